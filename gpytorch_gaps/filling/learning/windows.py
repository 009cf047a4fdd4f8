"""Windows: small parts of a grid from which hyperparameters are learned, some without and some with strides.

Each window is a grid, ``start, start + stride, ..`` along every axis, with few enough observations for dense algebra.
Neighbouring cells determine roughness, noise and short length-scales. Distant cells determine long length-scales.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from gpytorch_gaps.filling.arrays.grid_values import GridValues, even_sides
from gpytorch_gaps.filling.arrays.orientation import Orientation

MAX_WINDOW_OBSERVATIONS = 360
"""The Cholesky factorization of so many observations takes a few milliseconds."""

_MAX_CELLS_READ = 4_000_000  # per window
_MAX_TRIES = 12  # number of places that are tried for a window
_FULL_ENOUGH = 0.6  # a place is accepted if the window has this fraction of the possible observations


@dataclass(frozen=True, eq=False)
class Window:
    """`positions` along each axis, and the observed cells of their product: `cells` (N, d) and `values` (N,).

    `noise` (N,) are the known variances of their errors, zero if they are not known.
    """

    positions: list[np.ndarray]
    cells: Tensor
    values: Tensor
    noise: Tensor

    def __len__(self) -> int:
        return len(self.values)

    def spans(self, shape: Sequence[int]) -> bool:
        """Whether the observations extend over more than half of every axis of a grid."""
        return all(at[-1] - at[0] >= (size - 1) / 2 for at, size in zip(self.positions, shape, strict=True))


def whole_window(values: np.ndarray, noise: np.ndarray | None = None) -> Window:
    """All observations of a small grid, and the known variances of their errors."""
    positions = [np.arange(size) for size in values.shape]
    return _window(positions, values, noise, math.inf, np.random.default_rng(0))


def choose_windows(
    source: GridValues,
    count: int,
    generator: np.random.Generator,
    density: float = 1.0,
    through: np.ndarray | None = None,
) -> list[Window]:
    """`count` windows: two thirds have neighbouring cells, the others have strides up to the size of the grid.

    :param source: the grid and its values. Windows are chosen in its canonical order. Labels have no distances, and are
        chosen at random.
    :param density: the fraction of cells that are observed. If it is small, windows are wide.
    :param through: cells (count, d), one per window to contain. Default: windows lie anywhere.
    """
    turn = source.orientation
    size, labels = turn.shape(), [source.axes[axis].kind == "label" for axis in turn.order]
    wanted_cells = 1.5 * MAX_WINDOW_OBSERVATIONS * max(1.0, 0.5 / max(density, 1e-9))
    sides = even_sides(size, min(wanted_cells, _MAX_CELLS_READ), round)
    widest = np.array(size) // sides
    far = max(1, count // 3)
    windows = []
    for number in range(count):
        share = max(0, number - (count - far) + 1) / far  # 0: neighbouring cells, 1: spread over the grid
        stride = np.maximum(1, np.rint(widest**share)).astype(int)
        best: Window | None = None
        cell = [None] * len(size) if through is None else [int(at) for at in turn.canonical(through[number])]
        for _ in range(_MAX_TRIES):
            positions = [
                _some(m, n, at, generator) if label else _stretch(m, n, step, at, generator)
                for m, n, step, at, label in zip(size, sides, stride, cell, labels, strict=True)
            ]
            values, noise = source.read_canonical(positions)
            window = _window(positions, values, noise, MAX_WINDOW_OBSERVATIONS, generator)
            if best is None or len(window) > len(best):
                best = window
            if len(best) >= _FULL_ENOUGH * min(MAX_WINDOW_OBSERVATIONS, density * math.prod(sides)):
                break
        assert best is not None
        if len(best) > 1:
            windows.append(_for_user(best, turn))
    return windows


def _for_user(window: Window, turn: Orientation) -> Window:
    """Converts a window from the canonical order to that of the user, with ascending positions."""
    positions = turn.positions(window.positions)
    places = [np.argsort(at) for at in positions]
    cells = turn.columns(window.cells.numpy())
    cells = np.stack([np.argsort(place)[own] for place, own in zip(places, cells.T, strict=True)], axis=1)
    sorted_positions = [at[place] for at, place in zip(positions, places, strict=True)]
    return replace(window, positions=sorted_positions, cells=torch.from_numpy(cells))


def _some(size: int, count: int, through: int | None, generator: np.random.Generator) -> np.ndarray:
    """`count` labels at random, `through` among them."""
    order = generator.permutation(size)
    if through is not None:
        order = np.concatenate([[through], order[order != through]])
    return np.sort(order[:count])


def _stretch(size: int, count: int, stride: int, through: int | None, generator: np.random.Generator) -> np.ndarray:
    """`count` positions with this stride, `through` among them if possible."""
    reach = (count - 1) * stride + 1
    start = int(generator.integers(0, max(1, size - reach + 1)))
    if through is not None:
        start = through - stride * int(generator.integers(0, count))
        start += stride * -(-max(0, -start) // stride)
        start -= stride * min(-(-max(0, start + reach - size) // stride), start // stride)
    return np.arange(start, min(size, start + reach), stride)


def _window(
    positions: list[np.ndarray],
    values: np.ndarray,
    noise: np.ndarray | None,
    most: float,
    generator: np.random.Generator,
) -> Window:
    """The window of the observed cells, or of `most` of them."""
    cells = np.argwhere(~np.isnan(values))
    if len(cells) > most:
        cells = cells[np.sort(generator.permutation(len(cells))[: int(most)])]
    observed = values[tuple(cells.T)]
    known = np.zeros(len(cells)) if noise is None else noise[tuple(cells.T)]
    # positions without observations would only make kernel matrices larger
    used = [np.unique(column, return_inverse=True) for column in cells.T]
    positions = [p[places] for p, (places, _) in zip(positions, used, strict=True)]
    cells = np.stack([where for _, where in used], axis=1)
    return Window(positions, *map(torch.from_numpy, (cells, observed, known)))
