"""Scores against integrals and torch's own distributions; predictions of data left out against brute force."""

import dataclasses
import itertools
import math
import re
import warnings

import gpytorch
import linear_operator
import pytest
import torch
from gpytorch.constraints import GreaterThan
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from linear_operator.operators import DiagLinearOperator

import gpytorch_gaps as gaps
from gpytorch_gaps import settings
from gpytorch_gaps.posterior import regressions
from gpytorch_gaps.solvers.planning import variance as variance_planning
from tests import _dense as dense
from tests._covering import in_turn
from tests.workflow._pairs import CASES, Model, PerLevelNoise, gappy, with_length

MAX_CHOLESKY = linear_operator.settings.max_cholesky_size
NAMES = ["rmse", "mae", "crps", "nlpd", "interval", "coverage", "count", "level"]


def normal(mean, deviation):
    """Independent, of given means and standard deviations."""
    return MultivariateNormal(mean, DiagLinearOperator(deviation.square()))


def example(*shape, seed=0):
    """A distribution and values that it is about right for, some of them far off."""
    mean, deviation = dense.randn(*shape, seed=seed), 0.2 + dense.randn(*shape, seed=seed + 1).abs()
    return normal(mean, deviation), mean + 1.5 * deviation * dense.randn(*shape, seed=seed + 2)


# -- formulas ----------------------------------------------------------------------------------------------------------


def test_crps_by_integration():
    """``∫ (F(x) - 1{x >= y})^2 dx``, by the trapezium rule on both sides of y."""
    posterior, truth = example(12)
    total = 0.0
    for mean, deviation, y in zip(posterior.mean, posterior.stddev, truth, strict=True):
        distribution = torch.distributions.Normal(mean, deviation)
        low = min(float(y), float(mean)) - 12 * float(deviation)
        high = max(float(y), float(mean)) + 12 * float(deviation)
        below = torch.linspace(low, float(y), 20_001, dtype=torch.float64)
        above = torch.linspace(float(y), high, 20_001, dtype=torch.float64)
        total += float(torch.trapezoid(distribution.cdf(below).square(), below))
        total += float(torch.trapezoid((1.0 - distribution.cdf(above)).square(), above))
    assert gaps.score(posterior, truth).crps == pytest.approx(total / 12, rel=1e-6)


@pytest.mark.parametrize("level", [0.05, 0.5, 0.8, 0.95, 0.999])
def test_all_scores_by_hand(level):
    posterior, truth = example(200)
    got = gaps.score(posterior, truth, level=level)
    distribution = torch.distributions.Normal(posterior.mean, posterior.stddev)
    lower = distribution.icdf(torch.tensor(0.5 - level / 2, dtype=torch.float64))
    upper = distribution.icdf(torch.tensor(0.5 + level / 2, dtype=torch.float64))
    share = 1.0 - level
    interval = (
        (upper - lower)
        + 2.0 / share * (lower - truth) * (truth < lower)
        + 2.0 / share * (truth - upper) * (truth > upper)
    )
    assert got.nlpd == pytest.approx(-float(distribution.log_prob(truth).mean()), rel=1e-12)
    assert got.interval == pytest.approx(float(interval.mean()), rel=1e-8)
    assert got.coverage == float(((truth >= lower) & (truth <= upper)).double().mean())
    assert 0.0 < got.coverage < 1.0 or level > 0.99
    assert got.rmse == pytest.approx(float((truth - posterior.mean).square().mean().sqrt()), rel=1e-12)
    assert got.mae == pytest.approx(float((truth - posterior.mean).abs().mean()), rel=1e-12)
    assert (got.count, got.level) == (200, level)


def test_a_correlated_posterior_is_scored_value_by_value():
    covariance = dense.random_psd(7)
    mean, truth = dense.randn(7), dense.randn(7, seed=1)
    together = gaps.score(MultivariateNormal(mean, covariance), truth)
    assert together.as_dict() == pytest.approx(gaps.score(normal(mean, covariance.diagonal().sqrt()), truth).as_dict())


