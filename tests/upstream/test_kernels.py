"""Traps in GPyTorch's kernels: composition, batches, discrete and periodic inputs, casts."""

import math

import pytest
import torch
from gpytorch.kernels import (
    AdditiveKernel,
    GridInterpolationKernel,
    IndexKernel,
    Kernel,
    PeriodicKernel,
    ProductKernel,
    RBFKernel,
    ScaleKernel,
)
from linear_operator.operators import DenseLinearOperator, MatmulLinearOperator

from gpytorch_gaps import preconditioned_ski
from tests.upstream._helpers import changed, in_subprocess, raised

KERNELS = "gpytorch_gaps.kernels"
STRATEGY = "gpytorch_gaps.posterior.strategy"

# -- sums and products -------------------------------------------------------------------------------------------------

STRATEGIES = """
import gpytorch, torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.models.exact_prediction_strategies import DefaultPredictionStrategy

class Own(DefaultPredictionStrategy):
    pass

class OwnKernel(RBFKernel):
    def prediction_strategy(self, *args, **kwargs):
        return Own(*args, **kwargs)

class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood, kernel):
        super().__init__(x, y, likelihood)
        self.kernel = kernel
    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(torch.zeros(len(x)), self.kernel(x))

x = torch.linspace(0, 1, 5).unsqueeze(-1)
for kernel in (OwnKernel(), ScaleKernel(OwnKernel()), OwnKernel() + OwnKernel(), OwnKernel() * OwnKernel()):
    model = Model(x, torch.zeros(5), gpytorch.likelihoods.GaussianLikelihood(), kernel).eval()
    model(x + 0.1)
    print(type(model.prediction_strategy).__name__)
"""


def test_sums_and_products_do_not_forward_prediction_strategy():
    """Trap: AdditiveKernel and ProductKernel ignore their children's `prediction_strategy`.

    Answered by models/prediction_strategy, on import: hence a process of its own, without this package.
    """
    plain, scaled, added, multiplied = in_subprocess(STRATEGIES).split()
    assert plain == scaled == "Own", changed("kernels, or ScaleKernel, no longer choose their strategy", STRATEGY)
    default = "DefaultPredictionStrategy"
    assert added == default, changed("AdditiveKernel now forwards prediction_strategy", STRATEGY)
    assert multiplied == default, changed("ProductKernel now forwards prediction_strategy", STRATEGY)


class LowRankKernel(Kernel):
    """``x x'`` as an operator that is never dense."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, x1, x2, diag=False, **params):
        return (x1 * x2).sum(-1) if diag else MatmulLinearOperator(x1, x2.mT)


def test_product_densifies_test_by_train():
    """Trap: ProductKernel of structured kernels is dense off the diagonal block. Answered by kernels."""
    train_x, test_x = torch.rand(5, 2), torch.rand(3, 2)
    structured = (LowRankKernel() + LowRankKernel())(test_x, train_x).evaluate_kernel()
    assert not isinstance(structured, DenseLinearOperator)
    product = (LowRankKernel() * LowRankKernel())(test_x, train_x).evaluate_kernel()
    assert isinstance(product, DenseLinearOperator), changed("ProductKernel no longer densifies test x train", KERNELS)


# -- batches -----------------------------------------------------------------------------------------------------------


class WithAxis(Kernel):
    """A kernel that keeps a grid's axis as a buffer of its own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.register_buffer("axis", torch.arange(6.0))

    def forward(self, x1, x2, **params):
        return x1 @ x2.mT


def test_buffers_are_expanded_and_indexed_as_if_batched():
    """Trap: a buffer is taken for a batched parameter, `active_dims` too. Answered by axes in a child module."""
    where = "gpytorch_gaps.grid.cartesian.CartesianGrid"
    expanded = WithAxis().expand_batch(torch.Size([2])).axis
    assert expanded.shape == (2, 6), changed("Kernel.expand_batch no longer expands buffers", where)
    indexed = WithAxis(batch_shape=torch.Size([2]))[0].axis
    assert indexed.shape == (), changed("Kernel.__getitem__ no longer indexes buffers", where)
    columns = RBFKernel(batch_shape=torch.Size([2]), active_dims=(0, 2))[0].active_dims
    assert columns.shape == (), changed("Kernel.__getitem__ no longer indexes active_dims", where)


class Children(Kernel):
    """Kernels in a ModuleList, without the overrides that AdditiveKernel brings."""

    def __init__(self, *kernels):
        super().__init__()
        self.kernels = torch.nn.ModuleList(kernels)

    def forward(self, x1, x2, **params):
        return self.kernels[0](x1, x2, **params)


