"""``y' A^-1 y`` and ``log|A|``, starting from the results of the last training step: see `solvers.warm_start`."""

import torch
from torch import Tensor

from gpytorch_gaps.distributed.columns import Share, sum_over_ranks
from gpytorch_gaps.operators.estimates import (
    Covariance,
    apply_terms,
    log_determinant,
    no_quadratic_form,
    stationary_form,
)
from gpytorch_gaps.reports import LogdetReport, one_report
from gpytorch_gaps.solvers.config import SolveConfig
from gpytorch_gaps.solvers.planning.logdet import LogdetPlan
from gpytorch_gaps.solvers.solve import solve_system
from gpytorch_gaps.solvers.warm_start import LogdetPath, WarmStart, unbiased_tolerances


def warm_terms(
    operator: Covariance, rhs: Tensor, chosen: LogdetPlan, config: SolveConfig
) -> tuple[Tensor, Tensor, LogdetReport]:
    """The terms of a likelihood, with the probes and solutions of the last step. shape: (N, C) -> (C,) and ()"""
    memory, system = config.warm_start, operator.system()
    assert memory is not None
    share = Share(config.communicator, memory.num_probes)
    own = rhs if share.has_data else rhs[:, :0]
    with torch.no_grad():
        probes = memory.probes(operator.size(-1), rhs)[:, share.probes]
        tolerances = _tolerances(operator, memory, rhs, config)
        with one_report():
            solutions, residuals = _solutions(operator, memory, own, probes, share, tolerances, config)
        solution, probe_solutions = solutions.split([own.size(-1), probes.size(-1)], -1)
        images = [system.original_matmul(column.double()).mT for column in _columns_of(probes)]
        probe_images = _side_by_side(images, rhs)
        path = memory.advance(system.train_index, solutions, probe_images, share)
        reason = f"followed over steps, {chosen.side} side"
        if path is None:
            tolerance = min(memory.tolerance_for(tolerances[1]), config.loosest_tolerance)
            fresh = config.replace(num_probes=memory.num_probes, train_tolerance=tolerance)
            value, report = log_determinant(operator, chosen, fresh)
            error = torch.zeros_like(value) if report.standard_error is None else report.standard_error
            changes = torch.zeros_like(probes[0])
            path = LogdetPath(system.train_index, solutions, probe_images, value, error, changes)
            reason = f"begun, {report.reason}"
        memory.keep(path)
        now = path.of_all(share)
    quad = stationary_form(solution, own, residuals[:, : own.size(-1)])
    weights = probe_solutions / max(1, probes.size(-1))
    quad, value = apply_terms(operator, own, solution, quad, weights, probes, now.value)
    report = LogdetReport("stochastic", now.value, now.standard_error, memory.num_probes, 0, reason)
    if share.ranks.size > 1:
        quad = sum_over_ranks(share.ranks, quad if share.has_data else no_quadratic_form(operator, rhs))
        value = sum_over_ranks(share.ranks, share.weight * value)
    return quad, value, report


def _tolerances(operator: Covariance, memory: WarmStart, rhs: Tensor, config: SolveConfig) -> tuple[float, float]:
    """Tolerances for data and probes once hyperparameters have settled: at least the tolerance of a cold start."""
    if memory.tolerance is not None:
        return memory.tolerance, memory.tolerance
    data, probes = unbiased_tolerances(rhs, operator.noise_tensor())
    return max(config.train_tolerance, data), max(config.train_tolerance, probes)


def _solutions(
    operator: Covariance,
    memory: WarmStart,
    rhs: Tensor,
    probes: Tensor,
    share: Share,
    tolerances: tuple[float, float],
    config: SolveConfig,
) -> tuple[Tensor, Tensor]:
    """Solutions and residuals for right-hand sides, then probes. The last step's solutions are starting values.

    :param tolerances: of right-hand sides and of probes, once hyperparameters have settled.
    :return: shape (N, C + k) each.
    """
    system, first = operator.system(), rhs.size(-1)
    known = memory.guess(system.train_index, rhs, share.count)
    guesses: list[Tensor | None] = [None] * (first + probes.size(-1)) if known is None else list(_columns_of(known))
    groups = ((_columns_of(rhs.detach()), guesses[:first]), (_columns_of(probes), guesses[first:]))
    starts = [_relative_residual(operator, *group) for group in groups]
    starts[1] = share.last(starts[1])
    config = config.for_training().replace(expected_columns=1 + memory.num_probes)
    found, left = [], []
    with memory.reuse_preconditioner(system, config.solution_key[:4]):
        for (columns, starting_points), settled, start in zip(groups, tolerances, starts, strict=True):
            own = config.replace(tolerance=min(memory.tolerance_for(settled, start), config.loosest_tolerance))
            # one column at a time: each stops when it has converged, and products on a large grid are faster
            for column, guess in zip(columns, starting_points, strict=True):
                solved = solve_system(system, column, own, guess=guess)
                found.append(solved.solution.mT)
                left.append(solved.residual.mT)
    return _side_by_side(found, rhs), _side_by_side(left, rhs.double())


def _relative_residual(operator: Covariance, columns: list[Tensor], guesses: list[Tensor | None]) -> float:
    """Relative residual of the last guess; 1 without one."""
    if not columns or guesses[-1] is None:
        return 1.0
    wide = columns[-1].double()
    error = (wide - operator.system().original_matmul(guesses[-1].double())).norm()
    return float(error / wide.norm().clamp_min(torch.finfo(wide.dtype).tiny))


def _columns_of(x: Tensor) -> list[Tensor]:
    """shape: (N, C) -> C of (N, 1)"""
    return list(x.split(1, -1)) if x.size(-1) else []


def _side_by_side(rows: list[Tensor], like: Tensor) -> Tensor:
    """A matrix whose columns are contiguous in memory. shape: C of (1, N) -> (N, C)"""
    return torch.cat(rows).to(like.dtype).mT if rows else like.new_zeros(like.size(-2), 0)
