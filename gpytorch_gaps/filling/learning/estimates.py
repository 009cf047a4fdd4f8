"""Estimates from the observations before training: a trend, label offsets and scales.

The mean of the Gaussian process is

    m(x) = c + b'(x - x0) + a'g(x) + offsets of labels + lasting cycles

with backgrounds g, by least squares. Far inside a gap, the posterior mean is close to it. If the data rise from one
side to the other, a plane is then better than a constant. Cycles are those of
:mod:`gpytorch_gaps.filling.learning.cycles`, backgrounds those of :mod:`gpytorch_gaps.filling.arrays.covariates`.
"""

from collections.abc import Sequence

import numpy as np
import torch

from gpytorch_gaps.filling.arrays.covariates import Covariates
from gpytorch_gaps.filling.arrays.grid_values import coordinates
from gpytorch_gaps.filling.arrays.orientation import Orientation
from gpytorch_gaps.filling.axes.axis import Axis
from gpytorch_gaps.filling.learning.cycles import Cycles, fit_cycles
from gpytorch_gaps.filling.learning.model import TrendMean

_MIN_EXPLAINED_SHARE = 0.05  # smallest fraction of the variance that slopes must explain
_MAX_SAMPLE = 200_000  # largest number of observations for the estimate of a trend
_MAX_SCALE_RATIO = 3.0  # largest ratio of standard deviations of labels with the same noise
_OFFSET_SHRINKAGE = 3.0  # shrinkage of label offsets, in pseudo-observations
_KINDS_WITH_TREND = ("number", "time", "latitude", "longitude", "position")


def fit_mean(
    axes: Sequence[Axis],
    positions: np.ndarray,
    values: np.ndarray,
    trend: bool,
    cycles: Cycles | None = None,
    covariates: Covariates | None = None,
) -> TrendMean:
    """The mean function by least squares.

    :param positions: (N, d), positions of the observed cells, or of a sample of them.
    :param values: (N,), the observations there.
    :param trend: whether slopes are estimated. They are kept if they explain enough.
    :param cycles: lasting cycles, which are subtracted first.
    :param covariates: backgrounds, which are always kept.
    """
    x = coordinates(axes, positions)
    if cycles is not None:
        values = values - cycles(x).numpy()
    columns = x.numpy()
    flags = [axis.kind in _KINDS_WITH_TREND and axis.size > 4 for axis in axes]
    sloped = np.repeat(flags, [axis.points.shape[1] for axis in axes])  # one flag per column
    centre, slopes = columns.mean(axis=0), np.zeros(columns.shape[1])
    constant = float(values.mean())
    fields = np.empty((len(values), 0)) if covariates is None else covariates(x).numpy()
    level = fields.mean(axis=0)
    coefficients = _least_squares(fields - level, values - constant)
    if trend and sloped.any() and len(values) > 10 * sloped.sum():
        without = float(np.var(values - fields @ coefficients))
        sloped &= columns.std(axis=0) > 0
        design = np.concatenate([(columns - centre)[:, sloped], fields - level], axis=1)
        found = _least_squares(design, values - constant)
        if float(np.var(values - design @ found)) < (1 - _MIN_EXPLAINED_SHARE) * without:
            slopes[sloped], coefficients = np.split(found, [sloped.sum()])
    constant -= float(level @ coefficients)
    values = values - fields @ coefficients
    left = values - constant - (columns - centre) @ slopes
    offsets, column = [], 0
    for axis, at in zip(axes, positions.T, strict=True):
        if axis.kind == "label":
            count = np.bincount(at, minlength=axis.size)
            level = np.bincount(at, weights=left, minlength=axis.size) / (count + _OFFSET_SHRINKAGE)
            left = left - level[at]
            offsets.append((column, torch.from_numpy(level)))
        column += axis.points.shape[1]
    return TrendMean(
        constant,
        torch.from_numpy(slopes),
        torch.from_numpy(centre),
        offsets,
        cycles,
        covariates,
        None if covariates is None else torch.from_numpy(coefficients),
    )


def _least_squares(design: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Coefficients of the columns of a design; the smallest ones if they are not unique. Units do not matter."""
    spread = design.std(axis=0)
    spread[spread == 0] = 1.0
    found, *_ = np.linalg.lstsq(design / spread, values, rcond=None)
    return found / spread


def refit_mean(
    mean: TrendMean,
    axes: Sequence[Axis],
    numbers: np.ndarray,
    trend: bool,
    generator: np.random.Generator,
    orientation: Orientation | None = None,
) -> TrendMean:
    """The same mean function, fitted to other observations: `numbers` on the grid, NaN at gaps."""
    cycles = mean.cycles
    if cycles is not None:
        left = less_backgrounds(numbers, axes, mean.covariates, generator, orientation)
        cycles = fit_cycles(left, axes, cycles.axis, cycles.periods)
    return fit_mean(axes, *sample_observations(numbers, generator, orientation), trend, cycles, mean.covariates)


def less_backgrounds(
    numbers: np.ndarray,
    axes: Sequence[Axis],
    covariates: Covariates | None,
    generator: np.random.Generator,
    orientation: Orientation | None = None,
) -> np.ndarray:
    """Values on a grid, minus the part that backgrounds explain."""
    if covariates is None:
        return numbers
    sample = sample_observations(numbers, generator, orientation)
    alone = fit_mean(axes, *sample, trend=False, covariates=covariates)
    return numbers - covariates.on_grid(alone.coefficients)


def sample_observations(
    numbers: np.ndarray, generator: np.random.Generator, orientation: Orientation | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Positions (N, d) and values (N,) of the observed cells, or of a random sample large enough for a trend.

    :param orientation: the order in which cells are chosen.
    """
    orientation = orientation or Orientation.as_given(numbers.shape)
    turned = orientation.turn(numbers)
    cells = np.flatnonzero(~np.isnan(turned))
    if len(cells) > _MAX_SAMPLE:
        cells = np.sort(generator.choice(cells, _MAX_SAMPLE, replace=False))
    positions = np.stack(np.unravel_index(cells, turned.shape), axis=1)
    return orientation.cells(positions), turned.reshape(-1)[cells]


def label_scales(numbers: np.ndarray, axes: Sequence[Axis], always: bool = False) -> np.ndarray | None:
    """Standard deviations of the labels, as divisors, if they differ too much for a common noise; else None.

    :param always: whether to use them even if they are similar, because labels have different units.
    :return: an array with the dimensions of `numbers`, of size one along all axes except those of labels.
    """
    others = tuple(i for i, axis in enumerate(axes) if axis.kind != "label")
    if len(others) in (0, len(axes)):
        return None
    known = ~np.isnan(numbers)
    count = known.sum(axis=others, keepdims=True)
    means = np.where(known, numbers, 0.0).sum(axis=others, keepdims=True) / np.maximum(count, 1)
    square = np.where(known, numbers - means, 0.0) ** 2
    scales = np.sqrt(square.sum(axis=others, keepdims=True) / np.maximum(count - 1, 1))
    usable = (count > 2) & (scales > 0)
    if not usable.any() or (not always and scales[usable].max() <= _MAX_SCALE_RATIO * scales[usable].min()):
        return None
    return np.where(usable, scales, np.exp(np.mean(np.log(scales[usable]))))
