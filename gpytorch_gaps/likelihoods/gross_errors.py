"""Gross errors: some observations have an additional variance of their own.

    y_i = f(x_i) + e_i + g_i,        g_i ~ N(0, rho_i),        rho_i = 0 for most i

Let r_i be the difference between y_i and its prediction from all other observations, and S_i the variance of that
prediction, including the noise. Gross errors have any sign. Their size is log-uniform over four decades. If k of N
observations are distrusted, another observation is distrusted if a gross error is the more likely explanation of r_i:

    (k + 1) / (2 |r_i| log 10^4)  >  (N - k) N(r_i | 0, S_i)

Its variance ``rho_i = r_i^2 - S_i`` maximises the likelihood. Among 1,000 observations without gross errors, the
threshold is 4.6 standard deviations; if 5 % are distrusted, it is 3.5. The model is that of Ament et al. (2024),
"Robust Gaussian processes via relevance pursuit". They add variances one by one. Here, all are set at once, and again
until the same observations are distrusted.

The prediction of an observation from the others comes from the inverse covariance. If rho_i is large, digits would
cancel there. Then the prediction comes from the posterior mean m_i and variance v_i of f at its place, with
``D_i = s2 + rho_i``:

    r_i = (y_i - m_i) D_i / (D_i - v_i),        S_i = s2 + v_i D_i / (D_i - v_i)
"""

import math
import warnings
from collections.abc import Mapping
from typing import Any

import gpytorch
import torch
from gpytorch.models import ExactGP
from torch import Tensor

from gpytorch_gaps import settings
from gpytorch_gaps.posterior.last_solutions import LastSolutions
from gpytorch_gaps.posterior.scoring import leave_out
from gpytorch_gaps.posterior.strategy import predicting
from gpytorch_gaps.reports import ApproximateVarianceWarning

_MEDIAN_OF_SQUARES = 0.45494  # median of the square of a standard normal variable
_DECADES = 4  # decades of sizes of gross errors
_MAX_ROUNDS = 10
_SAMPLES = 16  # samples for estimated variances, if there are many observations
_SEED = 0  # seed of these samples: the same model always distrusts the same observations


class GrossErrors(torch.nn.Module):
    """The variances rho of gross errors, and the observations for which they were found. Empty at first."""

    variance: Tensor  # shape: (N,)
    observations: Tensor  # shape: (N,)

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("variance", torch.empty(0))
        self.register_buffer("observations", torch.empty(0))
        self.accepts_further = False  # whether points after the N observations have no gross errors

    def _load_from_state_dict(self, state_dict: Mapping[str, Tensor], prefix: str, *args: Any) -> None:
        for name, own in list(self._buffers.items()):
            found = state_dict.get(prefix + name)
            if found is not None and own is not None:  # the number of observations may differ
                self._buffers[name] = own.new_zeros(found.shape)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def keep(self, variance: Tensor, observations: Tensor) -> None:
        """Replaces the variances."""
        self.variance, self.observations = variance.to(observations), observations.detach().clone()
        self.accepts_further = False

    def variances(self, shape: torch.Size) -> Tensor | None:
        """The variances of the gross errors; None if there are none. shape: (N,), N the last entry of `shape`"""
        known = len(self.variance)
        if known != shape[-1] and not (self.accepts_further and known < shape[-1]):
            raise ValueError(
                f"robust: got the prior of {shape[-1]} points, expected the {known} observations that were weighed. "
                "Try: likelihood.weigh(model) before training and predictions, and again for new data; noise=... for "
                "other points"
            )
        if not bool(self.variance.any()):
            return None
        return torch.nn.functional.pad(self.variance, (0, shape[-1] - known))

    def check(self, observations: Tensor) -> None:
        """Raises a ValueError unless these are the observations that the variances were found for."""
        if not bool((observations[..., : len(self.observations)] == self.observations).all()):
            raise ValueError(
                "robust: the observations have changed since they were weighed; expected likelihood.weigh(model) after "
                "set_train_data"
            )


def find_gross_errors(model: ExactGP, gross: GrossErrors, noise: Tensor) -> None:
    """Finds the variances of gross errors, with the current hyperparameters of the model.

    :param model: the model, with its training data. Its mode is not changed.
    :param gross: receives the variances. Its old variances are starting values if they belong to the same observations.
    :param noise: noise variance of each observation. shape: (N,)
    """
    y = model.train_targets
    same = torch.equal(gross.observations.to(y), y)
    variance = gross.variance.to(y) if same else torch.zeros_like(y)
    for module in model.modules():
        if isinstance(getattr(module, "solutions", None), LastSolutions):
            module.solutions = LastSolutions()  # results must not depend on the rounding of earlier solutions
    before: Tensor | None = None
    device = [y.device] if y.is_cuda else []
    with torch.random.fork_rng(device), predicting(model, progress=False), torch.no_grad():
        for _ in range(_MAX_ROUNDS):
            gross.keep(variance, y)
            model._clear_cache()
            torch.manual_seed(_SEED)
            found = _variances(*_from_others(model, variance, noise), int((variance > 0).sum()))
            settled = torch.equal(found > 0, variance > 0)
            cycles = before is not None and torch.equal(found > 0, before > 0)
            before, variance = variance, torch.maximum(found, variance) if cycles else found
            if settled or cycles:
                break
        gross.keep(variance, y)
    model._clear_cache()


def _from_others(model: ExactGP, variance: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Difference of every observation from its prediction by all others, and its variance. shape: (N,) each"""
    y, wild = model.train_targets, variance > 0
    many = len(y) > settings.current().dense_size
    with warnings.catch_warnings(), settings.variance_method("pathwise" if many else "auto"):
        warnings.simplefilter("ignore", ApproximateVarianceWarning)  # a few percent do not matter here
        with settings.variance_samples(_SAMPLES):
            others = leave_out(model, progress=False)
    distance, spread = y - others.mean, others.variance
    if bool(wild.any()):
        with gpytorch.settings.debug(False), gpytorch.settings.min_variance(0.0, 0.0, 0.0):
            at = model(*(x[wild] for x in model.train_inputs))
        total, own = (noise + variance)[wild], at.variance
        factor = total / (total - own).clamp_min(torch.finfo(y.dtype).eps * total)
        distance[wild], spread[wild] = (y[wild] - at.mean) * factor, noise[wild] + own * factor
    return distance, spread


def _variances(distance: Tensor, spread: Tensor, known: int) -> Tensor:
    """``rho = r^2 - S`` for distrusted observations, zero for the others. shape: (N,)

    The predictions of an untrained model may be wrong for most observations. Therefore, if the median of ``r^2 / S`` is
    larger than that of a normal variable, S is multiplied by the ratio of the two medians. Most observations are thus
    always accepted.

    :param known: number of observations that are distrusted now.
    """
    ratio = distance.square() / spread
    spread = spread * (ratio.median() / _MEDIAN_OF_SQUARES).clamp_min(1.0)
    ratio = distance.square() / spread
    odds = 0.5 * (ratio - ratio.log() + math.log(2.0 * math.pi)) - math.log(2.0 * _DECADES * math.log(10.0))
    wild = (ratio > 1.0) & (odds > math.log((len(ratio) - known) / (known + 1)))
    return torch.where(wild, distance.square() - spread, 0.0)
