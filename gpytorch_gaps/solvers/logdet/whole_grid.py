"""Log-determinants of the observed block that start from the whole grid, ``A = K + s2 I``.

They use the block identity

    log|A_XX| = log|A| + log|V A^-1 V'|

The first term is a sum over eigenvalues. The matrix S of the second term is L x L. It is factorised, or its
log-determinant is estimated by Lanczos. Gradients are exact and do not pass through eigenvectors: the eigenvalues enter
as Rayleigh quotients, and ``d log|S| = tr(S^-1 dS)`` with ``dS = -V A^-1 dA A^-1 V'``.

The Nystrom approximation of Evans & Nair (2018) uses the N largest eigenvalues lambda_i of K:

    log|A_XX| ~ sum_{i <= N} log(N/M lambda_i + s2)

It is cheap but biased, because it does not depend on where the gaps are. A likelihood with this approximation
overestimates the noise. It is included for comparison.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from gpytorch_gaps.autograd.bilinear import kron_bilinear_gradient
from gpytorch_gaps.autograd.dense import logdet_from
from gpytorch_gaps.autograd.first_order import frozen_eigenvalues, refuse_second_order
from gpytorch_gaps.linalg.factors import Factor, leaf, with_leaf
from gpytorch_gaps.linalg.products import kron_diagonal
from gpytorch_gaps.solvers.gap_system import GapSystem
from gpytorch_gaps.utils.precision import full_float32
from gpytorch_gaps.utils.threads import threads_for


def grid_logdet(system: GapSystem, factors: Sequence[Factor], noise: Tensor) -> Tensor:
    """``log|K + s2 I| = sum log(lambda_i + s2)`` on the whole grid. Differentiable. shape: batch"""
    products = kron_diagonal(frozen_eigenvalues(factors, system.eigen().vectors))
    return (products + noise.double()).log().sum(-1)


def gap_side_logdet(system: GapSystem, factors: Sequence[Factor], noise: Tensor) -> Tensor:
    """``log|A| + log|V A^-1 V'|``. Cost: L^3 / 3 and two Kronecker products per gap. Differentiable. shape: batch

    :param system: the same factors and noise, detached, with their eigen-decomposition.
    """
    whole = grid_logdet(system, factors, noise)
    if not len(system.gap_index):
        return whole
    return whole + _ExactBlock.apply(system, noise.double(), *(leaf(factor).double() for factor in factors))


def estimated_gap_side_logdet(
    system: GapSystem, value: Tensor, left: Tensor, right: Tensor, factors: Sequence[Factor], noise: Tensor
) -> Tensor:
    """``log|V A^-1 V'|`` from an estimate of its value, and probes z that estimate its gradient. shape: batch

    :param left: ``S^-1 z / k`` for the k probes, ``S = V A^-1 V'``. shape (*batch, L, k).
    :param right: z, shape (*batch, L, k).
    """
    leaves = [leaf(factor).double() for factor in factors]
    return _EstimatedBlock.apply(system, value, left, right, noise.double(), *leaves)


def nystrom_logdet(system: GapSystem, factors: Sequence[Factor], noise: Tensor) -> Tensor:
    """The Nystrom approximation, for constant noise. Differentiable in factors and noise. shape: batch"""
    if not system.constant_noise:
        raise ValueError(
            "logdet_method: got 'nystrom' with one noise per point, expected constant noise, or a product over axes; "
            "use 'stochastic'"
        )
    products = kron_diagonal(frozen_eigenvalues(factors, system.eigen().vectors))
    largest = products.topk(min(system.num_train, system.num_cells), dim=-1).values
    # cells observed twice can make N > M: the eigenvalues beyond M are zero
    beyond = max(0, system.num_train - system.num_cells) * noise.double().log().sum(-1)
    return (system.num_train / system.num_cells * largest + noise.double()).log().sum(-1) + beyond


class _ExactBlock(Function):
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
        cholesky, noise, *leaves = ctx.saved_tensors
        eye = torch.eye(cholesky.size(-1), dtype=cholesky.dtype, device=cholesky.device)
        inverse_root = torch.linalg.solve_triangular(cholesky, eye, upper=False).mT
        parts = inverse_root.split(ctx.system.columns_at_once, dim=-1)
        return None, *_gradients(ctx.system, noise, leaves, grad_outputs[0], ((part, part) for part in parts))


class _EstimatedBlock(Function):
    """``log|V A^-1 V'|`` of a given value; the gradient of ``-sum_j (A^-1 V' u_j)' A (A^-1 V' z_j)``."""

    @staticmethod
    def forward(ctx: Any, system: GapSystem, value: Tensor, left: Tensor, right: Tensor, *args: Tensor) -> Tensor:
        ctx.system = system
        ctx.save_for_backward(left, right, *args)
        return value.clone()

    @staticmethod
    @full_float32()
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        left, right, noise, *leaves = ctx.saved_tensors
        grads = _gradients(ctx.system, noise, leaves, grad_outputs[0], [(left, right)])
        return None, None, None, None, *grads


def _gradients(
    system: GapSystem,
    noise: Tensor,
    leaves: Sequence[Tensor],
    weight: Tensor,
    pairs: Iterable[tuple[Tensor, Tensor]],
) -> list[Tensor]:
    """The gradient of ``-sum (A^-1 V' u)' A (A^-1 V' v)`` over pairs (u, v): for the noise, then for every factor.

    :param leaves: the tensors that the factors are made of.
    """
    factors = list(map(with_leaf, system.factors(), leaves))
    factor_grads = [torch.zeros_like(own) for own in leaves]
    noise_grad = torch.zeros_like(noise)
    for left, right in pairs:
        columns = left.shape[:-2].numel() * left.size(-1)
        with threads_for(columns * system.rotation_flops, columns * system.num_cells):
            v = system.spread_solve(right)
            u = weight[..., None, None] * (v if left is right else system.spread_solve(left))
        grads = kron_bilinear_gradient(factors, u, v)
        factor_grads = [total - grad for total, grad in zip(factor_grads, grads, strict=True)]
        noise_grad -= (u * v).sum((-2, -1)).unsqueeze(-1).sum_to_size(noise.shape)
    return [noise_grad, *factor_grads]
