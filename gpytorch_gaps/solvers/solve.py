"""Solves a :class:`GapSystem` by a named method or the cheapest, and reports the residual of the original system."""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from gpytorch_gaps.precision import full_float32
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

_MAX_RESTARTS = 3
_WORTH_RESTART = 0.1  # a residual from which solving once more should get further

ADVICE = {
    "fill": "more max_iterations, or gap_method('ignore') with a preconditioner_rank above the number of eigenvalues "
    "larger than the noise",
    "ignore": "a larger preconditioner_rank, gap_method('fill'), more max_iterations, or more noise",
    "spectral": "more max_iterations, or gap_method('ignore') with a preconditioner_rank above the number of "
    "eigenvalues larger than the noise; a noise far below float64's rounding of the kernel cannot be reached",
    "penalize": "another method: penalized systems are badly conditioned",
    "cholesky": "float64 factors, or more noise: the system is singular to working precision",
}


@full_float32()
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
    mixed: bool = False,
) -> tuple[Tensor, SolveReport]:
    """``a`` with ``(W K W' + D) a = rhs``, to a relative residual of `tolerance` in every column.

    float32 systems are iterated in float32 and refined in float64, with `mixed` float64 ones too; where float32 cannot
    contract, in float64 altogether.

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
    inner = torch.float32 if mixed or system.dtype == torch.float32 else torch.float64
    if method == "auto":
        plans = choose_plans(system, planned_columns(columns), tolerance, max_iterations, max_cholesky, start)
    else:
        plans = iter([_named_plan(system, method, rank, planned_columns(columns), tolerance, max_iterations, start)])
    iterations, passes, flops, tried = 0, 0, 0.0, ""
    best: tuple[Plan, Tensor, Tensor] | None = None
    for plan in plans:
        found = _solve_by(plan, system, wide, guess, inner, tolerance, plan.budget or max_iterations, penalty)
        iterations, passes, flops = iterations + found.iterations, passes + found.passes, flops + found.flops
        if best is None or bool(found.residual.max() < best[2].max()):
            best = plan, found.solution, found.residual
        if bool((found.residual <= tolerance).all()):
            break
        tried += f"{plan.method} stopped at {float(found.residual.max()):.1e}; "
        # an iterate worse than nothing is no start for the next
        guess = found.solution if bool((found.residual < 1.0).all()) else None
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


@dataclass
class _Found:
    """What a plan came to; `residual` is the relative one of the original system."""

    solution: Tensor
    residual: Tensor
    iterations: int
    passes: int
    flops: float


def _solve_by(
    plan: Plan,
    system: GapSystem,
    rhs: Tensor,
    guess: Tensor | None,
    dtype: torch.dtype,
    tolerance: float,
    budget: int,
    penalty: float | None,
) -> _Found:
    """One plan, on the system and then on what is left of it.

    A formulation whose residual the original one amplifies ends where rounding of its own is amplified: at some
    ``1e-16 |K| / s2``. Solving for the residual of the original system, and adding, starts again from there.
    """
    columns = rhs.shape[:-2].numel() * rhs.size(-1)
    form = _formulation(plan, system, rhs, tolerance, penalty)
    outcome = refine(form, guess, dtype, tolerance, budget)
    found = _Found(outcome.solution, outcome.residual, outcome.iterations, outcome.passes, form.flops)
    if isinstance(form, Ignore) or not columns:  # its own residual is the original one
        return found
    unit = system.residual_unit(rhs)
    left = rhs - system.matmul(found.solution)
    found.residual = system.column_norms(left) / unit
    found.flops += columns * system.product_flops
    # the penalty of sec:PG bounds its accuracy, and is not to be worked around
    for _ in range(0 if isinstance(form, Penalize) else _MAX_RESTARTS):
        worst = float(found.residual.max())
        if worst <= tolerance or not worst < _WORTH_RESTART or found.iterations >= budget:
            break
        size = system.residual_unit(left)
        asked = 0.5 * tolerance / worst  # what is left need not be solved for as well as the whole
        form = _formulation(plan, system, left / size.unsqueeze(-2), asked, penalty)
        outcome = refine(form, None, dtype, asked, budget - found.iterations)
        candidate = found.solution + outcome.solution * size.unsqueeze(-2)
        new_left = rhs - system.matmul(candidate)
        residual = system.column_norms(new_left) / unit
        found.iterations, found.passes = found.iterations + outcome.iterations, found.passes + outcome.passes
        found.flops += form.flops + columns * system.product_flops
        if not bool(residual.max() < 0.5 * worst):
            break
        found.solution, left, found.residual = candidate, new_left, residual
    return found


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
    return Ignore(system, rhs, tolerance, plan.rank, direct=bool(plan.direct), patience=plan.patience)
