"""Gross errors: some observations have a variance of their own, beside the noise of all.

    y_i = f(x_i) + e_i + g_i,        g_i ~ N(0, rho_i),        rho_i = 0 for most i

Let r_i be the distance of y_i to its prediction from all others, and S_i the variance of that prediction, noise
included. Gross errors have any sign and any size, equally likely in all of four decades. With k of N observations
distrusted so far, one more is if gross error is the likelier explanation of r_i:

    (k + 1) / (2 |r_i| log 10^4)  >  (N - k) N(r_i | 0, S_i)

Its variance ``rho_i = r_i^2 - S_i`` is that of largest likelihood. Among 1,000 observations without gross errors, it
takes 4.6 standard deviations; where 5 % are distrusted, 3.5. The model is that of Ament et al. (2024), "Robust Gaussian
processes via relevance pursuit"; instead of pursuing them one by one, all variances are set at once, and again until
the same observations are distrusted.

Predictions from others, for an observation with the variance ``D_i = s2 + rho_i``, come from the inverse covariance, or
where rho_i is large, which would cancel, from the posterior mean m_i and variance v_i of f at its own place:

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

_MEDIAN_OF_SQUARES = 0.45494  # of a standard normal variable
_DECADES = 4  # of sizes of gross errors
_MAX_ROUNDS = 10
_SAMPLES = 16  # from which variances are estimated where there are many observations
_SEED = 0  # of these samples: the same model always distrusts the same observations


class GrossErrors(torch.nn.Module):
    """The variances rho of gross errors, and the observations that they were found for. Empty before that."""

    variance: Tensor  # shape: (N,)
    observations: Tensor  # shape: (N,)

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("variance", torch.empty(0))
        self.register_buffer("observations", torch.empty(0))
        self.believes_further = False  # whether points after the N observations have no gross errors

    def _load_from_state_dict(self, state_dict: Mapping[str, Tensor], prefix: str, *args: Any) -> None:
        for name, own in list(self._buffers.items()):
            found = state_dict.get(prefix + name)
            if found is not None and own is not None:  # there may be another number of observations
                self._buffers[name] = own.new_zeros(found.shape)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def keep(self, variance: Tensor, observations: Tensor) -> None:
        """Replaces the variances."""
        self.variance, self.observations = variance.to(observations), observations.detach().clone()
        self.believes_further = False

    def variances(self, shape: torch.Size) -> Tensor | None:
        """The variances of the gross errors of `shape` observations; None without any. shape: (N,)"""
        known = len(self.variance)
        if known != shape[-1] and not (self.believes_further and known < shape[-1]):
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
    """Sets the variances of gross errors to what the model, with its present hyperparameters, makes of them.

    :param model: the model, with its training data. Its mode is not changed.
    :param gross: where they are kept. The variances in it are the starting point, if they are of the same observations.
    :param noise: variances of the noise of all observations. shape: (N,)
    """
    y = model.train_targets
    same = torch.equal(gross.observations.to(y), y)
    variance = gross.variance.to(y) if same else torch.zeros_like(y)
    for module in model.modules():
        if isinstance(getattr(module, "solutions", None), LastSolutions):
            module.solutions = LastSolutions()  # a start from earlier solutions would add roundings that depend on them
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
    """Distance to the prediction of every observation from all others, and the variance of that. shape: (N,) each"""
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
    """``rho = r^2 - S`` of the observations that are distrusted, zero for the others. shape: (N,)

    A model that is not trained yet may be off for most observations. Where the median of ``r^2 / S`` is larger than
    that of a normal variable, S is therefore multiplied by their ratio: most observations are always believed.

    :param known: number of observations that are distrusted so far.
    """
    ratio = distance.square() / spread
    spread = spread * (ratio.median() / _MEDIAN_OF_SQUARES).clamp_min(1.0)
    ratio = distance.square() / spread
    odds = 0.5 * (ratio - ratio.log() + math.log(2.0 * math.pi)) - math.log(2.0 * _DECADES * math.log(10.0))
    wild = (ratio > 1.0) & (odds > math.log((len(ratio) - known) / (known + 1)))
    return torch.where(wild, distance.square() - spread, 0.0)
