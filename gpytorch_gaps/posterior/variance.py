"""The variances of a posterior by the configured method, with a report of their error.

exact       ``k - g'A^-1 g``, with one solve per point; without solves if K has low rank to the tolerance
low rank    ``k - h'P^-1 h``, with approximations of A and g in the p leading eigenvectors: ``P = F C F' + D``, and h.
            Costs p^2 per point.
pathwise    from draws, with a regression on the nearest observations as a control variate: see
            :mod:`gpytorch_gaps.posterior.drawn_variance`
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from linear_operator import to_dense
from torch import Tensor

from gpytorch_gaps.linalg.selection import unravel
from gpytorch_gaps.operators.interpolated_kronecker import InterpolatedKroneckerOperator
from gpytorch_gaps.operators.khatri_rao import KhatriRaoOperator
from gpytorch_gaps.operators.noisy import low_rank_of
from gpytorch_gaps.operators.selected_kronecker import SelectedKroneckerOperator
from gpytorch_gaps.posterior.drawn_variance import ASKED_FOR, drawn_variance
from gpytorch_gaps.posterior.parts import ROUNDINGS, PosteriorParts, chunks
from gpytorch_gaps.preconditioners.interpolated import InterpolatedPreconditioner
from gpytorch_gaps.preconditioners.low_rank import LowRankPreconditioner
from gpytorch_gaps.reports import SolveReport, VarianceReport, one_report, report_solve, report_variance
from gpytorch_gaps.solvers.planning.variance import low_rank_form, too_expensive
from gpytorch_gaps.solvers.solve import ADVICE
from gpytorch_gaps.utils.precision import float64_entries
from gpytorch_gaps.utils.tensors import same_values

_EXTENSION_TOLERANCE = 1e-3  # factor of the truncation tolerance, if eigenvectors are extended off the grid
_EXTENSION_CHECKS = 8  # number of points at which an extension is checked
_MOST_ROUNDING = 0.1  # fraction of a variance; if rounding is larger, solves are used, which are more accurate
_LOW_RANK_CHECKS = 20  # number of exact variances; their worst error is not exceeded at 95 % of the points


def posterior_variance(parts: PosteriorParts, made: list[Tensor] | None = None) -> Tensor:
    """The variances of a posterior by ``config.variance_method``, with a report. shape: (*batch, Q)

    :param made: receives the draws minus the mean, for every piece of the points, if variances come from draws.
    """
    if not parts.num_points:
        return parts.prior_variance()
    started = time.perf_counter()
    variance, report = _concatenated([_variance(piece, made) for piece in parts.pieces()])
    variance = variance.to(parts.dtype)
    error = report.error.to(parts.dtype) + torch.finfo(parts.dtype).eps * variance.detach().abs()
    report_variance(replace(report, error=error, seconds=time.perf_counter() - started))
    return variance


def _concatenated(found: Sequence[tuple[Tensor, VarianceReport]]) -> tuple[Tensor, VarianceReport]:
    """The variances of all pieces, and one report."""
    variances, reports = zip(*found, strict=True)
    return torch.cat(variances, -1), replace(reports[0], error=torch.cat([report.error for report in reports], -1))


def _variance(parts: PosteriorParts, made: list[Tensor] | None) -> tuple[Tensor, VarianceReport]:
    """The variances in float64, and a report that does not have its time yet."""
    method, reason = parts.config.variance_method, ASKED_FOR
    if method == "low_rank":
        return _low_rank(parts)
    if method != "pathwise":
        closed = closed_form(parts)
        if closed is not None:
            variance, error, rank = closed
            return variance, VarianceReport("exact", error, 0.0, rank=rank, reason="without solves")
        cost = why_not_exact(parts, parts.num_points) if method == "auto" else None
        if cost is None:
            return _by_solves(parts)
        reason = cost
    return _concatenated([drawn_variance(piece, reason, made) for piece in parts.pieces(for_draws=True)])


def _by_solves(parts: PosteriorParts) -> tuple[Tensor, VarianceReport]:
    """``k - g'A^-1 g`` by a solve for every point."""
    prior, size, found = parts.prior_variance(), parts.columns_at_once(), []
    bound = torch.zeros_like(prior.detach())
    variance = prior if parts.differentiated else prior.clone()
    with one_report():
        for rows in chunks(parts.num_points, size, "exact variances"):
            explained, bound[..., rows] = parts.explained_variance(rows, prior)
            if parts.differentiated:
                found.append(explained)
            else:  # in place: separate small results would keep the memory of large columns from being freed
                variance[..., rows] -= explained
    variance = variance - torch.cat(found, -1) if found else variance
    bound = parts.config.tolerance * variance.detach().abs() + bound
    reason = f"{parts.num_points} solves, in {math.ceil(parts.num_points / size)} chunks"
    return variance, VarianceReport("exact", bound, 0.0, reason=reason)


