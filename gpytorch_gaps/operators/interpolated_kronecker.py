"""``W_r (K_1 (x) ... (x) K_d) W_c'`` with W interpolating: structured kernel interpolation at scattered points."""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from linear_operator.operators import AddedDiagLinearOperator, DiagLinearOperator, LinearOperator, ZeroLinearOperator
from linear_operator.utils.getitem import _is_noop_index
from torch import Tensor

from gpytorch_gaps.autograd.bilinear import kron_bilinear_gradient, thin_bilinear_gradient
from gpytorch_gaps.linalg.eigen import KroneckerEigen, factored_if_cheaper, kron_eigh, leading_products_stable
from gpytorch_gaps.linalg.interpolation import GridInterpolation
from gpytorch_gaps.linalg.products import kron_matmul, kron_matmul_flops
from gpytorch_gaps.operators.base import KroneckerFactorsOperator, as_diagonal, check_factors
from gpytorch_gaps.operators.sums import add
from gpytorch_gaps.operators.upstream import solve_matrix
from gpytorch_gaps.utils.cache import TensorCache
from gpytorch_gaps.utils.precision import cast_entries, full_float32
from gpytorch_gaps.utils.threads import Work, sized


class InterpolatedKroneckerOperator(KroneckerFactorsOperator):
    """A Kronecker product on a grid, interpolated at scattered points.

    With the same points as rows and columns, it is the covariance of structured kernel interpolation (Wilson & Nickisch
    2015). Adding a diagonal gives an :class:`InterpolatedKroneckerAddedDiagOperator`, which owns its solves and is
    preconditioned by interpolated eigenvectors of the grid.

    :param factors: square or rectangular, shape (*batch, q_i, m_i) each.
    :param rows: the interpolation of a grid of the shape (q_i) at N points.
    :param columns: likewise, of a grid of the shape (m_i). Default: `rows`.
    :param cache: what solves with this operator remember; rides along when the operator is rebuilt.
    :param out_dtype: precision of what the operator gives, where the factors are known in a higher one.
    :raises ValueError: if an interpolation is for another grid, or on another device.

    Cost of a product: sum_i q_i times the grid, and 4^d numbers for every point.

    >>> axis = torch.linspace(0, 1, 8, dtype=torch.float64)
    >>> factor = torch.exp(-(axis[:, None] - axis).square())
    >>> rows = GridInterpolation.cubic([axis], torch.tensor([[0.3], [0.55]], dtype=torch.float64))
    >>> covariance = InterpolatedKroneckerOperator(factor, rows=rows)
    >>> covariance.to_dense()[0, 1].item(), torch.exp(torch.tensor(-0.25**2)).item()
    (0.939..., 0.939...)
    """

    def __init__(
        self,
        *factors: Tensor,
        rows: GridInterpolation,
        columns: GridInterpolation | None = None,
        cache: TensorCache | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        check_factors("InterpolatedKroneckerOperator", factors, square=False)
        columns = rows if columns is None else columns
        self.row_shape = tuple(factor.size(-2) for factor in factors)
        self.col_shape = tuple(factor.size(-1) for factor in factors)
        _check_rows("rows", rows, self.row_shape, factors[0].device)
        _check_rows("columns", columns, self.col_shape, factors[0].device)
        self.rows, self.columns, self.cache = rows, columns, cache or TensorCache()
        kind: dict[str, Any] = {"cache": self.cache, "out_dtype": out_dtype}
        super().__init__(*factors, rows=rows, columns=columns, **kind)

    def _size(self) -> torch.Size:
        return torch.Size((*self._factor_batch_shape(), len(self.rows), len(self.columns)))

    @property
    def is_symmetric(self) -> bool:
        """Whether rows and columns are the same points."""
        return self.row_shape == self.col_shape and self.rows == self.columns

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Moves and casts like :meth:`torch.Tensor.to`."""
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        kind = dict(self._kwargs)
        rows, columns = self.rows.to(device), self.columns
        kind.update(rows=rows, columns=rows if columns is self.rows else columns.to(device))
        if dtype is not None:
            kind["out_dtype"] = None  # that of the factors
        return type(self)(*(factor.to(device, dtype, non_blocking) for factor in self.factors), **kind)

    # -- products ----------------------------------------------------------------------------------------------------

    def _work(self, rhs: Tensor, *_: Tensor) -> Work:
        """The work of a product with so many columns."""
        shapes = list(zip(self.row_shape, self.col_shape, strict=True))
        count = rhs.numel() // max(1, rhs.size(0 if rhs.dim() == 1 else -2))
        return kron_matmul_flops(shapes, count) + count * self.interpolation_flops, count * self.columns.num_cells

    @property
    def interpolation_flops(self) -> float:
        """FLOPs of both interpolations of one column."""
        return self.rows.flops + self.columns.flops

    @property
    def product_flops(self) -> float:
        """FLOPs of a product with one column."""
        shapes = list(zip(self.row_shape, self.col_shape, strict=True))
        return float(kron_matmul_flops(shapes, 1)) + self.interpolation_flops

    @full_float32()
    @sized(_work)
    def _matmul(self, rhs: Tensor) -> Tensor:
        grid = self.columns.spread(_as_columns(rhs))
        result = self.rows.select(kron_matmul(self._factors_for(rhs), grid))
        return result.squeeze(-1) if rhs.dim() == 1 else result

    def shared_eigen(self) -> dict[str, KroneckerEigen]:
        """Holds the eigen-decomposition of the factors under "eigen" once someone has needed it."""
        return self.cache.cached("eigen of", self.factors, dict)

    @full_float32()
    @sized(_work)
    def _bilinear_derivative(self, left_vecs: Tensor, right_vecs: Tensor) -> tuple[Tensor | None, ...]:
        """``u'W_r K W_c'v`` on the grid; for smooth kernels by way of their roots, where these are known."""
        others = (None,) * (len(self.representation()) - len(self.factors))
        if not any(factor.requires_grad for factor in self.factors):
            return (*(None for _ in self.factors), *others)
        left, right = self.rows.spread(_as_columns(left_vecs)), self.columns.spread(_as_columns(right_vecs))
        eigen = factored_if_cheaper(self.shared_eigen().get("eigen"))
        if eigen is not None and self.is_symmetric:
            gradients = thin_bilinear_gradient([root.to(left.dtype) for root in eigen.roots], left, right)
        else:
            gradients = kron_bilinear_gradient(self._factors_for(left), left, right)
        pairs = zip(gradients, self.factors, strict=True)
        return (*(gradient.sum_to_size(factor.shape).to(factor.dtype) for gradient, factor in pairs), *others)

    def leading_root(self, rank: int) -> Tensor:
        """``W Q_p T_p^(1/2)`` in float64, detached: the best root of that rank on the grid. shape: (*batch, N, p)"""
        shared = self.shared_eigen()
        if "eigen" not in shared:
            shared["eigen"] = kron_eigh(self.factors)
        eigen = shared["eigen"]
        values, positions = leading_products_stable(eigen.values, min(rank, eigen.num_cells))
        tables = [self.rows.table(axis, q[..., positions[axis]]) for axis, q in enumerate(eigen.vectors)]
        return reduce(torch.mul, tables) * values.sqrt().unsqueeze(-2)

    def _transpose_nonbatch(self) -> "InterpolatedKroneckerOperator":
        kind = {**self._kwargs, "rows": self.columns, "columns": self.rows}
        return InterpolatedKroneckerOperator(*(factor.mT for factor in self.factors), **kind)

    # -- entries -----------------------------------------------------------------------------------------------------

    def _get_indices(self, row_index: Tensor, col_index: Tensor, *batch_indices: Tensor) -> Tensor:
        rows, cols, *batch = torch.broadcast_tensors(row_index, col_index, *batch_indices)
        ends = self.rows.at(rows.flatten()), self.columns.at(cols.flatten())
        where = tuple(index.flatten() for index in batch)
        value = ends[0].entries(self._expanded().factors, ends[1], where).reshape(rows.shape)
        return cast_entries(value, self.dtype)

    def _diagonal(self) -> Tensor:
        diagonal = self.rows.entries(self.factors, self.columns).expand(self.shape[:-1])
        return cast_entries(diagonal, self.dtype)

    def to_dense(self) -> Tensor:
        return cast_entries(self.rows.block(self.factors, self.columns), self.dtype).expand(self.shape)

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        """Some of the points, again as such an operator."""
        simple = all(isinstance(index, slice) or index.dim() == 1 for index in (row_index, col_index))
        if not simple or (torch.is_tensor(row_index) and torch.is_tensor(col_index)):
            return super()._getitem(row_index, col_index, *batch_indices)
        part = self._index_batch(batch_indices)
        if _is_noop_index(row_index) and _is_noop_index(col_index):
            return part
        rows = self.rows if _is_noop_index(row_index) else self.rows.at(row_index)
        columns = self.columns if _is_noop_index(col_index) else self.columns.at(col_index)
        kind = {**self._kwargs, "rows": rows, "columns": columns, "cache": None}
        return InterpolatedKroneckerOperator(*part.factors, **kind)

    # -- staying what it is ------------------------------------------------------------------------------------------

    def _mul_constant(self, other: float | Tensor) -> "InterpolatedKroneckerOperator":
        """A constant goes into the first factor."""
        scale = other[..., None, None] if torch.is_tensor(other) else other
        return self.with_factors([self.factors[0] * scale, *self.factors[1:]])

    def with_factors(self, factors: Sequence[Tensor]) -> "InterpolatedKroneckerOperator":
        """The same points with another product."""
        return InterpolatedKroneckerOperator(*factors, **{**self._kwargs, "cache": None})

    def __add__(self, other: Any) -> LinearOperator | Tensor:
        if isinstance(other, ZeroLinearOperator):
            return self
        if isinstance(other, DiagLinearOperator) and self.is_square and self.is_symmetric:
            return add("interpolated diagonal", self, other)
        if isinstance(other, AddedDiagLinearOperator):  # the noise stays outermost, for our solves
            return self + other._linear_op + other._diag_tensor
        mixed = isinstance(other, LinearOperator)
        if mixed and self.shape[-2:] == other.shape[-2:] and self.is_square and self.is_symmetric:
            return add("kernel", self, other)
        return super().__add__(other)

    def add_diagonal(self, diag: float | Tensor) -> LinearOperator:
        return self + as_diagonal(self, diag)

    def _solve(self, rhs: Tensor, preconditioner: Any = None, num_tridiag: int = 0) -> Any:
        """Without noise, by conjugate gradients; add a diagonal for a preconditioner."""
        return solve_matrix(self._as_float64()._matmul, rhs, preconditioner, num_tridiag, self.batch_shape)


def _as_columns(vectors: Tensor) -> Tensor:
    return vectors.unsqueeze(-1) if vectors.dim() == 1 else vectors


def _check_rows(argument: str, rows: GridInterpolation, shape: tuple[int, ...], device: torch.device) -> None:
    name = f"InterpolatedKroneckerOperator: {argument}"
    if not isinstance(rows, GridInterpolation):
        raise ValueError(f"{name}: got {type(rows).__name__}, expected a GridInterpolation")
    if rows.shape != shape:
        raise ValueError(f"{name}: interpolate a grid of {rows.shape}, expected {shape}, as the factors have it")
    if rows.first.device != device:
        raise ValueError(f"{name}: are on {rows.first.device}, the factors on {device}; expected the same")
