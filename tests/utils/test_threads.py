"""Small work runs on one thread, large work on as many as there are, and the number is put back."""

import threading

import gpytorch
import linear_operator
import pytest
import torch
from gpytorch.kernels import MaternKernel

import gpytorch_gaps as gaps
from gpytorch_gaps.linalg import products
from gpytorch_gaps.preconditioners import low_rank
from gpytorch_gaps.solvers.gap_system import GapSystem
from gpytorch_gaps.utils import threads
from gpytorch_gaps.utils.threads import sized, threads_for

SMALL, LARGE = 1e3, 1e12


@pytest.fixture(autouse=True)
def _three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def seen(monkeypatch):
    """How many threads torch had in every Kronecker product and every factorisation."""
    found = []

    def watch(owner, name):
        original = getattr(owner, name)

        def watched(*args, **options):
            found.append(torch.get_num_threads())
            return original(*args, **options)

        monkeypatch.setattr(owner, name, watched)

    for name in ("_two_axes", "_rotated", "_in_order", "_blocked"):
        watch(products, name)
    for name in ("eigh", "cholesky_ex", "svd"):
        watch(torch.linalg, name)
    watch(low_rank, "masked_gram")
    return found


class Model(gpytorch.models.ExactGP):
    def __init__(self, grid, x, y, terms=1):
        super().__init__(x, y, gaps.GappyGridLikelihood())
        self.grid, self.mean_module = grid, gpytorch.means.ZeroMean()
        self.covar_module = gaps.GappyGridKernel([MaternKernel(nu=1.5), MaternKernel(nu=1.5)], grid)
        if terms == 2:
            self.covar_module = self.covar_module + gaps.GappyGridKernel([MaternKernel(), MaternKernel()], grid)

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def model(size=36, terms=1):
    torch.manual_seed(0)
    values = torch.randn(size, size, dtype=torch.float64)
    values[torch.rand(size, size) < 0.3] = torch.nan
    return Model(*gaps.from_array(values), terms).double()


def test_threads_by_the_size_of_the_work():
    with threads_for(SMALL):
        assert torch.get_num_threads() == 1
    with threads_for(LARGE):
        assert torch.get_num_threads() == 3
    with threads_for(SMALL, numbers=LARGE):
        assert torch.get_num_threads() == 3
    assert torch.get_num_threads() == 3


def test_large_work_inside_of_small_has_all_threads_and_small_inside_of_large_has_one():
    with threads_for(SMALL), threads_for(LARGE):
        assert torch.get_num_threads() == 3
        with threads_for(SMALL):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
    assert torch.get_num_threads() == 3


def test_the_number_is_put_back_after_an_exception():
    @sized(lambda work: (work, 0.0))
    def fails(work):
        assert torch.get_num_threads() == 1
        raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            fails(SMALL)
        assert torch.get_num_threads() == 3
        with threads_for(LARGE):  # of the outermost block, nothing is left
            assert torch.get_num_threads() == 3


def test_one_thread_given_is_one_thread_for_all_work():
    torch.set_num_threads(1)
    with threads_for(LARGE):
        assert torch.get_num_threads() == 1


def test_two_python_threads_each_put_back_what_they_found():
    entered, leave = threading.Event(), threading.Event()

    def other():
        torch.set_num_threads(2)
        with threads_for(SMALL):
            entered.set()
            leave.wait(10)
        after.append(torch.get_num_threads())

    after = []
    thread = threading.Thread(target=other)
    thread.start()
    entered.wait(10)
    with threads_for(SMALL):
        leave.set()
        thread.join()
    assert torch.get_num_threads() == 3
    assert after == [2]


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("method", ["auto", "ignore", "cholesky"])
def test_a_small_solve_runs_on_one_thread(seen, terms, method):
    ours = model(20, terms)
    with torch.no_grad(), gaps.settings.gap_method(method), linear_operator.settings.max_cholesky_size(0):
        matrix = ours.likelihood(ours.train()(*ours.train_inputs)).lazy_covariance_matrix
        seen.clear()
        matrix.solve(ours.train_targets.unsqueeze(-1))
    assert seen
    assert set(seen) == {1}
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("method", ["exact", "stochastic"])
@pytest.mark.parametrize("terms", [1, 2])
def test_a_small_training_loop_of_ones_own_runs_on_one_thread(seen, method, terms):
    ours = model(20, terms)
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(ours.likelihood, ours.train())
    with gaps.settings.logdet_method(method):
        loss = -mll(ours(*ours.train_inputs), ours.train_targets)
        loss.backward()
    assert set(seen) == {1}
    assert torch.get_num_threads() == 3


def test_small_predictions_and_steps_of_fit_run_on_one_thread(seen):
    ours = model(20)
    gaps.fit(ours, steps=2, progress=False)
    ours.eval()
    with torch.no_grad():
        posterior = ours(ours.grid.points())
        posterior.mean, posterior.variance  # noqa: B018
    assert set(seen) == {1}
    assert torch.get_num_threads() == 3


def test_a_solve_that_fails_puts_the_number_back():
    ours = model()
    with torch.no_grad():
        matrix = ours.likelihood(ours.train()(*ours.train_inputs)).lazy_covariance_matrix
    with torch.no_grad(), pytest.raises(ValueError, match="rhs: got NaN"):
        matrix.solve(torch.full_like(ours.train_targets, torch.nan).unsqueeze(-1))
    assert torch.get_num_threads() == 3


def test_a_large_solve_keeps_its_threads(monkeypatch, seen):
    monkeypatch.setattr(threads, "_MIN_FLOPS_FOR_THREADS", 1e4)  # as if this were large
    ours = model()
    with torch.no_grad():
        matrix = ours.likelihood(ours.train()(*ours.train_inputs)).lazy_covariance_matrix
        seen.clear()
        matrix.solve(ours.train_targets.unsqueeze(-1))
    assert set(seen) == {3}


def test_a_large_factor_of_a_small_system_has_all_threads(monkeypatch, seen):
    monkeypatch.setattr(threads, "_MIN_FLOPS_FOR_THREADS", 1e6)  # between a product and a factorisation
    index = torch.arange(0, 400, 2)
    system = GapSystem([torch.eye(20, dtype=torch.float64)] * 2, index, torch.ones(1, dtype=torch.float64))
    with threads_for(SMALL):
        system.cholesky()
    assert seen == [3]
