"""A test for every proposition and numbered equation of Evans & Nair (2018), named after its label.

Values and gradients against dense float64 algebra: 1e-8 relative on exact paths, with solves asked for 1e-12.
"""

import math
import warnings
from itertools import pairwise

import linear_operator
import pytest
import torch
from linear_operator.operators import ConstantDiagLinearOperator

from gpytorch_gaps import NotConvergedWarning, record_solves, settings
from gpytorch_gaps.linalg.eigen import kron_eigh
from gpytorch_gaps.operators import (
    FillGapsOperator,
    PenalizedGapsOperator,
    SelectedKroneckerAddedDiagOperator,
    SelectedKroneckerOperator,
)
from gpytorch_gaps.preconditioners import EigenPreconditioner, ShiftedEigenPreconditioner
from gpytorch_gaps.solvers.gap_system import GapSystem
from gpytorch_gaps.solvers.logdet.whole_grid import gap_side_logdet
from tests import _dense as dense
from tests._dense import data_side_logdet, solve_system

EXACT = 1e-8
SHAPE = (8, 7, 3)
CELLS = math.prod(SHAPE)


@pytest.fixture(autouse=True)
def _iterative():
    with (
        linear_operator.settings.max_cholesky_size(0),
        settings.solve_tolerance(1e-12),
        settings.train_tolerance(1e-12),
    ):
        yield


def number(value):
    return torch.tensor([value], dtype=torch.float64)


@pytest.fixture
def factors():
    return [dense.matern32(8), dense.se(7, 0.25), dense.random_psd(3)]


@pytest.fixture(params=["random", "block", "slice"])
def index(request):
    return dense.observed(request.param, SHAPE)


@pytest.fixture
def rhs(index):
    return dense.randn(len(index), 2, seed=7)


def grid_matrix(factors, noise):
    """``A = K + s2 I``, whole grid."""
    kernel = dense.kron(factors)
    return kernel + noise * torch.eye(kernel.size(-1), dtype=torch.float64)


def compare_gradients(function, reference, factors, noise, tolerance=EXACT):
    """Gradients of a scalar of (factors, noise) for every factor, symmetrised, and for the noise."""
    results = []
    for make in (function, reference):
        own, own_noise, inputs = dense.with_leaves(factors, noise)
        results.append((*dense.gradients(make(own, own_noise), inputs, len(own)),))
    for got, expected in zip(*results, strict=True):
        assert dense.relative(got, expected) < tolerance


# -- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 30, None], ids=["plain", "rank 30", "rank chosen"])
def test_thm_IG(factors, index, rhs, rank):
    """``W (K + s2 I) W' a_X = y_X`` has the solution of ``(K_XX + s2 I) a_X = y_X``."""
    noise = number(0.02)
    selection = torch.eye(CELLS, dtype=torch.float64)[index]
    matrix = selection @ grid_matrix(factors, noise) @ selection.mT
    assert dense.relative(matrix, dense.system(factors, index, noise)) < 1e-15
    with settings.gap_method("ignore"), settings.preconditioner_rank(rank), record_solves() as solves:
        solution = dense.build(factors, index, noise).solve(rhs)
        weights = dense.randn(*rhs.shape)
        compare_gradients(
            lambda f, s: (weights * dense.build(f, index, s).solve(rhs)).sum(),
            lambda f, s: (weights * torch.linalg.solve(dense.system(f, index, s), rhs)).sum(),
            factors,
            noise,
        )
    assert dense.relative(solution, torch.linalg.solve(matrix, rhs)) < EXACT
    assert {report.method for report in solves} == {"ignore"}


def test_thm_FG(factors, index, rhs):
    """``V A^-1 V' y_Z = -V A^-1 W' y_X`` gives ``a_Z = 0``, ``a_X`` of the original system, the mean at the gaps."""
    noise, gaps = number(0.02), dense.gaps_of(index, SHAPE)
    inverse = grid_matrix(factors, noise).inverse()
    filled = FillGapsOperator(*factors, noise=noise, gap_index=gaps).solve(-inverse[gaps][:, index] @ rhs)
    exact = torch.linalg.solve(dense.system(factors, index, noise), rhs)
    mean = dense.select(dense.kron(factors), gaps, index) @ exact
    assert dense.relative(filled, mean) < EXACT
    responses = torch.zeros(CELLS, 2, dtype=torch.float64)
    responses[index], responses[gaps] = rhs, filled
    weights = inverse @ responses
    assert float(weights[gaps].abs().max()) < 1e-9 * float(weights[index].abs().max())
    assert dense.relative(weights[index], exact) < EXACT
    with settings.gap_method("fill"), record_solves() as solves:
        assert dense.relative(dense.build(factors, index, noise).solve(rhs), exact) < EXACT
        cotangent = dense.randn(*rhs.shape)
        compare_gradients(
            lambda f, s: (cotangent * dense.build(f, index, s).solve(rhs)).sum(),
            lambda f, s: (cotangent * torch.linalg.solve(dense.system(f, index, s), rhs)).sum(),
            factors,
            noise,
        )
    assert {report.method for report in solves} == {"fill"}


