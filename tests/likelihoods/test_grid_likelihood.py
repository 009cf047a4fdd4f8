"""Which noise a point gets, and what follows from it, for learned, per-level and given noise."""

import copy
import io
import math
import pickle
import re

import gpytorch
import linear_operator
import pytest
import torch
from gpytorch.constraints import GreaterThan, Interval
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import IndexKernel, LinearKernel, MaternKernel, RBFKernel, ScaleKernel
from gpytorch.priors import GammaPrior, LogNormalPrior
from linear_operator.operators import ConstantDiagLinearOperator, DiagLinearOperator

from gpytorch_gaps import CartesianGrid, GappyGridKernel, GappyGridLikelihood, settings
from gpytorch_gaps.operators import SelectedKroneckerAddedDiagOperator, SelectedKroneckerDiagOperator
from tests import _dense as dense
from tests.workflow._pairs import Model

LEVELS = torch.tensor([0.05, 0.4, 0.9], dtype=torch.float64)
AXES = [torch.linspace(0, 1, 9, dtype=torch.float64), torch.tensor([[0.0, 1.0], [2.0, 1.0], [0.5, 0.5]]).double()]


def make_grid():
    """A plain axis of nine, and a group of three stations of two columns."""
    return CartesianGrid(AXES)


GRID = make_grid()
CELLS = dense.observed("random", GRID.shape)
TRAIN = GRID.points(CELLS)
LEVEL = CELLS % 3
Y = TRAIN.sum(-1).sin() + 0.1 * dense.randn(len(TRAIN))


def model_of(likelihood, x=TRAIN, y=Y, kernel=None, batch_shape=()):
    kernel = kernel or ScaleKernel(GappyGridKernel([RBFKernel(), MaternKernel()], make_grid()))
    return Model(x, y, likelihood, kernel, batch_shape).double()


def per_level(**kwargs):
    likelihood = GappyGridLikelihood(noise_axis=1, grid=make_grid(), **kwargs).double()
    likelihood.noise = LEVELS.expand_as(likelihood.noise)
    return likelihood


def given():
    return 0.1 + torch.rand(len(TRAIN), generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def diagonal_of(noisy, latent):
    """What the likelihood added to the variances."""
    return noisy.variance - latent.variance


def posterior(model, x):
    with torch.no_grad():
        return model.eval()(x)


# -- one learned noise -----------------------------------------------------------------------------------------------


def log_likelihood(model, likelihood):
    model.train()
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    return mll(model(*model.train_inputs), model.train_targets)


@pytest.mark.parametrize("axis", [None, 1])
def test_a_prior_enters_the_marginal_likelihood(axis):
    prior, grid = GammaPrior(1.1, 0.5), make_grid()
    values = []
    for own in (None, prior):
        likelihood = GappyGridLikelihood(noise_axis=axis, grid=grid, noise_prior=own)
        model = model_of(likelihood)
        likelihood.noise = 0.3
        values.append(log_likelihood(model, likelihood))
    expected = prior.log_prob(likelihood.noise).sum() / len(Y)
    assert (values[1] - values[0]).item() == pytest.approx(expected.item(), rel=1e-8)
    assert "likelihood.noise_covar.noise_prior" in [name for name, *_ in model.named_priors()]


@pytest.mark.parametrize("axis", [None, 1])
def test_a_constraint_is_respected(axis):
    likelihood = GappyGridLikelihood(noise_axis=axis, grid=make_grid(), noise_constraint=Interval(0.2, 0.3))
    model = model_of(likelihood)
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0)
    for _ in range(5):
        optimizer.zero_grad()
        (-log_likelihood(model, likelihood)).backward()
        optimizer.step()
    assert bool(((likelihood.noise >= 0.2) & (likelihood.noise <= 0.3)).all())
    assert likelihood.noise.requires_grad
    small = GappyGridLikelihood(noise_constraint=GreaterThan(1e-8))
    small.noise = 1e-6  # below GPyTorch's own floor
    assert small.noise.item() == pytest.approx(1e-6, rel=1e-3)


