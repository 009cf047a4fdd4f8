"""A dense factorisation costs N^3 / 3: it is computed only once."""

import gpytorch
import linear_operator
import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel

import gpytorch_gaps as gaps
from gpytorch_gaps import settings
from gpytorch_gaps.autograd import dense as dense_autograd
from gpytorch_gaps.operators import noisy
from gpytorch_gaps.operators.estimates import log_determinant
from gpytorch_gaps.solvers import gap_system, solve, system
from gpytorch_gaps.solvers.config import SolveConfig
from gpytorch_gaps.solvers.goal import Goal
from gpytorch_gaps.solvers.planning import logdet
from gpytorch_gaps.solvers.planning.costs import Plan
from gpytorch_gaps.solvers.refine import refine
from tests import _dense as dense
from tests.workflow._pairs import Model, gappy, with_length


@pytest.fixture
def factorised(monkeypatch):
    """The number of rows of every matrix that was factorised."""
    rows = []
    true = torch.linalg.cholesky_ex

    def watched(matrix, *args, **options):
        rows.append(matrix.size(-1))
        return true(matrix, *args, **options)

    monkeypatch.setattr(torch.linalg, "cholesky_ex", watched)
    return rows


@pytest.fixture
def asked(monkeypatch):
    """The number of rows of every matrix of a system whose factorisation was asked for."""
    rows = []
    for module in (system, gap_system, dense_autograd):
        true = module.psd_safe_cholesky

        def watched(matrix, *args, _true=true, **options):
            rows.append(matrix.size(-1))
            return _true(matrix, *args, **options)

        monkeypatch.setattr(module, "psd_safe_cholesky", watched)
    return rows


@pytest.fixture
def solves(monkeypatch):
    """The number of right-hand sides of every solve."""
    columns = []
    true = noisy.solve_system

    def watched(own, rhs, *args, **options):
        columns.append(rhs.size(-1))
        return true(own, rhs, *args, **options)

    monkeypatch.setattr(noisy, "solve_system", watched)
    return columns


def make(kind="a product", fraction=0.4):
    grid, x, y = gaps.from_array(*reversed(gappy((12, 11), fraction, 0)))
    kernel = gaps.GappyGridKernel([with_length(RBFKernel(), 0.3), with_length(MaternKernel(), 0.5)], grid)
    likelihood = gaps.GappyGridLikelihood(**({"noise_axis": 0, "grid": grid} if kind == "noise per axis" else {}))
    if kind == "a sum":
        other = gaps.GappyGridKernel([with_length(MaternKernel(), 0.1), with_length(RBFKernel(), 0.2)], grid)
        kernel = kernel + other
    elif kind == "a sum with a dense term":
        kernel = kernel + MaternKernel()
    model = Model(x, y, likelihood, ScaleKernel(kernel)).double()
    model.likelihood.noise = 0.05
    return model, grid


KINDS = ["a product", "noise per axis", "a sum", "a sum with a dense term"]


def step(model):
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model.train())
    loss = -mll(model(*model.train_inputs), model.train_targets)
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_step_factorises_once(kind, factorised, asked):
    model, _ = make(kind)
    with settings.gap_method("cholesky"), settings.logdet_method("exact"):
        step(model)
    rows = len(model.train_targets)
    assert asked == [rows]
    assert factorised.count(rows) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_exact_variances_in_chunks_factorise_once(kind, factorised, asked, solves):
    model, grid = make(kind)
    rows = len(model.train_targets)
    model.eval()
    with (
        torch.no_grad(),
        settings.gap_method("cholesky"),
        settings.variance_method("exact"),
        settings.prediction_memory(8 * 150 * rows),  # some twenty cells at once
    ):
        posterior = model(grid.points())
        assert posterior.variance.shape == posterior.mean.shape == (132,)
    assert sum(solves) >= 132
    assert 3 < len(solves) < 100
    assert asked == [rows]
    assert factorised.count(rows) == 1


def test_later_predictions_factorise_nothing(factorised):
    model, grid = make()
    model.eval()
    with torch.no_grad(), settings.gap_method("cholesky"), settings.variance_method("exact"):
        model(grid.points()[:9]).variance  # noqa: B018
        before = len(factorised)
        model(grid.points()[9:]).variance  # noqa: B018
    assert factorised[before:] == []


def test_a_training_step_on_the_gap_side_factorises_once(factorised, asked, monkeypatch):
    """The smaller side: the gaps serve the log-determinant and the solve."""
    monkeypatch.setattr(logdet, "_CHEAP_CHOLESKY_ROWS", 0)
    model, _ = make(fraction=0.15)
    rows = len(model.train_targets)
    few = 132 - rows
    with (
        settings.logdet_method("exact"),
        linear_operator.settings.max_cholesky_size(rows - 1),
        gaps.record_solves() as record,
    ):
        step(model)
    assert record.logdets[-1].reason == "gaps side"
    assert asked == [few]
    assert factorised.count(few) == 1
    assert rows not in factorised


def test_solves_on_the_gap_side_share_one_factorisation(factorised):
    shape = (9, 8)
    index, noise = dense.observed("random", shape, 0.2), torch.tensor([0.1], dtype=torch.float64)
    operator = dense.build([dense.matern32(9), dense.se(8)], index, noise)
    own = operator.system()
    for seed in range(3):
        rhs = dense.randn(len(index), 2, seed=seed)
        form = solve.formulation(Plan("cholesky", direct="gaps"), own, rhs, Goal.of(own, rhs, 1e-8), None)
        assert refine(form, None, torch.float64, 10).converged
    log_determinant(operator, logdet.LogdetPlan("exact", "gaps"), SolveConfig())
    assert factorised == [72 - len(index)]
