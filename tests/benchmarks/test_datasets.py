"""Data sets by name and from files, what is said of those that are not there, and a made-up climate."""

import hashlib
import os
import re
import warnings
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest

import gpytorch_gaps as gaps
from benchmarks.datasets import StationClimate, load_climate, load_dataset, load_field, sources, synthetic_climate

CLIMATES, FIELDS = ["trentino_daily", "colorado_monthly"], ["modis_lst", "sst_pacific"]
TABLES = ["german_pm10", "irish_wind", "lcbench_adult", "lcbench_higgs"]
DATASETS = ["alboran_sst", "sentinel2_ndvi_field"]
FOLDER = os.environ.get("GPYTORCH_GAPS_DATA")
needs_data = pytest.mark.skipif(FOLDER is None, reason="GPYTORCH_GAPS_DATA names no folder of data")


@pytest.fixture
def no_folder(monkeypatch):
    monkeypatch.delenv("GPYTORCH_GAPS_DATA", raising=False)


def climate_arrays(name="trentino_daily", seed=0):
    """A small one, as the file of that name has it."""
    rng = np.random.default_rng(seed)
    unit, count = ("doy", 5) if name == "trentino_daily" else ("month", 4)
    values = rng.normal(size=(3, count, 2, 2)).astype(np.float32)
    values[rng.random(values.shape) < 0.3] = np.nan
    arrays = {
        "values": values,
        "year": np.arange(1990, 1993),
        unit: 1 + np.arange(count),
        "lon": np.array([11.0, 11.5], dtype=np.float32),
        "lat": np.array([46.0, 46.5], dtype=np.float32),
        "elev": np.array([200.0, 1500.0], dtype=np.float32),
        "output": np.array(["tmin", "tmax"]),
    }
    if name == "trentino_daily":
        arrays["station_name"] = np.array(["MALE ", "CLES"])
    else:
        arrays["test_cells"] = ~np.isnan(values) & (rng.random(values.shape) < 0.3)
    return arrays


def field_arrays(name):
    first, second, *_ = sources()[name].arrays
    arrays = {"lat": np.arange(2.0), "lon": np.arange(3.0)}
    if name == "modis_lst":
        return {first: np.ones((2, 3), np.float32), second: np.zeros((2, 3), np.float32), **arrays}
    return {first: np.ones((4, 2, 3), np.float32), second: np.arange(4), **arrays}


def save(path, arrays):
    np.savez(path, **arrays)
    return path


def save_known(folder, name):
    arrays = climate_arrays(name) if name in CLIMATES else field_arrays(name)
    return save(folder / sources()[name].file, arrays), arrays


def climate(**changes):
    return replace(synthetic_climate(years=2, times=6, stations=3), **changes)


# -- the table ---------------------------------------------------------------------------------------------------------


def test_every_source_is_told_in_full():
    assert list(sources()) == CLIMATES + FIELDS + TABLES + DATASETS
    for name, source in sources().items():
        assert source.file.endswith(".nc" if name in DATASETS else ".npz")
        assert re.fullmatch("[0-9a-f]{64}", source.sha256)
        assert source.url.startswith("https://")
        assert all((source.public, source.licence, source.made, source.arrays))
    with pytest.raises(FrozenInstanceError):
        source.licence = "none"


def test_the_table_is_the_callers_own():
    sources().clear()
    assert len(sources()) == 10


# -- climates ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["name", "name in the environment", "path", "path in a folder"])
@pytest.mark.parametrize("name", CLIMATES)
def test_a_climate_round_trips(tmp_path, monkeypatch, no_folder, name, by):
    path, arrays = save_known(tmp_path, name)
    if by == "name in the environment":
        monkeypatch.setenv("GPYTORCH_GAPS_DATA", str(tmp_path))
    given = {"path": path, "path in a folder": path.name}.get(by, name)
    loaded = load_climate(given, None if by in ("path", "name in the environment") else tmp_path, verify=False)
    daily = name == "trentino_daily"
    assert loaded.name == (name if by.startswith("name") else path.stem)
    assert loaded.values.dtype == np.float32
    for attribute, key in {"time": "doy" if daily else "month", "elevation": "elev"}.items():
        np.testing.assert_array_equal(getattr(loaded, attribute), arrays[key])
    for key in ("values", "year", "lon", "lat"):
        np.testing.assert_array_equal(getattr(loaded, key), arrays[key])
    assert loaded.period == (365.25 if daily else 12.0)
    assert loaded.station == (("MALE", "CLES") if daily else ("station 0", "station 1"))
    assert loaded.output == ("tmin", "tmax")
    if daily:
        assert loaded.test_cells is None
    else:
        np.testing.assert_array_equal(loaded.test_cells, arrays["test_cells"])
    assert f"{loaded.name}: 3 x {5 if daily else 4} x 2 x 2" in repr(loaded)


