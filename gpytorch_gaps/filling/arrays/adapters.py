"""Adapters: arrays of several libraries as float64 with NaN at gaps, and results in the form of the input.

    tensor   ndarray   masked array   pandas Series, DataFrame   xarray DataArray

A result has the labels, names, attributes, dtype and device of the input. Observed values are returned bit for bit.
Integers are rounded.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gpytorch_gaps.filling.axes.axis import Axes, Axis
from gpytorch_gaps.filling.axes.describe import describe_axes
from gpytorch_gaps.filling.axes.index_grid import is_a, unstacked
from gpytorch_gaps.filling.axes.xarray_axes import axes_of
from gpytorch_gaps.utils.conventions import FLAG_ATTRIBUTES, LIMIT_ATTRIBUTES, valid_limits, where_valid
from gpytorch_gaps.utils.dtypes import is_gap, to_dtype, write_where


def adapt(values: Any, axes: Axes = None, dataset: Any = None) -> "ArrayAdapter":
    """The adapter of `values`, with its own coordinates or with `axes`.

    :param dataset: the Dataset that a DataArray comes from.
    """
    if isinstance(values, torch.Tensor):
        return TensorAdapter(values, axes)
    if is_a(values, "xarray", "DataArray"):
        return DataArrayAdapter(values, axes, dataset)
    if is_a(values, "pandas", "DataFrame"):
        return DataFrameAdapter(values, axes)
    if is_a(values, "pandas", "Series"):
        return SeriesAdapter(values, axes)
    array = np.asanyarray(values)
    if isinstance(values, Sequence) and array.dtype.kind == "O":
        array = np.array(values, dtype=np.float64)  # None becomes NaN
    return MaskedArrayAdapter(array, axes) if isinstance(array, np.ma.MaskedArray) else NumpyAdapter(array, axes)


class ArrayAdapter(ABC):
    """Reads one array and returns results in its form.

    `given` is the input, `array` the same as something that is sliced like an ndarray, NaN or masked at gaps, and
    `axes` describes its dimensions.
    """

    array: Any
    axes: list[Axis]
    limits: tuple[float, float] | None = None  # limits of valid values; filled values are clipped to them
    notes: tuple[str, ...] = ()  # notes on the array for the report
    chunked = False  # whether the array is read chunk by chunk (dask)
    units_differ = False  # whether labels have different units

    def __init__(self, given: Any, array: Any, axes: list[Axis]) -> None:
        self.given, self.array, self.axes = given, array, axes
        if np.dtype(getattr(array, "dtype", float)).kind not in "iufb":
            raise ValueError(f"values: got {array.dtype}, expected real numbers, with NaN or a mask for gaps")
        if not array.shape or 0 in array.shape:
            raise ValueError(f"values: got shape {tuple(array.shape)}, expected one dimension or more, none of them 0")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    @property
    def device(self) -> torch.device | None:
        return self.given.device if isinstance(self.given, torch.Tensor) else None

    def read(self, positions: Sequence[np.ndarray]) -> np.ndarray:
        """The values at a product of positions, one array of them per axis: float64, NaN at gaps."""
        part = take(self.array, positions)
        part = part if np.ma.isMaskedArray(part) else np.asarray(part)
        numbers = np.ma.filled(part.astype(np.float64, order="C"), np.nan)
        infinite = np.isinf(numbers)
        if infinite.any():
            first = np.unravel_index(int(infinite.argmax()), numbers.shape)
            entry = tuple(int(p[i]) for p, i in zip(positions, first, strict=True))
            raise ValueError(
                f"values: entry {entry} is {numbers[first]}, expected finite values; infinity is not a gap: use NaN"
            )
        return numbers

    def numbers(self) -> np.ndarray:
        """A copy of all values: float64, NaN at gaps."""
        return self.read([np.arange(size) for size in self.shape])

    def load(self) -> None:  # noqa: B027  only chunked arrays have something to load
        """Computes an array that is read chunk by chunk, once. Results have its chunks."""

    @abstractmethod
    def wrap_filled(self, values: np.ndarray, gaps: np.ndarray, smooth: bool) -> Any:
        """A copy of the input with `values` in the `gaps` or, if `smooth`, wherever they are not NaN."""

    @abstractmethod
    def wrap_like_input(self, values: np.ndarray) -> Any:
        """`values`, floating-point numbers or flags, in the form of the input."""


def take(array: Any, positions: Sequence[np.ndarray]) -> Any:
    """The entries of an array at a product of positions, one array of them per axis.

    Positions at equal steps are read as slices, as files and chunks are read fastest.
    """
    for axis, at in enumerate(positions):
        steps = np.unique(np.diff(at))
        step = int(steps[0]) if len(steps) else 1
        index: Any = slice(int(at[0]), int(at[-1]) + 1, step) if len(steps) <= 1 else at
        array = array[(slice(None),) * axis + (index,)]
    return array


def write_gaps(held: np.ndarray, values: np.ndarray, gaps: np.ndarray, smooth: bool) -> np.ndarray:
    """A copy of `held` with `values`, converted to its dtype, in the `gaps` or, if `smooth`, where they are not NaN."""
    return write_where(held, values, ~np.isnan(values) if smooth else gaps)


def _std_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype of standard deviations: that of the values if it is a floating-point one."""
    return dtype.newbyteorder("=") if dtype.kind == "f" else np.dtype(np.float64)


