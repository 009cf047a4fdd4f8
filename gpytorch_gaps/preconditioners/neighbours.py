"""A sparse inverse Cholesky factor by nearest neighbours (Vecchia 1988; Schaefer, Katzfuss & Owhadi 2021).

Observations are put in a coarse-to-fine order. Each observation is conditioned on its neighbours: the few earlier
observations that are most correlated with it. Let A_i be the covariance of the neighbours and observation i, in this
order, and ``A_i = L_i L_i'``. Then

    u_i = L_i^-T e_last,    P^-1 = U U',    log|P| = 2 sum_i log (L_i)_last,last

where u_i is column i of U, which is zero at all other observations. Among all matrices with these zeros, this U makes
``U' A U`` closest to the identity in the Kullback-Leibler divergence, with ones on its diagonal. Therefore the gradient

    d log|P| = sum_i u_i' dA u_i = tr(P^-1 dA)

does not contain a derivative of U. Only entries of A are used. A may be a sum or a product, and may have any diagonal.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gpytorch_gaps.linalg.axis_correlations import correlations, relative_change
from gpytorch_gaps.linalg.neighbours import earlier_rows
from gpytorch_gaps.linalg.ordering import coarse_to_fine, generations
from gpytorch_gaps.linalg.sparse_columns import SparseColumns

Entries = Callable[[Tensor, Tensor], Tensor]
_CHUNK_NUMBERS = 2**20  # entries of A in memory at a time: 8 MiB of float64
_MOVED = 0.5  # relative change of the correlations along an axis, beyond which new neighbours are found
_LARGE_ENTRIES = 2**24  # numbers in a factor, beyond which it is compressed in one precision at a time
_LIFTS = (1e-14, 1e-12, 1e-10, 1e-8, 1e-6)  # fractions of the largest variance, added to an indefinite block


@dataclass(frozen=True)
class NeighbourLists:
    """The earlier observations on which each observation is conditioned.

    :param rows: positions of the neighbours, -1 for none, integers of 32 bits if these are enough, shape (N, k).
    :param rank: place of each observation in the ordering, shape (N,).
    :param corr: ``|corr_i|`` of every axis when they were found, in the form of :func:`neighbour_lists`.
    """

    rows: Tensor
    rank: Tensor
    corr: Sequence[Tensor] = ()

    def still_serve(self, factors: Sequence[Tensor]) -> bool:
        """Whether the correlations along all axes are still close to those the neighbours were found with.

        :param factors: K_i, in the form of :func:`neighbour_lists`. If the kind of an axis has changed, new neighbours
        are found.
        """
        if [own.shape for own in factors] != [own.shape for own in self.corr]:
            return False
        pairs = zip(correlations(factors), self.corr, strict=True)
        changes = [relative_change(new, old) for new, old in pairs]
        return bool(torch.stack(changes).max() <= _MOVED)


def neighbour_lists(factors: Sequence[Tensor], index: Tensor, count: int) -> NeighbourLists:
    """The neighbours of observed cells under a Kronecker product, in a coarse-to-fine ordering.

    :param factors: K_i, shape (m_i, m_i) each. Only their correlations matter. For a stationary kernel on a regular
        axis, a vector of shape (m_i,) is enough: entry l is the covariance of two levels that are l apart. No matrix
        is formed for it, so the axis may have millions of levels. Latitude and longitude on the sphere are one axis of
        shape (a_i, a_i, q_i): :mod:`gpytorch_gaps.linalg.axis_correlations` has all three.
    :param index: flat cell of each observation, last axis fastest, shape (N,).
    :param count: largest number of neighbours of an observation.

    >>> lists = neighbour_lists([torch.eye(3) + 1.0], torch.arange(3), 1)
    >>> lists.rows.shape, sorted(lists.rank.tolist())
    (torch.Size([3, 1]), [0, 1, 2])
    >>> by_lag = torch.exp(-0.1 * torch.arange(100_000.0))
    >>> neighbour_lists([by_lag], torch.arange(0, 100_000, 2), 4).rows.shape  # every second level is a gap
    torch.Size([50000, 4])
    """
    corr = correlations(factors)
    generation = generations(corr)
    rank = coarse_to_fine(generation, index)
    rows = earlier_rows(corr, index, generation, rank, min(count, len(index) - 1))
    return NeighbourLists(rows.int() if len(index) <= torch.iinfo(torch.int32).max else rows, rank, corr)


class NeighbourPreconditioner:
    """``P^-1 = U U'`` with U as above, in float64 for any precision of its input.

    :param entries: ``K[rows, columns]`` of the covariance without noise, for positions that broadcast.
        shape: positions -> (*batch, *positions)
    :param noise: D, shape (*batch, 1) or (*batch, N).
    :param lists: the neighbours of every observation.
    :raises ValueError: if the covariance of an observation and its neighbours is not positive definite.

    Cost: set-up ``N (k + 1)^3 / 3``; then ``4 N (k + 1)`` FLOPs a column.

    >>> K = torch.tensor([[1.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
    >>> noise, lists = torch.ones(1, dtype=torch.float64), neighbour_lists([K], torch.arange(2), 1)
    >>> exact = NeighbourPreconditioner(lambda rows, columns: K[rows, columns], noise, lists)  # each has all before it
    >>> torch.allclose(exact.solve(K + torch.eye(2)), torch.eye(2, dtype=torch.float64)), f"{exact.logdet().exp():.2f}"
    (True, '3.75')
    """

    rank = 0
    left_over = math.inf

    def __init__(self, entries: Entries, noise: Tensor, lists: NeighbourLists) -> None:
        self.lists = lists
        own = torch.arange(len(lists.rank), device=lists.rank.device).unsqueeze(-1)
        self._rows = torch.cat([lists.rows, own.to(lists.rows.dtype)], -1)
        size, width = self._rows.shape
        members = torch.broadcast_shapes(entries(own[:1], own[:1]).shape[:-2], noise.shape[:-1]).numel()
        parts = self._rows.split(max(1, _CHUNK_NUMBERS // (members * width**2)))
        found = [_conditional(entries, noise, rows.long()) for rows in parts]
        self._values = torch.cat([column for column, _ in found], -2)  # shape: (*batch, N, k + 1)
        self._logdet = torch.cat([log for _, log in found], -1).sum(-1)
        self.batch = self._values.shape[:-2]
        self.setup_flops, self.flops = neighbour_flops(size, width - 1)

    @property
    def num_neighbours(self) -> int:
        """k."""
        return self.lists.rows.size(-1)

    @cached_property
    def _columns(self) -> list[SparseColumns]:
        """U of every member of the batch."""
        members = self._values.reshape(-1, *self._rows.shape)
        return [SparseColumns(self._rows, values, self.lists.rank) for values in members]

    @cached_property
    def _narrow_columns(self) -> list[SparseColumns]:
        narrow = [own.to(torch.float32) for own in self._columns]
        if self._values.numel() > _LARGE_ENTRIES:
            for own in self._columns:
                own.forget()
        return narrow

    def solve(self, x: Tensor) -> Tensor:
        """``P^-1 x``, in the precision of x. shape: (*batch, N, C)"""
        columns = self._narrow_columns if x.dtype == torch.float32 else self._columns
        return self._of_each(lambda own, part: own.matmul(own.mT_matmul(part)), columns, x)

    def matmul(self, x: Tensor) -> Tensor:
        """``P x``, in the precision of x. shape: (*batch, N, C)"""
        result = self._of_each(lambda own, part: own.mT_solve(own.solve(part)), self._columns, x.double())
        return result.to(x.dtype)

    def draw(self, count: int, batch: torch.Size) -> Tensor:
        """Random vectors with covariance P: ``U'^-1 g``, g random signs. shape: (*batch, N, count)

        Estimates from random signs have a smaller variance than those from normal numbers, because ``U' A U`` has ones
        on its diagonal.
        """
        signs = torch.randint(2, (*batch, len(self._rows), count), device=self._rows.device).mul_(2).sub_(1)
        return self._of_each(lambda own, part: own.mT_solve(part), self._columns, signs.double())

    def logdet(self) -> Tensor:
        """``log|P|``. shape: batch"""
        return self._logdet

    def inverse_entries(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Rows, columns and weights whose sum of weights times entries of a symmetric A is ``tr(P^-1 A)``, in parts.

        Several weights may belong to one entry. shape: (q,), (q,) and (*batch, q)
        """
        width = self._rows.size(-1)
        lower, upper = torch.tril_indices(width, width, device=self._rows.device)
        twice = torch.where(lower == upper, 1.0, 2.0).to(self._values)
        size = max(1, _CHUNK_NUMBERS // (self.batch.numel() * len(lower)))
        for rows, values in zip(self._rows.split(size), self._values.split(size, -2), strict=True):
            weights = values[..., lower] * values[..., upper] * twice  # zero where a neighbour is missing
            safe = rows.long().clamp_min(0)
            yield safe[:, lower].flatten(), safe[:, upper].flatten(), weights.flatten(-2)

    def _of_each(
        self, function: Callable[[SparseColumns, Tensor], Tensor], columns: Sequence[SparseColumns], x: Tensor
    ) -> Tensor:
        """Applies a function of U and x to every member of the batch. shape: (*batch, N, C)"""
        if self.batch:
            members = x.expand(*self.batch, *x.shape[-2:]).reshape(-1, *x.shape[-2:])
            parts = [function(own, part) for own, part in zip(columns, members, strict=True)]
            return torch.stack(parts).reshape(*self.batch, *x.shape[-2:])
        if x.dim() == 2:
            return function(columns[0], x)
        flat = x.movedim(-2, 0)  # a batch of right-hand sides for one matrix is a matrix with more of them
        return function(columns[0], flat.flatten(1)).unflatten(1, flat.shape[1:]).movedim(0, -2)


def neighbour_flops(rows: int, count: int) -> tuple[float, float]:
    """FLOPs of setting up, and of applying to one column, a preconditioner of N rows and k neighbours."""
    return rows * (count + 1) ** 3 / 3.0, 4.0 * rows * (count + 1)


def _conditional(entries: Entries, noise: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Columns of U, and the logarithms of the conditional variances, of some observations.

    :param rows: neighbours, -1 for none, and the observation itself last. shape (q, k + 1)
    :return: shape (*batch, q, k + 1) and (*batch, q)
    """
    has, safe = rows >= 0, torch.where(rows >= 0, rows, rows[:, -1:])
    # only the lower triangle is read. Line j: the covariances of neighbour j with those up to itself
    lines = [entries(safe[:, j : j + 1], safe[:, : j + 1]) for j in range(rows.size(-1))]
    own_noise = noise.unsqueeze(-1) if noise.size(-1) == 1 else noise[..., safe]
    own_noise = torch.where(has, own_noise, 1.0)  # shape: (*batch, q, k + 1)
    batch = torch.broadcast_shapes(lines[0].shape[:-2], own_noise.shape[:-2])
    block = lines[0].new_zeros(*batch, *rows.shape, rows.size(-1))
    for j, line in enumerate(lines):
        block[..., j, : j + 1] = line
    lacking = (~has).any(-1).nonzero().squeeze(-1)
    if len(lacking):  # a missing neighbour is independent of all others
        some = has[lacking]
        block[..., lacking, :, :] *= some.unsqueeze(-1) & some.unsqueeze(-2)
    block.diagonal(dim1=-2, dim2=-1).add_(own_noise)
    factor = _cholesky(block)
    last = torch.zeros_like(block[..., :1])
    last[..., -1, :] = 1.0
    column = torch.linalg.solve_triangular(factor.mT, last, upper=True).squeeze(-1)
    return torch.where(has, column, 0.0), 2.0 * factor[..., -1, -1].log()


def _cholesky(block: Tensor) -> Tensor:
    """Cholesky factors. If rounding makes a block indefinite, its diagonal is raised as little as necessary."""
    factor, info = torch.linalg.cholesky_ex(block)
    for lift in _LIFTS:
        failed = info > 0
        if not bool(failed.any()):
            return factor
        largest = block.diagonal(dim1=-2, dim2=-1).amax(-1, keepdim=True)
        lifted = block + torch.diag_embed((lift * largest * failed.unsqueeze(-1)).expand(block.shape[:-1]))
        again, info = torch.linalg.cholesky_ex(lifted)
        factor = torch.where(failed[..., None, None], again, factor)
    if bool((info > 0).any()):
        raise ValueError(
            "covariance: got an indefinite matrix or entries that are not finite, expected a positive definite matrix"
        )
    return factor
