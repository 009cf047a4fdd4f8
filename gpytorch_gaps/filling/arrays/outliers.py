"""Wild values: observations that are extreme in comparison with all data and with their neighbours.

An observation y is wild if two conditions hold.

1. Its distance ``|y - median|`` from the median of its label is extreme. The largest plausible distance is extrapolated
   from the middle of the distribution of distances, on each side of the median: a Weibull distribution

       P(distance > x) = exp(-(x / s)^k)

   is fitted to the 50 % and 80 % quantiles. If its tail is heavier than exponential (k < 1), it is mixed with a
   lognormal distribution with the same quantiles; the weight of this increases with the heaviness. A distance is
   extreme if, among so many observations, no distance of this size is expected. Therefore, skewed data and data with
   heavy tails, such as rain, have few wild values or none. Large distances are left out, and the distribution is fitted
   again, until no more are found.
2. On every axis, the median of the nearest observations is less than half as far from the median, on the same side.
   Therefore, thin lines, fronts, and peaks wider than a cell are not wild values, even if they are extreme.
"""

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import ndtri

from gpytorch_gaps.filling.arrays.adapters import ArrayAdapter
from gpytorch_gaps.filling.axes.axis import Axis

_LEAST_DEVIATIONS = 5.0  # a distance of fewer robust standard deviations is never extreme
_MEDIAN_OF_NORMAL = 0.6744898
_QUANTILES = (0.5, 0.8)  # 5 % of outliers hardly change the second one
_EXPECTED = 0.01  # expected number of distances as large as a wild one, among all observations
_MIN_DISTANCES = 20  # smallest number of distances for a fit
_SHARED = 0.5  # neighbours with at least this fraction of the distance confirm an observation
_REACH, _REACH_OF_A_SERIES = 3, 6  # neighbours are at most so many cells away
_MIN_NEIGHBOURS = 2  # smallest number of neighbours along an axis
_CHUNK = 200_000  # number of observations whose neighbours are in memory at once
_NAMED = 3  # number of wild values that the report lists
_ROUNDS = 3  # wild values may hide others close to them


def find_wild(numbers: np.ndarray, axes: Sequence[Axis]) -> np.ndarray:
    """Flags of the wild values.

    :param numbers: values on the grid, NaN at gaps.

    >>> from gpytorch_gaps.filling.axes.axis import Axis
    >>> values = np.sin(np.arange(60.0) / 5)
    >>> values[17] = 40.0
    >>> np.flatnonzero(find_wild(values, [Axis("x", "number", np.arange(60.0)[:, None])]))
    array([17])
    """
    wild, left = np.zeros(numbers.shape, dtype=bool), numbers
    for _ in range(_ROUNDS):
        found = _find_once(left, axes)
        if not found.any():
            break
        wild |= found
        left = np.where(wild, np.nan, numbers)
    return wild


def about_wild(adapter: ArrayAdapter, wild: np.ndarray) -> list[str]:
    """A note on wild values for the report: their number, and the most extreme ones."""
    cells = np.argwhere(wild)
    if not len(cells):
        return []
    numbers = adapter.numbers()
    values = numbers[wild]
    median, _ = _middle(np.where(wild, np.nan, numbers), adapter.axes)
    order = np.argsort(-np.abs(values - np.broadcast_to(median, wild.shape)[wild]), kind="stable")[:_NAMED]
    named = [f"{values[row]:.6g} at {_place(adapter.axes, cells[row])}" for row in order]
    others = "" if len(cells) <= _NAMED else f", and {len(cells) - _NAMED:,} more"
    return [f"{len(cells):,} wild value{'s' * (len(cells) > 1)} not used: {'; '.join(named)}{others}"]


def _place(axes: Sequence[Axis], cell: np.ndarray) -> str:
    """The location of a cell in words, in the coordinates of the user."""
    known = [at if axis.coordinates is None else axis.coordinates[at] for axis, at in zip(axes, cell, strict=True)]
    words = [f"{own:.6g}" if isinstance(own, float) else str(own) for own in known]
    return ", ".join(f"{axis.name} {own}" for axis, own in zip(axes, words, strict=True))


def _find_once(numbers: np.ndarray, axes: Sequence[Axis]) -> np.ndarray:
    found = np.zeros(numbers.shape, dtype=bool)
    median, unit = _middle(numbers, axes)
    with np.errstate(invalid="ignore", divide="ignore"):
        signed = (numbers - median) / unit
    suspects = np.argwhere(beyond_proportion(signed))
    along = [number for number, axis in enumerate(axes) if axis.kind != "label"]
    far = signed[tuple(suspects.T)]
    near = _neighbours(signed, suspects, along)
    wild = ~(near * np.sign(far) > _SHARED * np.abs(far))  # also without neighbours
    found[tuple(suspects[wild].T)] = True
    return found