def test_scores_in_other_units():
    """Ten times the values: ten times the scores in their units; the density moves by log 10, coverage not at all."""
    posterior, truth = example(50)
    one, ten = gaps.score(posterior, truth), gaps.score(normal(10 * posterior.mean, 10 * posterior.stddev), 10 * truth)
    for name in ("rmse", "mae", "crps", "interval"):
        assert getattr(ten, name) == pytest.approx(10 * getattr(one, name), rel=1e-12)
    assert ten.nlpd == pytest.approx(one.nlpd + math.log(10), rel=1e-12)
    assert ten.coverage == one.coverage


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95])
def test_a_true_prediction_is_calibrated_and_scores_best(level):
    """Values drawn from the prediction itself: as many inside as are meant to be, and a CRPS of sigma / sqrt(pi)."""
    count = 200_000
    deviation = 0.5 + dense.randn(count).abs()
    mean = dense.randn(count, seed=1)
    truth = mean + deviation * dense.randn(count, seed=2)
    got = gaps.score(normal(mean, deviation), truth, level=level)
    assert got.coverage == pytest.approx(level, abs=4 * math.sqrt(level * (1 - level) / count))
    assert got.crps == pytest.approx(float(deviation.mean()) / math.sqrt(math.pi), rel=0.01)
    assert got.rmse == pytest.approx(float(deviation.square().mean().sqrt()), rel=0.01)
    assert got.nlpd == pytest.approx(float(deviation.log().mean()) + 0.5 * math.log(2 * math.pi * math.e), rel=0.01)
    # all are proper: too wide and too narrow do worse
    for factor in (0.7, 1.4):
        other = gaps.score(normal(mean, factor * deviation), truth, level=level)
        assert other.crps > got.crps
        assert other.nlpd > got.nlpd
        assert other.interval > got.interval


# -- what may be scored ------------------------------------------------------------------------------------------------


def test_nan_is_left_out():
    posterior, truth = example(30)
    gappy_truth = truth.clone()
    gappy_truth[::3] = torch.nan
    known = ~gappy_truth.isnan()
    got = gaps.score(posterior, gappy_truth)
    expected = gaps.score(normal(posterior.mean[known], posterior.stddev[known]), truth[known])
    assert got == expected
    assert got.count == 20


@pytest.mark.parametrize("shape", [(5, 6), (2, 3, 5), (30, 1), (1, 30)], ids=str)
def test_truth_of_the_shape_of_a_grid(shape):
    posterior, truth = example(30)
    assert gaps.score(posterior, truth.reshape(shape)) == gaps.score(posterior, truth)


@pytest.mark.parametrize("shape", [(3, 10), (2, 3, 10)], ids=str)
def test_a_batch_is_scored_as_all_its_members(shape):
    """The average over all members; on a grid each has its own."""
    posterior, truth = example(*shape)
    together = gaps.score(posterior, truth)
    flat = gaps.score(normal(posterior.mean.flatten(), posterior.stddev.flatten()), truth.flatten())
    assert together.as_dict() == pytest.approx(flat.as_dict(), rel=1e-12)
    assert gaps.score(posterior, truth.unflatten(-1, (2, 5))) == together


def test_several_tasks_are_scored_value_by_value():
    mean, truth = dense.randn(4, 3), dense.randn(4, 3, seed=1)
    covariance = dense.random_psd(12)
    posterior = MultitaskMultivariateNormal(mean, covariance)
    got = gaps.score(posterior, truth)
    flat = normal(mean.flatten(), covariance.diagonal().sqrt())
    assert got.as_dict() == pytest.approx(gaps.score(flat, truth.flatten()).as_dict(), rel=1e-12)


def test_float32_predictions_are_scored_in_float64():
    """Scored in float64."""
    posterior, truth = example(40)
    narrow = normal(posterior.mean.float(), posterior.stddev.float())
    assert gaps.score(narrow, truth.float()).as_dict() == pytest.approx(
        gaps.score(posterior, truth).as_dict(), rel=1e-5
    )
    assert gaps.score(narrow, truth).as_dict() == pytest.approx(gaps.score(posterior, truth).as_dict(), rel=1e-5)
    many = normal(torch.full((3,), 1e8), torch.ones(3))
    assert gaps.score(many, torch.full((3,), 1e8 + 1, dtype=torch.float64)).mae == 1.0  # float32 would say 0


