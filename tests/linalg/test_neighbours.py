"""Neighbours by correlation against dense covariances."""

import pytest
import torch

from gpytorch_gaps.linalg import places
from gpytorch_gaps.linalg.neighbours import correlated_rows
from tests import _dense as dense

SHAPES = {
    "one axis": [dense.matern32(30)],
    "two axes": [dense.matern32(12, 0.5), dense.se(10)],
    "labels": [dense.ard(7), dense.matern32(9)],
    "three axes": [dense.matern32(6), dense.matern32(5), dense.periodic(4)],
    "by lag": [3.0 * dense.matern32(30)[0]],
    "two axes, by lag": [dense.matern32(12, 0.5)[0], dense.se(10)[0]],
    "labels and lags": [dense.ard(7), dense.matern32(9)[0]],
    "three axes, by lag": [dense.matern32(6)[0], dense.matern32(5), dense.periodic(4)[0]],
}


def others(factors, index, count):
    """The rows most correlated with every observation, but for its own."""
    return correlated_rows(factors, index, index, count + 1)[:, 1:]


@pytest.mark.parametrize("case", SHAPES)
@pytest.mark.parametrize("tabulated", [1024, 1])
def test_the_most_correlated_observations_come_first(case, tabulated, monkeypatch):
    """For a stationary kernel on a grid without gaps, away from its edges, no other observation is more correlated."""
    monkeypatch.setattr(places, "_MAX_TABULATED", tabulated)
    factors = SHAPES[case]
    index = dense.observed("random", tuple(len(factor) for factor in factors), 0.3)
    covariance = dense.select(dense.kron([dense.toeplitz(factor) for factor in factors]), index)
    rows = others(factors, index, 5)
    assert rows.shape == (len(index), 5)
    for row, found in enumerate(rows):
        known = found[found >= 0]
        assert row not in known.tolist()
        assert len(known.unique()) == len(known)
    found = covariance.gather(-1, rows.clamp_min(0)).masked_fill(rows < 0, 0.0)
    best = (covariance - 2 * torch.eye(len(index))).topk(5, dim=-1).values
    assert float(found.sum()) >= 0.9 * float(best.sum())


@pytest.mark.parametrize("kind", ["matrix", "by lag", "by lag, long"])
def test_too_few_observations_leave_places_empty(kind, monkeypatch):
    monkeypatch.setattr(places, "_MAX_TABULATED", 1 if "long" in kind else 1024)
    index = torch.tensor([3, 8])
    several, one = (dense.matern32(size) if kind == "matrix" else dense.matern32(size)[0] for size in (12, 1))
    rows = others([several], index, 4)
    assert [sorted(found) for found in rows.tolist()] == [[-1, -1, -1, 1], [-1, -1, -1, 0]]
    assert others([one], torch.tensor([0]), 3).tolist() == [[-1, -1, -1]]


def test_beyond_the_ends_of_an_axis_there_are_no_cells(monkeypatch):
    """Along a row of the grid, the cell after the last is the first of the next row: it is no neighbour of the last."""
    monkeypatch.setattr(places, "_MAX_TABULATED", 1)
    labels, lags = torch.tensor([[1.0, 0.1], [0.1, 1.0]]), torch.tensor([1.0, 0.9, 0.8, 0.7])
    for row, found in enumerate(others([labels, lags], torch.arange(8), 3).tolist()):
        assert sorted([row, *found]) == ([0, 1, 2, 3] if row < 4 else [4, 5, 6, 7])


def test_lags_that_do_not_decrease(monkeypatch):
    monkeypatch.setattr(places, "_MAX_TABULATED", 1)
    lags = torch.tensor([1.0, 0.1, 0.2, 0.05, 0.9, 0.3, 0.01])
    rows = others([lags], torch.arange(7), 2)
    assert rows[[0, 1, 5, 6]].tolist() == [[4, 5], [5, 6], [1, 0], [2, 1]]  # at lags 4 and 5


def test_a_kernel_that_is_zero_somewhere():
    factor = torch.zeros(4, 4, dtype=torch.float64)
    factor[1:, 1:] = dense.matern32(3)
    assert bool((others([factor], torch.arange(4), 2) >= -1).all())


# -- around any cells ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", SHAPES)
def test_observations_around_cells(case):
    """Gaps and observed cells, whose own row comes first; each row once, and no gap among them."""
    factors = SHAPES[case]
    shape = tuple(len(factor) for factor in factors)
    index = dense.observed("random", shape, 0.3)
    cells = torch.arange(dense.kron([dense.toeplitz(factor) for factor in factors]).size(-1)).flip(0)
    rows = correlated_rows(factors, index, cells, 5)
    covariance = dense.kron([dense.toeplitz(factor) for factor in factors])[cells][:, index]
    for cell, found in zip(cells.tolist(), rows, strict=True):
        known = found[found >= 0]
        assert len(known.unique()) == len(known) > 0
        if cell in index.tolist():
            assert int(index[known[0]]) == cell
    found = covariance.gather(-1, rows.clamp_min(0)).masked_fill(rows < 0, 0.0)
    assert float(found.sum()) >= 0.9 * float(covariance.topk(5, dim=-1).values.sum())


def test_a_repeated_observation_counts_once():
    index = torch.tensor([4, 4, 6])
    assert correlated_rows([dense.matern32(12)], index, torch.tensor([4, 3]), 3).tolist() == [[0, 2, -1]] * 2


def test_far_from_all_observations():
    """In the middle of a gap larger than what is looked up, coarser grids reach the data on the far side, too."""
    factors = [dense.matern32(120), dense.matern32(100)]
    flags = torch.ones(120, 100, dtype=torch.bool)
    flags[10:110, 10:90] = False
    index = flags.flatten().nonzero().squeeze(-1)
    cells = torch.tensor([60 * 100 + 50, 11 * 100 + 11])
    rows = correlated_rows(factors, index, cells, 3)  # 192 cells are looked up
    assert bool((rows >= 0).all())
    assert bool((index[rows[1]] // 100 < 15).all())  # near the edge of the gap, its own side
