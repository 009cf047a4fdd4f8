"""Cycles: which there are, and those that last as a part of the mean."""

import numpy as np
import pandas as pd
import pytest
import torch

import gpytorch_gaps as gaps
from gpytorch_gaps.filling.arrays.grid_values import coordinates
from gpytorch_gaps.filling.axes.calendars import YEAR
from gpytorch_gaps.filling.axes.describe import describe_axes
from gpytorch_gaps.filling.learning import learn
from gpytorch_gaps.filling.learning.cycles import find_changing, find_lasting, fit_cycles, last_long
from gpytorch_gaps.kernels.blocks import LONG_AXIS

PLACES = np.array([[0.0, 0.0], [3.0, 4.0], [8.0, 1.0]])


def hourly(days, seed=0):
    """Axes, and waves of the year and the day that differ by place. shape: (hours, 3)"""
    times = pd.date_range("2023-01-01", periods=24 * days, freq="h")
    axes = describe_axes([24 * days, 3], [times, PLACES], ["time", "place"])
    angle = 2 * np.pi * axes[0].points
    level, year, day = np.random.default_rng(seed).standard_normal((3, 3))
    return axes, 5.0 + level + (4.0 + year) * np.sin(angle / YEAR) + (3.0 + day) * np.cos(angle)


def test_least_squares_find_the_waves_of_every_series():
    axes, waves = hourly(360)
    generator = np.random.default_rng(1)
    values = np.where(generator.random(waves.shape) < 0.4, np.nan, waves)
    cycles = fit_cycles(values, axes, 0, [1.0, YEAR])
    assert cycles.periods == (YEAR, 1.0)
    cells = np.argwhere(np.isnan(values))
    found = cycles(coordinates(axes, cells)).numpy()
    # the penalty draws each series to the others, by its share of the squares of a wave: one or two hundredths,
    # and somewhat more where a year that is not whole looks like a level
    spread = np.ptp(waves, axis=1).max()
    np.testing.assert_allclose(found, waves[tuple(cells.T)], atol=0.1 * spread)
    np.testing.assert_allclose(cycles.on(axes[0].points[:, 0])[tuple(cells.T)], found, atol=1e-9)


def test_coefficients_are_those_of_dense_penalized_least_squares():
    axes, waves = hourly(60)
    values = waves + np.random.default_rng(2).standard_normal(waves.shape)
    values[100:700, 1] = np.nan
    cycles = fit_cycles(values, axes, 0, [1.0])
    t, k = axes[0].points, 0.01 * axes[0].size
    angle = 2 * np.pi * t * np.arange(1, 5)  # four harmonics, since there are many periods
    design = np.concatenate([np.ones_like(t), np.cos(angle), np.sin(angle)], axis=1)
    known = ~np.isnan(values)
    rows = np.concatenate([design[known[:, i]] for i in range(3)])
    common, *_ = np.linalg.lstsq(rows, np.concatenate([values[known[:, i], i] for i in range(3)]), rcond=None)
    for place in range(3):
        own = known[:, place]
        stacked = np.concatenate([design[own], np.sqrt(k) * np.eye(9)])
        target = np.concatenate([values[own, place], np.sqrt(k) * common])
        weights, *_ = np.linalg.lstsq(stacked, target, rcond=None)
        x = coordinates(axes, np.stack([np.arange(len(t)), np.full(len(t), place)], axis=1))
        np.testing.assert_allclose(cycles(x).numpy(), design @ weights, atol=1e-9)


def test_a_point_off_the_grid_has_the_cycle_of_the_nearest_series():
    axes, waves = hourly(60)
    cycles = fit_cycles(waves, axes, 0, [1.0])
    at, near = torch.tensor([[0.25, 3.0, 4.0], [0.25, 3.1, 3.9]], dtype=torch.float64)
    assert cycles(near[None]).item() == cycles(at[None]).item()
    assert cycles(at[None]).item() != pytest.approx(cycles(torch.tensor([[0.25, 0.0, 0.0]]).double()).item(), abs=1e-3)


def test_a_cycle_whose_phases_are_not_all_observed_is_left_out():
    axes, waves = hourly(360)
    waves[24 * 120 : 24 * 300] = np.nan  # half a year, at all places
    assert fit_cycles(waves, axes, 0, [YEAR, 1.0]).periods == (1.0,)
    assert fit_cycles(waves, axes, 0, [YEAR]) is None


def test_lasting_cycles_leave_nothing_and_changing_ones_do():
    axes, waves = hourly(360)
    noise = np.random.default_rng(3).standard_normal(waves.shape)
    assert find_lasting(waves + noise, 0, axes[0]) == [YEAR, 1.0]
    days = axes[0].points
    growing = np.sin(2 * np.pi * days / 90.0) * np.cos(2 * np.pi * days)  # summer days and winter days
    for values, expected in ((waves + noise, []), (waves + 2.0 * growing + noise, [1.0])):
        left = values - fit_cycles(values, axes, 0, [YEAR, 1.0]).on(days[:, 0])
        assert find_changing(left, 0, axes[0], [YEAR, 1.0]) == expected


def test_years_of_days_are_left_to_the_kernel_and_days_of_a_year_are_not():
    axes, _ = hourly(360)
    assert last_long(axes[0], [YEAR, 1.0])
    assert not last_long(axes[0], [YEAR])


@pytest.mark.parametrize("long", [True, False])
def test_cycles_of_long_axes_are_in_the_mean_and_others_in_the_kernel(long, monkeypatch):
    monkeypatch.setattr(learn, "FIRST_STEPS", 1)  # which kernel is best does not matter here
    monkeypatch.setattr(learn, "FURTHER_STEPS", 1)
    days = -(-LONG_AXIS // 24) if long else 20
    _, waves = hourly(days)
    generator = np.random.default_rng(4)
    values = waves + 0.3 * generator.standard_normal(waves.shape)
    missing = generator.random(values.shape) < 0.1
    missing[200:260, 1] = True
    times = pd.date_range("2023-01-01", periods=24 * days, freq="h")
    filled = gaps.fill_gaps(
        np.where(missing, np.nan, values), [times, PLACES], steps=3, std=False, check=False, progress=False
    )
    periodic = any("period_length" in name for name, _ in filled.model.named_parameters())
    assert (filled.model.mean_module.cycles is not None, periodic) == ((True, False) if long else (False, True))
    assert any("subtracted first" in note and "cycle" in note for note in filled.report.notes) == long
    error = filled.mean[200:260, 1] - waves[200:260, 1]
    assert np.sqrt(np.mean(error**2)) < (0.3 if long else 2.0)
