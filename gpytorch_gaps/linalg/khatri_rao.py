"""Row-wise Kronecker (Khatri-Rao) products: row q is ``F_1[q] ⊗ ... ⊗ F_d[q]``, one point against a whole grid.

The Q x M matrix is never stored. Rows are processed in chunks; within a chunk the longest axis is contracted by one
matrix product, the others row by row.

>>> khatri_rao_matmul([torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]])], torch.eye(4)).tolist()
[[3.0, 4.0, 6.0, 8.0]]
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_CHUNK_NUMBERS = 2**23  # numbers in memory at a time: 64 MiB of float64


def khatri_rao_matmul(factors: Sequence[Tensor], values: Tensor) -> Tensor:
    """``R v`` with rows ``R[q] = F_1[q] ⊗ ... ⊗ F_d[q]``. Cost: 2 Q M C.

    shape: (*batch, Q, m_i) each and (*batch, M, C) -> (*batch, Q, C)
    """
    tensor, order = _longest_first(factors, values)
    first, rest = factors[order[0]], [factors[i] for i in order[1:]]

    def rows(first: Tensor, tensor: Tensor, *rest: Tensor) -> Tensor:
        product = first @ tensor.flatten(-len(rest) - 1)  # shape: (*batch, q, m_2 .. m_d C)
        product = product.unflatten(-1, tensor.shape[-len(rest) - 1 :])
        for done, factor in enumerate(rest):
            left = len(rest) - done  # the dimensions after this axis: further axes, and C
            contracted = factor.unsqueeze(-2) @ product.flatten(-left)  # shape: (*batch, q, 1, .. C)
            product = contracted.squeeze(-2).unflatten(-1, product.shape[-left:])
        return product

    parts = [_bounded(rows, first[..., c, :], tensor, *(f[..., c, :] for f in rest)) for c in _chunks(factors, values)]
    return torch.cat(parts, -2)


def khatri_rao_t_matmul(factors: Sequence[Tensor], values: Tensor) -> Tensor:
    """``R' u``. shape: (*batch, Q, m_i) each and (*batch, Q, C) -> (*batch, M, C)"""
    shape = [factor.size(-1) for factor in factors]
    order = sorted(range(len(shape)), key=lambda i: -shape[i])
    first, rest = factors[order[0]], [factors[i] for i in order[1:]]

    def rows(first: Tensor, columns: Tensor, *rest: Tensor) -> Tensor:
        product = columns.unsqueeze(-2)  # shape: (*batch, q, .. , C)
        for factor in reversed(rest):
            product = (factor[..., :, None, None] * product.unsqueeze(-3)).flatten(-3, -2)
        return first.mT @ product.flatten(-2)  # shape: (*batch, m_1, m_2 .. m_d C)

    total: Tensor | None = None
    for c in _chunks(factors, values):
        part = _bounded(rows, first[..., c, :], values[..., c, :], *(f[..., c, :] for f in rest))
        total = part if total is None else total + part
    assert total is not None
    ordered = total.unflatten(-1, (*(shape[i] for i in order[1:]), values.size(-1)))
    lead = ordered.dim() - len(shape) - 1
    back = [lead + order.index(i) for i in range(len(shape))]
    return ordered.permute(*range(lead), *back, ordered.dim() - 1).flatten(lead, -2)


def _longest_first(factors: Sequence[Tensor], values: Tensor) -> tuple[Tensor, list[int]]:
    """The grid values as a tensor with the longest axis first, and the order of the axes."""
    shape = [factor.size(-1) for factor in factors]
    order = sorted(range(len(shape)), key=lambda i: -shape[i])
    tensor = values.unflatten(-2, shape)
    lead = values.dim() - 2
    return tensor.permute(*range(lead), *(lead + i for i in order), tensor.dim() - 1), order


def _chunks(factors: Sequence[Tensor], values: Tensor) -> Iterator[slice]:
    """Slices of rows whose intermediates fit `_CHUNK_NUMBERS`."""
    sizes = [factor.size(-1) for factor in factors]
    batch = torch.broadcast_shapes(*(factor.shape[:-2] for factor in factors), values.shape[:-2]).numel()
    numbers = batch * math.prod(sizes) // max(sizes) * values.size(-1)
    size = max(1, _CHUNK_NUMBERS // max(1, numbers))
    rows = factors[0].size(-2)
    for start in range(0, max(rows, 1), size):
        yield slice(start, min(start + size, rows))


def _bounded(function, *tensors: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
    """``function(*tensors)``; if it is differentiated, its intermediates are recomputed instead of stored."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return checkpoint(function, *tensors, use_reentrant=False)
    return function(*tensors)
