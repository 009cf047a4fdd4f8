"""Penalize the gaps: ``(K + gamma R + s2 I) a = y`` on the whole grid, ``R_ZZ = I`` and zero elsewhere.

This is the baseline of the paper. (The paper prints ``R_XX = I``, but the penalty applies to the gaps.) The residual of
its solution in the original system is ``-K_XZ a_Z``, which tends to zero as gamma grows. It is reported like any other.
"""

import math

import torch
from torch import Tensor

from gpytorch_gaps.linalg.factors import row_sum
from gpytorch_gaps.linalg.products import kron_matmul
from gpytorch_gaps.linalg.selection import select_cells, spread_cells
from gpytorch_gaps.solvers.gap_system import GapSystem
from gpytorch_gaps.solvers.goal import Goal
from gpytorch_gaps.solvers.krylov import Closure
from gpytorch_gaps.solvers.refine import Formulation


class PenalizeGaps(Formulation):
    """The penalty formulation of Evans & Nair (2018), preconditioned by ``(gamma R + s2 I)^-1`` as they suggest.

    Cost of an iteration: one Kronecker product on M cells. No refinement makes it more accurate than its penalty;
    `penalty` None means ``10 |K|`` divided by the required reduction of the residual, at which the penalty itself costs
    no accuracy.
    """

    system: GapSystem
    error_is_cheap = True
    restarts = 0  # the penalty limits the accuracy, and restarts would hide this
    margin = 0.5

    def __init__(self, system: GapSystem, rhs: Tensor, goal: Goal, *, penalty: float | None = None) -> None:
        system.require_fillable("penalize")
        super().__init__(system, rhs, goal)
        self.matmul_flops = system.rotation_flops
        self._observed = spread_cells(rhs, system.train_index, system.num_cells)
        self.penalty = penalty if penalty is not None else 10.0 * self._kernel_bound() / goal.reduction
        gaps = torch.zeros(system.num_cells, dtype=torch.float64, device=rhs.device)
        gaps[system.gap_index] = self.penalty
        self._diagonal = (gaps + system.noise).unsqueeze(-1)  # shape: (*batch, M, 1)

    def _kernel_bound(self) -> float:
        """``|K| = prod |K_i|``, bounded by the largest row sums."""
        return math.prod(float(row_sum(factor)) for factor in self.system.factors())

    def start(self, guess: Tensor | None) -> Tensor:
        if guess is None:
            return torch.zeros_like(self._observed)
        return spread_cells(guess, self.system.train_index, self.system.num_cells)

    def residual(self, iterate: Tensor) -> Tensor:
        self.flops += self.num_columns * self.matmul_flops
        return self._observed - self.matmul(iterate)

    def original_error(self, residual: Tensor) -> Tensor:
        """The observed rows of its own residual. They lack ``K_XZ a_Z``, which only a larger penalty reduces."""
        return self.goal.measure(select_cells(residual, self.system.train_index))

    def solution(self, iterate: Tensor) -> Tensor:
        return select_cells(iterate, self.system.train_index)

    def matmul(self, x: Tensor) -> Tensor:
        return kron_matmul(self.system.factors(x.dtype), x) + self._diagonal.to(x.dtype) * x

    def preconditioner(self, dtype: torch.dtype) -> Closure | None:
        diagonal = self._diagonal.to(dtype)
        return lambda residual: residual / diagonal

    def again(self, rhs: Tensor, goal: Goal) -> "PenalizeGaps":
        return PenalizeGaps(self.system, rhs, goal, penalty=self.penalty)
