"""Which formulation to use: the one that should take the least time on this machine, with the next ones in reserve.

- dense Cholesky where the observations, or the gaps, are few; or where it costs less than the eigen-decompositions
  that all else begins with, as on a series: one axis, and fewer observations than its places;
- ignore-gaps with a rank-p eigen preconditioner: what is left of the spectrum bounds the condition number by some
  ``1 + lambda_{p+1} / (s2 + lambda_M)``, so the iterations of every p, and the best p, are known before anything is
  solved;
- fill-gaps: its conditioning depends on the shape of the gaps, which is not known beforehand. For scattered gaps it
  is that of a random coordinate block of ``I - P``, P a projector of relative rank alpha, the effective dimension of
  the prior, with gappiness beta: ``1 / (1 - e)``, where ``e = (sqrt(alpha (1 - beta)) + sqrt(beta (1 - alpha)))^2``
  is the edge of the Jacobi ensemble. Inside a cloud beta is nearer to one, and what counts is the gappiness as gaps
  see it; clouds may still need hundreds of iterations. So fill-gaps is given no more than the cost of the
  alternative, which then takes over from its iterate: the total is at most twice the better of the two;
- spectral: the same in a truncated basis, wherever that is narrow enough to be cheaper.

Time is FLOPs, bytes moved and calls, at the rates of this machine (:mod:`gpytorch_gaps.solvers.planning.rates`). Where
fill-gaps or spectral should be done in a few hundredths of a second, nothing else is considered before they have
failed: planning takes as long.

A start from a guess has less far to go, but converges no faster: conjugate gradients from a residual of 1e-2 to 1e-6
take two thirds of the iterations. What is saved is spent on a higher rank where that at least halves the iterations
of a cold start, and costs little more.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from gpytorch_gaps.linalg.eigen import columns_in_use, largest_left_out, leading_products
from gpytorch_gaps.preconditioners.low_rank import low_rank_flops
from gpytorch_gaps.solvers.system import GapSystem

RANKS = tuple(int(2 ** (k / 2)) for k in range(6, 25))  # 8 .. 4096, half an octave apart
DENSE_REACH = 5  # dense Cholesky is considered, if it is cheaper, up to this many times `max_cholesky` rows
_NOTHING = 1e8  # FLOPs that take no longer than what an iteration takes besides
_WORTH_HALF = 1.5  # FLOPs of a set-up run at a higher rate than those of iterations
_SOON = 0.03  # seconds within which planning does not pay
_PASSES, _THIN_PASSES = 24.0, 12.0  # numbers moved per cell and iteration, with square products and with thin ones
_GATHERS = 40.0  # numbers moved per entry of a Gram matrix, whose look-up is random
_EIGH = 9.0  # times m^3: FLOPs of an eigen-decomposition, about; smooth kernels, by a thin SVD, take fewer
_CHOLESKY = 2.0  # times as long as a matrix product of as many FLOPs
_DENSE_BYTES = 200.0  # moved for every entry of a matrix that is gathered and factorised
_CALLS = 40.0  # an iteration, of torch
PATIENCE = 1000  # iterations without a halved residual, after which another plan is tried
_FLOAT32_PASSES = 2.5  # refinement restarts conjugate gradients: float32 takes so many times the iterations of float64


@dataclass(frozen=True)
class Plan:
    """A formulation, its parameters, the iterations it may take, and what it is thought to need."""

    method: str
    rank: int = 0
    direct: str = ""  # "data" or "gaps": the side that is factorised densely
    budget: int = 0
    patience: int = 0  # iterations that need not halve the residual, where another plan follows; 0: any number
    iterations: float = 0.0  # that it is thought to need
    flops: float = math.inf
    seconds: float = math.inf
    reason: str = ""


_expected: list[int] = []


@contextmanager
def expecting(columns: int) -> Iterator[None]:
    """Says that so many right-hand sides will be solved for, some at a time: a set-up is made for all of them."""
    _expected.append(columns)
    try:
        yield
    finally:
        _expected.pop()


def planned_columns(columns: int) -> int:
    """How many right-hand sides a plan is made for, of which `columns` are there."""
    return max(columns, *_expected) if _expected else columns


PlanT = TypeVar("PlanT", bound=Plan)


def choose_plans(
    system: GapSystem, num_rhs: int, tolerance: float, max_iterations: int, max_cholesky: float, start: float = 1.0
) -> Iterator[Plan]:
    """The plans to try, best first; each takes over from the iterate of the one before.

    :param start: relative residual of the guess that is started from.
    """
    if start < 1.0:
        plans = list(choose_plans(system, num_rhs, tolerance, max_iterations, max_cholesky))
        cold = plans[0]
        if cold.method == "spectral":  # whose iterations cost next to nothing
            cold = replace(cold, flops=max(cold.flops, best_rank(system, num_rhs, tolerance).flops))
        quick = quicker(rank_plans(system, num_rhs, still_needed(tolerance, start)), cold)
        yield from plans if quick is None else [replace(quick, budget=max_iterations), *plans]
        return
    rows, gaps = system.num_train, system.num_cells - system.num_train
    dense = Plan(
        "cholesky",
        direct="data",
        flops=rows**3 / 3.0,
        seconds=system.rates.seconds(_CHOLESKY * rows**3 / 3.0, _DENSE_BYTES * rows**2),
        reason=f"only {rows} observations",
    )
    if rows <= max_cholesky:
        yield dense
        return
    if dense_first(system, num_rhs, max_cholesky):
        yield replace(dense, reason=f"{rows} observations are fewer than an eigen-decomposition is worth")
    fill = filling_plan(system, num_rhs, tolerance, max_iterations) if system.fillable else None
    by_gaps = _by_gaps(system, gaps, num_rhs) if fill is not None and gaps <= DENSE_REACH * max_cholesky else None
    soon = fill is not None and fill.seconds < _SOON and (by_gaps is None or fill.seconds <= by_gaps.seconds)
    if fill is not None and soon:
        # twice what it should need, and at least as long as planning would be worth
        affordable = 2.0 * _SOON * fill.iterations / fill.seconds
        yield replace(fill, budget=min(max_iterations, max(10 + 2 * fill.budget, int(affordable))))
    cheapest = best_rank(system, num_rhs, tolerance)
    reliable = [replace(cheapest, budget=max_iterations)]
    if rows <= DENSE_REACH * max_cholesky:
        reliable.append(dense)
    reliable.sort(key=lambda plan: plan.seconds)
    reserve = [
        replace(plan, budget=max_iterations) for plan in deeper(rank_plans(system, num_rhs, tolerance), cheapest)
    ]
    if fill is None or soon:
        yield from in_turn([*reliable, *reserve])
    elif by_gaps is not None and by_gaps.seconds < min(fill.seconds, reliable[0].seconds):
        yield from in_turn([by_gaps, *reliable, *reserve])
    elif reliable[0].seconds <= fill.seconds:
        yield from in_turn([*reliable, replace(fill, budget=max_iterations), *reserve])
    else:
        # as many iterations as the alternative would cost, and at least what scattered gaps should need
        affordable = reliable[0].seconds / (fill.seconds / fill.budget)
        budget = max_iterations if math.isinf(affordable) else min(max_iterations, max(fill.budget, int(affordable)))
        yield from in_turn([replace(fill, budget=budget), *reliable, *reserve])


def dense_first(system: GapSystem, num_rhs: int, max_cholesky: float) -> bool:
    """Whether a dense solve costs less than the eigen-decomposition without which nothing else can be planned."""
    axes = [] if system.is_decomposed else [system.shape]
    return cheaper_than_eigen(system.num_train, axes, num_rhs, max_cholesky)


def cheaper_than_eigen(rows: int, shapes: Sequence[Sequence[int]], num_rhs: int, max_cholesky: float) -> bool:
    """:param shapes: of the grids of terms that are not decomposed yet."""
    decompositions = sum(_EIGH * float(size) ** 3 for shape in shapes for size in shape)
    dense = _CHOLESKY * rows**3 / 3.0 + 2.0 * rows**2 * num_rhs
    return rows <= DENSE_REACH * max_cholesky and dense <= decompositions


def _by_gaps(system: GapSystem, gaps: int, num_rhs: int) -> Plan:
    cost = gaps**3 / 3.0 + 2.0 * (gaps + num_rhs) * system.rotation_flops
    slower = cost + (_CHOLESKY - 1.0) * gaps**3 / 3.0
    seconds = system.rates.seconds(slower, _DENSE_BYTES * gaps**2 + 8.0 * _PASSES * gaps * system.num_cells)
    return Plan("cholesky", direct="gaps", flops=cost, seconds=seconds, reason=f"only {gaps} gaps")


def filling_plan(system: GapSystem, num_rhs: int, tolerance: float, max_iterations: int) -> Plan:
    """Fill-gaps, or spectral where its truncated basis makes it cheaper."""
    fill = fill_plan(system, num_rhs, tolerance, max_iterations)
    if not (float(system.noise.min()) > 0 and system.is_definite):
        return fill
    half = system.truncated_flops(tolerance)
    flops = fill.iterations * 2.2 * half * num_rhs
    moved = fill.iterations * 8.0 * _THIN_PASSES * system.num_cells * num_rhs
    seconds = system.rates.seconds(flops, moved, fill.iterations * _CALLS)
    spectral = replace(fill, method="spectral", flops=flops, seconds=seconds)
    return min(fill, spectral, key=lambda plan: plan.seconds)


def fill_plan(system: GapSystem, num_rhs: int, tolerance: float, max_iterations: int) -> Plan:
    """Fill-gaps, with the iterations it should need if the gaps are scattered."""
    products, noise = system.eigen().products, system.noise
    beta = system.local_gappiness
    # the worst of the batch
    alpha = float((products / (products + noise)).nan_to_num(1.0).mean(-1).max())
    spread = 1.0 + float((products.amax(-1, keepdim=True) / noise).max())
    edge = (math.sqrt(alpha * (1 - beta)) + math.sqrt(beta * (1 - alpha))) ** 2 if alpha + beta < 1 else 1.0
    condition = min(spread, 1.0 / max(1.0 - edge, 1e-300))
    # the original residual is the fill-gaps one amplified by up to `spread`; its root is what is seen
    needed = 1.3 * expected_iterations(condition, tolerance / math.sqrt(spread))
    if system.dtype == torch.float32:
        needed *= _FLOAT32_PASSES
    expected = max(1, math.ceil(min(max_iterations, needed)))
    reason = f"about {expected} iterations if the gaps are scattered"
    flops = needed * 2.2 * system.rotation_flops * num_rhs
    moved = needed * 8.0 * _PASSES * system.num_cells * num_rhs
    seconds = system.rates.seconds(flops, moved, needed * _CALLS)
    return Plan("fill", budget=expected, iterations=needed, flops=flops, seconds=seconds, reason=reason)


def expected_iterations(condition: float, tolerance: float) -> float:
    """Conjugate gradients contract by ``(sqrt(k) - 1) / (sqrt(k) + 1) = exp(-2 atanh(1 / sqrt(k)))`` an iteration."""
    root = math.sqrt(condition)
    if root <= 1.0:
        return 1.0
    if math.isinf(root) or tolerance <= 0.0:
        return math.inf
    return 1.0 + math.ceil(math.log(2.0 / tolerance) / (2.0 * math.atanh(1.0 / root)))


def still_needed(tolerance: float, start: float) -> float:
    """The reduction that takes a relative residual from `start` to `tolerance`."""
    return min(0.5, tolerance / max(start, tolerance))


def quicker(plans: Sequence[PlanT], cold: PlanT) -> PlanT | None:
    """The cheapest of the plans that need half the iterations of a cold start at most, for not much more FLOPs."""
    half, affordable = 0.5 * cold.iterations, _WORTH_HALF * cold.flops + _NOTHING
    fitting = [plan for plan in plans if plan.iterations <= half and plan.flops <= affordable]
    return min(fitting, key=lambda plan: plan.flops, default=None)


def in_turn(plans: Sequence[PlanT]) -> list[PlanT]:
    """All but the last give up where they get nowhere: another follows."""
    return [*(replace(plan, patience=PATIENCE) for plan in plans[:-1]), plans[-1]]


def deeper(plans: Sequence[PlanT], failed: PlanT) -> list[PlanT]:
    """Where a rank has failed: the one that should need the fewest iterations, if that is at most half as many."""
    fewest = min(plans, key=lambda plan: plan.iterations)
    return [fewest] if fewest.iterations <= 0.5 * failed.iterations < math.inf else []


def best_rank(system: GapSystem, num_rhs: int, tolerance: float) -> Plan:
    """The rank at which preconditioned ignore-gaps should cost least, set-up included. 0: no preconditioner."""
    return min(rank_plans(system, num_rhs, tolerance), key=lambda plan: plan.flops)


def rank_plans(system: GapSystem, num_rhs: int, tolerance: float) -> list[Plan]:
    """Ignore-gaps at every rank that is considered."""
    return system.once(("ranks", num_rhs, tolerance), lambda: _rank_plans(system, num_rhs, tolerance))


def _rank_plans(system: GapSystem, num_rhs: int, tolerance: float) -> list[Plan]:
    noise = float(system.noise.min())
    limit = min(system.num_train, system.num_cells, RANKS[-1])
    spectrum = system.eigen().values
    values, positions = leading_products(spectrum, limit + 1)
    ranks = (0, *(rank for rank in RANKS if rank < limit), limit)
    # of what is left after each rank, the largest, in one read; a batch must look at each of its members
    flat = values if values.dim() == 1 else values.flatten(0, -2)[0]
    left_after = torch.stack([flat[min(rank, len(flat) - 1)] for rank in ranks]).tolist()
    plans = []
    for i, (rank, used) in enumerate(zip(ranks, columns_in_use(positions, system.shape, ranks), strict=True)):
        if values.dim() == 1:
            left = left_after[i] if rank < len(flat) else 0.0
        else:
            left = largest_left_out(spectrum, positions[:, :rank])
        condition = 1.0 + left / (noise + system.least_eigenvalue) if noise > 0 else math.inf
        setup, application = 0.0, 0.0
        if rank:
            setup, application = low_rank_flops(list(zip(system.shape, used, strict=True)), rank)
        iterations = expected_iterations(condition, tolerance)
        cost = setup + iterations * num_rhs * (system.product_flops + application)
        moved = iterations * num_rhs * 8.0 * (_THIN_PASSES * system.num_cells + rank**2)
        moved += 8.0 * _GATHERS * rank**2
        seconds = system.rates.seconds(cost, moved, (iterations if rank == 0 else 2.0 * iterations) * _CALLS)
        reason = f"rank {rank} leaves eigenvalues of {left / noise if noise > 0 else math.inf:.1e} times the noise"
        plans.append(Plan("ignore", rank, iterations=iterations, flops=cost, seconds=seconds, reason=reason))
    return plans


def low_rank_form_flops(system: GapSystem, rank: int, num_points: int) -> float:
    """Of setting up ``P = F C F' + D`` and reading the variance of so many cells off it."""
    _, positions = leading_products(system.eigen().values, rank)
    (used,) = columns_in_use(positions, system.shape, [rank])
    shapes = list(zip(system.shape, used, strict=True))
    setup, _ = low_rank_flops(shapes, rank)
    return setup + num_points * (rank**2 + 2.0 * len(shapes) * rank)
