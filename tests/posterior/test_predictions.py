"""Posteriors of an ordinary ExactGP with a grid kernel: values, settings, caches, solves made, gradients, fantasies."""

import warnings

import gpytorch
import linear_operator
import pytest
import torch
from gpytorch.kernels import (
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    PolynomialKernel,
    ProductKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
    SpectralMixtureKernel,
)

import gpytorch_gaps as gaps
from gpytorch_gaps import settings
from gpytorch_gaps.posterior import GappyGridPredictionStrategy
from gpytorch_gaps.posterior.covariance import PosteriorCovarianceOperator
from tests import _dense as dense
from tests._covering import covering, in_turn
from tests.workflow._pairs import CASES, Model, PerLevelNoise, gappy, on, with_length

MAX_CHOLESKY = linear_operator.settings.max_cholesky_size
SHAPE = (14, 11)


@pytest.fixture(autouse=True)
def _not_at_the_training_points():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gpytorch.utils.warnings.GPInputWarning)
        yield


def grid_and_data(fraction=0.4, seed=0):
    return gaps.from_array(*reversed(gappy(SHAPE, fraction, seed)))


def kernel_of(grid, plain=False):
    if plain:
        return ScaleKernel(ProductKernel(on(0, RBFKernel, 0.3), on(1, MaternKernel, 0.5)))
    return ScaleKernel(gaps.GappyGridKernel([with_length(RBFKernel(), 0.3), with_length(MaternKernel(), 0.5)], grid))


def models(likelihood=None, smooth=False):
    """Ours, the same of plain dense kernels, and the grid."""
    grid, x, y = grid_and_data()
    ours = Model(x, y, likelihood or gaps.GappyGridLikelihood(), kernel_of(grid)).double()
    plain = Model(x, y, gpytorch.likelihoods.GaussianLikelihood(), kernel_of(grid, plain=True)).double()
    for model in (ours, plain):
        if model.likelihood is not likelihood:
            model.likelihood.noise = 0.05
        if smooth:
            model.covar_module.base_kernel.kernels[1] = RBFKernel(active_dims=[1] if model is plain else None).double()
            for kernel in model.covar_module.base_kernel.kernels:
                kernel.lengthscale = 0.7
    return ours.eval(), plain.eval(), grid


def points_of_every_kind(grid):
    first, second = grid.axes
    return {
        "all cells": grid.points(),
        "cells, permuted": grid.points(torch.randperm(grid.num_cells)),
        "a few cells": grid.points(torch.tensor([5, 100, 7])),
        "one cell": grid.points(torch.tensor([9])),
        "a finer grid": gaps.CartesianGrid([torch.linspace(0, 1, 20).double(), second]).points(),
        "a shifted grid": gaps.CartesianGrid([first[:4] + 0.013, second + 0.02]).points(),
        "scattered": dense.randn(13, 2).sigmoid(),
        "one point": torch.tensor([[0.123, 0.456]]).double(),
        "on and off the grid": torch.cat([grid.points()[:5], dense.randn(4, 2).sigmoid()]),
        "repeated": grid.points(torch.tensor([5, 5, 0, 5])),
        "none": grid.points()[:0],
    }


def close(posterior, expected, tolerance=1e-6):
    assert torch.allclose(posterior.mean, expected.mean, rtol=tolerance, atol=tolerance)
    assert torch.allclose(posterior.variance, expected.variance, rtol=tolerance, atol=tolerance)
    assert torch.allclose(posterior.covariance_matrix, expected.covariance_matrix, rtol=tolerance, atol=tolerance)


# -- values ----------------------------------------------------------------------------------------------------------

METHODS = [
    ("auto", None, 0),
    ("auto", None, 800),
    ("fill", None, 0),
    ("fill", 10, 0),
    ("ignore", 0, 0),
    ("ignore", None, 0),
    ("ignore", 30, 0),
    ("penalize", None, 0),
    ("spectral", None, 0),
    ("cholesky", None, 0),
]


@pytest.mark.parametrize(("method", "rank", "max_cholesky"), METHODS)
def test_every_method_at_all_kinds_of_points(method, rank, max_cholesky):
    ours, plain, grid = models()
    tolerance = 1e-5 if method == "penalize" else 1e-9
    for name, x in points_of_every_kind(grid).items():
        with (
            torch.no_grad(),
            settings.gap_method(method),
            settings.preconditioner_rank(rank),
            settings.solve_tolerance(tolerance),
            settings.max_iterations(20_000),
            MAX_CHOLESKY(max_cholesky),
            gaps.record_solves() as solves,
        ):
            posterior = ours(x)
            assert isinstance(posterior.lazy_covariance_matrix, PosteriorCovarianceOperator)
            posterior.variance, posterior.covariance_matrix  # noqa: B018
        assert all(report.converged for report in solves), name
        if method != "auto":
            assert {report.method for report in solves} <= {method}, name
        with torch.no_grad():
            expected = plain(x)
            close(posterior, expected, 1e-3 if method == "penalize" else 1e-6)


