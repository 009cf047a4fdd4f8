"""Chooses a formulation: the one with the least expected time on this machine. The next ones are alternatives.

- dense Cholesky if there are few observations or few gaps; or if it costs less than the eigen-decompositions that all
  other methods need, as for a series with fewer observations than places;
- ignore-gaps with the low-rank preconditioner of least expected cost, or with the neighbours preconditioner, which is
  tried if it could cost less;
- fill-gaps, or spectral, if gaps can be filled. Their iterations depend on the shape of the gaps. Therefore, they may
  cost no more than the alternative, which then continues from their iterate: the total is at most twice the cost of the
  better one. If their expected time is a few hundredths of a second, other methods are considered only if they fail,
  because planning would take as long.

A start from a guess needs a smaller reduction, but the rate of convergence is the same: conjugate gradients from a
residual of 1e-2 to 1e-6 take two thirds of the iterations. If a higher rank at least halves the iterations of a cold
start, and costs little more, it is used instead.
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
from gpytorch_gaps.solvers.planning.neighbours import neighbour_plan
from gpytorch_gaps.solvers.planning.trial import TRIAL_STEPS, expected_condition, gap_trial
from gpytorch_gaps.solvers.preconditioning import Eigen, Neighbours, Own, has_low_rank
from gpytorch_gaps.solvers.system import NoisySystem

DENSE_REACH = 5  # dense Cholesky is considered, if it is cheaper, up to this many times `dense_size` rows
_NEGLIGIBLE_FLOPS = 1e8  # negligible in comparison with the other work of an iteration
MANY_ITERATIONS = 60  # if more are planned, a report gives the reason
_SETUP_ADVANTAGE = 1.5  # FLOPs of a set-up run at a higher rate than those of iterations
_SKIP_PLANNING_BELOW_SECONDS = 0.03
_WORTH_A_TRIAL = 0.5  # largest duration of a trial, relative to that of another plan
_PATIENCE_ITERATIONS = 1000  # if the residual is not halved in so many iterations, the next plan is tried


@dataclass(frozen=True)
class Task:
    """The requirements of a solve.

    :param num_rhs: number of right-hand sides, including later ones.
    :param reduction: required reduction of their residuals, relative to the right-hand side.
    :param start: relative residual of the initial guess.
    """

    num_rhs: int
    reduction: float
    start: float = 1.0


def plan(system: NoisySystem, task: Task, config: SolveConfig) -> Iterator[Plan]:
    """The plans to try, best first. Each continues from the iterate of the one before."""
    if config.method != "auto":
        yield _named_plan(system, task, config)
    elif _reuses(system):
        yield _reusing_plan(system)
    elif task.start < 1.0:
        yield from _plans_from_guess(system, task, config)
    else:
        for number, own in enumerate(_plans_from_zero(system, task, config)):
            many = number == 0 and MANY_ITERATIONS < own.iterations < math.inf
            yield replace(own, reason=f"{own.reason}; fewer iterations would take longer") if many else own


def _named_plan(system: NoisySystem, task: Task, config: SolveConfig) -> Plan:
    """The requested method; for "ignore", with the requested rank or the best one."""
    method, rank = config.method, config.rank
    if method == "cholesky":
        return Plan(method, direct="data", reason=_asked_for(system, "dense"))
    if method == "ignore":
        return _ignore_plan(system, task, config)
    if not isinstance(system, GapSystem):
        raise ValueError(
            f"gap_method: got {method!r} for {system.kind}, expected 'auto', 'ignore' or 'cholesky': only a single "
            "Kronecker product at cells of its grid has an eigenbasis that fills gaps"
        )
    own = min(rank or 0, system.num_cells - system.num_train) if method == "fill" else 0
    return Plan(method, own, reason="asked for")


def _ignore_plan(system: NoisySystem, task: Task, config: SolveConfig) -> Plan:
    """Ignore-gaps with the best of the allowed preconditioners."""
    if config.rank and "eigen" in config.preconditioners and not has_low_rank(system):
        why = "for a block of axes, expected None: its eigenvectors are no columns of a matrix"
        why = "without noise, expected 0: the preconditioner divides by it" if system.has_eigenvectors else why
        raise ValueError(f"preconditioner_rank: got {config.rank} {why}")
    if config.preconditioners and system.reused_preconditioner is not None:
        return _reusing_plan(system)
    chosen = preconditioned_plan(system, task, config)
    if chosen is None:
        return Plan("ignore", reason=_asked_for(system, "no preconditioner"))
    own = isinstance(system, GapSystem) and not chosen.num_neighbours
    return replace(chosen, reason="asked for") if own else chosen


def preconditioned_plan(system: NoisySystem, task: Task, config: SolveConfig) -> Plan | None:
    """Ignore-gaps with the preconditioner that should take the least time; None if none is allowed."""
    if callable(config.preconditioner):
        return _own_plan(config)
    eigen = None
    if "eigen" in config.preconditioners and has_low_rank(system):
        eigen = _best_from(system, task, config.rank)
    ceiling = math.inf if eigen is None else eigen.seconds
    neighbours = neighbour_plan(system, task.num_rhs, task.reduction, config, ceiling)
    return min(filter(None, (eigen, neighbours)), key=lambda own: own.seconds, default=None)


def _own_plan(config: SolveConfig) -> Plan:
    assert callable(config.preconditioner)
    return Plan("ignore", preconditioner=Own(config.preconditioner), reason="a preconditioner of your own")


def _reuses(system: NoisySystem) -> bool:
    """Whether a preconditioner of an earlier system is used, without planning."""
    reused = system.reused_preconditioner
    return reused is not None and (not system.fillable or bool(reused.num_neighbours))


def _asked_for(system: NoisySystem, what: str) -> str:
    return "asked for" if isinstance(system, GapSystem) else f"{about_sum(system)}{what}"


def _reusing_plan(system: NoisySystem) -> Plan:
    assert system.reused_preconditioner is not None
    rank, count = system.reused_preconditioner.rank, system.reused_preconditioner.num_neighbours
    chosen = Neighbours(count) if count else Eigen((rank,))
    return Plan("ignore", rank, chosen, reason="a preconditioner set up for a matrix like it")


def _best_from(system: NoisySystem, task: Task, rank: int | None) -> Plan:
    """The best rank of ignore-gaps for the starting point of the task."""
    cold = best_rank(system, task.num_rhs, task.reduction, rank)
    return cold if task.start >= 1.0 else _quicker(system, task, rank, cold) or cold


def _quicker(system: NoisySystem, task: Task, rank: int | None, cold: Plan) -> Plan | None:
    """For a start from a guess: the cheapest rank with half the iterations of a cold start and few more FLOPs."""
    still_needed = min(0.5, task.reduction / max(task.start, task.reduction))
    affordable = _SETUP_ADVANTAGE * cold.flops + _NEGLIGIBLE_FLOPS
    plans = rank_plans(system, task.num_rhs, still_needed, rank)
    fitting = [own for own in plans if own.iterations <= 0.5 * cold.iterations and own.flops <= affordable]
    return min(fitting, key=lambda own: own.flops, default=None)


def _plans_from_guess(system: NoisySystem, task: Task, config: SolveConfig) -> Iterator[Plan]:
    plans = list(_plans_from_zero(system, replace(task, start=1.0), config))
    cold = plans[0]
    if cold.direct or cold.num_neighbours or "eigen" not in config.preconditioners or not has_low_rank(system):
        yield from plans
        return
    if cold.method == "spectral":  # its iterations are very cheap
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
        # twice the expected iterations, and at least as many as take the time of planning
        affordable = 2.0 * _SKIP_PLANNING_BELOW_SECONDS * fill.iterations / fill.seconds
        yield replace(fill, budget=max(10 + 2 * fill.budget, int(affordable)))
    known, reserve = _known_plans(system, task, config, dense if rows <= limit else None)
    if fill is not None and not soon:
        fill = _tried(system, fill, task, config, known[0].seconds if known else math.inf)
    others = [*known[:1], *([] if fill is None or soon else [fill]), *([] if by_gaps is None else [by_gaps])]
    ceiling = min((own.seconds for own in others), default=math.inf)
    reliable = _with_neighbours(neighbour_plan(system, task.num_rhs, task.reduction, config, ceiling), known)
    if fill is None or soon:
        yield from _in_turn([*reliable, *reserve])
    elif by_gaps is not None and by_gaps.seconds < min(fill.seconds, reliable[0].seconds):
        yield from _in_turn([by_gaps, *reliable, *reserve])
    elif reliable[0].seconds <= fill.seconds:
        yield from _in_turn([*reliable, replace(fill, budget=0), *reserve])
    else:
        # as many iterations as the alternative would cost, and at least the expected number for scattered gaps
        affordable = reliable[0].seconds / (fill.seconds / fill.budget)
        budget = 0 if math.isinf(affordable) else max(fill.budget, int(affordable))
        yield from _in_turn([replace(fill, budget=budget), *reliable, *reserve])


def _tried(system: NoisySystem, fill: Plan, task: Task, config: SolveConfig, other: float) -> Plan:
    """Filling with the iterations of a trial, if the bound exceeds the cost of another plan and the trial is cheap.

    :param other: seconds of the other plan.
    """
    cost = TRIAL_STEPS * fill.seconds / max(1.0, fill.iterations * task.num_rhs)
    if fill.seconds < other or cost > _WORTH_A_TRIAL * other or not isinstance(system, GapSystem):
        return fill
    if not system.gaps_are_scattered:  # a trial is unreliable for clouds
        return fill
    condition = expected_condition(gap_trial(system))
    tried = filling_plan(system, task.num_rhs, task.reduction, config.max_iterations, condition)
    return min(fill, tried, key=lambda own: own.seconds)


def _known_plans(
    system: NoisySystem, task: Task, config: SolveConfig, dense: Plan | None
) -> tuple[list[Plan], list[Plan]]:
    """Plans whose cost can be predicted, cheapest first; and a higher rank to try if they fail."""
    if callable(config.preconditioner):
        return [_own_plan(config)], []
    known, reserve = [] if dense is None else [dense], []
    is_product = isinstance(system, GapSystem)
    rank = None if is_product else config.rank
    uses_eigen = "eigen" in config.preconditioners or (is_product and config.preconditioner == "auto")
    if uses_eigen and rank != 0 and has_low_rank(system):
        iterative = best_rank(system, task.num_rhs, task.reduction, rank)
        known.append(iterative)
        fewest = min(rank_plans(system, task.num_rhs, task.reduction, rank), key=lambda own: own.iterations)
        reserve = [fewest] if fewest.iterations <= 0.5 * iterative.iterations < math.inf else []
    return sorted(known, key=lambda own: own.seconds), reserve


def _with_neighbours(neighbours: Plan | None, known: list[Plan]) -> list[Plan]:
    """All plans that do not depend on the shape of the gaps, cheapest first.

    The estimated number of iterations with neighbours may be too low, so they may cost twice as much as the next plan.
    """
    if neighbours is None:
        return known or [Plan("ignore", seconds=math.inf, reason="no preconditioner")]
    if not known or known[0].seconds < neighbours.seconds or math.isinf(known[0].seconds):
        return sorted([*known, neighbours], key=lambda own: own.seconds)
    affordable = neighbours.iterations * known[0].seconds / neighbours.seconds
    return [replace(neighbours, budget=math.ceil(2.0 * affordable)), *known]


def _in_turn(plans: Sequence[Plan]) -> list[Plan]:
    """Makes all plans except the last stop if there is no progress, because another one follows."""
    return [*(replace(own, patience=_PATIENCE_ITERATIONS) for own in plans[:-1]), plans[-1]]


def solve_flops(system: NoisySystem, num_rhs: int, config: SolveConfig) -> float:
    """Expected FLOPs of `num_rhs` solves."""
    task = Task(num_rhs, config.tolerance)
    if config.method in ("fill", "spectral") and isinstance(system, GapSystem):
        filling = fill_plan if config.method == "fill" else filling_plan
        return filling(system, num_rhs, config.tolerance, config.max_iterations).flops
    if config.method == "penalize":
        return best_rank(system, num_rhs, config.tolerance).flops
    chosen = next(plan(system, task, config))
    if chosen.direct == "data":
        return system.num_train**3 / 3.0 + 2.0 * system.num_train**2 * num_rhs
    if math.isfinite(chosen.flops) or not has_low_rank(system):
        return chosen.flops
    return best_rank(system, num_rhs, config.tolerance).flops
