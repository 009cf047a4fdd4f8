"""``W K W' + D``: the covariance of the observations, which owns its solves and its log-determinant."""

from collections.abc import Callable

import torch
from linear_operator.operators import (
    ConstantDiagLinearOperator,
    DiagLinearOperator,
    LinearOperator,
    SumLinearOperator,
)
from torch import Tensor

from gpytorch_gaps.linalg.eigen import kron_eigh
from gpytorch_gaps.linalg.factors import Factor, all_dense
from gpytorch_gaps.linalg.selection import product_at, unravel
from gpytorch_gaps.operators.base import check_factors, check_index
from gpytorch_gaps.operators.fill_gaps import as_noise
from gpytorch_gaps.operators.noisy import NoisyGridOperator
from gpytorch_gaps.operators.selected_kronecker import SelectedKroneckerOperator
from gpytorch_gaps.operators.selected_kronecker_diag import SelectedKroneckerDiagOperator
from gpytorch_gaps.operators.sums import register_sum
from gpytorch_gaps.preconditioners import EigenPreconditioner
from gpytorch_gaps.preconditioners.low_rank import LowRankPreconditioner
from gpytorch_gaps.solvers.gap_system import GapSystem, whiten
from gpytorch_gaps.solvers.preconditioning import low_rank_approximation
from gpytorch_gaps.utils.tensors import same_values


class SelectedKroneckerAddedDiagOperator(NoisyGridOperator):
    """``W (K_1 (x) ... (x) K_d) W' + D``, as GPyTorch's likelihoods build it.

    It owns its solve (``settings.gap_method``), preconditioner and log-determinant (``settings.logdet_method``).
    The noise may be constant, a product over axes, or any diagonal. Fill-gaps needs one of the first two.

    :param linear_ops: a :class:`SelectedKroneckerOperator` with the same rows and columns, and a diagonal operator.
    :param preconditioner_override: a function of the operator that returns (P^-1, P, log|P|) for linear_operator.
    :raises ValueError: if an operator has another class, or cells, dtype or device differ between them.

    >>> factor = torch.tensor([[1.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
    >>> kernel = SelectedKroneckerOperator(factor, factor, row_index=torch.tensor([0, 3]))
    >>> noisy = kernel.add_diagonal(0.5)
    >>> data = torch.ones(2, dtype=torch.float64)
    >>> type(noisy).__name__, torch.allclose(noisy @ noisy.solve(data), data)
    ('SelectedKroneckerAddedDiagOperator', True)
    """

    def __init__(self, *linear_ops: LinearOperator, preconditioner_override: Callable | None = None) -> None:
        kinds = [isinstance(op, SelectedKroneckerOperator) - isinstance(op, DiagLinearOperator) for op in linear_ops]
        if sorted(kinds) != [-1, 1]:
            came = ", ".join(type(op).__name__ for op in linear_ops)
            raise ValueError(
                f"SelectedKroneckerAddedDiagOperator: linear_ops: got {came}, expected a SelectedKroneckerOperator and "
                "a diagonal operator; kernel.add_diagonal(noise) makes one"
            )
        super().__init__(*linear_ops, preconditioner_override=preconditioner_override)
        kernel, noise = self._linear_op, self._diag_tensor
        if self._whitens and noise.shape_of_grid != kernel.row_shape:
            raise ValueError(f"axis_noise: got axes of {noise.shape_of_grid} levels, expected {kernel.row_shape}")
        if isinstance(noise, SelectedKroneckerDiagOperator) and not same_values(noise.index, kernel.row_index):
            raise ValueError("index: the cells of the noise differ from those of the kernel; expected the same")

    def _sum_batch(self, dim: int) -> LinearOperator:
        return SumLinearOperator(*(op._sum_batch(dim) for op in self.linear_ops))

    @property
    def factors(self) -> tuple[Factor, ...]:
        return self._linear_op.factors

    @property
    def _whitens(self) -> bool:
        """Whether the factors are divided by noise that is a product over axes. They must be matrices."""
        return isinstance(self._diag_tensor, SelectedKroneckerDiagOperator) and all_dense(self.factors)

    @property
    def train_index(self) -> Tensor:
        return self._linear_op.row_index

    def term_factors(self) -> list[tuple[Factor, ...]]:
        return [self.factors]

    def system(self) -> GapSystem:
        index, diag, kernel = self.train_index, self._diag_tensor, self._linear_op
        if self._whitens:
            return kernel.cache.cached(
                "system with axis noise",
                (*self.factors, index, *diag.axis_noise),
                lambda: GapSystem(self.factors, index, axis_noise=diag.axis_noise, dtype=self.dtype),
            )
        noise = self.noise_tensor()
        return kernel.cache.cached(
            "system",
            (*kernel.leaves, index, *diag.representation()),
            lambda: GapSystem(self.factors, index, noise, shared=kernel.shared_eigen(), dtype=self.dtype),
        )

    def whitened(self) -> "tuple[SelectedKroneckerAddedDiagOperator, Tensor] | None":
        diag = self._diag_tensor
        if not self._whitens:
            return None
        roots = [axis.sqrt() for axis in diag.axis_noise]
        kernel = self._linear_op.with_factors([whiten(f, root) for f, root in zip(self.factors, roots, strict=True)])
        unit = torch.ones(*self.batch_shape, 1, dtype=self.dtype, device=self.device)
        white = type(self)(kernel, ConstantDiagLinearOperator(unit, diag_shape=self.size(-1)))
        # use the system of this operator: nothing is decomposed or factorised twice
        system = self.system()
        kernel.cache.cached("eigen of", kernel.factors, lambda: system.term.shared)
        kernel.cache.cached(
            "system", (*kernel.leaves, self.train_index, *white._diag_tensor.representation()), system.in_own_units
        )
        return white, product_at(roots, unravel(self.train_index, kernel.row_shape))

    def low_rank_approximation(self, rank: int) -> LowRankPreconditioner | None:
        system = self.system()
        if not system.has_eigenvectors:
            return None
        rank = min(rank, system.num_cells)
        if system.row_scale is None:
            return low_rank_approximation(system, (rank,))
        # the system has the eigenvectors of the whitened kernel; variances need those of K
        shared = self._linear_op.shared_eigen()
        if "eigen" not in shared:
            shared["eigen"] = kron_eigh(self.factors)
        return EigenPreconditioner(shared["eigen"], self.train_index, self._diag_tensor._diagonal(), rank)


