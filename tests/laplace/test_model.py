"""What a user of a LaplaceGP meets: training, predictions, draws, and clear errors."""

import math

import gpytorch
import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    BetaLikelihood,
    NegativeBinomialLikelihood,
    PoissonLikelihood,
    StudentTLikelihood,
)

import gpytorch_gaps as gaps
from gpytorch_gaps.laplace import densities, mode
from gpytorch_gaps.laplace.shared import SharedPreconditioner
from tests.laplace._dense import Model, latent, likelihood_and_data


def model_of(name="poisson", side=12, seed=0):
    likelihood, y = likelihood_and_data(name, latent(side), seed)
    y[3:6, 4:9] = torch.nan
    t = torch.linspace(0, 4, side, dtype=torch.float64)
    grid, x, y = gaps.from_array(y, [t, t])
    return Model(x, y, likelihood, grid).double(), grid


def series(y, likelihood, **options):
    """A model of a series."""

    class Series(gaps.LaplaceGP):
        def __init__(self, x, y, grid):
            super().__init__(x, y, likelihood)
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = ScaleKernel(gaps.GappyGridKernel([RBFKernel()], grid, **options))

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    grid, x, y = gaps.from_array(torch.as_tensor(y, dtype=torch.float64))
    return Series(x, y, grid).double(), grid


def log_marginal(model):
    mll = gaps.LaplaceMarginalLogLikelihood(model.likelihood, model)
    return mll(model.train()(*model.train_inputs), model.train_targets)


def test_fit_trains_the_kernel_and_the_likelihood():
    model, _ = model_of("student")
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        start = log_marginal(model)
    history = gaps.fit(model, steps=8, progress=False)
    assert not model.training
    assert -history.loss[-1] > start
    assert all(bool((before[name] != parameter).any()) for name, parameter in model.named_parameters())


