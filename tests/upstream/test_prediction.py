"""Traps in GPyTorch's exact prediction: what the likelihood, the operators and the tolerances of ours answer."""

import math

import gpytorch
import linear_operator
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import MaternKernel, RBFKernel
from gpytorch.likelihoods import GaussianLikelihood
from linear_operator.operators import AddedDiagLinearOperator, DenseLinearOperator, DiagLinearOperator

from tests.upstream._helpers import PlainGP, changed, gaussian_likelihood, normal


class OwnOperator(DenseLinearOperator):
    """A kernel matrix that becomes an `OwnAddedDiag` when noise is added."""

    def __add__(self, other):
        return OwnAddedDiag(self, other) if isinstance(other, DiagLinearOperator) else super().__add__(other)


class OwnAddedDiag(AddedDiagLinearOperator):
    pass


class OwnKernel(RBFKernel):
    def forward(self, x1, x2, diag=False, **params):
        covariance = super().forward(x1, x2, diag=diag, **params)
        return covariance if diag else OwnOperator(covariance)


class EvaluatingLikelihood(GaussianLikelihood):
    """The remedy: evaluate, then add the noise."""

    def marginal(self, function_dist, *args, **kwargs):
        covariance = function_dist.lazy_covariance_matrix.evaluate_kernel()
        return super().marginal(MultivariateNormal(function_dist.mean, covariance), *args, **kwargs)


def solved_with(likelihood, monkeypatch):
    """The classes that solved for the predictive mean and the predictive covariance."""
    solvers = []
    upstream = AddedDiagLinearOperator.solve

    def spy(operator, *args, **kwargs):
        solvers.append(type(operator))
        return upstream(operator, *args, **kwargs)

    x = torch.linspace(0, 1, 20, dtype=torch.float64).unsqueeze(-1)
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(AddedDiagLinearOperator, "solve", spy)
        _ = PlainGP(x, x.squeeze(-1).sin(), likelihood, OwnKernel()).eval()(x[:3] + 0.01).variance
    return solvers


def test_predictive_covariance_never_evaluates_the_kernel(monkeypatch):
    """Trap: `exact_predictive_covar` solves with a plain AddedDiag over the lazy kernel, so our operator is not asked.

    Answered by the likelihood, whose `marginal` evaluates first.
    """
    where = "gpytorch_gaps.likelihoods"
    assert solved_with(gaussian_likelihood(0.1), monkeypatch) == [OwnAddedDiag, AddedDiagLinearOperator], changed(
        "exact_predictive_covar no longer solves with a plain AddedDiagLinearOperator", where
    )
    assert solved_with(EvaluatingLikelihood().double(), monkeypatch) == [OwnAddedDiag, OwnAddedDiag], changed(
        "a likelihood that evaluates first no longer brings its operator to the solve", where
    )


def test_predictive_variance_at_default_tolerance():
    """Trap: with eval_cg_tolerance 0.01, variances at 900 points are several times too large. See settings."""
    axis = torch.linspace(0, 1, 30, dtype=torch.float64)
    train_x = torch.cartesian_prod(axis, axis)
    kernel = MaternKernel(nu=1.5)
    kernel.lengthscale = 0.3
    test_x = torch.sigmoid(normal(10, 2))

    def variance():
        model = PlainGP(train_x, torch.sin(6 * train_x.sum(-1)), gaussian_likelihood(1e-3), kernel).eval()
        with torch.no_grad():
            return model(test_x).variance

    rough = variance()
    with linear_operator.settings.max_cholesky_size(1000):
        exact = variance()
    error = ((rough - exact).abs() / exact).max()
    message = changed("predictive variances by default are no longer off by a factor", "gpytorch_gaps.settings")
    assert error > 2, message


def test_nan_policy_mask():
    """Trap: under observation_nan_policy("mask") variances know the gaps' data and the MLL is divided by M, not N.

    Answered by never building on it: gpytorch_gaps.from_array drops gaps from the training data.
    """
    where = "gpytorch_gaps.grid.data.from_array"
    x = torch.linspace(0, 1, 40, dtype=torch.float64).unsqueeze(-1)
    y = torch.sin(6 * x.squeeze(-1))
    y[10:30] = math.nan
    observed = ~y.isnan()
    kernel = RBFKernel()
    kernel.lengthscale = 0.05
    inside = x[20:21] + 1e-6

    def variance_and_mll(train_x, train_y):
        likelihood = gaussian_likelihood(0.01)
        model = PlainGP(train_x, train_y, likelihood, kernel)
        mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
        with torch.no_grad():
            value = mll(model(train_x), train_y)
            return float(model.eval()(inside).variance), float(value)

    variance, mll = variance_and_mll(x[observed], y[observed])
    with gpytorch.settings.observation_nan_policy("mask"):
        masked_variance, masked_mll = variance_and_mll(x, y)
    assert variance > 0.99
    assert masked_variance < 0.01, changed("the mask policy no longer conditions variances on the gaps", where)
    ratio = masked_mll / mll
    assert math.isclose(ratio, int(observed.sum()) / len(y), rel_tol=1e-6), changed(
        "under the mask policy the MLL is no longer divided by the number of cells, gaps included", where
    )