@in_turn(case=[case for case in CASES if case not in ("two axes", "a noise per output")], max_cholesky=[0, 800])
def test_noisy_posteriors_of_every_case(case, max_cholesky):
    """Means and variances of new observations, on the whole grid."""
    pair = CASES[case](small=True)
    if case == "a noise per point":
        x = pair.ours.train_inputs[0].flip(0)
        noise = pair.ours.likelihood.noise.flip(0)
    else:
        x, noise = pair.test_x, pair.ours.likelihood.noise
    with torch.no_grad(), settings.solve_tolerance(1e-9), MAX_CHOLESKY(max_cholesky):
        latent = pair.ours.eval()(x)
        noisy = pair.ours.likelihood(latent)
        got = latent.mean, latent.variance, noisy.mean, noisy.variance
    with torch.no_grad(), MAX_CHOLESKY(10_000):
        reference = pair.dense.eval()(x)
        expected = reference.mean, reference.variance, reference.mean, reference.variance + noise
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-6)


def test_a_plain_likelihood_gives_the_same():
    """GPyTorch's own likelihood does not evaluate the kernel; the strategy does."""
    ours, _, grid = models()
    other, _, _ = models(gpytorch.likelihoods.GaussianLikelihood())
    other.likelihood.noise = 0.05
    for x in (grid.points(), dense.randn(9, 2).sigmoid()):
        with torch.no_grad(), MAX_CHOLESKY(0), settings.solve_tolerance(1e-10), gaps.record_solves() as solves:
            first, second = ours(x), other(x)
            close(first, second, 1e-8)
            noisy = other.likelihood(second)
            assert torch.allclose(noisy.variance, ours.likelihood(first).variance, atol=1e-8)
        assert {report.method for report in solves} <= {"fill", "ignore", "spectral"}
        assert isinstance(other.prediction_strategy, GappyGridPredictionStrategy)
    fixed = gpytorch.likelihoods.FixedNoiseGaussianLikelihood(torch.full_like(ours.train_targets, 0.05))
    third, _, _ = models(fixed)
    with torch.no_grad(), MAX_CHOLESKY(0), settings.solve_tolerance(1e-10):
        close(ours(grid.points()), third(grid.points()), 1e-8)


