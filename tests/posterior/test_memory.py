"""Predictions in little memory: pieces of points and columns, the same numbers."""

import gpytorch
import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel

import gpytorch_gaps as gaps
from gpytorch_gaps import settings
from gpytorch_gaps.operators import KernelRowsOperator
from gpytorch_gaps.posterior.parts import _rows_of
from gpytorch_gaps.preconditioners import EigenPreconditioner
from gpytorch_gaps.solvers.config import SolveConfig
from gpytorch_gaps.solvers.gap_system import GapSystem
from gpytorch_gaps.solvers.planning.costs import best_rank
from tests import _dense as dense
from tests.workflow._pairs import CASES, Model, gappy, with_length

CLOSE = {"rtol": 1e-6, "atol": 1e-6}


@pytest.mark.parametrize(("case", "memory"), [*((case, 20_000) for case in CASES), ("two axes", 8_000)])
def test_scattered_points_a_few_at_a_time(case, memory):
    """Mean, variance, covariance, products with it, in both directions: as by dense algebra."""
    pair = CASES[case](small=True)
    x = pair.test_x[::3]  # 20 cells, 7 other points
    columns = dense.randn(len(x), 2)
    with torch.no_grad(), settings.prediction_memory(memory):
        expected, posterior = pair.dense.eval()(x), pair.ours.eval()(x)
        covariance = posterior.lazy_covariance_matrix
        assert all(isinstance(op, KernelRowsOperator) for op in _rows_of(covariance.parts.cross))
        assert _rows_of(covariance.parts.cross)
        torch.testing.assert_close(posterior.mean, expected.mean, **CLOSE)
        torch.testing.assert_close(posterior.variance, expected.variance, **CLOSE)
        torch.testing.assert_close(covariance @ columns, expected.covariance_matrix @ columns, **CLOSE)
        torch.testing.assert_close(posterior.covariance_matrix, expected.covariance_matrix, **CLOSE)


def test_the_transpose_of_rows():
    axes, values = gappy((9, 8), 0.3, 0)
    grid, x, _ = gaps.from_array(values, axes)
    kernel = gaps.GappyGridKernel([RBFKernel(), MaternKernel()], grid).double()
    points = dense.randn(40, 2).sigmoid()
    with torch.no_grad(), settings.prediction_memory(2000):
        rows, columns = kernel(points, x).evaluate_kernel(), kernel(x, points).evaluate_kernel()
        assert isinstance(rows, KernelRowsOperator)
        assert isinstance(columns, KernelRowsOperator)
        assert rows.shape == columns.mT.shape == (40, len(x))
        expected = (kernel.kernels[0](points[:, :1], x[:, :1]) * kernel.kernels[1](points[:, 1:], x[:, 1:])).to_dense()
        for one, other in ((rows, expected), (columns, expected.mT), (rows.mT, expected.mT), (columns.mT, expected)):
            rhs = dense.randn(other.size(-1), 3)
            torch.testing.assert_close(one.to_dense(), other)
            torch.testing.assert_close(one @ rhs, other @ rhs)
            torch.testing.assert_close(one @ rhs[:, 0], other @ rhs[:, 0])
            torch.testing.assert_close(one[2:7, :5].to_dense(), other[2:7, :5])
            torch.testing.assert_close(one.mT @ other, other.mT @ other)
        assert rows.row_points is rows.x1
        assert columns.row_points is None


@pytest.mark.parametrize("case", ["two axes", "a sum of two grid kernels", "a noise per output", "a batch of three"])
def test_pathwise_variances_of_points_in_pieces(case):
    """Some of the pieces lie on the grid, others do not; 400 samples put them within 5 standard errors."""
    pair = CASES[case](small=True)
    x = pair.test_x[40::2]
    with torch.no_grad(), gaps.record_solves() as solves, settings.prediction_memory(60_000):
        with settings.variance_method("pathwise"), settings.variance_samples(400):
            variance = pair.ours.eval()(x).variance
        expected = pair.dense.eval()(x).variance
    error = solves.variances[-1].error
    assert error.shape == variance.shape
    assert bool(((variance - expected).abs() <= 2.5 * error + 1e-9).all())


def test_a_covariance_in_chunks():
    """No more columns at a time than memory allows, and the same to 1e-8 at a tolerance of 1e-6."""
    pair = CASES["two axes"](small=True)
    with torch.no_grad(), gpytorch.settings.max_cholesky_size(0):
        whole = pair.ours.eval()(pair.grid.points()).covariance_matrix
        with settings.prediction_memory(200_000), gaps.record_solves() as solves:
            posterior = pair.ours.eval()(pair.grid.points())
            parts = posterior.covariance_matrix
            most = posterior.lazy_covariance_matrix.parts.columns_at_once()
    assert most < pair.grid.num_cells / 10
    assert solves[-1].num_rhs / solves[-1].parts <= most
    torch.testing.assert_close(parts, whole, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(parts, parts.mT, rtol=1e-12, atol=1e-12)


def test_a_set_up_is_made_for_all_columns_to_come():
    factors = [dense.matern32(60), dense.matern32(50)]
    system = GapSystem(factors, dense.observed("block", (60, 50)), torch.tensor([1e-2]).double())
    alone, many = best_rank(system, 1, 1e-6).rank, best_rank(system, 1000, 1e-6).rank
    assert many > alone
    config = SolveConfig()
    assert config.planned_columns(3) == 3
    for_all = config.replace(expected_columns=1000)
    assert for_all.planned_columns(3) == 1000
    assert for_all.replace(expected_columns=for_all.planned_columns(10)).planned_columns(3) == 1000
    assert config.planned_columns(3) == 3
    axes, values = gappy((60, 50), 0.4, 0)
    values[10:40, 10:30] = torch.nan
    grid, x, y = gaps.from_array(values, axes)
    kernel = gaps.GappyGridKernel([with_length(MaternKernel(), 0.2), with_length(MaternKernel(), 0.2)], grid)
    model = Model(x, y, gaps.GappyGridLikelihood(), ScaleKernel(kernel)).double().eval()
    model.likelihood.noise = 0.01
    with (
        torch.no_grad(),
        gpytorch.settings.max_cholesky_size(0),
        settings.prediction_memory(3e6),
        settings.gap_method("ignore"),
        gaps.record_solves() as solves,
    ):
        model(x[:300]).variance  # noqa: B018
    mean, variances = solves
    assert variances.parts > 1
    assert variances.rank > mean.rank


def test_narrow_solves_and_wide_ones():
    """To the same accuracy, however many there are."""
    factors = [dense.matern32(20), dense.matern32(15)]
    index = dense.observed("random", (20, 15))
    system = GapSystem(factors, index, torch.tensor([1e-3]).double())
    preconditioner = EigenPreconditioner(system.eigen(), index, system.noise, 60)
    rhs = dense.randn(len(index), 2)
    first = preconditioner.solve(rhs)
    for _ in range(8):
        again = preconditioner.solve(rhs)
    assert torch.equal(again, first)
    torch.testing.assert_close(preconditioner.matmul(again), rhs, rtol=1e-8, atol=1e-8)
    wide = dense.randn(len(index), 9)
    torch.testing.assert_close(
        preconditioner.solve(wide)[:, :2], preconditioner.solve(wide[:, :2]), rtol=1e-9, atol=1e-9
    )
