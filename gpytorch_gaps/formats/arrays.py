"""Files of one array without labels: their base class, and .npy, which is memory-mapped and written in slabs."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from gpytorch_gaps.formats.opened import OpenedFile, reading, require_numbers, single_array
from gpytorch_gaps.utils.dtypes import equal_to, is_gap, write_where
from gpytorch_gaps.utils.files import atomic_write

SLAB_BYTES = 2**26


def slabs(shape: tuple[int, ...], itemsize: int, multiple: int = 1) -> Iterator[slice]:
    """Slices of the first dimension of about `SLAB_BYTES` each, in multiples of `multiple` rows (a chunk)."""
    row = max(1, itemsize * int(np.prod(shape[1:])))
    step = max(1, SLAB_BYTES // row // multiple) * multiple
    return (slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step))


def with_gaps(array: np.ndarray, gap_values: Sequence[float]) -> np.ndarray:
    """`array` itself if there are no `gap_values`, else a view of it with these and NaN masked."""
    if not gap_values:
        return array
    mask = np.zeros(array.shape, dtype=bool)
    for rows in slabs(array.shape, array.itemsize):
        part = np.asarray(array[rows])
        for value in gap_values:
            mask[rows] |= equal_to(part, value)
        mask[rows] |= is_gap(part)
    return np.ma.MaskedArray(array, mask=mask, copy=False)


def with_filled(held: np.ndarray, data: Any, filled: Any, reserved: Sequence[float] = ()) -> np.ndarray:
    """A copy of `held` with the values of `filled` at the gaps of `data`. Gaps of `filled` remain gaps.

    :param held: the array as stored; `data` is the same array with its gaps masked or NaN.
    """
    return write_where(held, np.ma.getdata(filled), is_gap(data) & ~is_gap(filled), reserved)


class ArrayFile(OpenedFile):
    """A file of one array. `held` is the array as stored, and `reserved` are the numbers that mark a gap in it."""

    options: dict[str, Any]  # how the file stores its array: keyword arguments of `_save`

    def __init__(self, path: Path, held: np.ndarray, reserved: Sequence[float] = (), name: str = "values") -> None:
        super().__init__(path, with_gaps(held, reserved), name)
        self.held, self.reserved, self.options = held, reserved, {}

    @classmethod
    def _save(cls, array: np.ndarray, path: Path, **options: Any) -> None:
        """Writes the array, by default without any options."""
        raise NotImplementedError

    def _stored(self, filled: Any, lossless: bool) -> np.ndarray:
        """The array to write: floating-point numbers with NaN at gaps if `lossless`, else as the file stores them."""
        if not lossless:
            return with_filled(self.held, self.data, filled, self.reserved)
        masked = np.ma.isMaskedArray(filled) and filled.dtype.kind == "f"
        return filled.filled(np.nan) if masked else np.ma.getdata(filled)

    def _for_other_formats(self, filled: Any, lossless: bool) -> np.ndarray:
        return self._stored(filled, lossless)

    def _write_again(self, filled: Any, path: Path, lossless: bool) -> None:
        self._save(self._stored(filled, lossless), path, **self.options)

    @classmethod
    def _write_new(cls, opened: OpenedFile, filled: Any, path: Path) -> None:
        one = single_array(opened, filled, path)
        cls._save(np.asarray(getattr(one, "values", one)), path)


class NpyFile(ArrayFile):
    suffixes = (".npy",)

    dtype: np.dtype  # with the byte order of the file
    fortran_order: bool

    @classmethod
    def read(cls, path: Path, variable: str | None, gap_value: float | None) -> OpenedFile:
        expected = "an .npy array without Python objects"
        with reading(path, expected), path.open("rb") as stream:
            shape, dtype, fortran_order = read_header(stream)
        require_numbers(path, "the array", shape, dtype)
        with reading(path, expected):
            held = np.load(path, mmap_mode="r", allow_pickle=False)
        opened = cls(path, native(held), () if gap_value is None else (gap_value,))
        opened.dtype, opened.fortran_order = dtype, fortran_order
        return opened

    def _write_again(self, filled: Any, path: Path, lossless: bool) -> None:
        if lossless:
            return super()._write_again(filled, path, lossless)

        def write(stream: IO[bytes]) -> None:
            result = np.lib.format.open_memmap(stream.name, "w+", self.dtype, self.held.shape, self.fortran_order)
            for rows in slabs(self.held.shape, self.held.itemsize):
                result[rows] = with_filled(self.held[rows], self.data[rows], filled[rows], self.reserved)
            result.flush()

        return atomic_write(path, write)

    @classmethod
    def _save(cls, array: np.ndarray, path: Path, **options: Any) -> None:
        atomic_write(path, lambda stream: np.lib.format.write_array(stream, array, allow_pickle=False))


def read_header(stream: IO[bytes]) -> tuple[tuple[int, ...], np.dtype, bool]:
    """Shape, number type, and whether the first index runs fastest, of an array in the .npy format."""
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran_order, dtype = read(stream)
    return shape, dtype, fortran_order


def native(array: np.ndarray) -> np.ndarray:
    """The array in the byte order of this machine; a copy if it has the other one."""
    return array.astype(array.dtype.newbyteorder("="), copy=False)
