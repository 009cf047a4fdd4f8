"""Times of any calendar as days since the first, with the length of a year, by which cycles are looked for.

A year of a climate model's calendar may have 360 days: looked for at 365.2425, its cycle drifts out of phase within
some decades, and is not found.
"""

import re
from datetime import date, timedelta
from typing import Any

import numpy as np

from gpytorch_gaps.grid.data import days_since_first

YEAR = 365.2425  # days
_YEARS = {  # mean length, by CF calendar
    "standard": YEAR,
    "gregorian": YEAR,
    "proleptic_gregorian": YEAR,
    "julian": 365.25,
    "noleap": 365.0,
    "365_day": 365.0,
    "all_leap": 366.0,
    "366_day": 366.0,
    "360_day": 360.0,
}
_UNITS = {  # in days; months and years follow the calendar
    **dict.fromkeys(("week", "weeks"), 7.0),
    **dict.fromkeys(("day", "days", "d"), 1.0),
    **dict.fromkeys(("hour", "hours", "hr", "hrs", "h"), 1 / 24),
    **dict.fromkeys(("minute", "minutes", "min", "mins"), 1 / 1440),
    **dict.fromkeys(("second", "seconds", "sec", "secs", "s"), 1 / 86400),
    **dict.fromkeys(("millisecond", "milliseconds", "msec", "msecs", "ms"), 1e-3 / 86400),
    **dict.fromkeys(("microsecond", "microseconds"), 1e-6 / 86400),
    **dict.fromkeys(("nanosecond", "nanoseconds"), 1e-9 / 86400),
}

Times = tuple[np.ndarray, float]
"""Days since the first, and the days of a year."""


def dates(name: str, array: np.ndarray) -> Times | None:
    """Times of datetime64, timedelta64, Python's dates or cftime's; None for anything else."""
    calendar = str(getattr(array[0], "calendar", "standard")) if _is_of_objects(array) else "standard"
    array = _as_durations(array)
    if array.dtype.kind not in "mM":
        return None
    if np.isnat(array).any():
        raise ValueError(f"{name}: entry {int(np.isnat(array).argmax())} is NaT, expected times")
    if calendar not in _YEARS:
        raise ValueError(f"{name}: got dates of the calendar {calendar!r}, expected one of {', '.join(_YEARS)}")
    return days_since_first(array), _YEARS[calendar]


def encoded_dates(numbers: np.ndarray, unit: str, calendar: str) -> Times | None:
    """Times of numbers in CF units, such as "hours since 1850-01-01"; None for other units and calendars."""
    found = re.match(r"\s*(\w+)\s+since\s", unit, re.IGNORECASE)
    year = _YEARS.get(calendar.lower())
    if found is None or year is None:
        return None
    lengths = {**_UNITS, "month": year / 12, "months": year / 12, "year": year, "years": year}
    days = lengths.get(found[1].lower())
    return None if days is None else ((numbers - numbers[:1]) * days, year)


def is_date(entry: Any) -> bool:
    """Whether one object is a date, of Python's or cftime's."""
    return isinstance(entry, date) or hasattr(entry, "calendar")


def _is_of_objects(array: np.ndarray) -> bool:
    return array.dtype.kind == "O" and len(array) > 0


def _as_durations(array: np.ndarray) -> np.ndarray:
    """Objects that are dates as durations since the first; what is not a date as it is."""
    if not _is_of_objects(array):
        return array
    if all(isinstance(entry, date) for entry in array):
        return array.astype("datetime64[us]")
    try:
        spans = [entry - array[0] for entry in array]
    except TypeError:
        return array
    if all(isinstance(span, timedelta) for span in spans):
        return np.array(spans, dtype="timedelta64[us]")
    return array
