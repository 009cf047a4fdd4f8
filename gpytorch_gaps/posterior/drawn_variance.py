"""Variances from draws, with a regression on the nearest observations as a control variate.

For a point with value f, ``b'y_J`` is its regression on the most correlated observations J. Its residual variance t is
known: see :mod:`gpytorch_gaps.posterior.regressions`. The posterior mean ``mu = g'A^-1 y`` explains more. For draws of
f and y from the prior,

    d = f - mu          ``E d^2 = v``, the posterior variance
    h = mu - b'y_J      ``E h^2 = t - v``, since d is independent of all y

are independent. Each gives an estimate of v. Their mean over n draws, weighted by precision, has the variance
``(2 / n) v^2 (t - v)^2 / (v^2 + (t - v)^2)``. This is small if the neighbours explain nearly all that the observations
explain. Without neighbours, b = 0 and t is the prior variance.

**Whether to draw.** At the pilots, a few points picked at random, ``t - v`` is estimated: see
:mod:`gpytorch_gaps.posterior.pilots`. If it is at most 2 % of t at nearly all of them, as along most long series, there
are no draws. The variances are then t, which is never too small. The reported error is the largest ratio
``(t - v) / t`` at nearly all pilots.

If it is more, and draws would take half a minute or longer, ``t (1 - s)`` is tried as an estimate, with s the mean of
``(t - v) / t`` at the pilots. Its relative error is estimated from the pilots: 97 % of them do not exceed it. If it is
below 25 %, and below the error of draws, there are no draws either.

**Solves.** A solution with ``A a = y - r`` is exact for ``y - r``. With ``mu = g'a + b'r_J``, the error of d and h is
therefore ``w'r`` for ``w = A^-1 g - b``, the weights of ``h = w'y``, and
``(w'r)^2 <= w'Dw r'D^-1 r <= (t - v) r'D^-1 r``. Without neighbours it is also at most ``v r'D^-1 r``: see
:mod:`gpytorch_gaps.solvers.goal`. If residuals are large compared with the noise, this bound is useless. The variance
and its estimate are between 0 and t in any case.
"""

import math
import warnings

import torch
from torch import Tensor

from gpytorch_gaps.posterior.parts import ROUNDINGS, PosteriorParts
from gpytorch_gaps.posterior.pathwise import conditioned_draws
from gpytorch_gaps.posterior.pilots import pilots
from gpytorch_gaps.posterior.regressions import Neighbourhoods, Regressions, neighbourhoods
from gpytorch_gaps.posterior.train_covariance import has_float64_entries
from gpytorch_gaps.reports import ApproximateVarianceWarning, VarianceReport, one_report, record_solves

ASKED_FOR = "asked for"  # the reason for a method that the settings name
# Relative errors of variances that cause no warning: of half of them, and of nearly all. The relative errors of
# standard deviations are half as large, and smaller than the effect of uncertain length-scales and noise.
_UNREMARKABLE = {0.5: 0.02, 0.95: 0.2}
# No draws if the relative error of t is below the first number (1 % of a standard deviation) at nearly all pilots.
_NEGLIGIBLE, _NEARLY_ALL = 0.02, 0.97
_MANY_FLOPS = 1e12  # cost of all draws beyond which pilots may replace them: half a minute or longer
# Largest relative error without draws, and the share of pilots within it. The share of all points should be at least
# 95 %. Its standard error, estimated from 192 pilots, is 1.6 %.
_MOST_BY_PILOTS, _STATED = 0.25, 0.97


def quantile_of_draws(count: int) -> float:
    """The relative error that is not exceeded by 95 % of the estimates ``mean of z^2`` over `count` draws.

    It is 1.96 standard errors for many draws. For few it is larger, because the standard error itself is estimated.
    """
    return (2.0 + 14.0 / count) * math.sqrt(2.0 / count)


