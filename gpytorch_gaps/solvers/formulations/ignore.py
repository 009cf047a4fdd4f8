"""thm:IG, ignore the gaps: ``W (K + s2 I) W' a = y`` by conjugate gradients of size N, preconditioned or not."""

import torch
from torch import Tensor

from gpytorch_gaps.solvers.goal import Goal
from gpytorch_gaps.solvers.krylov import conjugate_gradients
from gpytorch_gaps.solvers.system import GapSystem


class Ignore:
    """The formulation in which the system is its own: any diagonal, any repetition of cells.

    Implements: thm:ignore_gaps; with `rank` > 0 eqn:IG_precon; with `direct` a dense Cholesky decomposition. Cost an
    iteration: one Kronecker product, and two rectangular ones for the preconditioner.

    :param patience: iterations that need not halve the residual; after more, it gives up. 0: never.
    """

    def __init__(
        self,
        system: GapSystem,
        rhs: Tensor,
        goal: Goal,
        rank: int = 0,
        direct: bool = False,
        patience: int = 0,
    ) -> None:
        self.system, self.rhs, self.goal, self._patience = system, rhs, goal, patience
        self.flops = 0.0
        self._columns = rhs.shape[:-2].numel() * rhs.size(-1)
        self._preconditioner = None
        self._cholesky: Tensor | None = None
        self._at_zero = False
        if direct:
            self.flops += 0.0 if system.is_set_up("cholesky") else system.num_train**3 / 3.0
            self._cholesky = system.cholesky()
        elif rank:
            is_new = system.loan is None and not system.is_set_up(("eigen", rank))
            self._preconditioner = system.preconditioner_of_solves(rank)
            self.flops += self._preconditioner.setup_flops if is_new else 0.0

    def start(self, guess: Tensor | None) -> Tensor:
        self._at_zero = guess is None
        return torch.zeros_like(self.rhs) if guess is None else guess

    def residual(self, iterate: Tensor) -> Tensor:
        if self._at_zero:  # of the first iterate, nothing is left of the right-hand side
            self._at_zero = False
            return self.rhs
        self.flops += self._columns * self.system.product_flops
        return self.rhs - self.system.matmul(iterate)

    def original(self, residual: Tensor) -> Tensor:
        return self.goal.measure(residual)

    def correct(self, residual: Tensor, dtype: torch.dtype, budget: int) -> tuple[Tensor, int]:
        if self._cholesky is not None:
            return torch.cholesky_solve(residual, self._cholesky), 0
        if self._preconditioner is not None and self._preconditioner.left_over <= self.goal.reduction:
            # the preconditioner is the matrix to this tolerance; the residual, taken next, will tell
            self.flops += self._columns * self._preconditioner.flops
            return self._preconditioner.solve(residual), 1
        floor = 10 * torch.finfo(dtype).eps
        initial = residual.norm(dim=-2)

        def stop(current: Tensor) -> Tensor:
            done = (
                self.original(current) <= 0.9 * self.goal.tolerance
            )  # the recursive residual drifts from the true one
            return (done | (current.norm(dim=-2) <= floor * initial)).all()

        step, iterations, _ = conjugate_gradients(
            self.system.matmul,
            residual.to(dtype),
            stop=stop,
            max_iterations=budget,
            precondition=None if self._preconditioner is None else self._preconditioner.solve,
            patience=self._patience,
        )
        own = self._preconditioner.flops if self._preconditioner else 0.0
        self.flops += iterations * self._columns * (self.system.product_flops + own)
        return step.double(), iterations

    def finish(self, iterate: Tensor) -> Tensor:
        return iterate
