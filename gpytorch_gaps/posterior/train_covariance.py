"""Products and solves with ``A = K_XX + D``, the covariance of the observations that a posterior is conditioned on.

A :class:`~gpytorch_gaps.operators.noisy.NoisyGridOperator` is solved in float64 by a ``SolveConfig``, with a report.
For any other LinearOperator, linear_operator solves in the operator's precision, to its own tolerances.
"""

from collections.abc import Sequence

import torch
from linear_operator.operators import AddedDiagLinearOperator, LinearOperator, SumLinearOperator
from torch import Tensor

from gpytorch_gaps.operators.base import KroneckerFactorsOperator
from gpytorch_gaps.operators.noisy import NoisyGridOperator
from gpytorch_gaps.solvers.config import SolveConfig

UNSQUARED_TOLERANCE = 1e-3  # factor of the tolerance, for solutions whose error affects a result linearly


def train_covariance(operator: LinearOperator, config: SolveConfig) -> "TrainCovariance":
    """The covariance of the observations, with the solves of its operator."""
    if isinstance(operator, NoisyGridOperator):
        return GridTrainCovariance(operator, config)
    return TrainCovariance(operator, config)


class TrainCovariance:
    """A, for any LinearOperator."""

    def __init__(self, operator: LinearOperator, config: SolveConfig) -> None:
        self._operator, self._config = operator, config

    def config_for(self, expected: int, tolerance: float | None = None) -> SolveConfig:
        """The configuration for `expected` right-hand sides in total, which are solved for in chunks."""
        planned = self._config.planned_columns(expected * self._operator.batch_shape.numel())
        return self._config.replace(expected_columns=planned, tolerance=tolerance or self._config.tolerance)

    @property
    def has_float64_entries(self) -> bool:
        """Whether the entries of A are used in float64, for any dtype of the model."""
        return self._operator.dtype == torch.float64

    def solve(
        self, columns: Tensor, *, expected: int = 0, tolerance: float | None = None, of_data: bool = False
    ) -> Tensor:
        """``A^-1`` times columns, differentiable. shape: (*batch, N, q)

        :param expected: total number of columns, if they are solved for in chunks.
        :param tolerance: relative residual. Default: that of the configuration.
        :param of_data: whether the columns are data. The error of their posterior mean is then certified.
        """
        return self._operator.solve(columns)

    def solve_for_variances(self, columns: Tensor, prior: Tensor, expected: int) -> tuple[Tensor, Tensor]:
        """``a ~ A^-1 g``, accurate enough for variances within the tolerance, and ``g - A a``. In float64, no graph.

        :param columns: g, shape (*batch, N, q).
        :param prior: prior variances of their points, shape (*batch, q).
        :param expected: total number of columns.
        """
        with torch.no_grad():
            weights = self._operator.solve(columns.to(self._operator.dtype)).double()
        return weights, torch.zeros_like(weights)

    def variance_error(self, residual: Tensor) -> Tensor:
        """``r' D^-1 r``, which bounds the error of a variance. shape: (*batch, N, q) -> (*batch, q)"""
        return residual.square().sum(-2)

    def matmul(self, x: Tensor) -> Tensor:
        """``A x`` in float64, differentiable. shape: (*batch, N, q)"""
        return (self._operator @ x.to(self._operator.dtype)).double()


class GridTrainCovariance(TrainCovariance):
    """A, for one of our operators, which solves by the configuration."""

    _operator: NoisyGridOperator

    @property
    def has_float64_entries(self) -> bool:
        return has_float64_entries(self._operator._linear_op)

    def solve(
        self, columns: Tensor, *, expected: int = 0, tolerance: float | None = None, of_data: bool = False
    ) -> Tensor:
        return self._operator.solve(columns, of_data=of_data, config=self.config_for(expected, tolerance))

    def solve_for_variances(self, columns: Tensor, prior: Tensor, expected: int) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            solved = self._operator.solve_columns(columns.double(), self.config_for(expected), prior=prior)
        return solved.solution, solved.residual

    def variance_error(self, residual: Tensor) -> Tensor:
        noise = self._operator.noise_tensor().detach().double().clamp_min(torch.finfo(torch.float64).tiny)
        return (residual.square() / noise.unsqueeze(-1)).sum(-2)

    def matmul(self, x: Tensor) -> Tensor:
        noise = self._operator._diag_tensor._diagonal().double().unsqueeze(-1)
        return wide_product(self._operator._linear_op, x).double() + noise * x


# -- sums of covariances ---------------------------------------------------------------------------------------------


def summands(op: LinearOperator) -> Sequence[LinearOperator]:
    """The terms of a sum; anything else is its only term."""
    plain_sum = isinstance(op, SumLinearOperator) and not isinstance(op, AddedDiagLinearOperator)
    return op.linear_ops if plain_sum else (op,)


def has_float64_entries(op: LinearOperator) -> bool:
    """Whether all entries of a covariance are available in float64, for any dtype of the operator."""
    return all(_entry_dtype(term) == torch.float64 for term in summands(op))


def _entry_dtype(term: LinearOperator) -> torch.dtype | None:
    return term.factors[0].dtype if isinstance(term, KroneckerFactorsOperator) else term.dtype


def wide_product(op: LinearOperator, x: Tensor) -> Tensor:
    """``K x``, in float64 if the entries of K are. shape: (*batch, N, C)"""
    return op @ (x if has_float64_entries(op) else x.to(op.dtype))
