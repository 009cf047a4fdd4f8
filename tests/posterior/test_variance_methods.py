"""Variances of posteriors by every method, against dense algebra: values, stated errors, reports, settings, memory."""

import math

import gpytorch
import linear_operator
import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from torch.utils._python_dispatch import TorchDispatchMode

import gpytorch_gaps as gaps
from gpytorch_gaps import settings
from gpytorch_gaps.posterior import regressions
from gpytorch_gaps.solvers.planning import variance as variance_planning
from tests import _dense as dense
from tests._covering import covering
from tests.workflow._pairs import CASES, Model, gappy, with_length

MAX_CHOLESKY = linear_operator.settings.max_cholesky_size


pytestmark = pytest.mark.usefixtures("estimates_are_errors")


def problem(seed=0, shape=(12, 10), fraction=None, lengths=None, noise=None):
    """A model with random gaps, length-scales and noise where none are given, and its grid."""
    generator = torch.Generator().manual_seed(seed)
    chance = torch.rand(4, generator=generator, dtype=torch.float64)
    fraction = 0.2 + 0.6 * float(chance[0]) if fraction is None else fraction
    lengths = (0.1 + 0.6 * chance[1:3]).tolist() if lengths is None else lengths
    axes, values = gappy(shape, fraction, seed)
    grid, x, y = gaps.from_array(values, axes)
    kernels = [with_length(RBFKernel(), lengths[0]), with_length(MaternKernel(), lengths[1])]
    model = Model(x, y, gaps.GappyGridLikelihood(), ScaleKernel(gaps.GappyGridKernel(kernels, grid))).double()
    model.covar_module.outputscale = 1.7
    model.likelihood.noise = 10 ** float(2 * chance[3] - 2.5) if noise is None else noise
    return model.eval(), grid


def exact(model, x):
    """``k - g'A^-1 g`` of dense kernel matrices, differentiable; no code of the package."""
    (train,), noise = model.train_inputs, model.likelihood.noise
    first, second = model.covar_module.base_kernel.kernels

    def covariance(a, b):
        product = first(a[:, :1], b[:, :1]).to_dense() * second(a[:, 1:], b[:, 1:]).to_dense()
        return model.covar_module.outputscale * product

    cross = covariance(x, train)
    system = covariance(train, train) + noise * torch.eye(len(train), dtype=torch.float64)
    return model.covar_module.outputscale - (cross * torch.linalg.solve(system, cross.mT).mT).sum(-1)


def prior(model):
    return float(model.covar_module.outputscale)


def variance(model, x, method, *contexts):
    """The variances, and their report."""
    with torch.no_grad(), settings.variance_method(method), gaps.record_solves() as solves:
        for context in contexts:
            context.__enter__()
        try:
            value = model(x).variance
        finally:
            for context in reversed(contexts):
                context.__exit__(None, None, None)
    (report,) = solves.variances
    assert report.error.shape == value.shape
    assert not report.error.requires_grad
    assert bool((report.error >= 0).all())
    return value, report


def points(grid):
    first, second = grid.axes
    return {
        "cells": grid.points(),
        "a few cells": grid.points(torch.tensor([5, 100, 7])),
        "another grid": gaps.CartesianGrid([torch.cat([first[:3] + 0.013, first[-1:] + 0.4]), second + 0.02]).points(),
        "scattered": dense.randn(40, 2).sigmoid(),
        "on and off the grid": torch.cat([grid.points()[:9], dense.randn(9, 2).sigmoid()]),
    }


KINDS = ["cells", "a few cells", "another grid", "scattered", "on and off the grid"]
kinds = pytest.mark.parametrize("kind", KINDS)

# -- exact -----------------------------------------------------------------------------------------------------------


@covering(method=["exact", "auto"], gap_method=["fill", "ignore", "auto"], max_cholesky=[0, 800], kind=KINDS)
def test_exact_variances_are_exact_at_all_kinds_of_points(method, gap_method, max_cholesky, kind):
    """To 1e-6 of the prior, as is promised of every solve; and to the bound that is stated."""
    model, grid = problem(fraction=0.4, lengths=(0.4, 0.5), noise=0.01)
    x = points(grid)[kind]
    got, report = variance(model, x, method, settings.gap_method(gap_method), MAX_CHOLESKY(max_cholesky))
    error = (got - exact(model, x).detach()).abs()
    assert float(error.max()) <= 1e-6
    assert bool((error <= report.error + 1e-12).all())
    assert report.method == "exact"
    assert report.num_samples == 0


