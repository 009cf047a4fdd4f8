"""Which log-determinant, and on which side of the block identity.

Exact where a dense factorisation is small, or cheaper than an estimate. Otherwise Lanczos goes where the matrix is well
conditioned: to the observations, where an affordable rank takes the spectrum down to the noise, so that the
preconditioner leaves next to no variance; else to the gaps, unless that costs several times as much.
"""

import math

from gpytorch_gaps.solvers.planning.plans import DENSE_REACH, best_rank, fill_plan
from gpytorch_gaps.solvers.system import GapSystem

_CHEAP_CHOLESKY = 800
_WORTH = 25.0  # how many times the cost of the data side the smaller variance of the gap side is worth


def choose_logdet(
    system: GapSystem,
    method: str,
    *,
    rank: int | None,
    num_probes: int,
    tolerance: float,
    max_iterations: int,
    max_cholesky: float,
) -> tuple[str, str]:
    """The method ("exact", "stochastic", "nystrom") and the side ("data", "gaps").

    :param method: as asked for; "auto" is decided here.
    :param rank: of the eigen preconditioner, which belongs to the data side; None leaves the choice.
    :param max_cholesky: matrices up to this size are always exact in "auto", up to five times it where that is cheaper.
    """
    rows, gaps = system.num_train, system.num_cells - system.num_train
    # the gap side subtracts what the whole grid adds: where the data side is cheap, it is the more accurate
    side = "gaps" if system.fillable and gaps < rows and rows > _CHEAP_CHOLESKY else "data"
    size = gaps if side == "gaps" else rows
    if method == "exact" or (method == "auto" and size <= max_cholesky):
        return "exact", side
    if method == "nystrom":
        return method, side
    estimate_side, estimate_flops = _estimate(system, rank, num_probes, tolerance, max_iterations)
    # value and gradient: a factorisation, its inverse, and the products that make and differentiate the matrix
    dense_flops = 3.0 * size**3 + (6.0 * gaps * system.rotation_flops if side == "gaps" else 0.0)
    if method == "auto" and size <= DENSE_REACH * max_cholesky and dense_flops <= estimate_flops:
        return "exact", side
    return "stochastic", estimate_side


def _estimate(
    system: GapSystem, rank: int | None, num_probes: int, tolerance: float, max_iterations: int
) -> tuple[str, float]:
    """The better side for Lanczos, and its FLOPs."""
    if system.fillable and not len(system.gap_index):
        return "gaps", 0.0  # the log-determinant of the whole grid is a sum over eigenvalues
    if rank is not None:
        return "data", math.inf
    data = best_rank(system, num_probes + 1, tolerance)
    if not system.fillable:
        return "data", data.flops
    gaps = fill_plan(system, num_probes + 1, tolerance, max_iterations)
    reaches_noise = bool(data.rank) and system.eigenvalue_after(data.rank) <= float(system.noise.min())
    if not reaches_noise and gaps.flops <= _WORTH * data.flops:
        return "gaps", gaps.flops
    return "data", data.flops