@pytest.mark.parametrize("compose", [Children, AdditiveKernel, ProductKernel])
def test_expand_batch_leaves_children_in_lists_behind(compose):
    """Trap: `expand_batch` sets an attribute called "kernels.0", not the child. Answered by overrides in kernels."""
    expanded = compose(RBFKernel(), RBFKernel()).expand_batch(torch.Size([3]))
    message = changed("Kernel.expand_batch now expands children in a ModuleList", KERNELS)
    assert [child.raw_lengthscale.shape for child in expanded.kernels] == [(1, 1), (1, 1)], message
    assert "kernels.0" in expanded._modules, message
    assert ScaleKernel(RBFKernel()).expand_batch(torch.Size([3])).base_kernel.raw_lengthscale.shape == (3, 1, 1)


def test_indexing_leaves_children_in_lists_behind():
    """Trap: `Kernel.__getitem__` sets dotted names too, so a list's children keep their batch. Answered likewise."""
    indexed = Children(RBFKernel(batch_shape=torch.Size([2])))[0]
    message = changed("Kernel.__getitem__ now indexes children in a ModuleList", KERNELS)
    assert indexed.kernels[0].raw_lengthscale.shape == (2, 1, 1), message


# -- inputs ------------------------------------------------------------------------------------------------------------


def test_index_kernel_truncates_floats():
    """Trap: outputs rescaled to 0..1 all become output 0. Answered by codes 0..T-1, never rescaled, in kernels."""
    lazy = IndexKernel(num_tasks=3, rank=2)(torch.tensor([[0.0], [0.5], [0.99]]))
    assert raised(lazy.to_dense) is None, changed("IndexKernel now refuses floats", KERNELS)
    covariance = lazy.to_dense()
    message = changed("IndexKernel no longer truncates floats", KERNELS)
    assert torch.allclose(covariance, covariance[0, 0]), message


def test_periodic_kernel_divides_by_lengthscale_and_trains_its_period():
    """Trap: the exponent has l where textbooks have l^2, and the period is free to train. Answered by freezing it."""
    kernel = PeriodicKernel()
    kernel.lengthscale, kernel.period_length = 0.5, 2.0
    value = float(kernel(torch.tensor([[0.3]]), torch.tensor([[0.9]])).to_dense().detach())
    sine = math.sin(math.pi * 0.6 / 2.0) ** 2
    assert math.isclose(value, math.exp(-2 * sine / 0.5), rel_tol=1e-4), changed(
        "PeriodicKernel no longer divides by l", KERNELS
    )
    assert kernel.raw_period_length.requires_grad, changed("the period of PeriodicKernel no longer trains", KERNELS)


def test_float32_merges_minutes():
    """Trap: `.float()` merges close coordinates, e.g. minutes since 1970. Answered by CartesianGrid, which refuses."""
    where = "gpytorch_gaps.grid.cartesian.CartesianGrid"
    seconds = 1.6e9 + 60 * torch.arange(60, dtype=torch.float64)
    module = torch.nn.Module()
    module.register_buffer("axis", seconds)
    axis = module.float().axis
    message = changed("Module.float() no longer merges minutes since 1970", where)
    assert len(axis.unique()) < len(seconds.unique()) == 60, message


# -- structured kernel interpolation -----------------------------------------------------------------------------------

SKI = "gpytorch_gaps.kernels.interpolated"


def interpolation_error(base, sizes):
    """The largest difference between an interpolated kernel and the kernel itself, at random points."""
    unit = ((0.0, 1.0), (0.0, 1.0))
    x = torch.rand(40, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    base = base.double()
    interpolated = GridInterpolationKernel(base, grid_size=sizes, grid_bounds=unit).double()
    ours = preconditioned_ski(interpolated)
    return [float((own(x).to_dense() - base(x).to_dense()).abs().max().detach()) for own in (interpolated, ours)]


def test_interpolated_grids_of_different_lengths_are_wrong():
    """Trap: axes are multiplied in one order and indexed in the other. Answered by kernels.interpolated."""
    kernel = RBFKernel()
    kernel.lengthscale = 0.3
    square, _ = interpolation_error(kernel, [60, 60])
    theirs, ours = interpolation_error(kernel, [60, 90])
    assert square < 1e-3
    assert ours < 1e-3
    assert theirs > 0.5, changed("GridInterpolationKernel is right on axes of different lengths", SKI)


def test_interpolated_kernels_exchange_lengthscales():
    """Trap: with ARD the axes are exchanged, too, even if they are of one length. Answered likewise."""
    kernel = RBFKernel(ard_num_dims=2)
    kernel.lengthscale = torch.tensor([0.2, 0.9])
    theirs, ours = interpolation_error(kernel, [60, 60])
    assert ours < 1e-3
    assert theirs > 0.5, changed("GridInterpolationKernel is right with ARD", SKI)


def test_interpolated_kernels_scale_once_per_column():
    """Trap: a ScaleKernel inside counts once per column: the variance is s^d. Answered likewise."""
    kernel = ScaleKernel(RBFKernel())
    kernel.outputscale, kernel.base_kernel.lengthscale = 2.0, 0.3
    theirs, ours = interpolation_error(kernel, [60, 60])
    assert ours < 1e-3
    assert abs(theirs - 2.0) < 1e-2, changed("GridInterpolationKernel counts a scale inside once", SKI)