@pytest.mark.parametrize("noise", [1e-2, 1e-4])
@kinds
def test_exact_without_solves(kind, noise):
    """A kernel with a low rank to the tolerance needs only the solve for the mean. Errors are as stated."""
    model, grid = problem(shape=(40, 30), fraction=0.3, lengths=(0.5, 0.5), noise=noise)
    model.covar_module.base_kernel.kernels[1] = with_length(RBFKernel().double(), 0.6)
    x = points(grid)[kind]
    x = x[x[:, 0] < 1.1]
    got, report = variance(model, x, "exact", MAX_CHOLESKY(0))
    error = (got - exact(model, x).detach()).abs()
    assert float(error.max()) <= 1e-6
    if report.rank:  # chosen by cost: at all cells, and some of the others
        assert bool((error <= report.error + 1e-9).all())
    else:
        assert kind != "cells"


@pytest.mark.parametrize("noise", [0.1, 1e-4])
def test_exact_without_solves_beyond_the_data(noise):
    """Half a unit off a grid of length one, within the error stated all the same."""
    model, grid = problem(shape=(40, 30), fraction=0.3, lengths=(0.3, 0.3), noise=noise)
    model.covar_module.base_kernel.kernels[1] = with_length(RBFKernel().double(), 0.3)
    x = grid.points() + 0.5
    got, report = variance(model, x, "exact", MAX_CHOLESKY(0))
    assert report.rank
    error = (got - exact(model, x).detach()).abs()
    assert bool((error <= report.error + 1e-12).all())
    assert float(error.max()) <= 1e-6 * prior(model)


# -- low rank --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cells", "another grid", "scattered"])
@pytest.mark.parametrize("noise", [0.3, 1e-3])
def test_low_rank_converges(noise, kind):
    """Variances converge from above as the rank grows. They are never negative, and never above the prior."""
    model, grid = problem(fraction=0.4, lengths=(0.2, 0.3), noise=noise)
    x = points(grid)[kind]
    expected = exact(model, x).detach()
    errors = []
    for rank in (1, 5, 20, 50, 1000):
        got, report = variance(model, x, "low_rank", settings.preconditioner_rank(rank))
        assert report.rank == min(rank, grid.num_cells)
        assert bool((got >= 0).all())
        assert bool((got <= prior(model) + 1e-9).all())
        errors.append(float((got - expected).abs().max()))
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.1
    assert errors[-1] < 2e-2 * errors[0]  # of gaps, as many eigenvectors as observations do not say it all


@pytest.mark.parametrize("kind", ["cells", "another grid", "scattered"])
def test_low_rank_of_the_whole_rank_is_exact(kind):
    """With nothing missing, all eigenvectors say it all."""
    model, grid = problem(fraction=0.0, lengths=(0.2, 0.3), noise=0.05)
    x = points(grid)[kind]
    got, _ = variance(model, x, "low_rank", settings.preconditioner_rank(120))
    assert float((got - exact(model, x).detach()).abs().max()) <= 1e-8


@pytest.mark.parametrize("rank", [10, 40])
def test_the_stated_error_of_low_rank_variances(rank):
    """Covers 95 % of points, on average over problems: the worst of 20 at random does, of 21 in 20 cases."""
    shares = []
    for seed in range(40):
        model, grid = problem(seed, shape=(20, 15))
        got, report = variance(model, grid.points(), "low_rank", settings.preconditioner_rank(rank))
        off = (got - exact(model, grid.points()).detach()).abs()
        shares.append(float((off <= report.error + 1e-12).double().mean()))
        assert float(report.error.max()) <= 1.01 * float(off.max()) + 1e-9  # and no more than it must
    assert sum(shares) / len(shares) >= 0.94
    assert min(shares) >= 0.75


LOW_RANK_CASES = ["a sum of two grid kernels", "a noise per output", "a noise per point", "a batch of three"]


