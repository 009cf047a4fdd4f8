"""Which log-determinant, and on which side of the block identity.

Exact where a dense factorisation is cheap. Otherwise Lanczos goes where the matrix is well conditioned: to the
observations, where an affordable rank takes the spectrum down to the noise, so that the preconditioner leaves next to
no variance; to the gaps, where none does.
"""

from gpytorch_gaps.solvers.choose import best_rank
from gpytorch_gaps.solvers.system import GapSystem

_CHEAP_CHOLESKY = 800


def choose_logdet(
    system: GapSystem, method: str, *, rank: int | None, num_probes: int, tolerance: float, max_cholesky: float
) -> tuple[str, str]:
    """The method ("exact", "stochastic", "nystrom") and the side ("data", "gaps").

    :param method: as asked for; "auto" is decided here.
    :param rank: of the eigen preconditioner, which belongs to the data side; None leaves the choice.
    :param max_cholesky: largest matrix for which "auto" is exact.
    """
    rows, gaps = system.num_train, system.num_cells - system.num_train
    # the gap side subtracts what the whole grid adds: where the data side is cheap, it is the more accurate
    side = "gaps" if system.fillable and gaps < rows and rows > min(_CHEAP_CHOLESKY, max_cholesky) else "data"
    if method == "auto":
        method = "exact" if (gaps if side == "gaps" else rows) <= max_cholesky else "stochastic"
    if method == "stochastic":
        side = "gaps" if rank is None and _prefers_gaps(system, num_probes, tolerance) else "data"
    return method, side


def _prefers_gaps(system: GapSystem, num_probes: int, tolerance: float) -> bool:
    if not system.fillable:
        return False
    if not len(system.gap_index):
        return True  # the log-determinant of the whole grid is a sum over eigenvalues
    plan = best_rank(system, num_probes + 1, tolerance)
    return not plan.rank or system.eigenvalue_after(plan.rank) > float(system.noise.min())
