"""``y' A^-1 y`` and ``log|A|`` from where the last training step ended: see `solvers.warm_start`."""

from typing import Any

import linear_operator
import torch
from torch import Tensor

from gpytorch_gaps import settings
from gpytorch_gaps.distributed.columns import Share, sum_over_ranks
from gpytorch_gaps.operators.warm_likelihood import WarmLikelihood
from gpytorch_gaps.reports import LogdetReport, one_report, report_logdet
from gpytorch_gaps.solvers.planning.plans import expecting
from gpytorch_gaps.solvers.warm_start import Trail, WarmStart, unbiased_tolerances


def warm_inv_quad_logdet(operator: Any, memory: WarmStart, rhs: Tensor, path: tuple[str, str]) -> tuple[Tensor, Tensor]:
    """With the probes of the last step, by the current method. shape: (N, C) -> (C,) and ()"""
    share, everything = Share(settings.group.value(), memory.num_probes), rhs
    rhs = rhs if share.has_data else rhs[:, :0]
    with torch.no_grad():
        probes = memory.probes(operator.size(-1), rhs)[:, share.probes]
        cells, aims = operator._system().cells, _tolerances(operator, memory, everything)
        with one_report(), expecting(everything.size(-1) + memory.num_probes):
            solutions = _solutions(operator, memory, rhs, probes, share, aims)
        solution, probe_solutions = solutions.split([rhs.size(-1), probes.size(-1)], -1)
        products = [operator.wide_matmul(x.double()).mT for x in (*_columns_of(solution), *_columns_of(probes))]
        image, probe_images = _side_by_side(products, rhs).split([rhs.size(-1), probes.size(-1)], -1)
        trail = memory.follow(cells, solutions, probe_images, share)
        reason = f"followed over steps, {path[1] or 'data'} side"
        if trail is None:
            with linear_operator.settings.num_trace_samples(memory.num_probes), memory.aiming(aims[1]):
                value, report = operator._own_logdet(path)
            error = torch.zeros_like(value) if report.standard_error is None else report.standard_error
            trail = Trail(cells, solutions, probe_images, value, error, torch.zeros_like(probes[0]))
            reason = f"begun, {report.reason}"
        memory.keep(trail)
        now = trail.of_all(share)
    report_logdet(LogdetReport("stochastic", now.value, now.standard_error, memory.num_probes, 0, reason))
    quad, value = WarmLikelihood.apply(
        operator.representation_tree(),
        rhs,
        solution,
        image,
        probes,
        probe_solutions,
        now.value.to(rhs.dtype),
        *operator.representation(),
    )
    quad = sum_over_ranks(share.ranks, quad if share.has_data else operator._no_quad(everything))
    return quad, sum_over_ranks(share.ranks, share.weight * value)


def _tolerances(operator: Any, memory: WarmStart, rhs: Tensor) -> tuple[float, float]:
    """For the data and for probes, once hyperparameters have settled; no tighter than a cold start would ask."""
    if memory.tolerance is not None:
        return memory.tolerance, memory.tolerance
    floor = settings.train_tolerance.value()
    data, probes = unbiased_tolerances(rhs, operator._diag_tensor._diagonal())
    return max(floor, data), max(floor, probes)


def _solutions(
    operator: Any, memory: WarmStart, rhs: Tensor, probes: Tensor, share: Share, aims: tuple[float, float]
) -> Tensor:
    """For right-hand sides, then probes; from the last step's. shape: (N, C + k), columns whole in memory

    :param aims: tolerances for each of the two, once hyperparameters have settled.
    """
    system, first = operator._system(), rhs.size(-1)
    known = memory.guess(system.cells, rhs, share.count)
    guesses: list[Any] = [None] * (first + probes.size(-1)) if known is None else _columns_of(known)
    groups = ((_columns_of(rhs.detach()), guesses[:first]), (_columns_of(probes), guesses[first:]))
    starts = [_relative_residual(operator, *group) for group in groups]
    starts[1] = share.last(starts[1])
    key, found = (settings.gap_method.value(), settings.preconditioner_rank.value()), []
    with memory.lending(system, key):
        for group, aim, start in zip(groups, aims, starts, strict=True):
            with memory.aiming(aim, start):
                # one at a time: each stops where it is done, and a large grid's products are faster
                for column, guess in zip(*group, strict=True):
                    found.append(operator._solve(column, training=True, guess=guess).mT)
    return _side_by_side(found, rhs)


def _relative_residual(operator: Any, columns: list[Tensor], guesses: list[Any]) -> float:
    """Relative residual of the last column; 1 without a guess. shape: C of (N, 1)"""
    if not columns or guesses[-1] is None:
        return 1.0
    wide = columns[-1].double()
    error = (wide - operator.wide_matmul(guesses[-1].double())).norm()
    return float(error / wide.norm().clamp_min(torch.finfo(wide.dtype).tiny))


def _columns_of(x: Tensor) -> list[Tensor]:
    """shape: (N, C) -> C of (N, 1)"""
    return list(x.split(1, -1)) if x.size(-1) else []


def _side_by_side(rows: list[Tensor], like: Tensor) -> Tensor:
    """Columns that are whole in memory. shape: C of (1, N) -> (N, C)"""
    return torch.cat(rows).to(like.dtype).mT if rows else like.new_zeros(like.size(-2), 0)
