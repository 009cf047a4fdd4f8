"""Cycles, trends, windows and withheld observations."""

import numpy as np
import pandas as pd
import pytest
import torch

from gpytorch_gaps.filling.arrays import grid_values
from gpytorch_gaps.filling.arrays.grid_values import GridValues, choose_part, random_part, region_around
from gpytorch_gaps.filling.axes.axis import DAY, YEAR
from gpytorch_gaps.filling.axes.describe import describe_axes
from gpytorch_gaps.filling.checking.holdout import withhold
from gpytorch_gaps.filling.learning.cycles import explained_share, find_cycles, possible_periods
from gpytorch_gaps.filling.learning.estimates import fit_mean, sample_observations
from gpytorch_gaps.filling.learning.windows import MAX_WINDOW_OBSERVATIONS, choose_windows, whole_window

RNG = np.random.default_rng(1)


def on_grid(values, axes=None):
    return GridValues.in_memory(values, describe_axes(values.shape, axes))


def time_axis(periods, freq):
    return describe_axes([periods], [pd.date_range("2000-01-01", periods=periods, freq=freq)], ["time"])[0]


@pytest.mark.parametrize(
    ("periods", "freq", "expected"),
    [
        (1000, "D", [YEAR]),
        (48, "MS", [YEAR]),
        (400, "D", []),  # hardly more than one year
        (20, "YS", []),  # too coarse
        (24 * 10, "h", [DAY]),
        (24 * 800, "h", [YEAR, DAY]),
    ],
)
def test_periods_that_an_axis_has_room_for(periods, freq, expected):
    assert possible_periods(time_axis(periods, freq)) == expected


def test_a_cycle_is_found_in_noise_and_not_without_one():
    axis = time_axis(1500, "D")
    t = axis.points[:, 0]
    noise = RNG.standard_normal((1500, 4))
    wave = np.sin(2 * np.pi * t / YEAR)[:, None]
    gaps = RNG.random((1500, 4)) < 0.5
    with_cycle = np.where(gaps, np.nan, wave + noise)
    stations = describe_axes([4], [list("abcd")])[0]
    assert find_cycles(with_cycle, [axis, stations]) == [[YEAR], []]
    assert find_cycles(np.where(gaps, np.nan, noise), [axis, stations]) == [[], []]
    # a wave of amplitude 1 in unit noise has a third of the variance
    assert explained_share(with_cycle, 0, t, YEAR) == pytest.approx(1 / 3, abs=0.06)


def test_series_too_short_for_coefficients_have_no_cycle():
    values = np.full((1500, 2), np.nan)
    values[:5] = 1.0
    assert explained_share(values, 0, np.arange(1500.0), YEAR) == 0.0


def test_the_mean_is_a_plane_where_there_is_one():
    axes = describe_axes([40, 30], [np.linspace(10, 20, 40), np.arange(30)])
    rows, columns = axes[0].points, axes[1].points.T
    plane = 3.0 + 2.0 * rows - 0.5 * columns
    numbers = plane + 0.1 * RNG.standard_normal(plane.shape)
    numbers[RNG.random(plane.shape) < 0.5] = np.nan
    mean = fit_mean(axes, *sample_observations(numbers, RNG), trend=True)
    assert mean.slopes.tolist() == pytest.approx([2.0, -0.5], abs=0.02)
    x = torch.tensor([[15.0, 10.0]], dtype=torch.float64)
    assert mean(x).item() == pytest.approx(28.0, abs=0.05)
    flat = fit_mean(axes, *sample_observations(numbers, RNG), trend=False)
    assert flat.slopes.tolist() == [0.0, 0.0]
    assert flat(x).item() == pytest.approx(np.nanmean(numbers))
    noise = np.where(np.isnan(numbers), np.nan, RNG.standard_normal(plane.shape))
    assert fit_mean(axes, *sample_observations(noise, RNG), trend=True).slopes.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("shape", [(2000,), (100, 120), (30, 40, 20), (3000, 4), (12, 10, 9, 8)])
