"""A covariance without structure, too large to hold: its rows are worked out when they are wanted."""

from collections.abc import Iterator
from typing import Any

import torch
from gpytorch import Module
from linear_operator import to_dense
from linear_operator.operators import LinearOperator
from torch import Tensor

from gpytorch_gaps import settings


class KernelRowsOperator(LinearOperator):
    """``k(x1, x2)`` by rows, as many at a time as ``settings.prediction_memory`` allows. Not differentiable in k.

    :param x1: shape (*batch, N, D).
    :param x2: shape (*batch, M, D).
    :param kernel: called without its `active_dims`.
    :param params: passed to it.
    """

    def __init__(self, x1: Tensor, x2: Tensor, *, kernel: Any, params: dict[str, Any]) -> None:
        super().__init__(x1, x2, kernel=kernel, params=params)
        self.x1, self.x2, self.kernel, self.params = x1, x2, kernel, params

    @staticmethod
    def is_small(x1: Tensor, x2: Tensor) -> bool:
        """Whether the matrix of these points is better formed at once; a single row always is."""
        return x1.size(-2) <= 1 or 32 * x1.size(-2) * x2.size(-2) <= settings.prediction_memory.value()

    def _size(self) -> torch.Size:
        batch = torch.broadcast_shapes(self.x1.shape[:-2], self.x2.shape[:-2], self.kernel.batch_shape)
        return torch.Size((*batch, self.x1.size(-2), self.x2.size(-2)))

    def _parts(self) -> Iterator[Tensor]:
        """Some rows after the other. shape: (*batch, q, M) each"""
        size = int(max(1, settings.prediction_memory.value() // (32 * self.shape[:-2].numel() * self.x2.size(-2))))
        for start in range(0, max(1, self.size(-2)), size):
            rows = self.x1[..., start : start + size, :]
            yield to_dense(Module.__call__(self.kernel, rows, self.x2, **self.params))

    def _matmul(self, rhs: Tensor) -> Tensor:
        return torch.cat([part @ rhs for part in self._parts()], -2 if rhs.dim() > 1 else -1)

    def _transpose_nonbatch(self) -> "KernelRowsOperator":
        return KernelRowsOperator(self.x2, self.x1, kernel=self.kernel, params=self.params)

    def _diagonal(self) -> Tensor:
        diagonal = Module.__call__(self.kernel, self.x1, self.x2, diag=True, **self.params)
        return to_dense(diagonal).expand(self.shape[:-1])

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        simple = all(isinstance(index, slice) or index.dim() == 1 for index in (row_index, col_index))
        tensors = [torch.is_tensor(index) for index in (row_index, col_index)]
        if not simple or all(tensors) or (any(tensors) and any(map(torch.is_tensor, batch_indices))):
            return super()._getitem(row_index, col_index, *batch_indices)
        if batch_indices:
            return self._members(batch_indices)._getitem(row_index, col_index)
        x1, x2 = self.x1[..., row_index, :], self.x2[..., col_index, :]
        return KernelRowsOperator(x1, x2, kernel=self.kernel, params=self.params)

    def _members(self, batch_indices: tuple[Any, ...]) -> "KernelRowsOperator":
        batch, kernel = self.batch_shape, self.kernel
        x1, x2 = (x.expand(*batch, *x.shape[-2:])[batch_indices] for x in (self.x1, self.x2))
        kernel = kernel.expand_batch(batch)[batch_indices] if kernel.batch_shape else kernel
        return KernelRowsOperator(x1, x2, kernel=kernel, params=self.params)

    def _expand_batch(self, batch_shape: torch.Size | list[int]) -> "KernelRowsOperator":
        x1 = self.x1.expand(*batch_shape, *self.x1.shape[-2:])
        return KernelRowsOperator(x1, self.x2, kernel=self.kernel, params=self.params)

    def to_dense(self) -> Tensor:
        return torch.cat(list(self._parts()), -2).expand(self.shape)
