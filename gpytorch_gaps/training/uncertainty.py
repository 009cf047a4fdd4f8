"""The uncertainty of hyperparameters by Laplace's approximation, and its effect on error bars.

Let u be hyperparameters in :mod:`~gpytorch_gaps.training.coordinates` without bounds, and g(u) the gradient of the
negative log likelihood in nats. With the Hessian H at the optimum, by central differences of g, the posterior of u is
taken to be normal with the covariance ``H^-1``. That assumes a flat prior of u, which is the usual one for scales.

Predictions average over it. Along each principal axis ``c_i`` of the covariance, the Gauss-Hermite rule of three points
has nodes ``u, u +- sqrt(3) c_i`` with weights 2/3, 1/6, 1/6. The law of total variance,

    Var[f] = E_u[v(u)] + Var_u[m(u)],

is applied with effects of the axes that are added in the mean m and multiplied in the variance v, so that both terms
are positive for any number of axes. It takes ``2 P + 1`` predictions for P hyperparameters. Like the delta method,
which uses derivatives, it is correct to second order. Unlike the delta method, it includes the effect of large changes,
of 1.7 standard deviations, and needs no step size.
"""

from dataclasses import dataclass

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.models import ExactGP
from linear_operator.operators import DiagLinearOperator
from torch import Tensor

from gpytorch_gaps.posterior.strategy import predicting
from gpytorch_gaps.training.coordinates import Coordinates


@dataclass(frozen=True, eq=False)
class HyperparameterUncertainty:
    """The uncertainty of the hyperparameters of a model: ``fit(..., uncertainty=True).uncertainty``.

    Laplace's approximation: the posterior of the hyperparameters is normal around the optimum, in coordinates without
    bounds. Its covariance is the inverse Hessian of the negative log likelihood. The coordinate of a value above a
    bound, such as a length-scale or noise, is the logarithm of its distance from the bound. That of a value between two
    bounds is the logarithm of its odds. Other values are their own coordinates.

    :param names: names of the P hyperparameters, such as "covar_module.outputscale", or "likelihood.noise[2]" for one
        of several.
    :param values: values of the hyperparameters at the optimum. shape: (P,)
    :param standard_errors: standard errors of these values. shape: (P,)
    :param coordinates: coordinates at the optimum. shape: (P,)
    :param covariance: covariance of the coordinates. shape: (P, P)
    :param axes: its principal axes, each with the length of a standard deviation: ``axes @ axes.T`` is the covariance.
        shape: (P, P)
    :param unknown: names of hyperparameters that the data hardly determine. Their standard deviation is limited to a
        factor of 7.
    :param expected_gain: expected log-likelihood of the optimum minus that of these values, in nats.

    >>> import gpytorch, torch, gpytorch_gaps as gaps
    >>> class Model(gpytorch.models.ExactGP):
    ...     def __init__(self, x, y, likelihood, grid):
    ...         super().__init__(x, y, likelihood)
    ...         self.mean_module = gpytorch.means.ZeroMean()
    ...         self.covar_module = gaps.GappyGridKernel([gpytorch.kernels.RBFKernel()], grid)
    ...     def forward(self, x):
    ...         return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
    >>> _ = torch.manual_seed(0)
    >>> values = torch.linspace(0, 9, 40).sin() + 0.1 * torch.randn(40)
    >>> values[15:24] = torch.nan
    >>> grid, x, y = gaps.from_array(values.double())
    >>> model = Model(x, y, gaps.GappyGridLikelihood(), grid).double()
    >>> known = gaps.fit(model, progress=False, uncertainty=True).uncertainty
    >>> known.names
    ['likelihood.noise_covar.noise', 'covar_module.kernels.0.lengthscale']
    >>> wider = known.predict(model, grid.points())
    >>> bool((wider.variance > model(grid.points()).variance)[15:24].all())
    True
    """

    names: list[str]
    values: Tensor
    standard_errors: Tensor
    coordinates: Tensor
    covariance: Tensor
    axes: Tensor
    unknown: list[str]
    expected_gain: float

    def predict(self, model: ExactGP, x: Tensor) -> MultivariateNormal:
        """The latent function at some points, averaged over the posterior of the hyperparameters.

        It takes ``2 P + 1`` predictions. ``model.likelihood`` of the result adds the noise at the optimum. The
        parameters of the model do not change.

        :param model: the trained model.
        :param x: points. shape: (n, D)
        :return: the means and the variances, without covariances.
        :raises ValueError: if the model has other hyperparameters.
        """
        coordinates = Coordinates(model)
        if coordinates.names != self.names:
            raise ValueError(f"model: got one with {coordinates.names}, expected the trained one with {self.names}")
        with predicting(model, progress=False), coordinates.restored():
            mean, variance = _moments(model, coordinates, self.coordinates, x)
            expected, factor, spread = mean.clone(), torch.ones_like(mean), torch.zeros_like(mean)
            for axis in 3.0**0.5 * self.axes.mT:
                above, v_above = _moments(model, coordinates, self.coordinates + axis, x)
                below, v_below = _moments(model, coordinates, self.coordinates - axis, x)
                shift = (above + below - 2.0 * mean) / 6.0  # of the mean, by this axis
                expected += shift
                spread += ((above - mean).square() + (below - mean).square()) / 6.0 - shift.square()
                factor *= (4.0 + v_above / variance + v_below / variance) / 6.0
        model._clear_cache()
        return MultivariateNormal(expected, DiagLinearOperator(factor * variance + spread))

    def __str__(self) -> str:
        width = max(map(len, self.names))
        rows = zip(self.names, self.values.tolist(), self.standard_errors.tolist(), strict=True)
        lines = [
            f"{name:{width}}  " + (f"{value:.3g}, unknown" if name in self.unknown else f"{value:.3g} +- {error:.2g}")
            for name, value, error in rows
        ]
        return "\n".join(lines)


@torch.no_grad()
def _moments(model: ExactGP, coordinates: Coordinates, at: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of the latent function at x, for the given hyperparameters. shape: (n,) each"""
    coordinates.set(at)
    model._clear_cache()
    posterior = model(x)
    return posterior.mean.clone(), posterior.variance.clamp_min(torch.finfo(posterior.mean.dtype).tiny)
