"""Interpolated Kronecker products plus noise, values and gradients, against the matrix written out in float64."""

import copy
import pickle

import linear_operator
import pytest
import torch
from linear_operator.operators import AddedDiagLinearOperator as Upstream
from linear_operator.operators import DenseLinearOperator, DiagLinearOperator, RootLinearOperator

from gpytorch_gaps import record_solves, settings
from gpytorch_gaps.operators import (
    GridInterpolation,
    InterpolatedKroneckerAddedDiagOperator,
    InterpolatedKroneckerOperator,
    SelectedKroneckerSumOperator,
)
from gpytorch_gaps.solvers.preconditioning import eigen_preconditioner
from tests._covering import covering

NUM_POINTS, SHAPE = 1000, (24, 18)
EXACT = 1e-8
AXES = [torch.linspace(-0.1, 1.1, size, dtype=torch.float64) for size in SHAPE]


def rand(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


ROWS = GridInterpolation.cubic(AXES, rand(NUM_POINTS, 2))
W = ROWS.dense()


def squared_exponential(lengthscales):
    return [torch.exp(-0.5 * ((a[:, None] - a) / own).square()) for a, own in zip(AXES, lengthscales, strict=True)]


def matern(lengthscales):
    scaled = [3**0.5 * (a[:, None] - a).abs() / own for a, own in zip(AXES, lengthscales, strict=True)]
    return [(1.0 + d) * torch.exp(-d) for d in scaled]


def parameters(noise):
    lengthscales = torch.tensor([0.2, 0.3], dtype=torch.float64, requires_grad=True)
    return lengthscales, noise.clone().requires_grad_(True)


def results(operator_of, kernel, noise):
    """Solution, quadratic form and log-determinant of a random right-hand side, with all gradients."""
    lengthscales, noise = parameters(noise)
    rhs = rand(NUM_POINTS, 2, seed=1).requires_grad_(True)
    solution, quad, logdet = operator_of(kernel(lengthscales), noise, rhs)
    weights = rand(NUM_POINTS, 2, seed=2)
    found = [solution.detach(), quad.detach(), logdet.detach()]
    for value in ((weights * solution).sum(), quad, logdet):
        inputs = [lengthscales, noise, rhs]
        gradients = torch.autograd.grad(value, inputs, retain_graph=True, allow_unused=True)
        found += [torch.zeros_like(t) if g is None else g for g, t in zip(gradients, inputs, strict=True)]
    return found


def by_dense(factors, noise, rhs):
    matrix = W @ torch.kron(*factors) @ W.mT + torch.diag_embed(noise.expand(NUM_POINTS))
    solution = torch.linalg.solve(matrix, rhs)
    return solution, (rhs * solution).sum(), torch.linalg.slogdet(matrix).logabsdet


def by_us(factors, noise, rhs):
    noisy = InterpolatedKroneckerOperator(*factors, rows=ROWS).add_diagonal(noise)
    assert isinstance(noisy, InterpolatedKroneckerAddedDiagOperator)
    return noisy.solve(rhs), *noisy.inv_quad_logdet(rhs, logdet=True)


def relative(found, expected):
    return float((found - expected).norm() / expected.norm().clamp_min(1e-300))


CONSTANT = torch.tensor([1e-2], dtype=torch.float64)
PER_POINT = 1e-2 * (0.5 + rand(NUM_POINTS, seed=3))


@covering(method=["ignore", "cholesky", "auto"], kernel=[squared_exponential, matern], noise=[CONSTANT, PER_POINT])
def test_values_and_gradients(method, kernel, noise):
    """The log-determinant, and its gradient, is exact here; its estimate has a test of its own."""
    tight = settings.solve_tolerance(1e-12), settings.train_tolerance(1e-12)
    with tight[0], tight[1], settings.gap_method(method), settings.logdet_method("exact"), record_solves() as solves:
        found = results(by_us, kernel, noise)
    assert all(report.converged for report in solves)
    if method == "ignore":
        assert all(report.method == "ignore" and report.rank > 0 for report in solves)
    for own, expected in zip(found, results(by_dense, kernel, noise), strict=True):
        assert relative(own, expected) < EXACT


@pytest.mark.parametrize("noise", [CONSTANT, PER_POINT], ids=["constant", "per point"])
def test_estimated_log_determinants_are_unbiased_and_their_errors_honest(noise):
    """Matern-3/2 at a rank that leaves much to estimate; gradients as probes give them, averaged over seeds."""

    def value_and_gradient(operator_of):
        lengthscales, own_noise = parameters(noise)
        logdet = operator_of(matern(lengthscales), own_noise)
        return [logdet.detach(), *torch.autograd.grad(logdet, [lengthscales, own_noise])]

    def estimate(factors, own_noise):
        noisy = InterpolatedKroneckerOperator(*factors, rows=ROWS).add_diagonal(own_noise)
        with settings.logdet_method("stochastic"), settings.preconditioner_rank(60), record_solves() as solves:
            value = noisy.inv_quad_logdet(logdet=True)[1]
        errors.append(float(solves.logdets[-1].standard_error))
        return value

    def exact(factors, own_noise):
        return by_dense(factors, own_noise, torch.zeros(NUM_POINTS, 1, dtype=torch.float64))[2]

    torch.manual_seed(0)
    errors = []
    draws = [[part.sum() for part in value_and_gradient(estimate)] for _ in range(20)]
    for own, expected in zip(zip(*draws, strict=True), value_and_gradient(exact), strict=True):
        values = torch.stack(own)
        assert (values.mean() - expected.sum()).abs() < 3.5 * values.std() / len(values) ** 0.5
    spread = torch.stack([own[0] for own in draws]).std()
    assert 0.5 < sum(errors) / len(errors) / float(spread) < 2.0


def test_interpolated_eigenvectors_need_a_tenth_of_the_iterations_of_pivoted_cholesky():
    kernel = InterpolatedKroneckerOperator(*squared_exponential([0.2, 0.3]), rows=ROWS)
    rhs = rand(NUM_POINTS, 1, seed=1)
    with settings.gap_method("ignore"), record_solves() as solves:
        kernel.add_diagonal(1e-4).solve(rhs)
    products = []

    def matmul(x):
        products.append(x)
        return kernel._matmul(x) + 1e-4 * x

    with (
        linear_operator.settings.max_preconditioner_size(15),
        linear_operator.settings.min_preconditioning_size(1),
        linear_operator.settings.terminate_cg_by_size(False),
    ):
        noise = DiagLinearOperator(torch.full((NUM_POINTS,), 1e-4, dtype=torch.float64))
        apply = Upstream(kernel, noise)._preconditioner()[0]
        linear_operator.utils.linear_cg(matmul, rhs, tolerance=1e-6, max_iter=2000, preconditioner=apply)
    assert solves[-1].converged
    assert 10 * solves[-1].iterations <= len(products) - 1


@pytest.mark.parametrize("rank", [0, 7, 200])
def test_the_rank_that_is_asked_for(rank):
    noisy = InterpolatedKroneckerOperator(*matern([0.2, 0.3]), rows=ROWS).add_diagonal(1e-1)
    with settings.preconditioner_rank(rank), settings.gap_method("ignore"), record_solves() as solves:
        noisy.solve(rand(NUM_POINTS, 1))
    assert solves[-1].rank == rank
    assert solves[-1].converged


def test_a_preconditioner_is_what_it_says():
    """``P = W Q_p T_p Q_p' W' + D'`` densely: its product, inverse, log-determinant and draws."""
    noisy = InterpolatedKroneckerOperator(*matern([0.2, 0.3]), rows=ROWS).add_diagonal(1e-1)
    system = noisy.system()
    form = eigen_preconditioner(system, (50,))
    values, vectors = torch.linalg.eigh(torch.kron(*system.terms[0].factors()))
    leading = W @ vectors[:, -50:]
    dense = leading * values[-50:] @ leading.mT + torch.diag_embed(form.diagonal.expand(NUM_POINTS))
    identity = torch.eye(NUM_POINTS, dtype=torch.float64)
    assert relative(form.matmul(identity), dense) < 1e-10
    assert relative(form.solve(identity), torch.linalg.inv(dense)) < 1e-8
    assert relative(form.logdet(), torch.linalg.slogdet(dense).logabsdet) < 1e-10
    exact = noisy._linear_op.to_dense()
    torch.testing.assert_close(dense.trace(), exact.trace() + 1e-1 * NUM_POINTS)  # what is left out is on average there
    torch.manual_seed(0)
    draws = form.draw(4000, torch.Size())
    assert relative(draws @ draws.mT / 4000, dense) < 0.1


def test_sums_stay_ours():
    first = InterpolatedKroneckerOperator(*squared_exponential([0.2, 0.3]), rows=ROWS)
    second = InterpolatedKroneckerOperator(*matern([0.1, 0.1]), rows=ROWS)
    weights = rand(NUM_POINTS, 2, seed=5)
    for other in (second, DenseLinearOperator(weights @ weights.mT)):
        total = first + other
        assert isinstance(total, SelectedKroneckerSumOperator)
        noisy, rhs = total.add_diagonal(1e-2), rand(NUM_POINTS, 2, seed=1)
        with settings.gap_method("ignore"), settings.solve_tolerance(1e-10), record_solves() as solves:
            solution = noisy.solve(rhs)
        dense = first.to_dense() + other.to_dense() + 1e-2 * torch.eye(NUM_POINTS, dtype=torch.float64)
        assert relative(solution, torch.linalg.solve(dense, rhs)) < 1e-7
        assert solves[-1].converged


def test_a_sum_on_one_grid_has_the_eigenvectors_of_every_term():
    """With a linear kernel beside, values and gradients against dense; and fewer iterations than with one term's."""
    weights = rand(NUM_POINTS, 2, seed=5)
    linear = RootLinearOperator(weights)
    rhs = rand(NUM_POINTS, 1, seed=1)

    def terms(lengthscales):
        return squared_exponential(lengthscales), [0.1 * matern(lengthscales)[0], matern(lengthscales)[1]]

    def exact(lengthscales, noise):
        kernel = sum(torch.kron(*factors) for factors in terms(lengthscales))
        matrix = W @ kernel @ W.mT + weights @ weights.mT + noise * torch.eye(NUM_POINTS, dtype=torch.float64)
        return (rhs * torch.linalg.solve(matrix, rhs)).sum(), torch.linalg.slogdet(matrix).logabsdet

    def ours(lengthscales, noise):
        other = GridInterpolation.cubic(AXES, rand(NUM_POINTS, 2))  # the same points, found by their values
        first, second = (
            InterpolatedKroneckerOperator(*factors, rows=rows)
            for factors, rows in zip(terms(lengthscales), (ROWS, other), strict=True)
        )
        noisy = (first + second + linear).add_diagonal(noise)
        assert len(noisy.system().terms) == 2
        return noisy.inv_quad_logdet(rhs, logdet=True)

    tight = settings.train_tolerance(1e-12)
    with tight, settings.gap_method("ignore"), settings.logdet_method("exact"), record_solves() as solves:
        for found, expected in zip(*(values_and_gradients(which) for which in (ours, exact)), strict=True):
            assert relative(found, expected) < EXACT
    assert solves[-1].converged
    assert solves[-1].iterations < 60
    assert "a sum of interpolated kernels" in solves[-1].reason


def values_and_gradients(function):
    lengthscales, noise = parameters(CONSTANT)
    values = function(lengthscales, noise)
    return [
        part
        for value in values
        for part in (value.detach(), *torch.autograd.grad(value, [lengthscales, noise], retain_graph=True))
    ]


def test_points_of_a_part_are_not_those_of_the_whole():
    """Kernel and noise are the same tensors; only the points differ."""
    kernel = InterpolatedKroneckerOperator(*matern([0.2, 0.3]), rows=ROWS)
    total = kernel + InterpolatedKroneckerOperator(*squared_exponential([0.2, 0.3]), rows=ROWS)
    rhs = rand(NUM_POINTS, 1)
    for whole in (kernel, total):
        whole.add_diagonal(CONSTANT).solve(rhs)
        part = whole[..., :300, :300]
        dense = whole.to_dense()[:300, :300] + CONSTANT * torch.eye(300, dtype=torch.float64)
        solution = part.add_diagonal(CONSTANT).solve(rhs[:300])
        assert relative(dense @ solution, rhs[:300]) < 1e-5


def test_float32_models_are_solved_in_float64():
    factors = [factor.double() for factor in squared_exponential([0.2, 0.3])]
    kernel = InterpolatedKroneckerOperator(*factors, rows=ROWS, out_dtype=torch.float32)
    rhs = rand(NUM_POINTS, 1)
    noisy = kernel.add_diagonal(1e-3)
    assert noisy.dtype == torch.float32
    with settings.gap_method("ignore"), record_solves() as solves:
        solution = noisy.solve(rhs)  # in the precision of the right-hand side
    matrix = W @ torch.kron(*factors) @ W.mT + 1e-3 * torch.eye(NUM_POINTS, dtype=torch.float64)
    assert solves[-1].converged
    assert float((matrix @ solution - rhs).norm() / rhs.norm()) < 2e-6


def test_batches_of_kernels():
    scales = torch.tensor([0.5, 2.0], dtype=torch.float64)
    factors = squared_exponential([0.2, 0.3])
    noise = torch.tensor([[1e-2], [1e-1]], dtype=torch.float64)
    batch = InterpolatedKroneckerOperator(scales[:, None, None] * factors[0], factors[1], rows=ROWS)
    rhs = rand(NUM_POINTS, 3, seed=1)
    with settings.gap_method("ignore"), settings.solve_tolerance(1e-11), settings.logdet_method("exact"):
        noisy = batch.add_diagonal(noise)
        solution, logdet = noisy.solve(rhs), noisy.logdet()
    for member, (scale, own) in enumerate(zip(scales, noise, strict=True)):
        expected = by_dense([scale * factors[0], factors[1]], own, rhs)
        assert relative(solution[member], expected[0]) < EXACT
        assert relative(logdet[member], expected[2]) < EXACT


def test_casts_copies_and_pickles():
    noisy = InterpolatedKroneckerOperator(*matern([0.2, 0.3]), rows=ROWS).add_diagonal(1e-2)
    dense = noisy.to_dense()
    for other in (copy.deepcopy(noisy), pickle.loads(pickle.dumps(noisy)), noisy.clone(), noisy.detach()):
        assert isinstance(other, InterpolatedKroneckerAddedDiagOperator)
        torch.testing.assert_close(other.to_dense(), dense)
    narrow = noisy.to(torch.float32)
    assert narrow.dtype == torch.float32
    torch.testing.assert_close(narrow.to_dense().double(), dense, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: InterpolatedKroneckerOperator(rows=ROWS), "factors: got none"),
        (lambda: InterpolatedKroneckerOperator(torch.eye(18), torch.eye(18), rows=ROWS), r"expected \(18, 18\)"),
        (lambda: InterpolatedKroneckerOperator(torch.eye(24), torch.eye(18), rows=W), "rows: got Tensor"),
        (
            lambda: InterpolatedKroneckerOperator(torch.eye(24), torch.eye(18), rows=ROWS, columns=W),
            "columns: got Tensor",
        ),
        (
            lambda: InterpolatedKroneckerAddedDiagOperator(DenseLinearOperator(torch.eye(3)), torch.eye(3)),
            "expected an InterpolatedKroneckerOperator and a diagonal",
        ),
        (
            lambda: InterpolatedKroneckerOperator(
                torch.eye(24), torch.eye(18), rows=ROWS, columns=ROWS.at(slice(3))
            ).add_diagonal(1.0),
            "expected a square one",
        ),
    ],
)
def test_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("method", ["fill", "penalize", "spectral"])
def test_methods_that_fill_gaps_are_refused(method):
    noisy = InterpolatedKroneckerOperator(*matern([0.2, 0.3]), rows=ROWS).add_diagonal(1e-2)
    with settings.gap_method(method), pytest.raises(ValueError, match=f"{method}.*interpolated Kronecker product"):
        noisy.solve(rand(NUM_POINTS, 1))
    with settings.logdet_method("nystrom"), pytest.raises(ValueError, match=r"nystrom.*interpolated"):
        noisy.logdet()
