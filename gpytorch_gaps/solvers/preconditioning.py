"""The preconditioners of a system, each set up once.

**Eigen**: the leading eigenvectors of every Kronecker term, with the same threshold for all terms, and all of the
low-rank terms. The norm of the rest is at most the sum of the largest eigenvalues of each term that are left out, so
that the best rank is known before anything is solved.

**Neighbours**: a sparse inverse Cholesky factor. Its quality is estimated by a few iterations.

**Own**: the object that a user's function returns for the system. It has up to three methods:

- ``solve(x)``: ``P^-1 x`` for x in float64, shape (*batch, N, C);
- ``draw(count, batch)``: random vectors with covariance P, shape (*batch, N, count), for log-determinants alone;
- ``logdet()``: ``log|P|``, shape batch, for log-determinants alone.

P must be symmetric and positive definite. The system has products (``matmul``), entries without noise (``entries``),
the whole matrix (``dense``), the variances of the noise (``noise``), and the number of its rows (``num_train``).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gpytorch_gaps.linalg.axis_correlations import num_levels
from gpytorch_gaps.linalg.factors import toeplitz
from gpytorch_gaps.preconditioners.low_rank import LowRankPreconditioner
from gpytorch_gaps.preconditioners.neighbours import NeighbourLists, NeighbourPreconditioner, neighbour_lists
from gpytorch_gaps.solvers.kronecker_term import side_by_side
from gpytorch_gaps.solvers.system import NoisySystem
from gpytorch_gaps.utils.threads import threads_for


@dataclass(frozen=True)
class Eigen:
    """Leading eigenvectors: their number for each Kronecker term."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Neighbours:
    """A sparse inverse Cholesky factor with a given number of nearest neighbours."""

    count: int


@dataclass(frozen=True)
class Own:
    """The object that a user's function returns for the system."""

    make: Callable[[NoisySystem], Any]


class OwnPreconditioner:
    """An object that a user's function returned, with further attributes that solvers need.

    :param given: the object. It has ``solve``, and for log-determinants also ``draw`` and ``logdet``. For reports, it
        may have ``flops``, those of applying it to one column, and ``setup_flops``.
    :param num_rows: N.
    :raises ValueError: if it has no ``solve``, or lacks a method that a log-determinant needs.

    >>> class Halving:
    ...     def solve(self, x):
    ...         return x / 2.0
    >>> OwnPreconditioner(Halving(), 1).solve(torch.ones(1, 1))
    tensor([[0.5000]])
    """

    rank = num_neighbours = 0
    left_over = math.inf

    def __init__(self, given: Any, num_rows: int) -> None:
        if not callable(getattr(given, "solve", None)):
            raise ValueError(
                f"settings.preconditioner: the function made a {type(given).__name__}, expected an object with a "
                "method solve(x) that gives P^-1 x"
            )
        self._given, self._num_rows = given, num_rows
        self.flops, self.setup_flops = (float(getattr(given, name, 0.0)) for name in ("flops", "setup_flops"))

    def solve(self, x: Tensor) -> Tensor:
        """``P^-1 x``, in the precision of x. shape: (*batch, N, C)"""
        return self._checked("solve", self._given.solve(x.double()), x.shape).to(x.dtype)

    def draw(self, count: int, batch: torch.Size) -> Tensor:
        """Random vectors with covariance P. shape: (*batch, N, count)"""
        return self._checked("draw", self._needed("draw")(count, batch), torch.Size((*batch, self._num_rows, count)))

    def logdet(self) -> Tensor:
        """``log|P|``. shape: batch"""
        value = self._needed("logdet")()
        return value.double() if torch.is_tensor(value) else torch.tensor(float(value), dtype=torch.float64)

    def _needed(self, name: str) -> Callable[..., Any]:
        found = getattr(self._given, name, None)
        if not callable(found):
            raise ValueError(
                f"settings.preconditioner: {type(self._given).__name__} has no method {name}, expected "
                "draw(count, batch) and logdet() for a log-determinant that is estimated"
            )
        return found

    def _checked(self, name: str, result: Any, shape: torch.Size) -> Tensor:
        if not torch.is_tensor(result) or result.shape != shape:
            came = f"shape {tuple(result.shape)}" if torch.is_tensor(result) else f"a {type(result).__name__}"
            raise ValueError(
                f"settings.preconditioner: {name} of {type(self._given).__name__} gave {came}, expected a tensor of "
                f"shape {tuple(shape)}"
            )
        return result


