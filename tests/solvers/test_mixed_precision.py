"""Float64 models iterated in float32 and refined in float64: the same residual, against dense float64."""

import warnings

import linear_operator
import pytest
import torch

from gpytorch_gaps import NotConvergedWarning, record_solves, settings
from gpytorch_gaps.linalg.products import cast_without_denormals
from gpytorch_gaps.operators import SelectedKroneckerOperator
from gpytorch_gaps.operators.upstream import solve_matrix
from gpytorch_gaps.preconditioners import low_rank
from gpytorch_gaps.preconditioners.low_rank import LowRankPreconditioner
from gpytorch_gaps.solvers import refine, solve
from gpytorch_gaps.solvers.config import SolveConfig
from gpytorch_gaps.solvers.formulations.spectral import SpectralGaps
from gpytorch_gaps.solvers.gap_system import GapSystem
from gpytorch_gaps.solvers.goal import Goal
from gpytorch_gaps.solvers.kronecker_term import KroneckerTerm
from gpytorch_gaps.solvers.logdet.stochastic import log_quadrature
from gpytorch_gaps.solvers.matrix_system import MatrixSystem
from gpytorch_gaps.solvers.preconditioning import eigen_preconditioner, low_rank_approximation
from tests import _dense as dense
from tests._covering import covering, in_turn
from tests.workflow import _pairs

SHAPE = (20, 18)
INDEX = dense.observed("random", SHAPE)
TINY = torch.finfo(torch.float32).tiny


@pytest.fixture(autouse=True)
def _iterative():
    with linear_operator.settings.max_cholesky_size(0):
        yield


@pytest.fixture
def precisions(monkeypatch):
    """Precisions of all systems on which conjugate gradients were started."""
    seen = []
    true = refine.conjugate_gradients

    def spy(matmul, rhs, **arguments):
        seen.append(rhs.dtype)
        return true(matmul, rhs, **arguments)

    monkeypatch.setattr(refine, "conjugate_gradients", spy)
    return seen


def factors():
    return [dense.se(SHAPE[0], 0.2), dense.matern32(SHAPE[1])]


def constant(value):
    return torch.tensor([value], dtype=torch.float64)


def single(noise=0.01):
    return dense.build(factors(), INDEX, constant(noise)), dense.system(factors(), INDEX, constant(noise))


def product_noise():
    noise = (0.01 + 0.05 * torch.rand(SHAPE[0], dtype=torch.float64), 0.5 + torch.rand(SHAPE[1], dtype=torch.float64))
    return dense.build(factors(), INDEX, noise), dense.system(factors(), INDEX, noise)


def a_sum(noise=0.01):
    terms = (factors(), [dense.matern32(SHAPE[0], 0.1), dense.se(SHAPE[1], 0.1)])
    first, second = (SelectedKroneckerOperator(*own, row_index=INDEX, col_index=INDEX) for own in terms)
    matrix = sum(dense.select(dense.kron(own), INDEX) for own in terms) + noise * dense.identity(len(INDEX))
    return (first + second).add_diagonal(constant(noise)), matrix


SOLVES = [
    *((make, method, rank) for make in (single, product_noise) for method, rank in (("fill", 0), ("spectral", 0))),
    *((make, "ignore", rank) for make in (single, product_noise, a_sum) for rank in (0, 25, None)),
    *((make, "auto", None) for make in (single, product_noise, a_sum)),
]


