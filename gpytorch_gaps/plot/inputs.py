"""From the forms in which fields come, to masked arrays and where their cells lie."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property
from typing import Any

import matplotlib.dates as mdates
import numpy as np
import torch

from gpytorch_gaps.filling.index_grid import is_a
from gpytorch_gaps.grid.cartesian import CartesianGrid

_UNITS = {"degrees_north": "°N", "degrees_east": "°E", "degree_north": "°N", "degree_east": "°E", "1": ""}


@dataclass(frozen=True)
class Axis:
    """Where the cells of one dimension lie, and what to write beside them."""

    places: np.ndarray
    """Numbers, dates as matplotlib counts days, or 0, 1, .., m - 1."""
    kind: str = "positions"
    """``"positions"``, ``"numbers"``, ``"dates"`` or ``"labels"``."""
    name: str = ""
    unit: str = ""
    labels: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return with_unit(self.name, self.unit)

    @cached_property
    def edges(self) -> np.ndarray:
        """Cells, in ascending order, meet halfway; the outermost are as wide to the outside as to the inside."""
        places = np.sort(self.places)
        middle = (places[:-1] + places[1:]) / 2
        if places[0] == places[-1]:  # of one place nothing says how wide it is
            return np.concatenate([[places[0] - 0.5], middle, [places[-1] + 0.5]])
        return np.concatenate([[2 * places[0] - middle[0]], middle, [2 * places[-1] - middle[-1]]])

    @property
    def is_even(self) -> bool:
        widths = np.diff(self.edges)
        return bool(np.ptp(widths) <= 1e-3 * widths.max())  # a thousandth of a cell is not seen

    def describe(self, index: int, otherwise: str) -> str:
        """Such as "time = 2020-01-31"; a number without a name is called `otherwise`."""
        if self.kind == "labels":
            place = self.labels[index]
        elif self.kind == "dates":
            at_midnight = bool((self.places == self.places.round()).all())
            place = mdates.num2date(self.places[index]).strftime("%Y-%m-%d" if at_midnight else "%Y-%m-%d %H:%M")
        else:
            place = f"{self.places[index]:g} {self.unit}".strip()
        name = self.name or ("" if self.kind in ("labels", "dates") else otherwise)
        return f"{name} = {place}" if name else place

    def same_places(self, other: "Axis") -> bool:
        """Whether both have the same places, in whatever order."""
        if (self.kind, len(self.places)) != (other.kind, len(other.places)):
            return False
        close = 1e-6 * float(np.ptp(self.edges))  # coordinates may have been rounded to float32
        return self.labels == other.labels and np.allclose(np.sort(self.places), np.sort(other.places), 1e-6, close)


@dataclass(frozen=True)
class Field:
    """A field with its gaps masked; a picture in colour has a last dimension more than axes."""

    values: np.ma.MaskedArray
    axes: tuple[Axis, ...]
    name: str = ""

    @property
    def ndim(self) -> int:
        return len(self.axes)

    @property
    def gaps(self) -> np.ndarray:
        """Which cells. A cell of a picture in colour is a gap if any of its colours is."""
        mask = np.ma.getmaskarray(self.values)
        return np.any(mask, axis=-1) if self.values.ndim > self.ndim else mask

    def __getitem__(self, index: int) -> "Field":
        return replace(self, values=self.values[index], axes=self.axes[1:])

    def sorted(self) -> "Field":
        """With the coordinates of every axis in ascending order, as drawing needs it."""
        values, axes = self.values, list(self.axes)
        for i, axis in enumerate(axes):
            if (np.diff(axis.places) < 0).any():  # never for labels, which have places 0, 1, ..
                order = np.argsort(axis.places, kind="stable")
                values, axes[i] = values.take(order, axis=i), replace(axis, places=axis.places[order])
        return replace(self, values=values, axes=tuple(axes))


def read_field(name: str, values: Any, axes: Any = None, rgb: bool = False) -> Field:
    """`values` of any supported kind; `name` is what errors call it.

    :param axes: the coordinates of each dimension, or a grid; where None, those that `values` brings along, if any.
    :param rgb: whether the last dimension is red, green, blue and maybe opacity: scaled to 0 .. 1.
    """
    array, own, title = _unwrap(name, values)
    masked = _masked(name, array)
    shape = masked.shape
    if rgb:
        if masked.ndim < 3 or shape[-1] not in (3, 4):
            raise ValueError(f"{name}: got shape {shape}; expected (.., H, W, 3) or (.., H, W, 4), as rgb is True")
        masked, shape, own = _colours(masked, np.asarray(array).dtype.kind in "iu"), shape[:-1], own[: masked.ndim - 1]
    if isinstance(axes, CartesianGrid):
        axes = axes.axes
    given = list(own) if axes is None else [(one, before[1], before[2]) for one, before in _pair(axes, own, shape)]
    read = [_axis(f"axes: axis {i}", *one, size=m) for i, (one, m) in enumerate(zip(given, shape, strict=True))]
    return Field(masked, tuple(read), title)


def read_deviations(name: str, values: Any, axes: Any = None) -> Field:
    """Standard deviations."""
    field = read_field(name, values, axes)
    if bool((field.values < 0).any()):
        raise ValueError(f"{name}: got {field.values.min():g}; expected standard deviations, none below zero")
    return field


def shared_axes(name: str, field: Field, other: Field) -> tuple[Axis, ...]:
    """The axes of `field`, in its own order; those of `other` where it has no coordinates. Others must not differ."""
    for i, (mine, its) in enumerate(zip(field.axes, other.axes, strict=True)):
        if "positions" not in (mine.kind, its.kind) and not mine.same_places(its):
            raise ValueError(f"{name}: got other coordinates along axis {i}; expected those of the fields beside it")
    pairs = zip(field.axes, other.axes, strict=True)
    return tuple(its if mine.kind == "positions" else mine for mine, its in pairs)


def to_numpy(values: Any) -> np.ndarray:
    """A tensor of any device, or any array; a masked one stays masked."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        return (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    return np.asanyarray(values)


