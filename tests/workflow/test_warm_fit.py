"""Fits that start every step from the one before: where they end, what they cost, and what interrupts them."""

import gpytorch
import linear_operator
import pytest
import torch
from gpytorch.kernels import MaternKernel, ProductKernel, ScaleKernel
from gpytorch.mlls import ExactMarginalLogLikelihood

import gpytorch_gaps as gaps
from gpytorch_gaps import WarmStart, record_solves, settings
from tests import _dense as dense
from tests.workflow import _pairs


@pytest.fixture(autouse=True)
def _stochastic():
    torch.manual_seed(0)
    with linear_operator.settings.max_cholesky_size(0), settings.logdet_method("stochastic"):
        yield


def drawn(shape=(45, 55), seed=4, lengths=(0.12, 0.1), noise=0.16):
    """Models with data drawn from one of them, 40 % gaps; begun elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    for axis, (size, length) in enumerate(zip(shape, lengths, strict=True)):
        root = torch.linalg.cholesky(dense.matern32(size, length) + 1e-9 * dense.identity(size))
        values = torch.tensordot(root, values, ([1], [axis])).movedim(0, axis)
    values = values + noise**0.5 * torch.randn(shape, generator=generator, dtype=torch.float64)
    values[torch.rand(shape, generator=generator) < 0.4] = torch.nan
    grid, x, y = gaps.from_array(values, [torch.linspace(0, 1, size, dtype=torch.float64) for size in shape])

    def kernels(*columns):
        return [_pairs.with_length(MaternKernel(nu=1.5, active_dims=own), 0.3) for own in columns]

    ours = ScaleKernel(gaps.GappyGridKernel(kernels(None, None), grid))
    return _pairs._pair(grid, x, y, ours, ScaleKernel(ProductKernel(*kernels([0], [1]))))


def small():
    return drawn((16, 18)).ours


def quiet(model, steps, **arguments):
    return gaps.fit(model, steps, **{"progress": False, "patience": None, **arguments})


def positives(model):
    """All hyperparameters that are above zero."""
    lengths = [kernel.lengthscale for kernel in model.covar_module.base_kernel.kernels]
    found = [model.likelihood.noise, model.covar_module.outputscale, *lengths]
    return torch.cat([value.detach().reshape(-1) for value in found])


def raw(model):
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def states(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(one, other):
    ours, theirs = (m if isinstance(m, dict) else m.state_dict() for m in (one, other))
    return ours.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in ours.items())


def same_memory(one, other):
    ours, theirs = one.state_dict()["paths"], other.state_dict()["paths"]
    assert len(ours) == len(theirs)
    return all(torch.equal(a[name], b[name]) for a, b in zip(ours, theirs, strict=True) for name in a)


# -- where it ends -----------------------------------------------------------------------------------------------------


def dense_maximum(pair):
    """Dense maximum likelihood by L-BFGS, from where ours ended, to a gradient that is nothing; and its loss."""
    model = pair.dense
    for parameter, found in zip(model.parameters(), pair.ours.parameters(), strict=True):
        parameter.data.copy_(found.data)
    model.train()
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=15, tolerance_grad=5e-3, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        with gpytorch.settings.fast_computations(log_prob=False), gpytorch.settings.max_cholesky_size(10**4):
            loss = -100.0 * mll(model(*model.train_inputs), model.train_targets)
        loss.backward()
        return loss

    optimizer.step(closure)
    lowest = float(closure()) / 100.0
    assert max(float(parameter.grad.abs().max()) for parameter in model.parameters()) < 1e-2
    return model, lowest


def information(model, step=1e-4):
    """Fisher's: ``1/2 tr(A^-1 A_i A^-1 A_j)``, and ``1' A^-1 1`` of the mean, in the raw parameters."""

    def covariance():
        prior = model.likelihood(model(*model.train_inputs), *model.train_inputs)
        return prior.covariance_matrix.detach()

    cholesky = torch.linalg.cholesky(covariance())
    columns, means = [], []
    for name, parameter in model.named_parameters():
        parameter.data += step
        above = covariance()
        parameter.data -= 2 * step
        change = (above - covariance()) / (2 * step)
        parameter.data += step
        half = torch.linalg.solve_triangular(cholesky, change, upper=False)
        columns.append(torch.linalg.solve_triangular(cholesky, half.mT, upper=False).flatten())
        means.append(float("mean" in name))
    changes = torch.stack(columns)
    one = torch.linalg.solve_triangular(cholesky, torch.ones(len(cholesky), 1, dtype=torch.float64), upper=False)
    mean = torch.tensor(means, dtype=torch.float64)
    return 0.5 * changes @ changes.mT + one.square().sum() * torch.outer(mean, mean)


def test_ends_where_dense_maximum_likelihood_does():
    """With k probes the score is off by a variance of at most F / k, F being Fisher's information.

    It moves the optimum d by ``d'F d``, a chi-square of five degrees of freedom over k: by ``1 / sqrt(k)`` of what the
    data leave open. That is some 4 % for the noise and 10 to 15 % for the others here, so that with 32 probes, whose
    optimum is off by at most a sixth of it, five percent are twice what is due.
    """
    probes, pair = 32, drawn()
    history = quiet(pair.ours, 80, warm_start=WarmStart(num_probes=probes))
    assert 1400 < history.num_observations < 1600
    start, found = positives(drawn().ours), positives(pair.ours)
    model, lowest = dense_maximum(pair)
    best = positives(model)
    assert float((start / best).log().abs().max()) > 0.5  # it had a way to go
    assert float((found / best).log().abs().max()) < 0.05
    off = raw(pair.ours) - raw(model)
    assert float(off @ information(model) @ off) < 20.5 / probes  # the 99.9 % quantile
    # the loss, too: the log-determinant enters by half
    assert abs(history.loss[-1] - lowest) < 4.0 * 0.5 * history.standard_error[-1]


def honest_gradient(model):
    """The gradient of the loss in nats, with accurate solutions for the probes of a warm start."""
    model.train().zero_grad()
    with settings.warm_start(WarmStart(tolerance=1e-9, loosest=1e-9)):
        mll = ExactMarginalLogLikelihood(model.likelihood, model)
        (-len(model.train_targets) * mll(model(*model.train_inputs), model.train_targets)).backward()
    return torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])


def test_unfinished_solves_do_not_move_where_it_ends():
    """They are a bias, not noise, and with little noise a large one, if the residual is relative to the data."""
    pair = drawn((26, 30), noise=1e-3, lengths=(0.25, 0.3))
    pair.ours.likelihood.noise = 3e-3
    history = gaps.fit(pair.ours, 100, progress=False, warm_start=True)
    assert history.converged
    for parameter, found in zip(pair.dense.parameters(), pair.ours.parameters(), strict=True):
        parameter.data.copy_(found.data)
    gradient = honest_gradient(pair.ours)
    left = 0.5 * gradient @ torch.linalg.solve(information(pair.dense), gradient)
    assert float(left) < 0.5 * 0.1**2  # nats: a tenth of a standard deviation


def loop(model, memory, steps, cold=False, lr=0.03):
    """A training loop of one's own: losses, and the solves but for those that begin a log-determinant."""
    model.train()
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    losses = []
    with settings.warm_start(memory), record_solves() as record:
        for _ in range(steps):
            if cold:
                memory.forget()
            optimizer.zero_grad()
            loss = -mll(model(*model.train_inputs), model.train_targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, [report for report in record if "log-determinant" not in report.reason]


@pytest.mark.parametrize(("method", "rank"), [("ignore", 0), ("fill", 0), ("ignore", 30)])
def test_takes_fewer_iterations_than_cold_starts_to_the_same_tolerance(method, rank):
    memory, count = WarmStart(), {}
    for cold in (True, False):
        model = drawn((30, 35)).ours
        memory.forget()
        with (
            settings.gap_method(method),
            settings.preconditioner_rank(rank),
            linear_operator.settings.cg_tolerance(1e-3),
        ):
            _, solves = loop(model, memory, 15, cold)
        assert len(solves) == 15
        assert all(report.converged and report.tolerance == 1e-3 for report in solves)
        count[cold] = sum(report.iterations for report in solves)
    assert 0 < count[False] < 0.8 * count[True], count


def test_an_own_loop_is_what_fit_does():
    ours, theirs = small(), small()
    torch.manual_seed(1)
    history = quiet(ours, 8, lr=0.03, warm_start=WarmStart())
    torch.manual_seed(1)
    losses, solves = loop(theirs, gaps.WarmStart(), 8)
    assert history.loss == losses
    assert same(ours, theirs)
    assert sum(history.iterations) >= sum(report.iterations for report in solves) > 0


def test_the_default_is_four_probes():
    ours, theirs, cold = small(), small(), small()
    torch.manual_seed(1)
    history = quiet(ours, 6, warm_start=True)
    torch.manual_seed(1)
    assert history.loss == quiet(theirs, 6, warm_start=WarmStart(num_probes=4, tolerance=None, seed=0)).loss
    assert same(ours, theirs)
    torch.manual_seed(1)
    assert quiet(cold, 6, warm_start=False).loss != history.loss


def test_exact_log_determinants_fit_as_without():
    ours, theirs = small(), small()
    with settings.logdet_method("exact"):
        warm, plain = quiet(ours, 6, warm_start=True), quiet(theirs, 6)
    assert warm.loss == plain.loss
    assert same(ours, theirs)
    assert max(warm.worst_residual) <= 1e-6


# -- checkpoints and interruptions -------------------------------------------------------------------------------------

WAYS = [("auto", None), ("fill", None), ("spectral", None), ("ignore", 0)]


def without_seconds(history):
    return {name: values for name, values in vars(history).items() if not name.endswith("seconds")}


def stop_after(model, steps):
    """Ctrl-C, once so many evaluations are done, in the midst of the next."""
    true_forward, calls = model.forward, []

    def forward(x):
        calls.append(1)
        if len(calls) > steps:
            model.forward = true_forward
            raise KeyboardInterrupt
        return true_forward(x)

    model.forward = forward


def whole_and_resumed(path, **arguments):
    """Nine steps at once, and nine interrupted after five: history, model and memory of each."""
    torch.manual_seed(5)
    whole, memory = small(), WarmStart(**arguments)
    torch.manual_seed(5)
    expected = quiet(whole, 9, warm_start=memory)
    model = small()
    stop_after(model, 5)
    torch.manual_seed(5)
    with pytest.raises(KeyboardInterrupt):
        quiet(model, 9, warm_start=WarmStart(**arguments), checkpoint=path, checkpoint_every=2)
    torch.manual_seed(999)
    resumed, other = small(), WarmStart(**arguments)
    history = quiet(resumed, 9, warm_start=other, checkpoint=path)
    return (expected, whole, memory), (history, resumed, other)


@pytest.mark.parametrize(("method", "rank"), WAYS)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(method, rank, tmp_path):
    with settings.gap_method(method), settings.preconditioner_rank(rank):
        (expected, whole, memory), (history, resumed, other) = whole_and_resumed(tmp_path / "run.pt")
    assert history.loss == expected.loss
    assert without_seconds(history) == without_seconds(expected)
    assert same(resumed, whole)
    assert same_memory(other, memory)


@pytest.mark.parametrize(
    "arguments", [{"tolerance": 1e-2}, *({"tolerance": to, "loosest": to} for to in (1e-4, 1e-6, 1e-8))], ids=str
)
def test_a_resumed_run_with_a_preconditioner_on_loan_is_the_uninterrupted_one_to_the_tolerance(arguments, tmp_path):
    """It sets up its own where the uninterrupted run goes on with one on loan; whatever the tolerance is, no more."""
    with settings.gap_method("ignore"), settings.preconditioner_rank(20):
        (expected, whole, memory), (history, resumed, other) = whole_and_resumed(tmp_path / "run.pt", **arguments)
    tolerance = memory.tolerance
    assert history.loss[:5] == expected.loss[:5]
    assert history.loss == pytest.approx(expected.loss, rel=0, abs=0.1 * tolerance)
    torch.testing.assert_close(raw(resumed), raw(whole), rtol=0, atol=tolerance)
    (path,), (wanted,) = other._paths.values(), memory._paths.values()
    assert torch.equal(path.cells, wanted.cells)
    assert torch.equal(path.start, wanted.start)
    assert abs(float(path.value - wanted.value)) <= tolerance * history.num_observations


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (False, True),
        (True, False),
        (True, WarmStart(5)),
        (True, WarmStart(seed=3)),
        (True, WarmStart(tolerance=0.1)),
        (True, WarmStart(loosest=0.3)),
    ],
    ids=lambda memory: str(memory) if isinstance(memory, bool) else "another",
)
def test_a_checkpoint_of_another_memory_is_refused_and_kept(first, second, tmp_path):
    path = tmp_path / "run.pt"
    quiet(small(), 2, warm_start=first, checkpoint=path)
    before, model = path.read_bytes(), small()
    untouched = states(model)
    with pytest.raises(ValueError, match="belongs to another run") as caught:
        quiet(model, 4, warm_start=second, checkpoint=path)
    there, here = ({True: WarmStart(), False: None}.get(given, given) for given in (first, second))
    assert f"warm start: {there} in the checkpoint, {here} here" in str(caught.value)
    assert path.read_bytes() == before
    assert same(model, untouched)


