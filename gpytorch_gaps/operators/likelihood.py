"""Computes ``y' A^-1 y`` and ``log|A|``: chooses the method of each, and the process that computes it."""

from torch import Tensor

from gpytorch_gaps.distributed.columns import Share, same_problem, sum_over_ranks
from gpytorch_gaps.operators.estimates import (
    Covariance,
    estimated_together,
    log_determinant,
    no_quadratic_form,
    quadratic_form,
)
from gpytorch_gaps.operators.warm_likelihood import warm_terms
from gpytorch_gaps.reports import LogdetReport
from gpytorch_gaps.solvers.config import SolveConfig
from gpytorch_gaps.solvers.planning.logdet import LogdetPlan, plan_logdet


def likelihood_terms(operator: Covariance, rhs: Tensor, config: SolveConfig) -> tuple[Tensor, Tensor, LogdetReport]:
    """``rhs' A^-1 rhs`` per column, ``log|A|``, and a report on the latter. Differentiable.

    :param operator: A, of the batch shape of rhs.
    :param rhs: shape (*batch, N, C); C may be zero.
    :return: shape (*batch, C); shape batch; and a report.
    """
    chosen = agreed_plan(operator, rhs, config)
    warm = config.warm_start is not None and chosen.is_estimate and not operator.batch_shape and rhs.size(-1) > 0
    if warm:
        return warm_terms(operator, rhs, chosen, config)
    if chosen == LogdetPlan("stochastic", "data") and operator.whitened() is None:
        return estimated_together(operator, rhs, config)
    logdet, report = log_determinant(operator, chosen, config)
    # sums over processes come last, after every process has computed its part of both terms
    communicator = config.communicator
    if communicator.size == 1 or not chosen.is_estimate:
        return quadratic_form(operator, rhs, config), logdet, report
    has_data = Share(communicator, config.num_probes).has_data
    quad = quadratic_form(operator, rhs, config) if has_data else no_quadratic_form(operator, rhs)
    return sum_over_ranks(communicator, quad, operator.representation()), logdet, report


def agreed_plan(operator: Covariance, rhs: Tensor | None, config: SolveConfig) -> LogdetPlan:
    """How the log-determinant is computed. All processes use the plan of the first: plans depend on rounding.

    :raises RankError: if processes have different data or hyperparameters.
    """
    chosen = plan_logdet(operator.system(), config)
    if config.communicator.size == 1:
        return chosen
    return LogdetPlan(*same_problem(config.communicator, tuple(chosen), [rhs, *operator.representation()]))
