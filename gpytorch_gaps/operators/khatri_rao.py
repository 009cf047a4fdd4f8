"""Covariance between scattered points and cells of a grid: selected columns of a Khatri-Rao product."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from linear_operator.operators import LinearOperator
from torch import Tensor

from gpytorch_gaps.linalg.khatri_rao import khatri_rao_matmul, khatri_rao_t_matmul
from gpytorch_gaps.linalg.selection import select_cells, spread_cells, unravel
from gpytorch_gaps.operators.base import KroneckerFactorsOperator, check_factors, check_index
from gpytorch_gaps.utils.precision import cast_entries, full_float32


class KhatriRaoOperator(KroneckerFactorsOperator):
    """``K[q, n] = prod_i F_i[q, c_i(n)]``: a covariance between Q scattered points and N cells of a grid.

    No matrix of size Q x N is stored: see :mod:`gpytorch_gaps.linalg.khatri_rao`.

    :param factors: covariance of the points with the levels of each axis, shape (*batch, Q, m_i) each.
    :param col_index: flat cells, last axis fastest, shape (N,).
    :param transposed: whether the operator is the N x Q transpose.
    :param points: coordinates of the Q points, for likelihoods whose noise depends on them, shape (Q, D).
    :param out_dtype: precision of results, if it is lower than that of the factors.
    :raises ValueError: if the factors have different numbers of rows, or `col_index` is not valid for their columns.

    >>> rows = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]])  # one point, a grid of 2 x 2 cells
    >>> KhatriRaoOperator(*rows, col_index=torch.tensor([0, 3])).to_dense().tolist()
    [[3.0, 8.0]]
    """

    def __init__(
        self,
        *factors: Tensor,
        col_index: Tensor,
        transposed: bool = False,
        points: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        check_factors("KhatriRaoOperator", factors, square=False)
        for axis, factor in enumerate(factors):
            if factor.size(-2) != factors[0].size(-2):
                raise ValueError(
                    f"KhatriRaoOperator: factors: axis {axis} has {factor.size(-2)} rows, axis 0 "
                    f"{factors[0].size(-2)}; expected one row per point for every axis"
                )
        self.col_shape = tuple(factor.size(-1) for factor in factors)
        check_index("KhatriRaoOperator", "col_index", col_index, self.col_shape, factors[0].device)
        self.col_index, self.transposed, self.points = col_index, transposed, points
        kind: dict[str, Any] = {"transposed": transposed, "points": points, "out_dtype": out_dtype}
        super().__init__(*factors, col_index=col_index, **kind)

    @property
    def row_points(self) -> Tensor | None:
        """Coordinates of the points of the rows, if they are known."""
        return None if self.transposed else self.points

    def with_factors(self, factors: Sequence[Tensor]) -> "KhatriRaoOperator":
        """The same points and cells with the factors of another kernel."""
        return KhatriRaoOperator(*factors, **self._kwargs)

    def _size(self) -> torch.Size:
        sizes = (self.factors[0].size(-2), len(self.col_index))
        return torch.Size((*self._factor_batch_shape(), *(reversed(sizes) if self.transposed else sizes)))

    @full_float32()
    def _matmul(self, rhs: Tensor) -> Tensor:
        columns = rhs.unsqueeze(-1) if rhs.dim() == 1 else rhs
        if self.transposed:
            result = select_cells(khatri_rao_t_matmul(self._factors_for(rhs), columns), self.col_index)
        else:
            grid = spread_cells(columns, self.col_index, math.prod(self.col_shape))
            result = khatri_rao_matmul(self._factors_for(rhs), grid)
        return result.squeeze(-1) if rhs.dim() == 1 else result

    def _transpose_nonbatch(self) -> "KhatriRaoOperator":
        return KhatriRaoOperator(*self.factors, **{**self._kwargs, "transposed": not self.transposed})

    def _get_indices(self, row_index: Tensor, col_index: Tensor, *batch_indices: Tensor) -> Tensor:
        points, cells = (col_index, row_index) if self.transposed else (row_index, col_index)
        value = self.factors[0].new_ones(())
        for factor, column in zip(
            self._expanded().factors, unravel(self.col_index[cells], self.col_shape), strict=True
        ):
            value = value * factor[(*batch_indices, points, column)]
        return cast_entries(value, self.dtype)

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        """A subset of points and cells is an operator of the same class."""
        simple = all(isinstance(index, slice) or index.dim() == 1 for index in (row_index, col_index))
        if not simple or (torch.is_tensor(row_index) and torch.is_tensor(col_index)):
            return super()._getitem(row_index, col_index, *batch_indices)
        points, cells = (col_index, row_index) if self.transposed else (row_index, col_index)
        factors = (factor[..., points, :] for factor in self._index_batch(batch_indices).factors)
        kept = None if self.points is None else self.points[points]
        kind = {**self._kwargs, "col_index": self.col_index[cells], "points": kept}
        return KhatriRaoOperator(*factors, **kind)

    def _mul_constant(self, other: float | Tensor) -> "KhatriRaoOperator":
        """Multiplies the first factor."""
        scale = other[..., None, None] if torch.is_tensor(other) else other
        return self.with_factors([self.leaves[0] * scale, *self.factors[1:]])

    def to_dense(self) -> Tensor:
        value: Any = 1.0
        for factor, column in zip(self.factors, unravel(self.col_index, self.col_shape), strict=True):
            value = value * factor[..., column]
        return cast_entries(value.mT if self.transposed else value, self.dtype).expand(self.shape)
