"""Variances from draws with neighbours, against dense float64 algebra: unbiased, precise, honest about their error.

The regressions that they and predictions left out rest on are compared with dense ones, too.
"""

import math

import pytest
import torch
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import LinearKernel, MaternKernel, RBFKernel, ScaleKernel

import gpytorch_gaps as gaps
from gpytorch_gaps import settings
from gpytorch_gaps.posterior import drawn_variance, pilots, regressions
from tests import _dense as dense
from tests._covering import in_turn
from tests.workflow._pairs import CASES, Model, with_length

NUS = {"matern12": 0.5, "matern32": 1.5}


pytestmark = pytest.mark.usefixtures("estimates_are_errors")


def grid_kernel(kind, grid, length):
    parts = [MaternKernel(nu=NUS[kind]) if kind in NUS else RBFKernel() for _ in grid.axes]
    return ScaleKernel(gaps.GappyGridKernel([with_length(part, length) for part in parts], grid))


def problem(kind, noise, clouds, shape=(30, 40), dtype=torch.float64):
    """A model with gaps that are scattered or hang together, and its grid."""
    grid = gaps.CartesianGrid([torch.linspace(0, 1, size, dtype=torch.float64) for size in shape])
    field = dense.randn(1, 1, *shape, seed=2)
    field = torch.nn.functional.avg_pool2d(field, 9, 1, 4).flatten() if clouds else field.flatten()
    x = grid.points((field > field.quantile(0.4)).nonzero().squeeze(-1))
    if kind == "sum":
        kernel = grid_kernel("matern12", grid, 0.1) + grid_kernel("se", grid, 0.3)
    elif kind == "with a linear kernel":
        kernel = grid_kernel("matern32", grid, 0.2) + LinearKernel()
    else:
        kernel = grid_kernel(kind, grid, {"matern12": 0.5, "matern32": 0.2, "se": 0.1}[kind])
    likelihood = gaps.GappyGridLikelihood(noise_constraint=GreaterThan(1e-9))
    model = Model(x, torch.zeros(len(x)).double(), likelihood, kernel).double()
    model.likelihood.noise = noise
    return model.to(dtype).eval(), grid


def dense_parts(model, grid):
    """K of all cells, the observed ones, and the exact variances; by the kernel matrices alone."""
    with torch.no_grad():
        kernel = model.double().forward(grid.points().double()).covariance_matrix
        index = grid.index_of(model.train_inputs[0].to(grid.axes[0].dtype))
    system = kernel[index][:, index] + noise_of(model) * torch.eye(len(index), dtype=torch.float64)
    half = torch.linalg.solve_triangular(torch.linalg.cholesky(system), kernel[index], upper=False)
    return kernel, index, kernel.diagonal() - half.square().sum(0)


def noise_of(model):
    return float(model.likelihood.noise.detach())


def parts_of(model, x):
    with torch.no_grad():
        return model(x).lazy_covariance_matrix.parts


def estimate(model, x, samples, *contexts, seed=0):
    torch.manual_seed(seed)
    with torch.no_grad(), settings.variance_method("pathwise"), settings.variance_samples(samples):
        for context in contexts:
            context.__enter__()
        try:
            with gaps.record_solves() as solves:
                value = model(x).lazy_covariance_matrix.diagonal(dim1=-1, dim2=-2)
        finally:
            for context in reversed(contexts):
                context.__exit__(None, None, None)
    return value.double(), solves.variances[-1].error.double()


def dense_weights(found, num_rows):
    """b of every point as a matrix, checked to be what `fitted` uses. shape: (Q, N)"""
    return found.fitted(torch.eye(num_rows, dtype=torch.float64))


