"""Masks of the cells of an array, given as an array, tensor, DataArray or DataFrame: flags of the same shape.

A mask has flags, or numbers: as in the land masks of models, any number but 0 is True. NaN is False.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from gpytorch_gaps.filling.adapters import ArrayAdapter, adapt
from gpytorch_gaps.filling.index_grid import is_a


def flags_of(values: Any, mask: Any, argument: str) -> Any:
    """A mask as flags of the shape of `values`: an ndarray, or a dask array if the mask is one.

    Masks with labels are matched by the names of their dimensions, or by their index; others by the rules of NumPy.

    :param argument: the name of the mask in messages.
    :raises ValueError: if the mask does not fit to the values, or is neither of flags nor of numbers.
    """
    shape = tuple(values.shape)
    array = _labelled(values, mask, argument)
    kind = np.dtype(array.dtype).kind if hasattr(array, "dtype") else "O"
    if kind not in "biuf":
        raise ValueError(f"{argument}: got {getattr(array, 'dtype', type(mask).__name__)}, expected flags or numbers")
    flags = array if kind == "b" else (array != 0) & (array == array)
    if hasattr(flags, "chunks"):
        import dask.array

        broadcast: Any = dask.array.broadcast_to
    else:
        broadcast = np.broadcast_to
    try:
        return broadcast(flags, shape)
    except ValueError:
        raise ValueError(
            f"{argument}: got a mask of the shape {tuple(flags.shape)}, expected {shape}, as values has, or a shape "
            "that NumPy broadcasts to it"
        ) from None


def grid_flags(adapter: ArrayAdapter, mask: Any, argument: str) -> Any:
    """A mask as flags of the cells of the grid of an adapter. Rows of pandas may be in any order there."""
    given = adapter.given
    if isinstance(given, Mapping):  # several variables, and a mapping with the mask of each or None
        masks = [(one, True if mask.get(name) is None else mask[name]) for name, one in given.items()]
        dims = next(iter(given.values())).dims
        return np.stack([np.asarray(flags_of(one.transpose(*dims), own, argument)) for one, own in masks])
    flags = flags_of(given, mask, argument)
    if is_a(given, "pandas", "DataFrame") or is_a(given, "pandas", "Series"):
        return np.nan_to_num(adapt(_pandas_like(given, flags)).array).reshape(adapter.shape) != 0
    return flags


def ignoring(values: Any, untrusted: Any) -> Any:
    """A copy of `values`, of the same kind, with gaps where `untrusted` is True.

    Integers cannot be NaN: those of arrays become masked arrays, those of tensors and DataArrays numbers of 64 bits.
    """
    flags = flags_of(values, untrusted, "untrusted")
    if is_a(values, "xarray", "DataArray"):
        result = values.where(values.copy(data=~flags))
        result.encoding = values.encoding
        return result
    if is_a(values, "pandas", "DataFrame") or is_a(values, "pandas", "Series"):
        return values.mask(_pandas_like(values, flags))
    if isinstance(values, torch.Tensor):
        floating = values if values.is_floating_point() else values.double()
        return floating.masked_fill(torch.from_numpy(np.array(flags)).to(values.device), torch.nan)
    if np.ma.isMaskedArray(values) or values.dtype.kind != "f":
        return np.ma.MaskedArray(values, mask=np.ma.getmaskarray(values) | flags)
    return np.where(flags, np.nan, values).astype(values.dtype)


def _labelled(values: Any, mask: Any, argument: str) -> Any:
    """The mask as an array whose last dimensions are those of `values`."""
    if is_a(mask, "xarray", "DataArray"):
        return _by_dimensions(values, mask, argument) if is_a(values, "xarray", "DataArray") else mask.data
    if is_a(mask, "pandas", "DataFrame") or is_a(mask, "pandas", "Series"):
        if hasattr(values, "index") and hasattr(values, "iloc"):
            _require_equal(f"{argument}: its index", mask.index, values.index)
            if hasattr(mask, "columns") and hasattr(values, "columns"):
                _require_equal(f"{argument}: its columns", mask.columns, values.columns)
        array = mask.to_numpy(dtype=np.float64, na_value=np.nan)
        return array[:, None] if array.ndim < len(values.shape) == 2 else array
    if isinstance(mask, torch.Tensor):
        return mask.detach().cpu().numpy()
    return mask if hasattr(mask, "chunks") else np.ma.filled(np.ma.asarray(mask), False)


def _by_dimensions(values: Any, mask: Any, argument: str) -> Any:
    """The mask in the order of the dimensions of `values`, of length one where it has none of them."""
    import xarray

    unknown = [str(dim) for dim in mask.dims if dim not in values.dims]
    if unknown:
        raise ValueError(f"{argument}: got the dimensions {unknown}, expected some of {list(map(str, values.dims))}")
    try:
        xarray.align(mask, values, join="exact")
    except ValueError as error:
        raise ValueError(
            f"{argument}: its coordinates differ from those of values ({str(error).splitlines()[0]}); expected the "
            'same. Try mask.reindex_like(values, method="nearest")'
        ) from None
    data = mask.transpose(*[dim for dim in values.dims if dim in mask.dims]).data
    return data[tuple(slice(None) if dim in mask.dims else None for dim in values.dims)]


def _require_equal(what: str, got: Any, expected: Any) -> None:
    if not got.equals(expected):
        raise ValueError(f"{what} differs from that of values; expected the same. Try mask.reindex_like(values)")


def _pandas_like(given: Any, flags: Any) -> Any:
    import pandas

    if given.ndim == 1:
        return pandas.Series(np.asarray(flags), index=given.index)
    return pandas.DataFrame(np.asarray(flags), index=given.index, columns=given.columns)
