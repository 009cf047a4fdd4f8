"""A transform by two functions of the user, checked on the data."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from gpytorch_gaps.filling.transforms.transform import Transform

_ROUND_TRIP = 1e-6  # allowed difference of ``inverse(forward(y))`` and y, as a fraction of the range of the data
_BEYOND, _NUM_CHECKED = 3.0, 200  # the inverse is checked up to 3 standard deviations beyond the data, at 200 places
_STEP = 1e-5  # step for derivatives, as a fraction of the range of the data


class Functions(Transform):
    """g and its inverse as functions of arrays. If g decreases, its sign is changed.

    :param forward: g.
    :param inverse: its inverse.
    :param values: (N,), the observations, on which both are checked.
    :raises ValueError: if g is not finite or not monotone on them, if `inverse` is not its inverse, or if it decreases
        or is undefined near the data.
    """

    name = "your functions"

    def __init__(
        self, forward: Callable, inverse: Callable, values: np.ndarray, low: float = -math.inf, high: float = math.inf
    ) -> None:
        self._functions, self.low, self.high, self._side = (forward, inverse), low, high, 1.0
        ordered = np.unique(values)
        self._range = float(np.ptp(ordered))
        latent = self.forward(ordered)
        if not np.isfinite(latent).all():
            at = ordered[~np.isfinite(latent)][0]
            raise ValueError(f"transform: forward({at:.6g}) is not finite, expected a number for every observation")
        if len(ordered) > 1 and latent[0] > latent[-1]:
            self._side, latent = -1.0, -latent
        flat = np.flatnonzero(~(np.diff(latent) > 0))
        if len(flat):
            a, b = ordered[flat[0] : flat[0] + 2]
            raise ValueError(
                f"transform: forward is not monotone between {a:.6g} and {b:.6g}, expected a function that only "
                "increases, or only decreases, on the data"
            )
        off = np.abs(self._inverse(latent) - ordered)
        if not (off <= _ROUND_TRIP * (self._range or 1.0)).all():
            worst = ordered[int(np.argmax(np.where(np.isnan(off), math.inf, off)))]
            back = float(self._inverse(self.forward(np.array([worst])))[0])
            raise ValueError(
                f"transform: inverse(forward({worst:.6g})) is {back:.6g}, expected {worst:.6g}: the second function "
                "must be the inverse of the first"
            )
        self._check_beyond(latent)

    def _check_beyond(self, latent: np.ndarray) -> None:
        """Raises if the inverse decreases or is undefined near the data, where predictions may be."""
        reach = _BEYOND * float(np.std(latent))
        places = np.linspace(latent[0] - reach, latent[-1] + reach, _NUM_CHECKED)
        back = self._inverse(places)
        if np.isnan(back).any():
            at = self._side * places[np.isnan(back)][0]
            raise ValueError(
                f"transform: inverse({at:.6g}) is nan, expected a number, also outside the data: predictions may be "
                "there. For the root of a square, use lambda z: np.sqrt(np.maximum(z, 0))"
            )
        falls = np.flatnonzero(np.diff(back) < 0)
        if len(falls):
            a, b = self._side * places[falls[0] : falls[0] + 2]
            raise ValueError(
                f"transform: inverse decreases between {a:.6g} and {b:.6g}, expected an increasing function, also "
                "outside the data: predictions may be there. For a square root, use lambda z: np.maximum(z, 0) ** 2"
            )

    def forward(self, values: np.ndarray) -> np.ndarray:
        return self._side * _called(self._functions[0], values, "forward")

    def _inverse(self, latent: np.ndarray) -> np.ndarray:
        return _called(self._functions[1], self._side * latent, "inverse")

    def slope(self, values: np.ndarray) -> np.ndarray:
        step = _STEP * self._range
        return (self.forward(values + step) - self.forward(values - step)) / (2 * step)


def _called(function: Callable, values: np.ndarray, name: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        found: Any = np.asarray(function(np.array(values, dtype=np.float64)))
    if found.shape != np.shape(values) or found.dtype.kind not in "iuf":
        raise ValueError(
            f"transform: {name} returned {found.dtype} of shape {found.shape} for an array of shape "
            f"{np.shape(values)}, expected real numbers of the same shape"
        )
    return found.astype(np.float64)