def test_training_points_off_the_grid():
    """Exact, if slower."""
    grid, x, y = grid_and_data()
    x = x.clone()
    x[3:8] += 0.01
    results = []
    for plain in (False, True):
        likelihood = gpytorch.likelihoods.GaussianLikelihood() if plain else gaps.GappyGridLikelihood()
        model = Model(x, y, likelihood, kernel_of(grid, plain)).double()
        mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
        value = mll(model(x), y)
        with torch.no_grad():
            posterior = model.eval()(grid.points())
            results.append([value, posterior.mean, posterior.variance])
    for got, expected in zip(*results, strict=True):
        assert torch.allclose(got, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("max_cholesky", [800, 0])
def test_a_batch_of_different_test_points(max_cholesky):
    """As Bayesian optimisation asks for: each member its own points, with gradients."""
    ours, plain, grid = models()
    results = []
    for model, size in ((ours, max_cholesky), (plain, 800)):
        x = torch.stack([dense.randn(4, 2).sigmoid(), grid.points()[:4], dense.randn(4, 2, seed=1).sigmoid()])
        x.requires_grad_()
        with settings.solve_tolerance(1e-10), MAX_CHOLESKY(size):
            posterior = model(x)
            noisy = model.likelihood(posterior)
            value = posterior.mean.sum() + noisy.variance.sum()
            results.append(
                [posterior.mean, posterior.covariance_matrix, noisy.variance, torch.autograd.grad(value, x)[0]]
            )
    for got, expected in zip(*results, strict=True):
        assert got.shape == expected.shape
        assert torch.allclose(got, expected, rtol=1e-6, atol=1e-6)


@in_turn(case=CASES, max_cholesky=[0, 800])
def test_in_inference_mode(case, max_cholesky):
    pair = CASES[case](small=True)
    with settings.solve_tolerance(1e-9), MAX_CHOLESKY(max_cholesky):
        with torch.no_grad():
            expected = pair.ours.eval()(pair.test_x)
            mean, variance = expected.mean, expected.variance
        pair.ours.train()
        with torch.inference_mode():
            posterior = pair.ours.eval()(pair.test_x)
            assert torch.allclose(posterior.mean, mean, atol=1e-6)
            assert torch.allclose(posterior.variance, variance, atol=1e-6)


@pytest.mark.parametrize("setting", ["fast_pred_var", "fast_pred_samples", "memory_efficient"])
def test_settings_of_gpytorch_that_approximate(setting):
    """They change nothing here: variances stay exact."""
    ours, plain, grid = models()
    with torch.no_grad():
        with getattr(gpytorch.settings, setting)(), MAX_CHOLESKY(0), settings.solve_tolerance(1e-9):
            posterior = ours(grid.points())
            got = posterior.mean, posterior.variance
        expected = plain(grid.points())
        assert torch.allclose(got[0], expected.mean, atol=1e-6)
        assert torch.allclose(got[1], expected.variance, atol=1e-6)


@in_turn(case=CASES, max_cholesky=[800, 0])
def test_float32_means_are_close_to_float64(case, max_cholesky):
    """Means within 1e-4 of double precision's."""
    pair = CASES[case](small=True)
    cells = pair.test_x[:60]
    with torch.no_grad(), MAX_CHOLESKY(max_cholesky):
        expected = pair.ours.eval()(cells)
        mean, variance = expected.mean, expected.variance
        pair.ours.train()
        posterior = pair.ours.float().eval()(cells.float())
        assert posterior.mean.dtype == torch.float32
        assert torch.allclose(posterior.mean.double(), mean, atol=1e-4)
        assert torch.allclose(posterior.variance.double(), variance, atol=1e-3)


class Plain(gpytorch.kernels.Kernel):
    """A product of kernels on one column each, by the book."""

    def __init__(self, kernels):
        super().__init__()
        self.kernels = torch.nn.ModuleList(kernels)

    def forward(self, x1, x2, diag=False, **params):
        value = 1.0
        for i, kernel in enumerate(self.kernels):
            part = kernel(x1[..., i : i + 1], x2[..., i : i + 1], diag=diag)
            value = value * (part if diag else part.to_dense())
        return value


def two_kernels():
    return [RBFKernel(), MaternKernel()]


# shape of the grid, fraction of gaps, kernels, which observations
UNUSUAL = {
    "sums and products on an axis": (
        (9, 8),
        0.4,
        lambda: [ScaleKernel(RBFKernel()) + PeriodicKernel(), MaternKernel() * RBFKernel()],
        slice(None),
    ),
    "a spectral mixture": ((9, 8), 0.4, lambda: [SpectralMixtureKernel(num_mixtures=3), RQKernel()], slice(None)),
    "of low rank": ((9, 8), 0.4, lambda: [PolynomialKernel(power=2), LinearKernel()], slice(None)),
    "cells observed twice": ((9, 8), 0.4, two_kernels, [*range(40), 0, 3, 3]),
    "one observation": ((9, 8), 0.4, two_kernels, slice(1)),
    "no gaps": ((9, 8), 0.0, two_kernels, slice(None)),
    "one axis": ((30,), 0.4, lambda: [MaternKernel()], slice(None)),
    "an axis of one": ((1, 8, 5), 0.4, lambda: [RBFKernel(), *two_kernels()], slice(None)),
}


@covering(case=UNUSUAL, max_cholesky=[800, 0], eager=[False, True])
def test_unusual_models_from_likelihood_to_posterior(case, max_cholesky, eager):
    """From the likelihood and its gradients to the posterior, also where kernels are not evaluated lazily."""
    shape, fraction, kernels, rows = UNUSUAL[case]
    grid, x, y = gaps.from_array(*reversed(gappy(shape, fraction, 0)))
    x, y, results = x[rows], y[rows], []
    test_x = torch.cat([grid.points(), dense.randn(5, grid.num_columns)])
    for plain in (False, True):
        torch.manual_seed(0)
        kernel = Plain(kernels()) if plain else gaps.GappyGridKernel(kernels(), grid)
        likelihood = gpytorch.likelihoods.GaussianLikelihood() if plain else gaps.GappyGridLikelihood()
        model = Model(x, y, likelihood, kernel).double()
        mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
        with (
            MAX_CHOLESKY(10_000 if plain else max_cholesky),
            gpytorch.settings.lazily_evaluate_kernels(not eager or plain),
            settings.logdet_method("exact"),
            settings.train_tolerance(1e-11),
            settings.solve_tolerance(1e-10),
        ):
            value = mll(model(x), y)
            gradients = torch.autograd.grad(value, list(model.parameters()))
            with torch.no_grad():
                posterior = model.eval()(test_x)
                results.append([value, *gradients, posterior.mean, posterior.variance])
    for got, expected in zip(*results, strict=True):
        assert torch.allclose(got, expected, rtol=1e-6, atol=1e-7)


# -- caches and settings ---------------------------------------------------------------------------------------------


def solves_of(model, x, *contexts):
    """Reports of the solves that a mean takes."""
    with torch.no_grad(), gaps.record_solves() as solves:
        for context in contexts:
            context.__enter__()
        try:
            model(x).mean  # noqa: B018
        finally:
            for context in reversed(contexts):
                context.__exit__(None, None, None)
    return solves


def test_means_are_solved_for_once_in_the_same_settings():
    ours, _, grid = models()
    x = grid.points()
    with MAX_CHOLESKY(0):
        assert len(solves_of(ours, x)) == 1
        assert len(solves_of(ours, x)) == 0
        assert len(solves_of(ours, x[:3])) == 0
        tight = solves_of(ours, x, settings.solve_tolerance(1e-11))
        assert len(tight) == 1
        assert tight[0].worst_residual <= 1e-11
        assert [report.method for report in solves_of(ours, x, settings.gap_method("fill"))] == ["fill"]
        assert [report.method for report in solves_of(ours, x, settings.gap_method("ignore"))] == ["ignore"]
        assert [report.rank for report in solves_of(ours, x, settings.preconditioner_rank(7))] != []
        assert len(solves_of(ours, x, gpytorch.settings.eval_cg_tolerance(1e-12))) == 1
        assert solves_of(ours, x, settings.gap_method("fill"), settings.solve_tolerance(1e-11))[0].tolerance == 1e-11
        for known in (settings.solve_tolerance(1e-11), settings.gap_method("fill")):
            assert len(solves_of(ours, x, known)) == 0
    assert [report.method for report in solves_of(ours, x)] == ["cholesky"]


def test_another_method_really_gives_its_own_solution():
    """At a loose tolerance methods differ visibly, so that a stale cache would show."""
    ours, _, grid = models()
    means = {}
    with torch.no_grad(), MAX_CHOLESKY(0), settings.solve_tolerance(0.1):
        for method in ("fill", "ignore", "fill"):
            with settings.gap_method(method), settings.preconditioner_rank(0):
                mean = ours(grid.points()).mean
                assert torch.equal(mean, means.setdefault(method, mean))
    assert not torch.allclose(means["fill"], means["ignore"], atol=1e-6)


@pytest.mark.parametrize("method", ["fill", "ignore", "cholesky"])
def test_a_posterior_keeps_the_settings_of_its_making(method):
    ours, _, grid = models()
    with (
        torch.no_grad(),
        settings.gap_method(method),
        settings.solve_tolerance(1e-9),
        settings.preconditioner_rank(9),
        MAX_CHOLESKY(0),
    ):
        posterior = ours(grid.points())
    for later in (
        lambda: posterior.variance,
        lambda: posterior.covariance_matrix,
        lambda: posterior.lazy_covariance_matrix @ torch.ones(grid.num_cells).double(),
        lambda: posterior[3:9].variance,
        lambda: ours.likelihood(posterior[9:12]).variance,
    ):
        with torch.no_grad(), settings.gap_method("ignore"), settings.solve_tolerance(0.5):
            with gaps.record_solves() as solves:
                later()
            assert [(report.method, report.tolerance) for report in solves] == [(method, 1e-9)]


def test_variances_are_worked_out_once_and_shared():
    ours, _, grid = models()
    with torch.no_grad(), MAX_CHOLESKY(0), settings.gap_method("fill"):
        posterior = ours(grid.points())
        with gaps.record_solves() as solves:
            variance = posterior.variance
        assert len(solves) == 1
        assert solves[0].num_rhs == grid.num_cells
        with gaps.record_solves() as solves:
            noisy = ours.likelihood(posterior)
            assert torch.allclose(noisy.variance, variance + ours.likelihood.noise)
            posterior.stddev, noisy.stddev, noisy.confidence_region()
            ours.likelihood.log_marginal(torch.zeros(grid.num_cells).double(), posterior)
        assert len(solves) == 0
        other = ours(grid.points())
        with gaps.record_solves() as solves:
            ours.likelihood(other).variance, other.variance
        assert len(solves) == 1


def test_variances_in_chunks_of_the_memory():
    """A column a solve where there is next to none, several where there is more."""
    ours, _, grid = models()
    with torch.no_grad(), settings.gap_method("fill"), settings.solve_tolerance(1e-10):
        expected = ours(grid.points()).variance
        for memory, largest in ((1, 1), (200_000, 20)):
            with settings.prediction_memory(memory):
                posterior = ours(grid.points())
            with gaps.record_solves() as solves:
                assert torch.allclose(posterior.variance, expected, atol=1e-9)
            (report,) = solves
            assert report.num_rhs == grid.num_cells
            assert report.parts >= grid.num_cells / largest
            assert largest == 1 or report.parts < grid.num_cells


def test_variances_without_solves():
    """Where the covariance is of low rank to the tolerance: in closed form, as accurate as is said."""
    ours, plain, grid = models(smooth=True)
    with torch.no_grad(), MAX_CHOLESKY(0):
        for tolerance in (1e-3, 1e-6, 1e-9):
            with settings.solve_tolerance(tolerance), gaps.record_solves() as solves:
                variance = ours(grid.points()).variance
            report = solves[-1]
            assert "variances without solves" in report.reason
            assert report.iterations == 0
            assert report.converged
            assert report.num_rhs == grid.num_cells
            assert report.worst_residual <= tolerance
            with settings.gap_method("ignore"), settings.solve_tolerance(1e-12), gaps.record_solves() as solves:
                by_solves = ours(grid.points()).variance
            assert "without" not in solves[-1].reason
            prior = ours.covar_module(grid.points(), diag=True)
            assert bool(((variance - by_solves).abs() <= tolerance * prior).all())
            with MAX_CHOLESKY(800):
                assert torch.allclose(variance, plain(grid.points()).variance, atol=2 * tolerance)
            with settings.solve_tolerance(tolerance):
                posterior = ours(grid.points())
            some = torch.arange(3, 40)
            assert torch.allclose(posterior[3:40].variance, variance[some], atol=tolerance)


@pytest.mark.parametrize("tolerance", [1e-4, 1e-7])
@pytest.mark.parametrize("where", ["scattered", "a finer grid"])
def test_variances_without_solves_off_the_grid(where, tolerance):
    """Variances by the extension of eigenvectors to other points."""
    ours, plain, grid = models(smooth=True)
    x = points_of_every_kind(grid)[where]
    with torch.no_grad(), MAX_CHOLESKY(0), settings.solve_tolerance(tolerance), gaps.record_solves() as solves:
        variance = ours(x).variance
    assert "variances without solves" in solves[-1].reason
    with torch.no_grad(), MAX_CHOLESKY(800):
        expected = plain(x).variance
    assert torch.allclose(variance, expected, rtol=10 * tolerance, atol=tolerance * float(ours.likelihood.noise))


@pytest.mark.parametrize("where", ["differentiated", "a method", "a rank"])
def test_where_variances_take_solves(where):
    ours, _, grid = models(smooth=True)
    x = points_of_every_kind(grid).get(where, grid.points())
    method, rank = ("ignore" if where == "a method" else "auto"), (5 if where == "a rank" else None)
    with (
        torch.set_grad_enabled(where == "differentiated"),
        gpytorch.settings.detach_test_caches(False),
        MAX_CHOLESKY(0),
        settings.gap_method(method),
        settings.preconditioner_rank(rank),
        gaps.record_solves() as solves,
    ):
        ours(x).variance  # noqa: B018
    assert len(solves) == 2
    assert not any("without" in report.reason for report in solves)


def test_variances_without_solves_of_a_sum():
    grid, x, y = grid_and_data()
    results = []
    for plain in (False, True):
        parts = [kernel_of(grid, plain), kernel_of(grid, plain)]
        for part, length in zip(parts, (0.9, 0.5), strict=True):
            part.base_kernel.kernels[1] = RBFKernel(active_dims=[1] if plain else None)
            for kernel in part.base_kernel.kernels:
                kernel.lengthscale = length
        likelihood = gpytorch.likelihoods.GaussianLikelihood() if plain else gaps.GappyGridLikelihood()
        model = Model(x, y, likelihood, parts[0] + parts[1]).double().eval()
        with torch.no_grad(), MAX_CHOLESKY(800 if plain else 0), gaps.record_solves() as solves:
            results.append(model(grid.points()).variance)
        if not plain:
            assert "variances without solves" in solves[-1].reason
    assert torch.allclose(*results, atol=1e-5)


# -- indexing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "index",
    [
        slice(3, 17),
        slice(None, None, 5),
        torch.tensor([4, 1, 30]),
        Ellipsis,
        (Ellipsis, slice(2, 5)),
    ],
    ids=str,
)
def test_a_part_of_a_posterior_is_that_of_the_dense_one(index):
    ours, plain, grid = models()
    x = points_of_every_kind(grid)["all cells"]
    with torch.no_grad():
        part, expected = ours(x)[index], plain(x)[index]
        assert torch.allclose(part.mean, expected.mean, atol=1e-5)
        assert torch.allclose(part.variance, expected.variance, atol=1e-5)
        if part.mean.dim():
            assert torch.allclose(part.covariance_matrix, expected.covariance_matrix, atol=1e-5)


