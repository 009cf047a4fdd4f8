"""``W_r (K_1 (x) ... (x) K_d) W_c'``: rows and columns of a Kronecker product."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gpytorch_gaps.linalg.factors import Factor, col_places, row_places
from gpytorch_gaps.linalg.selection import (
    kron_block,
    kron_entries,
    kron_entries_at,
    select_cells,
    spread_cells,
    unravel,
)
from gpytorch_gaps.operators.base import KroneckerCovarianceOperator, check_factors, check_index
from gpytorch_gaps.utils.cache import TensorCache
from gpytorch_gaps.utils.precision import cast_entries
from gpytorch_gaps.utils.tensors import same_values


class SelectedKroneckerOperator(KroneckerCovarianceOperator):
    """Rows `row_index` and columns `col_index` of a Kronecker product, last axis fastest.

    With the observed cells as both, it is the covariance ``K_XX = W K W'`` of Evans & Nair (2018), Proposition 3.2.
    With other cells, it is a cross-covariance. Adding a diagonal gives a :class:`SelectedKroneckerAddedDiagOperator`,
    which owns its solves.

    :param factors: matrices, or operators for blocks of axes, square or rectangular, shape (*batch, q_i, m_i) each.
    :param row_index: flat cells among the prod q_i rows. Default: all of them.
    :param col_index: flat cells among the prod m_i columns. Default: `row_index` for square factors, else all.
    :param cache: results of earlier solves. It is kept when the operator is rebuilt.
    :param row_points: coordinates of the rows, for likelihoods whose noise depends on them, shape (N, D).
    :param col_points: coordinates of the columns, likewise.
    :param out_dtype: precision of results, if it is lower than that of the factors.

    Cost of a product: sum_i q_i times the grid, and one read or write per row and column.

    >>> factor = torch.tensor([[1.0, 0.5], [0.5, 1.0]])
    >>> observed = torch.tensor([0, 3])
    >>> SelectedKroneckerOperator(factor, factor, row_index=observed).to_dense()
    tensor([[1.0000, 0.2500],
            [0.2500, 1.0000]])
    """

    sum_with_diagonal = "diagonal"

    def __init__(
        self,
        *factors: Factor,
        row_index: Tensor | None = None,
        col_index: Tensor | None = None,
        cache: TensorCache | None = None,
        row_points: Tensor | None = None,
        col_points: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        check_factors("SelectedKroneckerOperator", factors, square=False)
        device = factors[0].device
        self.row_shape = tuple(factor.size(-2) for factor in factors)
        self.col_shape = tuple(factor.size(-1) for factor in factors)
        if row_index is None:
            row_index = torch.arange(math.prod(self.row_shape), device=device)
            col_index = row_index if col_index is None and self.row_shape == self.col_shape else col_index
        if col_index is None:
            same = self.row_shape == self.col_shape
            col_index = row_index if same else torch.arange(math.prod(self.col_shape), device=device)
        check_index("SelectedKroneckerOperator", "row_index", row_index, self.row_shape, device)
        check_index("SelectedKroneckerOperator", "col_index", col_index, self.col_shape, device)
        self.row_index, self.col_index, self.cache = row_index, col_index, cache or TensorCache()
        self.row_points, self.col_points = row_points, col_points
        kind: dict[str, Any] = {"row_points": row_points, "col_points": col_points, "out_dtype": out_dtype}
        super().__init__(*factors, row_index=row_index, col_index=col_index, cache=self.cache, **kind)

    def _size(self) -> torch.Size:
        return torch.Size((*self._factor_batch_shape(), len(self.row_index), len(self.col_index)))

    @property
    def is_symmetric(self) -> bool:
        """Whether rows and columns are the same cells."""
        return self.row_shape == self.col_shape and same_values(self.row_index, self.col_index)

    def _spread_rows(self, x: Tensor) -> Tensor:
        return spread_cells(x, self.row_index, math.prod(self.row_shape))

    def _spread_columns(self, x: Tensor) -> Tensor:
        return spread_cells(x, self.col_index, math.prod(self.col_shape))

    def _select_rows(self, grid: Tensor) -> Tensor:
        return select_cells(grid, self.row_index)

    def _transpose_nonbatch(self) -> "SelectedKroneckerOperator":
        factors = (factor.mT for factor in self.factors)
        return SelectedKroneckerOperator(
            *factors,
            row_index=self.col_index,
            col_index=self.row_index,
            cache=self.cache,
            row_points=self.col_points,
            col_points=self.row_points,
            out_dtype=self._kwargs["out_dtype"],
        )

    def _get_indices(self, row_index: Tensor, col_index: Tensor, *batch_indices: Tensor) -> Tensor:
        """An entry is a product of one entry of each factor."""
        factors = self._expanded().factors
        rows = [row_places(*own) for own in zip(factors, unravel(self.row_index, self.row_shape), strict=True)]
        cols = [col_places(*own) for own in zip(factors, unravel(self.col_index, self.col_shape), strict=True)]
        some_rows = [[place[row_index] for place in own] for own in rows]
        some_cols = [[place[col_index] for place in own] for own in cols]
        return cast_entries(kron_entries_at(factors, some_rows, some_cols, batch_indices), self.dtype)

    def _diagonal(self) -> Tensor:
        rows, cols = unravel(self.row_index, self.row_shape), unravel(self.col_index, self.col_shape)
        diagonal = kron_entries(self.factors, rows, cols).expand(*self.batch_shape, len(self.row_index))
        return cast_entries(diagonal, self.dtype)

    def _part(self, factors: Sequence[Factor], row_index: Any, col_index: Any) -> "SelectedKroneckerOperator":
        return SelectedKroneckerOperator(
            *factors,
            row_index=self.row_index[row_index],
            col_index=self.col_index[col_index],
            row_points=None if self.row_points is None else self.row_points[row_index],
            col_points=None if self.col_points is None else self.col_points[col_index],
            out_dtype=self._kwargs["out_dtype"],
        )

    def to_dense(self) -> Tensor:
        return cast_entries(kron_block(self.factors, self.row_index, self.col_index), self.dtype).expand(self.shape)
