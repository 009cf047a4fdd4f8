"""Results without a model, if there is nothing to fill or nothing to learn from."""

import numpy as np

from gpytorch_gaps.filling.arrays.adapters import ArrayAdapter
from gpytorch_gaps.filling.arrays.options import Options
from gpytorch_gaps.filling.arrays.targets import Targets
from gpytorch_gaps.filling.process.report import FillReport
from gpytorch_gaps.filling.results.filled import Filled

_ROUNDING = 4 * np.finfo(np.float64).eps  # values whose relative difference is smaller are equal


def nothing_to_learn(numbers: np.ndarray, gaps: np.ndarray, targets: Targets, options: Options) -> list[str]:
    """Notes with the reason why no model is needed or possible; empty if a model is needed.

    :param gaps: flags of the gaps that are filled.
    """
    known = numbers[~np.isnan(numbers)]
    notes = targets.notes(numbers.size - known.size - int(gaps.sum()))
    if notes and not gaps.any() and options.where is not None:
        notes.append("no gap is inside where. It must be True at the cells to fill; is it inverted?")
    if not gaps.any() and not options.smooth:
        return [*notes, f"there are no {'other ' if notes else ''}gaps: nothing was done"]
    unknown = "No uncertainty estimate is available: std is NaN there."
    if len(known) == 1:
        return [*notes, f"only one observation: all gaps were set to its value. {unknown}"]
    if np.ptp(known) <= _ROUNDING * np.abs(known).max():
        return [*notes, f"all observations are equal: all gaps were set to their value. {unknown}"]
    return []


def constant(
    adapter: ArrayAdapter, numbers: np.ndarray, gaps: np.ndarray, options: Options, notes: list[str]
) -> Filled:
    """The result without a model: `gaps` are set to the only value."""
    unknown = np.isnan(numbers)
    mean = np.where(gaps, numbers[~unknown].flat[0], numbers)
    std = adapter.wrap_like_input(np.where(unknown | options.smooth, np.nan, 0.0)) if options.std else None
    report = FillReport(
        shape=numbers.shape,
        num_gaps=int(gaps.sum()),
        num_left=int((unknown & ~gaps).sum()),
        axes=tuple(map(str, adapter.axes)),
        notes=(*adapter.notes, *notes),
    )
    return Filled(adapter.wrap_filled(mean, gaps, smooth=False), std, adapter.wrap_like_input(gaps), None, report)
