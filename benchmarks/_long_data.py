"""Made-up data with a long regular axis: hourly tables of weather stations, and a long series."""

import math
from dataclasses import dataclass

import numpy as np
from scipy.signal import lfilter

DAY, YEAR = 24.0, 8760.0  # hours
MISSING = 0.3
NOISE = 0.3  # standard deviation, degrees
_SIDE = 300.0  # kilometres of the region
_WEATHER = ((60.0, 2.5, 200.0), (6.0, 0.8, 50.0))  # memory in hours, degrees, and kilometres, of its scales
_OUTAGE = (24, 240)  # hours of an outage, from and to
_OUTAGES = 0.5  # share of the gaps that are outages, not single hours


@dataclass(frozen=True, eq=False)
class Table:
    """Temperatures by hour and station, NaN in the gaps, and the true values there."""

    hours: np.ndarray
    places: np.ndarray  # shape: (stations, 2), kilometres
    values: np.ndarray  # shape: (hours, stations)
    truth: np.ndarray  # with the noise of measurements

    @property
    def gaps(self) -> np.ndarray:
        return np.isnan(self.values)


def weather_table(hours: int, stations: int, seed: int = 0) -> Table:
    """A year and days that differ by station, weather of some days and of some hours, and noise; 30 % are gaps."""
    generator = np.random.default_rng(seed)
    places = generator.uniform(0.0, _SIDE, (stations, 2))
    away = np.linalg.norm(places[:, None] - places, axis=-1)
    smooth = np.linalg.cholesky(np.exp(-away / _SIDE) + 1e-9 * np.eye(stations))  # of what differs by station
    level, winter, day = (smooth @ generator.standard_normal((stations, 3)) * [3.0, 1.0, 1.0] + [9.0, 9.0, 4.0]).T
    time = np.arange(hours, dtype=np.float64)
    truth = level - winter * np.cos(2 * math.pi * (time[:, None] / YEAR - 0.05))
    truth -= day * np.cos(2 * math.pi * (time[:, None] / DAY - 0.2))
    for memory, degrees, distance in _WEATHER:
        truth += degrees * _remembered(hours, memory, np.exp(-away / distance), generator)
    truth += NOISE * generator.standard_normal(truth.shape)
    return Table(time, places, np.where(_table_gaps(truth.shape, generator), np.nan, truth), truth)


def _remembered(hours: int, memory: float, covariance: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Covariance ``exp(-lag / memory)`` in time, and the given one between stations. shape: (hours, stations)"""
    kept = math.exp(-1.0 / memory)
    root = np.linalg.cholesky(covariance + 1e-9 * np.eye(len(covariance)))
    white = generator.standard_normal((hours, len(covariance))) @ root.T
    white[1:] *= math.sqrt(1.0 - kept**2)
    return lfilter([1.0], [1.0, -kept], white, axis=0)


def _table_gaps(shape: tuple[int, int], generator: np.random.Generator) -> np.ndarray:
    """Outages of one to ten days at one station, then single hours, until 30 % are missing."""
    hours, stations = shape
    missing = np.zeros(shape, dtype=bool)
    while missing.mean() < _OUTAGES * MISSING:
        start, length = int(generator.integers(0, hours)), int(generator.integers(*_OUTAGE, endpoint=True))
        missing[start : start + min(length, hours // 4), int(generator.integers(0, stations))] = True
    left = (MISSING - missing.mean()) / (1.0 - missing.mean())
    return missing | (generator.random(shape) < left)


@dataclass(frozen=True, eq=False)
class Series:
    """A series, NaN in the gaps, the true values there, and the parameters of the draw."""

    values: np.ndarray
    truth: np.ndarray
    length_scale: float
    noise: float


def matern_series(points: int, seed: int = 0, length_scale: float = 40.0, noise: float = 0.01) -> Series:
    """A draw of variance one with a Matern-3/2 kernel, plus noise; 30 % are gaps, most of them in runs of 5 to 80."""
    generator = np.random.default_rng(seed)
    # on a circle of twice as many places, covariances are diagonal in the Fourier basis
    lag = np.minimum(np.arange(2 * points), np.arange(2 * points, 0, -1)) * math.sqrt(3.0) / length_scale
    spectrum = np.fft.rfft((1.0 + lag) * np.exp(-lag)).real.clip(0.0)
    white = generator.standard_normal(2 * points)
    field = np.fft.irfft(np.sqrt(spectrum) * np.fft.rfft(white), 2 * points)[:points]
    truth = field + math.sqrt(noise) * generator.standard_normal(points)
    missing = generator.random(points) < MISSING / 6
    # runs overlap: of what is left, each spares all but its length
    runs = round(-math.log((1 - MISSING) / (1 - MISSING / 6)) * points / 42.5)
    for start, length in zip(generator.integers(0, points, runs), generator.integers(5, 81, runs), strict=True):
        missing[start : start + length] = True
    return Series(np.where(missing, np.nan, truth), truth, length_scale, noise)