def test_a_resumed_fit_ends_where_an_uninterrupted_one_does(tmp_path):
    losses = []
    for path, legs in ((tmp_path / "once", (6,)), (tmp_path / "twice", (3, 6))):
        for steps in legs:
            model, _ = model_of()
            history = gaps.fit(model, steps=steps, checkpoint=path, checkpoint_every=3, progress=False)
        losses.append(history.loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_predictive_distributions_are_those_of_gpytorch():
    model, grid = model_of("bernoulli")
    with torch.no_grad():
        f = model.eval()(grid.points())
        chance = model.likelihood(f).probs
    torch.testing.assert_close(chance, torch.special.ndtr(f.mean / (1 + f.variance).sqrt()))
    assert chance.shape == (grid.num_cells,)


def test_draws_have_the_moments_of_the_posterior():
    model, grid = model_of(side=8)
    with torch.no_grad():
        posterior = model.eval()(grid.points())
        draws = gaps.sample_posterior(model, grid, 4_000, seed=0, progress=False).flatten(1)
    deviation = posterior.stddev
    assert (((draws.mean(0) - posterior.mean) / deviation).abs() < 5 / math.sqrt(4_000)).all()
    torch.testing.assert_close(draws.std(0), deviation, rtol=0.08, atol=0)


def test_sums_of_grid_kernels_serve():
    model, grid = model_of()
    model.covar_module = model.covar_module + ScaleKernel(gaps.GappyGridKernel([MaternKernel(), MaternKernel()], grid))
    model.double()
    log_marginal(model).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with torch.no_grad():
        assert model.eval()(grid.points()).variance.min() > 0


def test_float32_models_agree_with_float64_ones():
    model, grid = model_of()
    with torch.no_grad():
        wide = model.eval()(grid.points())
        expected = wide.mean, wide.stddev
    likelihood, y = likelihood_and_data("poisson", latent(12))
    y[3:6, 4:9] = torch.nan
    t = torch.linspace(0, 4, 12)
    grid, x, y = gaps.from_array(y.float(), [t, t])
    with torch.no_grad():
        narrow = Model(x, y, likelihood, grid).eval()(grid.points())
    torch.testing.assert_close(narrow.mean.double(), expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(narrow.stddev.double(), expected[1], rtol=1e-3, atol=1e-4)


def test_new_data_move_the_mode():
    model, grid = model_of()
    with torch.no_grad():
        before = model.eval()(grid.points()).mean
        model.set_train_data(targets=model.train_targets + 5)
        assert (model(grid.points()).mean > before).all()


def test_predictions_follow_hyperparameters_after_training_mode():
    model, grid = model_of()
    with torch.no_grad():
        before = model.eval()(grid.points()).variance
        model.train()
        model.covar_module.outputscale = 3.0
        assert (model.eval()(grid.points()).variance > before).any()


def test_large_counts_far_from_the_prior_mean_are_reached():
    model, _ = series([1e5, 2e5, float("nan"), 1e5], PoissonLikelihood())
    model.covar_module.outputscale = 1e10
    with torch.no_grad(), gaps.settings.mean_tolerance(1e-6):
        mean = model.eval()(torch.arange(4.0, dtype=torch.float64).unsqueeze(-1)).mean
    assert mean[[0, 1, 3]].tolist() == pytest.approx([1e5, 2e5, 1e5], rel=1e-2)
    assert model.mode.converged


def test_certain_classes_do_not_overflow():
    model, grid = series([1.0] * 10 + [float("nan")] + [0.0] * 10, BernoulliLikelihood())
    model.covar_module.outputscale = 1e6
    value = log_marginal(model)
    value.backward()
    assert value.isfinite()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    with torch.no_grad():
        posterior = model.eval()(grid.points())
    assert posterior.mean.isfinite().all()
    assert posterior.variance.min() > 0


@pytest.mark.filterwarnings("ignore:LaplaceGP")  # no step is taken
def test_the_mode_is_predicted_from_the_last_two(monkeypatch):
    errors = []
    for last in (2, 1):
        model, _ = model_of()
        for level in (0.0, 0.1, 0.2):
            model.mean_module.constant = level
            monkeypatch.setattr(mode, "_MAX_STEPS", 0 if level == 0.2 else 100)
            model._last_weights = model._last_weights[-last:]
            prior = model.train()(*model.train_inputs)
            found = model.find_mode(prior, model.train_targets)
        errors.append(found.error_in_std)
    assert errors[0] < 0.3 * errors[1]


def test_newton_steps_share_a_preconditioner_while_the_noise_moves_little():
    model, _ = model_of()
    kernel = mode.covariances(model.train()(*model.train_inputs)).detach()
    once = torch.linspace(0.5, 1.0, len(model.train_targets), dtype=torch.float64)
    shared, reused = SharedPreconditioner(), []
    for noise in (once, 1.9 * once, torch.cat([once[:-1], 2.1 * once[-1:]]), 1.5 * once):
        noisy = mode.noisy_covariance(kernel, noise)
        with shared.serving(noisy.system()), gaps.settings.dense_size(0), gaps.record_solves() as solves:
            solution = noisy.solve(noise, config=gaps.settings.current().replace(tolerance=1e-9))
        torch.testing.assert_close(noisy.to_dense() @ solution, noise)
        reused.append("set up for a matrix like it" in solves[-1].reason)
        assert noisy.system().reused_preconditioner is None
    assert reused == [False, True, False, True]  # the last one serves as that of the third does


def test_a_mode_that_is_not_reached_is_a_warning(monkeypatch):
    monkeypatch.setattr(mode, "_MAX_STEPS", 1)
    model, grid = model_of("bernoulli")
    with torch.no_grad(), pytest.warns(gaps.NotConvergedWarning, match="after 1 steps of Newton's method"):
        model.eval()(grid.points())
    assert not model.mode.converged


# -- the information of likelihoods that are not log-concave -----------------------------------------------------------


def test_expected_information_is_the_mean_of_the_curvature():
    likelihood = BetaLikelihood().double()
    likelihood.scale = 7.0
    f = torch.linspace(-2, 2, 5, dtype=torch.float64)
    y = torch.linspace(0, 1, 20_002, dtype=torch.float64)[1:-1].unsqueeze(-1)
    weights = likelihood(f).log_prob(y).exp() / 20_001
    each = densities.curvature(likelihood, f.expand(len(y), -1).contiguous(), y)
    found = densities.derivatives(likelihood, f, y[0].expand(5))[2]
    torch.testing.assert_close(found.detach(), (weights * each).sum(0).detach(), rtol=1e-4, atol=0)


def test_an_outlier_hardly_moves_a_student_t_model():
    clean = torch.sin(torch.arange(40, dtype=torch.float64) / 4)
    wild = clean.clone()
    wild[17] = 1e4
    means = []
    for y in (clean, wild):
        likelihood = StudentTLikelihood()
        likelihood.noise, likelihood.deg_free = 0.01, 3.0
        model, grid = series(y, likelihood)
        model.covar_module.base_kernel.kernels[0].lengthscale = 4.0
        with torch.no_grad():
            means.append(model.eval()(grid.points()).mean)
    assert (means[1] - means[0]).abs().max() < 0.1


def test_many_outliers_do_not_hold_up_the_mode():
    generator = torch.Generator().manual_seed(1)
    likelihood = StudentTLikelihood().double()
    likelihood.noise, likelihood.deg_free = 1e-3, 3.0
    f = torch.sin(torch.arange(60, dtype=torch.float64) / 4)
    noise, wild, chance = torch.randn(3, 60, generator=generator, dtype=torch.float64)
    y = f + math.sqrt(1e-3) * noise + torch.where(chance > 0.8, 5.0 * wild, 0.0)  # a fifth of them
    model, grid = series(y, likelihood)
    model.covar_module.base_kernel.kernels[0].lengthscale = 4.0
    with torch.no_grad(), gaps.settings.mean_tolerance(1e-6):
        mean = model.eval()(grid.points()).mean
        kernel = model.covar_module(*model.train_inputs).to_dense()
    assert model.mode.converged
    assert (mean - f).abs().max() < 0.1
    slope = 4.0 * (y - mean) / (3.0 * 1e-3 + (y - mean).square())
    torch.testing.assert_close(kernel @ slope + model.mean_module.constant.detach(), mean, rtol=0, atol=1e-6)


# -- what is refused ---------------------------------------------------------------------------------------------------


COUNTS = r"expected counts 0, 1, 2, \.\. with a"


@pytest.mark.parametrize(
    ("likelihood", "bad", "words"),
    [
        (PoissonLikelihood(), [-1.0], f"train_targets: observation 1 is -1, {COUNTS} PoissonLikelihood$"),
        (
            PoissonLikelihood(),
            [0.5, -2.0],
            f"observation 1 is 0.5, {COUNTS} PoissonLikelihood; 2 of 4 observations are not",
        ),
        (NegativeBinomialLikelihood(), [2.5], f"observation 1 is 2.5, {COUNTS} NegativeBinomialLikelihood"),
        (BernoulliLikelihood(), [-1.0], "observation 1 is -1, expected 0 or 1 with a BernoulliLikelihood"),
        (BetaLikelihood(), [1.0], "observation 1 is 1, expected shares between 0 and 1, both excluded"),
        (StudentTLikelihood(), [math.inf], "observation 1 is inf, expected finite numbers"),
        (PoissonLikelihood(), [math.nan], "observation 1 is nan, expected counts"),
    ],
)
def test_impossible_observations_are_named(likelihood, bad, words):
    possible = 0.5 if isinstance(likelihood, BetaLikelihood) else 1.0
    y = torch.tensor([possible, *bad, possible])
    grid, x, _ = gaps.from_array(torch.ones(1, len(y)))
    with pytest.raises(ValueError, match=words):
        Model(x, y, likelihood, grid)
    model = Model(x, torch.full_like(y, possible), likelihood, grid)
    with pytest.raises(ValueError, match=words.replace("train_targets", "targets")):
        model.set_train_data(targets=y)
    assert (model.train_targets == possible).all()
    mll = gaps.LaplaceMarginalLogLikelihood(likelihood, model)
    with pytest.raises(ValueError, match=words.replace("train_targets", "target")):
        mll(gpytorch.distributions.MultivariateNormal(torch.zeros(len(y)), torch.eye(len(y))), y)


@pytest.mark.parametrize(
    ("targets", "came"),
    [
        (torch.ones(8), r"\(8,\) of torch.float32"),
        (torch.ones(9, 1), r"\(9, 1\) of torch.float32"),
        (torch.ones(9) + 0j, r"\(9,\) of torch.complex64"),
        ([1.0] * 9, "list"),
    ],
)
def test_targets_that_are_no_observations_are_refused(targets, came):
    grid, x, _ = gaps.from_array(torch.ones(3, 3))
    with pytest.raises(
        ValueError, match=rf"train_targets: got {came}, expected a tensor of real numbers of shape \(9,\)"
    ):
        Model(x, targets, PoissonLikelihood(), grid)


def test_likelihoods_of_several_latent_functions_are_refused():
    grid, x, y = gaps.from_array(torch.ones(3, 3))
    with pytest.raises(
        ValueError, match="got SoftmaxLikelihood with several latent functions, expected a likelihood with one"
    ):
        Model(x, y, gpytorch.likelihoods.SoftmaxLikelihood(num_features=1, num_classes=3), grid)
    model = Model(x, y, gpytorch.likelihoods.DirichletClassificationLikelihood(y.long()), grid)
    with pytest.raises(ValueError, match=r"a log_prob of shape \(2, 9\), expected one for every value of f: \(9,\)"):
        log_marginal(model)


@pytest.mark.parametrize(
    ("likelihood", "words"),
    [
        (gpytorch.likelihoods.LaplaceLikelihood(), "got LaplaceLikelihood, whose log-density has a kink"),
        (gaps.GappyGridLikelihood(robust=True), "got a robust GappyGridLikelihood, which only an ExactGP can have"),
    ],
)
def test_likelihoods_without_a_laplace_approximation_are_refused(likelihood, words):
    grid, x, y = gaps.from_array(torch.ones(3, 3))
    with pytest.raises(ValueError, match=words):
        Model(x, y, likelihood, grid)


def test_observations_are_not_left_out_of_a_mode():
    model, _ = model_of()
    with pytest.raises(ValueError, match="got one with a PoissonLikelihood, expected Gaussian noise"):
        gaps.leave_out(model)


def test_flags_and_integers_are_observations():
    grid, x, y = gaps.from_array(torch.tensor([[1.0, 0.0, 1.0, 1.0]]))
    for likelihood in (BernoulliLikelihood(), PoissonLikelihood()):
        values = [log_marginal(Model(x, own, likelihood, grid)).item() for own in (y, y.long(), y.bool())]
        assert values[0] == values[1] == values[2]


def test_kernels_without_a_grid_are_refused():
    model, _ = model_of()
    model.covar_module = RBFKernel().double()
    with pytest.raises(ValueError, match="expected a kernel with a GappyGridKernel in it"):
        log_marginal(model)


def test_batches_are_refused():
    model, _ = model_of()
    model.covar_module = ScaleKernel(model.covar_module.base_kernel, batch_shape=torch.Size([2])).double()
    with pytest.raises(ValueError, match="batch"):
        log_marginal(model)


def test_fantasies_are_refused():
    model, _ = model_of()
    with pytest.raises(NotImplementedError, match="set_train_data"):
        model.get_fantasy_model(model.train_inputs[0][:1], model.train_targets[:1])


def test_other_models_are_refused():
    with pytest.raises(ValueError, match="expected a LaplaceGP"):
        gaps.LaplaceMarginalLogLikelihood(PoissonLikelihood(), gpytorch.models.ApproximateGP)
