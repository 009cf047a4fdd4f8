"""Models with kernels for blocks of axes against the same models of plain, dense GPyTorch kernels."""

import linear_operator
import pytest
import torch

import gpytorch_gaps as gaps
from gpytorch_gaps import settings
from gpytorch_gaps.linalg.factors import all_dense
from gpytorch_gaps.operators import SelectedKroneckerOperator
from tests.posterior.test_new_data import by_the_book, noise_at
from tests.posterior.test_sampling import covariance_by_draws
from tests.posterior.test_scoring import brute_force
from tests.workflow._block_pairs import BLOCKS
from tests.workflow._pairs import PerLevelNoise
from tests.workflow.test_against_dense import (
    _dense_posterior,
    agrees_with_dense,
    dense_results,
    log_likelihood,
    pairs_of_parameters,
)

MAX_CHOLESKY = linear_operator.settings.max_cholesky_size
blocks = pytest.mark.parametrize("case", BLOCKS)


def terms(model, x):
    covariance = model.covar_module(x).evaluate_kernel()
    found = [covariance] if isinstance(covariance, SelectedKroneckerOperator) else covariance.linear_ops
    assert all(isinstance(term, SelectedKroneckerOperator) for term in found)
    return found


@blocks
def test_products_go_by_fft(case):
    """Otherwise the tests below would be about matrices."""
    model = BLOCKS[case](small=True).ours
    assert not all(all_dense(term.factors) for term in terms(model, model.train_inputs[0]))


@pytest.fixture(scope="module", params=BLOCKS)
def dense_case(request):
    """The name of a case, and what its dense model says: computed once for all ways to solve."""
    return request.param, dense_results(BLOCKS[request.param]())


@pytest.mark.parametrize("max_cholesky", [10_000, 0], ids=["dense", "iterative"])
def test_likelihood_gradients_and_posterior(dense_case, max_cholesky):
    case, expected = dense_case
    pair = BLOCKS[case]()
    assert 1_400 <= pair.ours.train_targets.size(-1) <= 1_600
    agrees_with_dense(pair, max_cholesky, expected)


@blocks
def test_the_neighbours_preconditioner_and_estimated_log_determinants(case):
    """No dense matrix anywhere: means within their tolerance, the likelihood within its standard errors."""
    pair = BLOCKS[case](small=True)
    with MAX_CHOLESKY(10_000):
        expected = log_likelihood(pair.dense)
        expected.backward()
    torch.manual_seed(0)
    with (
        settings.dense_size(0),
        settings.logdet_method("stochastic"),
        settings.gap_method("ignore"),
        settings.preconditioner("neighbours"),
        settings.num_neighbours(15),
        MAX_CHOLESKY(0),
        linear_operator.settings.num_trace_samples(60),
        gaps.record_solves() as solves,
    ):
        value = log_likelihood(pair.ours)
        value.backward()
        pair.ours.eval()
        with torch.no_grad():
            mean = pair.ours(pair.test_x).mean
    assert all(report.converged and report.num_neighbours == 15 for report in solves)
    report = solves.logdets[-1]
    assert report.method == "stochastic"
    count = pair.ours.train_targets.size(-1)
    assert abs(value.item() - expected.item()) <= 5 * 0.5 * float(report.standard_error) / count + 1e-6
    size = torch.cat([plain.grad.flatten() for _, _, plain in pairs_of_parameters(pair)]).norm()
    for name, ours, plain in pairs_of_parameters(pair):
        assert float((ours.grad - plain.grad).norm()) <= 0.02 * float(size), name
    pair.dense.eval()
    with torch.no_grad(), MAX_CHOLESKY(10_000):
        reference = _dense_posterior(pair)
    assert float(((mean - reference.mean) / reference.variance.sqrt()).abs().max()) <= 1e-2


def test_methods_of_eigenvectors_are_refused():
    """A block has none."""
    pair = BLOCKS["a torus and time"](small=True)
    model = pair.ours.eval()
    for method in ("fill", "spectral", "penalize"):
        with (
            settings.gap_method(method),
            MAX_CHOLESKY(0),
            pytest.raises(ValueError, match=f"gap_method: got '{method}' with a block of axes.*use 'ignore' here"),
        ):
            model(pair.test_x).mean  # noqa: B018
    with (
        settings.gap_method("ignore"),
        settings.preconditioner_rank(20),
        MAX_CHOLESKY(0),
        pytest.raises(ValueError, match="preconditioner_rank: got 20 for a block of axes, expected None"),
    ):
        model(pair.test_x).mean  # noqa: B018