def test_numpy_and_integers():
    posterior, truth = example(6)
    assert gaps.score(posterior, truth.numpy()) == gaps.score(posterior, truth)
    assert gaps.score(posterior, torch.arange(6)) == gaps.score(posterior, torch.arange(6).double())


def test_no_graph_is_kept():
    mean = dense.randn(5).requires_grad_()
    got = gaps.score(MultivariateNormal(mean, dense.random_psd(5).requires_grad_()), dense.randn(5, seed=1))
    assert all(isinstance(value, float | int) for value in got.as_dict().values())


@pytest.mark.parametrize("level", [0, 1, 1.5, -0.1, 0.0, 1.0, float("nan"), None, "0.9", True])
def test_levels_that_are_refused(level):
    posterior, truth = example(4)
    with pytest.raises(ValueError, match=r"score: level: got .*, expected a number between 0 and 1"):
        gaps.score(posterior, truth, level=level)


@pytest.mark.parametrize("posterior", [torch.zeros(4), None, torch.distributions.Normal(0.0, 1.0), (1, 2)], ids=str)
def test_what_is_no_prediction(posterior):
    with pytest.raises(ValueError, match=f"score: posterior: got {type(posterior).__name__}, expected a Multivariate"):
        gaps.score(posterior, torch.zeros(4))


def test_truths_that_are_refused():
    posterior, truth = example(4)
    for wrong in (truth[:3], truth.repeat(2), torch.zeros(0), torch.tensor(1.0), truth.expand(3, 4)):
        with pytest.raises(ValueError, match=r"score: truth: got shape .*, expected \(4,\)"):
            gaps.score(posterior, wrong)
    with pytest.raises(ValueError, match="got only NaN"):
        gaps.score(posterior, torch.full((4,), torch.nan))
    for infinite in (math.inf, -math.inf):
        wrong = truth.clone()
        wrong[1], wrong[2] = infinite, torch.nan
        with pytest.raises(ValueError, match="got infinite values"):
            gaps.score(posterior, wrong)


def test_what_a_score_is():
    score = gaps.Score(0.12345678, 0.1, 0.05, -1.5, 0.7, 0.934, 1234, 0.9)
    assert str(score) == (
        "RMSE 0.1235, MAE 0.1, CRPS 0.05, NLPD -1.5, interval score 0.7, 90% intervals cover 93.4% of 1234"
    )
    assert list(score.as_dict()) == NAMES == [field.name for field in dataclasses.fields(gaps.Score)]
    assert gaps.Score(**score.as_dict()) == score
    assert dataclasses.replace(score, rmse=0.2) != score
    with pytest.raises(dataclasses.FrozenInstanceError):
        score.rmse = 0.0


def test_a_high_level_is_not_written_as_all():
    posterior, truth = example(10)
    assert "100% intervals" not in str(gaps.score(posterior, truth, level=0.999))


# -- left out ----------------------------------------------------------------------------------------------------------

FEW = 40


def few(case, count=FEW):
    """A pair with only a few observations, so that brute force is quick."""
    pair = CASES[case](small=True)
    rows = torch.randperm(pair.ours.train_targets.size(-1), generator=torch.Generator().manual_seed(2))[:count]
    (x,), y = pair.ours.train_inputs, pair.ours.train_targets[..., rows]
    if case == "a noise per point":
        noise = pair.ours.likelihood.noise[rows]
        pair.ours.likelihood = gaps.GappyGridLikelihood(noise)
        pair.dense.likelihood = gpytorch.likelihoods.FixedNoiseGaussianLikelihood(noise)
    for model in pair.both():
        model.mean_module.constant.data.fill_(0.3)
        model.set_train_data(x[rows], y, strict=False)
    return pair


def variances(model, x):
    """Variances of the noise of every observation. shape: (*batch, N) or (*batch, 1)"""
    likelihood = model.likelihood
    return likelihood.noise[x[:, -1].long()] if isinstance(likelihood, PerLevelNoise) else likelihood.noise