def drawn_variance(
    parts: PosteriorParts, reason: str, made: list[Tensor] | None = None
) -> tuple[Tensor, VarianceReport]:
    """Estimates from draws, with a warning if the settings do not ask for draws.

    :param reason: why the variances are not exact.
    :param made: receives the draws minus the mean. If it is given, draws are always made. shape: (*batch, Q, n)
    """
    count = parts.config.variance_samples
    near = None
    if made is None and parts.num_points:
        near = _neighbourhoods(parts, held=False)
        found = _without_draws(parts, near, reason)
        if found is not None:
            return found
    if near is None or not near.can_be_held(parts.config.memory):
        near = _neighbourhoods(parts)
    local = near.regressions()
    kept: list[Tensor] | None = None if made is None else []
    left, of_mean, missed = _moments(parts, local, count, kept)
    if made is not None and kept:
        made.append(torch.cat(kept, -1))
    variance, share = _combined(local.left, left, of_mean)
    with torch.no_grad():
        known, rest = variance.detach(), (local.left - variance).detach()
        spread = _spread(known, rest)
        weighted = share * known.sqrt() + (1.0 - share) * rest.sqrt()
        off = (rest if local.rows.numel() else rest.minimum(known)) * missed  # (w'r)^2
        error = quantile_of_draws(count) * spread + 2.0 * weighted * off.sqrt() + off
        error = error.minimum(known.maximum(rest)) + _rounding(parts, local.sizes())
    if reason != ASKED_FOR:
        _warn(error, known, count, reason)
    return variance, VarianceReport("pathwise", error, 0.0, num_samples=count, reason=reason)


def _without_draws(parts: PosteriorParts, near: Neighbourhoods, reason: str) -> tuple[Tensor, VarianceReport] | None:
    """t, reduced by the mean share that the pilots find; None if draws are cheap, or more accurate."""
    if not near.rows.numel():
        return None
    count = parts.config.variance_samples
    with record_solves() as solves:
        found = pilots(parts, near)
    flops = count * solves[-1].flops / solves[-1].num_rhs if solves else 0.0  # of all draws
    tiny = torch.finfo(torch.float64).tiny
    shares, missed = (own / found.left.clamp_min(tiny) for own in (found.beyond, found.missed))
    share, error = 0.0, _quantile(shares + found.off / found.left.clamp_min(tiny), _NEARLY_ALL)
    why = f"neighbours leave at most {error:.1%} of them"
    if error > _NEGLIGIBLE and flops < _MANY_FLOPS:
        return None
    if error > _NEGLIGIBLE:
        share = min(float(shares.mean()), _MOST_BY_PILOTS)
        # the shares of pilots vary more than those of all points, because of their standard error
        error = _quantile(((shares - share).abs() + missed) / (1.0 - share), _STATED)
        by_draws = quantile_of_draws(count) * _quantile(_spread(1.0 - shares, shares) / (1.0 - shares), _STATED)
        if error > min(_MOST_BY_PILOTS, by_draws):
            return None
        why = f"neighbours leave {share:.1%} too much, to within {error:.1%}"
    left, sizes = near.left()
    variance, rounding = (1.0 - share) * left, _rounding(parts, sizes)
    reason = f"{reason}; {why}, estimated at {len(shares)} points"
    return variance, VarianceReport("pathwise", error * variance + rounding, 0.0, reason=reason)


def _neighbourhoods(parts: PosteriorParts, held: bool = True) -> Neighbourhoods:
    """Neighbours at cells of the training grid. With gradients, and at other points: none.

    :param held: whether the coefficients of all points will be in memory.
    """
    prior = parts.prior_variance()
    if parts.cells is None or parts.differentiated:
        return Neighbourhoods.none(prior)
    return neighbourhoods(parts.train, parts.cross, prior, parts.cells, parts.config.memory, held)


