"""What an array holds, how its gaps look, and what filling them would take, without filling any."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gpytorch_gaps.cli.cost import fill_seconds
from gpytorch_gaps.cli.gap_sizes import GapSizes, gap_sizes
from gpytorch_gaps.filling.adapters import ArrayAdapter
from gpytorch_gaps.filling.axes import Axis
from gpytorch_gaps.filling.choose import NUM_WINDOWS
from gpytorch_gaps.filling.estimates import find_cycles
from gpytorch_gaps.filling.fill import is_streamed
from gpytorch_gaps.filling.grid_values import GridValues, choose_part
from gpytorch_gaps.filling.windows import MAX_WINDOW_OBSERVATIONS, choose_windows
from gpytorch_gaps.formats.values import is_gap, slabs

LARGEST = 20_000_000
"""Cells up to which regions of gaps are looked for; beyond, on a part."""


@dataclass(frozen=True)
class Inspection:
    """``print(inspection)`` says it in words, ``as_dict()`` in numbers that JSON takes."""

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[Axis, ...]
    num_gaps: int
    num_infinite: int
    sizes: GapSizes
    part: tuple[int, ...] | None
    """The shape of the part that `sizes` is of, None for all of it."""
    streamed: bool
    chunked: bool
    cycles: tuple[tuple[float, ...], ...]
    """Of each axis, in its units."""
    windows: tuple[int, ...]
    """Observations in each of the windows that kernels are learned from."""
    seconds: dict[str, float] = field(default_factory=dict)
    """That filling takes, about, by what they go to."""

    @property
    def num_cells(self) -> int:
        return math.prod(self.shape)

    def as_dict(self) -> dict[str, Any]:
        return {
            "shape": list(self.shape),
            "cells": self.num_cells,
            "dtype": self.dtype,
            "axes": [
                {"name": a.name, "kind": a.kind, "size": a.size, "unit": a.unit, "extent": a.extent,
                 "spacing": a.spacing, "cycles": list(found)}
                for a, found in zip(self.axes, self.cycles, strict=True)
            ],
            "gaps": self.num_gaps,
            "infinite": self.num_infinite,
            "gap_sizes": self.sizes.as_dict() | {"of_part": None if self.part is None else list(self.part)},
            "streamed": self.streamed,
            "chunked": self.chunked,
            "windows": list(self.windows),
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
        }  # fmt: skip

    def __str__(self) -> str:
        lines = [("values", f"{_product(self.shape)} {self.dtype}")]
        lines += [("axis", str(axis)) for axis in self.axes]
        lines.append(("gaps", f"{self.num_gaps:,} of {self.num_cells:,} cells ({self._share():.3g} %)"))
        if self.num_infinite:
            lines.append(("", f"{self.num_infinite:,} infinite entries, which would be refused: set them to NaN first"))
        if self.num_gaps:
            lines += self._size_lines()
        lines += self._way_lines()
        return "\n".join(f"  {what:<9}{words}" for what, words in lines)

    def _share(self) -> float:
        return 100 * self.num_gaps / self.num_cells

    def _size_lines(self) -> list[tuple[str, str]]:
        sizes = self.sizes
        where = "" if self.part is None else f", in a part of {_product(self.part)}"
        regions = f"{sizes.regions:,} regions, of {sizes.median:g} cells in the middle and {sizes.largest:,} at most"
        runs = ", ".join(f"{run} along {axis.name}" for run, axis in zip(sizes.runs, self.axes, strict=True))
        return [("", regions + where), ("", f"longest runs: {runs}{where}")]

    def _way_lines(self) -> list[tuple[str, str]]:
        if not self.num_gaps:
            return [("filling", "there is nothing to fill")]
        if self.num_gaps == self.num_cells:
            return [("filling", "there is nothing to fill it from")]
        lines = []
        for axis, found in zip(self.axes, self.cycles, strict=True):
            if found:
                words = " and ".join(f"{period:.6g} {axis.unit}".strip() for period in found)
                lines.append(("cycles", f"{axis.name} follows one of {words}"))
        how = "in memory, as one exact model"
        if self.streamed:
            why = "it is read in chunks" if self.chunked else "it is too large for a model in memory"
            how = f"piece by piece, without standard deviations: {why}"
        lines.append(("filling", how))
        if self.windows:
            counts = f"{min(self.windows)} to {max(self.windows)}" if len(self.windows) > 1 else f"{self.windows[0]}"
            lines.append(("windows", f"{len(self.windows)} to learn kernels from, of {counts} observations each"))
        parts = ", ".join(f"{what} {_rounded(value)}" for what, value in self.seconds.items())
        lines.append(("time", f"about {_rounded(sum(self.seconds.values()))} ({parts})"))
        return lines


def inspect_gaps(kind: ArrayAdapter, seed: int = 0) -> Inspection:
    """Looks at an array; of one that is streamed, slab by slab and at a part."""
    streamed, generator = is_streamed(kind), np.random.default_rng(seed)
    source = GridValues(kind.axes, kind.read)
    num_gaps, num_infinite = _counts(kind)
    labels = [axis.kind == "label" for axis in kind.axes]
    cells, part, values = math.prod(kind.shape), None, None
    if cells <= LARGEST and not kind.chunked:
        values = np.ma.filled(np.ma.asarray(kind.array[:]).astype(np.float64), np.nan)
    else:
        values = choose_part(source, generator).values
        part = values.shape
    observed = cells - num_gaps
    fillable = 0 < num_gaps < cells and not num_infinite
    windows: list[int] = []
    cycles: list[list[float]] = [[] for _ in kind.axes]
    if fillable:
        cycles = cycles if streamed else find_cycles(values, kind.axes)  # as filling does
        few = observed <= 2 * MAX_WINDOW_OBSERVATIONS
        windows = [observed] if few else [
            len(window) for window in choose_windows(source, NUM_WINDOWS, generator)
        ]  # fmt: skip
    return Inspection(
        shape=kind.shape,
        dtype=str(kind.array.dtype),
        axes=tuple(kind.axes),
        num_gaps=num_gaps,
        num_infinite=num_infinite,
        sizes=gap_sizes(np.isnan(values), labels),
        part=part,
        streamed=streamed,
        chunked=kind.chunked,
        cycles=tuple(map(tuple, cycles)),
        windows=tuple(windows),
        seconds=fill_seconds(kind.shape, observed, windows, streamed) if fillable else {},
    )


def _counts(kind: ArrayAdapter) -> tuple[int, int]:
    """Gaps, and infinite entries."""
    gaps = infinite = 0
    for rows in slabs(kind.shape, np.dtype(kind.array.dtype).itemsize):
        part = kind.array[rows]
        part = part if isinstance(part, np.ndarray) else np.asarray(part)
        gap = is_gap(part)
        gaps += int(gap.sum())
        if part.dtype.kind == "f":
            infinite += int((np.isinf(np.ma.getdata(part)) & ~gap).sum())
    return gaps, infinite


def _product(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _rounded(seconds: float) -> str:
    """To two digits, as it is a guess; minutes where there are several."""
    if seconds >= 99.5:
        return f"{seconds / 60:.2g} min" if seconds < 6000 else f"{seconds / 3600:.2g} h"
    return f"{seconds:.2g} s"
