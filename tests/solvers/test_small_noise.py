"""Noise far below the spectrum: preconditioners that still precondition, and plans that change where one does not."""

import linear_operator
import pytest
import torch
from linear_operator.operators import ConstantDiagLinearOperator

import gpytorch_gaps as gaps
from gpytorch_gaps import settings
from gpytorch_gaps.operators import SelectedKroneckerOperator
from gpytorch_gaps.preconditioners.low_rank import LowRankPreconditioner
from gpytorch_gaps.preconditioners.neighbours import NeighbourPreconditioner
from gpytorch_gaps.solvers.gap_system import GapSystem
from gpytorch_gaps.solvers.krylov import conjugate_gradients
from gpytorch_gaps.solvers.planning import neighbours as neighbour_planning
from gpytorch_gaps.utils.rates import Rates
from tests import _dense as dense
from tests._dense import solve_system

MAX_CHOLESKY = linear_operator.settings.max_cholesky_size


def matern12(n, length):
    x = torch.linspace(0.0, 1.0, n, dtype=torch.float64)
    return torch.exp(-(x[:, None] - x).abs() / length)


def clouds(shape, fraction=0.5, seed=0):
    """Observed cells, with round gaps."""
    generator = torch.Generator().manual_seed(seed)
    observed = torch.ones(shape, dtype=torch.bool)
    cells = torch.meshgrid(*(torch.arange(float(size)) for size in shape), indexing="ij")
    while float((~observed).double().mean()) < fraction:
        centre, radius = torch.rand(len(shape), generator=generator), torch.rand((), generator=generator)
        apart = sum((axis - at * size).square() for axis, at, size in zip(cells, centre, shape, strict=True))
        observed &= apart > (0.12 * min(shape) * (0.3 + 0.7 * radius)).square()
    return observed.flatten().nonzero().squeeze(-1)


def number(value):
    return torch.tensor([value], dtype=torch.float64)


SUMS = {
    "Matern-1/2 + Matern-3/2": (lambda n: matern12(n, 0.3), lambda n: dense.matern32(n, 0.2)),
    "SE + Matern-1/2": (lambda n: dense.se(n, 0.5), lambda n: matern12(n, 0.1)),
    "SE + white": (lambda n: dense.se(n, 0.5), lambda n: matern12(n, 0.02)),
    "SE + SE": (lambda n: dense.se(n, 0.3), lambda n: dense.se(n, 0.1)),
}


def sum_of(name, shape, index, noise):
    terms = [
        SelectedKroneckerOperator(*(kernel(n) for n in shape), row_index=index, col_index=index)
        for kernel in SUMS[name]
    ]
    return terms[0] + terms[1] + ConstantDiagLinearOperator(number(noise), diag_shape=len(index))


# -- preconditioners ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [1e-7, 1e-9])
def test_round_clouds_and_little_noise(noise):
    """The condition number of the core is 1e9 and more: its explicit inverse no longer preconditioned."""
    shape = (60, 66)
    index = clouds(shape)
    system = GapSystem([dense.matern32(n, 0.2) for n in shape], index, number(noise))
    rhs = dense.randn(len(index), 1)
    _, report = solve_system(system, rhs, method="ignore", rank=1024)
    assert report.converged
    assert report.iterations < 600


@pytest.mark.parametrize("noise", [1e-9, 1e-6, 1e-3, 1.0])
@pytest.mark.parametrize("pattern", ["random", "clouds"])
@pytest.mark.parametrize("name", SUMS)
def test_the_rank_that_auto_takes_needs_no_more_iterations_than_none(name, pattern, noise):
    shape = (16, 18)
    index = clouds(shape) if pattern == "clouds" else dense.observed("random", shape, 0.3)
    rhs, iterations = dense.randn(len(index), 1), []
    for rank in (None, 0):
        with MAX_CHOLESKY(0), settings.preconditioner_rank(rank), gaps.record_solves() as solves:
            sum_of(name, shape, index, noise).solve(rhs)
        assert solves[-1].converged
        iterations.append(solves[-1].iterations)
    assert iterations[0] <= iterations[1]


@pytest.mark.parametrize("name", SUMS)
def test_solutions_of_sums_at_a_noise_of_1e_9(name):
    shape = (16, 18)
    index = clouds(shape)
    operator, rhs = sum_of(name, shape, index, 1e-9), dense.randn(len(index), 1)
    with MAX_CHOLESKY(0), settings.solve_tolerance(1e-10):
        solution = operator.solve(rhs)
    exact = torch.linalg.solve(operator.to_dense(), rhs)
    assert dense.relative(operator.to_dense() @ solution, rhs) < 1e-10
    assert dense.relative(solution, exact) < 1e-4


