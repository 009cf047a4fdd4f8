"""What the axes of files are taken for."""

import json

import numpy as np
import pandas as pd
import pytest

xr = pytest.importorskip("xarray")
pytest.importorskip("h5netcdf")

UTM = 'PROJCS["WGS 84 / UTM zone 30N", GEOGCS["WGS 84"]]'
PLATE = 'GEOGCS["WGS 84"]'


def axes_of(run, path, *arguments):
    code, out, err = run("inspect", path, "--json", *arguments)
    assert (code, err) == (0, "")
    (found,) = json.loads(out)["variables"].values()
    return found["axes"]


@pytest.mark.parametrize(
    ("units", "calendar", "year"),
    [
        ("months since 1960-01-01", "standard", 365.2425),  # which xarray does not decode
        ("months since 1960-01-01", "360_day", 360.0),
        ("days since 1960-01-01", "360_day", 360.0),
        ("days since 1960-01-01", "noleap", 365.0),
        ("hours since 1960-01-01", "all_leap", 366.0),
        ("seconds since 1960-01-01", "julian", 365.25),
    ],
)
def test_the_year_is_that_of_the_calendar(run, tmp_path, units, calendar, year):
    months = np.arange(96)
    in_units = {"months": 1.0, "days": year / 12, "hours": 2 * year, "seconds": 7200 * year}[units.split()[0]]
    if calendar in ("julian", "all_leap", "noleap"):
        in_units = round(in_units)
    time = ("time", months * in_units, {"units": units, "calendar": calendar})
    values = 10 * np.sin(2 * np.pi * months / 12)
    values[30:34] = np.nan
    xr.Dataset({"t": ("time", values)}, {"time": time}).to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    (axis,) = axes_of(run, tmp_path / "a.nc")
    assert (axis["kind"], axis["unit"], axis["cycles"]) == ("time", "days", [year])


@pytest.mark.parametrize(("wkt", "kinds"), [(UTM, ["number", "number"]), (PLATE, ["latitude", "longitude"])])
def test_a_grid_mapping_tells_degrees_from_metres(run, tmp_path, wkt, kinds):
    field = xr.Dataset({"ndvi": (("y", "x"), np.eye(3), {"grid_mapping": "crs"})}, {"y": [3.0, 2, 1], "x": [1.0, 2, 3]})
    field.assign(crs=((), 0, {"crs_wkt": wkt})).to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    assert [axis["kind"] for axis in axes_of(run, tmp_path / "a.nc", "--variable", "ndvi")] == kinds


def test_stations_of_a_file_lie_in_space(run, tmp_path):
    dims, days = ("time", "station"), pd.date_range("2020-01-01", periods=4)
    places = {"lat": ("station", [50.0, 51, 52]), "lon": ("station", [8.0, 9, 7]), "station": [10382, 10384, 10400]}
    field = xr.Dataset({"t": (dims, np.eye(4, 3))}, {"time": days, **places})
    field.to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    assert [axis["kind"] for axis in axes_of(run, tmp_path / "a.nc")] == ["time", "group"]
    field.drop_vars("lat").to_netcdf(tmp_path / "b.nc", engine="h5netcdf")
    assert [axis["kind"] for axis in axes_of(run, tmp_path / "b.nc", "--variable", "t")] == ["time", "label"]


def test_an_archive_has_dates_and_names(run, tmp_path):
    days = np.arange("2020-01-01", "2020-01-06", dtype="datetime64[D]")
    np.savez(tmp_path / "a.npz", values=np.eye(5, 3), date=days, station=np.array(["a", "b", "c"]))
    date, station = axes_of(run, tmp_path / "a.npz")
    assert (date["name"], date["kind"], date["extent"]) == ("date", "time", 4.0)
    assert (station["name"], station["kind"]) == ("station", "label")
