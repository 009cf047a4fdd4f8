"""Which formulation to use: the one that should take the least time on this machine, with the next ones in reserve.

- dense Cholesky where the observations, or the gaps, are few; or where it costs less than the eigen-decompositions
  that all else begins with, as on a series: one axis, and fewer observations than its places;
- ignore-gaps with the low-rank preconditioner that should cost least;
- fill-gaps, or spectral, where gaps can be filled. Their iterations depend on the shape of the gaps, so they are given
  no more than the cost of the alternative, which then takes over from their iterate: the total is at most twice the
  better of the two. Where they should be done in a few hundredths of a second, nothing else is considered before they
  have failed: planning takes as long.

A start from a guess has less far to go, but converges no faster: conjugate gradients from a residual of 1e-2 to 1e-6
take two thirds of the iterations. What is saved is spent on a higher rank where that at least halves the iterations
of a cold start, and costs little more.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gpytorch_gaps.solvers.config import SolveConfig
from gpytorch_gaps.solvers.gap_system import GapSystem
from gpytorch_gaps.solvers.planning.costs import (
    Plan,
    about_sum,
    best_rank,
    cheaper_than_eigen,
    dense_plan,
    fill_plan,
    filling_plan,
    gap_dense_plan,
    rank_plans,
)
from gpytorch_gaps.solvers.system import NoisySystem

DENSE_REACH = 5  # dense Cholesky is considered, if it is cheaper, up to this many times `dense_size` rows
_NEGLIGIBLE_FLOPS = 1e8  # that take no longer than what an iteration takes besides
_SETUP_ADVANTAGE = 1.5  # FLOPs of a set-up run at a higher rate than those of iterations
_SKIP_PLANNING_BELOW_SECONDS = 0.03
_PATIENCE_ITERATIONS = 1000  # without a halved residual, after which the next plan is tried


@dataclass(frozen=True)
class Task:
    """What is to be solved for.

    :param num_rhs: right-hand sides, those that will follow included.
    :param reduction: factor by which their residuals must fall, from the right-hand side on.
    :param start: relative residual of the guess that is started from.
    """

    num_rhs: int
    reduction: float
    start: float = 1.0


def plan(system: NoisySystem, task: Task, config: SolveConfig) -> Iterator[Plan]:
    """The plans to try, best first; each takes over from the iterate of the one before."""
    if config.method != "auto":
        yield _named_plan(system, task, config)
    elif not system.fillable and system.reused_preconditioner is not None:
        yield _reusing_plan(system)
    elif task.start < 1.0:
        yield from _plans_from_guess(system, task, config)
    else:
        yield from _plans_from_zero(system, task, config)


def _named_plan(system: NoisySystem, task: Task, config: SolveConfig) -> Plan:
    """The method that is asked for; for "ignore", with the rank that is asked for or the best one."""
    method, rank = config.method, config.rank
    if method == "cholesky":
        return Plan(method, direct="data", reason=_asked_for(system, "dense"))
    if method == "ignore":
        if rank and not system.least_noise > 0:
            raise ValueError(
                f"preconditioner_rank: got {rank} without noise, expected 0: the preconditioner divides by it"
            )
        if rank == 0 or not system.least_noise > 0:
            return Plan(method, reason=_asked_for(system, "no preconditioner"))
        if system.reused_preconditioner is not None:
            return _reusing_plan(system)
        chosen = _best_from(system, task, rank)
        return replace(chosen, reason="asked for") if isinstance(system, GapSystem) else chosen
    if not isinstance(system, GapSystem):
        raise ValueError(
            f"gap_method: got {method!r} for {system.kind}, expected 'auto', 'ignore' or 'cholesky': only a single "
            "Kronecker product at cells of its grid has an eigenbasis that fills gaps"
        )
    own = min(rank or 0, system.num_cells - system.num_train) if method == "fill" else 0
    return Plan(method, own, reason="asked for")


def _asked_for(system: NoisySystem, what: str) -> str:
    return "asked for" if isinstance(system, GapSystem) else f"{about_sum(system)}{what}"


def _reusing_plan(system: NoisySystem) -> Plan:
    assert system.reused_preconditioner is not None
    rank = system.reused_preconditioner.rank
    return Plan("ignore", rank, (rank,), reason="a preconditioner set up for a matrix like it")


def _best_from(system: NoisySystem, task: Task, rank: int | None) -> Plan:
    """The best rank of ignore-gaps from where the task starts."""
    cold = best_rank(system, task.num_rhs, task.reduction, rank)
    return cold if task.start >= 1.0 else _quicker(system, task, rank, cold) or cold


def _quicker(system: NoisySystem, task: Task, rank: int | None, cold: Plan) -> Plan | None:
    """From a guess: the cheapest rank that needs half the iterations of a cold start, for not many more FLOPs."""
    still_needed = min(0.5, task.reduction / max(task.start, task.reduction))
    affordable = _SETUP_ADVANTAGE * cold.flops + _NEGLIGIBLE_FLOPS
    plans = rank_plans(system, task.num_rhs, still_needed, rank)
    fitting = [own for own in plans if own.iterations <= 0.5 * cold.iterations and own.flops <= affordable]
    return min(fitting, key=lambda own: own.flops, default=None)


def _plans_from_guess(system: NoisySystem, task: Task, config: SolveConfig) -> Iterator[Plan]:
    plans = list(_plans_from_zero(system, replace(task, start=1.0), config))
    cold = plans[0]
    if cold.direct:
        yield from plans
        return
    if cold.method == "spectral":  # whose iterations cost next to nothing
        cold = replace(cold, flops=max(cold.flops, best_rank(system, task.num_rhs, task.reduction).flops))
    quick = _quicker(system, task, config.rank, cold)
    yield from plans if quick is None else [quick, *plans]


def _plans_from_zero(system: NoisySystem, task: Task, config: SolveConfig) -> Iterator[Plan]:
    rows, limit = system.num_train, DENSE_REACH * config.dense_size
    dense = dense_plan(system, f"only {rows} observations")
    if rows <= config.dense_size:
        yield dense
        return
    if cheaper_than_eigen(system, task.num_rhs, limit) and (config.rank is None or system.fillable):
        yield replace(dense, reason=f"{rows} observations are fewer than an eigen-decomposition is worth")
    fill, by_gaps = None, None
    if isinstance(system, GapSystem) and system.fillable:
        fill = filling_plan(system, task.num_rhs, task.reduction, config.max_iterations)
        few_gaps = system.num_cells - rows <= limit
        by_gaps = gap_dense_plan(system, task.num_rhs) if few_gaps else None
    soon = fill is not None and fill.seconds < min(
        _SKIP_PLANNING_BELOW_SECONDS, math.inf if by_gaps is None else by_gaps.seconds
    )
    if fill is not None and soon:
        # twice what it should need, and at least as long as planning would be worth
        affordable = 2.0 * _SKIP_PLANNING_BELOW_SECONDS * fill.iterations / fill.seconds
        yield replace(fill, budget=max(10 + 2 * fill.budget, int(affordable)))
    reliable, reserve = _reliable_plans(system, task, config, dense if rows <= limit else None)
    if fill is None or soon:
        yield from _in_turn([*reliable, *reserve])
    elif by_gaps is not None and by_gaps.seconds < min(fill.seconds, reliable[0].seconds):
        yield from _in_turn([by_gaps, *reliable, *reserve])
    elif reliable[0].seconds <= fill.seconds:
        yield from _in_turn([*reliable, replace(fill, budget=0), *reserve])
    else:
        # as many iterations as the alternative would cost, and at least what scattered gaps should need
        affordable = reliable[0].seconds / (fill.seconds / fill.budget)
        budget = 0 if math.isinf(affordable) else max(fill.budget, int(affordable))
        yield from _in_turn([replace(fill, budget=budget), *reliable, *reserve])


def _reliable_plans(
    system: NoisySystem, task: Task, config: SolveConfig, dense: Plan | None
) -> tuple[list[Plan], list[Plan]]:
    """Plans whose cost is known beforehand, cheapest first; and a higher rank to try where they fail."""
    rank = None if isinstance(system, GapSystem) else config.rank
    if rank == 0 or not system.least_noise > 0:
        iterative = Plan("ignore", seconds=math.inf, reason="no preconditioner")
        return ([iterative] if dense is None else [dense]), []
    iterative = best_rank(system, task.num_rhs, task.reduction, rank)
    reliable = sorted([iterative, *([] if dense is None else [dense])], key=lambda own: own.seconds)
    fewest = min(rank_plans(system, task.num_rhs, task.reduction, rank), key=lambda own: own.iterations)
    deeper = fewest.iterations <= 0.5 * iterative.iterations < math.inf
    return reliable, [fewest] if deeper else []


def _in_turn(plans: Sequence[Plan]) -> list[Plan]:
    """All but the last give up where they make no progress: another follows."""
    return [*(replace(own, patience=_PATIENCE_ITERATIONS) for own in plans[:-1]), plans[-1]]


def solve_flops(system: NoisySystem, num_rhs: int, config: SolveConfig) -> float:
    """FLOPs that `num_rhs` solves should take."""
    task = Task(num_rhs, config.tolerance)
    if config.method in ("fill", "spectral") and isinstance(system, GapSystem):
        filling = fill_plan if config.method == "fill" else filling_plan
        return filling(system, num_rhs, config.tolerance, config.max_iterations).flops
    if config.method == "penalize":
        return best_rank(system, num_rhs, config.tolerance).flops
    chosen = next(plan(system, task, config))
    if chosen.direct == "data":
        return system.num_train**3 / 3.0 + 2.0 * system.num_train**2 * num_rhs
    if config.method == "ignore":
        return best_rank(system, num_rhs, config.tolerance).flops
    return chosen.flops