@pytest.mark.parametrize("case", LOW_RANK_CASES)
def test_low_rank_on_the_grid_of_every_case(case):
    pair = CASES[case](small=True)
    x = pair.grid.points()
    with torch.no_grad(), MAX_CHOLESKY(10_000):
        expected = pair.dense.eval()(x).variance
    off = []
    for rank in (20, 100):
        got, report = variance(pair.ours.eval(), x, "low_rank", settings.preconditioner_rank(rank))
        assert got.shape == expected.shape
        assert bool((got >= 0).all())
        off.append((got - expected).abs())
        # each member of a batch has its own
        shares = (off[-1] <= report.error + 1e-12).double().mean(-1)
        assert float(shares.min()) >= 0.8
    assert float(off[1].max()) < 0.2 * float(off[0].max())


@pytest.mark.parametrize("kind", [slice(-10, None), slice(55, 66)], ids=["scattered", "on and off the grid"])
@pytest.mark.parametrize("case", ["two axes", "a noise per output", "a noise per point", "a batch of three"])
def test_low_rank_off_the_grid_of_every_case(case, kind):
    pair = CASES[case](small=True)
    x = pair.test_x[kind]
    with torch.no_grad(), MAX_CHOLESKY(10_000):
        expected = pair.dense.eval()(x).variance
    got, report = variance(pair.ours.eval(), x, "low_rank", settings.preconditioner_rank(60))
    assert bool(((got - expected).abs() <= 1.000001 * report.error + 1e-12).all())  # of so few points, all are checked
    assert float(report.error.max()) < 0.1


def test_what_low_rank_refuses():
    pair = CASES["a sum of two grid kernels"](small=True)
    with torch.no_grad(), settings.variance_method("low_rank"):
        posterior = pair.ours.eval()(pair.test_x[-10:])
        with pytest.raises(ValueError, match=r"variance_method: got 'low_rank' for a kernel or points without"):
            posterior.variance  # noqa: B018
        linear = CASES["a grid kernel plus LinearKernel"](small=True)
        with pytest.raises(ValueError, match="expected a Kronecker product or, on the training grid, a sum of them"):
            linear.ours.eval()(linear.grid.points()).variance  # noqa: B018
    model, grid = problem()
    x = dense.randn(5, 2).sigmoid().requires_grad_()
    with settings.variance_method("low_rank"), pytest.raises(ValueError, match=r"gradients enabled.*no_grad"):
        model(x).variance  # noqa: B018
    with settings.variance_method("low_rank"), torch.no_grad():
        assert model(x).variance.shape == (5,)
        assert model(grid.points()).variance.shape == (120,)


# -- pathwise --------------------------------------------------------------------------------------------------------


@pytest.fixture
def few_neighbours(monkeypatch):
    """So few that they leave much to draws: on these small grids, as many as there may be would leave nothing."""
    monkeypatch.setattr(regressions, "_NUM_NEIGHBOURS", 4)


@pytest.mark.parametrize("samples", [16, 256])
def test_the_stated_error_of_pathwise_variances(samples, few_neighbours):
    """Covers 95 % of points, on average over problems of all kinds and seeds; also near the prior, and far below it."""
    shares, below, above = [], [], []
    for seed in range(50):
        model, grid = problem(seed)
        torch.manual_seed(1 + seed)
        got, report = variance(model, grid.points(), "pathwise", settings.variance_samples(samples))
        expected = exact(model, grid.points()).detach()
        covered = ((got - expected).abs() <= report.error).double()
        shares.append(float(covered.mean()))
        below.append(covered[expected < 0.03 * prior(model)])
        above.append(covered[expected > 0.2 * prior(model)])
        assert bool((got >= 0).all())
        assert bool((got <= prior(model)).all())
    assert 0.92 <= sum(shares) / len(shares) <= 0.985
    for part in (torch.cat(below), torch.cat(above)):
        assert len(part) >= 250
        assert 0.91 <= float(part.mean()) <= 0.99


@pytest.mark.parametrize("kind", ["another grid", "scattered", "on and off the grid"])
def test_the_stated_error_off_the_grid(kind):
    shares, sizes = [], []
    for seed in range(40):
        model, grid = problem(seed)
        x = points(grid)[kind]
        torch.manual_seed(seed)
        got, report = variance(model, x, "pathwise")
        shares.append(float(((got - exact(model, x).detach()).abs() <= report.error).double().mean()))
        sizes.append(float((report.error / got).max()))
    assert 0.92 <= sum(shares) / len(shares) <= 0.985
    assert max(sizes) <= (2.0 + 14 / 64) * math.sqrt(2.0 / 64) + 1e-9


