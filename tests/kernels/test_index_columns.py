"""Kernels inside others, each with columns of its own of a grouped axis: the codes of an IndexKernel, and no others.

The reference is GPyTorch's: a kernel sees the columns that ``active_dims`` picks of what reaches it, and a ScaleKernel
takes over those of its base, which are not picked twice.
"""

import pytest
import torch
from gpytorch.kernels import AdditiveKernel, IndexKernel, ProductKernel, RBFKernel, ScaleKernel

import gpytorch_gaps as gaps
from tests import _dense as dense


@pytest.fixture(autouse=True)
def _doubles():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


def rbf(*columns):
    return RBFKernel(active_dims=list(columns) or None)


def index(*columns, tasks=3):
    return IndexKernel(num_tasks=tasks, rank=2, active_dims=list(columns) or None)


# of an axis with columns (a number, a code, another number)
ACCEPTED = {
    "alone": lambda: index(1),
    "product": lambda: ProductKernel(rbf(0), index(1)),
    "product by *": lambda: rbf(0, 2) * index(1),
    "sum": lambda: AdditiveKernel(rbf(0), index(1)),
    "sum by +": lambda: rbf(2) + index(1),
    "scaled": lambda: ScaleKernel(index(1)),
    "scaled, given its own columns": lambda: ScaleKernel(index(), active_dims=[1]),
    "scaled product": lambda: ScaleKernel(ProductKernel(rbf(0), index(1))),
    "product of scaled": lambda: ScaleKernel(rbf(0)) * ScaleKernel(index(1)),
    "sum of products": lambda: rbf(0) * index(1) + ScaleKernel(rbf(2) * index(1)),
    "nested columns": lambda: ScaleKernel(ProductKernel(rbf(1), index(0)), active_dims=[1, 2]),
    "nested twice": lambda: ScaleKernel(
        ProductKernel(rbf(0), ScaleKernel(AdditiveKernel(index(0), rbf(1)), active_dims=[1, 0])), active_dims=[0, 1]
    ),
}


def grid_of(codes=(0.0, 1.0, 2.0, 1.0), columns=(0.3, 1.7, -0.5, 5.5)):
    axis = torch.tensor([columns, codes, [0.1, 0.2, 9.5, -3.0]]).mT
    return gaps.CartesianGrid([axis, torch.linspace(0, 1, 3).unsqueeze(-1)])


@pytest.mark.parametrize("name", ACCEPTED)
def test_codes_in_their_own_column_are_accepted(name):
    grid, kernel = grid_of(), ACCEPTED[name]()
    product = gaps.GappyGridKernel([kernel, RBFKernel()], grid)
    x = grid.points(torch.arange(grid.num_cells))
    expected = kernel(x[:, :3]).to_dense() * product.kernels[1](x[:, 3:]).to_dense()
    torch.testing.assert_close(product(x).to_dense(), expected, rtol=1e-12, atol=1e-12)
    new = torch.tensor([[0.77, 2.0, 0.5, 0.3], [-1.5, 0.0, 2.5, 0.9]])
    expected = kernel(new[:, :3], x[:, :3]).to_dense() * product.kernels[1](new[:, 3:], x[:, 3:]).to_dense()
    torch.testing.assert_close(product(new, x).to_dense(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("code", [0.5, 3.0, -1.0])
@pytest.mark.parametrize("name", ACCEPTED)
def test_a_wrong_code_is_refused(name, code):
    message = f"got {code:g}, expected the codes 0 to 2 of its IndexKernel"
    with pytest.raises(ValueError, match=f"grid: axis 0: {message}"):
        gaps.GappyGridKernel([ACCEPTED[name](), RBFKernel()], grid_of(codes=(0.0, 1.0, code, 2.0)))
    grid = grid_of()
    product = gaps.GappyGridKernel([ACCEPTED[name](), RBFKernel()], grid)
    with pytest.raises(ValueError, match=f"axis 0: {message}"):
        product(torch.tensor([[0.3, code, 0.1, 0.0]]), grid.points(torch.arange(4))).to_dense()


@pytest.mark.parametrize(
    "kernel",
    [
        lambda: ProductKernel(rbf(1), index(0)),
        lambda: ScaleKernel(index(0)),
        lambda: ScaleKernel(ProductKernel(rbf(0), index(1)), active_dims=[1, 0]),
    ],
)
def test_the_wrong_column_is_refused(kernel):
    with pytest.raises(ValueError, match=r"grid: axis 0: got 0\.3, expected the codes 0 to 2"):
        gaps.GappyGridKernel([kernel(), RBFKernel()], grid_of())


def test_two_index_kernels_have_codes_of_their_own():
    axis = torch.tensor([[0.0, 4.0], [1.0, 0.0], [0.0, 3.0]])
    grid = gaps.CartesianGrid([axis, torch.linspace(0, 1, 3).unsqueeze(-1)])
    kernel = index(0, tasks=2) * index(1, tasks=5)
    product = gaps.GappyGridKernel([kernel, RBFKernel()], grid)
    # on the axis, not the grid: upstream's product of covariances is that of their roots, and repeated points blur it
    expected = dense.kron([own(points).to_dense() for own, points in zip(product.kernels, grid.axes, strict=True)])
    torch.testing.assert_close(product(grid.points(torch.arange(9))).to_dense(), expected, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="got 4, expected the codes 0 to 3 of its IndexKernel"):
        gaps.GappyGridKernel([index(0, tasks=2) * index(1, tasks=4), RBFKernel()], grid)


@pytest.mark.parametrize(
    "kernel", [lambda: ScaleKernel(rbf(2)), lambda: ScaleKernel(ScaleKernel(rbf(2))), lambda: ScaleKernel(rbf(1, 2))]
)
def test_scaled_kernels_of_some_columns_without_codes(kernel):
    """A ScaleKernel takes over the columns of its base: they are not to be picked twice."""
    grid, own = grid_of(), kernel()
    product = gaps.GappyGridKernel([own, RBFKernel()], grid)
    x = grid.points(torch.arange(grid.num_cells))
    expected = own(x[:, :3]).to_dense() * product.kernels[1](x[:, 3:]).to_dense()
    torch.testing.assert_close(product(x).to_dense(), expected, rtol=1e-12, atol=1e-12)
