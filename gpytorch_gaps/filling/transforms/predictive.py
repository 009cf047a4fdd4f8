"""Predictions in the units of the data: of ``y = g^-1(z)``, with normal z.

Quantiles are ``g^-1`` of the quantiles of z, and the median is ``g^-1`` of the mean of z. Means and standard deviations
are integrals over z, by the Gauss-Hermite rule. Scores are those of this distribution, not of a normal one:

    CRPS = 2 int_0^1 (1{y <= q(p)} - p) (q(p) - y) dp,    NLPD = -log(phi((g(y) - m) / s) g'(y) / s)

An observation at an end of the domain has a probability in place of a density.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.polynomial.hermite_e import hermegauss
from scipy.special import ndtr, ndtri

from gpytorch_gaps.filling.transforms.transform import Transform
from gpytorch_gaps.posterior.scoring import Score, score_errors

_NODES = 40  # number of nodes of the Gauss-Hermite rule
_SCORE_NODES, _SCORE_REACH = 321, 8.0  # trapezoidal rule for the CRPS: number of nodes, range in standard deviations
_LEAST_CHANCE = 1e-300
_CHUNK = 50_000  # cells whose nodes are in memory at once


def predictive(transform: Transform | None, mean: np.ndarray, std: np.ndarray) -> "Normal | Transformed":
    """The distributions of values with normal z, given means and standard deviations of z."""
    return Normal(mean, std) if transform is None else Transformed(transform, mean, std)


@dataclass(frozen=True, eq=False)
class Normal:
    """Normal distributions of single values, for data that are not transformed."""

    mean: np.ndarray
    std: np.ndarray

    @property
    def median(self) -> np.ndarray:
        return self.mean

    def at(self, rows: Any) -> "Normal":
        """Some of the distributions."""
        return Normal(self.mean[rows], self.std[rows])

    def quantile(self, level: float) -> np.ndarray:
        return np.asarray(self.mean + float(ndtri(level)) * self.std)

    def score(self, truth: np.ndarray, level: float = 0.95) -> Score:
        """Scores of observations (Q,)."""
        return score_errors(torch.from_numpy(truth - self.mean), torch.from_numpy(self.std), level)

    def coverage(self, truth: np.ndarray, level: float) -> float:
        """The fraction of observations in the central intervals."""
        return float(np.mean(np.abs(truth - self.mean) / self.std <= ndtri((1 + level) / 2)))


@dataclass(frozen=True, eq=False)
class Transformed:
    """Distributions of single values, from means and standard deviations of z. Both are arrays of the same shape."""

    transform: Transform
    latent_mean: np.ndarray
    latent_std: np.ndarray

    def stretched(self, factor: float) -> "Transformed":
        """The same distributions with standard deviations of z multiplied by `factor`."""
        return Transformed(self.transform, self.latent_mean, factor * self.latent_std)

    def at(self, rows: Any) -> "Transformed":
        """Some of the distributions."""
        return Transformed(self.transform, self.latent_mean[rows], self.latent_std[rows])

    @cached_property
    def median(self) -> np.ndarray:
        return self.transform.inverse(self.latent_mean)

    def quantile(self, level: float) -> np.ndarray:
        return self.transform.inverse(self.latent_mean + float(ndtri(level)) * self.latent_std)

    @property
    def mean(self) -> np.ndarray:
        return self._moments[0]

    @property
    def std(self) -> np.ndarray:
        return self._moments[1]

    @property
    def mean_square(self) -> np.ndarray:
        """Mean square errors of the median."""
        return np.asarray(self.std**2 + (self.mean - self.median) ** 2)

    @property
    def mean_fourth(self) -> np.ndarray:
        """Means of the fourth power of the errors of the median."""
        return self._about_median(4)

    @cached_property
    def _moments(self) -> tuple[np.ndarray, np.ndarray]:
        """Means and standard deviations."""
        shift, square = self._about_median(1), self._about_median(2)  # moments about zero would cancel
        return self.median + shift, np.sqrt(np.maximum(square - shift**2, 0.0))

    def _about_median(self, power: int) -> np.ndarray:
        """Means of a power of the difference from the median."""
        nodes, weights = hermegauss(_NODES)
        weights = weights / weights.sum()
        medians = self.median.ravel()
        parts = [(values - medians[rows, None]) ** power @ weights for rows, values in self._at_nodes(nodes)]
        return np.concatenate(parts).reshape(self.median.shape) if parts else np.zeros(self.median.shape)

    def _at_nodes(self, nodes: np.ndarray) -> Any:
        """Values at the given numbers of standard deviations, chunk by chunk. shape: (rows, len(nodes))"""
        mean, std = self.latent_mean.ravel(), self.latent_std.ravel()
        for start in range(0, len(mean), _CHUNK):
            rows = slice(start, start + _CHUNK)
            yield rows, self.transform.inverse(mean[rows, None] + std[rows, None] * nodes)

    def score(self, truth: np.ndarray, level: float = 0.95) -> Score:
        """Scores of observations (Q,): of the median, of the distribution and of its central interval."""
        error = truth - self.median
        low, high = self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)
        missed = np.maximum(np.maximum(low - truth, truth - high), 0.0)
        return Score(
            rmse=float(np.sqrt(np.mean(error**2))),
            mae=float(np.mean(np.abs(error))),
            crps=float(np.mean(self.crps(truth))),
            nlpd=float(-np.mean(self.log_density(truth))),
            interval=float(np.mean(high - low + 2 / (1 - level) * missed)),
            coverage=self.coverage(truth, level),
            count=truth.size,
            level=level,
        )

    def coverage(self, truth: np.ndarray, level: float) -> float:
        """The fraction of observations in the central intervals.

        An observation at an end of the domain counts as a fraction: the part of its probability that is inside the
        interval. For example, the 95 % interval of a cell that is dry with probability 0.9 contains 0.875 of this
        probability. With this rule, the coverage equals the level if the distributions are correct. (Most of these
        intervals contain the value 0, so that a count would be too large.)
        """
        edge = (1 - level) / 2
        inside = ((truth >= self.quantile(edge)) & (truth <= self.quantile(1 - edge))).astype(np.float64)
        for flags, chance in self._chances(truth):
            inside[flags] = np.clip(np.minimum(chance, 1 - edge) - edge, 0.0, None) / np.maximum(chance, edge)
        return float(np.mean(inside))

    def _chances(self, truth: np.ndarray) -> Any:
        """Flags of the observations at the lower end and at the upper end, and the probabilities of these ends."""
        for side, end, flags in zip((1.0, -1.0), self.transform.ends, self.transform.at_ends(truth), strict=True):
            if flags.any():
                yield flags, ndtr(side * (end - self.latent_mean[flags]) / self.latent_std[flags])

    def crps(self, truth: np.ndarray) -> np.ndarray:
        """The continuous ranked probability score of each observation (Q,)."""
        nodes = np.linspace(-_SCORE_REACH, _SCORE_REACH, _SCORE_NODES)
        weights = np.exp(-0.5 * nodes**2)
        weights, below = weights / weights.sum(), ndtr(nodes)
        found = []
        for rows, values in self._at_nodes(nodes):
            own = truth[rows, None]
            found.append(2 * (((own <= values) - below) * (values - own)) @ weights)
        return np.concatenate(found)

    def log_density(self, truth: np.ndarray) -> np.ndarray:
        """Logarithms of the density at observations (Q,), or of the probability at the ends of the domain."""
        found = np.empty(len(truth))
        for flags, chance in self._chances(truth):
            found[flags] = np.log(np.maximum(chance, _LEAST_CHANCE))
        at_ends = self.transform.at_ends(truth)
        inner = ~(at_ends[0] | at_ends[1])
        values, std = truth[inner], self.latent_std[inner]
        z = (self.transform.forward(values) - self.latent_mean[inner]) / std
        with np.errstate(divide="ignore"):
            slope = np.log(self.transform.slope(values))
        found[inner] = -0.5 * z**2 - 0.5 * math.log(2 * math.pi) - np.log(std) + slope
        return found