def beyond_proportion(signed: np.ndarray) -> np.ndarray:
    """Flags of the distances, in robust standard deviations, that are extreme among those on the same side."""
    low, high = (largest_plausible(side * signed) for side in (-1, 1))
    return (signed < -low) | (signed > high)


def largest_plausible(signed: np.ndarray) -> float:
    """The largest plausible size of a positive distance among so many; infinite if there are too few.

    :param signed: distances in robust standard deviations. NaN, zero and negative distances are ignored.

    >>> normal = np.random.default_rng(0).standard_normal(10_000)
    >>> bool(normal.max() < largest_plausible(normal) < 8)
    True
    """
    sizes = signed[signed > 0]
    count, limit = len(sizes), math.inf
    while len(sizes) >= _MIN_DISTANCES:
        low, high = map(float, np.quantile(sizes, _QUANTILES))
        limit = max(_LEAST_DEVIATIONS, _extrapolated(low, high, _EXPECTED / count))
        if sizes.max() <= limit:
            break
        sizes = sizes[sizes <= limit]
    return limit


def _extrapolated(low: float, high: float, chance: float) -> float:
    """The size that is exceeded with the given probability, from the 50 % and 80 % quantiles of a distribution."""
    inner, outer = (-math.log1p(-share) for share in _QUANTILES)  # (x / s)^k at the quantiles
    power = math.log(high / low) / math.log(outer / inner)  # 1 / k
    weibull = power * math.log(-math.log(chance) / inner)
    lognormal = math.log(high / low) * float(ndtri(1.0 - chance) / ndtri(_QUANTILES[1]))
    weight = min(max(power - 1.0, 0.0), 1.0)
    return low * math.exp(weibull + weight * (lognormal - weibull))


def _middle(numbers: np.ndarray, axes: Sequence[Axis]) -> tuple[np.ndarray, np.ndarray]:
    """Median and robust standard deviation of the observations of the same labels."""
    kept = [number for number, axis in enumerate(axes) if axis.kind == "label"]
    median = _median(numbers, kept)
    sizes = np.abs(numbers - median)
    typical = _median(np.where(sizes > 0, sizes, np.nan), kept)  # values that equal the median have no spread
    return median, typical / _MEDIAN_OF_NORMAL


def _median(values: np.ndarray, kept: Sequence[int]) -> np.ndarray:
    """Medians over all axes except the `kept` ones, ignoring NaN. The number of dimensions does not change."""
    rows = np.moveaxis(values, list(kept), range(len(kept)))
    rows = rows.reshape(*(values.shape[axis] for axis in kept), -1)
    return _last_median(rows).reshape([size if axis in kept else 1 for axis, size in enumerate(values.shape)])


def _last_median(rows: np.ndarray) -> np.ndarray:
    """Medians along the last axis, ignoring NaN; faster than ``np.nanmedian``. shape: (*, n) -> (*)"""
    ordered = np.sort(rows, axis=-1)  # NaN last
    count = (~np.isnan(rows)).sum(axis=-1, keepdims=True)
    low, high = np.maximum(count - 1, 0) // 2, np.minimum(count // 2, rows.shape[-1] - 1)
    middle = np.take_along_axis(ordered, low, -1) + np.take_along_axis(ordered, high, -1)
    return np.where(count > 0, middle / 2.0, np.nan)[..., 0]


def _neighbours(signed: np.ndarray, cells: np.ndarray, along: Sequence[int]) -> np.ndarray:
    """The median of the neighbours of each observation, along the axis where it is farthest on the same side.

    :param cells: (Q, d).
    :param along: axes that have neighbours.
    :return: (Q,), NaN for observations without neighbours.
    """
    reach = _REACH_OF_A_SERIES if len(along) == 1 else _REACH
    offsets = np.array([step for step in range(-reach, reach + 1) if step])
    result = np.full(len(cells), np.nan)
    for start in range(0, len(cells), _CHUNK):
        some = cells[start : start + _CHUNK]
        side, best = np.sign(signed[tuple(some.T)]), np.full(len(some), np.nan)
        for axis in along:
            moved = some[:, axis, None] + offsets
            inside = (moved >= 0) & (moved < signed.shape[axis])
            index = [some[:, other, None] for other in range(signed.ndim)]
            index[axis] = np.clip(moved, 0, signed.shape[axis] - 1)
            near = np.where(inside, signed[tuple(index)], np.nan)
            enough = (~np.isnan(near)).sum(axis=1) >= _MIN_NEIGHBOURS
            best = np.fmax(best, np.where(enough, side * _last_median(near), np.nan))
        result[start : start + _CHUNK] = side * best
    return result
