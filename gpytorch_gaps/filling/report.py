"""The result of a filling, and the report of what was done and of the error to expect."""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gpytorch_gaps.posterior.scoring import Score
from gpytorch_gaps.reports import SolveReport
from gpytorch_gaps.training.history import History

if TYPE_CHECKING:
    from gpytorch_gaps.filling.fitted import Fitted
    from gpytorch_gaps.filling.points import Estimate


@dataclass(frozen=True, eq=False)
class FillReport:
    """How gaps were filled, and the error to expect.

    ``print(report)`` gives a summary in words, ``report.as_dict()`` one that can be written as JSON.

    >>> import numpy as np, gpytorch_gaps as gaps
    >>> report = gaps.fill_gaps(np.array([1.0, np.nan, 1.0]), progress=False).report
    >>> report.num_gaps, report.num_cells
    (1, 3)
    >>> report.notes
    ('all observations are equal: all gaps were set to their value. No uncertainty estimate is available: std is NaN \
there.',)
    """

    shape: tuple[int, ...]
    """Shape of the array."""
    num_gaps: int
    """Number of gaps that are filled."""
    num_left: int = 0
    """Number of gaps that are left: outside of ``where``, or in longer runs than ``max_gap``."""
    axes: tuple[str, ...] = ()
    """Interpretation of each dimension, such as "time: 24 times, 699 days"."""
    kernel: str = ""
    """Name of the chosen kernel."""
    noise_std: float | None = None
    """Standard deviation of the noise of a measurement, in the units of the data."""
    held_out: Score | None = None
    """Scores of observations that were withheld, as far from data as the gaps are, and predicted from the others.

    None if none were withheld.
    """
    expected_rmse: float | None = None
    """Root mean square error to expect in the gaps, of measurements, noise included.

    It is the error that the model expects there, corrected by its errors at withheld observations. None if neither
    standard deviations nor a check were asked for.
    """
    calibrated_by: float | None = None
    """Factor by which all standard deviations were multiplied, because 95 % intervals of the model cover less than 85 %
    or more than 99 % of the withheld observations. `held_out` has the scores before that. None if they were not.
    """
    like_the_gaps: bool | None = None
    """Whether the model expects about the same error of withheld observations as in the gaps."""
    solve: SolveReport | None = None
    """Report of the solve for the posterior mean."""
    std_method: str = ""
    """How standard deviations were computed, such as "exact" or "from 64 samples"."""
    history: History | None = None
    """Losses and further records of the training."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall-clock seconds per phase."""
    notes: tuple[str, ...] = ()
    """What to know about the result, in sentences."""

    @property
    def num_cells(self) -> int:
        """Number of cells, gaps included."""
        return math.prod(self.shape)

    @property
    def error_in_std(self) -> float | None:
        """Certified bound on the solver's error of the mean, in posterior standard deviations."""
        return None if self.solve is None else self.solve.error_in_std

    @property
    def expected_error(self) -> str:
        """In words, such as "RMSE 0.45 expected in the gaps; held-out RMSE 0.42, 95 % intervals cover 94 %"."""
        words = []
        if self.expected_rmse is not None:
            words.append(f"RMSE {self.expected_rmse:.3g} expected in the gaps")
        if self.held_out is not None:
            covered = f"{self.held_out.level:.0%} intervals cover {self.held_out.coverage:.0%}".replace("%", " %")
            words.append(f"held-out RMSE {self.held_out.rmse:.3g}, {covered}")
        return "; ".join(words)

    def as_dict(self) -> dict[str, Any]:
        """The report as a dictionary that can be written as JSON."""
        solve = self.solve
        return {
            "shape": list(self.shape),
            "cells": self.num_cells,
            "gaps": self.num_gaps,
            "left": self.num_left,
            "axes": list(self.axes),
            "kernel": self.kernel,
            "noise_std": self.noise_std,
            "held_out": None if self.held_out is None else self.held_out.as_dict(),
            "expected_rmse": self.expected_rmse,
            "calibrated_by": self.calibrated_by,
            "like_the_gaps": self.like_the_gaps,
            "method": None if solve is None else solve.method,
            "iterations": None if solve is None else solve.iterations,
            "residual": None if solve is None else float(solve.worst_residual),
            "error_in_std": self.error_in_std,
            "converged": None if solve is None else solve.converged,
            "std_method": self.std_method,
            "steps": 0 if self.history is None else len(self.history),
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
            "notes": list(self.notes),
        }

    def __repr__(self) -> str:
        return f"<FillReport {self}>"

    def __str__(self) -> str:
        size = " x ".join(map(str, self.shape))
        share = 100 * self.num_gaps / self.num_cells
        left = f" filled, {self.num_left:,} left" if self.num_left else ""
        lines = [f"{size} cells, {self.num_gaps:,} gaps ({share:.3g} %){left}, {sum(self.seconds.values()):.3g} s"]
        if self.kernel:
            noise = "" if self.noise_std is None else f"; noise {self.noise_std:.3g}"
            lines.append(f"kernel: {self.kernel}{noise}")
        if self.held_out is not None:
            lines.append(
                f"{self.expected_error} of {self.held_out.count:,} cells withheld as far from data as the gaps"
            )
        elif self.expected_rmse is not None:
            lines.append(f"{self.expected_error} (estimated by the model; no observations were withheld)")
        if self.solve is not None:
            lines.append(f"mean: {_in_short(self.solve)}")
        if self.std_method:
            by = "" if self.calibrated_by is None else f", calibrated by {self.calibrated_by:.2g}"
            lines.append(f"standard deviations: {self.std_method}{by}")
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)