def _moments(
    parts: PosteriorParts, local: Regressions, count: int, kept: list[Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Means of ``d^2``, ``h^2`` and ``r'D^-1 r`` over draws.

    :param kept: receives d, a few draws at a time. shape (*batch, Q, n)
    :return: shapes (*batch, Q), (*batch, Q) and (*batch, 1)
    """
    left, of_mean = torch.zeros_like(local.left), torch.zeros_like(local.left)
    missed = torch.zeros_like(local.left[..., :1])
    regressed = local.rows.numel() > 0
    with one_report():
        for draws in conditioned_draws(parts, count, what="variances from samples"):
            explained, observed = draws.explained.double(), draws.observed
            if draws.residual is not None:
                observed = observed.double() - draws.residual
                missed = missed + _in_noise(parts, draws.residual).sum(-1, keepdim=True)
            beyond = explained - local.fitted(observed)
            if draws.residual is not None and regressed:
                explained = explained + local.fitted(draws.residual)
            # float64, because squares of values in small units would underflow
            deviation = draws.tested.double() - explained
            if kept is not None:
                kept.append(deviation)
            left = left + deviation.square().sum(-1)
            of_mean = of_mean + beyond.square().sum(-1)
    return left / count, of_mean / count, missed / count


def _combined(known: Tensor, left: Tensor, of_mean: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of both estimates of v, weighted by precision, and the weight of the first.

    :param known: t.
    :param left: means of ``d^2``, estimates of v.
    :param of_mean: means of ``h^2``, estimates of ``t - v``.
    """
    with torch.no_grad():
        first = left / (left + of_mean).clamp_min(torch.finfo(torch.float64).tiny)  # v / t
        share = (1.0 - first).square() / (first.square() + (1.0 - first).square())
    variance = share * left + (1.0 - share) * (known - of_mean)
    return variance.clamp_min(0.0).minimum(known), share


def _spread(variance: Tensor, rest: Tensor) -> Tensor:
    """``v (t - v) / sqrt(v^2 + (t - v)^2)``, the standard deviation of an estimate times ``sqrt(n / 2)``."""
    size = (variance.square() + rest.square()).sqrt()
    return variance * rest / size.clamp_min(torch.finfo(torch.float64).tiny)


def _quantile(values: Tensor, share: float) -> float:
    """The value that a share of all values does not exceed."""
    return float(values.kthvalue(math.ceil(share * len(values))).values)


def _rounding(parts: PosteriorParts, sizes: Tensor) -> Tensor:
    """A bound on the rounding error of ``t = k - 2 b'g + b'(K_JJ + D_J) b``. shape: (*batch, Q)

    :param sizes: ``|b|``, shape (Q,).
    """
    exact = parts.observed.has_float64_entries and has_float64_entries(parts.cross)
    eps = torch.finfo(torch.float64 if exact else parts.dtype).eps
    largest = parts.train._diagonal().detach().double().amax(-1, keepdim=True)
    terms = parts.prior_variance().detach().clamp_min(0.0).sqrt() + largest.sqrt() * sizes
    return ROUNDINGS * eps * terms.square()


def _in_noise(parts: PosteriorParts, residual: Tensor) -> Tensor:
    """``r'D^-1 r``. Without noise, residuals give no bound; then the squared tolerance. shape: (*batch, n)"""
    if bool((parts.train._diag_tensor._diagonal() > 0).all()):
        return parts.observed.variance_error(residual)
    return torch.full_like(residual[..., 0, :], parts.config.tolerance**2)


def _warn(error: Tensor, variance: Tensor, count: int, reason: str) -> None:
    relative = (error / variance.clamp_min(torch.finfo(torch.float64).tiny)).flatten()
    off = {share: _quantile(relative, share) for share in _UNREMARKABLE}
    if all(off[share] <= allowed for share, allowed in _UNREMARKABLE.items()):
        return
    warnings.warn(
        f"variances are estimated from {count} samples, since {reason}: half of them are within {off[0.5]:.1%}, 95 % "
        f"within {off[0.95]:.0%}. Try: settings.variance_method('exact') at fewer points, more variance_samples, or "
        "variance_method('pathwise') to accept the estimates.",
        ApproximateVarianceWarning,
        stacklevel=2,
    )
