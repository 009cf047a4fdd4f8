"""Gaps that get filled, values that are corrected, observations that come and go: right, and from the last solution."""

import copy
import pickle

import gpytorch
import linear_operator
import pytest
import torch
from gpytorch.kernels import LinearKernel, MaternKernel, ProductKernel, RBFKernel, ScaleKernel
from linear_operator.operators import ConstantDiagLinearOperator

import gpytorch_gaps as gaps
from gpytorch_gaps import settings
from gpytorch_gaps.operators import SelectedKroneckerOperator, SelectedKroneckerSumOperator
from tests import _dense as dense
from tests._covering import covering, in_turn
from tests.workflow._pairs import CASES, Model, PerLevelNoise, gappy, on, with_length

MAX_CHOLESKY = linear_operator.settings.max_cholesky_size
SUMS = ("a sum of two grid kernels", "a grid kernel plus LinearKernel")
WAYS = [("auto", 800), ("auto", 0), ("ignore", 0), ("fill", 0)]
SPREAD = [  # every case once, every way with some of them
    ("two axes", "fill", 0),
    ("three axes with a group", "auto", 0),
    ("an output axis", "auto", 800),
    ("a sum of two grid kernels", "auto", 0),
    ("a grid kernel plus LinearKernel", "ignore", 0),
    ("a noise per output", "fill", 0),
    ("a noise per point", "ignore", 0),
    ("a batch of three", "auto", 0),
]


# -- a model and what it must predict ----------------------------------------------------------------------------------


def solutions_of(model):
    """What the kernels of a model remember, by settings."""
    kernels = [module for module in model.modules() if isinstance(module, gaps.GappyGridKernel)]
    return {key: value for kernel in kernels for key, value in kernel.solutions._known.items()}


def conditioned(case, rows):
    """A pair's model of ours that has only ever seen some of the observations, and the pair, with all of them."""
    pair, part = CASES[case](small=True), CASES[case](small=True).ours
    condition(pair, part, rows)
    pair.test_x = pair.test_x[::8]  # 8 cells, 2 other points
    return pair, part.eval()


def condition(pair, model, rows, y=None):
    """Gives a model some of a pair's observations, in that order."""
    (x,), values = pair.ours.train_inputs, pair.ours.train_targets if y is None else y
    if pair.ours.likelihood.noise.size(-1) == values.size(-1):
        model.likelihood = gaps.GappyGridLikelihood(pair.ours.likelihood.noise[rows])
    model.set_train_data(x[rows], values[..., rows], strict=False)


def by_the_book(pair, x, y, noise):
    """Mean and variance at the test points by dense algebra. :param noise: a variance each, shape (*batch, N)."""
    with torch.no_grad():
        joint = pair.dense.forward(torch.cat([x, pair.test_x]))
        covariance, n = joint.covariance_matrix, len(x)
        observed = covariance[..., :n, :n] + torch.diag_embed(noise.expand(*covariance.shape[:-2], n))
        weights = torch.linalg.solve(observed, covariance[..., :n, n:])
        mean = joint.mean[..., n:] + (weights.mT @ (y - joint.mean[..., :n]).unsqueeze(-1)).squeeze(-1)
        explained = (weights * covariance[..., :n, n:]).sum(-2)
        return mean, covariance[..., n:, n:].diagonal(dim1=-2, dim2=-1) - explained


def noise_at(pair, x, rows=slice(None)):
    likelihood = pair.dense.likelihood
    if isinstance(likelihood, PerLevelNoise):
        return likelihood.noise[x[:, -1].long()]
    noise = likelihood.noise
    return noise[rows] if noise.size(-1) == pair.ours.train_targets.size(-1) else noise


def check(model, pair, expected, tolerance=1e-6):
    with torch.no_grad():
        posterior = model(pair.test_x)
        for got, value in zip((posterior.mean, posterior.variance), expected, strict=True):
            assert got.shape == value.shape
            assert torch.allclose(got.double(), value, rtol=tolerance, atol=tolerance)


# -- the same as from scratch ------------------------------------------------------------------------------------------

