"""Entries of ``A^-1``, ``A = K_XX + D``. They give predictions of observations that are left out.

The diagonal, ``c_i = (A^-1)_ii``, is computed in one of three ways:

In closed form   ``c_i = (1 - v_i / D_ii) / D_ii`` with the posterior variance v_i of a kernel of low rank, if the
                 difference does not cancel too many digits.
By solves        ``c_i = 2 a_i - a'Aa`` with ``A a = e_i``. The error is quadratic in that of a.
From draws       w with covariance A, and ``u = A^-1 w``, which has covariance A^-1. For the residual
                 ``r_i = w_i - b'w_J`` of any regression on a few neighbours J, with variance t,

                     c_i = 1 / t + E (u_i - r_i / t)^2

                 since the covariance of u_i is one with w_i and zero with the others. This is always positive, and far
                 more accurate than ``E u_i^2``: only the part that neighbours do not explain is estimated.
"""

import math
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from gpytorch_gaps.posterior.drawn_variance import ASKED_FOR, quantile_of_draws
from gpytorch_gaps.posterior.joint_draws import JointDraws, normal_columns
from gpytorch_gaps.posterior.parts import PosteriorParts, chunks
from gpytorch_gaps.posterior.regressions import neighbourhoods
from gpytorch_gaps.posterior.train_covariance import UNSQUARED_TOLERANCE
from gpytorch_gaps.posterior.variance import closed_form, why_not_exact
from gpytorch_gaps.reports import VarianceReport, one_report
from gpytorch_gaps.solvers.solve import Solved
from gpytorch_gaps.utils.precision import full_float32

_CLOSED_FORM_ERROR = 1e-4  # relative error up to which the closed form is used


@full_float32()
def inverse_diagonal(parts: PosteriorParts) -> tuple[Tensor, VarianceReport]:
    """``c = diag(A^-1)`` in float64, shape (*batch, N), and a report on the variances ``1 / c_i``.

    ``config.variance_method`` chooses between solves and draws. "low_rank" is not accurate enough here, and is treated
    as "auto".

    :param parts: parts of the posterior at the observations.
    """
    started, method = time.perf_counter(), parts.config.variance_method
    kind, samples, reason = "exact", 0, ASKED_FOR
    diagonal, error = _without_solves(parts, closed=method != "pathwise")
    rows = (error > _CLOSED_FORM_ERROR).reshape(-1, error.size(-1)).any(0).nonzero().squeeze(-1)
    if len(rows):
        cost = None if method in ("exact", "pathwise") else why_not_exact(parts, len(rows))
        if method == "pathwise" or cost is not None:
            kind, samples, reason = "pathwise", parts.config.variance_samples, cost or reason
            some, off = _from_draws(parts, samples)
            diagonal[..., rows], error[..., rows] = some[..., rows], off[..., rows]
        else:
            diagonal[..., rows], error[..., rows] = _by_solves(parts, rows)
            reason = f"{len(rows)} solves"
    seconds = time.perf_counter() - started
    return diagonal, VarianceReport(kind, error / diagonal, seconds, num_samples=samples, reason=reason)


def _without_solves(parts: PosteriorParts, closed: bool) -> tuple[Tensor, Tensor]:
    """The closed form and its relative error. Without a closed form, the error is infinite. shape: (*batch, N) each"""
    noise = parts.train._diag_tensor._diagonal().double()
    found = closed_form(parts) if closed else None
    if found is None:
        return torch.empty_like(noise), torch.full_like(noise, torch.inf)
    variance, off, _ = found
    rest = 1.0 - variance / noise
    return rest / noise, torch.where(rest > 0, off / noise / rest, torch.inf)


def _by_solves(parts: PosteriorParts, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The entries of some rows, and a bound on their relative error. shape: (*batch, rows) each

    The bound is that of ``r'A^-1 r <= |r|^2 / s2``, divided by ``1 / A_ii <= c``.
    """
    train, found, errors = parts.train, [], []
    least = train._diag_tensor._diagonal().double().amin(-1, keepdim=True)
    ratio = float((least / train._diagonal().double().amax(-1, keepdim=True)).min())
    tolerance = parts.config.tolerance
    with one_report():
        for columns, solved in _solved_units(parts, rows, min(tolerance, math.sqrt(tolerance * ratio))):
            entries = (solved.solution * (columns + solved.residual)).sum(-2)
            found.append(entries)
            errors.append(solved.residual.square().sum(-2) / (least * entries))
    return torch.cat(found, -1), torch.cat(errors, -1)


def inverse_block(parts: PosteriorParts, rows: Tensor) -> Tensor:
    """``(A^-1)_gg`` of a group g of observations, in float64, by solves. shape: (*batch, g, g)"""
    tolerance = UNSQUARED_TOLERANCE * parts.config.tolerance
    with one_report():
        block = torch.cat([solved.solution[..., rows, :] for _, solved in _solved_units(parts, rows, tolerance)], -1)
    return 0.5 * (block + block.mT)


def _solved_units(parts: PosteriorParts, rows: Tensor, tolerance: float) -> Iterator[tuple[Tensor, Solved]]:
    """Unit vectors ``e_i`` of the given observations, and ``A^-1 e_i``, in chunks. shape: (*batch, N, q)"""
    train, config = parts.train, parts.observed.config_for(len(rows), tolerance)
    for chunk in chunks(len(rows), parts.columns_at_once(), "observations left out", unit="observation"):
        some = rows[chunk]
        columns = torch.zeros(*train.shape[:-1], len(some), dtype=torch.float64, device=train.device)
        columns[..., some, torch.arange(len(some), device=some.device)] = 1.0
        yield columns, train.solve_columns(columns, config)


# -- from draws ------------------------------------------------------------------------------------------------------


def _from_draws(parts: PosteriorParts, count: int) -> tuple[Tensor, Tensor]:
    """Estimates, and the relative error that 95 % of them do not exceed. shape: (*batch, N) each"""
    train, memory = parts.train, parts.config.memory
    variance = train._linear_op._diagonal().double() + train._diag_tensor._diagonal().double()
    local = neighbourhoods(train, train._linear_op, variance, None, memory).regressions()
    joint = JointDraws(parts.prior.evaluate_kernel(), parts.cross, train, parts.cells, memory)
    size = parts.columns_at_once(2 * joint.size + 8 * train.shape[:-1].numel())
    rest, missed = torch.zeros_like(local.left), torch.zeros_like(local.left[..., :1])
    noise = train._diag_tensor._diagonal().double().unsqueeze(-1)
    with one_report():
        for columns in chunks(count, size, "leaving out, from samples", unit="draw"):
            observed, _ = joint.draw(normal_columns(joint.sizes, columns.stop - columns.start, train))
            observed = observed.double()
            solved = train.solve_columns(observed, parts.observed.config_for(count))
            beyond = solved.solution - (observed - local.fitted(observed)) / local.left.unsqueeze(-1)
            rest += beyond.square().sum(-1) / count
            missed += (solved.residual.square() / noise).mean(-2).sum(-1, keepdim=True) / count
    diagonal = 1.0 / local.left + rest
    share = rest / diagonal  # the estimated part
    # a residual r of a solve changes u_i by at most sqrt(c_i r'D^-1 r); `missed` is the mean over observations
    of_solves = 2.0 * (share * missed).sqrt() + missed + parts.config.tolerance
    # predictions use 1 / c, whose mean is higher by the square of the standard error
    return diagonal / (1.0 - 2.0 / count * share.square()), quantile_of_draws(count) * share + of_solves