def test_learned_noise_is_that_of_gpytorch():
    ours, theirs = model_of(GappyGridLikelihood()), model_of(gpytorch.likelihoods.GaussianLikelihood())
    theirs.load_state_dict(ours.state_dict())
    results = []
    for model in (ours, theirs):
        value = log_likelihood(model, model.likelihood)
        results.append([value, *torch.autograd.grad(value, list(model.parameters()))])
    for got, expected in zip(*results, strict=True):
        assert torch.allclose(got, expected, rtol=1e-8, atol=1e-10)
    x = torch.cat([GRID.points(), dense.randn(5, 3)])
    latent = posterior(ours, x)
    added = diagonal_of(ours.likelihood(latent), latent)
    assert torch.allclose(added, ours.likelihood.noise.expand_as(added))


def test_the_covariance_that_is_solved_with_is_ours():
    for likelihood, kind in [
        (GappyGridLikelihood(), ConstantDiagLinearOperator),
        (per_level(), SelectedKroneckerDiagOperator),
        (GappyGridLikelihood(given()), DiagLinearOperator),
        (GappyGridLikelihood(0.2), ConstantDiagLinearOperator),
    ]:
        model = model_of(likelihood)
        covariance = likelihood(model(TRAIN)).lazy_covariance_matrix
        assert isinstance(covariance, SelectedKroneckerAddedDiagOperator)
        assert type(covariance._diag_tensor) is kind


# -- one noise per level ---------------------------------------------------------------------------------------------


def test_levels_in_training():
    likelihood = per_level()
    model = model_of(likelihood)
    prior = model(TRAIN)
    noisy = likelihood(prior)
    assert torch.allclose(diagonal_of(noisy, prior), LEVELS[LEVEL])
    assert torch.allclose(noisy.covariance_matrix, prior.covariance_matrix + LEVELS[LEVEL].diag())
    # some cells in another order, as another training set would be
    some = TRAIN.flip(0)[::2]
    prior = model_of(likelihood, some, Y[::2])(some)
    assert torch.allclose(diagonal_of(likelihood(prior), prior), LEVELS[LEVEL.flip(0)[::2]])


@pytest.mark.parametrize("axis", [1, -1])
def test_levels_at_test_points(axis):
    likelihood = GappyGridLikelihood(noise_axis=axis, grid=make_grid()).double()
    likelihood.noise = LEVELS
    model = model_of(likelihood)
    off = torch.cat([dense.randn(7, 1), AXES[1][torch.tensor([2, 0, 1, 1, 0, 2, 2])]], -1)
    finer = CartesianGrid([AXES[0] + 0.02, AXES[1].flip(0)])
    for x, expected in [
        (GRID.points(), LEVELS.repeat(9)),
        (GRID.points().flip(0), LEVELS.repeat(9).flip(0)),
        (GRID.points()[4:5], LEVELS[1:2]),
        (finer.points(), LEVELS.flip(0).repeat(9)),
        (off, LEVELS[torch.tensor([2, 0, 1, 1, 0, 2, 2])]),
        (torch.cat([GRID.points(), off]), torch.cat([LEVELS.repeat(9), LEVELS[torch.tensor([2, 0, 1, 1, 0, 2, 2])]])),
    ]:
        latent = posterior(model, x)
        noisy = likelihood(latent)
        assert torch.allclose(diagonal_of(noisy, latent), expected)
        assert torch.allclose(noisy.mean, latent.mean)
        assert torch.allclose(noisy.covariance_matrix, latent.covariance_matrix + expected.diag(), atol=1e-8)
        assert torch.allclose(diagonal_of(likelihood(latent, x), latent), expected)
        assert torch.allclose(diagonal_of(likelihood(latent[3:]), latent[3:]), expected[3:])
        with gpytorch.settings.prior_mode(True):
            prior = posterior(model, x)
            assert torch.allclose(diagonal_of(likelihood(prior), prior), expected)