@in_turn(solve=SOLVES, tolerance=[1e-6, 1e-8], columns=[1, 1, 3, 3])
def test_the_residual_is_that_asked_for(solve, tolerance, columns, precisions):
    make, method, rank = solve
    torch.manual_seed(0)
    operator, matrix = make()
    rhs = dense.randn(len(INDEX), columns)
    with (
        settings.gap_method(method),
        settings.preconditioner_rank(rank),
        settings.solve_tolerance(tolerance),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        with settings.mixed_precision(), record_solves() as record:
            solution = operator.solve(rhs)
        assert torch.float32 in precisions or record[0].iterations <= columns  # a preconditioner that is the matrix
        precisions.clear()
        plain = make_again(make).solve(rhs)
        assert torch.float32 not in precisions
    assert solution.dtype == torch.float64
    assert record[0].converged
    left = (rhs - matrix @ solution).norm(dim=0) / rhs.norm(dim=0)
    assert float(left.max()) <= 1.01 * tolerance
    torch.testing.assert_close(record[0].residual, left, rtol=1e-3, atol=1e-3 * tolerance)
    # ||A (a - b)|| is at most what both residuals are
    apart = (matrix @ (solution - plain)).norm(dim=0) / rhs.norm(dim=0)
    assert float(apart.max()) <= 2.02 * tolerance


def make_again(make):
    torch.manual_seed(0)
    return make()[0]


def smooth(noise):
    own = [dense.se(SHAPE[0], 0.4), dense.se(SHAPE[1], 0.5)]
    return dense.build(own, INDEX, constant(noise)), dense.system(own, INDEX, constant(noise))


def smooth_sum(noise):
    terms = [dense.se(SHAPE[0], 0.4), dense.se(SHAPE[1], 0.5)], [dense.se(SHAPE[0], 0.3), dense.se(SHAPE[1], 0.4)]
    first, second = (SelectedKroneckerOperator(*own, row_index=INDEX, col_index=INDEX) for own in terms)
    matrix = sum(dense.select(dense.kron(own), INDEX) for own in terms) + noise * dense.identity(len(INDEX))
    return (first + second).add_diagonal(constant(noise)), matrix


def three_times_as_many(make, noise, method, tolerance):
    """A mixed solve with three times the iterations that float64 takes alone: its report and its residual."""
    (operator, matrix), rhs = make(noise), dense.randn(len(INDEX), 1)
    with settings.gap_method(method), settings.preconditioner_rank(0), settings.solve_tolerance(tolerance):
        with settings.max_iterations(5000), record_solves() as plain:
            operator.solve(rhs)
        assert plain[0].converged
        few = settings.max_iterations(3 * plain[0].iterations)
        with settings.mixed_precision(), few, warnings.catch_warnings(), record_solves() as record:
            warnings.simplefilter("ignore")
            solution = make(noise)[0].solve(rhs)
    return record[0], float((rhs - matrix @ solution).norm() / rhs.norm())


@pytest.mark.parametrize("method", ["fill", "spectral"])
def test_condition_numbers_beyond_float32(method):
    assert float(torch.linalg.cond(smooth(1e-7)[1])) > 1e8
    report, residual = three_times_as_many(smooth, 1e-7, method, 1e-7)
    assert report.converged
    assert residual <= 1.1e-7  # float64's own rounding


@pytest.mark.parametrize("make", [smooth, smooth_sum])
def test_where_float32_cannot_contract_float64_goes_on(make, precisions):
    report, residual = three_times_as_many(make, 1e-5, "ignore", 1e-8)
    assert report.converged
    assert residual <= 1.01e-8
    first = precisions.index(torch.float32)
    assert torch.float64 in precisions[first:]


@pytest.mark.parametrize("tolerance", [1e-6, 1e-8])
@pytest.mark.parametrize(
    ("make", "method"),
    [
        (_pairs.two_axes, "fill"),
        (_pairs.two_axes, "ignore"),
        (_pairs.two_axes, "spectral"),
        (_pairs.noise_per_output, "auto"),
        (_pairs.sum_of_two, "auto"),
        (_pairs.plus_linear, "auto"),
    ],
)
def test_posterior_means_agree_with_dense_float64(make, method, tolerance):
    pair, means = make(small=True), {}
    rank = settings.preconditioner_rank(0 if method == "ignore" else None)
    with settings.gap_method(method), rank, settings.solve_tolerance(tolerance), torch.no_grad():
        for mixed in (False, True):
            pair.ours.train()
            pair.ours.eval()
            with settings.mixed_precision(mixed):
                means[mixed] = pair.ours(pair.test_x).mean
    pair.dense.eval()
    inputs = pair.dense.train_inputs[0]
    with torch.no_grad(), linear_operator.settings.max_cholesky_size(10**4):
        noisy = pair.dense.likelihood(pair.dense.forward(inputs), inputs).covariance_matrix
        cross = pair.dense.covar_module(pair.test_x, inputs).to_dense()
        centred = pair.dense.train_targets - pair.dense.mean_module(inputs)
        exact = pair.dense.mean_module(pair.test_x) + cross @ torch.linalg.solve(noisy, centred)
        # a residual r of the weights is an error of k_* A^-1 r of the mean
        reach = float(torch.linalg.matrix_norm(torch.linalg.solve(noisy, cross.mT), 2) * centred.norm())
    for mean in means.values():
        assert float((mean - exact).norm()) <= 1.01 * tolerance * reach
    assert float((means[True] - means[False]).norm()) <= 2.02 * tolerance * reach
    assert tolerance * reach < 1e-3 * float(exact.norm())  # the bound says something


# -- cast_without_denormals ------------------------------------------------------------


def test_narrowed_drops_what_is_nothing_in_float32_and_keeps_the_rest():
    matrix = torch.tensor([[2.0, 1e-11, -1e-11], [1.9e-12, -1.9e-12, 2.1e-12], [0.0, 1e-30, 1e-300]]).double()
    result = cast_without_denormals(matrix, torch.float32)
    assert result.dtype == torch.float32
    expected = torch.tensor([[2.0, 1e-11, -1e-11], [0.0, 0.0, 2.1e-12], [0.0, 0.0, 0.0]])
    assert torch.equal(result, expected)


def test_narrowed_looks_at_each_matrix_of_a_batch():
    one = torch.tensor([[1.0, 1e-10], [1e-10, 1e-14]]).double()
    batch = torch.stack([one, 1e6 * one, torch.zeros_like(one)])
    expected = torch.tensor([[1.0, 1e-10], [1e-10, 0.0]])
    assert torch.equal(cast_without_denormals(batch, torch.float32)[0], expected)
    torch.testing.assert_close(cast_without_denormals(batch, torch.float32)[1], 1e6 * expected, rtol=1e-6, atol=0)
    assert torch.equal(cast_without_denormals(batch, torch.float32)[2], torch.zeros(2, 2))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_narrowed_leaves_its_own_precision_untouched(dtype):
    matrix = torch.tensor([[1.0, 1e-30], [1e-30, 1e-35]], dtype=dtype)
    assert cast_without_denormals(matrix, dtype) is matrix
    assert torch.equal(cast_without_denormals(matrix, torch.float64), matrix.double())


def test_narrowed_without_columns():
    assert cast_without_denormals(torch.zeros(5, 0, dtype=torch.float64), torch.float32).shape == (5, 0)


def short(size, length=0.005):
    x = torch.linspace(0, 1, size, dtype=torch.float64)
    return torch.exp(-(x[:, None] - x).abs() / length)


def denormals(matrix):
    return int(((matrix != 0) & (matrix.abs() < TINY)).sum())


def test_no_denormal_numbers_in_float32():
    own = [short(60), short(50)]
    assert denormals(own[0].float()) > 0  # which a plain cast has
    index = dense.observed("random", (60, 50))
    system = GapSystem(own, index, constant(0.1))
    term = KroneckerTerm(own, {})
    term.matmul(torch.zeros(3000, 1))
    preconditioner, rhs = eigen_preconditioner(system, (40,)), dense.randn(len(index), 1)
    narrow = [
        *system.factors(torch.float32),
        *term.factors(torch.float32),
        *system.eigen(torch.float32).vectors,
        *preconditioner._narrow[0],
        *SpectralGaps(system, rhs, Goal.of(system, rhs, 1e-6))._in(torch.float32)[0],
    ]
    for matrix in narrow:
        assert matrix.dtype == torch.float32
        assert denormals(matrix) == 0
    products = [dense.kron([one[:5], other[:5]]) for one, other in (narrow[:2], narrow[2:4])]
    assert [denormals(product) for product in products] == [0, 0]


# -- the preconditioner in float32 -------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [1, 12])
@pytest.mark.parametrize("noise", [0.5, 1e-2, "points"])
def test_narrow_solves_are_close_to_those_in_float64(noise, columns, monkeypatch):
    monkeypatch.setattr(low_rank, "_LARGE", SHAPE[0] * SHAPE[1])
    diagonal = 0.05 + 0.1 * torch.rand(len(INDEX), dtype=torch.float64) if noise == "points" else constant(noise)
    preconditioner = eigen_preconditioner(GapSystem(factors(), INDEX, diagonal), (40,))
    assert preconditioner._float32_will_do
    rhs = dense.randn(len(INDEX), columns)
    for _ in range(6):  # by triangular solves first, then by the inverse
        exact, narrow = preconditioner.solve(rhs), preconditioner.solve(rhs.float())
        assert narrow.dtype == torch.float32
        ratio = float(preconditioner.coefficients.max() / preconditioner.diagonal.min())
        assert 0.0 < dense.relative(narrow, exact) < 2.0 * torch.finfo(torch.float32).eps * ratio**0.5
    full = preconditioner.matmul(exact)
    assert dense.relative(full, rhs) < 1e-10


def test_a_ratio_beyond_float32_is_solved_in_float64(monkeypatch):
    monkeypatch.setattr(low_rank, "_LARGE", 1)
    preconditioner = low_rank_approximation(GapSystem(factors(), INDEX, constant(1e-6)), (40,))
    assert not preconditioner._float32_will_do
    rhs = dense.randn(len(INDEX), 2).float()
    assert torch.equal(preconditioner.solve(rhs), preconditioner.solve(rhs.double()).float())


@pytest.mark.parametrize(("large", "narrow"), [(SHAPE[0] * SHAPE[1], True), (SHAPE[0] * SHAPE[1] + 1, False)])
def test_small_grids_are_solved_in_float64(large, narrow, monkeypatch):
    """On small grids, float32 would save no time."""
    monkeypatch.setattr(low_rank, "_LARGE", large)
    preconditioner = eigen_preconditioner(GapSystem(factors(), INDEX, constant(0.5)), (40,))
    assert preconditioner._float32_will_do == narrow
    rhs = dense.randn(len(INDEX), 12).float()  # as many columns as are solved by the same triangular solves each time
    result = preconditioner.solve(rhs)
    assert result.dtype == torch.float32
    assert torch.equal(result, preconditioner.solve(rhs.double()).float()) == (not narrow)


@pytest.mark.parametrize("large", [1, 10**9])
def test_a_preconditioner_of_nothing_but_noise_in_both_precisions(large, monkeypatch):
    monkeypatch.setattr(low_rank, "_LARGE", large)
    nothing = torch.zeros(1, 0, dtype=torch.long)
    alone = torch.ones(6, 1, dtype=torch.float64)
    diagonal = torch.full((6,), 2.0, dtype=torch.float64)
    preconditioner = LowRankPreconditioner([alone], nothing, alone.new_zeros(0), torch.arange(6), diagonal)
    for dtype in (torch.float64, torch.float32):
        assert torch.equal(preconditioner.solve(torch.ones(6, 1, dtype=dtype)), torch.full((6, 1), 0.5, dtype=dtype))


# -- column by column --------------------------------------------------------------------------------------------------


def both_ways(monkeypatch, *arguments, **named):
    found = []
    for rows in (10**9, 1):
        monkeypatch.setattr(solve, "_ONE_BY_ONE_ROWS", rows)
        found.append(solve.solve_with_lanczos(*arguments, **named))
    return found


@covering(
    lanczos=[False, True],
    rank=[0, 25],
    shape=[(9, 8), (25, 24)],
    mixed_precision=[False, True],
)
def test_column_by_column_is_all_at_once(shape, rank, lanczos, mixed_precision, monkeypatch):
    index = dense.observed("random", shape)
    own = [dense.se(shape[0], 0.2), dense.matern32(shape[1])]
    system, matrix = GapSystem(own, index, constant(0.1)), dense.system(own, index, constant(0.1))
    rhs = dense.randn(len(index), 5)
    rhs[:, 4] *= 1e-3
    preconditioner = eigen_preconditioner(system, (rank,)) if rank else None
    exact = torch.linalg.solve(matrix, rhs)
    config = SolveConfig(tolerance=1e-10, mixed_precision=mixed_precision)
    whole, single = both_ways(monkeypatch, system, rhs, preconditioner, config, lanczos=lanczos)
    for result in (whole, single):
        assert result.report.converged
        assert result.solution.shape == result.residual.shape == rhs.shape
        assert result.report.residual.shape == (5,)
        left = (rhs - matrix @ result.solution).norm(dim=0) / rhs.norm(dim=0)
        torch.testing.assert_close(result.report.residual, left, rtol=1e-2, atol=1e-13)
        torch.testing.assert_close(result.residual, rhs - matrix @ result.solution, rtol=1e-2, atol=1e-12)
        assert dense.relative(result.solution, exact) < 1e-8
        assert (result.lanczos is None) == (not lanczos)
    if lanczos:
        # z'log(P^-1/2 A P^-1/2)z of the whitened probe, written out
        half = dense.identity(len(index))
        if rank:
            values, vectors = torch.linalg.eigh(eigen_preconditioner(system, (rank,)).matmul(half))
            half = vectors @ torch.diag(values.rsqrt()) @ vectors.mT
        values, vectors = torch.linalg.eigh(half @ matrix @ half)
        white = half @ rhs
        weights = (vectors.mT @ white).square() / white.square().sum(0)
        expected = len(index) * (weights * values.log().unsqueeze(-1)).sum(0)
        close = 1e-4 if mixed_precision else 1e-8
        for result in (whole, single):
            assert result.lanczos.shape[0] == 5
            found = log_quadrature(result.lanczos, len(index))
            assert float((found - expected).abs().max()) < close * len(index)


def test_each_column_stops_where_it_is_done(monkeypatch):
    """An eigenvector takes one iteration, whatever its neighbours do."""
    values, vectors = torch.linalg.eigh(dense.random_psd(40))
    matrix = (vectors * values) @ vectors.mT
    rhs = torch.cat([vectors[:, :1], dense.randn(40, 1)], -1)
    products = []

    def matmul(x):
        products.append(x.size(-1))
        return matrix @ x

    system = MatrixSystem(matmul, 40, rhs.device)
    whole, single = both_ways(monkeypatch, system, rhs, None, SolveConfig(tolerance=1e-8))
    assert set(products) == {1, 2}
    sizes = [int((torch.diagonal(t) != 1.0).sum()) for t in single.lanczos]
    assert sizes[0] == 1
    assert sizes[1] == single.lanczos.size(-1) == single.report.iterations > 5
    torch.testing.assert_close(single.lanczos[0, 0, 0], values[0])
    for result in (whole, single):
        expected = 40 * torch.stack([values[0].log(), ((vectors.mT @ rhs[:, 1]).square() * values.log()).sum()])
        expected[1] /= rhs[:, 1].square().sum()
        torch.testing.assert_close(log_quadrature(result.lanczos, 40), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("mixed_precision", [False, True])
@pytest.mark.parametrize("rows", [10**9, 1])
def test_what_did_not_converge_still_warns(rows, mixed_precision, monkeypatch):
    monkeypatch.setattr(solve, "_ONE_BY_ONE_ROWS", rows)
    _, matrix = single()
    rhs = torch.cat([torch.zeros(len(INDEX), 1).double(), dense.randn(len(INDEX), 2)], -1)
    product = lambda x: matrix.to(x.dtype) @ x  # noqa: E731
    config = SolveConfig(max_iterations=3, mixed_precision=mixed_precision)
    result = solve.solve_with_lanczos(MatrixSystem(product, len(INDEX), rhs.device), rhs, None, config)
    assert not result.report.converged
    assert result.report.iterations <= 3
    left = (rhs - matrix @ result.solution).norm(dim=0)
    assert float(left[0]) == float(result.report.residual[0]) == 0.0
    torch.testing.assert_close(result.report.residual[1:], left[1:] / rhs[:, 1:].norm(dim=0), rtol=1e-6, atol=0)
    few = settings.max_iterations(3), settings.mixed_precision(mixed_precision)
    with few[0], few[1], pytest.warns(NotConvergedWarning, match="stopped after 3 iterations"):
        solve_matrix(product, rhs, None, 0, torch.Size())


@pytest.mark.parametrize(
    ("make", "method"), [(single, "ignore"), (single, "fill"), (single, "spectral"), (a_sum, "ignore")]
)
def test_mixed_solves_that_did_not_converge_still_warn(make, method):
    operator, _ = make()
    few = settings.max_iterations(2), settings.preconditioner_rank(0), settings.gap_method(method)
    with few[0], few[1], few[2], settings.mixed_precision(), pytest.warns(NotConvergedWarning, match="stopped after"):
        operator.solve(dense.randn(len(INDEX), 1))


@pytest.mark.parametrize("make", [single, a_sum])
def test_log_determinants_are_those_of_float64(make):
    """The same probes, by Lanczos in float32: no further off than its rounding."""
    found, gradients = {}, {}
    for mixed in (False, True):
        torch.manual_seed(2)
        operator, matrix = make(0.05)
        operator.requires_grad_(True)
        with (
            settings.mixed_precision(mixed),
            settings.logdet_method("stochastic"),
            settings.preconditioner_rank(20),
            settings.train_tolerance(1e-10),
            linear_operator.settings.num_trace_samples(8),
        ):
            quad, logdet = operator.inv_quad_logdet(dense.randn(len(INDEX), 1), logdet=True)
        found[mixed] = quad.detach(), logdet.detach()
        (quad + logdet).backward()
        gradients[mixed] = [part.grad for part in operator.representation() if part.grad is not None]
    torch.testing.assert_close(found[True][0], found[False][0], rtol=1e-8, atol=0)
    assert abs(float(found[True][1] - found[False][1])) < 1e-5 * len(INDEX)
    exact = (dense.randn(len(INDEX), 1) * torch.linalg.solve(matrix, dense.randn(len(INDEX), 1))).sum()
    torch.testing.assert_close(found[True][0], exact, rtol=1e-8, atol=0)
    assert gradients[True]
    for one, other in zip(gradients[True], gradients[False], strict=True):
        assert dense.relative(one, other) < 1e-4