def brute_force(model, labels):
    """Every group predicted, with its noise, by a dense model of the others."""
    (x,), y = model.train_inputs, model.train_targets
    with torch.no_grad():
        prior = model.forward(x)
        kernel, noise = prior.covariance_matrix, variances(model, x)
        noise = noise.expand(*kernel.shape[:-2], len(x))
        mean, variance = torch.empty_like(y), torch.empty_like(y)
        for label in labels.unique():
            out, rest = (labels == label).nonzero().squeeze(-1), (labels != label).nonzero().squeeze(-1)
            others = dense.select(kernel, rest) + torch.diag_embed(noise[..., rest])
            cross = dense.select(kernel, rest, out)
            weights = torch.linalg.solve(others, cross)
            offset = (y - prior.mean)[..., rest].unsqueeze(-1)
            mean[..., out] = prior.mean[..., out] + (weights.mT @ offset).squeeze(-1)
            own = kernel.diagonal(dim1=-2, dim2=-1)[..., out]
            variance[..., out] = own - (weights * cross).sum(-2) + noise[..., out]
    return mean, variance


def same(posterior, expected, tolerance=1e-6):
    assert isinstance(posterior, MultivariateNormal)
    for got, value in zip((posterior.mean, posterior.variance), expected, strict=True):
        assert got.shape == value.shape
        assert torch.allclose(got.double(), value.double(), rtol=tolerance, atol=tolerance)


def labels_of(kind):
    each = torch.arange(FEW)
    return {
        "each": each,
        "in turn": each % 7,  # not contiguous
        "of many sizes": torch.tensor([-5] * 11 + [100] + [3] * 2 + [7] * 20 + [8] * 6)[
            torch.randperm(FEW, generator=torch.Generator().manual_seed(0))
        ],
        "two": (each > 25).double() - 0.5,
        "one": torch.zeros(FEW),
    }[kind]


@in_turn(case=CASES, max_cholesky=[800, 0])
def test_one_left_out(case, max_cholesky):
    """Every observation of a small problem, against the model without it."""
    pair = few(case)
    with settings.solve_tolerance(1e-9), MAX_CHOLESKY(max_cholesky):
        same(gaps.leave_out(pair.ours), brute_force(pair.dense, torch.arange(FEW)))


GROUPS = ("each", "in turn", "of many sizes", "two", "one")
GROUPED = [  # every group of one model, and of every other model some
    *(("two axes", kind, size) for kind in GROUPS for size in (800, 0)),
    *((case, GROUPS[i % 5], (0, 800)[i % 2]) for i, case in enumerate(CASES) if case != "two axes"),
    *((case, GROUPS[(i + 2) % 5], (800, 0)[i % 2]) for i, case in enumerate(CASES) if case != "two axes"),
]


@pytest.mark.parametrize(("case", "kind", "max_cholesky"), GROUPED)
def test_groups_left_out(case, kind, max_cholesky):
    pair, labels = few(case), labels_of(kind)
    with settings.solve_tolerance(1e-9), MAX_CHOLESKY(max_cholesky):
        posterior = gaps.leave_out(pair.ours, labels)
        same(posterior, brute_force(pair.dense, labels))
        if kind == "each":
            alone = gaps.leave_out(pair.ours)
            same(posterior, (alone.mean, alone.variance))


@pytest.mark.parametrize("method", ["fill", "ignore", "cholesky"])
def test_every_method_leaves_out_alike(method):
    pair = few("two axes")
    expected = brute_force(pair.dense, torch.arange(FEW)), brute_force(pair.dense, labels_of("in turn"))
    with settings.gap_method(method), settings.solve_tolerance(1e-9), MAX_CHOLESKY(0):
        same(gaps.leave_out(pair.ours), expected[0])
        same(gaps.leave_out(pair.ours, labels_of("in turn")), expected[1])


def test_in_chunks_of_the_memory():
    pair = few("two axes")
    with settings.prediction_memory(1), settings.solve_tolerance(1e-9):
        same(gaps.leave_out(pair.ours), brute_force(pair.dense, torch.arange(FEW)))
        same(gaps.leave_out(pair.ours, labels_of("two")), brute_force(pair.dense, labels_of("two")))


