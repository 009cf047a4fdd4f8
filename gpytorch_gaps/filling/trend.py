"""What goes in front of the Gaussian process: a constant, a trend along axes of numbers if there is one, and the
levels of labels.

    m(x) = c + b'(x - x0)

by least squares. Deep inside a gap a process falls back to its mean: a plane is a better one than a constant where
the data rise from one side to the other.
"""

from collections.abc import Sequence

import numpy as np
import torch

from gpytorch_gaps.filling.axes import Axis
from gpytorch_gaps.filling.model import PlaneMean

_WORTH = 0.05  # of the variance, that slopes must explain
_SAMPLE = 200_000
_ALIKE = 3.0  # standard deviations of labels, one to the other, up to which they share a noise
_DOUBT = 3.0  # observations' worth of belief that a label is like the others
_SLOPED = ("number", "time", "latitude", "longitude", "position")


def fit_mean(axes: Sequence[Axis], positions: np.ndarray, values: np.ndarray, trend: bool) -> PlaneMean:
    """:param positions: of the observed cells, or some of them, (N, d), with their `values` (N,).

    :param trend: whether slopes are looked for at all.
    """
    columns = np.concatenate([axis.points[at] for axis, at in zip(axes, positions.T, strict=True)], axis=1)
    # one flag for every column of every axis
    sloped = np.concatenate([[axis.kind in _SLOPED and axis.size > 4] * axis.points.shape[1] for axis in axes])
    centre, slopes = columns.mean(axis=0), np.zeros(columns.shape[1])
    constant = float(values.mean())
    if trend and sloped.any() and len(values) > 10 * sloped.sum():
        spread = columns.std(axis=0)
        sloped &= spread > 0
        design = (columns - centre)[:, sloped] / spread[sloped]
        found, *_ = np.linalg.lstsq(design, values - constant, rcond=None)
        left = float(np.var(values - constant - design @ found))
        if left < (1 - _WORTH) * float(np.var(values)):
            slopes[sloped] = found / spread[sloped]
    left = values - constant - (columns - centre) @ slopes
    offsets, column = [], 0
    for axis, at in zip(axes, positions.T, strict=True):
        if axis.kind == "label":
            count = np.bincount(at, minlength=axis.size)
            level = np.bincount(at, weights=left, minlength=axis.size) / (count + _DOUBT)
            left = left - level[at]
            offsets.append((column, torch.from_numpy(level)))
        column += axis.points.shape[1]
    return PlaneMean(constant, torch.from_numpy(slopes), torch.from_numpy(centre), offsets)


def label_scales(numbers: np.ndarray, axes: Sequence[Axis]) -> np.ndarray | None:
    """Standard deviations of the labels, to divide by, where they differ too much for one noise: else None.

    Of the shape of `numbers`, with ones for the axes that are not labels.
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
    if not usable.any() or scales[usable].max() <= _ALIKE * scales[usable].min():
        return None
    return np.where(usable, scales, np.exp(np.mean(np.log(scales[usable]))))


def sample_of(numbers: np.ndarray, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Positions and values of observed cells, so many that a plane is known by them."""
    cells = np.flatnonzero(~np.isnan(numbers))
    if len(cells) > _SAMPLE:
        cells = np.sort(generator.choice(cells, _SAMPLE, replace=False))
    positions = np.stack(np.unravel_index(cells, numbers.shape), axis=1)
    return positions, numbers.reshape(-1)[cells]
