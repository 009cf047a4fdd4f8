"""Solves a :class:`GapSystem` by a named method or the cheapest, and reports the residual of the original system."""

import time

import torch
from torch import Tensor

from gpytorch_gaps.reports import SolveReport, report_solve
from gpytorch_gaps.solvers.choose import (
    Plan,
    best_rank,
    choose_plans,
    planned_columns,
    quicker,
    rank_plans,
    still_needed,
)
from gpytorch_gaps.solvers.fill import Fill
from gpytorch_gaps.solvers.ignore import Ignore
from gpytorch_gaps.solvers.penalize import Penalize
from gpytorch_gaps.solvers.refine import Formulation, refine
from gpytorch_gaps.solvers.spectral import Spectral
from gpytorch_gaps.solvers.system import GapSystem

ADVICE = {
    "fill": "more max_iterations, or gap_method('ignore') with a preconditioner_rank above the number of eigenvalues "
    "larger than the noise",
    "ignore": "a larger preconditioner_rank, gap_method('fill'), more max_iterations, or more noise",
    "spectral": "more max_iterations, or gap_method('ignore') with a preconditioner_rank above the number of "
    "eigenvalues larger than the noise; a noise far below float64's rounding of the kernel cannot be reached",
    "penalize": "another method: penalized systems are badly conditioned",
    "cholesky": "float64 factors, or more noise: the system is singular to working precision",
}


def solve_system(
    system: GapSystem,
    rhs: Tensor,
    *,
    method: str = "auto",
    rank: int | None = None,
    tolerance: float = 1e-6,
    max_iterations: int = 2000,
    max_cholesky: float = 800,
    penalty: float | None = None,
    guess: Tensor | None = None,
) -> tuple[Tensor, SolveReport]:
    """``a`` with ``(W K W' + D) a = rhs``, to a relative residual of `tolerance` in every column.

    float32 systems are iterated in float32 and refined in float64; where float32 cannot contract, in float64
    altogether.

    :param rhs: shape (*batch, N, C).
    :param guess: of ``a``, to start from. shape (*batch, N, C).
    :return: the solution, in the precision of rhs, and a report, which also goes to active recorders.
    """
    started = time.perf_counter()
    if not bool(torch.isfinite(rhs).all()):
        raise ValueError(
            "rhs: got NaN or infinite entries, expected finite numbers; NaN among the training targets are gaps, which "
            "from_array and from_points leave out"
        )
    # whitened where the noise is a product, and of size one, so that no norm under- or overflows
    scale = rhs.double().abs().amax(-2, keepdim=True)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    roots = 1.0 if system.row_scale is None else system.row_scale
    dtype, wide = rhs.dtype, rhs.double() / scale / roots
    unit = system.residual_unit(wide)
    columns = rhs.shape[:-2].numel() * rhs.size(-1)
    guess, error = _checked_guess(system, wide, None if guess is None else guess.double() / scale * roots, unit)
    start = 1.0 if error is None else float(error.max())
    if guess is not None and error is not None and start <= tolerance:
        report = SolveReport(
            method="ignore" if method == "auto" else method,
            iterations=0,
            residual=error,
            seconds=time.perf_counter() - started,
            rank=0,
            num_rhs=columns,
            converged=True,
            tolerance=tolerance,
            reason="the guess is a solution",
        )
        report_solve(report, "")
        return (guess * scale / roots).to(dtype), report
    inner = torch.float32 if system.dtype == torch.float32 else torch.float64
    if method == "auto":
        plans = choose_plans(system, planned_columns(columns), tolerance, max_iterations, max_cholesky, start)
    else:
        plans = iter([_named_plan(system, method, rank, planned_columns(columns), tolerance, max_iterations, start)])
    iterations, passes, flops, tried = 0, 0, 0.0, ""
    best: tuple[Plan, Tensor, Tensor] | None = None
    for plan in plans:
        form = _formulation(plan, system, wide, tolerance, penalty)
        outcome = refine(form, guess, inner, tolerance, plan.budget or max_iterations)
        flops += form.flops
        if isinstance(form, Ignore):  # its own residual is the original one
            residual = outcome.residual
        else:
            residual = system.column_norms(wide - system.matmul(outcome.solution)) / unit
            flops += columns * system.product_flops
        iterations, passes = iterations + outcome.iterations, passes + outcome.passes
        if best is None or bool(residual.max() < best[2].max()):
            best = plan, outcome.solution, residual
        if bool((residual <= tolerance).all()):
            break
        tried += f"{plan.method} stopped at {float(residual.max()):.1e}; "
        # an iterate worse than nothing is no start for the next
        guess = outcome.solution if bool((residual < 1.0).all()) else None
    assert best is not None
    plan, best_solution, best_residual = best
    converged = bool((best_residual <= tolerance).all())
    solution = best_solution * scale / roots
    report = SolveReport(
        method=plan.method,
        iterations=iterations,
        residual=best_residual,
        seconds=time.perf_counter() - started,
        rank=plan.rank,
        num_rhs=columns,
        converged=converged,
        tolerance=tolerance,
        refinements=passes,
        flops=flops,
        expected_seconds=plan.seconds * columns / max(1, planned_columns(columns)),
        reason=f"{tried if converged else ''}{plan.reason}{'' if start == 1.0 else f', from {start:.1e}'}",
    )
    report_solve(report, ADVICE[report.method])
    return solution.to(dtype), report


def _checked_guess(
    system: GapSystem, rhs: Tensor, guess: Tensor | None, unit: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """A guess that is better than nothing, and its relative residual per column."""
    if guess is None:
        return None, None
    error = system.column_norms(rhs - system.matmul(guess)) / unit
    return (guess, error) if bool((error < 1.0).all()) else (None, None)


def _named_plan(
    system: GapSystem,
    method: str,
    rank: int | None,
    columns: int,
    tolerance: float,
    max_iterations: int,
    start: float,
) -> Plan:
    if method == "cholesky":
        return Plan("cholesky", direct="data", budget=max_iterations, reason="asked for")
    if method == "ignore" and rank is None and float(system.noise.min()) > 0:
        cold = best_rank(system, columns, tolerance)
        quick = quicker(rank_plans(system, columns, still_needed(tolerance, start)), cold) if start < 1.0 else None
        rank = (quick or cold).rank
    if method in ("penalize", "spectral"):
        rank = 0
    if rank and method == "ignore" and not float(system.noise.min()) > 0:
        raise ValueError(f"preconditioner_rank: got {rank} without noise, expected 0: the preconditioner divides by it")
    size = len(system.gap_index) if method == "fill" else system.num_train
    return Plan(method, min(rank or 0, size), budget=max_iterations, reason="asked for")


def _formulation(plan: Plan, system: GapSystem, rhs: Tensor, tolerance: float, penalty: float | None) -> Formulation:
    if plan.method == "penalize":
        return Penalize(system, rhs, tolerance, penalty)
    if plan.method == "spectral":
        return Spectral(system, rhs, tolerance)
    if plan.method == "fill" or plan.direct == "gaps":
        return Fill(system, rhs, tolerance, plan.rank, direct=bool(plan.direct))
    return Ignore(system, rhs, tolerance, plan.rank, direct=bool(plan.direct))
