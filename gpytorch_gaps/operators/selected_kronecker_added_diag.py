"""``W K W' + D``: the covariance of the observations, which owns its solves and its log-determinant."""

import math
from collections.abc import Callable
from typing import Any

import linear_operator
from linear_operator.operators import (
    AddedDiagLinearOperator,
    ConstantDiagLinearOperator,
    DiagLinearOperator,
    LinearOperator,
    SumLinearOperator,
)
from linear_operator.utils.getitem import _is_noop_index
from torch import Tensor

from gpytorch_gaps import settings
from gpytorch_gaps.autograd.rayleigh import frozen_eigenvalues
from gpytorch_gaps.linalg.eigen import kron_eigh
from gpytorch_gaps.operators._logdet import logdet_by, whitened_logdet
from gpytorch_gaps.operators._solve import solve_in_force
from gpytorch_gaps.operators.low_rank import low_rank_operator
from gpytorch_gaps.operators.noisy import OwnAddedDiagOperator, asked_rank
from gpytorch_gaps.operators.selected_kronecker import SelectedKroneckerOperator
from gpytorch_gaps.operators.selected_kronecker_diag import SelectedKroneckerDiagOperator
from gpytorch_gaps.preconditioners import EigenPreconditioner
from gpytorch_gaps.preconditioners.low_rank import LowRankPreconditioner
from gpytorch_gaps.reports import LogdetReport
from gpytorch_gaps.solvers.planning.logdet import choose_logdet
from gpytorch_gaps.solvers.planning.plans import (
    best_rank,
    choose_plans,
    dense_first,
    fill_plan,
    filling_plan,
    low_rank_form_flops,
)
from gpytorch_gaps.solvers.system import GapSystem
from gpytorch_gaps.utils.tensors import same_values

_LOW_RANK_LIMIT = 4096  # a form of higher rank is left to solves