class NumpyAdapter(ArrayAdapter):
    def __init__(self, given: np.ndarray, axes: Axes) -> None:
        super().__init__(given, given, describe_axes(given.shape, axes))

    def wrap_filled(self, values: np.ndarray, gaps: np.ndarray, smooth: bool) -> np.ndarray:
        return write_gaps(np.asarray(self.given), values, gaps, smooth)

    def wrap_like_input(self, values: np.ndarray) -> np.ndarray:
        return values if values.dtype == bool else values.astype(_std_dtype(self.given.dtype))


class MaskedArrayAdapter(NumpyAdapter):
    """Masked entries and NaN are gaps; only gaps that are left are masked in a result."""

    def wrap_filled(self, values: np.ndarray, gaps: np.ndarray, smooth: bool) -> np.ma.MaskedArray:
        data = write_gaps(self.given, values, gaps, smooth)
        left = is_gap(self.given) & ~(~np.isnan(values) if smooth else gaps)
        return np.ma.MaskedArray(data, mask=left, fill_value=self.given.fill_value)

    def wrap_like_input(self, values: np.ndarray) -> np.ndarray:
        return np.ma.MaskedArray(super().wrap_like_input(values), mask=False)


class TensorAdapter(ArrayAdapter):
    def __init__(self, given: torch.Tensor, axes: Axes) -> None:
        host = given.detach().cpu()
        array = (host.float() if host.dtype == torch.bfloat16 else host).numpy()
        super().__init__(given, array, describe_axes(array.shape, axes))

    def wrap_filled(self, values: np.ndarray, gaps: np.ndarray, smooth: bool) -> torch.Tensor:
        result = torch.from_numpy(write_gaps(self.array, values, gaps, smooth))
        return result.to(dtype=self.given.dtype, device=self.given.device)

    def wrap_like_input(self, values: np.ndarray) -> torch.Tensor:
        result = torch.from_numpy(np.array(values))
        if result.dtype != torch.bool and self.given.is_floating_point():
            result = result.to(self.given.dtype)
        return result.to(self.given.device)


class DataArrayAdapter(ArrayAdapter):
    """Values outside the valid limits of CF attributes are gaps. Flags raise an error: they cannot be averaged."""

    def __init__(self, given: Any, axes: Axes, dataset: Any = None) -> None:
        flags = [name for name in FLAG_ATTRIBUTES if name in given.attrs]
        if flags:
            raise ValueError(
                f"values: {given.name} has {flags[0]}, so it holds flags; expected numbers. If it does hold numbers, "
                "drop the attribute"
            )
        self._chunks: Any = None  # chunks of results, once the array is loaded
        self.chunked, self.limits = given.chunks is not None, valid_limits(given)
        valid = where_valid(given)
        self.notes = () if self.chunked or valid is given else _about_invalid(given, valid)
        super().__init__(valid, valid.data if self.chunked else valid.values, axes_of(given, axes, dataset))

    def load(self) -> None:
        if self.chunked:
            self._chunks, self.given = dict(self.given.chunksizes), self.given.compute()
            self.array, self.chunked = self.given.values, False

    def wrap_filled(self, values: np.ndarray, gaps: np.ndarray, smooth: bool) -> Any:
        values = values if self.limits is None else values.clip(*self.limits)
        return self._chunked(self.given.copy(data=write_gaps(self.given.values, values, gaps, smooth)))

    def _chunked(self, result: Any) -> Any:
        return result if self._chunks is None else result.chunk(self._chunks)

    def wrap_like_input(self, values: Any) -> Any:
        flags = values.dtype == bool
        result = self.given.copy(data=values if flags else values.astype(_std_dtype(self.given.dtype)))
        named = str(result.attrs.pop("long_name", result.name or "values"))
        kept = {} if flags or "units" not in result.attrs else {"units": result.attrs["units"]}
        if "standard_name" in result.attrs and not flags:
            kept["standard_name"] = f"{result.attrs['standard_name']} standard_error"
        result.attrs = {"long_name": f"gaps of {named}" if flags else f"standard deviation of {named}", **kept}
        result.encoding = {}
        return self._chunked(result)


