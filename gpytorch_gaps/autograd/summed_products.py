"""Normal log density of observations whose covariance is a sum of products of small factors, in closed form.

    A = Σ_t s_t ∘_b P_b F_tb P_b' + diag(d),    log N(r | 0, A) = -(r' a + log|A| + n log 2 pi) / 2,    a = A^-1 r

P_b has a row of the identity for every observation: it picks the observation's position among the few positions of a
factor. With ``G = (a a' - A^-1) / 2``, the gradients are

    d log N / d d    = diag(G)
    d log N / d s_t  = sum(G ∘ products of term t)
    d log N / d F_tb = s_t P_b' (G ∘_{c != b} P_c F_tc P_c') P_b

They take a few products of matrices each. Differentiating every operation by itself takes three times as long.

>>> factor = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64, requires_grad=True)
>>> scales, noise = torch.ones(1, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
>>> value = summed_products_log_prob(torch.zeros(2, dtype=torch.float64), noise, scales, [[factor]], [[None]])
>>> round(value.item(), 4)  # -(log 8 + 2 log 2 pi) / 2
-2.8776
>>> (gradient,) = torch.autograd.grad(value, factor)
>>> torch.allclose(gradient, -0.5 * (factor.detach() + torch.eye(2)).inverse())
True
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from linear_operator.utils.cholesky import psd_safe_cholesky
from torch import Tensor
from torch.autograd import Function

from gpytorch_gaps.autograd.dense import logdet_from
from gpytorch_gaps.autograd.first_order import refuse_second_order

Picks = Sequence[Sequence[Tensor | None]]
"""P_b of every factor of every term, shape (n, m_b); None where it is the identity."""


def summed_products_log_prob(
    residual: Tensor, noise: Tensor, scales: Tensor, factors: Sequence[Sequence[Tensor]], picks: Picks
) -> Tensor:
    """``log N(r | 0, A)``, differentiable in the noise, the scales and the factors.

    :param residual: r, shape (n,). Nothing is differentiated by it.
    :param noise: d, shape (n,).
    :param scales: s, shape (T,).
    :param factors: F_tb, shape (m_b, m_b), symmetric, of every block b of every term t.
    :param picks: P_b, for the same terms and blocks.
    """
    flat = [factor for term in factors for factor in term]
    return _SummedProducts.apply(residual, picks, noise, scales, *flat)


class _SummedProducts(Function):
    @staticmethod
    def forward(ctx: Any, residual: Tensor, picks: Picks, noise: Tensor, scales: Tensor, *flat: Tensor) -> Tensor:
        left = iter(flat)
        spread = [[_spread(next(left), pick) for pick in term] for term in picks]
        covariance = torch.diag(noise)
        for scale, term in zip(scales, spread, strict=True):
            covariance.addcmul_(_product(term[:-1], scale), term[-1])
        cholesky = psd_safe_cholesky(covariance)
        weights = torch.cholesky_solve(residual.unsqueeze(-1), cholesky).squeeze(-1)
        ctx.save_for_backward(weights, cholesky, scales, *(one for term in spread for one in term))
        ctx.picks = picks
        return -0.5 * (residual @ weights + logdet_from(cholesky) + len(residual) * math.log(2 * math.pi))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        weights, cholesky, scales, *flat = ctx.saved_tensors
        outer = torch.cholesky_inverse(cholesky).neg_().addr_(weights, weights).mul_(0.5 * grad_outputs[0])
        left, of_scales, of_factors = iter(flat), [], []
        for scale, picks in zip(scales, ctx.picks, strict=True):
            term = [next(left) for _ in picks]
            for number, pick in enumerate(picks):
                others = [one for other, one in enumerate(term) if other != number]
                remaining = _product(others, outer)
                if number == 0:
                    of_scales.append((remaining * term[0]).sum())
                of_factors.append(scale * _gathered(remaining, pick))
        return None, None, outer.diagonal(), torch.stack(of_scales), *of_factors


def _spread(factor: Tensor, pick: Tensor | None) -> Tensor:
    """``P F P'``. shape: (m, m) -> (n, n)"""
    return factor if pick is None else pick @ (factor @ pick.mT)


def _gathered(matrix: Tensor, pick: Tensor | None) -> Tensor:
    """``P' X P``. shape: (n, n) -> (m, m)"""
    return matrix if pick is None else pick.mT @ (matrix @ pick)


def _product(matrices: Sequence[Tensor], start: Tensor) -> Tensor:
    for matrix in matrices:
        start = start * matrix
    return start
