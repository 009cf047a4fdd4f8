"""Long tables: a row for each value, with columns that say where it belongs."""

import csv
import json

import numpy as np
import pandas as pd
import pytest

import gpytorch_gaps as gaps
from gpytorch_gaps.formats import open_file

RNG = np.random.default_rng(0)
DAYS = pd.date_range("2020-01-30", periods=20)
STATIONS = [10382, 10384, 10400]
LEVELS = {10382: 3.0, 10384: -1.0, 10400: 0.5}


def rows():
    """Rows in no order; one combination of day and station has none, and some have no value."""
    wave = np.sin(np.arange(20) / 3)
    found = [
        [
            day.strftime("%d/%m/%Y"),
            f"{station}",
            f"{wave[i] + LEVELS[station] + 0.1 * RNG.standard_normal():.3f}",
            f"note {i}",
        ]
        for i, day in enumerate(DAYS)
        for station in STATIONS
        if (i, station) != (7, 10384)
    ]
    RNG.shuffle(found)
    for row in found[::9]:
        row[2] = "" if row[0] < "15" else "NA"
    return found


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "table.csv"
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows([["date", "station", "t", "remark"], *rows()])
    return path


LONG = ["--index", "date", "--columns", "station", "--value", "t"]


def test_a_long_table_is_filled_in_its_own_form(table, fill, tmp_path):
    fill(table, "-o", tmp_path / "out.csv", *LONG, "--std", tmp_path / "std.csv")
    before, after = (
        [row.split(",") for row in path.read_text().splitlines()] for path in (table, tmp_path / "out.csv")
    )
    assert [row[:2] + row[3:] for row in after] == [row[:2] + row[3:] for row in before]
    filled = [i for i, row in enumerate(before) if row[2] in ("", "NA")]
    assert len(filled) == 7
    assert [row[2] for i, row in enumerate(after) if i not in filled] == [
        row[2] for i, row in enumerate(before) if i not in filled
    ]
    for i in filled:
        day = DAYS.get_loc(pd.to_datetime(after[i][0], dayfirst=True))
        assert abs(float(after[i][2]) - np.sin(day / 3) - LEVELS[int(after[i][1])]) < 0.6
    deviations = pd.read_csv(tmp_path / "std.csv")["t"]
    assert (deviations > 0).tolist() == [i in filled for i in range(1, len(before))]


def test_it_is_what_python_fills_by_a_multiindex(table, fill, tmp_path):
    fill(table, "-o", tmp_path / "out.csv", *LONG)
    long = pd.read_csv(table, parse_dates=["date"], dayfirst=True)
    series = long.set_index(["date", "station"])["t"]
    filled = gaps.fill_gaps(series, steps=3, std=False, check=False, progress=False)
    assert filled.report.axes == ("date: 20 times, 19 days", "station: 3 labels")
    np.testing.assert_array_equal(filled.mean.to_numpy(), pd.read_csv(tmp_path / "out.csv")["t"])
    assert filled.mean.index.equals(series.index)


def test_inspect_takes_the_same_options(table, run):
    code, out, _ = run("inspect", table, *LONG, "--json")
    (found,) = json.loads(out)["variables"].values()
    assert code == 0
    assert [axis["kind"] for axis in found["axes"]] == ["time", "label"]
    assert found["gaps"] == 8  # the combination without a row is a gap, but it is not written


def test_other_formats_hold_the_grid_of_a_long_table(table, fill, tmp_path):
    fill(table, "-o", tmp_path / "out.npz", *LONG, "--plot", tmp_path / "out.png")
    with np.load(tmp_path / "out.npz") as archive:
        assert archive["t"].shape == (20, 3)
        assert archive["station"].tolist() == STATIONS
        assert np.isnan(archive["t"]).sum() == 1  # no row, no value
    assert (tmp_path / "out.png").stat().st_size > 1000


def test_what_is_not_clear_is_asked_about(table, run, tmp_path):
    def error(*arguments):
        code, _, text = run("inspect", table, *arguments)
        assert code == 1
        return text

    assert "again in row" in error("--index", "station")
    assert "--index date --columns NAME --value NAME" in error()
    assert "got the column 'place', expected one of date, station, t, remark" in error("--index", "place")
    assert "columns: got station without an index" in error("--columns", "station")
    text = table.read_text().replace("t,remark", "t,u").replace("note ", "")
    table.write_text(text)
    assert "got columns without --value, expected the column of values: one of t, u" in error(
        "--index", "date", "--columns", "station"
    )
    np.save(tmp_path / "a.npy", np.zeros(3))
    code, _, text = run("inspect", tmp_path / "a.npy", "--index", "date")
    assert code == 1
    assert "got index, columns or dates, expected none: they are for .csv tables" in text


def test_dates_that_may_be_two_are_asked_about_and_told(run, tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("date,a\n03/04/2020,1\n04/04/2020,\n05/04/2020,3\n")
    code, _, text = run("inspect", path)
    assert code == 1
    assert "got '03/04/2020', which may be 2020-04-03 or 2020-03-04" in text
    assert "--dates day-first" in text
    for order, span in (("day-first", 2), ("month-first", 61)):
        with open_file(path, dates=order) as opened:
            assert (opened.data.index[-1] - opened.data.index[0]).days == span
    with pytest.raises(ValueError, match="dates: got 'us', expected one of day-first, month-first"):
        open_file(path, dates="us")
