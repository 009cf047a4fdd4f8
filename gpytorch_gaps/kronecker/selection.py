"""Selection matrices as index operations: ``W x`` picks cells of a grid vector, ``W' v`` puts values back on the grid."""

from torch import Tensor


def select_cells(x: Tensor, index: Tensor) -> Tensor:
    """``W x``. shape: (*batch, M, C) -> (*batch, N, C)"""
    return x.index_select(-2, index)


def spread_cells(v: Tensor, index: Tensor, num_cells: int) -> Tensor:
    """``W' v``: zero elsewhere; a cell named twice gets the sum. shape: (*batch, N, C) -> (*batch, M, C)"""
    return v.new_zeros(*v.shape[:-2], num_cells, v.size(-1)).index_add(-2, index, v)


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