N = 90  # observations that the changes below are about; all cases have more
CHANGES = {  # which are left, one after the other
    "the first": [i for i in range(N - 9) if i % 20],
    "added in between": range(N - 9),
    "added at the end": range(N),
    "reordered": range(N - 1, -1, -1),
    "removed": range(9, N),
    "some removed, some added": range(N - 5),
    "one left": [17],
}


@pytest.mark.parametrize(
    ("case", "method", "max_cholesky"),
    sorted({*SPREAD, *(("two axes", *way) for way in WAYS)}),
)
def test_observations_that_come_and_go(case, method, max_cholesky):
    """Whichever come and go, as by dense algebra without any history."""
    pair, model = conditioned(case, slice(0, N))
    (x,), y = pair.ours.train_inputs, pair.ours.train_targets
    assert len(x) > N
    for name, left in CHANGES.items():
        rows = torch.tensor(list(left))
        condition(pair, model, rows)
        expected = by_the_book(pair, x[rows], y[..., rows], noise_at(pair, x[rows], rows))
        with (
            settings.gap_method(method),
            settings.solve_tolerance(1e-9),
            MAX_CHOLESKY(max_cholesky),
            gaps.record_solves() as solves,
        ):
            check(model, pair, expected)
        assert all(report.converged for report in solves), name
        if case not in SUMS and max_cholesky == 0 and name.startswith(("added", "reordered")):
            assert ", from " in solves[0].reason or solves[0].reason == "the guess is a solution", name


@pytest.mark.parametrize(("case", "method", "max_cholesky"), SPREAD)
def test_fantasies_of_a_model_and_of_a_fantasy(case, method, max_cholesky):
    """Once, again from the same model, and a fantasy of a fantasy."""
    pair, model = conditioned(case, slice(0, N))
    (x,), y = pair.ours.train_inputs, pair.ours.train_targets
    given = pair.ours.likelihood.noise if case == "a noise per point" else None

    def fantasy_of(parent, rows):
        kwargs = {} if given is None else {"noise": given[rows]}
        return parent.get_fantasy_model(x[rows], y[..., rows], **kwargs)

    def expected(*parts):
        rows = torch.cat([torch.arange(N), *(torch.arange(part.start, part.stop) for part in parts)])
        return by_the_book(pair, x[rows], y[..., rows], noise_at(pair, x[rows], rows))

    first, second = slice(N, N + 9), slice(N + 9, N + 14)
    with settings.gap_method(method), settings.solve_tolerance(1e-9), MAX_CHOLESKY(max_cholesky):
        check(model, pair, expected())
        fantasy = fantasy_of(model, first)
        check(fantasy, pair, expected(first))
        check(fantasy_of(fantasy, second), pair, expected(first, second))
        check(fantasy_of(model, second), pair, expected(second))
        model.train()
        check(model.eval(), pair, expected())  # from the solution with more observations


@pytest.mark.parametrize(("case", "method", "max_cholesky"), SPREAD)
def test_corrected_values_are_solved_for_again(case, method, max_cholesky):
    pair, model = conditioned(case, slice(0, N))
    (x,), y = pair.ours.train_inputs, pair.ours.train_targets
    x, y, noise = x[:N], y[..., :N], noise_at(pair, x[:N], slice(0, N))
    corrected = y.clone()
    corrected[..., ::40] += 0.7
    with settings.gap_method(method), settings.solve_tolerance(1e-9), MAX_CHOLESKY(max_cholesky):
        with torch.no_grad():
            model(pair.test_x).mean  # noqa: B018
        for values in (corrected, torch.zeros_like(y), y):
            model.set_train_data(targets=values)
            check(model, pair, by_the_book(pair, x, values, noise))


@pytest.mark.parametrize(("case", "method", "max_cholesky"), SPREAD)
def test_changed_hyperparameters_are_solved_for_again(case, method, max_cholesky):
    """The last solution is then of another matrix, and only a guess."""
    pair, model = conditioned(case, slice(0, N))
    (x,), y = pair.ours.train_inputs, pair.ours.train_targets
    with settings.gap_method(method), settings.solve_tolerance(1e-9), MAX_CHOLESKY(max_cholesky):
        with torch.no_grad():
            model(pair.test_x).mean  # noqa: B018
        for step in (0.05, -1.5):
            model.train()
            with torch.no_grad():
                for ours, other in zip(model.parameters(), pair.dense.parameters(), strict=True):
                    ours.add_(step)
                    other.copy_(ours)
            check(model.eval(), pair, by_the_book(pair, x[:N], y[..., :N], noise_at(pair, x[:N], slice(0, N))))


