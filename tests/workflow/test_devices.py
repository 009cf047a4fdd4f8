"""A whole model where its tensors live: a step of training with its backward pass, and predictions, as on the CPU.

On the accelerator where there is one, and on the stand-in device of ``tests/_standin.py``, which raises when devices
are mixed and counts copies and waits.
"""

import copy

import gpytorch
import linear_operator
import pytest
import torch
from gpytorch.kernels import LinearKernel, MaternKernel, RBFKernel, ScaleKernel

import gpytorch_gaps as gaps
from gpytorch_gaps import settings
from gpytorch_gaps.solvers.planning.logdet import LogdetPlan
from tests import _dense as dense
from tests import _standin as standin
from tests._covering import in_turn
from tests._devices import CPU, on_standin
from tests._devices import other_devices as devices
from tests._standin import count_transfers
from tests.workflow._pairs import CASES, Model

MAX_CHOLESKY = linear_operator.settings.max_cholesky_size


@pytest.fixture(autouse=True)
def _accurate():
    with settings.solve_tolerance(1e-10), settings.train_tolerance(1e-10):
        yield


def moved(model, device):
    """A copy of the model there, with all that belongs to it."""
    model = copy.deepcopy(model).to(device)
    tensors = [*model.parameters(), *model.buffers(), *model.train_inputs, model.train_targets]
    assert {tensor.device for tensor in tensors} == {device}
    return model


def host(value):
    """On the CPU, not counted."""
    value = value.detach()
    return value.host.clone() if isinstance(value, standin.StandInTensor) else value.cpu()


def copies(counts):
    """Those that the package asked for."""
    return [e for e in counts.within(gaps).events if e.kind != "sync"]


def step(model, optimizer):
    """One of GPyTorch's tutorial; the loss, not yet looked at."""
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    model.train()
    optimizer.zero_grad()
    loss = -mll(model(*model.train_inputs), model.train_targets).sum()
    loss.backward()
    optimizer.step()
    return loss.detach()


