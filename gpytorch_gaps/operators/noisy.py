"""What our covariances of noisy observations share: they own their solves and log-determinants, with reports."""

from abc import abstractmethod
from typing import Any

import linear_operator
import torch
from linear_operator import to_dense
from linear_operator.operators import AddedDiagLinearOperator, ConstantDiagLinearOperator, LinearOperator
from torch import Tensor

from gpytorch_gaps import settings
from gpytorch_gaps.distributed.columns import Share, num_probes, own_probes, same_problem, sum_over_ranks
from gpytorch_gaps.operators._solve import krylov_solve
from gpytorch_gaps.operators._warm import warm_inv_quad_logdet
from gpytorch_gaps.operators.base import as_diagonal
from gpytorch_gaps.operators.implicit_solve import OwnInvQuad, OwnSolve
from gpytorch_gaps.preconditioners.low_rank import LowRankPreconditioner
from gpytorch_gaps.reports import LogdetReport, report_logdet, report_solve
from gpytorch_gaps.solvers.logdet.stochastic import estimating, log_quadrature, standard_error
from gpytorch_gaps.solvers.solve import ADVICE
from gpytorch_gaps.solvers.sum_system import SumSystem
from gpytorch_gaps.solvers.system import GapSystem
from gpytorch_gaps.utils.threads import Work, sized

_DEFAULT_RANK = 1000  # of low-rank variances


