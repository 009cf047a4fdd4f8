"""Beyond the axes of the data: back to the prior far away, without a step at the edge, and as dense GPyTorch there."""

import gpytorch
import linear_operator
import pytest
import torch
from gpytorch.kernels import MaternKernel, PeriodicKernel, ProductKernel, RBFKernel, ScaleKernel

import gpytorch_gaps as gaps
from gpytorch_gaps import settings
from tests import _dense as dense
from tests._covering import covering, in_turn
from tests.workflow._pairs import CASES, Model, gappy, on, with_length

MAX_CHOLESKY = linear_operator.settings.max_cholesky_size
KERNELS = {"RBF": RBFKernel, "Matern-5/2": MaternKernel}
WAYS = [("auto", 800), ("auto", 0), ("ignore", 0), ("fill", 0)]
STEP = 1e-6
PERIOD = 0.37


def models(kernel="RBF", noise=0.05, first=None):
    """Ours and a dense one, of a 20 x 18 grid with gaps; the first axis may have a kernel of its own."""
    grid, x, y = gaps.from_array(*reversed(gappy((20, 18), 0.4, 0)))
    kind = KERNELS[kernel]

    def first_of(columns):
        if first is None:
            return with_length(kind(active_dims=columns), 0.3)
        return first(columns)

    ours = gaps.GappyGridKernel([first_of(None), with_length(kind(), 0.4)], grid)
    plain = ProductKernel(first_of([0]), on(1, kind, 0.4))
    made = [
        Model(x, y, gaps.GappyGridLikelihood(), ScaleKernel(ours)).double(),
        Model(x, y, gpytorch.likelihoods.GaussianLikelihood(), ScaleKernel(plain)).double(),
    ]
    for model in made:
        model.likelihood.noise = torch.tensor(noise, dtype=torch.float64)
        model.mean_module.constant.data.fill_(0.3)
        model.covar_module.outputscale = 1.75
        model.eval()
    return *made, grid


