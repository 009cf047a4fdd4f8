"""Times of any calendar as days since the first, with the mean length of a year in that calendar.

The calendar of a climate model may have 360 days per year. A yearly cycle with a period of 365.2425 days would
drift out of phase with its data within decades.
"""

import re
from datetime import date, timedelta
from typing import Any

import numpy as np

from gpytorch_gaps.grid.data import days_since

YEAR = 365.2425
"""Mean length of a Gregorian year, in days."""

_YEAR_DAYS = {  # mean length of a year, by CF calendar
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
_UNIT_DAYS = {  # months and years depend on the calendar
    **dict.fromkeys(("week", "weeks"), 7.0),
    **dict.fromkeys(("day", "days", "d"), 1.0),
    **dict.fromkeys(("hour", "hours", "hr", "hrs", "h"), 1 / 24),
    **dict.fromkeys(("minute", "minutes", "min", "mins"), 1 / 1440),
    **dict.fromkeys(("second", "seconds", "sec", "secs", "s"), 1 / 86400),
    **dict.fromkeys(("millisecond", "milliseconds", "msec", "msecs", "ms"), 1e-3 / 86400),
    **dict.fromkeys(("microsecond", "microseconds"), 1e-6 / 86400),
    **dict.fromkeys(("nanosecond", "nanoseconds"), 1e-9 / 86400),
}

_SINCE = re.compile(r"\s*(\w+)\s+since\s", re.IGNORECASE)
_TIME_NAMES = ("date", "day", "time", "datetime", "month", "yearmonth", "year_month", "yyyymm")

Times = tuple[np.ndarray, float]
"""Days since the first time, and the mean length of a year in days."""


def dates(name: str, array: np.ndarray, first: np.ndarray | None = None) -> Times | None:
    """Days from datetime64, timedelta64, or dates of Python or cftime; None for anything else.

    :param first: the date from which days are counted, in an array of one entry. Default: that of `array`.
    """
    first = array[:1] if first is None else first
    calendar = str(getattr(array[0], "calendar", "standard")) if _is_of_objects(array) else "standard"
    array, first = _as_durations(array, first), _as_durations(first, first)
    if array.dtype.kind not in "mM" or array.dtype.kind != first.dtype.kind:
        return None
    if np.isnat(array).any():
        raise ValueError(f"{name}: entry {int(np.isnat(array).argmax())} is NaT, expected times")
    if calendar not in _YEAR_DAYS:
        raise ValueError(f"{name}: got dates of the calendar {calendar!r}, expected one of {', '.join(_YEAR_DAYS)}")
    return days_since(array, first), _YEAR_DAYS[calendar]


def is_encoded(unit: str) -> bool:
    """Whether a unit is one of CF for times, such as "hours since 1850-01-01"."""
    return _SINCE.match(unit) is not None


def compact_dates(name: str, numbers: np.ndarray) -> np.ndarray | None:
    """Dates from integers such as 20200403, or 202004 if the name is that of a time; None for anything else."""
    digits = 6 if name.strip().lower() in _TIME_NAMES and numbers.max() < 1e6 else 8
    if (numbers != numbers.round()).any() or numbers.min() < 1500 * 10 ** (digits - 4):
        return None
    texts = [f"{int(number):d}" for number in numbers]
    if any(len(text) != digits or int(text[:4]) > 2300 for text in texts):
        return None
    try:
        return np.array([date(int(text[:4]), int(text[4:6]), int(text[6:] or 1)) for text in texts], "datetime64[D]")
    except ValueError:
        return None


def encoded_dates(numbers: np.ndarray, unit: str, calendar: str, first: float) -> Times | None:
    """Days from numbers in CF units, such as "hours since 1850-01-01"; None for other units and calendars.

    :param first: the number from which days are counted.
    """
    found = _SINCE.match(unit)
    year = _YEAR_DAYS.get(calendar.lower())
    if found is None or year is None:
        return None
    lengths = {**_UNIT_DAYS, "month": year / 12, "months": year / 12, "year": year, "years": year}
    days = lengths.get(found[1].lower())
    return None if days is None else ((numbers - first) * days, year)


def is_date(entry: Any) -> bool:
    """Whether an object is a date of Python or cftime."""
    return isinstance(entry, date) or hasattr(entry, "calendar")


def _is_of_objects(array: np.ndarray) -> bool:
    return array.dtype.kind == "O" and len(array) > 0


def _as_durations(array: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Converts objects that are dates to durations since `first`. Other arrays are returned unchanged."""
    if not _is_of_objects(array):
        return array
    if all(isinstance(entry, date) for entry in array):
        return array.astype("datetime64[us]")
    try:
        spans = [entry - first[0] for entry in array]
    except TypeError:
        return array
    if all(isinstance(span, timedelta) for span in spans):
        return np.array(spans, dtype="timedelta64[us]")
    return array
