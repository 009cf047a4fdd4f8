"""What is estimated from the observations before training: a trend, label offsets and scales, cycles, correlations.

The mean of the Gaussian process is

    m(x) = c + b'(x - x0) + offsets of labels

by least squares. Deep inside a gap the posterior mean reverts to it, and a plane is better than a constant where the
data rise from one side to the other. A cycle of period p along an axis of time is accepted if

    R2 = 1 - |y - a - b t - Σ_h (c_h cos + s_h sin)(2 pi h t / p)|^2 / |y - a - b t|^2,    h = 1, 2

is large enough over the series of all other cells, each with its own coefficients.
"""

from collections.abc import Sequence

import numpy as np
import torch

from gpytorch_gaps.filling.axes import DAY, Axis
from gpytorch_gaps.filling.model import TrendMean

_MIN_EXPLAINED_SHARE = 0.05  # of the variance, by slopes or by a cycle
_MAX_SAMPLE = 200_000  # observations by which a trend is estimated
_MAX_SCALE_RATIO = 3.0  # of the standard deviations of labels that share one noise
_OFFSET_SHRINKAGE = 3.0  # of label offsets, in pseudo-observations
_CORRELATION_SHRINKAGE = 20.0  # of correlations between labels, in pseudo-observations
_KINDS_WITH_TREND = ("number", "time", "latitude", "longitude", "position")
_HARMONICS = 2
_MIN_PERIODS_SEEN = 1.5
_MIN_POINTS_PER_PERIOD = 4
_MAX_SERIES = 300  # series that are searched for cycles


# -- trend and labels --------------------------------------------------------------------------------------------------


def fit_mean(axes: Sequence[Axis], positions: np.ndarray, values: np.ndarray, trend: bool) -> TrendMean:
    """The mean function by least squares.

    :param positions: (N, d), those of the observed cells or of a sample of them.
    :param values: (N,), the observations there.
    :param trend: whether slopes are estimated; they are kept if they explain enough.
    """
    columns = np.concatenate([axis.points[at] for axis, at in zip(axes, positions.T, strict=True)], axis=1)
    flags = [axis.kind in _KINDS_WITH_TREND and axis.size > 4 for axis in axes]
    sloped = np.repeat(flags, [axis.points.shape[1] for axis in axes])  # one flag per column
    centre, slopes = columns.mean(axis=0), np.zeros(columns.shape[1])
    constant = float(values.mean())
    if trend and sloped.any() and len(values) > 10 * sloped.sum():
        spread = columns.std(axis=0)
        sloped &= spread > 0
        design = (columns - centre)[:, sloped] / spread[sloped]
        found, *_ = np.linalg.lstsq(design, values - constant, rcond=None)
        left = float(np.var(values - constant - design @ found))
        if left < (1 - _MIN_EXPLAINED_SHARE) * float(np.var(values)):
            slopes[sloped] = found / spread[sloped]
    left = values - constant - (columns - centre) @ slopes
    offsets, column = [], 0
    for axis, at in zip(axes, positions.T, strict=True):
        if axis.kind == "label":
            count = np.bincount(at, minlength=axis.size)
            level = np.bincount(at, weights=left, minlength=axis.size) / (count + _OFFSET_SHRINKAGE)
            left = left - level[at]
            offsets.append((column, torch.from_numpy(level)))
        column += axis.points.shape[1]
    return TrendMean(constant, torch.from_numpy(slopes), torch.from_numpy(centre), offsets)


