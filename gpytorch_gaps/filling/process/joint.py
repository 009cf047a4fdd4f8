"""Filling of several variables on one grid as one array. The variables are labels, and their covariance is learned.

Every variable is divided by its standard deviation, because variables have different units. Reports are in the units of
the variable.
"""

from collections.abc import Hashable
from typing import Any

import numpy as np

from gpytorch_gaps.filling.arrays.outliers import about_wild
from gpytorch_gaps.filling.arrays.variables import VariablesAdapter
from gpytorch_gaps.filling.checking.calibration import Check
from gpytorch_gaps.filling.checking.factors import factors
from gpytorch_gaps.filling.learning.choose import ChosenModel
from gpytorch_gaps.filling.process.in_memory import InMemoryFilling
from gpytorch_gaps.filling.process.report import FillReport

_MIN_SCORED = 10  # smallest number of withheld observations of a variable


class JointFilling(InMemoryFilling):
    """Fills several variables together. The report is a dictionary by variable.

    :param adapter: a :class:`VariablesAdapter`.
    """

    adapter: VariablesAdapter

    def _reports(
        self, chosen: ChosenModel, check: Check | None, mean: np.ndarray, std: np.ndarray | None, **about: Any
    ) -> dict[Hashable, FillReport]:
        names, unknown, gaps = list(self.adapter.by_name), self.unknown, self.gaps
        reports = {}
        for number, name in enumerate(names):
            unit = self.unit(number)
            own = None if check is None else self._check_of(check, number, unit)
            inside = self._cells_of(number)
            wanted = gaps & inside
            squares = None if std is None or not wanted.any() else self._mean_square(std, wanted, chosen)
            noise_std, notes = self._about_noise(chosen, self.observed & inside, unit)
            reports[name] = self._report(
                chosen,
                own,
                None if squares is None else unit**2 * squares,
                [*notes, *about_wild(self.adapter.by_name[name], self.distrusted[number]), *self._notes_of(name, own)],
                shape=self.adapter.shape[1:],
                axes=tuple(map(str, self.source.axes[1:])),
                noise_std=noise_std,
                num_distrusted=int(self.distrusted[number].sum()),
                num_gaps=int(wanted.sum()),
                num_left=int((unknown & ~gaps)[number].sum()),
                **about,
            )
        return reports

    def calibration(self, check: Check, std: np.ndarray, first: np.ndarray) -> np.ndarray:
        found = np.ones(std.shape)
        for number in range(len(self.adapter.by_name)):
            own, inside = self._check_of(check, number), np.broadcast_to(first == number, std.shape)
            if own is not None and inside.any():
                found[inside] = factors(own, std[inside])
        return found

    def unit(self, variable: int) -> float:
        """The standard deviation by which a variable was divided."""
        return 1.0 if self.scales is None else float(self.scales[variable].item())

    def _cells_of(self, variable: int) -> np.ndarray:
        """Flags of the cells of one variable."""
        first = np.arange(len(self.numbers)).reshape(-1, *[1] * (self.numbers.ndim - 1))
        return np.broadcast_to(first == variable, self.numbers.shape)

    def _check_of(self, check: Check, variable: int, unit: float = 1.0) -> Check | None:
        """The check of one variable's withheld observations; None if there are too few."""
        assert self.withheld is not None
        scored = np.argwhere(self.withheld.scored)[:, 0] + self.part.corner[0] == variable
        return check.among(scored, unit) if scored.sum() >= _MIN_SCORED else None

    def _notes_of(self, variable: Hashable, check: Check | None) -> list[str]:
        others = [str(name) for name in self.adapter.by_name if name != variable]
        notes = [
            *self.adapter.by_name[variable].notes,
            f"filled together with {', '.join(others)}; the model is in units of their standard deviations",
        ]
        if self.withheld is not None and check is None:
            notes.append(f"fewer than {_MIN_SCORED} observations of it could be withheld: there are no scores")
        return [*self._notes(int((~np.isnan(self.numbers)).sum())), *notes]
