"""Whether exact variances are affordable, and whether they can be computed without solves."""

from gpytorch_gaps.preconditioners.low_rank import LowRankPreconditioner
from gpytorch_gaps.solvers.config import SolveConfig
from gpytorch_gaps.solvers.gap_system import GapSystem
from gpytorch_gaps.solvers.planning.costs import best_rank, cheaper_than_eigen, rank_choices
from gpytorch_gaps.solvers.planning.plans import DENSE_REACH, solve_flops
from gpytorch_gaps.solvers.preconditioning import has_low_rank, low_rank_approximation
from gpytorch_gaps.solvers.system import NoisySystem

_AFFORDABLE_FLOPS = 1e13  # limit for exact variances: a few minutes on two cores
_ALWAYS_EXACT_POINTS_PER_DRAW = 4  # if the ratio of points to draws is smaller, variances are always exact
_LOW_RANK_LIMIT = 4096  # solves are used instead of an approximation of higher rank


def too_expensive(system: NoisySystem, num_points: int, config: SolveConfig) -> str | None:
    """The reason not to make this many exact solves unless asked to; None if they are affordable."""
    flops = solve_flops(system, num_points, config)
    if flops <= _AFFORDABLE_FLOPS or num_points <= _ALWAYS_EXACT_POINTS_PER_DRAW * config.variance_samples:
        return None
    return f"{num_points} exact ones would take {flops / 1e12:.0f} TFLOP"


def low_rank_form(
    system: NoisySystem, num_rhs: int, config: SolveConfig, level: float = 1.0
) -> tuple[LowRankPreconditioner, float] | None:
    """A ``P = F C F' + D`` that equals the matrix to `level` times the tolerance, and a bound on the difference.

    Returns None if there is no such P, or if `num_rhs` solves cost less.
    """
    free = config.method == "auto" and "eigen" in config.preconditioners and config.rank is None
    if not free or system.row_scale is not None or system.batched or not has_low_rank(system):
        return None
    if system.other is not None or cheaper_than_eigen(system, num_rhs, DENSE_REACH * config.dense_size):
        return None
    # variances may be as far below the noise as the noise is below the prior
    noise, prior = system.least_noise, sum(float(term.largest_variance) for term in system.terms)
    ranks = _ranks_to(system, level * config.tolerance * noise / max(noise, prior))
    if ranks is None or not sum(ranks):
        return None
    choice = next(iter(rank_choices(system, sum(ranks))))
    rank = sum(ranks)
    form_flops = choice.setup_flops + num_rhs * (float(rank) ** 2 + 2.0 * len(system.terms[0].shape) * rank)
    if form_flops > best_rank(system, num_rhs, config.tolerance).flops:
        return None
    form = low_rank_approximation(system, ranks)
    return (form, form.left_over) if form.left_over <= config.tolerance else None


def _ranks_to(system: NoisySystem, level: float) -> tuple[int, ...] | None:
    """The ranks that leave no eigenvalues of more than `level` times the noise; None above the limit."""
    if isinstance(system, GapSystem):
        limit = min(_LOW_RANK_LIMIT, system.num_train)
        values, _ = system.term.leading(limit + 1)
        rank = int((values > level * system.least_noise).sum())
        return (rank,) if rank <= limit else None
    return next((choice.ranks for choice in rank_choices(system) if choice.left_over <= level), None)