@pytest.mark.parametrize("max_cholesky", [800, 0])
def test_indexing_a_batch(max_cholesky):
    pair = CASES["a batch of three"](small=True)
    with torch.no_grad(), settings.solve_tolerance(1e-9), MAX_CHOLESKY(max_cholesky):
        posterior = pair.ours.eval()(pair.test_x)
        parts = [posterior[index] for index in (1, slice(1, 3), (slice(None), slice(5, 9)), (2, slice(5, 9)))]
        got = [(part.mean, part.variance, part.covariance_matrix) for part in parts]
    with torch.no_grad(), MAX_CHOLESKY(10_000):
        reference = pair.dense.eval()(pair.test_x)
        mean, covariance = reference.mean, reference.covariance_matrix
        cuts = [(1, slice(None)), (slice(1, 3), slice(None)), (slice(None), slice(5, 9)), (2, slice(5, 9))]
    for (own_mean, variance, own), (batch, rows) in zip(got, cuts, strict=True):
        expected = covariance[batch][..., rows, :][..., rows]
        assert torch.allclose(own_mean, mean[batch][..., rows], atol=1e-6)
        assert torch.allclose(own, expected, atol=1e-6)
        assert torch.allclose(variance, expected.diagonal(dim1=-1, dim2=-2), atol=1e-6)