def beyond(grid, by=0.5):
    """Points outside, of every kind that is treated in its own way."""
    first, second = (axis.squeeze(-1) for axis in grid.axes)
    later = first[-1] + by * torch.linspace(0.1, 1, 7, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    scattered = torch.rand(9, 2, generator=generator, dtype=torch.float64)
    return {
        "a grid after the data": gaps.CartesianGrid([later, second]).points(),
        "a grid before the data": gaps.CartesianGrid([-later, second]).points(),
        "a grid around the data": gaps.CartesianGrid([torch.cat([-later, first, later]), second]).points(),
        "a grid off both axes": gaps.CartesianGrid([later, second + by + 1.0]).points(),
        "scattered, off one axis": scattered + torch.tensor([1.0 + by, 0.0], dtype=torch.float64),
        "scattered, off the other": scattered - torch.tensor([0.0, 1.0 + by], dtype=torch.float64),
        "scattered, off both": scattered + 1.0 + by,
        "one point": torch.tensor([[1.0 + by, 0.5]], dtype=torch.float64),
        "cells and beyond": torch.cat([grid.points()[:9], scattered + 1.0 + by]),
    }


def predict(model, x, method="auto", max_cholesky=800):
    with (
        torch.no_grad(),
        settings.gap_method(method),
        settings.solve_tolerance(1e-9),
        MAX_CHOLESKY(max_cholesky),
    ):
        posterior = model(x)
        return posterior.mean, posterior.variance, posterior.covariance_matrix


@in_turn(kernel=KERNELS, way=WAYS)
def test_as_dense_gpytorch(kernel, way):
    """Every way with one of the kernels; `test_methods_agree` compares the methods for each of them."""
    method, max_cholesky = way
    ours, plain, grid = models(kernel)
    for by in (1e-9, 0.3, 30.0):
        for name, x in beyond(grid, by).items():
            for got, expected in zip(predict(ours, x, method, max_cholesky), predict(plain, x), strict=True):
                assert torch.allclose(got, expected, rtol=1e-6, atol=1e-6), (name, by)


@pytest.mark.parametrize("case", [case for case in CASES if "output" not in case])
def test_every_case_as_dense_gpytorch(case):
    """With sums, groups, batches and noises; outputs have no beyond."""
    pair = CASES[case](small=True)
    x = pair.test_x + torch.linspace(0.0, 2.0, len(pair.test_x), dtype=torch.float64).unsqueeze(-1)
    for max_cholesky in (800, 0):
        got = predict(pair.ours.eval(), x, max_cholesky=max_cholesky)
        for own, expected in zip(got, predict(pair.dense.eval(), x), strict=True):
            assert torch.allclose(own, expected, rtol=1e-6, atol=1e-6)


@in_turn(kernel=KERNELS, way=WAYS)
def test_far_away_is_the_prior(kernel, way):
    """Mean, variance, covariance, and those of new observations; off one axis is far enough."""
    method, max_cholesky = way
    ours, _, grid = models(kernel)
    for name, x in beyond(grid, 40.0).items():
        outside = ~((x >= 0) & (x <= 1)).all(-1)
        far = x[outside & ((x - 0.5).abs().amax(-1) > 4.0)]
        assert len(far), name
        mean, variance, covariance = predict(ours, far, method, max_cholesky)
        assert torch.allclose(mean, torch.full_like(mean, 0.3), rtol=0, atol=1e-6), name
        assert torch.allclose(variance, torch.full_like(variance, 1.75), rtol=0, atol=1e-6), name
        with torch.no_grad():
            prior = ours.covar_module(far).to_dense()
            with settings.gap_method(method), MAX_CHOLESKY(max_cholesky):
                noisy = ours.likelihood(ours(far)).variance
        assert torch.allclose(covariance, prior, rtol=0, atol=1e-6), name
        assert torch.allclose(noisy, torch.full_like(noisy, 1.8), rtol=0, atol=1e-6), name


@pytest.mark.parametrize("kernel", KERNELS)
def test_certainty_only_falls(kernel):
    """Away from the last observations, step by step, up to the prior."""
    ours, _, grid = models(kernel)
    steps = torch.linspace(0.0, 3.0, 40, dtype=torch.float64)
    x = torch.stack([1.0 + steps, torch.full_like(steps, float(grid.axes[1][9]))], -1)
    _, variance, _ = predict(ours, x, max_cholesky=0)
    assert bool((variance.diff() > -1e-9).all())
    assert bool((variance < 1.75 + 1e-9).all())
    assert float(variance[0]) < 0.1


@covering(side=["first axis, start", "first axis, end", "second axis, end", "corner"], kernel=KERNELS, way=WAYS)
def test_no_step_at_the_edge(side, kernel, way):
    """Cells of the grid and points just beyond take different ways, and meet."""
    method, max_cholesky = way
    ours, _, grid = models(kernel)
    first, second = (axis.squeeze(-1) for axis in grid.axes)
    rows, columns, shift = {
        "first axis, start": (first[:1], second, [-STEP, 0.0]),
        "first axis, end": (first[-1:], second, [STEP, 0.0]),
        "second axis, end": (first, second[-1:], [0.0, STEP]),
        "corner": (first[-1:], second[-1:], [STEP, STEP]),
    }[side]
    edge = gaps.CartesianGrid([rows, columns]).points()
    shift = torch.tensor(shift, dtype=torch.float64)
    here = predict(ours, edge, method, max_cholesky)
    scattered = torch.cat([edge + shift, torch.rand(3, 2, generator=torch.Generator().manual_seed(0)).double() + 2.0])
    for there in (
        predict(ours, edge + shift, method, max_cholesky),  # a grid of its own
        tuple(part[..., : len(edge)] for part in predict(ours, scattered, method, max_cholesky)),
        predict(ours, torch.cat([grid.points(), edge + shift]), method, max_cholesky),  # together with the cells
    ):
        mean, variance = (part[..., -len(edge) :] for part in there[:2])
        # slopes of these are of order ten
        assert torch.allclose(mean, here[0], rtol=0, atol=20 * STEP)
        assert torch.allclose(variance, here[1], rtol=0, atol=20 * STEP)
    inside = predict(ours, edge - shift, method, max_cholesky)
    outside = predict(ours, edge + shift, method, max_cholesky)
    for a, b, c in zip(inside[:2], here[:2], outside[:2], strict=True):
        assert torch.allclose(a - b, b - c, rtol=0, atol=1e-7)  # nor a kink


@pytest.mark.parametrize("kernel", KERNELS)
def test_methods_agree(kernel):
    ours, _, grid = models(kernel, noise=0.01)
    for x in beyond(grid).values():
        results = [predict(ours, x, method, 0) for method in ("fill", "ignore", "cholesky")]
        for other in results[1:]:
            for got, expected in zip(other, results[0], strict=True):
                assert torch.allclose(got, expected, rtol=1e-6, atol=1e-6)


# -- periodic kernels --------------------------------------------------------------------------------------------------


def periodic(columns):
    kernel = PeriodicKernel(active_dims=columns)
    kernel.period_length, kernel.lengthscale = PERIOD, 0.8
    return kernel


@pytest.mark.parametrize(("method", "max_cholesky"), WAYS)
def test_periods_repeat(method, max_cholesky):
    """Any number of periods after or before the data, as within them."""
    ours, plain, grid = models("Matern-5/2", first=periodic)
    period = ours.covar_module.base_kernel.kernels[0].period_length.item()  # rounded where the kernel was made
    generator = torch.Generator().manual_seed(0)
    for x in (grid.points()[::5], torch.rand(8, 2, generator=generator, dtype=torch.float64)):
        here = predict(ours, x, method, max_cholesky)
        for periods in (1, 3, -2, 100):
            shifted = x + torch.tensor([periods * period, 0.0], dtype=torch.float64)
            there = predict(ours, shifted, method, max_cholesky)
            for got, expected, reference in zip(there, here, predict(plain, shifted), strict=True):
                assert torch.allclose(got, expected, rtol=1e-6, atol=1e-6)
                assert torch.allclose(got, reference, rtol=1e-6, atol=1e-6)
    half = predict(ours, x + torch.tensor([period / 2, 0.0], dtype=torch.float64), method, max_cholesky)
    assert not torch.allclose(half[0], here[0], atol=1e-2)


def test_a_decaying_period_returns_to_the_prior():
    """A periodic kernel times a local one: repeats for a while."""

    def decaying(columns):
        return periodic(columns) * with_length(RBFKernel(active_dims=columns), 1.5)

    ours, plain, grid = models("Matern-5/2", first=decaying)
    for by in (0.5, 60.0):
        for x in beyond(grid, by).values():
            for got, expected in zip(predict(ours, x, max_cholesky=0), predict(plain, x), strict=True):
                assert torch.allclose(got, expected, rtol=1e-6, atol=1e-6)
    mean, variance, _ = predict(ours, beyond(grid, 60.0)["scattered, off one axis"])
    assert torch.allclose(mean, torch.full_like(mean, 0.3), rtol=0, atol=1e-6)
    assert torch.allclose(variance, torch.full_like(variance, 1.75), rtol=0, atol=1e-6)


# -- samples -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_samples", [1, 5, 200])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("where", ["cells and a step beyond", "a grid of both"])
def test_samples_have_no_step_at_the_edge(where, kernel, num_samples):
    """Jointly at the edge and a step beyond; many samples of few points are drawn in another way."""
    ours, _, grid = models(kernel)
    first, second = (axis.squeeze(-1) for axis in grid.axes)
    edge = gaps.CartesianGrid([first[-1:], second]).points()
    shift = torch.tensor([STEP, 0.0], dtype=torch.float64)
    if where == "a grid of both":
        x = gaps.CartesianGrid([torch.stack([first[-1], first[-1] + STEP]), second]).points()
    else:
        x = torch.cat([edge, edge + shift])
    with torch.no_grad(), MAX_CHOLESKY(0):
        samples = gaps.sample_posterior(ours, x, num_samples, seed=0)
        _, variance, _ = predict(ours, edge)
    assert samples.shape == (num_samples, 2 * len(second))
    here, there = samples[:, : len(second)], samples[:, len(second) :]
    assert float((here - there).abs().max()) <= 30 * STEP  # slopes of up to fifteen
    assert float((here - here.mean(-1, keepdim=True)).abs().max()) > 0.5 * float(variance.min().sqrt())


@pytest.mark.parametrize("kernel", KERNELS)
def test_samples_far_away_are_those_of_the_prior(kernel):
    ours, _, grid = models(kernel)
    x = gaps.CartesianGrid([torch.tensor([50.0, 50.2]).double(), grid.axes[1].squeeze(-1)[:4]]).points()
    with torch.no_grad():
        samples = gaps.sample_posterior(ours, x, 20_000, seed=0)
        prior = ours.covar_module(x).to_dense()
    assert torch.allclose(samples.mean(0), torch.full((8,), 0.3, dtype=torch.float64), atol=0.05)
    assert torch.allclose(samples.mT.cov(), prior, atol=0.08)


def test_samples_of_a_forecast_have_its_moments():
    ours, plain, grid = models("Matern-5/2")
    x = beyond(grid, 0.3)["a grid after the data"][:20]
    with torch.no_grad(), MAX_CHOLESKY(0):
        few = torch.cat([gaps.sample_posterior(ours, x, 19, seed=seed) for seed in range(106)])
    mean, _, covariance = predict(plain, x)
    assert torch.allclose(few.mean(0), mean, atol=0.1)
    assert torch.allclose(few.mT.cov(), covariance, atol=0.15)
    assert dense.relative(few.mT.cov(), covariance) < 0.1
