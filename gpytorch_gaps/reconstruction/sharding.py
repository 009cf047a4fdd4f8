"""Who has which weights, where several ranks share a grid by slices of its first axis.

Weights are a box of shape (r_1, .., r_d). Few of them are held by every rank, which adds up what each has found on its
slices: a message as long as the weights for every product. As many as there are cells are held in parts, by the columns
of another axis, and a product transposes twice:

    slices of the first axis, all columns  <->  all slices, columns that are here
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gpytorch_gaps.distributed.communicator import Communicator, split_evenly
from gpytorch_gaps.linalg.products import kron_diagonal
from gpytorch_gaps.linalg.selection import ravel
from gpytorch_gaps.linalg.truncated import TruncatedEigen

_TRANSPOSE, _SCALAR = "transposes", "scalars"
_FEW = 2**20  # weights that are no burden for anybody


class ReplicatedWeights:
    """Every rank has all weights. One that is alone has them anyway.

    :param rows: all ranks' slices of the first axis.
    """

    def __init__(
        self, basis: TruncatedEigen, ranks: Communicator | None = None, rows: Sequence[slice] | None = None
    ) -> None:
        self.basis, self.ranks = basis, ranks or Communicator()
        self.rows = rows or [slice(0, basis.shape[0])]
        self.products = basis.products
        self.size = basis.size

    @property
    def own_rows(self) -> slice:
        return self.rows[self.ranks.rank]

    # -- numbers, the same on every rank -------------------------------------------------------------------------------

    def dot(self, first: Tensor, second: Tensor) -> Tensor:
        return torch.dot(first.reshape(-1), second.reshape(-1))

    def number(self, own: Tensor) -> float:
        """A sum over weights, or over what follows from them."""
        return self.ranks.from_main(float(own), own.device, _SCALAR)

    def norm(self, weights: Tensor) -> float:
        return self.number(weights.norm())

    def largest(self, weights: Tensor) -> float:
        return self.number(weights.abs().max())

    def complete(self, some: Tensor) -> Tensor:
        """A vector of which every rank has some entries, and zeros."""
        return some

    def here(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Which of the functions at `positions` are held here, and where in the box. shape: (d, p) -> (q,), (q,)"""
        everything = torch.arange(positions.size(-1), device=positions.device)
        return everything, ravel(positions, self.products.shape)

    # -- along the first axis ------------------------------------------------------------------------------------------

    def projection(self) -> "ReplicatedProjection":
        return ReplicatedProjection(self)


class ReplicatedProjection:
    """``Phi_1'`` times rows that come one after the other, added up over all ranks."""

    def __init__(self, weights: ReplicatedWeights) -> None:
        self._weights, self._first = weights, weights.basis.vectors[0]
        ranks = weights.basis.ranks
        self._sums = self._first.new_zeros(ranks[0], math.prod(ranks[1:]))

    def add(self, rows: slice, projected: Tensor) -> None:
        self._sums.addmm_(self._first[rows].mT, projected.reshape(rows.stop - rows.start, -1))

    def total(self) -> Tensor:
        sums = self._weights.ranks.sum(self._sums, "the right-hand side")
        return sums.view(self._weights.basis.ranks)


