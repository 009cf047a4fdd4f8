"""``fill --mask``, ``--max-gap`` and ``--untrusted``: what is filled, and what is believed, in every format."""

import json

import numpy as np
import pandas as pd
import pytest
import xarray as xr

from gpytorch_gaps.__main__ import main

LAND = np.zeros((12, 9), dtype=bool)
LAND[8:, 5:] = True


@pytest.fixture
def seen(field):
    field[LAND] = np.nan
    return field


@pytest.fixture
def quality(seen):
    flags = np.zeros(seen.shape, dtype="int8")
    flags[0, 4:7] = 5
    return flags


@pytest.fixture
def cube(tmp_path, seen, quality):
    path = tmp_path / "in.nc"
    data = {
        "sst": (("time", "x"), seen),
        "sea": (("time", "x"), (~LAND).astype("float32")),
        "qc": (("time", "x"), quality),
    }
    xr.Dataset(data, {"time": np.arange(12.0), "x": np.arange(9.0)}).to_netcdf(path, engine="h5netcdf")
    return path


def test_a_variable_is_the_mask(cube, seen, tmp_path, fill):
    code, out, err = fill(cube, "-o", tmp_path / "out.nc", "--mask", "sea", "--std", tmp_path / "std.nc")
    assert (code, err) == (0, "")
    assert f"{LAND.sum()} left" in out
    filled, std = xr.open_dataset(tmp_path / "out.nc"), xr.open_dataset(tmp_path / "std.nc")
    np.testing.assert_array_equal(np.isnan(filled.sst), LAND)
    np.testing.assert_array_equal(np.isnan(std.sst), LAND)
    before = xr.open_dataset(cube)
    assert "filled sst" in filled.attrs.pop("history")
    assert filled.drop_vars("sst").identical(before.drop_vars("sst"))


@pytest.mark.parametrize("condition", ["sea == 1", "sea>0", "{}:land == 0"])
def test_a_mask_may_be_a_condition(condition, cube, tmp_path, fill):
    xr.Dataset({"land": (("time", "x"), LAND * 1), "depth": ("x", np.arange(9.0))}).to_netcdf(tmp_path / "m.nc")
    condition = condition.format(tmp_path / "m.nc")
    code, _, err = fill(cube, "-o", tmp_path / "out.nc", "--mask", condition, "--variable", "sst")
    assert (code, err) == (0, "")
    np.testing.assert_array_equal(np.isnan(xr.open_dataset(tmp_path / "out.nc").sst), LAND)


def test_untrusted_observations_are_overwritten_and_flags_are_not(cube, seen, quality, tmp_path, fill):
    code, out, err = fill(
        cube, "-o", tmp_path / "out.nc", "--mask", "sea", "--untrusted", "qc >= 3", "--untrusted", "qc & 8"
    )
    assert (code, err) == (0, "")
    filled = xr.open_dataset(tmp_path / "out.nc")
    assert (filled.sst.values[quality > 0] != seen[quality > 0]).all()
    kept = ~np.isnan(seen) & (quality == 0)
    np.testing.assert_array_equal(filled.sst.values[kept], seen[kept])
    np.testing.assert_array_equal(filled.qc, quality)
    assert f"12 gaps ({1200 / seen.size:.3g} %) filled, {LAND.sum()} left" in out


def test_several_variables_share_a_mask(seen, tmp_path, fill):
    path = tmp_path / "in.nc"
    both = {name: (("y", "x"), seen * scale) for name, scale in (("a", 1), ("b", 2))}
    line = {"line": ("y", np.where(np.arange(12) == 4, np.nan, np.arange(12) ** 0.5))}
    xr.Dataset({**both, **line, "sea": (("y", "x"), (~LAND).astype("int8"))}).to_netcdf(path, engine="h5netcdf")
    code, _, err = fill(path, "-o", tmp_path / "out.nc", "--mask", "sea")
    filled = xr.open_dataset(tmp_path / "out.nc")
    assert (code, err) == (0, "")
    for name in "ab":
        np.testing.assert_array_equal(np.isnan(filled[name]), LAND)
    assert filled.line.notnull().all()


@pytest.mark.parametrize("kind", ["npy", "npz", "png", "nc", "nc:sea"])
def test_a_file_is_the_mask(kind, seen, tmp_path, fill):
    suffix, _, name = kind.partition(":")
    path = tmp_path / f"mask.{suffix}"
    if suffix == "npy":
        np.save(path, ~LAND)
    elif suffix == "npz":
        np.savez(path, sea=~LAND)
    elif suffix == "png":
        image = pytest.importorskip("PIL.Image")
        image.fromarray(np.where(LAND, 0, 255).astype(np.uint8)).save(path)
    else:
        mask = xr.Dataset({"sea": (("y", "x"), ~LAND)})
        (mask.assign(depth=mask.sea * 10) if name else mask).to_netcdf(path, engine="h5netcdf")
    np.save(tmp_path / "in.npy", seen)
    code, _, err = fill(tmp_path / "in.npy", "-o", tmp_path / "out.npy", "--mask", f"{path}:{name}" if name else path)
    assert (code, err) == (0, "")
    np.testing.assert_array_equal(np.isnan(np.load(tmp_path / "out.npy")), LAND)


