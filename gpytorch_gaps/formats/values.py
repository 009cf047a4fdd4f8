"""Gaps and number types of plain arrays.

A file keeps its number type: ``held[gap] = round(filled[gap])``, clipped to what the type holds and never onto
a value that means a gap; everything observed stays as it is, to the bit.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpytorch_gaps.formats.opened import Opened, single_array

SLAB_BYTES = 2**26


def slabs(shape: tuple[int, ...], itemsize: int, multiple: int = 1) -> Iterator[slice]:
    """Slices of the first dimension, of about `SLAB_BYTES` each and of a `multiple` of rows, as chunks lie."""
    row = max(1, itemsize * int(np.prod(shape[1:])))
    step = max(1, SLAB_BYTES // row // multiple) * multiple
    return (slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step))


def equal_to(array: np.ndarray, value: float) -> np.ndarray:
    """Where `array` is `value`, as its type holds it: 0.1 is found among float32, 2^63 - 1 alone among int64."""
    if array.dtype.kind == "f":
        with np.errstate(over="ignore"):
            return array == array.dtype.type(value)
    return array == int(value) if float(value).is_integer() else np.zeros(array.shape, dtype=bool)


def with_gaps(array: np.ndarray, gap_values: Sequence[float]) -> np.ndarray:
    """`array` itself where there are no `gap_values`, else around it, unread, a mask of these and of NaN."""
    if not gap_values:
        return array
    mask = np.zeros(array.shape, dtype=bool)
    for rows in slabs(array.shape, array.itemsize):
        part = np.asarray(array[rows])
        for value in gap_values:
            mask[rows] |= equal_to(part, value)
        mask[rows] |= is_gap(part)
    return np.ma.MaskedArray(array, mask=mask, copy=False)


def is_gap(array: Any) -> np.ndarray:
    mask = np.ma.getmaskarray(array)
    values = np.ma.getdata(array)
    return mask | np.isnan(values) if values.dtype.kind == "f" else mask


def to_dtype(values: np.ndarray, dtype: np.dtype, reserved: Sequence[float] = ()) -> np.ndarray:
    """`values`, none of them NaN, as `dtype`: clipped, rounded, and off the `reserved` ones onto the next number."""
    limits: Any = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
    if dtype.kind != "f" and values.dtype.kind == "f":
        low, high = float(limits.min), float(limits.max)
        high = np.nextafter(high, 0) if high > limits.max else high  # 2^63 - 1 is no float64: 2^63 would wrap around
        values = np.rint(values.astype(np.float64, copy=False)).clip(low, high)
    stored = values.clip(limits.min, limits.max).astype(dtype)
    for value in reserved:
        marked = equal_to(stored, value)
        if marked.any():
            stored[marked] = beside(value, dtype, reserved)
    return stored


def beside(value: float, dtype: np.dtype, reserved: Sequence[float]) -> Any:
    """The number next to `value` that `dtype` holds and that is not `reserved`."""
    if dtype.kind == "f":
        return np.nextafter(dtype.type(value), dtype.type(0 if value else 1))
    limits, taken = np.iinfo(dtype), {int(one) for one in reserved if float(one).is_integer()}
    reach = range(max(limits.min, int(value) - len(taken)), min(limits.max, int(value) + len(taken)) + 1)
    return min((number for number in reach if number not in taken), key=lambda number: abs(number - int(value)))


def put(held: np.ndarray, data: Any, filled: Any, reserved: Sequence[float] = ()) -> np.ndarray:
    """A copy of `held`, what the file has for `data`, with `filled` in the gaps of `data` that it fills."""
    result = np.array(held)
    new = is_gap(data) & ~is_gap(filled)
    result[new] = to_dtype(np.ma.getdata(filled)[new], result.dtype, reserved)
    return result


def plain(values: Any) -> np.ndarray:
    """A floating array as it is, NaN where it is masked."""
    return values.filled(np.nan) if np.ma.isMaskedArray(values) and values.dtype.kind == "f" else np.ma.getdata(values)


class ArrayFile(Opened):
    """A file of one array: `held` is what it has, `reserved` are the values that mean a gap there."""

    def __init__(self, path: Path, held: np.ndarray, reserved: Sequence[float] = (), **described: Any) -> None:
        super().__init__(path, with_gaps(held, reserved), **described)
        self.held, self.reserved = held, reserved

    def _converted(self, filled: Any, lossless: bool) -> np.ndarray:
        return plain(filled) if lossless else put(self.held, self.data, filled, self.reserved)


def as_array(opened: Opened, filled: Any, path: Path) -> np.ndarray:
    """One plain array of whatever was opened."""
    one = single_array(opened, filled, path)
    return np.asarray(getattr(one, "values", one))
