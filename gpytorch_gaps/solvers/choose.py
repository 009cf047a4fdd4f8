"""Which formulation to use: the one that should cost the fewest FLOPs, with the next one in reserve.

- dense Cholesky where the observations, or the gaps, are few;
- ignore-gaps with a rank-p eigen preconditioner: what is left of the spectrum bounds the condition number by
  ``1 + lambda_{p+1} / s2``, so the iterations of every p, and the best p, are known before anything is solved;
- fill-gaps: its conditioning depends on the shape of the gaps, which is not known beforehand. Scattered gaps need about
  ``1 / (1 - gappiness)`` as many iterations as few gaps; clouds may need hundreds. So it is given no more than the cost of
  the alternative before that takes over from its iterate: the total is at most twice the better of the two.
"""

import math
from dataclasses import dataclass

import torch

from gpytorch_gaps.kronecker.eigen import leading_products
from gpytorch_gaps.kronecker.products import kron_matmul_flops
from gpytorch_gaps.solvers.system import GapSystem

_RANKS = tuple(int(2 ** (k / 2)) for k in range(6, 25))  # 8 .. 4096, half an octave apart


@dataclass(frozen=True)
class Plan:
    """A formulation, its parameters, what it may cost (iterations) and is thought to cost (FLOPs)."""

    method: str
    rank: int = 0
    direct: str = ""  # "data" or "gaps": the side that is factorised densely
    budget: int = 0
    flops: float = math.inf
    reason: str = ""


def choose_plans(
    system: GapSystem, num_rhs: int, tolerance: float, max_iterations: int, max_cholesky: float
) -> list[Plan]:
    """The plans to try, best first; each takes over from the iterate of the one before."""
    rows, gaps = system.num_train, system.num_cells - system.num_train
    low_rank = best_rank(system, num_rhs, tolerance)
    ignore = Plan("ignore", low_rank.rank, "", max_iterations, low_rank.flops, low_rank.reason)
    if rows <= max_cholesky:
        return [Plan("cholesky", direct="data", reason=f"only {rows} observations"), ignore]
    if not system.fillable:
        return [ignore]
    fill = _fill_plan(system, num_rhs, max_iterations)
    if gaps <= max_cholesky and gaps**3 / 3.0 + 2.0 * gaps * system.product_flops < min(fill.flops, ignore.flops):
        return [Plan("cholesky", direct="gaps", reason=f"only {gaps} gaps"), *_in_order(ignore, fill, max_iterations)]
    return _in_order(ignore, fill, max_iterations)


def _in_order(ignore: Plan, fill: Plan, max_iterations: int) -> list[Plan]:
    if ignore.flops <= fill.flops:
        return [ignore, fill]
    per_iteration = fill.flops / fill.budget
    affordable = min(max_iterations, max(fill.budget, int(ignore.flops / per_iteration) if ignore.flops < math.inf else max_iterations))
    first = Plan("fill", budget=affordable, flops=fill.flops, reason=fill.reason)
    return [first, ignore]


def _fill_plan(system: GapSystem, num_rhs: int, max_iterations: int) -> Plan:
    gappiness = 1.0 - system.num_train / system.num_cells
    expected = min(max_iterations, math.ceil(12 + 12 / (1.0 - gappiness)))
    cost = expected * 2.2 * system.product_flops * num_rhs
    return Plan("fill", budget=expected, flops=cost, reason=f"{gappiness:.0%} gaps, about {expected} iterations if scattered")


def expected_iterations(condition: float, tolerance: float) -> float:
    """Conjugate gradients contract by ``(sqrt(k) - 1) / (sqrt(k) + 1)`` an iteration."""
    if condition <= 1.0:
        return 1.0
    if condition == math.inf:
        return math.inf
    root = math.sqrt(condition)
    return 1.0 + math.ceil(math.log(2.0 / tolerance) / math.log((root + 1.0) / (root - 1.0)))


def best_rank(system: GapSystem, num_rhs: int, tolerance: float) -> Plan:
    """The rank at which preconditioned ignore-gaps should cost least, set-up included. 0: no preconditioner."""
    floor = float(system.noise.min())
    limit = min(system.num_train, system.num_cells, _RANKS[-1])
    values, positions = leading_products(system.eigen().values, limit + 1)
    values = values.reshape(-1, values.size(-1)).max(0).values
    best = Plan("ignore", 0, flops=_ignore_flops(system, num_rhs, 0, float(values[0]), floor, tolerance))
    for rank in [rank for rank in _RANKS if rank <= limit] or [limit]:
        # with every eigenvalue taken, only rounding is left
        left = float(values[rank]) if rank < len(values) else 0.0
        used = [len(torch.unique(axis[:rank])) for axis in positions]
        setup = _setup_flops(system, used, rank)
        per_application = 2.0 * kron_matmul_flops(list(zip(system.shape, used, strict=True)), 1) + 2.0 * rank**2
        flops = setup + _ignore_flops(system, num_rhs, per_application, left, floor, tolerance)
        if flops < best.flops:
            best = Plan("ignore", rank, flops=flops)
    if not best.rank:
        return best
    left = float(values[best.rank]) if best.rank < len(values) else 0.0
    reason = f"rank {best.rank} leaves eigenvalues of {left / floor if floor else math.inf:.1e} noise"
    return Plan("ignore", best.rank, flops=best.flops, reason=reason)


def _ignore_flops(
    system: GapSystem, num_rhs: int, preconditioner: float, left: float, noise: float, tolerance: float
) -> float:
    condition = 1.0 + left / noise if noise > 0 else math.inf
    return expected_iterations(condition, tolerance) * num_rhs * (system.product_flops + preconditioner)


def _setup_flops(system: GapSystem, used: list[int], rank: int) -> float:
    pairs = [(u * (u + 1) // 2, m) for u, m in zip(used, system.shape, strict=True)]
    by_axis = kron_matmul_flops(pairs, 1) + 20.0 * rank**2
    by_columns = float(system.num_cells) * rank * (rank + len(used))
    return min(by_axis, by_columns) + rank**3 / 3.0
