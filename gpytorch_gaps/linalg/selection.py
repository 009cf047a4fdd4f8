"""Selection matrices as index operations: ``W x`` picks cells of the grid, ``W' v`` puts values back onto it."""

from collections.abc import Sequence

from torch import Tensor


def select_cells(x: Tensor, index: Tensor) -> Tensor:
    """``W x``. shape: (*batch, M, C) -> (*batch, N, C)"""
    return x.index_select(-2, index)


def spread_cells(v: Tensor, index: Tensor, num_cells: int) -> Tensor:
    """``W' v``: zero elsewhere; a cell named twice gets the sum. shape: (*batch, N, C) -> (*batch, M, C)"""
    return v.new_zeros(*v.shape[:-2], num_cells, v.size(-1)).index_add(-2, index, v)


def kron_entries(factors: Sequence[Tensor], rows: Sequence[Tensor], columns: Sequence[Tensor]) -> Tensor:
    """Entries of a Kronecker product: ``prod_i F_i[..., rows_i, columns_i]``, positions broadcasting.

    shape: (*batch, q_i, m_i) and any positions -> (*batch, *positions)
    """
    value = factors[0][..., rows[0], columns[0]]
    for factor, row, column in zip(factors[1:], rows[1:], columns[1:], strict=True):
        value = value * factor[..., row, column]
    return value


def product_at(vectors: Sequence[Tensor], positions: Sequence[Tensor] | Tensor) -> Tensor:
    """Entries of a Kronecker product of vectors: ``prod_i v_i[..., positions_i]``.

    shape: (*batch, m_i) and positions (n,) each -> (*batch, n)
    """
    value = vectors[0][..., positions[0]]
    for vector, position in zip(vectors[1:], positions[1:], strict=True):
        value = value * vector[..., position]
    return value


def kron_block(factors: Sequence[Tensor], row_index: Tensor, col_index: Tensor) -> Tensor:
    """``W_r (F_1 (x) ... (x) F_d) W_c'`` as a dense matrix. shape: (*batch, len(row_index), len(col_index))"""
    rows = unravel(row_index.unsqueeze(-1), tuple(factor.size(-2) for factor in factors))
    return kron_entries(factors, rows, unravel(col_index, tuple(factor.size(-1) for factor in factors)))


def unravel(index: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Position on each axis of flat cells, last axis fastest."""
    positions = []
    for size in reversed(shape):
        positions.append(index % size)
        index = index // size
    return tuple(reversed(positions))


def ravel(positions: Tensor | tuple[Tensor, ...], shape: tuple[int, ...]) -> Tensor:
    """Flat cell of positions on each axis, last axis fastest."""
    flat = positions[0]
    for position, size in zip(positions[1:], shape[1:], strict=True):
        flat = flat * size + position
    return flat
