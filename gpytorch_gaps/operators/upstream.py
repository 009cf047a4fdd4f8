"""Solves in the conventions of linear_operator: ``_solve(rhs, preconditioner, num_tridiag)``.

linear_operator passes a preconditioner as a function, and expects Lanczos matrices with the probes as first dimension.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gpytorch_gaps import settings
from gpytorch_gaps.preconditioners.low_rank import LowRankPreconditioner
from gpytorch_gaps.preconditioners.neighbours import NeighbourPreconditioner
from gpytorch_gaps.reports import warn_not_converged
from gpytorch_gaps.solvers.krylov import on_device
from gpytorch_gaps.solvers.matrix_system import GivenPreconditioner, MatrixSystem
from gpytorch_gaps.solvers.refine import Preconditioner
from gpytorch_gaps.solvers.solve import Solved, padded, solve_with_lanczos
from gpytorch_gaps.solvers.system import NoisySystem

_ADVICE = "more max_iterations, a diagonal added to the matrix, or a preconditioner_rank if the operator takes one"
_EIGEN_ON_HOST_BELOW = 32  # linear_operator copies smaller Lanczos matrices to the host for their eigenvalues


def as_preconditioner(function: Callable[[Tensor], Tensor] | None) -> Preconditioner | None:
    """The preconditioner that has this ``solve`` method, or a wrapper of a user's function."""
    owner = getattr(function, "__self__", None)
    if function is None or isinstance(owner, LowRankPreconditioner | NeighbourPreconditioner):
        return owner
    return GivenPreconditioner(function)


def solve_for_upstream(system: NoisySystem, rhs: Tensor, preconditioner: Any, num_tridiag: int) -> Solved:
    """Solves by conjugate gradients. If Lanczos matrices are requested, the tolerance is that of training."""
    config = settings.current()
    config = config.for_training() if num_tridiag else config
    return solve_with_lanczos(system, rhs, as_preconditioner(preconditioner), config, lanczos=bool(num_tridiag))


def solve_matrix(
    matmul: Callable[[Tensor], Tensor], rhs: Tensor, preconditioner: Any, num_tridiag: int, batch_shape: torch.Size
) -> Any:
    """The result of ``_solve`` for an operator without noise. Warns if the solve did not converge.

    :param matmul: the product with the operator, in float64 and detached.
    """
    batch = torch.broadcast_shapes(batch_shape, rhs.shape[:-2])
    wide = rhs.expand(*batch, *rhs.shape[-2:])
    solved = solve_for_upstream(MatrixSystem(matmul, rhs.size(-2), rhs.device), wide, preconditioner, num_tridiag)
    warn_not_converged(replace(solved.report, method="conjugate gradients"), _ADVICE)
    return upstream_result(solved, num_tridiag)


def upstream_result(solved: Solved, num_tridiag: int) -> Any:
    """The solution, with Lanczos matrices of the first columns: shape (num_tridiag, *batch, k, k)."""
    if not num_tridiag:
        return solved.solution
    assert solved.lanczos is not None
    lanczos = solved.lanczos[..., :num_tridiag, :, :].movedim(-3, 0)
    if on_device(lanczos) and lanczos.size(-1) < _EIGEN_ON_HOST_BELOW:
        lanczos = padded(lanczos, _EIGEN_ON_HOST_BELOW)
    return solved.solution, lanczos.to(solved.solution.dtype)
