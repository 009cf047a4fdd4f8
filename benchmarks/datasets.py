"""Public data sets with gaps, read from a folder of ``.npz`` and netCDF files."""

import hashlib
import os
import warnings
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .station_climate import StationClimate, synthetic_climate

if TYPE_CHECKING:
    import xarray

__all__ = [
    "FOLDER_VARIABLE",
    "Source",
    "StationClimate",
    "load_climate",
    "load_dataset",
    "load_field",
    "sources",
    "synthetic_climate",
]

FOLDER_VARIABLE = "GPYTORCH_GAPS_DATA"
"""The environment variable that names the folder of the data."""


@dataclass(frozen=True)
class Source:
    """Where a data set comes from, and how its file is made from there."""

    file: str
    sha256: str
    public: str
    url: str
    licence: str
    made: str
    arrays: tuple[str, ...]


_CLIMATE_ARRAYS = ("values", "year", "lon", "lat", "elev")
_CLIMATES = {
    "trentino_daily": Source(
        file="trentino_daily_train.npz",
        sha256="e4cd185d8d3b78fefe2bb0c89387ac91cb27390ad375601d8d09782576f0881e",
        public="CRAN package RMAWGEN, data set trentino",
        url="https://cran.r-project.org/package=RMAWGEN",
        licence="GPL (>= 2); the data set's manual page adds: for research purposes only",
        made="TEMPERATURE_MIN and TEMPERATURE_MAX of 52 stations as (year, day of the year, station, output), 1958 to "
        "2007; day 366 is a gap outside leap years. Some of the observations are withheld, and are gaps.",
        arrays=(*_CLIMATE_ARRAYS, "doy"),
    ),
    "colorado_monthly": Source(
        file="colorado_monthly.npz",
        sha256="aa9e741aae5203c44b3b3c39ddfe6c77680719f4038523bc9cec843c75fdb7a1",
        public="CRAN package fields, data set COmonthlyMet",
        url="https://cran.r-project.org/package=fields",
        licence="GPL (>= 2)",
        made="CO.tmin and CO.tmax as (year, month, station, output), 1895 to 1997, with CO.loc and CO.elev. The "
        "boolean test_cells marks 30 % of the observations, to be held out.",
        arrays=(*_CLIMATE_ARRAYS, "month"),
    ),
}
_FIELDS = {
    "modis_lst": Source(
        file="modis_lst.npz",
        sha256="3f1c356c440d32cab73db88c666415f7c3caedfc07a857575a46851406ab7b01",
        public="GitHub finnlindgren/heatoncomparison, SatelliteTemps.RData and SimulatedTemps.RData",
        url="https://github.com/finnlindgren/heatoncomparison",
        licence="not stated (the repository is provided as-is)",
        made="The column Temp of each file as (lat, lon), latitudes from north to south: satellite and simulated.",
        arrays=("satellite", "simulated", "lat", "lon"),
    ),
    "sst_pacific": Source(
        file="sst_pacific.npz",
        sha256="491087c061aae93bee7fea35a0d4c5050872bc391cbeb6f866158ff8acc4bbd3",
        public="GitHub andrewzm/STRbook, SSTdata, SSTlandmask and SSTlonlat",
        url="https://github.com/andrewzm/STRbook",
        licence="GPL (>2.1), as its DESCRIPTION has it",
        made="Monthly anomalies from January 1970 as (month, lat, lon), every 2 degrees; land is a gap.",
        arrays=("values", "month_index", "lat", "lon"),
    ),
    "german_pm10": Source(
        file="german_pm10.npz",
        sha256="2fedaf3ec901230a11747557a81879b5d21a43a36320bf6e3cb814c33959c067",
        public="CRAN package spacetime, data set air",
        url="https://cran.r-project.org/package=spacetime",
        licence="GPL (>= 2)",
        made="Daily PM10 of 70 rural stations from 1998 to 2009 as (day, station), in micrograms per cubic metre.",
        arrays=("values", "date"),
    ),
    "irish_wind": Source(
        file="irish_wind.npz",
        sha256="b79059eae90ebe95692997ae5e13945da2231a9ce94439401cba5418a7410535",
        public="CRAN package gstat, data set wind",
        url="https://cran.r-project.org/package=gstat",
        licence="GPL (>= 2)",
        made="The columns of the stations as (day, station), 1961 to 1978, in knots, with their names and the dates.",
        arrays=("values", "station", "date"),
    ),
    **{
        f"lcbench_{task}": Source(
            file=f"lcbench_{task}.npz",
            sha256=sha256,
            public=f"GitHub jandylin/Latent-Kronecker-GPs, data/LCBench/{task}.npz",
            url="https://github.com/jandylin/Latent-Kronecker-GPs",
            licence="MIT",
            made="X (configuration, hyperparameter) and Y (configuration, epoch), as they are.",
            arrays=("X", "Y"),
        )
        for task, sha256 in (
            ("adult", "0770d3b28a25d9e41c44a5cc46df6f173319f4f7a7cfada7036489a001ba9bda"),
            ("higgs", "335f4ecf3eda60a6a8a6d348ec414d56fe05270d24d9f9c7c8eddbb9b8d7caf1"),
        )
    },
}
_DATASETS = {
    "alboran_sst": Source(
        file="alboran_sst.nc",
        sha256="d1ccbab330642e47c9c23df046333ce2df2eb30c346acc4d3b806047ddc29e3b",
        public="GitHub aida-alvera/DINEOF, SmallExample/alboranSST_small.nc",
        url="https://github.com/aida-alvera/DINEOF",
        licence="not stated",
        made="The file, as it is: SST (time, lat, lon), ten days of May 2017, and mask (lat, lon), 1 at sea.",
        arrays=("SST", "mask"),
    ),
    "sentinel2_ndvi_field": Source(
        file="sentinel2_ndvi_field.nc",
        sha256="6d4b045ad5900781ca46eae0cec72b61e17405e169908d6400e79b2babcb248d",
        public="GitHub Open-EO/FuseTS, notebooks/FOSS4G/raw_s2_ndvi_field.nc",
        url="https://github.com/Open-EO/FuseTS",
        licence="Apache 2.0, as its LICENSE has it for all but one folder",
        made="The file, as it is: NDVI, two bands and two masks (t, y, x), 33 dates of 2019.",
        arrays=("NDVI",),
    ),
}


