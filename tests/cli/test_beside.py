"""``fill --mean`` and ``--noise``: arrays beside the values, from the same file or another."""

import json

import numpy as np
import pytest

xr = pytest.importorskip("xarray")
pytest.importorskip("h5netcdf")

CLIMATE = np.abs(np.random.default_rng(0).standard_normal((12, 9))).cumsum(0)
ERROR = np.where(np.random.default_rng(1).random((12, 9)) < 0.5, 0.01, 0.3)


@pytest.fixture
def product(tmp_path, field):
    """A file with a variable, its climatology and its errors."""
    dims = ("y", "x")
    data = {"sst": (dims, field + 2 * CLIMATE), "climate": (dims, CLIMATE), "sst_error": (dims, ERROR)}
    path = tmp_path / "in.nc"
    xr.Dataset(data, {"y": np.arange(12.0), "x": np.arange(9.0)}).to_netcdf(path, engine="h5netcdf")
    return path


def opened(path):
    with xr.open_dataset(path, engine="h5netcdf") as dataset:
        return dataset.load()


def test_other_variables_of_a_file_are_the_background_and_the_errors(product, tmp_path, fill):
    arguments = ("--mean", "climate", "--noise", "sst_error", "--json")
    code, out, err = fill(product, "-o", tmp_path / "out.nc", *arguments)
    assert code == 0, err
    (report,) = json.loads(out)["report"].values()
    notes = " ".join(report["notes"])
    assert "times climate" in notes
    assert "errors of measurements are as given" in notes
    after, before = opened(tmp_path / "out.nc"), opened(product)
    assert after["sst"].notnull().all()
    for name in ("climate", "sst_error"):
        xr.testing.assert_identical(after[name], before[name])


def test_files_are_backgrounds_and_a_number_is_the_error(product, tmp_path, fill):
    np.save(tmp_path / "in.npy", opened(product)["sst"].values)
    np.save(tmp_path / "height.npy", CLIMATE)
    arguments = ("--mean", tmp_path / "height.npy", "--mean", f"{product}:sst_error", "--noise", "0.2", "--json")
    code, out, err = fill(tmp_path / "in.npy", "-o", tmp_path / "out.npy", *arguments)
    assert code == 0, err
    report = json.loads(out)["report"]["values"]
    assert "times height + " in " ".join(report["notes"])
    assert report["noise_std"] >= 0.2
    code, _, err = fill(tmp_path / "in.npy", "-o", tmp_path / "out2.npy", "--noise", tmp_path / "height.npy")
    assert code == 0, err


def test_backgrounds_and_errors_of_several_variables(product, tmp_path, fill, field):
    data = opened(product)
    data["ice"] = data["sst"] + 1
    data.to_netcdf(tmp_path / "two.nc", engine="h5netcdf")
    start = (tmp_path / "two.nc", "-o", tmp_path / "out.nc")
    arguments = ("--mean", "climate", "--noise", "sst=sst_error", "--joint", "--json")
    code, out, err = fill(*start, *arguments)
    assert code == 0, err
    report = json.loads(out)["report"]
    assert sorted(report) == ["ice", "sst"]
    assert "times climate of sst" in " ".join(report["ice"]["notes"])
    code, _, err = fill(*start, "--noise", "sst_error", "--force")
    assert code == 1
    assert "--noise: got one for all of climate, ice, sst, expected VARIABLE=sst_error" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--mean", "clim"), "--mean: got 'clim', expected a file, or an array of"),
        (("--noise", "0.1", "--noise", "sst_error"), "--noise: got 0.1, sst_error for all values, expected one"),
        (("--noise", "-1", "--variable", "sst"), "noise: got -1.0, expected a standard deviation above 0"),
        (("--mean", "climate=sst_error", "--mean", "climate"), "--mean: got the variable 'climate', expected one to"),
    ],
)
def test_mistakes_are_named(product, tmp_path, fill, arguments, message):
    code, _, err = fill(product, "-o", tmp_path / "out.nc", *arguments)
    assert code == 1
    assert message in err
