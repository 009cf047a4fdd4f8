"""What goes in front of the Gaussian process: a constant and, if there is one, a trend along axes of numbers.

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
    return PlaneMean(constant, torch.from_numpy(slopes), torch.from_numpy(centre))


def sample_of(numbers: np.ndarray, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Positions and values of observed cells, so many that a plane is known by them."""
    cells = np.flatnonzero(~np.isnan(numbers))
    if len(cells) > _SAMPLE:
        cells = np.sort(generator.choice(cells, _SAMPLE, replace=False))
    positions = np.stack(np.unravel_index(cells, numbers.shape), axis=1)
    return positions, numbers.reshape(-1)[cells]