def sources() -> dict[str, Source]:
    """The data sets that are known by name."""
    return {**_CLIMATES, **_FIELDS, **_DATASETS}


def load_climate(name_or_path: str | Path, folder: str | Path | None = None, verify: bool = True) -> StationClimate:
    """A climate by its name in `sources`, or from an ``.npz`` file of the same arrays.

    The arrays are values, year, doy or month, lon, lat, elev, and perhaps station_name, output and test_cells. Known
    names are looked for in `folder`, or else in that which GPYTORCH_GAPS_DATA names; a path starts at `folder` if
    there is one. A known file of another content than expected is read, with a warning, unless `verify` is False.
    """
    if isinstance(name_or_path, str) and name_or_path in sources():
        name = name_or_path
        _require_one_of(_CLIMATES, "name_or_path", name)
        path = _known_file(name, folder, verify)
        arrays = _read(path, _CLIMATES[name].arrays)
    else:
        path = Path(folder or "", name_or_path)
        if not path.is_file():
            raise FileNotFoundError(f"name_or_path: no file {path}; expected an .npz, or one of {list(_CLIMATES)}")
        name, arrays = path.stem, _read(path, _CLIMATE_ARRAYS)
    if ("doy" in arrays) == ("month" in arrays):
        raise ValueError(f"{path}: got arrays {sorted(arrays)}; expected one of doy and month")
    values = arrays["values"]
    if values.dtype.kind not in "iuf" or values.ndim != 4:
        got = f"{values.dtype} of shape {values.shape}"
        raise ValueError(f"{path}: values are {got}; expected numbers (year, time, station, output)")
    with np.errstate(over="ignore"):  # what float32 cannot hold is refused as infinite
        values = values.astype(np.float32)
    try:
        return StationClimate(
            name=name,
            values=values,
            year=arrays["year"],
            time=arrays["doy"] if "doy" in arrays else arrays["month"],
            period=365.25 if "doy" in arrays else 12.0,
            lon=arrays["lon"],
            lat=arrays["lat"],
            elevation=arrays["elev"],
            station=_names(arrays.get("station_name"), "station", values.shape[2]),
            output=_names(arrays.get("output"), "output", values.shape[3]),
            test_cells=arrays.get("test_cells"),
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def load_field(name: str, folder: str | Path | None = None, verify: bool = True) -> dict[str, np.ndarray]:
    """The arrays of a grid or table of `sources`, not to be written to; `folder` and `verify` as of a climate."""
    _require_one_of(_FIELDS, "name", name)
    path = _known_file(name, folder, verify)
    arrays = _read(path, _FIELDS[name].arrays)
    for key, array in arrays.items():
        if array.dtype.kind == "f" and np.isinf(array).any():
            raise ValueError(f"{path}: {key} has infinite entries; expected finite values, or NaN for gaps")
        array.flags.writeable = False
    return arrays


def load_dataset(name: str, folder: str | Path | None = None, verify: bool = True) -> "xarray.Dataset":
    """A netCDF file of `sources` as xarray reads it, in memory; `folder` and `verify` as of a climate."""
    import xarray  # an optional dependency

    _require_one_of(_DATASETS, "name", name)
    path = _known_file(name, folder, verify)
    with xarray.open_dataset(path) as opened:
        if missing := [key for key in _DATASETS[name].arrays if key not in opened]:
            raise ValueError(f"{path}: no variable {', '.join(missing)}; got {list(opened)}")
        return opened.load()


def _require_one_of(known: dict[str, Source], argument: str, name: str) -> None:
    if name not in known:
        loaders = {"load_climate": _CLIMATES, "load_field": _FIELDS, "load_dataset": _DATASETS}
        hint = "".join(f"; that one is read by {loader}" for loader, own in loaders.items() if name in own)
        raise ValueError(f"{argument}: got {name!r}; expected one of {list(known)}{hint}")


def _known_file(name: str, folder: str | Path | None, verify: bool) -> Path:
    source, named = sources()[name], folder or os.environ.get(FOLDER_VARIABLE)
    if not named or not Path(named, source.file).is_file():
        missing = f"no file {source.file} in {named}" if named else f"no folder to look for {source.file} in"
        raise FileNotFoundError(
            f"{name}: {missing}; expected folder=, or else the environment variable {FOLDER_VARIABLE}, to name the "
            f"folder it is in. Its public source is {source.public}, {source.url}, licence: {source.licence}. How the "
            f"file is made from it: {source.made}"
        )
    path = Path(named, source.file)
    if verify:
        with path.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        if found != source.sha256:
            warnings.warn(
                f"{path}: its SHA-256 is {found}, expected {source.sha256}: results may differ from published ones.",
                UserWarning,
                stacklevel=3,
            )
    return path


def _read(path: Path, expected: Sequence[str]) -> dict[str, np.ndarray]:
    try:
        file = np.load(path, allow_pickle=False)  # a pickle could run anything
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise ValueError("it is a single array")
        with file:
            arrays = {key: file[key] for key in file}
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path}: expected an .npz of plain arrays, but {error}") from error
    if missing := [key for key in expected if key not in arrays]:
        raise ValueError(f"{path}: no array {', '.join(missing)}; expected {', '.join(expected)}, got {list(arrays)}")
    return arrays


def _names(given: np.ndarray | None, kind: str, count: int) -> tuple[str, ...]:
    return tuple(f"{kind} {i}" for i in range(count)) if given is None else tuple(str(n).strip() for n in given.flat)