def test_eqn_FG_matrix(factors, index):
    """The operator is ``V (K + s2 I)^-1 V'``, entry by entry, and so are its gradients."""
    noise, gaps = number(0.02), dense.gaps_of(index, SHAPE)
    operator = FillGapsOperator(*factors, noise=noise, gap_index=gaps)
    matrix = dense.select(grid_matrix(factors, noise).inverse(), gaps)
    assert dense.relative(operator.to_dense(), matrix) < EXACT
    assert dense.relative(operator.diagonal(), matrix.diagonal()) < EXACT
    left, right = dense.randn(len(gaps), 2, seed=1), dense.randn(len(gaps), 2, seed=2)
    compare_gradients(
        lambda f, s: (left * (FillGapsOperator(*f, noise=s, gap_index=gaps) @ right)).sum(),
        lambda f, s: (left * (dense.select(grid_matrix(f, s).inverse(), gaps) @ right)).sum(),
        factors,
        noise,
    )


def test_eqn_FG_no_noise(factors, index, rhs):
    """Without noise, ``V K^-1 V' y_Z = -V K^-1 W' y_X`` interpolates: ``y_Z = K_ZX K_XX^-1 y_X``."""
    gaps, kernel = dense.gaps_of(index, SHAPE), dense.kron(factors)
    inverse = kernel.inverse()
    exact = torch.linalg.solve(dense.select(kernel, index), rhs)
    filled = FillGapsOperator(*factors, noise=0.0, gap_index=gaps).solve(-inverse[gaps][:, index] @ rhs)
    # the condition number of K is about 1e6 here, which is what is left of 1e-12
    assert dense.relative(filled, dense.select(kernel, gaps, index) @ exact) < 1e-7
    solution, report = solve_system(GapSystem(factors, index, number(0.0)), rhs, method="fill", tolerance=1e-9)
    assert report.converged
    assert dense.relative(solution, exact) < 1e-7


def test_eqn_FG_no_noise_chosen_automatically(factors, rhs, index):
    """Zero noise leaves ignore-gaps without a bound on its condition number; that must not stop the choice."""
    solution, report = solve_system(GapSystem(factors, index, number(0.0)), rhs, tolerance=1e-9, dense_size=0)
    assert report.converged
    assert dense.relative(solution, torch.linalg.solve(dense.select(dense.kron(factors), index), rhs)) < 1e-7


def test_sec_PG_limit(factors, index, rhs):
    """``(K + gamma R + s2 I) a = y`` with any values in the gaps tends to ``a_X`` like 1 / gamma, ``R_ZZ = I``."""
    noise, gaps = number(0.02), dense.gaps_of(index, SHAPE)
    exact = torch.linalg.solve(dense.system(factors, index, noise), rhs)
    arbitrary = 3.0 * dense.randn(CELLS, 2, seed=9)
    arbitrary[index] = rhs
    penalties = [1e3, 1e4, 1e5, 1e6]
    errors = []
    for penalty in penalties:
        operator = PenalizedGapsOperator(*factors, noise=noise, gap_index=gaps, penalty=penalty)
        diagonal = torch.zeros(CELLS, dtype=torch.float64).index_fill(0, gaps, penalty)
        matrix = grid_matrix(factors, noise) + torch.diag(diagonal)
        assert dense.relative(operator.to_dense(), matrix) < 1e-14
        solution = operator.solve(arbitrary)
        assert dense.relative(solution, torch.linalg.solve(matrix, arbitrary)) < EXACT
        errors.append(dense.relative(solution[index], exact))
    ratios = [a / b for a, b in pairwise(errors)]
    assert ratios[1:] == pytest.approx([10.0, 10.0], rel=0.05)
    assert errors[-1] < 1e-3


