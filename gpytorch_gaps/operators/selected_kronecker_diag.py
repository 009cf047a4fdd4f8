"""``W (D_1 (x) ... (x) D_d) W'`` for diagonal D_i: noise that is a product over axes, such as one noise per output."""

from typing import Any

import torch
from linear_operator.operators import DiagLinearOperator, LinearOperator, TriangularLinearOperator
from torch import Tensor

from gpytorch_gaps.linalg.selection import product_at, unravel
from gpytorch_gaps.operators.base import check_index


class SelectedKroneckerDiagOperator(DiagLinearOperator):
    """The diagonal matrix of a product of axis vectors at the cells `index`.

    When it is added to a :class:`SelectedKroneckerOperator`, the factors can be divided by it, so that fill-gaps
    applies as for constant noise.

    :param axis_noise: one positive vector per axis, shape (*batch, m_i) each: ones if the noise does not depend on that
        axis.
    :param index: flat cells, last axis fastest, shape (N,).
    :raises ValueError: if the index has cells outside the grid.

    >>> per_output, ones = torch.tensor([0.1, 0.4]), torch.ones(3)
    >>> SelectedKroneckerDiagOperator(per_output, ones, index=torch.tensor([0, 5])).diagonal()
    tensor([0.1000, 0.4000])
    """

    def __init__(self, *axis_noise: Tensor, index: Tensor) -> None:
        self.shape_of_grid = tuple(axis.size(-1) for axis in axis_noise)
        check_index("SelectedKroneckerDiagOperator", "index", index, self.shape_of_grid, axis_noise[0].device)
        # like ConstantDiagLinearOperator: the diagonal is computed from the arguments, and is not one of them
        super(TriangularLinearOperator, self).__init__(*axis_noise, index=index)
        self.axis_noise, self.index = axis_noise, index

    @property
    def _diag(self) -> Tensor:
        return product_at(self.axis_noise, unravel(self.index, self.shape_of_grid))

    def _size(self) -> torch.Size:
        batch = torch.broadcast_shapes(*(axis.shape[:-1] for axis in self.axis_noise))
        return torch.Size((*batch, len(self.index), len(self.index)))

    def _bilinear_derivative(self, left_vecs: Tensor, right_vecs: Tensor) -> tuple[Tensor | None, ...]:
        return LinearOperator._bilinear_derivative(self, left_vecs, right_vecs)

    def _expand_batch(self, batch_shape: torch.Size | list[int]) -> "SelectedKroneckerDiagOperator":
        axes = (axis.expand(*batch_shape, axis.size(-1)) for axis in self.axis_noise)
        return SelectedKroneckerDiagOperator(*axes, index=self.index)

    def _mul_constant(self, other: float | Tensor) -> "SelectedKroneckerDiagOperator":
        scale = other.unsqueeze(-1) if torch.is_tensor(other) else other
        return SelectedKroneckerDiagOperator(self.axis_noise[0] * scale, *self.axis_noise[1:], index=self.index)

    def _map(self, function: Any) -> "SelectedKroneckerDiagOperator":
        """For functions with ``f(ab) = f(a) f(b)``."""
        return SelectedKroneckerDiagOperator(*(function(axis) for axis in self.axis_noise), index=self.index)

    def abs(self) -> "SelectedKroneckerDiagOperator":
        return self._map(torch.abs)

    def sqrt(self) -> "SelectedKroneckerDiagOperator":
        return self._map(torch.sqrt)

    def inverse(self) -> "SelectedKroneckerDiagOperator":
        return self._map(torch.reciprocal)

    def exp(self) -> DiagLinearOperator:
        return DiagLinearOperator(self._diag.exp())

    def log(self) -> DiagLinearOperator:
        return DiagLinearOperator(self._diag.log())

    def _prod_batch(self, dim: int) -> DiagLinearOperator:
        return DiagLinearOperator(self._diag.prod(dim))

    def _sum_batch(self, dim: int) -> DiagLinearOperator:
        return DiagLinearOperator(self._diag.sum(dim))

    def to(self, *args: Any, **kwargs: Any) -> "SelectedKroneckerDiagOperator":
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        axes = (axis.to(device, dtype, non_blocking) for axis in self.axis_noise)
        return SelectedKroneckerDiagOperator(*axes, index=self.index.to(device))
