"""Neighbours by correlation against dense covariances."""

import pytest
import torch

from gpytorch_gaps.linalg.neighbours import correlated_rows
from tests import _dense as dense

SHAPES = {
    "one axis": [dense.matern32(30)],
    "two axes": [dense.matern32(12, 0.5), dense.se(10)],
    "labels": [dense.ard(7), dense.matern32(9)],
    "three axes": [dense.matern32(6), dense.matern32(5), dense.periodic(4)],
}


@pytest.mark.parametrize("case", SHAPES)
def test_the_most_correlated_observations_come_first(case):
    """Of a stationary kernel on a grid without gaps, away from its edges, no other is more correlated."""
    factors = SHAPES[case]
    index = dense.observed("random", tuple(len(factor) for factor in factors), 0.3)
    covariance = dense.select(dense.kron(factors), index)
    rows = correlated_rows(factors, index, 5)
    assert rows.shape == (len(index), 5)
    for row, found in enumerate(rows):
        known = found[found >= 0]
        assert row not in known.tolist()
        assert len(known.unique()) == len(known)
    found = covariance.gather(-1, rows.clamp_min(0)).masked_fill(rows < 0, 0.0)
    best = (covariance - 2 * torch.eye(len(index))).topk(5, dim=-1).values
    assert float(found.sum()) >= 0.9 * float(best.sum())


def test_too_few_observations_leave_places_empty():
    index = torch.tensor([3, 8])
    rows = correlated_rows([dense.matern32(12)], index, 4)
    assert [sorted(found) for found in rows.tolist()] == [[-1, -1, -1, 1], [-1, -1, -1, 0]]
    assert correlated_rows([dense.matern32(1)], torch.tensor([0]), 3).tolist() == [[-1, -1, -1]]


def test_a_kernel_that_is_zero_somewhere():
    factor = torch.zeros(4, 4, dtype=torch.float64)
    factor[1:, 1:] = dense.matern32(3)
    assert bool((correlated_rows([factor], torch.arange(4), 2) >= -1).all())
