"""Chooses the method for a log-determinant, and the side of the block identity.

It is exact if a dense factorisation is small, or cheaper than an estimate. Otherwise, Lanczos is used on the side where
an estimate of given accuracy takes the least time: on the observations, preconditioned by eigenvectors or neighbours,
or on the gaps. The variance of each estimate is known from the spectrum, or from a trial.
"""

import math
from typing import NamedTuple

import torch

from gpytorch_gaps.solvers.config import SolveConfig
from gpytorch_gaps.solvers.gap_system import GapSystem
from gpytorch_gaps.solvers.planning.costs import Plan, best_rank, fill_plan
from gpytorch_gaps.solvers.planning.neighbours import neighbour_plan, neighbour_trial
from gpytorch_gaps.solvers.planning.plans import DENSE_REACH, Task, plan, preconditioned_plan
from gpytorch_gaps.solvers.planning.trial import expected_condition, expected_log_variance, gap_trial
from gpytorch_gaps.solvers.preconditioning import Choice, has_low_rank, remember_count, remembered_count
from gpytorch_gaps.solvers.system import NoisySystem

_CHEAP_CHOLESKY_ROWS = 800
_NEGLIGIBLE_ERROR = 1.0  # nats


class LogdetPlan(NamedTuple):
    """The method ("exact", "stochastic", "nystrom") and the side ("data", "gaps")."""

    method: str
    side: str

    @property
    def is_estimate(self) -> bool:
        """Whether the log-determinant is found from probes."""
        return self.method == "stochastic"


def plan_logdet(system: NoisySystem, config: SolveConfig) -> LogdetPlan:
    """How to compute ``log|A|`` of a system, with its gradient."""
    if not isinstance(system, GapSystem):
        return _plan_of_sum(system, config)
    method, rows, gaps = config.logdet_method, system.num_train, system.num_cells - system.num_train
    # on the gap side, large terms cancel: if the data side is cheap, it is more accurate
    side = "gaps" if system.fillable and gaps < rows and rows > _CHEAP_CHOLESKY_ROWS else "data"
    size = gaps if side == "gaps" else rows
    if method == "exact" or (method == "auto" and size <= config.dense_size):
        return LogdetPlan("exact", side)
    if method == "nystrom":
        return LogdetPlan(method, side)
    estimate_side, estimate_flops = _estimate(system, config)
    # value and gradient: a factorisation, its inverse, and the products that make and differentiate the matrix
    dense_flops = 3.0 * size**3 + (6.0 * gaps * system.rotation_flops if side == "gaps" else 0.0)
    if method == "auto" and size <= DENSE_REACH * config.dense_size and dense_flops <= estimate_flops:
        return LogdetPlan("exact", side)
    return LogdetPlan("stochastic", estimate_side)


def _plan_of_sum(system: NoisySystem, config: SolveConfig) -> LogdetPlan:
    method = config.logdet_method
    if method == "nystrom":
        raise ValueError(f"logdet_method: got 'nystrom' for {system.kind}, expected 'auto', 'exact' or 'stochastic'")
    if method == "auto":
        task = Task(config.num_probes + 1, config.train_tolerance)
        chosen = next(plan(system, task, config.replace(method="auto")))
        method = "exact" if chosen.method == "cholesky" else "stochastic"
    return LogdetPlan(method, "data")


def _estimate(system: GapSystem, config: SolveConfig) -> tuple[str, float]:
    """The better side for Lanczos, and its FLOPs."""
    if system.fillable and not len(system.gap_index):
        return "gaps", 0.0  # the log-determinant of the whole grid is a sum over eigenvalues
    if config.rank is not None or config.preconditioner != "auto":
        return "data", math.inf
    gaps = _on_gaps(system, config) if system.fillable else None
    data = _on_data(system, config, math.inf if gaps is None else gaps.merit)
    sides = {"gaps": gaps, "data": data}
    best = min(filter(None, sides.values()), key=lambda own: own.merit, default=None)
    return ("gaps" if best is gaps else "data"), math.inf if best is None else best.plan.flops


