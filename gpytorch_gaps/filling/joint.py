"""Filling of several variables on one grid as one array: the variables are labels whose covariance is learned.

Every variable is divided by its standard deviation, because variables differ in units. Reports are in its own units.
"""

import math
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np

from gpytorch_gaps.filling.adapters import ArrayAdapter, DataArrayAdapter
from gpytorch_gaps.filling.axes import Axis
from gpytorch_gaps.filling.calibration import Check
from gpytorch_gaps.filling.choose import ChosenModel
from gpytorch_gaps.filling.in_memory import InMemoryFilling
from gpytorch_gaps.filling.report import FillReport

_MIN_SCORED = 10  # withheld observations of a variable


class VariablesAdapter(ArrayAdapter):
    """Several DataArrays on one grid as one array, whose first axis has a label for each.

    Results are dictionaries of DataArrays.

    :param given: the DataArrays by name, with the same dimensions in any order.
    :param dataset: the Dataset that they come from.
    """

    units_differ = True

    def __init__(self, given: Mapping[Hashable, Any], dataset: Any = None) -> None:
        dims = next(iter(given.values())).dims
        self.by_name = {name: DataArrayAdapter(one.transpose(*dims), None, dataset) for name, one in given.items()}
        self.chunked = any(one.chunked for one in self.by_name.values())
        labels = Axis("variable", "label", np.arange(float(len(given)))[:, None])
        axes = [labels, *next(iter(self.by_name.values())).axes]
        super().__init__(given, np.stack([one.array for one in self.by_name.values()]), axes)

    def load(self) -> None:
        for one in self.by_name.values():
            one.load()
        self.chunked = False

    def wrap_filled(self, values: np.ndarray, gaps: np.ndarray, smooth: bool) -> dict[Hashable, Any]:
        columns = zip(self.by_name.items(), values, gaps, strict=True)
        return self._in_order({name: one.wrap_filled(own, gap, smooth) for (name, one), own, gap in columns})

    def wrap_like_input(self, values: np.ndarray) -> dict[Hashable, Any]:
        columns = zip(self.by_name.items(), values, strict=True)
        return self._in_order({name: one.wrap_like_input(own) for (name, one), own in columns})

    def _in_order(self, results: dict[Hashable, Any]) -> dict[Hashable, Any]:
        return {name: one.transpose(*self.given[name].dims) for name, one in results.items()}


class JointFilling(InMemoryFilling):
    """Fills variables together; the report is a dictionary by variable.

    :param adapter: a :class:`VariablesAdapter`.
    """

    adapter: VariablesAdapter

    def _reports(
        self, chosen: ChosenModel, check: Check | None, std: np.ndarray | None, **about: Any
    ) -> dict[Hashable, FillReport]:
        names, unknown, gaps = list(self.adapter.by_name), self.unknown, self.gaps
        reports = {}
        for number, name in enumerate(names):
            unit = self._unit(number)
            own = None if check is None else self._check_of(check, number, unit)
            own_gaps = None if std is None else std[number][gaps[number]]
            squares = None if own_gaps is None or not own_gaps.size else self._mean_square(own_gaps, chosen)
            reports[name] = self._report(
                chosen,
                own,
                None if squares is None else unit**2 * squares,
                self._notes_of(name, own),
                shape=self.adapter.shape[1:],
                axes=tuple(map(str, self.source.axes[1:])),
                noise_std=unit * math.sqrt(chosen.noise),
                num_gaps=int(gaps[number].sum()),
                num_left=int((unknown & ~gaps)[number].sum()),
                **about,
            )
        return reports

    def calibration(self, check: Check) -> np.ndarray:
        checks = [self._check_of(check, number) for number in range(len(self.adapter.by_name))]
        factors = np.array([1.0 if own is None else own.calibration for own in checks])
        return factors.reshape(-1, *[1] * (self.numbers.ndim - 1))

    def _unit(self, variable: int) -> float:
        """The standard deviation by which a variable was divided."""
        return 1.0 if self.scales is None else float(self.scales[variable].item())

    def _check_of(self, check: Check, variable: int, unit: float = 1.0) -> Check | None:
        """What was withheld of one variable."""
        assert self.withheld is not None
        scored = np.argwhere(self.withheld.scored)[:, 0] + self.part.corner[0] == variable
        return check.among(scored, unit) if scored.sum() >= _MIN_SCORED else None

    def _notes_of(self, variable: Hashable, check: Check | None) -> list[str]:
        others = [str(name) for name in self.adapter.by_name if name != variable]
        notes = [f"filled together with {', '.join(others)}; the model is in units of their standard deviations"]
        if self.withheld is not None and check is None:
            notes.append(f"fewer than {_MIN_SCORED} observations of it could be withheld: there are no scores")
        return [*self._notes(int((~np.isnan(self.numbers)).sum())), *notes]
