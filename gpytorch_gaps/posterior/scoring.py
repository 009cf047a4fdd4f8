"""Scores of predictions against measured values, and predictions of observations that are left out.

Predictions of each observation from all others need no further models: with ``A = K_XX + D``,
``a = A^-1 (y - m)`` and ``c_i = (A^-1)_ii``,

    mean of y_i given the others = y_i - a_i / c_i,    variance = 1 / c_i

The relative error of c_i is also that of ``y_i`` minus this mean. If a group g is left out, the block
``C = (A^-1)_gg`` gives its mean ``y_g - C^-1 a_g`` and its covariance ``C^-1``.
"""

import math
import warnings
from dataclasses import asdict, dataclass, replace
from numbers import Real

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from gpytorch.models import ExactGP
from linear_operator.operators import DiagLinearOperator
from torch import Tensor

from gpytorch_gaps.posterior.covariance import PosteriorCovarianceOperator
from gpytorch_gaps.posterior.drawn_variance import ASKED_FOR
from gpytorch_gaps.posterior.inverse_entries import inverse_block, inverse_diagonal
from gpytorch_gaps.posterior.parts import PosteriorParts
from gpytorch_gaps.posterior.strategy import predicting
from gpytorch_gaps.reports import ApproximateVarianceWarning, also_record_to, report_variance
from gpytorch_gaps.utils.progress import with_bar


