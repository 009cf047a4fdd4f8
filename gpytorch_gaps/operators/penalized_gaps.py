"""``K + gamma R + s2 I`` on the whole grid: the matrix of sec:PG, the baseline the paper compares with."""

import math
from collections.abc import Callable
from typing import Any

import linear_operator
import torch
from linear_operator.operators import DiagLinearOperator, LinearOperator
from linear_operator.utils.getitem import _is_noop_index
from torch import Tensor

from gpytorch_gaps.linalg.products import kron_matmul
from gpytorch_gaps.operators._solve import krylov_solve
from gpytorch_gaps.operators.base import KroneckerFactorsOperator, as_noise, check_factors, check_index
from gpytorch_gaps.operators.selected_kronecker import SelectedKroneckerOperator
from gpytorch_gaps.utils.precision import full_float32


class PenalizedGapsOperator(KroneckerFactorsOperator):
    """``K + gamma R + s2 I`` with ``R_ZZ = I`` on the gaps and zero elsewhere, of size M.

    Implements: eqn:penalty, preconditioned by ``(gamma R + s2 I)^-1`` as sec:PG suggests. The paper prints
    ``R_XX = I``, but the penalty belongs on the gaps.

    :param factors: K_i, shape (*batch, m_i, m_i) each.
    :param noise: s2, a float or a tensor of shape (), (1,) or (*batch, 1).
    :param gap_index: flat cells of the gaps, last axis fastest, shape (L,).
    :param penalty: gamma.
    """

    _batched_kwargs = ("noise",)

    def __init__(self, *factors: Tensor, noise: float | Tensor, gap_index: Tensor, penalty: float) -> None:
        check_factors("PenalizedGapsOperator", factors, square=True)
        shape = tuple(factor.size(-1) for factor in factors)
        check_index("PenalizedGapsOperator", "gap_index", gap_index, shape, factors[0].device)
        if not isinstance(penalty, (int, float)) or not penalty > 0:
            raise ValueError(f"PenalizedGapsOperator: penalty: got {penalty}, expected a number above 0")
        self.noise = as_noise("PenalizedGapsOperator", noise, factors)
        self.gap_index, self.penalty = gap_index, penalty
        self.num_cells = math.prod(shape)
        super().__init__(*factors, noise=self.noise, gap_index=gap_index, penalty=penalty)

    def _size(self) -> torch.Size:
        return torch.Size((*self._factor_batch_shape(), self.num_cells, self.num_cells))

    def _added_diagonal(self) -> Tensor:
        """``gamma R + s2``. shape: (*batch, M)"""
        gaps = torch.zeros(self.num_cells, dtype=self.dtype, device=self.device)
        return gaps.index_fill(0, self.gap_index, self.penalty) + self.noise

    @full_float32()
    def _matmul(self, rhs: Tensor) -> Tensor:
        columns = rhs.unsqueeze(-1) if rhs.dim() == 1 else rhs
        result = kron_matmul(self.factors, columns) + self._added_diagonal().unsqueeze(-1) * columns
        return result.squeeze(-1) if rhs.dim() == 1 else result

    def _t_matmul(self, rhs: Tensor) -> Tensor:
        return self._matmul(rhs)

    def _transpose_nonbatch(self) -> "PenalizedGapsOperator":
        # equal in value, but the gradient of a factor is transposed
        return self._rebuild(lambda factor: factor.mT, lambda noise: noise)

    def _diagonal(self) -> Tensor:
        diagonal = SelectedKroneckerOperator(*self.factors)._diagonal() + self._added_diagonal()
        return diagonal.expand(*self.batch_shape, self.num_cells)

    def _get_indices(self, row_index: Tensor, col_index: Tensor, *batch_indices: Tensor) -> Tensor:
        kernel = SelectedKroneckerOperator(*self._expanded().factors)._get_indices(row_index, col_index, *batch_indices)
        added = self._added_diagonal().expand(*self.batch_shape, self.num_cells)[(*batch_indices, row_index)]
        return kernel + added * (row_index == col_index)

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        if _is_noop_index(row_index) and _is_noop_index(col_index):
            return self._index_batch(batch_indices)
        return super()._getitem(row_index, col_index, *batch_indices)

    def _solve(self, rhs: Tensor, preconditioner: Any = None, num_tridiag: int = 0) -> Any:
        return krylov_solve(
            self._as_float64()._matmul, rhs, preconditioner, num_tridiag, self.batch_shape
        ).as_upstream()

    def _preconditioner(self) -> tuple[Callable | None, LinearOperator | None, Tensor | None]:
        """As (P^-1, P, log|P|), at the sizes where upstream preconditions: its matrix roots are rotated by P."""
        if self.num_cells < linear_operator.settings.min_preconditioning_size.value():
            return None, None, None
        diagonal = self._added_diagonal().expand(*self.batch_shape, self.num_cells)
        return self._solve_preconditioner(), DiagLinearOperator(diagonal), diagonal.log().sum(-1)

    def _solve_preconditioner(self) -> Callable[[Tensor], Tensor]:
        diagonal = self._added_diagonal().detach().unsqueeze(-1)
        return lambda r: r / diagonal.to(r.dtype)