def test_windows_are_parts_of_the_grid_and_small(shape):
    values = RNG.standard_normal(shape)
    values[RNG.random(shape) < 0.3] = np.nan
    windows = choose_windows(on_grid(values), 6, np.random.default_rng(0))
    assert len(windows) == 6
    strides = []
    for window in windows:
        assert 0.5 * MAX_WINDOW_OBSERVATIONS < len(window) <= MAX_WINDOW_OBSERVATIONS
        places = tuple(p[c] for p, c in zip(window.positions, window.cells.numpy().T, strict=True))
        np.testing.assert_array_equal(window.values.numpy(), values[places])
        assert all(p.min() >= 0 and p.max() < m for p, m in zip(window.positions, shape, strict=True))
        strides.append(max(int(np.diff(p).min()) for p in window.positions if len(p) > 1))
    assert strides[:4] == [1] * 4
    longest = max(range(len(shape)), key=lambda i: shape[i])
    assert np.ptp(windows[-1].positions[longest]) > 0.6 * shape[longest]  # the last sees most of the longest axis


def test_windows_look_for_observations():
    values = np.full((200, 200), np.nan)
    values[60:160, 60:160] = 1.0
    windows = choose_windows(on_grid(values), 6, np.random.default_rng(0))
    assert min(map(len, windows)) > 50


@pytest.mark.parametrize("labels", [False, True])
def test_windows_go_through_the_cells_that_they_are_asked_for(labels):
    shape = (150, 160, 3)
    values = RNG.standard_normal(shape)
    cells = np.array([[0, 0, 0], [149, 159, 2], [75, 3, 1], [2, 150, 2], [149, 0, 1], [70, 80, 0]])
    values[RNG.random(shape) < 0.5] = np.nan  # few enough are left for windows to keep all of them
    values[tuple(cells.T)] = 100.0
    source = on_grid(values, [None, None, list("abc") if labels else [0.0, 1.0, 2.0]])
    windows = choose_windows(source, 6, np.random.default_rng(0), density=0.5, through=cells)
    for window, cell in zip(windows, cells, strict=True):
        assert all(at in p for at, p in zip(cell, window.positions, strict=True))
        assert window.values.max() == 100.0


def test_windows_of_a_sparse_grid_are_wide():
    values = np.full((600, 700), np.nan)
    values.reshape(-1)[RNG.choice(values.size, 1000, replace=False)] = 1.0
    density = 1000 / values.size
    windows = choose_windows(on_grid(values), 6, np.random.default_rng(0), density)
    assert min(map(len, windows)) > 100
    for window in windows:  # places without observations are left out
        assert all(len(np.unique(c)) == len(p) for p, c in zip(window.positions, window.cells.T, strict=True))


def test_all_of_a_small_grid():
    values = np.array([[1.0, np.nan], [2.0, 3.0]])
    window = whole_window(values)
    assert window.cells.tolist() == [[0, 0], [1, 0], [1, 1]]
    assert window.values.tolist() == [1.0, 2.0, 3.0]


# -- what is withheld --------------------------------------------------------------------------------------------------


def depths(unknown, at):
    """Distances to the nearest known cell, at the flagged ones, by brute force."""
    known = np.argwhere(~unknown)
    return np.array([np.sqrt(((known - cell) ** 2).sum(1).min()) for cell in np.argwhere(at)])


def cut(shape, *boxes):
    values = RNG.standard_normal(shape)
    for box in boxes:
        values[box] = np.nan
    return values


SCATTERED = np.where(RNG.random((40, 45)) < 0.3, np.nan, RNG.standard_normal((40, 45)))
GAPPY = {
    "hole": cut((40, 45), np.s_[12:27, 20:36]),
    "strip": cut((40, 45), np.s_[:, 20:32]),
    "several holes": cut((40, 45), np.s_[3:9, 4:11], np.s_[20:31, 8:20], np.s_[30:38, 30:44]),
    "end of a series": cut((900,), np.s_[720:]),
    "scattered": SCATTERED,
}


