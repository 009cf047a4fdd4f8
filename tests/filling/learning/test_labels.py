"""Labels: their covariance from all observations, their kernel and noise, and tables of many of them."""

import numpy as np
import pandas as pd
import pytest
import torch
from gpytorch.kernels import MaternKernel

import gpytorch_gaps as gaps
from gpytorch_gaps.filling.arrays.grid_values import GridValues
from gpytorch_gaps.filling.axes.describe import describe_axes
from gpytorch_gaps.filling.learning.candidates import KernelLimits, KernelTask, candidates
from gpytorch_gaps.filling.learning.label_factors import analyse, label_factors
from gpytorch_gaps.filling.learning.label_kernel import on_part
from gpytorch_gaps.filling.learning.learn import TrainingData
from gpytorch_gaps.filling.learning.model import TrendMean, make_model
from gpytorch_gaps.filling.learning.window_likelihood import WindowLogLikelihood, WindowTensors
from gpytorch_gaps.filling.learning.windows import whole_window
from gpytorch_gaps.grid.cartesian import CartesianGrid


def table(places=120, labels=18, seed=0):
    """Stations that share three factors and differ in how noisy they are; a third of the cells are gaps."""
    generator = np.random.default_rng(seed)
    time = np.arange(places)
    root = np.linalg.cholesky(np.exp(-np.abs(time[:, None] - time) / 2.0) + 1e-9 * np.eye(places))
    own = np.geomspace(0.3, 1.5, labels)
    loadings = generator.standard_normal((3, labels))
    values = root @ generator.standard_normal((places, 3)) @ (1.2 * loadings / np.linalg.norm(loadings, axis=0))
    values += own * generator.standard_normal((places, labels))
    return values, generator.random(values.shape) < 0.33


def plain(axes):
    """A mean of zero."""
    return TrendMean(0.0, *torch.zeros(2, sum(axis.points.shape[1] for axis in axes), dtype=torch.float64))


def test_the_covariance_of_labels_is_found_in_spite_of_gaps():
    generator = np.random.default_rng(1)
    loadings, own = generator.standard_normal((8, 2)), np.linspace(0.2, 2.0, 8)
    values = generator.standard_normal((4000, 2)) @ loadings.T + np.sqrt(own) * generator.standard_normal((4000, 8))
    values[generator.random(values.shape) < 0.4] = np.nan
    found = analyse(values)
    truth = loadings @ loadings.T + np.diag(own)
    covariance = found.variance * (found.loadings @ found.loadings.T + np.diag(found.own))
    deviation = np.sqrt(np.diag(truth))
    np.testing.assert_allclose(covariance, truth, atol=0.06 * float(np.max(np.outer(deviation, deviation))))
    np.testing.assert_allclose(found.variance * found.own, own, rtol=0.2, atol=0.1)
    assert np.mean(np.diag(covariance)) == pytest.approx(found.variance)


def test_labels_are_not_explained_by_factors_that_are_not_there():
    values = np.random.default_rng(2).standard_normal((60, 30))  # factors would explain a third of it by chance
    found = analyse(values)
    assert (found.loadings**2).sum(axis=1).mean() < 0.1


def test_a_label_without_observations_has_the_variance_of_the_others_and_no_correlations():
    values = np.random.default_rng(3).standard_normal((400, 1)) + 0.3 * np.random.default_rng(4).standard_normal(
        (400, 4)
    )
    values[:, 2] = np.nan
    found = analyse(5.0 * values)
    covariance = found.variance * (found.loadings @ found.loadings.T + np.diag(found.own))
    assert covariance[2, 2] == pytest.approx(25.0 * 1.09, rel=0.2)
    assert abs(covariance[2, 0]) < 0.01 * covariance[0, 0]
    assert covariance[0, 1] == pytest.approx(25.0, rel=0.2)


def test_the_mean_is_subtracted_at_the_cells_of_every_axis():
    axes = describe_axes((30, 3, 4), [np.arange(30.0), list("abc"), np.arange(4.0)])
    mean = plain(axes)
    mean.constant += 7.0
    mean.slopes[0], mean.slopes[2] = 0.5, -2.0
    white = np.random.default_rng(5).standard_normal((30, 3, 4))
    values = white + 7.0 + 0.5 * np.arange(30.0)[:, None, None] - 2.0 * np.arange(4.0)
    expected = analyse(np.moveaxis(white, 1, 2).reshape(-1, 3))
    found = label_factors(values, axes, 1, mean, np.random.default_rng(0))
    np.testing.assert_allclose(found.own, expected.own, rtol=1e-9)
    assert found.variance == pytest.approx(expected.variance)


