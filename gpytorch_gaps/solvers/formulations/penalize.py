"""sec:PG, penalize the gaps: ``(K + gamma R + s2 I) a = y`` on the whole grid, ``R_ZZ = I`` and zero elsewhere.

The baseline the paper compares with. (The paper prints ``R_XX = I``; the penalty belongs on the gaps.) Its solution
leaves ``-K_XZ a_Z`` as the residual of the original system, which vanishes as gamma grows; it is reported like any
other.
"""

import torch
from torch import Tensor

from gpytorch_gaps.linalg.products import kron_matmul
from gpytorch_gaps.linalg.selection import select_cells, spread_cells
from gpytorch_gaps.solvers.goal import Goal
from gpytorch_gaps.solvers.krylov import conjugate_gradients
from gpytorch_gaps.solvers.system import GapSystem


class Penalize:
    """The penalty formulation, with the preconditioner ``(gamma R + s2 I)^-1`` of sec:PG.

    Implements: eqn:penalty. Cost an iteration: one Kronecker product on M cells. No refinement makes it more accurate
    than its penalty; `penalty` None takes ``10 |K|`` over the reduction of the residual that is asked for, at which the
    penalty itself costs no accuracy.
    """

    def __init__(self, system: GapSystem, rhs: Tensor, goal: Goal, penalty: float | None = None) -> None:
        system.require_fillable("penalize")
        self.system, self.rhs, self.goal = system, rhs, goal
        self.flops = 0.0
        self._columns = rhs.shape[:-2].numel() * rhs.size(-1)
        self._observed = spread_cells(rhs, system.train_index, system.num_cells)
        self.penalty = penalty if penalty is not None else 10.0 * self._kernel_bound() / goal.reduction
        gaps = torch.zeros(system.num_cells, dtype=torch.float64, device=rhs.device)
        gaps[system.gap_index] = self.penalty
        self._diagonal = (gaps + system.noise).unsqueeze(-1)  # shape: (*batch, M, 1)

    def _kernel_bound(self) -> float:
        """``|K| = prod |K_i|``, bounded by the largest row sums."""
        bound = 1.0
        for factor in self.system.factors():
            bound *= float(factor.abs().sum(-1).max())
        return bound

    def _matmul(self, x: Tensor) -> Tensor:
        return kron_matmul(self.system.factors(x.dtype), x) + self._diagonal.to(x.dtype) * x

    def start(self, guess: Tensor | None) -> Tensor:
        if guess is None:
            return torch.zeros_like(self._observed)
        return spread_cells(guess, self.system.train_index, self.system.num_cells)

    def residual(self, iterate: Tensor) -> Tensor:
        self.flops += self._columns * self.system.rotation_flops
        return self._observed - self._matmul(iterate)

    def original(self, residual: Tensor) -> Tensor:
        """The observed rows of its own residual: all but ``K_XZ a_Z``, which only a larger penalty reduces."""
        return self.goal.measure(select_cells(residual, self.system.train_index))

    def correct(self, residual: Tensor, dtype: torch.dtype, budget: int) -> tuple[Tensor, int]:
        floor = 10 * torch.finfo(dtype).eps
        initial = residual.norm(dim=-2)
        diagonal = self._diagonal.to(dtype)

        def stop(current: Tensor) -> Tensor:
            done = self.original(current) <= 0.5 * self.goal.tolerance
            return (done | (current.norm(dim=-2) <= floor * initial)).all()

        step, iterations, _ = conjugate_gradients(
            self._matmul,
            residual.to(dtype),
            stop=stop,
            max_iterations=budget,
            precondition=lambda r: r / diagonal,
        )
        self.flops += iterations * self._columns * self.system.rotation_flops
        return step.double(), iterations

    def finish(self, iterate: Tensor) -> Tensor:
        return select_cells(iterate, self.system.train_index)
