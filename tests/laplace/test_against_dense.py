"""Laplace's approximation on grids with gaps, compared with dense algebra."""

import gpytorch
import linear_operator
import pytest
import torch

import gpytorch_gaps as gaps
from tests._covering import covering
from tests.laplace._dense import Model, dense_laplace, latent, likelihood_and_data

LIKELIHOODS = ["bernoulli", "poisson", "negative binomial", "beta", "student", "gaussian"]
GAPS = ["none", "one", "random", "block", "slice"]
WAYS = ["dense", "iterative"]


def with_gaps(values, shape):
    values = values.clone()
    if shape == "one":
        values[3, 4] = torch.nan
    elif shape == "random":
        values[torch.rand(values.shape, generator=torch.Generator().manual_seed(1)) < 0.4] = torch.nan
    elif shape == "block":
        values[8:20, 5:25] = torch.nan
    elif shape == "slice":
        values[:, 10:15] = torch.nan
    return values


def model_of(name, shape, side=30):
    likelihood, y = likelihood_and_data(name, latent(side))
    t = torch.linspace(0, 4, side, dtype=torch.float64)
    grid, x, y = gaps.from_array(with_gaps(y, shape), [t, t])
    model = Model(x, y, likelihood, grid).double()
    model.covar_module.base_kernel.kernels[0].lengthscale = 0.8
    return model, grid


@covering(name=LIKELIHOODS, shape=GAPS, way=WAYS)
def test_value_gradient_and_moments_are_those_of_dense_algebra(name, shape, way):
    model, grid = model_of(name, shape, 30 if way == "dense" else 20)
    expected = dense_laplace(model, grid.points())
    model.zero_grad()
    iterative = way == "iterative"
    with (
        gaps.settings.mean_tolerance(1e-6),
        gaps.settings.solve_tolerance(1e-8),
        gaps.settings.train_tolerance(1e-9),
        gaps.settings.logdet_method("exact"),
        gaps.settings.dense_size(0 if iterative else 2_000),
        linear_operator.settings.max_cholesky_size(0 if iterative else 2_000),
    ):
        mll = gaps.LaplaceMarginalLogLikelihood(model.likelihood, model)
        value = mll(model.train()(*model.train_inputs), model.train_targets) * len(model.train_targets)
        value.backward()
        with torch.no_grad():
            posterior = model.eval()(grid.points())
            mean, variance = posterior.mean, posterior.variance
    assert value.item() == pytest.approx(expected.log_marginal, rel=1e-6)
    for parameter, gradient in ((key, own.grad) for key, own in model.named_parameters()):
        torch.testing.assert_close(
            gradient,
            expected.gradients[parameter],
            rtol=1e-5,
            atol=1e-4,
            msg=lambda text, key=parameter: f"{key}: {text}",
        )
    torch.testing.assert_close(mean, expected.mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(variance, expected.variance, rtol=1e-5, atol=1e-5)


def test_with_gaussian_noise_it_is_the_exact_gaussian_process():
    model, grid = model_of("gaussian", "block", 15)

    class Exact(gpytorch.models.ExactGP):
        def __init__(self):
            super().__init__(model.train_inputs, model.train_targets, model.likelihood)
            self.mean_module, self.covar_module, self.forward = model.mean_module, model.covar_module, model.forward

    exact, x = Exact(), grid.points()
    log_evidence = gpytorch.mlls.ExactMarginalLogLikelihood(exact.likelihood, exact)
    approximate = gaps.LaplaceMarginalLogLikelihood(model.likelihood, model)
    with torch.no_grad():
        expected = log_evidence(exact.train()(*exact.train_inputs), exact.train_targets)
        assert approximate(model.train()(*model.train_inputs), model.train_targets).item() == pytest.approx(
            expected.item()
        )
        expected, found = exact.eval()(x), model.eval()(x)
        torch.testing.assert_close(found.mean, expected.mean)
        torch.testing.assert_close(found.variance, expected.variance)
        assert model.mode.steps == 0  # the training mode found it already