# -- gradients -------------------------------------------------------------------------------------------------------


@covering(
    where=["a few cells", "scattered", "a shifted grid", "on and off the grid"],
    what=["mean", "variance", "both"],
    max_cholesky=[800, 0],
)
def test_gradients_of_a_posterior_are_those_of_dense_algebra(where, what, max_cholesky):
    """Gradients of a posterior with respect to its points and to every hyperparameter."""
    ours, plain, grid = models()
    results = []
    for model, size in ((ours, max_cholesky), (plain, 800)):
        x = points_of_every_kind(grid)[where].clone().requires_grad_()
        with (
            gpytorch.settings.detach_test_caches(False),
            settings.solve_tolerance(1e-11),
            MAX_CHOLESKY(size),
        ):
            posterior = model(x)
            weights = dense.randn(2, len(x))
            value = (posterior.mean * weights[0]).sum() if what != "variance" else 0.0
            value = value + ((posterior.variance * weights[1]).sum() if what != "mean" else 0.0)
            inputs = [x, *model.parameters()]
            gradients = torch.autograd.grad(value, inputs, allow_unused=True)
            results.append(
                [value, *(torch.zeros_like(i) if g is None else g for i, g in zip(inputs, gradients, strict=True))]
            )
    for got, expected in zip(*results, strict=True):
        assert torch.allclose(got, expected, rtol=1e-6, atol=1e-7)


