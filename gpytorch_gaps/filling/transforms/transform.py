"""Monotone transforms: the model is one of ``z = g(y)``, and results are those of ``y = g^-1(z)``.

Values lie in a domain from `low` to `high`. If ``g(low)`` is finite, as for a square root, many observations may be
exactly at that end: half of all days have no rain. They only mean that z is at most ``c = g(low)``. The model receives
the conditional mean of z, by the normal distribution of all z, and its variance as the variance of a measurement error:

    E[z | z <= c] = m - s h,    var[z | z <= c] = s^2 (1 - a h - h^2),    a = (c - m) / s,    h = phi(a) / Phi(a)

Predictions of y have a positive probability at that end, ``P(z <= c)``.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from scipy.special import log_ndtr

_LARGEST = 1e300  # limit of predicted values


class Transform(ABC):
    """A strictly increasing function g of values in a domain, and its inverse."""

    name: str
    """The name that the user gives."""
    low, high = -math.inf, math.inf
    """The ends of the domain, in the units of the data."""
    centre, spread = 0.0, 1.0
    """Mean and standard deviation of the normal distribution of all z."""

    @abstractmethod
    def forward(self, values: np.ndarray) -> np.ndarray:
        """g of values in the domain; NaN for NaN."""

    @abstractmethod
    def slope(self, values: np.ndarray) -> np.ndarray:
        """The derivative of g inside the domain."""

    @abstractmethod
    def _inverse(self, latent: np.ndarray) -> np.ndarray:
        """The inverse of g for any numbers. Beyond g of the ends of the domain, it is the end."""

    @property
    def words(self) -> str:
        """The name, with learned parameters."""
        return self.name

    @property
    def ends(self) -> tuple[float, float]:
        """g of the ends of the domain; infinite for ends that cannot be observed."""
        return -math.inf, math.inf

    def inverse(self, latent: np.ndarray) -> np.ndarray:
        """The inverse of g for any numbers, NaN for NaN.

        :raises ValueError: if values are not finite.
        """
        with np.errstate(all="ignore"):
            found = np.clip(self._inverse(np.asarray(latent, dtype=np.float64)), self.low, self.high)
        bad = ~np.isnan(latent) & ~(np.abs(found) < _LARGEST)
        if bad.any():
            first = np.asarray(latent)[bad].flat[0]
            raise ValueError(
                f"transform: {self.words} gives {found[bad].flat[0]} for {first:.6g}, expected finite predictions; "
                "the data do not determine the tail. Try: transform='rank', or no transform"
            )
        return found

    def at_ends(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Flags of the observations at the lower end of the domain, and of those at the upper end."""
        below, above = self.ends
        none = np.zeros(np.shape(values), dtype=bool)
        return values <= self.low if below > -math.inf else none, values >= self.high if above < math.inf else none

    def latent(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The values for the model: z, or its mean if only a bound is known, and the variance of its error.

        :param values: observations, NaN at gaps.
        """
        latent, variance = self.forward(values), np.zeros(np.shape(values))
        for side, end, flags in zip((1.0, -1.0), self.ends, self.at_ends(values), strict=True):
            if flags.any():
                mean, own = _moments_below(side * end, side * self.centre, self.spread)
                latent[flags], variance[flags] = side * mean, own
        return latent, variance


def _moments_below(end: float, mean: float, deviation: float) -> tuple[float, float]:
    """Mean and variance of a normal variable that is at most `end`."""
    a = (end - mean) / deviation
    h = math.exp(-0.5 * a * a - 0.5 * math.log(2 * math.pi) - float(log_ndtr(a)))
    return mean - deviation * h, deviation**2 * max(1.0 - a * h - h * h, 0.0)


@dataclass(frozen=True)
class Power(Transform):
    """A power of the distance u from an end of the domain (Box & Cox 1964), or its logarithm, the power 0.

    g = s ((u / unit)^power - 1) / power,    u = y - low, s = 1    or    u = high - y, s = -1
    """

    power: float
    unit: float
    low: float = 0.0
    high: float = math.inf
    centre: float = 0.0
    spread: float = 1.0
    name: str = "boxcox"

    @property
    def words(self) -> str:
        return f"boxcox, power {self.power:.3g}" if self.name == "boxcox" else self.name

    @property
    def _from_above(self) -> bool:
        return self.low == -math.inf

    @property
    def ends(self) -> tuple[float, float]:
        end = -1.0 / self.power if self.power > 0 else -math.inf
        return (-math.inf, -end) if self._from_above else (end, math.inf)

    def _distance(self, values: np.ndarray) -> np.ndarray:
        return np.asarray((self.high - values if self._from_above else values - self.low) / self.unit)

    def forward(self, values: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore"):
            logs = np.log(self._distance(values))
        found = np.expm1(self.power * logs) / self.power if self.power > 0 else logs
        return -found if self._from_above else found

    def slope(self, values: np.ndarray) -> np.ndarray:
        return self._distance(values) ** (self.power - 1.0) / self.unit

    def _inverse(self, latent: np.ndarray) -> np.ndarray:
        own = -latent if self._from_above else latent
        logs = np.log1p(np.maximum(self.power * own, -1.0)) / self.power if self.power > 0 else own
        distance = self.unit * np.exp(logs)
        return np.asarray(self.high - distance if self._from_above else self.low + distance)


@dataclass(frozen=True)
class Logit(Transform):
    """The logarithm of the odds, ``g = log(u / (1 - u))`` with ``u = (y - low) / (high - low)``."""

    low: float = 0.0
    high: float = 1.0
    name: str = "logit"

    def forward(self, values: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore"):
            return np.asarray(np.log(values - self.low) - np.log(self.high - values))

    def slope(self, values: np.ndarray) -> np.ndarray:
        return np.asarray((self.high - self.low) / (values - self.low) / (self.high - values))

    def _inverse(self, latent: np.ndarray) -> np.ndarray:
        share = np.exp(-np.logaddexp(0.0, -latent))  # accurate for very small values too
        return np.asarray(self.low + (self.high - self.low) * share)
