"""The covariance of new observations: a posterior's plus their noise."""

from typing import Any

import torch
from linear_operator.operators import AddedDiagLinearOperator, DiagLinearOperator, LinearOperator
from torch import Tensor

from gpytorch_gaps.operators.posterior_covariance import PosteriorCovarianceOperator


class NoisyPosteriorCovarianceOperator(AddedDiagLinearOperator):
    """``K_** - K_*X (K_XX + D)^-1 K_X* + D_*``: variances and draws are those of the posterior, and noise.

    Made of a ``PosteriorCovarianceOperator`` and a diagonal operator.
    """

    def __add__(self, other: Any) -> LinearOperator | Tensor:
        if isinstance(other, DiagLinearOperator):
            return type(self)(self._linear_op, self._diag_tensor + other)
        return super().__add__(other)

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        function = self._linear_op._getitem(row_index, col_index, *batch_indices)
        if isinstance(function, PosteriorCovarianceOperator):  # rows and columns are the same points
            noise = self._diag_tensor._diagonal()[(*batch_indices, row_index)]
            return type(self)(function, DiagLinearOperator(noise))
        return LinearOperator._getitem(self, row_index, col_index, *batch_indices)  # keeps where draws come from

    def zero_mean_mvn_samples(self, num_samples: int, generator: torch.Generator | None = None) -> Tensor:
        """shape: (num_samples, *batch, Q)"""
        posterior: PosteriorCovarianceOperator = self._linear_op
        return posterior.zero_mean_mvn_samples(num_samples, generator, noise=self._diag_tensor._diagonal())

    def root_decomposition(self, method: str | None = None) -> LinearOperator:
        """By Cholesky, whatever the size."""
        return super().root_decomposition(method=method or "cholesky")
