"""``W K W' + D``: the covariance of the observations, which owns its solves and its log-determinant."""

import math
from collections.abc import Callable
from typing import Any

import linear_operator
import torch
from linear_operator import to_dense
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
from gpytorch_gaps.functions.rayleigh import frozen_eigenvalues
from gpytorch_gaps.functions.solve import OwnInvQuad, OwnSolve
from gpytorch_gaps.logdet.choose import choose_logdet
from gpytorch_gaps.logdet.stochastic import log_quadrature, standard_error
from gpytorch_gaps.operators._base import as_diagonal, same_cells
from gpytorch_gaps.operators._logdet import logdet_by, whitened_logdet
from gpytorch_gaps.operators._low_rank import low_rank_operator
from gpytorch_gaps.operators._solve import krylov_solve, solve_in_force
from gpytorch_gaps.operators.selected_kronecker import SelectedKroneckerOperator
from gpytorch_gaps.operators.selected_kronecker_diag import SelectedKroneckerDiagOperator
from gpytorch_gaps.reports import LogdetReport, report_logdet, report_solve
from gpytorch_gaps.solvers.choose import best_rank
from gpytorch_gaps.solvers.solve import ADVICE
from gpytorch_gaps.solvers.system import GapSystem


class SelectedKroneckerAddedDiagOperator(AddedDiagLinearOperator):
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
        if isinstance(noise, SelectedKroneckerDiagOperator) and not same_cells(noise.index, kernel.row_index):
            raise ValueError("index: the noise is on other cells than the kernel; expected the same")

    # -- staying what it is ------------------------------------------------------------------------------------------

    def __add__(self, other: Any) -> LinearOperator | Tensor:
        if isinstance(other, DiagLinearOperator):
            return type(self)(self._linear_op, self._diag_tensor + other)
        return AddedDiagLinearOperator(self._linear_op + other, self._diag_tensor)

    def add_diagonal(self, diag: float | Tensor) -> LinearOperator:
        return self + as_diagonal(self, diag)

    def _mul_constant(self, other: float | Tensor) -> LinearOperator:
        diag = self._diag_tensor
        if isinstance(diag, ConstantDiagLinearOperator):
            scale = other.unsqueeze(-1) if torch.is_tensor(other) else other
            scaled = ConstantDiagLinearOperator(diag.diag_values * scale, diag_shape=diag.diag_shape)
        else:
            scaled = diag._mul_constant(other)
        return type(self)(self._linear_op._mul_constant(other), scaled)

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
            return self._linear_op.memo.get(
                "product", tensors, lambda: GapSystem(self.factors, index, axis_noise=diag.axis_noise)
            )
        noise = self._noise_tensor()
        return self._linear_op.memo.get(
            "system", (*self.factors, index, noise), lambda: GapSystem(self.factors, index, noise)
        )

    def _noise_tensor(self) -> Tensor:
        """shape: (*batch, 1) or (*batch, N)"""
        diag = self._diag_tensor
        return diag.diag_values if isinstance(diag, ConstantDiagLinearOperator) else diag._diag

    def _solve(self, rhs: Tensor, preconditioner: Any = None, num_tridiag: int = 0, training: bool = False) -> Any:
        system = self._system()
        if not num_tridiag:
            return solve_in_force(system, rhs, training=training)
        # upstream's log-determinant asks for solves and Lanczos matrices at once, which is ignore-gaps
        result = krylov_solve(self._wide_matmul(), rhs, preconditioner, num_tridiag, self.batch_shape, training=True)
        assert result.lanczos is not None
        system.probe_estimates, system.probe_iterations = (
            log_quadrature(result.lanczos, self.size(-1)),
            result.iterations,
        )
        flops = result.iterations * result.residual.numel() * system.product_flops
        rank = getattr(getattr(preconditioner, "__self__", None), "rank", 0)
        reason = f"with {num_tridiag} probes for the log-determinant"
        report_solve(result.report("ignore", rank, flops, reason), ADVICE["ignore"])
        return result.solution, result.lanczos.to(result.solution.dtype)

    def _wide_matmul(self) -> Callable[[Tensor], Tensor]:
        """The product in float64."""
        kernel, diagonal = self._linear_op._wide(), self._diag_tensor._diag.detach().double().unsqueeze(-1)
        return lambda x: kernel._matmul(x) + diagonal * x

    def _solve_preconditioner(self) -> None:
        """The method in force sets up its own."""
        return

    def solve(self, right_tensor: Tensor, left_tensor: Tensor | None = None) -> Tensor:
        columns = self._columns("solve: right_tensor", right_tensor)
        if columns.dim() > 2 and not self.batch_shape:
            # a batch of right-hand sides for one matrix is a matrix with more of them
            flat = columns.movedim(-2, 0).flatten(1)
            solution = self.solve(flat).unflatten(1, (*columns.shape[:-2], columns.size(-1))).movedim(0, -2)
            return solution if left_tensor is None else left_tensor @ solution
        operator, columns = self._same_batch(columns)
        solution = OwnSolve.apply(operator.representation_tree(), columns, *operator.representation())
        solution = solution.squeeze(-1) if right_tensor.dim() == 1 else solution
        return solution if left_tensor is None else left_tensor @ solution

    def inv_quad(self, inv_quad_rhs: Tensor, reduce_inv_quad: bool = True) -> Tensor:
        operator, columns = self._same_batch(self._columns("inv_quad: inv_quad_rhs", inv_quad_rhs))
        terms = OwnInvQuad.apply(operator.representation_tree(), columns, *operator.representation())
        return terms.sum(-1) if reduce_inv_quad else terms

    def _columns(self, name: str, rhs: Tensor) -> Tensor:
        """Right-hand sides as columns, checked. shape: (N,) or (*batch, N, C) -> (*batch, N, C)"""
        rhs = to_dense(rhs)
        columns = rhs.unsqueeze(-1) if rhs.dim() == 1 else rhs
        if columns.size(-2) != self.size(-1):
            raise ValueError(f"{name}: got shape {tuple(rhs.shape)}, expected {self.size(-1)} rows")
        return columns

    def _same_batch(self, columns: Tensor) -> tuple[Any, Tensor]:
        batch = torch.broadcast_shapes(self.batch_shape, columns.shape[:-2])
        operator = self if batch == self.batch_shape else self.expand(*batch, *self.matrix_shape)
        return operator, columns.expand(*batch, *columns.shape[-2:])

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

    # -- log-determinant ---------------------------------------------------------------------------------------------

    def inv_quad_logdet(
        self, inv_quad_rhs: Tensor | None = None, logdet: bool | None = False, reduce_inv_quad: bool | None = True
    ) -> tuple[Tensor, Tensor]:
        zero = torch.zeros([], dtype=self.dtype, device=self.device)
        if not logdet:
            if inv_quad_rhs is None:
                raise RuntimeError("inv_quad_logdet: got neither inv_quad_rhs nor logdet=True, expected at least one")
            return self.inv_quad(inv_quad_rhs, bool(reduce_inv_quad)), zero
        together = inv_quad_rhs is not None and inv_quad_rhs.shape[:-2] == self.batch_shape
        if together and self._logdet_path() == ("stochastic", "data"):
            # one run of conjugate gradients serves probes and right-hand sides
            quad, value, report = self._upstream_inv_quad_logdet(inv_quad_rhs, bool(reduce_inv_quad))
        else:
            quad = zero if inv_quad_rhs is None else self.inv_quad(inv_quad_rhs, bool(reduce_inv_quad))
            value, report = self._own_logdet()
        report_logdet(report)
        return quad, value

    def _logdet_path(self) -> tuple[str, str]:
        """The method, and the side of the block identity it works on; ("product", "") is whitened first."""
        if isinstance(self._diag_tensor, SelectedKroneckerDiagOperator):
            return "product", ""
        dense = linear_operator.settings.fast_computations.log_prob.off()
        return choose_logdet(
            self._system(),
            settings.logdet_method.value(),
            rank=settings.preconditioner_rank.value(),
            num_probes=linear_operator.settings.num_trace_samples.value(),
            tolerance=settings.tolerance_in_force(training=True),
            max_iterations=settings.max_iterations.value(),
            max_cholesky=math.inf if dense else linear_operator.settings.max_cholesky_size.value(),
        )

    def _own_logdet(self) -> tuple[Tensor, LogdetReport]:
        """``log|W K W' + D|``, differentiable, and how it was found."""
        path = self._logdet_path()
        if path == ("stochastic", "data"):
            _, value, report = self._upstream_inv_quad_logdet(None, True)
            return value, report
        if path == ("product", ""):
            return whitened_logdet(self)
        return logdet_by(self, *path)

    def _upstream_inv_quad_logdet(
        self, rhs: Tensor | None, reduce_inv_quad: bool
    ) -> tuple[Tensor, Tensor, LogdetReport]:
        """GPyTorch's own estimator, with our preconditioner for its variance and our solves."""
        # autograd Functions rebuild the operator fully expanded: the system they solve must be the one we ask below
        operator = self._expand_batch(self.batch_shape) if self.batch_shape else self
        with linear_operator.settings.max_cholesky_size(0), linear_operator.settings.fast_computations(log_prob=True):
            quad, value = AddedDiagLinearOperator.inv_quad_logdet(operator, rhs, True, reduce_inv_quad)
        estimates = operator._system().probe_estimates
        assert estimates is not None  # set by _solve, which the estimator above called
        error = standard_error(estimates)
        probes, iterations = estimates.size(0), operator._system().probe_iterations
        return quad, value, LogdetReport("stochastic", value.detach(), error, probes, iterations, "data side")
