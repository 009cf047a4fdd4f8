"""Fitting: the same numbers as a hand-written loop, whatever interrupts it, and an account of every step."""

import copy
import math
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import gpytorch
import linear_operator
import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.means import ConstantMean
from gpytorch.mlls import ExactMarginalLogLikelihood, LeaveOneOutPseudoLikelihood

from gpytorch_gaps import WarmStart, settings
from gpytorch_gaps.operators import SelectedKroneckerOperator
from gpytorch_gaps.reports import LogdetReport, SolveRecord, SolveReport, record_solves
from gpytorch_gaps.solvers.planning.logdet import LogdetPlan
from gpytorch_gaps.training.finish import Plateau
from gpytorch_gaps.training.fit import fit
from gpytorch_gaps.training.history import FitError, History, count_iterations, logdet_error
from gpytorch_gaps.training.run import TrainingRun


@pytest.fixture(autouse=True)
def _doubles():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


class Model(gpytorch.models.ExactGP):
    """The plain GP, in whose forward a test may lay a trap for evaluation number `trap_at`."""

    def __init__(self, x, y, likelihood=None, batch=()):
        super().__init__(x, y, likelihood or GaussianLikelihood(batch_shape=torch.Size(batch)))
        shape = torch.Size(batch)
        self.mean_module = ConstantMean(batch_shape=shape)
        self.covar_module = ScaleKernel(RBFKernel(batch_shape=shape), batch_shape=shape)
        self.evaluations, self.trap_at, self.trap = 0, None, None

    def forward(self, x):
        covariance, mean = self.covar_module(x), self.mean_module(x)
        if self.training:
            self.evaluations += 1
            if self.evaluations - 1 == self.trap_at:
                mean = self.trap(mean)
        return MultivariateNormal(mean, covariance)


class DeepModel(Model):
    """Features by a small network, whose dropout draws on the random state and whose batch norm has buffers."""

    def __init__(self, x, y):
        super().__init__(x, y)
        self.features = torch.nn.Sequential(
            torch.nn.Linear(1, 8),
            torch.nn.BatchNorm1d(8),
            torch.nn.Tanh(),
            torch.nn.Dropout(0.1),
            torch.nn.Linear(8, 2),
        )

    def forward(self, x):
        return super().forward(self.features(x))


class GridModel(gpytorch.models.ExactGP):
    """A gappy grid, by this package's operators, whose log-determinants are stochastic on request."""

    def __init__(self, x, y, axes, observed, make_kernel):
        super().__init__(x, y, GaussianLikelihood())
        self.mean_module, self.axes, self.observed = ConstantMean(), axes, observed
        self.kernels = torch.nn.ModuleList([make_kernel() for _ in axes])

    def forward(self, x):
        factors = [kernel(axis).to_dense() for kernel, axis in zip(self.kernels, self.axes, strict=True)]
        operator = SelectedKroneckerOperator(*factors, row_index=self.observed, col_index=self.observed)
        return MultivariateNormal(self.mean_module(x), operator)


