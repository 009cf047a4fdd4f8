"""Tiles of a grid: groups of nearby cells, each longest along the axis whose neighbouring levels are most correlated.

>>> smooth = torch.exp(-0.01 * (torch.arange(8.0).unsqueeze(-1) - torch.arange(8.0)).abs())
>>> tile_shape([smooth, torch.eye(3)], 4)  # levels without correlation do not share a tile
[4, 1]
>>> centres, members = tiles([smooth, torch.eye(3)], torch.tensor([0, 3, 6, 1]), 4)
>>> centres.tolist(), members.tolist()  # cells 0, 3 and 6 lie in one column
([3, 1], [[0, 1, 2], [3, -1, -1]])
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gpytorch_gaps.linalg.axis_correlations import correlations
from gpytorch_gaps.linalg.selection import ravel, unravel


def tile_shape(factors: Sequence[Tensor], size: int) -> list[int]:
    """Levels of a tile along each axis, of at most `size` cells.

    :param factors: K_i, or their correlations, shape (m_i, m_i), or by lag (m_i,), each.
    """
    corr, shape = correlations(factors), [1] * len(factors)
    while True:
        # an axis is doubled at a time: that with the largest correlation between the middles of both halves
        scores = [_typical(matrix, length) for matrix, length in zip(corr, shape, strict=True)]
        best = max(range(len(shape)), key=scores.__getitem__)
        doubled = [2 * length if axis == best else length for axis, length in enumerate(shape)]
        if scores[best] <= 0.0 or torch.Size(doubled).numel() > size:
            return shape
        shape = doubled


def _typical(corr: Tensor, lag: int) -> float:
    """The median correlation of levels that are so far apart; zero beyond the axis."""
    if 2 * lag > len(corr):
        return 0.0
    return float(corr[lag] if corr.dim() == 1 else corr.diagonal(lag).median())


def tiles(factors: Sequence[Tensor], cells: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Divides cells into tiles. A tile contains at most `size` cells.

    :param factors: K_i, or their correlations, shape (m_i, m_i), or by lag (m_i,), each.
    :param cells: flat cells, which may repeat, shape (Q,).
    :param size: the largest number of cells.
    :return: the cell in the middle of the cells of each tile, shape (tiles,); and the positions in `cells` of the cells
        of each tile, filled up with -1, shape (tiles, p).
    """
    shape = [len(factor) for factor in factors]
    lengths, levels = tile_shape(factors, size), unravel(cells, shape)
    counts = [-(-levels_ // length) for levels_, length in zip(shape, lengths, strict=True)]
    where = ravel([level // length for level, length in zip(levels, lengths, strict=True)], counts)
    place = _place_among_equals(where)
    if int(place.max()) >= size:  # repeated cells
        where = where * (1 + int(place.max()) // size) + place // size
        place = _place_among_equals(where)
    _, tile = where.unique(return_inverse=True)
    members = torch.full((int(tile.max()) + 1, int(place.max()) + 1), -1, dtype=torch.long, device=cells.device)
    members[tile, place] = torch.arange(len(cells), device=cells.device)
    number = (members >= 0).sum(-1)
    middles = [torch.zeros_like(number).index_add(0, tile, level) // number for level in levels]
    return ravel(middles, shape), members


def _place_among_equals(labels: Tensor) -> Tensor:
    """For each label, how many equal ones come before it. shape: (Q,)"""
    order = labels.argsort(stable=True)
    _, counts = torch.unique_consecutive(labels[order], return_counts=True)
    starts = (counts.cumsum(0) - counts).repeat_interleave(counts)
    place = torch.empty_like(labels)
    place[order] = torch.arange(len(labels), device=labels.device) - starts
    return place
