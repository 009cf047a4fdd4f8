"""A sparse matrix with the same number of entries in every row, and products with it and with its transpose.

On a CPU, products use torch's sparse matrices. With many columns, these are ten times as fast as look-ups. On other
devices, products use look-ups and additions. All devices have these, and the host does not wait for them.

>>> rows = SparseRows(torch.tensor([[0, 2], [1, 2]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64), 3)
>>> rows.matmul(torch.eye(3)).tolist()
[[1.0, 0.0, 2.0], [0.0, 3.0, 4.0]]
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from scipy.sparse import csr_array
from torch import Tensor
from torch.autograd import Function

_MOST_SHORT = torch.iinfo(torch.int32).max  # number of entries with indices of 32 bits


class SparseRows:
    """W, with k entries in each of N rows.

    :param columns: where the entries are, shape (N, k).
    :param values: the entries, float64, shape (N, k).
    :param num_columns: M.
    """

    def __init__(self, columns: Tensor, values: Tensor, num_columns: int) -> None:
        self.columns, self.values, self.num_columns = columns, values, num_columns
        self._known: dict[tuple[torch.dtype, bool], Tensor] = {}

    def matmul(self, x: Tensor) -> Tensor:
        """``W x``, in the precision of x. shape: (*batch, M, C) -> (*batch, N, C)"""
        return self.product(x, transposed=False)

    def t_matmul(self, x: Tensor) -> Tensor:
        """``W' x``, in the precision of x. shape: (*batch, N, C) -> (*batch, M, C)"""
        return self.product(x, transposed=True)

    def product(self, x: Tensor, transposed: bool) -> Tensor:
        """``W x``, or ``W' x`` if `transposed`."""
        if torch.is_grad_enabled() and x.requires_grad:
            return _Product.apply(self, transposed, x)
        return self._product(x, transposed)

    def _product(self, x: Tensor, transposed: bool) -> Tensor:
        if x.device.type != "cpu":
            return self._added(x) if transposed else self._looked_up(x)
        matrix = self._matrix(x.dtype, transposed)
        if x.dim() == 2:
            return matrix @ x
        batch, columns = x.shape[:-2], x.size(-1)
        flat = x.movedim(-2, 0).reshape(x.size(-2), -1)
        return (matrix @ flat).reshape(-1, *batch, columns).movedim(0, -2)

    # -- entry by entry of all rows ----------------------------------------------------------------------------------

    def _looked_up(self, x: Tensor) -> Tensor:
        total = x.new_zeros(*x.shape[:-2], len(self.columns), x.size(-1))
        for columns, values in zip(self.columns.mT, self.values.to(x.dtype).mT, strict=True):
            total = torch.addcmul(total, values.unsqueeze(-1), x.index_select(-2, columns))
        return total

    def _added(self, x: Tensor) -> Tensor:
        total = x.new_zeros(*x.shape[:-2], self.num_columns, x.size(-1))
        for columns, values in zip(self.columns.mT, self.values.to(x.dtype).mT, strict=True):
            total = total.index_add(-2, columns, values.unsqueeze(-1) * x)
        return total

    # -- compressed rows ---------------------------------------------------------------------------------------------

    def _matrix(self, dtype: torch.dtype, transposed: bool) -> Tensor:
        key = (dtype, transposed)
        if key not in self._known:
            wide = self._compressed(transposed) if dtype == torch.float64 else self._matrix(torch.float64, transposed)
            self._known[key] = wide.to(dtype)
        return self._known[key]

    def _compressed(self, transposed: bool) -> Tensor:
        if transposed:
            return transposed_rows(self._matrix(torch.float64, transposed=False))
        rows, width = self.columns.shape
        starts, size = torch.arange(rows + 1) * width, (rows, self.num_columns)
        return compressed_rows(starts, self.columns.flatten(), self.values.flatten(), size)


class _Product(Function):
    """W or W' times x. The derivative is a product with the transpose."""

    @staticmethod
    def forward(ctx: Any, rows: SparseRows, transposed: bool, x: Tensor) -> Tensor:
        ctx.rows, ctx.transposed = rows, transposed
        return rows._product(x, transposed)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, None, Tensor]:
        return None, None, ctx.rows.product(grad_outputs[0], not ctx.transposed)


def compressed_rows(starts: Tensor, columns: Tensor, values: Tensor, size: tuple[int, int]) -> Tensor:
    """A matrix as torch's compressed sparse rows."""
    few = columns.numel() <= _MOST_SHORT  # MKL's own indices: others are converted each time
    index = torch.int32 if few else torch.int64
    starts, columns = starts.to(index), columns.to(index)
    with without_notes():
        return torch.sparse_csr_tensor(starts, columns, values, size, check_invariants=False)


def with_dtype(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Compressed sparse rows in another precision. Indices are shared with the given matrix, not copied."""
    parts = matrix.crow_indices(), matrix.col_indices(), matrix.values().to(dtype)
    return compressed_rows(*parts, (matrix.size(0), matrix.size(1)))


def transposed_rows(matrix: Tensor) -> Tensor:
    """The transpose of compressed sparse rows, by SciPy. torch would sort the entries, which takes ten times as long.

    >>> transposed_rows(torch.tensor([[0.0, 2.0], [0.0, 3.0]]).to_sparse_csr()).to_dense()
    tensor([[0., 0.],
            [2., 3.]])
    """
    parts = matrix.values(), matrix.col_indices(), matrix.crow_indices()
    by_column = csr_array(tuple(part.numpy() for part in parts), shape=tuple(matrix.shape)).tocsc()
    starts, columns, values = (torch.from_numpy(part) for part in (by_column.indptr, by_column.indices, by_column.data))
    return compressed_rows(starts, columns, values, (matrix.size(1), matrix.size(0)))


@contextmanager
def without_notes() -> Iterator[None]:
    """Suppresses torch's warnings that compressed sparse tensors are in beta state and are not checked."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse (CSR tensor support is in beta|invariant checks)")
        yield