def test_near_the_prior_pathwise_variances_are_far_better_than_draws():
    """``sqrt(2 / n) v (k - v) / sqrt(v^2 + (k - v)^2)``: where little is explained, little can be off."""
    model, _ = problem(fraction=0.4, lengths=(0.1, 0.1), noise=0.05)
    x = torch.tensor([[1.25, 0.5], [1.3, 0.5], [1.35, 0.5], [3.0, 3.0]], dtype=torch.float64)
    expected = exact(model, x).detach()
    told = 1.0 - expected / prior(model)
    assert 0 < float(told[:3].min()) < float(told[:3].max()) < 0.2
    torch.manual_seed(0)
    got, report = variance(model, x, "pathwise", settings.variance_samples(64))
    assert bool(((got - expected).abs() <= 2.0 * report.error + 1e-12).all())
    assert bool((report.error <= 4.0 * told * math.sqrt(2.0 / 64) * expected + 1e-12).all())
    assert float((got - expected).abs()[-1]) <= 1e-12


def test_more_samples_are_better(few_neighbours):
    model, grid = problem(3)
    expected, errors = exact(model, grid.points()).detach(), []
    for samples in (10, 160, 2560):
        torch.manual_seed(0)
        got, report = variance(model, grid.points(), "pathwise", settings.variance_samples(samples))
        assert report.num_samples == samples
        errors.append(float((got - expected).norm() / expected.norm()))
    assert errors[1] < 0.5 * errors[0]
    assert errors[2] < 0.5 * errors[1]


def gradient(model, x, method):
    model.train()  # a graph serves one backward pass
    model.eval()
    x = x.detach().clone().requires_grad_()
    weights = dense.randn(len(x), seed=4).abs()
    with gpytorch.settings.detach_test_caches(False), settings.solve_tolerance(1e-10):
        if method == "dense":
            value = exact(model, x)
        else:
            with settings.variance_method(method), settings.variance_samples(200):
                value = model(x).variance
        inputs = [x, *(p for name, p in model.named_parameters() if "mean" not in name)]
        gradients = torch.autograd.grad((weights * value).sum(), inputs, allow_unused=True)
    parts = [torch.zeros_like(i) if g is None else g for i, g in zip(inputs, gradients, strict=True)]
    return torch.cat([part.flatten() for part in parts])


@pytest.mark.parametrize("kind", ["a few cells", "scattered"])
def test_gradients_of_pathwise_variances(kind):
    """As the dense ones, within what 25 runs can tell, and a bias: the weights of the two estimates are held fixed."""
    model, grid = problem(fraction=0.4, lengths=(0.4, 0.5), noise=0.05)
    x = points(grid)[kind][:6]
    expected = gradient(model, x, "dense")
    torch.testing.assert_close(gradient(model, x, "exact"), expected, rtol=1e-6, atol=1e-6)
    rows = []
    for seed in range(25):
        torch.manual_seed(seed)
        rows.append(gradient(model, x, "pathwise"))
    rows = torch.stack(rows)
    assert bool(rows.isfinite().all())
    error = rows.std(0) / math.sqrt(len(rows))
    assert bool(((rows.mean(0) - expected).abs() <= 4.5 * error + 0.01 * expected.abs().max()).all())


@pytest.mark.parametrize("case", CASES)
def test_pathwise_of_every_case(case):
    pair = CASES[case](small=True)
    for x in (pair.grid.points()[::5], pair.test_x[-12:]):
        with torch.no_grad(), MAX_CHOLESKY(10_000):
            expected = pair.dense.eval()(x).variance
        torch.manual_seed(1)
        got, report = variance(pair.ours.eval(), x, "pathwise", settings.variance_samples(400))
        assert got.shape == expected.shape
        assert bool(((got - expected).abs() <= 2.3 * report.error).all())  # 4.6 standard errors
        assert float((report.error / got).max()) <= (2.0 + 14 / 400) * math.sqrt(2.0 / 400) + 1e-9


# -- the choice ------------------------------------------------------------------------------------------------------


def test_auto_is_exact_where_that_is_affordable():
    model, grid = problem()
    _, report = variance(model, grid.points(), "auto")
    assert report.method == "exact"
    assert settings.variance_method.value() == "auto"


