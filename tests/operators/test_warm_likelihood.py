"""Likelihoods from one step's solutions to the next, against dense float64.

The gradient of the log-determinant is Hutchinson's: with the same probes, written out densely, it must be the same
number, so that no tolerance has to make room for its spread. Solves are asked for a residual of 1e-10 and compared at
1e-7. Log-determinants are estimated even where they would be exact.
"""

import gpytorch
import linear_operator
import pytest
import torch
from gpytorch.mlls import ExactMarginalLogLikelihood

from gpytorch_gaps import WarmStart, record_solves, settings
from gpytorch_gaps.operators import SelectedKroneckerOperator
from tests import _dense as dense
from tests._covering import in_turn
from tests.workflow import _pairs

TIGHT = 1e-10
CLOSE = 1e-7


@pytest.fixture(autouse=True)
def _stochastic():
    torch.manual_seed(0)
    with linear_operator.settings.max_cholesky_size(0), settings.logdet_method("stochastic"):
        yield


def names(model):
    return [name for name, _ in model.named_parameters()]


def gradients(value, model):
    found = torch.autograd.grad(value, list(model.parameters()))
    return dict(zip(names(model), found, strict=True))


def ours(model, memory):
    """The log marginal likelihood of each observation, and its gradients."""
    model.train()
    with settings.warm_start(memory):
        value = ExactMarginalLogLikelihood(model.likelihood, model)(model(*model.train_inputs), model.train_targets)
        return value.detach(), gradients(value.sum(), model)


def covariance(model):
    """The mean, and the covariance of the observations in full. Differentiable."""
    model.train()
    prior = model.likelihood(model(*model.train_inputs), *model.train_inputs)
    return prior.mean, prior.covariance_matrix


def by_hand(model, probes):
    """The same, dense: ``y'A^-1 y`` and, for the log-determinant's gradient, ``mean_j z_j' A^-1 dA z_j``."""
    mean, matrix = covariance(model)
    residual = (model.train_targets - mean).unsqueeze(-1)
    quad = (residual * torch.linalg.solve(matrix, residual)).sum()
    solutions = torch.linalg.solve(matrix.detach(), probes)
    trace = (solutions * (matrix @ probes)).sum() / probes.size(-1)
    return quad.detach(), gradients(-0.5 * (quad + trace) / len(residual), model)


def check(got, expected, tolerance=CLOSE):
    scale = max(float(value.norm()) for value in expected.values())
    for (name, value), wanted in zip(got.items(), expected.values(), strict=True):
        error = float((value - wanted).norm())
        assert error <= tolerance * max(float(wanted.norm()), 1e-3 * scale), f"{name}: {error:.1e}, {wanted}"


GRIDS = {"two axes": _pairs.two_axes, "a noise per output": _pairs.noise_per_output}
SUMS = {"a sum of two": _pairs.sum_of_two, "plus LinearKernel": _pairs.plus_linear}
FILLING = ("auto", "fill", "ignore", "spectral", "penalize")
CASES = [
    *((name, method) for name in GRIDS for method in FILLING),
    *((name, method) for name in SUMS for method in ("auto", "ignore", "cholesky")),
    ("a noise per point", "auto"),
    ("a noise per point", "ignore"),
]
MAKE = GRIDS | SUMS | {"a noise per point": _pairs.noise_per_point}


@pytest.mark.parametrize(("name", "method"), CASES)
def test_gradients_are_those_of_dense_algebra_with_the_same_probes(name, method):
    pair, memory = MAKE[name](small=True), WarmStart(num_probes=3)
    probes = memory.probes(len(pair.dense.train_targets), torch.zeros((), dtype=torch.float64))
    with settings.gap_method(method), linear_operator.settings.cg_tolerance(TIGHT):
        for lift in (0.0, 0.02):  # from nothing, and from a guess at other hyperparameters
            for model in pair.both():
                for parameter in model.parameters():
                    parameter.data += lift
            _, got = ours(pair.ours, memory)
            _, expected = by_hand(pair.dense, probes)
            check(got, expected)
    assert any("mean" in name for name in got)


