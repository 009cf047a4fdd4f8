"""A canonical order of the dimensions of an array and of the positions along each.

With it, random choices of cells do not depend on the arrangement of the array. Windows for learning and withheld
observations are chosen in the canonical order and mapped back. The order depends on the content:

| of | by |
|---|---|
| positions along numbers, times, degrees, circles | their coordinates |
| stations | their first column, which differs between regions |
| labels | the number and the spread of their observations |
| positions without coordinates | given order or its reverse: more, or larger, observations in the second half |
| dimensions | kind, size and roughness of the values along them |

Without values (for streamed arrays), labels and positions keep the order of the user.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gpytorch_gaps.filling.axes.axis import Axis

_KINDS = ("latitude", "longitude", "circle", "group", "number", "position", "time", "label")  # in this order
_DIGITS = 6  # significant digits of statistics of the data: rounding differs between arrangements
_TIE = 1e-9  # a smaller relative difference may be rounding


@dataclass(frozen=True, eq=False)
class Orientation:
    """The canonical order.

    :param order: the user's dimension of each canonical dimension.
    :param places: for each of the user's dimensions, the user's position of each canonical position.
    """

    order: tuple[int, ...]
    places: tuple[np.ndarray, ...]

    @classmethod
    def as_given(cls, shape: Sequence[int]) -> "Orientation":
        """The order of the user."""
        return cls(tuple(range(len(shape))), tuple(np.arange(size) for size in shape))

    @classmethod
    def of(cls, axes: Sequence[Axis], values: np.ndarray | None = None) -> "Orientation":
        """The canonical order of an array.

        :param axes: its axes.
        :param values: NaN at gaps; None if they are not in memory.

        >>> axes = [Axis("x", "number", np.array([[3.0], [1.0], [2.0]])), Axis("lat", "latitude", np.array([[5.0]]))]
        >>> Orientation.of(axes).turn(np.array([[30.0], [10.0], [20.0]])).tolist()
        [[10.0, 20.0, 30.0]]
        """
        centred = None if values is None else values - np.nanmean(values)
        places = tuple(_places(axis, number, centred) for number, axis in enumerate(axes))
        keys = [
            (
                _KINDS.index(axis.kind),
                axis.size,
                0.0 if centred is None else _roughness(centred, number, places[number]),
            )
            for number, axis in enumerate(axes)
        ]
        return cls(tuple(sorted(range(len(axes)), key=keys.__getitem__)), places)

    def in_blocks(self) -> "Orientation":
        """An order without permutations, only reversals: blocks of neighbours are then blocks of the user's array."""
        monotonic = [bool((np.diff(at) == 1).all() or (np.diff(at) == -1).all()) for at in self.places]
        kept = [at if whole else np.arange(len(at)) for at, whole in zip(self.places, monotonic, strict=True)]
        return Orientation(self.order, tuple(kept))

    def at(self, positions: Sequence[np.ndarray]) -> "Orientation":
        """The canonical order of a part, given its positions in the user's array."""
        ranks = [np.argsort(at)[own] for at, own in zip(self.places, positions, strict=True)]
        return Orientation(self.order, tuple(np.argsort(rank, kind="stable") for rank in ranks))

    def shape(self) -> tuple[int, ...]:
        """Sizes of the canonical dimensions."""
        return tuple(len(self.places[axis]) for axis in self.order)

    def turn(self, values: np.ndarray) -> np.ndarray:
        """The user's array in canonical order."""
        return values[np.ix_(*self.places)].transpose(self.order)

    def turn_back(self, values: np.ndarray) -> np.ndarray:
        """An array in canonical order, in the order of the user."""
        result = np.empty_like(values.transpose(np.argsort(self.order)), order="C")
        result[np.ix_(*self.places)] = values.transpose(np.argsort(self.order))
        return result

    def positions(self, canonical: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The user's positions along each dimension, from canonical positions along canonical dimensions."""
        return [at[canonical[self.order.index(axis)]] for axis, at in enumerate(self.places)]

    def columns(self, canonical: np.ndarray) -> np.ndarray:
        """Columns, one per canonical dimension, in the order of the user's dimensions. shape: (N, d)"""
        return canonical[:, [self.order.index(axis) for axis in range(len(self.order))]]

    def canonical(self, cell: np.ndarray) -> np.ndarray:
        """The canonical position of a cell of the user's array. shape: (d,)"""
        return np.array([int(np.flatnonzero(self.places[axis] == cell[axis])[0]) for axis in self.order])

    def cells(self, canonical: np.ndarray) -> np.ndarray:
        """The user's positions of cells (N, d), from canonical positions."""
        return np.stack(self.positions(list(canonical.T)), axis=1)


def _places(axis: Axis, number: int, centred: np.ndarray | None) -> np.ndarray:
    """The positions along an axis in canonical order."""
    if axis.period is not None:
        return np.argsort((axis.points[:, 0] + axis.period / 2) % axis.period, kind="stable")
    if axis.kind not in ("label", "position"):
        return np.lexsort(axis.points.T[::-1])
    if centred is None:
        return np.arange(axis.size)
    rows = np.moveaxis(centred, number, 0).reshape(axis.size, -1)
    counts = (~np.isnan(rows)).sum(axis=1)
    squares = np.nansum(rows**2, axis=1)
    if axis.kind == "label":
        spread = np.nanmean(np.abs(np.where(counts[:, None] > 0, rows, 0.0)), axis=1)
        return np.lexsort((spread, counts))
    middle = np.arange(axis.size) - (axis.size - 1) / 2
    for weights in (counts, squares):
        moment, total = float(middle @ weights), float(np.abs(middle) @ weights)
        if abs(moment) > _TIE * total:
            return np.arange(axis.size) if moment > 0 else np.arange(axis.size)[::-1]
    return np.arange(axis.size)


def _roughness(centred: np.ndarray, number: int, places: np.ndarray) -> float:
    """Mean square of the differences of neighbours along an axis, relative to that of the values."""
    rows = np.moveaxis(centred, number, 0)[places]
    steps = np.diff(rows, axis=0) ** 2
    known, scale = ~np.isnan(steps), float(np.nanmean(centred**2))
    if not known.any() or scale == 0:
        return 0.0
    return float(f"{float(steps[known].mean()) / scale:.{_DIGITS}g}")
