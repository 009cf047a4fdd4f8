"""The benchmark of long axes on some hundred cells: data are what they are said to be, and runs report."""

import json

import numpy as np
import pytest

from benchmarks import long_axes
from benchmarks._long_data import DAY, MISSING, NOISE, matern_series, weather_table


def test_tables_have_cycles_weather_and_gaps():
    table = weather_table(8760, 5)
    assert table.gaps.mean() == pytest.approx(MISSING, abs=0.01)
    assert np.array_equal(table.values[~table.gaps], table.truth[~table.gaps])
    months = table.truth[:8640].reshape(12, -1, 5).mean(1)
    assert (months[6] - months[0] > 8).all()
    hours = table.truth.reshape(-1, int(DAY), 5).mean(0)
    assert (np.ptp(hours, axis=0) > 2).all()
    steps = np.diff(table.truth, axis=0).std()
    assert 2**0.5 * NOISE < steps < 2
    runs = np.diff(np.flatnonzero(np.diff(np.pad(table.gaps[:, 0].astype(int), 1)))[:])[::2]
    assert runs.max() >= 24  # an outage


def test_cycles_are_those_of_least_squares():
    table = weather_table(2000, 3)
    left = table.values - long_axes.cycles(table)
    assert np.allclose(np.nanmean(left, axis=0), 0, atol=1e-8)
    assert np.nanstd(left) < 0.7 * np.nanstd(table.values)


def test_the_series_has_its_kernel():
    series = matern_series(200_000, length_scale=10.0, noise=0.04)
    assert np.isnan(series.values).mean() == pytest.approx(MISSING, abs=0.01)
    at_ten = np.mean(series.truth[10:] * series.truth[:-10])
    assert at_ten == pytest.approx((1 + 3**0.5) * np.exp(-(3**0.5)), abs=0.03)
    assert series.truth.var() == pytest.approx(1.04, abs=0.05)


def test_runs_report_seconds_memory_and_scores(tmp_path, capsys):
    sizes = ["--hours", "96", "--stations", "3", "--points", "400", "--train-hours", "60", "--train-stations", "2"]
    long_axes.main([*sizes, "--methods", "own", "--steps", "3", "--output", str(tmp_path)])
    runs = json.loads((tmp_path / "long_axes.json").read_text())["runs"]
    assert [run["run"] for run in runs] == ["96 x 3", "400"]
    for run in runs:
        assert run["outcome"] == "done", run
        assert {"training", "mean", "standard deviations"} == set(run["wall"])
        assert run["memory_gib"] > 0
        assert 0.6 < run["scores"]["coverage"] <= 1
        assert run["warnings"] == []
    assert "| 96 x 3 | own | done | training" in capsys.readouterr().out


@pytest.mark.usefixtures("quick_choice")
def test_fill_gaps_takes_the_table():
    facts = {}

    class Child:
        def report(self, **found):
            facts.update(found)

        def clock(self):
            return long_axes.contextmanager(lambda: iter([None]))()

    long_axes.table_by_fill_gaps(Child(), 48, 2, long_axes.parser().parse_args([]))
    assert facts["outcome"] == "done"
    assert facts["phases"]["training"] > 0
