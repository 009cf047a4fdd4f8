"""The meaning of the dimensions of an array, and the coordinates that the kernel of each dimension receives.

| kind | what it is | coordinates (p: the period) |
|---|---|---|
| number | numbers | as they are |
| time | dates of any calendar, durations, numbers in CF units such as "hours since 2000-01-01" | days since the first |
| latitude, longitude | by name, unit or standard name | degrees |
| circle | longitudes of a whole circle, months, days of the year, hours | ``p / 2 pi (cos, sin)(2 pi x / p)`` |
| group | several columns, such as a station's position | as they are |
| label | strings, or a few levels without coordinates, such as colour channels | 0, 1, .., m - 1 |
| position | anything else without coordinates | 0, 1, .., m - 1 |
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from gpytorch_gaps.filling.calendars import YEAR, dates, encoded_dates, is_date
from gpytorch_gaps.filling.encodings import Circle, Dates, Degrees, EncodedDates, Labels, Numbers

_MAX_LABELS = 4  # a length-scale cannot be learned from so few positions without coordinates,
_MIN_CELLS_PER_LABEL = 30  # but a free covariance can, if each position has so many cells

DAY = 1.0
"""Length of a day, in days."""

_LATITUDES = ("lat", "latitude", "degrees_north", "degree_north", "degreesn")
_LONGITUDES = ("lon", "long", "longitude", "degrees_east", "degree_east", "degreese")
_PERIODS = {"month": 12.0, "hour": 24.0, "dayofyear": YEAR, "day_of_year": YEAR, "doy": YEAR}  # of periodic axes


@dataclass(frozen=True, eq=False)
class Axis:
    """One dimension: its `name`, its `kind` as in the table above, and `points` (m, d), the inputs of its kernel."""

    name: str
    kind: str
    points: np.ndarray
    unit: str = ""
    year: float = YEAR
    """Mean length of a year in the calendar of an axis of times, in days."""
    encoding: Callable[[str, np.ndarray], np.ndarray] = Numbers()  # noqa: RUF009  a frozen dataclass itself
    """The function from coordinates of the user's to points."""
    coordinates: np.ndarray | None = None
    """The coordinates that the user gave, None where there are none."""

    @property
    def size(self) -> int:
        return len(self.points)

    @property
    def extent(self) -> float:
        """The largest difference of coordinates within one column."""
        return float(np.ptp(self.points, axis=0).max())

    @property
    def spacing(self) -> float:
        """Median distance between neighbours; the largest one if there are several columns."""
        if self.size == 1:
            return 1.0
        steps = np.diff(np.sort(self.points, axis=0), axis=0)
        steps = np.where(steps > 0, steps, np.nan)
        known = [np.nanmedian(column) for column in steps.T if np.isfinite(column).any()]
        return float(max(known, default=1.0))

    def at(self, positions: np.ndarray) -> "Axis":
        """The same axis with some of its points."""
        known = None if self.coordinates is None else self.coordinates[positions]
        return replace(self, points=self.points[positions], coordinates=known)

    def encode(self, coordinates: Any) -> np.ndarray:
        """Points of further coordinates, which are given as those of the axis were. shape: (m, d)

        :raises ValueError: if coordinates are of another kind, or labels that the axis does not have.
        """
        return self.encoding(self.name, _as_array(self.name, coordinates, getattr(self.encoding, "zone", None)))

    def __str__(self) -> str:
        where = f" {self.unit}" if self.unit else ""
        span = "" if self.kind in ("label", "group", "position", "circle") else f", {self.extent:.6g}{where}"
        return f"{self.name}: {self.size} {_PLURALS[self.kind]}{span}"


_PLURALS = {
    "number": "numbers",
    "time": "times",
    "latitude": "latitudes",
    "longitude": "longitudes",
    "circle": "points on a circle",
    "group": "points of several columns",
    "label": "labels",
    "position": "positions",
}


