"""The mode of the latent function, by Newton's method: every step is a regression on Gaussian pseudo-observations.

    max_f  log p(y | f) - (f - m)' K^-1 (f - m) / 2,        f = m + K a

At f, let g be the slopes of ``log p`` and W its information. The next iterate of Newton's method is the posterior mean
given observations ``z = f + g / W`` with the noise ``D = 1 / W`` (Flaxman et al. 2015):

    (K + D) a = z - m

A line search prevents the objective from decreasing. At the mode, ``a = g``. Elsewhere, ``|D^(1/2) (a - g)|`` is a
bound on the error of the mean at any point, in units of its standard deviation.

If W is an expected information, steps use the maximum of W and the curvature H of ``-log p``. With W alone, they would
be too long where the data are more informative than expected. For Student's t, steps are those of EM: outliers have
small weights, and do not slow down the others.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import Likelihood
from linear_operator.operators import DiagLinearOperator, LinearOperator
from torch import Tensor

from gpytorch_gaps.laplace.densities import derivatives, is_curvature, log_density, step_information
from gpytorch_gaps.laplace.shared import SharedPreconditioner
from gpytorch_gaps.operators.inspect import grid_covariance
from gpytorch_gaps.operators.noisy import NoisyGridOperator
from gpytorch_gaps.posterior.train_covariance import wide_product
from gpytorch_gaps.reports import NotConvergedWarning, one_report
from gpytorch_gaps.solvers.config import SolveConfig

_MAX_STEPS = 200
_MAX_HALVINGS = 30
_ENOUGH_OF_SLOPE = 1e-4  # a step must achieve this fraction of the increase predicted by the slope
_SOLVE_SHARE = 0.1  # largest error of a solve, as a fraction of the current error
_NEXT_ERROR = 0.5  # the error after a Newton step, relative to the square of the current error of each observation
_LEAST_INFORMATION = 1e-8  # over the prior variance; an observation with less has no effect


@dataclass(frozen=True, eq=False)
class LaplaceMode:
    """The mode of the latent function at the observations, and the Gaussian observations that replace the data.

    :param weights: a. The mean at any point x is ``m(x) + k(x, X) a``. shape: (N,)
    :param latent: f = m + K a. shape: (N,)
    :param targets: pseudo-observations z. shape: (N,)
    :param noise: their variances D. shape: (N,)
    :param objective: ``log p(y | f) - a' K a / 2``.
    :param least: lower bound on the information of an observation.
    :param steps: number of Newton steps.
    :param error_in_std: bound on the error of the mean, in units of its standard deviation.
    :param converged: whether the bound is within the tolerance.
    """

    weights: Tensor
    latent: Tensor
    targets: Tensor
    noise: Tensor
    objective: float
    least: float
    steps: int
    error_in_std: float
    converged: bool


def covariances(prior: MultivariateNormal) -> LinearOperator:
    """The covariance of the latent function at the observations, evaluated."""
    kernel = grid_covariance(prior.lazy_covariance_matrix)
    if kernel.batch_shape:
        raise ValueError(f"LaplaceGP: got a batch {tuple(kernel.batch_shape)} of models, expected one")
    return kernel


def noisy_covariance(kernel: LinearOperator, noise: Tensor) -> NoisyGridOperator:
    """``K + D`` as an operator of this package."""
    noisy = kernel + DiagLinearOperator(noise.to(kernel.dtype))
    if not isinstance(noisy, NoisyGridOperator):
        raise ValueError(
            f"LaplaceGP: covar_module: got a covariance of type {type(kernel).__name__}, expected a kernel with a "
            "GappyGridKernel in it"
        )
    return noisy


@torch.no_grad()
def find_mode(
    prior: MultivariateNormal,
    likelihood: Likelihood,
    y: Tensor,
    config: SolveConfig,
    tolerance: float,
    starts: Sequence[Tensor] = (),
) -> LaplaceMode:
    """The mode of the latent function.

    :param prior: distribution of the latent function at the observations.
    :param likelihood: likelihood of the observations.
    :param y: observations. shape: (N,)
    :param config: configuration of the solves.
    :param tolerance: largest error of the mean, in units of its standard deviation.
    :param starts: candidates for the first weights a. The best is used. If none has a finite objective, iterations
        start from the prior mean. shape: (N,)
    """
    newton = _Newton(prior, likelihood, y, config, tolerance)
    states = [own for own in map(newton.at, starts) if math.isfinite(own.objective)]
    found = max(states, key=lambda own: own.objective) if states else newton.at(torch.zeros_like(newton.mean))
    if not math.isfinite(found.objective):
        raise ValueError(
            f"LaplaceGP: got log p(y | f) = {found.objective} at the prior mean, expected a finite number. Try: a "
            "constant mean near the data, on the scale of the latent function"
        )
    with one_report():  # one report for all solves
        while found.steps < _MAX_STEPS and found.error_in_std > tolerance:
            better = newton.step(found)
            if better is None:
                break
            found = better
    found = replace(found, converged=found.error_in_std <= tolerance)
    if not found.converged:
        warnings.warn(
            f"LaplaceGP: after {found.steps} steps of Newton's method, the error of the mean may be "
            f"{found.error_in_std:.1e} of its standard deviation, more than the tolerance of {tolerance:.1e}. Try: "
            "more max_iterations, a mean function near the data, or a larger mean_tolerance.",
            NotConvergedWarning,
            stacklevel=3,
        )
    return found


class _Newton:
    """The problem, and its Newton steps."""

    def __init__(
        self, prior: MultivariateNormal, likelihood: Likelihood, y: Tensor, config: SolveConfig, tolerance: float
    ) -> None:
        self.kernel = covariances(prior).detach()
        self.mean = prior.mean.detach().double()
        self.likelihood, self.y, self.config, self.tolerance = likelihood, y.double(), config, tolerance
        self.shared = SharedPreconditioner()
        self.least = _LEAST_INFORMATION / float(self.kernel.diagonal(dim1=-1, dim2=-2).max())

    def at(self, weights: Tensor, latent: Tensor | None = None, steps: int = 0) -> LaplaceMode:
        """The state for some weights a; f is computed if it is not given."""
        if latent is None:
            latent = self.mean + wide_product(self.kernel, weights.unsqueeze(-1)).squeeze(-1)
        value, slope, information = (part.detach() for part in derivatives(self.likelihood, latent, self.y))
        noise = pseudo_noise(information, self.least).to(self.kernel.dtype).double()
        error = float((noise.sqrt() * (weights - slope)).norm())
        objective = float(value.sum() - 0.5 * weights @ (latent - self.mean))
        return LaplaceMode(weights, latent, latent + noise * slope, noise, objective, self.least, steps, error, False)

    def step(self, now: LaplaceMode) -> LaplaceMode | None:
        """The next state; None if the objective cannot be increased."""
        deserved = min(_SOLVE_SHARE, _NEXT_ERROR * now.error_in_std / math.sqrt(len(now.noise)))
        wanted = max(deserved * min(now.error_in_std, 1.0), 0.5 * self.tolerance)
        config = self.config.replace(tolerance=max(self.config.tolerance, min(0.5, wanted)), mean_tolerance=wanted)
        noise, slope = now.noise, (now.targets - now.latent) / now.noise
        if not is_curvature(self.likelihood):
            information = step_information(self.likelihood, now.latent, self.y, 1.0 / noise)
            noise = pseudo_noise(information, self.least).to(self.kernel.dtype).double()
        noisy = noisy_covariance(self.kernel, noise)
        rhs, guess = (now.latent + noise * slope - self.mean).unsqueeze(-1), now.weights.unsqueeze(-1)
        with self.shared.serving(noisy.system()):
            weights = noisy.solve_columns(rhs, config, guess=guess, of_data=True).solution.squeeze(-1)
        latent = self.mean + wide_product(self.kernel, weights.unsqueeze(-1)).squeeze(-1)
        share = self._line_search(now, slope, weights - now.weights, latent - now.latent)
        if share is None:
            return None
        mixed = torch.lerp(now.weights, weights, share), torch.lerp(now.latent, latent, share)
        return self.at(*mixed, steps=now.steps + 1)

    def _line_search(self, now: LaplaceMode, slope: Tensor, weights: Tensor, latent: Tensor) -> float | None:
        """The largest fraction 1, 1/2, 1/4, .. of a step that increases the objective enough; None if there is none.

        :param slope: slopes of ``log p`` at the current f.
        :param weights: change of a.
        :param latent: change of f.
        """
        promised = float((slope - now.weights) @ latent)
        rounding = 1e-13 * abs(now.objective)
        share = 1.0
        for _ in range(_MAX_HALVINGS):
            f, a = now.latent + share * latent, now.weights + share * weights
            reached = float(log_density(self.likelihood, f, self.y).sum() - 0.5 * a @ (f - self.mean))
            if reached >= now.objective + _ENOUGH_OF_SLOPE * share * promised - rounding:
                return share
            share /= 2.0
        return None


def pseudo_noise(information: Tensor, least: float) -> Tensor:
    """``1 / W``, bounded for observations with almost no information. shape: (N,)"""
    return information.clamp_min(least).reciprocal()
