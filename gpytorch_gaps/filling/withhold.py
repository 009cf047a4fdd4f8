"""Which observations to withhold: cells as far from the remaining data as the gaps are from all of them.

Large gaps are harder to fill than scattered ones, so withheld cells must lie as deep as the gaps do. There are three
kinds of proposals: cells at random; connected pieces of the gaps, copied whole to other places; and the mask of the
gaps, moved, near a few places. The first proposal is taken whose distances to the nearest observation match those of
the gaps, or else the one that matches best. Copies keep the shape of a gap, so that they match in any metric.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import ndimage

from gpytorch_gaps.filling.windows import Reader

LARGEST = 200_000
"""Cells that are looked at: of a larger grid, a part."""

FEWEST = 30
"""Observations without which nothing is withheld."""

_SHARE, _MOST = 0.1, 10_000  # of the observations that are scored, and in all
_HIDDEN = 0.5  # of the observations, that may be hidden at the most
_PROPOSALS = 4  # of each kind that depends on chance
_PLACES = 6  # that a moved mask is cut to
_TRIES = 20  # places for a copy of a piece
_FREE = 0.9  # share of a copy that must fall on observations, if that can be
_ALIKE = 0.05  # mean difference of the logarithms of distances that is as good as none
_QUANTILES = np.linspace(0.025, 0.975, 20)


@dataclass(frozen=True, eq=False)
class Withheld:
    """Flags of the shape of the part that is looked at.

    `hidden` observations are not given to the model that is checked; those `scored` among them, a tenth of all
    observations at the most, take no part in training either.
    """

    hidden: np.ndarray
    scored: np.ndarray


def part_of(shape: Sequence[int], generator: np.random.Generator) -> list[np.ndarray]:
    """Positions of a part of the grid that is small enough, as even as the axes allow."""
    sides = _sides(shape, LARGEST)
    starts = [int(generator.integers(0, m - n + 1)) for m, n in zip(shape, sides, strict=True)]
    return [np.arange(start, start + n) for start, n in zip(starts, sides, strict=True)]


def region_around(positions: Sequence[np.ndarray], shape: Sequence[int], most: int) -> list[np.ndarray]:
    """Positions of a larger part of the grid, of at most so many cells, with the one at `positions` in its middle."""
    region = []
    for own, size, side in zip(positions, shape, _sides(shape, most), strict=True):
        side = max(side, len(own))
        start = min(max(0, int(own[0]) - (side - len(own)) // 2), size - side)
        region.append(np.arange(start, start + side))
    return region


def _sides(shape: Sequence[int], most: int) -> list[int]:
    sides = np.array(shape, dtype=float)
    while sides.prod() > most:
        at = int(np.argmax(sides))
        others = sides.prod() / sides[at]
        second = np.max(np.delete(sides, at), initial=1.0)
        sides[at] = max(min(sides[at] - 1, second), math.floor(most / others), 1.0)
    return [int(side) for side in sides]


def choose_part(
    read: Reader, shape: Sequence[int], generator: np.random.Generator
) -> tuple[list[np.ndarray], np.ndarray]:
    """A part with observations in it, and gaps if that can be: the best of a few."""
    best, merit = None, -1.0
    for _ in range(1 if math.prod(shape) <= LARGEST else 4):
        positions = part_of(shape, generator)
        values = read(positions)
        gappy = float(np.isnan(values).mean())
        if gappy * (1 - gappy) > merit:
            best, merit = (positions, values), gappy * (1 - gappy)
    assert best is not None
    return best


def withhold(values: np.ndarray, generator: np.random.Generator) -> Withheld | None:
    """What to withhold of `values`, None if there are too few observations."""
    gaps = np.isnan(values)
    observed = int((~gaps).sum())
    if observed < FEWEST:
        return None
    wanted = min(_MOST, int(_SHARE * observed))
    best, least = None, math.inf
    for hidden in _proposals(gaps, wanted, generator):
        if not min(wanted, FEWEST) <= hidden.sum() <= _HIDDEN * observed:
            continue
        proposal = Withheld(hidden, _some_of(hidden, wanted, generator))
        mismatch = _mismatch(gaps, proposal) if gaps.any() else 0.0
        if mismatch < least:
            best, least = proposal, mismatch
        if least < _ALIKE:
            break
    return best


def _proposals(gaps: np.ndarray, wanted: int, generator: np.random.Generator) -> Iterator[np.ndarray]:
    """Flags of observations, about `wanted` of them, more where one piece of the gaps is larger."""
    yield _some_of(~gaps, wanted, generator)
    if not gaps.any():
        return
    labels, count = ndimage.label(gaps)
    pieces = ndimage.find_objects(labels)
    sizes = np.bincount(labels.ravel(), minlength=count + 1)[1:]
    for number in range(_PROPOSALS):
        order = generator.permutation(count)
        if number % 2 == 0:  # among many small ones, chance would hardly ever take the largest
            order = np.concatenate([[sizes.argmax()], order])
        enough = wanted + (int(sizes.max()) if number % 2 == 0 and count > 1 else 0)
        yield _copies(gaps, labels, pieces, order, enough, generator)
    for _ in range(_PROPOSALS):
        shifts = [int(generator.integers(0, size)) for size in gaps.shape]
        yield _nearest(np.roll(gaps, shifts, axis=range(gaps.ndim)) & ~gaps, wanted, generator)


def _copies(
    gaps: np.ndarray, labels: np.ndarray, pieces: Sequence[tuple[slice, ...]], order: np.ndarray, wanted: int,
    generator: np.random.Generator,
) -> np.ndarray:  # fmt: skip
    """Pieces of the gaps, whole, at other places, until they cover enough observations."""
    hidden = np.zeros_like(gaps)
    covered = 0
    for _ in range(1 + wanted // max(1, int(gaps.sum()))):
        for number in order:
            if covered >= wanted:
                return hidden
            box = pieces[number]
            piece = labels[box] == number + 1
            best, free = None, 0.0
            for _ in range(_TRIES):
                where, moved = _elsewhere(piece, box, gaps.shape, generator)
                share = float((moved & ~gaps[where] & ~hidden[where]).sum() / moved.sum())
                if share > free:
                    best, free = (where, moved), share
                if free >= _FREE:
                    break
            if best is not None:
                where, moved = best
                new = moved & ~gaps[where] & ~hidden[where]
                hidden[where] |= new
                covered += int(new.sum())
    return hidden


def _elsewhere(
    piece: np.ndarray, box: tuple[slice, ...], shape: Sequence[int], generator: np.random.Generator
) -> tuple[tuple[slice, ...], np.ndarray]:
    """A random place for the piece, and the piece as it goes there.

    What lies at the end of an axis has data on one side only: it stays at that end, or is mirrored to the other.
    """
    where = []
    for axis, (own, size) in enumerate(zip(box, shape, strict=True)):
        length = own.stop - own.start
        mirrored = bool(generator.integers(0, 2))
        if own.start == 0 or own.stop == size:
            start = size - own.stop if mirrored else own.start
        else:
            start = int(generator.integers(1, size - length))
        where.append(slice(start, start + length))
        piece = np.flip(piece, axis) if mirrored else piece
    return tuple(where), piece


def _nearest(flags: np.ndarray, count: int, generator: np.random.Generator) -> np.ndarray:
    """The `count` flagged cells nearest to a few random flagged cells, so that clusters stay connected."""
    cells = np.argwhere(flags)
    if len(cells) <= count:
        return flags
    scaled = cells / np.array(flags.shape)
    centres = scaled[generator.choice(len(cells), min(_PLACES, len(cells)), replace=False)]
    distance = np.full(len(cells), np.inf)
    for centre in centres:
        distance = np.minimum(distance, np.abs(scaled - centre).max(axis=1))
    return _flags(cells[np.argsort(distance, kind="stable")[:count]], flags.shape)


def _some_of(flags: np.ndarray, count: int, generator: np.random.Generator) -> np.ndarray:
    cells = np.argwhere(flags)
    return flags if len(cells) <= count else _flags(cells[generator.permutation(len(cells))[:count]], flags.shape)


def _flags(cells: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    flags = np.zeros(shape, dtype=bool)
    flags[tuple(cells.T)] = True
    return flags


def _mismatch(gaps: np.ndarray, proposal: Withheld) -> float:
    """Between distances to the nearest observation: the mean difference of the quantiles of their logarithms."""
    deep, target = (
        np.quantile(np.log(ndimage.distance_transform_edt(unknown)[at]), _QUANTILES)
        for unknown, at in ((gaps | proposal.hidden, proposal.scored), (gaps, gaps))
    )
    return float(np.abs(deep - target).mean())