register_sum("diagonal", SelectedKroneckerAddedDiagOperator)


def PenalizedGapsOperator(  # a class to its users
    *factors: Tensor, noise: float | Tensor, gap_index: Tensor, penalty: float
) -> SelectedKroneckerAddedDiagOperator:
    """``K + gamma R + s2 I`` on the whole grid, with ``R_ZZ = I`` on the gaps and zero elsewhere.

    The penalty formulation of Evans & Nair (2018), which they use as a baseline. They print ``R_XX = I``, but the
    penalty applies to the gaps.

    :param factors: K_i, shape (*batch, m_i, m_i) each.
    :param noise: s2, a float or a tensor of shape (), (1,) or (*batch, 1).
    :param gap_index: flat cells of the gaps, last axis fastest, shape (L,).
    :param penalty: gamma.
    :return: an operator of size M: a Kronecker product plus a diagonal.
    :raises ValueError: if the factors, the noise, the cells or the penalty are not valid.

    >>> PenalizedGapsOperator(torch.eye(2), noise=0.5, gap_index=torch.tensor([1]), penalty=100.0).to_dense()
    tensor([[  1.5000,   0.0000],
            [  0.0000, 101.5000]])
    """
    name = "PenalizedGapsOperator"
    check_factors(name, factors, square=True)
    shape = tuple(factor.size(-1) for factor in factors)
    check_index(name, "gap_index", gap_index, shape, factors[0].device)
    if not isinstance(penalty, (int, float)) or not penalty > 0:
        raise ValueError(f"{name}: penalty: got {penalty}, expected a number above 0")
    kernel = SelectedKroneckerOperator(*factors)
    gaps = torch.zeros(kernel.size(-1), dtype=factors[0].dtype, device=factors[0].device)
    diagonal = gaps.index_fill(0, gap_index, penalty) + as_noise(name, noise, factors)
    return SelectedKroneckerAddedDiagOperator(kernel, DiagLinearOperator(diagonal.expand(kernel.shape[:-1])))
