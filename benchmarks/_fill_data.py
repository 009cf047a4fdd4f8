"""The data sets that fillings are compared on, each in the form in which its users have it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.datasets import load_climate, load_dataset, load_field

FIELD, STATIONS, CURVES = "field", "stations", "learning curves"
_CURVES = 400  # configurations of a table of learning curves


@dataclass(frozen=True, eq=False)
class Problem:
    """Values with gaps, and how some of them are withheld.

    :param kind: a field, stations (time, station), or learning curves (configuration, epoch).
    :param values: shape as `dims`; NaN at gaps. Times come first.
    :param dims: names of the dimensions.
    :param coordinates: those of the dimensions, by name, and others as (dimension, array).
    :param inside: flags of the cells that are to be filled, such as sea, for the dimensions in space. Default: all.
    :param cloud: extents along each axis of the clouds that hide cells. Default: the gaps of other dates.
    :param run: cells in a row that a station loses.
    :param test_cells: observations that were marked for tests by those who published the data.
    :param published: root mean square errors of others, by method and what was withheld.
    """

    name: str
    kind: str
    values: np.ndarray
    dims: tuple[str, ...]
    coordinates: Mapping[str, Any]
    inside: np.ndarray | None = None
    cloud: tuple[float, ...] | None = None
    run: int = 0
    test_cells: np.ndarray | None = None
    published: Mapping[tuple[str, str], float] = field(default_factory=dict)

    @property
    def has_time(self) -> bool:
        return self.dims[0] in ("time", "t")

    def arguments(self, seen: np.ndarray) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of ``fill_gaps``: a table of stations, an array with its axes, or a DataArray."""
        import pandas as pd  # optional dependencies

        if self.kind == CURVES:
            return (seen, [self.coordinates[name] for name in self.dims]), {}
        if self.kind == STATIONS and len(self.coordinates) == 2:
            time, station = (self.coordinates[name] for name in self.dims)
            return (pd.DataFrame(seen, pd.DatetimeIndex(time), station),), {}
        inside = None if self.inside is None else self.array(np.broadcast_to(self.inside, seen.shape))
        return (self.array(seen),), {} if inside is None else {"where": inside}

    def array(self, seen: np.ndarray) -> Any:
        """Values as a DataArray."""
        import xarray

        return xarray.DataArray(seen, dims=self.dims, coords=dict(self.coordinates), name=self.name)

    def days(self) -> np.ndarray:
        """Days since the first time."""
        time = np.asarray(self.coordinates[self.dims[0]])
        return (time - time[0]) / np.timedelta64(1, "D")


def _modis(name: str, small: bool) -> Problem:
    arrays, every = load_field("modis_lst"), slice(None, None, 6 if small else 1)
    coordinates = {key: arrays[key][every] for key in ("lat", "lon")}
    values = arrays[name.removeprefix("modis_")][every, every]
    extent = 2.0 if small else 12.0
    return Problem(name, FIELD, values.astype(np.float64), ("lat", "lon"), coordinates, cloud=(extent, extent))


def _pacific(name: str, small: bool) -> Problem:
    arrays, months = load_field(name), slice(36 if small else None)
    time = np.datetime64("1970-01", "M") + arrays["month_index"][months] - arrays["month_index"][0]
    coordinates = {"time": time.astype("datetime64[ns]"), "lat": arrays["lat"], "lon": arrays["lon"]}
    values = arrays["values"][months].astype(np.float64)
    return Problem(name, FIELD, values, ("time", "lat", "lon"), coordinates, cloud=(2.0, 4.0, 6.0))


