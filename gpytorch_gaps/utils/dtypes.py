"""Number types of arrays: where their gaps are, and how filled values are stored among observed ones.

An array keeps its number type. Values that fill gaps are rounded and clipped to what the type holds, and are never
stored as a number that marks a gap. Observed values do not change, bit for bit.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np


def is_gap(array: Any) -> np.ndarray:
    """Where an array, masked or not, has a gap: masked entries and NaN.

    >>> import numpy as np
    >>> is_gap(np.ma.MaskedArray([1.0, np.nan, 3.0], mask=[0, 0, 1])).tolist()
    [False, True, True]
    """
    mask = np.ma.getmaskarray(array)
    values = np.ma.getdata(array)
    return mask | np.isnan(values) if values.dtype.kind == "f" else mask


def equal_to(array: np.ndarray, value: float) -> np.ndarray:
    """Where `array` equals `value` in its own type: 0.1 is found among float32, and only 2^63 - 1 among int64."""
    if array.dtype.kind == "f":
        with np.errstate(over="ignore"):
            return array == array.dtype.type(value)
    return array == int(value) if float(value).is_integer() else np.zeros(array.shape, dtype=bool)


def to_dtype(values: np.ndarray, dtype: np.dtype, reserved: Sequence[float] = ()) -> np.ndarray:
    """`values`, none of them NaN, as `dtype`: rounded, clipped, and moved off the `reserved` numbers.

    Flags are set where values are above one half.

    >>> import numpy as np
    >>> to_dtype(np.array([-3.0, 6.6, 300.0]), np.dtype("uint8"), reserved=[7]).tolist()
    [0, 6, 255]
    """
    if dtype.kind == "b":
        return values > 0.5
    limits: Any = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
    if dtype.kind != "f" and values.dtype.kind == "f":
        low, high = float(limits.min), float(limits.max)
        high = np.nextafter(high, 0) if high > limits.max else high  # no float64 equals 2^63 - 1, and 2^63 would wrap
        values = np.rint(values.astype(np.float64, copy=False)).clip(low, high)
    stored = values.clip(limits.min, limits.max).astype(dtype)
    for value in reserved:
        marked = equal_to(stored, value)
        if marked.any():
            stored[marked] = next_to(value, dtype, reserved)
    return stored


def next_to(value: float, dtype: np.dtype, reserved: Sequence[float]) -> Any:
    """The nearest number to `value` that `dtype` holds and that is not `reserved`."""
    if dtype.kind == "f":
        return np.nextafter(dtype.type(value), dtype.type(0 if value else 1))
    limits, taken = np.iinfo(dtype), {int(one) for one in reserved if float(one).is_integer()}
    reach = range(max(limits.min, int(value) - len(taken)), min(limits.max, int(value) + len(taken)) + 1)
    return min((number for number in reach if number not in taken), key=lambda number: abs(number - int(value)))


def write_where(held: Any, values: np.ndarray, where: np.ndarray, reserved: Sequence[float] = ()) -> np.ndarray:
    """A copy of `held`, masked or not, with `values` at the entries `where`, as its number type stores them.

    :param reserved: numbers that mark a gap in `held`, and are not written.

    >>> import numpy as np
    >>> write_where(np.array([1, 99, 3]), np.array([0.0, 6.7, 0.0]), np.array([False, True, False])).tolist()
    [1, 7, 3]
    """
    result = np.array(np.ma.getdata(held))
    result[where] = to_dtype(values[where], result.dtype, reserved)
    return result
