"""Interpolation matrices: ``W g`` reads a grid at scattered points, ``W' v`` puts values of the points onto the grid.

A row of W is a tensor product over axes. On axis i, a point is interpolated from s neighbouring places::

    W[n, (x_1, ..., x_d)]  =  prod_i w_i[n, x_i - c_i(n)],      0 <= x_i - c_i(n) < s

where ``c_i(n)`` is the first of these places. With s = 4 this is cubic convolution (Keys 1981), as in structured kernel
interpolation. With s = 1 and weights of one, W selects cells. W is a sparse matrix. Entries of
``W (F_1 ⊗ ... ⊗ F_d) W'`` are products over axes, too.

>>> axes = [torch.linspace(0.0, 5.0, 6, dtype=torch.float64)]
>>> rows = GridInterpolation.cubic(axes, torch.tensor([[2.5]], dtype=torch.float64))
>>> rows.select(axes[0].square().unsqueeze(-1)).item()  # exact for quadratic functions
6.25
"""

import math
from collections.abc import Sequence
from functools import cached_property, reduce
from itertools import product
from typing import Any

import torch
from torch import Tensor

from gpytorch_gaps.linalg.cubic import cubic_on_axis
from gpytorch_gaps.linalg.gram import masked_gram
from gpytorch_gaps.linalg.khatri_rao import khatri_rao_t_matmul
from gpytorch_gaps.linalg.selection import unravel
from gpytorch_gaps.linalg.sparse_rows import SparseRows
from gpytorch_gaps.utils.tensors import same_values

_CHUNK_NUMBERS = 2**22  # numbers made at once from the points: 32 MiB of float64


