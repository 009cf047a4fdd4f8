"""The expected cost of each method on this machine. All cost models are here.

Time is the sum of FLOPs, bytes moved and calls, each divided by its rate (:mod:`gpytorch_gaps.utils.rates`).

**Ignore-gaps** with a preconditioner of rank p: the rest of the spectrum bounds the condition number by about
``1 + lambda_{p+1} / (s2 + lambda_M)``. Therefore the number of iterations for every p, and the best p, are known before
anything is solved.

**Fill-gaps**: the number of iterations depends on the shape of the gaps. For scattered gaps, the condition number is
that of a random coordinate block of ``I - P``, where P is a projector whose relative rank alpha is the effective
dimension of the prior. With gappiness beta it is ``1 / (1 - e)``, where
``e = (sqrt(alpha (1 - beta)) + sqrt(beta (1 - alpha)))^2`` is the edge of the Jacobi ensemble. In a cluster of gaps,
such as a cloud, the gappiness is nearly one. Therefore beta is the gappiness in the neighbourhood of gaps. Clouds may
still need hundreds of iterations. For rough kernels, the bound is far too high, and a trial is more accurate
(:mod:`gpytorch_gaps.solvers.planning.trial`). **Spectral** is the same in a truncated basis.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpytorch_gaps.linalg.eigen import columns_in_use
from gpytorch_gaps.linalg.factors import eigh_cubes
from gpytorch_gaps.preconditioners.core_matrix import low_rank_flops
from gpytorch_gaps.solvers.gap_system import GapSystem
from gpytorch_gaps.solvers.preconditioning import Choice, Eigen, Neighbours
from gpytorch_gaps.solvers.system import NoisySystem
from gpytorch_gaps.utils.rates import Rates, rates_of

RANKS = tuple(int(2 ** (k / 2)) for k in range(6, 25))  # 8 .. 4096, half an octave apart
_NUMBERS_MOVED_PER_CELL = 24.0  # per iteration with square products
NUMBERS_MOVED_PER_CELL_THIN = 12.0  # per iteration with thin products
_NUMBERS_MOVED_PER_GRAM_ENTRY = 40.0  # look-ups are random
_EIGH_FLOPS_PER_CUBE = 9.0  # about 9 m^3; smooth kernels take fewer, by a thin SVD
_CHOLESKY_SLOWDOWN = 2.0  # relative to a matrix product with as many FLOPs
_DENSE_BYTES_PER_ENTRY = 200.0  # moved per entry of a matrix that is gathered and factorised
CALLS_PER_ITERATION = 40.0  # number of torch calls
_FLOAT32_ITERATIONS = 2.5  # ratio of iterations in float32 and float64: refinement restarts conjugate gradients


@dataclass(frozen=True)
class Plan:
    """A formulation, its parameters, the iterations it may take, and its expected iterations and cost."""

    method: str
    rank: int = 0
    """Columns of a low-rank preconditioner."""
    preconditioner: Choice | None = None
    direct: str = ""
    """The side that is factorised densely: "data", "gaps" or none."""
    budget: int = 0
    """Iterations it may take. 0: as many as the configuration allows."""
    patience: int = 0
    """Iterations that need not halve the residual, where another plan follows. 0: any number."""
    iterations: float = 0.0
    flops: float = math.inf
    seconds: float = math.inf
    reason: str = ""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Eigenvectors that each Kronecker term gives to the preconditioner."""
        return self.preconditioner.ranks if isinstance(self.preconditioner, Eigen) else ()

    @property
    def num_neighbours(self) -> int:
        return self.preconditioner.count if isinstance(self.preconditioner, Neighbours) else 0


def system_rates(system: NoisySystem) -> Rates:
    return system.cached("rates", lambda: rates_of(system.noise.device, torch.float64))


def expected_iterations(condition: float, reduction: float) -> float:
    """Conjugate gradients contract by ``(sqrt(k) - 1) / (sqrt(k) + 1) = exp(-2 atanh(1 / sqrt(k)))`` an iteration."""
    root = math.sqrt(condition)
    if root <= 1.0:
        return 1.0
    if math.isinf(root) or reduction <= 0.0:
        return math.inf
    return 1.0 + math.ceil(math.log(2.0 / reduction) / (2.0 * math.atanh(1.0 / root)))


# -- dense -----------------------------------------------------------------------------------------------------------


def dense_plan(system: NoisySystem, reason: str) -> Plan:
    """Cholesky of the N x N matrix."""
    rows = system.num_train
    seconds = system_rates(system).seconds(_CHOLESKY_SLOWDOWN * rows**3 / 3.0, _DENSE_BYTES_PER_ENTRY * rows**2)
    return Plan("cholesky", direct="data", flops=rows**3 / 3.0, seconds=seconds, reason=reason)


