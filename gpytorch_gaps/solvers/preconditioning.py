"""Which preconditioners a system can be given, each set up once.

**Eigen**: the leading eigenvectors of every Kronecker term, those of all terms above one threshold, and low-rank terms
whole. What is left out has a norm of at most the sum of the largest eigenvalues left out, so that the best rank is
known before anything is solved.

**Neighbours**: a sparse inverse Cholesky factor. How good it is, a few iterations tell.

**Own**: whatever a function that the user gave makes of the system.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gpytorch_gaps.preconditioners.low_rank import LowRankPreconditioner
from gpytorch_gaps.preconditioners.neighbours import NeighbourLists, NeighbourPreconditioner, neighbour_lists
from gpytorch_gaps.solvers.system import NoisySystem
from gpytorch_gaps.utils.threads import threads_for


@dataclass(frozen=True)
class Eigen:
    """Leading eigenvectors: so many of each Kronecker term."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Neighbours:
    """A sparse inverse Cholesky factor by so many nearest neighbours."""

    count: int


@dataclass(frozen=True)
class Own:
    """What a user's function makes of the system."""

    make: Callable[[NoisySystem], Any]


Choice = Eigen | Neighbours | Own


def preconditioner(system: NoisySystem, choice: Choice) -> Any:
    """P, set up once a system."""
    if isinstance(choice, Eigen):
        return eigen_preconditioner(system, choice.ranks)
    make = (lambda: choice.make(system)) if isinstance(choice, Own) else (lambda: _neighbours(system, choice.count))
    return system.cached(("preconditioner", choice), make)


def preconditioner_of_solves(system: NoisySystem, choice: Choice) -> Any:
    """The one that is reused, if there is one; else the one that is chosen."""
    if system.reused_preconditioner is not None:
        return system.reused_preconditioner
    system.last_preconditioner = preconditioner(system, choice)
    return system.last_preconditioner


def has_preconditioner(system: NoisySystem, choice: Choice) -> bool:
    """Whether :func:`preconditioner_of_solves` costs nothing."""
    return system.reused_preconditioner is not None or system.is_cached(("preconditioner", choice))


# -- eigenvectors ----------------------------------------------------------------------------------------------------


def eigen_preconditioner(system: NoisySystem, ranks: tuple[int, ...]) -> LowRankPreconditioner:
    """:func:`low_rank_approximation` with the trace of the matrix: what conjugate gradients want.

    :param ranks: how many eigenvectors each Kronecker term gives.
    """
    return system.cached(("preconditioner", Eigen(ranks)), lambda: _low_rank(system, ranks, system.kernel_trace))


def low_rank_approximation(system: NoisySystem, ranks: tuple[int, ...]) -> LowRankPreconditioner:
    """``Σ_t W Q_t T_t,p Q_t' W' + R R' + D`` with nothing added: what variances are computed from."""
    return system.cached(("low rank", ranks), lambda: _low_rank(system, ranks, None))


def eigenvalues_kept(system: NoisySystem, ranks: Sequence[int], factors: Sequence[Sequence[Tensor]]) -> Tensor:
    """The eigenvalues kept of all terms, differentiable in the same factors as the system's. shape: (*batch, p)"""
    parts = [
        term.eigenvalues(own, term.leading(rank)[1])
        for term, own, rank in zip(system.terms, factors, ranks, strict=True)
        if rank
    ]
    batch = torch.broadcast_shapes(*(part.shape[:-1] for part in parts)) if parts else torch.Size()
    return torch.cat([system.noise.new_zeros(*batch, 0), *(part.expand(*batch, -1) for part in parts)], -1)


def _low_rank(system: NoisySystem, ranks: tuple[int, ...], trace: Tensor | None) -> LowRankPreconditioner:
    """Eigenvectors of all terms, axis by axis, side by side."""
    root = None if system.other is None else system.other.root
    if not sum(ranks):
        alone = system.noise.new_ones(system.num_train, 1)
        nothing = torch.zeros(1, 0, dtype=torch.long, device=alone.device)
        rows = torch.arange(system.num_train, device=alone.device)
        return LowRankPreconditioner([alone], nothing, alone.new_zeros(0), rows, system.noise, root, trace=trace)
    positions, offsets = [], [0] * len(system.terms[0].shape)
    for term, rank in zip(system.terms, ranks, strict=True):
        own = term.leading(rank)[1] if rank else system.train_index.new_zeros(len(offsets), 0)
        positions.append(torch.stack([axis + offset for axis, offset in zip(own, offsets, strict=True)]))
        offsets = [offset + size for offset, size in zip(offsets, term.shape, strict=True)]
    left_out = sum(term.left_out(rank) for term, rank in zip(system.terms, ranks, strict=True))
    all_known = (system.other is None or system.other.is_low_rank) and system.least_noise > 0
    return LowRankPreconditioner(
        [_side_by_side(axis) for axis in zip(*(term.eigen().vectors for term in system.terms), strict=True)],
        torch.cat(positions, -1),
        eigenvalues_kept(system, ranks, [term.factors() for term in system.terms]),
        system.train_index,
        system.noise,
        root,
        left_over=left_out / system.least_noise if all_known else math.inf,
        trace=trace,
    )


def _side_by_side(vectors: Sequence[Tensor]) -> Tensor:
    """shape: (*batch, m, m_t) each -> (*batch, m, Σ m_t)"""
    if len(vectors) == 1:
        return vectors[0]
    batch = torch.broadcast_shapes(*(own.shape[:-2] for own in vectors))
    return torch.cat([own.expand(*batch, *own.shape[-2:]) for own in vectors], -1)


# -- neighbours ------------------------------------------------------------------------------------------------------

_kept_lists: Any = WeakTensorKeyDictionary()  # of observed cells: they serve one training step after the other


def _neighbours(system: NoisySystem, count: int) -> NeighbourPreconditioner:
    count = min(count, system.num_train - 1)
    work = system.num_train * (count + 1) ** 3 / 3.0
    with threads_for(work):
        return NeighbourPreconditioner(system.entries, system.noise, _lists(system, count))


def _lists(system: NoisySystem, count: int) -> NeighbourLists:
    """The neighbours of every observation; those found for earlier hyperparameters, while these have moved little."""
    factors = _typical_factors(system)
    kept = _kept_lists.setdefault(system.train_index, {})
    if count not in kept or not kept[count].still_serve(factors):
        kept[count] = neighbour_lists(factors, system.train_index, count)
    return kept[count]


def _typical_factors(system: NoisySystem) -> list[Tensor]:
    """Along every axis, the mean of the terms weighted by their variances, and over a batch. shape: (m_i, m_i) each"""
    shares = [term.trace(system.train_index).mean() for term in system.terms]
    return [
        torch.stack(
            [share * _scaled(term.factors()[axis]) for term, share in zip(system.terms, shares, strict=True)]
        ).sum(0)
        for axis in range(len(system.terms[0].shape))
    ]


def _scaled(factor: Tensor) -> Tensor:
    """The mean over a batch, with a mean variance of one. shape: (*batch, m, m) -> (m, m)"""
    mean = factor.reshape(-1, *factor.shape[-2:]).mean(0)
    return mean / mean.diagonal().mean().clamp_min(torch.finfo(mean.dtype).tiny)