def test_gradients_may_be_taken_again():
    """As in GPyTorch a graph serves one backward pass, and caches are forgotten by ``train()``."""
    ours, plain, _ = models()
    x = dense.randn(5, 2).sigmoid()
    gradients = []
    for model in (ours, plain):
        with gpytorch.settings.detach_test_caches(False):
            for _ in range(2):
                model.train()
                model.eval()
                value = model(x).mean.sum()
                gradients.append(torch.autograd.grad(value, model.covar_module.raw_outputscale)[0])
    for again in gradients[1:]:
        assert torch.allclose(gradients[0], again)


@pytest.mark.parametrize("max_cholesky", [800, 0])
def test_gradients_of_the_points_with_detached_caches(max_cholesky):
    """GPyTorch's default, as Bayesian optimisation uses it."""
    ours, plain, _ = models()
    results = []
    for model, size in ((ours, max_cholesky), (plain, 800)):
        x = dense.randn(6, 2).sigmoid().requires_grad_()
        with settings.solve_tolerance(1e-11), MAX_CHOLESKY(size):
            for _ in range(2):
                posterior = model(x)
                value = (posterior.mean + posterior.variance.sqrt()).sum()
                results.append(torch.autograd.grad(value, x)[0])
    assert torch.allclose(results[0], results[1])
    assert torch.allclose(results[0], results[2], rtol=1e-6, atol=1e-8)


# -- other data ------------------------------------------------------------------------------------------------------


def retrained(model, x, y, likelihood=None):
    """The same hyperparameters, from scratch, on these data."""
    fresh = Model(x, y, likelihood or gaps.GappyGridLikelihood(), kernel_of(model.covar_module.base_kernel.grid))
    fresh = fresh.double()
    if likelihood is None:
        fresh.load_state_dict(model.state_dict())
    else:
        fresh.covar_module.load_state_dict(model.covar_module.state_dict())
        fresh.mean_module.load_state_dict(model.mean_module.state_dict())
    return fresh.eval()


