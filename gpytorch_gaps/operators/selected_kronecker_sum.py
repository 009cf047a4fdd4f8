"""``Σ_t W K_t W' + ...``: sums in which a Kronecker product meets others, and the same with noise."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import linear_operator
import torch
from linear_operator import to_dense
from linear_operator.operators import (
    AddedDiagLinearOperator,
    DiagLinearOperator,
    LinearOperator,
    RootLinearOperator,
    SumLinearOperator,
    ZeroLinearOperator,
)
from linear_operator.utils.getitem import _is_noop_index
from linear_operator.utils.memoize import cached
from torch import Tensor

from gpytorch_gaps import settings
from gpytorch_gaps.autograd.dense_logdet import dense_logdet
from gpytorch_gaps.operators._sum_solve import solve_sum
from gpytorch_gaps.operators.base import as_diagonal
from gpytorch_gaps.operators.low_rank import low_rank_operator
from gpytorch_gaps.operators.noisy import OwnAddedDiagOperator, asked_rank
from gpytorch_gaps.operators.selected_kronecker import SelectedKroneckerOperator
from gpytorch_gaps.preconditioners.low_rank import LowRankPreconditioner
from gpytorch_gaps.reports import LogdetReport, report_solve
from gpytorch_gaps.solvers.goal import largest
from gpytorch_gaps.solvers.kronecker_term import KroneckerTerm
from gpytorch_gaps.solvers.planning.plans import planned_columns
from gpytorch_gaps.solvers.solve import ADVICE
from gpytorch_gaps.solvers.sum_system import SumPlan, SumSystem
from gpytorch_gaps.utils.cache import TensorCache
from gpytorch_gaps.utils.precision import float64_entries, full_float32
from gpytorch_gaps.utils.tensors import same_values

_OTHER_RANK = 100  # how far a term without structure is followed by the preconditioner, by pivoted Cholesky


class SelectedKroneckerSumOperator(SumLinearOperator):
    """A sum of covariances of the same points: Kronecker products, low-rank ones, and others, which are dense.

    :param linear_ops: square, of the same size.
    :param cache: what solves with this operator remember.
    """

    def __init__(self, *linear_ops: LinearOperator, cache: TensorCache | None = None) -> None:
        flat = [part for op in linear_ops for part in (op.linear_ops if type(op) is SumLinearOperator else (op,))]
        self.cache = cache or TensorCache()
        super().__init__(*flat, cache=self.cache)

    def __add__(self, other: Any) -> LinearOperator | Tensor:
        if isinstance(other, ZeroLinearOperator):
            return self
        if isinstance(other, DiagLinearOperator):
            return SelectedKroneckerSumAddedDiagOperator(self, other)
        if isinstance(other, AddedDiagLinearOperator):
            return self + other._linear_op + other._diag_tensor
        parts = other.linear_ops if isinstance(other, SumLinearOperator) else (other,)
        return SelectedKroneckerSumOperator(*self.linear_ops, *parts)

    def add_diagonal(self, diag: float | Tensor) -> LinearOperator:
        return self + as_diagonal(self, diag)

    @full_float32()
    def _matmul(self, rhs: Tensor) -> Tensor:
        return super()._matmul(rhs)

    @full_float32()
    def _bilinear_derivative(self, left_vecs: Tensor, right_vecs: Tensor) -> tuple[Tensor | None, ...]:
        return super()._bilinear_derivative(left_vecs, right_vecs)

    @cached(name="kronecker_terms")
    def kronecker_terms(self) -> list[SelectedKroneckerOperator]:
        """The Kronecker products on the same grid as the first of them."""
        terms = [op for op in self.linear_ops if isinstance(op, SelectedKroneckerOperator)]
        return [
            op for op in terms if op.row_shape == terms[0].row_shape and same_values(op.row_index, terms[0].row_index)
        ]

    def root(self) -> Tensor | None:
        """Of the other terms: exact for low-rank ones, else of their pivoted Cholesky decomposition, as constants."""
        terms, roots = self.kronecker_terms(), []
        for number, op in enumerate(self.linear_ops):
            if isinstance(op, RootLinearOperator) and op.root.size(-1) <= _OTHER_RANK:
                roots.append(to_dense(op.root))
            elif not any(op is term for term in terms):
                roots.append(self._remembered_root(number, op))
        if not roots:
            return None
        return torch.cat([root.expand(*self.batch_shape, *root.shape[-2:]) for root in roots], -1)

    def _remembered_root(self, number: int, op: LinearOperator) -> Tensor:
        rank = min(_OTHER_RANK, op.size(-1))

        def compute() -> Tensor:
            # beyond the numerical rank of a smooth kernel the decomposition goes on with roots of negative numbers
            root = _as_float64(op).pivoted_cholesky(rank=rank, error_tol=1e-10).detach()
            return torch.where(root.isfinite().all(-2, keepdim=True), root, torch.zeros_like(root))

        return self.cache.cached(("root", number), op.representation(), compute).to(self.dtype)


class SelectedKroneckerSumAddedDiagOperator(OwnAddedDiagOperator):
    """A :class:`SelectedKroneckerSumOperator` plus noise: solved by dense Cholesky or preconditioned ignore-gaps.

    The preconditioner is ``Σ_t W Q_t T_t,p Q_t' W' + R R' + D``: the leading eigenpairs of every Kronecker term, and
    low-rank terms whole.
    """

    _advice = ADVICE | {"ignore": "a larger preconditioner_rank, gap_method('cholesky'), more max_iterations or noise"}

    def __init__(self, *linear_ops: LinearOperator, preconditioner_override: Callable | None = None) -> None:
        super().__init__(*linear_ops, preconditioner_override=preconditioner_override)
        kernel, noise = self._linear_op, self._diag_tensor
        if not isinstance(kernel, SelectedKroneckerSumOperator):
            raise ValueError(
                f"SelectedKroneckerSumAddedDiagOperator: got {type(kernel).__name__}, expected a "
                "SelectedKroneckerSumOperator and a diagonal operator"
            )
        if noise.dtype != kernel.dtype or noise.device != kernel.device:
            raise ValueError(
                f"SelectedKroneckerSumAddedDiagOperator: the diagonal is {noise.dtype} on {noise.device}, "
                f"the kernel {kernel.dtype} on {kernel.device}; expected the same"
            )

    def __add__(self, other: Any) -> LinearOperator | Tensor:
        if isinstance(other, DiagLinearOperator):
            return type(self)(self._linear_op, self._diag_tensor + other)
        if isinstance(other, AddedDiagLinearOperator):
            return type(self)(self._linear_op + other._linear_op, self._diag_tensor + other._diag_tensor)
        return type(self)(self._linear_op + other, self._diag_tensor)

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        parts = [op._getitem(row_index, col_index, *batch_indices) for op in self.linear_ops]
        if _is_noop_index(row_index) and _is_noop_index(col_index):
            return parts[0] + parts[1]
        return SumLinearOperator(*parts)

    # -- solving -----------------------------------------------------------------------------------------------------

    def _system(self) -> SumSystem:
        """The detached system, with what was worked out for it so far."""
        kernel: SelectedKroneckerSumOperator = self._linear_op
        return kernel.cache.cached(
            "system", (*kernel.representation(), *self._diag_tensor.representation()), self._build
        )

    def _build(self) -> SumSystem:
        kernel: SelectedKroneckerSumOperator = self._linear_op
        terms, root, rows = kernel.kronecker_terms(), kernel.root(), self.size(-1)
        others = [op for op in kernel.linear_ops if not any(op is term for term in terms)]
        narrow = [op.root.size(-1) if isinstance(op, RootLinearOperator) else rows / 2 for op in others]
        wide = [_as_float64(op) for op in others]
        index = terms[0].row_index if terms else torch.zeros(0, dtype=torch.long, device=self.device)
        return SumSystem(
            (lambda x: sum(op._matmul(x) for op in wide)) if wide else None,
            lambda: sum(_as_float64(op).to_dense() for op in (*kernel.linear_ops, self._diag_tensor)),
            [KroneckerTerm(op.factors, op.shared_eigen()) for op in terms],
            index,
            None if root is None else root.detach().double(),
            self._noise_diagonal(),
            other_flops=sum(4.0 * rows * width for width in narrow),
            other_trace=sum(op._diagonal().sum(-1) for op in wide) if wide else None,
            all_known=all(isinstance(op, RootLinearOperator) and op.root.size(-1) <= _OTHER_RANK for op in others),
        )

    def _noise_diagonal(self) -> Tensor:
        """shape: (*batch, N)"""
        return self._diag_tensor._diagonal()

    def _plan(self, num_rhs: int, training: bool) -> SumPlan:
        return self._plans(num_rhs, training)[0]

    def _plans(self, num_rhs: int, training: bool, start: float = 1.0) -> list[SumPlan]:
        return self._system().plans(
            settings.gap_method.value(),
            settings.preconditioner_rank.value(),
            num_rhs,
            settings.tolerance_in_force(training),
            settings.dense_size_in_force(),
            start,
        )

    @full_float32()
    def _solve_own(self, rhs: Tensor, training: bool, guess: Tensor | None = None, of_data: bool = False) -> Tensor:
        system, start = self._system(), 1.0
        error_in_std = settings.mean_tolerance_in_force() if of_data else None
        certified = error_in_std is None
        if guess is not None:
            left = rhs.double() - system.matmul(guess.double())
            start = float((left.norm(dim=-2) / rhs.double().norm(dim=-2)).nan_to_num(math.inf).max())
            guess, start = (guess, start) if start < 1.0 else (None, 1.0)
            certified = error_in_std is None or largest(system.noise_norms(left)) <= error_in_std
        if certified and start <= settings.tolerance_in_force(training):
            plans = [SumPlan("ignore", reason="the guess is a solution")]
        elif system.loan is not None:
            reason = f"a preconditioner set up for a matrix like it, from {start:.1e}"
            plans = [SumPlan("ignore", system.loan.rank, reason=reason)]
        else:
            plans = self._plans(planned_columns(rhs.shape[:-2].numel() * rhs.size(-1)), training, start)
            if start < 1.0 and plans[0].method == "ignore":
                plans[0] = replace(plans[0], reason=f"{plans[0].reason}, from {start:.1e}")
        narrow = settings.mixed_precision.value() or self.dtype == torch.float32
        inner = torch.float32 if narrow else torch.float64
        factor_flops = 0.0 if system.is_factorised else system.num_train**3 / 3.0
        best, plan = solve_sum(system, plans, rhs, self.batch_shape, training, guess, inner, error_in_std)
        flops = factor_flops if plan.method == "cholesky" else best.iterations * rhs.size(-1) * system.product_flops
        report_solve(best.report(plan.method, plan.rank, flops, plan.reason), self._advice[plan.method])
        return best.solution

    def _preconditioner(self) -> tuple[Callable | None, LinearOperator | None, Tensor | None]:
        if self.preconditioner_override is not None:
            return self.preconditioner_override(self)
        with settings.gap_method("ignore"):
            # probes and right-hand side are solved together
            plan = self._plan(linear_operator.settings.num_trace_samples.value() + 1, training=True)
        if not plan.rank:
            return None, None, None
        system, kernel = self._system(), self._linear_op
        preconditioner = system.preconditioner(plan.ranks)
        coefficients = system.coefficients(plan.ranks, [op.factors for op in kernel.kronecker_terms()])
        root = kernel.root()
        operator = low_rank_operator(preconditioner, coefficients, self._diag_tensor, self.dtype, root)
        wide_root = None if root is None else root.double()
        if torch.is_grad_enabled():
            logdet = preconditioner.logdet(coefficients, self._noise_diagonal().double(), wide_root)
        else:
            logdet = preconditioner.logdet()  # no second Gram matrix
        return preconditioner.solve, operator, logdet.to(self.dtype)

    def low_rank_form(self, num_rhs: int, level: float = 1.0) -> tuple[LowRankPreconditioner, float] | None:
        free = settings.gap_method.value() == "auto" and settings.preconditioner_rank.value() is None
        if free and self._system().dense_first(num_rhs, settings.dense_size_in_force()):
            return None
        tolerance = settings.tolerance_in_force()
        # variances may be as far below the noise as the noise is below the prior
        prior, noise = float(self._linear_op._diagonal().max()), float(self._noise_diagonal().min())
        found = self._system().low_rank_plan(level * tolerance * noise / max(noise, prior)) if free else None
        if found is None:
            return None
        plan, _ = found
        by_solves = self._system().choose("ignore", None, num_rhs, tolerance, 0).flops
        if plan.flops + num_rhs * float(plan.rank) ** 2 > by_solves:
            return None
        form = self._system().low_rank_approximation(plan.ranks)
        return (form, form.left_over) if form.left_over <= tolerance else None

    def low_rank_approximation(self) -> LowRankPreconditioner | None:
        system, tolerance = self._system(), settings.tolerance_in_force()
        plan = system.choose("ignore", asked_rank(), 1, tolerance, 0)
        return system.low_rank_approximation(plan.ranks) if plan.rank else None

    def solve_flops(self, num_rhs: int) -> float:
        plan = self._plan(num_rhs, training=False)
        return plan.flops + (2.0 * self.size(-1) ** 2 * num_rhs if plan.method == "cholesky" else 0.0)

    # -- log-determinant ---------------------------------------------------------------------------------------------

    def _logdet_path(self) -> tuple[str, str]:
        method = settings.logdet_method.value()
        if method == "nystrom":
            raise ValueError(
                "logdet_method: got 'nystrom' for a sum of kernels, expected 'auto', 'exact' or 'stochastic'"
            )
        if method == "auto":
            probes = linear_operator.settings.num_trace_samples.value()
            max_cholesky = settings.dense_size_in_force()
            tolerance, rank = settings.tolerance_in_force(training=True), settings.preconditioner_rank.value()
            plan = self._system().choose("auto", rank, probes + 1, tolerance, max_cholesky)
            method = "exact" if plan.method == "cholesky" else "stochastic"
        return method, "data"

    @full_float32()
    def _logdet_by(self, method: str, side: str) -> tuple[Tensor, LogdetReport]:
        with float64_entries():
            terms = [to_dense(op).double() for op in self._linear_op.linear_ops]
        matrix = torch.stack(terms).sum(0) + torch.diag_embed(self._noise_diagonal().double())
        value = dense_logdet(matrix, self._system().cholesky).to(self.dtype)
        return value, LogdetReport("exact", value.detach(), torch.zeros((), device=self.device), 0, 0, "data side")


def _as_float64(op: LinearOperator) -> LinearOperator:
    """In float64 and detached."""
    if isinstance(op, SelectedKroneckerOperator):
        return op._as_float64()
    tensors = (t.detach().double() if t.is_floating_point() else t for t in op.representation())
    return op.representation_tree()(*tensors)