def data(n=30, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.linspace(0, 4, n).unsqueeze(-1)
    return x, torch.sin(2 * x[:, 0]) + 0.1 * torch.randn(n, generator=generator)


def make(kind=Model, **arguments):
    torch.manual_seed(7)  # the network's weights
    return kind(*data(**arguments))


def make_grid(make_kernel=RBFKernel, observed=50):
    generator = torch.Generator().manual_seed(2)
    axes = [torch.linspace(0, 3, 9), torch.linspace(0, 3, 8)]
    cells = torch.randperm(72, generator=generator)[:observed].sort().values
    x = torch.cartesian_prod(*axes)[cells]
    y = torch.sin(2 * x.sum(-1)) + 0.1 * torch.randn(observed, generator=generator)
    return GridModel(x, y, axes, cells, make_kernel)


def quiet(model, steps=100, **arguments):
    return fit(model, steps, **{"progress": False, "patience": None, **arguments})


def hand_written(model, steps, make_optimizer=torch.optim.Adam, lr=0.1):
    model.train()
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    optimizer = make_optimizer(model.parameters(), lr=lr)
    losses = []

    def closure():
        optimizer.zero_grad()
        loss = -mll(model(*model.train_inputs), model.train_targets).sum()
        loss.backward()
        return loss

    for _ in range(steps):
        losses.append(optimizer.step(closure).item())
    return losses


def state_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(model, other):
    ours, theirs = (m if isinstance(m, dict) else m.state_dict() for m in (model, other))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def without_seconds(history):
    return {name: values for name, values in vars(history).items() if "seconds" not in name}


def raise_(error):
    def trap(mean):
        raise error

    return trap


# -- the ascent --------------------------------------------------------------------------------------------------------


def test_equals_a_hand_written_loop_bit_for_bit():
    ours, theirs = make(), make()
    history = quiet(ours, 25)
    assert history.loss == hand_written(theirs, 25)
    assert_same(ours, theirs)
    assert history.stopped == "steps"
    assert len(history) == 25
    assert not history.converged


def test_default_arguments_converge_and_find_the_noise_on_average():
    """A variance estimated from 60 observations has a standard error of 20 %, the mean of eight of them 7 %."""
    found = []
    for seed in range(8):
        model = make(n=60, seed=seed)
        history = fit(model, 200, progress=False)
        assert history.loss[-1] < history.loss[0] - 0.5
        assert history.converged
        found.append(model.likelihood.noise.item())
    assert sum(found) / len(found) == pytest.approx(0.01, rel=0.2)


def test_leaves_eval_mode_data_and_random_state():
    model = make()
    inputs, targets = model.train_inputs[0], model.train_targets
    copies = inputs.clone(), targets.clone()
    random_state = torch.get_rng_state()
    quiet(model, 3)
    assert not any(module.training for module in model.modules())
    assert model.train_inputs[0] is inputs
    assert model.train_targets is targets
    assert torch.equal(inputs, copies[0])
    assert torch.equal(targets, copies[1])
    assert torch.equal(torch.get_rng_state(), random_state)
    assert model(torch.zeros(1, 1)).mean.shape == (1,)


def test_predictions_after_a_second_fit_are_not_those_cached_before():
    model, once = make(), make()
    quiet(model, 5)
    before = model(torch.zeros(1, 1)).mean
    quiet(model, 5)
    after = model(torch.zeros(1, 1)).mean
    once.load_state_dict(model.state_dict())
    assert torch.equal(after, once.eval()(torch.zeros(1, 1)).mean)
    assert not torch.equal(before, after)


def test_zero_steps_change_nothing():
    model = make()
    before = state_of(model)
    history = quiet(model, 0)
    assert_same(model, before)
    assert len(history) == 0
    assert history.best_loss == math.inf
    assert str(history) == "0 steps, all done"


def test_frozen_parameters_stay():
    model = make()
    model.likelihood.raw_noise.requires_grad_(False)
    before = model.likelihood.raw_noise.clone()
    quiet(model, 5)
    assert torch.equal(model.likelihood.raw_noise, before)


def test_priors_count_in_the_loss():
    plain, informed = make(), make()
    prior = gpytorch.priors.GammaPrior(3.0, 6.0)
    informed.covar_module.base_kernel.register_prior("lengthscale_prior", prior, "lengthscale")
    expected = prior.log_prob(informed.covar_module.base_kernel.lengthscale).sum().item() / 30
    assert quiet(informed, 1).loss[0] == pytest.approx(quiet(plain, 1).loss[0] - expected)


def test_a_batch_is_summed_and_fitted_as_its_members():
    x, y = data()
    targets = torch.stack([y, 2 * y + 1])
    batch = Model(x.expand(2, -1, -1), targets, batch=(2,))
    history = quiet(batch, 10)
    members = [Model(x, target) for target in targets]
    separate = [quiet(member, 10) for member in members]
    assert history.loss == pytest.approx([sum(losses) for losses in zip(*(h.loss for h in separate), strict=True)])
    for i, member in enumerate(members):
        torch.testing.assert_close(batch.likelihood.noise[i], member.likelihood.noise, rtol=1e-6, atol=0)
    assert history.num_observations == 30


def test_deep_kernels_are_trained_as_by_hand():
    ours, theirs = make(DeepModel), make(DeepModel)
    torch.manual_seed(3)
    history = quiet(ours, 10)
    torch.manual_seed(3)
    assert history.loss == hand_written(theirs, 10)
    assert_same(ours, theirs)


def test_another_objective_may_be_given():
    model = make()
    history = quiet(model, 3, mll=LeaveOneOutPseudoLikelihood(model.likelihood, model))
    assert history.loss[0] != quiet(make(), 1).loss[0]


def test_under_no_grad_too():
    with torch.no_grad():
        assert quiet(make(), 3).loss == quiet(make(), 3).loss


# -- optimizers --------------------------------------------------------------------------------------------------------


def test_an_optimizer_class():
    ours, theirs = make(), make()
    assert quiet(ours, 8, optimizer=torch.optim.SGD, lr=0.05).loss == hand_written(theirs, 8, torch.optim.SGD, 0.05)
    assert_same(ours, theirs)


def test_an_optimizer_function():
    ours, theirs = make(), make()
    quiet(ours, 8, optimizer=lambda params, lr: torch.optim.Adam(params, lr=lr, amsgrad=True))
    hand_written(theirs, 8, lambda params, lr: torch.optim.Adam(params, lr=lr, amsgrad=True))
    assert_same(ours, theirs)


def test_a_ready_optimizer_keeps_its_learning_rate_and_its_state():
    ours, theirs = make(), make()
    optimizer = torch.optim.Adam(ours.parameters(), lr=0.03)
    quiet(ours, 4, optimizer=optimizer)
    quiet(ours, 4, optimizer=optimizer)
    hand_written(theirs, 8, lr=0.03)
    assert_same(ours, theirs)


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_steps_are_those_by_hand(line_search):
    def lbfgs(params, lr):
        return torch.optim.LBFGS(params, lr=lr, max_iter=4, line_search_fn=line_search)

    ours, theirs = make(), make()
    history = quiet(ours, 5, optimizer=lbfgs)
    assert history.loss == hand_written(theirs, 5, lbfgs)
    assert_same(ours, theirs)
    assert len(history) == 5
    assert ours.evaluations > 5


# -- the account -------------------------------------------------------------------------------------------------------


def test_history_of_plain_gpytorch():
    history = quiet(make(), 4)
    assert history.noise[0] == pytest.approx(GaussianLikelihood().noise.item())
    assert history.iterations == [0] * 4
    assert history.standard_error == [None] * 4
    assert history.worst_residual == [None] * 4
    assert all(seconds > 0 for seconds in history.seconds)
    assert history.best_loss == min(history.loss)
    columns = history.as_dict()
    seconds = {"seconds", "solve_seconds", "gradient_seconds"}
    others = {"loss", "noise", "iterations", "worst_residual", "standard_error", "sent_bytes", "expected_gain"}
    assert set(columns) == {*others, *seconds}
    for whole, solves, gradient in zip(*(columns[name] for name in sorted(seconds, key=len)), strict=True):
        assert solves >= 0
        assert gradient > 0
        assert solves + gradient < whole
    assert {len(values) for values in columns.values()} == {4}
    columns["loss"].clear()
    assert len(history) == 4
    assert str(history).startswith("4 steps, all done: loss ")


def test_a_likelihood_without_noise_has_none():
    class Silent(GaussianLikelihood):
        noise = None

    assert quiet(Model(*data(), Silent()), 2).noise == [None, None]


def rough_kernel():
    return MaternKernel(nu=0.5)


@pytest.mark.parametrize(("kernel", "side"), [(RBFKernel, "data side"), (rough_kernel, "gaps side")])
def test_history_of_our_operators(kernel, side):
    model = make_grid(kernel)
    with linear_operator.settings.max_cholesky_size(0), settings.logdet_method("stochastic"), record_solves() as solves:
        history = quiet(model, 3)
    assert {report.reason for report in solves.logdets} == {side}
    # on the data side, probes and right-hand side are solved together
    apart = sum(report.iterations for report in solves.logdets) if side == "gaps side" else 0
    assert sum(history.iterations) == sum(report.iterations for report in solves) + apart
    assert all(iterations > 0 for iterations in history.iterations)
    assert all(0 < residual <= 1e-6 for residual in history.worst_residual)
    assert all(error > 0 for error in history.standard_error)
    exact = quiet(make_grid(kernel), 1)
    assert exact.standard_error == [0.0]
    assert abs(history.loss[0] - exact.loss[0]) < 5 * history.standard_error[0]


def solve(iterations, reason=""):
    return SolveReport("ignore", iterations, torch.zeros(1), 0.0, 0, 1, True, 1e-6, reason=reason)


def logdet(iterations, error=0.0):
    error = None if error is None else torch.as_tensor(error)
    return LogdetReport("stochastic", torch.zeros(()), error, 10, iterations, "data side")


def test_probes_solved_with_the_right_hand_side_count_once():
    record = SolveRecord()
    record += [solve(7, "with 10 probes for the log-determinant"), solve(5)]
    record.logdets += [logdet(7)]
    assert count_iterations(record) == 12
    record.logdets += [logdet(7), logdet(5)]  # others happen to take as many
    assert count_iterations(record) == 24


def test_standard_errors_add_up_as_independent_ones():
    record = SolveRecord()
    assert logdet_error(record) is None
    record.logdets += [logdet(1, [3.0, 4.0]), logdet(1, 12.0)]
    assert logdet_error(record) == pytest.approx(13.0)
    record.logdets += [logdet(1, None)]
    assert logdet_error(record) is None


def test_the_bar_shows_loss_noise_and_iterations(capfd):
    fit(make(), 3)
    captured = capfd.readouterr()
    assert captured.out == ""
    for part in ("3/3", "loss=", "noise=", "CG=0"):
        assert part in captured.err


def test_no_bar_prints_nothing(capfd):
    fit(make(), 3, progress=False)
    assert capfd.readouterr() == ("", "")


# -- the plateau -------------------------------------------------------------------------------------------------------


def stops_at(losses, patience=20, min_improvement=0.1):
    plateau = Plateau(patience, min_improvement)
    for i, loss in enumerate(losses):
        plateau.add(loss)
        if plateau.reached:
            return i
    return None


def test_a_flat_loss_stops_after_patience():
    assert stops_at([1.0] * 100, patience=10) == 4 + 10  # the first mean is of five


def test_a_slow_but_steady_fall_goes_on():
    assert stops_at([-0.01 * i for i in range(500)]) is None
    assert stops_at([-0.001 * i for i in range(500)]) is not None


def test_an_overshoot_is_forgiven():
    assert stops_at([50.0 - i for i in range(20)] + [60.0] * 8 + [30.0 - i for i in range(30)]) is None


def test_a_noisy_fall_goes_on():
    noise = torch.randn(300).tolist()
    assert stops_at([-0.3 * i + 2 * e for i, e in enumerate(noise)]) is None
    assert stops_at([2 * e for e in noise]) is not None


def num_finishing(history):
    return sum(gain is not None for gain in history.expected_gain)


def test_a_plateau_in_nats_of_all_observations_ends_the_optimizer_s_part():
    history = fit(make(), 1000, progress=False)
    first = len(history) - num_finishing(history)
    assert 15 < first < len(history) < 400
    assert history.expected_gain[:first] == [None] * first
    assert stops_at([loss * 30 for loss in history.loss[:first]], patience=10) == first - 1
    looser = fit(make(), 1000, progress=False, min_improvement=3.0, patience=5)
    assert len(looser) - num_finishing(looser) < first


# -- the finish --------------------------------------------------------------------------------------------------------


def maximum_likelihood(model):
    """The optimum by L-BFGS with a line search, from the parameters of the model, and its loss in nats."""
    model = copy.deepcopy(model).train()
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    options = {"max_iter": 300, "tolerance_grad": 1e-8, "tolerance_change": 1e-14, "line_search_fn": "strong_wolfe"}
    optimizer = torch.optim.LBFGS(model.parameters(), **options)

    def loss():
        optimizer.zero_grad()
        value = -len(model.train_targets) * mll(model(*model.train_inputs), model.train_targets)
        value.backward()
        return value

    optimizer.step(loss)
    return model, loss().item()


@pytest.mark.parametrize("kind", [make, make_grid])
def test_fit_as_it_comes_ends_at_the_maximum(kind):
    model = kind()
    history = fit(model, progress=False)
    assert history.converged
    assert history.stopped == "converged"
    assert "converged" in str(history)
    best, lowest = maximum_likelihood(model)
    assert model.likelihood.noise.item() == pytest.approx(best.likelihood.noise.item(), rel=1e-3)
    assert history.loss[-1] * history.num_observations - lowest < 1e-3


def test_a_flat_direction_is_not_taken_for_the_maximum():
    """Length-scales longer than the data: ten pairs of steps and gradients know too little of the curvature."""
    torch.manual_seed(7)
    points = torch.cartesian_prod(torch.linspace(0, 1, 40), torch.linspace(0, 1, 35))
    x = points[torch.randperm(len(points))[:120].sort().values]
    covariance = math.log(2.0) * torch.exp(-(x.unsqueeze(-2) - x).abs().sum(-1))
    model = Model(x, torch.linalg.cholesky(covariance) @ torch.randn(120) + torch.randn(120))
    kernels = [MaternKernel(nu=0.5, active_dims=[column]) for column in range(2)]
    for kernel in kernels:
        kernel.lengthscale = 3.0
    model.covar_module = ScaleKernel(kernels[0] * kernels[1])
    history = fit(model, 200, progress=False)
    assert history.converged
    assert history.loss[-1] * 120 - maximum_likelihood(model)[1] < 1e-3


def test_the_expected_gain_is_what_there_is_to_gain():
    model = make(n=60)
    history = fit(model, 200, progress=False)
    _, lowest = maximum_likelihood(model)
    finishing = num_finishing(history)
    assert finishing >= 5
    left = [loss * 60 - lowest for loss in history.loss[-3:]]
    assert max(history.expected_gain[-2:]) <= 1e-4
    assert max(left[-2:]) < 1e-3


@pytest.mark.parametrize(("kernel", "rank", "side"), [(RBFKernel, 12, "data side"), (rough_kernel, None, "gaps side")])
def test_stochastic_log_determinants_end_where_the_gradient_of_their_probes_vanishes(kernel, rank, side, monkeypatch):
    chosen = LogdetPlan("stochastic", side.removesuffix(" side"))
    monkeypatch.setattr("gpytorch_gaps.operators.likelihood.plan_logdet", lambda *_: chosen)
    model = make_grid(kernel)
    model.likelihood.noise = 0.05
    model.likelihood.raw_noise.requires_grad_(False)  # the rough kernel would do without
    stochastic = settings.logdet_method("stochastic")
    with linear_operator.settings.max_cholesky_size(0), stochastic, settings.preconditioner_rank(rank):
        torch.manual_seed(1)
        with record_solves() as solves:
            history = fit(model, 300, progress=False)
        assert all(report.reason.endswith(side) for report in solves.logdets[-3:])
        assert history.converged
        assert max(history.standard_error[-2:]) > 0
        gradients = []
        for seed in range(2):  # other probes: another gradient
            model.train().zero_grad()
            with settings.warm_start(WarmStart(20, 1e-9, loosest=1e-9, seed=seed)):
                mll = ExactMarginalLogLikelihood(model.likelihood, model)
                (-50 * mll(model(*model.train_inputs), model.train_targets)).backward()
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            gradients.append(max(float(parameter.grad.abs().max()) for parameter in trained))
    # a gain of g^2 / 2 H below 1e-4 nats, with a curvature H of at most 1/2 an observation
    assert gradients[0] < (2 * 1e-4 * 50 / 2) ** 0.5 < gradients[1]


def test_noise_that_data_do_without_ends_at_its_bound():
    """Adam alone comes closer and closer to it."""
    model = make_grid(rough_kernel)
    history = fit(model, 300, progress=False)
    assert history.converged
    assert model.likelihood.noise.item() == pytest.approx(1e-4, rel=1e-5)
    assert history.loss[-1] * history.num_observations - maximum_likelihood(model)[1] < 1e-3


def test_a_loss_that_is_no_function_of_the_parameters_ends_on_a_plateau_and_says_so():
    history = fit(make(DeepModel), 300, progress=False, min_improvement=2.0)
    assert history.stopped == "plateau"
    assert not history.converged
    assert "plateau reached" in str(history)
    assert num_finishing(history) == 0


def test_steps_that_run_out_in_the_finish_have_not_converged():
    whole = fit(make(), 1000, progress=False)
    history = fit(make(), len(whole) - 2, progress=False)
    assert history.stopped == "steps"
    assert not history.converged
    assert history.loss == whole.loss[:-2]


def test_a_finish_that_fails_leaves_the_last_finite_parameters():
    whole = fit(make(), 1000, progress=False)
    first = len(whole) - num_finishing(whole)
    model = make()
    model.trap_at, model.trap = first + 2 + 3, lambda mean: mean * math.nan  # two evaluations precede the finish
    history = fit(model, 1000, progress=False)
    assert history.stopped == "plateau"
    assert not history.converged
    assert len(history) == first + 3
    assert all(p.isfinite().all() for p in model.parameters())
    assert not model.training


@pytest.mark.parametrize("kind", ["plain", "stochastic"])
def test_a_run_interrupted_in_its_finish_resumes_bit_for_bit(kind, tmp_path):
    make_model, path = KINDS[kind][0], tmp_path / "run.pt"

    def run(model, steps, **arguments):
        torch.manual_seed(5)
        size, method = (0, "stochastic") if kind == "stochastic" else (800, "auto")
        with linear_operator.settings.max_cholesky_size(size), settings.logdet_method(method):
            return fit(model, steps, progress=False, **arguments)

    whole = make_model()
    expected = run(whole, 400)
    assert num_finishing(expected) > 4
    run(make_model(), len(expected) - 3, checkpoint=path)
    resumed = make_model()
    history = run(resumed, 400, checkpoint=path)
    assert without_seconds(history) == without_seconds(expected)
    assert_same(resumed, whole)
    assert run(make_model(), 400, checkpoint=path) == history


# -- failures ----------------------------------------------------------------------------------------------------------


def at_step(k, trap, **arguments):
    model = make(**arguments)
    model.trap_at, model.trap = k, trap
    return model


def test_a_loss_that_is_not_finite_puts_back_the_last_finite_parameters():
    model, reference = at_step(6, lambda mean: mean * math.nan), make()
    losses = hand_written(reference, 5)  # the parameters of step 5, at which the loss was finite
    with pytest.raises(
        FitError, match=r"step 6: the loss is nan .*raw_noise in .*lower lr.*noise_constraint"
    ) as caught:
        quiet(model, 20)
    assert_same(model, reference)
    assert caught.value.step == 6
    assert caught.value.history.loss[:5] == losses
    assert len(caught.value.history) == 6
    assert caught.value.history.stopped == "interrupted"
    assert not model.training
    assert not model.likelihood.training


class InfiniteGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * math.inf


def test_a_gradient_that_is_not_finite_names_its_parameter():
    model, reference = at_step(4, InfiniteGradient.apply), make()
    hand_written(reference, 4)
    with pytest.raises(FitError, match=r"step 4: gradients are not finite: mean_module\.raw_constant "):
        quiet(model, 20)
    assert_same(model, reference)


def test_an_update_that_is_not_finite_is_undone():
    model, reference = make(), make()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: model.mean_module.raw_constant.data.fill_(math.nan))
    with pytest.raises(FitError, match=r"step 0: parameters are not finite: mean_module\.raw_constant"):
        quiet(model, 5, optimizer=optimizer)
    assert_same(model, reference)
    assert not optimizer.state_dict()["state"]


