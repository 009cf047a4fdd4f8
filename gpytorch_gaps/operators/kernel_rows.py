"""A covariance too large to hold: the rows of its points are worked out when they are wanted, some at a time."""

from collections.abc import Iterator
from typing import Any

import torch
from gpytorch import Module
from linear_operator import to_dense, to_linear_operator
from linear_operator.operators import LinearOperator
from torch import Tensor

from gpytorch_gaps import settings
from gpytorch_gaps.operators.float64_covariance import covariance_in_float64
from gpytorch_gaps.utils.precision import cast_entries, full_float32


class KernelRowsOperator(LinearOperator):
    """``k(x1, x2)`` by rows, as many at a time as ``settings.prediction_memory`` allows. Not differentiable in k.

    :param x1: shape (*batch, N, D).
    :param x2: shape (*batch, M, D).
    :param kernel: called without its `active_dims`.
    :param params: passed to it.
    :param width: numbers that a row is made of; default: M, for a kernel without structure.
    :param transposed: whether this is ``k(x1, x2)'``; x1 are still the points that are taken some at a time.
    """

    def __init__(
        self,
        x1: Tensor,
        x2: Tensor,
        *,
        kernel: Any,
        params: dict[str, Any],
        width: int | None = None,
        transposed: bool = False,
    ) -> None:
        super().__init__(x1, x2, kernel=kernel, params=params, width=width, transposed=transposed)
        self.x1, self.x2, self.kernel, self.params = x1, x2, kernel, params
        self.width, self.transposed = x2.size(-2) if width is None else width, transposed

    @property
    def row_points(self) -> Tensor | None:
        """The points that the rows belong to, where they are all that the kernel sees of a grid."""
        return self.x1 if hasattr(self.kernel, "grid") and not self.transposed else None

    @staticmethod
    def is_small(x1: Tensor, x2: Tensor) -> bool:
        """Whether the matrix of these points is better formed at once; a single row always is."""
        return x1.size(-2) <= 1 or 32 * x1.size(-2) * x2.size(-2) <= settings.prediction_memory.value()

    def _size(self) -> torch.Size:
        batch = torch.broadcast_shapes(self.x1.shape[:-2], self.x2.shape[:-2], self.kernel.batch_shape)
        sizes = self.x1.size(-2), self.x2.size(-2)
        return torch.Size((*batch, *(reversed(sizes) if self.transposed else sizes)))

    def _parts(self) -> Iterator[tuple[slice, Tensor | LinearOperator]]:
        """Some points after the other, against x2. shape: (*batch, q, M) each"""
        size = int(max(1, settings.prediction_memory.value() // (32 * self.shape[:-2].numel() * self.width)))
        for start in range(0, max(1, self.x1.size(-2)), size):
            rows = slice(start, start + size)
            yield rows, self._part(self.x1[..., rows, :])

    def _part(self, x: Tensor) -> Tensor | LinearOperator:
        """As structured as a grid makes it, else dense: in float32, the entries of float64, rounded."""
        if hasattr(self.kernel, "grid") or x.dtype != torch.float32:
            return Module.__call__(self.kernel, x, self.x2, **self.params)
        return cast_entries(covariance_in_float64(self.kernel, x, self.x2, taken=True, **self.params), x.dtype)

    @full_float32()
    def _matmul(self, rhs: Tensor) -> Tensor:
        columns = rhs.unsqueeze(-1) if rhs.dim() == 1 else rhs
        if self.transposed:
            result = columns.new_zeros(())
            for rows, part in self._parts():
                result = result + part.mT @ columns[..., rows, :]
        else:
            result = torch.cat([part @ columns for _, part in self._parts()], -2)
        return result.squeeze(-1) if rhs.dim() == 1 else result

    def _transpose_nonbatch(self) -> "KernelRowsOperator":
        return self._like(self.x1, self.x2, self.kernel, not self.transposed)

    def _like(self, x1: Tensor, x2: Tensor, kernel: Any, transposed: bool | None = None) -> "KernelRowsOperator":
        turned = self.transposed if transposed is None else transposed
        width = self._kwargs["width"]
        return KernelRowsOperator(x1, x2, kernel=kernel, params=self.params, width=width, transposed=turned)

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
        first, second = (col_index, row_index) if self.transposed else (row_index, col_index)
        return self._like(self.x1[..., first, :], self.x2[..., second, :], self.kernel)

    def _members(self, batch_indices: tuple[Any, ...]) -> "KernelRowsOperator":
        batch, kernel = self.batch_shape, self.kernel
        x1, x2 = (x.expand(*batch, *x.shape[-2:])[batch_indices] for x in (self.x1, self.x2))
        return self._like(x1, x2, kernel.expand_batch(batch)[batch_indices] if kernel.batch_shape else kernel)

    def _expand_batch(self, batch_shape: torch.Size | list[int]) -> "KernelRowsOperator":
        return self._like(self.x1.expand(*batch_shape, *self.x1.shape[-2:]), self.x2, self.kernel)

    def at_once(self) -> LinearOperator:
        """With all rows worked out: of few points against a grid, as structured as the kernel makes them."""
        covariance = to_linear_operator(Module.__call__(self.kernel, self.x1, self.x2, **self.params))
        return covariance.mT if self.transposed else covariance

    def to_dense(self) -> Tensor:
        dense = torch.cat([to_dense(part) for _, part in self._parts()], -2)
        return (dense.mT if self.transposed else dense).expand(self.shape)