def trained(model, steps=2):
    """Losses, gradients of the last step and parameters after it."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    losses = [step(model, optimizer) for _ in range(steps)]
    return [*losses, *(p.grad for p in model.parameters()), *model.parameters()]


def predicted(model, x):
    """Means, variances, covariances; of new observations too, where their noise is known."""
    model.eval()
    with torch.no_grad():
        posterior = model(x)
        results = [posterior.mean, posterior.variance, posterior.covariance_matrix]
        if model.likelihood.noise.size(-1) != model.train_targets.size(-1):
            results.append(model.likelihood(posterior).variance)
        return results


def check(got, expected, device, tolerance=1e-8):
    assert len(got) == len(expected)
    for i, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        assert ours.device == device, i
        assert ours.shape == theirs.shape, i
        assert torch.allclose(host(ours), host(theirs), rtol=tolerance, atol=tolerance), i


# -- training --------------------------------------------------------------------------------------------------------


@devices
@in_turn(case=CASES, max_cholesky=[0, 800])
def test_training(case, max_cholesky, device):
    model = CASES[case](small=True).ours
    here, there = moved(model, CPU), moved(model, device)
    with MAX_CHOLESKY(max_cholesky), settings.logdet_method("exact"):
        expected = trained(here)
        with count_transfers() as counts:
            got = trained(there)
    assert copies(counts) == []
    check(got, expected, device, 1e-7)


@devices
@pytest.mark.parametrize("case", ["two axes", "a sum of two grid kernels", "a noise per output", "a noise per point"])
def test_training_with_a_stochastic_log_determinant(case, device):
    """On the stand-in, whose random numbers are the CPU's, the losses are the CPU's too."""
    model, results = CASES[case](small=True).ours, []
    for where in (CPU, device):
        own = moved(model, where)
        torch.manual_seed(0)
        with MAX_CHOLESKY(0), settings.logdet_method("stochastic"), count_transfers() as counts:
            results.append(trained(own))
        assert {tensor.device for tensor in results[-1]} == {where}
        assert copies(counts) == []
    if device == standin.DEVICE:
        check(results[1], results[0], device, 1e-6)


# -- predictions -----------------------------------------------------------------------------------------------------


@devices
@in_turn(case=CASES, max_cholesky=[0, 800])
def test_predictions(case, max_cholesky, device):
    """At cells, on another grid and at scattered points."""
    pair = CASES[case](small=True)
    here, there = moved(pair.ours, CPU), moved(pair.ours, device)
    cells, finer = pair.grid.points()[::8], pair.grid.points()[:30].clone()
    finer[:, 0] += 0.003
    for x in (cells, finer, pair.test_x[45:]):
        ours = x.to(device)
        with MAX_CHOLESKY(max_cholesky):
            expected = predicted(here, x)
            with count_transfers() as counts:
                got = predicted(there, ours)
        assert copies(counts) == []
        check(got, expected, device)


@devices
@pytest.mark.parametrize("method", ["auto", "fill", "ignore", "penalize", "spectral", "cholesky"])
def test_predictions_by_every_method(method, device):
    pair = CASES["two axes"](small=True)
    results = []
    tolerance = 1e-5 if method == "penalize" else 1e-11
    for where in (CPU, device):
        with settings.gap_method(method), settings.solve_tolerance(tolerance), settings.max_iterations(20_000):
            results.append(predicted(moved(pair.ours, where), pair.test_x.to(where)))
    check(results[1], results[0], device, 1e-3 if method == "penalize" else 1e-7)


@devices
def test_predictions_with_gradients(device):
    pair, results = CASES["two axes"](small=True), []
    for where in (CPU, device):
        model, x = moved(pair.ours, where).eval(), pair.test_x.to(where).detach().requires_grad_()
        with gpytorch.settings.detach_test_caches(False), MAX_CHOLESKY(0), count_transfers() as counts:
            posterior = model(x)
            (posterior.mean.sum() + posterior.variance.sum()).backward()
        assert copies(counts) == []
        results.append([x.grad, *(p.grad for p in model.parameters())])
    check(results[1], results[0], device, 1e-6)


@devices
def test_fantasies(device):
    pair, results = CASES["two axes"](small=True), []
    for where in (CPU, device):
        model, x = moved(pair.ours, where), pair.test_x.to(where)
        predicted(model, x)
        with torch.no_grad():
            fantasy = model.get_fantasy_model(x[-5:], torch.ones(5, dtype=torch.float64).to(where))
        results.append(predicted(fantasy, x))
    check(results[1], results[0], device)


MIXES = {
    "grid * linear": lambda g: g() * LinearKernel(),
    "grid * RBF of one axis + linear": lambda g: ScaleKernel(g() * RBFKernel(active_dims=[0])) + LinearKernel(),
    "grid + RBF of both axes": lambda g: g() + RBFKernel(ard_num_dims=2),
}


@devices
@pytest.mark.parametrize("mix", MIXES)
def test_mixed_kernels(mix, device):
    axes = [torch.linspace(0, 1, 6, dtype=torch.float64), torch.linspace(0, 1, 5, dtype=torch.float64)]
    grid = gaps.CartesianGrid(axes)
    x = grid.points(dense.observed("random", grid.shape))
    kernel = MIXES[mix](lambda: gaps.GappyGridKernel([RBFKernel(), MaternKernel()], grid))
    model = Model(x, x.sum(-1).sin(), gaps.GappyGridLikelihood(), kernel).double()
    test_x, results = torch.cat([grid.points()[::5], dense.randn(4, 2)]), []
    for where in (CPU, device):
        own = moved(model, where)
        with MAX_CHOLESKY(0), settings.logdet_method("exact"):
            training = trained(own)
            with settings.prediction_memory(8_000):  # rows of a kernel without structure, when they are wanted
                results.append([*training, *predicted(own, test_x.to(where))])
    check(results[1], results[0], device, 1e-6)


# -- what it costs ---------------------------------------------------------------------------------------------------


@on_standin
@pytest.mark.parametrize(
    ("case", "max_cholesky", "training", "prediction"),
    [
        ("two axes", 800, 24, 43),
        ("two axes", 0, 64, 48),
        ("a noise per output", 800, 44, 50),
        ("a noise per point", 800, 23, 43),
        ("a sum of two grid kernels", 800, 15, 52),
        ("a sum of two grid kernels", 0, 79, 63),
    ],
)
def test_waits_of_a_step_and_of_a_prediction(case, max_cholesky, training, prediction):
    """Once everything has been looked up. Measured: a quarter less each, most of them while a method is chosen."""
    pair = CASES[case](small=True)
    model = moved(pair.ours, standin.DEVICE)
    x = standin.to_standin(pair.grid.points())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with MAX_CHOLESKY(max_cholesky), settings.solve_tolerance(1e-6), settings.train_tolerance(1e-6):
        step(model, optimizer)
        with count_transfers() as counts:
            step(model, optimizer)
        assert copies(counts) == []
        assert counts.within(gaps).syncs <= training, counts.within(gaps).by_line
        predicted(model, x)
        with count_transfers() as counts:
            predicted(model, x)
        assert copies(counts) == []
        assert counts.within(gaps).syncs <= prediction, counts.within(gaps).by_line


ITERATIVE = {"krylov", "goal", "ignore", "fill", "spectral", "penalize", "refine", "solve", "matrix_system", "upstream"}


def iterating(counts):
    """Waits asked for by solves and all that they call, ours or upstream's."""
    stems = [event.where.rsplit(":", 1)[0].rsplit("/", 1)[-1].removesuffix(".py") for event in counts.events]
    return sum(stem in ITERATIVE or stem == "linear_cg" for stem in stems)