# -- regressions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("neighbours", [5, 40, 320])
@pytest.mark.parametrize("kind", ["matern12", "se", "sum", "with a linear kernel"])
def test_what_regressions_leave(kind, neighbours, monkeypatch):
    """t is the variance of ``f - b'y_J`` for the very coefficients, between that of the posterior and the prior."""
    monkeypatch.setattr(regressions, "_NUM_NEIGHBOURS", neighbours)
    model, grid = problem(kind, 1e-2, True, shape=(20, 16))
    kernel, index, exact = dense_parts(model, grid)
    parts = parts_of(model, grid.points())
    with torch.no_grad():
        variance = parts.prior_variance()
        near = regressions.neighbourhoods(parts.train, parts.cross, variance, parts.cells, 2.0**29)
        found = near.regressions()
    for without, own in zip(near.left(), (found.left, found.sizes()), strict=True):  # coefficients are not held
        torch.testing.assert_close(without, own, rtol=1e-6, atol=0.0)
    weights = dense_weights(found, len(index))
    assert bool(((weights != 0).sum(-1) <= neighbours).all())
    system = kernel[index][:, index] + noise_of(model) * torch.eye(len(index), dtype=torch.float64)
    left = kernel.diagonal() + (weights * (weights @ system - 2.0 * kernel[:, index])).sum(-1)
    torch.testing.assert_close(found.left, left, rtol=1e-9, atol=1e-12)
    assert bool((found.left >= exact - 1e-10).all())
    assert bool((found.left <= kernel.diagonal() + 1e-10).all())
    torch.testing.assert_close(found.sizes(), weights.norm(dim=-1), rtol=1e-5, atol=1e-12)
    for cell in (0, 77, 201):  # the best that these neighbours can do
        own = weights[cell].nonzero().squeeze(-1)
        best = torch.linalg.solve(system[own][:, own], kernel[cell, index[own]])
        torch.testing.assert_close(weights[cell, own], best, rtol=1e-4, atol=1e-6)
    if neighbours == 320:  # all observations
        torch.testing.assert_close(found.left, exact, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("neighbours", [6, 320])
def test_regressions_of_observations_on_others(neighbours, monkeypatch):
    """No observation is its own neighbour. Some share a cell, and a few are neighbours of no other."""
    monkeypatch.setattr(regressions, "_NUM_NEIGHBOURS", neighbours)
    model, grid = problem("matern32", 1e-2, True, shape=(16, 14))
    x = torch.cat([model.train_inputs[0], model.train_inputs[0][:5]])
    model.set_train_data(x, torch.zeros(len(x)).double(), strict=False)
    kernel, index, _ = dense_parts(model, grid)
    system = kernel[index][:, index] + noise_of(model) * torch.eye(len(index), dtype=torch.float64)
    train = parts_of(model, x).train
    with torch.no_grad():
        variance = train._diagonal().double()
        found = regressions.neighbourhoods(train, train._linear_op, variance, None, 2.0**29).regressions()
    weights = dense_weights(found, len(x))
    assert float(weights.diagonal().abs().max()) == 0.0
    rest = torch.eye(len(x), dtype=torch.float64) - weights
    torch.testing.assert_close(found.left, (rest * (rest @ system)).sum(-1), rtol=1e-8, atol=1e-12)
    for row in (0, 40, len(x) - 1):
        own = weights[row].nonzero().squeeze(-1)
        best = torch.linalg.solve(system[own][:, own], system[row, own])
        torch.testing.assert_close(weights[row, own], best, rtol=1e-4, atol=1e-6)


def test_matrices_that_are_singular_to_working_precision():
    """Are solved with a ridge, others as they are."""
    regular = dense.matern32(6) + 0.1 * torch.eye(6, dtype=torch.float64)
    singular = torch.ones(6, 6, dtype=torch.float64) - 1e-15 * torch.eye(6, dtype=torch.float64)
    columns = torch.stack([dense.randn(6, 2), torch.full((6, 2), 0.7, dtype=torch.float64)])
    solved = regressions._solve(torch.stack([regular, singular]), columns)
    torch.testing.assert_close(solved[0], torch.linalg.solve(regular, columns[0]), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(singular @ solved[1], columns[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("memory", [2.0**14, 2.0**18, 2.0**29])
def test_memory_bounds_coefficients(memory):
    """Fewer neighbours, and fewer points that share them."""
    model, grid = problem("matern32", 1e-2, False)
    parts = parts_of(model, grid.points())
    with torch.no_grad():
        found = regressions.neighbourhoods(
            parts.train, parts.cross, parts.prior_variance(), parts.cells, memory
        ).regressions()
    assert found.coefficients.numel() * 4 <= max(memory, 8 * 4 * found.members.numel())
    assert found.rows.size(-1) >= min(4 * found.members.size(-1), 8)


@pytest.mark.parametrize("case", CASES)
def test_where_there_are_no_neighbours(case):
    """Points off the grid, batches, kernels without single entries, and gradients: the prior variance is left."""
    pair = CASES[case](small=True)
    parts = parts_of(pair.ours.eval(), pair.test_x[-12:])
    assert not drawn_variance._neighbourhoods(parts).rows.numel()
    parts = parts_of(pair.ours.eval(), pair.grid.points()[::7])
    found = drawn_variance._neighbourhoods(parts)
    assert bool(found.rows.numel()) == (parts.cells is not None and not parts.train.batch_shape)
    if found.rows.numel():
        assert float((found.left()[0] / parts.prior_variance()).median()) < 0.5
    attached = pair.ours(pair.grid.points()[::7]).lazy_covariance_matrix.parts
    assert not drawn_variance._neighbourhoods(attached).rows.numel()


# -- estimates -------------------------------------------------------------------------------------------------------


@in_turn(kind=["sum", "matern12", "se", "sum"], neighbours=[0, 24, 4])
def test_both_halves_of_a_draw_are_unbiased(kind, neighbours, monkeypatch):
    """``E d^2 = v`` and ``E h^2 = t - v``, to what 4,000 draws can tell: z-scores are as large as chance makes them."""
    monkeypatch.setattr(regressions, "_NUM_NEIGHBOURS", max(1, neighbours))
    model, grid = problem(kind, 1e-2, True, shape=(16, 14))
    exact = dense_parts(model, grid)[2]
    parts, count = parts_of(model, grid.points()), 4000
    torch.manual_seed(0)
    with torch.no_grad():
        prior = parts.prior_variance()
        none = regressions.Neighbourhoods.none(prior)
        local = (drawn_variance._neighbourhoods(parts) if neighbours else none).regressions()
        left, of_mean, *_ = drawn_variance._moments(parts, local, count)
    for got, expected in ((left, exact), (of_mean, local.left - exact)):
        score = (got - expected) / expected.clamp_min(1e-9) / math.sqrt(2.0 / count)
        score = score[expected > 1e-9]
        assert len(score) > 0.9 * len(exact)
        assert float(score.abs().max()) < 5.0
        assert float(score.square().mean()) < 2.5  # of scores that go together


def test_draws_behind_variances_are_those_of_the_posterior():
    model, grid = problem("matern32", 1e-2, True, shape=(16, 14))
    with torch.no_grad(), settings.variance_method("pathwise"), settings.variance_samples(16):
        covariance = model(grid.points()).lazy_covariance_matrix
        torch.manual_seed(1)
        variance, draws = covariance.variance_and_draws()
        torch.manual_seed(1)
        torch.testing.assert_close(draws, covariance.zero_mean_mvn_samples(len(draws)), rtol=0.0, atol=1e-4)
    torch.testing.assert_close(variance, covariance.diagonal(dim1=-1, dim2=-2), rtol=0.05, atol=0.0)
    with torch.no_grad(), settings.variance_method("exact"):
        assert model(grid.points()).lazy_covariance_matrix.variance_and_draws()[1] is None


PROBLEMS = [
    (kind, noise, clouds) for kind in ("matern12", "matern32", "sum") for noise in (1e-2, 1e-4) for clouds in (0, 1)
]


@pytest.mark.parametrize(("kind", "noise", "clouds"), PROBLEMS)
def test_neighbours_leave_little_to_draws(kind, noise, clouds, monkeypatch):
    """At least five times as precise as without, from as few as 32 draws, with an error that is stated honestly.

    The error of draws is that of every point, and is exceeded at 5 % of them. Without draws, one relative error is
    stated for all points. It is at most 2 %, and is exceeded at no more than 5 % of them.
    """
    monkeypatch.setattr(regressions, "_NUM_NEIGHBOURS", 128)
    model, grid = problem(kind, noise, clouds)
    exact = dense_parts(model, grid)[2]
    off, covered = [], []
    with gaps.record_solves() as solves:
        for seed in range(4):
            got, error = estimate(model, grid.points(), 32, seed=seed)
            off.append((got - exact) / exact)
            covered.append(((got - exact).abs() <= error).double())
    rms = float(torch.stack(off).square().mean().sqrt())
    assert rms <= 0.2 * math.sqrt(2.0 / 32)
    share = float(torch.stack(covered).mean())
    assert share >= 0.93
    drawn = {bool(report.num_samples) for report in solves.variances}
    assert len(drawn) == 1  # pilots do not depend on the seed
    if drawn == {True}:
        assert share <= 0.99
    else:
        assert float((error / got).max()) <= 0.02 + 1e-6


@pytest.mark.parametrize("noise", [1e-2, 1e-4])
def test_the_mean_of_estimates(noise, monkeypatch):
    """Over seeds, within their standard errors of the exact ones."""
    monkeypatch.setattr(regressions, "_NUM_NEIGHBOURS", 24)
    model, grid = problem("matern12", noise, True, shape=(16, 14))
    exact = dense_parts(model, grid)[2]
    runs = torch.stack([estimate(model, grid.points(), 16, seed=seed)[0] for seed in range(100)])
    score = (runs.mean(0) - exact) / (runs.std(0) / math.sqrt(len(runs))).clamp_min(1e-9 * exact)
    # each estimate is weighted by what its own draws say, which moves it by 5 % where half is left, by less elsewhere
    assert float(((runs.mean(0) - exact) / exact).abs().median()) <= 0.01
    assert float(score.square().mean().sqrt()) <= 2.0


@pytest.mark.parametrize("kind", ["matern12", "matern32"])
def test_loose_solves_are_part_of_the_error(kind, monkeypatch):
    """Their residuals are known, and neighbours correct for most of them."""
    monkeypatch.setattr(regressions, "_NUM_NEIGHBOURS", 64)
    model, grid = problem(kind, 1e-3, True)
    exact, x = dense_parts(model, grid)[2], grid.points()
    loose = (
        settings.solve_tolerance(0.1),
        settings.mean_tolerance(0.5),
        settings.dense_size(1),
        settings.preconditioner_rank(20),
    )
    got, error = estimate(model, x, 64, *loose)
    tight, _ = estimate(model, x, 64)
    moved = (got - tight).abs()
    assert float(moved.max()) > 0
    assert float((moved <= error).double().mean()) >= 0.99
    assert float(((got - exact).abs() <= error).double().mean()) >= 0.93
    assert float((moved / exact).median()) <= 0.01


@pytest.mark.parametrize("neighbours", [8, 64])
def test_no_error_exceeds_what_is_certain(neighbours, monkeypatch):
    """The variance is between 0 and t, even if residuals of loose solves are large compared with the noise."""
    monkeypatch.setattr(regressions, "_NUM_NEIGHBOURS", neighbours)
    model, grid = problem("matern12", 1e-8, True, shape=(20, 16))
    kernel, _, exact = dense_parts(model, grid)
    loose = (settings.mean_tolerance(5.0), settings.dense_size(1), settings.preconditioner_rank(1))
    got, error = estimate(model, grid.points(), 64, settings.solve_tolerance(0.1), *loose)
    left = drawn_variance._neighbourhoods(parts_of(model, grid.points())).left()[0]
    assert float((error - got.maximum(left - got)).max()) <= 1e-6
    assert bool(((got - exact).abs() <= error).double().mean() >= 0.95)
    assert float((got - kernel.diagonal()).max()) <= 1e-6


def test_neighbours_are_searched_for_once(monkeypatch):
    """Draws after pilots use the neighbours of the pilots, if memory allows."""
    model, grid = problem("matern12", 1e-2, True, shape=(20, 16))
    monkeypatch.setattr(regressions, "_NUM_NEIGHBOURS", 16)
    parts, searches = parts_of(model, grid.points()), []
    search = drawn_variance._neighbourhoods
    monkeypatch.setattr(drawn_variance, "_neighbourhoods", lambda *a, **k: searches.append(a) or search(*a, **k))
    with torch.no_grad():
        report = drawn_variance.drawn_variance(parts, drawn_variance.ASKED_FOR)[1]
    assert report.num_samples
    assert len(searches) == 1


def test_float32_models():
    """With regressions in float64, they are no worse than float64 ones."""
    model, grid = problem("matern12", 1e-3, True, dtype=torch.float32)
    x = grid.points().float()
    got, error = estimate(model, x, 32)
    exact = dense_parts(model, grid)[2]
    assert float(((got - exact) / exact).square().mean().sqrt()) <= 0.05
    assert float(((got - exact).abs() <= error).double().mean()) >= 0.93


def test_observed_cells_in_any_order_and_repeated():
    """Points of one tile, of many, and the same point many times."""
    model, grid = problem("matern32", 1e-2, True)
    exact = dense_parts(model, grid)[2]
    cells = torch.randperm(grid.num_cells, generator=torch.Generator().manual_seed(1))[:300]
    cells = torch.cat([cells, cells[:1].expand(100)])
    got, error = estimate(model, grid.points(cells), 64)
    assert float(((got - exact[cells]).abs() <= error).double().mean()) >= 0.9
    # batched products round by where a point is in the batch
    torch.testing.assert_close(got[300:], got[:1].expand(100), rtol=1e-12, atol=0.0)
    assert float((error / got).median()) < 0.05


# -- whether to draw -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("neighbours", "samples"), [(320, 0), (100, 0), (48, 40)])
def test_draws_only_where_neighbours_leave_something(neighbours, samples, monkeypatch):
    """Otherwise t is v, to the error that is stated."""
    monkeypatch.setattr(regressions, "_NUM_NEIGHBOURS", neighbours)
    model, grid = problem("matern12", 1e-2, True, shape=(20, 16))
    exact = dense_parts(model, grid)[2]
    torch.manual_seed(0)
    with (
        torch.no_grad(),
        settings.variance_method("pathwise"),
        settings.variance_samples(40),
        gaps.record_solves() as solves,
    ):
        value = model(grid.points()).variance.double()
    report, relative = solves.variances[-1], (value - exact).abs() / exact
    assert report.num_samples == samples
    assert float((relative <= report.error.double() / exact).double().mean()) >= 0.93
    if not samples:
        assert float((relative <= 0.02).double().mean()) >= 0.95


def test_pilots_in_place_of_draws_that_take_long(monkeypatch):
    """95 % of the variances are within the stated error, and their mean is right."""
    monkeypatch.setattr(regressions, "_NUM_NEIGHBOURS", 64)
    model, grid = problem("matern12", 0.1, False)
    exact = dense_parts(model, grid)[2]
    monkeypatch.setattr(drawn_variance, "_MANY_FLOPS", 0.0)
    with gaps.record_solves() as solves:
        got, error = estimate(model, grid.points(), 8)
    assert not solves.variances[-1].num_samples
    assert "estimated at" in solves.variances[-1].reason
    assert float(((got - exact).abs() <= error).double().mean()) >= 0.93
    assert float((got.sum() - exact.sum()).abs() / exact.sum()) <= 0.01
    assert float((error / exact).median()) <= 0.1


@pytest.mark.parametrize("neighbours", [8, 24])
def test_what_pilots_say_of_neighbours(neighbours, monkeypatch):
    """Estimates of ``t - v`` from one solve for many pilots are within the errors that they state."""
    monkeypatch.setattr(regressions, "_NUM_NEIGHBOURS", neighbours)
    model, grid = problem("matern12", 1e-2, True, shape=(20, 80))
    exact, parts = dense_parts(model, grid)[2], parts_of(model, grid.points())
    local = drawn_variance._neighbourhoods(parts)
    found = pilots.pilots(parts, local)
    torch.testing.assert_close(found.left, local.left()[0][found.points], rtol=1e-10, atol=0.0)
    truth = (found.left - exact[found.points]).clamp_min(0.0)
    # errors are one standard error, judged by seven numbers
    assert float(((found.beyond - truth).abs() <= 2.0 * found.off).double().mean()) >= 0.85
    assert float(found.off.median()) <= 0.5 * float(truth.median())


@pytest.mark.parametrize("noise", [1e-3, 1e-1])
def test_a_series_needs_no_draws(noise):
    """Neighbours on either side of a point say nearly all of it: t is v, to the error that is stated."""
    grid = gaps.CartesianGrid([torch.arange(3000, dtype=torch.float64)])
    field = torch.nn.functional.avg_pool1d(dense.randn(1, 1, 3000, seed=3), 31, 1, 15).flatten()
    x = grid.points((field > field.quantile(0.3)).nonzero().squeeze(-1))
    model = Model(x, torch.zeros(len(x)).double(), gaps.GappyGridLikelihood(), grid_kernel("matern32", grid, 25.0))
    model = model.double().eval()
    model.likelihood.noise = noise
    exact = dense_parts(model, grid)[2]
    with gaps.record_solves() as solves:
        got, error = estimate(model, grid.points(), 64)
    assert not solves.variances[-1].num_samples
    assert bool((got >= exact - 1e-9).all())
    assert float((got - exact <= error).double().mean()) >= 0.94
    assert float((error / exact).median()) <= 0.02
