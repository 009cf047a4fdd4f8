"""``W_r (K_1 (x) ... (x) K_d) W_c'``: rows and columns of a Kronecker product."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from linear_operator.operators import (
    AddedDiagLinearOperator,
    DiagLinearOperator,
    LinearOperator,
    ZeroLinearOperator,
)
from linear_operator.utils.getitem import _is_noop_index
from torch import Tensor

from gpytorch_gaps.autograd.bilinear import kron_bilinear_gradient, thin_bilinear_gradient
from gpytorch_gaps.linalg.eigen import KroneckerEigen, factored_if_cheaper
from gpytorch_gaps.linalg.products import kron_matmul, kron_matmul_flops
from gpytorch_gaps.linalg.selection import kron_block, kron_entries, select_cells, spread_cells, unravel
from gpytorch_gaps.operators.base import KroneckerFactorsOperator, as_diagonal, check_factors, check_index
from gpytorch_gaps.operators.sums import add
from gpytorch_gaps.operators.upstream import solve_matrix
from gpytorch_gaps.utils.cache import TensorCache
from gpytorch_gaps.utils.precision import cast_entries, full_float32
from gpytorch_gaps.utils.tensors import same_values
from gpytorch_gaps.utils.threads import Work, sized


class SelectedKroneckerOperator(KroneckerFactorsOperator):
    """Rows `row_index` and columns `col_index` of a Kronecker product, last axis fastest.

    With the observed cells as both, it is the covariance ``K_XX = W K W'`` of Evans & Nair (2018), Proposition 3.2.
    With others, it is a cross-covariance. Adding a diagonal gives a :class:`SelectedKroneckerAddedDiagOperator`, which
    owns its solves.

    :param factors: square or rectangular, shape (*batch, q_i, m_i) each.
    :param row_index: flat cells among the prod q_i rows. Default: all of them.
    :param col_index: flat cells among the prod m_i columns. Default: `row_index` for square factors, else all.
    :param cache: what solves with this operator remember; rides along when the operator is rebuilt.
    :param row_points: the points that the rows belong to, where it matters which they are. shape (N, D).
    :param col_points: likewise, of the columns.
    :param out_dtype: precision of what the operator gives, where the factors are known in a higher one.

    Cost of a product: sum_i q_i times the grid, and one visit to each row and column.

    >>> factor = torch.tensor([[1.0, 0.5], [0.5, 1.0]])
    >>> observed = torch.tensor([0, 3])
    >>> SelectedKroneckerOperator(factor, factor, row_index=observed).to_dense()
    tensor([[1.0000, 0.2500],
            [0.2500, 1.0000]])
    """

    def __init__(
        self,
        *factors: Tensor,
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

    def _work(self, rhs: Tensor, *_: Tensor) -> Work:
        """The work of a product with so many columns."""
        shapes = list(zip(self.row_shape, self.col_shape, strict=True))
        columns = rhs.numel() // max(1, rhs.size(0 if rhs.dim() == 1 else -2))
        return float(kron_matmul_flops(shapes, columns)), columns * math.prod(self.col_shape)

    @full_float32()
    @sized(_work)
    def _matmul(self, rhs: Tensor) -> Tensor:
        grid = spread_cells(_as_columns(rhs), self.col_index, math.prod(self.col_shape))
        result = select_cells(kron_matmul(self._factors_for(rhs), grid), self.row_index)
        return result.squeeze(-1) if rhs.dim() == 1 else result

    def shared_eigen(self) -> dict[str, KroneckerEigen]:
        """Holds the eigen-decomposition of the factors under "eigen" once someone has needed it."""
        return self.cache.cached("eigen of", self.factors, dict)

    @full_float32()
    @sized(_work)
    def _bilinear_derivative(self, left_vecs: Tensor, right_vecs: Tensor) -> tuple[Tensor | None, ...]:
        """For smooth kernels by way of their roots, where these are known from a solve."""
        others = (None,) * (len(self.representation()) - len(self.factors))
        if not any(factor.requires_grad for factor in self.factors):
            return (*(None for _ in self.factors), *others)
        left = spread_cells(_as_columns(left_vecs), self.row_index, math.prod(self.row_shape))
        right = spread_cells(_as_columns(right_vecs), self.col_index, math.prod(self.col_shape))
        eigen = factored_if_cheaper(self.shared_eigen().get("eigen"))
        if eigen is not None and self.is_symmetric:
            gradients = thin_bilinear_gradient([root.to(left.dtype) for root in eigen.roots], left, right)
        else:
            gradients = kron_bilinear_gradient(self._factors_for(left), left, right)
        pairs = zip(gradients, self.factors, strict=True)
        return (*(gradient.sum_to_size(factor.shape).to(factor.dtype) for gradient, factor in pairs), *others)

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
        rows = [level[row_index] for level in unravel(self.row_index, self.row_shape)]
        cols = [level[col_index] for level in unravel(self.col_index, self.col_shape)]
        first, *others = zip(self._expanded().factors, rows, cols, strict=True)
        value = first[0][(*batch_indices, *first[1:])]
        for factor, row, col in others:
            value = value * factor[(*batch_indices, row, col)]
        return cast_entries(value, self.dtype)

    def _diagonal(self) -> Tensor:
        rows, cols = unravel(self.row_index, self.row_shape), unravel(self.col_index, self.col_shape)
        diagonal = kron_entries(self.factors, rows, cols).expand(*self.batch_shape, len(self.row_index))
        return cast_entries(diagonal, self.dtype)

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        """A part of a selection is a selection."""
        simple = all(isinstance(index, slice) or index.dim() == 1 for index in (row_index, col_index))
        if not simple or (torch.is_tensor(row_index) and torch.is_tensor(col_index)):
            return super()._getitem(row_index, col_index, *batch_indices)
        part = self._index_batch(batch_indices)
        if _is_noop_index(row_index) and _is_noop_index(col_index):
            return part
        return SelectedKroneckerOperator(
            *part.factors,
            row_index=self.row_index[row_index],
            col_index=self.col_index[col_index],
            row_points=None if self.row_points is None else self.row_points[row_index],
            col_points=None if self.col_points is None else self.col_points[col_index],
            out_dtype=self._kwargs["out_dtype"],
        )

    def to_dense(self) -> Tensor:
        return cast_entries(kron_block(self.factors, self.row_index, self.col_index), self.dtype).expand(self.shape)

    def _mul_constant(self, other: float | Tensor) -> "SelectedKroneckerOperator":
        """A constant goes into the first factor: a scaled kernel stays a Kronecker product."""
        scale = other[..., None, None] if torch.is_tensor(other) else other
        return self.with_factors([self.factors[0] * scale, *self.factors[1:]])

    def with_factors(self, factors: Sequence[Tensor]) -> "SelectedKroneckerOperator":
        """The same rows and columns of another product."""
        return SelectedKroneckerOperator(*factors, **{**self._kwargs, "cache": None})

    def __add__(self, other: Any) -> LinearOperator | Tensor:
        if isinstance(other, ZeroLinearOperator):
            return self
        if isinstance(other, DiagLinearOperator) and self.is_square and self.is_symmetric:
            return add("diagonal", self, other)
        if isinstance(other, AddedDiagLinearOperator):  # the noise stays outermost, for our solves
            return self + other._linear_op + other._diag_tensor
        mixed = isinstance(other, LinearOperator)
        if mixed and self.shape[-2:] == other.shape[-2:] and self.is_square and self.is_symmetric:
            return add("kernel", self, other)
        return super().__add__(other)

    def add_diagonal(self, diag: float | Tensor) -> LinearOperator:
        return self + as_diagonal(self, diag)

    def _solve(self, rhs: Tensor, preconditioner: Any = None, num_tridiag: int = 0) -> Any:
        """``K_XX^-1 rhs`` without noise, by conjugate gradients; add a diagonal for the methods of the paper."""
        return solve_matrix(self._as_float64()._matmul, rhs, preconditioner, num_tridiag, self.batch_shape)


def _as_columns(vectors: Tensor) -> Tensor:
    return vectors.unsqueeze(-1) if vectors.dim() == 1 else vectors
