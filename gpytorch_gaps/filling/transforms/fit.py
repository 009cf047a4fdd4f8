"""The choice of a transform, from its name or from bounds, and its parameters, from the observations."""

import math
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize, minimize_scalar
from scipy.special import log_ndtr

from gpytorch_gaps.filling.transforms.functions import Functions
from gpytorch_gaps.filling.transforms.rank import LEAST_DISTINCT, fit_rank
from gpytorch_gaps.filling.transforms.transform import Logit, Power, Transform
from gpytorch_gaps.utils.checks import check_number

NAMES = ("log", "logit", "boxcox", "rank", "auto")

_MOST_POWER = 2.0
_LEAST_POWER_OF_MASS = 0.1  # smallest power if there are observations at the end of the domain, where log is infinite
_NEARLY_LOG = 0.02  # a smaller power is replaced by log


class Bounds(NamedTuple):
    """The ends of the domain, infinite where there is none."""

    low: float = -math.inf
    high: float = math.inf


class FittedTransform(NamedTuple):
    """A transform, None for unchanged data, and the reason for its choice, empty if the user named it."""

    transform: Transform | None
    why: str = ""


UNTRANSFORMED = FittedTransform(None)
"""No transform."""


def check_transform(transform: Any, bounds: Any) -> None:
    """Raises a ValueError if the arguments of ``fill_gaps`` are not a transform and bounds."""
    read_bounds(bounds)
    is_pair = isinstance(transform, tuple | list) and len(transform) == 2 and all(map(callable, transform))
    if transform is not None and transform not in NAMES and not is_pair:
        raise ValueError(
            f"transform: got {transform!r}, expected one of {', '.join(map(repr, NAMES))}, a pair of functions "
            "(forward, inverse), or None"
        )


def read_bounds(given: Any) -> Bounds | None:
    """The argument ``bounds`` of ``fill_gaps``."""
    if given is None:
        return None
    if not isinstance(given, tuple | list) or len(given) != 2 or all(one is None for one in given):
        raise ValueError(f"bounds: got {given!r}, expected a pair such as (0, None), (None, 100) or (0, 1)")
    low, high = (None if one is None else check_number("bounds", one) for one in given)
    if low is not None and high is not None and low >= high:
        raise ValueError(f"bounds: got {tuple(given)}, expected the lower bound first")
    return Bounds(-math.inf if low is None else low, math.inf if high is None else high)


def fit_transform(asked: Any, given: Any, values: np.ndarray) -> FittedTransform:
    """The transform of the given name, or the one for the given bounds.

    :param asked: the argument ``transform`` of ``fill_gaps``, except ``"auto"``.
    :param given: the argument ``bounds``.
    :param values: (N,), the observations, without NaN.
    :raises ValueError: if the transform is not defined for all of them.
    """
    check_transform(asked, given)
    bounds = read_bounds(given)
    if bounds is not None:
        _require_inside(values, bounds)
    if asked is None:
        return UNTRANSFORMED if bounds is None else _by_bounds(values, bounds)
    if asked == "rank":
        return FittedTransform(fit_rank(values, *(bounds or natural_bounds(values))))
    if asked == "logit":
        return FittedTransform(_logit(values, bounds or Bounds(0.0, 1.0)))
    if asked in ("log", "boxcox"):
        bounds = bounds or Bounds(0.0)
        if math.isfinite(bounds.low) and math.isfinite(bounds.high):
            raise ValueError(f"transform: got {asked!r} with two bounds, expected one; for two, 'logit' or 'rank'")
        return FittedTransform(_log(values, bounds) if asked == "log" else fit_power(values, *bounds))
    forward, inverse = asked
    return FittedTransform(Functions(forward, inverse, values, *(bounds or Bounds())))


def candidates(given: Any, values: np.ndarray) -> list[Transform | None]:
    """The transforms that ``"auto"`` compares. Without bounds, the first is None, for unchanged data.

    :param given: the argument ``bounds`` of ``fill_gaps``.
    :param values: (N,), the observations, without NaN.
    """
    bounds = read_bounds(given)
    found: list[Transform | None] = [None] if bounds is None else []
    if bounds is not None:
        _require_inside(values, bounds)
    bounds = bounds or natural_bounds(values)
    ends = [math.isfinite(one) for one in bounds]
    on_end = bool(np.any((values <= bounds.low) | (values >= bounds.high)))
    if all(ends) and not on_end:
        found.append(Logit(*bounds))
    if ends[0] != ends[1]:
        power = fit_power(values, *bounds)
        found += [power] if on_end or power.power > _NEARLY_LOG else []
        found += [] if on_end else [_log(values, bounds)]
    inside = values[(values > bounds.low) & (values < bounds.high)]
    if len(np.unique(inside)) >= LEAST_DISTINCT:
        found.append(fit_rank(values, *bounds))
    if not found:
        raise ValueError(f"transform: got 'auto' and bounds {given}, but no transform fits the data. Try: other bounds")
    return found


def natural_bounds(values: np.ndarray) -> Bounds:
    """The lower bound is zero if no value is negative."""
    return Bounds(0.0) if (values >= 0).all() else Bounds()