@pytest.mark.parametrize(("method", "max_cholesky"), [way for way in WAYS if way[0] != "fill"])
@pytest.mark.parametrize("case", ["two axes", *SUMS])
def test_repeated_cells_and_points_off_the_grid(case, method, max_cholesky):
    """Added, joined by others, reordered, and removed again."""
    pair, model = conditioned(case, slice(0, N))
    (x,), y = pair.ours.train_inputs, pair.ours.train_targets
    noise = pair.dense.likelihood.noise
    more = torch.cat([x[:4], x[2:3], x[5:9] + 0.013, pair.test_x[-2:], pair.test_x[-1:] + 0.1])
    values = dense.randn(len(more))
    with settings.gap_method(method), settings.solve_tolerance(1e-9), MAX_CHOLESKY(max_cholesky):
        check(model, pair, by_the_book(pair, x[:N], y[:N], noise))
        for count in (5, 12):
            fantasy = model.get_fantasy_model(more[:count], values[:count])
            joint = torch.cat([x[:N], more[:count]]), torch.cat([y[:N], values[:count]])
            check(fantasy, pair, by_the_book(pair, *joint, noise))
        for rows in (slice(None), torch.arange(len(joint[0])).flip(0), slice(3, None), slice(0, N)):
            model.set_train_data(joint[0][rows], joint[1][rows], strict=False)
            check(model, pair, by_the_book(pair, joint[0][rows], joint[1][rows], noise))


@pytest.mark.parametrize(("method", "max_cholesky"), WAYS)
def test_batches_of_fantasies(method, max_cholesky):
    """Several values at the same new points, and several of these."""
    pair, model = conditioned("two axes", slice(0, N))
    (x,), y = pair.ours.train_inputs, pair.ours.train_targets
    noise = pair.dense.likelihood.noise
    values = torch.stack([y[N : N + 6], y[N : N + 6] + 1.0, dense.randn(6)])
    with settings.gap_method(method), settings.solve_tolerance(1e-9), MAX_CHOLESKY(max_cholesky):
        check(model, pair, by_the_book(pair, x[:N], y[:N], noise))
        fantasies = model.get_fantasy_model(x[N : N + 6], values)
        again = fantasies.get_fantasy_model(
            x[N + 6 : N + 8].expand(3, 2, -1).contiguous(), torch.stack([values[:, 0], values[:, 3]], -1)
        )
        with torch.no_grad():
            results = [
                (posterior.mean, posterior.variance) for posterior in (fantasies(pair.test_x), again(pair.test_x))
            ]
        for member, own in enumerate(values):
            for (mean, variance), count in zip(results, (6, 8), strict=True):
                targets = torch.cat([y[:N], own, own[[0, 3]]])[: N + count]
                expected = by_the_book(pair, x[: N + count], targets, noise)
                assert mean.shape == (3, len(pair.test_x))
                assert torch.allclose(mean[member], expected[0], rtol=1e-6, atol=1e-6)
                assert torch.allclose(variance[member], expected[1], rtol=1e-6, atol=1e-6)
        check(model, pair, by_the_book(pair, x[:N], y[:N], noise))


