"""``log|A_XX|`` exactly, from whichever side is smaller.

From the data: Cholesky of the N x N matrix. From the gaps, with ``A = K + s2 I`` on the whole grid, by the block
identity

    log|A_XX| = log|A| + log|V A^-1 V'|

whose first term is a sum over eigenvalues and whose second is L x L. Gradients are exact and pass through no
eigenvector: the eigenvalues enter as Rayleigh quotients, and ``d log|S| = tr(S^-1 dS)`` with ``dS = -V A^-1 dA A^-1
V'``.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from gpytorch_gaps.autograd.bilinear import kron_bilinear_gradient
from gpytorch_gaps.autograd.dense_logdet import dense_logdet, logdet_from
from gpytorch_gaps.autograd.first_order import refuse_second_order
from gpytorch_gaps.autograd.rayleigh import frozen_eigenvalues
from gpytorch_gaps.linalg.products import kron_diagonal
from gpytorch_gaps.linalg.selection import kron_block
from gpytorch_gaps.solvers.system import GapSystem
from gpytorch_gaps.utils.precision import full_float32


def data_side_logdet(
    factors: Sequence[Tensor], train_index: Tensor, noise: Tensor, cholesky: Tensor | None = None
) -> Tensor:
    """``log|W K W' + D|`` by Cholesky. Cost: N^3 / 3. Differentiable in factors and noise. shape: batch

    :param noise: shape (*batch, 1) or (*batch, N).
    :param cholesky: the factor of the same matrix, where it is known. shape (*batch, N, N).
    """
    matrix = kron_block([factor.double() for factor in factors], train_index, train_index)
    diagonal = noise.double().expand(*noise.shape[:-1], len(train_index))
    return dense_logdet(matrix + torch.diag_embed(diagonal), cholesky)


def gap_side_logdet(system: GapSystem, factors: Sequence[Tensor], noise: Tensor) -> Tensor:
    """``log|A| + log|V A^-1 V'|``. Cost: L^3 / 3 and two Kronecker products a gap. Differentiable. shape: batch

    :param system: the same factors and noise, detached, with their eigen-decomposition.
    """
    spectral = grid_logdet(system, factors, noise)
    if not len(system.gap_index):
        return spectral
    return spectral + _GapBlockLogdet.apply(system, noise.double(), *(factor.double() for factor in factors))


def grid_logdet(system: GapSystem, factors: Sequence[Tensor], noise: Tensor) -> Tensor:
    """``log|K + s2 I| = sum log(lambda_i + s2)`` on the whole grid. Differentiable. shape: batch"""
    products = kron_diagonal(frozen_eigenvalues(factors, system.eigen().vectors))
    return (products + noise.double()).log().sum(-1)


class _GapBlockLogdet(Function):
    """``log|V A^-1 V'|`` by Cholesky ``S = C C'``; the gradient of ``-sum_c b_c' A b_c`` with ``b = A^-1 V' C^-T``."""

    @staticmethod
    def forward(ctx: Any, system: GapSystem, noise: Tensor, *factors: Tensor) -> Tensor:
        cholesky = system.gap_cholesky()
        ctx.system = system
        ctx.save_for_backward(cholesky, noise, *factors)
        return logdet_from(cholesky)

    @staticmethod
    @full_float32()
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        cholesky, noise, *factors = ctx.saved_tensors
        system: GapSystem = ctx.system
        inverse_root = torch.linalg.solve_triangular(
            cholesky, torch.eye(cholesky.size(-1), dtype=cholesky.dtype, device=cholesky.device), upper=False
        ).mT
        weight = grad_outputs[0][..., None, None]
        factor_grads = [torch.zeros_like(factor) for factor in factors]
        noise_grad = torch.zeros_like(noise)
        for part in inverse_root.split(system.columns_at_once, dim=-1):
            columns = system.spread_solve(part)
            grads = kron_bilinear_gradient(factors, weight * columns, columns)
            factor_grads = [total - grad for total, grad in zip(factor_grads, grads, strict=True)]
            noise_grad -= (weight * columns.square()).sum((-2, -1)).unsqueeze(-1).sum_to_size(noise.shape)
        return None, noise_grad, *factor_grads