def test_sec_PG_limit_of_the_method(factors, index, rhs):
    """``gap_method("penalize")`` with a given penalty: error and reported residual fall like 1 / gamma."""
    noise = number(0.02)
    exact = torch.linalg.solve(dense.system(factors, index, noise), rhs)
    errors, residuals = [], []
    for penalty in (1e4, 1e5, 1e6):
        with (
            settings.gap_method("penalize"),
            settings.gap_penalty(penalty),
            record_solves() as solves,
            pytest.warns(NotConvergedWarning),
        ):
            solution = dense.build(factors, index, noise).solve(rhs)
        errors.append(dense.relative(solution, exact))
        residuals.append(solves[-1].worst_residual)
        assert not solves[-1].converged
    assert [a / b for a, b in pairwise(errors)] == pytest.approx([10.0, 10.0], rel=0.05)
    assert [a / b for a, b in pairwise(residuals)] == pytest.approx([10.0, 10.0], rel=0.05)
    with settings.gap_method("penalize"), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dense.relative(dense.build(factors, index, noise).solve(rhs), exact) < EXACT


# -- preconditioners -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 10, 60, CELLS])
def test_eqn_IG_precon(factors, index, rank):
    """``P^-1`` by the paper's formula, and the inverse of ``W Q S_p' T_p S_p Q' W' + s2 I``."""
    noise = number(0.02)
    values, vectors = torch.linalg.eigh(dense.kron(factors))
    values, basis = values.flip(0)[:rank], vectors.flip(1)[index][:, :rank]
    matrix = basis @ torch.diag(values) @ basis.mT + noise * torch.eye(len(index), dtype=torch.float64)
    inner = noise * torch.eye(rank, dtype=torch.float64) + torch.diag(values) @ basis.mT @ basis
    formula = (torch.eye(len(index)) - basis @ torch.linalg.solve(inner, torch.diag(values) @ basis.mT)) / noise
    eye = torch.eye(len(index), dtype=torch.float64)
    preconditioner = EigenPreconditioner(kron_eigh(factors), index, noise, rank)
    assert preconditioner.rank == rank
    assert dense.relative(preconditioner.solve(eye), formula) < EXACT
    assert dense.relative(preconditioner.solve(eye), matrix.inverse()) < EXACT
    assert dense.relative(preconditioner.matmul(eye), matrix) < 1e-12
    assert dense.relative(preconditioner.logdet(), torch.logdet(matrix)) < EXACT
    if rank == CELLS:
        assert dense.relative(matrix, dense.system(factors, index, noise)) < 1e-12
    with settings.preconditioner_rank(rank):
        solve, operator, logdet = dense.build(factors, index, noise)._preconditioner()
    if rank <= len(index):
        # beyond the paper: what is left out of the trace is spread over the diagonal
        left_out = (dense.system(factors, index, noise).trace() - matrix.trace()) / len(index)
        matrix = matrix + left_out * eye
        assert dense.relative(solve(eye), matrix.inverse()) < EXACT
        assert dense.relative(operator.to_dense(), matrix) < 1e-12
        assert dense.relative(logdet, torch.logdet(matrix)) < EXACT


def test_eqn_IG_precon_noise_per_point(factors, index):
    """Beyond the paper: any diagonal in place of ``s2 I``."""
    noise = 0.01 + dense.randn(len(index)).abs()
    values, vectors = torch.linalg.eigh(dense.kron(factors))
    basis = vectors.flip(1)[index][:, :25]
    matrix = basis @ torch.diag(values.flip(0)[:25]) @ basis.mT + torch.diag(noise)
    preconditioner = EigenPreconditioner(kron_eigh(factors), index, noise, 25)
    eye = torch.eye(len(index), dtype=torch.float64)
    assert dense.relative(preconditioner.solve(eye), matrix.inverse()) < EXACT
    assert dense.relative(preconditioner.logdet(), torch.logdet(matrix)) < EXACT


def test_eqn_IG_precon_saves_iterations(factors, index, rhs):
    iterations = []
    for rank in (0, 60):
        with settings.gap_method("ignore"), settings.preconditioner_rank(rank), record_solves() as solves:
            dense.build(factors, index, number(1e-3)).solve(rhs)
        iterations.append(solves[-1].iterations)
        assert solves[-1].rank == rank
    assert iterations[1] < 0.5 * iterations[0]