def test_a_covariance_that_is_not_finite():
    model = make()
    model.covar_module.raw_outputscale.data.fill_(math.nan)
    with pytest.raises(FitError, match=r"step 0: .*not finite: covar_module.raw_outputscale"):
        quiet(model, 5)


def test_targets_with_nan():
    x, y = data()
    y[3] = math.nan
    with pytest.raises(FitError, match=r"step 0: the loss is nan.*check the targets"):
        quiet(Model(x, y), 5)


def test_a_failure_within_an_lbfgs_step_undoes_the_step():
    model, reference = at_step(10, lambda mean: mean * math.nan), make()

    def lbfgs(params, lr):
        return torch.optim.LBFGS(params, lr=lr, max_iter=4, max_eval=4)

    with pytest.raises(FitError, match="step 2"):
        quiet(model, 20, optimizer=lbfgs)
    hand_written(reference, 2, lbfgs)
    assert_same(model, reference)


def test_a_failed_checkpoint_holds_finite_parameters(tmp_path):
    path = tmp_path / "run.pt"
    model = at_step(6, lambda mean: mean * math.nan)
    with pytest.raises(FitError):
        quiet(model, 20, checkpoint=path, checkpoint_every=2)  # the checkpoint of step 6 has a loss of nan
    resumed, reference = make(), make()
    assert len(quiet(resumed, 1, checkpoint=path)) == 5
    hand_written(reference, 5)
    assert_same(resumed, reference)
    assert_same(model, reference)