def test_at_the_default_tolerance():
    """Within a few times what a solve is asked for, in standard deviations."""
    for case in CASES:
        pair = few(case)
        for labels, size in itertools.product((None, labels_of("in turn")), (800, 0)):
            mean, variance = brute_force(pair.dense, torch.arange(FEW) if labels is None else labels)
            with MAX_CHOLESKY(size):
                posterior = gaps.leave_out(pair.ours, labels)
            assert float(((posterior.mean - mean) / variance.sqrt()).abs().max()) <= 1e-5, case
            assert float((posterior.variance / variance - 1).abs().max()) <= 1e-6, case


def test_single_precision_left_out():
    pair = few("two axes")
    expected = brute_force(pair.dense, torch.arange(FEW)), brute_force(pair.dense, labels_of("in turn"))
    model = pair.ours.float()
    for posterior, value in zip(
        (gaps.leave_out(model), gaps.leave_out(model, labels_of("in turn"))), expected, strict=True
    ):
        assert posterior.mean.dtype == torch.float32
        same(posterior, value, 1e-4)


def small_model(x, y, noise, grid, length=0.3):
    kernel = gaps.GappyGridKernel([with_length(RBFKernel(), length), with_length(MaternKernel(), length)], grid)
    likelihood = gaps.GappyGridLikelihood(noise_constraint=GreaterThan(1e-9))
    model = Model(x, y, likelihood, ScaleKernel(kernel)).double()
    model.mean_module.constant.data.fill_(-0.4)
    model.likelihood.noise = noise
    return model


