"""A low-rank preconditioner as a LinearOperator: linear_operator draws probes from it and differentiates it."""

import torch
from linear_operator.operators import DiagLinearOperator, LinearOperator, MatmulLinearOperator, RootLinearOperator
from linear_operator.operators.psd_sum_linear_operator import PsdSumLinearOperator
from torch import Tensor

from gpytorch_gaps.linalg.interpolation import GridInterpolation
from gpytorch_gaps.operators.interpolated_kronecker import InterpolatedKroneckerOperator
from gpytorch_gaps.operators.selected_kronecker import SelectedKroneckerOperator
from gpytorch_gaps.preconditioners.core_matrix import lifted_root
from gpytorch_gaps.preconditioners.interpolated import InterpolatedPreconditioner
from gpytorch_gaps.preconditioners.low_rank import LowRankPreconditioner
from gpytorch_gaps.utils.precision import full_float32


class _LowRankSum(PsdSumLinearOperator):
    """A sum that sets the float32 precision itself: linear_operator calls it outside of our solves."""

    @full_float32()
    def zero_mean_mvn_samples(self, num_samples: int) -> Tensor:
        return super().zero_mean_mvn_samples(num_samples)

    @full_float32()
    def _bilinear_derivative(self, left_vecs: Tensor, right_vecs: Tensor) -> tuple[Tensor | None, ...]:
        return super()._bilinear_derivative(left_vecs, right_vecs)


def low_rank_operator(
    preconditioner: LowRankPreconditioner,
    coefficients: Tensor,
    diagonal: DiagLinearOperator,
    dtype: torch.dtype,
    root: Tensor | None = None,
) -> LinearOperator:
    """``F C F' + R R' + D'``. ``F C^(1/2)`` is a selected Kronecker product: no N x p matrix is stored.

    :param diagonal: D. The preconditioner adds a constant to it.
    """
    raised = DiagLinearOperator(diagonal._diagonal() + preconditioner.added.to(dtype))
    if not coefficients.size(-1):
        assert root is not None
        return _LowRankSum(RootLinearOperator(root.to(dtype)), raised)
    basis = _basis(preconditioner, [q.to(dtype) for q in preconditioner.vectors])
    scale = DiagLinearOperator(lifted_root(coefficients).to(dtype))
    parts = [RootLinearOperator(MatmulLinearOperator(basis, scale))]
    if root is not None:
        parts.append(RootLinearOperator(root.to(dtype)))
    return _LowRankSum(*parts, raised)


def _basis(preconditioner: LowRankPreconditioner, vectors: list[Tensor]) -> LinearOperator:
    """F, without its scale."""
    columns = preconditioner.basis_index
    if isinstance(preconditioner, InterpolatedPreconditioner):
        selection = GridInterpolation.selecting(columns, [q.size(-1) for q in vectors])
        return InterpolatedKroneckerOperator(*vectors, rows=preconditioner.rows, columns=selection)
    return SelectedKroneckerOperator(*vectors, row_index=preconditioner.index, col_index=columns)
