"""NumPy's .npz archives: one array is read, with its coordinates; all other members are copied unchanged."""

import shutil
import warnings
import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np

from gpytorch_gaps.formats.arrays import ArrayFile, native, read_header, with_gaps
from gpytorch_gaps.formats.opened import OpenedFile, choose, reading, require_numbers
from gpytorch_gaps.utils.dtypes import is_gap
from gpytorch_gaps.utils.files import atomic_write


class NpzFile(ArrayFile):
    suffixes = (".npz",)
    has_variables = True
    holds_one_array = False

    dtype: np.dtype  # with the byte order of the file

    @classmethod
    def read(cls, path: Path, variable: str | None, gap_value: float | None) -> OpenedFile:
        """The array `variable`. Default: the only array with gaps, or the only one that is not a coordinate."""
        archive = _Archive(path)
        name = choose(path, archive.headers, archive.candidate(gap_value) if variable is None else variable)
        require_numbers(path, f"the array {name!r}", *archive.headers[name])
        opened = cls(path, archive.load(name), () if gap_value is None else (gap_value,), name)
        opened.dtype = archive.headers[name][1]
        opened.coordinates = archive.coordinates(name)
        if any(opened.coordinates):
            opened.axes = dict(found or (f"axis {i}", None) for i, found in enumerate(opened.coordinates))
        return opened

    def names(self) -> list[str]:
        return list(_Archive(self.path).headers)

    def take_out(self, name: str) -> np.ndarray:
        if choose(self.path, self.names(), name) == self.name:
            self._refuse_to_take(name)
        return _Archive(self.path).load(name)

    def _write_again(self, filled: Any, path: Path, lossless: bool) -> None:
        array = self._stored(filled, lossless)
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
    def _write_new(cls, opened: OpenedFile, filled: Any, path: Path) -> None:
        arrays = _named_arrays(opened, filled)

        def write(stream: IO[bytes]) -> None:
            with zipfile.ZipFile(stream, "w") as target:  # np.savez cannot write an array with the name "file"
                for name, array in arrays.items():
                    with target.open(f"{name}.npy", "w", force_zip64=True) as out:
                        np.lib.format.write_array(out, array, allow_pickle=False)

        atomic_write(path, write)


class _Archive:
    """The arrays of an .npz file: `headers` are their shapes and number types."""

    expected = "an .npz archive of arrays without Python objects"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.headers: dict[str, tuple[tuple[int, ...], np.dtype]] = {}
        with reading(path, self.expected), zipfile.ZipFile(path) as archive:
            for member in archive.namelist():
                if member.endswith(".npy"):
                    with archive.open(member) as stream:
                        self.headers[member.removesuffix(".npy")] = read_header(stream)[:2]

    def load(self, name: str) -> np.ndarray:
        with reading(self.path, self.expected), np.load(self.path, allow_pickle=False) as archive:
            return native(archive[name])

    def candidate(self, gap_value: float | None) -> str:
        """The array to fill if no name is given."""
        headers, gap_values = self.headers, () if gap_value is None else (gap_value,)
        numeric = {name: shape for name, (shape, dtype) in headers.items() if dtype.kind in "iuf" and shape}
        if not numeric:
            held = ", ".join(f"{name} {dtype}{shape}" for name, (shape, dtype) in headers.items()) or "nothing"
            raise ValueError(f"{self.path}: holds no array of numbers, only {held}")
        lengths = {length for shape in numeric.values() if len(shape) > 1 for length in shape}
        names = [name for name, shape in numeric.items() if len(shape) > 1 or shape[0] not in lengths] or list(numeric)
        if len(names) > 1:
            names = [name for name in names if is_gap(with_gaps(self.load(name), gap_values)).any()] or names
        if len(names) > 1:
            listed = ", ".join(f"{name} {numeric[name]}" for name in names)
            raise ValueError(f"{self.path}: got several arrays, expected one. Try: --variable NAME, one of {listed}")
        return names[0]

    def coordinates(self, name: str) -> list[tuple[str, np.ndarray] | None]:
        """The coordinates of each dimension: the only other array that has its length and can be an axis, or None."""
        shape = self.headers[name][0]
        found: list[tuple[str, np.ndarray] | None] = [None] * len(shape)
        by_length: dict[int, list[tuple[str, np.ndarray]]] = {}
        for other, (its_shape, dtype) in self.headers.items():
            if other != name and len(its_shape) == 1 and its_shape[0] in shape and dtype.kind in "iufMU":
                array = self.load(other)
                if _is_an_axis(array):
                    by_length.setdefault(its_shape[0], []).append((other, array))
        for length, matches in by_length.items():
            if len(matches) == 1 and shape.count(length) == 1:
                found[shape.index(length)] = matches[0]
            else:
                names = ", ".join(other for other, _ in matches)
                warnings.warn(
                    f"{self.path}: {names} may be coordinates of {name} {shape}, but it is not clear of which "
                    "dimension; they are not used",
                    stacklevel=4,
                )
        return found


def _is_an_axis(array: np.ndarray) -> bool:
    """Whether an array is strictly monotonic, or consists of distinct texts."""
    if array.dtype.kind == "U":
        return len(set(array.tolist())) == len(array)
    return bool(np.isfinite(array).all() and ((array[1:] > array[:-1]).all() or (array[1:] < array[:-1]).all()))


def _named_arrays(opened: OpenedFile, filled: Any) -> dict[str, np.ndarray]:
    """The arrays and their coordinates. Labels, which may be Python objects, become strings."""
    if hasattr(filled, "coords"):
        held = filled.to_dataset(name=filled.name or opened.name) if hasattr(filled, "to_dataset") else filled
        arrays = {str(name): held[name].values for name in held.variables}
    else:
        name, values, coordinates = opened._labelled(filled)
        arrays = {name: values, **dict(filter(None, coordinates))}
    return {
        name: np.asarray(a).astype(str) if getattr(a.dtype, "kind", "O") not in "biufmMSU" else np.asarray(a)
        for name, a in arrays.items()
    }
