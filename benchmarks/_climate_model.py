"""A climate of stations as a Gaussian process: preparation of the data, and the kernels of the remainder.

The observations are a grid of year x day x place. A place is one output (minimum, maximum) of one station. Two things
are removed first, because a product of kernels cannot describe them: the mean seasonal cycle of every place, and shifts
of its records by a day. (Some stations record the maximum of the day before. A shift of a whole year of a place by one
day permutes its cells. It is reversed in the predictions.)

    y = cycle + weather + slow + noise
    weather:  year (almost no memory)  x day (short memory)  x place
    slow:     year (long memory)       x day (periodic)      x place

The kernel of places is a sum of products of GPyTorch kernels: a kernel of the distance between stations, in three
dimensions and at two scales, times a kernel of outputs; and a free covariance of low rank for properties of single
places.
"""

import math
from dataclasses import dataclass

import gpytorch
import numpy as np
import torch
from gpytorch.constraints import GreaterThan
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import AdditiveKernel, IndexKernel, Kernel, MaternKernel, PeriodicKernel, ProductKernel
from gpytorch.models import ExactGP
from torch import Tensor

import gpytorch_gaps as gaps
from benchmarks.datasets import StationClimate

_HARMONICS = 4
_SHRINKAGE = 30.0  # observations' worth of belief in what elevation and position say of a station's cycle
_LAG_MARGIN = 0.02  # of correlation, by which another day must fit better before a record is moved
_PASSES = 5


# -- what goes in front ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Anomalies:
    """Observations minus the mean cycle of their place, on the day to which they belong."""

    values: np.ndarray  # (year, time, station, output), NaN at gaps
    cycle: np.ndarray  # (time, station, output), on the calendar of the records
    shift: np.ndarray  # (year, station, output), days that the records of a year were moved by

    @classmethod
    def of(cls, climate: StationClimate, values: np.ndarray) -> "Anomalies":
        """:param values: those of the climate, or fewer of them."""
        cycle = mean_cycle(climate, values)
        anomalies = values.astype(np.float64) - cycle
        daily = climate.period > 300
        shift = days_off(anomalies) if daily else np.zeros((len(values), *values.shape[2:]), dtype=int)
        return cls(moved(anomalies, shift), cycle, shift)

    def recorded(self, on_grid: np.ndarray) -> np.ndarray:
        """Predictions for the true days, shifted to the calendar of the records."""
        return moved(on_grid, -self.shift)


