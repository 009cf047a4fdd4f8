"""``solve``, ``inv_quad`` and ``inv_quad_logdet`` of ``W K W' + D``, values and gradients, against dense float64.

Solves are asked for a residual of 1e-12 and compared at 1e-8 relative, norm by norm: of the solution, of the
gradient of every factor, of the noise and of the right-hand side. Dense
Cholesky is switched off unless a case is about it.
"""

import warnings

import linear_operator
import pytest
import torch

from gpytorch_gaps import record_solves, settings
from tests import _dense as dense

EXACT = 1e-8


@pytest.fixture(autouse=True)
def _iterative():
    with linear_operator.settings.max_cholesky_size(0), settings.logdet_method("exact"):
        yield


def constant(value, *batch):
    return torch.full((*batch, 1), value, dtype=torch.float64)


def axes(shape, *, low=0.2, seed=0, batch=()):
    """Noise as a product over axes."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(low + torch.rand(*batch, size, generator=generator, dtype=torch.float64) for size in shape)


def per_point(index, seed=0, batch=()):
    return 0.1 + torch.rand(*batch, len(index), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def reference(factors, index, noise, rhs, weights):
    """Values and gradients in the order that `ours` returns them."""
    factors, noise, inputs = dense.with_leaves(factors, noise)
    (rhs,) = dense.leaves(rhs)
    matrix = dense.system(factors, index, noise)
    batch = torch.broadcast_shapes(matrix.shape[:-2], rhs.shape[:-2])
    solution = torch.linalg.solve(matrix.expand(*batch, *matrix.shape[-2:]), rhs.expand(*batch, *rhs.shape[-2:]))
    terms = (rhs * solution).sum(-2)
    logdet = torch.linalg.slogdet(matrix).logabsdet
    return collect(solution, terms.sum(-1), logdet, [*inputs, rhs], len(factors), weights)


def collect(solution, quad, logdet, inputs, num_factors, weights):
    """Gradients of weighted sums, so that no direction or batch element hides behind another."""
    result = {"solve": solution.detach(), "inv_quad": quad.detach(), "logdet": logdet.detach()}
    of = {
        "solve": (weights["solve"] * solution).sum(),
        "inv_quad": (weights["batch"] * quad).sum(),
        "logdet": (weights["batch"] * logdet).sum(),
    }
    for name, value in of.items():
        wanted = inputs[:-1] if name == "logdet" else inputs
        gradients = torch.autograd.grad(value, wanted, retain_graph=True)
        for i, gradient in enumerate(gradients):
            result[f"d {name} / d input {i}"] = dense.symmetric(gradient) if i < num_factors else gradient
    return result


def ours(factors, index, noise, rhs, weights, dtype=torch.float64):
    factors, noise, inputs = dense.with_leaves(
        [factor.to(dtype) for factor in factors],
        tuple(axis.to(dtype) for axis in noise) if isinstance(noise, tuple) else noise.to(dtype),
    )
    (rhs,) = dense.leaves(rhs.to(dtype))
    operator = dense.build(factors, index, noise)
    solution = operator.solve(rhs)
    quad, logdet = operator.inv_quad_logdet(rhs, logdet=True)
    alone = operator.inv_quad(rhs)
    assert dense.relative(alone.detach(), quad.detach()) < 100 * torch.finfo(dtype).eps ** 0.5
    return collect(solution, quad, logdet, [*inputs, rhs], len(factors), weights)


def compare(factors, index, noise, *, method="auto", columns=2, rhs_batch=(), tolerance=EXACT, dtype=torch.float64):
    """Everything at once; returns the reports of our solves."""
    batch = torch.broadcast_shapes(
        *(factor.shape[:-2] for factor in factors),
        *(axis.shape[:-1] for axis in (noise if isinstance(noise, tuple) else (noise,))),
        rhs_batch,
    )
    rhs = dense.randn(*rhs_batch, len(index), columns, seed=1)
    # inputs that are exact in both precisions
    factors, rhs = [factor.to(dtype).double() for factor in factors], rhs.to(dtype).double()
    noise = tuple(a.to(dtype).double() for a in noise) if isinstance(noise, tuple) else noise.to(dtype).double()
    weights = {
        "solve": dense.randn(*batch, len(index), columns, seed=2),
        "batch": 2.0 + dense.randn(*batch, seed=3).tanh(),
    }
    expected = reference(factors, index, noise, rhs, weights)
    accuracy = 1e-12 if dtype == torch.float64 else 1e-7
    with (
        settings.gap_method(method),
        settings.solve_tolerance(accuracy),
        settings.train_tolerance(accuracy),
        record_solves() as solves,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        got = ours(factors, index, noise, rhs, weights, dtype)
    dense.check_each(got, expected, dtype, tolerance)
    return solves


SHAPE = (6, 5, 4)
METHODS = ("fill", "ignore", "penalize", "spectral", "cholesky", "auto")


def rough(shape=SHAPE):
    kinds = (dense.matern32, dense.random_psd, dense.se, dense.matern32)
    return [kind(size) for kind, size in zip(kinds, shape, strict=False)]


@pytest.mark.parametrize("shape", [(11,), (6, 5), (4, 3, 5), (3, 4, 2, 3)], ids=lambda shape: f"{len(shape)} axes")
@pytest.mark.parametrize("method", METHODS)
def test_number_of_axes(shape, method):
    solves = compare(rough(shape), dense.observed("random", shape), constant(0.05), method=method)
    if method != "auto":
        assert {report.method for report in solves} == {method}


@pytest.mark.parametrize("pattern", ["none", "one gap", "one observation", "random", "block", "slice"])
@pytest.mark.parametrize("method", ["fill", "ignore", "penalize", "spectral", "auto"])
def test_gaps_of_every_pattern(pattern, method):
    compare(rough(), dense.observed(pattern, SHAPE), constant(0.05), method=method)


@pytest.mark.parametrize("pattern", ["none", "one gap", "random"])
def test_gap_patterns_with_dense_cholesky_allowed(pattern):
    with linear_operator.settings.max_cholesky_size(800):
        solves = compare(rough(), dense.observed(pattern, SHAPE), constant(0.05))
    assert {report.method for report in solves} == {"cholesky"}


@pytest.mark.parametrize("fraction", [0.1, 0.9])
@pytest.mark.parametrize("method", ["fill", "ignore"])
def test_few_and_many_gaps(fraction, method):
    compare(rough(), dense.observed("random", SHAPE, fraction), constant(0.05), method=method)


@pytest.mark.parametrize("noise", [1e-6, 1e-3, 1.0, 1e2])
@pytest.mark.parametrize("method", ["fill", "ignore", "cholesky"])
def test_noise_of_every_size(noise, method):
    # at 1e-6 the smallest eigenvalue of this K, about 1e-4, still bounds the condition number
    factors = [dense.matern32(6), dense.random_psd(5)]
    compare(factors, dense.observed("random", (6, 5)), constant(noise), method=method)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["constant", "product"])
def test_kinds_of_noise(kind, method):
    index = dense.observed("random", SHAPE)
    noise = constant(0.05) if kind == "constant" else axes(SHAPE)
    compare(rough(), index, noise, method=method)


def test_product_noise_over_many_orders_of_magnitude():
    shape = (6, 5)
    noise = (torch.logspace(-3, 1, 6, dtype=torch.float64), torch.ones(5, dtype=torch.float64))
    compare(rough(shape), dense.observed("random", shape), noise, method="fill")


@pytest.mark.parametrize("method", ["ignore", "cholesky", "auto"])
def test_noise_per_point(method):
    index = dense.observed("random", SHAPE)
    solves = compare(rough(), index, per_point(index), method=method)
    assert {report.method for report in solves} == {"cholesky" if method == "cholesky" else "ignore"}


@pytest.mark.parametrize("method", ["ignore", "auto"])
@pytest.mark.parametrize("kind", ["constant", "product", "per point"])
def test_cells_observed_twice(kind, method):
    index = dense.observed("random", SHAPE)
    index = torch.cat([index, index[:7], index[3:5]])
    noise = {"constant": constant(0.05), "product": axes(SHAPE), "per point": per_point(index)}[kind]
    solves = compare(rough(), index, noise, method=method)
    assert {report.method for report in solves} == {"ignore"}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["constant", "product"])
def test_observations_in_any_order(kind, method):
    index = dense.observed("random", SHAPE)
    index = index[torch.randperm(len(index), generator=torch.Generator().manual_seed(0))]
    compare(rough(), index, constant(0.05) if kind == "constant" else axes(SHAPE), method=method)


@pytest.mark.parametrize("method", ["fill", "ignore", "auto"])
@pytest.mark.parametrize(
    "factors",
    [
        [dense.identity(6), dense.identity(5)],
        [dense.identity(5), dense.matern32(6)],
        [dense.periodic(8), dense.periodic(6)],
        [2.0 * dense.identity(4), dense.periodic(5), dense.identity(2)],
    ],
    ids=["identities", "identity and Matern", "periodic", "three axes"],
)
def test_kernels_with_repeated_eigenvalues(factors, method):
    shape = tuple(factor.size(-1) for factor in factors)
    for fraction in (0.2, 0.6):  # the log-determinant is taken on the gaps, then on the data
        compare(factors, dense.observed("random", shape, fraction), constant(0.05), method=method)


@pytest.mark.parametrize("method", ["fill", "ignore", "auto"])
def test_axes_of_several_columns(method):
    factors = [dense.ard(9), dense.matern32(6)]
    compare(factors, dense.observed("slice", (9, 6)), constant(0.05), method=method)


def test_gradient_reaches_the_lengths_of_a_grouped_axis():
    """Through a multi-column ARD kernel to its hyperparameters, which symmetric parts alone decide."""
    index, noise = dense.observed("random", (9, 6)), constant(0.05)
    rhs, points = dense.randn(len(index), 1, seed=4), dense.randn(9, 3, seed=5)
    results = []
    for build in (dense.system, dense.build):
        lengths = torch.tensor([0.4, 1.1, 0.7], dtype=torch.float64, requires_grad=True)
        scaled = points / lengths
        factor = torch.exp(-0.5 * (scaled[:, None] - scaled).square().sum(-1))
        matrix = build([factor, dense.matern32(6)], index, noise)
        with settings.train_tolerance(1e-12):
            if torch.is_tensor(matrix):
                value = (rhs * torch.linalg.solve(matrix, rhs)).sum() + torch.logdet(matrix)
            else:
                quad, logdet = matrix.inv_quad_logdet(rhs, logdet=True)
                value = quad + logdet
        results.append(torch.autograd.grad(value, lengths)[0])
    assert dense.relative(results[1], results[0]) < EXACT


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("factor_batch", "noise_batch", "rhs_batch"),
    [((3,), (3,), (3,)), ((3,), (), (3,)), ((), (3,), (3,)), ((3,), (3,), ()), ((2, 3), (3,), (2, 3))],
    ids=["all", "factors and rhs", "noise and rhs", "rhs shared", "two dimensions"],
)
def test_batches_are_solved_member_by_member(factor_batch, noise_batch, rhs_batch, method):
    factors = [dense.random_psd(5, 1, batch=factor_batch), dense.random_psd(4, 2, batch=factor_batch)]
    noise = 0.1 + torch.rand(*noise_batch, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    compare(factors, dense.observed("random", (5, 4)), noise, method=method, rhs_batch=rhs_batch)


def test_right_hand_sides_batched_alone():
    """The matrix is shared: solutions and quadratic forms have the batch of the right-hand sides, the logdet none."""
    factors, index, noise = [dense.random_psd(5, 1), dense.random_psd(4, 2)], torch.arange(3, 17), constant(0.1)
    rhs = dense.randn(3, 14, 2)
    matrix = dense.system(factors, index, noise)
    operator = dense.build(factors, index, noise)
    with settings.solve_tolerance(1e-12), settings.train_tolerance(1e-12):
        assert dense.relative(operator.solve(rhs), torch.linalg.solve(matrix, rhs)) < EXACT
        quad, logdet = operator.inv_quad_logdet(rhs, logdet=True)
    assert dense.relative(quad, (rhs * torch.linalg.solve(matrix, rhs)).sum((-2, -1))) < EXACT
    assert dense.relative(logdet.expand(3), torch.logdet(matrix).expand(3)) < EXACT


@pytest.mark.parametrize("kind", ["product", "per point"])
@pytest.mark.parametrize("factor_batch", [(), (3,)], ids=["factors shared", "factors batched"])
def test_batched_noise_of_other_kinds(kind, factor_batch):
    factors = [dense.random_psd(5, 1, batch=factor_batch), dense.random_psd(4, 2)]
    index = dense.observed("random", (5, 4))
    noise = axes((5, 4), batch=(3,)) if kind == "product" else per_point(index, batch=(3,))
    compare(factors, index, noise, rhs_batch=(3,))


def test_vectors_and_unreduced_quadratic_forms():
    factors, index, noise = rough(), dense.observed("random", SHAPE), constant(0.05)
    operator, matrix = dense.build(factors, index, noise), dense.system(factors, index, noise)
    rhs = dense.randn(len(index), 3)
    exact = torch.linalg.solve(matrix, rhs)
    with settings.solve_tolerance(1e-12), settings.train_tolerance(1e-12):
        vector = operator.solve(rhs[:, 0])
        assert vector.shape == (len(index),)
        assert dense.relative(vector, exact[:, 0]) < EXACT
        assert dense.relative(operator.inv_quad(rhs[:, 1]), rhs[:, 1] @ exact[:, 1]) < EXACT
        assert dense.relative(operator.solve(rhs, exact.mT), exact.mT @ exact) < EXACT
        terms, _ = operator.inv_quad_logdet(rhs, logdet=True, reduce_inv_quad=False)
    assert dense.relative(terms, (rhs * exact).sum(0)) < EXACT


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("constant", "fill"),
        ("constant", "ignore"),
        ("constant", "auto"),
        ("product", "fill"),
        ("product", "ignore"),
        ("per point", "ignore"),
        ("per point", "auto"),
    ],
)
def test_values_and_gradients_in_float32(kind, method):
    """Against float64 algebra on the same rounded inputs: 2e-5 relative.

    Solutions are exact to 1e-7 before they are rounded; gradients are float32 products of them, with
    about sqrt(n) roundings each.
    """
    index = dense.observed("random", SHAPE)
    noise = {"constant": constant(0.05), "product": axes(SHAPE), "per point": per_point(index)}[kind]
    compare(rough(), index, noise, method=method, tolerance=2e-5, dtype=torch.float32)


@pytest.mark.parametrize("method", ["fill", "ignore", "auto"])
@pytest.mark.parametrize("noise", [1e-4, 1e2])
def test_float32_noise_levels(noise, method):
    """At 1e-4 the condition number is 1e5, which the roundings of gradients meet once: 1e-3."""
    factors = [dense.matern32(8), dense.se(6, 0.5)]
    tolerance = 1e-3 if noise < 1 else 2e-5
    index = dense.observed("random", (8, 6))
    compare(factors, index, constant(noise), method=method, tolerance=tolerance, dtype=torch.float32)


def test_scaling_the_covariance_scales_everything():
    """``c (K_XX + D)`` as GPyTorch makes it, by a constant factor."""
    factors, index, noise = rough(), dense.observed("random", SHAPE), constant(0.05)
    scale, rhs = torch.tensor(2.5, dtype=torch.float64, requires_grad=True), dense.randn(len(index), 1)
    with settings.train_tolerance(1e-12):
        quad, logdet = (dense.build(factors, index, noise) * scale).inv_quad_logdet(rhs, logdet=True)
        (gradient,) = torch.autograd.grad(quad + logdet, scale)
    matrix = dense.system(factors, index, noise)
    exact = float((rhs * torch.linalg.solve(matrix, rhs)).sum())
    assert float(quad.detach()) == pytest.approx(exact / 2.5, rel=EXACT)
    assert float(gradient) == pytest.approx(-exact / 2.5**2 + len(index) / 2.5, rel=EXACT)


def test_added_noise_adds_up():
    """Jitter on top of the noise, of either kind, is part of the system that is solved."""
    index = dense.observed("random", SHAPE)
    rhs = dense.randn(len(index), 1)
    for noise in (constant(0.05), axes(SHAPE), per_point(index)):
        matrix = dense.system(rough(), index, noise) + 0.3 * torch.eye(len(index), dtype=torch.float64)
        operator = dense.build(rough(), index, noise).add_jitter(0.3)
        with settings.solve_tolerance(1e-12):
            assert dense.relative(operator.solve(rhs), torch.linalg.solve(matrix, rhs)) < EXACT


def test_solve_differentiates_twice_or_refuses():
    """A second derivative is right, or an error: never a wrong number."""
    index, rhs = dense.observed("random", (6, 5)), dense.randn(18, 1)
    factors = rough((6, 5))

    def second(function):
        noise, scale = constant(0.1).requires_grad_(True), torch.ones(1, dtype=torch.float64, requires_grad=True)
        inputs = (noise, scale)
        first = torch.autograd.grad(function([factors[0] * scale, factors[1]], noise), inputs, create_graph=True)
        return torch.stack([torch.stack(torch.autograd.grad(g, inputs, retain_graph=True)) for g in first])

    def check(name, operator_value, dense_value):
        expected = second(lambda f, noise: dense_value(dense.system(f, index, noise)))
        try:
            got = second(lambda f, noise: operator_value(dense.build(f, index, noise)))
        except RuntimeError:
            return
        assert dense.relative(got, expected) < 1e-6, name

    with settings.solve_tolerance(1e-12), settings.train_tolerance(1e-12):
        check(
            "solve",
            lambda operator: operator.solve(rhs).square().sum(),
            lambda matrix: torch.linalg.solve(matrix, rhs).square().sum(),
        )
        check(
            "inv_quad",
            lambda operator: operator.inv_quad(rhs),
            lambda matrix: (rhs * torch.linalg.solve(matrix, rhs)).sum(),
        )
    with settings.train_tolerance(1e-12):
        # a term that silently counts as constant would leave the other one's second derivative as the sum's
        check(
            "inv_quad_logdet",
            lambda operator: sum(operator.inv_quad_logdet(rhs, logdet=True)),
            lambda matrix: (rhs * torch.linalg.solve(matrix, rhs)).sum() + torch.logdet(matrix),
        )
