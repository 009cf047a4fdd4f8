"""Solves in the settings in force, for operators."""

import warnings
from collections.abc import Callable
from typing import Any

import linear_operator
import torch
from torch import Tensor

from gpytorch_gaps import settings
from gpytorch_gaps.logdet.stochastic import log_quadrature
from gpytorch_gaps.reports import NotConvergedWarning
from gpytorch_gaps.solvers.conjugate_gradients import conjugate_gradients
from gpytorch_gaps.solvers.solve import solve_system
from gpytorch_gaps.solvers.system import GapSystem


def solve_in_force(system: GapSystem, rhs: Tensor, method: str | None = None, training: bool = False) -> Tensor:
    """``(W K W' + D)^-1 rhs`` by the method, rank and tolerance in force. shape: (*batch, N, C)"""
    solution, _ = solve_system(
        system,
        rhs,
        method=method or settings.gap_method.value(),
        rank=settings.preconditioner_rank.value(),
        tolerance=settings.tolerance_in_force(training),
        max_iterations=settings.max_iterations.value(),
        max_cholesky=linear_operator.settings.max_cholesky_size.value(),
        penalty=settings.gap_penalty.value(),
    )
    return solution


def krylov_solve(
    matmul: Callable[[Tensor], Tensor],
    rhs: Tensor,
    precondition: Callable[[Tensor], Tensor] | None,
    num_tridiag: int,
    batch_shape: torch.Size,
    training: bool = False,
) -> Any:
    """Plain conjugate gradients on any matrix, checked on the true residual; what upstream expects of ``_solve``.

    :return: the solution; with `num_tridiag` also the Lanczos matrices of the first columns, (num_tridiag, *batch, k,
        k).
    """
    wide = rhs.double().expand(*torch.broadcast_shapes(batch_shape, rhs.shape[:-2]), *rhs.shape[-2:])
    tolerance = settings.tolerance_in_force(training)
    norm = wide.norm(dim=-2)

    def stop(residual: Tensor) -> bool:
        return bool((residual.norm(dim=-2) <= 0.5 * tolerance * norm).all())

    budget = settings.max_iterations.value()
    solution, iterations, tridiagonal = conjugate_gradients(
        matmul, wide, stop=stop, max_iterations=budget, precondition=precondition, lanczos=bool(num_tridiag)
    )
    residual = wide - matmul(solution)
    if bool((residual.norm(dim=-2) > tolerance * norm).any()) and iterations < budget:
        # the recursive residual has drifted from the true one: once more, from where we are
        step, used, _ = conjugate_gradients(
            matmul, residual, stop=stop, max_iterations=budget - iterations, precondition=precondition
        )
        solution, iterations = solution + step, iterations + used
        residual = wide - matmul(solution)
    worst = float((residual.norm(dim=-2) / norm.clamp_min(torch.finfo(norm.dtype).tiny)).max()) if norm.numel() else 0.0
    if not worst <= tolerance:
        warnings.warn(
            f"conjugate gradients stopped after {iterations} iterations with a relative residual of {worst:.1e} where "
            f"{tolerance:.1e} was asked for. Try: a larger preconditioner_rank, or more max_iterations.",
            NotConvergedWarning,
            stacklevel=2,
        )
    if not num_tridiag:
        return solution.to(rhs.dtype)
    assert tridiagonal is not None
    # shape: (*batch, C, k, k) -> (num_tridiag, *batch, k, k)
    matrices = tridiagonal[..., :num_tridiag, :, :].movedim(-3, 0)
    return solution.to(rhs.dtype), matrices.to(rhs.dtype)


def probe_estimates(matrices: Tensor, size: int) -> Tensor:
    """The log-determinant that each probe saw. shape: (probes, *batch, k, k) -> (probes, *batch)"""
    return log_quadrature(matrices, size)