def test_auto_falls_back_to_draws_and_says_so(monkeypatch, few_neighbours):
    monkeypatch.setattr(variance_planning, "_AFFORDABLE_FLOPS", 0.0)
    model, grid = problem(shape=(20, 15), lengths=(0.1, 0.1), noise=0.1)
    x = grid.points()
    with settings.variance_method("auto"), torch.no_grad(), gaps.record_solves() as solves:
        posterior = model(x)
        with pytest.warns(gaps.ApproximateVarianceWarning, match=r"estimated from 64 samples.*exact.*pathwise") as seen:
            value = posterior.variance
        assert len(seen) == 1
    (report,) = solves.variances
    assert report.method == "pathwise"
    assert "TFLOP" in report.reason
    assert float(((value - exact(model, x).detach()).abs() <= report.error).double().mean()) > 0.85
    few, report = variance(model, x[: 4 * 64], "auto")  # solves for so few cost less than draws
    assert report.method == "exact"
    torch.testing.assert_close(few, exact(model, x[: 4 * 64]).detach(), rtol=1e-6, atol=1e-6)
    assert variance(model, x, "exact")[1].method == "exact"
    assert variance(model, x, "pathwise")[1].reason == "asked for"  # and silent: warnings are errors here


def test_auto_is_silent_about_precise_draws(monkeypatch):
    """Neighbours leave so little to 16 draws that half of the variances are within 2 %, 95 % within 20 %."""
    monkeypatch.setattr(variance_planning, "_AFFORDABLE_FLOPS", 0.0)
    model, grid = problem(shape=(30, 40), fraction=0.3, lengths=(0.05, 0.05), noise=0.01)
    value, report = variance(model, grid.points(), "auto", settings.variance_samples(16))  # warnings are errors here
    assert report.method == "pathwise"
    relative = report.error / value
    assert 0 < float(relative.median()) <= 0.02
    assert float(relative.quantile(0.95)) <= 0.2
    monkeypatch.setattr(regressions, "_NUM_NEIGHBOURS", 3)
    said = r"half of them are within ([\d.]+)%, 95 % within (\d+)%"
    with torch.no_grad(), settings.variance_samples(16), pytest.warns(gaps.ApproximateVarianceWarning, match=said):
        model(grid.points()).variance  # noqa: B018


# -- reports ---------------------------------------------------------------------------------------------------------


def test_reports_tell_method_samples_and_error():
    model, grid = problem()
    x = grid.points()
    reports = {
        "exact": variance(model, x, "exact")[1],
        "low_rank": variance(model, x, "low_rank", settings.preconditioner_rank(17))[1],
        "pathwise": variance(model, x + 1e-3, "pathwise", settings.variance_samples(33))[1],  # off the grid: all draws
    }
    for method, report in reports.items():
        assert isinstance(report, gaps.VarianceReport)
        assert report.method == method
        assert report.error.shape == (120,)
        assert report.seconds > 0
        assert str(report).startswith(f"{method} variances of 120 points")
        assert f"error up to {float(report.error.max()):.1e}" in str(report)
        assert repr(report) == f"<VarianceReport {report}>"
    assert (reports["low_rank"].rank, reports["low_rank"].num_samples) == (17, 0)
    assert (reports["pathwise"].rank, reports["pathwise"].num_samples) == (0, 33)
    assert ", rank 17" in str(reports["low_rank"])
    assert ", 33 samples" in str(reports["pathwise"])


@pytest.mark.parametrize("method", ["exact", "low_rank", "pathwise"])
def test_a_posterior_reports_where_it_was_made(method):
    """And works as it was told then, whatever is in force when its variances are read."""
    model, grid = problem()
    with torch.no_grad():
        with settings.variance_method(method), settings.variance_samples(21), gaps.record_solves() as solves:
            posterior = model(grid.points() + 1e-3 * (method == "pathwise"))  # off the grid, no draw is spared
        assert solves.variances == []
        with settings.variance_method("exact" if method != "exact" else "pathwise"), gaps.record_solves() as later:
            first = posterior.variance
        assert [report.method for report in solves.variances] == [method]
        assert [report.method for report in later.variances] == [method]
        assert solves.variances[0].num_samples == (21 if method == "pathwise" else 0)
        assert posterior.variance is first or torch.equal(posterior.variance, first)
        assert posterior.stddev.shape == (120,)
        assert len(solves.variances) == 1
    assert settings.variance_method.value() == "auto"


