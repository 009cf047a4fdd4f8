"""``gpytorch-gaps inspect``: the contents of a file, the shape of its gaps, and the method to fill them."""

import argparse
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import ndimage

from gpytorch_gaps import __version__
from gpytorch_gaps.cli.files import open_input, read_arrays
from gpytorch_gaps.cli.fill import json_text
from gpytorch_gaps.filling.arrays.adapters import ArrayAdapter
from gpytorch_gaps.filling.axes.axis import Axis
from gpytorch_gaps.filling.fill import is_streamed
from gpytorch_gaps.filling.learning.cycles import find_cycles
from gpytorch_gaps.formats.arrays import slabs
from gpytorch_gaps.utils.dtypes import is_gap

MOST_CELLS = 20_000_000  # for a larger array, the shape of the gaps is computed for a block in its middle


def run_inspect(options: argparse.Namespace) -> int:
    """Runs the command.

    :param options: the parsed arguments.
    :return: the exit code, 0.
    """
    with open_input(options) as opened:
        found = {name: inspect(kind) for name, kind in read_arrays(opened)[1].items()}
    if options.json:
        variables = {name or "values": one.as_dict() for name, one in found.items()}
        print(json_text({"version": __version__, "input": str(options.input), "variables": variables}))
        return 0
    for name, one in found.items():
        print(f"{options.input}{': ' if name else ''}{name}")
        print(one)
    return 0


@dataclass(frozen=True)
class Inspection:
    """Properties of an array before filling. ``print(inspection)`` shows them in words."""

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[Axis, ...]
    num_gaps: int
    num_infinite: int
    regions: tuple[int, float, int]
    """Regions of gaps that are connected along the axes: their number, and the cells of the median and the largest."""
    runs: tuple[int, ...]
    """The longest run of gaps along each axis."""
    part: tuple[int, ...] | None
    """The shape of the block in which `regions` and `runs` were counted; None for the whole array."""
    streamed: bool
    chunked: bool
    cycles: tuple[tuple[float, ...], ...]
    """Periods of cycles in the data along each axis, in its units."""

    def as_dict(self) -> dict[str, Any]:
        number, median, largest = self.regions
        part = None if self.part is None else list(self.part)
        return {
            "shape": list(self.shape),
            "cells": math.prod(self.shape),
            "dtype": self.dtype,
            "axes": [
                {"name": a.name, "kind": a.kind, "size": a.size, "unit": a.unit, "extent": a.extent,
                 "spacing": a.spacing, "note": a.note, "cycles": list(found)}
                for a, found in zip(self.axes, self.cycles, strict=True)
            ],
            "gaps": self.num_gaps,
            "infinite": self.num_infinite,
            "gap_sizes": {
                "regions": number, "median": median, "largest": largest, "runs": list(self.runs), "of_part": part,
            },
            "streamed": self.streamed,
            "chunked": self.chunked,
        }  # fmt: skip

    def __str__(self) -> str:
        cells = math.prod(self.shape)
        lines = [("values", f"{_product(self.shape)} {self.dtype}")]
        lines += [("axis", str(axis)) for axis in self.axes]
        lines += [("note", axis.note) for axis in self.axes if axis.note]
        lines.append(("gaps", f"{self.num_gaps:,} of {cells:,} cells ({100 * self.num_gaps / cells:.3g} %)"))
        if self.num_infinite:
            lines.append(("", f"{self.num_infinite:,} infinite entries, which are not accepted: set them to NaN first"))
        if self.num_gaps:
            number, median, largest = self.regions
            where = "" if self.part is None else f", in a part of {_product(self.part)}"
            runs = ", ".join(f"{run} along {axis.name}" for run, axis in zip(self.runs, self.axes, strict=True))
            lines.append(("", f"{number:,} regions, median {median:g} cells, largest {largest:,} cells{where}"))
            lines.append(("", f"longest runs: {runs}{where}"))
        for axis, found in zip(self.axes, self.cycles, strict=True):
            if found:
                words = " and ".join(f"{period:.6g} {axis.unit}".strip() for period in found)
                lines.append(("cycles", f"{axis.name} has a cycle of {words}"))
        lines.append(("filling", self._way(cells)))
        return "\n".join(f"  {what:<9}{words}" for what, words in lines)

    def _way(self, cells: int) -> str:
        if not self.num_gaps:
            return "there is nothing to fill"
        if self.num_gaps == cells:
            return "there are no observations to fill the gaps from"
        if self.streamed:
            return "in pieces, with standard deviations from draws: it is too large for a model in memory"
        return "in memory, as one exact model"