@in_turn(case=CASES, max_cholesky=[0, 800])
def test_float32_models_take_new_observations(case, max_cholesky):
    pair, model = conditioned(case, slice(0, N - 9))
    (x,), y = pair.ours.train_inputs, pair.ours.train_targets
    expected = by_the_book(pair, x[:N], y[..., :N], noise_at(pair, x[:N], slice(0, N)))
    with torch.no_grad(), MAX_CHOLESKY(max_cholesky):
        model(pair.test_x).mean  # noqa: B018  # in float64: no start for float32
        model.train()
        model = model.float().eval()
        points = pair.test_x.float()
        model(points).mean  # noqa: B018
        if case == "a noise per point":
            model.likelihood = gaps.GappyGridLikelihood(pair.ours.likelihood.noise[:N].float())
        model.set_train_data(x[:N].float(), y[..., :N].float(), strict=False)
        posterior = model(points)
        assert posterior.mean.dtype == torch.float32
        assert torch.allclose(posterior.mean.double(), expected[0], atol=1e-4)
        assert torch.allclose(posterior.variance.double(), expected[1], atol=1e-3)


@pytest.mark.parametrize("case", CASES)
def test_after_inference_mode(case):
    """What is remembered from there starts solves that are differentiated."""
    pair, model = conditioned(case, slice(0, N - 9))
    (x,), y = pair.ours.train_inputs, pair.ours.train_targets
    with MAX_CHOLESKY(0), settings.solve_tolerance(1e-9):
        with torch.inference_mode():
            model(pair.test_x).mean  # noqa: B018
        assert solutions_of(model)
        condition(pair, model, slice(0, N))
        with gpytorch.settings.detach_test_caches(False):
            mean = model(pair.test_x).mean
    expected, _ = by_the_book(pair, x[:N], y[..., :N], noise_at(pair, x[:N], slice(0, N)))
    assert torch.allclose(mean, expected, rtol=1e-6, atol=1e-6)
    gradients = torch.autograd.grad(mean.sum(), list(model.parameters()), allow_unused=True)
    assert all(bool(gradient.isfinite().all()) for gradient in gradients if gradient is not None)


@pytest.mark.parametrize(("case", "method", "max_cholesky"), SPREAD)
def test_gradients_of_a_warm_mean(case, method, max_cholesky):
    """Are those of a cold one: where a solve starts is no part of what it solves."""
    results = []
    for warm in (True, False):
        pair, model = conditioned(case, slice(0, N - 9) if warm else slice(0, N))
        x = pair.test_x.clone().requires_grad_("an output axis" not in case and "per output" not in case)
        with (
            settings.gap_method(method),
            settings.solve_tolerance(1e-10),
            MAX_CHOLESKY(max_cholesky),
            gpytorch.settings.detach_test_caches(False),
        ):
            if warm:
                model(x).mean  # noqa: B018
                condition(pair, model, slice(0, N))
            mean = model(x).mean
            inputs = [*model.parameters(), *([x] if x.requires_grad else [])]
            gradients = torch.autograd.grad((mean * dense.randn(len(x))).sum(), inputs, allow_unused=True)
            results.append([mean, *(gradient for gradient in gradients if gradient is not None)])
    assert len(results[0]) == len(results[1]) > 3
    for got, expected in zip(*results, strict=True):
        assert torch.allclose(got, expected, rtol=1e-6, atol=1e-6)


# -- copies ------------------------------------------------------------------------------------------------------------


