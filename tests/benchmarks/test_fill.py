"""What ``fill_gaps`` is compared with does what it says, and the comparison prints what it measured."""

import json

import numpy as np
import pytest

from benchmarks import fill
from benchmarks._fill_data import CURVES, FIELD, STATIONS, Problem
from benchmarks._fill_peers import climatology, dineof, interpolate_na, peers, regional, scattered
from benchmarks._fill_splits import withheld

pytest.importorskip("xarray")
ROWS, COLUMNS = np.meshgrid(np.arange(20.0), np.arange(30.0), indexing="ij")
PLANE = 2 * ROWS - 3 * COLUMNS
DAYS = np.datetime64("2001-01-01", "ns") + np.arange(900) * np.timedelta64(1, "D")


def plane(values=PLANE, **more):
    coordinates = {"lat": np.arange(1.0 * len(values)), "lon": np.arange(1.0 * values.shape[1])}
    return Problem("plane", FIELD, values, ("lat", "lon"), coordinates, cloud=(2.0, 2.0), **more)


def cube(values, **more):
    coordinates = {"time": DAYS[: len(values)], "lat": np.arange(20.0), "lon": np.arange(30.0)}
    return Problem("cube", FIELD, values, ("time", "lat", "lon"), coordinates, **more)


def stations(values, run=50):
    coordinates = {"time": DAYS[: len(values)], "station": np.array([f"s{i}" for i in range(values.shape[1])])}
    return Problem("stations", STATIONS, values, ("time", "station"), coordinates, run=run)


def curves(values):
    coordinates = {"configuration": np.arange(2.0 * len(values)).reshape(-1, 2), "epoch": np.arange(values.shape[1])}
    return Problem("curves", CURVES, values, ("configuration", "epoch"), coordinates)


def season(levels=(3.0, 8.0, -1.0), weather=0.0):
    wave = np.cos(2 * np.pi * np.arange(900) / 365.2425)
    common = weather * np.random.default_rng(1).standard_normal(900)
    return (wave + common)[:, None] + np.array(levels)


# -- methods -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fill",
    [interpolate_na("linear", -1), interpolate_na("cubic", 0), scattered("linear")],
    ids=["rows", "columns", "griddata"],
)
def test_linear_peers_are_exact_on_a_plane(fill):
    seen = PLANE.copy()
    seen[4:9, 5:12] = np.nan
    np.testing.assert_allclose(fill(plane(), seen), PLANE, atol=1e-9)


def test_peers_are_constant_beyond_the_data():
    seen = PLANE.copy()
    seen[:, 0] = np.nan
    for method in (scattered("linear"), scattered("nearest"), interpolate_na("linear", -1)):
        np.testing.assert_allclose(method(plane(), seen)[:, 0], PLANE[:, 1])


def test_series_of_few_observations_have_no_spline():
    seen = np.where(np.arange(20)[:, None] % 9 == 4, PLANE, np.nan)
    np.testing.assert_allclose(interpolate_na("cubic", 0)(plane(), seen)[4:14], PLANE[4:14])


def test_fields_are_filled_one_date_after_the_other_and_empty_dates_with_the_mean():
    values = np.stack([PLANE, PLANE + 100, PLANE])
    seen = values.copy()
    seen[1, 3, 3] = np.nan
    np.testing.assert_allclose(scattered("linear")(cube(values), seen), values)
    seen[2] = np.nan
    np.testing.assert_allclose(scattered("linear")(cube(values), seen)[2], np.nanmean(seen))


def test_a_climatology_has_levels_and_the_year():
    values = season()
    seen = values.copy()
    seen[100:300, 0] = np.nan
    np.testing.assert_allclose(climatology(stations(values), seen), values, atol=1e-9)


def test_the_regional_anomaly_is_that_of_the_other_stations():
    values = season(np.linspace(0, 9, 10), weather=1.0)
    seen = values.copy()
    seen[100:140, 0] = np.nan
    given = stations(values)
    off = [np.abs(method(given, seen) - values)[100:140, 0].mean() for method in (climatology, regional)]
    assert off[1] < 0.1 * off[0]


def test_curves_have_a_mean_by_epoch_and_a_level_of_their_own():
    values = np.add.outer(np.array([0.0, 1.0, 2.0]), np.log1p(np.arange(20.0)))
    seen = values.copy()
    seen[0, 10:] = np.nan
    np.testing.assert_allclose(climatology(curves(values), seen)[:, :10], np.tile(values[1, :10], (3, 1)))
    assert np.abs(regional(curves(values), seen) - values)[0, 10:].mean() < 0.6


@pytest.mark.parametrize("turned", [False, True])
def test_dineof_recovers_few_modes(turned):
    pytest.importorskip("pydineof")
    rng = np.random.default_rng(0)
    values = rng.standard_normal((12, 2)) @ rng.standard_normal((2, 200)) + 20.0
    values = values.T if turned else values
    seen = np.where(rng.random(values.shape) < 0.1, np.nan, values)
    found = dineof(curves(values), seen)
    assert np.sqrt(np.mean((found - values) ** 2)) < 0.1 * values.std()
    empty = (slice(None), 3) if turned else (3,)
    seen[empty] = np.nan
    np.testing.assert_allclose(dineof(curves(values), seen)[empty], np.nanmean(seen))


def test_dineof_refuses_too_few_times():
    pytest.importorskip("pydineof")
    with pytest.raises(ValueError, match="got 5 times; expected 8 or more"):
        dineof(curves(PLANE[:5]), PLANE[:5])