def split(model, count=9):
    """The training data without the last few, and these."""
    (x,), y = model.train_inputs, model.train_targets
    return (x[:-count], y[:-count]), (x[-count:], y[-count:])


@pytest.mark.parametrize("max_cholesky", [800, 0])
@pytest.mark.parametrize("where", ["cells", "off the grid"])
def test_a_fantasy_is_the_model_with_more_data(where, max_cholesky):
    ours, _, grid = models()
    known, (x, y) = split(ours)
    x = x if where == "cells" else x + 0.017
    part = retrained(ours, *known)
    with torch.no_grad(), settings.solve_tolerance(1e-9), MAX_CHOLESKY(max_cholesky):
        before = part(grid.points()).mean
        fantasy = part.get_fantasy_model(x, y)
        close(
            fantasy(grid.points()), retrained(ours, torch.cat([known[0], x]), torch.cat([known[1], y]))(grid.points())
        )
        assert torch.equal(part(grid.points()).mean, before)
        assert len(fantasy.train_targets) == len(known[1]) + len(y)
        again = fantasy.get_fantasy_model(x[:2] + 0.3, y[:2])
        everything = torch.cat([known[0], x, x[:2] + 0.3]), torch.cat([known[1], y, y[:2]])
        close(again(grid.points()), retrained(ours, *everything)(grid.points()))


def test_fantasies_of_a_sum():
    grid, x, y = grid_and_data()

    def model(rows):
        return Model(x[rows], y[rows], gaps.GappyGridLikelihood(), kernel_of(grid) + LinearKernel()).double().eval()

    few, all_of_them = model(slice(0, -5)), model(slice(None))
    with torch.no_grad():
        few(x[:3])
        close(few.get_fantasy_model(x[-5:], y[-5:])(grid.points()), all_of_them(grid.points()))


def test_a_batch_of_fantasies():
    """Several values at the same new points: one covariance, several means."""
    ours, _, grid = models()
    known, (x, y) = split(ours, 4)
    part = retrained(ours, *known)
    values = torch.stack([y, y + 1, y - 2])
    with torch.no_grad():
        part(grid.points())
        posterior = part.get_fantasy_model(x, values)(grid.points())
        assert posterior.mean.shape == (3, grid.num_cells)
        for member, own in enumerate(values):
            expected = retrained(ours, torch.cat([known[0], x]), torch.cat([known[1], own]))(grid.points())
            assert torch.allclose(posterior.mean[member], expected.mean, atol=1e-5)
            assert torch.allclose(posterior.variance[member], expected.variance, atol=1e-5)


def test_fantasies_with_given_noise():
    """New observations come with their own variances."""
    ours, _, grid = models()
    known, (x, y) = split(ours)
    noise = 0.1 + torch.rand(len(ours.train_targets), generator=torch.Generator().manual_seed(0)).double()
    part = retrained(ours, *known, gaps.GappyGridLikelihood(noise[:-9]))
    everything = retrained(ours, *ours.train_inputs, ours.train_targets, gaps.GappyGridLikelihood(noise))
    with torch.no_grad():
        part(grid.points())
        fantasy = part.get_fantasy_model(x, y, noise=noise[-9:])
        close(fantasy(grid.points()), everything(grid.points()))
        assert torch.allclose(fantasy.likelihood(fantasy(x)).variance, fantasy(x).variance + noise[-9:])
        with pytest.raises(ValueError, match="expected those of the new ones too"):
            part.get_fantasy_model(x, y)


def test_fantasies_with_a_noise_per_level():
    grid, x, y = grid_and_data()

    def model(rows):
        likelihood = gaps.GappyGridLikelihood(noise_axis=1, grid=grid).double()
        likelihood.noise = torch.linspace(0.05, 0.5, 11).double()
        return Model(x[rows], y[rows], likelihood, kernel_of(grid)).double().eval()

    few, all_of_them = model(slice(0, -5)), model(slice(None))
    with torch.no_grad():
        few(x[:3])
        fantasy = few.get_fantasy_model(x[-5:], y[-5:])
        close(fantasy(grid.points()), all_of_them(grid.points()))
        close(fantasy.likelihood(fantasy(grid.points())), all_of_them.likelihood(all_of_them(grid.points())))


