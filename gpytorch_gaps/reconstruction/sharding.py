"""How the weights of a basis and the slices of a grid are divided among processes.

Every process holds some slices of the first axis. The weights are an array of shape (r_1, .., r_d), called a box. A
small box is *replicated*: every process holds all of it, and a product with the system sums one message of that length
over the processes. The box of a kernel that does not truncate is large. It is *sharded* by the columns of another axis,
and a product transposes it twice:

    own slices of the first axis, all columns  <->  all slices, own columns
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from gpytorch_gaps.distributed.communicator import SINGLE, Communicator, split_evenly
from gpytorch_gaps.linalg.masked_grid import MaskedGrid, blocks
from gpytorch_gaps.linalg.products import kron_diagonal, kron_matmul
from gpytorch_gaps.linalg.selection import ravel
from gpytorch_gaps.linalg.truncated import TruncatedEigen
from gpytorch_gaps.linalg.truncated_sum import TruncatedSum

_MAX_REPLICATED_WEIGHTS = 2**20  # a box of at most so many weights is never sharded
_BLOCK_NUMBERS = 2**22  # numbers of the grid that are held at once
Basis = TruncatedEigen | TruncatedSum
_SCALARS, _TRANSPOSES, _SUMS, _BLOCK = "scalars", "transposes", "sums of weights", "the dense block"


class Weights(ABC):
    """The weights that this process holds, and its exchanges with other processes.

    :param basis: eigenvectors of all axes, the same on every process.
    :param rows: slices of the first axis of every process.
    """

    products: Tensor  # eigenvalues of the weights held here, zero where they are dropped
    size: int  # number of basis functions, of all processes together

    def __init__(self, basis: Basis, comm: Communicator, rows: Sequence[slice]) -> None:
        self.basis, self.comm, self.rows = basis, comm, rows
        self.own_rows = rows[comm.rank]

    @abstractmethod
    def total(self, own: Tensor) -> float:
        """A sum over all weights, given the sum over those held here. The same number on every process."""

    @abstractmethod
    def dot(self, first: Tensor, second: Tensor) -> Tensor:
        """The inner product of two boxes of weights."""

    @abstractmethod
    def complete(self, own: Tensor) -> Tensor:
        """A complete short vector, given the entries whose weights are held here, and zeros for the others."""

    @abstractmethod
    def held(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The given functions that this process holds, and their places in its box. shape: (d, p) -> (q,), (q,)"""

    @abstractmethod
    def gram(self, grid: MaskedGrid, bases: Sequence[Tensor], weights: Tensor) -> Tensor:
        """``Phi' W'W Phi w`` over the whole grid, given the mask of this process's slices."""

    @abstractmethod
    def empty_projection(self) -> Tensor:
        """A tensor of zeros in which :meth:`add_rows` collects ``Phi' y`` of this process's slices."""

    @abstractmethod
    def add_rows(self, projection: Tensor, rows: slice, values: Tensor) -> None:
        """Add slices that have been projected on all other axes. shape: (k, r_2 .. r_d)"""

    @abstractmethod
    def sum_projection(self, projection: Tensor) -> Tensor:
        """``Phi' y`` over the whole grid, a box of weights."""

    def norm(self, weights: Tensor) -> float:
        return math.sqrt(self.total(_flat_dot(weights, weights)))

    def largest(self, weights: Tensor) -> float:
        return max(self.comm.gather(float(weights.abs().max()) if weights.numel() else 0.0, _SCALARS))

    def count(self, grid: MaskedGrid) -> int:
        """N, the number of observed cells of all slices."""
        return sum(self.comm.gather(grid.count(), "the number of observations"))

    def project_mask(self, grid: MaskedGrid, bases: Sequence[Tensor]) -> Tensor:
        """``Phi' W' 1`` over the whole grid, on every process."""
        return self.comm.sum(grid.project(self._own_slices(bases)), _BLOCK)

    def _own_slices(self, bases: Sequence[Tensor]) -> list[Tensor]:
        return [bases[0][self.own_rows], *bases[1:]]


