"""What the dimensions of an array mean, and the coordinates that a kernel sees of each.

| kind | what it is | coordinates |
|---|---|---|
| number | numbers | as they are |
| time | dates of any calendar, durations, numbers in CF units such as "hours since 2000-01-01" | days since the first |
| latitude, longitude | by name, unit or standard name | degrees |
| circle | longitudes all around, months, days of the year, hours | ``p / 2 pi (cos, sin)(2 pi x / p)``, p the period |
| group | several columns, such as a station's position | as they are |
| label | strings, or a few levels without coordinates, such as colours | 0, 1, .., m - 1 |
| position | anything else without coordinates | 0, 1, .., m - 1 |
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gpytorch_gaps.filling.calendars import YEAR, dates, encoded_dates, is_date

FEW_LEVELS = 4  # so few places without coordinates have no distance that could be learned from them,
CELLS_EACH = 30  # but a covariance, if each has so many cells

DAY = 1.0  # in days

_LATITUDES = ("lat", "latitude", "degrees_north", "degree_north", "degreesn")
_LONGITUDES = ("lon", "long", "longitude", "degrees_east", "degree_east", "degreese")
_ROUND = {"month": 12.0, "hour": 24.0, "dayofyear": YEAR, "day_of_year": YEAR, "doy": YEAR}  # axes that close


@dataclass(frozen=True, eq=False)
class Axis:
    """One dimension: its `name`, its `kind` as above, and `points` (m, d), what its kernel sees."""

    name: str
    kind: str
    points: np.ndarray
    unit: str = ""
    year: float = YEAR
    """Mean length of a year of the calendar, in days, if this is an axis of times."""

    @property
    def size(self) -> int:
        return len(self.points)

    @property
    def extent(self) -> float:
        """The largest distance along one column."""
        return float(np.ptp(self.points, axis=0).max())

    @property
    def spacing(self) -> float:
        """Between neighbours, in the middle: of all columns the widest."""
        if self.size == 1:
            return 1.0
        steps = np.diff(np.sort(self.points, axis=0), axis=0)
        steps = np.where(steps > 0, steps, np.nan)
        known = [np.nanmedian(column) for column in steps.T if np.isfinite(column).any()]
        return float(max(known, default=1.0))

    def __str__(self) -> str:
        where = f" {self.unit}" if self.unit else ""
        span = "" if self.kind in ("label", "group", "position", "circle") else f", {self.extent:.6g}{where}"
        return f"{self.name}: {self.size} {_PLURALS[self.kind]}{span}"


_PLURALS = {
    "number": "numbers",
    "time": "times",
    "latitude": "latitudes",
    "longitude": "longitudes",
    "circle": "places on a circle",
    "group": "places of several columns",
    "label": "labels",
    "position": "positions",
}


def describe_axes(
    shape: Sequence[int],
    axes: Sequence[Any] | None = None,
    names: Sequence[str] | None = None,
    attributes: Sequence[Mapping[str, Any]] | None = None,
) -> list[Axis]:
    """One :class:`Axis` for each dimension; `attributes` are those of a CF coordinate, such as its units."""
    if axes is not None and len(shape) == 1 and len(axes) == shape[0] and np.ndim(axes[0]) == 0 and axes[0] is not None:
        axes = [axes]  # of one dimension: the coordinates themselves
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
    times = dates(name, array)
    if times is not None:
        return _times(name, *times)
    if array.dtype.kind in "iufb" and coordinates is not None:
        return _numeric(name, np.array(array, dtype=np.float64).reshape(size, -1), attributes)
    positions = np.arange(size, dtype=np.float64).reshape(size, 1)
    if coordinates is not None:
        _check_labels(name, array)
    few = 1 < size <= FEW_LEVELS and cells_each >= CELLS_EACH
    kind = "label" if coordinates is not None or few else "position"
    return Axis(name, kind, positions)


def _numeric(name: str, points: np.ndarray, attributes: Mapping[str, Any]) -> Axis:
    unit = str(attributes.get("units", ""))
    words = {name.strip().lower(), unit.strip().lower(), str(attributes.get("standard_name", "")).strip().lower()}
    axis = _checked(Axis(name, "group" if points.shape[1] > 1 else "number", points, unit))
    if axis.kind == "group":
        return axis
    times = encoded_dates(points[:, 0], unit, str(attributes.get("calendar", "standard")))
    if times is not None:
        return _times(name, *times)
    if words.intersection(_LATITUDES) and points.min() >= -90.01 and points.max() <= 90.01:
        return Axis(name, "latitude", points, "degrees")
    if words.intersection(_LONGITUDES) and axis.extent <= 360:
        around = axis.extent + 1.5 * axis.spacing >= 360 and axis.size > 2
        return _round(name, points, 360.0) if around else Axis(name, "longitude", points, "degrees")
    period = next((_ROUND[word] for word in words - {unit.strip().lower()} if word in _ROUND), None)  # 18 hours do not
    if period is not None and 0.5 * period < axis.extent <= period + 1 and axis.size > 2:
        return _round(name, points, period)
    return axis


def _times(name: str, days: np.ndarray, year: float) -> Axis:
    return _checked(Axis(name, "time", days.reshape(-1, 1), "days", year))


def _check_labels(name: str, array: np.ndarray) -> None:
    """Refuses what are no labels: missing ones, tuples, dates that cannot be subtracted, and repeated ones."""
    for at, entry in enumerate(array):
        if isinstance(entry, tuple):
            raise ValueError(
                f"{name}: entry {at} is {entry}, of several levels; expected numbers, times or labels. Unstack it, so "
                "that each level is a dimension of its own"
            )
        missing = not isinstance(entry, str) and str(entry) in ("nan", "NaT", "None", "<NA>")
        if missing or is_date(entry):
            raise ValueError(f"{name}: entry {at} is {entry}, expected labels, or dates of one calendar throughout")
    labels = [str(label) for label in array]
    if len(set(labels)) < len(labels):
        twice = next(label for label in labels if labels.count(label) > 1)
        raise ValueError(f"{name}: got the label {twice!r} twice, expected each once")


def _round(name: str, points: np.ndarray, period: float) -> Axis:
    """On a circle whose arcs are as long as the coordinates say: what lies on both sides of the seam is close."""
    angle = 2 * math.pi * points[:, 0] / period
    circle = np.stack([np.cos(angle), np.sin(angle)], axis=1) * period / (2 * math.pi)
    axis = Axis(name, "circle", circle)
    if axis.size > 1 and len(np.unique(circle.round(9), axis=0)) < axis.size:
        return Axis(name, "number", points)  # a year of 366 days on a circle of 365.2425, or 0 and 360 degrees
    return axis


def _checked(axis: Axis) -> Axis:
    bad = ~np.isfinite(axis.points).all(axis=1)
    if bad.any():
        at = int(bad.argmax())
        raise ValueError(f"{axis.name}: entry {at} is {axis.points[at].squeeze()}, expected finite coordinates")
    _, first, counts = np.unique(axis.points, axis=0, return_index=True, return_counts=True)
    if (counts > 1).any():
        value = axis.points[first[counts > 1].min()]
        raise ValueError(f"{axis.name}: got the coordinate {value.squeeze()} twice, expected distinct ones")
    return axis


def _as_array(name: str, coordinates: Any) -> np.ndarray:
    if isinstance(coordinates, torch.Tensor):
        coordinates = coordinates.detach().cpu()
    if hasattr(coordinates, "iloc"):  # a pandas Series, whose own index does not matter
        coordinates = coordinates.array
    if hasattr(coordinates, "to_timestamp"):  # pandas' periods
        coordinates = coordinates.to_timestamp()
    if getattr(coordinates, "tz", None) is not None:  # days are counted in UTC
        coordinates = coordinates.tz_convert(None)
    array = np.asarray(coordinates)
    if array.ndim not in (1, 2) or (array.ndim == 2 and array.dtype.kind not in "iuf") or array.dtype.kind == "c":
        raise ValueError(f"{name}: got {array.dtype} of shape {array.shape}, expected coordinates (m,) or (m, d)")
    return array
