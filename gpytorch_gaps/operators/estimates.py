"""``y' A^-1 y`` and ``log|A|`` of a covariance A of noisy observations, with their gradients.

With ``a = A^-1 y``, probes z of covariance P, ``u = A^-1 z`` and ``w = P^-1 z``,

    y' A^-1 y  =  2 a'y - a'A a                          gradient: 2 a for y, that of -a'A a for A
    log|A|     =  log|P| + log|P^-1 A|                   gradient: that of log|P| - mean w'P w + mean u'A w

The quadratic form is stationary in a, so its error is quadratic in the error of a. ``log|P|`` is exact. Only the small
rest is estimated: its value by Lanczos, its gradient by probes with w'P w as a control variate. The neighbours
preconditioner has ``d log|P| = tr(P^-1 dA)``, so that the control variate is w'A w: the gradient is that of
``tr(P^-1 A) + mean (u - w)'A w``, with P^-1, u and w as constants. One run of conjugate gradients solves for the data
and the probes.
"""

from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from gpytorch_gaps.autograd.dense import factored_logdet
from gpytorch_gaps.autograd.first_order import refuse_second_order
from gpytorch_gaps.distributed.columns import Share, sum_over_ranks
from gpytorch_gaps.linalg.factors import Factor
from gpytorch_gaps.operators.traces import trace_gradient
from gpytorch_gaps.preconditioners.neighbours import NeighbourPreconditioner
from gpytorch_gaps.reports import LogdetReport, report_solve, warn_not_converged
from gpytorch_gaps.solvers.config import SolveConfig
from gpytorch_gaps.solvers.gap_system import GapSystem
from gpytorch_gaps.solvers.logdet.stochastic import draw_probes, log_quadrature, standard_error
from gpytorch_gaps.solvers.logdet.whole_grid import (
    estimated_gap_side_logdet,
    gap_side_logdet,
    grid_logdet,
    nystrom_logdet,
)
from gpytorch_gaps.solvers.matrix_system import MatrixSystem
from gpytorch_gaps.solvers.planning.logdet import LogdetPlan, data_preconditioner
from gpytorch_gaps.solvers.preconditioning import Choice, Eigen, eigenvalues_kept
from gpytorch_gaps.solvers.preconditioning import preconditioner as make_preconditioner
from gpytorch_gaps.solvers.solve import ADVICE, advice_for, solve_system, solve_with_lanczos
from gpytorch_gaps.solvers.system import NoisySystem
from gpytorch_gaps.utils.precision import float64_entries, full_float32


class Covariance(Protocol):
    """The interface of a covariance A of noisy observations for likelihood terms. ``NoisyGridOperator`` has it."""

    shape: torch.Size
    batch_shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    def size(self, dim: int) -> int: ...

    def representation(self) -> tuple[Tensor, ...]: ...

    def representation_tree(self) -> Any: ...

    def system(self) -> NoisySystem:
        """The detached system, with everything that has been computed for it."""

    def whitened(self) -> "tuple[Covariance, Tensor] | None":
        """For noise that is a product over axes: the covariance with unit noise, and ``D^(1/2)``, shape (*batch, N)."""

    def kernel_matrix(self) -> Tensor:
        """The kernel without noise, dense. shape: (*batch, N, N)"""

    def term_factors(self) -> list[tuple[Factor, ...]]:
        """The factors of every Kronecker term."""

    def noise_tensor(self) -> Tensor:
        """shape: (*batch, 1) or (*batch, N)"""

    def unstructured_root(self) -> Tensor | None:
        """R, with ``R R'`` a low-rank approximation of the other terms. shape: (*batch, N, r)"""


