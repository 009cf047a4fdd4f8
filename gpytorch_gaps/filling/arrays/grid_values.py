"""Values on a grid that are read part by part, from memory, from a file or from chunks."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from gpytorch_gaps.filling.arrays.covariates import Covariates
from gpytorch_gaps.filling.arrays.orientation import Orientation
from gpytorch_gaps.filling.axes.axis import Axis

Positions = Sequence[np.ndarray]
"""Positions along each axis; a part of a grid is their product."""

MAX_PART_CELLS = 200_000
"""Cells of the part of a large grid in which observations are withheld."""

_PARTS_COMPARED = 4


@dataclass(frozen=True, eq=False)
class Part:
    """A block of a grid: consecutive `positions` along each axis, its `axes`, and `values`, NaN at gaps.

    `targets` are flags of the gaps to fill. `noise` are the known variances of measurement errors. `orientation` is the
    order in which cells are chosen.
    """

    positions: Positions
    axes: Sequence[Axis]
    values: np.ndarray
    targets: np.ndarray
    orientation: Orientation
    noise: np.ndarray | None = None

    @property
    def corner(self) -> np.ndarray:
        return np.array([int(p[0]) for p in self.positions])

    def without(self, flags: np.ndarray) -> "Part":
        """The same part with NaN at the flagged cells."""
        return replace(self, values=np.where(flags, np.nan, self.values))


@dataclass(frozen=True, eq=False)
class GridValues:
    """Values on a grid with the given `axes`. ``read(positions)`` returns a copy of a part, NaN at gaps.

    ``may_fill(positions)`` returns flags of the cells that may be filled. Default: all. `noise` are the known variances
    of measurement errors, including those of measurements in gaps. `covariates` are backgrounds. `content` are the
    values that determine the canonical order; None if they are not in memory.
    """

    axes: Sequence[Axis]
    read: Callable[[Positions], np.ndarray]
    may_fill: Callable[[Positions], np.ndarray] | None = None
    noise: np.ndarray | None = None
    covariates: Covariates | None = None
    content: np.ndarray | None = None

    @classmethod
    def in_memory(
        cls,
        numbers: np.ndarray,
        axes: Sequence[Axis],
        may_fill: Callable[[Positions], np.ndarray] | None = None,
        noise: np.ndarray | None = None,
        covariates: Covariates | None = None,
    ) -> "GridValues":
        # a function without closures, so that results can be pickled
        return cls(axes, partial(_block, numbers), may_fill, noise, covariates, numbers)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.axes)

    @cached_property
    def orientation(self) -> Orientation:
        """The canonical order of the grid, in which random choices are made."""
        return Orientation.of(self.axes, self.content)

    def part(self, positions: Positions) -> Part:
        """The block at the given positions."""
        axes = [axis.at(p) for axis, p in zip(self.axes, positions, strict=True)]
        values = self.read(positions)
        targets = np.isnan(values)
        if self.may_fill is not None:
            targets &= self.may_fill(positions)
        noise = None if self.noise is None else self.noise[np.ix_(*positions)]
        return Part(positions, axes, values, targets, self.orientation.at(positions), noise)

    def read_canonical(self, positions: Positions) -> tuple[np.ndarray, np.ndarray | None]:
        """Copies of a part of the values and of the noise; positions and results are in canonical order."""
        turn = self.orientation
        wanted = turn.positions(positions)
        places = [np.argsort(at) for at in wanted]
        found = self.read([at[place] for at, place in zip(wanted, places, strict=True)])
        noise = None if self.noise is None else self.noise[np.ix_(*wanted)].transpose(turn.order)
        return found[np.ix_(*map(np.argsort, places))].transpose(turn.order), noise

    def whole(self) -> Part:
        """All values."""
        return self.part([np.arange(size) for size in self.shape])

    def without(self, part: Part, flags: np.ndarray) -> "GridValues":
        """The same grid with NaN at the flagged cells of `part`."""

        def read(wanted: Positions) -> np.ndarray:
            values = self.read(wanted)
            ranges = list(zip(wanted, part.corner, flags.shape, strict=True))
            inside = [(p >= start) & (p < start + size) for p, start, size in ranges]
            if all(one.any() for one in inside):
                hidden = flags[np.ix_(*[p[one] - start for one, (p, start, _) in zip(inside, ranges, strict=True)])]
                values[np.ix_(*inside)] = np.where(hidden, np.nan, values[np.ix_(*inside)])
            return values

        return replace(self, read=read)


def _block(numbers: np.ndarray, positions: Positions) -> np.ndarray:
    return numbers[np.ix_(*positions)]


def random_part(shape: Sequence[int], generator: np.random.Generator) -> list[np.ndarray]:
    """Positions of a block of at most `MAX_PART_CELLS` cells at a random place, with sides as equal as possible."""
    sides = even_sides(shape, MAX_PART_CELLS)
    starts = [int(generator.integers(0, m - n + 1)) for m, n in zip(shape, sides, strict=True)]
    return [np.arange(start, start + n) for start, n in zip(starts, sides, strict=True)]


def choose_part(values: GridValues, generator: np.random.Generator) -> Part:
    """The block with the most even mixture of gaps to fill and observations among a few at random places."""
    best, merit, blocks = None, -1.0, values.orientation.in_blocks()
    for _ in range(1 if math.prod(values.shape) <= MAX_PART_CELLS else _PARTS_COMPARED):
        part = values.part([np.sort(at) for at in blocks.positions(random_part(blocks.shape(), generator))])
        evenness = float(part.targets.mean()) * (1 - float(np.isnan(part.values).mean()))
        if evenness > merit:
            best, merit = part, evenness
    assert best is not None
    return best


def region_around(positions: Positions, shape: Sequence[int], max_cells: int) -> list[np.ndarray]:
    """Positions of a larger block, of at most `max_cells` cells, with the block at `positions` in its middle."""
    region = []
    for own, size, side in zip(positions, shape, even_sides(shape, max_cells), strict=True):
        side = max(side, len(own))
        start = min(max(0, int(own[0]) - (side - len(own)) // 2), size - side)
        region.append(np.arange(start, start + side))
    return region


def even_sides(shape: Sequence[int], cells: float, rounded: Callable[[float], int] = math.floor) -> list[int]:
    """Sides, as equal as possible, of a block of about `cells` cells. Short axes are included completely.

    :param rounded: the rounding of sides. If they are rounded down, the block has at most `cells` cells.
    """
    sides = [1] * len(shape)
    for number, axis in enumerate(np.argsort(shape)):
        even = (cells / math.prod(sides)) ** (1 / (len(shape) - number))
        sides[axis] = max(1, min(int(shape[axis]), rounded(even + 1e-9)))  # the cube root of 1e6 is 99.99..
    return sides


def coordinates(axes: Sequence[Axis], cells: np.ndarray) -> Tensor:
    """Coordinates of cells, from their positions (Q, d). shape: (Q, D)"""
    columns = [axis.points[at] for axis, at in zip(axes, cells.T, strict=True)]
    return torch.from_numpy(np.concatenate(columns, axis=1))
