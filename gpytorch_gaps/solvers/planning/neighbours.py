"""What ignore-gaps costs with the neighbours preconditioner: nothing but a few iterations can tell.

The set-up depends on N and the number k of neighbours alone. The iterations depend on how far neighbours screen an
observation from all others. Ten Lanczos steps from random signs give a condition number; where it still grew in the
last five of them, it is extrapolated. Twice the neighbours take some 2.5 times fewer iterations.
"""

import math

import torch

from gpytorch_gaps.preconditioners.neighbours import neighbour_flops
from gpytorch_gaps.solvers.config import SolveConfig
from gpytorch_gaps.solvers.krylov import ConjugateGradients
from gpytorch_gaps.solvers.planning.costs import (
    CALLS_PER_ITERATION,
    NUMBERS_MOVED_PER_CELL_THIN,
    Plan,
    about_sum,
    expected_iterations,
    system_rates,
)
from gpytorch_gaps.solvers.preconditioning import Neighbours, preconditioner
from gpytorch_gaps.solvers.system import NoisySystem
from gpytorch_gaps.solvers.warm_start import random_signs

_COUNTS = (20, 40)
_FEWEST_ITERATIONS = 12.0  # that a solve with few neighbours is thought to take before anything is measured
_SAVED_BY_DOUBLING = 2.5  # times fewer iterations with twice the neighbours
_STEPS = 10  # of Lanczos, by which a preconditioner is judged
_SETTLED_GROWTH = 1.4  # of the condition number in the last half of these steps: it will not grow much further
_SMALL_CHOLESKY_SLOWDOWN = 12.0  # over a matrix product of as many FLOPs
_BYTES_PER_ENTRY = 60.0  # moved to look up one entry of one factor
_BYTES_PER_CANDIDATE = 4000.0  # moved to find one neighbour


def neighbour_plan(
    system: NoisySystem, num_rhs: int, reduction: float, config: SolveConfig, ceiling: float = math.inf
) -> Plan | None:
    """Ignore-gaps with the neighbours preconditioner, which is set up and tried; None where that cannot pay.

    :param ceiling: seconds of the best alternative.
    """
    if "neighbours" not in config.preconditioners or not system.terms or system.num_train < 2:
        return None
    counts = _COUNTS if config.num_neighbours is None else (config.num_neighbours,)
    if _seconds(system, counts[0], num_rhs, _FEWEST_ITERATIONS) >= ceiling:
        return None
    best = _measured_plan(system, counts[0], num_rhs, reduction)
    for count in counts[1:]:
        fewer = best.iterations / _SAVED_BY_DOUBLING
        if _seconds(system, count, num_rhs, fewer) < _seconds(system, counts[0], num_rhs, best.iterations):
            best = min(best, _measured_plan(system, count, num_rhs, reduction), key=lambda own: own.seconds)
    return best


def _measured_plan(system: NoisySystem, count: int, num_rhs: int, reduction: float) -> Plan:
    """A plan with the iterations that a few Lanczos steps predict."""
    setup, flops = neighbour_flops(system.num_train, count)
    condition = neighbour_condition(system, count)
    iterations = expected_iterations(condition, reduction)
    return Plan(
        "ignore",
        preconditioner=Neighbours(count),
        iterations=iterations,
        flops=setup + iterations * num_rhs * (system.product_flops + flops),
        seconds=_seconds(system, count, num_rhs, iterations),
        reason=f"{about_sum(system)}{count} neighbours leave a condition number of about {condition:.2g}",
    )


def _seconds(system: NoisySystem, count: int, num_rhs: int, iterations: float) -> float:
    """Of the set-up, if there was none, and so many iterations."""
    rates, rows = system_rates(system), system.num_train
    setup, flops = neighbour_flops(rows, count)
    entries = 0.5 * rows * (count + 1) ** 2 * sum(len(term.shape) for term in system.terms)
    found = system.is_cached(("preconditioner", Neighbours(count)))
    begun = (
        0.0
        if found
        else rates.seconds(
            _SMALL_CHOLESKY_SLOWDOWN * setup, _BYTES_PER_ENTRY * entries + _BYTES_PER_CANDIDATE * rows * count
        )
    )
    columns, cells = iterations * num_rhs, max(system.num_cells, rows)
    # a product with the sparse factor moves an entry and its place
    moved = columns * (8.0 * NUMBERS_MOVED_PER_CELL_THIN * cells + 8.0 * flops)
    return begun + rates.seconds(columns * system.product_flops, moved, 2.0 * iterations * CALLS_PER_ITERATION)


def neighbour_condition(system: NoisySystem, count: int) -> float:
    """The condition number of the preconditioned matrix, estimated once."""
    return system.cached(("neighbour condition", count), lambda: _condition(system, count))


def _condition(system: NoisySystem, count: int) -> float:
    signs = random_signs(0, 1, system.num_train, system.noise).mT
    batch = torch.broadcast_shapes(system.noise.shape[:-1], system.kernel_trace.shape)
    signs = signs.expand(*batch, *signs.shape).clone(memory_format=torch.contiguous_format)
    run = ConjugateGradients(
        system.matmul, signs, precondition=preconditioner(system, Neighbours(count)).solve, keep_lanczos=True
    )
    for _ in range(_STEPS):
        run.step()
    matrices = run.lanczos()
    half = matrices[..., : _STEPS // 2, : _STEPS // 2]
    extremes = torch.stack([_spread(matrices), _spread(half)])
    whole, early = extremes.nan_to_num(math.inf).flatten(1).amax(-1).tolist()  # the worst of a batch, in one read
    return whole * max(1.0, whole / early / _SETTLED_GROWTH) ** 2


def _spread(tridiagonal: torch.Tensor) -> torch.Tensor:
    """Largest over smallest eigenvalue. shape: (..., k, k) -> (...)"""
    values = torch.linalg.eigvalsh(tridiagonal)
    return values[..., -1] / values[..., 0].clamp_min(torch.finfo(values.dtype).tiny)
