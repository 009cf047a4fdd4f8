"""Which cells of a grid a table of points names, and look-ups that are remembered.

Points come in three kinds. *On the grid*: a flat index says all. *On a grid of their own*: their coordinates, axis by
axis, are few, so that they are cells of the grid of these, and a covariance with them has rectangular Kronecker
factors. *Scattered*: neither.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpytorch_gaps.grid.cartesian import CartesianGrid
from gpytorch_gaps.linalg.selection import ravel
from gpytorch_gaps.utils.tensors import same_values

_ROOM = 4  # a grid of their own may have so many times as many cells as there are points


@dataclass(frozen=True)
class Cells:
    """Cells of the grid of these axes. Axes of shape (m_i, d_i) each; index of shape (N,), last axis fastest."""

    axes: tuple[Tensor, ...]
    index: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(axis) for axis in self.axes)


def on_grid(grid: CartesianGrid, x: Tensor) -> Cells | None:
    """The cells of `grid` that the rows of x `(N, D)` are, or None if one of them is off it."""
    index = grid.index_of(x)
    return None if bool((index < 0).any()) else Cells(grid.axes, index)


def own_grid(grid: CartesianGrid, x: Tensor) -> Cells | None:
    """The rows of x `(N, D)` as cells of the grid of their own coordinates, or None if that grid is too large."""
    axes, positions = [], []
    for columns in grid.columns:
        distinct, where = torch.unique(x[:, columns], dim=0, return_inverse=True)
        axes.append(distinct)
        positions.append(where)
    shape = tuple(len(axis) for axis in axes)
    if math.prod(shape) > _ROOM * len(x):
        return None
    return Cells(tuple(axes), ravel(tuple(positions), shape))


class Lookups:
    """Remembers the last few answers by the *content* of x: never stale, whatever is done to x meanwhile.

    A comparison costs far less than a look-up, and the same index tensor comes back for the same points, by which
    everything worked out from it is found again. Copies and pickles start empty.
    """

    def __init__(self, size: int = 4) -> None:
        self._size = size
        self._entries: deque[tuple[Any, tuple[Tensor, ...], tuple[Tensor, ...], Tensor, Any]] = deque(maxlen=size)

    def get(self, name: str, grid: CartesianGrid, x: Tensor, compute: Callable[[], Any]) -> Any:
        """``compute()``, or what it gave before for the same name, grid and points."""
        for known, axes, copies, points, value in self._entries:
            here = known == name and all(a is b for a, b in zip(axes, grid.axes, strict=True))  # a cast makes others
            if here and same_values(points, x) and all(map(same_values, copies, axes)):
                return value
        value = compute()
        copies = tuple(axis.clone() for axis in grid.axes)  # loading a state changes the grid in place
        self._entries.appendleft((name, grid.axes, copies, x.detach().clone(), value))
        return value

    def __reduce__(self) -> tuple[type["Lookups"], tuple[int]]:
        return Lookups, (self._size,)