@pytest.mark.parametrize("method", ["fill", "spectral", "penalize", "auto"])
def test_gaps_of_the_globe_are_filled(method):
    """All longitudes close a circle, with the poles and the date line on it: there is an eigenbasis."""
    pair = BLOCKS["a sphere and time"](small=True)
    for model in pair.both():
        model.eval()
    goal = settings.solve_tolerance(1e-6 if method == "penalize" else 1e-9)
    no_matrix = settings.dense_size(0), MAX_CHOLESKY(0)
    with torch.no_grad(), goal, settings.gap_method(method), no_matrix[0], no_matrix[1], gaps.record_solves() as solves:
        posterior = pair.ours(pair.test_x)
        mean, variance = posterior.mean, posterior.variance
    assert all(report.converged for report in solves)
    assert solves[0].method == method if method != "auto" else solves[0].method in ("fill", "spectral")
    with torch.no_grad(), MAX_CHOLESKY(10_000):
        expected = _dense_posterior(pair)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if method == "penalize" else {"rtol": 1e-7, "atol": 1e-7}
    torch.testing.assert_close(mean, expected.mean, **tolerance)
    torch.testing.assert_close(variance, expected.variance, **tolerance)


# -- data that come and go -------------------------------------------------------------------------------------------


@blocks
@pytest.mark.parametrize("max_cholesky", [800, 0], ids=["dense", "iterative"])
def test_new_data(case, max_cholesky):
    """A fantasy, and other training data for the same model."""
    pair = BLOCKS[case](small=True)
    (x,), y, model = pair.ours.train_inputs, pair.ours.train_targets, pair.ours.eval()
    pair.test_x = pair.test_x[::8]
    first = slice(0, len(y) - 12)
    with torch.no_grad(), settings.solve_tolerance(1e-9), settings.dense_size(max_cholesky), MAX_CHOLESKY(max_cholesky):
        model.set_train_data(x[first], y[first], strict=False)
        _same(model(pair.test_x), by_the_book(pair, x[first], y[first], noise_at(pair, x[first])))
        if not isinstance(pair.dense.likelihood, PerLevelNoise):
            fantasy = model.get_fantasy_model(x[len(y) - 12 :], y[len(y) - 12 :])
            _same(fantasy(pair.test_x), by_the_book(pair, x, y, noise_at(pair, x)))
        model.set_train_data(x[5:], y[5:], strict=False)
        _same(model(pair.test_x), by_the_book(pair, x[5:], y[5:], noise_at(pair, x[5:])))


def _same(posterior, expected, tolerance=1e-6):
    for got, value in zip((posterior.mean, posterior.variance), expected, strict=True):
        assert got.shape == value.shape
        assert torch.allclose(got, value, rtol=tolerance, atol=tolerance)


@blocks
@pytest.mark.parametrize("max_cholesky", [800, 0], ids=["dense", "iterative"])
def test_data_left_out(case, max_cholesky):
    pair = BLOCKS[case](small=True)
    (x,), y = pair.ours.train_inputs, pair.ours.train_targets
    rows = torch.randperm(len(y), generator=torch.Generator().manual_seed(2))[:30]
    for model in pair.both():
        model.set_train_data(x[rows], y[rows], strict=False)
    labels = torch.arange(30) % 11
    with settings.solve_tolerance(1e-9), settings.dense_size(max_cholesky), MAX_CHOLESKY(max_cholesky):
        posterior = gaps.leave_out(pair.ours, labels)
    mean, variance = brute_force(pair.dense, labels)
    _same(posterior, (mean, variance))
    score = gaps.score(posterior, y[rows])
    assert score.rmse == pytest.approx(float((mean - y[rows]).square().mean().sqrt()), rel=1e-6)


# -- draws -----------------------------------------------------------------------------------------------------------


