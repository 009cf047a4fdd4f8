"""Ignore the gaps: ``W (K + s2 I) W' a = y`` by conjugate gradients of size N, preconditioned or not, or directly."""

from typing import Any

import torch
from torch import Tensor

from gpytorch_gaps.autograd.dense import solve_from
from gpytorch_gaps.solvers.goal import Goal
from gpytorch_gaps.solvers.refine import Formulation, Preconditioner
from gpytorch_gaps.solvers.system import NoisySystem


class IgnoreGaps(Formulation):
    """The formulation that iterates on the original system: any kernel, any diagonal, any repetition of cells.

    Implements Evans & Nair (2018), Proposition 3.2 (ignore-gaps), with their low-rank eigen preconditioner; with
    `direct` a dense Cholesky decomposition. Cost of an iteration: one product with the kernel, and two rectangular
    Kronecker products for the preconditioner.
    """

    is_original = error_is_cheap = True

    def __init__(
        self,
        system: NoisySystem,
        rhs: Tensor,
        goal: Goal,
        *,
        preconditioner: Preconditioner | None = None,
        direct: bool = False,
        patience: int = 0,
    ) -> None:
        super().__init__(system, rhs, goal, patience)
        self.restarts = 0 if goal.prior is None else self.restarts  # nothing is amplified, except for variances
        self.matmul_flops = system.product_flops
        self._preconditioner, self.is_direct, self._at_zero = preconditioner, direct, False
        if direct:
            self.flops += 0.0 if system.is_factorised else system.num_train**3 / 3.0

    def start(self, guess: Tensor | None) -> Tensor:
        self._at_zero = guess is None
        return torch.zeros_like(self.rhs) if guess is None else guess

    def residual(self, iterate: Tensor) -> Tensor:
        if self._at_zero:  # the first iterate is zero: its residual is the right-hand side
            self._at_zero = False
            return self.rhs
        self.flops += self.num_columns * self.matmul_flops
        return self.rhs - self.matmul(iterate)

    def original_error(self, residual: Tensor) -> Tensor:
        return self.goal.measure(residual)

    def solution(self, iterate: Tensor) -> Tensor:
        return iterate

    def matmul(self, x: Tensor) -> Tensor:
        return self.system.matmul(x)

    def direct_solution(self, residual: Tensor) -> tuple[Tensor, int] | None:
        if self.is_direct:
            return solve_from(self.system.cholesky(), residual), 0
        if self._preconditioner is None or self._preconditioner.left_over > self.goal.reduction:
            return None
        # the preconditioner equals the matrix to this tolerance; the residual, computed next, confirms it
        self.flops += self.num_columns * self._preconditioner.flops
        solution = self._preconditioner.solve(residual)
        if self.keeps_lanczos and self.lanczos is None:
            self.lanczos = _one_step_lanczos(solution, self.matmul(solution), residual)
        return solution, 1

    def again(self, rhs: Tensor, goal: Goal) -> "IgnoreGaps":
        kept: dict[str, Any] = {
            "preconditioner": self._preconditioner,
            "direct": self.is_direct,
            "patience": self.patience,
        }
        return IgnoreGaps(self.system, rhs, goal, **kept)


def _one_step_lanczos(solution: Tensor, image: Tensor, residual: Tensor) -> Tensor:
    """``x'A x / x'P x`` for ``P x = r``: the Lanczos matrix of a single step. shape: (*batch, C, 1, 1)"""
    curvature, size = (solution * image).sum(-2), (solution * residual).sum(-2)
    empty = size <= 0
    quotient = torch.where(empty, torch.ones_like(curvature), curvature / size.masked_fill(empty, 1.0))
    return quotient[..., None, None]