class ReplicatedWeights(Weights):
    """Every process holds all weights. A product sends as many numbers as its sweep has coefficients."""

    def __init__(self, basis: Basis, comm: Communicator = SINGLE, rows: Sequence[slice] | None = None) -> None:
        super().__init__(basis, comm, rows or [slice(0, basis.shape[0])])
        self.products, self.size = basis.products, basis.size

    def total(self, own: Tensor) -> float:
        return self.comm.from_main(float(own), own.device, _SCALARS)

    def dot(self, first: Tensor, second: Tensor) -> Tensor:
        return _flat_dot(first, second)

    def complete(self, own: Tensor) -> Tensor:
        return own

    def held(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        everything = torch.arange(positions.size(-1), device=positions.device)
        return everything, ravel(positions, self.products.shape)

    def gram(self, grid: MaskedGrid, bases: Sequence[Tensor], weights: Tensor) -> Tensor:
        image = self.comm.sum(grid.gram(self._own_slices(bases), self.basis.to_box(weights)), _SUMS)
        return self.basis.from_box(image.double())

    def empty_projection(self) -> Tensor:
        ranks = self.basis.ranks
        return self.products.new_zeros(ranks[0], math.prod(ranks[1:]))

    def add_rows(self, projection: Tensor, rows: slice, values: Tensor) -> None:
        projection.addmm_(self.basis.vectors[0][rows].mT, values)

    def sum_projection(self, projection: Tensor) -> Tensor:
        return self.basis.from_box(self.comm.sum(projection, "the right-hand side").view(self.basis.ranks))


class ShardedWeights(Weights):
    """Every process holds the weights of some columns of the longest axis after the first.

    A product sends ``m_1 r_2 .. r_d`` numbers twice, divided among the processes.
    """

    basis: TruncatedEigen

    def __init__(self, basis: TruncatedEigen, comm: Communicator, rows: Sequence[slice]) -> None:
        super().__init__(basis, comm, rows)
        self.axis = max(range(1, len(basis.ranks)), key=lambda axis: basis.ranks[axis])
        self.columns = split_evenly(basis.ranks[self.axis], comm.size)
        self.own_columns = self.columns[comm.rank]
        own = list(basis.values)
        own[self.axis] = own[self.axis][self.own_columns]
        products = kron_diagonal(own).view([len(value) for value in own])
        self.products = torch.where(products >= basis.level, products, 0.0)
        self.size = int(self.total(self.products.count_nonzero()))

    def total(self, own: Tensor) -> float:
        return float(self.comm.sum(own.double(), _SCALARS))

    def dot(self, first: Tensor, second: Tensor) -> Tensor:
        return self.comm.sum(_flat_dot(first, second), _SCALARS)

    def complete(self, own: Tensor) -> Tensor:
        return self.comm.sum(own, _BLOCK)

    def held(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        column = positions[self.axis]
        which = ((column >= self.own_columns.start) & (column < self.own_columns.stop)).nonzero().squeeze(-1)
        local = positions[:, which].clone()
        local[self.axis] -= self.own_columns.start
        return which, ravel(local, self.products.shape)

    def gram(self, grid: MaskedGrid, bases: Sequence[Tensor], weights: Tensor) -> Tensor:
        first, *others = bases
        transposed = [basis.mT for basis in others]
        half = self.expand_first(first, weights.to(first.dtype))
        for rows in blocks(grid.shape[0], _BLOCK_NUMBERS // math.prod(grid.shape[1:])):
            part = kron_matmul(others, half[rows].flatten(1).unsqueeze(-1))  # shape: (k, m_2 .. m_d, 1)
            part.mul_(grid.observed[rows].reshape(part.shape))
            half[rows] = kron_matmul(transposed, part).view(half[rows].shape)
        return self._project_first(first, half)

    def empty_projection(self) -> Tensor:
        return self.products.new_zeros(self._shape(self.own_rows, slice(0, self.basis.ranks[self.axis])))

    def add_rows(self, projection: Tensor, rows: slice, values: Tensor) -> None:
        start = self.own_rows.start  # rows are kept until all have been read
        projection[rows.start - start : rows.stop - start] = values.view(-1, *projection.shape[1:])

    def sum_projection(self, projection: Tensor) -> Tensor:
        return self._project_first(self.basis.vectors[0], projection)

    def expand_first(self, first: Tensor, weights: Tensor) -> Tensor:
        """``Phi_1 w``, transposed to this process's slices. shape: (own slices, r_2, .., r_d)"""
        expanded = (first @ weights.flatten(1)).view(len(first), *weights.shape[1:])
        shapes = [self._shape(self.own_rows, columns) for columns in self.columns]
        return torch.cat(self.comm.exchange([expanded[rows] for rows in self.rows], shapes, _TRANSPOSES), self.axis)

    def _project_first(self, first: Tensor, half: Tensor) -> Tensor:
        """``Phi_1'`` times the slices of all processes. shape: (own slices, r_2, .., r_d) -> own box"""
        parts = [half.narrow(self.axis, own.start, own.stop - own.start) for own in self.columns]
        shapes = [self._shape(rows, self.own_columns) for rows in self.rows]
        slices = torch.cat(self.comm.exchange(parts, shapes, _TRANSPOSES))
        return (first.mT @ slices.flatten(1)).view(self.products.shape)

    def _shape(self, rows: slice, columns: slice) -> list[int]:
        shape = [rows.stop - rows.start, *self.basis.ranks[1:]]
        shape[self.axis] = columns.stop - columns.start
        return shape


def _flat_dot(first: Tensor, second: Tensor) -> Tensor:
    return torch.dot(first.reshape(-1), second.reshape(-1))


def distribute_weights(basis: Basis, comm: Communicator, rows: Sequence[slice]) -> Weights:
    """The weights of a basis, replicated or sharded, for processes that hold these slices.

    The weights of a sum of products are always replicated.
    """
    if isinstance(basis, TruncatedEigen) and is_sharded(basis.shape, basis.ranks, comm.size):
        return ShardedWeights(basis, comm, rows)
    return ReplicatedWeights(basis, comm, rows)


def is_sharded(shape: Sequence[int], ranks: Sequence[int], processes: int) -> bool:
    """Whether weights are sharded: there are many of them, and at least as many as cells of one process."""
    cells, count = math.prod(shape), math.prod(ranks)
    return processes > 1 and len(shape) > 1 and count > _MAX_REPLICATED_WEIGHTS and count >= cells / processes


def broadcast_basis(basis: Basis, comm: Communicator) -> Basis:
    """The basis of the main process, on every process.

    Eigenvectors from another machine may have other signs, or be rotated if eigenvalues are repeated.
    """
    if comm.size == 1:
        return basis
    if isinstance(basis, TruncatedSum):
        return _broadcast_sum(basis, comm)
    return broadcast_product(basis, comm)


def _broadcast_sum(basis: TruncatedSum, comm: Communicator) -> TruncatedSum:
    terms = tuple(broadcast_product(term, comm) for term in basis.terms)
    shapes, error = comm.gather(([own.shape for own in basis.vectors], basis.error), "the basis")[0]
    vectors = tuple(_like(own, shape) for own, shape in zip(basis.vectors, shapes, strict=True))
    for tensor in vectors:
        comm.broadcast(tensor, "the basis")
    return TruncatedSum(terms, vectors, error)


def broadcast_product(basis: TruncatedEigen, comm: Communicator) -> TruncatedEigen:
    """:func:`broadcast_basis` of a single product."""
    if comm.size == 1:
        return basis
    shapes, level, error = comm.gather(([v.shape for v in basis.vectors], basis.level, basis.error), "the basis")[0]
    vectors = tuple(_like(own, shape) for own, shape in zip(basis.vectors, shapes, strict=True))
    values = tuple(_like(own, shape[-1:]) for own, shape in zip(basis.values, shapes, strict=True))
    for tensor in (*vectors, *values):
        comm.broadcast(tensor, "the basis")
    return TruncatedEigen(vectors, values, level, error)


def _like(own: Tensor, shape: torch.Size) -> Tensor:
    """A tensor of this shape to receive a broadcast: `own` if it fits."""
    return own.contiguous() if own.shape == shape else own.new_empty(shape)
