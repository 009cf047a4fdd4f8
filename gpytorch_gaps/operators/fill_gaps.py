"""``V (K + s2 I)^-1 V'``: the matrix of Evans & Nair (2018), Proposition 3.3, on the gaps."""

import math
from collections.abc import Callable
from typing import Any

import torch
from linear_operator.operators import DiagLinearOperator, LinearOperator
from torch import Tensor

from gpytorch_gaps import settings
from gpytorch_gaps.autograd.shifted_solve import ShiftedSolve
from gpytorch_gaps.linalg.eigen import KroneckerEigen, kron_eigh
from gpytorch_gaps.linalg.products import kron_matmul
from gpytorch_gaps.linalg.selection import select_cells, spread_cells
from gpytorch_gaps.operators.base import KroneckerFactorsOperator, check_factors, check_index
from gpytorch_gaps.operators.low_rank import low_rank_operator
from gpytorch_gaps.operators.upstream import solve_matrix
from gpytorch_gaps.preconditioners import ShiftedEigenPreconditioner
from gpytorch_gaps.utils.cache import TensorCache
from gpytorch_gaps.utils.precision import full_float32


class FillGapsOperator(KroneckerFactorsOperator):
    """``V (K + s2 I)^-1 V'`` for a Kronecker product K. A product with it takes two Kronecker products.

    The left-hand side of Evans & Nair (2018), eq. (3.5). With ``settings.preconditioner_rank(p)``, solves and
    log-determinants are preconditioned by eq. (3.8). By default they are not, as the paper recommends.

    :param factors: K_i, shape (*batch, m_i, m_i) each.
    :param noise: s2, a float or a tensor of shape (), (1,) or (*batch, 1).
    :param gap_index: flat cells of the gaps, last axis fastest, shape (L,).
    :param cache: results computed from the tensors. It is kept when the operator is rebuilt.

    >>> operator = FillGapsOperator(torch.eye(3), noise=1.0, gap_index=torch.tensor([0, 2]))
    >>> operator.to_dense()
    tensor([[0.5000, 0.0000],
            [0.0000, 0.5000]])
    """

    _batched_kwargs = ("noise",)

    def __init__(
        self, *factors: Tensor, noise: float | Tensor, gap_index: Tensor, cache: TensorCache | None = None
    ) -> None:
        check_factors("FillGapsOperator", factors, square=True)
        shape = tuple(factor.size(-1) for factor in factors)
        check_index("FillGapsOperator", "gap_index", gap_index, shape, factors[0].device)
        self.noise = as_noise("FillGapsOperator", noise, factors)
        self.gap_index, self.cache = gap_index, cache or TensorCache()
        self.num_cells = math.prod(shape)
        super().__init__(*factors, noise=self.noise, gap_index=gap_index, cache=self.cache)

    def _size(self) -> torch.Size:
        return torch.Size((*self._factor_batch_shape(), len(self.gap_index), len(self.gap_index)))

    def _eigen(self) -> KroneckerEigen:
        return self.cache.cached("eigen", self.factors, lambda: kron_eigh(self.factors))

    @full_float32()
    def _matmul(self, rhs: Tensor) -> Tensor:
        columns = rhs.unsqueeze(-1) if rhs.dim() == 1 else rhs
        grid = spread_cells(columns, self.gap_index, self.num_cells)
        result = select_cells(ShiftedSolve.apply(self._eigen(), self.noise, grid, *self.factors), self.gap_index)
        return result.squeeze(-1) if rhs.dim() == 1 else result

    def _t_matmul(self, rhs: Tensor) -> Tensor:
        return self._matmul(rhs)

    def _transpose_nonbatch(self) -> "FillGapsOperator":
        # the value is the same, but the gradient of a factor is transposed
        return self._rebuild(lambda factor: factor.mT, lambda noise: noise)

    def _diagonal(self) -> Tensor:
        """``sum_j Q_zj^2 / (lambda_j + s2)``: one Kronecker product, or entry by entry if gradients are needed."""
        if torch.is_grad_enabled() and self.requires_grad:
            return super()._diagonal()
        eigen = self._eigen()
        inverse = 1.0 / (eigen.products + self.noise.double())
        grid = kron_matmul([vectors.square() for vectors in eigen.matrices], inverse.unsqueeze(-1))
        return select_cells(grid, self.gap_index).squeeze(-1).to(self.dtype)

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        if isinstance(row_index, slice) and isinstance(col_index, slice) and row_index == col_index:
            part = self._index_batch(batch_indices)
            kwargs = {**part._kwargs, "gap_index": self.gap_index[row_index]}
            return FillGapsOperator(*part.factors, **kwargs)
        return super()._getitem(row_index, col_index, *batch_indices)

    def _solve(self, rhs: Tensor, preconditioner: Any = None, num_tridiag: int = 0) -> Any:
        return solve_matrix(self._as_float64()._matmul, rhs, preconditioner, num_tridiag, self.batch_shape)

    def _preconditioner(self) -> tuple[Callable | None, LinearOperator | None, Tensor | None]:
        rank = settings.current().rank or 0
        if not rank or not len(self.gap_index):
            return None, None, None
        precondition: ShiftedEigenPreconditioner = self.cache.cached(
            ("shifted", rank),
            (*self.factors, self.noise, self.gap_index),
            lambda: ShiftedEigenPreconditioner(self._eigen(), self.gap_index, self.noise.detach().double(), rank),
        )
        # any shift is valid: the shift and the coefficients are constants for autograd
        shift = precondition.shift.to(self.dtype).expand(*self.batch_shape, len(self.gap_index))
        operator = low_rank_operator(precondition, precondition.coefficients, DiagLinearOperator(shift), self.dtype)
        return precondition.solve, operator, precondition.logdet().to(self.dtype)


def as_noise(name: str, noise: float | Tensor, factors: tuple[Tensor, ...]) -> Tensor:
    """The noise as a tensor of shape (*batch, 1) in the precision of the factors, checked."""
    dtype, device = factors[0].dtype, factors[0].device
    value = noise if torch.is_tensor(noise) else torch.tensor(float(noise), dtype=dtype, device=device)
    value = value.unsqueeze(-1) if value.dim() == 0 else value
    if value.size(-1) != 1:
        raise ValueError(f"{name}: noise: got shape {tuple(value.shape)}, expected one value (or (*batch, 1))")
    if value.dtype != dtype or value.device != device:
        raise ValueError(f"{name}: noise: is {value.dtype} on {value.device}, the factors {dtype} on {device}")
    return value