class ShardedWeights:
    """Every rank has the weights of some columns of the longest axis but the first."""

    def __init__(self, basis: TruncatedEigen, ranks: Communicator, rows: Sequence[slice]) -> None:
        self.basis, self.ranks, self.rows = basis, ranks, rows
        self.axis = max(range(1, len(basis.ranks)), key=lambda axis: basis.ranks[axis])
        self.columns = split_evenly(basis.ranks[self.axis], ranks.size)
        own = list(basis.values)
        own[self.axis] = own[self.axis][self.own_columns]
        products = kron_diagonal(own).view([len(value) for value in own])
        self.products = torch.where(products >= basis.level, products, 0.0)
        self.size = int(self.number(self.products.count_nonzero()))

    @property
    def own_rows(self) -> slice:
        return self.rows[self.ranks.rank]

    @property
    def own_columns(self) -> slice:
        return self.columns[self.ranks.rank]

    # -- numbers, the same on every rank -------------------------------------------------------------------------------

    def dot(self, first: Tensor, second: Tensor) -> Tensor:
        return self.ranks.sum(torch.dot(first.reshape(-1), second.reshape(-1)), _SCALAR)

    def number(self, own: Tensor) -> float:
        return float(self.ranks.sum(own.double(), _SCALAR))

    def norm(self, weights: Tensor) -> float:
        return math.sqrt(self.number(weights.square().sum()))

    def largest(self, weights: Tensor) -> float:
        return max(self.ranks.gather(float(weights.abs().max()) if weights.numel() else 0.0, _SCALAR))

    def complete(self, some: Tensor) -> Tensor:
        return self.ranks.sum(some, "the dense block")

    def here(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        column, own = positions[self.axis], self.own_columns
        which = ((column >= own.start) & (column < own.stop)).nonzero().squeeze(-1)
        local = positions[:, which].clone()
        local[self.axis] -= own.start
        return which, ravel(local, self.products.shape)

    # -- along the first axis ------------------------------------------------------------------------------------------

    def expand_first(self, first: Tensor, weights: Tensor) -> Tensor:
        """``Phi_1 w``, transposed to the slices that are here. shape: (own slices, r_2, .., r_d)"""
        lead = (first @ weights.flatten(1)).view(len(first), *weights.shape[1:])  # some ranks may have none
        count = self.own_rows.stop - self.own_rows.start
        shapes = [self._shape(count, columns) for columns in self.columns]
        found = self.ranks.exchange([lead[rows] for rows in self.rows], shapes, _TRANSPOSE)
        return torch.cat(found, self.axis)

    def project_first(self, first: Tensor, half: Tensor) -> Tensor:
        """``Phi_1'`` times what all ranks have found on their slices. shape: (own slices, r_2, .., r_d) -> own box"""
        parts = [half.narrow(self.axis, own.start, own.stop - own.start) for own in self.columns]
        shapes = [self._shape(rows.stop - rows.start, self.own_columns) for rows in self.rows]
        whole = torch.cat(self.ranks.exchange(parts, shapes, _TRANSPOSE))
        return (first.mT @ whole.flatten(1)).view(self.products.shape)

    def _shape(self, rows: int, columns: slice) -> list[int]:
        shape = [rows, *self.basis.ranks[1:]]
        shape[self.axis] = columns.stop - columns.start
        return shape

    def projection(self) -> "ShardedProjection":
        return ShardedProjection(self)


class ShardedProjection:
    """The same where weights are in parts: rows are kept until all are there."""

    def __init__(self, weights: ShardedWeights) -> None:
        self._weights, self._first = weights, weights.basis.vectors[0]
        self._start = weights.own_rows.start
        shape = (weights.own_rows.stop - self._start, *weights.basis.ranks[1:])
        self._half = self._first.new_zeros(shape)

    def add(self, rows: slice, projected: Tensor) -> None:
        here = slice(rows.start - self._start, rows.stop - self._start)
        self._half[here] = projected.view(self._half[here].shape)

    def total(self) -> Tensor:
        return self._weights.project_first(self._first, self._half)


Weights = ReplicatedWeights | ShardedWeights


def weights_for(basis: TruncatedEigen, ranks: Communicator, rows: Sequence[slice]) -> Weights:
    in_parts = are_sharded(basis.shape, basis.ranks, ranks.size)
    return ShardedWeights(basis, ranks, rows) if in_parts else ReplicatedWeights(basis, ranks, rows)


def are_sharded(shape: Sequence[int], ranks: Sequence[int], processes: int) -> bool:
    """Where there are many, more than a process has cells."""
    cells, count = math.prod(shape), math.prod(ranks)
    return processes > 1 and len(shape) > 1 and count > _FEW and count >= cells / processes
