"""Neighbours are found once for many training steps, again if length-scales change much, and freed with the model."""

import gc
import weakref

import gpytorch
import linear_operator
import pytest
import torch

import gpytorch_gaps as gaps
from gpytorch_gaps import settings
from gpytorch_gaps.solvers import preconditioning
from tests import _dense as dense
from tests.workflow._pairs import Model


@pytest.fixture(autouse=True)
def _neighbours():
    with (
        linear_operator.settings.max_cholesky_size(0),
        settings.gap_method("ignore"),
        settings.logdet_method("stochastic"),
        settings.preconditioner("neighbours"),
        settings.num_neighbours(6),
    ):
        yield


@pytest.fixture
def found(monkeypatch):
    """The lists that were found, oldest first."""
    lists, find = [], preconditioning.neighbour_lists

    def counted(*args):
        lists.append(find(*args))
        return lists[-1]

    monkeypatch.setattr(preconditioning, "neighbour_lists", counted)
    return lists


def model(likelihood=None):
    """A product of two Matern kernels on a field with gaps."""
    values = dense.randn(9, 10).cumsum(0).cumsum(1).masked_fill(dense.randn(9, 10, seed=1) > 0.5, torch.nan)
    grid, x, y = gaps.from_array(values, [torch.linspace(0, 1, n, dtype=torch.float64) for n in values.shape])
    axes = [gpytorch.kernels.MaternKernel(nu=1.5) for _ in values.shape]
    kernel = gpytorch.kernels.ScaleKernel(gaps.GappyGridKernel(axes, grid))
    own = gpytorch.likelihoods.GaussianLikelihood() if likelihood is None else likelihood(grid)
    return Model(x, y, own, kernel).double().train()


def lengthscales(own):
    return [kernel.raw_lengthscale for kernel in own.covar_module.base_kernel.kernels]


def loss(own):
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(own.likelihood, own)
    return -mll(own(*own.train_inputs), own.train_targets)


def train(own, steps, rate):
    optimizer = torch.optim.Adam(own.parameters(), lr=rate)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(own).backward()
        optimizer.step()


LIKELIHOODS = {
    "constant": None,
    "per axis": lambda grid: gaps.GappyGridLikelihood(noise_axis=1, grid=grid),
}


@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_training_steps_share_their_neighbours(kind, found):
    train(model(LIKELIHOODS[kind]), 8, 0.01)
    assert len(found) == 1


@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_likelihoods_of_a_model_are_those_of_dense_algebra(kind):
    own = model(LIKELIHOODS[kind])
    with settings.num_neighbours(len(own.train_targets) - 1), settings.train_tolerance(1e-12):
        value = loss(own)
    got = torch.autograd.grad(value, own.parameters())
    with settings.gap_method("cholesky"), settings.logdet_method("exact"):
        expected = loss(own)
    assert float(value) == pytest.approx(float(expected), rel=1e-9)
    for mine, theirs in zip(got, torch.autograd.grad(expected, own.parameters()), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-9)


def test_neighbours_are_found_anew_where_length_scales_moved_far(found):
    own = model()
    loss(own)
    with torch.no_grad():
        lengthscales(own)[0].fill_(-3.0)
    loss(own)
    assert len(found) == 2
    assert not torch.equal(found[0].rows, found[1].rows)


def test_variances_and_noise_do_not_matter(found):
    own = model()
    loss(own)
    with torch.no_grad():
        own.covar_module.raw_outputscale.fill_(8.0)
        own.likelihood.raw_noise.fill_(-8.0)
    loss(own)
    assert len(found) == 1


def test_another_number_of_neighbours_is_found_for_itself(found):
    own = model()
    for count in (6, 3, 6, 3):
        with settings.num_neighbours(count):
            loss(own)
    assert [lists.rows.size(-1) for lists in found] == [6, 3]


def test_neighbours_are_freed_with_the_model(found):
    own = model()
    train(own, 2, 0.01)
    kept = weakref.ref(found[0])
    found.clear()
    gc.collect()
    assert kept() is not None
    del own
    gc.collect()
    assert kept() is None


# -- one index, several systems ----------------------------------------------------------------------------------------


def residual(factors, index):
    operator = dense.build(factors, index, torch.tensor([0.1], dtype=torch.float64))
    rhs = dense.randn(len(index), 1)
    return dense.relative(operator.to_dense() @ operator.solve(rhs), rhs)


def test_the_same_cells_of_grids_of_other_shapes(found):
    index = torch.arange(0, 60, 2)
    for shape in ((60,), (10, 6), (6, 10), (1, 60), (70,)):
        assert residual([dense.matern32(size) for size in shape], index) < 1e-5
    assert len(found) == 5


def test_cells_that_change_in_place(found):
    index = torch.arange(0, 60, 2)
    factors = [dense.matern32(60, 0.05)]
    assert residual(factors, index) < 1e-5
    index.copy_(index[torch.randperm(30, generator=torch.Generator().manual_seed(0))])
    assert residual(factors, index) < 1e-5
    assert len(found) == 2


def test_cells_of_an_inference_tensor(found):
    with torch.inference_mode():
        index = torch.arange(0, 60, 2)
    for _ in range(2):
        assert residual([dense.matern32(60)], index) < 1e-5
    assert len(found) == 1
