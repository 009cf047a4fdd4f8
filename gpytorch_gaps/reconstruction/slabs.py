"""The values of a grid, read once as slabs, that is, consecutive slices of the first axis, from any source."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpytorch_gaps.linalg.masked_grid import MaskedGrid, blocks
from gpytorch_gaps.linalg.products import kron_matmul
from gpytorch_gaps.linalg.selection import unravel
from gpytorch_gaps.reconstruction.sharding import Weights
from gpytorch_gaps.utils.progress import with_bar

_READ_NUMBERS = 2**24  # size of a slab that is cut from an array
_PROJECT_NUMBERS = 2**22  # values that are projected at once


class Slabs:
    """The values of a grid, as an iterable of slabs.

    An array may be a ``numpy.memmap``, or belong to zarr, HDF5 or dask: one slab is read at a time. An iterable yields
    arrays of shape (k, m_2, .., m_d), for any k, in the order of the first axis, and is consumed once. Gaps are NaN, or
    masked in a NumPy masked array.

    If several processes share a grid, each iterates over its own `rows` of the first axis, and reads only these. An
    array contains the whole grid. An iterable yields only the slabs of these rows.

    :param values: a tensor, an array, an object that is sliced like one, or an iterable of slabs.
    :param shape: lengths of the axes; None for the shape of the array.
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
        self._is_array = own is not None
        if not self.shape or 0 in self.shape:
            raise ValueError(f"values: got shape {self.shape}, expected one dimension or more, none of them 0")
        sample = values[0] if own is None and isinstance(values, Sequence) and len(values) else values
        self.dtype = _result_dtype(getattr(sample, "dtype", "float64"))
        self.rows = slice(0, self.shape[0])

    @property
    def chunk(self) -> int:
        """The number of slices that are stored, and read, together."""
        chunks = getattr(self._values, "chunks", None)  # zarr and HDF5: one number per axis; dask: one per block
        first = chunks[0] if isinstance(chunks, tuple) and len(chunks) == len(self.shape) else 1
        first = first[0] if isinstance(first, tuple) and first else first
        return first if isinstance(first, int) and first > 0 else 1

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        """The index of the first slice of each slab, and the slab. shape: (k, m_2, .., m_d)"""
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
        if not self._is_array:
            yield from self._values
            return
        step = max(1, _READ_NUMBERS // math.prod(self.shape[1:]))
        for start in range(self.rows.start, self.rows.stop, step):
            yield self._values[start : min(start + step, self.rows.stop)]


def read_slabs(
    slabs: Slabs,
    weights: Weights,
    mean: Callable[[int, int], float | Tensor],
    scale: Callable[[int, int], float | Tensor] | None = None,
) -> tuple[MaskedGrid, Tensor, float]:
    """Read the slices of this process once.

    :param mean: a function that gives the prior mean of some slices.
    :param scale: a function that gives the divisors of ``y - mean`` in some slices. Default: 1.
    :return: the observed cells of these slices; ``Phi' W' (y - mean)`` and ``|y - mean|`` of the whole grid.
    """
    rows, basis = weights.own_rows, weights.basis
    device = basis.vectors[0].device
    observed = torch.empty(rows.stop - rows.start, *slabs.shape[1:], dtype=torch.bool, device=device)
    projection, square = weights.empty_projection(), 0.0
    others = [vectors.mT for vectors in basis.vectors[1:]]

    def pieces() -> Iterator[None]:
        nonlocal square
        with with_bar(None, "reading", total=len(observed), unit="slice") as bar:
            for start, slab in slabs:
                for part in blocks(len(slab), _PROJECT_NUMBERS // math.prod(slab.shape[1:])):
                    here = slice(start + part.start, start + part.stop)
                    values = slab[part].to(device)
                    y = _centred(
                        values, observed[here.start - rows.start : here.stop - rows.start], mean(here.start, here.stop)
                    )
                    if scale is not None:
                        y /= scale(here.start, here.stop)
                    columns = y.reshape(len(y), -1, 1)  # shape: (k, m_2 .. m_d, 1)
                    columns = kron_matmul(others, columns) if others else columns
                    weights.add_rows(projection, here, columns.reshape(len(y), -1))
                    square += _finite_square(y, values, here.start)
                bar.update(len(slab))
                yield

    weights.comm.run_lockstep("reading its slices", pieces())
    norm = math.sqrt(sum(weights.comm.gather(square, "the size of the values")))
    return MaskedGrid(observed), weights.sum_projection(projection) * (weights.products > 0), norm


def _centred(values: Tensor, observed: Tensor, mean: float | Tensor) -> Tensor:
    """Values minus the mean, in float64, zero in gaps; `observed` receives the mask."""
    torch.logical_not(values.isnan(), out=observed)
    y = values.to(torch.float64, copy=True).sub_(mean)
    return y.nan_to_num_(nan=0.0, posinf=math.inf, neginf=-math.inf)


def _finite_square(y: Tensor, values: Tensor, first: int) -> float:
    """``|y|^2`` of a slab that begins at slice `first`. Infinite values raise a ValueError."""
    square = float(y.square().sum())
    if not math.isfinite(square):
        where = tuple(int(position) for position in unravel(y.abs().flatten().argmax(), tuple(y.shape)))
        what = "infinite" if bool(values[where].isinf()) else f"{float(values[where])}, whose square is infinite"
        where = (where[0] + first, *where[1:])
        raise ValueError(f"values: entry {where} is {what}; expected finite values, or NaN for gaps")
    return square


def _as_tensor(part: Any) -> Tensor:
    """A slab as a floating-point tensor, with NaN in place of masked values."""
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
    # torch needs native, writeable memory with positive strides; other slabs are copied
    native = np.dtype("float64") if array.dtype.itemsize > 8 else array.dtype.newbyteorder("=")
    array = np.asarray(array, dtype=native)
    usable = array.flags.writeable and min(array.strides, default=0) >= 0
    tensor = torch.from_numpy(array if usable else array.copy(order="C"))
    return tensor if tensor.is_floating_point() else tensor.double()


def _result_dtype(dtype: Any) -> torch.dtype:
    """The precision of the results, float32 or float64, from that of the values."""
    name = str(dtype).removeprefix("torch.")
    return torch.float32 if name in ("float32", ">f4", "float16", ">f2", "bfloat16") else torch.float64