Choice = Eigen | Neighbours | Own


def preconditioner(system: NoisySystem, choice: Choice) -> Any:
    """P, set up once per system."""
    if isinstance(choice, Eigen):
        return eigen_preconditioner(system, choice.ranks)
    own, count = (choice.make, 0) if isinstance(choice, Own) else (None, choice.count)
    make = (
        (lambda: _neighbours(system, count))
        if own is None
        else (lambda: OwnPreconditioner(own(system), system.num_train))
    )
    return system.cached(("preconditioner", choice), make)


def preconditioner_of_solves(system: NoisySystem, choice: Choice) -> Any:
    """The reused preconditioner, if there is one; otherwise the chosen one."""
    if system.reused_preconditioner is not None:
        return system.reused_preconditioner
    system.last_preconditioner = preconditioner(system, choice)
    return system.last_preconditioner


def has_preconditioner(system: NoisySystem, choice: Choice) -> bool:
    """Whether :func:`preconditioner_of_solves` costs nothing."""
    return system.reused_preconditioner is not None or system.is_cached(("preconditioner", choice))


# -- eigenvectors ----------------------------------------------------------------------------------------------------


def eigen_preconditioner(system: NoisySystem, ranks: tuple[int, ...]) -> LowRankPreconditioner:
    """:func:`low_rank_approximation` with the trace of the matrix, for conjugate gradients.

    :param ranks: number of eigenvectors of each Kronecker term.
    """
    return system.cached(("preconditioner", Eigen(ranks)), lambda: _low_rank(system, ranks, system.kernel_trace))


def has_low_rank(system: NoisySystem) -> bool:
    """Whether a preconditioner by eigenvectors is possible. It divides by the noise."""
    return system.has_eigenvectors and system.least_noise > 0


def low_rank_approximation(system: NoisySystem, ranks: tuple[int, ...]) -> LowRankPreconditioner:
    """``Σ_t W Q_t T_t,p Q_t' W' + R R' + D``, without the dropped part of the diagonal, for variances."""
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
    """Eigenvectors of all terms, concatenated for each axis."""
    root = None if system.other is None else system.other.root
    if not sum(ranks):
        alone = system.noise.new_ones(system.num_train, 1)
        nothing = torch.zeros(1, 0, dtype=torch.long, device=alone.device)
        rows = torch.arange(system.num_train, device=alone.device)
        return LowRankPreconditioner([alone], nothing, alone.new_zeros(0), rows, system.noise, root, trace=trace)
    positions, offsets = [], [0] * len(system.terms[0].shape)
    for term, rank in zip(system.terms, ranks, strict=True):
        own = term.leading(rank)[1] if rank else term.leading(1)[1][:, :0]
        positions.append(torch.stack([axis + offset for axis, offset in zip(own, offsets, strict=True)]))
        offsets = [offset + size for offset, size in zip(offsets, term.shape, strict=True)]
    left_out = system.gain * sum(term.left_out(rank) for term, rank in zip(system.terms, ranks, strict=True))
    all_known = (system.other is None or system.other.is_low_rank) and system.least_noise > 0
    return system.low_rank(
        [side_by_side(axis) for axis in zip(*(term.eigen().matrices for term in system.terms), strict=True)],
        torch.cat(positions, -1),
        eigenvalues_kept(system, ranks, [term.factors() for term in system.terms]),
        root=root,
        left_over=left_out / system.least_noise if all_known else math.inf,
        trace=trace,
    )


# -- neighbours ------------------------------------------------------------------------------------------------------


