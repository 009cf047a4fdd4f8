"""Small parts of a grid that hyperparameters are learned from: some of neighbouring cells, some of cells far apart.

Each is a grid itself, ``start, start + stride, ..`` along every axis, and holds few enough observations for dense
algebra. Neighbours tell of roughness, noise and short distances; strides of the size of the grid of long ones.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Reader = Callable[[Sequence[np.ndarray]], np.ndarray]
"""The values at a product of positions, one array of them for each axis; NaN at gaps."""

OBSERVATIONS = 360
"""Of a window: a Cholesky factor of it takes a few milliseconds."""

_READ = 4_000_000  # cells of a window that are looked at for observations
_TRIES = 12
_FULL_ENOUGH = 0.6


@dataclass(frozen=True, eq=False)
class Window:
    """`positions` of each axis, and the observed cells among their product: `cells` (N, d) and `values` (N,)."""

    positions: list[np.ndarray]
    cells: Tensor
    values: Tensor

    def __len__(self) -> int:
        return len(self.values)


def all_of(values: np.ndarray) -> Window:
    return _window([np.arange(size) for size in values.shape], values, math.inf, np.random.default_rng(0))


def choose_windows(
    read: Reader, shape: Sequence[int], whole: Sequence[bool], count: int, generator: np.random.Generator,
    density: float = 1.0, through: np.ndarray | None = None,
) -> list[Window]:  # fmt: skip
    """`count` windows: two in three of neighbours, the others at strides up to the largest that there are.

    :param whole: axes whose places are taken as they come, without distances: labels.
    :param density: the share of cells that are observed. Where it is small, windows are wide.
    :param through: cells (count, d), one for each window to hold. Default: windows lie anywhere.
    """
    size = np.array(shape)
    sides = _sides(size, min(1.5 * OBSERVATIONS * max(1.0, 0.5 / max(density, 1e-9)), _READ))
    widest = np.maximum(size // sides, 1)
    far = max(1, count // 3)
    windows = []
    for number in range(count):
        share = max(0, number - (count - far) + 1) / far  # 0: neighbours, 1: as far apart as the grid is wide
        stride = np.maximum(1, np.rint(widest**share)).astype(int)
        best: Window | None = None
        cell = [None] * len(size) if through is None else [int(at) for at in through[number]]
        for _ in range(_TRIES):
            positions = [
                _some(m, n, at, generator) if one else _stretch(m, n, step, at, generator)
                for m, n, step, at, one in zip(size, sides, stride, cell, whole, strict=True)
            ]
            window = _window(positions, read(positions), OBSERVATIONS, generator)
            if best is None or len(window) > len(best):
                best = window
            if len(best) >= _FULL_ENOUGH * min(OBSERVATIONS, density * math.prod(sides)):
                break
        assert best is not None
        if len(best) > 1:
            windows.append(best)
    return windows


def _sides(size: np.ndarray, cells: float) -> np.ndarray:
    """As even as the axes allow, with about as many cells in all: short axes are taken whole."""
    sides = np.ones(len(size))
    for axis, at in enumerate(np.argsort(size)):
        left = len(size) - axis
        sides[at] = min(size[at], round((cells / sides.prod()) ** (1 / left)))
    return np.maximum(sides, 1).astype(int)


def _some(size: int, count: int, through: int | None, generator: np.random.Generator) -> np.ndarray:
    """Places of labels, `through` among them."""
    order = generator.permutation(size)
    if through is not None:
        order = np.concatenate([[through], order[order != through]])
    return np.sort(order[:count])


def _stretch(size: int, count: int, stride: int, through: int | None, generator: np.random.Generator) -> np.ndarray:
    reach = (count - 1) * stride + 1
    start = int(generator.integers(0, max(1, size - reach + 1)))
    if through is not None:
        start = through - stride * int(generator.integers(0, count))
        start += stride * -(-max(0, -start) // stride)
        start -= stride * min(-(-max(0, start + reach - size) // stride), start // stride)
    return np.arange(start, min(size, start + reach), stride)


def _window(positions: list[np.ndarray], values: np.ndarray, most: float, generator: np.random.Generator) -> Window:
    cells = np.argwhere(~np.isnan(values))
    if len(cells) > most:
        cells = cells[np.sort(generator.permutation(len(cells))[: int(most)])]
    observed = values[tuple(cells.T)]
    # places without observations would only make kernels larger
    used = [np.unique(column, return_inverse=True) for column in cells.T]
    positions = [p[places] for p, (places, _) in zip(positions, used, strict=True)]
    cells = np.stack([where for _, where in used], axis=1)
    return Window(positions, torch.from_numpy(cells), torch.from_numpy(observed))
