"""The variances of a posterior by the current method, with a report of how far they may be off.

exact       ``k - g'A^-1 g``, a solve per point; or, where K is of low rank to the tolerance, no solve at all
low rank    ``k - h'P^-1 h`` with ``P = F C F' + D`` of rank p in place of A, and h in place of g likewise: what the
            leading eigenvectors say. Costs p^2 a point.
pathwise    from draws of deviations d and explained parts h, independent of each other, ``E d^2 = v`` and
            ``E h^2 = k - v``. Each gives an estimate of v; together, weighted by their precision, they have the
            variance ``(2 / n) v^2 (k - v)^2 / (v^2 + (k - v)^2)``: near the prior, far less than d alone.
"""

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from linear_operator import to_dense
from torch import Tensor

from gpytorch_gaps.linalg.selection import unravel
from gpytorch_gaps.operators.khatri_rao import KhatriRaoOperator
from gpytorch_gaps.operators.noisy import NoisyGridOperator, low_rank_of
from gpytorch_gaps.operators.selected_kronecker import SelectedKroneckerOperator
from gpytorch_gaps.posterior.parts import ROUNDINGS, PosteriorParts
from gpytorch_gaps.posterior.pathwise import pathwise_draws
from gpytorch_gaps.preconditioners.low_rank import LowRankPreconditioner
from gpytorch_gaps.reports import (
    ApproximateVarianceWarning,
    SolveReport,
    VarianceReport,
    one_report,
    report_solve,
    report_variance,
)
from gpytorch_gaps.solvers.planning.variance import low_rank_form, too_expensive
from gpytorch_gaps.solvers.solve import ADVICE
from gpytorch_gaps.utils.precision import float64_entries
from gpytorch_gaps.utils.progress import with_bar
from gpytorch_gaps.utils.tensors import same_values

_EXTENDED = 1e-3  # of the tolerance: eigenvectors that are extended off the grid must leave out less
_JUDGED = 8  # points by which an extension is judged
_LOST = 0.1  # of a variance: where rounding may take so much of it, solves keep more digits
_CHECKED = 20  # exact variances, by which low-rank ones are judged: their worst error is that of 95 % of points


def posterior_variance(parts: PosteriorParts) -> Tensor:
    """The variances of a posterior, reported. shape: (*batch, Q)"""
    if not parts.num_points:
        return parts.prior_variance()
    variance, report = _together([_variance(piece) for piece in parts.pieces()])
    variance = variance.to(parts.dtype)
    error = report.error.to(parts.dtype) + torch.finfo(parts.dtype).eps * variance.detach().abs()
    report_variance(replace(report, error=error))
    return variance


def _together(found: Sequence[tuple[Tensor, VarianceReport]]) -> tuple[Tensor, VarianceReport]:
    """The variances of several pieces, and one report."""
    reports = [report for _, report in found]
    error, seconds = torch.cat([report.error for report in reports], -1), sum(report.seconds for report in reports)
    return torch.cat([variance for variance, _ in found], -1), replace(reports[0], error=error, seconds=seconds)


def _variance(parts: PosteriorParts) -> tuple[Tensor, VarianceReport]:
    method = parts.config.variance_method
    if method == "low_rank":
        return _low_rank(parts)
    if method == "pathwise":
        return _together([_pathwise(piece, "asked for") for piece in parts.pieces(drawn=True)])
    started, prior, tolerance = time.perf_counter(), parts.prior_variance(), parts.config.tolerance
    closed = closed_form(parts)
    if closed is not None:
        variance, error, rank = closed
        seconds = time.perf_counter() - started
        return variance, VarianceReport("exact", error, seconds, rank=rank, reason="without solves")
    if method == "auto":
        reason = why_not_exact(parts, parts.num_points)
        if reason is not None:
            return _together([_pathwise(piece, reason) for piece in parts.pieces(drawn=True)])
    size = parts.columns_at_once()
    chunks = [slice(start, start + size) for start in range(0, parts.num_points, size)]
    bar = with_bar(chunks, "exact variances", unit="chunk")
    missed, found = torch.zeros_like(prior.detach()), []
    variance = prior if parts.differentiated else prior.clone()
    with one_report():
        for rows in bar:
            explained, missed[..., rows] = parts.explained(rows, prior)
            if parts.differentiated:
                found.append(explained)
            else:  # in place: small results among large columns would keep the memory of these
                variance[..., rows] -= explained
    variance = variance - torch.cat(found, -1) if found else variance
    bound = tolerance * variance.detach().abs() + missed
    reason = f"{parts.num_points} solves, in {len(chunks)} chunks"
    return variance, VarianceReport("exact", bound, time.perf_counter() - started, reason=reason)