# -- checkpoints -------------------------------------------------------------------------------------------------------


KINDS = {
    "plain": (make, None),
    "deep": (lambda: make(DeepModel), None),
    "stochastic": (make_grid, None),
    "stochastic on the gaps": (lambda: make_grid(rough_kernel), None),
    "lbfgs": (make, lambda params, lr: torch.optim.LBFGS(params, lr=lr, max_iter=3)),
    "wolfe": (make, lambda params, lr: torch.optim.LBFGS(params, lr=lr, max_iter=3, line_search_fn="strong_wolfe")),
}


@pytest.mark.parametrize(("kind", "error"), [("plain", OSError), *((kind, KeyboardInterrupt) for kind in KINDS)])
def test_an_interrupted_run_resumes_bit_for_bit(kind, error, tmp_path):
    make_model, optimizer = KINDS[kind]
    steps, path = 8, tmp_path / "run.pt"

    def run(model, **arguments):
        size, method = (0, "stochastic") if kind.startswith("stochastic") else (800, "auto")
        with linear_operator.settings.max_cholesky_size(size), settings.logdet_method(method):
            return quiet(model, steps, optimizer=optimizer, **arguments)

    torch.manual_seed(5)
    whole = make_model()
    torch.manual_seed(5)
    expected = run(whole)
    after = torch.rand(1)

    torch.manual_seed(5)
    model, calls = make_model(), []
    torch.manual_seed(5)
    true_forward = model.forward

    def forward(x):
        calls.append(1)
        output = true_forward(x)
        if len(calls) == (5 if optimizer is None else 14):  # in the midst of a step, random numbers drawn
            torch.rand(3)
            raise error("stop")
        return output

    model.forward = forward
    with pytest.raises(error) as caught:
        run(model, checkpoint=path, checkpoint_every=3)
    assert "continues from there" in caught.value.__notes__[-1]
    assert caught.value.history.stopped == "interrupted"
    assert 0 < len(caught.value.history) < steps

    for resumed in (make_model(), model):  # in a new process, as it were, and in the same
        torch.manual_seed(999)
        backup = path.read_bytes()
        model.forward = true_forward
        history = run(resumed, checkpoint=path)
        assert without_seconds(history) == without_seconds(expected)
        assert_same(resumed, whole)
        assert torch.equal(torch.rand(1), after)
        path.write_bytes(backup)


