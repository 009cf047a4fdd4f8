"""NumPy's own files: an .npy is mapped into memory, of an .npz one array is read and the others stay as they are."""

import shutil
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np

from gpytorch_gaps.formats.labels import table_names
from gpytorch_gaps.formats.opened import Opened, choose, reading, require_numbers, single_array
from gpytorch_gaps.formats.values import ArrayFile, as_array, equal_to, is_gap, plain, put, slabs
from gpytorch_gaps.utils.files import atomic_write

Header = tuple[tuple[int, ...], np.dtype]


class NpyFile(ArrayFile):
    suffixes = (".npy",)

    dtype: np.dtype  # with the byte order of the file
    fortran_order: bool

    @classmethod
    def read(cls, path: Path, variable: str | None, gap_value: float | None) -> Opened:
        expected = "an .npy array without Python objects"
        with reading(path, expected), path.open("rb") as stream:
            shape, dtype, fortran_order = _header(stream)
        require_numbers(path, "the array", shape, dtype)
        with reading(path, expected):
            held = np.load(path, mmap_mode="r", allow_pickle=False)
        if not held.dtype.isnative:
            held = held.astype(held.dtype.newbyteorder("="))  # read, for nothing computes with swapped bytes
        opened = cls(path, held, () if gap_value is None else (gap_value,))
        opened.dtype, opened.fortran_order = dtype, fortran_order
        return opened

    def _write_again(self, filled: Any, path: Path, lossless: bool) -> None:
        if lossless:
            return self._write_new(self, plain(filled), path)

        def write(stream: IO[bytes]) -> None:
            result = np.lib.format.open_memmap(stream.name, "w+", self.dtype, self.held.shape, self.fortran_order)
            for rows in slabs(self.held.shape, self.held.itemsize):
                result[rows] = put(self.held[rows], self.data[rows], filled[rows], self.reserved)
            result.flush()

        return atomic_write(path, write)

    @classmethod
    def _write_new(cls, opened: Opened, filled: Any, path: Path) -> None:
        array = as_array(opened, filled, path)
        atomic_write(path, lambda stream: np.lib.format.write_array(stream, array, allow_pickle=False))

    @classmethod
    def _refuse(cls, opened: Opened, path: Path, lossless: bool) -> None:
        single_array(opened, opened.data, path)


class NpzFile(ArrayFile):
    suffixes = (".npz",)
    has_variables = True

    dtype: np.dtype  # with the byte order of the file

    @classmethod
    def read(cls, path: Path, variable: str | None, gap_value: float | None) -> Opened:
        """The array `variable`, or the only one with gaps, or the only one that is no coordinate of another."""
        reserved = () if gap_value is None else (gap_value,)
        expected = "an .npz archive of arrays without Python objects"
        with reading(path, expected):
            headers = _headers(path)

        def load(name: str) -> np.ndarray:
            with reading(path, expected), np.load(path, allow_pickle=False) as archive:
                array = archive[name]
            return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))

        if variable is None:
            variable = _only_candidate(path, headers, load, gap_value)
        name = choose(path, headers, variable)
        require_numbers(path, f"the array {name!r}", *headers[name])
        opened = cls(path, load(name), reserved, name=name)
        opened.dtype = headers[name][1]
        opened.coordinates = _coordinates(path, name, headers, load)
        if any(opened.coordinates):
            opened.axes = [None if found is None else _numbers(found[1]) for found in opened.coordinates]
        return opened

    def _write_again(self, filled: Any, path: Path, lossless: bool) -> None:
        array = self._converted(filled, lossless)
        array = array if lossless else array.astype(self.dtype, copy=False)

        def write(stream: IO[bytes]) -> None:
            with zipfile.ZipFile(self.path) as source, zipfile.ZipFile(stream, "w") as target:
                for member in source.infolist():
                    copy = zipfile.ZipInfo(member.filename, member.date_time)
                    copy.compress_type = member.compress_type
                    with target.open(copy, "w", force_zip64=True) as out:
                        if member.filename == f"{self.name}.npy":
                            np.lib.format.write_array(out, array, allow_pickle=False)
                        else:
                            with source.open(member) as before:
                                shutil.copyfileobj(before, out)

        atomic_write(path, write)

    @classmethod
    def _write_new(cls, opened: Opened, filled: Any, path: Path) -> None:
        arrays = _named_arrays(opened, filled)

        def write(stream: IO[bytes]) -> None:
            with zipfile.ZipFile(stream, "w") as target:  # np.savez has no room for an array of the name "file"
                for name, array in arrays.items():
                    with target.open(f"{name}.npy", "w", force_zip64=True) as out:
                        np.lib.format.write_array(out, array, allow_pickle=False)

        atomic_write(path, write)

    @classmethod
    def _refuse(cls, opened: Opened, path: Path, lossless: bool) -> None:
        """An .npz takes everything."""


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], np.dtype, bool]:
    """Shape, dtype, and whether the first index runs fastest."""
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran_order, dtype = read(stream)
    return shape, dtype, fortran_order