def why_not_exact(parts: PosteriorParts, columns: int) -> str | None:
    """Why so many exact solves are not made unless asked for; None if they are affordable."""
    if not isinstance(parts.train, NoisyGridOperator):
        return None
    return too_expensive(parts.train.system(), columns, parts.config)


# -- low rank --------------------------------------------------------------------------------------------------------


def closed_form(parts: PosteriorParts) -> tuple[Tensor, Tensor, int] | None:
    """The variances in float64, how far they may be off, and the rank: where no solves are needed.

    With ``K = Φ C Φ' + E`` and ``|E| <= e s2``, the variance is off by no more than about e times the prior's on the
    grid. Elsewhere the basis is extended, best asked to know more, and judged where it knows least.
    """
    if parts.differentiated or parts.train.batch_shape or not isinstance(parts.train, NoisyGridOperator):
        return None
    started = time.perf_counter()
    level, tolerance = 1.0 if parts.cells is not None else _EXTENDED, parts.config.tolerance
    found = low_rank_form(parts.train.system(), parts.num_points, parts.config, level)
    basis = None if found is None else _basis(parts, found[0], tolerance)
    if found is None or basis is None:
        return None
    form, error = found
    variance, prior, left_out = _variances_by(parts, form, basis)
    off = error * prior + _rounding(prior, form.condition * variance)
    if bool((off > _LOST * variance).any()):
        return None
    if parts.cells is None:
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
    """Rounding of a difference of numbers of the size of the prior variance, and of what a factorisation amplifies."""
    return ROUNDINGS * torch.finfo(torch.float64).eps * (prior + amplified)


def _error_of_extension(
    parts: PosteriorParts, form: LowRankPreconditioner, variance: Tensor, left_out: Tensor
) -> float:
    """Relative to the variance, at the points of which the basis knows least: with the covariances g themselves.

    For weights ``a = P^-1 g`` close to ``A^-1 g``, ``2 a'g - a'Aa`` is right to second order.
    """
    worst = left_out.abs().topk(min(_JUDGED, parts.num_points)).indices
    few = parts.at(worst)
    with float64_entries():
        columns = to_dense(few.cross).mT.double()
    weights = form.solve(columns)
    exact = few.prior_variance() - (weights * (2.0 * columns - parts.train.wide_matmul(weights))).sum(-2)
    floor = torch.finfo(torch.float64).eps * few.prior_variance()
    return float(((variance[..., worst] - exact).abs() / exact.maximum(floor)).max())


def _low_rank(parts: PosteriorParts) -> tuple[Tensor, VarianceReport]:
    """By the leading eigenvectors alone, with an error judged by some points whose variances are exact as well."""
    started = time.perf_counter()
    if parts.differentiated:
        raise ValueError(
            "variance_method: got 'low_rank' where gradients are wanted; expected torch.no_grad(), or 'exact'"
        )
    own = isinstance(parts.train, NoisyGridOperator)
    form = parts.train.low_rank_approximation(low_rank_of(parts.config)) if own else None
    basis = None if form is None or form.root is not None else _basis(parts, form)
    if form is None or basis is None:
        raise ValueError(
            "variance_method: got 'low_rank' for a kernel or points without eigenvectors; expected a Kronecker product "
            "or, on the training grid, a sum of them; 'exact' and 'pathwise' take anything"
        )
    prior = parts.prior_variance()
    variance = _variances_by(parts, form, basis)[0].clamp_min(0.0)
    picked = torch.randperm(parts.num_points, generator=torch.Generator().manual_seed(0))[:_CHECKED]
    some = picked.sort().values.to(prior.device)
    few = parts.at(some)
    exact = few.prior_variance() - few.explained(slice(None), few.prior_variance())[0]
    worst = (variance[..., some] - exact).abs().amax(-1, keepdim=True)
    error = worst.expand(variance.shape)
    seconds, reason = time.perf_counter() - started, f"error judged by {len(some)} exact ones"
    return variance, VarianceReport("low_rank", error, seconds, rank=form.rank, reason=reason)