class SelectedKroneckerAddedDiagOperator(OwnAddedDiagOperator):
    """``W (K_1 (x) ... (x) K_d) W' + D``, as GPyTorch's likelihoods build it.

    Owns its solve (``settings.gap_method``), its preconditioner (eqn:IG_precon) and its log-determinant
    (``settings.logdet_method``). The noise may be constant, a product over axes, or any diagonal; the first two allow
    fill-gaps.

    :param linear_ops: a :class:`SelectedKroneckerOperator` with the same rows and columns, and a diagonal operator.
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
        if noise.dtype != kernel.dtype or noise.device != kernel.device:
            raise ValueError(
                f"SelectedKroneckerAddedDiagOperator: the diagonal is {noise.dtype} on {noise.device}, "
                f"the kernel {kernel.dtype} on {kernel.device}; expected the same"
            )
        if isinstance(noise, SelectedKroneckerDiagOperator) and noise.shape_of_grid != kernel.row_shape:
            raise ValueError(f"axis_noise: got axes of {noise.shape_of_grid} levels, expected {kernel.row_shape}")
        if isinstance(noise, SelectedKroneckerDiagOperator) and not same_values(noise.index, kernel.row_index):
            raise ValueError("index: the noise is on other cells than the kernel; expected the same")

    # -- staying what it is ------------------------------------------------------------------------------------------

    def __add__(self, other: Any) -> LinearOperator | Tensor:
        if isinstance(other, DiagLinearOperator):
            return type(self)(self._linear_op, self._diag_tensor + other)
        if isinstance(other, AddedDiagLinearOperator):
            return self._linear_op + other._linear_op + (self._diag_tensor + other._diag_tensor)
        return self._linear_op + other + self._diag_tensor

    def _sum_batch(self, dim: int) -> LinearOperator:
        return SumLinearOperator(*(op._sum_batch(dim) for op in self.linear_ops))

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        parts = [op._getitem(row_index, col_index, *batch_indices) for op in self.linear_ops]
        if _is_noop_index(row_index) and _is_noop_index(col_index):
            return type(self)(*parts)
        return SumLinearOperator(*parts)

    # -- solving -----------------------------------------------------------------------------------------------------

    @property
    def factors(self) -> tuple[Tensor, ...]:
        return self._linear_op.factors

    @property
    def train_index(self) -> Tensor:
        return self._linear_op.row_index

    def _system(self) -> GapSystem:
        """The detached system, with the eigen-decompositions and preconditioners worked out for it so far."""
        index, diag = self.train_index, self._diag_tensor
        if isinstance(diag, SelectedKroneckerDiagOperator):
            tensors = (*self.factors, index, *diag.axis_noise)
            return self._linear_op.cache.cached(
                "product",
                tensors,
                lambda: GapSystem(self.factors, index, axis_noise=diag.axis_noise, dtype=self.dtype),
            )
        noise = self._noise_tensor()
        return self._linear_op.cache.cached(
            "system",
            (*self.factors, index, noise),
            lambda: GapSystem(self.factors, index, noise, shared=self._linear_op.shared_eigen(), dtype=self.dtype),
        )

    def _noise_tensor(self) -> Tensor:
        """shape: (*batch, 1) or (*batch, N)"""
        diag = self._diag_tensor
        return diag.diag_values if isinstance(diag, ConstantDiagLinearOperator) else diag._diag

    def _solve_own(self, rhs: Tensor, training: bool, guess: Tensor | None = None, of_data: bool = False) -> Tensor:
        return solve_in_force(self._system(), rhs, training, guess, of_data)

    # -- preconditioner ----------------------------------------------------------------------------------------------

    def _preconditioner(self) -> tuple[Callable | None, LinearOperator | None, Tensor | None]:
        """``P = W Q S_p' T_p S_p Q' W' + D`` as (P^-1, P, log|P|). Implements: eqn:IG_precon.

        The eigenvectors are frozen and T_p are Rayleigh quotients: P is differentiable, its basis is not.
        """
        if self.preconditioner_override is not None:
            return self.preconditioner_override(self)
        if isinstance(self._diag_tensor, SelectedKroneckerDiagOperator):
            return None, None, None  # whitened first: see inv_quad_logdet
        system = self._system()
        rank = settings.preconditioner_rank.value()
        if rank is None:
            # probes and right-hand side are solved together
            columns = linear_operator.settings.num_trace_samples.value() + 1
            rank = best_rank(system, columns, settings.tolerance_in_force(training=True)).rank
        if not rank:
            return None, None, None
        preconditioner = system.eigen_preconditioner(min(rank, self.size(-1)))
        eigenvalues = frozen_eigenvalues(self.factors, preconditioner.vectors)
        coefficients = preconditioner.product_of(eigenvalues)
        operator = low_rank_operator(preconditioner, coefficients, self._diag_tensor, self.dtype)
        logdet = preconditioner.logdet(coefficients, self._noise_tensor().double())
        return preconditioner.solve, operator, logdet.to(self.dtype)

    def low_rank_form(self, num_rhs: int, level: float = 1.0) -> tuple[LowRankPreconditioner, float] | None:
        system = self._system()
        noise = float(system.noise.min())
        free = settings.gap_method.value() == "auto" and settings.preconditioner_rank.value() is None
        if not free or system.row_scale is not None or not noise > 0:
            return None
        if dense_first(system, num_rhs, settings.dense_size_in_force()):
            return None
        tolerance = settings.tolerance_in_force()
        limit = min(_LOW_RANK_LIMIT, system.num_train)
        # variances may be as far below the noise as the noise is below the prior
        prior = math.prod(float(factor.diagonal(dim1=-2, dim2=-1).amax()) for factor in system.factors())
        rank = system.rank_to(level * tolerance * noise * noise / max(noise, prior), limit)
        if not rank:
            return None
        solves = best_rank(system, num_rhs, tolerance).flops
        if low_rank_form_flops(system, rank, num_rhs) > solves:
            return None
        form = system.low_rank_approximation(rank)
        return form, max(form.left_over, system.eigenvalue_after(rank) / noise)

    def low_rank_approximation(self) -> LowRankPreconditioner | None:
        system = self._system()
        rank = min(asked_rank(), system.num_cells)
        if system.row_scale is None:
            return system.low_rank_approximation(rank)
        # whitened eigenvectors are not those of K, which variances are told by
        shared = self._linear_op.shared_eigen()
        if "eigen" not in shared:
            shared["eigen"] = kron_eigh(self.factors)
        return EigenPreconditioner(shared["eigen"], self.train_index, self._diag_tensor._diagonal(), rank)

    def solve_flops(self, num_rhs: int) -> float:
        system, method, tolerance = self._system(), settings.gap_method.value(), settings.tolerance_in_force()
        budget, size = settings.max_iterations.value(), settings.dense_size_in_force()
        if method == "fill":
            return fill_plan(system, num_rhs, tolerance, budget).flops
        if method == "spectral":
            return filling_plan(system, num_rhs, tolerance, budget).flops
        if method == "auto":
            plan = next(choose_plans(system, num_rhs, tolerance, budget, size))
            return plan.flops + (2.0 * system.num_train**2 * num_rhs if plan.direct == "data" else 0.0)
        if method == "cholesky":
            return system.num_train**3 / 3.0 + 2.0 * system.num_train**2 * num_rhs
        return best_rank(system, num_rhs, tolerance).flops

    # -- log-determinant ---------------------------------------------------------------------------------------------

    def _logdet_path(self) -> tuple[str, str]:
        """The method, and the side of the block identity it works on; ("product", "") is whitened first."""
        if isinstance(self._diag_tensor, SelectedKroneckerDiagOperator):
            return "product", ""
        return self._path_of_system()

    def _path_of_system(self) -> tuple[str, str]:
        """Of the system that is solved, which is whitened where the noise is a product over axes."""
        return choose_logdet(
            self._system(),
            settings.logdet_method.value(),
            rank=settings.preconditioner_rank.value(),
            num_probes=linear_operator.settings.num_trace_samples.value(),
            tolerance=settings.tolerance_in_force(training=True),
            max_iterations=settings.max_iterations.value(),
            max_cholesky=settings.dense_size_in_force(),
        )

    def _is_estimate(self, path: tuple[str, str]) -> bool:
        return super()._is_estimate(self._path_of_system() if path[0] == "product" else path)

    def _logdet_by(self, method: str, side: str) -> tuple[Tensor, LogdetReport]:
        return whitened_logdet(self) if method == "product" else logdet_by(self, method, side)
