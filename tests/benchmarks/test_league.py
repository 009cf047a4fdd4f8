"""The league table: every method once, in one process, and the picture from the file."""

import json

import numpy as np
import pytest

from benchmarks import league
from benchmarks._fill_data import FIELD, Problem

pytest.importorskip("xarray")


def small(name, small):
    """A plane with noise, which every method can fill."""
    values = np.add.outer(np.arange(12.0), np.arange(15.0))
    values = values + 0.01 * np.random.default_rng(0).standard_normal(values.shape)
    coordinates = {"lat": np.arange(12.0), "lon": np.arange(15.0)}
    published = {("theirs", "clouds"): 0.5, ("theirs, at random", "random"): 0.7}
    return Problem(name, FIELD, values, ("lat", "lon"), coordinates, cloud=(2.0, 2.0), published=published)


def broken(given, seen):
    raise ValueError("no")


def predictions(given, seen, method):
    """`fill_gaps` itself is run by test_fill.py."""
    if method == league.OURS:
        return given.values + 0.01, np.full_like(seen, 0.02), "a report"
    return league.peers(given)[method](given, seen), None, ""


def test_the_table_has_the_best_other_method_and_published_figures(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(league, "problem", small)
    worse = {"broken": broken, "mean": lambda given, seen: np.where(np.isnan(seen), np.nanmean(seen), seen)}
    near = {"near": lambda given, seen: given.values + 0.5}
    monkeypatch.setattr("benchmarks.fill.predictions", predictions)
    monkeypatch.setattr(league, "peers", lambda given: worse | near)
    path = tmp_path / "league.json"
    (case,) = league.main(["--data", "irish_wind", "--json", str(path)])
    assert json.loads(path.read_text())["cases"] == [case]
    assert case["methods"]["broken"] == {"error": "ValueError: no"}
    assert list(league.others(case)) == ["near", "mean"]
    assert case["methods"]["fill_gaps"]["rmse"] == pytest.approx(0.01)
    assert case["methods"]["fill_gaps"]["coverage"] == 1
    *_, line, _, failed = capsys.readouterr().out.splitlines()
    assert failed == "No result: irish_wind, broken: ValueError: no"
    assert "| 0.5 (near) | 0.5 |" in line
    assert line.endswith("| 0.5 (theirs) |")
    pytest.importorskip("matplotlib")
    league.main(["--json", str(path), "--draw", str(tmp_path / "league.png")])
    assert (tmp_path / "league.png").stat().st_size > 1000