def test_a_file_may_lack_names_and_hold_other_numbers(tmp_path):
    arrays = climate_arrays()
    del arrays["output"]
    arrays["values"] = np.arange(60).reshape(3, 5, 2, 2)
    loaded = load_climate(save(tmp_path / "mine.npz", arrays))
    assert loaded.output == ("output 0", "output 1")
    np.testing.assert_array_equal(loaded.values, arrays["values"].astype(np.float32))


@pytest.mark.parametrize("name", CLIMATES + FIELDS)
def test_another_content_than_known_is_warned_of(tmp_path, name):
    path, _ = save_known(tmp_path, name)
    load = load_climate if name in CLIMATES else load_field
    with pytest.warns(UserWarning, match=re.escape(str(path))) as caught:
        load(name, tmp_path)
    assert len(caught) == 1
    assert sources()[name].sha256 in str(caught[0].message)
    assert hashlib.sha256(path.read_bytes()).hexdigest() in str(caught[0].message)
    assert caught[0].filename == __file__, "it points at the caller"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(name, tmp_path, verify=False)
        if name in CLIMATES:
            load(path)  # no content is expected of a file that comes by its path


@pytest.mark.parametrize("given", ["folder", "environment", "neither"])
@pytest.mark.parametrize("name", CLIMATES + FIELDS)
def test_a_missing_file_is_told_with_its_source(tmp_path, monkeypatch, no_folder, name, given):
    if given == "environment":
        monkeypatch.setenv("GPYTORCH_GAPS_DATA", str(tmp_path))
    load = load_climate if name in CLIMATES else load_field
    with pytest.raises(FileNotFoundError) as caught:
        load(name, tmp_path if given == "folder" else None)
    source, message = sources()[name], str(caught.value)
    for part in (name, source.file, "GPYTORCH_GAPS_DATA", source.public, source.url, source.licence, source.made):
        assert part in message
    assert (f"no file {source.file} in {tmp_path};" in message) == (given != "neither")


def without(*names):
    return lambda arrays: {key: array for key, array in arrays.items() if key not in names}


def having(**changes):
    return lambda arrays: {**arrays, **changes}


def infinite(arrays):
    arrays["values"][1, 2, 0, 1] = -np.inf
    return arrays


BAD_CLIMATES = {
    "no values": (without("values"), "no array values; expected values, year, lon, lat, elev, got"),
    "several missing": (without("lat", "elev"), "no array lat, elev; expected"),
    "no time": (without("doy"), "expected one of doy and month"),
    "two times": (having(month=np.arange(1, 6)), "expected one of doy and month"),
    "infinite": (infinite, "values: entry (1, 2, 0, 1) is -inf; expected finite values, or NaN for gaps"),
    "beyond float32": (having(values=np.full((3, 5, 2, 2), 1e300)), "values: entry (0, 0, 0, 0) is inf"),
    "three axes": (having(values=np.ones((3, 5, 2))), "values are float64 of shape (3, 5, 2); expected numbers (year,"),
    "text": (having(values=np.full((3, 5, 2, 2), "a")), "values are <U1 of shape (3, 5, 2, 2)"),
    "short axis": (having(lon=np.ones(1)), "lon: got shape (1,); expected (2,), as values has along dimension 2"),
    "names": (having(station_name=np.array("A")), "station: got 1 names; expected 2"),
    "pickles": (having(year=np.array([1990, None, 1992])), "expected an .npz of plain arrays, but"),
    "days from 0": (having(doy=np.arange(5)), "time: got 0 to 4; expected times from 1 to 366"),
}


