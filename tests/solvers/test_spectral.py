"""The spectral formulation through ``solve_system``, operators and whole models, against dense float64."""

import math
import warnings

import gpytorch
import linear_operator
import pytest
import torch

import gpytorch_gaps as gaps
from gpytorch_gaps import NotConvergedWarning, record_solves, settings
from gpytorch_gaps.solvers.gap_system import GapSystem
from tests import _dense as dense
from tests._dense import solve_system
from tests.workflow import _pairs

DENSE = linear_operator.settings.max_cholesky_size


def number(value, *batch):
    return torch.full((*batch, 1), value, dtype=torch.float64)


def axes(shape, spread=1.0, batch=()):
    """Noise over `spread` orders of magnitude on every axis."""
    levels = [torch.logspace(-spread, 0, size, dtype=torch.float64).roll(size // 2) for size in shape]
    return tuple(level.expand(*batch, -1) for level in levels)


def make(factors, index, noise):
    if isinstance(noise, tuple):
        return GapSystem(factors, index, axis_noise=noise)
    return GapSystem(factors, index, noise)


def solve(factors, index, noise, rhs, **options):
    """Checks the report against residuals taken densely; returns solution and report."""
    options = {"tolerance": 1e-10, **options}
    solution, report = solve_system(make(factors, index, noise), rhs, method="spectral", **options)
    matrix = dense.system([factor.double() for factor in factors], index, noise)
    residual = (matrix @ solution.double() - rhs.double()).norm(dim=-2) / rhs.double().norm(dim=-2)
    kernel = matrix - torch.diag_embed(dense.diagonal(noise, index))
    smallest = float(dense.diagonal(noise, index).min())
    # a is up to |y| / s2, so a product with K rounds at 1e-16 |K| / s2
    rounding = 1e-14 + 1e-15 * float(torch.linalg.matrix_norm(kernel, 2).max()) / smallest
    assert report.method == "spectral"
    assert report.residual.shape == residual.shape
    if rhs.dtype == torch.float64:
        assert torch.allclose(report.residual, residual, rtol=1e-3, atol=rounding)
    assert report.converged == bool((report.residual <= options["tolerance"]).all())
    return solution, report


def exact(factors, index, noise, rhs):
    return torch.linalg.solve(dense.system([factor.double() for factor in factors], index, noise), rhs.double())


def rough(shape):
    kinds = (dense.matern32, dense.random_psd, dense.se, dense.matern32)
    return [kind(size) for kind, size in zip(kinds, shape, strict=False)]


def smooth(shape=(16, 14), theta=0.4):
    return [dense.se(size, theta) for size in shape]


# -- solve_system ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["none", "one gap", "one observation", "random", "block", "slice"])
@pytest.mark.parametrize("shape", [(11,), (9, 8), (5, 4, 6), (3, 4, 2, 3)], ids=lambda shape: f"{len(shape)} axes")
def test_solutions_are_those_of_dense_algebra(shape, pattern):
    index = dense.observed(pattern, shape)
    rhs = dense.randn(len(index), 3)
    solution, report = solve(rough(shape), index, number(0.05), rhs)
    assert report.converged
    assert report.rank == 0
    assert dense.relative(solution, exact(rough(shape), index, number(0.05), rhs)) < 1e-8


@pytest.mark.parametrize("tolerance", [1e-2, 1e-6, 1e-10])
@pytest.mark.parametrize("noise", [1e-4, 1e-2, 1.0, 1e2])
@pytest.mark.parametrize("pattern", ["random", "block"])
def test_the_reported_residual_is_the_original_one(pattern, noise, tolerance):
    """Whatever was dropped: the residual is taken with the whole kernel, and the tolerance met all the same."""
    factors = smooth()
    index = dense.observed(pattern, (16, 14))
    rhs = dense.randn(len(index), 3) * torch.tensor([1.0, 1e-6, 1e4], dtype=torch.float64)
    _, report = solve(factors, index, number(noise), rhs, tolerance=tolerance)
    assert report.converged
    assert report.worst_residual <= tolerance


@pytest.mark.parametrize("pattern", ["random", "block"])
def test_tiny_noise_is_reached(pattern):
    index = dense.observed(pattern, (16, 14))
    rhs = dense.randn(len(index), 2)
    _, report = solve(smooth(), index, number(1e-6), rhs, tolerance=1e-5)
    assert report.converged


@pytest.mark.parametrize(
    "factors",
    [
        [dense.identity(6), dense.identity(5)],
        [dense.periodic(8), dense.periodic(6)],
        [torch.ones(6, 6, dtype=torch.float64), dense.se(5)],
        [dense.ard(9), dense.matern32(5)],
        [1e5 * dense.se(7), 1e-5 * dense.matern32(6)],
        [torch.zeros(4, 4, dtype=torch.float64), dense.se(5)],
    ],
    ids=["identity", "repeated", "rank one", "a group", "norms", "zero"],
)
def test_factors_with_any_spectrum_are_solved(factors):
    shape = tuple(len(factor) for factor in factors)
    index = dense.observed("random", shape)
    rhs = dense.randn(len(index), 2)
    solution, report = solve(factors, index, number(0.01), rhs)
    assert report.converged
    assert dense.relative(solution, exact(factors, index, number(0.01), rhs)) < 1e-7


@pytest.mark.parametrize("pattern", ["random", "block", "one observation", "none"])
def test_noise_of_axes_is_whitened(pattern):
    shape = (9, 8)
    index, noise = dense.observed(pattern, shape), axes(shape)
    rhs = dense.randn(len(index), 3)
    solution, report = solve(rough(shape), index, noise, rhs)
    assert report.converged
    assert dense.relative(solution, exact(rough(shape), index, noise, rhs)) < 1e-8


@pytest.mark.parametrize("kind", ["constant", "product"])
def test_batches_of_members_of_very_different_size(kind):
    """Members of very different size: no member may lose what is small only beside the others."""
    shape = (5, 4)
    index = dense.observed("random", shape)
    scales = torch.tensor([1.0, 1e-4, 1e4], dtype=torch.float64).view(3, 1, 1)
    factors = [scales * dense.random_psd(5, 1, batch=(3,)), dense.random_psd(4, 2, batch=(3,))]
    noise = torch.tensor([[1e-2], [1e-6], [1e2]], dtype=torch.float64) if kind == "constant" else axes(shape, 0.5, (3,))
    rhs = dense.randn(3, len(index), 2)
    solution, report = solve(factors, index, noise, rhs, tolerance=1e-9)
    assert report.residual.shape == (3, 2)
    assert report.converged
    expected = exact(factors, index, noise, rhs)
    for member in range(3):
        assert dense.relative(solution[member], expected[member]) < 1e-5, member


def test_a_batch_of_kernels_for_one_noise_and_one_kernel_for_a_batch_of_noises():
    shape = (6, 5)
    index = dense.observed("random", shape)
    rhs = dense.randn(2, len(index), 1)
    batch = [dense.random_psd(6, 1, batch=(2,)), dense.se(5)]
    solution, _ = solve(batch, index, number(0.1), rhs)
    assert dense.relative(solution, exact(batch, index, number(0.1), rhs)) < 1e-8
    noises = torch.tensor([[0.1], [3.0]], dtype=torch.float64)
    solution, _ = solve(rough(shape), index, noises, rhs)
    assert dense.relative(solution, exact(rough(shape), index, noises, rhs)) < 1e-8


@pytest.mark.parametrize("noise", [1e-2, 1e-4])
def test_float32_factors_are_refined_in_float64(noise):
    """Iterated in float32, refined in float64."""
    shape = (9, 8)
    single = [factor.float() for factor in (dense.matern32(9), dense.se(8, 0.4))]
    index = dense.observed("random", shape)
    rhs = dense.randn(len(index), 3)
    solution, report = solve(single, index, number(noise), rhs, tolerance=1e-6)
    assert report.converged
    rounded, _ = solve(single, index, number(noise), rhs.float(), tolerance=1e-6)
    assert rounded.dtype == torch.float32
    assert dense.relative(rounded, solution) < 1e-4


def test_columns_of_different_difficulty():
    index, noise = dense.observed("random", (9, 8)), number(1e-3)
    factors = [dense.matern32(9), dense.se(8, 0.4)]
    matrix = dense.system(factors, index, noise)
    vectors = torch.linalg.eigh(matrix).eigenvectors
    rhs = dense.randn(len(index), 6)
    rhs[:, 1], rhs[:, 2], rhs[:, 3], rhs[:, 4] = matrix[:, 0], vectors[:, -1], vectors[:, 0], 0.0
    rhs[:, 5] *= 1e-30
    solution, report = solve_system(make(factors, index, noise), rhs, method="spectral", tolerance=1e-9)
    assert report.converged
    assert bool((solution[:, 4] == 0).all())
    for column in (0, 1, 2, 3, 5):
        assert dense.relative(solution[:, column], torch.linalg.solve(matrix, rhs[:, column])) < 1e-5


def test_an_unsorted_index():
    index = dense.observed("random", (9, 8))
    index = index[torch.randperm(len(index), generator=torch.Generator().manual_seed(0))]
    rhs = dense.randn(len(index), 2)
    solution, _ = solve(rough((9, 8)), index, number(0.05), rhs)
    assert dense.relative(solution, exact(rough((9, 8)), index, number(0.05), rhs)) < 1e-8


@pytest.mark.parametrize("kind", ["constant", "product"])
def test_a_good_guess_saves_iterations(kind):
    """From a good guess: fewer iterations, the same solution. From the solution: none. From a bad one: no harm."""
    shape = (16, 14)
    factors = [dense.matern32(16), dense.matern32(14)]
    index = dense.observed("random", shape)
    noise = number(1e-2) if kind == "constant" else axes(shape)
    rhs = dense.randn(len(index), 2)
    cold, cold_report = solve(factors, index, noise, rhs, tolerance=1e-8)
    expected = exact(factors, index, noise, rhs)
    guess = expected + 1e-4 * expected.norm() * dense.randn(*expected.shape, seed=3) / len(index) ** 0.5
    warm, warm_report = solve(factors, index, noise, rhs, tolerance=1e-8, guess=guess)
    assert warm_report.iterations < cold_report.iterations
    assert dense.relative(warm, cold) < 1e-5
    _, again = solve(factors, index, noise, rhs, tolerance=1e-6, guess=expected)
    assert again.iterations == 0
    _, bad = solve(factors, index, noise, rhs, tolerance=1e-8, guess=1e8 * dense.randn(len(index), 2, seed=8))
    assert bad.converged


def test_iterations_run_out():
    index, noise = dense.observed("block", (9, 8)), number(1e-4)
    rhs = dense.randn(len(index), 3)
    with (
        record_solves() as solves,
        pytest.warns(NotConvergedWarning, match="'spectral' stopped after 3 iterations .* Try: more max_iterations"),
    ):
        _, report = solve(rough((9, 8)), index, noise, rhs, max_iterations=3)
    assert solves == [report]
    assert not report.converged
    assert report.iterations == 3


def test_a_converged_solve_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        index = dense.observed("random", (9, 8))
        solve(rough((9, 8)), index, number(0.1), dense.randn(len(index), 1))


def test_narrow_bases_make_fewer_flops_than_fill_gaps():
    shape = (60, 50)
    index = dense.observed("random", shape)
    rhs = dense.randn(len(index), 1)
    reports = {
        method: solve_system(make(smooth(shape, 0.5), index, number(0.01)), rhs, method=method)[1]
        for method in ("spectral", "fill")
    }
    assert reports["spectral"].converged
    assert reports["spectral"].flops < 0.5 * reports["fill"].flops


@pytest.mark.parametrize(("fraction", "most"), [(0.0, 1), (0.3, 16), (0.6, 26), (0.8, 38), (0.9, 55)])
def test_scattered_gaps_take_few_iterations(fraction, most):
    """Preconditioned by ``s2 / T + N / M``: without gaps that is the inverse."""
    shape = (24, 20)
    index = dense.observed("random" if fraction else "none", shape, fraction)
    _, report = solve(smooth(shape, 0.3), index, number(1e-2), dense.randn(len(index), 1), tolerance=1e-6)
    assert report.converged
    assert report.iterations <= most


@pytest.mark.parametrize("kind", ["per point", "duplicates", "no noise"])
def test_what_it_cannot_do_is_refused(kind):
    shape = (9, 8)
    index, noise, use = dense.observed("random", shape), number(0.1), "'ignore'"
    if kind == "duplicates":
        index = torch.cat([index, index[:1]])
    elif kind == "per point":
        noise = torch.linspace(0.1, 0.2, len(index), dtype=torch.float64)
    else:
        noise, use = number(0.0), "'fill'"
    rhs = dense.randn(len(index), 1)
    with pytest.raises(ValueError, match=f"gap_method: got 'spectral' .*{use}"):
        solve_system(make(rough(shape), index, noise), rhs, method="spectral")
    with settings.gap_method("spectral"), DENSE(0), pytest.raises(ValueError, match="gap_method: got 'spectral'"):
        dense.build(rough(shape), index, noise).solve(rhs)


def test_one_of_a_batch_without_noise_is_refused():
    index = dense.observed("random", (6, 5))
    noise = torch.tensor([[0.1], [0.0]], dtype=torch.float64)
    with pytest.raises(ValueError, match="'spectral' without noise"):
        solve_system(make(rough((6, 5)), index, noise), dense.randn(2, len(index), 1), method="spectral")


# -- what it is made of ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tolerance", [1e-2, 1e-6, 1e-12])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_the_truncated_basis_leaves_out_nothing_above_its_level(tolerance, batch):
    """``|K - Phi T Phi'|_2 <= level``, which costs a tenth of the tolerance in the residual."""
    scales = torch.logspace(-2, 2, 3, dtype=torch.float64).view(3, 1, 1) if batch else 1.0
    factors = [scales * dense.se(14, 0.4), dense.se(12, 0.6) + (0.0 * scales)]
    index = dense.observed("random", (14, 12))
    system = make(factors, index, number(1e-2))
    level = system.level(tolerance)
    assert 0 < level <= tolerance * 1e-2
    vectors, values = system.truncated(tolerance)
    phi = dense.kron(vectors)
    products = dense.kron_vectors(values)
    rebuilt = phi * torch.where(products >= level, products, 0.0).unsqueeze(-2) @ phi.mT
    kernel = dense.kron(factors)
    error = torch.linalg.matrix_norm(kernel - rebuilt, 2)
    assert bool((error <= level + 1e-13 * torch.linalg.matrix_norm(kernel, 2)).all())
    for q in vectors:
        eye = torch.eye(q.size(-1), dtype=torch.float64).expand(*batch, -1, -1)
        torch.testing.assert_close(q.mT @ q, eye, rtol=0, atol=1e-13)
    assert system.truncated(tolerance)[0][0] is vectors[0], "made once"
    flops = system.truncated_flops(tolerance)
    assert flops == pytest.approx(min(_orders(vectors)))
    if tolerance == 1e-2:
        assert flops < system.rotation_flops


def _orders(vectors):
    """FLOPs of expanding two axes, either first."""
    (m, r), (n, s) = [q.shape[-2:] for q in vectors]
    return 2.0 * (m * r * s + n * s * m), 2.0 * (n * s * r + m * r * n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_mask_marks_observations_and_is_kept(dtype):
    index = dense.observed("random", (6, 5))
    system = make(rough((6, 5)), index, number(0.1))
    mask = system.observed(dtype)
    assert mask.shape == (30, 1)
    assert mask.dtype == dtype
    assert torch.equal(mask.squeeze(-1).nonzero().squeeze(-1), index)
    assert set(mask.unique().tolist()) == {0.0, 1.0}
    assert system.observed(dtype) is mask


# -- operators: values and gradients ---------------------------------------------------------------------------------


def everything(factors, index, noise, rhs, build):
    """Solve, inv_quad and logdet, and the gradients of weighted sums of them in all inputs."""
    factors, noise, inputs = dense.with_leaves(factors, noise)
    (rhs,) = dense.leaves(rhs)
    solution, quad, logdet = build(factors, index, noise, rhs)
    result = {"solve": solution.detach(), "inv_quad": quad.detach(), "logdet": logdet.detach()}
    weights = dense.randn(*solution.shape, seed=2).to(solution.dtype)
    for name, value in (("solve", (weights * solution).sum()), ("inv_quad", quad.sum()), ("logdet", logdet.sum())):
        wanted = inputs if name == "logdet" else [*inputs, rhs]
        for i, gradient in enumerate(torch.autograd.grad(value, wanted, retain_graph=True)):
            result[f"d {name} / d {i}"] = dense.symmetric(gradient) if i < len(factors) else gradient
    return result


def by_hand(factors, index, noise, rhs):
    matrix = dense.system(factors, index, noise)
    batch = torch.broadcast_shapes(matrix.shape[:-2], rhs.shape[:-2])
    solution = torch.linalg.solve(matrix.expand(*batch, -1, -1), rhs.expand(*batch, -1, -1))
    return solution, (rhs * solution).sum((-2, -1)), torch.linalg.slogdet(matrix).logabsdet


def ours(factors, index, noise, rhs):
    operator = dense.build(factors, index, noise)
    return operator.solve(rhs), *operator.inv_quad_logdet(rhs, logdet=True)


def compare(factors, index, noise, *, columns=2, dtype=torch.float64, tolerance=1e-8, batch=()):
    def cast(value):
        return tuple(map(cast, value)) if isinstance(value, (tuple, list)) else value.to(dtype)

    rhs = dense.randn(*batch, len(index), columns, seed=1).to(dtype)
    factors, noise = cast(factors), cast(noise)
    wide = [factor.double() for factor in factors]
    wide_noise = tuple(a.double() for a in noise) if isinstance(noise, tuple) else noise.double()
    expected = everything(wide, index, wide_noise, rhs.double(), by_hand)
    accuracy = 1e-12 if dtype == torch.float64 else 1e-7
    with (
        DENSE(0),
        settings.logdet_method("exact"),
        settings.gap_method("spectral"),
        settings.solve_tolerance(accuracy),
        settings.train_tolerance(accuracy),
        record_solves() as solves,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        got = everything(factors, index, noise, rhs, ours)
    dense.check_each(got, expected, dtype, tolerance)
    assert {report.method for report in solves} == {"spectral"}


@pytest.mark.parametrize("shape", [(11,), (6, 5), (4, 3, 5), (3, 4, 2, 3)], ids=lambda shape: f"{len(shape)} axes")
@pytest.mark.parametrize("kind", ["constant", "product"])
def test_values_and_gradients(shape, kind):
    noise = number(0.05) if kind == "constant" else axes(shape, 0.5)
    compare(rough(shape), dense.observed("random", shape), noise)


@pytest.mark.parametrize("pattern", ["none", "one gap", "one observation", "block", "slice"])
def test_values_and_gradients_of_gap_patterns(pattern):
    compare(rough((6, 5)), dense.observed(pattern, (6, 5)), number(0.05))


def test_values_and_gradients_of_a_batch():
    factors = [dense.random_psd(5, 1, batch=(2,)), dense.random_psd(4, 2, batch=(2,))]
    compare(factors, dense.observed("random", (5, 4)), torch.tensor([[0.05], [1.0]]), batch=(2,))


def test_values_and_gradients_in_float32():
    compare(rough((6, 5)), dense.observed("random", (6, 5)), number(0.05), dtype=torch.float32, tolerance=2e-4)


def test_values_and_gradients_where_much_is_dropped():
    """A smooth kernel of numerical rank far below its size."""
    compare(smooth((14, 12), 0.8), dense.observed("random", (14, 12)), number(0.05), columns=1)


# -- whole models ----------------------------------------------------------------------------------------------------


def log_likelihood(model):
    model.train()
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    params = model.train_inputs if isinstance(model.likelihood, _pairs.PerLevelNoise) else ()
    return mll(model(*model.train_inputs), model.train_targets, *params).sum()


MODELS = ("two axes", "three axes with a group", "an output axis", "a noise per output", "a batch of three")


@pytest.mark.parametrize("case", MODELS)
def test_a_model_equals_a_dense_one(case):
    pair = _pairs.CASES[case](True)
    by_spectral = (DENSE(0), settings.gap_method("spectral"), settings.logdet_method("exact"))
    tight = (settings.train_tolerance(1e-11), settings.solve_tolerance(1e-10))
    with by_spectral[0], by_spectral[1], by_spectral[2], tight[0], tight[1], record_solves() as solves:
        value = log_likelihood(pair.ours)
        value.backward()
        pair.ours.eval()
        with torch.no_grad():
            posterior = pair.ours(pair.test_x)
            mean, variance = posterior.mean, posterior.variance
    assert "spectral" in {report.method for report in solves}
    assert all(report.converged for report in solves)
    with DENSE(10_000):
        expected = log_likelihood(pair.dense)
        expected.backward()
        assert value.item() == pytest.approx(expected.item(), rel=1e-8)
        parameters = zip(pair.ours.named_parameters(), pair.dense.parameters(), strict=True)
        for (name, own), other in parameters:
            assert torch.allclose(own.grad, other.grad, rtol=1e-6, atol=1e-8), name
        if case != "a noise per output":  # whose posterior GPyTorch has no likelihood for
            pair.dense.eval()
            with torch.no_grad():
                reference = pair.dense(pair.test_x)
                assert torch.allclose(mean, reference.mean, rtol=1e-6, atol=1e-6)
                assert torch.allclose(variance, reference.variance, rtol=1e-6, atol=1e-6)
            return
        with torch.no_grad():
            (x,), y = pair.dense.train_inputs, pair.dense.train_targets
            joint = pair.dense.forward(torch.cat([x, pair.test_x]))
            covariance, n = joint.covariance_matrix, len(y)
            noisy = covariance[:n, :n] + torch.diag(pair.dense.likelihood.noise[x[:, -1].long()])
            by_the_book = joint.mean[n:] + covariance[n:, :n] @ torch.linalg.solve(noisy, y - joint.mean[:n])
        assert torch.allclose(mean, by_the_book, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", ["a noise per point", "a sum of two grid kernels"])
def test_a_model_that_it_does_not_apply_to_says_so(case):
    """As 'fill' does, and does not quietly go by another method."""
    model = _pairs.CASES[case](True).ours.eval()
    x = _pairs.CASES[case](True).test_x
    with DENSE(0), settings.gap_method("spectral"), torch.no_grad(), record_solves() as solves:
        with pytest.raises(ValueError, match="gap_method: got 'spectral'"):
            _ = model(x).mean
        assert not solves


def test_a_model_in_float32():
    """Predictions within what float32 allows of the dense float64 ones, at test points on and off the grid."""
    pair = _pairs.CASES["two axes"](True)
    pair.dense.eval()
    with torch.no_grad(), DENSE(10_000):
        expected = pair.dense(pair.test_x).mean
    axes32, values = _pairs.gappy((20, 25), 0.4, 0)
    grid, x, y = gaps.from_array(values.float(), [axis.float() for axis in axes32])
    kernel = gpytorch.kernels.ScaleKernel(
        gaps.GappyGridKernel(
            [
                _pairs.with_length(gpytorch.kernels.RBFKernel(), 0.3),
                _pairs.with_length(gpytorch.kernels.MaternKernel(), 0.4),
            ],
            grid,
        )
    )
    model = _pairs.Model(x, y, gaps.GappyGridLikelihood(), kernel).eval()
    with torch.no_grad(), DENSE(0), settings.gap_method("spectral"), record_solves() as solves:
        mean = model(pair.test_x.float()).mean
    assert mean.dtype == torch.float32
    assert {report.method for report in solves} == {"spectral"}
    assert dense.relative(mean, expected) < 1e-3
    assert math.isfinite(float(mean.sum()))