@pytest.mark.parametrize("rank", [1, 10, 60, CELLS])
def test_eqn_FG_precon(factors, index, rank):
    """``J~ + zeta I`` with ``0 < zeta < 1 / (lambda_p + s2)``, and its inverse by the paper's formula."""
    noise, gaps = number(0.02), dense.gaps_of(index, SHAPE)
    values, vectors = torch.linalg.eigh(dense.kron(factors))
    values, basis = values[:rank], vectors[gaps][:, :rank]  # the p smallest
    preconditioner = ShiftedEigenPreconditioner(kron_eigh(factors), gaps, noise, rank)
    zeta = preconditioner.shift
    assert 0.0 < float(zeta) < float(1.0 / (values[rank - 1] + noise))
    shifted = torch.diag(1.0 / (values + noise) - zeta)
    eye = torch.eye(len(gaps), dtype=torch.float64)
    matrix = basis @ shifted @ basis.mT + zeta * eye
    inner = zeta * torch.eye(rank, dtype=torch.float64) + shifted @ basis.mT @ basis
    formula = (eye - basis @ torch.linalg.solve(inner, shifted @ basis.mT)) / zeta
    assert dense.relative(preconditioner.solve(eye), formula) < EXACT
    assert dense.relative(preconditioner.solve(eye), matrix.inverse()) < EXACT
    assert dense.relative(preconditioner.logdet(), torch.logdet(matrix)) < EXACT
    if rank == CELLS:  # nothing is left out: the preconditioner is the matrix
        assert dense.relative(matrix, dense.select(grid_matrix(factors, noise).inverse(), gaps)) < 1e-12
    with settings.preconditioner_rank(rank):
        solve, operator, _ = FillGapsOperator(*factors, noise=noise, gap_index=gaps)._preconditioner()
    assert dense.relative(solve(eye), matrix.inverse()) < EXACT
    assert dense.relative(operator.to_dense(), matrix) < 1e-10


@pytest.mark.parametrize("rank", [20, 80])
def test_eqn_FG_precon_changes_no_solution(factors, index, rhs, rank):
    noise = number(0.02)
    exact = torch.linalg.solve(dense.system(factors, index, noise), rhs)
    with settings.gap_method("fill"), settings.preconditioner_rank(rank), record_solves() as solves:
        assert dense.relative(dense.build(factors, index, noise).solve(rhs), exact) < EXACT
    assert solves[-1].rank == min(rank, CELLS - len(index))


# -- log-determinants ------------------------------------------------------------------------------------------------


def test_nystrom_logdet(factors, index):
    """``sum_{i <= N} log(N/M lambda_i + s2)``, gradients included; and it is not the log-determinant."""
    noise, observed = number(0.02), len(index)

    def paper(f, s):
        values = torch.linalg.eigvalsh(dense.kron(f)).flip(0)[:observed]
        return (observed / CELLS * values + s).log().sum()

    def ours(f, s):
        return dense.build(f, index, s).logdet()

    with settings.logdet_method("nystrom"), record_solves() as solves:
        value = ours(factors, noise)
        compare_gradients(ours, paper, factors, noise)
    assert dense.relative(value, paper(factors, noise)) < EXACT
    assert solves.logdets[0].method == "nystrom"
    assert solves.logdets[0].standard_error is None
    truth = torch.logdet(dense.system(factors, index, noise))
    assert abs(float(value - truth)) > 1.0


def test_block_identity(factors, index):
    """``log|A_XX| = log|A| + log|V A^-1 V'|``, in dense algebra and in ours, from either side."""
    noise, gaps = number(0.02), dense.gaps_of(index, SHAPE)
    matrix = grid_matrix(factors, noise)
    truth = torch.logdet(dense.system(factors, index, noise))
    identity = torch.logdet(matrix) + torch.logdet(dense.select(matrix.inverse(), gaps))
    assert dense.relative(identity, truth) < 1e-12
    sides = {
        "gaps": lambda f, s: gap_side_logdet(GapSystem(f, index, s), f, s),
        "data": lambda f, s: data_side_logdet(f, index, s),
        "chosen": lambda f, s: dense.build(f, index, s).logdet(),
    }
    with settings.logdet_method("exact"):
        for ours in sides.values():
            assert dense.relative(ours(factors, noise), truth) < EXACT
            compare_gradients(ours, lambda f, s: torch.logdet(dense.system(f, index, s)), factors, noise)


# -- the model -------------------------------------------------------------------------------------------------------


