"""Which observations to withhold: cells as far from the remaining data as the gaps are from all data.

Large gaps are harder to fill than scattered ones. Therefore, withheld cells must be as far from data as the gaps that
are to be filled. (Other gaps, such as land, are only places without data.) There are three kinds of proposals: random
cells; copies of connected gaps at other places; and the shifted mask of the gaps around a few cells. The first proposal
is used whose distances to the nearest observation match those of the gaps; if there is none, the one that matches best.
Copies have the shape of a gap, so they match in any metric.

Neighbours along an axis of labels, or of groups of coordinates, are not near each other. With such an axis, distances
along the others have to match as well: the lost end of a curve is long, though other curves go on beside it. Every
curve's gap is then copied by itself, to any other curve.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import ndimage

from gpytorch_gaps.filling.learning.predict import MIN_OBSERVATIONS_TO_WITHHOLD

_SCORED_SHARE, _MAX_SCORED = 0.1, 10_000  # fraction and largest number of observations that are scored
_MAX_HIDDEN_SHARE = 0.5  # largest fraction of observations that are hidden
_NUM_PROPOSALS = 4  # number of proposals of each random kind
_NUM_CENTRES = 6  # number of cells around which a shifted mask is kept
_MAX_TRIES = 20  # number of places that are tried for the copy of a gap
_TRIES_AT_OWN_END = 10  # for a gap at the end of an axis: number of tries before the other end is used too
_ENOUGH_COVERED = 0.9  # a place is accepted if this fraction of the copy is on observations
_GOOD_MISMATCH = 0.05  # a proposal is accepted if the logarithms of distances differ by less
_QUANTILES = np.linspace(0.025, 0.975, 20)


@dataclass(frozen=True, eq=False)
class Withheld:
    """Flags of withheld observations, of the shape of the values.

    For the check, the model is conditioned on all observations except the `hidden` ones. The `scored` ones are a subset
    of these, at most a tenth of all observations. They are not used in training either.
    """

    hidden: np.ndarray
    scored: np.ndarray


def withhold(
    values: np.ndarray,
    generator: np.random.Generator,
    targets: np.ndarray | None = None,
    ordered: Sequence[bool] | None = None,
) -> Withheld | None:
    """The observations of `values` to withhold; None if there are too few.

    :param targets: flags of the gaps that are to be filled. Default: all of them.
    :param ordered: whether neighbours along each axis are near each other. Default: along all.
    """
    unknown = np.isnan(values)
    gaps = unknown if targets is None else targets
    observed = int((~unknown).sum())
    if observed < MIN_OBSERVATIONS_TO_WITHHOLD:
        return None
    wanted = min(_MAX_SCORED, int(_SCORED_SHARE * observed))
    ordered = [True] * values.ndim if ordered is None else ordered
    best, least = None, math.inf
    for hidden in _proposals(unknown, gaps, wanted, generator, ordered):
        if not min(wanted, MIN_OBSERVATIONS_TO_WITHHOLD) <= hidden.sum() <= _MAX_HIDDEN_SHARE * observed:
            continue
        proposal = Withheld(hidden, _some_of(hidden, wanted, generator))
        mismatch = _mismatch(unknown, gaps, proposal, ordered) if gaps.any() else 0.0
        if mismatch < least:
            best, least = proposal, mismatch
        if least < _GOOD_MISMATCH:
            break
    return best


def _proposals(
    unknown: np.ndarray, gaps: np.ndarray, wanted: int, generator: np.random.Generator, ordered: Sequence[bool]
) -> Iterator[np.ndarray]:
    """Flags of about `wanted` observations, or more if a connected gap is larger.

    :param unknown: flags of all cells without observations, including `gaps`.
    """
    yield _some_of(~unknown, wanted, generator)
    if not gaps.any():
        return
    touching = ndimage.generate_binary_structure(gaps.ndim, 1)
    for axis in np.flatnonzero(~np.array(ordered)):
        touching &= np.moveaxis(np.array([False, True, False])[(...,) + (None,) * (gaps.ndim - 1)], 0, axis)
    labels, count = ndimage.label(gaps, touching)
    sizes = np.bincount(labels.ravel(), minlength=count + 1)[1:]
    for number in range(_NUM_PROPOSALS):
        order = generator.permutation(count)
        if number % 2 == 0:  # largest first: if there are many small gaps, a random choice would rarely include it
            order = np.concatenate([[sizes.argmax()], order])
        enough = wanted + (int(sizes.max()) if number % 2 == 0 and count > 1 else 0)
        yield _copies(unknown, labels, order, enough, generator, ordered)
    for _ in range(_NUM_PROPOSALS):
        shifts = [int(generator.integers(0, size)) for size in gaps.shape]
        yield _nearest(np.roll(gaps, shifts, axis=range(gaps.ndim)) & ~unknown, wanted, generator)


def _copies(
    unknown: np.ndarray,
    labels: np.ndarray,
    order: np.ndarray,
    wanted: int,
    generator: np.random.Generator,
    ordered: Sequence[bool],
) -> np.ndarray:
    """Copies of connected gaps at other places, until they cover enough observations.

    :param labels: the number of the connected gap of each cell, starting at 1; 0 for other cells.
    :param order: numbers of gaps, starting at 0, in the order in which they are copied.
    """
    pieces = ndimage.find_objects(labels)
    hidden = np.zeros_like(unknown)
    covered = 0
    for _ in range(1 + wanted // max(1, int((labels > 0).sum()))):
        for number in order:
            if covered >= wanted:
                return hidden
            box = pieces[number]
            piece = labels[box] == number + 1
            best, free = None, 0.0
            for tried in range(_MAX_TRIES):
                at_own_end = tried < _TRIES_AT_OWN_END
                where, moved = _elsewhere(piece, box, unknown.shape, generator, at_own_end, ordered)
                share = float((moved & ~unknown[where] & ~hidden[where]).sum() / moved.sum())
                if share > free:
                    best, free = (where, moved), share
                if free >= _ENOUGH_COVERED:
                    break
            if best is not None:
                where, moved = best
                new = moved & ~unknown[where] & ~hidden[where]
                hidden[where] |= new
                covered += int(new.sum())
    return hidden


def _elsewhere(
    piece: np.ndarray,
    box: tuple[slice, ...],
    shape: Sequence[int],
    generator: np.random.Generator,
    at_own_end: bool,
    ordered: Sequence[bool],
) -> tuple[tuple[slice, ...], np.ndarray]:
    """A random place for a gap, and the gap, mirrored along some axes.

    A gap at the end of an axis has data on one side only. It is placed at an end too.

    :param at_own_end: whether it is placed at the same end, and not mirrored to the other one. The ends may differ: if
        the beginnings of curves are missing, errors at their ends are not relevant.
    """
    where = []
    for axis, (own, size) in enumerate(zip(box, shape, strict=True)):
        length = own.stop - own.start
        mirrored = bool(generator.integers(0, 2))
        if not ordered[axis]:
            start = int(generator.integers(0, size - length + 1))
        elif own.start == 0 or own.stop == size:
            mirrored = mirrored and not at_own_end
            start = size - own.stop if mirrored else own.start
        else:
            start = int(generator.integers(1, size - length))
        where.append(slice(start, start + length))
        piece = np.flip(piece, axis) if mirrored else piece
    return tuple(where), piece


def _nearest(flags: np.ndarray, count: int, generator: np.random.Generator) -> np.ndarray:
    """The `count` flagged cells that are nearest to a few random ones, so that clusters remain connected."""
    cells = np.argwhere(flags)
    if len(cells) <= count:
        return flags
    scaled = cells / np.array(flags.shape)
    centres = scaled[generator.choice(len(cells), min(_NUM_CENTRES, len(cells)), replace=False)]
    distance = np.full(len(cells), np.inf)
    for centre in centres:
        distance = np.minimum(distance, np.abs(scaled - centre).max(axis=1))
    return _flags(cells[np.argsort(distance, kind="stable")[:count]], flags.shape)


def _some_of(flags: np.ndarray, count: int, generator: np.random.Generator) -> np.ndarray:
    """`count` of the flagged cells at random."""
    cells = np.argwhere(flags)
    return flags if len(cells) <= count else _flags(cells[generator.permutation(len(cells))[:count]], flags.shape)


def _flags(cells: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    flags = np.zeros(shape, dtype=bool)
    flags[tuple(cells.T)] = True
    return flags


def _mismatch(unknown: np.ndarray, gaps: np.ndarray, proposal: Withheld, ordered: Sequence[bool]) -> float:
    """Mean difference between the quantiles of log-distances to data of the scored cells and those of the gaps.

    It is computed for distances along all axes and for distances along the ordered axes. The larger one is returned.
    """
    metrics = [[True] * unknown.ndim]
    if any(ordered) and not all(ordered):
        metrics.append(list(ordered))
    found = []
    for along in metrics:
        deep, target = (
            np.quantile(np.log(_distances(without_data, along)[at]), _QUANTILES)
            for without_data, at in ((unknown | proposal.hidden, proposal.scored), (unknown, gaps))
        )
        found.append(float(np.abs(deep - target).mean()))
    return max(found)


def _distances(without_data: np.ndarray, along: Sequence[bool]) -> np.ndarray:
    """Distances to data, in cells along these axes, and at most the sum of the sizes of these axes."""
    longest = sum(size for size, counts in zip(without_data.shape, along, strict=True) if counts)
    return distances_to_data(without_data, along, float(longest))


def distances_to_data(without_data: np.ndarray, along: Sequence[bool], longest: float) -> np.ndarray:
    """Distances of all cells to the nearest one with data, in cells.

    :param without_data: flags of the cells without data.
    :param along: for each axis, whether a step along it is one cell. Other steps are `longest`.
    :param longest: the largest distance that is returned.
    """
    steps = [1.0 if counts else longest for counts in along]
    return np.minimum(ndimage.distance_transform_edt(without_data, sampling=steps), longest)