def _by_bounds(values: np.ndarray, bounds: Bounds) -> FittedTransform:
    """The transform for data within bounds."""
    named = f"bounds ({', '.join('None' if math.isinf(one) else f'{one:g}' for one in bounds)})"
    if np.any((values <= bounds.low) | (values >= bounds.high)):
        return FittedTransform(fit_rank(values, *bounds), f"for {named}, with observations on a bound")
    if math.isfinite(bounds.low) and math.isfinite(bounds.high):
        return FittedTransform(Logit(*bounds), f"for {named}")
    return FittedTransform(_log(values, bounds), f"for {named}")


def _require_inside(values: np.ndarray, bounds: Bounds) -> None:
    outside = values[(values < bounds.low) | (values > bounds.high)]
    if len(outside):
        raise ValueError(
            f"bounds: got [{bounds.low:g}, {bounds.high:g}], and {len(outside):,} observations outside of it, such as "
            f"{outside[0]:.6g}; expected none. Try untrusted= for these"
        )


def _log(values: np.ndarray, bounds: Bounds) -> Power:
    distance = _distances(values, bounds)
    if (distance <= 0).any():
        beyond = f"above {bounds.low:g}" if math.isfinite(bounds.low) else f"below {bounds.high:g}"
        hint = "'boxcox' or 'rank', which allow values at the bound" if (distance >= 0).all() else "'rank', or bounds="
        raise ValueError(
            f"transform: 'log' got {values[distance <= 0][0]:.6g}, expected observations {beyond}; try {hint}"
        )
    return Power(0.0, _unit(distance), *bounds, name="log")


def _logit(values: np.ndarray, bounds: Bounds) -> Logit:
    if not (math.isfinite(bounds.low) and math.isfinite(bounds.high)):
        raise ValueError("transform: got 'logit' with one bound, expected two, such as bounds=(0, 1); for one, 'log'")
    bad = values[(values <= bounds.low) | (values >= bounds.high)]
    if len(bad):
        raise ValueError(
            f"transform: 'logit' got {bad[0]:.6g}, expected observations strictly between {bounds.low:g} and "
            f"{bounds.high:g}; try bounds=, or 'rank', which allows values at a bound"
        )
    return Logit(*bounds)


def fit_power(values: np.ndarray, low: float = 0.0, high: float = math.inf) -> Power:
    """The Box-Cox transform with the power that maximises the likelihood, for independent normal z.

    Values at the end of the domain have the likelihood ``P(z <= g(low))``. The power is between 0 and 2.

    :param values: (N,), without NaN.
    :raises ValueError: if values are outside the domain.

    >>> fit_power(np.linspace(1, 5, 99) ** 3).power < 0.6
    True
    """
    distance = _distances(values, Bounds(low, high))
    if (distance < 0).any():
        raise ValueError(
            f"transform: 'boxcox' got {values[distance < 0][0]:.6g}, expected observations of at least 0; try bounds=, "
            "such as (-5, None), or 'rank'"
        )
    inside = distance[distance > 0]
    if not len(inside):
        raise ValueError("transform: 'boxcox' got only values at the bound, expected some inside")
    unit = _unit(inside)
    logs, count = np.log(inside / unit), len(distance) - len(inside)
    fitted = _censored_power(logs, count) if count else _plain_power(logs)
    power, centre, spread = fitted
    side = -1.0 if low == -math.inf else 1.0
    return Power(power, unit, low, high, side * centre, spread)


def _plain_power(logs: np.ndarray) -> tuple[float, float, float]:
    """Power, mean and standard deviation of z that maximise the likelihood.

    -log L = N log sd(z) - (power - 1) sum log u
    """

    def loss(power: float) -> float:
        return math.log(max(float(np.std(_powers(logs, power))), 1e-300)) - power * float(logs.mean())

    found = minimize_scalar(loss, bounds=(0.0, _MOST_POWER), method="bounded", options={"xatol": 1e-4})
    power = float(found.x) if found.x > _NEARLY_LOG else 0.0
    z = _powers(logs, power)
    return power, float(z.mean()), float(z.std())


def _censored_power(logs: np.ndarray, count: int) -> tuple[float, float, float]:
    """As :func:`_plain_power`, with `count` more values, for which only ``z <= -1 / power`` is known."""

    def loss(at: np.ndarray) -> float:
        power, centre, spread = float(at[0]), float(at[1]), math.exp(at[2])
        z = (_powers(logs, power) - centre) / spread
        below = float(log_ndtr((-1.0 / power - centre) / spread))
        return float(0.5 * z @ z) + len(logs) * float(at[2]) - power * float(logs.sum()) - count * below

    z = _powers(logs, 0.5)
    start = [0.5, float(z.mean()), math.log(max(float(z.std()), 1e-3))]
    limits = [(_LEAST_POWER_OF_MASS, _MOST_POWER), (None, None), (-20.0, 20.0)]
    found = minimize(loss, start, method="L-BFGS-B", bounds=limits).x
    return float(found[0]), float(found[1]), math.exp(found[2])


def _powers(logs: np.ndarray, power: float) -> np.ndarray:
    return np.asarray(np.expm1(power * logs) / power if power > 0 else logs)


def _distances(values: np.ndarray, bounds: Bounds) -> np.ndarray:
    """Distances from the only end of the domain."""
    return bounds.high - values if bounds.low == -math.inf else values - bounds.low


def _unit(distances: np.ndarray) -> float:
    """The geometric mean, so that results do not depend on the units of the data."""
    return float(np.exp(np.mean(np.log(distances))))
