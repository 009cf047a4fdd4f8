"""A few Lanczos steps from random signs, to estimate the spectrum of a matrix.

**Condition number**: the ratio of the extreme Ritz values. If it still grew in the second half of the steps, it is
extrapolated.

**Variance of log-determinants**: for random signs z, ``z' f(A) z`` has a variance of about ``2 n Var f(x)``, where x is
distributed as the eigenvalues. The Ritz values and their weights approximate this distribution.
"""

import math

import torch
from torch import Tensor

from gpytorch_gaps.solvers.gap_system import GapSystem
from gpytorch_gaps.solvers.krylov import Closure, ConjugateGradients
from gpytorch_gaps.solvers.logdet.stochastic import log_residuals
from gpytorch_gaps.solvers.warm_start import random_signs

TRIAL_STEPS = 10
_SETTLED_GROWTH = 1.4  # if the condition number grows less in the second half of the steps, it is nearly final


def lanczos_trial(
    matmul: Closure, size: int, batch: torch.Size, like: Tensor, precondition: Closure | None = None
) -> Tensor:
    """The tridiagonal matrix of a few Lanczos steps, for every member of a batch. shape: (*batch, 1, k, k)

    :param like: a tensor of the dtype and on the device of the matrix.
    """
    signs = random_signs(0, 1, size, like).mT
    signs = signs.expand(*batch, *signs.shape).clone(memory_format=torch.contiguous_format)
    run = ConjugateGradients(matmul, signs, precondition=precondition, keep_lanczos=True)
    for _ in range(TRIAL_STEPS):
        run.step()
    return run.lanczos()


def gap_trial(system: GapSystem) -> Tensor:
    """A trial of the matrix of fill-gaps, made once. shape: (*batch, 1, k, k)"""
    batch = torch.broadcast_shapes(system.noise.shape[:-1], system.kernel_trace.shape)
    size = len(system.gap_index)
    return system.cached("gap trial", lambda: lanczos_trial(system.gap_matmul, size, batch, system.noise))


def expected_condition(tridiagonal: Tensor) -> float:
    """The condition number of the matrix of a trial, the worst of a batch."""
    half = tridiagonal.size(-1) // 2
    spreads = torch.stack([_spread(tridiagonal), _spread(tridiagonal[..., :half, :half])])
    whole, early = spreads.nan_to_num(math.inf).flatten(1).amax(-1).tolist()  # one read
    return whole * max(1.0, whole / early / _SETTLED_GROWTH) ** 2


def expected_log_variance(tridiagonal: Tensor, size: int, mean_is_one: bool = False) -> float:
    """The variance of the log-determinant that one probe estimates, the worst of a batch.

    :param mean_is_one: whether the mean of the eigenvalues is known to be one, as in `log_quadrature`.
    """
    weights, logs = log_residuals(tridiagonal, mean_is_one, own_slope=True)
    mean = (weights * logs).sum(-1, keepdim=True)
    return 2.0 * size * float((weights * (logs - mean).square()).sum(-1).max())


def _spread(tridiagonal: Tensor) -> Tensor:
    """Largest over smallest eigenvalue. shape: (..., k, k) -> (...)"""
    values = torch.linalg.eigvalsh(tridiagonal)
    return values[..., -1] / values[..., 0].clamp_min(torch.finfo(values.dtype).tiny)