@pytest.mark.parametrize("case", BAD_CLIMATES)
def test_a_file_that_is_no_climate_is_refused(tmp_path, case):
    change, message = BAD_CLIMATES[case]
    path = save(tmp_path / "mine.npz", change(climate_arrays()))
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        load_climate(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", ["empty", "text", "cut off", "npy"])
def test_a_file_that_is_no_npz_is_refused(tmp_path, content):
    path = save(tmp_path / "mine.npz", climate_arrays())
    if content == "npy":
        with path.open("wb") as stream:
            np.save(stream, np.ones(3))
    else:
        path.write_bytes({"empty": b"", "text": b"year,day\n", "cut off": path.read_bytes()[:700]}[content])
    with pytest.raises(ValueError, match=re.escape(f"{path}: expected an .npz of plain arrays, but")):
        load_climate(path)


def test_a_name_that_is_not_known(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"name_or_path: no file .*trentino; expected an .npz, or one of"):
        load_climate("trentino", tmp_path)
    with pytest.raises(FileNotFoundError, match="name_or_path: no file"):
        load_climate(tmp_path)
    with pytest.raises(ValueError, match=r"name_or_path: got 'modis_lst'; expected one of .*read by load_field"):
        load_climate("modis_lst", tmp_path)
    with pytest.raises(ValueError, match=r"name: got 'trentino_daily'; expected one of .*read by load_climate"):
        load_field("trentino_daily", tmp_path)
    with pytest.raises(ValueError, match=r"name: got 'alboran_sst'; expected one of .*read by load_dataset"):
        load_field("alboran_sst", tmp_path)
    with pytest.raises(ValueError, match=r"name: got 'mars'; expected one of \['modis_lst', .*\]$"):
        load_field("mars", tmp_path)


# -- fields ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_round_trips_and_is_not_written_to(tmp_path, name):
    _, arrays = save_known(tmp_path, name)
    loaded = load_field(name, tmp_path, verify=False)
    assert loaded.keys() == arrays.keys()
    for key, array in arrays.items():
        np.testing.assert_array_equal(loaded[key], array)
        with pytest.raises(ValueError, match="read-only"):
            loaded[key][...] = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gaps.from_array(loaded[sources()[name].arrays[0]])


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_that_lacks_arrays_or_is_infinite_is_refused(tmp_path, name):
    path, arrays = save_known(tmp_path, name)
    first = sources()[name].arrays[0]
    arrays[first].flat[1] = np.inf
    save(path, arrays)
    with pytest.raises(ValueError, match=f"{first} has infinite entries; expected finite values, or NaN"):
        load_field(name, tmp_path, verify=False)
    save(path, without(first, "lat")(arrays))
    with pytest.raises(ValueError, match=f"no array {first}, lat; expected"):
        load_field(name, tmp_path, verify=False)


@pytest.mark.parametrize("name", TABLES)
def test_a_table_round_trips(tmp_path, name):
    given = {key: np.arange(6.0).reshape(3, 2) for key in sources()[name].arrays}
    save(tmp_path / sources()[name].file, given)
    loaded = load_field(name, tmp_path, verify=False)
    assert loaded.keys() == given.keys()
    for key, array in given.items():
        np.testing.assert_array_equal(loaded[key], array)


def test_a_netcdf_file_is_read_as_xarray_reads_it(tmp_path):
    xr = pytest.importorskip("xarray")
    given = xr.Dataset(
        {
            "SST": (("time", "lat"), np.array([[1.0, np.nan], [2.0, 3.0]])),
            "mask": (("lat",), np.array([1.0, 0.0])),
        },
        {"time": np.array(["2017-05-14", "2017-05-15"], "datetime64[ns]"), "lat": [34.0, 35.0]},
    )
    given.to_netcdf(tmp_path / "alboran_sst.nc")
    xr.testing.assert_equal(load_dataset("alboran_sst", tmp_path, verify=False), given)
    with pytest.warns(UserWarning, match="its SHA-256 is"):
        load_dataset("alboran_sst", tmp_path)
    given[["SST"]].to_netcdf(tmp_path / "alboran_sst.nc")
    with pytest.raises(ValueError, match="no variable mask; got"):
        load_dataset("alboran_sst", tmp_path, verify=False)
    with pytest.raises(FileNotFoundError, match="no file sentinel2_ndvi_field"):
        load_dataset("sentinel2_ndvi_field", tmp_path)


# -- what a climate must be --------------------------------------------------------------------------------------------

VALUES = np.ones((2, 6, 3, 2), np.float32)
BAD_PARTS = {
    "three axes": ({"values": VALUES[0]}, "values: got shape (6, 3, 2); expected (year, time, station, output)"),
    "nothing": ({"values": VALUES[:0]}, "values: got shape (0, 6, 3, 2)"),
    "float64": ({"values": VALUES.astype(float)}, "values: got float64; expected float32"),
    "infinite": ({"values": VALUES * np.inf}, "values: entry (0, 0, 0, 0) is inf; expected finite values"),
    "years": ({"year": np.arange(3)}, "year: got shape (3,); expected (2,), as values has along dimension 0"),
    "times": ({"time": np.ones((6, 1))}, "time: got shape (6, 1); expected (6,), as values has along dimension 1"),
    "lon": ({"lon": np.ones(2)}, "lon: got shape (2,); expected (3,)"),
    "lat": ({"lat": np.array([46.0, np.nan, 46.0])}, "lat: entry 1 is nan; expected finite numbers"),
    "elevation": ({"elevation": np.array(["a", "b", "c"])}, "elevation: entry 0 is a; expected finite numbers"),
    "stations": ({"station": ("a", "b")}, "station: got 2 names; expected 3"),
    "outputs": ({"output": ("a",)}, "output: got 1 names; expected 2"),
    "period": ({"period": 0.0}, "period: got 0.0; expected a positive number"),
    "beyond the period": ({"period": 4.5}, "time: got 1 to 6; expected times from 1 to 5"),
    "test cells": ({"test_cells": np.ones(3, bool)}, "test_cells: got bool of shape (3,); expected bool of shape (2,"),
    "counts of cells": ({"test_cells": np.ones(VALUES.shape)}, "test_cells: got float64 of shape (2, 6, 3, 2)"),
}


@pytest.mark.parametrize("case", BAD_PARTS)
def test_parts_that_do_not_fit_are_refused(case):
    changes, message = BAD_PARTS[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        climate(**changes)


def test_a_climate_is_what_it_was_made_as():
    made = climate(test_cells=np.zeros((2, 6, 3, 2), bool))
    with pytest.raises(FrozenInstanceError):
        made.name = "another"
    assert isinstance(made, StationClimate)


# -- a made-up one -----------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_climate():
    first, again, other = (synthetic_climate(seed, years=3, times=20, stations=4) for seed in (5, 5, 6))
    for name in ("values", "year", "time", "lon", "lat", "elevation"):
        np.testing.assert_array_equal(getattr(first, name), getattr(again, name))
    assert not np.array_equal(first.values, other.values, equal_nan=True)


@pytest.mark.parametrize("gappiness", [0.05, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("stations", [3, 40])
def test_the_share_of_gaps_is_the_one_asked_for(stations, gappiness):
    made = synthetic_climate(2, years=20, times=50, stations=stations, gappiness=gappiness)
    assert made.values.shape == (20, 50, stations, 2)
    gap = np.isnan(made.values)
    assert gap.mean() == pytest.approx(gappiness, abs=0.02)
    assert not gap.all(axis=(0, 1, 3)).any(), "every station has measured something"
    if stations == 40 and gappiness > 0.2:
        silent = gap.all(axis=(1, 3))  # shape: (year, station)
        assert 0.5 * gappiness < silent.mean() < gappiness
        assert silent[0].any(), "some begin late"
        assert silent[-1].any(), "some end early"
        assert (np.abs(np.diff(silent.astype(int), axis=0)).sum(0) <= 2).all(), "in between they run"


def test_day_366_is_in_leap_years_only():
    made = synthetic_climate(years=8, stations=3, gappiness=0.0)
    leap = [year % 4 == 0 for year in made.year]
    assert np.isnan(made.values[:, 365]).all(axis=(1, 2)).tolist() == [not is_leap for is_leap in leap]
    assert not np.isnan(made.values[:, :365]).any()


def test_the_values_are_those_of_a_climate():
    made = synthetic_climate(1, years=12, stations=30, gappiness=0.0)
    values, height = made.values[:, :365].astype(float), made.elevation / 1000.0
    assert -45.0 < values.min() < -10.0
    assert 25.0 < values.max() < 50.0
    assert (made.elevation.min() >= 70.0) & (made.elevation.max() <= 2750.0)
    assert np.ptp(made.lat) <= 1.1
    assert np.ptp(made.lon) <= 1.5
    tmin, tmax = values.mean((0, 1)).T
    assert np.polyfit(height, tmin, 1)[0] == pytest.approx(-6.0, abs=0.7)
    assert (tmax > tmin + 4.0).all()
    assert (values[:, 181:212].mean((0, 1)) > values[:, :31].mean((0, 1)) + 10.0).all(), "July is warmer than January"
    anomaly = values - values.mean(0)
    regional = anomaly.mean(2)  # shape: (year, day, output)
    assert regional.std() == pytest.approx(3.0, abs=0.4)
    assert np.corrcoef(regional.reshape(-1, 2).T)[0, 1] == pytest.approx(0.7, abs=0.08)
    after_four = np.corrcoef(regional[:, :-4, 0].ravel(), regional[:, 4:, 0].ravel())[0, 1]
    assert after_four == pytest.approx(np.exp(-1.0), abs=0.1)
    local = (anomaly - regional[:, :, None])[..., 0].reshape(-1, 30)
    correlation = np.corrcoef(local.T)
    apart = np.hypot(np.subtract.outer(made.lat, made.lat), np.subtract.outer(made.lon, made.lon))
    apart = apart + np.abs(np.subtract.outer(height, height))
    pair = np.triu_indices(30, 1)
    assert np.corrcoef(apart[pair], correlation[pair])[0, 1] < -0.5, "stations alike are those close by"


def test_months_and_single_cells():
    monthly = synthetic_climate(years=4, times=12, stations=2, gappiness=0.2, period=12.0)
    assert (monthly.period, monthly.time.tolist()) == (12.0, list(range(1, 13)))
    assert synthetic_climate(years=1, times=1, stations=1, gappiness=0.0).values.shape == (1, 1, 1, 2)


def test_it_is_as_large_as_a_real_network():
    made = synthetic_climate()
    assert made.values.size == 1_903_200
    assert np.isnan(made.values).mean() == pytest.approx(0.5, abs=0.01)
    grid, _, y = gaps.from_array(
        made.values[:2], [made.year[:2], made.time, np.stack([made.lon, made.lat, made.elevation], -1), None]
    )
    assert (grid.num_cells, len(y)) == (2 * 366 * 52 * 2, int((~np.isnan(made.values[:2])).sum()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"years": 0}, "years: got 0; expected at least 1"),
        ({"times": 0}, "times: got 0; expected at least 1"),
        ({"stations": -1}, "stations: got -1; expected at least 1"),
        ({"times": 367}, "times: got 367; expected no more than the period, 365.25"),
        ({"period": float("nan")}, "times: got 366; expected no more than the period, nan"),
        ({"gappiness": 1.0}, "gappiness: got 1.0; expected a share from 0 to below 1"),
        ({"gappiness": -0.1}, "gappiness: got -0.1"),
    ],
)
def test_a_climate_that_cannot_be_made_is_refused(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        synthetic_climate(**arguments)


# -- the real ones -----------------------------------------------------------------------------------------------------


@needs_data
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("name", "shape", "observed"),
    [("trentino_daily", (50, 366, 52, 2), 904_764), ("colorado_monthly", (103, 12, 376, 2), 356_140)],
)
def test_the_real_climates(name, shape, observed):
    loaded = load_climate(name)
    assert loaded.values.shape == shape
    assert int((~np.isnan(loaded.values)).sum()) == observed
    assert loaded.output == ("tmin", "tmax")
    if name == "colorado_monthly":
        assert loaded.test_cells.sum() == 106_842
        assert not np.isnan(loaded.values[loaded.test_cells]).any()
    else:
        assert loaded.station[0].startswith("PERGINE")


@needs_data
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("name", "key", "shape", "observed"),
    [("modis_lst", "satellite", (300, 500), 105_569), ("sst_pacific", "values", (399, 30, 84), 902_139)],
)
def test_the_real_fields(name, key, shape, observed):
    loaded = load_field(name)
    assert loaded[key].shape == shape
    assert int((~np.isnan(loaded[key])).sum()) == observed
    assert (len(loaded["lat"]), len(loaded["lon"])) == shape[-2:]


@needs_data
@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("name", TABLES + DATASETS)
def test_the_real_tables_and_netcdf_files_are_those_that_are_known(name):
    loaded = (load_field if name in TABLES else load_dataset)(name)
    assert set(sources()[name].arrays) <= set(loaded)
