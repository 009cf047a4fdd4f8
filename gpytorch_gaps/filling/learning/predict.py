"""Predictions of a model in memory: one solve for the mean; variances are exact if that is cheap."""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import gpytorch
import linear_operator
import torch
from scipy.special import stdtrit
from torch import Tensor

from gpytorch_gaps import settings
from gpytorch_gaps.filling.arrays.options import Options
from gpytorch_gaps.filling.learning.model import FillModel
from gpytorch_gaps.reports import ApproximateVarianceWarning, SolveReport, record_solves
from gpytorch_gaps.utils.rates import nominal_rates

MIN_OBSERVATIONS_TO_WITHHOLD = 30
"""With fewer observations, none are withheld, and standard deviations are widened instead."""

NORMAL_975 = 1.959964
"""The 95 % interval of a normal variable is plus or minus so many standard deviations."""

_RELATIVE_RESIDUAL = 1e-4  # required in addition to the certified error of the mean
_LOOSER = 10.0  # factor on the tolerances of variances and of the held-out check, which have larger errors anyway
_DRAW_RESIDUAL = 0.1  # root mean square in units of the noise: its effect on variances is that of 1 % more noise
_MAX_DENSE = 1600  # so many observations are always factorized; five times as many if it is cheaper than iterations
_MAX_EXACT_VARIANCE_FLOPS = 5e11  # a few seconds; a tenth for a check, where draws are accurate enough
_SAMPLED_VARIANCE_FLOPS = 6e12  # one or two minutes on two cores
_DRAW_OVER_MEAN_FLOPS = 0.7  # cost of a draw, at the looser tolerance, relative to that of the mean


class Prediction:
    """The posterior of a model at some points.

    The constructor solves for the mean. Variances and draws use the same posterior with looser tolerances. The residual
    of the solve for a draw has the effect of additional noise, so it is kept small in comparison with the noise.

    :param model: a conditioned model.
    :param x: points, shape (Q, D).
    :param options: options with the tolerance of the mean.
    :param quick: whether to use the looser tolerance for the mean too, to prefer draws for variances, and to keep these
        draws.
    """

    def __init__(self, model: FillModel, x: Tensor, options: Options, quick: bool = False) -> None:
        self._options, self._quick = options, quick
        with prediction_settings(options, _LOOSER if quick else 1.0), record_solves() as solves:
            self._posterior = model(x)
            self.mean: Tensor = self._posterior.mean  # shape: (Q,)
        self.solve: SolveReport | None = solves[-1] if solves else None
        self._residual_of_draws = _DRAW_RESIDUAL * math.sqrt(model.train_targets.numel())
        self._drawn: Tensor | None = None
        self.how_variances = "exact"
        """The method of the variances in words, once they have been computed."""

    @property
    def is_factorized(self) -> bool:
        """Whether the mean comes from a dense factor, which is used in all further solves."""
        return self.solve is None or self.solve.method == "cholesky"

    def variance(self, max_samples: int = 16) -> Tensor:
        """Variances of the field, without noise: exact, or from at most `max_samples` samples. shape: (Q,)"""
        each = 0.0 if self.is_factorized or self.solve is None else self.solve.flops
        effort = each * len(self.mean) * (_LOOSER if self._quick else 1.0)
        with (
            prediction_settings(self._options, _LOOSER, self._residual_of_draws),
            variance_budget(each, effort, max_samples),
            record_solves() as solves,
        ):
            self._covariance = self._posterior.lazy_covariance_matrix.in_current_settings()
            if self._quick:  # the draws will be needed too
                variance, self._drawn = self._covariance.variance_and_draws()
            else:
                variance = self._covariance.diagonal(dim1=-1, dim2=-2)  # .variance is clamped at 1e-10
        if solves.variances and solves.variances[-1].method == "pathwise":
            samples = solves.variances[-1].num_samples
            self.how_variances = f"from {samples} samples" if samples else "from the nearest observations"
        return variance

    def covariance(self) -> Tensor:
        """The covariance of the field, after :meth:`variance`. shape: (Q, Q)"""
        with prediction_settings(self._options, _LOOSER):
            return self._covariance.to_dense()

    def draws(self, count: int) -> Tensor:
        """Draws of the field minus its mean, after :meth:`variance`: `count`, or those of variances. shape: (n, Q)"""
        if self._drawn is not None:
            return self._drawn
        with prediction_settings(self._options, _LOOSER, self._residual_of_draws):
            return self._covariance.zero_mean_mvn_samples(count)


@contextmanager
def variance_budget(solve_flops: float, exact_flops: float, max_samples: int) -> Iterator[None]:
    """Settings with which variances take seconds, or about a minute.

    :param solve_flops: the cost of one solve, 0 if there is a dense factor.
    :param exact_flops: the cost of exact variances, with one solve per point.
    """
    affordable = _SAMPLED_VARIANCE_FLOPS / max(_DRAW_OVER_MEAN_FLOPS * solve_flops, 1.0)
    samples = int(min(max_samples, max(settings.variance_samples.minimum, affordable)))
    method = "auto" if exact_flops <= _MAX_EXACT_VARIANCE_FLOPS else "pathwise"
    with settings.variance_method(method), settings.variance_samples(samples):
        yield


@contextmanager
def prediction_settings(options: Options, looser: float = 1.0, residual: float = 0.0) -> Iterator[None]:
    """Settings of all predictions. There are no warnings of variances from samples, because the report mentions them.

    :param residual: a norm of residuals, in units of the noise, that solves for data may always leave.
    """
    with (
        torch.no_grad(),
        gpytorch.settings.debug(False),  # predictions at the training data are intended if smooth
        settings.solve_tolerance(looser * _RELATIVE_RESIDUAL),
        settings.mean_tolerance(max(looser * options.tolerance, residual)),
        settings.mixed_precision(),
        settings.dense_size(_MAX_DENSE),
        linear_operator.settings.max_cholesky_size(_MAX_DENSE),
        settings.progress(options.progress),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", ApproximateVarianceWarning)
        ignore_sparse_warning()
        yield


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, results repeat: there is a seed, and nominal rates. At the end, restores the user's random state."""
    with torch.random.fork_rng(devices=[]), nominal_rates():
        torch.manual_seed(seed)
        yield


def ignore_sparse_warning() -> None:
    """Torch warns about the sparse tensors of the IndexKernel of labels."""
    warnings.filterwarnings("ignore", message="Sparse invariant checks")


def widening(num_observations: int) -> float:
    """The factor on standard deviations for the uncertainty of hyperparameters from few observations.

    If a mean and a variance are estimated from n observations, predictions have ``sqrt(n / (n - 1))`` times Student's
    t distribution. About half of the degrees of freedom are used for length-scales and noise.
    """
    if num_observations >= MIN_OBSERVATIONS_TO_WITHHOLD:
        return 1.0
    quantile = stdtrit(max(1.0, num_observations / 2), 0.975)
    return float(quantile / NORMAL_975 * math.sqrt(num_observations / (num_observations - 1)))