def test_arrays_of_an_archive_and_columns_of_a_table_serve_too(seen, quality, tmp_path, fill):
    np.savez(tmp_path / "in.npz", values=seen, sea=~LAND, qc=quality)
    code, _, err = fill(
        tmp_path / "in.npz", "-o", tmp_path / "out.npz", "--mask", "sea", "--untrusted", "qc!=0", "--variable", "values"
    )
    assert (code, err) == (0, "")
    with np.load(tmp_path / "out.npz") as out:
        np.testing.assert_array_equal(np.isnan(out["values"]), LAND)
        assert (out["values"][quality > 0] != seen[quality > 0]).all()
    table = pd.DataFrame(seen[:, :2], columns=["a", "b"]).assign(qc=(np.arange(12) == 7) * 1)
    table.to_csv(tmp_path / "in.csv", index_label="time")
    code, _, err = fill(tmp_path / "in.csv", "-o", tmp_path / "out.csv", "--untrusted", "qc == 1")
    assert (code, err) == (0, "")
    after = pd.read_csv(tmp_path / "out.csv", index_col="time")
    assert (after.loc[7, ["a", "b"]] != table.loc[7, ["a", "b"]]).all()
    pd.testing.assert_series_equal(after.qc, table.qc, check_names=False, check_index=False)
    assert after.drop(7)["a"].equals(table.drop(7)["a"])


def test_long_runs_are_left(cube, seen, tmp_path, fill):
    code, out, _ = fill(cube, "-o", tmp_path / "out.nc", "--variable", "sst", "--max-gap", "time=3", "--json")
    assert code == 0
    report = json.loads(out)["report"]["sst"]
    assert (report["gaps"], report["left"]) == (9, LAND.sum())
    code, out, _ = fill(cube, "-o", tmp_path / "o2.nc", "--variable", "sst", "--max-gap", "time=3 units", "--json")
    assert json.loads(out)["report"]["sst"]["gaps"] == 0  # they are four units long, from observation to observation


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--mask", "land"), "--mask: got 'land', expected a file, or an array of"),
        (("--untrusted", "flag != 0"), "got the variable 'flag', expected one of"),
        (("--variable", "sst", "--untrusted", "sst > 9"), "is the array to fill"),
        (("--max-gap", "depth=3"), "max_gap: got the axis 'depth'"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, message, cube, tmp_path, fill):
    code, _, err = fill(cube, "-o", tmp_path / "out.nc", *arguments)
    assert code == 1
    assert message in err
    assert not (tmp_path / "out.nc").exists()


@pytest.mark.parametrize("arguments", [("--max-gap", "time"), ("--untrusted", "qc"), ("--untrusted", "qc != bad")])
def test_wrong_usage_is_refused(arguments, cube, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["fill", str(cube), "-o", str(tmp_path / "out.nc"), *arguments])
    assert stopped.value.code == 2
    assert "expected" in capsys.readouterr().err


def test_flags_of_cf_are_carried_along(tmp_path, seen, fill):
    path = tmp_path / "in.nc"
    flags = (("y", "x"), np.where(LAND, np.nan, 1.0), {"flag_values": [0, 1], "flag_meanings": "bad good"})
    xr.Dataset({"sst": (("y", "x"), seen), "scl": flags}).to_netcdf(path, engine="h5netcdf")
    code, out, _ = fill(path, "-o", tmp_path / "out.nc", "--json")
    assert code == 0
    assert list(json.loads(out)["report"]) == ["sst"]
    assert xr.open_dataset(tmp_path / "out.nc").scl.identical(xr.open_dataset(path).scl)


def test_invalid_numbers_of_a_packed_file_are_overwritten(tmp_path, seen, fill):
    path = tmp_path / "in.nc"
    spoilt = np.where(np.isnan(seen), seen, np.where(np.arange(9) == 8, 300.0, seen))
    data = xr.Dataset({"sst": (("y", "x"), spoilt, {"valid_range": np.array([385, 475], dtype="int16")})})
    packing = {"dtype": "int16", "scale_factor": 0.01, "add_offset": 1.0, "_FillValue": -1}
    data.to_netcdf(path, engine="h5netcdf", encoding={"sst": packing})
    code, out, _ = fill(path, "-o", tmp_path / "out.nc")
    after = xr.open_dataset(tmp_path / "out.nc")
    assert code == 0
    assert "values outside of valid_range are gaps" in out
    packed = xr.open_dataset(path.with_name("out.nc"), mask_and_scale=False).sst.values
    assert 385 <= packed.min() <= packed.max() <= 475  # filled values are valid as they are stored
    assert 385 in packed
    assert after.sst.notnull().all()
