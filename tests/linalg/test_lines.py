"""Axes given by a matrix by lag, such as latitude and longitude on the sphere, against the matrices they stand for."""

import pytest
import torch
from gpytorch.kernels import MaternKernel

from gpytorch_gaps import settings
from gpytorch_gaps.kernels import SphereKernel
from gpytorch_gaps.linalg import neighbours
from gpytorch_gaps.linalg.axis_correlations import axis_entries, correlations, num_levels, relative_change
from gpytorch_gaps.linalg.neighbours import correlated_rows, earlier_rows
from gpytorch_gaps.linalg.ordering import coarse_to_fine, generations
from gpytorch_gaps.operators import CirculantOperator, SelectedKroneckerOperator
from gpytorch_gaps.reports import record_solves
from gpytorch_gaps.solvers.kronecker_term import KroneckerTerm
from tests import _dense as dense


def on_the_sphere(latitudes, longitudes, length=0.3):
    """Covariances between latitudes, by lag along longitudes. shape: (a, a, q)"""
    kernel = SphereKernel(MaternKernel(nu=1.5)).double()
    kernel.base_kernel.lengthscale = length
    points = torch.cartesian_prod(latitudes.double(), longitudes.double())
    covariance = kernel(points).to_dense().detach()
    rows, columns = len(latitudes), len(longitudes)
    return covariance.reshape(rows, columns, rows, columns)[:, 0].contiguous()


def globe(rows, columns):
    """All of the sphere: lines are closed circles."""
    return on_the_sphere((torch.arange(rows) + 0.5) * 180 / rows - 90, torch.arange(columns) * 360 / columns)


def region(rows, columns):
    """A part of it around the pole, whose lines are open."""
    return on_the_sphere(89 - 2.0 * torch.arange(rows), 3.0 * torch.arange(columns))


AXES = {"globe": globe(9, 16), "globe, odd": globe(8, 15), "region": region(7, 12), "one line": globe(1, 12)}
axes = pytest.mark.parametrize("axis", AXES.values(), ids=AXES)


def expanded(axis):
    """The matrix of all pairs of levels."""
    levels = torch.arange(num_levels(axis))
    return axis_entries(axis, levels.unsqueeze(-1), levels)


@axes
def test_entries_depend_on_the_lines_and_the_lag(axis):
    lines, _, positions = axis.shape
    matrix = expanded(axis).reshape(lines, positions, lines, positions)
    for start in range(positions):
        for end in range(positions):
            assert torch.equal(matrix[:, start, :, end], axis[..., abs(start - end)])


@axes
def test_correlations_are_those_of_the_matrix(axis):
    scaled = axis * (1.0 + torch.arange(len(axis))).outer(1.0 + torch.arange(len(axis))).unsqueeze(-1)
    (own,), (matrix,) = correlations([scaled]), correlations([expanded(scaled)])
    torch.testing.assert_close(expanded(own), matrix, rtol=1e-14, atol=1e-15)


def test_a_change_of_one_lag_is_seen():
    axis = AXES["globe"]
    changed = axis.clone()
    changed[..., 3] = 0.0
    expected = axis[..., 3].norm() / axis.norm()
    torch.testing.assert_close(relative_change(changed, axis), expected)


@axes
def test_generations_are_nested_multiples_on_every_line(axis):
    (generation,) = generations(correlations([axis]))
    by_line = generation.reshape(axis.shape[1:])
    for line in by_line:
        for value in line.unique():
            kept = (line <= value).nonzero().squeeze(-1)
            step = int(kept[1]) if len(kept) > 1 else len(line)
            assert kept.tolist() == list(range(0, len(line), step))
    assert int(by_line[:, 1:].amin()) >= int(by_line.amin())


def test_circles_near_the_pole_are_refined_later_than_the_equator():
    axis = globe(18, 36)
    (generation,) = generations(correlations([axis]))
    finest = generation.reshape(18, 36).amax(-1)
    assert int(finest[[0, -1]].min()) > int(finest[8])


@axes
@pytest.mark.parametrize("with_time", [False, True])
@pytest.mark.parametrize("pattern", ["random", "block", "one gap"])
def test_earlier_rows_are_nearly_the_most_correlated(axis, with_time, pattern, monkeypatch):
    monkeypatch.setattr(neighbours, "_COMPARED_WITH_ALL", 20)
    factors = correlations([axis, dense.matern32(4)] if with_time else [axis])
    index = dense.observed(pattern, tuple(map(num_levels, factors)), 0.3)
    generation = generations(factors)
    rank = coarse_to_fine(generation, index)
    rows = earlier_rows(factors, index, generation, rank, 6)
    for row, found in enumerate(rows):
        known = found[found >= 0]
        assert len(known.unique()) == len(known)
        assert bool((rank[known] < rank[row]).all())
    every = expanded(axis) if not with_time else torch.kron(expanded(axis), dense.matern32(4))
    pairs = every[index.unsqueeze(-1), index].masked_fill(rank >= rank.unsqueeze(-1), -1.0)
    best = pairs.topk(min(6, len(index)), dim=-1).values.clamp_min(0.0)
    found = pairs.gather(-1, rows.clamp_min(0)).masked_fill(rows < 0, 0.0)
    assert float(found.sum()) >= 0.9 * float(best.sum())


@axes
def test_rows_around_gaps_are_the_most_correlated(axis):
    """Around every cell, observed or not, also where a large gap has to be crossed."""
    index = dense.observed("block", (num_levels(axis),), 0.3)
    cells = torch.arange(num_levels(axis))
    rows = correlated_rows([axis], index, cells, 4)
    pairs = expanded(axis)[:, index]
    found = pairs.gather(-1, rows.clamp_min(0)).masked_fill(rows < 0, 0.0)
    assert float(found.sum()) >= 0.9 * float(pairs.topk(4, dim=-1).values.sum())


def test_neighbours_across_the_poles_save_iterations(monkeypatch):
    """Neighbours that are looked for along each axis alone miss those on the other side of a pole."""
    axis = globe(45, 90)
    circles = CirculantOperator(axis[..., : 90 // 2 + 1], torus=(90,), row_positions=(90,))
    index, time = dense.observed("random", (num_levels(axis), 3), 0.3), dense.matern32(3)
    y = torch.sin(torch.arange(len(index), dtype=torch.float64)).unsqueeze(-1)

    def iterations():
        covariance = SelectedKroneckerOperator(circles, time, row_index=index.clone())
        with (
            settings.gap_method("ignore"),
            settings.preconditioner("neighbours"),
            settings.num_neighbours(20),
            settings.dense_size(0),
            record_solves() as solves,
        ):
            covariance.add_diagonal(torch.tensor([1e-2], dtype=torch.float64)).solve(y)
        assert solves[-1].converged
        return solves[-1].iterations

    together = iterations()
    monkeypatch.setattr(KroneckerTerm, "joint_covariances", KroneckerTerm.axis_covariances)
    assert together <= 0.75 * iterations()