@pytest.mark.parametrize("name", [*GRIDS, *SUMS])
def test_solves_settle_to_the_tolerance_of_the_warm_start(name):
    """Without a step of the hyperparameters each evaluation goes a part of the way, and then no further."""
    pair, memory = MAKE[name](small=True), WarmStart(num_probes=2, tolerance=1e-8)
    probes = memory.probes(len(pair.dense.train_targets), torch.zeros((), dtype=torch.float64))
    mean, matrix = covariance(pair.dense)
    columns = torch.cat([(pair.dense.train_targets - mean).unsqueeze(-1), probes], -1).detach()
    for _ in range(40):
        with record_solves() as record:
            value, got = ours(pair.ours, memory)
        if all(report.tolerance == 1e-8 for report in record):
            break
    trail = memory._paths[len(columns)]
    left = columns - matrix.detach() @ memory.guess(trail.cells, columns[:, :1])
    assert float((left.norm(dim=0) / columns.norm(dim=0)).max()) < 1.01e-8
    _, expected = by_hand(pair.dense, probes)
    check(got, expected, 1e-5)
    with record_solves() as record:
        again, _ = ours(pair.ours, memory)
    assert sum(report.iterations for report in record) == 0
    assert float(again) == pytest.approx(float(value), rel=1e-9)


# -- values ------------------------------------------------------------------------------------------------------------

SHAPE = (9, 8)
INDEX = dense.observed("random", SHAPE)


def parts(theta=0.3, noise=0.05, scale=1.0):
    return [scale * dense.se(SHAPE[0], theta), dense.matern32(SHAPE[1])], torch.tensor([noise], dtype=torch.float64)


@pytest.mark.parametrize("tolerance", [1e-1, 1e-2, 1e-3])
@pytest.mark.parametrize("method", ["ignore", "fill", "spectral"])
def test_an_error_of_the_solution_enters_the_quadratic_form_squared(method, tolerance):
    """``2 a'y - a'A a`` falls short of ``y'A^-1 y`` by ``r'A^-1 r``, of the residual r that was left."""
    factors, noise = parts()
    memory, rhs = WarmStart(num_probes=1), dense.randn(len(INDEX), 1)
    with (
        settings.gap_method(method),
        settings.preconditioner_rank(0),
        linear_operator.settings.cg_tolerance(tolerance),
        settings.warm_start(memory),
    ):
        quad, _ = dense.build(factors, INDEX, noise).inv_quad_logdet(rhs, logdet=True)
    matrix = dense.system(factors, INDEX, noise)
    exact = float((rhs * torch.linalg.solve(matrix, rhs)).sum())
    left = rhs - matrix @ memory.guess(INDEX, rhs)[:, :1]
    short = float((left * torch.linalg.solve(matrix, left)).sum())
    assert exact - float(quad) == pytest.approx(short, rel=1e-6, abs=1e-11 * exact)
    assert 0.0 < float(left.norm() / rhs.norm()) <= tolerance
    assert short <= (tolerance * float(rhs.norm())) ** 2 / 0.05


@pytest.mark.parametrize("reduce_inv_quad", [True, False])
def test_several_right_hand_sides(reduce_inv_quad):
    (factors, noise), memory = parts(), WarmStart(num_probes=2)
    factors, noise, inputs = dense.with_leaves(factors, noise)
    (rhs,) = dense.leaves(dense.randn(len(INDEX), 3))
    weights = torch.tensor(1.0) if reduce_inv_quad else torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    with settings.warm_start(memory), linear_operator.settings.cg_tolerance(1e-12):
        quad, logdet = dense.build(factors, INDEX, noise).inv_quad_logdet(rhs, True, reduce_inv_quad)
    got = dense.gradients((weights * quad).sum() + 3.0 * logdet, [*inputs, rhs], len(factors))
    matrix, probes = dense.system(factors, INDEX, noise), memory.probes(len(INDEX), rhs.detach())
    exact = (rhs * torch.linalg.solve(matrix, rhs)).sum(0)
    trace = (torch.linalg.solve(matrix.detach(), probes) * (matrix @ probes)).sum() / 2
    expected = dense.gradients((weights * exact).sum() + 3.0 * trace, [*inputs, rhs], len(factors))
    torch.testing.assert_close(quad, exact.sum() if reduce_inv_quad else exact, rtol=1e-9, atol=0)
    for mine, wanted in zip(got, expected, strict=True):
        assert dense.relative(mine, wanted) < 1e-8


