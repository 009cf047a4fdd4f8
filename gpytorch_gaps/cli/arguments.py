"""Converts the values of options: types for ``argparse``. Imports only the standard library."""

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path

Condition = tuple[str, str, float]
"""The name of an array, a comparison and a number, such as ("qc", "!=", 0.0)."""

_CONDITION = re.compile(r"\s*(.*?\S)\s*(==|!=|<=|>=|<|>|&)\s*(\S+)\s*")


def integer(least: int) -> Callable[[str], int]:
    """A reader of integers of at least `least`."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"got {text!r}, expected an integer of at least {least}")
        return value

    return read


def positive(text: str) -> float:
    """A finite number above zero."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number above zero")
    return value


def max_gap(text: str) -> tuple[str | int, int | str]:
    """Parses ``AXIS=LENGTH`` into the axis, and a number of cells or a length with its unit."""
    axis, equals, length = text.partition("=")
    if not equals or not axis.strip() or not length.strip():
        raise argparse.ArgumentTypeError(f"got {text!r}, expected AXIS=LENGTH, such as time=5 or time='5 days'")
    return _axis(axis), int(length) if length.strip().isdigit() else length.strip()


def find_condition(text: str) -> Condition | None:
    """The condition in a text such as ``qc != 0``; None if it is not a condition."""
    found = _CONDITION.fullmatch(text)
    try:
        return (found[1], found[2], float(found[3])) if found else None
    except ValueError:
        return None


def condition(text: str) -> Condition:
    """A condition such as ``qc != 0``."""
    found = find_condition(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected NAME, a comparison and a number, such as 'qc != 0'")
    return found


def _axis(text: str) -> str | int:
    name = text.strip()
    return int(name) if name.lstrip("-").isdigit() else name


def period(text: str) -> tuple[str | int, float | None]:
    """The axis, and its period, or None for no cycle."""
    axis, equals, value = text.rpartition("=")
    if not equals or not axis.strip():
        raise argparse.ArgumentTypeError(f"got {text!r}, expected AXIS=PERIOD, such as time=365.2425")
    return _axis(axis), None if value.strip().lower() == "none" else positive(value)


def bounds(text: str) -> tuple[float | None, float | None]:
    """The smallest and the largest value, as in ``0,`` or ``0,1``."""
    low, comma, high = text.partition(",")
    try:
        found = tuple(float(one) if one.strip() else None for one in (low, high))
    except ValueError:
        found = (None, None)
    if not comma or found == (None, None):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected LOW,HIGH with one of them or both, such as 0, or 0,1")
    return found[0], found[1]


def quantile(text: str) -> tuple[float, Path]:
    """A probability, and the file for the quantiles."""
    level, equals, path = text.partition("=")
    try:
        probability = float(level)
    except ValueError:
        probability = math.nan
    if not equals or not path.strip() or not 0 < probability < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected P=FILE with P between 0 and 1, such as 0.975=high.nc")
    return probability, Path(path)
