"""Solves a :class:`GapSystem` by a named method or the cheapest, and reports what the original system says of it."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpytorch_gaps.reports import SolveReport, report_solve
from gpytorch_gaps.solvers.formulations.fill import Fill
from gpytorch_gaps.solvers.formulations.ignore import Ignore
from gpytorch_gaps.solvers.formulations.penalize import Penalize
from gpytorch_gaps.solvers.formulations.spectral import Spectral
from gpytorch_gaps.solvers.goal import Goal, certified_error
from gpytorch_gaps.solvers.planning.plans import (
    Plan,
    best_rank,
    choose_plans,
    planned_columns,
    quicker,
    rank_plans,
    still_needed,
)
from gpytorch_gaps.solvers.refine import Formulation, refine
from gpytorch_gaps.solvers.system import GapSystem
from gpytorch_gaps.utils.precision import full_float32
from gpytorch_gaps.utils.threads import Work, sized

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


def _work(system: GapSystem, rhs: Tensor, **_: object) -> Work:
    return rhs.shape[:-2].numel() * rhs.size(-1) * system.product_flops, rhs.numel()


@full_float32()
@sized(_work)
def solve_system(
    system: GapSystem,
    rhs: Tensor,
    *,
    method: str = "auto",
    rank: int | None = None,
    tolerance: float = 1e-6,
    error_in_std: float | None = None,
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
    :param error_in_std: also hold the certified error of the posterior mean of data `rhs` to that, in posterior
        standard deviations (:mod:`gpytorch_gaps.solvers.goal`). It is reported in any case.
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
    if error_in_std is not None and not bool((system.noise > 0).all()):
        error_in_std = None  # without noise there is no certificate
    goal = Goal.of(system, wide, tolerance, None if error_in_std is None else error_in_std / scale)
    columns = rhs.shape[:-2].numel() * rhs.size(-1)
    inner = torch.float32 if mixed or system.dtype == torch.float32 else torch.float64
    given = _checked_guess(system, wide, None if guess is None else guess.double() / scale * roots, goal)
    # plans are made for reductions of the right-hand side: that of the goal, and that of the guess
    start = 1.0 if given is None else min(1.0, given.error * goal.reduction / tolerance)
    asked = planned_columns(columns), goal.reduction, max_iterations
    if given is not None and given.error <= tolerance:
        plan, found, tried = Plan("ignore" if method == "auto" else method, reason="the guess is a solution"), given, ""
    else:
        if method == "auto":
            plans = choose_plans(system, *asked, max_cholesky, start)
        else:
            plans = iter([_named_plan(system, method, rank, *asked, start)])

        def solve(plan: Plan, start: Tensor | None) -> _Found:
            return _solve_by(plan, system, wide, start, inner, goal, plan.budget or max_iterations, penalty)

        plan, found, tried = _best_of(plans, solve, given, goal)
    bound = certified_error(system, found.residual * scale, found.solution * scale)
    converged = found.error <= tolerance and (error_in_std is None or bound <= error_in_std)
    report = SolveReport(
        method=plan.method,
        iterations=found.iterations,
        residual=goal.relative(found.residual),
        seconds=time.perf_counter() - started,
        rank=plan.rank,
        num_rhs=columns,
        converged=converged,
        tolerance=tolerance,
        refinements=found.passes,
        flops=found.flops,
        expected_seconds=plan.seconds * columns / max(1, planned_columns(columns)),
        reason=f"{tried if converged else ''}{plan.reason}{'' if start == 1.0 else f', from {start:.1e}'}",
        error_in_std=bound,
        std_tolerance=error_in_std,
    )
    report_solve(report, ADVICE[report.method])
    return (found.solution * scale / roots).to(dtype), report


@dataclass
class _Found:
    """A solution, the residual it leaves in the original system, and what it took."""

    solution: Tensor  # shape: (*batch, N, C)
    residual: Tensor  # shape: (*batch, N, C)
    error: float  # of the worst column, as the goal measures it
    iterations: int = 0
    passes: int = 0
    flops: float = 0.0


def _best_of(
    plans: Iterator[Plan], solve: Callable[[Plan, Tensor | None], _Found], given: _Found | None, goal: Goal
) -> tuple[Plan, _Found, str]:
    """Plans in turn until one meets the goal, each from what the one before came to; and those that did not, in words.

    What all of them took is added up.
    """
    guess, tried = None if given is None else given.solution, ""
    best: tuple[Plan, _Found] | None = None
    iterations, passes, flops = 0, 0, 0.0
    for plan in plans:
        found = solve(plan, guess)
        iterations, passes, flops = iterations + found.iterations, passes + found.passes, flops + found.flops
        if best is None or found.error < best[1].error:
            best = plan, found
        if found.error <= goal.tolerance:
            break
        reached = goal.relative(found.residual)
        tried += f"{plan.method} stopped at {float(reached.max()):.1e}; "
        # an iterate worse than nothing is no start for the next
        guess = found.solution if bool((reached < 1.0).all()) else None
    assert best is not None
    plan, found = best
    return plan, replace(found, iterations=iterations, passes=passes, flops=flops), tried


def _solve_by(
    plan: Plan,
    system: GapSystem,
    rhs: Tensor,
    guess: Tensor | None,
    dtype: torch.dtype,
    goal: Goal,
    budget: int,
    penalty: float | None,
) -> _Found:
    """One plan, on the system and then on what is left of it.

    A formulation whose residual the original one amplifies ends where rounding of its own is amplified: at some
    ``1e-16 |K| / s2``. Solving for the residual of the original system, and adding, starts again from there.
    """
    columns = rhs.shape[:-2].numel() * rhs.size(-1)
    form = _formulation(plan, system, rhs, goal, penalty)
    outcome = refine(form, guess, dtype, budget)
    same = isinstance(form, Ignore) or not columns  # its own residual is the original one
    left = outcome.residual if same else rhs - system.matmul(outcome.solution)
    flops = form.flops + (0.0 if same else columns * system.product_flops)
    found = _Found(outcome.solution, left, goal.worst(left), outcome.iterations, outcome.passes, flops)
    # the penalty of sec:PG bounds its accuracy, and is not to be worked around
    for _ in range(0 if same or isinstance(form, Penalize) else _MAX_RESTARTS):
        far = not float(goal.relative(found.residual).max()) < _WORTH_RESTART
        if found.error <= goal.tolerance or far or found.iterations >= budget:
            break
        size = system.residual_unit(found.residual)
        # what is left need not be solved for as well as the whole
        form = _formulation(
            plan, system, found.residual / size.unsqueeze(-2), goal.of_correction(size, found.error), penalty
        )
        outcome = refine(form, None, dtype, budget - found.iterations)
        candidate = found.solution + outcome.solution * size.unsqueeze(-2)
        left = rhs - system.matmul(candidate)
        error, before = goal.worst(left), found.error
        found.iterations, found.passes = found.iterations + outcome.iterations, found.passes + outcome.passes
        found.flops += form.flops + columns * system.product_flops
        if not error < before:
            break
        found.solution, found.residual, found.error = candidate, left, error
        if error > 0.5 * before:
            break
    return found


def _checked_guess(system: GapSystem, rhs: Tensor, guess: Tensor | None, goal: Goal) -> _Found | None:
    """A guess that is better than nothing, with the residual it leaves."""
    if guess is None:
        return None
    left = rhs - system.matmul(guess)
    return _Found(guess, left, goal.worst(left)) if bool((goal.relative(left) < 1.0).all()) else None


def _named_plan(
    system: GapSystem,
    method: str,
    rank: int | None,
    columns: int,
    reduction: float,
    max_iterations: int,
    start: float,
) -> Plan:
    if method == "cholesky":
        return Plan("cholesky", direct="data", budget=max_iterations, reason="asked for")
    if method == "ignore" and rank is None and float(system.noise.min()) > 0:
        cold = best_rank(system, columns, reduction)
        quick = quicker(rank_plans(system, columns, still_needed(reduction, start)), cold) if start < 1.0 else None
        rank = (quick or cold).rank
    if method in ("penalize", "spectral"):
        rank = 0
    if rank and method == "ignore" and not float(system.noise.min()) > 0:
        raise ValueError(f"preconditioner_rank: got {rank} without noise, expected 0: the preconditioner divides by it")
    size = len(system.gap_index) if method == "fill" else system.num_train
    return Plan(method, min(rank or 0, size), budget=max_iterations, reason="asked for")


def _formulation(plan: Plan, system: GapSystem, rhs: Tensor, goal: Goal, penalty: float | None) -> Formulation:
    if plan.method == "penalize":
        return Penalize(system, rhs, goal, penalty)
    if plan.method == "spectral":
        return Spectral(system, rhs, goal)
    if plan.method == "fill" or plan.direct == "gaps":
        return Fill(system, rhs, goal, plan.rank, direct=bool(plan.direct))
    return Ignore(system, rhs, goal, plan.rank, direct=bool(plan.direct), patience=plan.patience)
