"""What ``fill`` writes beside the filled values: deviations with CF attributes, flags, a line of history."""

import numpy as np
import pytest
import xarray as xr
from scipy.io import netcdf_file

from gpytorch_gaps.formats import Additions, open_file

LAND = np.zeros((12, 9), dtype=bool)
LAND[8:, 5:] = True


def dataset(field):
    seen = np.where(LAND, np.nan, field)
    about = {"standard_name": "sea_surface_temperature", "units": "degC", "long_name": "SST"}
    data = xr.Dataset(
        {
            "sst": (("time", "x"), seen, about),
            "quality": (("time", "x"), np.where(LAND, 3, 0).astype("int8"), {"flag_values": np.int8([0, 3])}),
            "depth": ("x", np.arange(9.0)),
            "crs": ((), np.int32(1), {"grid_mapping_name": "latitude_longitude"}),
        },
        {"time": np.arange(12) * np.timedelta64(1, "D") + np.datetime64("2024-01-01", "ns"), "x": np.arange(9.0)},
        {"title": "a sea", "history": "2023-01-01: made"},
    )
    data.sst.attrs["ancillary_variables"] = "quality"
    data.sst.encoding = {"dtype": "int16", "scale_factor": 0.001, "_FillValue": -1, "grid_mapping": "crs"}
    data.encoding["unlimited_dims"] = ["time"]
    return data


def save(data, path, kind):
    if kind.startswith("netCDF 3"):
        data.to_netcdf(path, engine="scipy", format="NETCDF3_64BIT" if kind == "netCDF 3" else "NETCDF3_CLASSIC")
    elif kind == "netCDF 4":
        data.to_netcdf(path, engine="h5netcdf")
    else:
        pytest.importorskip("zarr")
        data.to_zarr(path, zarr_format=int(kind[5]), consolidated="consolidated" in kind)


def opened(path, **options):
    how = {"mask_and_scale": False, "decode_times": False} | options
    if path.suffix == ".zarr":
        return xr.open_zarr(path, **how).load()
    with xr.open_dataset(path, **how) as data:
        return data.load()


KINDS = [
    "netCDF 3",
    "netCDF 3, classic",
    "netCDF 4",
    "zarr 2",
    "zarr 3",
    "zarr 2, consolidated",
    "zarr 3, consolidated",
]


@pytest.mark.parametrize("kind", KINDS)
def test_flags_deviations_and_history_are_added_and_all_else_stays(kind, field, tmp_path, fill):
    suffix = ".nc" if kind.startswith("netCDF") else ".zarr"
    source, target = tmp_path / f"in{suffix}", tmp_path / f"out{suffix}"
    save(dataset(field), source, kind)
    mask = tmp_path / "sea.npy"
    np.save(mask, ~LAND)
    # scipy writes the scalar `crs` over two values of `sst` in netCDF 3 files with records: they are to be believed
    what = ("--mask", mask, "--variable", "sst", "--max-gap", "time=3", "--robust", "no")
    code, out, err = fill(source, "-o", target, "--std", target, "--flags", *what)
    assert (code, err) == (0, "")
    assert f"{target} (standard deviations)" in out
    before, after = opened(source), opened(target)
    assert set(after.variables) == {*before.variables, "sst_std", "sst_filled_flag"}
    for name in before.variables:
        if name != "sst":
            assert after[name].variable.identical(before[name].variable)
            assert after[name].encoding.get("compressors") == before[name].encoding.get("compressors")
    gaps = np.isnan(field) | LAND
    np.testing.assert_array_equal(after.sst.values[~gaps], before.sst.values[~gaps])
    assert after.sst.attrs == before.sst.attrs | {"ancillary_variables": "quality sst_std sst_filled_flag"}
    assert after.attrs["title"] == "a sea"
    old, new = after.attrs["history"].splitlines()
    assert old == "2023-01-01: made"
    assert "gpytorch-gaps" in new
    assert "filled sst (9 gaps)" in new

    flag = after.sst_filled_flag
    assert flag.dtype == np.int8
    assert flag.attrs["flag_meanings"] == "observed filled not_filled"
    assert list(np.ravel(flag.attrs["flag_values"])) == [0, 1, 2]
    assert flag.attrs["standard_name"] == "sea_surface_temperature status_flag"
    np.testing.assert_array_equal(flag, np.where(LAND, 2, np.where(gaps, 1, 0)))
    std = after.sst_std
    assert std.attrs["standard_name"] == "sea_surface_temperature standard_error"
    assert (std.attrs["units"], std.attrs["grid_mapping"]) == ("degC", "crs")
    np.testing.assert_array_equal(std.values > 0, gaps & ~LAND)
    np.testing.assert_array_equal(np.isnan(std), LAND)


