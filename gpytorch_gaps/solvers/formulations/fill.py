"""Fill the gaps: solve for the L missing responses, then for the whole grid at once.

``V A^-1 V' y_Z = -V A^-1 W' y_X`` with ``A = K + s2 I``, then ``a = A^-1 y`` and ``a_Z = 0``.

Iterations reduce the residual of this system, ``r_Z = -V A^-1 (W' y_X + V' y_Z)``. The residual of the original system
is ``(K_XX + s2 I) a_X - y_X = -K_XZ r_Z``, which may be larger by a factor of up to ``|K| / s2``. Therefore r_Z is
refined in float64, and iterations stop when the original residual is small enough.
"""

from torch import Tensor

from gpytorch_gaps.autograd.dense import solve_from
from gpytorch_gaps.linalg.selection import select_cells, spread_cells
from gpytorch_gaps.solvers.gap_system import GapSystem
from gpytorch_gaps.solvers.goal import Goal
from gpytorch_gaps.solvers.refine import Formulation


class FillGaps(Formulation):
    """The fill-gaps formulation: constant noise, every cell observed at most once.

    Implements Evans & Nair (2018), Proposition 3.3 (fill-gaps), also without noise; with `rank` > 0 its shifted
    preconditioner; with `direct` a Cholesky decomposition of the L x L matrix. Cost of an iteration: two Kronecker
    products, for any N and L.
    """

    system: GapSystem

    def __init__(self, system: GapSystem, rhs: Tensor, goal: Goal, *, rank: int = 0, direct: bool = False) -> None:
        system.require_fillable("fill")
        super().__init__(system, rhs, goal)
        self.matmul_flops = 2.0 * system.rotation_flops
        self._rank, self.is_direct = rank, direct
        self._observed = spread_cells(rhs, system.train_index, system.num_cells)
        if direct:
            size = len(system.gap_index)
            is_new = not system.is_cached("gap cholesky")
            self.flops += 2.0 * size * system.rotation_flops + size**3 / 3.0 if is_new else 0.0
        elif rank and len(system.gap_index):
            is_new = not system.is_cached(("shifted", rank))
            self._preconditioner = system.shifted_preconditioner(rank)
            self.flops += self._preconditioner.setup_flops if is_new else 0.0

    def _weights(self, filled: Tensor) -> Tensor:
        """``A^-1 y`` on the whole grid, the gaps holding `filled`. shape: (*batch, M, C)"""
        self.flops += self.num_columns * self.matmul_flops
        grid = self._observed + spread_cells(filled, self.system.gap_index, self.system.num_cells)
        return self.system.shifted_solve(grid)

    def start(self, guess: Tensor | None) -> Tensor:
        """``y_Z = K_ZX a_X`` for an initial guess of a."""
        if guess is None:
            return self.rhs.new_zeros(*self.rhs.shape[:-2], len(self.system.gap_index), self.rhs.size(-1))
        return self.system.kernel_matmul(guess, self.system.gap_index, self.system.train_index)

    def residual(self, iterate: Tensor) -> Tensor:
        return -select_cells(self._weights(iterate), self.system.gap_index)

    def original_error(self, residual: Tensor) -> Tensor:
        """``K_XZ r_Z`` is the residual of the original system."""
        self.flops += self.num_columns * self.system.product_flops
        return self.goal.measure(self.system.kernel_matmul(residual, self.system.train_index, self.system.gap_index))

    def solution(self, iterate: Tensor) -> Tensor:
        return select_cells(self._weights(iterate), self.system.train_index)

    def matmul(self, x: Tensor) -> Tensor:
        return self.system.gap_matmul(x)

    def direct_solution(self, residual: Tensor) -> tuple[Tensor, int] | None:
        return (solve_from(self.system.gap_cholesky(), residual), 0) if self.is_direct else None

    def again(self, rhs: Tensor, goal: Goal) -> "FillGaps":
        return FillGaps(self.system, rhs, goal, rank=self._rank, direct=self.is_direct)