def _about_invalid(given: Any, valid: Any) -> tuple[str, ...]:
    """A note on the values outside the valid limits, if there are any."""
    count = int(given.count()) - int(valid.count())
    names = ", ".join(name for name in LIMIT_ATTRIBUTES if name in given.attrs)
    return (f"{count:,} values outside of {names} are gaps",) if count else ()


# -- pandas ------------------------------------------------------------------------------------------------------------


class DataFrameAdapter(ArrayAdapter):
    """A wide DataFrame: rows along one axis, columns along another, or along one per level of their index.

    Every column keeps its dtype.
    """

    def __init__(self, given: Any, axes: Axes) -> None:
        for name, dtype in given.dtypes.items():
            if getattr(dtype, "kind", "O") not in "iufb":
                raise ValueError(
                    f"values: column {name!r} holds {dtype}, expected real numbers; drop it, or make it the index"
                )
        array, (rows, columns) = unstacked(given)
        self._table, self._cells = (rows.size, columns.size), np.ix_(rows.cells, columns.cells)
        own = [*rows.coordinates, *columns.coordinates] if axes is None else axes
        super().__init__(given, array, describe_axes(array.shape, own, [*rows.names, *columns.names]))

    def _as_table(self, values: np.ndarray) -> np.ndarray:
        return values.reshape(self._table)[self._cells]

    def wrap_filled(self, values: np.ndarray, gaps: np.ndarray, smooth: bool) -> Any:
        result, values, gaps = self.given.copy(), self._as_table(values), self._as_table(gaps)
        for j in range(values.shape[1]):
            if smooth or gaps[:, j].any():
                result.isetitem(j, _write_series(result.iloc[:, j], values[:, j], gaps[:, j], smooth))
        return result

    def wrap_like_input(self, values: np.ndarray) -> Any:
        import pandas

        return pandas.DataFrame(self._as_table(values), index=self.given.index, columns=self.given.columns)


class SeriesAdapter(ArrayAdapter):
    """A Series along one axis, or along one per level of its index."""

    def __init__(self, given: Any, axes: Axes) -> None:
        if getattr(given.dtype, "kind", "O") not in "iufb":
            raise ValueError(f"values: got a Series of {given.dtype}, expected real numbers")
        array, (rows,) = unstacked(given)
        self._cells = rows.cells
        own = rows.coordinates if axes is None else axes
        super().__init__(given, array, describe_axes(array.shape, own, rows.names))

    def wrap_filled(self, values: np.ndarray, gaps: np.ndarray, smooth: bool) -> Any:
        return _write_series(self.given, values.flat[self._cells], gaps.flat[self._cells], smooth)

    def wrap_like_input(self, values: np.ndarray) -> Any:
        import pandas

        return pandas.Series(values.flat[self._cells], index=self.given.index, name=self.given.name)


def _write_series(column: Any, values: np.ndarray, gaps: np.ndarray, smooth: bool) -> Any:
    """A copy of a Series with `values` in its dtype, nullable integers included."""
    result = column.copy()
    where = ~np.isnan(values) if smooth else gaps
    dtype = np.dtype(getattr(column.dtype, "numpy_dtype", column.dtype))
    result.iloc[np.flatnonzero(where)] = to_dtype(values[where], dtype)
    return result
