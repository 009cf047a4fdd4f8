"""Solves with a sum of kernels: one plan after the other, until one converges."""

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gpytorch_gaps import settings
from gpytorch_gaps.operators._solve import KrylovResult, krylov_solve
from gpytorch_gaps.solvers.goal import certified_error
from gpytorch_gaps.solvers.sum_system import SumPlan, SumSystem


def solve_sum(
    system: SumSystem,
    plans: Sequence[SumPlan],
    rhs: Tensor,
    batch_shape: torch.Size,
    training: bool,
    guess: Tensor | None,
    inner: torch.dtype,
    error_in_std: float | None,
) -> tuple[KrylovResult, SumPlan]:
    """The best that the plans come to, each from where the best before it ended, and the plan that found it.

    :param inner: precision of the iterations.
    :param error_in_std: what the certified error of a posterior mean must reach; None where rhs are no data.
    """
    best, chosen, tried, iterations = None, plans[0], "", 0
    for plan in plans:
        if plan.method == "cholesky":
            result = _direct(system, rhs, training, error_in_std)
        else:
            result = _iterative(system, plan, rhs, batch_shape, training, guess, inner, error_in_std)
        iterations += result.iterations
        if best is None or result.excess < best.excess:
            best, chosen = result, replace(plan, reason=f"{tried if result.converged else ''}{plan.reason}")
        if result.converged:
            break
        tried += f"{plan.method} stopped at {float(result.residual.max()):.1e}; "
        if best is result and bool((result.residual < 1.0).all()):
            guess = result.solution
    assert best is not None
    return replace(best, iterations=iterations), chosen


def _iterative(
    system: SumSystem,
    plan: SumPlan,
    rhs: Tensor,
    batch_shape: torch.Size,
    training: bool,
    guess: Tensor | None,
    inner: torch.dtype,
    error_in_std: float | None,
) -> KrylovResult:
    preconditioner = system.preconditioner_of_solves(plan.ranks) if plan.rank else None
    precondition = None if preconditioner is None else preconditioner.solve
    return krylov_solve(
        system.matmul,
        rhs,
        precondition,
        0,
        batch_shape,
        training,
        guess,
        inner,
        noise=system.diagonal,
        error_in_std=error_in_std,
        patience=plan.patience,
        rounding=system.rounding_norms,
    )


def _direct(system: SumSystem, rhs: Tensor, training: bool, error_in_std: float | None) -> KrylovResult:
    started = time.perf_counter()
    wide = rhs.double()
    solution = torch.cholesky_solve(wide, system.cholesky)
    solution = solution + torch.cholesky_solve(wide - system.matmul(solution), system.cholesky)
    norm = wide.norm(dim=-2)
    unit = torch.where(norm > 0, norm, torch.ones_like(norm))
    left = wide - system.matmul(solution)
    bound = certified_error(system, left, solution)
    tolerance, seconds = settings.tolerance_in_force(training), time.perf_counter() - started
    residual, error_in_std = left.norm(dim=-2) / unit, error_in_std if system.least_noise > 0 else None
    return KrylovResult(solution.to(rhs.dtype), None, residual, 0, seconds, tolerance, bound, error_in_std)