@pytest.mark.parametrize("method", ["exact", "low_rank", "pathwise"])
@pytest.mark.parametrize("noisy_first", [True, False])
def test_variances_of_new_observations_take_no_more_solves(noisy_first, method):
    model, grid = problem()
    with torch.no_grad(), settings.variance_method(method), gaps.record_solves() as solves:
        posterior = model(grid.points())
        noisy = model.likelihood(posterior)
        first = noisy.variance if noisy_first else posterior.variance
        made = len(solves)
        second = posterior.variance if noisy_first else noisy.variance
        assert len(solves) == made
        assert len(solves.variances) == 1
        difference = (first - second) if noisy_first else (second - first)
        torch.testing.assert_close(difference, model.likelihood.noise.expand(120), rtol=1e-9, atol=1e-12)


def test_nothing_to_report():
    model, grid = problem()
    for method in ("exact", "low_rank", "pathwise", "auto"):
        with torch.no_grad(), settings.variance_method(method), gaps.record_solves() as solves:
            assert model(grid.points()[:0]).variance.shape == (0,)
        assert solves.variances == []


# -- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        (settings.variance_method, "exakt", "got 'exakt', expected one of auto, exact, low_rank, pathwise"),
        (settings.variance_method, None, "got None, expected one of"),
        (settings.variance_samples, 0, "got 0, expected an integer at least 8"),
        (settings.variance_samples, 1, "got 1, expected an integer at least 8"),
        (settings.variance_samples, 6.5, "got 6.5, expected an integer"),
        (settings.variance_samples, True, "got True, expected an integer"),
        (settings.variance_samples, None, "got None, expected an integer"),
        (settings.prediction_memory, 0, "got 0, expected a number above 0"),
        (settings.progress, "no", "got 'no', expected True or False"),
        (settings.progress, 1, "got 1, expected True or False"),
    ],
)
def test_bad_values_are_refused(setting, value, message):
    before = setting.value()
    with pytest.raises(ValueError, match=f"settings.{setting.__name__}: {message}"):
        setting(value)
    assert setting.value() == before


def test_settings_are_restored():
    def fail():
        with settings.variance_method("pathwise"), settings.progress(False), settings.variance_samples(8):
            assert settings.variance_samples.value() == 8
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert settings.variance_method.value() == "auto"
    assert settings.variance_samples.value() == 64
    assert settings.progress.value() is True


# -- memory ----------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The size of the largest tensor that operations return, in numbers."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                own = tensor.untyped_storage().nbytes() // tensor.element_size()
                self.numbers = max(self.numbers, min(own, tensor.numel()))
        return result


@pytest.mark.parametrize("where", ["cells", "another grid"])
def test_pathwise_holds_nothing_of_size_points_times_observations(where):
    """Q = 5,000 points and N = 3,000 observations: with 8 samples, no more than a few columns, factors, neighbours."""
    model, grid = problem(shape=(100, 50), fraction=0.4, lengths=(0.1, 0.1), noise=0.1)
    x = grid.points() if where == "cells" else gaps.CartesianGrid([grid.axes[0] + 0.003, grid.axes[1] + 0.004]).points()
    observations = model.train_targets.size(-1)
    assert observations > 2900
    with torch.no_grad(), MAX_CHOLESKY(0), settings.variance_method("pathwise"), settings.variance_samples(8):
        model(x[:3]).mean  # noqa: B018
        with Largest() as largest:
            posterior = model(x)
            posterior.variance  # noqa: B018
    assert largest.numbers >= len(x) * 8
    assert largest.numbers <= 0.15 * len(x) * observations


def test_memory_bounds_exact_variances_too():
    model, grid = problem(shape=(50, 25), fraction=0.4, lengths=(0.1, 0.1), noise=0.1)
    x, memory = grid.points(), 2**20
    with torch.no_grad(), settings.variance_method("exact"), settings.prediction_memory(memory), Largest() as largest:
        got = model(x).variance
    torch.testing.assert_close(got, exact(model, x).detach(), rtol=1e-6, atol=1e-6)
    assert largest.numbers <= max(memory / 8, model.train_targets.size(-1) ** 2)
