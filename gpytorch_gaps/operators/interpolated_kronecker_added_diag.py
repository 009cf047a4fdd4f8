"""``W K W' + D`` with W interpolating: the covariance of noisy observations at scattered points."""

from collections.abc import Callable

from linear_operator.operators import DiagLinearOperator, LinearOperator, SumLinearOperator
from torch import Tensor

from gpytorch_gaps.operators.interpolated_kronecker import InterpolatedKroneckerOperator
from gpytorch_gaps.operators.noisy import NoisyGridOperator
from gpytorch_gaps.operators.sums import register_sum
from gpytorch_gaps.solvers.interpolated_system import InterpolatedSystem
from gpytorch_gaps.solvers.kronecker_term import KroneckerTerm


class InterpolatedKroneckerAddedDiagOperator(NoisyGridOperator):
    """``W (K_1 (x) ... (x) K_d) W' + D``, as GPyTorch's likelihoods build it.

    Solves use dense Cholesky or conjugate gradients (``settings.gap_method``: "auto", "ignore" or "cholesky"). The
    preconditioner is ``W Q_p T_p Q_p' W' + D``, with the leading eigenvectors of the grid. Their number p is chosen to
    minimise the expected cost, or set by ``settings.preconditioner_rank``. The noise may be any diagonal.

    :param linear_ops: an :class:`InterpolatedKroneckerOperator` with the same rows and columns, and a diagonal
        operator.
    :param preconditioner_override: a function of the operator that returns (P^-1, P, log|P|) for linear_operator.
    :raises ValueError: if an operator has another class, or another dtype or device than the other one.

    >>> import torch
    >>> from gpytorch_gaps.operators import GridInterpolation
    >>> axis = torch.linspace(0, 1, 8, dtype=torch.float64)
    >>> rows = GridInterpolation.cubic([axis], torch.rand(5, 1, dtype=torch.float64))
    >>> kernel = InterpolatedKroneckerOperator(torch.exp(-(axis[:, None] - axis).abs()), rows=rows)
    >>> noisy, data = kernel.add_diagonal(0.5), torch.ones(5, dtype=torch.float64)
    >>> type(noisy).__name__, torch.allclose(noisy @ noisy.solve(data), data)
    ('InterpolatedKroneckerAddedDiagOperator', True)
    """

    def __init__(self, *linear_ops: LinearOperator, preconditioner_override: Callable | None = None) -> None:
        kinds = [
            isinstance(op, InterpolatedKroneckerOperator) - isinstance(op, DiagLinearOperator) for op in linear_ops
        ]
        if sorted(kinds) != [-1, 1]:
            came = ", ".join(type(op).__name__ for op in linear_ops)
            raise ValueError(
                f"InterpolatedKroneckerAddedDiagOperator: linear_ops: got {came}, expected an "
                "InterpolatedKroneckerOperator and a diagonal operator; kernel.add_diagonal(noise) makes one"
            )
        super().__init__(*linear_ops, preconditioner_override=preconditioner_override)

    def _sum_batch(self, dim: int) -> LinearOperator:
        return SumLinearOperator(*(op._sum_batch(dim) for op in self.linear_ops))

    def term_factors(self) -> list[tuple[Tensor, ...]]:
        return [self._linear_op.factors]

    def system(self) -> InterpolatedSystem:
        kernel, noise = self._linear_op, self.noise_tensor()
        return kernel.cache.cached(
            "system",
            (*kernel.factors, kernel.rows.first, kernel.rows.weights, noise),
            lambda: InterpolatedSystem(
                [KroneckerTerm(kernel.factors, kernel.shared_eigen())], kernel.rows, noise, dtype=self.dtype
            ),
        )


register_sum("interpolated diagonal", InterpolatedKroneckerAddedDiagOperator)
