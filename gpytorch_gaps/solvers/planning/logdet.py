"""Which log-determinant, and on which side of the block identity.

Exact where a dense factorisation is small, or cheaper than an estimate. Otherwise Lanczos goes where the matrix is well
conditioned: to the observations, where an affordable rank takes the spectrum down to the noise, or where neighbours
precondition well, so that the preconditioner leaves next to no variance; else to the gaps, unless that costs several
times as much. Between neighbours and the gaps, what counts is the time that an estimate of a given error takes.
"""

import math
from typing import NamedTuple

from gpytorch_gaps.solvers.config import SolveConfig
from gpytorch_gaps.solvers.gap_system import GapSystem
from gpytorch_gaps.solvers.planning.costs import Plan, best_rank, fill_plan
from gpytorch_gaps.solvers.planning.neighbours import neighbour_plan, neighbour_trial
from gpytorch_gaps.solvers.planning.plans import DENSE_REACH, Task, plan, preconditioned_plan
from gpytorch_gaps.solvers.planning.trial import expected_condition, expected_log_variance, gap_trial
from gpytorch_gaps.solvers.preconditioning import Choice
from gpytorch_gaps.solvers.system import NoisySystem

_CHEAP_CHOLESKY_ROWS = 800
_NEGLIGIBLE_ERROR = 1.0  # nats
_NEIGHBOURS_WORTH = 4.0  # times the seconds of a low rank that stays above the noise: their variance is far smaller
_GAP_SIDE_WORTH = 25.0  # times the cost of the data side: what the smaller variance of the gap side is worth


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
    # the gap side subtracts what the whole grid adds: where the data side is cheap, it is the more accurate
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
    columns, tolerance = config.num_probes + 1, config.train_tolerance
    if system.fillable and not len(system.gap_index):
        return "gaps", 0.0  # the log-determinant of the whole grid is a sum over eigenvalues
    if config.rank is not None or config.preconditioner != "auto":
        return "data", math.inf
    if not system.fillable:
        data = _data_plan(system, config)
        return "data", math.inf if data is None else data.flops
    eigen = best_rank(system, columns, tolerance) if system.least_noise > 0 else None
    if eigen is not None and _reaches_noise(eigen, system):
        return "data", eigen.flops
    trial = gap_trial(system)
    gaps = fill_plan(system, columns, tolerance, config.max_iterations, expected_condition(trial))
    variance = expected_log_variance(trial, len(system.gap_index))
    if variance / config.num_probes <= _NEGLIGIBLE_ERROR**2:
        return "gaps", gaps.flops
    data = _data_plan(system, config)
    if data is not None and data.num_neighbours:
        # what counts is the time that an estimate of a given error takes
        left = neighbour_trial(system, data.num_neighbours)
        merit = data.seconds * expected_log_variance(left, system.num_train, mean_is_one=True)
        return ("gaps", gaps.flops) if gaps.seconds * variance < merit else ("data", data.flops)
    if data is None or gaps.flops <= _GAP_SIDE_WORTH * data.flops:
        return "gaps", gaps.flops
    return "data", data.flops


# -- the preconditioner on the side of the data ----------------------------------------------------------------------


def data_preconditioner(system: NoisySystem, config: SolveConfig) -> Choice | None:
    """What probes and data are preconditioned with, which are solved for together; None for nothing."""
    found = _data_plan(system, config)
    return None if found is None else found.preconditioner


def _data_plan(system: NoisySystem, config: SolveConfig) -> Plan | None:
    columns, tolerance = config.num_probes + 1, config.train_tolerance
    key = ("data plan", columns, tolerance, config.preconditioner, config.rank, config.num_neighbours)
    return system.cached(key, lambda: _make_data_plan(system, columns, tolerance, config))


def _make_data_plan(system: NoisySystem, columns: int, tolerance: float, config: SolveConfig) -> Plan | None:
    if callable(config.preconditioner):
        return preconditioned_plan(system, Task(columns, tolerance), config)
    eigen = None
    if "eigen" in config.preconditioners and system.least_noise > 0:
        eigen = best_rank(system, columns, tolerance, config.rank)
    if eigen is not None and _reaches_noise(eigen, system):
        return eigen
    worth = math.inf if eigen is None else _NEIGHBOURS_WORTH * eigen.seconds
    neighbours = neighbour_plan(system, columns, tolerance, config, worth)
    useless = neighbours is None or (eigen is not None and neighbours.seconds > worth)
    return eigen if useless else neighbours


def _reaches_noise(found: Plan, system: NoisySystem) -> bool:
    """Whether the eigenvalues that a preconditioner leaves out are below the noise."""
    left = sum(term.left_out(rank) for term, rank in zip(system.terms, found.ranks, strict=False))
    return bool(found.rank) and bool(found.ranks) and left <= system.least_noise