class OwnAddedDiagOperator(AddedDiagLinearOperator):
    """``K + D`` whose subclasses say how to solve with it, precondition it, and take its log-determinant."""

    _advice = ADVICE  # what to try where a method did not converge

    # -- what a subclass says ----------------------------------------------------------------------------------------

    @abstractmethod
    def _solve_own(self, rhs: Tensor, training: bool, guess: Tensor | None = None, of_data: bool = False) -> Tensor:
        """``(K + D)^-1 rhs`` by the current method, from a guess if there is one; reported. shape: (*batch, N, C)

        :param of_data: whether rhs are data, whose posterior mean must meet ``settings.mean_tolerance``.
        """

    @abstractmethod
    def _logdet_path(self) -> tuple[str, str]:
        """The method of the log-determinant in force, and the side of the block identity it works on."""

    @abstractmethod
    def _logdet_by(self, method: str, side: str) -> tuple[Tensor, LogdetReport]:
        """``log|K + D|`` by any method but the stochastic one on the data side. Differentiable."""

    @abstractmethod
    def _system(self) -> GapSystem | SumSystem:
        """The detached matrix in float64, with what was worked out for it so far."""

    def low_rank_form(self, num_rhs: int, level: float = 1.0) -> tuple[LowRankPreconditioner, float] | None:
        """A ``P = F C F' + D`` that is this matrix to `level` times the tolerance in force, and how far it is at most.

        None where there is none, or where `num_rhs` solves cost less.
        """
        return None

    def low_rank_approximation(self) -> LowRankPreconditioner | None:
        """``P = F C F' + D`` of the rank in force; None where there is none."""
        return None

    @abstractmethod
    def solve_flops(self, num_rhs: int) -> float:
        """What `num_rhs` solves by the method in force should cost."""

    def _work(self, rhs: Tensor | None, *_: Any, more: int = 0, **__: Any) -> Work:
        """The work of one product with as many columns as rhs has, and `more`."""
        columns = more + (0 if rhs is None else rhs.numel() // max(1, self.size(-1)))
        return columns * self._system().product_flops, columns * self.size(-1)

    @sized(_work)
    def wide_matmul(self, x: Tensor) -> Tensor:
        """The product in float64, detached, by way of narrow roots where these are known. shape: (*batch, N, C)"""
        system = self._system()
        scale = getattr(system, "row_scale", None)
        if scale is not None:  # whitened
            return scale * system.matmul(scale * x)
        return system.matmul(x)

    def _mul_constant(self, other: float | Tensor) -> LinearOperator:
        diag = self._diag_tensor
        if isinstance(diag, ConstantDiagLinearOperator):
            scale = other.unsqueeze(-1) if torch.is_tensor(other) else other
            scaled = ConstantDiagLinearOperator(diag.diag_values * scale, diag_shape=diag.diag_shape)
        else:
            scaled = diag._mul_constant(other)
        return type(self)(self._linear_op._mul_constant(other), scaled)

    # -- solving -----------------------------------------------------------------------------------------------------

    def add_diagonal(self, diag: float | Tensor) -> LinearOperator:
        return self + as_diagonal(self, diag)

    def _solve_preconditioner(self) -> None:
        """The method in force sets up its own."""
        return

    @sized(_work)
    def _solve(
        self,
        rhs: Tensor,
        preconditioner: Any = None,
        num_tridiag: int = 0,
        training: bool = False,
        guess: Tensor | None = None,
        of_data: bool = False,
    ) -> Any:
        if not num_tridiag:
            return self._solve_own(rhs, training, guess, of_data)
        # upstream's log-determinant asks for solves and Lanczos matrices at once, which is ignore-gaps
        system = self._system()
        inner = torch.float32 if settings.mixed_precision.value() else torch.float64
        result = krylov_solve(
            system.matmul, rhs, preconditioner, num_tridiag, self.batch_shape, training=True, inner=inner
        )
        assert result.lanczos is not None
        probes = system.probes
        probes.estimates, probes.iterations = log_quadrature(result.lanczos, self.size(-1)), result.iterations
        flops = result.iterations * result.residual.numel() * system.product_flops
        rank = getattr(getattr(preconditioner, "__self__", None), "rank", 0)
        reason = f"with {num_tridiag} probes for the log-determinant"
        report_solve(result.report("ignore", rank, flops, reason), self._advice["ignore"])
        return result.solution, result.lanczos.to(result.solution.dtype)

    def solve(
        self,
        right_tensor: Tensor,
        left_tensor: Tensor | None = None,
        guess: Tensor | None = None,
        of_data: bool = False,
    ) -> Tensor:
        """``left (K + D)^-1 right``.

        :param guess: of ``(K + D)^-1 right``, shaped like right: it may save iterations.
        :param of_data: whether `right` are data. The error of their posterior mean is then certified, and held to
            ``settings.mean_tolerance``.
        """
        columns = self._columns("solve: right_tensor", right_tensor)
        if guess is not None:
            guess = (guess.unsqueeze(-1) if guess.dim() == 1 else guess).detach().expand(columns.shape)
        if columns.dim() > 2 and not self.batch_shape:
            # a batch of right-hand sides for one matrix is a matrix with more of them
            flat = columns.movedim(-2, 0).flatten(1)
            guess = None if guess is None else guess.movedim(-2, 0).flatten(1)
            solution = (
                self.solve(flat, guess=guess, of_data=of_data)
                .unflatten(1, (*columns.shape[:-2], columns.size(-1)))
                .movedim(0, -2)
            )
            return solution if left_tensor is None else left_tensor @ solution
        operator, columns = self._same_batch(columns)
        guess = None if guess is None else guess.expand(columns.shape)
        solution = OwnSolve.apply(operator.representation_tree(), columns, guess, of_data, *operator.representation())
        solution = solution.squeeze(-1) if right_tensor.dim() == 1 else solution
        return solution if left_tensor is None else left_tensor @ solution

    def inv_quad(self, inv_quad_rhs: Tensor, reduce_inv_quad: bool = True) -> Tensor:
        operator, columns = self._same_batch(self._columns("inv_quad: inv_quad_rhs", inv_quad_rhs))
        terms = OwnInvQuad.apply(operator.representation_tree(), columns, *operator.representation())
        return terms.sum(-1) if reduce_inv_quad else terms

    def sqrt_inv_matmul(self, rhs: Tensor, lhs: Tensor | None = None) -> Any:
        """``(K + D)^-1/2 rhs``: upstream's, without a preconditioner, which would give a rotated root."""
        plain = type(self)(*self.linear_ops, preconditioner_override=_no_preconditioner)
        return AddedDiagLinearOperator.sqrt_inv_matmul(plain, rhs, lhs)

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

    # -- log-determinant ---------------------------------------------------------------------------------------------

    def _work_with_probes(self, inv_quad_rhs: Tensor | None = None, *_: Any, **__: Any) -> Work:
        return self._work(inv_quad_rhs, more=linear_operator.settings.num_trace_samples.value())

    @sized(_work_with_probes)
    def inv_quad_logdet(
        self, inv_quad_rhs: Tensor | None = None, logdet: bool | None = False, reduce_inv_quad: bool | None = True
    ) -> tuple[Tensor, Tensor]:
        zero = torch.zeros([], dtype=self.dtype, device=self.device)
        if not logdet:
            if inv_quad_rhs is None:
                raise RuntimeError("inv_quad_logdet: got neither inv_quad_rhs nor logdet=True, expected at least one")
            return self.inv_quad(inv_quad_rhs, bool(reduce_inv_quad)), zero
        together = inv_quad_rhs is not None and inv_quad_rhs.shape[:-2] == self.batch_shape
        path = self.agreed_path(inv_quad_rhs)
        memory = settings.warm_start.value()
        remembered = memory is not None and together and not self.batch_shape
        if remembered and self._is_estimate(path):
            assert inv_quad_rhs is not None
            quad, value = warm_inv_quad_logdet(self, memory, self._columns("inv_quad_rhs", inv_quad_rhs), path)
            return quad.sum(-1) if reduce_inv_quad else quad, value
        if together and path == ("stochastic", "data"):
            # one run of conjugate gradients serves probes and right-hand sides
            quad, value, report = self._upstream_inv_quad_logdet(inv_quad_rhs, bool(reduce_inv_quad))
        else:
            # what is shared is added up when each has done its part of both
            quad, shared = self._own_inv_quad(inv_quad_rhs, path)
            value, report = self._own_logdet(path)
            quad = sum_over_ranks(settings.group.value(), quad, self.representation()) if shared else quad
            quad = quad.sum(-1) if reduce_inv_quad and inv_quad_rhs is not None else quad
        report_logdet(report)
        return quad, value

    def agreed_path(self, rhs: Tensor | None = None) -> tuple[str, str]:
        """The first rank's :meth:`_logdet_path`, which rounding may change; refused where ranks have parted."""
        ranks, path = settings.group.value(), self._logdet_path()
        return path if ranks.size == 1 else same_problem(ranks, path, [rhs, *self.representation()])

    def _own_inv_quad(self, rhs: Tensor | None, path: tuple[str, str]) -> tuple[Tensor, bool]:
        """By the rank that has the data, where others have the probes of an estimate; whether it is to be added up."""
        if rhs is None:
            return torch.zeros([], dtype=self.dtype, device=self.device), False
        shared = settings.group.value().size > 1 and self._is_estimate(path)
        if shared and not Share(settings.group.value(), num_probes()).has_data:
            return self._no_quad(rhs), True
        return self.inv_quad(rhs, False), shared

    def _no_quad(self, rhs: Tensor) -> Tensor:
        """shape: (*batch, C)"""
        columns = 1 if rhs.dim() == 1 else rhs.size(-1)
        batch = torch.broadcast_shapes(self.batch_shape, rhs.shape[:-2])
        nothing = torch.zeros(*batch, columns, dtype=self.dtype, device=self.device)
        return nothing + 0.0 * rhs.sum() if rhs.requires_grad else nothing  # a function of the data, here too

    def _is_estimate(self, path: tuple[str, str]) -> bool:
        """Whether the log-determinant is found from probes."""
        return path[0] == "stochastic"

    def _own_logdet(self, path: tuple[str, str]) -> tuple[Tensor, LogdetReport]:
        """``log|K + D|``, differentiable, and how it was found."""
        if path == ("stochastic", "data"):
            _, value, report = self._upstream_inv_quad_logdet(None, True)
            return value, report
        return self._logdet_by(*path)

    def _upstream_inv_quad_logdet(
        self, rhs: Tensor | None, reduce_inv_quad: bool
    ) -> tuple[Tensor, Tensor, LogdetReport]:
        """GPyTorch's own estimator, with our preconditioner for its variance and our solves."""
        # autograd Functions rebuild the operator fully expanded: the probes they see must be those we ask for below
        operator: OwnAddedDiagOperator = self._expand_batch(self.batch_shape) if self.batch_shape else self
        share = Share(settings.group.value(), num_probes())
        with estimating():
            estimates: Tensor | None
            if share.draws:
                quad, value, estimates = operator._estimate_together(rhs, share)
                quad = quad.sum(-1) if reduce_inv_quad else quad
            else:
                quad, value = AddedDiagLinearOperator.inv_quad_logdet(operator, rhs, True, reduce_inv_quad)
                estimates = operator._system().probes.estimates
        assert estimates is not None  # set by _solve, which the estimator above called
        error, iterations = standard_error(estimates), operator._system().probes.iterations
        report = LogdetReport("stochastic", value.detach(), error, estimates.size(0), iterations, "data side")
        return quad, value, report

    def _estimate_together(self, rhs: Tensor | None, share: Share) -> tuple[Tensor, Tensor, Tensor]:
        """The same with probes that are drawn here, by several ranks perhaps; and what these probes estimated.

        One rank has the data, and all have some probes.
        """
        operator, estimates = self._with_probes_of(share), None
        own = rhs if share.has_data else None
        quad = torch.zeros([], dtype=self.dtype, device=self.device) if rhs is None else self._no_quad(rhs)
        value = torch.zeros(self.batch_shape, dtype=self.dtype, device=self.device)
        if share.count:
            found, value = AddedDiagLinearOperator.inv_quad_logdet(operator, own, True, False)
            estimates = operator._system().probes.estimates
            quad = quad if own is None else found
        elif own is not None:
            quad = self.inv_quad(own, False)
        total = sum_over_ranks(share.ranks, share.weight * value, self.representation())
        return sum_over_ranks(share.ranks, quad), total, share.of(estimates)

    def _with_probes_of(self, share: Share) -> "OwnAddedDiagOperator":
        """The same, preconditioned as it is, with some of the probes that it would draw."""
        made = self._preconditioner()
        operator = type(self)(*self.linear_ops, preconditioner_override=lambda _: made)
        operator._probes = own_probes(operator, made[1], share)
        return operator

    _probes: tuple[Tensor | None, Tensor | None] = (None, None)

    def _probe_vectors_and_norms(self) -> tuple[Tensor | None, Tensor | None]:
        return self._probes


def solve_data(train: LinearOperator, data: Tensor, guess: Tensor | None = None) -> Tensor:
    """``(K + D)^-1 y`` for data y; the error of its posterior mean is certified where the operator is ours."""
    if isinstance(train, OwnAddedDiagOperator):
        return train.solve(data, guess=guess, of_data=True)
    return train.solve(data)


def asked_rank() -> int:
    """Of low-rank variances: ``settings.preconditioner_rank``, or a default."""
    rank = settings.preconditioner_rank.value()
    if rank == 0:
        raise ValueError("preconditioner_rank: got 0 with variance_method 'low_rank', expected a rank above 0")
    return _DEFAULT_RANK if rank is None else rank


def _no_preconditioner(_: LinearOperator) -> tuple[None, None, None]:
    return None, None, None
