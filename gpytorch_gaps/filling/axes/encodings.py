"""Encodings: functions from the user's coordinates to the points that the kernel of an axis receives.

The same object encodes the coordinates of an axis and further ones, such as those of a forecast. It maps an array of
coordinates (m,) or (m, d) to points (m, d'). See the table in :mod:`gpytorch_gaps.filling.axes.axis`.
"""

import difflib
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gpytorch_gaps.filling.axes.calendars import compact_dates, dates, encoded_dates
from gpytorch_gaps.utils.date_texts import parse_dates

_PARTS_OF_A_DATE = ("year", "month", "day", "hour", "minute", "second", "microsecond")


@dataclass(frozen=True)
class Numbers:
    """Unchanged numbers, in one or several columns."""

    columns: int = 1

    def __call__(self, name: str, array: np.ndarray) -> np.ndarray:
        return _numbers(name, array, self.columns)


@dataclass(frozen=True)
class Degrees:
    """Degrees of longitude, moved into an interval of 360 degrees."""

    start: float

    def __call__(self, name: str, array: np.ndarray) -> np.ndarray:
        return _wrapped(_numbers(name, array, 1), self.start, 360.0)


@dataclass(frozen=True)
class Circle:
    """Coordinates on a circle, moved into the period that begins at `start`."""

    period: float
    start: float = 0.0

    def __call__(self, name: str, array: np.ndarray) -> np.ndarray:
        return _wrapped(_numbers(name, array, 1), self.start, self.period)


def _wrapped(numbers: np.ndarray, start: float, period: float) -> np.ndarray:
    """Moves numbers into the interval from `start` to ``start + period``. Both ends belong to it."""
    outside = (numbers < start) | (numbers > start + period)
    return np.where(outside, start + (numbers - start) % period, numbers)


@dataclass(frozen=True, eq=False)
class Dates:
    """Days since a date or duration, of any calendar.

    :param first: that date, in an array of one entry.
    :param zone: the time zone of dates without one; None if dates have no zones.
    """

    first: np.ndarray
    zone: Any = None

    def __call__(self, name: str, array: np.ndarray) -> np.ndarray:
        is_text = _is_text(array)
        of_calendar = self.first.dtype.kind == "O" and hasattr(self.first[0], "calendar")
        try:
            if not of_calendar:
                array = as_dates(name, array)
            elif is_text or (of_calendar and array.dtype.kind == "M"):
                texts = array if is_text else array.astype("datetime64[us]").astype(str)
                array = np.array([_same_calendar(self.first[0], str(text)) for text in texts])
            found = dates(name, array, self.first)
        except (TypeError, ValueError):  # not a date, or a date of another calendar
            found = None
        if found is None:
            raise ValueError(f"{name}: got {array.flat[0]!s}, expected times of the same kind as {self.first[0]!s}")
        return found[0].reshape(-1, 1)


def _same_calendar(like: Any, text: str) -> Any:
    """A date of cftime in ISO 8601, such as "2000-02-30 12:00", in the calendar of `like`."""
    parts = dict(zip(_PARTS_OF_A_DATE, map(int, re.findall(r"\d+", text)), strict=False))
    start_of_year = {**dict.fromkeys(("month", "day"), 1), **dict.fromkeys(_PARTS_OF_A_DATE[3:], 0)}
    return like.replace(**{**start_of_year, **parts})


@dataclass(frozen=True)
class EncodedDates:
    """Days since the first of some numbers in CF units, such as "hours since 1850-01-01"."""

    first: float
    unit: str
    calendar: str

    def __call__(self, name: str, array: np.ndarray) -> np.ndarray:
        found = encoded_dates(_numbers(name, array, 1)[:, 0], self.unit, self.calendar, self.first)
        assert found is not None
        return found[0].reshape(-1, 1)


@dataclass(frozen=True)
class Labels:
    """The position of each label among those of an axis."""

    labels: tuple[str, ...]

    def __call__(self, name: str, array: np.ndarray) -> np.ndarray:
        code = {label: float(at) for at, label in enumerate(self.labels)}
        for entry in map(str, array):
            if entry not in code:
                near = difflib.get_close_matches(entry, self.labels, n=3) or self.labels[:3]
                more = ", ..." if len(near) < len(self.labels) else ""
                raise ValueError(f"{name}: got the label {entry!r}, expected one of {', '.join(near)}{more}")
        return np.array([[code[str(entry)]] for entry in array])


def _is_text(array: np.ndarray) -> bool:
    return array.dtype.kind in "UT" or (array.dtype.kind == "O" and all(isinstance(one, str) for one in array))


def as_dates(name: str, array: np.ndarray) -> np.ndarray:
    """Converts texts and digits that are dates to dates. Other arrays are returned unchanged.

    :raises ValueError: if the order of day and month is ambiguous.
    """
    if not len(array) or array.ndim != 1:
        return array
    if array.dtype.kind in "iuf":
        found = compact_dates(name, array)
    else:
        found = parse_dates(name, [str(text) for text in array]) if _is_text(array) else None
    return array if found is None else found


def _numbers(name: str, array: np.ndarray, columns: int) -> np.ndarray:
    """Finite numbers in the given number of columns. shape: (m, columns)"""
    if array.dtype.kind not in "iufb" or array.shape[1:] not in (() if columns == 1 else (columns,), (columns,)):
        shape = "(m,)" if columns == 1 else f"(m, {columns})"
        raise ValueError(f"{name}: got {array.dtype} of shape {array.shape}, expected numbers of shape {shape}")
    points = np.array(array, dtype=np.float64).reshape(len(array), columns)
    bad = ~np.isfinite(points).all(axis=1)
    if bad.any():
        at = int(bad.argmax())
        raise ValueError(f"{name}: entry {at} is {points[at].squeeze()}, expected finite coordinates")
    return points


def as_array(name: str, coordinates: Any, zone: Any = None) -> np.ndarray:
    """Coordinates as an array, (m,) or (m, d).

    :param zone: the time zone of dates without one.
    """
    if isinstance(coordinates, torch.Tensor):
        coordinates = coordinates.detach().cpu()
    if hasattr(coordinates, "iloc"):  # a pandas Series, whose index is not used
        coordinates = coordinates.array
    if hasattr(coordinates, "to_timestamp"):  # pandas periods
        coordinates = coordinates.to_timestamp()
    if zone is not None:
        coordinates = _in_zone(coordinates, zone)
    if getattr(coordinates, "tz", None) is not None:  # days are counted in UTC
        coordinates = coordinates.tz_convert(None)
    array = np.asarray(coordinates)
    if array.ndim not in (1, 2) or (array.ndim == 2 and array.dtype.kind not in "iuf") or array.dtype.kind == "c":
        raise ValueError(f"{name}: got {array.dtype} of shape {array.shape}, expected coordinates (m,) or (m, d)")
    return array


def _in_zone(dates: Any, zone: Any) -> Any:
    """A pandas index of dates. Dates without a zone are in `zone`."""
    import pandas

    index = pandas.DatetimeIndex(dates)
    return index.tz_localize(zone) if index.tz is None else index
