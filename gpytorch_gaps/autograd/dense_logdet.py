"""``log|A|`` of a symmetric positive definite matrix, whose gradient is ``A^-1``."""

from typing import Any

import torch
from linear_operator.utils.cholesky import psd_safe_cholesky
from torch import Tensor
from torch.autograd import Function

from gpytorch_gaps.autograd.first_order import refuse_second_order


def dense_logdet(matrix: Tensor, cholesky: Tensor | None = None) -> Tensor:
    """Differentiable in the matrix; its Cholesky factor, where that is known, is taken as it is.

    shape: (*batch, n, n) -> batch
    """
    return _DenseLogdet.apply(matrix, cholesky)


def logdet_from(cholesky: Tensor) -> Tensor:
    """Of the matrix with this factor. shape: (*batch, n, n) -> batch"""
    return 2.0 * cholesky.diagonal(dim1=-2, dim2=-1).log().sum(-1)


class _DenseLogdet(Function):
    """By Cholesky; its gradient is ``A^-1``, at a third of the cost of differentiating the factorisation."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, cholesky: Tensor | None) -> Tensor:
        cholesky = psd_safe_cholesky(matrix) if cholesky is None else cholesky
        ctx.save_for_backward(cholesky)
        return logdet_from(cholesky)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        refuse_second_order()
        (cholesky,) = ctx.saved_tensors
        return grad_outputs[0][..., None, None] * torch.cholesky_inverse(cholesky), None
