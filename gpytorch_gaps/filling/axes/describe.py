"""Describes dimensions: the kind of each follows from its coordinates, CF attributes and name."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gpytorch_gaps.filling.axes.axis import Axes, Axis
from gpytorch_gaps.filling.axes.calendars import YEAR, dates, encoded_dates, is_date, is_encoded
from gpytorch_gaps.filling.axes.encodings import (
    Circle,
    Dates,
    Degrees,
    EncodedDates,
    Labels,
    Numbers,
    as_array,
    as_dates,
)
from gpytorch_gaps.filling.axes.meaning import is_id, meaning

_MAX_LABELS = 4  # so few positions without coordinates do not determine a length-scale,
_MIN_CELLS_PER_LABEL = 30  # but they determine a free covariance, if each has so many cells
_PERIODS = {"month": 12.0, "hour": 24.0, "dayofyear": YEAR, "day_of_year": YEAR, "doy": YEAR}  # of periodic axes
_SERIES = (["time", "position"], ["position", "time"])  # kinds of axes of what may be a table of series
_YEARS = (1500, 2200)  # integers in this range are years


def describe_axes(
    shape: Sequence[int],
    axes: Axes = None,
    names: Sequence[str] | None = None,
    attributes: Sequence[Mapping[str, Any]] | None = None,
) -> list[Axis]:
    """One :class:`Axis` per dimension.

    :param shape: sizes of the dimensions.
    :param axes: coordinates of each dimension, or None; or a mapping from names to these. Names and CF attributes of
        xarray and pandas coordinates are used.
    :param names: names of the dimensions.
    :param attributes: CF attributes of the coordinates, such as their units.
    :return: one description per dimension.
    :raises ValueError: if coordinates are not finite or not distinct, or if their number is not that of the dimension.
    """
    if isinstance(axes, Mapping):
        names, axes = list(map(str, axes)), list(axes.values())
    elif axes is not None and len(shape) == 1 and len(axes) == shape[0] and np.ndim(axes[0]) == 0:
        axes = axes if axes[0] is None else [axes]  # for one dimension, the coordinates themselves are accepted
    if axes is not None and len(axes) != len(shape):
        raise ValueError(f"axes: got {len(axes)}, expected {len(shape)}, one for each dimension of values")
    coordinates = [None] * len(shape) if axes is None else axes
    if names is None:
        names = [str(getattr(one, "name", None) or f"axis {i}") for i, one in enumerate(coordinates)]
    if attributes is None:
        attributes = [getattr(one, "attrs", {}) for one in coordinates]
    cells = math.prod(shape)
    described = zip(names, shape, coordinates, attributes, strict=True)
    found = [_describe(name, size, cells // max(size, 1), *known) for name, size, *known in described]
    return [_asking(axis) for axis in found] if [axis.kind for axis in found] in _SERIES else found


def _asking(axis: Axis) -> Axis:
    """Adds a note to an axis without coordinates: it says what was assumed. Other axes are returned unchanged."""
    if axis.kind != "position" or axis.size == 1:
        return axis
    assumed = f"{axis.size} places without coordinates were taken for neighbours at equal distances"
    return replace(axis, note=f"{axis.name}: {assumed}; if they are separate series, pass their names")


def _describe(name: str, size: int, cells_each: int, coordinates: Any, attributes: Mapping[str, Any]) -> Axis:
    if coordinates is not None:
        array = as_dates(name, as_array(name, coordinates))
        if len(array) != size:
            raise ValueError(
                f"{name}: got {len(array)} coordinates, expected {size}, the size of this dimension of values"
            )
        return replace(_describe_known(name, array, cells_each, coordinates, attributes), coordinates=array)
    few = 1 < size <= _MAX_LABELS and cells_each >= _MIN_CELLS_PER_LABEL
    if few or (size > 1 and cells_each > 1 and meaning(name, attributes) == "label"):
        return _labels(name, np.arange(size))
    return Axis(name, "position", np.arange(size, dtype=np.float64).reshape(size, 1))


def _describe_known(
    name: str, array: np.ndarray, cells_each: int, coordinates: Any, attributes: Mapping[str, Any]
) -> Axis:
    times = dates(name, array)
    if times is not None:
        return _times(name, Dates(array[:1], getattr(coordinates, "tz", None)), *times)
    if array.dtype.kind in "iufb":
        return _numeric(name, array, cells_each, attributes)
    _check_labels(name, array)
    return _labels(name, array)


def _labels(name: str, labels: np.ndarray, note: str = "") -> Axis:
    encoding = Labels(tuple(map(str, labels)))
    return Axis(name, "label", encoding(name, labels), encoding=encoding, note=note)


def _numeric(name: str, array: np.ndarray, cells_each: int, attributes: Mapping[str, Any]) -> Axis:
    unit, calendar = str(attributes.get("units", "")), str(attributes.get("calendar", "standard"))
    columns = array.shape[1] if array.ndim == 2 else 1
    points = Numbers(columns)(name, array)
    axis = _checked(Axis(name, "group" if columns > 1 else "number", points, unit, encoding=Numbers(columns)))
    if axis.kind == "group":
        return axis
    first = float(points[0, 0]) if len(points) else 0.0
    times = encoded_dates(points[:, 0], unit or name, calendar, first)
    if times is not None:
        return _times(name, EncodedDates(first, unit or name, calendar), *times)
    if is_encoded(unit or name):
        return replace(axis, note=f"{name}: no search for cycles, because the calendar {calendar!r} is not known")
    known = meaning(name, attributes)
    if known == "latitude" and points.min() >= -90.01 and points.max() <= 90.01:
        return replace(axis, kind="latitude", unit="degrees")
    if known == "longitude" and axis.extent <= 360:
        around = axis.extent + 1.5 * axis.spacing >= 360 and axis.size > 2
        start = float(points.min() + points.max()) / 2 - 180
        open_ended = replace(axis, kind="longitude", unit="degrees", encoding=Degrees(start))
        return _circle(axis, 360.0, "degrees") if around else open_ended
    # decide by name, not by unit: a lead time of 18 hours is not periodic
    words = (name.strip().lower(), str(attributes.get("standard_name", "")).strip().lower())
    period = next((_PERIODS[word] for word in words if word in _PERIODS), None)
    if period is not None and 0.5 * period < axis.extent <= period + 1 and axis.size > 2:
        return _circle(axis, period)
    return _numbers_or_identifiers(axis, array, known, cells_each)


def _numbers_or_identifiers(axis: Axis, array: np.ndarray, known: str | None, cells_each: int) -> Axis:
    """Integers that identify something are labels. If this is not certain, the axis gets a note."""
    values = axis.points[:, 0]
    steps = np.diff(np.sort(values))
    integral = bool((values == values.round()).all()) and values.min() >= 0
    uneven = integral and axis.size > 2 and steps.max() > steps.min()
    if cells_each > 1 and ((known == "label" and integral) or (is_id(axis.name) and uneven)):
        return _labels(axis.name, array)
    if known is not None or not uneven or (values.min() >= _YEARS[0] and values.max() <= _YEARS[1]):
        return axis
    if axis.name == "columns" and cells_each > 1:  # of a DataFrame
        naming = "if they are numbers, name them, as in table.columns.name = 'depth'"
        return _labels(axis.name, array, f"columns: uneven integers were taken for labels; {naming}")
    naming = "if they identify something, pass them as text"
    return replace(axis, note=f"{axis.name}: uneven integers were taken for numbers; {naming}")


def _times(name: str, encoding: Dates | EncodedDates, days: np.ndarray, year: float) -> Axis:
    return _checked(Axis(name, "time", days.reshape(-1, 1), "days", year, encoding))


def _check_labels(name: str, array: np.ndarray) -> None:
    """Checks that labels are present and distinct, and not tuples or dates of several calendars."""
    for at, entry in enumerate(array):
        if isinstance(entry, tuple):
            raise ValueError(
                f"{name}: entry {at} is {entry}, with several levels; expected numbers, times or labels. Try: unstack "
                "it, so that each level is a dimension"
            )
        missing = not isinstance(entry, str) and str(entry) in ("nan", "NaT", "None", "<NA>")
        if missing or is_date(entry):
            raise ValueError(f"{name}: entry {at} is {entry}, expected labels, or dates of one calendar throughout")
    labels = [str(label) for label in array]
    if len(set(labels)) < len(labels):
        twice = next(label for label in labels if labels.count(label) > 1)
        raise ValueError(f"{name}: got the label {twice!r} twice, expected each once")


def _circle(axis: Axis, period: float, unit: str = "") -> Axis:
    """The axis as points on a circle. Both ends may be the same point, such as 0 and 360 degrees, but no others."""
    circle = Circle(period, float(axis.points.min()))
    points = circle(axis.name, axis.points)
    if len(np.unique(points)) < axis.size:
        return replace(axis, unit="")
    return replace(axis, kind="circle", points=points, unit=unit, encoding=circle)


def _checked(axis: Axis) -> Axis:
    _, first, counts = np.unique(axis.points, axis=0, return_index=True, return_counts=True)
    if (counts > 1).any():
        value = axis.points[first[counts > 1].min()]
        raise ValueError(f"{axis.name}: got the coordinate {value.squeeze()} twice, expected distinct ones")
    return axis