def test_a_file_of_deviations_has_the_filled_variables_only(field, tmp_path, fill):
    data = dataset(field).assign(other=(("time", "x"), np.nan_to_num(field) + 1))
    save(data, tmp_path / "in.nc", "netCDF 4")
    code, _, _ = fill(tmp_path / "in.nc", "-o", tmp_path / "out.nc", "--std", tmp_path / "std.nc")
    with xr.open_dataset(tmp_path / "std.nc", engine="h5netcdf", decode_coords="all") as std:
        assert code == 0
        assert list(std.data_vars) == ["sst"]
        assert {"crs", "time", "x"} <= set(std.coords)
        assert std.sst.attrs["standard_name"] == "sea_surface_temperature standard_error"
        assert std.sst.attrs["units"] == "degC"
        assert std.sst.encoding["zlib"]
        assert std.sst.dtype.kind == "f"
        assert "filled sst" in std.attrs["history"]


def test_files_without_labels_become_files_with_flags(field, tmp_path, fill):
    np.save(tmp_path / "in.npy", field)
    code, _, err = fill(tmp_path / "in.npy", "-o", tmp_path / "out.nc", "--std", tmp_path / "out.nc", "--flags")
    assert (code, err) == (0, "")
    with xr.open_dataset(tmp_path / "out.nc", engine="h5netcdf") as after:
        np.testing.assert_array_equal(after.values_filled_flag, np.isnan(field))
        np.testing.assert_array_equal(after.values_std > 0, np.isnan(field))


def test_smoothed_files_have_flags_too(field, tmp_path, fill):
    save(dataset(field), tmp_path / "in.nc", "netCDF 4")
    code, _, err = fill(tmp_path / "in.nc", "-o", tmp_path / "out.nc", "--variable", "sst", "--flags", "--smooth")
    assert (code, err) == (0, "")
    with xr.open_dataset(tmp_path / "out.nc", engine="h5netcdf") as after:
        np.testing.assert_array_equal(after.sst_filled_flag, np.isnan(field) | LAND)


def test_what_a_format_cannot_hold_is_refused_before_any_work(field, tmp_path, fill):
    np.save(tmp_path / "in.npy", field)
    for arguments, message in (
        (("in.npy", "-o", tmp_path / "out.npy", "--flags"), "a .npy file cannot hold flags"),
        (("in.npy", "-o", tmp_path / "out.npy", "--std", tmp_path / "out.npy"), "cannot hold flags or standard dev"),
    ):
        code, _, err = fill(tmp_path / arguments[0], *arguments[1:])
        assert code == 1
        assert message in err
    save(dataset(field), tmp_path / "in.nc", "netCDF 4")
    assert fill(tmp_path / "in.nc", "-o", tmp_path / "a.nc", "--variable", "sst", "--flags")[0] == 0
    code, _, err = fill(tmp_path / "a.nc", "-o", tmp_path / "b.nc", "--variable", "sst", "--flags")
    assert code == 1
    assert "has a variable 'sst_filled_flag' already" in err


def test_one_observation_has_no_deviations(tmp_path, fill):
    np.save(tmp_path / "in.npy", np.array([np.nan, 3.0, np.nan]))
    assert fill(tmp_path / "in.npy", "-o", tmp_path / "out.npy", "--std", tmp_path / "std.npy")[0] == 0
    np.testing.assert_array_equal(np.load(tmp_path / "std.npy"), [np.nan, 0.0, np.nan])


@pytest.mark.parametrize("version", ["NETCDF3_CLASSIC", "NETCDF3_64BIT"])
@pytest.mark.parametrize("several", [False, True])
def test_records_of_netcdf_3_are_copied_with_and_without_padding(version, several, field, tmp_path):
    rows = np.where(np.isnan(field), -1, 100 * np.nan_to_num(field)).astype("int16")[:, :5]  # ten bytes a record
    data = xr.Dataset({"a": (("time", "x"), rows, {"_FillValue": np.int16(-1)}), "fixed": ("x", np.arange(5.0))})
    data = data.assign(text=("time", np.array(list("abcdefghijkl"), "S1"))) if several else data
    source, target = tmp_path / "in.nc", tmp_path / "out.nc"
    data.to_netcdf(source, engine="scipy", format=version, unlimited_dims=["time"])
    with open_file(source, "a") as given:
        filled = given.data.fillna(4.0).load()
        given.write(filled, target, additions=Additions("a line", True, filled * 0.1))
    with netcdf_file(source, "r", mmap=False) as before, netcdf_file(target, "r", mmap=False) as after:
        assert list(after.variables) == [*before.variables, "a_std", "a_filled_flag"]
        assert after.version_byte == before.version_byte
        for name in before.variables:
            if name != "a":
                assert after.variables[name].data.tobytes() == before.variables[name].data.tobytes()
        np.testing.assert_array_equal(after.variables["a"].data, np.where(rows == -1, 4, rows))
        np.testing.assert_array_equal(after.variables["a_filled_flag"].data, rows == -1)
        np.testing.assert_array_equal(after.variables["a_std"].data, 0.1 * filled)
        assert after.variables["a"]._FillValue == -1
        assert after.variables["a"].ancillary_variables == b"a_std a_filled_flag"
        assert after.history == b"a line"