def _alboran(name: str, small: bool) -> Problem:
    dataset = load_dataset(name)
    dataset = dataset.isel(lat=slice(None, None, 5), lon=slice(None, None, 5)) if small else dataset
    sea = np.equal(dataset["mask"].to_numpy(), 1)
    coordinates = {key: dataset[key].to_numpy() for key in ("time", "lat", "lon")}
    published = {("DINEOF, its own 2,258 points", "clouds"): 0.4445}
    values = np.where(sea, dataset["SST"].to_numpy().astype(np.float64), np.nan)
    return Problem(name, FIELD, values, ("time", "lat", "lon"), coordinates, inside=sea, published=published)


def _sentinel(name: str, small: bool) -> Problem:
    dataset = load_dataset(name)
    dataset = dataset.isel(y=slice(None, None, 3), x=slice(None, None, 3)) if small else dataset
    coordinates = {key: dataset[key].to_numpy() for key in ("t", "y", "x")}
    values, extent = dataset["NDVI"].to_numpy().astype(np.float64), 2.0 if small else 6.0
    return Problem(name, FIELD, values, ("t", "y", "x"), coordinates, cloud=(0.0, extent, extent))


def _table(name: str, small: bool) -> Problem:
    arrays = load_field(name)
    days = slice(730 if small else None)
    names = arrays.get("station", [f"station {i}" for i in range(arrays["values"].shape[1])])
    coordinates = {"time": arrays["date"][days].astype("datetime64[ns]"), "station": np.asarray(names)}
    run = {"german_pm10": 365, "irish_wind": 90}[name]
    values = arrays["values"][days].astype(np.float64)
    return Problem(name, STATIONS, values, ("time", "station"), coordinates, run=60 if small else run)


def _colorado(name: str, small: bool) -> Problem:
    climate = load_climate("colorado_monthly")
    output = climate.output.index(name.removeprefix("colorado_"))
    stations, years = (slice(40), slice(-10, None)) if small else (slice(None), slice(None))
    shown = (years, slice(None), stations, output)
    tests = np.zeros(climate.values.shape, dtype=bool) if climate.test_cells is None else climate.test_cells
    values, tests = (array[shown].reshape(-1, array[shown].shape[-1]) for array in (climate.values, tests))
    first = np.datetime64(f"{climate.year[years][0]}-01", "M")
    coordinates = {
        "time": (first + np.arange(len(values))).astype("datetime64[ns]"),
        "station": np.array(climate.station[stations]),
        "lat": ("station", climate.lat[stations]),
        "lon": ("station", climate.lon[stations]),
        "elev": ("station", climate.elevation[stations]),
    }
    return Problem(
        name, STATIONS, values.astype(np.float64), ("time", "station"), coordinates, run=24, test_cells=tests
    )


def _curves(name: str, small: bool) -> Problem:
    arrays, count = load_field(name), 60 if small else _CURVES
    drawn = arrays["X"][:count].copy()
    drawn[:, [0, 1, 5]] = np.log(drawn[:, [0, 1, 5]])  # batch size, learning rate and units were drawn on a log scale
    drawn = (drawn - drawn.mean(0)) / np.maximum(drawn.std(0), 1e-12)
    coordinates = {"configuration": drawn, "epoch": np.arange(1.0, 1.0 + arrays["Y"].shape[1])}
    return Problem(name, CURVES, arrays["Y"][:count].astype(np.float64), ("configuration", "epoch"), coordinates)


PROBLEMS: dict[str, Callable[[str, bool], Problem]] = {
    "modis_satellite": _modis,
    "modis_simulated": _modis,
    "sst_pacific": _pacific,
    "alboran_sst": _alboran,
    "sentinel2_ndvi_field": _sentinel,
    "german_pm10": _table,
    "irish_wind": _table,
    "colorado_tmin": _colorado,
    "colorado_tmax": _colorado,
    "lcbench_adult": _curves,
    "lcbench_higgs": _curves,
    "lcbench_Fashion-MNIST": _curves,
}


def problem(name: str, small: bool = False) -> Problem:
    """A data set by its name in `PROBLEMS`, or a part of it of some thousand cells."""
    return PROBLEMS[name](name, small)
