import json

import numpy as np
import pytest

import gpytorch_gaps.filling.fill as filling
from gpytorch_gaps.cli import inspect


def test_what_is_said_of_a_field(tmp_path, field, run):
    np.save(tmp_path / "in.npy", field)
    code, out, err = run("inspect", tmp_path / "in.npy")
    assert (code, err) == (0, "")
    for words in (
        "12 x 9 float64",
        "axis 0: 12 positions",
        "10 of 108 cells (9.26 %)",
        "2 regions, median 5 cells, largest 9 cells",
        "3 along axis 0, 3 along axis 1",
        "in memory",
    ):
        assert words in out


def test_json_has_the_same(tmp_path, field, run):
    np.savez(tmp_path / "in.npz", sst=field, t=np.arange(12) * 30.0)
    _, out, _ = run("inspect", tmp_path / "in.npz", "--json")
    found = json.loads(out)["variables"]["values"]
    assert found["gap_sizes"] == {"regions": 2, "median": 5.0, "largest": 9, "runs": [3, 3], "of_part": None}
    assert (found["axes"][0]["kind"], found["axes"][0]["extent"]) == ("number", 330.0)
    assert found["streamed"] is False


def test_cycles_are_found(tmp_path, run):
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("h5netcdf")
    days = np.arange(0, 1500, 10)
    values = np.sin(2 * np.pi * days / 365.2425)[:, None] + np.zeros(3)
    values[20:25] = np.nan
    times = np.datetime64("2001-01-01", "ns") + days * np.timedelta64(1, "D")
    dataset = xarray.Dataset({"t2m": (("time", "station"), values)}, {"time": times, "station": ["a", "b", "c"]})
    dataset.to_netcdf(tmp_path / "in.nc", engine="h5netcdf")
    _, out, _ = run("inspect", tmp_path / "in.nc")
    assert "time has a cycle of 365.243 days" in out
    assert "station: 3 labels" in out
    assert "3 regions, median 5 cells" in out  # gaps of different stations are not connected


@pytest.mark.parametrize(
    ("value", "words"),
    [(1.0, "nothing to fill"), (np.nan, "no observations to fill the gaps from"), (np.inf, "36 infinite entries")],
)
def test_nothing_to_do(value, words, tmp_path, run):
    np.save(tmp_path / "in.npy", np.full((6, 6), value))
    code, out, _ = run("inspect", tmp_path / "in.npy")
    assert code == 0
    assert words in out
    assert run("inspect", tmp_path / "in.npy", "--json")[0] == 0


def test_a_large_array_is_seen_in_part(tmp_path, run, monkeypatch):
    values = np.random.default_rng(0).random((700, 600)).astype(np.float32)
    values[values < 0.2] = np.nan
    np.save(tmp_path / "in.npy", values)
    monkeypatch.setattr(filling, "MAX_CELLS_IN_MEMORY", 1000)
    monkeypatch.setattr(inspect, "MOST_CELLS", 1000)
    _, out, _ = run("inspect", tmp_path / "in.npy")
    assert "in a part of 22 x 38" in out
    assert "in pieces" in out
    assert f"{np.isnan(values).sum():,} of 420,000 cells" in out


def test_an_image_and_its_gap_value(tmp_path, run):
    image = pytest.importorskip("PIL.Image")
    pixels = np.full((8, 9, 3), 7, dtype=np.uint8)
    pixels[2:4, 2:4] = 0
    image.fromarray(pixels).save(tmp_path / "in.png")
    _, out, _ = run("inspect", tmp_path / "in.png", "--gap-value", 0)
    assert "uint8" in out
    assert "12 of 216 cells" in out


def test_runs_and_regions_against_a_loop():
    flags = np.random.default_rng(2).random((9, 7, 5)) < 0.6
    for axis in range(3):
        lines = np.moveaxis(flags, axis, -1).reshape(-1, flags.shape[axis])
        longest = max(len(run) for line in lines for run in "".join("x" if f else " " for f in line).split(" "))
        assert inspect.longest_run(flags, axis) == longest
    (whole, *_), (apart, _, largest) = (
        inspect.gap_regions(flags, labels) for labels in ([False] * 3, [True, True, False])
    )
    assert whole < apart
    assert largest == inspect.longest_run(flags, 2)