def why_not_exact(parts: PosteriorParts, columns: int) -> str | None:
    """The reason not to solve for `columns` columns unless asked to; None if the solves are affordable."""
    train = parts.grid_train
    return None if train is None else too_expensive(train.system(), columns, parts.config)


# -- low rank --------------------------------------------------------------------------------------------------------


def closed_form(parts: PosteriorParts) -> tuple[Tensor, Tensor, int] | None:
    """The variances in float64, bounds on their errors, and the rank; None if solves are needed.

    With ``K = Φ C Φ' + E`` and ``|E| <= e s2``, the error of a variance on the grid is at most about e times the prior
    variance. Off the grid, the basis is extended, with a smaller e. The extension is checked at the points where it
    explains the smallest part of the prior variance.
    """
    train = parts.grid_train
    if train is None or parts.differentiated or train.batch_shape:
        return None
    started = time.perf_counter()
    extended = parts.cells is None and not isinstance(parts.cross, InterpolatedKroneckerOperator)
    level, tolerance = _EXTENSION_TOLERANCE if extended else 1.0, parts.config.tolerance
    found = low_rank_form(train.system(), parts.num_points, parts.config, level)
    basis = None if found is None else _basis(parts, found[0], tolerance)
    if found is None or basis is None:
        return None
    form, error = found
    variance, prior, left_out = _variances_by(parts, form, basis)
    off = error * prior + _rounding(prior, form.condition * variance)
    if bool((off > _MOST_ROUNDING * variance).any()):
        return None
    if extended:
        if _error_of_extension(parts, form, variance, left_out) > 0.2 * tolerance:
            return None
        off = off + tolerance * variance
    report = SolveReport(
        method="ignore",
        iterations=0,
        residual=torch.tensor([error]),
        seconds=time.perf_counter() - started,
        rank=form.rank,
        num_rhs=parts.num_points,
        converged=error <= tolerance,
        tolerance=tolerance,
        flops=form.setup_flops + parts.num_points * float(form.rank) ** 2,
        reason=f"variances without solves: rank {form.rank} leaves eigenvalues of {error:.1e} times the noise",
    )
    report_solve(report, ADVICE["ignore"])
    return variance, off, form.rank


def _rounding(prior: Tensor, amplified: Tensor) -> Tensor:
    """Bound on the rounding of a difference of numbers as large as the prior variance, and of the factorisation."""
    return ROUNDINGS * torch.finfo(torch.float64).eps * (prior + amplified)


def _error_of_extension(
    parts: PosteriorParts, form: LowRankPreconditioner, variance: Tensor, left_out: Tensor
) -> float:
    """The relative error of variances at the points whose prior variance is least explained by the basis.

    It is computed from the covariances g: for ``a = P^-1 g`` close to ``A^-1 g``, ``2 a'g - a'Aa`` has an error of
    second order.
    """
    worst = left_out.abs().topk(min(_EXTENSION_CHECKS, parts.num_points)).indices
    few = parts.at(worst)
    with float64_entries():
        columns = to_dense(few.cross).mT.double()
    weights = form.solve(columns)
    exact = few.prior_variance() - (weights * (2.0 * columns - parts.train.wide_matmul(weights))).sum(-2)
    floor = torch.finfo(torch.float64).eps * few.prior_variance()
    return float(((variance[..., worst] - exact).abs() / exact.maximum(floor)).max())


