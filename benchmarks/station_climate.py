"""The climate of weather stations, measured with gaps, and a synthetic one."""

import calendar
import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np


@dataclass(frozen=True, eq=False, repr=False)
class StationClimate:
    """Measurements of weather stations, NaN at gaps."""

    name: str
    values: np.ndarray  # shape: (year, time, station, output), float32
    year: np.ndarray
    time: np.ndarray  # day of the year, or month, from 1
    period: float  # times in a year: 365.25 days, or 12 months
    lon: np.ndarray
    lat: np.ndarray
    elevation: np.ndarray  # metres
    station: tuple[str, ...]
    output: tuple[str, ...]
    test_cells: np.ndarray | None = None  # which cells are meant to be held out, if any

    def __post_init__(self) -> None:
        shape = self.values.shape
        if len(shape) != 4 or 0 in shape:
            raise ValueError(f"values: got shape {shape}; expected (year, time, station, output), none of them 0")
        if self.values.dtype != np.float32:
            raise ValueError(f"values: got {self.values.dtype}; expected float32")
        if np.isinf(self.values).any():
            entry = tuple(np.argwhere(np.isinf(self.values))[0].tolist())
            raise ValueError(f"values: entry {entry} is {self.values[entry]}; expected finite values, or NaN for gaps")
        for i, names in enumerate((("year",), ("time",), ("lon", "lat", "elevation"))):
            for name in names:
                array = getattr(self, name)
                if array.shape != (shape[i],):
                    raise ValueError(
                        f"{name}: got shape {array.shape}; expected ({shape[i]},), as values has along dimension {i}"
                    )
                bad = ~np.isfinite(array) if array.dtype.kind in "iuf" else np.ones(shape[i], dtype=bool)
                if bad.any():
                    raise ValueError(f"{name}: entry {bad.argmax()} is {array[bad.argmax()]}; expected finite numbers")
        for i, name in ((2, "station"), (3, "output")):
            if len(getattr(self, name)) != shape[i]:
                raise ValueError(f"{name}: got {len(getattr(self, name))} names; expected {shape[i]}, one for each")
        if not (math.isfinite(self.period) and self.period > 0):
            raise ValueError(f"period: got {self.period}; expected a positive number, the times in a year")
        if self.time.min() < 1 or self.time.max() > math.ceil(self.period):
            span = f"{self.time.min()} to {self.time.max()}"
            raise ValueError(f"time: got {span}; expected times from 1 to {math.ceil(self.period)}, as the period says")
        if self.test_cells is not None and (self.test_cells.shape != shape or self.test_cells.dtype != np.bool_):
            got = f"{self.test_cells.dtype} of shape {self.test_cells.shape}"
            raise ValueError(f"test_cells: got {got}; expected bool of shape {shape}, as values")

    def __repr__(self) -> str:
        shape, observed = " x ".join(map(str, self.values.shape)), 1.0 - np.isnan(self.values).mean()
        return f"StationClimate({self.name}: {shape}, {observed:.1%} observed)"


# -- a made-up one -----------------------------------------------------------------------------------------------------

# Of tmin and tmax, in degrees.
_LEVEL, _SWING = np.array([10.0, 20.0]), np.array([9.0, 11.5])  # at sea level: the mean, and half the year's range
_LAPSE = -6.0  # degrees a kilometre
_REGIONAL, _LOCAL, _DRIFT, _NOISE = 3.0, 1.0, 0.4, np.array([0.8, 1.3])  # standard deviations
_MEMORY, _LOCAL_MEMORY, _DRIFT_MEMORY = 4.0, 2.0, 10.0  # days, days, years
_BETWEEN_OUTPUTS = np.linalg.cholesky([[1.0, 0.7], [0.7, 1.0]])


