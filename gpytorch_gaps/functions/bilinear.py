"""The gradient of ``sum_c u_c' (K_1 (x) ... (x) K_d) v_c`` with respect to every factor."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gpytorch_gaps.kronecker.products import kron_matmul

_CHUNK_NUMBERS = 2**23  # grid numbers differentiated at once; autograd keeps one copy an axis


def kron_bilinear_gradient(factors: Sequence[Tensor], left: Tensor, right: Tensor) -> list[Tensor]:
    """One gradient a factor, columns visited in chunks so that memory stays bounded.

    :param factors: shape (*batch, q_i, m_i) each.
    :param left: U on the grid of rows, shape (*batch, Q, C).
    :param right: V on the grid of columns, shape (*batch, M, C).
    """
    leaves = [factor.detach().requires_grad_(True) for factor in factors]
    gradients = [torch.zeros_like(factor) for factor in leaves]
    rows = max(left.shape[:-1].numel(), right.shape[:-1].numel(), 1)
    chunk = max(1, _CHUNK_NUMBERS // rows)
    for start in range(0, left.size(-1), chunk):
        u, v = left[..., start : start + chunk], right[..., start : start + chunk]
        with torch.enable_grad():
            value = (u * kron_matmul(leaves, v)).sum()
        for total, part in zip(gradients, torch.autograd.grad(value, leaves), strict=True):
            total += part
    return gradients