def sample_observations(numbers: np.ndarray, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Positions (N, d) and values (N,) of the observed cells, or of a random sample large enough for a trend."""
    cells = np.flatnonzero(~np.isnan(numbers))
    if len(cells) > _MAX_SAMPLE:
        cells = np.sort(generator.choice(cells, _MAX_SAMPLE, replace=False))
    positions = np.stack(np.unravel_index(cells, numbers.shape), axis=1)
    return positions, numbers.reshape(-1)[cells]


def label_scales(numbers: np.ndarray, axes: Sequence[Axis]) -> np.ndarray | None:
    """Standard deviations of the labels, to divide by, if they differ too much for one noise; else None.

    They have the number of dimensions of `numbers`, and size one along all axes but those of labels.
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
    if not usable.any() or scales[usable].max() <= _MAX_SCALE_RATIO * scales[usable].min():
        return None
    return np.where(usable, scales, np.exp(np.mean(np.log(scales[usable]))))


def label_correlations(numbers: np.ndarray, axis: int) -> np.ndarray:
    """Correlations between the positions of one axis, from the cells that both have, shrunk if these are few.

    The matrix is positive definite, with ones on the diagonal.
    """
    rows = np.moveaxis(numbers, axis, 0).reshape(numbers.shape[axis], -1)
    known = ~np.isnan(rows)
    means = np.where(known, rows, 0.0).sum(axis=1) / np.maximum(known.sum(axis=1), 1)
    centred = np.where(known, rows - means[:, None], 0.0)
    count = known.astype(float) @ known.T.astype(float)
    covariance = centred @ centred.T / np.maximum(count, 1)
    deviation = np.sqrt(np.maximum(np.diag(covariance), 1e-300))
    matrix = covariance / np.outer(deviation, deviation) * count / (count + _CORRELATION_SHRINKAGE)
    np.fill_diagonal(matrix, 1.0)
    values, vectors = np.linalg.eigh(matrix)
    matrix = (vectors * np.clip(values, 1e-3, None)) @ vectors.T
    scale = np.sqrt(np.diag(matrix))
    return matrix / np.outer(scale, scale)


# -- cycles ------------------------------------------------------------------------------------------------------------


def find_cycles(numbers: np.ndarray, axes: Sequence[Axis]) -> list[list[float]]:
    """For each axis, the periods of the cycles in its data."""
    return [
        [
            period
            for period in possible_periods(axis)
            if explained_share(numbers, i, axis.points[:, 0], period) > _MIN_EXPLAINED_SHARE
        ]
        for i, axis in enumerate(axes)
    ]


def possible_periods(axis: Axis) -> list[float]:
    """The year, by its calendar, and the day, if the axis is long and fine enough for them."""
    if axis.kind != "time" or axis.size < 8:
        return []
    return [
        period
        for period in (axis.year, DAY)
        if axis.extent >= _MIN_PERIODS_SEEN * period and axis.spacing * _MIN_POINTS_PER_PERIOD <= period
    ]


def explained_share(numbers: np.ndarray, axis: int, times: np.ndarray, period: float) -> float:
    """The share of the variance along `axis` that a cycle explains, less what it would explain by chance."""
    series = np.moveaxis(numbers, axis, 0).reshape(len(times), -1)
    counts = (~np.isnan(series)).sum(axis=0)
    parameters = 2 + 2 * _HARMONICS
    long_enough = np.flatnonzero(counts > 2 * parameters)
    if not len(long_enough):
        return 0.0
    chosen = long_enough[np.linspace(0, len(long_enough) - 1, min(len(long_enough), _MAX_SERIES)).astype(int)]
    angle = 2 * np.pi * times / period
    line = np.stack([np.ones_like(times), (times - times.mean()) / max(np.ptp(times), 1e-300)], axis=1)
    waves = [wave(h * angle) for h in range(1, _HARMONICS + 1) for wave in (np.cos, np.sin)]
    full = np.concatenate([line, np.stack(waves, axis=1)], axis=1)
    before = after = 0.0
    for column in chosen:
        known = ~np.isnan(series[:, column])
        y = series[known, column]
        before += _residual_square(line[known], y) / (len(y) - line.shape[1])
        after += _residual_square(full[known], y) / (len(y) - parameters)
    return 1.0 - after / before if before > 0 else 0.0


def _residual_square(design: np.ndarray, y: np.ndarray) -> float:
    coefficients, *_ = np.linalg.lstsq(design, y, rcond=None)
    return float(np.square(y - design @ coefficients).sum())
