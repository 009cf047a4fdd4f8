"""Reads masks and other arrays from files of any format."""

from pathlib import Path
from typing import Any

import numpy as np

from gpytorch_gaps.formats.opened import choose, format_of, reading, require
from gpytorch_gaps.formats.xarray_files import XarrayFile


def open_mask(path: Path | str, variable: str | None = None) -> Any:
    """The mask in a file, in memory. The mask of a picture is true where pixels are neither black nor transparent.

    :param path: the file.
    :param variable: as in :func:`open_array`.
    :return: an array, a DataFrame or a DataArray of flags or numbers.
    """
    data = open_array(path, variable)
    if np.ma.isMaskedArray(data):  # transparent pixels
        return data.filled(0).any(axis=-1) if data.ndim == 3 else data.filled(0)
    return data


def open_array(path: Path | str, variable: str | None = None) -> Any:
    """The only array of a file, or the array with the given name, in memory.

    :param path: the file.
    :param variable: one of its arrays. Default: the only one.
    :return: an array, a masked array, a DataFrame or a DataArray of flags or numbers.
    :raises ValueError: if the file has several arrays and no name is given, or no array with this name.
    """
    path = Path(path)
    kind = format_of(path)
    require(path, *kind.packages)
    if path.suffix.lower() in (".npy", ".npz"):
        with reading(path, f"a {path.suffix} file"):
            loaded: Any = np.load(path, allow_pickle=False)
        return loaded if isinstance(loaded, np.ndarray) else loaded[_only(path, list(loaded), variable)]
    if issubclass(kind, XarrayFile):
        with reading(path, f"a {path.suffix} file"):
            dataset = kind._open(path)
        with dataset:
            names = [str(name) for name, held in dataset.data_vars.items() if held.dims and held.dtype.kind in "biuf"]
            return dataset[_only(path, names, variable)].load()
    with kind.read(path, variable, None) as opened:
        return opened.data


def _only(path: Path, names: list[str], variable: str | None) -> str:
    if variable is not None:
        return choose(path, names, variable)
    if len(names) != 1:
        raise ValueError(f"{path}: got the arrays {', '.join(names) or 'none'}, expected one; name it: {path}:NAME")
    return names[0]
