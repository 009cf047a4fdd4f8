"""The base class of covariances of noisy observations: their solves and log-determinants, with reports."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

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
from gpytorch_gaps.linalg.factors import Factor
from gpytorch_gaps.operators.estimates import quadratic_form
from gpytorch_gaps.operators.implicit_solve import ImplicitSolve
from gpytorch_gaps.operators.likelihood import likelihood_terms
from gpytorch_gaps.operators.low_rank import low_rank_operator
from gpytorch_gaps.operators.sums import as_diagonal
from gpytorch_gaps.operators.upstream import solve_for_upstream, upstream_result
from gpytorch_gaps.preconditioners.low_rank import LowRankPreconditioner
from gpytorch_gaps.reports import report_logdet, report_solve
from gpytorch_gaps.solvers.config import SolveConfig
from gpytorch_gaps.solvers.matrix_system import MatrixSystem
from gpytorch_gaps.solvers.planning.costs import best_rank
from gpytorch_gaps.solvers.planning.logdet import data_preconditioner
from gpytorch_gaps.solvers.preconditioning import (
    Eigen,
    eigen_preconditioner,
    eigenvalues_kept,
    low_rank_approximation,
)
from gpytorch_gaps.solvers.solve import Solved, advice_for, solve_system
from gpytorch_gaps.solvers.system import NoisySystem
from gpytorch_gaps.utils.threads import Work, sized

_DEFAULT_LOW_RANK = 1000  # rank of low-rank variances


class NoisyGridOperator(AddedDiagLinearOperator):
    """``K + D``. A subclass defines the structure of K. Solves and log-determinants are implemented here.

    All of them start from :meth:`system`. Settings are read here, once, and passed on as a ``SolveConfig``.
    """

    def __init__(self, *linear_ops: LinearOperator, preconditioner_override: Callable | None = None) -> None:
        super().__init__(*linear_ops, preconditioner_override=preconditioner_override)
        kernel, noise = self._linear_op, self._diag_tensor
        if noise.dtype != kernel.dtype or noise.device != kernel.device:
            raise ValueError(
                f"{type(self).__name__}: the diagonal is {noise.dtype} on {noise.device}, "
                f"the kernel {kernel.dtype} on {kernel.device}; expected the same"
            )

    # -- what a subclass defines ---------------------------------------------------------------------------------------

    @abstractmethod
    def system(self) -> NoisySystem:
        """The detached system in float64, with everything that has been computed for it."""

    @abstractmethod
    def term_factors(self) -> list[tuple[Factor, ...]]:
        """The factors of every Kronecker term."""

    def unstructured_root(self) -> Tensor | None:
        """R, with ``R R'`` a low-rank approximation of the other terms. shape: (*batch, N, r)"""
        return None

    def whitened(self) -> "tuple[NoisyGridOperator, Tensor] | None":
        """For noise that is a product over axes: the covariance with unit noise, and ``D^(1/2)``, shape (*batch, N)."""
        return None

    def low_rank_approximation(self, rank: int) -> LowRankPreconditioner | None:
        """``P = F C F' + D`` of about that rank, in the eigenvectors of K. None if there is no such P."""
        if not self.system().has_eigenvectors:
            return None
        chosen = best_rank(self.system(), 1, 1e-6, rank)
        return low_rank_approximation(self.system(), chosen.ranks) if chosen.rank else None

    def kernel_matrix(self) -> Tensor:
        """The kernel without noise, dense. shape: (*batch, N, N)"""
        return to_dense(self._linear_op)

    def noise_tensor(self) -> Tensor:
        """shape: (*batch, 1) or (*batch, N)"""
        diag = self._diag_tensor
        return diag.diag_values if isinstance(diag, ConstantDiagLinearOperator) else diag._diagonal()

    # -- operations that keep the structure ----------------------------------------------------------------------------

    def add_diagonal(self, diag: float | Tensor) -> LinearOperator:
        return self + as_diagonal(self, diag)

    def __add__(self, other: Any) -> LinearOperator | Tensor:
        """Adds to K, so that the noise stays the outermost term and the result has our solves."""
        if isinstance(other, DiagLinearOperator):
            return type(self)(self._linear_op, self._diag_tensor + other)
        if isinstance(other, AddedDiagLinearOperator):
            return self._linear_op + other._linear_op + (self._diag_tensor + other._diag_tensor)
        return self._linear_op + other + self._diag_tensor

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        parts = [op._getitem(row_index, col_index, *batch_indices) for op in self.linear_ops]
        if _is_noop_index(row_index) and _is_noop_index(col_index):
            return parts[0] + parts[1]
        return SumLinearOperator(*parts)

    def evaluate_kernel(self) -> "NoisyGridOperator":
        """Returns itself: its kernel has been evaluated."""
        return self

    def _bilinear_derivative(self, left_vecs: Tensor, right_vecs: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(part for op in self.linear_ops for part in op._bilinear_derivative(left_vecs, right_vecs))

    def _mul_constant(self, other: float | Tensor) -> LinearOperator:
        diag = self._diag_tensor
        if isinstance(diag, ConstantDiagLinearOperator):
            scale = other.unsqueeze(-1) if torch.is_tensor(other) else other
            scaled = ConstantDiagLinearOperator(diag.diag_values * scale, diag_shape=diag.diag_shape)
        else:
            scaled = diag._mul_constant(other)
        return type(self)(self._linear_op._mul_constant(other), scaled)

    # -- solving -----------------------------------------------------------------------------------------------------

    def _work(self, rhs: Tensor | None, *_: Any, more: int = 0, **__: Any) -> Work:
        """The work of one product. It has the columns of rhs, and `more` columns."""
        columns = more + (0 if rhs is None else rhs.numel() // max(1, self.size(-1)))
        return columns * self.system().product_flops, columns * self.size(-1)

    @sized(_work)
    def solve_columns(
        self,
        rhs: Tensor,
        config: SolveConfig | None = None,
        *,
        guess: Tensor | None = None,
        of_data: bool = False,
        prior: Tensor | None = None,
    ) -> Solved:
        """Solves without a graph: see :func:`~gpytorch_gaps.solvers.solve.solve_system`. shape: (*batch, N, C)

        :param config: default: the current settings.
        """
        config = config or settings.current()
        batch = torch.broadcast_shapes(self.batch_shape, rhs.shape[:-2])
        wide = rhs.detach().expand(*batch, *rhs.shape[-2:])
        return solve_system(self.system(), wide, config, guess=guess, of_data=of_data, prior=prior)

    @sized(_work)
    def wide_matmul(self, x: Tensor) -> Tensor:
        """The product in float64, without a graph. shape: (*batch, N, C)"""
        return self.system().original_matmul(x)

    def solve(
        self,
        right_tensor: Tensor,
        left_tensor: Tensor | None = None,
        guess: Tensor | None = None,
        of_data: bool = False,
        config: SolveConfig | None = None,
    ) -> Tensor:
        """``left (K + D)^-1 right``.

        :param guess: starting values for ``(K + D)^-1 right``, in the shape of right. Good ones save iterations.
        :param of_data: whether `right` are data. The error of their posterior mean is then certified to be at most
            ``settings.mean_tolerance``.
        :param config: default: the current settings.
        """
        columns, config = self._columns("solve: right_tensor", right_tensor), config or settings.current()
        if guess is not None:
            guess = (guess.unsqueeze(-1) if guess.dim() == 1 else guess).detach().expand(columns.shape)
        if columns.dim() > 2 and not self.batch_shape:
            # batches of right-hand sides for one matrix become further columns
            flat = columns.movedim(-2, 0).flatten(1)
            guess = None if guess is None else guess.movedim(-2, 0).flatten(1)
            solution = self.solve(flat, guess=guess, of_data=of_data, config=config)
            solution = solution.unflatten(1, (*columns.shape[:-2], columns.size(-1))).movedim(0, -2)
            return solution if left_tensor is None else left_tensor @ solution
        operator, columns = self._same_batch(columns)
        guess = None if guess is None else guess.expand(columns.shape)
        tree, tensors = operator.representation_tree(), operator.representation()
        solution = ImplicitSolve.apply(tree, columns, guess, of_data, config, *tensors)
        solution = solution.squeeze(-1) if right_tensor.dim() == 1 else solution
        return solution if left_tensor is None else left_tensor @ solution

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

    # -- the likelihood ----------------------------------------------------------------------------------------------

    def inv_quad(self, inv_quad_rhs: Tensor, reduce_inv_quad: bool = True) -> Tensor:
        operator, columns = self._same_batch(self._columns("inv_quad: inv_quad_rhs", inv_quad_rhs))
        terms = quadratic_form(operator, columns, settings.current())
        return terms.sum(-1) if reduce_inv_quad else terms

    def _work_with_probes(self, inv_quad_rhs: Tensor | None = None, *_: Any, **__: Any) -> Work:
        return self._work(inv_quad_rhs, more=settings.current().num_probes)

    @sized(_work_with_probes)
    def inv_quad_logdet(
        self, inv_quad_rhs: Tensor | None = None, logdet: bool | None = False, reduce_inv_quad: bool | None = True
    ) -> tuple[Tensor, Tensor]:
        if not logdet:
            if inv_quad_rhs is None:
                raise RuntimeError("inv_quad_logdet: got neither inv_quad_rhs nor logdet=True, expected at least one")
            zero = torch.zeros([], dtype=self.dtype, device=self.device)
            return self.inv_quad(inv_quad_rhs, bool(reduce_inv_quad)), zero
        nothing = torch.zeros(*self.shape[:-1], 0, dtype=self.dtype, device=self.device)
        rhs = nothing if inv_quad_rhs is None else self._columns("inv_quad_logdet: inv_quad_rhs", inv_quad_rhs)
        together = rhs.shape[:-2] == self.batch_shape
        # autograd Functions rebuild the operator with the whole batch shape on every tensor
        operator: NoisyGridOperator = self._expand_batch(self.batch_shape) if self.batch_shape else self
        quad, value, report = likelihood_terms(operator, rhs if together else nothing, settings.current())
        report_logdet(report)
        if inv_quad_rhs is None:
            return torch.zeros([], dtype=self.dtype, device=self.device), value
        quad = quad if together else self.inv_quad(rhs, reduce_inv_quad=False)
        return quad.sum(-1) if reduce_inv_quad else quad, value

    # -- what linear_operator asks for -------------------------------------------------------------------------------

    def _solve_preconditioner(self) -> None:
        """None: the chosen method sets up its own preconditioner."""
        return

    @sized(_work)
    def _solve(self, rhs: Tensor, preconditioner: Any = None, num_tridiag: int = 0) -> Any:
        if not num_tridiag:
            return self.solve_columns(rhs).solution
        own = system = self.system()
        if own.row_scale is not None:  # linear_operator expects the matrix that is not whitened
            system = MatrixSystem(own.original_matmul, self.size(-1), self.device, own.product_flops)
        solved = solve_for_upstream(system, rhs, preconditioner, num_tridiag)
        report_solve(solved.report, advice_for(own, "ignore"))
        return upstream_result(solved, num_tridiag)

    def _preconditioner(self) -> tuple[Callable | None, LinearOperator | None, Tensor | None]:
        """``P = Σ_t W Q_t T_t,p Q_t' W' + R R' + D`` as (P^-1, P, log|P|).

        The eigenvectors are frozen and T_p are Rayleigh quotients: P is differentiable, its basis is not.
        """
        if self.preconditioner_override is not None:
            return self.preconditioner_override(self)
        system, root, config = self.system(), self.unstructured_root(), settings.current()
        # linear_operator differentiates P itself; a sparse factor has no such gradient
        config = config.replace(preconditioner="eigen") if "eigen" in config.preconditioners else config
        choice = None if self.whitened() is not None else data_preconditioner(system, config)
        if not isinstance(choice, Eigen):
            return None, None, None
        preconditioner = eigen_preconditioner(system, choice.ranks)
        coefficients = eigenvalues_kept(system, choice.ranks, self.term_factors())
        operator = low_rank_operator(preconditioner, coefficients, self._diag_tensor, self.dtype, root)
        wide_root = None if root is None else root.double()
        logdet = preconditioner.logdet(coefficients, self.noise_tensor().double(), wide_root)
        return preconditioner.solve, operator, logdet.to(self.dtype)

    def sqrt_inv_matmul(self, rhs: Tensor, lhs: Tensor | None = None) -> Any:
        """``(K + D)^-1/2 rhs`` by linear_operator, without a preconditioner: with one, the root would be rotated."""
        plain = type(self)(*self.linear_ops, preconditioner_override=_no_preconditioner)
        return AddedDiagLinearOperator.sqrt_inv_matmul(plain, rhs, lhs)


def _no_preconditioner(_: LinearOperator) -> tuple[None, None, None]:
    return None, None, None


def low_rank_of(config: SolveConfig) -> int:
    """The rank of low-rank variances: ``settings.preconditioner_rank``, or a default."""
    if config.rank == 0:
        raise ValueError("preconditioner_rank: got 0 with variance_method 'low_rank', expected a rank above 0")
    return _DEFAULT_LOW_RANK if config.rank is None else config.rank
