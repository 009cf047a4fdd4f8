"""How gaps look: how many hang together, and how far one has to reach across them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import ndimage


@dataclass(frozen=True)
class GapSizes:
    """`regions` that hang together by the sides of their cells, the cells of the one in the middle and of the largest;
    the longest run of gaps along each axis."""

    regions: int
    median: float
    largest: int
    runs: tuple[int, ...]

    def as_dict(self) -> dict[str, Any]:
        return {"regions": self.regions, "median": self.median, "largest": self.largest, "runs": list(self.runs)}


def gap_sizes(gaps: np.ndarray, apart: Sequence[bool]) -> GapSizes:
    """:param apart: axes of labels, along which nothing hangs together."""
    runs = tuple(longest_run(gaps, axis) for axis in range(gaps.ndim))
    if not gaps.any():
        return GapSizes(0, 0.0, 0, runs)
    structure = ndimage.generate_binary_structure(gaps.ndim, 1)
    for axis, alone in enumerate(apart):
        if alone:
            np.moveaxis(structure, axis, 0)[[0, 2]] = False
    labels, count = ndimage.label(gaps, structure)
    sizes = np.bincount(labels.ravel(), minlength=count + 1)[1:]
    return GapSizes(int(count), float(np.median(sizes)), int(sizes.max()), runs)


def longest_run(flags: np.ndarray, axis: int) -> int:
    """Of flags that are set, along an axis."""
    count = np.cumsum(flags, axis=axis, dtype=np.int32)
    before = np.maximum.accumulate(np.where(flags, 0, count), axis=axis)  # the count at the last flag that was not set
    return int((count - before).max(initial=0))