def describe_axes(
    shape: Sequence[int],
    axes: Sequence[Any] | None = None,
    names: Sequence[str] | None = None,
    attributes: Sequence[Mapping[str, Any]] | None = None,
) -> list[Axis]:
    """One :class:`Axis` per dimension.

    :param shape: sizes of the dimensions.
    :param axes: coordinates of each dimension, None where there are none.
    :param names: names of the dimensions.
    :param attributes: CF attributes of the coordinates, such as their units.
    :return: one description per dimension.
    :raises ValueError: if coordinates are not finite, not distinct, or not as many as the dimension is long.
    """
    if axes is not None and len(shape) == 1 and len(axes) == shape[0] and np.ndim(axes[0]) == 0 and axes[0] is not None:
        axes = [axes]  # for one dimension, the coordinates themselves are accepted
    if axes is not None and len(axes) != len(shape):
        raise ValueError(f"axes: got {len(axes)}, expected {len(shape)}, one for each dimension of values")
    coordinates = [None] * len(shape) if axes is None else axes
    names = [f"axis {i}" for i in range(len(shape))] if names is None else list(names)
    attributes = [{}] * len(shape) if attributes is None else attributes
    cells = math.prod(shape)
    described = zip(names, shape, coordinates, attributes, strict=True)
    return [_describe(name, size, cells // max(size, 1), *known) for name, size, *known in described]


def _describe(name: str, size: int, cells_each: int, coordinates: Any, attributes: Mapping[str, Any]) -> Axis:
    array = np.empty(0, object) if coordinates is None else _as_array(name, coordinates)
    if coordinates is not None and len(array) != size:
        raise ValueError(f"{name}: got {len(array)} coordinates, expected {size}, as values has along this dimension")
    if coordinates is not None:
        return replace(_describe_known(name, array, coordinates, attributes), coordinates=array)
    few = 1 < size <= _MAX_LABELS and cells_each >= _MIN_CELLS_PER_LABEL
    points = np.arange(size, dtype=np.float64).reshape(size, 1)
    if few:
        return Axis(name, "label", points, encoding=Labels(tuple(map(str, range(size)))))
    return Axis(name, "position", points)


def _describe_known(name: str, array: np.ndarray, coordinates: Any, attributes: Mapping[str, Any]) -> Axis:
    times = dates(name, array)
    if times is not None:
        return _times(name, Dates(array[:1], getattr(coordinates, "tz", None)), *times)
    if array.dtype.kind in "iufb":
        return _numeric(name, array, attributes)
    _check_labels(name, array)
    labels = Labels(tuple(map(str, array)))
    return Axis(name, "label", labels(name, array), encoding=labels)


def _numeric(name: str, array: np.ndarray, attributes: Mapping[str, Any]) -> Axis:
    unit, calendar = str(attributes.get("units", "")), str(attributes.get("calendar", "standard"))
    words = {name.strip().lower(), unit.strip().lower(), str(attributes.get("standard_name", "")).strip().lower()}
    columns = array.shape[1] if array.ndim == 2 else 1
    points = Numbers(columns)(name, array)
    axis = _checked(Axis(name, "group" if columns > 1 else "number", points, unit, encoding=Numbers(columns)))
    if axis.kind == "group":
        return axis
    first = float(points[0, 0]) if len(points) else 0.0
    times = encoded_dates(points[:, 0], unit, calendar, first)
    if times is not None:
        return _times(name, EncodedDates(first, unit, calendar), *times)
    if words.intersection(_LATITUDES) and points.min() >= -90.01 and points.max() <= 90.01:
        return replace(axis, kind="latitude", unit="degrees")
    if words.intersection(_LONGITUDES) and axis.extent <= 360:
        around = axis.extent + 1.5 * axis.spacing >= 360 and axis.size > 2
        start = float(points.min() + points.max()) / 2 - 180
        open_ended = replace(axis, kind="longitude", unit="degrees", encoding=Degrees(start))
        return _circle(axis, 360.0) if around else open_ended
    # by name, not by unit: a lead time of 18 hours is not periodic
    period = next((_PERIODS[word] for word in words - {unit.strip().lower()} if word in _PERIODS), None)
    if period is not None and 0.5 * period < axis.extent <= period + 1 and axis.size > 2:
        return _circle(axis, period)
    return axis


def _times(name: str, encoding: Dates | EncodedDates, days: np.ndarray, year: float) -> Axis:
    return _checked(Axis(name, "time", days.reshape(-1, 1), "days", year, encoding))


def _check_labels(name: str, array: np.ndarray) -> None:
    """Refuses missing and repeated labels, tuples, and dates of several calendars."""
    for at, entry in enumerate(array):
        if isinstance(entry, tuple):
            raise ValueError(
                f"{name}: entry {at} is {entry}, of several levels; expected numbers, times or labels. Unstack it, so "
                "each level is a dimension"
            )
        missing = not isinstance(entry, str) and str(entry) in ("nan", "NaT", "None", "<NA>")
        if missing or is_date(entry):
            raise ValueError(f"{name}: entry {at} is {entry}, expected labels, or dates of one calendar throughout")
    labels = [str(label) for label in array]
    if len(set(labels)) < len(labels):
        twice = next(label for label in labels if labels.count(label) > 1)
        raise ValueError(f"{name}: got the label {twice!r} twice, expected each once")


def _circle(axis: Axis, period: float) -> Axis:
    """The axis as points on a circle, unless two of them coincide, such as 0 and 360 degrees."""
    circle = Circle(period)
    points = circle(axis.name, axis.points)
    if axis.size > 1 and len(np.unique(points.round(9), axis=0)) < axis.size:
        return replace(axis, unit="")
    return replace(axis, kind="circle", points=points, unit="", encoding=circle)


def _checked(axis: Axis) -> Axis:
    _, first, counts = np.unique(axis.points, axis=0, return_index=True, return_counts=True)
    if (counts > 1).any():
        value = axis.points[first[counts > 1].min()]
        raise ValueError(f"{axis.name}: got the coordinate {value.squeeze()} twice, expected distinct ones")
    return axis


def _as_array(name: str, coordinates: Any, zone: Any = None) -> np.ndarray:
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
    """A pandas index of dates, in `zone` where they have none."""
    import pandas

    index = pandas.DatetimeIndex(dates)
    return index.tz_localize(zone) if index.tz is None else index
