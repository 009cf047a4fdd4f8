"""``W_r (K_1 (x) ... (x) K_d) W_c'`` with W interpolating: structured kernel interpolation at scattered points."""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from linear_operator.utils.getitem import _is_noop_index
from torch import Tensor

from gpytorch_gaps.linalg.eigen import kron_eigh, leading_products_stable
from gpytorch_gaps.linalg.interpolation import GridInterpolation
from gpytorch_gaps.operators.base import KroneckerCovarianceOperator, check_factors
from gpytorch_gaps.utils.cache import TensorCache
from gpytorch_gaps.utils.precision import cast_entries


class InterpolatedKroneckerOperator(KroneckerCovarianceOperator):
    """A Kronecker product on a grid, interpolated at scattered points.

    With the same points as rows and columns, it is the covariance of structured kernel interpolation (Wilson & Nickisch
    2015). Adding a diagonal gives an :class:`InterpolatedKroneckerAddedDiagOperator`, which owns its solves and is
    preconditioned by interpolated eigenvectors of the grid.

    :param factors: square or rectangular, shape (*batch, q_i, m_i) each.
    :param rows: the interpolation of a grid of the shape (q_i) at N points.
    :param columns: the interpolation of a grid of the shape (m_i) at the points of the columns. Default: `rows`.
    :param cache: results of earlier solves. It is kept when the operator is rebuilt.
    :param out_dtype: precision of results, if it is lower than that of the factors.
    :raises ValueError: if an interpolation is for another grid, or on another device.

    Cost of a product: sum_i q_i times the grid, and 4^d numbers for every point.

    >>> axis = torch.linspace(0, 1, 8, dtype=torch.float64)
    >>> factor = torch.exp(-(axis[:, None] - axis).square())
    >>> rows = GridInterpolation.cubic([axis], torch.tensor([[0.3], [0.55]], dtype=torch.float64))
    >>> covariance = InterpolatedKroneckerOperator(factor, rows=rows)
    >>> covariance.to_dense()[0, 1].item(), torch.exp(torch.tensor(-0.25**2)).item()
    (0.939..., 0.939...)
    """

    sum_with_diagonal = "interpolated diagonal"

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
            kind["out_dtype"] = None  # results get the dtype of the factors
        return type(self)(*(factor.to(device, dtype, non_blocking) for factor in self.factors), **kind)

    # -- products ----------------------------------------------------------------------------------------------------

    @property
    def sparse_flops(self) -> float:
        return self.rows.flops + self.columns.flops

    def _spread_rows(self, x: Tensor) -> Tensor:
        return self.rows.spread(x)

    def _spread_columns(self, x: Tensor) -> Tensor:
        return self.columns.spread(x)

    def _select_rows(self, grid: Tensor) -> Tensor:
        return self.rows.select(grid)

    def leading_root(self, rank: int) -> Tensor:
        """``W Q_p T_p^(1/2)`` with the p largest eigenvalues, in float64 and detached. shape: (*batch, N, p)"""
        shared = self.shared_eigen()
        if "eigen" not in shared:
            shared["eigen"] = kron_eigh(self.factors)
        eigen = shared["eigen"]
        values, positions = leading_products_stable(eigen.values, min(rank, eigen.num_cells))
        tables = [self.rows.table(axis, q[..., positions[axis]]) for axis, q in enumerate(eigen.matrices)]
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

    def _part(self, factors: Sequence[Tensor], row_index: Any, col_index: Any) -> "InterpolatedKroneckerOperator":
        rows = self.rows if _is_noop_index(row_index) else self.rows.at(row_index)
        columns = self.columns if _is_noop_index(col_index) else self.columns.at(col_index)
        return InterpolatedKroneckerOperator(
            *factors, **{**self._kwargs, "rows": rows, "columns": columns, "cache": None}
        )


def _check_rows(argument: str, rows: GridInterpolation, shape: tuple[int, ...], device: torch.device) -> None:
    name = f"InterpolatedKroneckerOperator: {argument}"
    if not isinstance(rows, GridInterpolation):
        raise ValueError(f"{name}: got {type(rows).__name__}, expected a GridInterpolation")
    if rows.shape != shape:
        raise ValueError(f"{name}: got a grid of shape {rows.shape}, expected {shape}, the shape of the factors")
    if rows.first.device != device:
        raise ValueError(f"{name}: got device {rows.first.device}, expected {device}, the device of the factors")
