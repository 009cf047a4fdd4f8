"""Solves a system by a named method or the cheapest, and reports the residual of the original system."""

import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpytorch_gaps.reports import SolveReport, report_solve
from gpytorch_gaps.solvers.config import SolveConfig
from gpytorch_gaps.solvers.formulations.fill import FillGaps
from gpytorch_gaps.solvers.formulations.ignore import IgnoreGaps
from gpytorch_gaps.solvers.formulations.penalize import PenalizeGaps
from gpytorch_gaps.solvers.formulations.spectral import SpectralGaps
from gpytorch_gaps.solvers.gap_system import GapSystem
from gpytorch_gaps.solvers.goal import Goal, certified_error
from gpytorch_gaps.solvers.planning.plans import MANY_ITERATIONS, Plan, Task, plan
from gpytorch_gaps.solvers.preconditioning import has_preconditioner, preconditioner_of_solves
from gpytorch_gaps.solvers.refine import Formulation, Preconditioner, Refined, refine
from gpytorch_gaps.solvers.system import NoisySystem
from gpytorch_gaps.utils.precision import full_float32
from gpytorch_gaps.utils.threads import Work, sized

_TIGHTER_WITHOUT_NOISE = 1e-3  # factor on the tolerance for variances without noise, whose error has no bound
_SURPRISE = 1.5  # if the ratio of iterations to planned iterations is larger, the report mentions it
_ONE_BY_ONE_ROWS = 2**17  # with so many rows, columns are solved for one after the other on a CPU

ADVICE = {
    "fill": "more max_iterations, or gap_method('ignore') with a preconditioner_rank above the number of eigenvalues "
    "larger than the noise",
    "ignore": "a larger preconditioner_rank, gap_method('fill'), more max_iterations, or more noise",
    "spectral": "more max_iterations, or gap_method('ignore') with a preconditioner_rank above the number of "
    "eigenvalues larger than the noise; a noise far below float64's rounding of the kernel cannot be reached",
    "penalize": "another method: penalized systems are badly conditioned",
    "cholesky": "float64 factors, or more noise: the system is singular to working precision",
}
_ADVICE_FOR_SUMS = {
    "ignore": "a larger preconditioner_rank, gap_method('cholesky'), more max_iterations or noise",
}


@dataclass(frozen=True)
class Solved:
    """A solution, its residual, and a report.

    :param solution: the solution in the precision of the right-hand sides. shape: (*batch, N, C)
    :param residual: ``rhs - A a`` in float64. shape: (*batch, N, C)
    :param lanczos: tridiagonal matrices, if requested. shape: (*batch, C, k, k)
    """

    solution: Tensor
    residual: Tensor
    report: SolveReport
    lanczos: Tensor | None = None


def _work(system: NoisySystem, rhs: Tensor, *_: object, **__: object) -> Work:
    return rhs.shape[:-2].numel() * rhs.size(-1) * system.product_flops, rhs.numel()


@full_float32()
@sized(_work)
def solve_system(
    system: NoisySystem,
    rhs: Tensor,
    config: SolveConfig | None = None,
    *,
    guess: Tensor | None = None,
    of_data: bool = False,
    prior: Tensor | None = None,
) -> Solved:
    """``a`` with ``A a = rhs``, to a relative residual of ``config.tolerance`` in every column.

    float32 systems, and float64 systems with ``config.mixed_precision``, are iterated in float32 and refined in
    float64. If float32 cannot reduce the residual, they are iterated in float64.

    :param rhs: shape (*batch, N, C).
    :param guess: initial guess of ``a``. shape (*batch, N, C).
    :param of_data: whether rhs are data. The certified error of their posterior mean must then reach
        ``config.mean_tolerance``, too. It is reported in any case.
    :param prior: prior variances of points whose covariances with the data are rhs. Their posterior variances must then
        reach ``config.tolerance``, instead of the residual. shape (*batch, C).
    """
    started, config = time.perf_counter(), config or SolveConfig()
    _refuse_infinite(rhs)
    # whitened if the noise is a product, and scaled to size one, so that no norm under- or overflows
    scale = _sizes(rhs)
    roots = 1.0 if system.row_scale is None else system.row_scale
    wide = rhs.double() / scale / roots
    certifies = system.least_noise > 0  # without noise, there is no bound from residuals in units of the noise
    mean_tolerance = config.mean_tolerance if of_data and certifies else None
    goal = Goal.of(
        system,
        wide,
        config.tolerance if certifies or prior is None else _TIGHTER_WITHOUT_NOISE * config.tolerance,
        None if mean_tolerance is None else mean_tolerance / scale,
        prior.double() / scale.squeeze(-2).square() if prior is not None and certifies else None,
    )
    given = _checked_guess(system, wide, None if guess is None else guess.double() / scale * roots, goal)
    found, chosen, start = _solve_by_plans(system, wide, goal, given, config)
    report = _report(system, wide, found, config, started, scale)
    columns, reached = report.num_rhs, found.converged or (not certifies and report.worst_residual <= config.tolerance)
    report = replace(
        report,
        method=chosen.method,
        rank=chosen.rank,
        num_neighbours=chosen.num_neighbours,
        converged=reached and (mean_tolerance is None or report.error_in_std <= mean_tolerance),
        expected_seconds=chosen.seconds * columns / max(1, config.planned_columns(columns)),
        reason=f"{chosen.reason}{'' if start == 1.0 else f', from {start:.1e}'}{_surprise(chosen, report.iterations)}",
        std_tolerance=mean_tolerance,
    )
    report_solve(report, advice_for(system, chosen.method))
    return Solved((found.solution * scale / roots).to(rhs.dtype), found.residual * scale * roots, report)


