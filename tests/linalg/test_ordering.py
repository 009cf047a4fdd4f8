"""Coarse-to-fine orderings, and the earlier rows most correlated with each, against brute force."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpytorch_gaps.linalg import neighbours, places
from gpytorch_gaps.linalg.axis_correlations import correlations
from gpytorch_gaps.linalg.neighbours import earlier_rows
from gpytorch_gaps.linalg.ordering import coarse_to_fine, farthest_first, generations
from gpytorch_gaps.linalg.selection import unravel
from tests import _dense as dense

examples = settings(max_examples=40)
AXES = {
    "rough": lambda n: dense.matern32(n, 0.2),
    "smooth": dense.se,
    "ring": dense.periodic,
    "labels": dense.ard,
    "rough, by lag": lambda n: dense.matern32(n, 0.2)[0],
    "smooth, by lag": lambda n: dense.se(n)[0],
    "ring, by lag": lambda n: dense.periodic(n)[0],
    "cycles, by lag": lambda n: dense.matern32(n)[0] * torch.cos(0.9 * torch.arange(n, dtype=torch.float64)),
}
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
    return dense.select(dense.kron([dense.toeplitz(axis) for axis in corr]), index)


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


@examples
@given(st.integers(1, 200), st.sampled_from(sorted(kind for kind in AXES if "by lag" in kind)))
def test_an_axis_by_lag_is_bisected(size, kind):
    """Its levels up to any generation are all the multiples of a power of two."""
    (generation,) = generations(correlations([AXES[kind](size)]))
    for value in generation.unique().tolist():
        kept = (generation <= value).nonzero().squeeze(-1)
        step = int(kept[1]) if len(kept) > 1 else 2 ** (size - 1).bit_length()
        assert step & (step - 1) == 0
        assert torch.equal(kept, torch.arange(0, size, step))


@pytest.mark.parametrize("length", [0.02, 0.2, 2.0])
def test_an_axis_by_lag_has_about_the_generations_of_its_matrix(length):
    """On 2^k + 1 levels, farthest first is a bisection of a kernel that decreases, and both are comparable."""
    matrix = dense.matern32(65, length)
    ours, expected = generations(correlations([matrix[0], matrix]))
    assert int((ours - expected).abs().max()) <= 1
    assert float((ours == expected).double().mean()) > 0.9


def test_the_distance_of_a_level_is_from_all_that_are_coarser():
    """With a period of three levels, a level has an equal three times its stride away, unless that is off the axis."""
    period = torch.tensor([1.0, 0.2, 0.2], dtype=torch.float64).repeat(11)[:32]
    assert torch.equal(generations([period])[0], (torch.arange(32) % 16 > 0).long())
    assert generations([torch.ones(1, dtype=torch.float64)])[0].tolist() == [0]


@pytest.mark.parametrize("kind", [kind for kind in AXES if "by lag" not in kind])
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


KINDS = [("rough",), ("rough", "smooth"), ("labels", "rough"), ("rough", "rough", "ring")]
BY_LAG = [
    ("rough, by lag",),
    ("cycles, by lag",),
    ("rough, by lag", "smooth, by lag"),
    ("cycles, by lag", "labels"),
    ("rough, by lag", "cycles, by lag", "ring, by lag"),
]


def searched(kinds, pattern):
    """Correlations, generations, ordering and cells of a grid that is too large to compare all pairs of rows."""
    shape = {1: (150,), 2: (15, 12), 3: (7, 6, 5)}[len(kinds)]
    corr, index = correlations([AXES[k](n) for k, n in zip(kinds, shape, strict=True)]), dense.observed(pattern, shape)
    generation = generations(corr)
    return corr, index, generation, coarse_to_fine(generation, index)


@pytest.mark.parametrize("pattern", PATTERNS[:-2])
@pytest.mark.parametrize("kinds", [*KINDS, *BY_LAG])
@pytest.mark.parametrize("tabulated", [1024, 1])
def test_a_search_on_sub_grids_finds_nearly_the_most_correlated(kinds, pattern, tabulated, monkeypatch):
    """Beyond the first rows, which are compared with all others, neighbours are looked up."""
    monkeypatch.setattr(neighbours, "_COMPARED_WITH_ALL", 20)
    monkeypatch.setattr(places, "_MAX_TABULATED", tabulated)
    corr, index, generation, rank = searched(kinds, pattern)
    rows = earlier_rows(corr, index, generation, rank, 6)
    known = torch.where(rows >= 0, rank[rows], -1)
    assert bool((known < rank.unsqueeze(-1)).all())
    assert torch.equal((rows >= 0).sum(-1), rank.clamp_max(6))
    assert all(len(set(found)) == len(found) for found in rows[rank >= 6].tolist())
    pairs = covariance(corr, index).masked_fill(rank >= rank.unsqueeze(-1), -1.0)
    best = pairs.topk(6, dim=-1).values.clamp_min(0.0).sum()
    found = pairs.gather(-1, rows.clamp_min(0)).masked_fill(rows < 0, 0.0).sum()
    assert float(found) >= 0.95 * float(best)


@pytest.mark.parametrize("pattern", PATTERNS[:-2])
@pytest.mark.parametrize("kinds", BY_LAG)
def test_lags_and_their_matrix_give_the_same_neighbours(kinds, pattern, monkeypatch):
    monkeypatch.setattr(neighbours, "_COMPARED_WITH_ALL", 20)
    corr, index, generation, rank = searched(kinds, pattern)
    expected = earlier_rows([dense.toeplitz(axis) for axis in corr], index, generation, rank, 6)
    assert torch.equal(earlier_rows(corr, index, generation, rank, 6), expected)


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


@pytest.mark.parametrize("other", [(), (3,)], ids=["one axis", "two axes"])
def test_an_axis_of_a_million_levels(other):
    """No matrix of its levels could be made. Only some of the levels are observed, so that all pairs can be."""
    level = torch.arange(10**6, dtype=torch.float64)
    corr = [(1.0 + 0.05 * level) * torch.exp(-0.05 * level), *(dense.matern32(size, 2.0) for size in other)]
    observed = torch.rand(9_000, generator=torch.Generator().manual_seed(0)) > 0.3
    index = 600_000 * math.prod(other) + observed.nonzero().squeeze(-1)
    generation = generations(corr)
    rank = coarse_to_fine(generation, index)
    rows = earlier_rows(corr, index, generation, rank, 10)
    some = torch.arange(0, len(index), 20)
    first, *rest = (abs(own[some].unsqueeze(-1) - own) for own in unravel(index, [10**6, *other]))
    pairs = math.prod([corr[0][first], *(axis[0][lag] for axis, lag in zip(corr[1:], rest, strict=True))])
    pairs = pairs.masked_fill(rank >= rank[some].unsqueeze(-1), 0.0)
    found = pairs.gather(-1, rows[some].clamp_min(0)).masked_fill(rows[some] < 0, 0.0)
    assert float(found.sum()) >= 0.99 * float(pairs.topk(10, dim=-1).values.sum())