@pytest.mark.parametrize("max_cholesky", [800, 0])
@pytest.mark.parametrize("noise", [1e-6, 1e-3])
def test_observations_that_stand_alone(noise, max_cholesky):
    """Far from all others, or with so little noise that its variance says nothing: what is left out is the prior's."""
    axes, values = gappy((8, 7), 0.4, 0)
    axes[0], axes[1] = axes[0].clone(), axes[1].clone()
    axes[0][-1], axes[1][-1] = 60.0, -45.0
    values[-1] = torch.nan
    values[:, -1] = torch.nan
    values[-1, -1], values[-1, 2] = 7.0, 3.0
    grid, x, y = gaps.from_array(values, axes)
    model = small_model(x, y, noise, grid)
    expected = brute_force(model, torch.arange(len(y)))
    with settings.solve_tolerance(1e-9), MAX_CHOLESKY(max_cholesky):
        posterior = gaps.leave_out(model)
        grouped = gaps.leave_out(model, torch.arange(len(y)) // 4)
    same(posterior, expected, 1e-5 if noise < 1e-3 else 1e-6)
    same(grouped, brute_force(model, torch.arange(len(y)) // 4), 1e-5 if noise < 1e-3 else 1e-6)
    alone = (x[:, 0] == 60.0).nonzero().squeeze(-1)
    assert len(alone) == 2
    assert torch.allclose(posterior.mean[alone], torch.full((2,), -0.4, dtype=torch.float64), atol=1e-6)
    prior = (model.covar_module.outputscale + model.likelihood.noise).detach()
    assert torch.allclose(posterior.variance[alone], prior.expand(2), rtol=1e-6)


def full_grid_of_two_terms(noise):
    """A sum of a smooth and a less smooth kernel, every cell observed, one noise a point."""
    axes, values = gappy((9, 8), 0.0, 0)
    grid, x, y = gaps.from_array(values, axes)
    terms = [
        ScaleKernel(gaps.GappyGridKernel([with_length(kernel(), length) for _ in axes], grid))
        for kernel, length in ((RBFKernel, 0.5), (MaternKernel, 0.3))
    ]
    likelihood = gaps.GappyGridLikelihood(noise=torch.full((len(y),), noise, dtype=torch.float64))
    return Model(x, y, likelihood, terms[0] + terms[1]).double().eval()


@pytest.mark.parametrize("noise", [2e-8, 1e-9])
def test_groups_of_a_full_grid_with_hardly_any_noise(noise):
    """The inverse of the covariance has entries of 1e8, whose inverse is of size one."""
    model = full_grid_of_two_terms(noise)
    labels = torch.arange(72) // 9
    with MAX_CHOLESKY(0), settings.solve_tolerance(1e-9):
        posterior = gaps.leave_out(model, labels)
    same(posterior, brute_force(model, labels), 1e-5)


def test_groups_whose_solves_missed_by_far_say_what_to_do():
    model = full_grid_of_two_terms(1e-9)
    with MAX_CHOLESKY(0), settings.preconditioner_rank(0), settings.max_iterations(3), warnings.catch_warnings():
        warnings.simplefilter("ignore", gaps.NotConvergedWarning)
        with pytest.raises(ValueError, match=r"leave_out: groups: got a group of 36 .* Try: a tighter solve_tolerance"):
            gaps.leave_out(model, torch.arange(72) // 36)


@pytest.mark.parametrize("max_cholesky", [800, 0])
def test_repeated_cells_and_points_off_the_grid(max_cholesky):
    """A twin left behind tells most of what was left out."""
    grid, x, y = gaps.from_array(*reversed(gappy((8, 7), 0.4, 0)))
    x, y = torch.cat([x, x[:3], x[4:6] + 0.02]), torch.cat([y, y[:3] + 0.1, y[4:6]])
    model = small_model(x, y, 0.01, grid)
    labels = torch.arange(len(y)) % 5
    with settings.solve_tolerance(1e-9), MAX_CHOLESKY(max_cholesky):
        same(gaps.leave_out(model), brute_force(model, torch.arange(len(y))))
        same(gaps.leave_out(model, labels), brute_force(model, labels))


def rough_model(nu, length, noise, shape=(20, 18), clouds=False):
    """A draw of a model of one Matern kernel on both axes, with scattered gaps or such that hang together."""
    grid = gaps.CartesianGrid([torch.linspace(0, 1, size, dtype=torch.float64) for size in shape])
    if clouds:
        blurred = torch.nn.functional.avg_pool2d(dense.randn(1, 1, *shape), 7, 1, 3).flatten()
        cells = (blurred > blurred.quantile(0.4)).nonzero().squeeze(-1)
    else:
        cells = dense.observed("random", shape)
    x = grid.points(cells)
    kernels = [with_length(MaternKernel(nu=nu), length) for _ in shape]
    likelihood = gaps.GappyGridLikelihood(noise_constraint=GreaterThan(1e-9))
    model = Model(x, torch.zeros(len(x)).double(), likelihood, gaps.GappyGridKernel(kernels, grid)).double()
    model.likelihood.noise = noise
    with torch.no_grad():
        covariance = model.forward(x).covariance_matrix + model.likelihood.noise * torch.eye(len(x)).double()
    model.set_train_data(targets=torch.linalg.cholesky(covariance) @ dense.randn(len(x), seed=1))
    return model, covariance


@pytest.mark.parametrize("max_cholesky", [800, 0])
@pytest.mark.parametrize("samples", [16, 64])
@pytest.mark.parametrize("clouds", [False, True], ids=["scattered", "clouds"])
@pytest.mark.parametrize(("nu", "length", "noise"), [(0.5, 0.2, 1e-2), (1.5, 0.2, 1e-2), (2.5, 0.1, 1e-4)])
def test_left_out_from_samples(nu, length, noise, clouds, samples, max_cholesky, monkeypatch):
    """Predictions stay close to the exact ones, in their standard deviations, and within the error that is stated.

    Of as few neighbours as observations far from any edge have among millions.
    """
    monkeypatch.setattr(regressions, "_NUM_NEIGHBOURS", 24)
    model, covariance = rough_model(nu, length, noise, clouds=clouds)
    inverse = torch.linalg.inv(covariance)
    y, variance = model.train_targets, 1.0 / inverse.diagonal()
    mean = y - variance * (inverse @ y)
    torch.manual_seed(0)
    with (
        settings.variance_method("pathwise"),
        settings.variance_samples(samples),
        MAX_CHOLESKY(max_cholesky),
        gaps.record_solves() as solves,
    ):
        posterior = gaps.leave_out(model)
    (report,) = solves.variances
    assert (report.method, report.num_samples) == ("pathwise", samples)
    covered = (posterior.variance - variance).abs() <= report.error
    assert 0.9 <= float(covered.double().mean()) <= 0.995
    stated = report.error / posterior.variance * (y - posterior.mean).abs()
    # a relative error of the variance is one of the distance to y; the solve for y has an error of its own
    covered = (posterior.mean - mean).abs() <= stated + 1e-5 * variance.sqrt()
    assert 0.9 <= float(covered.double().mean()) <= 0.995
    assert float(((posterior.mean - mean) / variance.sqrt()).abs().max()) <= 0.5
    rmse, expected = ((value - y).square().mean().sqrt() for value in (posterior.mean, mean))
    assert float(rmse) == pytest.approx(float(expected), rel=0.02)


@pytest.mark.parametrize("case", CASES)
def test_left_out_from_samples_of_every_case(case):
    """Within 2.3 times the stated error, 4.6 standard errors, everywhere."""
    pair = few(case)
    mean, variance = brute_force(pair.dense, torch.arange(FEW))
    torch.manual_seed(0)
    with settings.variance_method("pathwise"), settings.variance_samples(200), gaps.record_solves() as solves:
        posterior = gaps.leave_out(pair.ours)
    (report,) = solves.variances
    assert bool(((posterior.variance - variance).abs() <= 2.3 * report.error).all())
    stated = report.error / posterior.variance * (pair.ours.train_targets - posterior.mean).abs()
    assert bool(((posterior.mean - mean).abs() <= 2.3 * stated + 1e-5 * variance.sqrt()).all())


def test_left_out_from_samples_unasked_says_so(monkeypatch):
    """As `auto` does where exact ones would take too long; the message says how far off predictions are."""
    monkeypatch.setattr(regressions, "_NUM_NEIGHBOURS", 24)
    model, covariance = rough_model(0.5, 0.2, 1e-2)
    monkeypatch.setattr(variance_planning, "_AFFORDABLE_FLOPS", 0.0)
    torch.manual_seed(0)
    with settings.variance_samples(32), gaps.record_solves() as solves:
        with pytest.warns(gaps.ApproximateVarianceWarning, match=r"leave_out: .* 32 samples, .* of the means") as seen:
            gaps.leave_out(model)
        assert len(seen) == 1
        stated = (solves.variances[-1].error * torch.linalg.inv(covariance).diagonal()).median()
        said = re.search(r"half of them are within ([\d.]+)%", str(seen[0].message))
        assert float(said[1]) / 100 == pytest.approx(float(stated), abs=1e-3)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with settings.variance_method("pathwise"):
                gaps.leave_out(model)
            with settings.variance_method("exact"):
                gaps.leave_out(model)
    assert [report.method for report in solves.variances] == ["pathwise", "pathwise", "exact"]


@pytest.mark.parametrize("method", ["auto", "exact", "low_rank"])
@pytest.mark.parametrize("noise", [1e-1, 1e-4, 1e-8])
def test_the_stated_error_of_exact_predictions_left_out(noise, method):
    """Smooth kernels in closed form, where that keeps its digits, rough ones by solves."""
    for nu in (0.5, 2.5):
        model, covariance = rough_model(nu, 0.5, noise, shape=(12, 10))
        variance = 1.0 / torch.linalg.inv(covariance).diagonal()
        with settings.variance_method(method), MAX_CHOLESKY(0), gaps.record_solves() as solves:
            posterior = gaps.leave_out(model)
        (report,) = solves.variances
        assert report.method == "exact"
        assert bool(((posterior.variance - variance).abs() <= report.error + 1e-6 * variance).all())
        assert float((report.error / variance).max()) <= 1e-3


def test_one_observation_left_out_leaves_the_prior():
    """Left out, the prior remains."""
    grid, x, y = gaps.from_array(*reversed(gappy((8, 7), 0.4, 0)))
    model = small_model(x[:1], y[:1], 0.01, grid)
    for posterior in (gaps.leave_out(model), gaps.leave_out(model, torch.tensor([3]))):
        same(posterior, brute_force(model, torch.zeros(1)))
        assert posterior.mean.item() == pytest.approx(-0.4)


def test_a_likelihood_of_gpytorch():
    pair = few("two axes")
    pair.ours.likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    with settings.solve_tolerance(1e-9):
        same(gaps.leave_out(pair.ours), brute_force(pair.dense, torch.arange(FEW)))


@in_turn(case=CASES, training=[True, True, False, False], labels=[None, torch.arange(FEW) // 3])
def test_the_model_is_left_as_it_was(case, training, labels):
    pair = few(case)
    model = pair.ours.train(training)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    (x,), y = model.train_inputs, model.train_targets
    with torch.no_grad():
        before = None if training else model(pair.test_x).mean
    with warnings.catch_warnings():
        warnings.simplefilter("error", gpytorch.utils.warnings.GPInputWarning)  # "did you forget to call train()?"
        first, second = gaps.leave_out(model, labels), gaps.leave_out(model, labels)
    assert torch.allclose(first.mean, second.mean, rtol=1e-9, atol=1e-9)
    assert not first.mean.requires_grad
    assert not first.variance.requires_grad
    assert model.training == training
    assert all(module.training == training for module in model.modules())
    assert model.train_inputs[0] is x
    assert model.train_targets is y
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
    if not training:
        with torch.no_grad():
            assert torch.equal(model(pair.test_x).mean, before)
    with pytest.warns(gpytorch.utils.warnings.GPInputWarning):  # said again to those who did forget
        model.eval()(x)


def test_a_failure_leaves_the_mode():
    pair = few("two axes")
    for training in (True, False):
        pair.ours.train(training)
        with pytest.raises(ValueError, match="groups"):
            gaps.leave_out(pair.ours, torch.zeros(3))
        assert pair.ours.training == training
        assert settings.progress.value()


@pytest.mark.parametrize("shape", [(FEW - 1,), (FEW + 1,), (FEW, 1), (1, FEW), (), (0,)], ids=str)
def test_groups_of_the_wrong_shape(shape):
    with pytest.raises(ValueError, match=rf"leave_out: groups: got shape .*, expected \({FEW},\)"):
        gaps.leave_out(few("two axes").ours, torch.zeros(shape))


def test_models_that_are_refused():
    pair = few("two axes")
    with pytest.raises(ValueError, match="with a GappyGridKernel in it"):
        gaps.leave_out(pair.dense)
    for wrong in (None, torch.nn.Linear(1, 1), pair.ours.covar_module):
        with pytest.raises(ValueError, match=r"leave_out: model: expected a gpytorch\.models\.ExactGP"):
            gaps.leave_out(wrong)
    empty = Model(None, None, gaps.GappyGridLikelihood(), pair.ours.covar_module)
    with pytest.raises(ValueError, match="with training data"):
        gaps.leave_out(empty)


def test_scores_of_what_was_left_out():
    """The usual call; of data that the model made itself, honest."""
    grid = gaps.CartesianGrid([torch.linspace(0, 1, 30).double(), torch.linspace(0, 1, 30).double()])
    cells = dense.observed("random", (30, 30))
    x = grid.points(cells)
    model = small_model(x, torch.zeros(len(x)).double(), 0.05, grid, length=0.2)
    with torch.no_grad(), gpytorch.settings.prior_mode(True):
        torch.manual_seed(0)
        covariance = model.eval()(x).covariance_matrix + 0.05 * torch.eye(len(x), dtype=torch.float64)
    y = -0.4 + torch.linalg.cholesky(covariance) @ dense.randn(len(x))
    model.set_train_data(targets=y)
    posterior = gaps.leave_out(model)
    got = gaps.score(posterior, y, level=0.9)
    assert got.count == len(y)
    assert got.coverage == pytest.approx(0.9, abs=0.04)
    assert got.crps == pytest.approx(float(posterior.stddev.mean()) / math.sqrt(math.pi), rel=0.1)


@pytest.mark.parametrize(
    "labels",
    [
        pytest.param(None, id="each"),
        pytest.param(torch.arange(FEW) // 3, id="groups"),
    ],
)
def test_hyperparameters_of_a_batch_for_one_set_of_values(labels):
    """A batch of kernels, one y."""
    pair = few("a batch of three")
    y = pair.ours.train_targets[0]
    pair.ours.set_train_data(targets=y, strict=False)
    pair.dense.set_train_data(targets=y.expand(3, -1).clone(), strict=False)
    with settings.solve_tolerance(1e-9):
        posterior = gaps.leave_out(pair.ours, labels)
    same(posterior, brute_force(pair.dense, torch.arange(FEW) if labels is None else labels))
