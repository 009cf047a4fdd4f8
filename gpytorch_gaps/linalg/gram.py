"""The masked Gram matrix of eigenvectors of a Kronecker product: ``G = S_p Q' diag(w) Q S_p'``.

An entry is a sum over the grid of a product over axes,
``G[a, b] = sum_x w[x] prod_i Q_i[x_i, a_i] Q_i[x_i, b_i]``,
so all of them can be looked up in one rectangular Kronecker product of the mask with the pair factors
``B_i[x_i, (a_i, b_i)] = Q_i[x_i, a_i] Q_i[x_i, b_i]``. The N x p matrix is formed, in chunks, only if that is cheaper.
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, combinations_with_replacement

import torch
from torch import Tensor

from gpytorch_gaps.linalg.products import kron_matmul, kron_matmul_flops
from gpytorch_gaps.linalg.selection import unravel

Contraction = Callable[[Sequence[Tensor]], Tensor]

_CHUNK_NUMBERS = 2**24  # numbers held at once: 128 MiB of float64
_MAX_PAIR_NUMBERS = 2**28  # largest size of the pair factor of an axis, which is in memory as a whole: 2 GiB


def masked_gram(vectors: Sequence[Tensor], positions: Tensor, weights: Tensor) -> Tensor:
    """``S_p Q' diag(w) Q S_p'`` by the cheaper one of the two contractions.

    :param vectors: Q_i, shape (*batch, m_i, r_i) each.
    :param positions: column of each Q_i that makes up eigenvector a, shape (d, p).
    :param weights: w over the grid, zero on gaps, shape (M,) or (*batch, M).
    :return: shape (*batch, p, p).
    """
    used = [torch.unique(axis, return_inverse=True) for axis in positions]
    vectors = [q[..., columns] for q, (columns, _) in zip(vectors, used, strict=True)]
    positions = torch.stack([local for _, local in used])
    by_axis, by_columns = gram_flops(vectors, positions.size(-1))
    if by_axis <= by_columns:
        return _gram_by_axis(vectors, positions, weights)
    return _gram_by_columns(vectors, positions, weights)


def gram_flops(vectors: Sequence[Tensor], rank: int) -> tuple[float, float]:
    """FLOPs of the contraction axis by axis, and of forming the columns in chunks and multiplying."""
    return pair_flops([(q.size(-2), q.size(-1)) for q in vectors], rank)


def pair_flops(shapes: Sequence[tuple[int, int]], rank: int) -> tuple[float, float]:
    """:func:`gram_flops` from the shapes (m_i, columns in use) of the eigenvectors.

    The first is infinite if the pair factor of an axis does not fit in memory.
    """
    pairs = [(columns * (columns + 1) // 2, size) for size, columns in shapes]
    fits = all(count * size <= _MAX_PAIR_NUMBERS for count, size in pairs)
    by_axis = kron_matmul_flops(pairs, 1) if fits else math.inf
    cells = math.prod(size for size, _ in shapes)
    # the table of pair products is gathered into p^2 entries; a gather costs far more than a FLOP
    return by_axis + 20.0 * rank * rank, float(cells) * rank * (rank + len(shapes))


def structured_gram(vectors: Sequence[Tensor], positions: Tensor, contract: Contraction) -> Tensor:
    """``S_p Q' diag(w) Q S_p'`` axis by axis, for a mask that is not stored as a tensor.

    :param contract: computes ``(x) B_i' w`` for any bases B_i.
    """
    used = [torch.unique(axis, return_inverse=True) for axis in positions]
    vectors = [q[..., columns] for q, (columns, _) in zip(vectors, used, strict=True)]
    return _gram_from_pairs(vectors, torch.stack([local for _, local in used]), contract, _CHUNK_NUMBERS)


def _gram_by_axis(vectors: Sequence[Tensor], positions: Tensor, weights: Tensor) -> Tensor:
    def contract(bases: Sequence[Tensor]) -> Tensor:
        table = kron_matmul([basis.mT for basis in bases], weights.unsqueeze(-1)).squeeze(-1)
        return table.unflatten(-1, [basis.size(-1) for basis in bases])

    # a contraction holds the grid without its first axis, for every pair on that axis
    within = weights.size(-1) // vectors[0].size(-2)
    return _gram_from_pairs(vectors, positions, contract, _CHUNK_NUMBERS, within)


def _gram_from_pairs(
    vectors: Sequence[Tensor], positions: Tensor, contract: Contraction, at_once: int, within: int = 1
) -> Tensor:
    """Looks up every entry in a table of pair products.

    :param at_once: how many numbers of the table are in memory at a time.
    :param within: how many numbers a contraction needs in memory for every pair of the first axis.
    """
    rank = positions.size(-1)
    pairs, pair_of = zip(*[_pair_basis(q) for q in vectors], strict=True)
    tail = math.prod(pair.size(-1) for pair in pairs[1:])
    # pairs of the first axis are visited in chunks: the table of all pair products need not fit in memory
    chunk = max(1, at_once // max(1, tail, within))
    if chunk >= pairs[0].size(-1):
        table = contract(pairs).flatten(-len(vectors))
        first = pair_of[0][positions[0].unsqueeze(-1), positions[0]]  # shape: (p, p)
        return table[..., first * tail + _pairs_of(positions[1:], positions[1:], pair_of[1:])]
    # sorted by their column on the first axis, the eigenvectors of a pair of columns form a block of the matrix
    order = positions[0].argsort(stable=True)
    counts = torch.bincount(positions[0], minlength=vectors[0].size(-1)).tolist()
    ends = list(accumulate(counts))
    blocks = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
    gram = None
    rest = positions[1:, order]
    columns = list(combinations_with_replacement(blocks, 2))  # in the order of the pairs
    here, flat = None, order
    for start in range(0, pairs[0].size(-1), chunk):
        part = pairs[0][..., start : start + chunk]
        table = contract([part, *pairs[1:]]).flatten(-len(vectors)).unflatten(-1, (-1, tail))
        if gram is None:
            gram = table.new_empty(*table.shape[:-2], rank, rank)
        for number, (rows, others) in enumerate(columns[start : start + chunk]):
            if rows != here:
                here, flat = rows, _pairs_of(rest[:, rows], rest, pair_of[1:])
            block = table[..., number, :][..., flat[:, others]]
            gram[..., rows, others] = block
            gram[..., others, rows] = block.mT
    assert gram is not None
    back = torch.empty_like(order).scatter_(0, order, torch.arange(rank, device=order.device))
    return gram[..., back, :][..., back]


def _pairs_of(first: Tensor, second: Tensor, pair_of: Sequence[Tensor]) -> Tensor:
    """The flat index of the pair of columns of every two eigenvectors. shape: (axes, p), (axes, q) -> (p, q)"""
    flat = torch.zeros(first.size(-1), second.size(-1), dtype=torch.long, device=first.device)
    for own, other, rows in zip(first, second, pair_of, strict=True):
        flat = flat * (rows.size(-1) * (rows.size(-1) + 1) // 2) + rows[own.unsqueeze(-1), other]
    return flat


def _pair_basis(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """``B[x, (a, b)] = Q[x, a] Q[x, b]`` for a <= b, shape (*batch, m, pairs); and the column of each (a, b)."""
    columns = vectors.size(-1)
    upper = torch.triu_indices(columns, columns, device=vectors.device)
    row_of = torch.empty(columns, columns, dtype=torch.long, device=vectors.device)
    rows = torch.arange(upper.size(-1), device=vectors.device)
    row_of[upper[0], upper[1]] = rows
    row_of[upper[1], upper[0]] = rows
    return vectors[..., upper[0]] * vectors[..., upper[1]], row_of


def _gram_by_columns(vectors: Sequence[Tensor], positions: Tensor, weights: Tensor) -> Tensor:
    """Rows of ``W Q S_p'`` in chunks of observed cells, multiplied and added up. Cost: N p^2."""
    rank = positions.size(-1)
    observed = weights.reshape(-1, weights.size(-1)).abs().sum(0).nonzero().squeeze(-1)
    shape = tuple(q.size(-2) for q in vectors)
    batch = torch.broadcast_shapes(*(q.shape[:-2] for q in vectors), weights.shape[:-1])
    gram = weights.new_zeros(*batch, rank, rank)
    chunk = max(1, _CHUNK_NUMBERS // (max(rank, 1) * max(batch.numel(), 1)))
    for cells in observed.split(chunk):
        rows = weights.new_ones(())
        for q, cell, position in zip(vectors, unravel(cells, shape), positions, strict=True):
            rows = rows * q[..., cell, :][..., position]
        gram += rows.mT @ (weights[..., cells].unsqueeze(-1) * rows)
    return gram