def with_unit(name: str, unit: str) -> str:
    return f"{name} [{unit}]".strip() if unit else name


_Own = list[tuple[Any, str, str]]  # of each dimension: coordinates or None, name, unit


def _unwrap(name: str, values: Any) -> tuple[Any, _Own, str]:
    """The array inside, what is known of its axes, and what it is called."""
    if is_a(values, "xarray", "Dataset"):
        raise ValueError(f"{name}: got a Dataset; expected one of its variables, {list(values.data_vars)}")
    if is_a(values, "xarray", "DataArray"):
        attrs = values.attrs
        title = with_unit(str(attrs.get("long_name", values.name or "")), _unit(attrs))
        return values.values, [_of_dimension(values, dim) for dim in values.dims], title
    if is_a(values, "pandas", "DataFrame"):
        return _table(name, values), [_of_index(values.index), _of_index(values.columns)], ""
    if is_a(values, "pandas", "Series"):
        return _table(name, values), [_of_index(values.index)], "" if values.name is None else str(values.name)
    array = to_numpy(values)
    return array, [(None, "", "")] * array.ndim, ""


def _table(name: str, values: Any) -> np.ndarray:
    try:
        return values.to_numpy(dtype=float, na_value=np.nan)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: got {error}; expected real numbers, with NaN for gaps") from error


def _of_dimension(array: Any, dim: Any) -> tuple[Any, str, str]:
    if dim not in array.coords:
        return None, str(dim), ""
    coordinate = array.coords[dim]
    return coordinate.values, str(coordinate.attrs.get("long_name", dim)), _unit(coordinate.attrs)


