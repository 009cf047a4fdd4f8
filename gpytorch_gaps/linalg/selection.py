"""Selection matrices as index operations: ``W x`` picks cells of a grid, ``W' v`` puts values back onto it.

Cells are numbered with the last axis fastest.

>>> import torch
>>> index = torch.tensor([2, 0])
>>> select_cells(torch.tensor([[1.0], [2.0], [3.0]]), index).flatten().tolist()
[3.0, 1.0]
>>> spread_cells(torch.tensor([[3.0], [1.0]]), index, num_cells=3).flatten().tolist()
[1.0, 0.0, 3.0]
>>> unravel(torch.tensor([5]), (2, 3)), ravel(torch.tensor([[1], [2]]), (2, 3))
((tensor([1]), tensor([2])), tensor([5]))
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gpytorch_gaps.linalg.factors import Factor, col_places, entries_at, row_places


def select_cells(x: Tensor, index: Tensor) -> Tensor:
    """``W x``. shape: (*batch, M, C) -> (*batch, N, C)"""
    return x.index_select(-2, index)


def spread_cells(v: Tensor, index: Tensor, num_cells: int) -> Tensor:
    """``W' v``: zero at cells not in `index`; values of a repeated cell add up.

    shape: (*batch, N, C) -> (*batch, M, C)
    """
    return v.new_zeros(*v.shape[:-2], num_cells, v.size(-1)).index_add(-2, index, v)


def kron_entries(factors: Sequence[Factor], rows: Sequence[Tensor], columns: Sequence[Tensor]) -> Tensor:
    """Entries of a Kronecker product, ``prod_i F_i[..., rows_i, columns_i]``. Positions broadcast.

    shape: (*batch, q_i, m_i) and any positions -> (*batch, *positions)
    """
    sides = list(map(row_places, factors, rows)), list(map(col_places, factors, columns))
    return kron_entries_at(factors, *sides)


def kron_entries_at(
    factors: Sequence[Factor],
    rows: Sequence[Sequence[Tensor]],
    columns: Sequence[Sequence[Tensor]],
    batch: tuple[Any, ...] = (...,),
) -> Tensor:
    """Entries of a Kronecker product between places on every factor, which broadcast. shape: (*batch, *positions)"""
    value = entries_at(factors[0], rows[0], columns[0], batch)
    for factor, row, column in zip(factors[1:], rows[1:], columns[1:], strict=True):
        value = value * entries_at(factor, row, column, batch)
    return value


def product_at(vectors: Sequence[Tensor], positions: Sequence[Tensor] | Tensor) -> Tensor:
    """Entries of a Kronecker product of vectors, ``prod_i v_i[..., positions_i]``.

    shape: (*batch, m_i) and positions (n,) each -> (*batch, n)
    """
    value = vectors[0][..., positions[0]]
    for vector, position in zip(vectors[1:], positions[1:], strict=True):
        value = value * vector[..., position]
    return value


def kron_block(factors: Sequence[Factor], row_index: Tensor, col_index: Tensor) -> Tensor:
    """``W_r (F_1 ⊗ ... ⊗ F_d) W_c'`` as a dense matrix. shape: (*batch, len(row_index), len(col_index))"""
    rows = unravel(row_index.unsqueeze(-1), tuple(factor.size(-2) for factor in factors))
    return kron_entries(factors, rows, unravel(col_index, tuple(factor.size(-1) for factor in factors)))


def unravel(index: Tensor, shape: Sequence[int]) -> tuple[Tensor, ...]:
    """Position of flat cells on each axis. (`torch.unravel_index` would copy the shape to the device.)"""
    positions = []
    for size in reversed(shape):
        positions.append(index % size)
        index = index // size
    return tuple(reversed(positions))


def ravel(positions: Tensor | Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """Flat cells of positions on each axis."""
    flat = positions[0]
    for position, size in zip(positions[1:], shape[1:], strict=True):
        flat = flat * size + position
    return flat