@pytest.mark.parametrize("values", GAPPY.values(), ids=GAPPY.keys())
def test_what_is_withheld_was_observed_and_is_as_far_from_data_as_the_gaps(values):
    gaps = np.isnan(values)
    held = withhold(values, np.random.default_rng(0))
    assert not (held.hidden & gaps).any()
    assert not (held.scored & ~held.hidden).any()
    assert held.hidden.sum() <= 0.5 * (~gaps).sum()
    assert 0.05 * (~gaps).sum() < held.scored.sum() <= 0.1 * (~gaps).sum()
    found, target = depths(gaps | held.hidden, held.scored), depths(gaps, gaps)
    for share in (0.25, 0.5, 0.75, 0.95):
        assert np.quantile(found, share) == pytest.approx(np.quantile(target, share), rel=0.3)


def test_ends_that_are_lost_are_withheld_at_that_end():
    values = cut((80, 30), *(np.s_[first : first + 9, 21:] for first in (3, 24, 48)))
    hidden = withhold(values, np.random.default_rng(0)).hidden
    left = ~np.isnan(values) & ~hidden
    assert hidden.any()
    assert left[:, 0].all()
    assert (np.diff(left.astype(int), axis=1) <= 0).all()  # what is left of every row is its beginning


def test_ends_of_curves_are_withheld_as_long_as_they_are_lost_whatever_other_curves_lie_beside_them():
    values, generator = RNG.standard_normal((160, 40)), np.random.default_rng(1)
    for row in generator.permutation(160)[:80]:
        values[row, generator.integers(1, 40) :] = np.nan
    hidden = withhold(values, np.random.default_rng(0), ordered=[False, True]).hidden
    lost = np.isnan(values)
    left = ~lost & ~hidden
    assert (np.diff(left.astype(int), axis=1) <= 0).all()  # what is left of every curve is its beginning
    lengths, target = (flags.sum(axis=1)[flags.any(axis=1)] for flags in (hidden, lost))
    assert np.median(lengths) > 0.5 * np.median(target)


def test_a_few_gaps_in_a_large_grid_are_joined_by_cells_at_random():
    values = RNG.standard_normal((80, 90))
    values[3, 4] = np.nan
    assert withhold(values, np.random.default_rng(0)).scored.sum() > 100


def test_a_hole_that_is_half_of_the_grid_is_not_hidden_again():
    values = cut((40, 45), np.s_[2:38, 12:40])
    held = withhold(values, np.random.default_rng(0))
    assert 0 < held.hidden.sum() <= 0.5 * np.isfinite(values).sum()


@pytest.mark.parametrize("observed", [1, 10, 29])
def test_nothing_is_withheld_from_a_few_observations(observed):
    values = np.full(200, np.nan)
    values[:observed] = 1.0
    assert withhold(values, np.random.default_rng(0)) is None


def test_a_region_is_larger_than_its_part_and_around_it():
    part = [np.arange(90, 100), np.arange(40, 60)]
    region = region_around(part, (100, 100), 2000)
    assert [len(r) for r in region] == [44, 45]
    assert all(np.isin(p, r).all() for p, r in zip(part, region, strict=True))
    assert [len(r) for r in region_around(part, (100, 100), 10_000)] == [100, 100]


def test_parts_of_large_grids_are_small_and_hold_gaps(monkeypatch):
    monkeypatch.setattr(grid_values, "MAX_PART_CELLS", 500)
    generator = np.random.default_rng(0)
    positions = random_part((1000, 40, 3), generator)
    sides = [len(p) for p in positions]
    assert np.prod(sides) <= 500
    assert np.prod(sides) > 250
    assert sides[2] == 3
    values = np.ones((100, 100))
    values[:50] = np.nan
    part = choose_part(on_grid(values), generator)
    assert np.isfinite(part.values).any()


def test_a_grid_that_is_small_enough_is_looked_at_whole():
    assert [len(p) for p in random_part((20, 30), np.random.default_rng(0))] == [20, 30]