def gap_dense_plan(system: GapSystem, num_rhs: int) -> Plan:
    """Cholesky of the L x L matrix of fill-gaps."""
    gaps = system.num_cells - system.num_train
    cost = gaps**3 / 3.0 + 2.0 * (gaps + num_rhs) * system.rotation_flops
    slower = cost + (_CHOLESKY_SLOWDOWN - 1.0) * gaps**3 / 3.0
    moved = _DENSE_BYTES_PER_ENTRY * gaps**2 + 8.0 * _NUMBERS_MOVED_PER_CELL * gaps * system.num_cells
    return Plan(
        "cholesky",
        direct="gaps",
        flops=cost,
        seconds=system_rates(system).seconds(slower, moved),
        reason=f"only {gaps} gaps",
    )


def cheaper_than_eigen(system: NoisySystem, num_rhs: int, limit: float) -> bool:
    """Whether a dense solve costs less than the eigen-decompositions, which all other plans need.

    :param limit: rows beyond which no dense solve is considered.
    """
    needed = [term for term in system.terms if term.has_eigenvectors or system.fillable]
    factors = [factor for term in needed if not term.is_decomposed for factor in term.factors()]
    decompositions = _EIGH_FLOPS_PER_CUBE * sum(map(eigh_cubes, factors))
    rows = system.num_train
    dense = _CHOLESKY_SLOWDOWN * rows**3 / 3.0 + 2.0 * rows**2 * num_rhs
    return rows <= limit and dense <= decompositions


# -- fill-gaps and spectral ------------------------------------------------------------------------------------------


def filling_plan(
    system: GapSystem, num_rhs: int, reduction: float, max_iterations: int, condition: float | None = None
) -> Plan:
    """Fill-gaps, or spectral if its truncated basis makes it cheaper.

    :param condition: condition number of the matrix of fill-gaps, if a trial has estimated it.
    """
    fill = fill_plan(system, num_rhs, reduction, max_iterations, condition)
    if not (system.least_noise > 0 and system.is_definite):
        return fill
    flops = fill.iterations * 2.2 * system.truncated_flops(reduction) * num_rhs
    moved = fill.iterations * 8.0 * NUMBERS_MOVED_PER_CELL_THIN * system.num_cells * num_rhs
    seconds = system_rates(system).seconds(flops, moved, fill.iterations * CALLS_PER_ITERATION)
    spectral = replace(fill, method="spectral", flops=flops, seconds=seconds)
    return min(fill, spectral, key=lambda plan: plan.seconds)


def fill_plan(
    system: GapSystem, num_rhs: int, reduction: float, max_iterations: int, condition: float | None = None
) -> Plan:
    """Fill-gaps, with the iterations that scattered gaps should need, or that a trial has measured."""
    products, noise = system.eigen().products, system.noise
    spread = 1.0 + float((products.amax(-1, keepdim=True) / noise).max())  # the worst of the batch
    reason = "if the gaps are scattered" if condition is None else "after a trial"
    condition = _scattered_condition(system, spread) if condition is None else condition
    # the residual of fill-gaps is amplified by up to `spread`; in practice, by about its root
    needed = 1.3 * expected_iterations(condition, reduction / math.sqrt(spread))
    if system.dtype == torch.float32:
        needed *= _FLOAT32_ITERATIONS
    expected = max(1, math.ceil(min(max_iterations, needed)))
    flops = needed * 2.2 * system.rotation_flops * num_rhs
    moved = needed * 8.0 * _NUMBERS_MOVED_PER_CELL * system.num_cells * num_rhs
    seconds = system_rates(system).seconds(flops, moved, needed * CALLS_PER_ITERATION)
    reason = f"about {expected} iterations {reason}"
    return Plan("fill", budget=expected, iterations=needed, flops=flops, seconds=seconds, reason=reason)


def _scattered_condition(system: GapSystem, spread: float) -> float:
    """A bound on the condition number of fill-gaps for scattered gaps."""
    products, beta = system.eigen().products, system.local_gappiness
    alpha = float((products / (products + system.noise)).nan_to_num(1.0).mean(-1).max())  # the worst of the batch
    edge = (math.sqrt(alpha * (1 - beta)) + math.sqrt(beta * (1 - alpha))) ** 2 if alpha + beta < 1 else 1.0
    return min(spread, 1.0 / max(1.0 - edge, 1e-300))


# -- ignore-gaps at every rank ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankChoice:
    """A low-rank preconditioner that could be set up."""

    ranks: tuple[int, ...]
    width: int
    left_over: float  # largest eigenvalues left out, over the noise
    setup_flops: float
    flops: float  # FLOPs of applying it to one column


def rank_choices(system: NoisySystem, rank: int | None = None) -> list[RankChoice]:
    """Preconditioners of increasing rank, or of the requested rank."""
    return system.cached(("rank choices", rank), lambda: _rank_choices(system, rank))


