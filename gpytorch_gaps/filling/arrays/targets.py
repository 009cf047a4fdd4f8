"""Which gaps are filled: those that the mask `where` allows, in runs of gaps no longer than `max_gap`."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from gpytorch_gaps.filling.arrays.adapters import ArrayAdapter, take
from gpytorch_gaps.filling.arrays.masks import grid_flags
from gpytorch_gaps.filling.arrays.max_gap import MaxGap, in_short_runs
from gpytorch_gaps.filling.arrays.options import Options
from gpytorch_gaps.utils.dtypes import is_gap

_SLAB_CELLS = 2**24


class Targets:
    """Flags of the cells that may be filled, read part by part. All other gaps remain gaps.

    :param adapter: the array.
    :param options: options with ``where`` and ``max_gap``.
    :param gaps: flags of the gaps, if they are known. ``max_gap`` needs them, one byte per cell.
    :raises ValueError: if a mask does not fit the array, or a length does not fit its axis.
    """

    def __init__(self, adapter: ArrayAdapter, options: Options, gaps: np.ndarray | None = None) -> None:
        self.limits: list[MaxGap] = options.max_gaps_of(adapter.axes)
        self._adapter = adapter
        self._where = None if options.where is None else grid_flags(adapter, options.where, "where")
        self._short: np.ndarray | None = None
        if self.limits:
            gaps = np.concatenate([is_gap(part) for _, part in self._slabs()]) if gaps is None else gaps
            self._short = in_short_runs(gaps, adapter.axes, self.limits)

    @property
    def are_all(self) -> bool:
        """Whether all gaps are filled."""
        return self._where is None and self._short is None

    def read(self, positions: Sequence[np.ndarray]) -> np.ndarray:
        """Flags at a product of positions, one array of them per axis."""
        flags = np.ones(tuple(map(len, positions)), dtype=bool)
        for restriction in (self._where, self._short):
            if restriction is not None:
                flags &= np.asarray(take(restriction, positions))
        return flags

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Flags of the slices `start` to `stop` of the first axis."""
        return self.read([np.arange(start, stop), *map(np.arange, self._adapter.shape[1:])])

    def count(self) -> tuple[int, int]:
        """The number of gaps that are filled, and of gaps that remain, in one pass over the array."""
        filled = left = 0
        for _, gaps, wanted in self.slabs():
            filled, left = filled + int(wanted.sum()), left + int((gaps & ~wanted).sum())
        return filled, left

    def slabs(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Slab by slab: the first slice, flags of the gaps, and flags of the gaps that are filled."""
        for start, part in self._slabs():
            gaps = is_gap(part)
            yield start, gaps, gaps & self.rows(start, start + len(gaps))

    def notes(self, num_left: int) -> list[str]:
        """A note for the report on gaps that remain."""
        if not num_left:
            return []
        reasons = [] if self._where is None else ["outside where"]
        reasons += [f"in runs longer than {limit.name}" for limit in self.limits]
        return [f"{num_left:,} gaps are not filled: {', or '.join(reasons)}"]

    def _slabs(self) -> Any:
        array, shape = self._adapter.array, self._adapter.shape
        step = max(1, _SLAB_CELLS // int(np.prod(shape[1:], dtype=np.int64)))
        for start in range(0, shape[0], step):
            part = array[start : start + step]
            yield start, part if np.ma.isMaskedArray(part) else np.asarray(part)
