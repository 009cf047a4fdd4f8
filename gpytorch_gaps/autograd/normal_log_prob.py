"""``log N(r | 0, A)`` of a dense covariance, with its closed gradients.

    log N = -(r' a + log|A| + n log 2 pi) / 2,    a = A^-1 r,    d/dA = (a a' - A^-1) / 2,    d/dr = -a

A third of the cost of differentiating the factorisation.
"""

import math
from typing import Any

import torch
from linear_operator.utils.cholesky import psd_safe_cholesky
from torch import Tensor
from torch.autograd import Function

from gpytorch_gaps.autograd.dense_logdet import logdet_from
from gpytorch_gaps.autograd.first_order import refuse_second_order


def normal_log_prob(residual: Tensor, covariance: Tensor) -> Tensor:
    """Differentiable in both. shape: (n,), (n, n) -> ()"""
    return _NormalLogProb.apply(residual, covariance)


class _NormalLogProb(Function):
    @staticmethod
    def forward(ctx: Any, residual: Tensor, covariance: Tensor) -> Tensor:
        cholesky = psd_safe_cholesky(covariance)
        weights = torch.cholesky_solve(residual.unsqueeze(-1), cholesky).squeeze(-1)
        ctx.save_for_backward(weights, cholesky)
        return -0.5 * (residual @ weights + logdet_from(cholesky) + len(residual) * math.log(2 * math.pi))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        refuse_second_order()
        weights, cholesky = ctx.saved_tensors
        outer = torch.cholesky_inverse(cholesky).neg_().addr_(weights, weights)
        return -grad_outputs[0] * weights, outer.mul_(0.5 * grad_outputs[0])
