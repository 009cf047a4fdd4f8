"""The rank transform: it maps quantiles of the data to those of a standard normal distribution.

Between its tails, g is piecewise linear through some empirical quantiles. Each tail is shifted log-normal,

    y = b + s (exp(k (z - c)) - 1) / k,    k >= 0.

It is fitted to the outermost tenth of the observations by least squares of relative errors. ``k = 0`` is a normal tail;
larger k are heavier tails. A tail that ends at a bound is ``y = low + (b - low) exp(k (z - c))``. If there are
observations at the bound, g ends there, at the quantile of their fraction.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri

from gpytorch_gaps.filling.transforms.transform import Transform

LEAST_DISTINCT = 10
"""Smallest number of distinct values inside the domain."""

_NUM_KNOTS = 60
_TAIL_SHARE, _MIN_TAIL, _MAX_TAIL_SHARE = 0.1, 20, 0.2  # observations of a tail: fraction, smallest number, limit
_SHAPES = np.linspace(0.0, 2.5, 51)  # values of k that are tried for an open tail
_LEAST_SLOPE = 1e-3  # smallest k of a tail that ends at a bound


@dataclass(frozen=True, eq=False)
class Tail:
    """A tail that starts at the point (c, b), in terms of ``x = z - c`` and ``t = y - b`` with positive signs.

    `side` is -1 for the lower tail and 1 for the upper one. `room` is the distance from b to the bound. If it is
    infinite, `scale` and `shape` are s and k; otherwise `shape` is k.
    """

    side: float
    c: float
    b: float
    shape: float
    scale: float
    room: float

    def value(self, latent: np.ndarray) -> np.ndarray:
        x = self.side * (latent - self.c)
        if self.room < math.inf:
            return np.asarray(self.b + self.side * self.room * -np.expm1(-self.shape * x))
        grown = np.expm1(self.shape * x) / self.shape if self.shape else x
        return np.asarray(self.b + self.side * self.scale * grown)

    def latent(self, values: np.ndarray) -> np.ndarray:
        t = self.side * (values - self.b)
        if self.room < math.inf:
            with np.errstate(divide="ignore"):
                return np.asarray(self.c - self.side * np.log1p(-t / self.room) / self.shape)
        x = np.log1p(self.shape * t / self.scale) / self.shape if self.shape else t / self.scale
        return np.asarray(self.c + self.side * x)

    def slope(self, values: np.ndarray) -> np.ndarray:
        """dz/dy."""
        t = self.side * (values - self.b)
        if self.room < math.inf:
            return np.asarray(1.0 / (self.shape * (self.room - t)))
        return np.asarray(1.0 / (self.scale + self.shape * t))


@dataclass(frozen=True, eq=False)
class Rank(Transform):
    """Normal scores: `knots` (2, n) are increasing points (z, y). There is no tail if the domain ends at a knot."""

    knots: np.ndarray
    tails: tuple[Tail | None, Tail | None]
    low: float = -math.inf
    high: float = math.inf
    name: str = "rank"

    @property
    def ends(self) -> tuple[float, float]:
        lower, upper = self.tails
        z = self.knots[0]
        return -math.inf if lower else float(z[0]), math.inf if upper else float(z[-1])

    def forward(self, values: np.ndarray) -> np.ndarray:
        z, y = self.knots
        return self._in_tails(np.interp(values, y, z), values, y, "latent")

    def _inverse(self, latent: np.ndarray) -> np.ndarray:
        z, y = self.knots
        return self._in_tails(np.interp(latent, z, y), latent, z, "value")

    def slope(self, values: np.ndarray) -> np.ndarray:
        z, y = self.knots
        slopes = np.diff(z) / np.diff(y)
        inner = slopes[np.clip(np.searchsorted(y, values, side="right") - 1, 0, len(slopes) - 1)]
        return self._in_tails(inner, values, y, "slope")

    def _in_tails(self, found: np.ndarray, at: np.ndarray, inside: np.ndarray, method: str) -> np.ndarray:
        """`found`, with entries from the given method of the tails if their `at` lies beyond the knots."""
        found = np.array(found, dtype=np.float64)
        for tail, flags in zip(self.tails, (at < inside[0], at > inside[-1]), strict=True):
            if tail is not None and np.any(flags):
                found[flags] = getattr(tail, method)(np.asarray(at)[flags])
        return found


def fit_rank(values: np.ndarray, low: float = -math.inf, high: float = math.inf) -> Rank:
    """The rank transform of some observations.

    :param values: (N,), without NaN, inside the bounds.
    :raises ValueError: if there are too few distinct values.

    >>> rank = fit_rank(np.exp(np.linspace(-2, 2, 99)), low=0.0)
    >>> bool((rank.inverse(np.array([-9.0, 0.0, 9.0])) > 0).all())
    True
    """
    ordered = np.sort(values)
    scores = ndtri((np.arange(len(ordered)) + 0.5) / len(ordered))
    inside = (ordered > low) & (ordered < high)
    distinct = len(np.unique(ordered[inside]))
    if distinct < LEAST_DISTINCT:
        raise ValueError(
            f"transform: 'rank' got {distinct} distinct values inside the bounds, expected {LEAST_DISTINCT} or more"
        )
    shares = np.mean(ordered <= low), np.mean(ordered >= high)
    y, z = ordered[inside], scores[inside]
    size = int(min(max(_TAIL_SHARE * len(y), _MIN_TAIL), _MAX_TAIL_SHARE * len(y)))
    first, last = 0 if shares[0] else size, len(y) - 1 if shares[1] else len(y) - 1 - size
    at = np.interp(np.linspace(z[first], z[last], _NUM_KNOTS), z, y)
    knots = _distinct(np.linspace(z[first], z[last], _NUM_KNOTS), at)
    for share, end, place in ((shares[0], low, 0), (shares[1], high, knots.shape[1])):
        if share:
            edge = float(ndtri(share)) if place == 0 else -float(ndtri(share))
            knots = np.insert(knots, place, [edge, end], axis=1)
    lower = None if shares[0] else _fit_tail(-1.0, knots[:, 0], z[:size], y[:size], low)
    upper = None if shares[1] else _fit_tail(1.0, knots[:, -1], z[len(z) - size :], y[len(y) - size :], high)
    return Rank(knots, (lower, upper), low, high)


def _distinct(z: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Points with increasing y. Points with equal y are replaced by one, at the mean of their z. shape: (2, n)"""
    unique, place = np.unique(y, return_inverse=True)
    return np.stack([np.bincount(place, z) / np.bincount(place), unique])


def _fit_tail(side: float, corner: np.ndarray, z: np.ndarray, y: np.ndarray, bound: float) -> Tail:
    """The tail that starts at a corner (c, b) and is closest to the given observations."""
    c, b = map(float, corner)
    x, t, room = side * (z - c), side * (y - b), side * (bound - b)
    x, t = x[x > 0], t[x > 0]
    if room < math.inf:
        logs = -np.log1p(-np.maximum(t, 0.0) / room)
        shape = max(float(x @ logs) / max(float(x @ x), 1e-12), _LEAST_SLOPE)
        return Tail(side, c, b, shape, 1.0, room)
    least = np.finfo(np.float64).eps * max(abs(b), 1e-300)
    weights = 1.0 / (float(np.median(t)) + t + least) ** 2  # errors of large values are large
    best: tuple[float, float, float] | None = None
    for shape in _SHAPES.tolist():
        grown = np.expm1(shape * x) / shape if shape else x
        scale = max(float((weights * grown) @ t) / max(float((weights * grown) @ grown), 1e-300), least)
        misfit = float(weights @ (t - scale * grown) ** 2)
        if best is None or misfit < best[0]:
            best = misfit, shape, scale
    assert best is not None
    return Tail(side, c, b, best[1], best[2], math.inf)
