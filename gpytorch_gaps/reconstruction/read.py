"""The one pass over the values of a grid: which cells are observed, and what they come to in a truncated basis."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from gpytorch_gaps.linalg.products import kron_matmul
from gpytorch_gaps.linalg.selection import unravel
from gpytorch_gaps.reconstruction.shared_grid import masked_grid
from gpytorch_gaps.reconstruction.slabs import Slabs
from gpytorch_gaps.reconstruction.weight_space import WeightSpace
from gpytorch_gaps.reconstruction.weights import Weights
from gpytorch_gaps.utils.progress import with_bar

_SLAB = 2**22  # numbers that are projected at a time


def read_slabs(slabs: Slabs, weights: Weights, noise: float, mean: float) -> tuple[WeightSpace, Tensor, float]:
    """The system of the observed cells, ``Phi' W' (y - mean)`` and ``|y - mean|``."""
    ranks, rows = weights.ranks, weights.own_rows
    device = weights.basis.vectors[0].device
    observed = torch.empty(rows.stop - rows.start, *slabs.shape[1:], dtype=torch.bool, device=device)
    projection, squares = weights.projection(), [0.0]

    def pieces() -> Iterator[None]:
        with with_bar(None, "reading", total=len(observed), unit="slice") as bar:
            for start, slab in slabs:
                for at, part in _parts(slab):
                    first = start + at
                    here = slice(first - rows.start, first - rows.start + len(part))
                    y = _centred(part.to(device), observed[here], mean)
                    projection.add(slice(first, first + len(part)), _project(weights, y))
                    squares[0] += _checked_square(y, part, first)
                bar.update(len(slab))
                yield

    ranks.run_lockstep("reading its slices", pieces())
    space = WeightSpace(masked_grid(observed, weights), weights, noise)
    if not space.num_train:
        cells = math.prod(slabs.shape)
        raise ValueError(f"values: got {cells} entries, all of them gaps; expected at least one observation")
    square = sum(ranks.gather(squares[0], "the size of the values"))
    return space, projection.total() * (weights.products > 0), math.sqrt(square)


def _parts(slab: Tensor) -> Iterator[tuple[int, Tensor]]:
    step = max(1, _SLAB // math.prod(slab.shape[1:]))
    for at in range(0, len(slab), step):
        yield at, slab[at : at + step]


def _centred(part: Tensor, observed: Tensor, mean: float) -> Tensor:
    """Values less the mean, zero in gaps; `observed` is told which these are."""
    torch.logical_not(part.isnan(), out=observed)
    y = part.to(torch.float64, copy=True).sub_(mean)
    y.nan_to_num_(nan=0.0, posinf=math.inf, neginf=-math.inf)
    return y


def _project(weights: Weights, y: Tensor) -> Tensor:
    """On all axes but the first. shape: (k, m_2, .., m_d) -> (k, r_2 .. r_d)"""
    others = [vectors.mT for vectors in weights.basis.vectors[1:]]
    columns = y.reshape(len(y), -1, 1)
    return (kron_matmul(others, columns) if others else columns).reshape(len(y), -1)


def _checked_square(y: Tensor, part: Tensor, first: int) -> float:
    """``|y|^2`` of a slab that begins at slice `first`."""
    square = float(y.square().sum())
    if not math.isfinite(square):
        where = tuple(int(position) for position in unravel(y.abs().flatten().argmax(), tuple(y.shape)))
        what = "infinite" if bool(part[where].isinf()) else f"{float(part[where])}, whose square is infinite"
        where = (where[0] + first, *where[1:])
        raise ValueError(f"values: entry {where} is {what}; expected finite values, or NaN for gaps")
    return square