def synthetic_climate(
    seed: int = 0,
    years: int = 50,
    times: int = 366,
    stations: int = 52,
    gappiness: float = 0.5,
    period: float = 365.25,
) -> StationClimate:
    """Extremes of temperature as Alpine stations measure them, of which about the share `gappiness` is missing.

    A seasonal cycle by elevation, weather of the region and around each station, stations that drift over the years,
    and noise. Day 366 is a gap outside leap years, stations begin late or end early, and cells fail at random.
    """
    for name, count in (("years", years), ("times", times), ("stations", stations)):
        if count < 1:
            raise ValueError(f"{name}: got {count}; expected at least 1")
    if not (math.isfinite(period) and times <= math.ceil(period)):
        raise ValueError(f"times: got {times}; expected no more than the period, {period}")
    if not 0.0 <= gappiness < 1.0:
        raise ValueError(f"gappiness: got {gappiness}; expected a share from 0 to below 1")
    rng = np.random.default_rng(seed)
    lat, lon = 46.0 + rng.uniform(-0.55, 0.55, stations), 11.2 + rng.uniform(-0.75, 0.75, stations)
    elevation = 70.0 + 2680.0 * rng.random(stations) ** 1.5  # more of them in the valleys
    year, time = 1958 + np.arange(years), 1 + np.arange(times)
    height = elevation[:, None] / 1000.0
    swing = _SWING - 0.8 * height + rng.normal(0.0, 0.7, (stations, 1))  # valleys are more continental
    season = -np.cos(2.0 * math.pi * (time / period - 0.055))  # coldest in the third week of January
    mean = _LEVEL + _LAPSE * height + season[:, None, None] * swing  # shape: (time, station, output)
    steps, day = years * times, 365.25 / period  # the days from one time to the next
    region = _autoregressive(rng.standard_normal((steps, 1, 2)), _MEMORY / day)
    nearby = _root_of_places(lat, lon, elevation) @ rng.standard_normal((steps, stations, 2))
    weather = _REGIONAL * region + _LOCAL * _autoregressive(nearby, _LOCAL_MEMORY / day)
    drift = _DRIFT * _autoregressive(rng.standard_normal((years, stations, 2)), _DRIFT_MEMORY)
    values = (weather @ _BETWEEN_OUTPUTS.T).reshape(years, times, stations, 2) + mean + drift[:, None]
    values += _NOISE * rng.standard_normal(values.shape)
    values[~_observed(rng, year, time, stations, gappiness)] = np.nan
    return StationClimate(
        name="synthetic",
        values=values.astype(np.float32),
        year=year,
        time=time,
        period=period,
        lon=lon.astype(np.float32),
        lat=lat.astype(np.float32),
        elevation=elevation.astype(np.float32),
        station=tuple(f"station {i}" for i in range(stations)),
        output=("tmin", "tmax"),
    )


def _autoregressive(white: np.ndarray, memory: float) -> np.ndarray:
    """White noise along the first axis, in place, as one that forgets by a factor e in `memory` steps."""
    kept = math.exp(-1.0 / memory)
    white[1:] *= math.sqrt(1.0 - kept**2)  # the first is as the stationary process has it
    for before, after in pairwise(white):
        after += kept * before
    return white


def _root_of_places(lat: np.ndarray, lon: np.ndarray, elevation: np.ndarray) -> np.ndarray:
    """Cholesky factor of the correlations between stations: e-fold in 60 km, and in a difference of 800 m in height."""
    north, east = 111.0 * lat, 77.0 * lon  # kilometres
    distance = np.hypot(north[:, None] - north, east[:, None] - east)
    apart = distance / 60.0 + np.abs(elevation[:, None] - elevation) / 800.0
    return np.linalg.cholesky(np.exp(-apart) + 1e-9 * np.eye(len(lat)))


def _observed(
    rng: np.random.Generator, year: np.ndarray, time: np.ndarray, stations: int, gappiness: float
) -> np.ndarray:
    """Which cells are: most gaps are whole years of a station, the others make up the share."""
    whole = 0.8 * gappiness
    lost = rng.beta(2.0 * whole + 1e-9, 2.0 - 2.0 * whole, stations)
    lost *= min(1.0, gappiness / max(lost.mean(), 1e-9))  # with few stations, chance may have taken too much
    lost_years = np.minimum(np.floor(lost * len(year)), len(year) - 1)
    late = np.where(rng.random(stations) < 0.4, rng.random(stations), 0.0)  # how much of it is after the station's end
    end = len(year) - np.floor(late * lost_years)
    begin = lost_years - (len(year) - end)
    ordinal = np.arange(len(year))[:, None]
    running = (ordinal >= begin) & (ordinal < end)  # shape: (year, station)
    exists = np.array([[day <= 365 or calendar.isleap(int(y)) for day in time] for y in year])  # shape: (year, time)
    observed = np.repeat((running[:, None] & exists[:, :, None])[..., None], 2, axis=-1)
    return observed & (rng.random(observed.shape) < (1.0 - gappiness) / max(observed.mean(), 1e-9))
