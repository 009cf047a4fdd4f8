"""The cost of a filling, counted in factorisations and solves: one dense factor for a series, one solve for a mean."""

from collections import Counter

import gpytorch
import linear_operator
import numpy as np
import pytest
import torch
from gpytorch.kernels import MaternKernel

import gpytorch_gaps as gaps
from gpytorch_gaps.filling.learning import predict
from gpytorch_gaps.filling.process import in_memory
from gpytorch_gaps.posterior import drawn_variance
from gpytorch_gaps.posterior import parts as _posterior_parts

PLACES = 150


@pytest.fixture
def counted(monkeypatch):
    """How often matrices of each size were decomposed, by kind."""
    counts = Counter()
    for name in ("eigh", "cholesky_ex", "svd"):
        original = getattr(torch.linalg, name)

        def count(matrix, *args, _name=name, _original=original, **options):
            counts[_name, matrix.size(-1)] += 1
            return _original(matrix, *args, **options)

        monkeypatch.setattr(torch.linalg, name, count)
    return counts


def series():
    rng = np.random.default_rng(0)
    t = np.arange(float(PLACES))
    values = np.sin(t / 5) + 0.3 * np.cumsum(rng.standard_normal(PLACES)) + 0.1 * rng.standard_normal(PLACES)
    values[rng.random(PLACES) < 0.2] = np.nan
    values[60:75] = np.nan
    return values


def test_a_series_takes_one_dense_factor_and_no_eigen_decomposition(monkeypatch, counted):
    monkeypatch.setattr(predict, "_MAX_DENSE", 40)  # so that a dense solve has to be chosen
    monkeypatch.setattr(_posterior_parts, "_CPU_CACHE_NUMBERS", 10 * PLACES)  # and points are predicted ten at a time
    prediction = in_memory.Prediction

    def after_training(*args):
        counted.clear()
        return prediction(*args)

    monkeypatch.setattr(in_memory, "Prediction", after_training)
    values = series()
    result = gaps.fill_gaps(values, kernels=[MaternKernel(nu=0.5)], steps=2, check=False, progress=False)
    assert result.report.solve.method == "cholesky"
    assert result.report.std_method == "exact"
    assert counted == {("cholesky_ex", int((~np.isnan(values)).sum())): 1}


def test_a_long_series_says_that_neighbours_gave_its_standard_deviations(monkeypatch):
    monkeypatch.setattr(predict, "_MAX_DENSE", 0)
    monkeypatch.setattr(predict, "_MAX_EXACT_VARIANCE_FLOPS", 0.0)
    result = gaps.fill_gaps(series(), kernels=[MaternKernel(nu=0.5)], steps=2, check=False, progress=False)
    assert result.report.std_method == "from the nearest observations"


@pytest.mark.parametrize("check", [False, True])
def test_the_mean_is_solved_for_once(monkeypatch, check):
    monkeypatch.setattr(predict, "_MAX_DENSE", 0)  # iterative
    values = series()[:120].reshape(12, 10)
    with gaps.record_solves() as solves:
        gaps.fill_gaps(values, kernels=[MaternKernel(), MaternKernel()], steps=2, check=check, progress=False)
    assert sum(solve.num_rhs == 1 for solve in solves) == 1 + check  # another one for the withheld observations


def test_loose_solves_of_draws_save_iterations_and_hardly_change_error_bars(monkeypatch):
    monkeypatch.setattr(predict, "_MAX_DENSE", 0)
    monkeypatch.setattr(predict, "_MAX_EXACT_VARIANCE_FLOPS", 0.0)
    monkeypatch.setattr(drawn_variance, "_NEGLIGIBLE", -1.0)  # draws are made in any case
    values = np.concatenate([series()] * 3).reshape(30, 15)
    std, iterations = [], []
    for residual in (0.0, predict._DRAW_RESIDUAL):
        monkeypatch.setattr(predict, "_DRAW_RESIDUAL", residual)
        with gaps.record_solves() as solves:
            found = gaps.fill_gaps(values, kernels=[MaternKernel(), MaternKernel()], steps=2, progress=False)
        assert found.report.std_method.endswith("samples")
        std.append(found.std[np.isnan(values)])
        iterations.append([solve.iterations for solve in solves if solve.num_rhs == 16])
    assert sum(iterations[1]) < sum(iterations[0])
    assert len(iterations[1]) == 2  # for the check, which takes its draws from its variances, and for error bars
    np.testing.assert_allclose(std[1], std[0], rtol=0.005)


class Model(gpytorch.models.ExactGP):
    def __init__(self, grid, x, y, *kernels):
        super().__init__(x, y, gaps.GappyGridLikelihood())
        self.grid, self.mean_module = grid, gpytorch.means.ZeroMean()
        self.covar_module = sum(
            (gaps.GappyGridKernel(own, grid) for own in kernels[1:]), gaps.GappyGridKernel(kernels[0], grid)
        )

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def model():
    values = torch.from_numpy(series()[:144]).reshape(12, 12)
    return Model(*gaps.from_array(values), [MaternKernel(nu=0.5), MaternKernel()]).double()


def test_a_sum_along_a_series_takes_one_dense_factor_and_no_eigen_decomposition(counted):
    ours = Model(*gaps.from_array(series()), [MaternKernel(nu=0.5)], [MaternKernel()]).double().eval()
    with torch.no_grad(), linear_operator.settings.max_cholesky_size(40):
        posterior = ours(ours.grid.points())
        posterior.mean, posterior.variance  # noqa: B018
    assert counted == {("cholesky_ex", len(ours.train_targets)): 1}


def test_exact_variances_in_many_chunks_take_one_factor(monkeypatch, counted):
    monkeypatch.setattr(_posterior_parts, "_CPU_CACHE_NUMBERS", 5 * 144)
    ours = model().eval()
    with torch.no_grad(), linear_operator.settings.max_cholesky_size(200), gaps.record_solves() as solves:
        found = ours(ours.grid.points()).variance
    assert "in 29 chunks" in solves.variances[-1].reason
    observed = len(ours.train_targets)
    assert counted["cholesky_ex", observed] == 1
    x = ours.train_inputs[0]
    with torch.no_grad():
        matrix = ours.covar_module(x).to_dense() + ours.likelihood.noise * torch.eye(observed)
        cross = ours.covar_module(ours.grid.points(), x).to_dense()
    expected = 1.0 - (cross @ torch.linalg.solve(matrix, cross.mT)).diagonal()
    assert torch.allclose(found, expected, rtol=1e-6)


def test_an_exact_training_step_takes_one_factor(counted):
    ours = model().train()
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(ours.likelihood, ours)
    loss = -mll(ours(*ours.train_inputs), ours.train_targets)
    loss.backward()
    assert counted["cholesky_ex", len(ours.train_targets)] == 1


def test_a_posterior_in_current_settings_is_worked_out_in_these():
    ours = model().eval()
    with torch.no_grad(), gaps.settings.variance_method("exact"):
        covariance = ours(ours.grid.points()).lazy_covariance_matrix
    with torch.no_grad(), gaps.settings.variance_method("pathwise"), gaps.record_solves() as solves:
        covariance.in_current_settings().diagonal()
    assert solves.variances[-1].method == "pathwise"