def test_an_interruption_without_checkpoint_undoes_the_unfinished_step():
    model, reference = make(), make()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    done = []

    def interrupt(*_):
        done.append(1)
        if len(done) == 4:
            raise KeyboardInterrupt

    optimizer.register_step_post_hook(interrupt)  # the parameters are updated, the step not accounted for
    with pytest.raises(KeyboardInterrupt) as caught:
        quiet(model, 10, optimizer=optimizer)
    hand_written(reference, 3)
    assert_same(model, reference)
    assert len(caught.value.history) == 3
    assert not model.training
    assert {state["step"].item() for state in optimizer.state_dict()["state"].values()} == {3}


KILLED = """
    import os, signal, sys, torch
    sys.path.insert(0, sys.argv[1])
    import test_fit
    torch.set_default_dtype(torch.float64)
    model = test_fit.make(test_fit.DeepModel)
    torch.manual_seed(11)
    def kill(mean):
        os.kill(os.getpid(), signal.SIGKILL)
    model.trap_at, model.trap = int(sys.argv[3]), kill
    test_fit.quiet(model, 12, checkpoint=sys.argv[2], checkpoint_every=3)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_a_killed_process_resumes_bit_for_bit(tmp_path):
    path = tmp_path / "run.pt"
    here = os.path.dirname(__file__)
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    command = [sys.executable, "-c", textwrap.dedent(KILLED), here, str(path), "7"]
    killed = subprocess.run(command, env=environment, cwd=Path(here).parents[1], timeout=600, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert torch.load(path, weights_only=True)["step"] == 6

    resumed, whole = make(DeepModel), make(DeepModel)
    history = quiet(resumed, 12, checkpoint=path)
    torch.manual_seed(11)
    expected = quiet(whole, 12)
    assert history.loss == expected.loss
    assert_same(resumed, whole)


def test_a_kill_while_writing_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    path = tmp_path / "run.pt"
    quiet(make(), 5, checkpoint=path)
    before = path.read_bytes()

    def half_written(content, stream):
        stream.write(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", half_written)
    with pytest.raises(OSError, match="no space"):
        quiet(make(), 9, checkpoint=path, checkpoint_every=2)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.pt"]


def test_a_finished_run_returns_at_once(tmp_path):
    path = tmp_path / "deep" / "er" / "run.pt"
    model = make()
    expected = quiet(model, 7, checkpoint=path)
    again = make()
    history = quiet(again, 7, checkpoint=path)
    assert history == expected
    assert again.evaluations == 0
    assert_same(again, model)
    assert not again.training
    assert [entry.name for entry in path.parent.iterdir()] == ["run.pt"]
    assert quiet(make(), 7, checkpoint=path) == expected  # it has left the file as it was


def test_a_resumed_run_interrupted_in_its_first_step_loses_nothing(tmp_path):
    path = tmp_path / "run.pt"
    quiet(make(), 4, checkpoint=path)
    with pytest.raises(KeyboardInterrupt):
        quiet(at_step(0, raise_(KeyboardInterrupt)), 9, checkpoint=path)
    model, whole = make(), make()
    history = quiet(model, 9, checkpoint=path)
    assert without_seconds(history) == without_seconds(quiet(whole, 9))
    assert_same(model, whole)


def test_a_step_interrupted_once_accounted_for_is_undone(tmp_path, monkeypatch):
    path, taken = tmp_path / "run.pt", []
    true_snapshot = TrainingRun.snapshot

    def snapshot(run):
        taken.append(1)
        if len(taken) == 4:  # of the start and two steps before
            raise KeyboardInterrupt
        return true_snapshot(run)

    monkeypatch.setattr(TrainingRun, "snapshot", snapshot)
    with pytest.raises(KeyboardInterrupt) as caught:
        quiet(make(), 6, checkpoint=path)
    assert {len(values) for values in caught.value.history.as_dict().values()} == {2}
    monkeypatch.undo()
    assert quiet(make(), 6, checkpoint=path).loss == quiet(make(), 6).loss


def test_more_steps_go_on_and_fewer_return_at_once(tmp_path):
    path = tmp_path / "run.pt"
    quiet(make(), 4, checkpoint=path)
    model, whole = make(), make()
    assert len(quiet(model, 9, checkpoint=path)) == 9
    quiet(whole, 9)
    assert_same(model, whole)
    assert len(quiet(make(), 5, checkpoint=path)) == 9


def test_a_plateau_is_remembered(tmp_path):
    path = tmp_path / "run.pt"
    expected = fit(make(), 1000, progress=False)
    first = make()
    fit(first, len(expected) - 3, progress=False, checkpoint=path)  # some patience is used up
    resumed = make()
    history = fit(resumed, 1000, progress=False, checkpoint=path)
    assert without_seconds(history) == without_seconds(expected)
    assert fit(make(), 1000, progress=False, checkpoint=path) == history


def test_the_bar_of_a_resumed_run_starts_where_it_was(tmp_path, capfd):
    path = tmp_path / "run.pt"
    quiet(make(), 4, checkpoint=path)
    fit(make(), 6, checkpoint=path, patience=None)
    assert "4/6" in capfd.readouterr().err


def test_saved_every_so_many_steps(tmp_path):
    path, seen = tmp_path / "run.pt", []

    def look(mean):
        seen.append(torch.load(path, weights_only=True)["step"])
        return mean

    for k in (0, 2, 3, 5, 6):
        path.unlink(missing_ok=True)
        quiet(at_step(k, look), 7, checkpoint=path, checkpoint_every=3)
    assert seen == [0, 0, 3, 3, 6]
    assert torch.load(path, weights_only=True)["step"] == 7


def other_length():
    return make(n=31)


def other_targets():
    return make(seed=2)


def other_inputs():
    x, y = data()
    return Model(x + 1e-12, y)


def other_kernel():
    model = make()
    model.covar_module.base_kernel = MaternKernel()
    return model


def other_shapes():
    model = make()
    model.covar_module.base_kernel = RBFKernel(batch_shape=torch.Size([2]))
    return model


def other_fixed_value():
    model = make()
    model.likelihood.raw_noise.requires_grad_(False)
    return model


def other_bound():
    return Model(*data(), GaussianLikelihood(noise_constraint=gpytorch.constraints.GreaterThan(1e-6)))


def other_dtype():
    return make().float()


FOREIGN = {
    "train_inputs: .*(30, 1).*(31, 1)": other_length,
    "train_targets": other_targets,
    "train_inputs": other_inputs,
    "base_kernel: RBFKernel in the checkpoint, MaternKernel here": other_kernel,
    "raw_lengthscale: (1, 1) torch.float64 in the checkpoint, (2, 1, 1)": other_shapes,
    "raw_noise: (1,) torch.float64 in the checkpoint, (1,) torch.float64 fixed": other_fixed_value,
    "fixed values": other_bound,
    "torch.float64 in the checkpoint, (1,) torch.float32": other_dtype,
}


@pytest.mark.parametrize("message", FOREIGN)
def test_a_foreign_checkpoint_is_refused_and_kept(message, tmp_path):
    path = tmp_path / "run.pt"
    quiet(make(), 3, checkpoint=path)
    content = path.read_bytes()
    model = FOREIGN[message]()
    before = state_of(model)
    pattern = "belongs to another run.*" + message.replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(ValueError, match=pattern):
        quiet(model, 9, checkpoint=path)
    assert_same(model, before)
    assert path.read_bytes() == content
    assert model.training  # untouched


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"optimizer": torch.optim.SGD},
            "optimizer: torch.optim.adam.Adam in the checkpoint, torch.optim.sgd.SGD here",
        ),
        ({"lr": 0.2}, "lr: 0.1 in the checkpoint, 0.2 here"),
    ],
)
def test_another_optimizer_is_refused(arguments, message, tmp_path):
    quiet(make(), 3, checkpoint=tmp_path / "run.pt")
    with pytest.raises(ValueError, match=message):
        quiet(make(), 9, checkpoint=tmp_path / "run.pt", **arguments)


def test_another_objective_is_refused(tmp_path):
    quiet(make(), 3, checkpoint=tmp_path / "run.pt")
    model = make()
    with pytest.raises(ValueError, match="objective: ExactMarginalLogLikelihood"):
        quiet(model, 9, checkpoint=tmp_path / "run.pt", mll=LeaveOneOutPseudoLikelihood(model.likelihood, model))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (settings.logdet_method("stochastic"), "logdet_method: auto in the checkpoint, stochastic here"),
        (settings.train_tolerance(1e-3), "train_tolerance: 1e-06 in the checkpoint, 0.001 here"),
        (settings.gap_method("fill"), "gap_method: auto in the checkpoint, fill here"),
        (linear_operator.settings.num_trace_samples(3), "num_trace_samples: 10 in the checkpoint, 3 here"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_settings_that_change_the_numbers_are_refused(other, message, tmp_path):
    quiet(make_grid(), 3, checkpoint=tmp_path / "run.pt")
    with other, pytest.raises(ValueError, match=message):
        quiet(make_grid(), 9, checkpoint=tmp_path / "run.pt")


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", "cut", "other"])
def test_a_file_that_is_no_checkpoint_is_refused_and_kept(content, tmp_path):
    path = tmp_path / "run.pt"
    if content == "other":
        torch.save({"weights": torch.zeros(2)}, path)
    elif content == "cut":
        quiet(make(), 3, checkpoint=path)
        path.write_bytes(path.read_bytes()[:1000])
    else:
        path.write_bytes(content)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"checkpoint: .*run.pt .*move it away"):
        quiet(make(), 3, checkpoint=path)
    assert path.read_bytes() == before


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": -1}, "steps: got -1, expected an integer of at least 0"),
        ({"steps": 2.5}, "steps: got 2.5"),
        ({"steps": True}, "steps: got True"),
        ({"lr": 0}, "lr: got 0, expected a number above 0"),
        ({"lr": -0.1}, "lr: got -0.1"),
        ({"lr": math.nan}, "lr: got nan"),
        ({"lr": "fast"}, "lr: got 'fast'"),
        ({"checkpoint_every": 0}, "checkpoint_every: got 0, expected an integer of at least 1"),
        ({"patience": 0}, "patience: got 0, expected an integer of at least 1 or None"),
        ({"min_improvement": -1}, "min_improvement: got -1"),
        ({"min_improvement": math.inf}, "min_improvement: got inf"),
        ({"optimizer": "Adam"}, "optimizer: got str"),
        ({"optimizer": lambda params, lr: None}, "optimizer: got a function that returns NoneType"),
        ({"mll": "loo"}, "mll: got str"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    model = make()
    with pytest.raises(ValueError, match=message):
        fit(model, **{"progress": False, **arguments})
    assert model.evaluations == 0


def test_wrong_models_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"model: got Linear, expected a gpytorch\.models\.ExactGP"):
        fit(torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match="model: got no training data"):
        fit(Model(None, None))
    frozen = make().requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        fit(frozen)
    with pytest.raises(ValueError, match="checkpoint: got the directory"):
        fit(make(), checkpoint=tmp_path)


def test_strangers_are_refused():
    model, other = make(), make()
    with pytest.raises(ValueError, match="mll: got one of another model"):
        fit(model, mll=ExactMarginalLogLikelihood(other.likelihood, other))
    with pytest.raises(ValueError, match="optimizer: got one of 4 parameters that are not the model's"):
        fit(model, optimizer=torch.optim.Adam(other.parameters()))


def test_an_optimizer_that_ignores_the_closure_is_refused():
    class Idle(torch.optim.SGD):
        def step(self, closure=None):
            return None

    with pytest.raises(ValueError, match="optimizer: got an optimizer that never evaluates the loss"):
        quiet(make(), 3, optimizer=Idle)


def test_history_is_comparable_and_copyable():
    history = History(loss=[2.0, 1.0], iterations=[3, 4], noise=[None, None], seconds=[0.5, 0.5], stopped="plateau")
    assert copy.deepcopy(history) == history
    assert str(history) == ("2 steps, plateau reached: loss 2 -> 1 nats per observation (best 1), 7 CG iterations, 1 s")