def _headers(path: Path) -> dict[str, Header]:
    """Shapes and dtypes without the arrays."""
    found = {}
    with zipfile.ZipFile(path) as archive:
        for member in archive.namelist():
            if member.endswith(".npy"):
                with archive.open(member) as stream:
                    found[member.removesuffix(".npy")] = _header(stream)[:2]
    return found


def _only_candidate(
    path: Path, headers: dict[str, Header], load: Callable[[str], np.ndarray], gap_value: float | None
) -> str:
    numeric = [name for name, (shape, dtype) in headers.items() if dtype.kind in "iuf" and shape]
    if not numeric:
        held = ", ".join(f"{name} {dtype}{shape}" for name, (shape, dtype) in headers.items()) or "nothing"
        raise ValueError(f"{path}: holds no array of numbers, only {held}")
    lengths = {length for name in numeric if len(headers[name][0]) > 1 for length in headers[name][0]}
    candidates = [
        name for name in numeric if len(headers[name][0]) > 1 or headers[name][0][0] not in lengths
    ] or numeric

    def has_gaps(name: str) -> bool:
        array = load(name)
        return bool(is_gap(array).any() or (gap_value is not None and equal_to(array, gap_value).any()))

    if len(candidates) > 1:
        candidates = [name for name in candidates if has_gaps(name)] or candidates
    if len(candidates) > 1:
        listed = ", ".join(f"{name} {headers[name][0]}" for name in candidates)
        raise ValueError(f"{path}: which array is meant? Pass --variable NAME, one of {listed}")
    return candidates[0]


def _coordinates(
    path: Path, name: str, headers: dict[str, Header], load: Callable[[str], np.ndarray]
) -> list[tuple[str, np.ndarray] | None]:
    """For each dimension the only other array, strictly rising or falling, that is as long as this dimension alone."""
    shape = headers[name][0]
    found: list[tuple[str, np.ndarray] | None] = [None] * len(shape)
    by_length: dict[int, list[tuple[str, np.ndarray]]] = {}
    for other, (its_shape, dtype) in headers.items():
        if other != name and len(its_shape) == 1 and its_shape[0] in shape and dtype.kind in "iufM":
            array = load(other)
            if np.isfinite(array).all() and ((array[1:] > array[:-1]).all() or (array[1:] < array[:-1]).all()):
                by_length.setdefault(its_shape[0], []).append((other, array))
    for length, matches in by_length.items():
        if len(matches) == 1 and shape.count(length) == 1:
            found[shape.index(length)] = matches[0]
        else:
            names = ", ".join(other for other, _ in matches)
            warnings.warn(
                f"{path}: {names} may be coordinates of {name} {shape}, but of which dimension is not clear; "
                "they are not used",
                stacklevel=4,
            )
    return found


def _numbers(coordinates: np.ndarray) -> np.ndarray:
    """Times as days since the first."""
    return (coordinates - coordinates[0]) / np.timedelta64(1, "D") if coordinates.dtype.kind == "M" else coordinates


def _named_arrays(opened: Opened, filled: Any) -> dict[str, np.ndarray]:
    """The arrays and their coordinates; labels, which may be Python objects, as strings."""
    if hasattr(filled, "coords"):
        held = filled.to_dataset(name=filled.name or opened.name) if hasattr(filled, "to_dataset") else filled
        arrays = {str(name): held[name].values for name in held.variables}
    elif hasattr(filled, "columns"):
        row, column, name = table_names(filled, "index", "columns")
        arrays = {name: filled.values, row: filled.index.values, column: filled.columns.values}
    else:
        arrays = {opened.name: filled, **dict(found for found in opened.coordinates if found)}
    return {
        name: np.asarray(a).astype(str) if getattr(a.dtype, "kind", "O") not in "biufmMSU" else np.asarray(a)
        for name, a in arrays.items()
    }
