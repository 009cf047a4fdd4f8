"""Runs of gaps along an axis, and their longest lengths: ``max_gap`` of ``fill_gaps``.

A length in cells is the number of consecutive gaps. A length in units is the difference between the coordinates of the
observations on both sides of a run, as in ``max_gap`` of xarray's ``interpolate_na``. At the end of an axis, the
coordinate of the last gap replaces the missing observation. Along a circle, runs cross the seam.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np

from gpytorch_gaps.filling.axes.axis import Axis
from gpytorch_gaps.utils.checks import check_number

_DAYS_PER_UNIT = {"week": 7.0, "day": 1.0, "hour": 1 / 24, "minute": 1 / 1440, "second": 1 / 86400}
_SHORT_TIMES = {"w": "week", "d": "day", "h": "hour", "hr": "hour", "min": "minute", "s": "second", "sec": "second"}
_QUANTITY = re.compile(r"\s*([0-9.]+(?:e[-+]?\d+)?)\s*(\S.*?)\s*", re.IGNORECASE)
_ROUNDING = 1e-9  # relative rounding of lengths in units
_BLOCK_CELLS = 4_000_000  # number of cells that are processed at once


@dataclass(frozen=True)
class MaxGap:
    """The longest run of gaps along one axis that is filled: `length` cells, or units of the axis."""

    axis: int
    length: float
    in_cells: bool
    name: str
    """The length in words, such as "5 cells along time"."""


def read_max_gap(number: int, axis: Axis, given: Any) -> MaxGap:
    """The option for one axis: an integer for cells, or a text or a timedelta for a length in units.

    :raises ValueError: if it is neither of these, or if the axis has no order.
    """
    argument = f"max_gap: {axis.name}"
    if axis.kind in ("label", "group"):
        raise ValueError(f"{argument} is an axis of {axis.kind}s, which have no order; expected an axis of numbers")
    if isinstance(given, int | np.integer) and not isinstance(given, bool):
        cells = int(check_number(argument, int(given), above=0))
        return MaxGap(number, cells, True, f"{cells} cell{'s' * (cells != 1)} along {axis.name}")
    if isinstance(given, timedelta | np.timedelta64):
        days = given / timedelta(days=1) if isinstance(given, timedelta) else given / np.timedelta64(1, "D")
        given = f"{float(days):.15g} days"
    found = _QUANTITY.fullmatch(given) if isinstance(given, str) else None
    if found is None:
        raise ValueError(
            f"{argument}: got {given!r}, expected an integer, which counts cells, or a length with its unit, such as "
            f"{_example(axis)!r}"
        )
    length = check_number(argument, float(found[1]), above=0) * _factor(argument, axis, found[2])
    return MaxGap(number, length, False, f"{given.strip()} along {axis.name}")


def _example(axis: Axis) -> str:
    return "5 days" if axis.kind == "time" else f"5 {axis.unit or 'units'}"


def _factor(argument: str, axis: Axis, unit: str) -> float:
    """How many units of the coordinates of the axis one `unit` is."""
    plain = _singular(unit)
    if axis.kind == "time":
        known = _SHORT_TIMES.get(plain, plain)
        if known in _DAYS_PER_UNIT:
            return _DAYS_PER_UNIT[known]
        raise ValueError(f"{argument}: got the unit {unit!r}, expected one of {', '.join(_DAYS_PER_UNIT)}")
    own = {"unit"} | ({_singular(axis.unit)} if axis.unit else set())
    if "degree" in _singular(axis.unit):
        own |= {"degree", "deg", "°"}
    if plain not in own:
        raise ValueError(f"{argument}: got the unit {unit!r}, expected one of {', '.join(sorted(own))}")
    return 1.0


def _singular(unit: str) -> str:
    plain = unit.strip().lower()
    return plain.removesuffix("s") if len(plain) > 2 else plain


def in_short_runs(gaps: np.ndarray, axes: Sequence[Axis], limits: Sequence[MaxGap]) -> np.ndarray:
    """Flags of the cells that do not lie in a run of gaps longer than one of the limits.

    :param gaps: flags of the gaps.
    :param axes: the axes of the array.
    :param limits: the longest run along some of the axes.
    """
    short = np.ones(gaps.shape, dtype=bool)
    for limit in limits:
        lines = np.moveaxis(gaps, limit.axis, -1)
        result = np.moveaxis(short, limit.axis, -1)  # a view
        order, x, period = _in_order(axes[limit.axis])
        step = max(1, _BLOCK_CELLS // max(1, math.prod(lines.shape[1:]))) if lines.ndim > 1 else 1
        for start in range(0, len(lines) if lines.ndim > 1 else 1, step):
            block = (slice(start, start + step),) if lines.ndim > 1 else ()
            sorted_lines = lines[block][..., order]
            length = _run_lengths(sorted_lines, np.arange(len(x)) if limit.in_cells else x, limit.in_cells, period)
            kept = ~sorted_lines | (length <= limit.length * (1 + _ROUNDING))
            within = np.empty_like(kept)
            within[..., order] = kept
            result[block] &= within
    return short


def _in_order(axis: Axis) -> tuple[np.ndarray, np.ndarray, float | None]:
    """The order of the coordinates of an axis, the coordinates in this order, and the period of a circle."""
    x = axis.points[:, 0] if axis.period is None else axis.points[:, 0] % axis.period
    order = np.argsort(x, kind="stable")
    return order, x[order], axis.period


def _run_lengths(gaps: np.ndarray, x: np.ndarray, in_cells: bool, period: float | None) -> np.ndarray:
    """The length of each cell's run of gaps along the last axis. Its coordinates x increase."""
    size = len(x)
    if period is not None:  # use three periods, and return the middle one
        step = size if in_cells else period
        rounds = np.concatenate([x - step, x, x + step])
        return _run_lengths(np.concatenate([gaps] * 3, axis=-1), rounds, in_cells, None)[..., size : 2 * size]
    at = np.arange(size, dtype=np.int32)
    before = np.maximum.accumulate(np.where(gaps, np.int32(-1), at), axis=-1)
    after = np.minimum.accumulate(np.where(gaps, np.int32(size), at)[..., ::-1], axis=-1)[..., ::-1]
    return after - before - 1 if in_cells else x[np.minimum(after, size - 1)] - x[np.maximum(before, 0)]