def _rank_choices(system: NoisySystem, rank: int | None) -> list[RankChoice]:
    limit = min(system.num_train, RANKS[-1], *([system.num_cells] if system.terms else []))
    found = [term.leading(limit + 1) for term in system.terms]
    own = 0 if system.other is None else system.other.root.size(-1)
    sizes = (0, *(r for r in RANKS if r < limit), limit) if rank is None else (min(rank, limit),)
    ranks, left_after = _cut(sizes, [values for values, _ in found])
    used = [
        columns_in_use(positions, term.shape, own_ranks)
        for term, (_, positions), own_ranks in zip(system.terms, found, ranks, strict=True)
    ]
    choices = []
    for i in range(len(sizes)):
        chosen = tuple(own_ranks[i] for own_ranks in ranks)
        left = system.gain * sum(own_left[i] for own_left in left_after)
        columns = [sum(counts) for counts in zip(*(counts[i] for counts in used), strict=True)]
        setup, application = _preconditioner_flops(system, sum(chosen), columns, own)
        over_noise = left / system.least_noise if system.least_noise > 0 else math.inf
        choices.append(RankChoice(chosen, sum(chosen) + own, over_noise, setup, application))
    return choices


def _cut(sizes: Sequence[int], leading: Sequence[Tensor]) -> tuple[list[list[int]], list[list[float]]]:
    """For every term and size: how many of its eigenvalues are among the largest of all, and the largest left out."""
    if not leading:
        return [], []
    ended = [torch.cat([values, values.new_zeros(1)]) for values in leading]
    if len(leading) == 1:
        counts = [min(size, len(leading[0])) for size in sizes]
        return [counts], [torch.stack([ended[0][count] for count in counts]).tolist()]
    pooled = torch.cat(list(leading)).sort(descending=True).values
    nothing = pooled.new_full((), -1.0)
    levels = torch.stack([pooled[size] if size < len(pooled) else nothing for size in sizes])
    ranks = torch.stack([(values > levels.unsqueeze(-1)).sum(-1) for values in leading])
    left = [values[own] for values, own in zip(ended, ranks, strict=True)]
    kept, rest = torch.stack([ranks.double(), torch.stack(left)]).tolist()  # one read by the host, which must decide
    return [[int(count) for count in own] for own in kept], rest


def _preconditioner_flops(system: NoisySystem, rank: int, columns: Sequence[int], own: int) -> tuple[float, float]:
    """FLOPs of setting up a preconditioner, and of applying it to one column."""
    rows = system.num_train
    if not rank:
        return 2.0 * rows * own**2, 4.0 * rows * own
    setup, application = low_rank_flops(list(zip(system.gram_shape, columns, strict=True)), rank)
    # columns without structure are projected onto the others, and multiplied densely
    return setup + own * application + 2.0 * rows * own**2, application + 4.0 * rows * own


def rank_plans(system: NoisySystem, num_rhs: int, reduction: float, rank: int | None = None) -> list[Plan]:
    """Plans of ignore-gaps, one for each rank."""
    key = ("rank plans", num_rhs, reduction, rank)
    return system.cached(key, lambda: [_rank_plan(system, c, num_rhs, reduction) for c in rank_choices(system, rank)])


def _rank_plan(system: NoisySystem, choice: RankChoice, num_rhs: int, reduction: float) -> Plan:
    noise = system.least_noise
    above = noise / (noise + system.least_eigenvalue) if noise > 0 else 1.0
    iterations = expected_iterations(1.0 + above * choice.left_over, reduction)
    cost = choice.setup_flops + iterations * num_rhs * (system.product_flops + choice.flops)
    cells = max(system.num_cells, system.num_train)
    moved = iterations * num_rhs * 8.0 * (NUMBERS_MOVED_PER_CELL_THIN * cells + choice.width**2)
    moved += 8.0 * _NUMBERS_MOVED_PER_GRAM_ENTRY * choice.width**2
    calls = (iterations if choice.width == 0 else 2.0 * iterations) * CALLS_PER_ITERATION
    return Plan(
        "ignore",
        choice.width,
        Eigen(choice.ranks) if choice.width else None,
        iterations=iterations,
        flops=cost,
        seconds=system_rates(system).seconds(cost, moved, calls),
        reason=f"{about_sum(system)}rank {choice.width} leaves eigenvalues of {choice.left_over:.1e} times the noise",
    )


def about_sum(system: NoisySystem) -> str:
    """The description of a sum of kernels or an interpolated product in reports; empty for a product at cells."""
    if isinstance(system, GapSystem):
        return ""
    if system.kind != NoisySystem.kind:  # interpolated
        return f"{system.kind}, "
    count = len(system.terms)
    return f"a sum with {count} Kronecker term{'s' if count != 1 else ''}, "


def best_rank(system: NoisySystem, num_rhs: int, reduction: float, rank: int | None = None) -> Plan:
    """The rank at which preconditioned ignore-gaps should cost least, set-up included. Rank 0: no preconditioner."""
    return min(rank_plans(system, num_rhs, reduction, rank), key=lambda plan: plan.flops)