def rough():
    """A model whose solves take many iterations, on the stand-in device."""
    pair = CASES["two axes"](small=True)
    kernel = pair.ours.covar_module.base_kernel
    kernel.kernels[0].lengthscale, kernel.kernels[1].lengthscale, pair.ours.likelihood.noise = 0.15, 0.2, 1e-3
    return pair, moved(pair.ours, standin.DEVICE)


@on_standin
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "mixed"])
@pytest.mark.parametrize(
    ("method", "rank"),
    [("fill", 0), ("fill", 15), ("ignore", 0), ("ignore", 15), ("spectral", None), ("penalize", None), ("auto", None)],
)
def test_solves_of_a_model_wait_once_every_ten_iterations(method, rank, dtype):
    """A training step and a prediction; a few waits more for each solve, and each of its refinements."""
    pair, model = rough()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x = standin.to_standin(pair.grid.points())
    with (
        MAX_CHOLESKY(0),
        settings.logdet_method("exact"),
        settings.gap_method(method),
        settings.preconditioner_rank(rank),
        settings.mixed_precision(dtype == torch.float32),
        settings.max_iterations(20_000),
        settings.solve_tolerance(1e-5),
        settings.train_tolerance(1e-5),
        gaps.record_solves() as solves,
        count_transfers() as counts,
    ):
        step(model, optimizer)
        model.eval()
        with torch.no_grad():
            _ = model(x).mean
    assert copies(counts) == []
    total = sum(report.iterations for report in solves)
    calls = sum(1 + report.refinements for report in solves)
    assert total >= (30 if method != "auto" else 0)
    assert iterating(counts) <= total / 10 + 5 * calls, counts.by_line