def _report(
    system: NoisySystem, rhs: Tensor, found: Refined, config: SolveConfig, started: float, scale: Tensor | float = 1.0
) -> SolveReport:
    """The report of a solution by ignore-gaps.

    :param scale: the divisor of `rhs`.
    """
    return SolveReport(
        method="ignore",
        iterations=found.iterations,
        residual=system.column_norms(found.residual) / system.residual_unit(rhs),
        seconds=time.perf_counter() - started,
        rank=0,
        num_rhs=rhs.shape[:-2].numel() * rhs.size(-1),
        converged=found.converged,
        tolerance=config.tolerance,
        refinements=found.passes,
        flops=found.flops,
        error_in_std=certified_error(system, found.residual * scale, found.solution * scale),
    )


def _surprise(chosen: Plan, iterations: int) -> str:
    """The remark of a report on many more iterations than were planned."""
    more = MANY_ITERATIONS < iterations > _SURPRISE * chosen.iterations > 0
    return f"; {chosen.iterations:.0f} iterations were expected" if more else ""


def advice_for(system: NoisySystem, method: str) -> str:
    """Advice for a method that did not converge."""
    return ADVICE[method] if isinstance(system, GapSystem) else (ADVICE | _ADVICE_FOR_SUMS)[method]


def _sizes(rhs: Tensor) -> Tensor:
    """The largest entry of every column, or one, as a divisor that avoids under- and overflow. shape: (*batch, 1, C)"""
    largest = rhs.double().abs().amax(-2, keepdim=True)
    return torch.where(largest > 0, largest, torch.ones_like(largest))


def _refuse_infinite(rhs: Tensor) -> None:
    if not bool(torch.isfinite(rhs).all()):
        raise ValueError(
            "rhs: got NaN or infinite entries, expected finite numbers; NaN among the training targets are gaps, which "
            "from_array and from_points leave out"
        )


def _checked_guess(system: NoisySystem, rhs: Tensor, guess: Tensor | None, goal: Goal) -> Refined | None:
    """An initial guess, if it is better than zero, with its residual."""
    if guess is None:
        return None
    left = rhs - system.matmul(guess)
    better = bool((system.column_norms(left) < system.residual_unit(rhs)).all())
    return Refined(guess, left, goal, goal.worst(left)) if better else None


def _solve_by_plans(
    system: NoisySystem, rhs: Tensor, goal: Goal, given: Refined | None, config: SolveConfig
) -> tuple[Refined, Plan, float]:
    """Tries plans in turn until one meets the goal. Each starts from the solution of the one before.

    :return: the best solution, with the iterations of all plans; its plan, with the failed plans in its reason; and
        the relative residual of the first guess.
    """
    # plans depend on two reductions of the right-hand side: by the goal, and by the guess
    start = 1.0 if given is None else min(1.0, given.error * goal.reduction / goal.tolerance)
    if given is not None and given.converged and goal.prior is None:
        method = "ignore" if config.method == "auto" else config.method
        return given, Plan(method, reason="the guess is a solution"), start
    columns = config.planned_columns(rhs.shape[:-2].numel() * rhs.size(-1))
    guess, tried = None if given is None else given.solution, ""
    best: tuple[Refined, Plan] | None = None
    iterations, passes, flops = 0, 0, 0.0
    for chosen in plan(system, Task(columns, goal.reduction, start), config):
        budget = min(chosen.budget or config.max_iterations, config.max_iterations)
        form = formulation(chosen, system, rhs, goal, config.penalty)
        found = refine(form, guess, config.iteration_dtype(system.dtype), budget)
        iterations, passes, flops = iterations + found.iterations, passes + found.passes, flops + found.flops
        if best is None or found.error < best[0].error:
            best = found, replace(chosen, reason=f"{tried if found.converged else ''}{chosen.reason}")
        if found.converged:
            break
        reached = system.column_norms(found.residual) / system.residual_unit(rhs)
        tried += f"{chosen.method} stopped at {float(reached.max()):.1e}; "
        # the next plan does not start from an iterate that is worse than zero
        guess = found.solution if bool((reached < 1.0).all()) else None
    assert best is not None
    return replace(best[0], iterations=iterations, passes=passes, flops=flops), best[1], start


