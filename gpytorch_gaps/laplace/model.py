"""``LaplaceGP``: a model of observations that are not Gaussian, with the interface of an ``ExactGP``."""

from typing import Any

import torch
from gpytorch import settings as gpytorch_settings
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from gpytorch.models import GP, ExactGP
from gpytorch.models.exact_prediction_strategies import prediction_strategy
from torch import Tensor

from gpytorch_gaps import settings
from gpytorch_gaps.laplace.densities import check_likelihood, check_observations
from gpytorch_gaps.laplace.mode import LaplaceMode, find_mode
from gpytorch_gaps.likelihoods import GappyGridLikelihood

_SHARE_OF_TOLERANCE = 0.1  # part of ``settings.mean_tolerance`` for the mode; the solve for the mean adds its own error


class LaplaceGP(ExactGP):
    """A Gaussian process f on a grid with gaps, observed through a likelihood that is not Gaussian.

    It uses Laplace's approximation: the posterior of f is replaced by a Gaussian at its mode, with the curvature of the
    exact posterior there. This is also the posterior of Gaussian pseudo-observations at the same cells, each with its
    own noise variance. Means, variances, draws and preconditioners are therefore those of an ``ExactGP``.

    Write it like an ``ExactGP``. ``model(x)`` is the distribution of f. ``model.likelihood(model(x))`` is GPyTorch's
    predictive distribution of observations. Train it by :func:`fit`, or in a loop of your own with a
    :class:`LaplaceMarginalLogLikelihood`.

    :param train_inputs: cells of the observations. shape (N, D)
    :param train_targets: observations, such as counts, classes 0 and 1, or shares. shape (N,)
    :param likelihood: a GPyTorch likelihood whose ``likelihood(f)`` is a distribution with a ``log_prob`` per value:
        Bernoulli, Poisson, negative binomial, Student's t, Beta, or your own, with a smooth log-density.
    :raises ValueError: if an observation is impossible under the likelihood.

    >>> import gpytorch, torch, gpytorch_gaps as gaps
    >>> class Model(gaps.LaplaceGP):
    ...     def __init__(self, x, y, likelihood, grid):
    ...         super().__init__(x, y, likelihood)
    ...         self.mean_module = gpytorch.means.ConstantMean()
    ...         self.covar_module = gaps.GappyGridKernel([gpytorch.kernels.RBFKernel()], grid)
    ...     def forward(self, x):
    ...         return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
    >>> rain = torch.tensor([1.0, 1.0, 1.0, torch.nan, 0.0, 0.0])
    >>> grid, x, y = gaps.from_array(rain)
    >>> model = Model(x, y, gpytorch.likelihoods.BernoulliLikelihood(), grid).eval()
    >>> with torch.no_grad():
    ...     chance = model.likelihood(model(grid.points())).mean
    >>> bool(chance[0] > chance[3] > chance[5])
    True
    """

    def __init__(self, train_inputs: Any, train_targets: Tensor, likelihood: Likelihood) -> None:
        check_likelihood(likelihood)
        GP.__init__(self)
        self.train_inputs = _as_inputs(train_inputs)
        self.train_targets = train_targets
        self.likelihood = likelihood
        self.prediction_strategy = None
        self._last_weights: list[Tensor] = []  # weights of the last two modes
        self._mode: LaplaceMode | None = None
        check_observations(likelihood, train_targets, self.train_inputs[0].size(-2), "train_targets")

    def set_train_data(self, inputs: Any = None, targets: Tensor | None = None, strict: bool = True) -> None:
        """Replaces observations, their cells, or both. Hyperparameters do not change.

        :raises ValueError: if an observation is impossible under the likelihood. The model then keeps its data.
        """
        rows = _as_inputs(inputs)[0].size(-2) if inputs is not None else self.train_inputs[0].size(-2)
        check_observations(self.likelihood, self.train_targets if targets is None else targets, rows, "targets")
        super().set_train_data(inputs, targets, strict)
        self._last_weights, self._mode = [], None

    def _clear_cache(self) -> None:
        super()._clear_cache()
        self._mode = None

    def __call__(self, *args: Any, **kwargs: Any) -> MultivariateNormal:
        known = self.train_inputs is not None and self.train_targets is not None
        if not self.training and known and not gpytorch_settings.prior_mode.on() and self.prediction_strategy is None:
            self.prediction_strategy = self._strategy(**kwargs)
        return super().__call__(*args, **kwargs)

    def _strategy(self, **kwargs: Any) -> Any:
        """GPyTorch's prediction strategy for the pseudo-observations."""
        prior = self._get_train_prior_distribution(list(self.train_inputs), **kwargs)
        mode = self._mode = self.find_mode(prior, self.train_targets)
        dtype = prior.mean.dtype
        likelihood = GappyGridLikelihood(noise=mode.noise.to(dtype))
        return prediction_strategy(list(self.train_inputs), prior, mode.targets.to(dtype), likelihood.to(dtype=dtype))

    @property
    def mode(self) -> LaplaceMode:
        """The mode of the latent function, and the pseudo-observations, with the current hyperparameters.

        :raises RuntimeError: in training mode.
        """
        if self.training:
            raise RuntimeError("mode: the model is in training mode, expected eval mode: model.eval()")
        if self._mode is None:
            with torch.no_grad():
                self.prediction_strategy = self._strategy()
        assert self._mode is not None
        return self._mode

    def find_mode(self, prior: MultivariateNormal, targets: Tensor) -> LaplaceMode:
        """The mode of the latent function. Iterations start from the modes of earlier calls.

        :param prior: distribution of the latent function at the observations.
        :param targets: the observations. shape (N,)
        """
        config = settings.current()
        tolerance = _SHARE_OF_TOLERANCE * (config.mean_tolerance or 1.0)
        known = [weights for weights in self._last_weights if len(weights) == len(targets)]
        # the mode changes with the hyperparameters, nearly linearly: extrapolate from the last two
        starts = [*known[-1:], *([2.0 * known[-1] - known[-2]] if len(known) == 2 else [])]
        mode = find_mode(prior, self.likelihood, targets, config, tolerance, starts)
        self._last_weights = [*known, mode.weights][-2:]
        return mode

    def get_fantasy_model(self, inputs: Any, targets: Tensor, **kwargs: Any) -> Any:
        """Not available: new observations change the mode.

        :raises NotImplementedError: always.
        """
        raise NotImplementedError("get_fantasy_model: new observations change the mode; use set_train_data instead")


def _as_inputs(given: Any) -> tuple[Tensor, ...]:
    """One or several tensors as a tuple of tensors with at least one column. shape: (N, D) each"""
    inputs = (given,) if torch.is_tensor(given) else tuple(given)
    return tuple(own.unsqueeze(-1) if own.dim() == 1 else own for own in inputs)
