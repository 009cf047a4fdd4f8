"""The common steps of fillings in memory and of streamed fillings."""

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from gpytorch_gaps.filling.arrays.adapters import ArrayAdapter
from gpytorch_gaps.filling.arrays.grid_values import GridValues, Part, choose_part
from gpytorch_gaps.filling.arrays.options import Options
from gpytorch_gaps.filling.arrays.targets import Targets
from gpytorch_gaps.filling.axes.axis import Axis
from gpytorch_gaps.filling.checking.calibration import Check, stated_error
from gpytorch_gaps.filling.checking.holdout import Withheld, withhold
from gpytorch_gaps.filling.learning.budget import Budget
from gpytorch_gaps.filling.learning.choose import ChosenModel
from gpytorch_gaps.filling.learning.model import FillModel
from gpytorch_gaps.filling.process.report import FillReport

_logger = logging.getLogger(__name__)

_AXIS_MATRICES = 3  # covariance matrices of the longest axis that are in memory at once


class Results(NamedTuple):
    """The predictions of a filling, in the form of the input. :class:`gpytorch_gaps.Filled` describes them."""

    mean: Any
    std: Any
    gaps: Any
    model: FillModel | None
    report: Any
    distrusted: Any = None


class Filling(ABC):
    """One filling: ``choose_model``, ``check_model`` and ``predict``, in this order.

    :param adapter: the array.
    :param source: its values in the units of the model.
    :param targets: the gaps that are filled.
    :param options: the options of ``fill_gaps``.
    :raises ValueError: if the covariance matrix of an axis would not fit in memory.
    """

    def __init__(self, adapter: ArrayAdapter, source: GridValues, targets: Targets, options: Options) -> None:
        self.adapter, self.source, self.targets, self.options = adapter, source, targets, options
        self.generator = np.random.default_rng(options.seed)
        self.stopwatch, self.budget = Stopwatch(), Budget(options.budget)
        for axis in source.axes:
            needed = 8.0 * _AXIS_MATRICES * axis.size**2
            if needed > options.memory and self._has_matrix(axis):
                raise ValueError(
                    f"{axis.name}: got {axis.size:,} positions, whose covariance matrices take {needed / 2**30:.3g} "
                    f"GiB, expected at most {options.memory / 2**30:.3g}: pass a larger memory, or fill it in parts"
                )

    def _has_matrix(self, axis: Axis) -> bool:
        """Whether the covariance of an axis is a matrix."""
        return True

    def choose_model(self) -> ChosenModel:
        """Chooses and trains a model, without the observations that are withheld for the check."""
        self.part = choose_part(self.source, self.generator)
        self.withheld = self.withhold(self.part, self.generator) if self.options.check else None
        seen = self.source if self.withheld is None else self.source.without(self.part, self.withheld.scored)
        with self.stopwatch("training"):
            chosen = self._choose(seen)
        _logger.info(
            "kernel: %s; noise %.3g; %s", chosen.learned.name, math.sqrt(chosen.noise), "; ".join(chosen.notes)
        )
        return chosen

    def withhold(self, part: Part, generator: np.random.Generator) -> Withheld | None:
        """The observations to withhold, chosen in the canonical order."""
        turn = part.orientation
        ordered = [part.axes[axis].is_ordered for axis in turn.order]
        found = withhold(turn.turn(part.values), generator, turn.turn(part.targets), ordered)
        return None if found is None else Withheld(turn.turn_back(found.hidden), turn.turn_back(found.scored))

    def check_model(self, chosen: ChosenModel) -> Check | None:
        """Predicts the withheld observations from the others; None if none are withheld."""
        if self.withheld is None or not self._affords_check(chosen):
            return None
        with self.stopwatch("held-out check"):
            check = self._check(chosen, self.withheld)
        _logger.info("withheld observations: %s", check.score)
        return check

    def _affords_check(self, chosen: ChosenModel) -> bool:
        """Whether the budget allows a check."""
        return True

    @abstractmethod
    def predict(self, chosen: ChosenModel, check: Check | None) -> Results:
        """Fills the gaps, given all observations."""

    @abstractmethod
    def _choose(self, seen: GridValues) -> ChosenModel:
        """Chooses a model for the given values."""

    @abstractmethod
    def _check(self, chosen: ChosenModel, withheld: Withheld) -> Check:
        """Predicts withheld observations of ``self.part``."""

    def _report(
        self,
        chosen: ChosenModel,
        check: Check | None,
        gap_variance: float | None,
        notes: Sequence[str],
        num_gaps: int,
        num_left: int,
        **about: Any,
    ) -> FillReport:
        """The report of this filling.

        :param gap_variance: the mean square error in the gaps according to the model.
        :param num_gaps: the number of gaps that are filled.
        :param num_left: the number of gaps that are not filled.
        :param about: fields of the report that differ from, or add to, those that are computed here.
        """
        entries = {
            "shape": self.adapter.shape,
            "num_gaps": num_gaps,
            "num_left": num_left,
            "axes": tuple(map(str, self.source.axes)),
            "kernel": chosen.learned.name,
            "noise_std": math.sqrt(chosen.noise),
            "history": chosen.learned.history,
            "seconds": self.stopwatch.seconds,
            **stated_error(
                check,
                gap_variance,
                (*self.adapter.notes, *self.targets.notes(num_left), *chosen.notes, *self.budget.notes, *notes),
                rescaled=bool(about.get("std_method")),
            ),
        }
        return FillReport(**(entries | about))


class Stopwatch:
    """Measures seconds per phase, by default of the wall clock."""

    clock = staticmethod(time.perf_counter)

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started = self.clock()
        try:
            yield
        finally:
            spent = self.clock() - started
            self.seconds[phase] = self.seconds.get(phase, 0.0) + spent
            _logger.info("%s: %.3g s", phase, spent)