@in_turn(case=CASES, how=[copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_start_without_solutions(case, how):
    pair, model = conditioned(case, slice(0, N))
    with torch.no_grad(), MAX_CHOLESKY(0), settings.solve_tolerance(1e-9):
        with gaps.record_solves() as cold:
            mean = model(pair.test_x).mean
        twin = how(model)
        assert len(solutions_of(model)) == 1
        assert not solutions_of(twin)
        twin.train()
        with gaps.record_solves() as solves:
            assert torch.allclose(twin.eval()(pair.test_x).mean, mean, rtol=1e-9, atol=1e-9)
        assert solves[0].iterations == cold[0].iterations > 0
        assert len(solutions_of(twin)) == 1


def test_few_solutions_are_kept():
    pair, model = conditioned("two axes", slice(0, N))
    with torch.no_grad(), MAX_CHOLESKY(0):
        for tolerance in (1e-3, 1e-4, 1e-5, 1e-6):
            with settings.solve_tolerance(tolerance):
                model(pair.test_x).mean  # noqa: B018
        assert len(solutions_of(model)) == 2


# -- fewer iterations --------------------------------------------------------------------------------------------------

SHAPE = (60, 50)
KERNELS = {"RBF": RBFKernel, "Matern-3/2": lambda: MaternKernel(nu=1.5), "Matern-5/2": MaternKernel}
PROBLEMS = [(k, pattern, noise) for k in KERNELS for pattern in ("random", "block") for noise in (1e-1, 1e-2)]


class Problem:
    """A grid of which 60 % is observed, and another 1 % that comes later."""

    def __init__(self, kernel, pattern, noise):
        self.kernel, self.noise = KERNELS[kernel], noise
        axes = [torch.linspace(0, 1, size, dtype=torch.float64) for size in SHAPE]
        self.grid = gaps.CartesianGrid(axes)
        smooth = torch.sin(5 * axes[0]).unsqueeze(-1) + torch.cos(4 * axes[1])
        self.y = (smooth + noise**0.5 * dense.randn(*SHAPE)).flatten()
        self.known = dense.observed(pattern, SHAPE)
        left = dense.gaps_of(self.known, SHAPE)
        picked = torch.randperm(len(left), generator=torch.Generator().manual_seed(5))
        self.new = left[picked[: len(self.known) // 100]]
        self.all = torch.cat([self.known, self.new])

    def model(self, cells):
        kernel = gaps.GappyGridKernel([with_length(self.kernel(), 0.2), with_length(self.kernel(), 0.2)], self.grid)
        model = Model(self.grid.points(cells), self.y[cells], gaps.GappyGridLikelihood(), ScaleKernel(kernel)).double()
        model.likelihood.noise = self.noise
        return model.eval()

    def predict(self, model):
        """The mean everywhere, and the report of the solve it took."""
        with torch.no_grad(), MAX_CHOLESKY(0), gaps.record_solves() as solves:
            mean = model(self.grid.points()).mean
        (report,) = solves
        assert report.converged
        return mean, report

    def cold(self, cells, y=None):
        model = self.model(cells)
        if y is not None:
            model.set_train_data(targets=y)
        return self.predict(model)

    def warm(self, cells):
        """A model that has predicted."""
        model = self.model(cells)
        self.predict(model)
        return model


def same(mean, expected, tolerance=3e-5):
    """As far as solves to 1e-6 tell."""
    assert torch.allclose(mean, expected, rtol=0, atol=tolerance)


def additions(problem):
    """The solve with 1 % more, both ways."""
    model = problem.warm(problem.known)
    fantasy = model.get_fantasy_model(problem.grid.points(problem.new), problem.y[problem.new])
    yield problem.predict(fantasy)
    model = problem.warm(problem.known)
    model.set_train_data(problem.grid.points(problem.all), problem.y[problem.all], strict=False)
    yield problem.predict(model)


@pytest.mark.parametrize(("kernel", "pattern", "noise"), PROBLEMS)
def test_one_percent_more_takes_half_the_iterations(kernel, pattern, noise):
    """A residual of 2.5e-2 at the start leaves 73 % of the iterations: the rest is a higher rank."""
    problem = Problem(kernel, pattern, noise)
    expected, cold = problem.cold(problem.all)
    for mean, report in additions(problem):
        same(mean, expected)
        assert report.method == "ignore"
        assert 2 * report.iterations <= cold.iterations
        assert report.iterations < cold.iterations
        assert report.worst_residual <= 1e-6


@covering(kernel=KERNELS, pattern=["random", "block"], noise=[1e-1, 1e-2])
def test_other_changes_of_the_data(kernel, pattern, noise):
    """Nothing changed, a little, or all of it."""
    problem = Problem(kernel, pattern, noise)
    expected, _ = problem.cold(problem.all)
    model, y = problem.warm(problem.all), problem.y[problem.all]
    model.train()
    mean, report = problem.predict(model.eval())
    same(mean, expected)
    assert report.iterations == 0
    model.set_train_data(problem.grid.points(problem.all.flip(0)), y.flip(0))
    mean, report = problem.predict(model)
    same(mean, expected)
    assert report.iterations == 0
    # a few values corrected
    corrected = y.clone()
    corrected[::500] += 0.01
    model = problem.warm(problem.all)
    model.set_train_data(targets=corrected)
    mean, report = problem.predict(model)
    expected, again = problem.cold(problem.all, corrected)
    same(mean, expected)
    assert report.iterations < again.iterations
    # useless guesses, of a residual a little above and a little below one
    shuffled = y[torch.randperm(len(y), generator=torch.Generator().manual_seed(1))]
    for unrelated in (-1000.0 * shuffled, 1000.0 * shuffled):
        model = problem.warm(problem.all)
        model.set_train_data(targets=unrelated)
        mean, report = problem.predict(model)
        expected, again = problem.cold(problem.all, unrelated)
        same(mean, expected, 3e-2)
        assert report.iterations <= again.iterations + 1


@covering(kernel=KERNELS, pattern=["random", "block"], noise=[1e-1, 1e-2])
def test_one_percent_less_does_no_harm(kernel, pattern, noise):
    problem = Problem(kernel, pattern, noise)
    expected, cold = problem.cold(problem.known)
    model = problem.warm(problem.all)
    model.set_train_data(problem.grid.points(problem.known), problem.y[problem.known], strict=False)
    mean, report = problem.predict(model)
    same(mean, expected)
    assert report.iterations <= cold.iterations


@pytest.mark.parametrize(("kernel", "pattern", "noise"), [p for p in PROBLEMS if p[2] == 1e-2 and p[0] != "RBF"])
def test_comparing_methods_compares_them(kernel, pattern, noise):
    """Another method does not start where the last one has arrived; the same one on new data does."""
    problem = Problem(kernel, pattern, noise)
    model, alone, means = problem.warm(problem.known), {}, {}
    for method in ("fill", "ignore"):
        with settings.gap_method(method):
            _, alone[method] = problem.cold(problem.known)
            means[method], report = problem.predict(model)
        assert report.method == method
        assert report.iterations == alone[method].iterations > 1
        assert "from" not in report.reason
    same(means["fill"], means["ignore"])
    model.set_train_data(problem.grid.points(problem.all), problem.y[problem.all], strict=False)
    for method in ("fill", "ignore"):
        with settings.gap_method(method):
            _, report = problem.predict(model)
            _, cold = problem.cold(problem.all)
        assert report.method == cold.method == method
        assert report.iterations < cold.iterations
        assert ", from " in report.reason


def test_another_tolerance_starts_from_nothing():
    problem = Problem("Matern-3/2", "random", 1e-2)
    model = problem.warm(problem.known)
    with settings.solve_tolerance(1e-9):
        _, report = problem.predict(model)
        _, cold = problem.cold(problem.known)
    assert report.iterations == cold.iterations


@pytest.mark.parametrize(
    "context",
    [
        settings.variance_method("pathwise"),
        settings.variance_samples(8),
        settings.prediction_memory(1e9),
        settings.logdet_method("exact"),
        settings.train_tolerance(1e-3),
    ],
    ids=lambda context: type(context).__name__,
)
def test_settings_that_a_mean_does_not_depend_on(context):
    """Neither solve it anew, nor forget where to start."""
    problem = Problem("Matern-3/2", "random", 1e-2)
    model = problem.warm(problem.known)
    with torch.no_grad(), MAX_CHOLESKY(0), context, gaps.record_solves() as solves:
        model(problem.grid.points()).mean  # noqa: B018
    assert len(solves) == 0
    model.set_train_data(problem.grid.points(problem.all), problem.y[problem.all], strict=False)
    with context:
        _, report = problem.predict(model)
    assert ", from " in report.reason


@pytest.mark.parametrize("case", CASES)
def test_every_case_takes_fewer_iterations(case):
    """Also sums, batches, and noises of their own."""
    pair, model = conditioned(case, slice(0, N))
    y = model.train_targets
    iterations = []
    with torch.no_grad(), MAX_CHOLESKY(0), settings.gap_method("ignore"), settings.preconditioner_rank(4):
        for values in (y, y + 1e-4 * dense.randn(N), y):
            model.set_train_data(targets=values)
            with gaps.record_solves() as solves:
                model(pair.test_x).mean  # noqa: B018
            iterations.append(solves[0].iterations)
    assert 0 < iterations[1] < iterations[0]
    assert 0 < iterations[2] < iterations[0]


def test_a_fantasy_of_a_fantasy_starts_from_the_first():
    problem = Problem("Matern-3/2", "random", 1e-2)
    points, half = problem.grid.points(problem.new), len(problem.new) // 2
    fantasy = problem.warm(problem.known).get_fantasy_model(points[:half], problem.y[problem.new[:half]])
    problem.predict(fantasy)
    _, report = problem.predict(fantasy.get_fantasy_model(points[half:], problem.y[problem.new[half:]]))
    _, cold = problem.cold(problem.all)
    assert report.iterations < cold.iterations


# -- operators ---------------------------------------------------------------------------------------------------------

GRID = (9, 8)
INDEX = dense.observed("random", GRID)
ROWS = len(INDEX)
FACTORS = [[dense.matern32(9), dense.se(8, 0.4)], [dense.ard(9), dense.matern32(8, 0.1)]]
METHODS = {"one": ["auto", "fill", "ignore", "cholesky"], "sum": ["auto", "ignore", "cholesky"]}
EVERY_OPERATOR = [(kind, method) for kind, methods in METHODS.items() for method in methods]


def operator(kind, factors, noise):
    """One Kronecker product with noise, or a sum of two."""
    if kind == "one":
        return dense.build(factors[0], INDEX, noise)
    parts = [SelectedKroneckerOperator(*own, row_index=INDEX, col_index=INDEX) for own in factors]
    return SelectedKroneckerSumOperator(*parts) + ConstantDiagLinearOperator(noise, diag_shape=ROWS)


def matrix(kind, factors, noise):
    kernel = sum(dense.select(dense.kron(own), INDEX) for own in factors[: 1 if kind == "one" else 2])
    return kernel + noise * torch.eye(ROWS, dtype=torch.float64)


@in_turn(operator_and_method=EVERY_OPERATOR, shape=[(ROWS,), (ROWS, 1), (ROWS, 3), (2, ROWS, 3), (2, 3, ROWS, 1)])
def test_a_guess_saves_iterations_and_changes_nothing(operator_and_method, shape):
    """An exact one takes no iterations, a wrong one changes nothing."""
    kind, method = operator_and_method
    noise = torch.tensor([0.03], dtype=torch.float64)
    own, full, rhs = operator(kind, FACTORS, noise), matrix(kind, FACTORS, noise), dense.randn(*shape)
    column = rhs.dim() == 1
    exact = torch.linalg.solve(full, rhs.unsqueeze(-1) if column else rhs)
    exact = exact.squeeze(-1) if column else exact
    nearly = exact + 1e-4 * dense.randn(*shape, seed=1)
    with settings.gap_method(method), settings.solve_tolerance(1e-10), MAX_CHOLESKY(0):
        with gaps.record_solves() as solves:
            assert torch.allclose(own.solve(rhs, guess=exact), exact, rtol=1e-9, atol=1e-9)
            (report,) = solves
            assert report.iterations == 0
            assert report.worst_residual <= 1e-10
        for guess in (torch.zeros_like(rhs), nearly, 1e9 * exact, -exact, dense.randn(*shape, seed=2)):
            with gaps.record_solves() as solves:
                solution = own.solve(rhs, guess=guess)
            assert solution.shape == rhs.shape
            assert solves[0].converged
            assert torch.allclose(solution, exact, rtol=1e-7, atol=1e-7)
        left = dense.randn(2, ROWS, seed=3)
        assert torch.allclose(own.solve(rhs, left, guess=nearly), left @ exact, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize(("kind", "method"), EVERY_OPERATOR)
def test_a_guess_that_suits_one_column_only(kind, method):
    """And a column of zeros, whose solution is known."""
    noise = torch.tensor([0.03], dtype=torch.float64)
    own, full, rhs = operator(kind, FACTORS, noise), matrix(kind, FACTORS, noise), dense.randn(ROWS, 3)
    rhs[:, 2] = 0.0
    exact = torch.linalg.solve(full, rhs)
    guess = exact.clone()
    guess[:, 1] = 1e6 * dense.randn(ROWS, seed=1)
    with settings.gap_method(method), settings.solve_tolerance(1e-10), MAX_CHOLESKY(0):
        for start in (exact, guess, exact + 1.0):
            assert torch.allclose(own.solve(rhs, guess=start), exact, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("guessed", ["exact", "close", "wrong"])
@pytest.mark.parametrize(("kind", "method"), EVERY_OPERATOR)
def test_gradients_know_nothing_of_a_guess(kind, method, guessed):
    rhs, weights, noise = dense.randn(ROWS, 2), dense.randn(ROWS, 2, seed=1), torch.tensor([0.05], dtype=torch.float64)
    exact = torch.linalg.solve(matrix(kind, FACTORS, noise), rhs)
    guess = {"exact": exact, "close": exact + 1e-3, "wrong": dense.randn(ROWS, 2, seed=2)}[guessed].requires_grad_()
    results = []
    for ours in (True, False):
        b, level = dense.leaves(rhs, noise)
        factors = [dense.leaves(*own) for own in FACTORS]
        used = factors[: 1 if kind == "one" else 2]
        with settings.gap_method(method), settings.solve_tolerance(1e-11), MAX_CHOLESKY(0):
            if ours:
                solution = operator(kind, factors, level).solve(b, guess=guess)
            else:
                solution = torch.linalg.solve(matrix(kind, factors, level), b)
            inputs = [*(factor for own in used for factor in own), b, level]
            results.append([solution, *dense.gradients((solution * weights).sum(), inputs, 2 * len(used))])
    for got, expected in zip(*results, strict=True):
        assert torch.allclose(got, expected, rtol=1e-7, atol=1e-7)
    assert guess.grad is None


def test_a_batch_of_operators():
    """Each member from its own guess, or all from one."""
    factors = [dense.random_psd(9, batch=(2,)), dense.random_psd(8, seed=1, batch=(2,))]
    noise = torch.tensor([[0.02], [0.1]], dtype=torch.float64)
    own, full = dense.build(factors, INDEX, noise), dense.system(factors, INDEX, noise)
    rhs = dense.randn(2, ROWS, 1)
    exact = torch.linalg.solve(full, rhs)
    with settings.gap_method("ignore"), settings.solve_tolerance(1e-10), gaps.record_solves() as solves:
        for guess in (exact, exact[0], dense.randn(2, ROWS, 1, seed=1)):
            assert torch.allclose(own.solve(rhs, guess=guess), exact, rtol=1e-7, atol=1e-7)
    assert solves[0].iterations == 0 < solves[1].iterations


def test_a_sum_with_a_linear_kernel_starts_from_the_last_solution():
    """Where the term is of low rank, on data that grow."""
    grid, x, y = gaps.from_array(*reversed(gappy((30, 24), 0.4, 0)))

    def model(rows, plain=False):
        if plain:
            kernel = ScaleKernel(ProductKernel(on(0, MaternKernel, 0.2), on(1, MaternKernel, 0.2)))
        else:
            kernel = ScaleKernel(
                gaps.GappyGridKernel([with_length(MaternKernel(), 0.2), with_length(MaternKernel(), 0.2)], grid)
            )
        likelihood = gpytorch.likelihoods.GaussianLikelihood() if plain else gaps.GappyGridLikelihood()
        made = Model(x[rows], y[rows], likelihood, kernel + LinearKernel()).double()
        made.likelihood.noise = 0.01
        return made.eval()

    few, everything, plain = model(slice(0, -4)), model(slice(None)), model(slice(None), plain=True)
    with torch.no_grad(), MAX_CHOLESKY(0):
        few(grid.points()).mean  # noqa: B018
        with gaps.record_solves() as warm:
            mean = few.get_fantasy_model(x[-4:], y[-4:])(grid.points()).mean
        with gaps.record_solves() as cold:
            everything(grid.points()).mean  # noqa: B018
    assert warm[0].iterations < cold[0].iterations
    with torch.no_grad(), MAX_CHOLESKY(10_000):
        assert torch.allclose(mean, plain(grid.points()).mean, atol=3e-5)
