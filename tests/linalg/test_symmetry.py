"""Blocks of a matrix tell of it what the whole does."""

import math

import pytest
import torch

from gpytorch_gaps.linalg import symmetry
from tests import _dense as dense


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 24, 25])
@pytest.mark.parametrize("transposed", [False, True])
def test_blocks_give_the_symmetric_part_of_the_whole(monkeypatch, size, transposed):
    monkeypatch.setattr(symmetry, "_BLOCK_ROWS", 8)
    matrix = dense.randn(size, size)
    matrix = matrix.mT if transposed else matrix
    before = matrix.clone()
    found = symmetry.symmetric_part(matrix)
    assert torch.equal(found, 0.5 * (matrix + matrix.mT))
    assert torch.equal(found, found.mT)
    largest, asymmetry = symmetry.largest_and_asymmetry(matrix)
    assert largest == float(matrix.abs().amax())
    assert asymmetry == float((matrix - matrix.mT).abs().amax())
    assert torch.equal(matrix, before)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [(0, 0), (0, 19), (19, 0), (11, 3), (3, 11)])
def test_what_is_not_finite_is_found(monkeypatch, value, where):
    monkeypatch.setattr(symmetry, "_BLOCK_ROWS", 8)
    matrix = dense.randn(20, 20)
    matrix[where] = value
    assert not math.isfinite(sum(symmetry.largest_and_asymmetry(matrix)))