@on_standin
@pytest.mark.parametrize(("side", "rank"), [("data", 0), ("data", 15), ("gaps", None)])
def test_stochastic_log_determinants_wait_once_every_ten_iterations(side, rank, monkeypatch):
    """On both sides; and come to what they come to on the CPU."""
    monkeypatch.setattr("gpytorch_gaps.operators.likelihood.plan_logdet", lambda *_: LogdetPlan("stochastic", side))
    pair, model = rough()
    results = []
    for own in (pair.ours, model):
        optimizer = torch.optim.Adam(own.parameters(), lr=0.01)
        torch.manual_seed(0)
        with (
            MAX_CHOLESKY(0),
            settings.logdet_method("stochastic"),
            settings.preconditioner_rank(rank),
            settings.train_tolerance(1e-8),
            settings.max_iterations(20_000),
            gaps.record_solves() as solves,
            count_transfers() as counts,
        ):
            results.append(step(own, optimizer))
        assert [(report.method, report.reason) for report in solves.logdets] == [("stochastic", f"{side} side")]
    assert copies(counts) == []
    # where linear_operator takes Lanczos matrices that are small; a one that it sends to the device is let pass
    assert "to host" not in {event.kind for event in counts.events}
    # on the data side one run serves both
    total = sum(report.iterations for report in (solves if side == "data" else [*solves, *solves.logdets]))
    assert total >= 50
    assert iterating(counts) <= total / 10 + 10, counts.by_line
    assert torch.allclose(host(results[1]), results[0], rtol=1e-6, atol=1e-6)


@devices
def test_warm_started_steps(device):
    """Probes are made on the device: nothing crosses, and the losses are the CPU's."""
    results = []
    for where in (CPU, device):
        own = moved(CASES["two axes"](small=True).ours, where)
        torch.manual_seed(0)
        memory = gaps.WarmStart(tolerance=1e-8, loosest=1e-8)
        with (
            MAX_CHOLESKY(0),
            settings.logdet_method("stochastic"),
            settings.warm_start(memory),
            count_transfers() as counts,
        ):
            results.append(trained(own, steps=3))
        assert copies(counts) == []
    if device == standin.DEVICE:
        check(results[1], results[0], device, 1e-5)


@on_standin
def test_the_same_points_are_not_looked_up_again():
    """A look-up waits for the device; a comparison waits once."""
    pair = CASES["two axes"](small=True)
    kernel = moved(pair.ours, standin.DEVICE).covar_module.base_kernel
    x = standin.to_standin(pair.ours.train_inputs[0])
    kernel(x).evaluate_kernel()
    with count_transfers() as counts:
        kernel(x).evaluate_kernel()
    assert copies(counts) == []
    assert counts.within(gaps).syncs <= 4, counts.within(gaps).by_line


# -- mistakes and round trips ----------------------------------------------------------------------------------------


@on_standin
def test_what_lives_elsewhere_is_refused():
    pair = CASES["two axes"](small=True)
    there, x = moved(pair.ours, standin.DEVICE), pair.ours.train_inputs[0]
    kernel = there.covar_module.base_kernel
    with pytest.raises(ValueError, match=f"x1: got torch.float64 on cpu, expected torch.float64 on {standin.DEVICE}"):
        kernel(x).to_dense()
    with pytest.raises(ValueError, match=r"model\.to"):
        pair.ours.covar_module(standin.to_standin(x)).to_dense()
    kernels = [RBFKernel().double(), MaternKernel().double()]
    mixed = gaps.GappyGridKernel(kernels, standin.to_standin(gaps.CartesianGrid(pair.grid.axes)))
    with pytest.raises(ValueError, match=r"but kernels\.0\.raw_lengthscale is torch\.float64 on cpu"):
        mixed(standin.to_standin(x)).to_dense()


@devices
@pytest.mark.parametrize("case", ["three axes with a group", "a noise per output", "a batch of three"])
def test_there_and_back(case, device):
    pair = CASES[case](small=True)
    expected = predicted(moved(pair.ours, CPU), pair.test_x)
    model = moved(pair.ours, device)
    predicted(model, pair.test_x.to(device))
    back = {name: host(value) for name, value in model.train().state_dict().items()}
    twin = CASES[case](small=True).ours
    twin.load_state_dict(back)
    check(predicted(twin, pair.test_x), expected, CPU)
    if device != standin.DEVICE:  # which cannot be left but by copies
        check(predicted(model.to(CPU), pair.test_x), expected, CPU)
