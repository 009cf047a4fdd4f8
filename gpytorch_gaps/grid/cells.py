"""Cells of a table of points, and a cache of look-ups.

There are three kinds of points. *On the grid*: a flat index describes them. *On a grid of their own*: they have few
distinct coordinates per axis and are cells of the grid of these coordinates, so a covariance with them has rectangular
Kronecker factors. *Scattered*: neither.
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

_MAX_CELLS_PER_POINT = 4  # largest ratio of cells to points for which points form a grid of their own


@dataclass(frozen=True)
class Cells:
    """Cells of the grid with the given axes."""

    axes: tuple[Tensor, ...]  # shape: (m_i, d_i) each
    index: Tensor  # flat cells, last axis fastest, shape: (N,)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(axis) for axis in self.axes)


def on_grid(grid: CartesianGrid, x: Tensor) -> Cells | None:
    """The points x `(N, D)` as cells of `grid`; None if one of them is not on it."""
    index = grid.index_of(x)
    return None if bool((index < 0).any()) else Cells(grid.axes, index)


def own_grid(grid: CartesianGrid, x: Tensor) -> Cells | None:
    """The points x `(N, D)` as cells of the grid of their own coordinates; None if that grid is too large."""
    axes, positions = [], []
    for columns in grid.columns:
        distinct, where = torch.unique(x[:, columns], dim=0, return_inverse=True)
        axes.append(distinct)
        positions.append(where)
    shape = tuple(len(axis) for axis in axes)
    if math.prod(shape) > _MAX_CELLS_PER_POINT * len(x):
        return None
    return Cells(tuple(axes), ravel(tuple(positions), shape))


class Lookups:
    """The last few look-ups, found by the *content* of the points, so that changes in place are noticed.

    Owned by a grid kernel, which shares it with the kernels that a composite kernel derives from it, and lives as long
    as that kernel. A comparison costs much less than a look-up. The same points get the same index tensor, by which
    :class:`~gpytorch_gaps.utils.cache.TensorCache` finds what was computed for it. Copies and pickles start empty.
    """

    def __init__(self, size: int = 4) -> None:
        self._size = size
        self._entries: deque[tuple[Any, tuple[Tensor, ...], tuple[Tensor, ...], Tensor, Any]] = deque(maxlen=size)

    def get(self, name: str, grid: CartesianGrid, x: Tensor, compute: Callable[[], Any]) -> Any:
        """``compute()``, or its earlier result for the same name, grid and points."""
        for known, axes, copies, points, value in self._entries:
            # a cast replaces the axes
            here = known == name and all(a is b for a, b in zip(axes, grid.axes, strict=True))
            if here and same_values(points, x) and all(map(same_values, copies, axes)):
                return value
        value = compute()
        copies = tuple(axis.clone() for axis in grid.axes)  # loading a state changes the grid in place
        self._entries.appendleft((name, grid.axes, copies, x.detach().clone(), value))
        return value

    def __reduce__(self) -> tuple[type["Lookups"], tuple[int]]:
        return Lookups, (self._size,)
