"""The report of a filling: its steps, and the expected error."""

import math
from dataclasses import dataclass, field
from typing import Any

from gpytorch_gaps.posterior.scoring import Score
from gpytorch_gaps.reports import SolveReport
from gpytorch_gaps.training.history import History
from gpytorch_gaps.utils.html import table

_WITHOUT_HEADING = ("array", "error")  # lines of the summary without a heading


@dataclass(frozen=True, eq=False)
class FillReport:
    """How gaps were filled, and the expected error.

    ``print(report)`` shows a summary in words. ``report.as_dict()`` is a dictionary that can be written as JSON.

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
    """Number of gaps that are not filled: outside ``where``, or in longer runs than ``max_gap``."""
    num_distrusted: int = 0
    """Number of observations that were not used, because they are wild; see ``robust`` of ``fill_gaps``."""
    axes: tuple[str, ...] = ()
    """Interpretation of each dimension, such as "time: 24 times, 699 days"."""
    transform: str = ""
    """The transform of the values, and the reason for its choice; empty if there is none."""
    kernel: str = ""
    """Name of the chosen kernel."""
    noise_std: float | None = None
    """Standard deviation of the noise of a measurement, in the units of the data, or of transformed values."""
    held_out: Score | None = None
    """Scores of withheld observations, predicted from the others. They are as far from other data as the gaps are.

    None if no observations were withheld.
    """
    expected_rmse: float | None = None
    """Expected root mean square error of measurements in the gaps, including noise.

    It is the error according to the model, corrected by the errors of withheld observations. None without standard
    deviations and without a check, and for transformed values without standard deviations.
    """
    calibrated_by: float | None = None
    """Factor on standard deviations with which 95 % intervals cover 95 % of the withheld observations; None if those of
    the model are right. If enough were withheld, small and large standard deviations have factors of their own, and
    this is the factor of all together. `held_out` are the scores before that.
    """
    like_the_gaps: bool | None = None
    """Whether the errors of withheld observations and of gaps are about the same according to the model."""
    solve: SolveReport | None = None
    """Report of the solve for the posterior mean."""
    std_method: str = ""
    """How standard deviations were computed, such as "exact" or "from 64 samples"."""
    history: History | None = None
    """Losses and other records of the training."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall-clock seconds per phase."""
    notes: tuple[str, ...] = ()
    """Notes on the result, in sentences."""

    @property
    def num_cells(self) -> int:
        """Number of cells, including gaps."""
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
            "distrusted": self.num_distrusted,
            "axes": list(self.axes),
            "transform": self.transform,
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
        return "\n".join(words if what in _WITHOUT_HEADING else f"{what}: {words}" for what, words in self._facts())

    def _repr_html_(self) -> str:
        return self.table()

    def table(self, title: str = "") -> str:
        """The summary as a table in HTML."""
        facts = self._facts()
        rows = [*facts[:1], *(("axis", axis) for axis in self.axes), *facts[1:]]
        return table(rows, title=title)

    def _facts(self) -> list[tuple[str, str]]:
        """The lines of the summary: a heading and a text each."""
        size = " x ".join(map(str, self.shape))
        share = 100 * self.num_gaps / self.num_cells
        left = f" filled, {self.num_left:,} left" if self.num_left else ""
        spent = sum(self.seconds.values())
        facts = [("array", f"{size} cells, {self.num_gaps:,} gaps ({share:.3g} %){left}, {spent:.3g} s")]
        if self.transform:
            facts.append(("transform", self.transform))
        if self.kernel:
            noise = "" if self.noise_std is None else f"; noise {self.noise_std:.3g}"
            facts.append(("kernel", f"{self.kernel}{noise}"))
        if self.held_out is not None:
            of = f"of {self.held_out.count:,} cells withheld as far from data as the gaps"
            facts.append(("error", f"{self.expected_error} {of}"))
        elif self.expected_rmse is not None:
            why = "estimated by the model; no observations were withheld"
            facts.append(("error", f"{self.expected_error} ({why})"))
        if self.solve is not None:
            facts.append(("mean", _in_short(self.solve)))
        if self.std_method:
            by = "" if self.calibrated_by is None else f", calibrated by {self.calibrated_by:.2g}"
            facts.append(("standard deviations", f"{self.std_method}{by}"))
        return facts + [("note", note) for note in self.notes]


def _in_short(solve: SolveReport) -> str:
    rank = f", rank {solve.rank}" if solve.rank else ""
    ended = "" if solve.converged else "NOT CONVERGED, "
    bound = f"within {solve.error_in_std:.1e} standard deviations of the exact mean"
    return f"{solve.method}{rank}: {ended}{solve.iterations} iterations, {bound}"