def test_set_train_data_forgets_the_last_solution():
    ours, _, grid = models()
    (x,), y = ours.train_inputs, ours.train_targets
    with torch.no_grad():
        ours(grid.points())
        ours.set_train_data(targets=y.flip(0))
        close(ours(grid.points()), retrained(ours, x, y.flip(0))(grid.points()))
        ours.set_train_data(x.flip(0), y)
        close(ours(grid.points()), retrained(ours, x.flip(0), y)(grid.points()))
        ours.set_train_data(x[:50], y[:50], strict=False)
        close(ours(grid.points()), retrained(ours, x[:50], y[:50])(grid.points()))
        ours.set_train_data(x[:50] + 0.01, y[:50])
        close(ours(grid.points()), retrained(ours, x[:50] + 0.01, y[:50])(grid.points()))


def test_prior_mode_makes_no_solve():
    ours, plain, grid = models()
    for x in points_of_every_kind(grid).values():
        with torch.no_grad(), gpytorch.settings.prior_mode(True), gaps.record_solves() as solves:
            prior, expected = ours(x), plain(x)
            close(prior, expected, 1e-10)
            noisy = ours.likelihood(prior)
            assert torch.allclose(noisy.variance, expected.variance + 0.05)
        assert len(solves) == 0


def test_skipped_variances_are_zero_and_cost_nothing():
    ours, plain, grid = models()
    with torch.no_grad(), gpytorch.settings.skip_posterior_variances(), gaps.record_solves() as solves:
        posterior = ours(grid.points())
        assert torch.allclose(posterior.mean, plain(grid.points()).mean, atol=1e-5)
        assert posterior.variance.dtype == torch.float64
        assert bool((posterior.lazy_covariance_matrix.to_dense() == 0).all())
    assert len(solves) == 1
    with torch.no_grad():
        assert torch.allclose(ours(grid.points()).variance, plain(grid.points()).variance, atol=1e-5)


@pytest.mark.parametrize("case", ["two axes", "a sum of two grid kernels", "a noise per output", "a batch of three"])
def test_nothing_is_stale_after_a_step(case):
    """Train, predict, train, predict: always as a fresh model with the same hyperparameters."""
    pair, fresh = CASES[case](small=True), CASES[case](small=True)
    model = pair.ours
    assert not isinstance(model.likelihood, PerLevelNoise)
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.3)
    means = []
    for _ in range(3):
        model.train()
        optimizer.zero_grad()
        (-mll(model(*model.train_inputs), model.train_targets).sum()).backward()
        optimizer.step()
        model.eval()
        fresh.ours.load_state_dict(model.state_dict())
        fresh.ours.train()
        fresh.ours.eval()
        with torch.no_grad(), settings.solve_tolerance(1e-10):
            got, expected = model(pair.test_x), fresh.ours(pair.test_x)
            assert torch.allclose(got.mean, expected.mean, atol=1e-7)
            assert torch.allclose(got.variance, expected.variance, atol=1e-7)
            noisy = model.likelihood(got).variance, fresh.ours.likelihood(expected).variance
            assert torch.allclose(*noisy, atol=1e-7)
            means.append(got.mean)
    assert not torch.allclose(means[0], means[1], atol=1e-3)
    assert not torch.allclose(means[1], means[2], atol=1e-3)


def test_loading_a_state_in_eval_mode_is_not_stale():
    """GPyTorch forgets its caches when a state is loaded; so do we."""
    ours, _, grid = models()
    other, _, _ = models()
    other.covar_module.outputscale = 3.0
    other.covar_module.base_kernel.kernels[0].lengthscale = 0.1
    with torch.no_grad():
        ours(grid.points())
        ours.load_state_dict(other.state_dict())
        ours.train()
        ours.eval()
        close(ours(grid.points()), other(grid.points()))


# -- errors ----------------------------------------------------------------------------------------------------------


def test_what_is_refused():
    ours, _, grid = models()
    with gpytorch.settings.observation_nan_policy("mask"), pytest.raises(ValueError, match="observation_nan_policy"):
        ours(grid.points())

    class Multitask(gpytorch.models.ExactGP):
        def __init__(self, x, y, likelihood):
            super().__init__(x, y, likelihood)
            self.mean_module = gpytorch.means.MultitaskMean(gpytorch.means.ConstantMean(), 2)
            self.covar_module = gpytorch.kernels.MultitaskKernel(kernel_of(grid), 2)

        def forward(self, x):
            return gpytorch.distributions.MultitaskMultivariateNormal(self.mean_module(x), self.covar_module(x))

    (x,), y = ours.train_inputs, ours.train_targets
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=2)
    model = Multitask(x, torch.stack([y, y], -1), likelihood).double().eval()
    with torch.no_grad():
        assert model(grid.points()[:5]).mean.shape == (5, 2)  # GPyTorch's own way
        with pytest.raises(ValueError, match="got a multitask prior; expected outputs as an axis of the grid"):
            GappyGridPredictionStrategy([x], model.forward(x), model.train_targets, likelihood)