def cross(kernel, rows, size):
    """A kernel between `rows` new points on [0, 1] and the `size` points of an axis."""
    new, old = torch.linspace(0.05, 0.9, rows, dtype=torch.float64), torch.linspace(0, 1, size, dtype=torch.float64)
    return kernel((new[:, None] - old).abs())


@pytest.mark.parametrize("method", ["fill", "ignore", "penalize", "spectral", "cholesky"])
def test_eqn_posterior(method):
    """Mean on a test grid by rectangular Kronecker factors, variance by a solve per test point."""
    shape = (8, 7)
    index, noise = dense.observed("random", shape), number(0.02)
    rhs = dense.randn(len(index), 1)
    factors = [dense.matern32(8), dense.se(7)]
    scaled = 3**0.5 / 0.3
    sides = [
        cross(lambda d: (1 + scaled * d) * torch.exp(-scaled * d), 5, 8),
        cross(lambda d: torch.exp(-((d / 0.3) ** 2)), 4, 7),
    ]
    inverse = dense.system(factors, index, noise).inverse()
    full = dense.kron(sides)[:, index]
    with settings.gap_method(method):
        operator = dense.build(factors, index, noise)
        weights = operator.solve(rhs)
        rectangular = SelectedKroneckerOperator(*sides, col_index=index)
        assert dense.relative(rectangular.to_dense(), full) < 1e-14
        assert dense.relative(rectangular @ weights, full @ inverse @ rhs) < EXACT
        some = torch.tensor([17, 0, 6])
        selected = SelectedKroneckerOperator(*sides, row_index=some, col_index=index)
        assert dense.relative(selected @ weights, (full @ inverse @ rhs)[some]) < EXACT
        variance = 1.0 - (full.mT * operator.solve(full.mT)).sum(0)
    exact = 1.0 - (full @ inverse * full).sum(-1)
    assert float((variance - exact).abs().max()) < EXACT
    assert float(exact.min()) > 0.0


def negative_log_likelihood(quad, logdet, observed):
    return 0.5 * (quad + logdet + observed * math.log(2 * math.pi))


@pytest.mark.parametrize("method", ["fill", "ignore", "penalize", "spectral", "cholesky", "auto"])
def test_eqn_likelihood(factors, index, rhs, method):
    """The log marginal likelihood and its gradient in every factor and the noise, exact log-determinant."""
    noise, rhs = number(0.05), rhs[:, :1]

    def ours(f, s):
        quad, logdet = dense.build(f, index, s).inv_quad_logdet(rhs, logdet=True)
        return negative_log_likelihood(quad, logdet, len(index))

    def exact(f, s):
        matrix = dense.system(f, index, s)
        normal = torch.distributions.MultivariateNormal(torch.zeros(len(index), dtype=torch.float64), matrix)
        return -normal.log_prob(rhs[:, 0])

    with settings.gap_method(method), settings.logdet_method("exact"):
        assert dense.relative(ours(factors, noise), exact(factors, noise)) < EXACT
        compare_gradients(ours, exact, factors, noise)


@pytest.mark.parametrize("rank", [None, 0, 30], ids=["auto", "plain", "rank 30"])
def test_eqn_likelihood_stochastic(factors, rank):
    """Within four of the standard errors that it reports, with 200 probes."""
    index, noise = dense.observed("random", SHAPE), number(0.05)
    rhs = dense.randn(len(index), 1)
    operator = SelectedKroneckerAddedDiagOperator(
        SelectedKroneckerOperator(*factors, row_index=index, col_index=index),
        ConstantDiagLinearOperator(noise, diag_shape=len(index)),
    )
    torch.manual_seed(0)
    with (
        settings.logdet_method("stochastic"),
        settings.preconditioner_rank(rank),
        settings.train_tolerance(1e-8),
        linear_operator.settings.num_trace_samples(200),
        record_solves() as solves,
    ):
        quad, logdet = operator.inv_quad_logdet(rhs, logdet=True)
    matrix = dense.system(factors, index, noise)
    assert dense.relative(quad, (rhs * torch.linalg.solve(matrix, rhs)).sum()) < 1e-7
    (report,) = solves.logdets
    assert report.num_probes == 200
    assert float(report.value) == float(logdet)
    assert 0.0 < float(report.standard_error) < 0.05 * abs(float(torch.logdet(matrix)))
    assert abs(float(logdet - torch.logdet(matrix))) < 4.0 * float(report.standard_error)