@dataclass
class _Kept:
    """Results that one training step keeps for the next, for one set of observed cells."""

    lists: dict[tuple[int, tuple[int, ...], int | None], NeighbourLists] = field(default_factory=dict)
    count: int | None = None
    """The best number of neighbours; 0 if neighbours were slower than the alternative."""


_kept: Any = WeakTensorKeyDictionary()  # keyed by the cells: it is freed with them


def _neighbours(system: NoisySystem, count: int) -> NeighbourPreconditioner:
    count = min(count, system.num_train - 1)
    work = system.num_train * (count + 1) ** 3 / 3.0
    with threads_for(work):
        return NeighbourPreconditioner(system.entries, system.noise, _lists(system, count))


def _lists(system: NoisySystem, count: int) -> NeighbourLists:
    """The neighbours of every observation. They are kept as long as hyperparameters have changed little."""
    factors, key = _typical_covariances(system), _key(system, count)
    lists = _kept.setdefault(system.train_index, _Kept()).lists
    if key not in lists or not lists[key].still_serve(factors):
        lists[key] = neighbour_lists(factors, system.train_index, count)
    return lists[key]


def _key(system: NoisySystem, count: int) -> tuple[int, tuple[int, ...], int | None]:
    """The same cells may belong to grids of several shapes, and may be changed in place."""
    index = system.train_index
    return count, _finest_axes(system), None if index.is_inference() else index._version


def remember_count(system: NoisySystem, count: int) -> None:
    """Keeps the best number of neighbours, or 0, for the next systems on the same cells."""
    _kept.setdefault(system.train_index, _Kept()).count = count


def remembered_count(system: NoisySystem) -> int | None:
    """The number of neighbours that was best for hyperparameters close to these; None if unknown."""
    kept = _kept.get(system.train_index)
    if kept is None or kept.count is None:
        return None
    shape, version = _key(system, kept.count)[1:]
    known = [lists for key, lists in kept.lists.items() if key[1:] == (shape, version)]
    serve = known and all(lists.still_serve(_typical_covariances(system)) for lists in known)
    return kept.count if serve else None


def forget_neighbours() -> None:
    """Drops all kept results: a run that resumes from a checkpoint has none, and must take the same steps."""
    _kept.clear()


def _finest_axes(system: NoisySystem) -> tuple[int, ...]:
    """The axes of the term with the most axes: a dense factor for several axes counts as one."""
    return max((term.axes for term in system.terms), key=len)


def _typical_covariances(system: NoisySystem) -> list[Tensor]:
    """The mean covariance along every axis, over terms, weighted by their variances, and over a batch.

    shape: (m_i, m_i) each, or by lag if all terms are stationary along a regular axis: (m_i,), or (a_i, a_i, q_i)
    for a block of a dense and a regular axis
    """
    axes = _finest_axes(system)
    terms = [term for term in system.terms if term.axes == axes]
    shares = [term.trace(system.train_index).mean() for term in terms]
    found = [term.joint_covariances() for term in terms]
    if len({tuple(map(num_levels, own)) for own in found}) > 1:  # not all of them have the same block
        found = [term.axis_covariances() for term in terms]
    return [_mean(own, shares) for own in zip(*found, strict=True)]


def _mean(covariances: Sequence[Tensor], shares: Sequence[Tensor]) -> Tensor:
    """Covariances along one axis, with a mean variance of one, weighted by shares."""
    if any(own.dim() == 2 for own in covariances):
        covariances = [toeplitz(own) if own.dim() == 1 else own for own in covariances]
    pairs = zip(covariances, shares, strict=True)
    return torch.stack([share * _scaled(own) for own, share in pairs]).sum(0)


def _scaled(covariance: Tensor) -> Tensor:
    together = covariance[..., 0] if covariance.dim() == 3 else covariance
    variance = together[0] if together.dim() == 1 else together.diagonal().mean()
    return covariance / variance.clamp_min(torch.finfo(covariance.dtype).tiny)
