"""Laplace's approximation of the log marginal likelihood, and its gradient.

At the mode f, with weights a, slopes g and pseudo-noise D = 1 / W (:mod:`gpytorch_gaps.laplace.mode`),

    log p(y) ~ log p(y | f) - a' K a / 2 - (log|K + D| + log|W|) / 2

The sum of the first two terms is stationary in f. The log-determinant is not. A change of a hyperparameter also changes
the mode, by ``df = (I + K H)^-1 (dm + dK a + K dg)``, with ``H`` the curvature of ``-log p``. With s the derivative of
the last term with respect to f, the gradient therefore has the additional term

    v' (dm + dK a + K dg),        (I + H K) v = s

If H = W, one more solve with the same matrix gives ``v = (K + D)^-1 D s``.
"""

from typing import Any

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from gpytorch.mlls import ExactMarginalLogLikelihood, MarginalLogLikelihood
from linear_operator.operators import LinearOperator
from torch import Tensor

from gpytorch_gaps import settings
from gpytorch_gaps.laplace.densities import check_observations, curvature, derivatives, is_curvature
from gpytorch_gaps.laplace.mode import LaplaceMode, covariances, noisy_covariance, pseudo_noise
from gpytorch_gaps.laplace.model import LaplaceGP
from gpytorch_gaps.laplace.shared import reusing
from gpytorch_gaps.operators.noisy import NoisyGridOperator
from gpytorch_gaps.posterior.train_covariance import wide_product

_MAX_CORRECTIONS = 50
_LEAST_TOLERANCE = 1e-9  # smallest tolerance, relative to s


class LaplaceMarginalLogLikelihood(ExactMarginalLogLikelihood):
    """Laplace's approximation of the log marginal likelihood of a :class:`LaplaceGP`, per observation.

    Use it like ``gpytorch.mlls.ExactMarginalLogLikelihood``: ``loss = -mll(model(x), y)``. Its gradient includes the
    change of the mode with the hyperparameters. Every call computes the mode again, starting from that of the last
    call.

    :param likelihood: the model's likelihood.
    :param model: the model.
    :raises ValueError: if the model is not a :class:`LaplaceGP`.

    >>> import gpytorch, torch, gpytorch_gaps as gaps
    >>> class Model(gaps.LaplaceGP):
    ...     def __init__(self, x, y, likelihood, grid):
    ...         super().__init__(x, y, likelihood)
    ...         self.mean_module = gpytorch.means.ConstantMean()
    ...         self.covar_module = gaps.GappyGridKernel([gpytorch.kernels.RBFKernel()], grid)
    ...     def forward(self, x):
    ...         return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
    >>> grid, x, y = gaps.from_array(torch.tensor([1.0, 0.0, torch.nan, 3.0, 4.0, 7.0]))
    >>> model = Model(x, y, gpytorch.likelihoods.PoissonLikelihood(), grid)
    >>> mll = gaps.LaplaceMarginalLogLikelihood(model.likelihood, model)
    >>> loss = -mll(model.train()(x), y)
    >>> loss.backward()
    >>> bool(model.mean_module.raw_constant.grad != 0)
    True
    """

    def __init__(self, likelihood: Likelihood, model: LaplaceGP) -> None:
        if not isinstance(model, LaplaceGP):
            raise ValueError(f"model: got {type(model).__name__}, expected a LaplaceGP")
        MarginalLogLikelihood.__init__(self, likelihood, model)  # the parent class requires a Gaussian likelihood

    def forward(self, function_dist: MultivariateNormal, target: Tensor, *params: Any, **kwargs: Any) -> Tensor:
        """The approximate log marginal likelihood, divided by the number of observations.

        :param function_dist: the prior at the observations, ``model(x)`` in training mode.
        :param target: the observations. shape: (N,)
        :raises ValueError: if an observation is impossible under the likelihood.
        """
        if target is not self.model.train_targets:
            check_observations(self.likelihood, target, function_dist.mean.size(-1), "target")
        mode = self.model.find_mode(function_dist, target)
        total = log_marginal(function_dist, self.likelihood, target.double(), mode)
        total = self._add_other_terms(total.to(function_dist.mean.dtype), params)
        return total / target.size(-1)


def log_marginal(prior: MultivariateNormal, likelihood: Likelihood, y: Tensor, mode: LaplaceMode) -> Tensor:
    """Laplace's approximation of ``log p(y)``. Differentiable."""
    kernel = covariances(prior)
    latent = mode.latent.detach().requires_grad_()
    value, slope, information = derivatives(likelihood, latent, y)
    noise = pseudo_noise(information, mode.least)
    noisy = noisy_covariance(kernel, noise)
    _, logdet = noisy.inv_quad_logdet(logdet=True)
    half = 0.5 * (noise.log().sum() - logdet.double())
    curved = information.detach() if is_curvature(likelihood) else curvature(likelihood, latent, y)
    moved = _moved(noisy, kernel.detach(), half, latent, curved, mode)
    image = kernel @ (0.5 * mode.weights + moved).to(kernel.dtype).unsqueeze(-1)
    by_prior = (image.squeeze(-1).double() * mode.weights).sum()
    by_mean = (prior.mean.double() * (mode.weights + moved)).sum()
    by_slope = (wide_product(kernel.detach(), moved.unsqueeze(-1)).squeeze(-1) * slope).sum()
    surrogate = value.sum() + by_prior + by_mean + by_slope + half  # has the gradient of the result
    result = value.sum() - 0.5 * mode.weights @ (mode.latent - prior.mean.double()) + half
    return result.detach() + (surrogate - surrogate.detach())


def _moved(
    noisy: NoisyGridOperator, kernel: LinearOperator, half: Tensor, latent: Tensor, curvature: Tensor, mode: LaplaceMode
) -> Tensor:
    """v with ``(I + H K) v = s``. shape: (N,)

    For u = K v, this is ``(K^-1 + H) u = s``, with a matrix that is positive definite at a mode. Conjugate gradients
    with the preconditioner ``(K^-1 + W)^-1 = K (K + D)^-1 D`` compute v together with u. If H = W, one step is enough.
    """
    if not (torch.is_grad_enabled() and half.requires_grad):
        return torch.zeros_like(mode.weights)
    (slope,) = torch.autograd.grad(half, latent, retain_graph=True, allow_unused=True)
    if slope is None or not bool(slope.any()):
        return torch.zeros_like(mode.weights)
    config = settings.current().for_training()
    tolerance = max(_LEAST_TOLERANCE, config.tolerance) * slope.norm()

    @torch.no_grad()
    def preconditioned(residual: Tensor) -> tuple[Tensor, Tensor]:
        v = noisy.solve_columns((mode.noise * residual).unsqueeze(-1), config).solution.squeeze(-1)
        return v, wide_product(kernel, v.unsqueeze(-1)).squeeze(-1)

    found, left = torch.zeros_like(slope), slope
    system = noisy.system()
    with reusing(system, system.last_preconditioner):  # the log-determinant has used it for the same matrix
        v, u = preconditioned(left)
        direction, image, merit = v, u, left @ u
        for _ in range(_MAX_CORRECTIONS):
            product = direction + curvature * image
            step = merit / (image @ product)
            found, left = found + step * direction, left - step * product
            if bool(left.norm() <= tolerance):
                break
            v, u = preconditioned(left)
            before, merit = merit, left @ u
            direction, image = v + merit / before * direction, u + merit / before * image
    return found
