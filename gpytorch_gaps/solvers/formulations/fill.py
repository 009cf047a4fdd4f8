"""thm:FG, fill the gaps: solve for the L missing responses, then the whole grid at once.

``V A^-1 V' y_Z = -V A^-1 W' y_X`` with ``A = K + s2 I``, then ``a = A^-1 y`` and ``a_Z = 0``.

The residual that fill-gaps iterates on is not the model's: ``(K_XX + s2 I) a_X - y_X = -K_XZ r_Z`` amplifies it by up
to ``|K| / s2``. So its own residual ``r_Z = -V A^-1 (W' y_X + V' y_Z)`` is refined in float64, and the iteration
stops on the original one.
"""

import torch
from torch import Tensor

from gpytorch_gaps.linalg.selection import select_cells, spread_cells
from gpytorch_gaps.solvers.amplified import correct_amplified
from gpytorch_gaps.solvers.goal import Goal
from gpytorch_gaps.solvers.system import GapSystem


class Fill:
    """The fill-gaps formulation: constant noise, every cell observed at most once.

    Implements: thm:fill_gaps, eqn:FG_no_noise at zero noise; with `rank` > 0 eqn:FG_precon; with `direct` a Cholesky
    decomposition of the L x L matrix. Cost an iteration: two Kronecker products, whatever N and L.
    """

    def __init__(self, system: GapSystem, rhs: Tensor, goal: Goal, rank: int = 0, direct: bool = False) -> None:
        system.require_fillable("fill")
        self.system, self.rhs, self.goal = system, rhs, goal
        self.flops = 0.0
        self._columns = rhs.shape[:-2].numel() * rhs.size(-1)
        self._observed = spread_cells(rhs, system.train_index, system.num_cells)
        self._preconditioner = None
        self._cholesky: Tensor | None = None
        if direct:
            size = len(system.gap_index)
            is_new = not system.is_set_up("gap cholesky")
            self.flops += 2.0 * size * system.rotation_flops + size**3 / 3.0 if is_new else 0.0
            self._cholesky = system.gap_cholesky()
        elif rank and len(system.gap_index):
            is_new = not system.is_set_up(("shifted", rank))
            self._preconditioner = system.shifted_preconditioner(rank)
            self.flops += self._preconditioner.setup_flops if is_new else 0.0

    def _weights(self, filled: Tensor) -> Tensor:
        """``A^-1 y`` on the whole grid, the gaps holding `filled`. shape: (*batch, M, C)"""
        self.flops += 2.0 * self._columns * self.system.rotation_flops
        grid = self._observed + spread_cells(filled, self.system.gap_index, self.system.num_cells)
        return self.system.shifted_solve(grid)

    def start(self, guess: Tensor | None) -> Tensor:
        """``y_Z = K_ZX a_X`` for a guess of a."""
        if guess is None:
            return self.rhs.new_zeros(*self.rhs.shape[:-2], len(self.system.gap_index), self.rhs.size(-1))
        return self.system.kernel_matmul(guess, self.system.gap_index, self.system.train_index)

    def residual(self, iterate: Tensor) -> Tensor:
        return -select_cells(self._weights(iterate), self.system.gap_index)

    def original(self, residual: Tensor) -> Tensor:
        """``K_XZ r_Z`` is the residual of the original system."""
        self.flops += self._columns * self.system.product_flops
        image = self.system.kernel_matmul(residual, self.system.train_index, self.system.gap_index)
        return self.goal.measure(image)

    def correct(self, residual: Tensor, dtype: torch.dtype, budget: int) -> tuple[Tensor, int]:
        if self._cholesky is not None:
            return torch.cholesky_solve(residual, self._cholesky), 0
        step, iterations = correct_amplified(
            residual,
            dtype,
            budget,
            matmul=self.system.gap_matmul,
            precondition=None if self._preconditioner is None else self._preconditioner.solve,
            original=self.original,
            tolerance=self.goal.tolerance,
        )
        own = self._preconditioner.flops if self._preconditioner else 0.0
        self.flops += iterations * self._columns * (2.0 * self.system.rotation_flops + own)
        return step, iterations

    def finish(self, iterate: Tensor) -> Tensor:
        return select_cells(self._weights(iterate), self.system.train_index)
