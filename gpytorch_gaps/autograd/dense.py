"""Log-determinant of a dense covariance by its Cholesky factor, with its gradient in closed form.

    d log|A| / dA = A^-1

This costs a third of differentiating the factorisation.

>>> covariance = torch.tensor([[4.0, 0.0], [0.0, 0.25]], dtype=torch.float64, requires_grad=True)
>>> (gradient,) = torch.autograd.grad(dense_logdet(covariance), covariance)
>>> torch.equal(gradient, torch.tensor([[0.25, 0.0], [0.0, 4.0]], dtype=torch.float64))
True
"""

from typing import Any

import torch
from linear_operator.utils.cholesky import psd_safe_cholesky
from torch import Tensor
from torch.autograd import Function

from gpytorch_gaps.autograd.first_order import refuse_second_order


def logdet_from(cholesky: Tensor) -> Tensor:
    """``log|A|`` from the Cholesky factor of A. shape: (*batch, n, n) -> batch"""
    return 2.0 * cholesky.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def solve_from(cholesky: Tensor, x: Tensor) -> Tensor:
    """``A^-1 x`` from the Cholesky factor of A. shape: (*batch, n, C)

    ``torch.cholesky_solve`` does the same, and copies the factor first, which takes as long as a few columns.
    """
    half = torch.linalg.solve_triangular(cholesky, x, upper=False)
    return torch.linalg.solve_triangular(cholesky.mT, half, upper=True)


def dense_logdet(matrix: Tensor) -> Tensor:
    """``log|A|``, differentiable in the symmetric positive definite A. shape: (*batch, n, n) -> batch"""
    return _DenseLogdet.apply(matrix)


def factored_logdet(cholesky: Tensor, kernel: Tensor, noise: Tensor) -> Tensor:
    """``log|K + D|`` from the Cholesky factor of ``K + D``, differentiable in K and in the diagonal D. shape: batch

    :param kernel: K, shape (*batch, n, n). Its numbers are not used, and ``K + D`` is not formed.
    :param noise: D, shape (*batch, 1) or (*batch, n).
    """
    return _FactoredLogdet.apply(cholesky, kernel, noise)


class _DenseLogdet(Function):
    @staticmethod
    def forward(ctx: Any, matrix: Tensor) -> Tensor:
        cholesky = psd_safe_cholesky(matrix)
        ctx.save_for_backward(cholesky)
        return logdet_from(cholesky)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        refuse_second_order()
        (cholesky,) = ctx.saved_tensors
        return torch.cholesky_inverse(cholesky).mul_(grad_outputs[0][..., None, None])


class _FactoredLogdet(Function):
    @staticmethod
    def forward(ctx: Any, cholesky: Tensor, kernel: Tensor, noise: Tensor) -> Tensor:
        ctx.save_for_backward(cholesky)
        ctx.shapes = kernel.shape, noise.shape
        return logdet_from(cholesky)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, Tensor, Tensor]:
        refuse_second_order()
        (cholesky,) = ctx.saved_tensors
        inverse = torch.cholesky_inverse(cholesky).mul_(grad_outputs[0][..., None, None])
        of_kernel, of_noise = ctx.shapes
        return None, inverse.sum_to_size(of_kernel), inverse.diagonal(dim1=-2, dim2=-1).sum_to_size(of_noise)
