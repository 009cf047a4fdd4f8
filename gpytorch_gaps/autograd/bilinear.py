"""The gradient of ``sum_c u_c' (K_1 (x) ... (x) K_d) v_c`` with respect to every factor."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gpytorch_gaps.linalg.factors import Factor, leaf, with_leaf
from gpytorch_gaps.linalg.products import kron_matmul, product_flops
from gpytorch_gaps.utils.precision import full_float32
from gpytorch_gaps.utils.threads import Work, sized

_CHUNK_NUMBERS = 2**23  # grid numbers differentiated at once; autograd keeps one copy per axis


def _work(factors: Sequence[Factor], left: Tensor, right: Tensor) -> Work:
    columns = right.numel() // max(1, right.size(-2))
    return product_flops(factors, columns), right.numel()


@full_float32()
@sized(_work)
def kron_bilinear_gradient(factors: Sequence[Factor], left: Tensor, right: Tensor) -> list[Tensor]:
    """The gradient for every factor. Columns are visited in chunks so that memory stays bounded.

    :param factors: shape (*batch, q_i, m_i) each.
    :param left: U on the grid of rows, shape (*batch, Q, C).
    :param right: V on the grid of columns, shape (*batch, M, C).
    """
    leaves = [leaf(factor).detach().requires_grad_(True) for factor in factors]
    gradients = [torch.zeros_like(factor) for factor in leaves]
    rows = max(left.shape[:-1].numel(), right.shape[:-1].numel(), 1)
    chunk = max(1, _CHUNK_NUMBERS // rows)
    for start in range(0, left.size(-1), chunk):
        u, v = left[..., start : start + chunk], right[..., start : start + chunk]
        with torch.enable_grad():
            value = (u * kron_matmul(list(map(with_leaf, factors, leaves)), v)).sum()
        for total, part in zip(gradients, torch.autograd.grad(value, leaves), strict=True):
            total += part
    return gradients


@full_float32()
@sized(_work)
def thin_bilinear_gradient(roots: Sequence[Tensor], left: Tensor, right: Tensor) -> list[Tensor]:
    """The gradient for symmetric factors ``K_i = U_i U_i'`` with narrow roots.

    The gradient of axis i needs only the roots of the others, ``G_i = Σ_c (u_c x_j U_j') (v_c x_j U_j')'`` over all j
    but i, so that no product is taken with a whole factor.

    :param roots: U_i, shape (*batch, m_i, r_i) each.
    :param left: U on the grid, shape (*batch, M, C).
    :param right: V on the grid, shape (*batch, M, C).
    """
    shape = [root.size(-2) for root in roots]
    batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2], *(root.shape[:-2] for root in roots))
    gradients = [torch.zeros(*batch, size, size, dtype=left.dtype, device=left.device) for size in shape]
    chunk = max(1, _CHUNK_NUMBERS // max(1, batch.numel() * left.size(-2)))
    for start in range(0, left.size(-1), chunk):
        grids = [x[..., start : start + chunk].unflatten(-2, shape) for x in (left, right)]
        for axis, gradient in enumerate(gradients):
            u, v = (_seen_from(axis, roots, grid) for grid in grids)
            gradient += u @ v.mT
    return gradients


def _seen_from(axis: int, roots: Sequence[Tensor], grid: Tensor) -> Tensor:
    """Contracts all axes except one with their roots. shape: (*batch, m_1, .., m_d, C) -> (*batch, m_i, ...)"""
    axes = len(roots)
    for other, root in enumerate(roots):
        if other != axis:
            letters = "".join(chr(ord("a") + i) for i in range(axes + 1))
            target = letters.replace(letters[other], "z")
            grid = torch.einsum(f"...{letters},...{letters[other]}z->...{target}", grid, root)
    return grid.movedim(axis - axes - 1, -axes - 1).flatten(-axes)
