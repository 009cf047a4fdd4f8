"""Nothing depends on the units of the data: in units of 1e-6 the numbers are a million times as large, or as small."""

import math
import warnings

import gpytorch
import pytest
import torch
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import LinearKernel, MaternKernel, RBFKernel, ScaleKernel
from linear_operator.operators import DiagLinearOperator

import gpytorch_gaps as gaps
from gpytorch_gaps import settings
from tests.workflow._pairs import Model, gappy, with_length

units = pytest.mark.parametrize("unit", [1e-6, 1e6, 1e-15])
precisions = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}


@pytest.fixture(autouse=True)
def _no_floors():
    """GPyTorch's floor under variances would say so."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", gpytorch.utils.warnings.NumericalWarning)
        yield


def model_in(unit, dtype=torch.float64):
    """A model of data that are `unit` times as large, and its grid."""
    axes, values = gappy((10, 9), 0.4, 0)
    grid, x, y = gaps.from_array((unit * values).to(dtype), [axis.to(dtype) for axis in axes])
    kernels = [with_length(RBFKernel(), 0.3), with_length(MaternKernel(nu=1.5), 0.4)]
    likelihood = gaps.GappyGridLikelihood(noise_constraint=GreaterThan(1e-37))
    model = Model(x, y, likelihood, ScaleKernel(gaps.GappyGridKernel(kernels, grid))).to(dtype)
    model.covar_module.outputscale = 1.3 * unit**2
    model.likelihood.noise = 0.03 * unit**2
    model.mean_module.constant = 0.2 * unit
    return model.eval(), grid


def same_score(got, expected, unit, tolerance):
    for name in ("rmse", "mae", "crps", "interval"):
        assert getattr(got, name) == pytest.approx(unit * getattr(expected, name), rel=tolerance), name
    assert got.nlpd == pytest.approx(expected.nlpd + math.log(unit), abs=tolerance)
    assert got.coverage == expected.coverage


@units
@precisions
def test_scores_of_a_prediction(dtype, unit):
    results = []
    for own in (1.0, unit):
        model, grid = model_in(own, dtype)
        x = grid.points() + 0.01
        with torch.no_grad():
            results.append(gaps.score(model.likelihood(model(x)), own * torch.sin(5 * x).sum(-1)))
    same_score(results[1], results[0], unit, TOLERANCE[dtype])


@units
@precisions
@pytest.mark.parametrize("groups", [None, 4], ids=["each", "groups"])
def test_scores_of_what_was_left_out(groups, dtype, unit):
    results = []
    for own in (1.0, unit):
        model, _ = model_in(own, dtype)
        labels = None if groups is None else torch.arange(len(model.train_targets)) // groups
        results.append(gaps.score(gaps.leave_out(model, labels), model.train_targets))
    same_score(results[1], results[0], unit, TOLERANCE[dtype])


@units
@precisions
@pytest.mark.parametrize("method", ["exact", "low_rank", "pathwise"])
def test_variances_and_their_stated_errors(method, dtype, unit):
    results = []
    for own in (1.0, unit):
        model, grid = model_in(own, dtype)
        torch.manual_seed(0)
        with (
            torch.no_grad(),
            settings.variance_method(method),
            settings.preconditioner_rank(20),
            gaps.record_solves() as solves,
        ):
            covariance = model(grid.points()[::3] + 0.01).lazy_covariance_matrix
            variance = covariance.diagonal(dim1=-1, dim2=-2)
        results.append([number.double() / own**2 for number in (variance, solves.variances[0].error)])
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(results[1][0], results[0][0], rtol=tolerance, atol=tolerance)
    assert float(results[1][1].mean()) == pytest.approx(float(results[0][1].mean()), rel=0.02)


@units
def test_draws_scale_with_the_unit(unit):
    draws = []
    for own in (1.0, unit):
        model, grid = model_in(own)
        with torch.no_grad():
            draws.append(gaps.sample_posterior(model, grid, 3, noise=True, seed=0) / own)
    torch.testing.assert_close(draws[1], draws[0], rtol=1e-5, atol=1e-5)


@units
def test_draws_of_a_sum_with_a_low_rank_kernel(unit):
    draws = []
    for own in (1.0, unit):
        model, grid = model_in(own)
        linear = LinearKernel().double()
        linear.variance = 0.7 * own**2
        model.covar_module = model.covar_module + linear
        with torch.no_grad():
            draws.append(gaps.sample_posterior(model, grid, 3, seed=0) / own)
    torch.testing.assert_close(draws[1], draws[0], rtol=1e-5, atol=1e-5)


@units
def test_a_certain_prediction_is_scored_by_its_error(unit):
    """A standard deviation of zero is not lifted: its CRPS is the absolute error, the density of the truth zero."""
    certain = gpytorch.distributions.MultivariateNormal(
        torch.zeros(2).double(), DiagLinearOperator(torch.zeros(2).double())
    )
    got = gaps.score(certain, torch.tensor([-1.0 * unit, 3.0 * unit], dtype=torch.float64))
    assert got.crps == got.mae == 2.0 * unit
    assert (got.nlpd, got.coverage) == (math.inf, 0.0)
    assert gaps.score(certain, torch.zeros(2)).nlpd == -math.inf


def test_the_check_of_a_filling():
    """Its held-out scores are in the units of the data."""
    axes, values = gappy((14, 12), 0.3, 0)
    results = []
    for unit in (1.0, 1e-6):
        kernels = [with_length(RBFKernel(), 0.3), with_length(MaternKernel(nu=1.5), 0.4)]
        results.append(gaps.fill_gaps(unit * values, axes, kernels, progress=False).report.held_out)
    same_score(results[1], results[0], 1e-6, 1e-2)
