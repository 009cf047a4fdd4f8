"""Which log-determinant, and on which side of the block identity.

Exact where a dense factorisation is small, or cheaper than an estimate. Otherwise Lanczos goes where the matrix is well
conditioned: to the observations, where an affordable rank takes the spectrum down to the noise, so that the
preconditioner leaves next to no variance; else to the gaps, unless that costs several times as much.
"""

import math
from typing import NamedTuple

from gpytorch_gaps.solvers.config import SolveConfig
from gpytorch_gaps.solvers.gap_system import GapSystem
from gpytorch_gaps.solvers.planning.costs import best_rank, fill_plan
from gpytorch_gaps.solvers.planning.plans import DENSE_REACH, Task, plan
from gpytorch_gaps.solvers.system import NoisySystem

_CHEAP_CHOLESKY_ROWS = 800
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
    if config.rank is not None:
        return "data", math.inf
    data = best_rank(system, columns, tolerance)
    if not system.fillable:
        return "data", data.flops
    gaps = fill_plan(system, columns, tolerance, config.max_iterations)
    reaches_noise = bool(data.rank) and system.term.left_out(data.rank) <= system.least_noise
    if not reaches_noise and gaps.flops <= _GAP_SIDE_WORTH * data.flops:
        return "gaps", gaps.flops
    return "data", data.flops