def test_the_likelihood_of_windows_has_the_noise_of_each_label():
    values, hidden = table(12, 9)
    values[hidden] = np.nan
    axes = describe_axes(values.shape, [None, list("abcdefghi")])
    mean = plain(axes)
    factors = label_factors(values, axes, 1, mean, np.random.default_rng(0))
    listed = candidates(KernelTask(axes, 2.0, [[], []], [None, factors], [None, None], KernelLimits(one_term=True)))
    terms, window = listed[0][1](), whole_window(values)
    data = TrainingData([window], axes, mean, 2.0, 1e-6, labels=(1, factors))
    likelihood = data.make_likelihood()
    grid = CartesianGrid([torch.from_numpy(axis.points) for axis in axes])
    index = torch.from_numpy(np.flatnonzero(~np.isnan(values)))
    model = make_model(grid, index, window.values, terms, likelihood, mean)
    found = WindowLogLikelihood(likelihood, model, terms, [WindowTensors.of(window, axes, mean)])(None, None)

    time, label = np.nonzero(~np.isnan(values))
    between = factors.loadings @ factors.loadings.T + 0.5 * np.diag(factors.own)
    along = terms[0].kernels[0](torch.from_numpy(axes[0].points)).to_dense().detach().numpy()
    noise = 0.5 * factors.variance * factors.own
    covariance = 2.0 * between[np.ix_(label, label)] * along[np.ix_(time, time)] + np.diag(noise[label])
    normal = torch.distributions.MultivariateNormal(torch.zeros(len(time)).double(), torch.from_numpy(covariance))
    prior = sum(p.log_prob(closure(m)).sum().item() for _, m, p, closure, _ in model.named_priors())
    assert found.item() == pytest.approx((normal.log_prob(window.values).item() + prior) / len(time), rel=1e-8)


@pytest.fixture(scope="module")
def filled():
    values, hidden = table()
    columns = [f"station {number}" for number in range(values.shape[1])]
    data = pd.DataFrame(np.where(hidden, np.nan, values), pd.date_range("2001-01-01", periods=len(values)), columns)
    options = {"kernels": {0: MaternKernel(nu=0.5)}, "steps": 15, "check": False, "progress": False, "periods": {0: []}}
    return values, hidden, gaps.fill_gaps(data, **options), gaps.fill_gaps(data, smooth=True, **options)


def test_intervals_of_many_labels_cover_what_they_should(filled):
    values, hidden, found, _ = filled
    off = np.abs(found.mean.to_numpy() - values) / found.std.where(hidden, np.nan).to_numpy()
    assert 0.92 < np.mean(off[hidden] < 1.96) < 0.98
    quiet, loud = (np.nanmean(off[:, part] ** 2) for part in (slice(6), slice(12, None)))
    assert 0.7 < quiet < 1.4  # of stations of little noise as of those of much
    assert 0.7 < loud < 1.4


def test_error_bars_are_those_of_a_dense_model_with_the_noise_of_each_label(filled):
    _, hidden, found, smoothed = filled
    model = found.model
    with torch.no_grad():
        x = torch.cartesian_prod(*(axis.squeeze(-1) for axis in model.covar_module.base_kernel.grid.axes))
        noise = model.likelihood.noise.repeat(len(hidden))
        covariance, seen = model.covar_module(x).to_dense(), torch.from_numpy(~hidden.ravel())
        root = torch.linalg.cholesky(covariance[seen][:, seen] + torch.diag(noise[seen]))
        cross = torch.linalg.solve_triangular(root, covariance[seen], upper=False)
        variance = (covariance.diagonal() - cross.square().sum(0)).numpy()
    assert len(model.likelihood.noise) == hidden.shape[1]
    assert model.likelihood.noise.max() > 4 * model.likelihood.noise.min()
    expected = np.sqrt(variance + noise.numpy()).reshape(hidden.shape)
    np.testing.assert_allclose(found.std.to_numpy()[hidden], expected[hidden], rtol=1e-3)
    np.testing.assert_allclose(smoothed.std.to_numpy(), np.sqrt(variance).reshape(hidden.shape), rtol=1e-3)


@pytest.mark.usefixtures("quick_choice")
def test_yearly_cycles_of_a_long_table_of_many_labels_are_in_its_mean():
    values, hidden = table(144, 9)
    values += 10.0 * np.cos(2 * np.pi * np.arange(144) / 12)[:, None] * np.linspace(-1.0, 2.0, 9)
    values[hidden] = np.nan
    months = pd.date_range("1990-01-01", periods=144, freq="MS")
    data = pd.DataFrame(values, months, list("abcdefghi"))
    options = {"check": False, "std": False, "progress": False, "steps": 2}
    report = gaps.fill_gaps(data, **options).report
    assert any("subtracted first" in note for note in report.notes)
    for smaller in (data[:60], data[["a", "b"]]):
        report = gaps.fill_gaps(smaller, **options).report
        assert not any("subtracted first" in note for note in report.notes)
        assert any("cycle" in note for note in report.notes)


def test_a_part_of_the_labels_has_their_noise():
    values, _ = table(40, 6)
    axes = describe_axes(values.shape, [None, list("abcdef")])
    factors = label_factors(values, axes, 1, plain(axes), np.random.default_rng(0))
    whole = TrainingData([], axes, plain(axes), 1.0, 1e-6, labels=(1, factors)).make_likelihood()
    part = GridValues.in_memory(values, axes).part([np.arange(10), np.array([1, 4])])
    found = on_part(whole, CartesianGrid([torch.from_numpy(axis.points) for axis in part.axes]))
    torch.testing.assert_close(found.noise, whole.noise[[1, 4]])