def test_every_kind_of_data_has_its_peers():
    for given in (plane(), cube(np.stack([PLANE] * 9)), stations(season()), curves(PLANE)):
        names = list(peers(given))
        assert "interpolate_na, linear" in names
        assert ("biharmonic" in names) == (given.kind == FIELD)
        assert ("DINEOF" in names) == (given.name != "plane")


# -- what is withheld --------------------------------------------------------------------------------------------------


def gappy(shape, share=0.3, seed=7):
    rng = np.random.default_rng(seed)
    return np.where(rng.random(shape) < share, np.nan, rng.standard_normal(shape))


@pytest.mark.parametrize(("shape", "share"), [("random", 0.1), ("clouds", 0.15)])
def test_withheld_cells_of_a_field_were_observed(shape, share):
    given = plane(gappy((60, 80)))
    held = withheld(given, shape, seed=0)
    assert not np.isnan(given.values[held]).any()
    assert held.sum() / np.isfinite(given.values).sum() == pytest.approx(share, abs=0.05)
    together = (held[1:] & held[:-1]).sum() / held.sum()
    assert together > 0.3 if shape == "clouds" else together < 0.2


def test_clouds_of_other_dates_lie_over_the_clearest():
    values = np.ones((10, 20, 30))
    for date in range(10):
        values[date, :date] = np.nan
    values[:, :, :3] = np.nan  # land
    sea = np.ones((20, 30), dtype=bool)
    sea[:, :3] = False
    held = withheld(cube(values, inside=sea), "clouds", seed=0)
    assert held[:3].any()
    assert not held[3:].any()
    assert not held[:, :, :3].any()
    assert not np.isnan(values[held]).any()
    for date in range(3):
        assert len(np.unique(held[date][:, 3:].sum(axis=1))) <= 2, "whole rows, as the gaps of another date"


def test_stations_lose_runs_and_keep_half():
    given = stations(gappy((900, 6)), run=50)
    held = withheld(given, "runs", seed=1)
    observed = np.isfinite(given.values)
    assert not np.isnan(given.values[held]).any()
    assert 0.09 < held.sum() / observed.sum() < 0.15
    assert (held.sum(axis=0) <= 0.5 * observed.sum(axis=0)).all()
    span = np.diff(np.flatnonzero(held[:, held.any(axis=0)][:, 0])[[0, -1]])
    assert span >= 40, "a run of 50 with gaps of its own inside"


def test_curves_end_early_and_all_begin():
    given = curves(np.ones((40, 30)))
    held = withheld(given, "ends", seed=0)
    assert not held[:, 0].any()
    assert 0.3 < held[:, -1].mean() < 0.7
    assert (np.diff(held.astype(int), axis=1) >= 0).all()


def test_cells_marked_for_tests_are_taken_with_seed_0():
    tests = np.zeros((20, 30), dtype=bool)
    tests[3] = True
    given = plane(test_cells=tests)
    assert np.array_equal(withheld(given, "random", 0), tests)
    assert not np.array_equal(withheld(given, "random", 1), tests)
    with pytest.raises(ValueError, match="shape: got 'holes'; expected one of"):
        withheld(given, "holes", 0)


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_prints_and_writes_what_it_measured(tmp_path, monkeypatch, capsys):
    months = season(weather=1.0)[::30]
    monkeypatch.setattr(fill, "problem", lambda name, small: stations(months, run=4))
    path = tmp_path / "made" / "fill.json"
    options = ["--data", "irish_wind", "--withheld", "runs", "--seed", "3", "--cap", "60", "--json", str(path)]
    status = fill.main([*options, "--methods", "climatology", "interpolate_na, linear"])
    printed, content = capsys.readouterr().out, json.loads(path.read_text())
    assert content["seed"] == 3
    assert [row["method"] for row in content["rows"]] == ["interpolate_na, linear", "climatology"]
    for row in content["rows"]:
        assert row["outcome"] == "done"
        assert row["crps"] <= row["rmse"]
        assert row["seconds"] > 0
        assert row["memory_gib"] >= row["before_gib"] > 0
        assert "coverage" not in row
        assert f"| {row['method']} | {row['rmse']:.4g} | {row['crps']:.4g} |  |" in printed
    assert "### stations, runs:" in printed
    assert status == 1, "fill_gaps did not take part"


class InProcess:
    """Stands for the process of a run."""

    def __init__(self):
        self.facts = {}

    def clock(self):
        import contextlib

        return contextlib.nullcontext()

    def report(self, **facts):
        self.facts |= facts


@pytest.mark.usefixtures("quick_choice")
def test_fill_gaps_is_scored_with_its_error_bars():
    rows = np.sin(np.arange(14.0))[:, None] + 0.1 * np.random.default_rng(0).standard_normal((14, 6))
    child = InProcess()
    fill.measure(child, plane(rows), "clouds", 0, "fill_gaps")
    assert child.facts["outcome"] == "done"
    assert 0 <= child.facts["coverage"] <= 1
    assert child.facts["crps"] < child.facts["rmse"] < 2
    assert "RMSE" in child.facts["report"]


def test_data_come_in_the_form_that_their_users_have():
    pd, xr = pytest.importorskip("pandas"), pytest.importorskip("xarray")
    (table,), options = stations(season()).arguments(season())
    assert isinstance(table, pd.DataFrame)
    assert isinstance(table.index, pd.DatetimeIndex)
    assert options == {}
    (array, axes), _ = curves(PLANE).arguments(PLANE)
    assert [len(axis) for axis in axes] == list(array.shape)
    values, sea = np.stack([PLANE] * 2), PLANE > -20
    (field,), options = cube(values, inside=sea).arguments(values)
    assert isinstance(field, xr.DataArray)
    np.testing.assert_array_equal(options["where"], np.stack([sea] * 2))