def test_levels_of_the_first_axis():
    grid = make_grid()
    likelihood = GappyGridLikelihood(noise_axis=0, grid=grid).double()
    likelihood.noise = torch.linspace(0.1, 0.9, 9).double()
    latent = posterior(model_of(likelihood), GRID.points())
    expected = likelihood.noise.repeat_interleave(3)
    assert torch.allclose(diagonal_of(likelihood(latent), latent), expected)


def unknown_level():
    return torch.cat([GRID.points()[:4], torch.tensor([[0.3, 2.0, 1.5]]).double()])


def test_an_unknown_level_is_refused():
    likelihood = per_level()
    model, x = model_of(likelihood), unknown_level()
    latent = posterior(model, x)
    message = re.escape("noise_axis: got [2.0, 1.5] at test point 4, which has no noise; expected levels of the grid")
    for do in (
        lambda: likelihood(latent),
        lambda: likelihood(latent, x),
        lambda: likelihood(torch.zeros(5).double(), x),
        lambda: likelihood.expected_log_prob(torch.zeros(5).double(), latent, x),
    ):
        with pytest.raises(ValueError, match=message):
            do()
    assert torch.allclose(diagonal_of(likelihood(latent[:4]), latent[:4]), LEVELS[torch.tensor([0, 1, 2, 0])])
    noise = torch.linspace(1, 2, 5).double()
    assert torch.allclose(diagonal_of(likelihood(latent, noise=noise), latent), noise)


def test_points_that_are_not_known_are_asked_for():
    """A distribution from elsewhere does not say where its points are."""
    likelihood = per_level()
    elsewhere = MultivariateNormal(torch.zeros(27).double(), torch.eye(27).double())
    for do in (lambda: likelihood(elsewhere), lambda: likelihood(torch.zeros(27).double())):
        with pytest.raises(ValueError, match=r"got a distribution without its points, expected likelihood\(f, x\)"):
            do()
    assert torch.allclose(likelihood(elsewhere, GRID.points()).variance, 1 + LEVELS.repeat(9))
    assert torch.allclose(likelihood(elsewhere, [GRID.points()]).variance, 1 + LEVELS.repeat(9))


def test_levels_where_kernels_are_not_evaluated_lazily():
    """Our operators know their points; the posterior is then GPyTorch's own, and is told."""
    likelihood = per_level()
    model = model_of(likelihood)
    with gpytorch.settings.lazily_evaluate_kernels(False):
        prior = model(TRAIN)
        assert torch.allclose(diagonal_of(likelihood(prior), prior), LEVELS[LEVEL])
        latent = posterior(model, GRID.points())
        assert torch.allclose(diagonal_of(likelihood(latent, GRID.points()), latent), LEVELS.repeat(9))


def test_points_with_columns_that_are_not_the_grids():
    """The posterior knows which of its columns are the grid's; a table of points does not say."""
    grid = make_grid()
    kernel = GappyGridKernel([RBFKernel(), MaternKernel()], grid, active_dims=[1, 2, 3]) + LinearKernel(active_dims=[0])
    likelihood = per_level()

    def wide(x):
        return torch.cat([dense.randn(len(x), 1), x], -1)

    model = model_of(likelihood, wide(TRAIN), Y, kernel)
    prior = model(wide(TRAIN))
    assert torch.allclose(diagonal_of(likelihood(prior), prior), LEVELS[LEVEL])
    latent = posterior(model, wide(GRID.points()))
    assert torch.allclose(diagonal_of(likelihood(latent), latent), LEVELS.repeat(9))
    elsewhere = MultivariateNormal(latent.mean, latent.covariance_matrix)
    with pytest.raises(ValueError, match="x: got 4 columns, expected the grid's 3"):
        likelihood(elsewhere, wide(GRID.points()))