def test_second_derivatives_are_refused():
    factors, noise, inputs = dense.with_leaves(*parts())
    with settings.warm_start(WarmStart()):
        quad, logdet = dense.build(factors, INDEX, noise).inv_quad_logdet(dense.randn(len(INDEX), 1), True)
    with pytest.raises(RuntimeError, match=r"(?i)second|twice|first"):
        torch.autograd.grad(quad + logdet, inputs, create_graph=True)


PATHS = {
    "length-scale": lambda t: {"theta": 0.25 + 0.1 * t},
    "noise": lambda t: {"noise": 0.05 * 2.0**t},
    "scale": lambda t: {"scale": 3.0**t},
    "all": lambda t: {"theta": 0.3 - 0.05 * t, "noise": 0.05 * 0.6**t, "scale": 1.5**t},
}


@in_turn(path=PATHS, tolerance=[1e-2, 1e-8])
def test_the_value_follows_small_steps(path, tolerance):
    """To what the probes state themselves (three standard errors) and 1 % of the change, the start left out."""
    memory, rhs, steps = WarmStart(num_probes=16, tolerance=tolerance), dense.randn(len(INDEX), 1), 20
    values, exact, own = [], [], []
    for step in range(steps + 1):
        factors, noise = parts(**PATHS[path](step / steps))
        with settings.warm_start(memory), record_solves() as record:
            _, value = dense.build(factors, INDEX, noise).inv_quad_logdet(rhs, logdet=True)
        assert ("begun" if step == 0 else "followed") in record.logdets[-1].reason
        assert float(record.logdets[-1].value) == float(value)
        values.append(float(value))
        exact.append(float(torch.linalg.slogdet(dense.system(factors, INDEX, noise)).logabsdet))
        trail = memory._paths[len(INDEX)]
        own.append(float(trail.followed.std()) / 4.0)
        stated = float(record.logdets[-1].standard_error)
        assert stated == pytest.approx((float(trail.start_error) ** 2 + own[-1] ** 2) ** 0.5)
    assert abs(exact[-1] - exact[0]) > 5.0  # nats: a change to be seen
    for value, wanted, error in zip(values, exact, own, strict=True):
        change = wanted - exact[0]
        assert abs(value - values[0] - change) <= 3.0 * error + 0.01 * abs(change)
    assert abs(values[0] - exact[0]) <= 4.0 * float(memory._paths[len(INDEX)].start_error)
    assert own[-1] < 0.5 * abs(exact[-1] - exact[0])  # and what is stated says something


def test_a_step_too_long_begins_anew():
    memory, rhs = WarmStart(num_probes=16), dense.randn(len(INDEX), 1)
    for arguments in ({}, {"scale": 40.0, "noise": 2.0}):
        factors, noise = parts(**arguments)
        with settings.warm_start(memory), record_solves() as record:
            _, value = dense.build(factors, INDEX, noise).inv_quad_logdet(rhs, logdet=True)
        report = record.logdets[-1]
        assert report.reason.startswith("begun")
        exact = torch.linalg.slogdet(dense.system(factors, INDEX, noise)).logabsdet
        assert abs(float(value - exact)) <= 4.0 * float(report.standard_error) + 1e-2 * len(INDEX)
        assert torch.equal(memory._paths[len(INDEX)].followed, torch.zeros(16, dtype=torch.float64))


@pytest.mark.parametrize("moved", [1, 10])
def test_two_sets_of_as_many_observations_do_not_share_a_trail(moved):
    """Models of the same size under one memory: each has its own log-determinant, and its own solutions."""
    memory, rhs = WarmStart(num_probes=8), dense.randn(len(INDEX), 1)
    elsewhere = torch.cat([INDEX[:-moved], dense.gaps_of(INDEX, SHAPE)[:moved]]).sort().values
    for cells in (INDEX, elsewhere):
        factors, noise = parts(noise=0.5)
        with settings.warm_start(memory), record_solves() as record:
            dense.build(factors, cells, noise).inv_quad_logdet(rhs, logdet=True)
        assert record.logdets[-1].reason.startswith("begun")


