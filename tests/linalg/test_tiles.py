"""Tiles of a grid: every cell in one of them, none too large, and along the axes that are most correlated."""

import math

import pytest
import torch

from gpytorch_gaps.linalg.selection import unravel
from gpytorch_gaps.linalg.tiles import tile_shape, tiles
from tests import _dense as dense

FACTORS = {
    "one axis": [dense.matern32(30)],
    "two axes": [dense.matern32(12, 0.5), dense.se(10)],
    "labels": [dense.ard(7), dense.matern32(9)],
    "three axes": [dense.matern32(6), dense.matern32(5), dense.periodic(4)],
    "a single cell": [dense.matern32(1)],
}


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("case", FACTORS)
def test_every_cell_is_in_one_tile(case, size):
    factors = FACTORS[case]
    shape = [len(factor) for factor in factors]
    cells = torch.randperm(math.prod(shape), generator=torch.Generator().manual_seed(0))[: 1 + math.prod(shape) // 2]
    centres, members = tiles(factors, cells, size)
    assert members.size(-1) <= size
    assert bool((members >= 0).any(-1).all())
    assert sorted(members[members >= 0].tolist()) == list(range(len(cells)))
    lengths = tile_shape(factors, size)
    assert math.prod(lengths) <= size
    for centre, own in zip(centres, members, strict=True):
        levels = unravel(cells[own[own >= 0]], shape)
        for level, middle, length in zip(levels, unravel(centre, shape), lengths, strict=True):
            assert int(level.max() - level.min()) < length
            assert int(level.min()) <= int(middle) <= int(level.max())


def test_tiles_are_long_where_levels_are_alike():
    rough, smooth = dense.matern32(40, 0.02), dense.matern32(40, 2.0)
    assert tile_shape([rough, smooth], 16) == [1, 16]
    assert tile_shape([smooth, smooth], 16) == [4, 4]
    assert tile_shape([torch.eye(10).double(), torch.eye(5).double()], 16) == [1, 1]


def test_repeated_cells_fill_more_tiles():
    cells = torch.tensor([3, 3, 3, 3, 3, 8])
    centres, members = tiles([dense.matern32(12, 0.01)], cells, 2)
    assert sorted(members[members >= 0].tolist()) == [0, 1, 2, 3, 4, 5]
    assert members.size(-1) == 2
    assert sorted(centres.tolist()) == [3, 3, 3, 8]