@pytest.mark.parametrize("combine", ["plus linear", "scaled", "times a kernel of all columns"])
def test_levels_in_sums_and_products(combine):
    grid_kernel = GappyGridKernel([RBFKernel(), MaternKernel()], make_grid())
    kernel = grid_kernel * RBFKernel() if combine == "times a kernel of all columns" else grid_kernel + LinearKernel()
    likelihood = per_level()
    model = model_of(likelihood, kernel=ScaleKernel(kernel) if combine == "scaled" else kernel)
    prior = model(TRAIN)
    assert torch.allclose(diagonal_of(likelihood(prior), prior), LEVELS[LEVEL])
    latent = posterior(model, GRID.points())
    assert torch.allclose(diagonal_of(likelihood(latent, GRID.points()), latent), LEVELS.repeat(9))
    if combine != "times a kernel of all columns":
        assert torch.allclose(diagonal_of(likelihood(latent), latent), LEVELS.repeat(9))
        return
    with pytest.raises(ValueError, match=r"without its points, expected likelihood\(f, x\)"):
        likelihood(latent)  # a covariance that was formed densely has forgotten its points


def test_levels_in_a_batch_of_different_points():
    """Each member's points have their own levels."""
    likelihood = per_level()
    x = torch.stack([GRID.points()[:6], GRID.points()[1:7]])
    kernel = GappyGridKernel([RBFKernel(), MaternKernel()], make_grid()).double()
    prior = MultivariateNormal(torch.zeros(2, 6).double(), kernel(x))
    expected = torch.stack([LEVELS.repeat(9)[:6], LEVELS.repeat(9)[1:7]])
    assert torch.allclose(diagonal_of(likelihood(prior), prior), expected)
    assert torch.allclose(diagonal_of(likelihood(prior, x), prior), expected)
    assert torch.allclose(likelihood(torch.zeros(2, 6).double(), x).variance, expected)


def test_a_batch_of_likelihoods_with_levels():
    batch = torch.Size([2])
    likelihood = GappyGridLikelihood(noise_axis=1, grid=make_grid(), batch_shape=batch).double()
    likelihood.noise = torch.stack([LEVELS, 2 * LEVELS])
    model = model_of(likelihood, y=torch.stack([Y, Y.flip(0)]), batch_shape=batch)
    prior = model(TRAIN)
    assert torch.allclose(diagonal_of(likelihood(prior), prior), likelihood.noise[:, LEVEL])
    latent = posterior(model, GRID.points())
    assert latent.mean.shape == (2, 27)
    assert torch.allclose(diagonal_of(likelihood(latent), latent), likelihood.noise.repeat(1, 9))


def test_gradients_reach_every_level():
    likelihood = per_level()
    model = model_of(likelihood)
    with settings.logdet_method("exact"):
        value = log_likelihood(model, likelihood)
    (got,) = torch.autograd.grad(value, likelihood.noise_covar.raw_noise)
    covariance = model.covar_module(TRAIN).to_dense().detach() + likelihood.noise[LEVEL].diag()
    expected = MultivariateNormal(torch.zeros_like(Y), covariance).log_prob(Y) / len(Y)
    assert value.item() == pytest.approx(expected.item(), rel=1e-8)
    assert torch.allclose(got, torch.autograd.grad(expected, likelihood.noise_covar.raw_noise)[0], rtol=1e-6)


# -- given noise -----------------------------------------------------------------------------------------------------


def test_given_noise_in_training():
    noise = given()
    likelihood = GappyGridLikelihood(noise)
    model = model_of(likelihood)
    prior = model(TRAIN)
    assert torch.allclose(diagonal_of(likelihood(prior), prior), noise)
    assert not list(likelihood.parameters())
    assert torch.equal(likelihood.noise, noise)
    noise.fill_(7.0)  # the caller's
    assert not torch.equal(likelihood.noise, noise)


