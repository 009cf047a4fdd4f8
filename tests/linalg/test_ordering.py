"""Coarse-to-fine orderings, and the earlier rows most correlated with each, against brute force."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpytorch_gaps.linalg import neighbours
from gpytorch_gaps.linalg.neighbours import correlations, earlier_rows
from gpytorch_gaps.linalg.ordering import coarse_to_fine, farthest_first, generations
from gpytorch_gaps.linalg.selection import unravel
from tests import _dense as dense

examples = settings(max_examples=40, deadline=None)
AXES = {"rough": lambda n: dense.matern32(n, 0.2), "smooth": dense.se, "ring": dense.periodic, "labels": dense.ard}
PATTERNS = ["none", "random", "block", "slice", "one gap", "one observation", "repeated"]


@st.composite
def grids(draw, most_axes=4, most_cells=600):
    """Correlations of one to four axes, and observed cells in any order, some of them twice."""
    kinds = draw(st.lists(st.sampled_from(sorted(AXES)), min_size=1, max_size=most_axes))
    largest = int(most_cells ** (1.0 / len(kinds)))
    shape = tuple(draw(st.integers(1, min(30, largest))) for _ in kinds)
    pattern, seed = draw(st.sampled_from(PATTERNS)), draw(st.integers(0, 99))
    index = dense.observed("random" if pattern == "repeated" else pattern, shape, 0.4, seed)
    if pattern == "repeated" or not len(index):
        index = torch.randint(math.prod(shape), (20,), generator=torch.Generator().manual_seed(seed))
    index = index[torch.randperm(len(index), generator=torch.Generator().manual_seed(seed))]
    return correlations([AXES[kind](size) for kind, size in zip(kinds, shape, strict=True)]), index


def covariance(corr, index):
    return dense.select(dense.kron(corr), index)


@examples
@given(grids())
def test_the_ordering_is_a_permutation(grid):
    corr, index = grid
    rank = coarse_to_fine(generations(corr), index)
    assert torch.equal(rank.sort().values, torch.arange(len(index)))


@examples
@given(grids())
def test_sub_grids_are_nested(grid):
    """Whatever is on the sub-grid of some generation comes before all that is not."""
    corr, index = grid
    generation = generations(corr)
    levels = unravel(index, [len(matrix) for matrix in corr])
    latest = torch.stack([own[level] for own, level in zip(generation, levels, strict=True)]).amax(0)
    in_order = latest[coarse_to_fine(generation, index).argsort()]
    assert torch.equal(in_order, in_order.sort().values)


@pytest.mark.parametrize("kind", AXES)
def test_levels_are_taken_farthest_first(kind):
    corr = correlations([AXES[kind](9)])[0]
    order, distances = farthest_first(corr)
    assert torch.equal(order.sort().values, torch.arange(9))
    for k in range(1, 9):
        nearest = corr[order[:k]].amax(0)
        nearest[order[:k]] = 2.0
        assert float(nearest.min()) == pytest.approx(1.0 - float(distances[k]), abs=1e-15)


def test_an_axis_with_a_long_length_scale_is_refined_late():
    """Its levels are all alike: they are of later generations than all but the finest levels of a rough axis."""
    smooth, rough = generations(correlations([dense.se(9, 30.0), dense.matern32(9, 0.05)]))
    assert int(smooth.sort().values[1]) > int(rough.max())


@examples
@given(grids(), st.integers(1, 8))
def test_neighbours_come_earlier_and_only_once(grid, count):
    corr, index = grid
    generation = generations(corr)
    rank = coarse_to_fine(generation, index)
    rows = earlier_rows(corr, index, generation, rank, count)
    assert rows.shape == (len(index), count)
    for row, found in enumerate(rows):
        known = found[found >= 0]
        assert len(known.unique()) == len(known) == min(count, int(rank[row]))
        assert bool((rank[known] < rank[row]).all())


@examples
@given(grids(), st.integers(1, 8))
def test_no_other_earlier_row_is_more_correlated(grid, count):
    corr, index = grid
    generation = generations(corr)
    rank = coarse_to_fine(generation, index)
    rows = earlier_rows(corr, index, generation, rank, count)
    pairs = covariance(corr, index).masked_fill(rank >= rank.unsqueeze(-1), -1.0)
    best = pairs.topk(min(count, len(index)), dim=-1).values.clamp_min(0.0).sum(-1)
    found = pairs.gather(-1, rows.clamp_min(0)).masked_fill(rows < 0, 0.0).sum(-1)
    torch.testing.assert_close(found, best, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("pattern", PATTERNS[:-2])
@pytest.mark.parametrize("kinds", [("rough",), ("rough", "smooth"), ("labels", "rough"), ("rough", "rough", "ring")])
def test_a_search_on_sub_grids_finds_nearly_the_most_correlated(kinds, pattern, monkeypatch):
    """Beyond the first rows, which are compared with all others, neighbours are looked up."""
    monkeypatch.setattr(neighbours, "_COMPARED_WITH_ALL", 20)
    shape = {1: (150,), 2: (15, 12), 3: (7, 6, 5)}[len(kinds)]
    corr, index = correlations([AXES[k](n) for k, n in zip(kinds, shape, strict=True)]), dense.observed(pattern, shape)
    generation = generations(corr)
    rank = coarse_to_fine(generation, index)
    rows = earlier_rows(corr, index, generation, rank, 6)
    known = torch.where(rows >= 0, rank[rows], -1)
    assert bool((known < rank.unsqueeze(-1)).all())
    assert torch.equal((rows >= 0).sum(-1), rank.clamp_max(6))
    assert all(len(set(found)) == len(found) for found in rows[rank >= 6].tolist())
    pairs = covariance(corr, index).masked_fill(rank >= rank.unsqueeze(-1), -1.0)
    best = pairs.topk(6, dim=-1).values.clamp_min(0.0).sum()
    found = pairs.gather(-1, rows.clamp_min(0)).masked_fill(rows < 0, 0.0).sum()
    assert float(found) >= 0.95 * float(best)


def test_rows_that_share_a_cell_stand_for_it_once_in_a_search(monkeypatch):
    monkeypatch.setattr(neighbours, "_COMPARED_WITH_ALL", 4)
    corr = correlations([dense.matern32(40, 0.1)])
    index = torch.arange(40).repeat_interleave(2)
    generation = generations(corr)
    rank = coarse_to_fine(generation, index)
    rows = earlier_rows(corr, index, generation, rank, 5)
    cells = torch.where(rows >= 0, index[rows], -1 - torch.arange(5))
    late = rank >= 10  # twice the neighbours
    assert all(len(set(found)) == 5 for found in cells[late].tolist())
    twin = torch.arange(80).view(-1, 2).flip(-1).flatten()
    second = late & (rank > rank[twin])
    assert torch.equal(rows[second][:, 0], twin[second])  # nothing is closer than the same cell
