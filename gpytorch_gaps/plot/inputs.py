"""Converts tensors, arrays, pandas and xarray objects to masked arrays, and finds the places of their cells."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property
from typing import Any

import matplotlib.dates as mdates
import numpy as np
import torch

from gpytorch_gaps.filling.axes.index_grid import IndexGrid, is_a, unstacked
from gpytorch_gaps.filling.axes.meaning import meaning
from gpytorch_gaps.grid.cartesian import CartesianGrid

_SHORT_UNITS = {"degrees_north": "°N", "degrees_east": "°E", "degree_north": "°N", "degree_east": "°E", "1": ""}


@dataclass(frozen=True)
class Places:
    """The positions of the cells of one dimension on a picture, and the text beside them."""

    values: np.ndarray
    """Numbers, dates in matplotlib's days, or 0, 1, .., m - 1."""
    kind: str = "positions"
    """``"positions"``, ``"numbers"``, ``"dates"`` or ``"labels"``."""
    name: str = ""
    unit: str = ""
    labels: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return _with_unit(self.name, self.unit)

    @cached_property
    def edges(self) -> np.ndarray:
        """Boundaries of the cells in ascending order: halfway between neighbours, and as far beyond the outermost."""
        values = np.sort(self.values)
        middle = (values[:-1] + values[1:]) / 2
        if values[0] == values[-1]:  # a single place does not define a width
            return np.concatenate([[values[0] - 0.5], middle, [values[-1] + 0.5]])
        return np.concatenate([[2 * values[0] - middle[0]], middle, [2 * values[-1] - middle[-1]]])

    @property
    def is_even(self) -> bool:
        widths = np.diff(self.edges)
        return bool(np.ptp(widths) <= 1e-3 * widths.max())  # a thousandth of a cell is not visible

    def describe(self, index: int, default_name: str) -> str:
        """Text for one place, such as "time = 2020-01-31"."""
        if self.kind == "labels":
            text = self.labels[index]
        elif self.kind == "dates":
            at_midnight = bool((self.values == self.values.round()).all())
            text = mdates.num2date(self.values[index]).strftime("%Y-%m-%d" if at_midnight else "%Y-%m-%d %H:%M")
        else:
            text = f"{self.values[index]:g} {self.unit}".strip()
        name = self.name or ("" if self.kind in ("labels", "dates") else default_name)
        return f"{name} = {text}" if name else text

    @property
    def are_bands(self) -> bool:
        """Whether these are labels, or bands by name, which have no order."""
        return self.kind == "labels" or meaning(self.name, {}) == "label"

    def same_as(self, other: "Places") -> bool:
        """Whether both have the same places, in any order."""
        if (self.kind, len(self.values)) != (other.kind, len(other.values)):
            return False
        close = 1e-6 * float(np.ptp(self.edges))  # coordinates may have been rounded to float32
        return self.labels == other.labels and np.allclose(np.sort(self.values), np.sort(other.values), 1e-6, close)


@dataclass(frozen=True)
class Field:
    """A field with masked gaps. A colour picture has one dimension more than `places`."""

    values: np.ma.MaskedArray
    places: tuple[Places, ...]
    name: str = ""

    @property
    def ndim(self) -> int:
        return len(self.places)

    @property
    def gaps(self) -> np.ndarray:
        """Mask of the gaps. A cell of a colour picture is a gap if any of its colours is."""
        mask = np.ma.getmaskarray(self.values)
        return np.any(mask, axis=-1) if self.values.ndim > self.ndim else mask

    def __getitem__(self, index: int) -> "Field":
        return replace(self, values=self.values[index], places=self.places[1:])

    def bands_first(self) -> "Field":
        """The field with its only dimension of bands or labels first, if it has three dimensions or more."""
        bands = [number for number, places in enumerate(self.places) if places.are_bands]
        if self.ndim < 3 or len(bands) != 1:
            return self
        others = [places for number, places in enumerate(self.places) if number != bands[0]]
        return replace(self, values=np.moveaxis(self.values, bands[0], 0), places=(self.places[bands[0]], *others))

    def sorted(self) -> "Field":
        """The field with the coordinates of every dimension in ascending order."""
        values, places = self.values, list(self.places)
        for i, one in enumerate(places):
            if (np.diff(one.values) < 0).any():  # never true for labels, whose places are 0, 1, ..
                order = np.argsort(one.values, kind="stable")
                values, places[i] = values.take(order, axis=i), replace(one, values=one.values[order])
        return replace(self, values=values, places=tuple(places))


def read_field(name: str, values: Any, axes: Any = None, rgb: bool = False) -> Field:
    """Reads values of any supported type. `name` is their name in error messages.

    :param axes: the coordinates of each dimension, a mapping from names to these, or a grid. None: those of `values`,
        if any.
    :param rgb: whether the last dimension is red, green, blue and maybe opacity. Colours are scaled to 0 .. 1.
    """
    array, own, title = _unwrap(name, values)
    masked = _masked(name, array)
    shape = masked.shape
    if rgb:
        if masked.ndim < 3 or shape[-1] not in (3, 4):
            raise ValueError(f"{name}: got shape {shape}; expected (.., H, W, 3) or (.., H, W, 4), as rgb is True")
        masked, shape, own = _colours(masked, np.asarray(array).dtype.kind in "iu"), shape[:-1], own[: masked.ndim - 1]
    given: Any = axes.axes if isinstance(axes, CartesianGrid) else axes
    if isinstance(given, Mapping):
        own = [(None, str(key), one[2]) for key, one in zip(given, own, strict=False)]
        given = list(given.values())
    if given is not None:
        if not hasattr(given, "__len__") or len(given) != len(shape):
            got = len(given) if hasattr(given, "__len__") else type(given).__name__
            raise ValueError(f"axes: got {got}; expected {len(shape)}, one for each dimension of shape {shape}")
        own = [(coordinates, known[1], known[2]) for coordinates, known in zip(given, own, strict=True)]
    places = [_places(f"axes: axis {i}", *one, size=m) for i, (one, m) in enumerate(zip(own, shape, strict=True))]
    return Field(masked, tuple(places), title)