class GridInterpolation:
    """W, the matrix that interpolates values of a grid at N points.

    :param first: the first place on each axis from which a point is interpolated, shape (N, d).
    :param weights: weights of this place and the s - 1 places that follow it, float64, shape (N, d, s).
    :param shape: number of places on each axis.
    :raises ValueError: for shapes that do not fit together, or places that are not on the axes.

    >>> first, weights = torch.tensor([[1], [0]]), torch.tensor([[[0.5, 0.5]], [[1.0, 0.0]]]).double()
    >>> GridInterpolation(first, weights, (3,)).dense().tolist()
    [[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]]
    """

    def __init__(self, first: Tensor, weights: Tensor, shape: Sequence[int]) -> None:
        self.first, self.weights, self.shape = first, weights, tuple(shape)
        if first.dim() != 2 or weights.dim() != 3 or weights.shape[:2] != first.shape or first.dtype != torch.long:
            raise ValueError(
                f"GridInterpolation: got first of {first.dtype} and shape {tuple(first.shape)}, weights of shape "
                f"{tuple(weights.shape)}; expected int64 of shape (N, d) and (N, d, s)"
            )
        if first.size(-1) != len(self.shape):
            raise ValueError(f"GridInterpolation: shape: got {len(self.shape)} axes, expected {first.size(-1)}")
        last = torch.tensor(self.shape, device=first.device) - self.width
        if len(first) and bool(((first < 0) | (first > last)).any()):
            raise ValueError(f"GridInterpolation: first: {self.width} places from there on exceed axes of {self.shape}")

    @classmethod
    def cubic(cls, axes: Sequence[Tensor], x: Tensor) -> "GridInterpolation":
        """Cubic convolution at points x, with the weights of GPyTorch's ``Interpolation``.

        Points between the outermost two places of an axis get the value of the nearer place, as in GPyTorch.

        :param axes: equally spaced places, ascending, shape (m_i,) each, m_i at least 4.
        :param x: points, shape (N, d).
        :raises ValueError: if points lie outside the grid, or places are not ascending and equally spaced.
        """
        if x.dim() != 2 or x.size(-1) != len(axes):
            raise ValueError(f"x: got shape {tuple(x.shape)}, expected (N, {len(axes)}): one column per axis")
        found = [cubic_on_axis(number, axis, x[:, number]) for number, axis in enumerate(axes)]
        first, weights = (torch.stack(some, 1) for some in zip(*found, strict=True))
        return cls(first, weights, [len(axis) for axis in axes])

    @classmethod
    def selecting(cls, index: Tensor, shape: Sequence[int]) -> "GridInterpolation":
        """W that selects flat cells, last axis fastest. shape: (N,)"""
        first = torch.stack(unravel(index, shape), -1)
        return cls(first, torch.ones(*first.shape, 1, dtype=torch.float64, device=index.device), shape)

    def __len__(self) -> int:
        return self.first.size(0)

    @property
    def width(self) -> int:
        return self.weights.size(-1)  # s

    @property
    def num_cells(self) -> int:
        return math.prod(self.shape)

    def at(self, index: Any) -> "GridInterpolation":
        """Some of the rows."""
        return self._with(self.first[index], self.weights[index])

    def to(self, device: torch.device | None) -> "GridInterpolation":
        """The rows on another device; weights stay float64."""
        if device is None or device == self.first.device:
            return self
        return self._with(self.first.to(device), self.weights.to(device))

    def _with(self, first: Tensor, weights: Tensor) -> "GridInterpolation":
        """Other rows of the same grid, not checked again: the host would wait for a device."""
        rows = object.__new__(GridInterpolation)
        rows.first, rows.weights, rows.shape = first, weights, self.shape
        return rows

    def __reduce__(self) -> tuple[type["GridInterpolation"], tuple[Any, ...]]:
        return GridInterpolation, (self.first, self.weights, self.shape)  # torch does not copy sparse matrices

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GridInterpolation) or self.shape != other.shape:
            return False
        return same_values(self.first, other.first) and same_values(self.weights, other.weights)

    __hash__ = None  # type: ignore[assignment]  # equality is by value

    # -- sparse products ---------------------------------------------------------------------------------------------

    @cached_property
    def _sparse(self) -> SparseRows:
        return SparseRows(*self._entries(), self.num_cells)

    def select(self, grid: Tensor) -> Tensor:
        """``W g``, in the precision of g. shape: (*batch, M, C) -> (*batch, N, C)"""
        return self._sparse.matmul(grid)

    def spread(self, v: Tensor) -> Tensor:
        """``W' v``, in the precision of v. shape: (*batch, N, C) -> (*batch, M, C)"""
        return self._sparse.t_matmul(v)

    @property
    def flops(self) -> float:
        """FLOPs of either product with one column."""
        return 2.0 * len(self) * float(self.width) ** len(self.shape)

    def dense(self) -> Tensor:
        """W. shape: (N, M)"""
        zeros = self.weights.new_zeros(len(self), self.num_cells)
        return zeros.scatter_add(-1, self._sparse.columns, self._sparse.values)

    def _entries(self) -> tuple[Tensor, Tensor]:
        """Flat cells of every row, ascending, and their weights. shape: (N, s^d) each"""
        offsets = torch.arange(self.width, device=self.first.device)
        cells = self.first.new_zeros(len(self), 1)
        values = self.weights.new_ones(len(self), 1)
        for axis, size in enumerate(self.shape):
            own = self.first[:, axis, None] + offsets
            cells = (cells.unsqueeze(-1) * size + own.unsqueeze(-2)).flatten(1)
            values = (values.unsqueeze(-1) * self.weights[:, axis, None, :]).flatten(1)
        return cells, values

    def norm_bound(self) -> Tensor:
        """A bound on the largest eigenvalue of ``W W'``: the largest row sum times the largest column sum of ``|W|``.

        No eigenvalue of ``W K W'`` is larger than this times the one of K. Not read by the host.
        """
        if not len(self):
            return self.weights.new_ones(())
        cells, sizes = self._sparse.columns, self._sparse.values.abs()
        columns = sizes.new_zeros(self.num_cells).index_add(0, cells.flatten(), sizes.flatten())
        return sizes.sum(-1).amax() * columns.amax()

    # -- products over axes ------------------------------------------------------------------------------------------

    def table(self, axis: int, matrix: Tensor) -> Tensor:
        """``W_i F``, the interpolation along one axis. shape: (*batch, m_i, r) -> (*batch, N, r)"""
        weights, total = self.weights[:, axis].to(matrix.dtype), None
        for place in range(self.width):
            part = weights[:, place, None] * matrix[..., self.first[:, axis] + place, :]
            total = part if total is None else total + part
        assert total is not None
        return total

    def block(self, factors: Sequence[Tensor], columns: "GridInterpolation") -> Tensor:
        """``W_r (F_1 ⊗ ... ⊗ F_d) W_c'``, dense. shape: (*batch, q_i, m_i) each -> (*batch, N_r, N_c)"""
        tables = [columns.table(axis, self.table(axis, factor).mT).mT for axis, factor in enumerate(factors)]
        return reduce(torch.mul, tables)

    def entries(self, factors: Sequence[Tensor], columns: "GridInterpolation", batch: tuple[Any, ...] = ()) -> Tensor:
        """Entries of that block, row n with column n. shape: (*batch, N)

        :param batch: indices into the batch of the factors, one per row, instead of all members.
        """
        value: Any = 1.0
        for axis, factor in enumerate(factors):
            own: Any = 0.0
            left, right = self.weights[:, axis].to(factor.dtype), columns.weights[:, axis].to(factor.dtype)
            for s, t in product(range(self.width), range(columns.width)):
                where = (self.first[:, axis] + s, columns.first[:, axis] + t)
                entry = factor[(*batch, *where)] if batch else factor[..., where[0], where[1]]
                own = own + left[:, s] * right[:, t] * entry
            value = value * own
        return value

    def column_squares(self, vectors: Sequence[Tensor]) -> Tensor:
        """``|W (q_1 ⊗ ... ⊗ q_d)|^2`` for all combinations of columns. shape: (*batch, r_1 ... r_d)"""
        tables = [self.table(axis, q).square() for axis, q in enumerate(vectors)]
        return khatri_rao_t_matmul(tables, self.weights.new_ones(len(self), 1)).squeeze(-1)

    def gram(self, vectors: Sequence[Tensor], positions: Tensor, scales: Tensor) -> Tensor:
        """``F' diag(v) F`` for ``F = W Q S_p'``, differentiable in v, by the contraction of :func:`masked_gram`.

        On an axis, a point contributes ``t t'`` with ``t = Σ_s w_s q_s``, where q_s are the rows of Q from which it is
        interpolated. By polarisation, this is a sum of squares of rows of Q and of sums of two rows. These rows and
        sums are the levels of a longer axis:

            t t'  =  Σ_s (w_s^2 - w_s Σ_{u != s} w_u) q_s q_s'  +  Σ_{s < u} w_s w_u (q_s + q_u)(q_s + q_u)'

        W' diag(v) W thus becomes a mask over the cells of the longer axes, for any number of points.

        :param vectors: Q_i, shape (*batch, m_i, r_i) each.
        :param positions: column of each Q_i that makes up column a of F, shape (d, p).
        :param scales: v, shape (*batch, N).
        :return: shape (*batch, p, p).
        """
        longer = [torch.cat([_plus_next(q, step) for step in range(self.width)], -2) for q in vectors]
        return masked_gram(longer, positions, self._mask(scales))

    def _mask(self, scales: Tensor) -> Tensor:
        """The weights of the cells of the longer axes, s m_i each. shape: (*batch, N) -> (*batch, s^d M)"""
        size = self.width ** len(self.shape) * self.num_cells
        mask = scales.new_zeros(*scales.shape[:-1], size)
        pairs = [(s, u) for s in range(self.width) for u in range(s, self.width)]
        step = max(1, _CHUNK_NUMBERS // len(pairs) ** len(self.shape))
        for start in range(0, len(self), step):
            rows = slice(start, start + step)
            cells, values = self.first.new_zeros(1, 1), self.weights.new_ones(1, 1)
            for axis, places in enumerate(self.shape):
                own_cells, own_values = _squares(self.first[rows, axis], self.weights[rows, axis], pairs, places)
                cells = (cells.unsqueeze(-1) * (self.width * places) + own_cells.unsqueeze(-2)).flatten(1)
                values = (values.unsqueeze(-1) * own_values.unsqueeze(-2)).flatten(1)
            mask = mask.index_add(-1, cells.flatten(), (scales[..., rows, None] * values).flatten(-2))
        return mask


def _squares(first: Tensor, weights: Tensor, pairs: Sequence[tuple[int, int]], places: int) -> tuple[Tensor, Tensor]:
    """Places on a longer axis and the weights of their squares, for every pair of places. shape: (N, pairs) each"""
    total = weights.sum(-1)
    cells, values = [], []
    for s, u in pairs:
        cells.append(first + s + (u - s) * places)
        own = weights[:, s]
        values.append(own * weights[:, u] if s != u else own * (2.0 * own - total))
    return torch.stack(cells, -1), torch.stack(values, -1)


def _plus_next(q: Tensor, step: int) -> Tensor:
    """``q_x + q_(x + step)``, or q itself for step 0; rows without such a neighbour are not used."""
    if not step:
        return q
    beyond = q.new_zeros(*q.shape[:-2], min(step, q.size(-2)), q.size(-1))
    return q + torch.cat([q[..., step:, :], beyond], -2)
