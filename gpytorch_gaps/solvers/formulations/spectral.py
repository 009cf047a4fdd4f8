"""Fill-gaps in a truncated eigenbasis: ``(s2 T^-1 + Phi' W'W Phi) w = Phi' W' y``, then ``a = (y - W Phi w) / s2``.

Products of eigenvalues far below the noise are dropped, which changes the residual by less than the tolerance. A narrow
basis remains of each axis. A residual r of this system is ``-W Phi (T / s2) r`` in the original one.
``reconstruction.weight_space`` solves the same system for grids that are too large to store.
"""

import torch
from torch import Tensor

from gpytorch_gaps.linalg.factors import Basis
from gpytorch_gaps.linalg.products import kron_diagonal, kron_matmul
from gpytorch_gaps.linalg.selection import select_cells, spread_cells
from gpytorch_gaps.solvers.gap_system import GapSystem
from gpytorch_gaps.solvers.goal import Goal
from gpytorch_gaps.solvers.krylov import Closure
from gpytorch_gaps.solvers.refine import Formulation


class SpectralGaps(Formulation):
    """The spectral formulation: constant noise above zero, every cell observed at most once.

    Cost of an iteration: two thin Kronecker products, where fill-gaps takes two square ones.
    """

    system: GapSystem

    def __init__(self, system: GapSystem, rhs: Tensor, goal: Goal) -> None:
        system.require_fillable("spectral")
        if not float(system.noise.min()) > 0:
            raise ValueError("gap_method: got 'spectral' without noise, expected a noise above 0; use 'fill' here")
        super().__init__(system, rhs, goal)
        vectors, values = system.truncated(goal.reduction)
        self._vectors = {torch.float64: vectors}
        products = kron_diagonal(values).unsqueeze(-1)  # shape: (*batch, R, 1)
        noise = system.noise.unsqueeze(-1)
        kept = products >= system.level(goal.reduction)
        shift = torch.where(kept, noise / products, 0.0)  # s2 T^-1
        self._all_kept = bool(kept.all())
        share = system.num_train / system.num_cells  # Phi' W'W Phi is close to it where gaps are scattered
        self._diagonals = {torch.float64: (shift, torch.where(kept, 1.0 / (shift + share), 0.0), kept.double())}
        self._amplified = products / noise
        self._target = self._project(rhs)
        self._at_zero = False
        self._half_flops = system.truncated_flops(goal.reduction)
        self.matmul_flops = 2.0 * self._half_flops

    def _in(self, dtype: torch.dtype) -> tuple[tuple[Basis, ...], tuple[Tensor, ...]]:
        if dtype not in self._vectors:
            self._vectors[dtype] = tuple(q.to(dtype) for q in self._vectors[torch.float64])
            self._diagonals[dtype] = tuple(d.to(dtype) for d in self._diagonals[torch.float64])  # type: ignore[assignment]
        return self._vectors[dtype], self._diagonals[dtype]

    def _project(self, x: Tensor) -> Tensor:
        """``Phi' W' x``. shape: (*batch, N, C) -> (*batch, R, C)"""
        vectors, (_, _, kept) = self._in(x.dtype)
        grid = spread_cells(x, self.system.train_index, self.system.num_cells)
        return kept * kron_matmul([q.mT for q in vectors], grid)

    def _expand(self, weights: Tensor) -> Tensor:
        """``W Phi w``. shape: (*batch, R, C) -> (*batch, N, C)"""
        return select_cells(kron_matmul(self._in(weights.dtype)[0], weights), self.system.train_index)

    def matmul(self, weights: Tensor) -> Tensor:
        """``(s2 T^-1 + Phi' W'W Phi) w``. The mask is applied as a product, without index operations."""
        vectors, (shift, _, kept) = self._in(weights.dtype)
        grid = kron_matmul(vectors, weights).mul_(self.system.observed(weights.dtype))
        image = kron_matmul([q.mT for q in vectors], grid)
        return torch.addcmul(image if self._all_kept else kept * image, shift, weights)

    def start(self, guess: Tensor | None) -> Tensor:
        """``w = T Phi' W' a`` for an initial guess of a."""
        self._at_zero = guess is None
        if guess is None:
            return torch.zeros_like(self._target)
        self.flops += self.num_columns * self._half_flops
        return self._amplified * self.system.noise.unsqueeze(-1) * self._project(guess)

    def residual(self, iterate: Tensor) -> Tensor:
        if self._at_zero:  # the first iterate is zero: its residual is the right-hand side
            self._at_zero = False
            return self._target
        self.flops += 2.0 * self.num_columns * self._half_flops
        return self._target - self.matmul(iterate)

    def original_error(self, residual: Tensor) -> Tensor:
        self.flops += self.num_columns * self._half_flops
        image = self._expand(self._amplified.to(residual.dtype) * residual)
        return self.goal.measure(image)

    def preconditioner(self, dtype: torch.dtype) -> Closure | None:
        inverse = self._in(dtype)[1][1]
        return lambda residual: inverse * residual

    def solution(self, iterate: Tensor) -> Tensor:
        self.flops += self.num_columns * self._half_flops
        return (self.rhs - self._expand(iterate)) / self.system.noise.unsqueeze(-1)

    def again(self, rhs: Tensor, goal: Goal) -> "SpectralGaps":
        return SpectralGaps(self.system, rhs, goal)