def read_deviations(name: str, values: Any, axes: Any = None) -> Field:
    """Reads standard deviations, which must not be negative."""
    field = read_field(name, values, axes)
    if bool((field.values < 0).any()):
        raise ValueError(f"{name}: got {field.values.min():g}; expected standard deviations, none below zero")
    return field


def shared_places(name: str, field: Field, other: Field) -> tuple[Places, ...]:
    """The places of `field`. Missing coordinates are taken from `other`. Coordinates that both have must agree."""
    pairs = list(zip(field.places, other.places, strict=True))
    for i, (mine, its) in enumerate(pairs):
        if "positions" not in (mine.kind, its.kind) and not mine.same_as(its):
            raise ValueError(f"{name}: got other coordinates along axis {i}; expected those of the fields beside it")
    return tuple(its if mine.kind == "positions" else mine for mine, its in pairs)


_Described = tuple[Any, str, str]  # coordinates or None, name, unit


def _unwrap(name: str, values: Any) -> tuple[Any, Sequence[_Described], str]:
    """The array inside `values`, a description of each dimension, and a title."""
    if is_a(values, "xarray", "Dataset"):
        raise ValueError(f"{name}: got a Dataset; expected one of its variables, {list(values.data_vars)}")
    if is_a(values, "xarray", "DataArray"):
        title = _with_unit(str(values.attrs.get("long_name", values.name or "")), _unit(values.attrs))
        return values.values, [_describe_dimension(values, dim) for dim in values.dims], title
    if is_a(values, "pandas", "DataFrame") or is_a(values, "pandas", "Series"):
        try:
            array, grids = unstacked(values)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name}: got {error}; expected real numbers, with NaN for gaps") from error
        name_of_series = values.name if values.ndim == 1 and values.name is not None else ""
        return array, [level for grid in grids for level in _describe_levels(grid)], str(name_of_series)
    array = _to_numpy(values)
    return array, [(None, "", "")] * array.ndim, ""


def _describe_dimension(array: Any, dim: Any) -> _Described:
    if dim not in array.coords:
        return None, str(dim), ""
    coordinate = array.coords[dim]
    return coordinate.values, str(coordinate.attrs.get("long_name", dim)), _unit(coordinate.attrs)


def _describe_levels(grid: IndexGrid) -> list[_Described]:
    """The levels of an index of pandas; a default index has neither coordinates nor a name."""
    named = zip(grid.coordinates, grid.names, strict=True)
    return [(level, "" if level is None or level.name is None else name, "") for level, name in named]


def _unit(attrs: Any) -> str:
    unit = str(attrs.get("units", ""))
    return _SHORT_UNITS.get(unit, unit)


def _with_unit(name: str, unit: str) -> str:
    return f"{name} [{unit}]".strip() if unit else name


def _to_numpy(values: Any) -> np.ndarray:
    """An array from a tensor on any device, or from an array-like object. Masks are kept."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        return (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    return np.asanyarray(values)


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
    """Scales colours to 0 .. 1. Floats are divided by 255 if any is above 2: a filled image may exceed 1 a little."""
    largest = masked.max()
    to_255 = integers or (largest is not np.ma.masked and largest > 2)
    return np.ma.clip(masked / 255 if to_255 else masked, 0, 1)


def _places(where: str, coordinates: Any, name: str, unit: str, size: int) -> Places:
    positions = np.arange(float(size))
    if coordinates is None:
        return Places(positions, name=name)
    array = _to_numpy(coordinates)
    if array.ndim not in (1, 2) or len(array) != size:
        raise ValueError(f"{where}: got shape {array.shape}; expected {size} coordinates")
    if array.ndim == 2 and array.shape[1] > 1:  # several columns have no order along a line
        return Places(positions, name=name)
    array = array.reshape(size)
    if array.dtype.kind == "O":
        array = _dates_or_labels(array)
    if array.dtype.kind == "m":
        array, unit = array / np.timedelta64(1, "D"), "days"
    if array.dtype.kind not in "iufM":
        return Places(positions, "labels", name, unit, tuple(map(str, array)))
    kind = "dates" if array.dtype.kind == "M" else "numbers"
    values = np.asarray(mdates.date2num(array) if kind == "dates" else array, dtype=float)
    if not np.isfinite(values).all():
        raise ValueError(f"{where}: got {array[~np.isfinite(values)][0]}; expected finite coordinates")
    return Places(values, kind, name, "" if kind == "dates" else unit)


def _dates_or_labels(objects: np.ndarray) -> np.ndarray:
    """Python dates, and pandas dates with a zone or a period, as datetime64 in UTC; other objects as text."""
    stamps = [entry.to_timestamp() if hasattr(entry, "to_timestamp") else entry for entry in objects]
    if not all(isinstance(stamp, date) for stamp in stamps):
        return np.array([str(entry) for entry in objects])
    known = [stamp for stamp in stamps if stamp == stamp]  # NaT is unequal to itself
    microseconds = 86400e6 * (mdates.date2num(known) - mdates.date2num(np.datetime64("1970-01-01")))
    read = np.full(len(stamps), np.datetime64("NaT", "us"))
    read[[stamp == stamp for stamp in stamps]] = microseconds.round().astype("datetime64[us]")
    return read
