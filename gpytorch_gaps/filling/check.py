"""What a filling is worth: observations withheld in the shape of the gaps, and predicted from the others.

Gaps that hang together are harder to fill than scattered ones, so what is withheld must look like them: the mask of
the gaps, moved by a random distance along every axis, laid over what was observed around some random places.
"""

import math
from collections.abc import Sequence

import gpytorch
import numpy as np
import torch
from gpytorch.distributions import MultivariateNormal
from linear_operator.operators import DiagLinearOperator

from gpytorch_gaps.filling.axes import Axis
from gpytorch_gaps.filling.deviations import in_reasonable_time
from gpytorch_gaps.filling.windows import Reader
from gpytorch_gaps.reports import record_solves
from gpytorch_gaps.score import Score, score

LARGEST = 200_000
"""Cells that are looked at: of a larger grid, a part."""

SAMPLES = 24
"""Draws behind standard deviations, where they are not exact."""

_SHARE, _MOST = 0.1, 10_000  # of the observations, and in all
_PLACES = 6
_FEWEST = 30  # observations without which nothing is withheld
_TRIES = 20


def part_of(shape: Sequence[int], generator: np.random.Generator) -> list[np.ndarray]:
    """Positions of a part of the grid that is small enough, as even as the axes allow."""
    sides = np.array(shape, dtype=float)
    while sides.prod() > LARGEST:
        at = int(np.argmax(sides))
        others = sides.prod() / sides[at]
        second = np.max(np.delete(sides, at), initial=1.0)
        sides[at] = max(min(sides[at] - 1, second), math.floor(LARGEST / others), 1.0)
    starts = [int(generator.integers(0, m - int(n) + 1)) for m, n in zip(shape, sides, strict=True)]
    return [np.arange(start, start + int(n)) for start, n in zip(starts, sides, strict=True)]


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


def withheld(values: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Which observations to withhold: flags of the shape of `values`, none if there are too few observations."""
    gaps = np.isnan(values)
    observed = int((~gaps).sum())
    none = np.zeros_like(gaps)
    wanted = min(_MOST, int(_SHARE * observed))
    if observed < _FEWEST:
        return none
    scattered = ~gaps & (generator.random(gaps.shape) < _SHARE)
    if not gaps.any():
        return _nearest(scattered, wanted, generator)
    best = none
    for _ in range(_TRIES):
        moved = gaps
        for axis, size in enumerate(gaps.shape):
            moved = np.roll(moved, int(generator.integers(0, size)), axis=axis)
        found = moved & ~gaps
        if found.sum() > best.sum():
            best = found
        if best.sum() >= wanted:
            break
    # a few gaps in a large grid show too little of what filling is worth
    return _nearest(best if best.sum() >= min(wanted, _FEWEST) else scattered, wanted, generator)


def _nearest(flags: np.ndarray, count: int, generator: np.random.Generator) -> np.ndarray:
    """Those flags that are nearest to a few random ones of them, `count` in all: gaps that hang together stay so."""
    cells = np.argwhere(flags)
    if len(cells) <= count:
        return flags
    scaled = cells / np.array(flags.shape)
    centres = scaled[generator.choice(len(cells), min(_PLACES, len(cells)), replace=False)]
    distance = np.full(len(cells), np.inf)
    for centre in centres:
        apart = np.abs(scaled - centre).max(axis=1)
        distance = np.minimum(distance, apart)
    chosen = cells[np.argsort(distance, kind="stable")[:count]]
    result = np.zeros_like(flags)
    result[tuple(chosen.T)] = True
    return result


def score_withheld(
    model: gpytorch.models.ExactGP, axes: Sequence[Axis], positions: Sequence[np.ndarray], held: np.ndarray,
    truth: np.ndarray,
) -> Score:  # fmt: skip
    """Scores predictions at the cells that `held` flags in the part at `positions`."""
    cells = np.argwhere(held)
    points = [axis.points[p[c]] for axis, p, c in zip(axes, positions, cells.T, strict=True)]
    x = torch.from_numpy(np.concatenate(points, axis=1))
    x = x.to(model.train_targets.device)
    with torch.no_grad(), record_solves() as solves:
        mean = model(x).mean
        with in_reasonable_time(solves[-1] if solves else None, len(x), SAMPLES):
            variance = model(x).lazy_covariance_matrix.diagonal(dim1=-1, dim2=-2) + model.likelihood.noise
    if solves.variances and solves.variances[-1].num_samples:
        variance = variance * _wider(solves.variances[-1].num_samples) ** 2
    predicted = MultivariateNormal(mean.cpu(), DiagLinearOperator(variance.cpu()))
    return score(predicted, torch.from_numpy(truth[held]))


def _wider(freedom: int) -> float:
    """By how much an interval is wider when its deviation is that of so many samples: Student's t at 97.5 %.

    The first terms of the expansion of its quantile.
    """
    z = 1.959964
    return 1 + (z**2 + 1) / (4 * freedom) + (5 * z**4 + 16 * z**2 + 3) / (96 * freedom**2)