def mean_cycle(climate: StationClimate, values: np.ndarray) -> np.ndarray:
    """Harmonics of the year for every place. With few observations, they are shrunk to a regression on position."""
    angle = 2.0 * np.pi * climate.time / climate.period
    count = min(_HARMONICS, (len(climate.time) - 1) // 2)
    waves = [wave(k * angle) for k in range(1, count + 1) for wave in (np.cos, np.sin)]
    basis = np.stack([np.ones_like(angle), *waves], -1)  # shape: (time, h)
    known = ~np.isnan(values)
    seen = known.sum(0).astype(np.float64)  # shape: (time, station, output)
    gram = np.einsum("tso,th,tk->sohk", seen, basis, basis)
    moments = np.einsum("tso,th->soh", np.where(known, values, 0.0).sum(0, dtype=np.float64), basis)
    eye = np.eye(basis.shape[1])
    own = np.linalg.solve(gram + 1e-3 * eye, moments[..., None])[..., 0]
    x = positions(climate)
    x = np.concatenate([np.ones((len(x), 1)), x - x.mean(0)], -1)
    weight = np.sqrt(seen.sum(0))  # shape: (station, output)
    regional = np.stack(
        [np.linalg.lstsq(x * w[:, None], own[:, o] * w[:, None], rcond=None)[0] for o, w in enumerate(weight.T)], 1
    )  # shape: (1 + 3, output, h)
    drawn_to = np.einsum("sp,poh->soh", x, regional)
    coefficients = np.linalg.solve(gram + _SHRINKAGE * eye, (moments + _SHRINKAGE * drawn_to)[..., None])[..., 0]
    return np.einsum("soh,th->tso", coefficients, basis)


def positions(climate: StationClimate) -> np.ndarray:
    """East and north in 100 km, height in km. shape: (station, 3)"""
    east = 1.112 * np.cos(np.radians(climate.lat.mean())) * climate.lon
    return np.stack([east, 1.112 * climate.lat, climate.elevation / 1000.0], -1).astype(np.float64)


def days_off(anomalies: np.ndarray) -> np.ndarray:
    """The shift in days (-1, 0, 1) of each year of a place that fits the others best. shape: (year, station, output)

    Three years are compared at a time. The mean is computed again after records have been moved.
    """
    years, _, stations, outputs = anomalies.shape
    shift = np.zeros((years, stations, outputs), dtype=int)
    now = anomalies.copy()
    for _ in range(_PASSES):
        known = ~np.isnan(now)
        filled = np.where(known, now, 0.0)
        total, count = filled.sum(2), known.sum(2)  # shape: (year, day, output)
        changed = False
        for s, o in np.ndindex(stations, outputs):
            others = count[..., o] - known[:, :, s, o]
            mean = np.where(others >= 3, (total[..., o] - filled[:, :, s, o]) / np.maximum(others, 1), np.nan)
            fits = np.stack([_moments(np.roll(now[:, :, s, o], lag, 1), mean) for lag in (-1, 0, 1)])
            seen = fits[1, 3]
            smooth = np.stack([fits[..., max(0, y - 1) : y + 2].sum(-1) for y in range(years)], -1)
            fit = smooth[:, 0] / np.sqrt(np.maximum(smooth[:, 1] * smooth[:, 2], 1e-9))  # shape: (lag, year)
            best = fit.argmax(0)
            move = np.where((fit.max(0) > fit[1] + _LAG_MARGIN) & (seen > 30), best - 1, 0)
            move = np.clip(shift[:, s, o] + move, -1, 1) - shift[:, s, o]
            for y in np.flatnonzero(move):
                now[y, :, s, o] = np.roll(now[y, :, s, o], move[y])
            shift[:, s, o] += move
            changed |= bool(move.any())
        if not changed:
            break
    return shift


def _moments(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Sums of products, of squares of both, and the number of pairs, for every year. shape: (4, year)"""
    both = ~np.isnan(first) & ~np.isnan(second)
    a, b = np.where(both, first, 0.0), np.where(both, second, 0.0)
    return np.stack([(a * b).sum(1), (a * a).sum(1), (b * b).sum(1), both.sum(1)])


def moved(values: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """The year of every place rolled by its shift: a permutation of its days."""
    result = values.copy()
    for y, s, o in zip(*np.nonzero(shift), strict=True):
        result[y, :, s, o] = np.roll(result[y, :, s, o], shift[y, s, o])
    return result


# -- the model ---------------------------------------------------------------------------------------------------------

PLACE = 3  # columns of a place: east, north, height, its code, code of its output
OUTPUT = 4


def place_axis(climate: StationClimate) -> Tensor:
    """shape: (stations * outputs, 5)"""
    stations, outputs = len(climate.lat), len(climate.output)
    where = np.repeat(positions(climate) - positions(climate).mean(0), outputs, axis=0)
    place, output = np.arange(stations * outputs), np.tile(np.arange(outputs), stations)
    return torch.from_numpy(np.concatenate([where, place[:, None], output[:, None]], -1))


def outputs_kernel(variances: list[float], correlation: float = 0.7) -> IndexKernel:
    """``b b' + diag(v)`` over the outputs."""
    kernel = IndexKernel(num_tasks=len(variances), rank=1, active_dims=(OUTPUT,))
    scale = torch.tensor(variances)
    with torch.no_grad():
        kernel.covar_factor.copy_((correlation * scale).sqrt().unsqueeze(-1))
        kernel.initialize(var=(1.0 - correlation) * scale)
    return kernel


def space_kernel(lengthscales: list[float], nu: float = 1.5) -> MaternKernel:
    kernel = MaternKernel(nu=nu, ard_num_dims=3, active_dims=(0, 1, 2))
    kernel.initialize(lengthscale=torch.tensor(lengthscales))
    return kernel


def places_kernel(climate: StationClimate, seen: np.ndarray, weight: np.ndarray, rank: int) -> Kernel:
    """The kernel of places: two spatial kernels times outputs, and a free covariance for properties of single places.

    :param seen: estimate of the covariance of the places from the data. shape (places, places).
    :param weight: its reliability, from 0 to 1. The free covariance starts as the part that space does not explain.
    :param rank: rank of the free covariance, which also has a diagonal.
    """
    outputs = len(climate.output)
    each = weight.diagonal().reshape(-1, outputs)
    total = (each * seen.diagonal().reshape(-1, outputs)).sum(0) / each.sum(0)
    wide = ProductKernel(space_kernel([4.0, 3.0, 2.5]), outputs_kernel((0.7 * total).tolist()))
    near = ProductKernel(space_kernel([0.15, 0.15, 0.2]), outputs_kernel((0.05 * total).tolist()))
    axis = place_axis(climate).float()
    with torch.no_grad():
        rest = weight * (seen - (wide(axis) + near(axis)).to_dense().double().numpy())
    values, vectors = np.linalg.eigh(rest)
    factor = vectors[:, -rank:] * np.sqrt(np.maximum(values[-rank:], 1e-2 * total.mean() / len(seen)))
    left = np.maximum(rest.diagonal() - (factor**2).sum(-1), 0.02 * total.mean())
    free = IndexKernel(num_tasks=len(seen), rank=rank, active_dims=(PLACE,))
    with torch.no_grad():
        free.covar_factor.copy_(torch.from_numpy(factor))
        free.initialize(var=torch.from_numpy(left).float())
    return AdditiveKernel(wide, near, free)


def lagged_covariance(anomalies: np.ndarray, lag: int) -> tuple[np.ndarray, np.ndarray]:
    """The covariance of the places from one day to the next, which does not contain their noise, or on the same day.

    Also its reliability, from 0 for pairs without common observations to 1. shape: (places, places) each
    """
    series = anomalies.reshape(*anomalies.shape[:2], -1)
    known = ~np.isnan(series)
    filled, known = np.where(known, series, 0.0), known.astype(np.float64)
    days = series.shape[1] - lag
    products, counts = (np.einsum("ytp,ytq->pq", x[:, lag:], x[:, :days], optimize=True) for x in (filled, known))
    covariance, weight = products / np.maximum(counts, 1.0), counts / (counts + _SHRINKAGE)
    return 0.5 * (covariance + covariance.T), 0.5 * (weight + weight.T)


class ClimateModel(ExactGP):
    """Weather and slow change, on the grid of year x day x place."""

    def __init__(self, climate: StationClimate, anomalies: np.ndarray, rank: int = 8) -> None:
        values = torch.from_numpy(anomalies).flatten(-2)
        axes = [torch.from_numpy(climate.year), torch.from_numpy(climate.time)]
        grid, x, y = gaps.from_array(values, [*(axis.double() for axis in axes), place_axis(climate)])
        above = GreaterThan(1e-3)
        super().__init__(x, y, gaps.GappyGridLikelihood(noise_axis=-1, grid=grid, noise_constraint=above))
        self.grid = grid
        spread = np.nanvar(anomalies, (0, 1, 2))
        daily = climate.period > 300
        noise = (0.1 if daily else 0.05) * np.tile(spread, len(climate.lat))
        self.likelihood.initialize(noise=torch.from_numpy(noise))
        self.mean_module = gpytorch.means.ZeroMean()
        memory = 3.0 if daily else 0.8
        seen, weight = lagged_covariance(anomalies, int(daily))
        seen = math.exp(1.0 / memory) * seen if daily else seen
        year, time = MaternKernel(nu=0.5), MaternKernel(nu=0.5)
        year.initialize(lengthscale=0.15)
        time.initialize(lengthscale=memory)
        weather = [year, time, places_kernel(climate, 0.9 * seen, weight, rank)]
        long, season = MaternKernel(nu=0.5), PeriodicKernel()
        long.initialize(lengthscale=6.0)
        season.initialize(lengthscale=1.5, period_length=climate.period)
        season.raw_period_length.requires_grad_(False)
        share = 0.1 * np.diag(seen.diagonal()) + 0.05 * seen
        slow = [long, season, places_kernel(climate, share, weight, 1)]
        self.covar_module = AdditiveKernel(gaps.GappyGridKernel(weather, grid), gaps.GappyGridKernel(slow, grid))
        self.double()

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))