def inspect(kind: ArrayAdapter) -> Inspection:
    """Inspects an array. Gaps are counted slab by slab. If the array is large, their shape is that in a block."""
    num_gaps = num_infinite = 0
    for rows in slabs(kind.shape, np.dtype(kind.array.dtype).itemsize):
        part = _in_memory(kind.array[rows])
        gap = is_gap(part)
        num_gaps += int(gap.sum())
        num_infinite += int((np.isinf(np.ma.getdata(part)) & ~gap).sum()) if part.dtype.kind == "f" else 0
    values = _in_memory(kind.array[_central_block(kind.shape)])
    gaps, whole = is_gap(values), values.shape == kind.shape
    cycles: list[list[float]] = [[] for _ in kind.axes]
    if 0 < num_gaps < math.prod(kind.shape) and not num_infinite and not is_streamed(kind):
        cycles = find_cycles(np.ma.filled(values.astype(np.float64), np.nan), kind.axes)
    return Inspection(
        shape=kind.shape,
        dtype=str(kind.array.dtype),
        axes=tuple(kind.axes),
        num_gaps=num_gaps,
        num_infinite=num_infinite,
        regions=gap_regions(gaps, [axis.kind == "label" for axis in kind.axes]),
        runs=tuple(longest_run(gaps, axis) for axis in range(gaps.ndim)),
        part=None if whole else values.shape,
        streamed=is_streamed(kind),
        chunked=kind.chunked,
        cycles=tuple(map(tuple, cycles)),
    )


def _in_memory(part: Any) -> np.ndarray:
    return part if isinstance(part, np.ndarray) else np.asarray(part)


def _central_block(shape: tuple[int, ...]) -> tuple[slice, ...]:
    """The block of at most `MOST_CELLS` cells in the middle: the longest side is halved until it is small enough."""
    sides = list(shape)
    while math.prod(sides) > MOST_CELLS:
        longest = sides.index(max(sides))
        sides[longest] = (sides[longest] + 1) // 2
    return tuple(slice((n - side) // 2, (n - side) // 2 + side) for n, side in zip(shape, sides, strict=True))


def gap_regions(gaps: np.ndarray, labels: list[bool]) -> tuple[int, float, int]:
    """The number of connected regions of gaps, and the cells of the median and of the largest region.

    :param labels: the axes of labels, along which neighbours are not connected.
    """
    if not gaps.any():
        return 0, 0.0, 0
    structure = ndimage.generate_binary_structure(gaps.ndim, 1)
    for axis in np.flatnonzero(labels):
        np.moveaxis(structure, axis, 0)[[0, 2]] = False
    region_of, count = ndimage.label(gaps, structure)
    sizes = np.bincount(region_of.ravel(), minlength=count + 1)[1:]
    return int(count), float(np.median(sizes)), int(sizes.max())


def longest_run(flags: np.ndarray, axis: int) -> int:
    """Length of the longest run of set flags along an axis."""
    count = np.cumsum(flags, axis=axis, dtype=np.int32)
    before = np.maximum.accumulate(np.where(flags, 0, count), axis=axis)  # index of the last flag that was not set
    return int((count - before).max(initial=0))


def _product(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
