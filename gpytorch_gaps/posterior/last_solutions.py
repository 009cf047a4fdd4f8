"""Solutions for the last training data. They are starting values of solves for changed data."""

from collections.abc import Hashable

import torch
from torch import Tensor

from gpytorch_gaps.grid.cartesian import CartesianGrid
from gpytorch_gaps.utils.tensors import same_values


class LastSolutions:
    """Solutions ``(K_XX + D)^-1 y`` for the last two solver configurations.

    A solve with another method or tolerance starts at zero. A grid kernel owns this object as ``kernel.solutions``.
    Prediction strategies read and write it. GPyTorch discards those when data or hyperparameters change, but not the
    kernel. Copies and pickles start empty.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[Tensor, Tensor]] = {}

    def keep(self, key: Hashable, x: Tensor, solution: Tensor) -> None:
        """Stores the solution, shape (*batch, N), for observations at x, shape (N, D)."""
        self._known.pop(key, None)
        self._known[key] = (x.detach().clone(), solution.detach())
        while len(self._known) > 2:
            self._known.pop(next(iter(self._known)))

    def start(self, key: Hashable, grid: CartesianGrid, x: Tensor, batch: torch.Size) -> Tensor | None:
        """A guess for observations at x: the last solution at the same cells, zero elsewhere. shape: (*batch, N)"""
        if key not in self._known:
            return None
        old_x, solution = self._known[key]
        if old_x.dtype != x.dtype or old_x.device != x.device or old_x.size(-1) != x.size(-1):
            return None
        if torch.broadcast_shapes(solution.shape[:-1], batch) != batch:
            return None
        rows = len(old_x)
        if len(x) >= rows and same_values(old_x, x[:rows]):  # the same observations, or additional ones
            nothing = solution.new_zeros(*solution.shape[:-1], len(x) - rows)
            return torch.cat([solution, nothing], -1)
        old, new = grid.index_of(old_x), grid.index_of(x)
        on_grid = solution.new_zeros(*solution.shape[:-1], grid.num_cells)
        on_grid[..., old[old >= 0]] = solution[..., old >= 0]
        return on_grid[..., new.clamp_min(0)] * (new >= 0)

    def __reduce__(self) -> tuple[type["LastSolutions"], tuple[()]]:
        return LastSolutions, ()
