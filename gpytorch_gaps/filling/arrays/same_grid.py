"""Further arrays on the grid of the values: masks, known errors, backgrounds.

Arrays with labels are matched by the names of their dimensions or by their index, others by the rules of NumPy.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from gpytorch_gaps.filling.arrays.adapters import ArrayAdapter, adapt
from gpytorch_gaps.filling.axes.index_grid import is_a


def on_shape(values: Any, array: Any, argument: str) -> Any:
    """An array in the shape of `values`: an ndarray, or a dask array if it is one.

    :param argument: the name of the array in messages.
    :raises ValueError: if it does not fit the values, or does not contain flags or real numbers.
    """
    shape = tuple(values.shape)
    found = _labelled(values, array, argument)
    kind = np.dtype(found.dtype).kind if hasattr(found, "dtype") else "O"
    if kind not in "biuf":
        raise ValueError(f"{argument}: got {getattr(found, 'dtype', type(array).__name__)}, expected flags or numbers")
    if hasattr(found, "chunks"):
        import dask.array

        broadcast: Any = dask.array.broadcast_to
    else:
        broadcast = np.broadcast_to
    try:
        return broadcast(found, shape)
    except ValueError:
        raise ValueError(
            f"{argument}: got an array of the shape {tuple(found.shape)}, expected {shape}, as values, or a shape "
            "that NumPy broadcasts to it"
        ) from None


def on_grid(adapter: ArrayAdapter, array: Any, argument: str, absent: float | None = None) -> Any:
    """An array in the shape of an adapter's grid. Rows of pandas objects may have another order there.

    :param absent: entries for variables without an array, if `array` is a mapping by variable.
    """
    given = adapter.given
    if isinstance(given, Mapping):  # several variables
        arrays = [(one, absent if array.get(name) is None else array[name]) for name, one in given.items()]
        dims = next(iter(given.values())).dims
        return np.stack([np.asarray(on_shape(one.transpose(*dims), own, argument)) for one, own in arrays])
    found = on_shape(given, array, argument)
    if is_a(given, "pandas", "DataFrame") or is_a(given, "pandas", "Series"):
        return adapt(pandas_like(given, found)).array.reshape(adapter.shape)
    return found


def pandas_like(given: Any, array: Any) -> Any:
    """An array as a Series or DataFrame with the labels of another."""
    import pandas

    if given.ndim == 1:
        return pandas.Series(np.asarray(array), index=given.index)
    return pandas.DataFrame(np.asarray(array), index=given.index, columns=given.columns)


def _labelled(values: Any, array: Any, argument: str) -> Any:
    """The array, with the labels of its dimensions matched to those of `values`."""
    if is_a(array, "xarray", "DataArray"):
        return _by_dimensions(values, array, argument) if is_a(values, "xarray", "DataArray") else array.data
    if is_a(array, "pandas", "DataFrame") or is_a(array, "pandas", "Series"):
        return _by_index(values, array, argument)
    if isinstance(array, torch.Tensor):
        return array.detach().cpu().numpy()
    if hasattr(array, "chunks"):
        return array
    masked = np.ma.asarray(array)
    return np.ma.filled(masked, False if masked.dtype.kind == "b" else np.nan if masked.dtype.kind == "f" else 0)


def _by_index(values: Any, array: Any, argument: str) -> np.ndarray:
    """The numbers of a Series or DataFrame with the index of `values`. A Series may have the index of the columns."""
    numbers = array.to_numpy(dtype=np.float64, na_value=np.nan)
    if not (hasattr(values, "index") and hasattr(values, "iloc")):
        return numbers
    columns = getattr(values, "columns", None)
    if array.ndim == 1 and columns is not None and array.index.equals(columns):
        return numbers
    _require_equal(f"{argument}: its index", array.index, values.index)
    if array.ndim == 2 and columns is not None:
        _require_equal(f"{argument}: its columns", array.columns, columns)
    return numbers[:, None] if array.ndim < values.ndim else numbers


def _by_dimensions(values: Any, array: Any, argument: str) -> Any:
    """The array with the dimensions of `values`, in their order. Missing dimensions have length one."""
    import xarray

    unknown = [str(dim) for dim in array.dims if dim not in values.dims]
    if unknown:
        raise ValueError(f"{argument}: got the dimensions {unknown}, expected some of {list(map(str, values.dims))}")
    try:
        xarray.align(array, values, join="exact")
    except ValueError as error:
        raise ValueError(
            f"{argument}: its coordinates differ from those of values ({str(error).splitlines()[0]}); expected the "
            f'same. Try {argument}.reindex_like(values, method="nearest")'
        ) from None
    data = array.transpose(*[dim for dim in values.dims if dim in array.dims]).data
    return data[tuple(slice(None) if dim in array.dims else None for dim in values.dims)]


def _require_equal(what: str, got: Any, expected: Any) -> None:
    if not got.equals(expected):
        raise ValueError(f"{what} differs from that of values; expected the same. Try .reindex_like(values)")