def test_given_noise_at_training_cells_in_any_order():
    noise = given()
    likelihood = GappyGridLikelihood(noise)
    model = model_of(likelihood)
    for order in (torch.arange(len(noise)).flip(0), torch.randperm(len(noise)), torch.tensor([3, 3, 0])):
        latent = posterior(model, TRAIN[order])
        assert torch.allclose(diagonal_of(likelihood(latent), latent), noise[order])


def test_given_noise_may_have_a_variance_elsewhere():
    noise = given()
    likelihood = GappyGridLikelihood(noise, noise_elsewhere=0.7)
    latent = posterior(model_of(likelihood), torch.cat([TRAIN[:2], dense.randn(3, 3)]))
    expected = torch.cat([noise[:2], noise.new_full((3,), 0.7)])
    assert torch.allclose(diagonal_of(likelihood(latent), latent), expected)


def test_given_noise_elsewhere_is_refused():
    noise = given()
    likelihood = GappyGridLikelihood(noise)
    model = model_of(likelihood)
    same_number = GRID.points()[: len(noise)]
    for x in (GRID.points(), dense.randn(4, 3), same_number, torch.cat([TRAIN, dense.randn(1, 3)])):
        latent = posterior(model, x)
        with pytest.raises(
            ValueError, match=r"a test point without an observation; expected likelihood\(posterior, noise="
        ):
            likelihood(latent)
        override = torch.linspace(1, 2, len(x)).double()
        assert torch.allclose(diagonal_of(likelihood(latent, noise=override), latent), override)
        assert torch.allclose(diagonal_of(likelihood(latent, noise=0.25), latent), torch.full_like(override, 0.25))


def test_a_known_number():
    likelihood = GappyGridLikelihood(0.3)
    model = model_of(likelihood)
    for x in (GRID.points(), dense.randn(4, 3)):
        latent = posterior(model, x)
        added = diagonal_of(likelihood(latent), latent)
        assert torch.allclose(added, torch.full_like(added, 0.3))
    prior = model.train()(TRAIN)
    added = diagonal_of(likelihood(prior), prior)
    assert torch.allclose(added, torch.full_like(added, 0.3))


def test_given_noise_in_a_batch():
    noise = torch.stack([given(), 2 * given()])
    likelihood = GappyGridLikelihood(noise)
    model = model_of(likelihood, y=torch.stack([Y, Y]), batch_shape=(2,))
    prior = model(TRAIN)
    assert torch.allclose(diagonal_of(likelihood(prior), prior), noise)
    latent = posterior(model, TRAIN.flip(0))
    assert torch.allclose(diagonal_of(likelihood(latent), latent), noise.flip(-1))


def test_given_noise_of_another_number():
    likelihood = GappyGridLikelihood(given()[:5])
    model = model_of(likelihood)
    with pytest.raises(ValueError, match=rf"noise: got variances of shape \(5,\) for {len(Y)} points, expected one"):
        likelihood(model(TRAIN))


def test_overrides_in_training_and_for_samples():
    for likelihood in (GappyGridLikelihood().double(), per_level(), GappyGridLikelihood(given())):
        model = model_of(likelihood)
        prior, noise = model(TRAIN), 0.5 + given()
        assert torch.allclose(diagonal_of(likelihood(prior, noise=noise), prior), noise)
        assert torch.allclose(diagonal_of(likelihood(prior, noise=0.25), prior), torch.full_like(noise, 0.25))
        assert torch.allclose(likelihood(Y, noise=noise).variance, noise)
        with pytest.raises(ValueError, match=rf"noise: got shape \(3,\), expected one variance for each of {len(Y)} p"):
            likelihood(prior, noise=noise[:3])


# -- skipped variances -------------------------------------------------------------------------------------------------


