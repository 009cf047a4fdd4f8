"""The cost of ignore-gaps with the neighbours preconditioner, estimated by a few iterations.

The cost of the set-up depends only on N and the number k of neighbours. The number of iterations depends on how well
neighbours screen an observation from all others. A trial with the preconditioned matrix estimates it. With twice as
many neighbours, there are about 2.5 times fewer iterations.
"""

import math

import torch
from torch import Tensor

from gpytorch_gaps.preconditioners.neighbours import neighbour_flops
from gpytorch_gaps.solvers.config import SolveConfig
from gpytorch_gaps.solvers.planning.costs import (
    CALLS_PER_ITERATION,
    NUMBERS_MOVED_PER_CELL_THIN,
    Plan,
    about_sum,
    expected_iterations,
    system_rates,
)
from gpytorch_gaps.solvers.planning.trial import expected_condition, lanczos_trial
from gpytorch_gaps.solvers.preconditioning import Neighbours, preconditioner, remember_count, remembered_count
from gpytorch_gaps.solvers.system import NoisySystem

_COUNTS = (20, 40)
_COUNTS_OF_A_SERIES = (8, 20, 40)  # along one axis, a few neighbours on either side screen an observation from the rest
_FEWEST_ITERATIONS = 12.0  # assumed iterations of a solve with few neighbours, before a trial
_MANY_ITERATIONS = 250.0  # an estimate that is likely to be too low: more neighbours are the safer choice
_SAVED_BY_DOUBLING = 2.5  # ratio of iterations with k and 2 k neighbours
_SMALL_CHOLESKY_SLOWDOWN = 36.0  # relative to a matrix product with as many FLOPs
_BYTES_PER_ENTRY = 300.0  # moved to look up one entry of one factor
_BYTES_PER_NEIGHBOUR = 20000.0  # moved to find one neighbour
_GRADIENT_WORK = 8.0  # work of a gradient, relative to the look-up of all entries
_SETUP_CALLS = 4000.0  # number of torch calls


def neighbour_plan(
    system: NoisySystem,
    num_rhs: int,
    reduction: float,
    config: SolveConfig,
    ceiling: float = math.inf,
    gradients: bool = False,
) -> Plan | None:
    """Ignore-gaps with the neighbours preconditioner, which is set up and tried; None if it cannot be faster.

    :param ceiling: time of the best alternative, in seconds.
    :param gradients: whether ``log|P|`` is differentiated, which takes longer than its set-up.
    """
    if "neighbours" not in config.preconditioners or not (system.terms and system.on_cells) or system.num_train < 2:
        return None
    known = config.num_neighbours or (remembered_count(system) if gradients else None) or None
    counts = _COUNTS_OF_A_SERIES if all(len(term.axes) == 1 for term in system.terms) else _COUNTS
    wanted = counts if known is None else (known,)
    first, *others = sorted({min(count, system.num_train - 1) for count in wanted})
    paid = system.is_cached(("preconditioner", Neighbours(first)))
    setup = 0.0 if paid else setup_seconds(system, first, gradients)
    if setup + _solve_seconds(system, first, num_rhs, _FEWEST_ITERATIONS) >= ceiling:
        return None
    best = _measured_plan(system, first, num_rhs, reduction, setup)
    for count in others:
        more = setup_seconds(system, count, gradients) + _solve_seconds(
            system, count, num_rhs, best.iterations / _SAVED_BY_DOUBLING
        )
        if more < _solve_seconds(system, first, num_rhs, best.iterations) or best.iterations > _MANY_ITERATIONS:
            better = _measured_plan(system, count, num_rhs, reduction, setup_seconds(system, count, gradients))
            best = min(best, better, key=lambda own: own.iterations)
    if gradients and config.num_neighbours is None:  # the next training step need not compare
        remember_count(system, best.num_neighbours)
    return best


def _measured_plan(system: NoisySystem, count: int, num_rhs: int, reduction: float, setup: float) -> Plan:
    """A plan with the iterations that a trial predicts.

    :param setup: seconds of the set-up that count.
    """
    setup_flops, flops = neighbour_flops(system.num_train, count)
    condition = expected_condition(neighbour_trial(system, count))
    iterations = expected_iterations(condition, reduction)
    return Plan(
        "ignore",
        preconditioner=Neighbours(count),
        iterations=iterations,
        flops=setup_flops + iterations * num_rhs * (system.product_flops + flops),
        seconds=setup + _solve_seconds(system, count, num_rhs, iterations),
        reason=f"{about_sum(system)}{count} neighbours leave a condition number of about {condition:.2g}",
    )


def setup_seconds(system: NoisySystem, count: int, gradients: bool = False) -> float:
    """Expected seconds to find the neighbours, factorise their covariances, and differentiate these."""
    rows = system.num_train
    flops, _ = neighbour_flops(rows, count)
    entries = 0.5 * rows * (count + 1) ** 2 * sum(len(term.axes) for term in system.terms)
    moved = (1.0 + _GRADIENT_WORK * gradients) * _BYTES_PER_ENTRY * entries + _BYTES_PER_NEIGHBOUR * rows * count
    return system_rates(system).seconds(_SMALL_CHOLESKY_SLOWDOWN * flops, moved, _SETUP_CALLS)


def _solve_seconds(system: NoisySystem, count: int, num_rhs: int, iterations: float) -> float:
    _, flops = neighbour_flops(system.num_train, count)
    columns, cells = iterations * num_rhs, max(system.num_cells, system.num_train)
    # a product with the sparse factor moves an entry and its place
    moved = columns * (8.0 * NUMBERS_MOVED_PER_CELL_THIN * cells + 8.0 * flops)
    return system_rates(system).seconds(columns * system.product_flops, moved, 2.0 * iterations * CALLS_PER_ITERATION)


def neighbour_trial(system: NoisySystem, count: int) -> Tensor:
    """A few Lanczos steps with the preconditioned matrix, made once. shape: (*batch, 1, k, k)"""

    def make() -> Tensor:
        batch = torch.broadcast_shapes(system.noise.shape[:-1], system.kernel_trace.shape)
        made = preconditioner(system, Neighbours(count))
        return lanczos_trial(system.matmul, system.num_train, batch, system.noise, made.solve)

    return system.cached(("neighbour trial", count), make)