class LikelihoodTerms(Function):
    """The quadratic form and the log-determinant, from given solutions."""

    @staticmethod
    def forward(
        ctx: Any,
        representation_tree: Any,
        traced: NeighbourPreconditioner | None,
        rhs: Tensor,
        solution: Tensor,
        quad: Tensor,
        left: Tensor,
        right: Tensor,
        logdet: Tensor,
        *matrix_args: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The values are given; the gradients follow from the solutions.

        :param traced: P, if the gradient of the log-determinant is that of ``tr(P^-1 A) + sum left'A right``; None if
            it is that of ``sum left'A right``.
        :param rhs: y, shape (*batch, N, C).
        :param solution: a, shape (*batch, N, C).
        :param left: u / k, shape (*batch, N, k).
        :param right: w, shape (*batch, N, k).
        :return: `quad`, shape (*batch, C), and `logdet`, shape batch.
        """
        ctx.representation_tree, ctx.traced = representation_tree, traced
        ctx.save_for_backward(solution, left, right, *matrix_args)
        return quad.clone(), logdet.clone()

    @staticmethod
    @full_float32()
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order()
        solution, left, right, *matrix_args = ctx.saved_tensors
        weighted = solution * grad_outputs[0].unsqueeze(-2)
        arg_grads: tuple[Tensor | None, ...] = (None,) * len(matrix_args)
        if any(ctx.needs_input_grad[8:]):
            # each column is contiguous in memory
            lefts = torch.cat([-weighted.mT, left.mT * grad_outputs[1][..., None, None]], -2).mT
            rights = torch.cat([solution.mT, right.mT], -2).mT
            arg_grads = ctx.representation_tree(*matrix_args)._bilinear_derivative(lefts, rights)
            if ctx.traced is not None:
                traces = trace_gradient(ctx.representation_tree, matrix_args, ctx.traced, grad_outputs[1])
                arg_grads = tuple(map(_added, arg_grads, traces))
        return None, None, 2.0 * weighted, None, None, None, None, None, *arg_grads


def _added(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """The sum of two gradients, each of which may be missing."""
    return second if first is None else first if second is None else first + second


def apply_terms(
    operator: Covariance,
    rhs: Tensor,
    solution: Tensor,
    quad: Tensor,
    left: Tensor,
    right: Tensor,
    logdet: Tensor,
    traced: NeighbourPreconditioner | None = None,
) -> tuple[Tensor, Tensor]:
    """Applies :class:`LikelihoodTerms` to an operator, in its precision."""
    numbers = [tensor.to(operator.dtype) for tensor in (rhs, solution, quad, left, right, logdet)]
    return LikelihoodTerms.apply(operator.representation_tree(), traced, *numbers, *operator.representation())


def quadratic_form(operator: Covariance, rhs: Tensor, config: SolveConfig) -> Tensor:
    """``rhs' A^-1 rhs`` per column, by the configured method. Differentiable. shape: (*batch, C)"""
    if not rhs.size(-1):
        return rhs.sum(-2)
    solved = solve_system(operator.system(), rhs.detach(), config.for_training())
    nothing = rhs[..., :0]
    quad = stationary_form(solved.solution, rhs, solved.residual)
    zero = torch.zeros(operator.batch_shape, dtype=operator.dtype, device=operator.device)
    return apply_terms(operator, rhs, solved.solution, quad, nothing, nothing, zero)[0]


def stationary_form(solution: Tensor, rhs: Tensor, residual: Tensor) -> Tensor:
    """``2 a'y - a'A a = a'(y + r)``. Its error is quadratic in that of a. shape: (*batch, C)"""
    return (solution.double() * (rhs.detach().double() + residual)).sum(-2)


def no_quadratic_form(operator: Covariance, rhs: Tensor) -> Tensor:
    """Zero, in the autograd graph of the data. For processes that have no data columns. shape: (*batch, C)"""
    nothing = torch.zeros(*operator.batch_shape, rhs.size(-1), dtype=operator.dtype, device=operator.device)
    return nothing + 0.0 * rhs.sum() if rhs.requires_grad else nothing


# -- log-determinants ------------------------------------------------------------------------------------------------


@full_float32()
def log_determinant(operator: Covariance, chosen: LogdetPlan, config: SolveConfig) -> tuple[Tensor, LogdetReport]:
    """``log|A|`` by a given plan. Differentiable. shape: batch"""
    whitened = operator.whitened()
    if whitened is not None:
        # log|A| = log|D^(-1/2) A D^(-1/2)| + log|D| for noise that is a product over axes
        white, root = whitened
        value, report = log_determinant(white, chosen, config)
        value = value + 2.0 * root.log().sum(-1)
        return value, replace(report, value=value.detach())
    if chosen == LogdetPlan("stochastic", "data"):
        nothing = torch.zeros(*operator.shape[:-1], 0, dtype=operator.dtype, device=operator.device)
        _, value, report = estimated_together(operator, nothing, config)
        return value, report
    system = operator.system()
    if chosen.side == "gaps" or chosen.method == "nystrom":
        assert isinstance(system, GapSystem)
        return _with_the_grid(operator, system, chosen, config)
    with float64_entries():
        kernel = operator.kernel_matrix().double()
    value = factored_logdet(system.cholesky(), kernel, operator.noise_tensor().double()).to(operator.dtype)
    return value, LogdetReport("exact", value.detach(), torch.zeros((), device=operator.device), 0, 0, "data side")


def _with_the_grid(
    operator: Covariance, system: GapSystem, chosen: LogdetPlan, config: SolveConfig
) -> tuple[Tensor, LogdetReport]:
    """Log-determinants that use the eigenvalues of the whole grid."""
    factors, noise = operator.term_factors()[0], operator.noise_tensor()
    error: Tensor | None = torch.zeros((), device=operator.device)
    probes = iterations = 0
    if chosen.method == "nystrom":
        value, error = nystrom_logdet(system, factors, noise), None
    elif chosen.method == "exact":
        value = gap_side_logdet(system, factors, noise)
    else:
        value, error, probes, iterations = _estimated_on_gaps(operator, system, config)
    value = value.to(operator.dtype)
    return value, LogdetReport(chosen.method, value.detach(), error, probes, iterations, f"{chosen.side} side")


def estimated_together(operator: Covariance, rhs: Tensor, config: SolveConfig) -> tuple[Tensor, Tensor, LogdetReport]:
    """Solves for data and probes in one run of conjugate gradients. All processes have probes; one has the data."""
    system, share = operator.system(), Share(config.communicator, config.num_probes)
    choice = data_preconditioner(system, config)
    preconditioner = None if choice is None else make_preconditioner(system, choice)
    system.last_preconditioner = preconditioner
    traced = preconditioner if isinstance(preconditioner, NeighbourPreconditioner) else None
    own_rhs = rhs if share.has_data else rhs[..., :0]
    probes = draw_probes(
        preconditioner, operator.size(-1), operator.batch_shape, share.num_probes, rhs, config.repeat_probes
    )[..., share.probes]
    count, quad, value, estimates, iterations = share.count, no_quadratic_form(operator, rhs), None, None, 0
    if count:
        columns = torch.cat([probes.mT, own_rhs.detach().mT], -2).mT  # each column is contiguous in memory
        solved = solve_with_lanczos(system, columns, preconditioner, config.for_training())
        reason = f"with {count} probes for the log-determinant"
        report_solve(replace(solved.report, reason=reason), advice_for(system, "ignore"))
        assert solved.lanczos is not None
        # the matrix preconditioned by neighbours has ones on its diagonal
        lanczos, centred = solved.lanczos[..., :count, :, :], traced is not None
        estimates = log_quadrature(lanczos, operator.size(-1), centred).movedim(-1, 0)
        iterations = solved.report.iterations
        partners = probes if preconditioner is None else preconditioner.solve(probes)
        exact = _preconditioner_terms(operator, choice, partners)
        differences = solved.solution[..., :count] if traced is None else solved.solution[..., :count] - partners
        own_quad, value = apply_terms(
            operator,
            own_rhs,
            solved.solution[..., count:],
            stationary_form(solved.solution[..., count:], own_rhs, solved.residual[..., count:]),
            differences / count,
            partners,
            estimates.mean(0),
            traced,
        )
        value = value + exact
        quad = own_quad if share.has_data else quad
    elif share.has_data:
        quad = quadratic_form(operator, rhs, config)
    value = torch.zeros(operator.batch_shape, dtype=operator.dtype, device=operator.device) if value is None else value
    if share.ranks.size > 1:
        value = sum_over_ranks(share.ranks, share.weight * value, operator.representation())
        quad = sum_over_ranks(share.ranks, quad, operator.representation())
    every = share.of(estimates)
    report = LogdetReport("stochastic", value.detach(), standard_error(every), every.size(0), iterations, "data side")
    return quad, value, report


def _preconditioner_terms(operator: Covariance, choice: Choice | None, partners: Tensor) -> Tensor | float:
    """``log|P|``. With eigenvectors, its gradient is that of ``log|P| - mean w'P w``. shape: batch"""
    if choice is None:
        return 0.0
    system = operator.system()
    preconditioner = make_preconditioner(system, choice)
    differentiable = torch.is_grad_enabled() and operator.requires_grad
    if not (isinstance(choice, Eigen) and differentiable):
        return preconditioner.logdet().to(operator.dtype)  # no second Gram matrix
    coefficients = eigenvalues_kept(system, choice.ranks, operator.term_factors())
    diagonal, root = operator.noise_tensor().double(), operator.unstructured_root()
    wide_root = None if root is None else root.double()
    control = preconditioner.quadratic(partners, coefficients, diagonal, wide_root).mean(-1)
    logdet = preconditioner.logdet(coefficients, diagonal, wide_root)
    return (logdet - (control - control.detach())).to(operator.dtype)


def _estimated_on_gaps(operator: Covariance, system: GapSystem, config: SolveConfig) -> tuple[Tensor, Tensor, int, int]:
    """``log|A| + log|V A^-1 V'|``, the second term by Lanczos on the L x L matrix.

    :return: value, standard error, number of probes, number of iterations.
    """
    factors, noise = operator.term_factors()[0], operator.noise_tensor()
    value = grid_logdet(system, factors, noise)
    if not len(system.gap_index):
        return value, torch.zeros((), device=operator.device), 0, 0
    share, estimates, iterations = Share(config.communicator, config.num_probes), None, 0
    size, own = len(system.gap_index), torch.zeros_like(value)
    probes = draw_probes(None, size, operator.batch_shape, share.num_probes, system.noise, config.repeat_probes)
    probes = probes[..., share.probes]
    if share.count:
        matrix = MatrixSystem(system.gap_matmul, size, operator.device, 2.0 * system.rotation_flops)
        solved = solve_with_lanczos(matrix, probes, None, config.for_training())
        warn_not_converged(solved.report, ADVICE["fill"])
        assert solved.lanczos is not None
        estimates = log_quadrature(solved.lanczos, size).movedim(-1, 0)
        iterations = solved.report.iterations
        left = solved.solution / share.count
        own = estimated_gap_side_logdet(system, estimates.mean(0), left, probes, factors, noise)
    if share.ranks.size > 1:
        own = sum_over_ranks(share.ranks, share.weight * own, operator.representation())
    every = share.of(estimates)
    return value + own, standard_error(every), every.size(0), iterations