def test_a_log_determinant_at_a_noise_of_1e_9():
    """Probes see the condition of ``P^-1 A``: with the trace of A in P, that is small."""
    shape = (16, 18)
    index = dense.observed("random", shape, 0.3)
    operator = sum_of("Matern-1/2 + Matern-3/2", shape, index, 1e-9)
    exact = torch.linalg.slogdet(operator.to_dense())[1]
    torch.manual_seed(0)
    with MAX_CHOLESKY(0), settings.logdet_method("stochastic"), gaps.record_solves() as found:
        value = operator.logdet()
    assert abs(float(value - exact)) < 5 * float(found.logdets[-1].standard_error)
    assert float(found.logdets[-1].standard_error) < 0.02 * len(index)


# -- plans -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def useless(monkeypatch):
    """Preconditioners of less than full rank make the condition number 1e12 worse."""
    sound = LowRankPreconditioner.solve

    def solve(self, x):
        if self.rank >= len(self.index):
            return sound(self, x)
        return x * torch.logspace(-12, 0, x.size(-2), dtype=x.dtype).unsqueeze(-1)

    monkeypatch.setattr(LowRankPreconditioner, "solve", solve)


def test_auto_leaves_a_plan_that_gets_nowhere(useless):
    """At half of its iterations, for a rank that should need fewer."""
    shape = (20, 22)
    index = dense.observed("random", shape, 0.3)
    noise = 1e-3 * (1.0 + dense.randn(len(index)).abs())
    system = GapSystem([dense.matern32(n, 0.3) for n in shape], index, noise)
    _, report = solve_system(system, dense.randn(len(index), 1), dense_size=10, preconditioner="eigen")
    assert report.converged
    assert 1000 < report.iterations < 1500
    assert "ignore stopped at" in report.reason


def test_auto_leaves_neighbours_that_promised_too_much(monkeypatch):
    """After twice the iterations that the next best plan would cost."""
    monkeypatch.setattr(neighbour_planning, "expected_condition", lambda _: 1.1)
    monkeypatch.setattr(neighbour_planning, "setup_seconds", lambda *_: 0.0)
    monkeypatch.setattr(
        NeighbourPreconditioner, "solve", lambda _, x: x * torch.logspace(-12, 0, len(x), dtype=x.dtype).unsqueeze(-1)
    )
    shape = (20, 22)
    index = dense.observed("random", shape, 0.3)
    noise = 1e-3 * (1.0 + dense.randn(len(index)).abs())
    system = GapSystem([dense.matern32(n, 0.3) for n in shape], index, noise)
    _, report = solve_system(system, dense.randn(len(index), 1), dense_size=10)
    assert (report.converged, report.num_neighbours) == (True, 0)
    assert report.reason.startswith("ignore stopped at")


def test_many_more_iterations_than_planned_are_stated(monkeypatch):
    monkeypatch.setattr(neighbour_planning, "expected_condition", lambda _: 1.1)
    shape = (30, 34)
    index = dense.observed("random", shape, 0.3)
    system = GapSystem([dense.se(n, 0.1) for n in shape], index, number(1e-6))
    config = {"method": "ignore", "preconditioner": "neighbours", "num_neighbours": 5}
    _, report = solve_system(system, dense.randn(len(index), 1), **config)
    assert report.iterations > 60
    assert report.reason.endswith("iterations were expected")


def test_a_sum_falls_back_to_a_dense_factorisation(useless):
    shape = (20, 22)
    index = dense.observed("random", shape, 0.3)
    rhs = dense.randn(len(index), 1)
    operator = sum_of("SE + SE", shape, index, 1.0)
    operator.system().cached("rates", lambda: Rates(1e14, 1e6, 1e-9))  # of a machine on which it comes second
    with MAX_CHOLESKY(100), gaps.record_solves() as solves:
        solution = operator.solve(rhs)
    assert (solves[-1].method, solves[-1].converged) == ("cholesky", True)
    assert "ignore stopped at" in solves[-1].reason
    assert dense.relative(operator.to_dense() @ solution, rhs) < 1e-6


def test_a_method_asked_for_by_name_uses_all_of_its_iterations(useless):
    shape = (30, 34)
    index = dense.observed("random", shape, 0.3)
    system = GapSystem([dense.matern32(n, 0.3) for n in shape], index, number(0.3))
    with pytest.warns(gaps.NotConvergedWarning):
        _, report = solve_system(system, dense.randn(len(index), 1), method="ignore", rank=20, max_iterations=1300)
    assert report.iterations == 1300


@pytest.mark.parametrize("columns", [1, 3])
def test_conjugate_gradients_give_up_after_so_many_iterations_without_a_halved_residual(columns):
    matrix = torch.logspace(0, 14, 400, dtype=torch.float64).unsqueeze(-1)

    def run(patience):
        rhs = dense.randn(400, columns)
        stop = {"stop": lambda residual: False, "max_iterations": 300}
        return conjugate_gradients(lambda x: matrix * x, rhs, patience=patience, **stop)[1]

    assert run(0) == 300
    assert 50 <= run(50) < 300
