"""Products with Kronecker matrices that never form them."""

from collections.abc import Sequence
from math import inf, prod

import torch
from torch import Tensor


def kron_matmul(factors: Sequence[Tensor], x: Tensor) -> Tensor:
    """``(F_1 (x) ... (x) F_d) x``; factors ``(*batch, q_i, m_i)``, x ``(*batch, M, C)``, result ``(*batch, Q, C)``."""
    sizes = [f.shape[-1] for f in factors]
    if prod(sizes) != x.shape[-2]:
        raise ValueError(f"factors with {sizes} columns do not act on {x.shape[-2]} rows")
    batch = torch.broadcast_shapes(x.shape[:-2], *(f.shape[:-2] for f in factors))
    num_rhs = x.shape[-1]
    y = x.expand(*batch, *x.shape[-2:])
    for i in _order([(f.shape[-2], f.shape[-1]) for f in factors]):
        left, right = prod(sizes[:i]), prod(sizes[i + 1 :]) * num_rhs
        y = factors[i].unsqueeze(-3) @ y.reshape(*batch, left, sizes[i], right)  # shape: (*batch, left, q_i, right)
        sizes[i] = factors[i].shape[-2]
    return y.reshape(*batch, prod(sizes), num_rhs)


def kron_matmul_flops(shapes: Sequence[tuple[int, int]], num_rhs: int = 1) -> int:
    """FLOPs of :func:`kron_matmul` for factors of ``shapes`` ``(q_i, m_i)`` and ``num_rhs`` right-hand sides."""
    sizes = [m for _, m in shapes]
    flops = 0
    for i in _order(shapes):
        q, m = shapes[i]
        flops += 2 * q * m * prod(sizes[:i]) * prod(sizes[i + 1 :]) * num_rhs
        sizes[i] = q
    return flops


def kron_diagonal(diagonals: Sequence[Tensor]) -> Tensor:
    """Diagonal ``(*batch, M)`` of ``diag(v_1) (x) ... (x) diag(v_d)`` for vectors ``(*batch, m_i)``."""
    result = diagonals[0]
    for v in diagonals[1:]:
        result = (result.unsqueeze(-1) * v.unsqueeze(-2)).flatten(-2)
    return result


def _order(shapes: Sequence[tuple[int, int]]) -> list[int]:
    def key(i: int) -> float:
        q, m = shapes[i]
        return -inf if q == 0 else inf if m == 0 else (q - m) / (q * m)

    return sorted(range(len(shapes)), key=key)
