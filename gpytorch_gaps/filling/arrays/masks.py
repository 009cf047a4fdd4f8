"""Masks of the cells of an array, from an array, tensor, DataArray or DataFrame.

A mask contains flags or numbers. As in the land masks of models, any number except 0 is True. NaN is False.
"""

from typing import Any

import numpy as np
import torch

from gpytorch_gaps.filling.arrays.adapters import ArrayAdapter
from gpytorch_gaps.filling.arrays.same_grid import on_grid, on_shape, pandas_like
from gpytorch_gaps.filling.axes.index_grid import is_a


def flags_of(values: Any, mask: Any, argument: str) -> Any:
    """A mask as flags with the shape of `values`: an ndarray, or a dask array if the mask is one.

    :param argument: the name of the mask in messages.
    :raises ValueError: if the mask does not fit the values, or contains neither flags nor numbers.
    """
    return _flags(on_shape(values, mask, argument))


def grid_flags(adapter: ArrayAdapter, mask: Any, argument: str) -> Any:
    """A mask as flags of the cells of an adapter's grid. True for variables without a mask."""
    return _flags(on_grid(adapter, mask, argument, absent=True))


def _flags(array: Any) -> Any:
    return array if np.dtype(array.dtype).kind == "b" else (array != 0) & (array == array)


def ignoring(values: Any, untrusted: Any) -> Any:
    """A copy of `values`, of the same kind, with gaps where `untrusted` is True.

    Integers cannot be NaN. Arrays of integers become masked arrays; tensors and DataArrays become float64.
    """
    values = values if hasattr(values, "shape") else np.array(values, dtype=np.float64)  # None becomes NaN
    flags = flags_of(values, untrusted, "untrusted")
    if is_a(values, "xarray", "DataArray"):
        result = values.where(values.copy(data=~flags))
        result.encoding = values.encoding
        return result
    if is_a(values, "pandas", "DataFrame") or is_a(values, "pandas", "Series"):
        return values.mask(pandas_like(values, flags))
    if isinstance(values, torch.Tensor):
        floating = values if values.is_floating_point() else values.double()
        return floating.masked_fill(torch.from_numpy(np.array(flags)).to(values.device), torch.nan)
    if np.ma.isMaskedArray(values) or values.dtype.kind != "f":
        return np.ma.MaskedArray(values, mask=np.ma.getmaskarray(values) | flags)
    return np.where(flags, np.nan, values).astype(values.dtype)