def test_noise_where_variances_are_skipped():
    """The latent variances are zero then; the noise is not."""
    for likelihood, x, expected in (
        (GappyGridLikelihood().double(), GRID.points(), None),
        (per_level(), GRID.points(), LEVELS.repeat(9)),
        (GappyGridLikelihood(given()), TRAIN.flip(0), given().flip(0)),
    ):
        model = model_of(likelihood)
        with gpytorch.settings.skip_posterior_variances():
            latent = posterior(model, x)
            noisy = likelihood(latent)
        expected = likelihood.noise.expand(27) if expected is None else expected
        assert torch.allclose(noisy.mean, latent.mean)
        assert torch.allclose(noisy.variance, expected)


# -- formulas --------------------------------------------------------------------------------------------------------


KINDS = {
    "learned": lambda: (GappyGridLikelihood().double(), TRAIN, math.log(2.0) * torch.ones(len(TRAIN)).double() + 1e-4),
    "per level": lambda: (per_level(), TRAIN, LEVELS[LEVEL]),
    "given": lambda: (GappyGridLikelihood(given()), TRAIN, given()),
    "a number": lambda: (GappyGridLikelihood(0.3).double(), TRAIN, torch.full((len(TRAIN),), 0.3).double()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_conditionals_and_marginals_follow_their_formulas(kind):
    likelihood, x, noise = KINDS[kind]()
    prior = MultivariateNormal(0.3 * dense.randn(len(x), seed=4), dense.random_psd(len(x)))
    mean, variance = prior.mean, prior.variance
    conditional = likelihood(prior.mean, x)
    assert isinstance(conditional, torch.distributions.Normal)
    assert torch.allclose(conditional.variance, noise)
    assert torch.allclose(conditional.mean, mean)
    samples = likelihood(prior.rsample(torch.Size([4])), x)
    assert torch.allclose(samples.variance, noise.expand(4, -1))
    expected = -0.5 * (((Y - mean) ** 2 + variance) / noise + noise.log() + math.log(2 * math.pi))
    assert torch.allclose(likelihood.expected_log_prob(Y, prior, x), expected)
    normal = torch.distributions.Normal(mean, (variance + noise).sqrt())
    assert torch.allclose(likelihood.log_marginal(Y, prior, x), normal.log_prob(Y))
    marginal = likelihood(prior, x)
    assert torch.allclose(marginal.covariance_matrix, prior.covariance_matrix + noise.diag())
    dense_marginal = torch.distributions.MultivariateNormal(mean, prior.covariance_matrix + noise.diag())
    assert torch.allclose(marginal.log_prob(Y), dense_marginal.log_prob(Y), rtol=1e-6)


@pytest.mark.parametrize("max_cholesky", [800, 0])
@pytest.mark.parametrize("kind", KINDS)
def test_log_marginal_of_a_posterior(kind, max_cholesky):
    likelihood, x, noise = KINDS[kind]()
    model = model_of(likelihood)
    with linear_operator.settings.max_cholesky_size(max_cholesky), settings.solve_tolerance(1e-10):
        latent = posterior(model, x.flip(0))
        got = likelihood.log_marginal(Y, latent)
    covariance = model.covar_module(TRAIN).to_dense().detach()
    gain = torch.linalg.solve(covariance + noise.diag(), covariance).mT
    mean, variance = gain @ Y, (covariance - gain @ covariance).diagonal()
    expected = torch.distributions.Normal(mean, (variance + noise).sqrt()).log_prob(Y.flip(0))
    assert torch.allclose(got.flip(0), expected, atol=1e-6)


def test_a_learned_batch():
    likelihood = GappyGridLikelihood(batch_shape=torch.Size([2])).double()
    likelihood.noise = torch.tensor([[0.1], [0.7]]).double()
    model = model_of(likelihood, y=torch.stack([Y, Y]), batch_shape=(2,))
    prior = model(TRAIN)
    assert torch.allclose(diagonal_of(likelihood(prior), prior), likelihood.noise.expand(2, len(Y)))
    latent = posterior(model, GRID.points())
    assert torch.allclose(diagonal_of(likelihood(latent), latent), likelihood.noise.expand(2, 27))


# -- bad arguments and round trips -----------------------------------------------------------------------------------

ERRORS = {
    "axis without a grid": (lambda: GappyGridLikelihood(noise_axis=1), "grid: got none, expected the CartesianGrid"),
    "axis out of range": (
        lambda: GappyGridLikelihood(noise_axis=2, grid=GRID),
        "noise_axis: got 2, expected an axis of the grid, -2 to 1",
    ),
    "axis out of range below": (lambda: GappyGridLikelihood(noise_axis=-3, grid=GRID), "noise_axis: got -3"),
    "axis by name": (lambda: GappyGridLikelihood(noise_axis="time", grid=GRID), "noise_axis: got 'time', expected an"),
    "not a grid": (lambda: GappyGridLikelihood(noise_axis=0, grid=AXES), "grid: got"),
    "given and by axis": (
        lambda: GappyGridLikelihood(0.1, 1, grid=GRID),
        "got known variances and options for learned",
    ),
    "given with a prior": (lambda: GappyGridLikelihood(0.1, noise_prior=LogNormalPrior(0.0, 1.0)), "expected one or"),
    "given with a constraint": (lambda: GappyGridLikelihood(0.1, noise_constraint=GreaterThan(0.1)), "expected one or"),
    "zero": (lambda: GappyGridLikelihood(0.0), "minimum of 0.0, expected finite variances above 0"),
    "negative": (lambda: GappyGridLikelihood(torch.tensor([0.1, -0.2])), "expected finite variances above 0"),
    "NaN": (lambda: GappyGridLikelihood(torch.tensor([0.1, torch.nan])), "expected finite variances above 0"),
    "infinite": (lambda: GappyGridLikelihood(torch.tensor([0.1, torch.inf])), "expected finite variances above 0"),
    "integers": (lambda: GappyGridLikelihood(torch.tensor([1, 2])), "got torch.int64"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_wrong_arguments_are_named(case):
    do, message = ERRORS[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        do()


def saved_and_loaded(likelihood):
    file = io.BytesIO()
    torch.save(likelihood.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_loaded_states_have_the_same_noise(kind):
    likelihood, x, noise = KINDS[kind]()
    blank = {
        "learned": GappyGridLikelihood,
        "per level": lambda: GappyGridLikelihood(noise_axis=1, grid=CartesianGrid(AXES)),
        "given": lambda: GappyGridLikelihood(torch.ones(len(TRAIN))),
        "a number": lambda: GappyGridLikelihood(1.0),
    }[kind]().double()
    blank.load_state_dict(saved_and_loaded(likelihood))
    twins = [blank, copy.deepcopy(likelihood), pickle.loads(pickle.dumps(likelihood)), likelihood.float().double()]
    for twin in twins:
        assert torch.allclose(twin(Y, x).variance, noise, rtol=1e-6)
        model = model_of(twin)
        latent = posterior(model, x.flip(0))
        assert torch.allclose(diagonal_of(twin(latent), latent), noise.flip(0), rtol=1e-6)


def test_an_output_axis_with_a_noise_each():
    """The use it is made for: outputs as an axis of codes."""
    grid = CartesianGrid([AXES[0], torch.arange(3).double()])
    likelihood = GappyGridLikelihood(noise_axis=-1, grid=grid).double()
    likelihood.noise = LEVELS
    x = grid.points(CELLS)
    kernel = GappyGridKernel([RBFKernel(), IndexKernel(num_tasks=3)], grid)
    model = model_of(likelihood, x, Y, kernel)
    latent = posterior(model, grid.points())
    assert torch.allclose(diagonal_of(likelihood(latent), latent), LEVELS.repeat(9))