def formulation(chosen: Plan, system: NoisySystem, rhs: Tensor, goal: Goal, penalty: float | None) -> Formulation:
    """The formulation of a plan."""
    if isinstance(system, GapSystem):
        if chosen.method == "penalize":
            return PenalizeGaps(system, rhs, goal, penalty=penalty)
        if chosen.method == "spectral":
            return SpectralGaps(system, rhs, goal)
        if chosen.method == "fill" or chosen.direct == "gaps":
            return FillGaps(system, rhs, goal, rank=chosen.rank, direct=bool(chosen.direct))
    if chosen.preconditioner is None:
        return IgnoreGaps(system, rhs, goal, direct=bool(chosen.direct), patience=chosen.patience)
    is_new = not has_preconditioner(system, chosen.preconditioner)
    preconditioner = preconditioner_of_solves(system, chosen.preconditioner)
    form = IgnoreGaps(system, rhs, goal, preconditioner=preconditioner, patience=chosen.patience)
    form.flops += preconditioner.setup_flops if is_new else 0.0
    return form


# -- solves with Lanczos matrices ------------------------------------------------------------------------------------


@full_float32()
@sized(_work)
def solve_with_lanczos(
    system: NoisySystem, rhs: Tensor, preconditioner: Preconditioner | None, config: SolveConfig, lanczos: bool = True
) -> Solved:
    """Solutions and Lanczos matrices at once, by conjugate gradients on the system itself.

    On a CPU, the columns of a large grid are faster one after the other, and each stops when it has converged.

    :param lanczos: False for solutions alone.
    """
    if rhs.dim() == 2 and rhs.size(-1) > 1 and rhs.device.type == "cpu" and rhs.size(-2) >= _ONE_BY_ONE_ROWS:
        columns = rhs.split(1, -1)
        return _together([_lanczos_once(system, column, preconditioner, config, lanczos) for column in columns])
    return _lanczos_once(system, rhs, preconditioner, config, lanczos)


def _lanczos_once(
    system: NoisySystem, rhs: Tensor, preconditioner: Preconditioner | None, config: SolveConfig, lanczos: bool
) -> Solved:
    started, scale = time.perf_counter(), _sizes(rhs)
    wide = rhs.double() / scale
    form = IgnoreGaps(system, wide, Goal.of(system, wide, config.tolerance), preconditioner=preconditioner)
    form.keeps_lanczos = lanczos
    found = refine(form, None, config.iteration_dtype(torch.float64), config.max_iterations)
    report = _report(system, wide, found, config, started, scale)
    if preconditioner is not None:
        count = getattr(preconditioner, "num_neighbours", 0)
        report = replace(report, rank=preconditioner.rank, num_neighbours=count)
    return Solved((found.solution * scale).to(rhs.dtype), found.residual * scale, report, form.lanczos)


def _together(parts: list[Solved]) -> Solved:
    """Concatenates columns that were solved for one after the other."""
    reports = [part.report for part in parts]
    matrices = [part.lanczos for part in parts if part.lanczos is not None]
    longest = max((matrix.size(-1) for matrix in matrices), default=0)
    report = replace(
        reports[0],
        iterations=max(report.iterations for report in reports),
        residual=torch.cat([report.residual for report in reports], -1),
        seconds=sum(report.seconds for report in reports),
        num_rhs=sum(report.num_rhs for report in reports),
        converged=all(report.converged for report in reports),
        flops=sum(report.flops for report in reports),
        error_in_std=max(report.error_in_std for report in reports),
    )
    return Solved(
        torch.cat([part.solution.mT for part in parts]).mT,  # each column is contiguous in memory
        torch.cat([part.residual.mT for part in parts]).mT,
        report,
        torch.cat([padded(matrix, longest) for matrix in matrices]) if matrices else None,
    )


def padded(tridiagonal: Tensor, size: int) -> Tensor:
    """Lanczos matrices, padded with a decoupled identity. shape: (..., k, k) -> (..., size, size)"""
    short = tridiagonal.size(-1)
    result = torch.eye(size, dtype=tridiagonal.dtype, device=tridiagonal.device)
    result = result.expand(*tridiagonal.shape[:-2], size, size).clone()
    result[..., :short, :short] = tridiagonal
    return result
