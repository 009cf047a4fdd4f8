"""A sparse matrix that is upper triangular in some ordering of its rows, with a few entries in every column.

On the CPU, products and triangular solves use torch's compressed sparse rows. Other devices may lack these. There,
products are gathers and sums, one entry of every column at a time. A triangular solve ``(D + N) x = b`` repeats
``x <- D^-1 (b - N x)`` until x stays the same. This ends because N is nilpotent: the number of repetitions is the
length of the longest chain of neighbours, a few hundred. CPUs without MKL, which torch needs for sparse solves, use
the same iteration.
"""

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from gpytorch_gaps.linalg.sparse_rows import compressed_rows, transposed_rows, with_dtype

_SWEEPS_BETWEEN_READS = 20  # of a triangular solve on a device


class SparseColumns:
    """U with ``U[rows[i, j], i] = values[i, j]``, a permuted upper triangular matrix.

    :param rows: shape (N, k), -1 for no entry; the last column is i itself.
    :param values: shape (N, k), zero where there is no entry.
    :param rank: place of each row in the ordering: row ``rows[i, j]`` does not come after i. shape (N,)

    >>> U = SparseColumns(torch.tensor([[-1, 0], [0, 1]]), torch.tensor([[0.0, 2.0], [3.0, 4.0]]), torch.arange(2))
    >>> U.matmul(torch.eye(2))
    tensor([[2., 3.],
            [0., 4.]])
    >>> U.solve(torch.tensor([[2.0], [0.0]])).flatten(), U.mT_solve(torch.tensor([[2.0], [7.0]])).flatten()
    (tensor([1., 0.]), tensor([1., 1.]))
    """

    def __init__(self, rows: Tensor, values: Tensor, rank: Tensor) -> None:
        self.rows, self.values, self.rank = rows, values, rank
        self._is_sparse = values.device.type == "cpu"
        self._has_solves = self._is_sparse and torch.backends.mkl.is_available()

    def to(self, dtype: torch.dtype) -> "SparseColumns":
        """The same entries in another precision. Existing compressed rows are converted, and share their indices."""
        if dtype == self.values.dtype:
            return self
        other = SparseColumns(self.rows, self.values.to(dtype), self.rank)
        for name in ("_by_column", "_by_row"):
            if name in self.__dict__:
                other.__dict__[name] = with_dtype(self.__dict__[name], dtype)
        return other

    def forget(self) -> None:
        """Frees the compressed rows, which are made again when they are needed."""
        for name in ("_by_column", "_by_row", "_in_order", "_upper_in_order"):
            self.__dict__.pop(name, None)

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def _by_column(self) -> Tensor:
        """``U'`` as compressed sparse rows."""
        return _compressed(self.rows, self.values)

    @cached_property
    def _by_row(self) -> Tensor:
        """U as compressed sparse rows."""
        return transposed_rows(self._by_column)

    def matmul(self, x: Tensor) -> Tensor:
        """``U x``. shape: (N, C)"""
        if self._is_sparse:
            return self._by_row @ x
        return self._product(x, self.rows.size(-1))

    def mT_matmul(self, x: Tensor) -> Tensor:
        """``U' x``. shape: (N, C)"""
        if self._is_sparse:
            return self._by_column @ x
        return self._mT_product(x, self.rows.size(-1))

    def mT_solve(self, x: Tensor) -> Tensor:
        """``U'^-1 x``. shape: (N, C)"""
        if not self._has_solves:
            return self._by_sweeps(self._mT_product, x)
        order, lower = self._in_order
        return _triangular_solve(x[order], lower, upper=False)[self.rank]

    def solve(self, x: Tensor) -> Tensor:
        """``U^-1 x``. shape: (N, C)"""
        if not self._has_solves:
            return self._by_sweeps(self._product, x)
        order, _ = self._in_order
        return _triangular_solve(x[order], self._upper_in_order, upper=True)[self.rank]

    @cached_property
    def _in_order(self) -> tuple[Tensor, Tensor]:
        """Row numbers sorted by `rank`, and ``U'`` with rows and columns in this order, which is lower triangular."""
        order = self.rank.argsort()
        own = self.rows[order]
        return order, _compressed(torch.where(own >= 0, self.rank[own.long()], -1), self.values[order])

    @cached_property
    def _upper_in_order(self) -> Tensor:
        """U with rows and columns sorted by `rank`, an upper triangular matrix."""
        return transposed_rows(self._in_order[1])

    def _product(self, x: Tensor, width: int) -> Tensor:
        """The product with the first `width` entries of every column of U. shape: (N, C)"""
        result = x.new_zeros(len(x) + 1, x.size(-1))
        for rows, values in zip(self._safe_rows[:width], self.values.mT[:width], strict=True):
            result.index_add_(0, rows, values.unsqueeze(-1) * x)
        return result[:-1]

    def _mT_product(self, x: Tensor, width: int) -> Tensor:
        """The product with the first `width` entries of every row of U'. shape: (N, C)"""
        result, ended = torch.zeros_like(x), torch.cat([x, torch.zeros_like(x[:1])])
        for rows, values in zip(self._safe_rows[:width], self.values.mT[:width], strict=True):
            result.addcmul_(values.unsqueeze(-1), ended.index_select(0, rows))
        return result

    @cached_property
    def _safe_rows(self) -> Tensor:
        """Rows of the entries. Missing entries have the row N, which contains zeros. shape: (k, N)

        Sweeps may overflow before they settle. Zero times infinity is not a number, and would stay one.
        """
        return torch.where(self.rows >= 0, self.rows, len(self)).long().mT.contiguous()

    def _by_sweeps(self, product: Callable[[Tensor, int], Tensor], x: Tensor) -> Tensor:
        diagonal, others = self.values[:, -1:], self.rows.size(-1) - 1
        current = x / diagonal
        for sweep in range(1, len(self) + 1):
            before, current = current, (x - product(current, others)) / diagonal
            if sweep % _SWEEPS_BETWEEN_READS == 0 and torch.equal(before, current):
                break
        return current


def _compressed(columns: Tensor, values: Tensor) -> Tensor:
    """Compressed sparse rows from the columns of the entries of every row, -1 for none. shape: (N, k) each"""
    columns, size = columns.to(values.device), len(columns)
    has = columns >= 0
    starts = torch.cat([torch.zeros_like(columns[:1, 0]), has.sum(-1).cumsum(0)])
    return compressed_rows(starts, columns[has], values[has], (size, size))


def _triangular_solve(x: Tensor, matrix: Tensor, upper: bool) -> Tensor:
    return torch.triangular_solve(x, matrix, upper=upper)[0]