def others(case, grid):
    """Cells, a grid of its own on the same lattice, one off it, and scattered points."""
    moved = [axis.clone() for axis in grid.axes]
    if case.startswith("a sphere"):
        moved[0] = moved[0] + 3.0  # as many other latitudes
    else:
        moved[0] = moved[0] + 0.5 * (moved[0][1] - moved[0][0])
    off = [axis[:3] for axis in grid.axes]
    off[1 if len(off) > 1 else 0] = off[1 if len(off) > 1 else 0] + 0.01234567
    some = [own[:3] for own in moved]
    return {
        "cells": grid.points()[:: max(1, grid.num_cells // 20)],
        "half a step away": gaps.CartesianGrid(some).points(),
        "another grid of the same shape": gaps.CartesianGrid(moved).points() if case.startswith("a sphere") else None,
        "off the lattice": gaps.CartesianGrid(off).points(),
        "scattered": grid.points()[:6] + 0.01 * torch.arange(6, dtype=torch.float64).square().unsqueeze(-1),
    }


DRAWS = [
    ("a torus", "cells"),
    ("a torus", "half a step away"),
    ("a torus", "scattered"),
    ("a torus and time", "off the lattice"),
    ("a sphere and time", "cells"),
    ("a sphere and time", "half a step away"),
    ("a sphere and time", "another grid of the same shape"),
    ("a torus plus a product", "cells"),
    ("a torus plus a product", "half a step away"),
    ("a torus and a noise per output", "cells"),
]


@pytest.mark.parametrize(("case", "where"), DRAWS)
def test_the_root_that_draws_are_made_with(case, where, monkeypatch):
    """Its square is the dense covariance: that of infinitely many draws."""
    pair = BLOCKS[case](small=True)
    (x,), y = pair.ours.train_inputs, pair.ours.train_targets
    for module in (part for model in pair.both() for part in model.modules()):
        if getattr(module, "has_lengthscale", False) and getattr(module, "nu", None):
            module.lengthscale = 0.4 * module.lengthscale.detach()  # where the torus is positive definite
    for model in pair.both():
        model.eval().set_train_data(x[:60], y[:60], strict=False)
    pair.test_x = others(case, pair.grid)[where]
    with torch.no_grad(), settings.solve_tolerance(1e-11), MAX_CHOLESKY(10_000):
        got = covariance_by_draws(pair.ours(pair.test_x), monkeypatch)
        expected = _dense_posterior(pair).covariance_matrix
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def test_draws_of_a_long_axis():
    """At cells far apart and between them: variances of many draws, and correlations of neighbours."""
    pair = BLOCKS["a long axis"](small=True)
    step = float(pair.grid.axes[0][1] - pair.grid.axes[0][0])
    near = pair.grid.points(torch.arange(0, 6_400, 400))
    pair.test_x = torch.cat([near, near + 0.5 * step])
    with torch.no_grad(), MAX_CHOLESKY(10_000):
        expected = _dense_posterior(type(pair)(pair.ours, pair.dense.eval(), pair.grid, pair.test_x)).covariance_matrix
        draws = gaps.sample_posterior(pair.ours.eval(), pair.test_x, 400, seed=0)
    got = torch.cov(draws.mT)
    scale = expected.diagonal().sqrt()
    # standard errors of covariances of unit variance are at most sqrt(2 / n)
    assert float(((got - expected) / (scale.unsqueeze(-1) * scale)).abs().max()) <= 5 * (2 / 400) ** 0.5


def test_draws_whose_torus_is_not_positive_definite_say_so():
    pair = BLOCKS["a torus"](small=True)
    kernel = pair.ours.covar_module.base_kernel.kernels[0]
    kernel.lengthscale = torch.tensor([[3.0, 3.0]])
    with pytest.warns(linear_operator.utils.warnings.NumericalWarning, match="the padding of .* places is too short"):
        draws = gaps.sample_posterior(pair.ours.eval(), pair.grid, 2, seed=0)
    assert torch.isfinite(draws).all()


# -- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["a torus", "a torus plus a product"])
def test_training_is_resumed_from_a_checkpoint(case, tmp_path):
    """Step by step as without an interruption, by estimated log-determinants."""
    quiet = {"progress": False, "lr": 0.1, "checkpoint_every": 3}
    results = []
    for interrupted in (False, True):
        model = BLOCKS[case](small=True).ours
        path = tmp_path / f"{interrupted}.pt"
        torch.manual_seed(0)
        with settings.dense_size(0), settings.logdet_method("stochastic"), MAX_CHOLESKY(0):
            if interrupted:
                gaps.fit(model, steps=3, checkpoint=path, **quiet)
                model = BLOCKS[case](small=True).ours
            history = gaps.fit(model, steps=6, checkpoint=path, **quiet)
        results.append([torch.tensor(history.loss), *(p.detach() for p in model.parameters())])
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)
