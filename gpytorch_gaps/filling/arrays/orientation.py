"""A canonical order of the dimensions of an array and of the positions along each, so that random choices of cells do
not depend on how a user has arranged them.

Windows to learn from and observations to withhold are chosen in the canonical order and mapped back. It is determined
by content:

| what | its order |
|---|---|
| positions along numbers, times, degrees, circles | of their coordinates |
| stations | of their first column, which differs by region |
| labels | of the number and the spread of their observations |
| positions without coordinates | as they are or reversed: more observations, or larger ones, are in the second half |
| dimensions | of kind, size and roughness of the values along them |

Without values (arrays that are streamed), labels and positions keep the order of the user.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gpytorch_gaps.filling.axes.axis import Axis

_KINDS = ("latitude", "longitude", "circle", "group", "number", "position", "time", "label")  # in this order
_DIGITS = 6  # of statistics of the data, which differ by rounding between arrangements
_TIE = 1e-9  # relative difference that may be rounding


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
        """The same where blocks of neighbours are blocks of the user's array too: only reversed, or as given."""
        monotonic = [bool((np.diff(at) == 1).all() or (np.diff(at) == -1).all()) for at in self.places]
        kept = [at if whole else np.arange(len(at)) for at, whole in zip(self.places, monotonic, strict=True)]
        return Orientation(self.order, tuple(kept))

    def at(self, positions: Sequence[np.ndarray]) -> "Orientation":
        """The canonical order of a part, from the user's positions of it."""
        ranks = [np.argsort(at)[own] for at, own in zip(self.places, positions, strict=True)]
        return Orientation(self.order, tuple(np.argsort(rank, kind="stable") for rank in ranks))

    def shape(self) -> tuple[int, ...]:
        """Sizes of the canonical dimensions."""
        return tuple(len(self.places[axis]) for axis in self.order)

    def turn(self, values: np.ndarray) -> np.ndarray:
        """An array of the user's in canonical order."""
        return values[np.ix_(*self.places)].transpose(self.order)

    def turn_back(self, values: np.ndarray) -> np.ndarray:
        """An array in canonical order in that of the user."""
        result = np.empty_like(values.transpose(np.argsort(self.order)), order="C")
        result[np.ix_(*self.places)] = values.transpose(np.argsort(self.order))
        return result

    def positions(self, canonical: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The user's positions along each of the user's dimensions, from canonical ones along canonical dimensions."""
        return [at[canonical[self.order.index(axis)]] for axis, at in enumerate(self.places)]

    def columns(self, canonical: np.ndarray) -> np.ndarray:
        """Columns, one per canonical dimension, in the order of the user's dimensions. shape: (N, d)"""
        return canonical[:, [self.order.index(axis) for axis in range(len(self.order))]]

    def canonical(self, cell: np.ndarray) -> np.ndarray:
        """The canonical position of a cell of the user's. shape: (d,)"""
        return np.array([int(np.flatnonzero(self.places[axis] == cell[axis])[0]) for axis in self.order])

    def cells(self, canonical: np.ndarray) -> np.ndarray:
        """The user's positions of cells (N, d), from canonical ones."""
        return np.stack(self.positions(list(canonical.T)), axis=1)


def _places(axis: Axis, number: int, centred: np.ndarray | None) -> np.ndarray:
    """The positions along an axis in canonical order."""
    if axis.kind == "circle":
        return np.argsort(np.arctan2(axis.points[:, 1], axis.points[:, 0]), kind="stable")
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
    """Mean square of the differences of neighbours along an axis, as a share of that of the values."""
    rows = np.moveaxis(centred, number, 0)[places]
    steps = np.diff(rows, axis=0) ** 2
    known, scale = ~np.isnan(steps), float(np.nanmean(centred**2))
    if not known.any() or scale == 0:
        return 0.0
    return float(f"{float(steps[known].mean()) / scale:.{_DIGITS}g}")