@pytest.mark.parametrize("value", [None, 1, "yes", WarmStart, 0.01])
def test_a_bad_warm_start_is_refused(value):
    with pytest.raises(ValueError, match=r"fit: warm_start: got .*, expected True, False or a WarmStart"):
        quiet(small(), 1, warm_start=value)


def test_an_interrupted_step_restores_the_memory():
    """The step is over for the memory, and the parameters are updated, but not accounted for."""
    model, memory, done = small(), WarmStart(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def interrupt(*_):
        done.append(memory.state_dict())
        if len(done) == 4:
            raise KeyboardInterrupt

    optimizer.register_step_post_hook(interrupt)
    torch.manual_seed(1)
    with pytest.raises(KeyboardInterrupt):
        quiet(model, 9, optimizer=optimizer, warm_start=memory)
    reference, expected = small(), WarmStart()
    torch.manual_seed(1)
    quiet(reference, 3, warm_start=expected)
    assert same(model, reference)
    assert same_memory(memory, expected)
    undone = done[-1]["paths"][0]["solutions"]
    assert not torch.equal(memory.state_dict()["paths"][0]["solutions"], undone)


def test_a_fit_that_goes_on_in_the_same_process_is_one_of_as_many_steps():
    """A ready optimizer and a memory hold all there is of a run."""
    model, whole, memory = small(), small(), WarmStart()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    parts = [quiet(model, 4, optimizer=optimizer, warm_start=memory) for _ in range(2)]
    torch.manual_seed(1)
    history = quiet(whole, 8, warm_start=WarmStart())
    assert parts[0].loss + parts[1].loss == history.loss
    assert same(model, whole)


def test_a_failed_step_leaves_a_memory_that_works():
    """A loss that is not a number enters neither the trail nor what is lent."""
    model, memory, count = small(), WarmStart(), []
    true_forward = model.forward

    def forward(x):
        count.append(1)
        output = true_forward(x)
        scale = float("nan") if len(count) == 4 else 1.0
        return gpytorch.distributions.MultivariateNormal(scale * output.mean, output.lazy_covariance_matrix)

    model.forward = forward
    with pytest.raises((gaps.FitError, ValueError)):
        quiet(model, 9, warm_start=memory)
    assert all(bool(value.isfinite().all()) for trail in memory.state_dict()["paths"] for value in trail.values())
    history = quiet(model, 3, warm_start=memory)
    assert all(torch.tensor(history.loss).isfinite())


def test_lbfgs_with_a_line_search_finds_the_optimum_of_fixed_probes():
    """The same probes at every evaluation: the loss is a function, and its gradient vanishes where it ends."""
    model, memory = small(), WarmStart(num_probes=8, tolerance=1e-6)

    def lbfgs(params, lr):
        return torch.optim.LBFGS(params, lr=lr, max_iter=10, line_search_fn="strong_wolfe")

    with linear_operator.settings.cg_tolerance(1e-6):
        history = quiet(model, 8, lr=1.0, optimizer=lbfgs, warm_start=memory)
        assert history.loss[-1] < history.loss[0]
        model.train()
        with settings.warm_start(memory):
            mll = ExactMarginalLogLikelihood(model.likelihood, model)
            (-mll(model(*model.train_inputs), model.train_targets)).backward()
    assert max(float(parameter.grad.abs().max()) for parameter in model.parameters()) < 1e-3