def _variances_by(
    parts: PosteriorParts, form: LowRankPreconditioner, basis: Callable[[slice], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Posterior and prior variances, and the part of the latter that the form does not know, which data leave as it is.

    In float64. shape: (*batch, Q) each
    """
    numbers = 4 * form.rank * parts.train.batch_shape.numel()
    size = int(max(1, parts.config.memory // (8 * numbers)))
    starts = with_bar(range(0, parts.num_points, size), "variances by eigenvectors", unit="chunk")
    found = [form.variances(basis(slice(start, start + size))) for start in starts]
    variance, known = (torch.cat(chunks, -1) for chunks in zip(*found, strict=True))
    prior = parts.prior_variance()
    return variance + (prior - known), prior, prior - known


def _basis(
    parts: PosteriorParts, form: LowRankPreconditioner, tolerance: float | None = None
) -> Callable[[slice], Tensor] | None:
    """Φ at some of the points: eigenvectors at cells of the training grid, their extension at others.

    The extension of an eigenvector q of K_i to a point is ``k_i(x, axis_i) q / t``; rounding of the numerator
    enters a variance with up to ``eps sqrt(M) |K|``. None where that is more than `tolerance` allows, and for other
    points of a sum.
    """
    cells = parts.cells
    if cells is not None:
        return lambda rows: form.basis_at(cells[rows])
    cross, kernel = parts.cross, parts.train._linear_op
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
    # a direction that the kernel does not have on an axis is not extended either
    scales = [torch.where(values > 0, 1.0 / values, 0.0).unsqueeze(-2) for values in used]
    tables = [factor.double() @ vectors * scale for (factor, vectors), scale in zip(sides, scales, strict=True)]
    if isinstance(cross, KhatriRaoOperator):
        return lambda rows: form.basis_from([table[..., rows, :] for table in tables])
    where = unravel(cross.row_index, cross.row_shape)
    return lambda rows: form.basis_from([table[..., own[rows], :] for table, own in zip(tables, where, strict=True)])


# -- from draws ------------------------------------------------------------------------------------------------------


def quantile_of_draws(count: int) -> float:
    """What 95 % of estimates ``mean of z^2``, over so many draws, are within, relative to the estimate.

    1.96 standard errors for many draws; more for few, since the standard error itself is estimated.
    """
    return (2.0 + 14.0 / count) * math.sqrt(2.0 / count)


def _pathwise(parts: PosteriorParts, reason: str) -> tuple[Tensor, VarianceReport]:
    started, count = time.perf_counter(), parts.config.variance_samples
    prior = parts.prior_variance()
    left, of_mean = torch.zeros_like(prior), torch.zeros_like(prior)
    with one_report():
        for deviation, explained in pathwise_draws(parts, count, what="variances from samples"):
            left = left + deviation.double().square().sum(-1) / count  # squares in small units need float64
            of_mean = of_mean + explained.double().square().sum(-1) / count
    tiny = torch.finfo(torch.float64).tiny
    with torch.no_grad():
        first = left / (left + of_mean).clamp_min(tiny)  # of the prior
        share = (1.0 - first).square() / (first.square() + (1.0 - first).square())
    variance = share * left + (1.0 - share) * (prior - of_mean)
    variance = variance.clamp_min(0.0).minimum(prior)
    known, rest = variance.detach(), (prior - variance).detach()
    spread = known * rest / (known.square() + rest.square()).sqrt().clamp_min(tiny)
    error = quantile_of_draws(count) * spread
    if reason != "asked for":
        share_off = float((error / known.clamp_min(tiny)).median())
        warnings.warn(
            f"variances are estimated from {count} samples, since {reason}: half of them are within {share_off:.0%}. "
            "Try: settings.variance_method('exact') at fewer points, more variance_samples, or "
            "variance_method('pathwise') to say that this is meant.",
            ApproximateVarianceWarning,
            stacklevel=2,
        )
    seconds = time.perf_counter() - started
    return variance, VarianceReport("pathwise", error, seconds, num_samples=count, reason=reason)
