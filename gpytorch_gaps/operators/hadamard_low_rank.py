"""``A o (U V')``: a kernel times one of low rank, such as a linear kernel, entry by entry."""

from typing import Any

import torch
from linear_operator.operators import LinearOperator
from torch import Tensor


class HadamardLowRankOperator(LinearOperator):
    """``A o (U V') = Σ_r diag(u_r) A diag(v_r)``: r products with A make one with this; nothing dense is formed.

    :param base: A, shape (*batch, N, M).
    :param left: U, shape (*batch, N, r).
    :param right: V, shape (*batch, M, r).
    """

    def __init__(self, base: LinearOperator, left: Tensor, right: Tensor) -> None:
        batch = torch.broadcast_shapes(base.batch_shape, left.shape[:-2], right.shape[:-2])
        base = base if base.batch_shape == batch else base._expand_batch(batch)
        # only where needed: autograd Functions rebuild the operator without gradients, and look for those of its tensors
        left, right = (t if t.shape[:-2] == batch else t.expand(*batch, *t.shape[-2:]) for t in (left, right))
        super().__init__(base, left, right)
        self.base, self.left, self.right = base, left, right

    def _size(self) -> torch.Size:
        return self.base.shape

    def _matmul(self, rhs: Tensor) -> Tensor:
        columns = rhs.unsqueeze(-1) if rhs.dim() == 1 else rhs
        spread = (self.right.unsqueeze(-1) * columns.unsqueeze(-2)).flatten(-2)  # shape: (*batch, M, r C)
        images = self.base._matmul(spread).unflatten(-1, (self.left.size(-1), columns.size(-1)))
        result = (self.left.unsqueeze(-1) * images).sum(-2)
        return result.squeeze(-1) if rhs.dim() == 1 else result

    def _transpose_nonbatch(self) -> "HadamardLowRankOperator":
        return HadamardLowRankOperator(self.base._transpose_nonbatch(), self.right, self.left)

    def _get_indices(self, row_index: Tensor, col_index: Tensor, *batch_indices: Tensor) -> Tensor:
        weights = (self.left[(*batch_indices, row_index)] * self.right[(*batch_indices, col_index)]).sum(-1)
        return weights * self.base._get_indices(row_index, col_index, *batch_indices)

    def _diagonal(self) -> Tensor:
        return self.base._diagonal() * (self.left * self.right).sum(-1)

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        simple = all(isinstance(index, slice) or index.dim() == 1 for index in (row_index, col_index))
        if batch_indices or not simple or (torch.is_tensor(row_index) and torch.is_tensor(col_index)):
            return super()._getitem(row_index, col_index, *batch_indices)
        base = self.base._getitem(row_index, col_index)
        return HadamardLowRankOperator(base, self.left[..., row_index, :], self.right[..., col_index, :])

    def _expand_batch(self, batch_shape: torch.Size | list[int]) -> "HadamardLowRankOperator":
        left = self.left.expand(*batch_shape, *self.left.shape[-2:])
        right = self.right.expand(*batch_shape, *self.right.shape[-2:])
        return HadamardLowRankOperator(self.base._expand_batch(batch_shape), left, right)

    def _mul_constant(self, other: float | Tensor) -> "HadamardLowRankOperator":
        return HadamardLowRankOperator(self.base._mul_constant(other), self.left, self.right)

    def to_dense(self) -> Tensor:
        return self.base.to_dense() * (self.left @ self.right.mT)