# -- settings in force -------------------------------------------------------------------------------------------------


def grid_sum(noise):
    terms = parts()[0], [dense.matern32(SHAPE[0], 0.1), dense.se(SHAPE[1], 0.1)]
    first, second = (SelectedKroneckerOperator(*own, row_index=INDEX, col_index=INDEX) for own in terms)
    return (first + second).add_diagonal(noise)


def grid_product(noise):
    return dense.build(parts()[0], INDEX, noise)


def step(make, memory, noise, method, rank):
    """One evaluation to 1e-6: the report of its solves."""
    with (
        settings.warm_start(memory),
        settings.gap_method(method),
        settings.preconditioner_rank(rank),
        linear_operator.settings.cg_tolerance(1e-6),
        record_solves() as record,
    ):
        make(torch.tensor([noise], dtype=torch.float64)).inv_quad_logdet(dense.randn(len(INDEX), 1), logdet=True)
    return record[0]


@pytest.mark.parametrize("make", [grid_product, grid_sum])
@pytest.mark.parametrize(
    ("first", "second"),
    [(("ignore", 3), ("ignore", 30)), (("ignore", 3), ("ignore", 0)), (("auto", 3), ("cholesky", 3))],
)
def test_settings_in_force_are_respected_whatever_is_on_loan(make, first, second):
    memory, fresh = WarmStart(), WarmStart()
    step(make, memory, 0.01, *first)
    report, alone = step(make, memory, 0.0101, *second), step(make, fresh, 0.0101, *second)
    assert report.method == alone.method
    assert report.rank == alone.rank
    assert report.iterations <= alone.iterations  # it has a guess besides


def test_a_method_that_does_not_apply_is_refused_whatever_is_on_loan():
    memory = WarmStart()
    step(grid_sum, memory, 0.01, "ignore", 20)
    with pytest.raises(ValueError, match="gap_method: got 'fill' for a sum of kernels"):
        step(grid_sum, memory, 0.0101, "fill", 20)


# -- where it does not apply -------------------------------------------------------------------------------------------


def both_ways(make):
    found = []
    for memory in (None, WarmStart()):
        torch.manual_seed(3)
        model = make(small=True).ours
        with record_solves() as record:
            found.append((*ours(model, memory), record, memory))
    return found


@pytest.mark.parametrize(("name", "method"), CASES)
def test_exact_log_determinants_are_untouched(name, method):
    with settings.logdet_method("exact"), settings.gap_method(method):
        (value, got, record, _), (warm_value, warm_got, warm_record, memory) = both_ways(MAKE[name])
    assert torch.equal(value, warm_value)
    for parameter, gradient in got.items():
        assert torch.equal(gradient, warm_got[parameter]), parameter
    assert [report.tolerance for report in record] == [report.tolerance for report in warm_record]
    assert not memory.state_dict()["paths"]


def test_batches_take_the_usual_path():
    (value, got, record, _), (warm_value, warm_got, warm_record, memory) = both_ways(_pairs.batch_of_three)
    assert not memory.state_dict()["paths"]
    assert [report.reason for report in warm_record.logdets] == [report.reason for report in record.logdets]
    assert [report.tolerance for report in warm_record] == [report.tolerance for report in record]
    torch.testing.assert_close(warm_value, value, rtol=1e-9, atol=0)
    for parameter, gradient in got.items():
        torch.testing.assert_close(warm_got[parameter], gradient, rtol=1e-9, atol=1e-12)


def test_plain_solves_and_predictions_are_untouched():
    pair, memory = _pairs.two_axes(small=True), WarmStart()
    ours(pair.ours, memory)
    predictions = []
    for given in (None, memory):
        pair.ours.train()
        pair.ours.eval()
        with settings.warm_start(given), torch.no_grad(), record_solves() as record:
            predictions.append(pair.ours(pair.test_x).mean)
        assert all(report.tolerance == 1e-6 for report in record)
    torch.testing.assert_close(predictions[0], predictions[1], rtol=1e-5, atol=1e-5)
    pair.dense.eval()
    with torch.no_grad(), gpytorch.settings.fast_computations(False, False, False):
        torch.testing.assert_close(predictions[1], pair.dense(pair.test_x).mean, rtol=1e-5, atol=1e-5)