def _in_short(solve: SolveReport) -> str:
    rank = f", rank {solve.rank}" if solve.rank else ""
    ended = "" if solve.converged else "NOT CONVERGED, "
    bound = f"within {solve.error_in_std:.1e} standard deviations of the exact mean"
    return f"{solve.method}{rank}: {ended}{solve.iterations} iterations, {bound}"


@dataclass(frozen=True, eq=False)
class Filled:
    """The result of ``fill_gaps``.

    For a Dataset, `mean`, `std` and `gaps` are Datasets, and `model` and `report` are dictionaries by variable.

    >>> import numpy as np, gpytorch_gaps as gaps
    >>> result = gaps.fill_gaps(np.array([2.0, np.nan, 2.0]), progress=False)
    >>> result.mean
    array([2., 2., 2.])
    >>> result.gaps
    array([False,  True, False])
    """

    mean: Any
    """The input with its gaps filled, in the same form. Observed values are unchanged unless `smooth` was set."""
    std: Any
    """Standard deviation of the mean's error, in the same form as the input.

    In a gap it is that of a measurement, noise included; at observed values it is 0, at gaps that are left it is NaN.
    With `smooth` it is that of the field without noise, everywhere else. It is widened below 30 observations,
    multiplied by ``report.calibrated_by`` if the withheld observations show that it is far off, and NaN in gaps if
    there is only one observation or if all are equal. None if it was not asked for or if values were streamed.
    """
    gaps: Any
    """Flags of the gaps that are filled, in the same form as the input. Gaps that are left are not flagged: they are
    gaps in `mean` as well."""
    model: Any
    """The trained :class:`FillModel`, an ``ExactGP`` in the units of the data: ``model.likelihood(model(x))`` predicts
    anywhere. Its variances are not multiplied by ``report.calibrated_by``. None if there was nothing to learn or if
    values were streamed."""
    report: Any
    """A :class:`FillReport` of what was done, and of the error to expect."""
    _fitted: Any = None  # a `Fitted`, or a dictionary of them by variable, for the methods below

    def at(self, points: Any, *, noise: bool = True) -> "Estimate":
        """Mean and standard deviation of measurements at any points, between the cells and beyond them.

        At the coordinates of an observation, this is the prediction of another measurement there.

        :param points: a mapping or DataFrame with the coordinates along each axis, by its name or number: as many along
            each, or one. They are given as those of the axis are: as dates, degrees, labels. An array of numbers (Q, d)
            has a column for each axis; for a single axis, its coordinates are enough.
        :param noise: whether standard deviations include the noise of a measurement. Without it they are those of the
            field.
        :return: an :class:`Estimate` with arrays (Q,) in the units of the data: tensors if the input was one, Series if
            points are a DataFrame. For a Dataset, both are dictionaries by variable.
        :raises ValueError: if values were streamed, if there was nothing to learn, or if points do not fit the axes.

        >>> import numpy as np, gpytorch_gaps as gaps
        >>> values = np.sin(np.arange(30.0) / 4)
        >>> values[10:14] = np.nan
        >>> result = gaps.fill_gaps(values, steps=5, check=False, progress=False)
        >>> mean, std = result.at([11.5, 12.5])
        >>> mean.shape, bool((std > 0).all())
        ((2,), True)
        """
        from gpytorch_gaps.filling.points import of_variables, predict_at

        found = {name: predict_at(one, points, noise) for name, one in self._models("at").items()}
        return of_variables(found) if isinstance(self._fitted, dict) else found[None]

    def forecast(self, steps: int, axis: Any = None, *, noise: bool = True) -> "Estimate":
        """Mean and standard deviation of the next measurements along an axis.

        :param steps: how many coordinates to add at the end of the axis, which must be regular: numbers with a constant
            step, times with a constant step or a frequency, such as months, or no coordinates at all.
        :param axis: the name or number of the axis. Default: the only axis of times, or the only one that can be
            continued.
        :param noise: whether standard deviations include the noise of a measurement.
        :return: an :class:`Estimate` of arrays in the form of the input, with the new coordinates along this axis.
        :raises ValueError: if values were streamed, if there was nothing to learn, or if the axis is not regular.

        >>> import numpy as np, gpytorch_gaps as gaps
        >>> result = gaps.fill_gaps(np.sin(np.arange(30.0)), smooth=True, steps=5, check=False, progress=False)
        >>> result.forecast(3).mean.shape
        (3,)
        """
        from gpytorch_gaps.filling.forecast import forecast
        from gpytorch_gaps.filling.points import of_variables

        found = {name: forecast(one, steps, axis, noise) for name, one in self._models("forecast").items()}
        return of_variables(found) if isinstance(self._fitted, dict) else found[None]

    def _models(self, method: str) -> "dict[Any, Fitted]":
        """The fitted model of each variable; with the key None if there is only one."""
        fitted = self._fitted if isinstance(self._fitted, dict) else {None: self._fitted}
        known = {name: one for name, one in fitted.items() if one is not None}
        if len(known) < len(fitted):
            raise ValueError(
                f"{method}: got a result without a model in memory, expected one: fill a smaller part of an array that "
                "was streamed; without gaps, pass smooth=True; equal observations have no model"
            )
        return known

    def __repr__(self) -> str:
        return f"<Filled {self.report}>"
