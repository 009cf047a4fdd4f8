"""A covariance that is too large to store: its rows are evaluated in chunks when they are needed."""

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

_BYTES_PER_ENTRY = 32  # memory of one entry during evaluation: four float64 numbers


class KernelRowsOperator(LinearOperator):
    """``k(x1, x2)``, evaluated in chunks of rows that fit in ``settings.prediction_memory``.

    It is not differentiable with respect to the kernel.

    :param x1: points of the rows, shape (*batch, N, D).
    :param x2: points of the columns, shape (*batch, Q, D).
    :param kernel: the kernel; called with inputs to which its `active_dims` have been applied.
    :param params: further keyword arguments of the kernel.
    :param width: numbers stored per row. Default: Q, for a kernel without structure.
    :param transposed: whether the operator is ``k(x1, x2)'``. It is still evaluated in parts of x1.

    >>> from gpytorch.kernels import RBFKernel
    >>> x = torch.linspace(0, 1, 5).unsqueeze(-1)
    >>> covariance = KernelRowsOperator(x, x[:3], kernel=RBFKernel(), params={})
    >>> covariance.shape, (covariance @ torch.ones(3)).shape
    (torch.Size([5, 3]), torch.Size([5]))
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
        """The points of the rows, if the kernel is a grid kernel."""
        return self.x1 if hasattr(self.kernel, "grid") and not self.transposed else None

    def _size(self) -> torch.Size:
        batch = torch.broadcast_shapes(self.x1.shape[:-2], self.x2.shape[:-2], self.kernel.batch_shape)
        sizes = self.x1.size(-2), self.x2.size(-2)
        return torch.Size((*batch, *(reversed(sizes) if self.transposed else sizes)))

    def _parts(self) -> Iterator[tuple[slice, Tensor | LinearOperator]]:
        """Slices of x1 and their covariance with x2. shape: (*batch, q, Q) each"""
        row_bytes = _BYTES_PER_ENTRY * self.shape[:-2].numel() * self.width
        size = int(max(1, settings.prediction_memory.value() // row_bytes))
        for start in range(0, max(1, self.x1.size(-2)), size):
            rows = slice(start, start + size)
            yield rows, self._part(self.x1[..., rows, :])

    def _part(self, x: Tensor) -> Tensor | LinearOperator:
        """The covariance of x with x2: an operator if the kernel has a grid, else dense, rounded from float64."""
        if hasattr(self.kernel, "grid") or x.dtype != torch.float32:
            return Module.__call__(self.kernel, x, self.x2, **self.params)
        return cast_entries(
            covariance_in_float64(self.kernel, x, self.x2, columns_selected=True, **self.params), x.dtype
        )

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
        """All rows evaluated at once, for few points. A grid kernel gives an operator."""
        covariance = to_linear_operator(Module.__call__(self.kernel, self.x1, self.x2, **self.params))
        return covariance.mT if self.transposed else covariance

    def to_dense(self) -> Tensor:
        dense = torch.cat([to_dense(part) for _, part in self._parts()], -2)
        return (dense.mT if self.transposed else dense).expand(self.shape)


def fits_memory(rows: int, width: int) -> bool:
    """Whether `rows` rows of `width` entries fit ``settings.prediction_memory``; a single row always does."""
    return rows <= 1 or _BYTES_PER_ENTRY * rows * width <= settings.prediction_memory.value()