def _low_rank(parts: PosteriorParts) -> tuple[Tensor, VarianceReport]:
    """The variances by the leading eigenvectors only. Their error comes from exact variances at some points."""
    if parts.differentiated:
        raise ValueError("variance_method: got 'low_rank' with gradients enabled, expected torch.no_grad() or 'exact'")
    train = parts.grid_train
    form = None if train is None else train.low_rank_approximation(low_rank_of(parts.config))
    basis = None if form is None or form.root is not None else _basis(parts, form)
    if form is None or basis is None:
        raise ValueError(
            "variance_method: got 'low_rank' for a kernel or points without eigenvectors; expected a Kronecker product "
            "or, on the training grid, a sum of them. Try: 'exact' or 'pathwise', which work for all kernels"
        )
    prior = parts.prior_variance()
    variance = _variances_by(parts, form, basis)[0].clamp_min(0.0)
    picked = torch.randperm(parts.num_points, generator=torch.Generator().manual_seed(0))[:_LOW_RANK_CHECKS]
    some = picked.sort().values.to(prior.device)
    few = parts.at(some)
    exact = few.prior_variance() - few.explained_variance(slice(None), few.prior_variance())[0]
    worst = (variance[..., some] - exact).abs().amax(-1, keepdim=True)
    error = worst.expand(variance.shape)
    reason = f"error estimated from {len(some)} exact ones"
    return variance, VarianceReport("low_rank", error, 0.0, rank=form.rank, reason=reason)


def _variances_by(
    parts: PosteriorParts, form: LowRankPreconditioner, basis: Callable[[slice], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Posterior and prior variances in float64, and the part of the prior variance outside the basis.

    The data do not change that part. shape: (*batch, Q) each
    """
    numbers = 4 * form.rank * parts.train.batch_shape.numel()
    size = int(max(1, parts.config.memory // (8 * numbers)))
    found = [form.variances(basis(rows)) for rows in chunks(parts.num_points, size, "variances by eigenvectors")]
    variance, known = (torch.cat(some, -1) for some in zip(*found, strict=True))
    prior = parts.prior_variance()
    return variance + (prior - known), prior, prior - known


def _basis(
    parts: PosteriorParts, form: LowRankPreconditioner, tolerance: float | None = None
) -> Callable[[slice], Tensor] | None:
    """Φ at a slice of the points: eigenvectors at cells of the training grid, their extension at other points.

    The extension of an eigenvector q of K_i to a point is ``k_i(x, axis_i) q / t``. Rounding of the numerator changes
    a variance by up to ``eps sqrt(M) |K|``. None if that exceeds the tolerance, and for a sum at points off the grid.
    """
    cells = parts.cells
    if cells is not None:
        return lambda rows: form.basis_at(cells[rows])
    cross, kernel = parts.cross, parts.train._linear_op
    if isinstance(form, InterpolatedPreconditioner):  # its eigenvectors are interpolated at any point
        known = isinstance(cross, InterpolatedKroneckerOperator)
        return (lambda rows: form.basis_of(cross.rows.at(rows))) if known else None
    structured = isinstance(cross, SelectedKroneckerOperator | KhatriRaoOperator)
    if not structured or not isinstance(kernel, SelectedKroneckerOperator):
        return None
    eigen = kernel.shared_eigen().get("eigen")
    alike = cross.col_shape == kernel.row_shape and same_values(cross.col_index, kernel.row_index)
    if eigen is None or not alike or getattr(cross, "transposed", False):
        return None
    largest = math.prod(float(values.amax()) for values in eigen.values)
    rounding = 5.0 * torch.finfo(torch.float64).eps * math.sqrt(eigen.num_cells) * largest
    if tolerance is not None and rounding > tolerance * float(form.diagonal.min()):
        return None
    used = [values[..., columns] for values, columns in zip(eigen.values, form.columns, strict=True)]
    sides = zip(cross.factors, form.vectors, strict=True)
    # eigenvectors with eigenvalue zero are not extended
    scales = [torch.where(values > 0, 1.0 / values, 0.0).unsqueeze(-2) for values in used]
    tables = [factor.double() @ vectors * scale for (factor, vectors), scale in zip(sides, scales, strict=True)]
    if isinstance(cross, KhatriRaoOperator):
        return lambda rows: form.basis_from([table[..., rows, :] for table in tables])
    where = unravel(cross.row_index, cross.row_shape)
    return lambda rows: form.basis_from([table[..., own[rows], :] for table, own in zip(tables, where, strict=True)])
