"""The kinds of arrays that have gaps, as numbers with NaN; and numbers, as the kind that came.

    tensor   ndarray   masked array   pandas Series, DataFrame   xarray DataArray

What comes back has the labels, names, attributes, dtype and device of what went in. Where a value was observed it is
that value, to the bit. Integers are rounded.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gpytorch_gaps.filling.axes import Axis, describe_axes
from gpytorch_gaps.filling.index_grid import IndexGrid, is_a
from gpytorch_gaps.utils.dtypes import to_dtype


def read_kind(values: Any, axes: Sequence[Any] | None = None) -> "Kind":
    """What `values` is, with the coordinates it brings along, or with `axes`."""
    if isinstance(values, torch.Tensor):
        return TensorKind(values, axes)
    if is_a(values, "xarray", "DataArray"):
        return DataArrayKind(values, axes)
    if is_a(values, "pandas", "DataFrame"):
        return TableKind(values, axes)
    if is_a(values, "pandas", "Series"):
        return SeriesKind(values, axes)
    array = np.asanyarray(values)
    if isinstance(values, Sequence) and array.dtype.kind == "O":
        array = np.array(values, dtype=np.float64)  # None is NaN
    return MaskedKind(array, axes) if isinstance(array, np.ma.MaskedArray) else ArrayKind(array, axes)


class Kind(ABC):
    """`given`: what came; `array`: the same, sliced like an ndarray, NaN or masked at gaps; `axes`: what it lies on."""

    array: Any
    axes: list[Axis]
    chunked = False  # whether it is read piece by piece

    def __init__(self, given: Any, array: Any, axes: list[Axis]) -> None:
        self.given, self.array, self.axes = given, array, axes
        kind = np.dtype(getattr(array, "dtype", float)).kind
        if kind not in "iufb":
            raise ValueError(f"values: got {array.dtype}, expected real numbers, with NaN or a mask for gaps")
        if not array.shape or 0 in array.shape:
            raise ValueError(f"values: got shape {tuple(array.shape)}, expected one dimension or more, none of them 0")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    def numbers(self, rows: slice = slice(None)) -> np.ndarray:
        """A copy in float64, NaN at gaps; infinite entries are refused."""
        part = np.ma.asarray(self.array[rows]) if np.ma.isMaskedArray(self.array) else np.asarray(self.array[rows])
        numbers = np.ma.filled(part.astype(np.float64, order="C"), np.nan)
        infinite = np.isinf(numbers)
        if infinite.any():
            at = np.unravel_index(int(infinite.argmax()), numbers.shape)
            entry = (int(at[0]) + (rows.start or 0), *map(int, at[1:]))
            raise ValueError(f"values: entry {entry} is {numbers[at]}, expected finite values, or NaN for gaps")
        return numbers

    @abstractmethod
    def filled(self, values: np.ndarray, gaps: np.ndarray, smooth: bool) -> Any:
        """What came, with `values` in the `gaps` or, if `smooth`, everywhere."""

    @abstractmethod
    def like(self, values: np.ndarray) -> Any:
        """`values`, floating numbers or flags, as the kind that came."""


def put(held: np.ndarray, values: np.ndarray, gaps: np.ndarray, smooth: bool) -> np.ndarray:
    """A copy of `held` with `values`, in its dtype, where they belong."""
    result = np.array(np.ma.getdata(held), copy=True, order="K")
    where = np.ones_like(gaps) if smooth else gaps
    if result.dtype.kind == "b":
        result[where] = values[where] > 0.5
    else:
        result[where] = to_dtype(values[where], result.dtype)
    return result


def _floating(dtype: np.dtype) -> np.dtype:
    """Of standard deviations: that of the values where it is one, and precise enough."""
    return dtype.newbyteorder("=") if dtype.kind == "f" else np.dtype(np.float64)


class ArrayKind(Kind):
    def __init__(self, given: np.ndarray, axes: Sequence[Any] | None) -> None:
        super().__init__(given, given, describe_axes(given.shape, axes))

    def filled(self, values: np.ndarray, gaps: np.ndarray, smooth: bool) -> np.ndarray:
        return put(np.asarray(self.given), values, gaps, smooth)

    def like(self, values: np.ndarray) -> np.ndarray:
        return values if values.dtype == bool else values.astype(_floating(self.given.dtype))


class MaskedKind(ArrayKind):
    """Masked entries are gaps, as NaN is; what comes back has none masked."""

    def filled(self, values: np.ndarray, gaps: np.ndarray, smooth: bool) -> np.ma.MaskedArray:
        return np.ma.MaskedArray(put(self.given, values, gaps, smooth), mask=False, fill_value=self.given.fill_value)

    def like(self, values: np.ndarray) -> np.ndarray:
        return np.ma.MaskedArray(super().like(values), mask=False)


class TensorKind(Kind):
    def __init__(self, given: torch.Tensor, axes: Sequence[Any] | None) -> None:
        host = given.detach().cpu()
        array = (host.float() if host.dtype == torch.bfloat16 else host).numpy()
        super().__init__(given, array, describe_axes(array.shape, axes))

    def filled(self, values: np.ndarray, gaps: np.ndarray, smooth: bool) -> torch.Tensor:
        result = torch.from_numpy(put(self.array, values, gaps, smooth))
        return result.to(dtype=self.given.dtype, device=self.given.device)

    def like(self, values: np.ndarray) -> torch.Tensor:
        result = torch.from_numpy(np.array(values))
        if result.dtype != torch.bool and self.given.is_floating_point():
            result = result.to(self.given.dtype)
        return result.to(self.given.device)


class TableKind(Kind):
    """A wide DataFrame: rows along one axis, columns along the other, or along several if their index has levels.

    Every column keeps its dtype.
    """

    def __init__(self, given: Any, axes: Sequence[Any] | None) -> None:
        for name, dtype in given.dtypes.items():
            if getattr(dtype, "kind", "O") not in "iufb":
                raise ValueError(
                    f"values: column {name!r} holds {dtype}, expected real numbers; leave it out, or make it the index"
                )
        rows, columns = IndexGrid(given.index, "rows"), IndexGrid(given.columns, "columns")
        self._table, self._cells = (rows.size, columns.size), np.ix_(rows.places, columns.places)
        array = np.full(self._table, np.nan)
        array[self._cells] = given.to_numpy(dtype=np.float64, na_value=np.nan)
        array = array.reshape(*rows.shape, *columns.shape)
        own = [*rows.coordinates, *columns.coordinates] if axes is None else axes
        super().__init__(given, array, describe_axes(array.shape, own, [*rows.names, *columns.names]))

    def _of_table(self, values: np.ndarray) -> np.ndarray:
        return values.reshape(self._table)[self._cells]

    def filled(self, values: np.ndarray, gaps: np.ndarray, smooth: bool) -> Any:
        result, values, gaps = self.given.copy(), self._of_table(values), self._of_table(gaps)
        for j in range(values.shape[1]):
            column = result.iloc[:, j]
            if smooth or gaps[:, j].any():
                result.isetitem(j, _column(column, values[:, j], gaps[:, j], smooth))
        return result

    def like(self, values: np.ndarray) -> Any:
        import pandas

        return pandas.DataFrame(self._of_table(values), index=self.given.index, columns=self.given.columns)


class SeriesKind(Kind):
    """A Series along one axis, or along one for each level of its index."""

    def __init__(self, given: Any, axes: Sequence[Any] | None) -> None:
        if getattr(given.dtype, "kind", "O") not in "iufb":
            raise ValueError(f"values: got a Series of {given.dtype}, expected real numbers")
        rows = IndexGrid(given.index, "rows")
        self._places = rows.places
        array = np.full(rows.size, np.nan)
        array[rows.places] = given.to_numpy(dtype=np.float64, na_value=np.nan)
        own = rows.coordinates if axes is None else axes
        super().__init__(given, array.reshape(rows.shape), describe_axes(rows.shape, own, rows.names))

    def filled(self, values: np.ndarray, gaps: np.ndarray, smooth: bool) -> Any:
        return _column(self.given, values.flat[self._places], gaps.flat[self._places], smooth)

    def like(self, values: np.ndarray) -> Any:
        import pandas

        return pandas.Series(values.flat[self._places], index=self.given.index, name=self.given.name)


def _column(column: Any, values: np.ndarray, gaps: np.ndarray, smooth: bool) -> Any:
    """A Series of the same dtype; pandas' own integers, which know gaps, are rounded."""
    result = column.copy()
    where = np.ones_like(gaps) if smooth else gaps
    kept = np.dtype(getattr(column.dtype, "numpy_dtype", column.dtype))
    result.iloc[np.flatnonzero(where)] = values[where] > 0.5 if kept.kind == "b" else to_dtype(values[where], kept)
    return result


class DataArrayKind(Kind):
    def __init__(self, given: Any, axes: Sequence[Any] | None) -> None:
        self.chunked = given.chunks is not None
        names = [str(dim) for dim in given.dims]
        known = [given.coords[dim] if dim in given.indexes else None for dim in given.dims]
        own = [None if one is None else one.values for one in known] if axes is None else axes
        attributes = [{} if one is None else one.attrs for one in known]
        array = given.data if self.chunked else given.values
        super().__init__(given, array, describe_axes(given.shape, own, names, attributes))

    def filled(self, values: np.ndarray, gaps: np.ndarray, smooth: bool) -> Any:
        return self.given.copy(data=put(self.given.values, values, gaps, smooth))

    def like(self, values: Any) -> Any:
        flags = values.dtype == bool
        result = self.given.copy(data=values if flags else values.astype(_floating(self.given.dtype)))
        named = str(result.attrs.pop("long_name", result.name or "values"))
        kept = {} if flags else {key: result.attrs[key] for key in ("units",) if key in result.attrs}
        result.attrs = {"long_name": f"gaps of {named}" if flags else f"standard deviation of {named}", **kept}
        result.encoding = {}
        return result