class _Estimate(NamedTuple):
    """One way to estimate a log-determinant.

    :param variance: variance of the mean over all probes.
    """

    plan: Plan
    variance: float

    @property
    def merit(self) -> float:
        """The time for an estimate of given accuracy. Errors below a nat are ignored. Smaller is better."""
        return self.plan.seconds * (self.variance + _NEGLIGIBLE_ERROR**2)


def _on_gaps(system: GapSystem, config: SolveConfig) -> _Estimate:
    columns, tolerance = config.num_probes + 1, config.train_tolerance
    trial = gap_trial(system)
    # a trial is unreliable for clouds, for which the bound is the safer guess
    condition = expected_condition(trial) if system.gaps_are_scattered else None
    found = fill_plan(system, columns, tolerance, config.max_iterations, condition)
    return _Estimate(found, expected_log_variance(trial, len(system.gap_index)) / config.num_probes)


# -- the preconditioner on the side of the data ----------------------------------------------------------------------


def data_preconditioner(system: NoisySystem, config: SolveConfig) -> Choice | None:
    """The preconditioner for probes and data, which are solved for together; None for no preconditioner."""
    found = _on_data(system, config)
    return None if found is None else found.plan.preconditioner


def _on_data(system: NoisySystem, config: SolveConfig, ceiling: float = math.inf) -> _Estimate | None:
    """The best preconditioner; None if none is allowed.

    :param ceiling: merit of the other side, which neighbours must beat.
    """
    known = (config.num_probes, config.train_tolerance, config.preconditioner, config.rank, config.num_neighbours)
    return system.cached(("data side", ceiling, *known), lambda: _best_on_data(system, config, ceiling))


def _best_on_data(system: NoisySystem, config: SolveConfig, ceiling: float) -> _Estimate | None:
    columns, tolerance = config.num_probes + 1, config.train_tolerance
    if callable(config.preconditioner):
        own = preconditioned_plan(system, Task(columns, tolerance), config)
        return None if own is None else _Estimate(own, math.inf)
    eigen = neighbours = None
    if "eigen" in config.preconditioners and has_low_rank(system):
        found = best_rank(system, columns, tolerance, config.rank)
        eigen = _Estimate(found, _eigen_variance(system, found) / config.num_probes)
        ceiling = min(ceiling, eigen.merit)
    seconds, sparse = ceiling / _NEGLIGIBLE_ERROR**2, None
    if math.isinf(ceiling) or not system.on_cells or remembered_count(system) != 0:
        sparse = neighbour_plan(system, columns, tolerance, config, seconds, gradients=True)
    if sparse is not None:
        left = neighbour_trial(system, sparse.num_neighbours)
        variance = expected_log_variance(left, system.num_train, mean_is_one=True)
        neighbours = _Estimate(sparse, variance / config.num_probes)
        if neighbours.merit >= ceiling:  # the next training step need not try them
            remember_count(system, 0)
    return min(filter(None, (eigen, neighbours)), key=lambda own: own.merit, default=None)


def _eigen_variance(system: NoisySystem, found: Plan) -> float:
    """The variance of one probe: ``2 n Var log((x + s2) / (mean x + s2))``, with x the eigenvalues beyond the rank.

    The eigenvalues of the observed block are about N/M times those of the whole grid.
    """
    rows, kept = system.num_train, sum(found.ranks)
    every = [term.eigen().products.reshape(-1, system.num_cells).amax(0) for term in system.terms]
    if not every:
        return math.inf
    values = torch.cat(every).sort(descending=True).values[kept:rows] * (rows / system.num_cells)
    left = torch.cat([values, values.new_zeros(max(0, rows - kept - len(values)))])
    logs = ((left + system.least_noise) / (left.sum() / rows + system.least_noise)).log()
    return 2.0 * float(logs.square().sum() - logs.sum().square() / rows)
