"""Reads further arrays from the same file or from another."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from gpytorch_gaps.formats import OpenedFile
from gpytorch_gaps.formats.masks import open_array


def read_source(
    option: str, given: str, opened: OpenedFile, read: Callable[[str, str | None], Any] = open_array
) -> Any:
    """Another array of the opened file, or the array of another file. FILE:NAME names one of several arrays.

    :param read: the function that reads a file.
    :raises ValueError: if there is neither such an array nor such a file.
    """
    if given in opened.names():
        return opened.take_out(given)
    path, colon, name = given.rpartition(":")
    if not Path(given).exists() and colon and Path(path).exists():
        return read(path, name)
    if not Path(given).exists():
        held = ", ".join(opened.names()) or "an array without a name"
        raise ValueError(f"{option}: got {given!r}, expected a file, or an array of {opened.path}, which has {held}")
    return read(given, None)


def of_variables(option: str, opened: OpenedFile, array: Any) -> Any:
    """The array. For several variables, a dictionary: the array for variables with its dimensions, None for others."""
    data = opened.data
    if not hasattr(data, "data_vars"):
        pixels = getattr(data, "ndim", 0) == getattr(array, "ndim", 0) + 1 and data.shape[:-1] == array.shape
        return array[..., None] if pixels and isinstance(array, np.ndarray) else array
    dims = getattr(array, "dims", None)
    if dims is None:
        raise ValueError(f"{option}: got an array without dimensions for several variables; pick one with --variable")
    found = {name: array if set(dims) <= set(one.dims) else None for name, one in data.data_vars.items()}
    if all(one is None for one in found.values()):
        raise ValueError(f"{option}: got the dimensions {list(map(str, dims))}, expected those of a variable to fill")
    return found