@dataclass(frozen=True)
class Score:
    """Scores of normal predictions, averaged over values, in their units. Lower is better for all but `coverage`.

    :param rmse: root mean squared error.
    :param mae: mean absolute error.
    :param crps: continuous ranked probability score.
    :param nlpd: negative log predictive density.
    :param interval: interval score of the central interval at `level`: its width, plus ``2 / (1 - level)`` times the
        distance of values outside it.
    :param coverage: share of values inside that interval.
    :param count: number of values.
    :param level: probability of the interval.

    >>> print(Score(rmse=0.5, mae=0.4, crps=0.3, nlpd=0.7, interval=2.1, coverage=0.94, count=100))
    RMSE 0.5, MAE 0.4, CRPS 0.3, NLPD 0.7, interval score 2.1, 95% intervals cover 94.0% of 100
    """

    rmse: float
    mae: float
    crps: float
    nlpd: float
    interval: float
    coverage: float
    count: int
    level: float = 0.95

    def as_dict(self) -> dict[str, float]:
        """All scores by name."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"RMSE {self.rmse:.4g}, MAE {self.mae:.4g}, CRPS {self.crps:.4g}, NLPD {self.nlpd:.4g}, interval score "
            f"{self.interval:.4g}, {100 * self.level:.6g}% intervals cover {self.coverage:.1%} of {self.count}"
        )


def score(posterior: MultivariateNormal, truth: Tensor, *, level: float = 0.95) -> Score:
    """Scores predictions against measured values. NaN in `truth` is skipped.

    :param posterior: the predictive distribution of the values in `truth`. Measured values contain noise, so pass
        ``likelihood(model(x))``.
    :param truth: measured values, of the shape of ``posterior.mean``, or of a grid with as many cells.
    :param level: probability of the intervals, between 0 and 1.
    :return: the averages over all values.
    :raises ValueError: if `posterior` is not a MultivariateNormal, if `truth` has another shape, has infinite values
        or nothing but NaN, or if `level` is not between 0 and 1.

    >>> posterior = MultivariateNormal(torch.zeros(3), torch.eye(3))
    >>> scores = score(posterior, torch.tensor([0.0, 4.0, torch.nan]))
    >>> scores.mae, scores.coverage, scores.count
    (2.0, 0.5, 2)
    """
    if not isinstance(posterior, MultivariateNormal):
        raise ValueError(
            f"score: posterior: got {type(posterior).__name__}, expected a MultivariateNormal such as "
            "likelihood(model(x))"
        )
    if not (isinstance(level, Real) and 0.0 < level < 1.0):
        raise ValueError(f"score: level: got {level!r}, expected a number between 0 and 1")
    with torch.no_grad():
        mean = posterior.mean.double()
        values = torch.as_tensor(truth).to(mean)
        batch = mean.shape[:-1]
        fits = values.shape[: len(batch)] == batch and values.shape[len(batch) :].numel() == mean.size(-1)
        if values.shape != mean.shape and not fits:
            raise ValueError(
                f"score: truth: got shape {tuple(values.shape)}, expected {tuple(mean.shape)}, or a grid with as many "
                "cells in place of the last dimension"
            )
        values = values.reshape(mean.shape)
        known = ~values.isnan()
        if not bool(known.any()):
            raise ValueError("score: truth: got only NaN, expected at least one value")
        if bool(values[known].isinf().any()):
            raise ValueError("score: truth: got infinite values, expected finite values, or NaN for missing ones")
        with gpytorch.settings.min_variance(0.0, 0.0, 0.0):  # a floor of 1e-10 would depend on the units of the data
            deviation = posterior.stddev.double()[known]
        return score_errors((values - mean)[known], deviation, level)


def score_errors(error: Tensor, deviation: Tensor, level: float = 0.95) -> Score:
    """Scores of normal predictions from their errors and standard deviations. Both have the same shape."""
    z = torch.where(error == 0, 0.0, error / deviation)
    density, below = torch.exp(-0.5 * z.square()) / math.sqrt(2.0 * math.pi), torch.special.ndtr(z)
    # closed form for a normal distribution; |error| if the deviation is zero
    crps = error * (2.0 * below - 1.0) + deviation * (2.0 * density - 1.0 / math.sqrt(math.pi))
    surprise = 0.5 * z.square() + torch.where(z.isinf(), 0.0, deviation.log()) + 0.5 * math.log(2.0 * math.pi)
    half = math.sqrt(2.0) * float(torch.erfinv(torch.tensor(level, dtype=torch.float64))) * deviation
    missed = (error.abs() - half).clamp_min(0.0)
    return Score(
        rmse=float(error.square().mean().sqrt()),
        mae=float(error.abs().mean()),
        crps=float(crps.mean()),
        nlpd=float(surprise.mean()),
        interval=float((2.0 * half + 2.0 / (1.0 - level) * missed).mean()),
        coverage=float((missed == 0).double().mean()),
        count=error.numel(),
        level=float(level),
    )


def leave_out(model: ExactGP, groups: Tensor | None = None, *, progress: bool = True) -> MultivariateNormal:
    """Predicts every observation from the others, including noise, for ``score(leave_out(model), train_y)``.

    This needs the solution for the data and the diagonal of the inverse covariance. The diagonal is computed in closed
    form or by one solve per observation, to the solve tolerance. If that takes too long, or with
    ``settings.variance_method("pathwise")``, it is estimated from ``settings.variance_samples`` draws. A warning then
    states the error of the predictions. The error of every variance is in ``record_solves().variances``. Groups always
    take one solve per observation.

    :param model: a model with training data and a :class:`GappyGridKernel` in its covariance. Its hyperparameters do
        not change.
    :param groups: a label for every observation, shape (N,): observations with the same label, such as those of one
        station or one year, are left out together. Default: one at a time.
    :param progress: whether to show a progress bar after a few seconds.
    :return: means and variances of the N observations, without covariances.
    :raises ValueError: if the model is not an ``ExactGP`` with training data and a :class:`GappyGridKernel`, if
        `groups` does not have N labels, or if the solves of a group are not accurate enough.

    >>> import gpytorch, gpytorch_gaps as gaps
    >>> class Model(gpytorch.models.ExactGP):
    ...     def __init__(self, x, y, grid):
    ...         super().__init__(x, y, gaps.GappyGridLikelihood())
    ...         self.mean_module = gpytorch.means.ZeroMean()
    ...         self.covar_module = gaps.GappyGridKernel([gpytorch.kernels.RBFKernel() for _ in range(2)], grid)
    ...
    ...     def forward(self, x):
    ...         return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
    >>> grid, x, y = gaps.from_array(torch.tensor([[1.0, torch.nan, 0.3], [0.5, 0.0, 0.1]]))
    >>> model = Model(x, y, grid)
    >>> predicted = gaps.leave_out(model)
    >>> predicted.mean.shape, bool((predicted.variance > 0).all())
    (torch.Size([5]), True)
    """
    if not isinstance(model, ExactGP) or model.train_inputs is None:
        raise ValueError("leave_out: model: expected a gpytorch.models.ExactGP with training data")
    if not isinstance(model.likelihood, _GaussianLikelihoodBase):
        came = type(model.likelihood).__name__
        raise ValueError(
            f"leave_out: model: got one with a {came}, expected Gaussian noise; withhold observations instead"
        )
    with predicting(model, progress), torch.no_grad():
        with gpytorch.settings.debug(False), gpytorch.settings.skip_posterior_variances(False):
            # GPyTorch warns of predictions at the training data, but these are intended
            posterior = model(*model.train_inputs)
        covariance, strategy = posterior.lazy_covariance_matrix, model.prediction_strategy
        if not isinstance(covariance, PosteriorCovarianceOperator) or covariance.parts.grid_train is None:
            raise ValueError(
                "leave_out: model: expected a covar_module with a GappyGridKernel in it, and one set of inputs"
            )
        with also_record_to(covariance.config.records):
            weights, y = strategy.solution_for(covariance.config), model.train_targets
            if groups is None:
                mean, variance = _each_out(covariance.parts, weights, y)
            else:
                mean, variance = _groups_out(covariance.parts, weights, y, groups)
    return MultivariateNormal(mean, DiagLinearOperator(variance))


def _each_out(parts: PosteriorParts, weights: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    diagonal, report = inverse_diagonal(parts)
    shift, variance = weights.double() / diagonal, 1.0 / diagonal
    if report.num_samples and report.reason != ASKED_FOR:
        off = report.error / variance
        in_mean = off * shift.abs() / variance.sqrt()
        warnings.warn(
            f"leave_out: variances are estimated from {report.num_samples} samples, since {report.reason}: half of "
            f"them are within {float(off.median()):.1%}, half of the means within {float(in_mean.median()):.2g} of "
            "their standard deviations. Try: more settings.variance_samples, variance_method('exact'), or "
            "variance_method('pathwise') to accept the estimates.",
            ApproximateVarianceWarning,
            stacklevel=3,
        )
    report_variance(replace(report, error=report.error.to(y.dtype)))
    return (y.double() - shift).to(y.dtype), variance.to(y.dtype)


def _groups_out(parts: PosteriorParts, weights: Tensor, y: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    try:
        labels = torch.as_tensor(groups, device=y.device)
    except (TypeError, ValueError) as error:
        raise ValueError(f"leave_out: groups: expected one number per observation, its label: {error}") from error
    if labels.is_floating_point() and bool(labels.isnan().any()):
        raise ValueError("leave_out: groups: got NaN, expected a label for every observation")
    if labels.shape != y.shape[-1:]:
        raise ValueError(f"leave_out: groups: got shape {tuple(labels.shape)}, expected {tuple(y.shape[-1:])}")
    mean, variance = (torch.empty(weights.shape, dtype=y.dtype, device=y.device) for _ in range(2))
    _, where = torch.unique(labels, return_inverse=True)
    order = where.argsort(stable=True)
    members = order.split(torch.bincount(where).tolist())
    for rows in with_bar(members, "groups left out", unit="group"):
        cholesky, failed = torch.linalg.cholesky_ex(inverse_block(parts, rows))
        if bool(failed.any()):
            raise ValueError(
                f"leave_out: groups: got a group of {len(rows)} observations that cannot be predicted: the solves are "
                "not accurate enough, so that its inverse covariance is not positive definite. Try: a tighter "
                "solve_tolerance, gap_method('cholesky'), smaller groups, or more noise"
            )
        shift = torch.cholesky_solve(weights[..., rows].double().unsqueeze(-1), cholesky).squeeze(-1)
        mean[..., rows] = (y[..., rows].double() - shift).to(y.dtype)
        variance[..., rows] = torch.cholesky_inverse(cholesky).diagonal(dim1=-1, dim2=-2).to(y.dtype)
    return mean, variance