def _of_index(index: Any) -> tuple[Any, str, str]:
    name = "" if index.name is None else str(index.name)
    if is_a(index, "pandas", "RangeIndex") and (index.start, index.step) == (0, 1) and not name:
        return None, "", ""  # what a table has that was given none
    return index, name, ""


def _unit(attrs: Any) -> str:
    unit = str(attrs.get("units", ""))
    return _UNITS.get(unit, unit)


def _masked(name: str, array: Any) -> np.ma.MaskedArray:
    try:
        if np.asarray(array).dtype.kind not in "biufO":
            raise TypeError("text, dates or complex numbers")
        masked = np.ma.masked_invalid(np.ma.asarray(array).astype(float), copy=True)
    except (TypeError, ValueError) as error:
        kind = getattr(array, "dtype", type(array).__name__)
        raise ValueError(f"{name}: got {kind}; expected real numbers, with NaN or a mask for gaps") from error
    if masked.ndim == 0 or masked.size == 0:
        raise ValueError(f"{name}: got shape {masked.shape}; expected one dimension or more, none of them 0")
    return masked


def _colours(masked: np.ma.MaskedArray, integers: bool) -> np.ma.MaskedArray:
    """From 0 to 1. Floats count to 255 if any is above 2: what fills an image of 0 .. 1 may shoot a little over."""
    largest = masked.max()
    to_255 = integers or (largest is not np.ma.masked and largest > 2)
    return np.ma.clip(masked / 255 if to_255 else masked, 0, 1)


def _pair(axes: Sequence[Any], own: _Own, shape: tuple[int, ...]) -> list[tuple[Any, tuple[Any, str, str]]]:
    if not hasattr(axes, "__len__") or len(axes) != len(shape):
        got = len(axes) if hasattr(axes, "__len__") else type(axes).__name__
        raise ValueError(f"axes: got {got}; expected {len(shape)}, one for each dimension of shape {shape}")
    return list(zip(axes, own, strict=True))


def _axis(where: str, coordinates: Any, name: str, unit: str, size: int) -> Axis:
    positions = np.arange(float(size))
    if coordinates is None:
        return Axis(positions, name=name)
    array = to_numpy(coordinates)
    if array.ndim not in (1, 2) or len(array) != size:
        raise ValueError(f"{where}: got shape {array.shape}; expected {size} coordinates")
    if array.ndim == 2 and array.shape[1] > 1:  # a group of columns has no order on a line
        return Axis(positions, name=name)
    array = array.reshape(size)
    if array.dtype.kind == "O":
        array = _dates_or_labels(array)
    if array.dtype.kind == "m":
        array, unit = array / np.timedelta64(1, "D"), "days"
    if array.dtype.kind in "iufM":
        kind = "dates" if array.dtype.kind == "M" else "numbers"
        places = np.asarray(mdates.date2num(array) if kind == "dates" else array, dtype=float)
        if not np.isfinite(places).all():
            raise ValueError(f"{where}: got {array[~np.isfinite(places)][0]}; expected finite coordinates")
        return Axis(places, kind, name, "" if kind == "dates" else unit)
    return Axis(positions, "labels", name, unit, tuple(map(str, array)))


def _dates_or_labels(objects: np.ndarray) -> np.ndarray:
    """Python's dates, and those of pandas with a zone or a period, as datetime64 in UTC; anything else as text."""
    stamps = [entry.to_timestamp() if hasattr(entry, "to_timestamp") else entry for entry in objects]
    if not all(isinstance(stamp, date) for stamp in stamps):
        return np.array([str(entry) for entry in objects])
    known = [stamp for stamp in stamps if stamp == stamp]  # NaT is not
    microseconds = 86400e6 * (mdates.date2num(known) - mdates.date2num(np.datetime64("1970-01-01")))
    read = np.full(len(stamps), np.datetime64("NaT", "us"))
    read[[stamp == stamp for stamp in stamps]] = microseconds.round().astype("datetime64[us]")
    return read
