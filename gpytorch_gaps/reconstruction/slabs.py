"""Values of a grid as slabs: consecutive slices of its first axis, whatever they come from."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_NUMBERS = 2**24  # in a slab that we cut ourselves


class Slabs:
    """What `values` holds, slice by slice: a tensor, an array, anything that is sliced like one, or an iterable.

    An array may be a ``numpy.memmap``, or of zarr, HDF5 or dask: only the slab that is asked for is read. An iterable
    gives arrays of shape (k, m_2, .., m_d), for any k, in the order of the first axis, and is gone through once.
    Gaps are NaN, or masked in a NumPy masked array.

    Where several ranks share a grid, each goes through `rows` of the first axis only, and reads nothing else: an array
    is that of the whole grid, an iterable gives the slabs of these rows.
    """

    def __init__(self, values: Any, shape: Sequence[int] | None) -> None:
        self._values = values
        own = getattr(values, "shape", None)
        if own is not None:
            own = tuple(int(size) for size in own)
            if shape is not None and own != tuple(shape):
                raise ValueError(f"values: got shape {own}, expected {tuple(shape)}, the lengths of the axes")
        elif not isinstance(values, Iterable):
            raise ValueError(f"values: got {type(values).__name__}, expected an array, or an iterable of slabs")
        elif shape is None:
            raise ValueError("axes: got none with an iterable of slabs, expected one for each dimension")
        self.shape = tuple(shape if own is None or shape is not None else own)  # type: ignore[arg-type]
        self._sliced = own is not None
        if not self.shape or 0 in self.shape:
            raise ValueError(f"values: got shape {self.shape}, expected one dimension or more, none of them 0")
        some = values[0] if own is None and isinstance(values, Sequence) and len(values) else values
        kind = getattr(some, "dtype", None)
        self.dtype = torch.float64 if kind is None else _floating(kind)
        self.rows = slice(0, self.shape[0])

    @property
    def chunk(self) -> int:
        """Slices that are stored, and read, together."""
        chunks = getattr(self._values, "chunks", None)  # of zarr and HDF5 a number an axis, of dask one a block
        first = chunks[0] if isinstance(chunks, tuple) and len(chunks) == len(self.shape) else 1
        first = first[0] if isinstance(first, tuple) and first else first
        return first if isinstance(first, int) and first > 0 else 1

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        """The first slice of each slab, and the slab. shape: (k, m_2, .., m_d)"""
        rest, start = self.shape[1:], self.rows.start
        count = self.rows.stop - self.rows.start
        expected = "the length of axis 0" if count == self.shape[0] else f"those from {self.rows.start} on"
        for part in self._parts():
            slab = _as_tensor(part)
            if slab.dim() != len(self.shape) or tuple(slab.shape[1:]) != rest:
                raise ValueError(
                    f"values: the slab that begins at slice {start} has shape {tuple(slab.shape)}, expected (k, "
                    f"{', '.join(map(str, rest))})"
                )
            if start + len(slab) > self.rows.stop:
                raise ValueError(f"values: got more than {count} slices, expected {count}: {expected}")
            yield start, slab
            start += len(slab)
        if start != self.rows.stop:
            raise ValueError(f"values: got {start - self.rows.start} slices, expected {count}, {expected}")

    def _parts(self) -> Iterator[Any]:
        if not self._sliced:
            yield from self._values
            return
        step = max(1, _NUMBERS // math.prod(self.shape[1:]))
        for start in range(self.rows.start, self.rows.stop, step):
            yield self._values[start : min(start + step, self.rows.stop)]


def _as_tensor(part: Any) -> Tensor:
    if isinstance(part, Tensor):
        if part.is_complex():
            raise ValueError(f"values: got {part.dtype}, expected real numbers")
        return part if part.is_floating_point() else part.double()
    try:
        array = part if isinstance(part, np.ndarray) else np.asarray(part)
    except ValueError as error:
        raise ValueError(f"values: expected real numbers, but {error}") from error
    floating = array.dtype.kind == "f"
    if array.dtype.kind not in "fiub":
        raise ValueError(f"values: got {array.dtype}, expected real numbers")
    if isinstance(array, np.ma.MaskedArray):
        array = np.ma.filled(array if floating else array.astype(np.float64), np.nan)
    # torch reads native memory that it may write to, forwards: anything else is copied, slab by slab
    kind = np.dtype("float64") if array.dtype.itemsize > 8 else array.dtype.newbyteorder("=")
    array = np.asarray(array, dtype=kind)
    plain = array.flags.writeable and min(array.strides, default=0) >= 0
    tensor = torch.from_numpy(array if plain else array.copy(order="C"))
    return tensor if tensor.is_floating_point() else tensor.double()


def _floating(kind: Any) -> torch.dtype:
    """The precision that results are given in: that of the values."""
    name = str(kind).removeprefix("torch.")
    return torch.float32 if name in ("float32", ">f4", "float16", ">f2", "bfloat16") else torch.float64
