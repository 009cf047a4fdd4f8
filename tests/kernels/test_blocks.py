"""Blocks of axes that share a kernel: what is recognised as a lattice, and covariances against the kernel itself."""

import copy
import math
import pickle

import pytest
import torch
from gpytorch.kernels import (
    Kernel,
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
    SpectralDeltaKernel,
    SpectralMixtureKernel,
)

import gpytorch_gaps as gaps
from gpytorch_gaps.kernels.blocks import block_factor, find_lattice, regular_positions, stationary_columns
from gpytorch_gaps.linalg.circulant import CirculantOperator
from gpytorch_gaps.linalg.factors import negative_share
from gpytorch_gaps.operators import KhatriRaoOperator, SelectedKroneckerOperator
from tests import _dense as dense


def axis(*values):
    return torch.tensor(values, dtype=torch.float64)


def regular(size, step=0.1, start=0.0, dtype=torch.float64):
    return (start + step * torch.arange(size, dtype=torch.float64)).to(dtype)


def grid_of(*axes):
    return gaps.CartesianGrid(axes)


def factors(kernel, x1, x2=None):
    return [type(factor) for factor in kernel(x1, x2).evaluate_kernel().factors]


def plain(kernel, x1, x2=None):
    """The product over blocks by GPyTorch alone."""
    value, x2 = 1.0, x1 if x2 is None else x2
    for axes, own in zip(kernel.blocks, kernel.kernels, strict=True):
        columns = slice(kernel.grid.columns[axes[0]].start, kernel.grid.columns[axes[-1]].stop)
        value = value * own(x1[:, columns], x2[:, columns]).to_dense()
    return value


# -- coordinates -----------------------------------------------------------------------------------------------------


def places(positions):
    return list(range(positions)) if isinstance(positions, int) else positions.tolist()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("step", "start"), [(0.1, 0.0), (1 / 3, -7.0), (1.0, 2000.0), (0.25, -90.0), (3600.0, 1.7e5), (1e-9, 0.0)]
)
def test_regular_coordinates(step, start, dtype):
    levels = regular(40, step, start, dtype)
    found, rows, columns, span = regular_positions(levels, levels)
    assert found == pytest.approx(step, rel=1e-5)
    assert (rows, columns, span) == (40, 40, 40)
    # the other way round: places are counted from where the axis begins
    assert regular_positions(levels.flip(0), levels.flip(0))[1:] == (40, 40, 40)
    some = torch.tensor([0, 3, 4, 9, 39])
    found, rows, columns, span = regular_positions(levels[some], levels)
    assert places(rows) == some.tolist()
    assert (columns, span) == (40, 40)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("size", [7_000, 100_000])
def test_long_axes(size, dtype):
    """In float32, single distances are rounded by more than one step over the whole axis."""
    levels = torch.linspace(0, 1, size, dtype=torch.float64).to(dtype)
    step, rows, columns, span = regular_positions(levels, levels)
    assert (rows, columns, span) == (size, size, size)
    assert step == pytest.approx(1 / (size - 1), rel=1e-7)


def test_missing_levels_and_other_grids():
    step, rows, columns, span = regular_positions(axis(0.0, 0.2, 0.3, 0.8), axis(0.0, 0.2, 0.3, 0.8))
    assert step == pytest.approx(0.1)
    assert (places(rows), places(columns), span) == ([0, 2, 3, 8], [0, 2, 3, 8], 9)
    # steps of 1.0 and 1.2: the lattice of both is finer than either distance
    step, rows, _, span = regular_positions(axis(0.0, 1.0, 2.2, 3.4), axis(0.0, 1.0, 2.2, 3.4))
    assert step == pytest.approx(0.2)
    assert (places(rows), span) == ([0, 5, 11, 17], 18)
    # a finer grid, half a step away, and one that goes beyond
    step, rows, columns, span = regular_positions(axis(0.5, 1.0, 3.5), axis(0.0, 1.0, 2.0))
    assert step == pytest.approx(0.5)
    assert (places(rows), places(columns), span) == ([1, 2, 7], [0, 2, 4], 8)
    # downwards, and at levels of any order
    step, rows, columns, span = regular_positions(axis(3.0, 2.0, 0.0), axis(0.0, 3.0))
    assert (places(rows), places(columns), span) == ([0, 1, 3], [3, 0], 4)
    assert regular_positions(axis(5.0), axis(5.0)) == (1.0, 1, 1, 1)
    assert regular_positions(axis(5.0), axis(2.0, 5.0))[1:] == (pytest.approx(axis(1.0)), 2, 2)


def test_coordinates_that_were_stored_in_float32():
    exact = 34.3 + 0.0092739783 * torch.arange(300, dtype=torch.float64)
    stored = exact.float().double()
    step, rows, _, span = regular_positions(stored, stored)
    assert (rows, span) == (300, 300)
    assert step == pytest.approx(0.0092739783, rel=1e-5)
    moved = exact + 3e-5 * torch.sin(torch.arange(300, dtype=torch.float64))
    assert regular_positions(moved, moved) is None  # not by rounding


def test_irregular_coordinates():
    generator = torch.Generator().manual_seed(0)
    scattered = torch.rand(30, generator=generator, dtype=torch.float64).sort().values
    assert regular_positions(scattered, scattered) is None
    geometric = torch.logspace(0, 3, 20, dtype=torch.float64)
    assert regular_positions(geometric, geometric) is None
    jittered = regular(30) + 1e-3 * torch.rand(30, generator=generator, dtype=torch.float64)
    assert regular_positions(jittered, jittered) is None
    # far too many places for two clusters
    far = torch.cat([regular(10), 1e4 + regular(10)])
    assert regular_positions(far, far) is None
    # rounded to float32, days are within a few units of rounding of any lattice
    days = (2000.0 + 20.0 * torch.rand(2_000, generator=generator, dtype=torch.float64)).sort().values.float().unique()
    assert regular_positions(days, days) is None


def test_coordinates_are_those_of_the_places():
    """Whatever is accepted is close to a place, and every level has a place of its own."""
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        size, dtype = int(torch.randint(2, 40, (), generator=generator)), (torch.float64, torch.float32)[seed % 2]
        start, step = 10.0 ** (4.0 * torch.rand(2, generator=generator, dtype=torch.float64) - 2.0)
        level = torch.randperm(3 * size, generator=generator)[:size].sort().values
        coordinates = (start + step * level).to(dtype)
        if len(coordinates.unique()) < size:
            continue
        found = regular_positions(coordinates, coordinates)
        if found is None:
            continue
        own = torch.tensor(places(found[1]), dtype=torch.float64)
        assert len(own.unique()) == size
        error = (coordinates.double() - coordinates.double()[0] - found[0] * own).abs().max()
        rounding = 20 * torch.finfo(dtype).eps * float(coordinates.abs().max())
        assert float(error) <= 2e-6 * found[0] + rounding


# -- which kernels ---------------------------------------------------------------------------------------------------


class Tilted(Kernel):
    """Stationary, but not even along each of the first two axes."""

    has_lengthscale = True

    def forward(self, x1, x2, diag=False, **params):
        lag = x1 - x2 if diag else x1.unsqueeze(-2) - x2.unsqueeze(-3)
        lag = lag / self.lengthscale.unsqueeze(-2 if not diag else -1).squeeze(-1)
        return torch.exp(-(lag[..., 0] + 0.8 * lag[..., 1]).square() - lag.square().sum(-1) / 4)


class Drifting(Kernel):
    """Says that it is stationary, since it has a length-scale, and is so within a few steps only."""

    has_lengthscale = True

    def forward(self, x1, x2, diag=False, **params):
        first, second = (x1, x2) if diag else (x1.unsqueeze(-2), x2.unsqueeze(-3))
        scale = (1.0 + 0.5 * torch.sin(first[..., 0] / 5)) * (1.0 + 0.5 * torch.sin(second[..., 0] / 5))
        return scale * torch.exp(-0.5 * ((first - second) / 0.1).square().sum(-1))


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (Tilted, (4, 5)),
        (Tilted, (4, 5, 3)),
        (Drifting, (300, 4)),
        (Drifting, (4, 300)),
        (lambda: SpectralDeltaKernel(num_dims=2), (5, 6)),  # cos(a lag_1 + b lag_2)
        (lambda: LinearKernel(), (4, 5)),
        (lambda: RBFKernel() + LinearKernel(), (4, 5)),
        (lambda: RBFKernel() * LinearKernel(active_dims=[1]), (4, 5)),
    ],
)
def test_kernels_that_are_not_stationary_and_even_have_matrices(make, shape):
    grid = grid_of(*(regular(size) for size in shape))
    kernel = gaps.GappyGridKernel([make().double()], grid, blocks=[tuple(range(len(shape)))])
    x = grid.points(torch.arange(0, grid.num_cells, max(1, grid.num_cells // 60)))
    covariance = kernel(x).evaluate_kernel()
    assert [torch.is_tensor(factor) for factor in covariance.factors] == [True]
    torch.testing.assert_close(covariance.to_dense(), plain(kernel, x), rtol=1e-12, atol=1e-12)


def mixture(num_dims):
    torch.manual_seed(0)
    kernel = SpectralMixtureKernel(num_mixtures=3, ard_num_dims=num_dims)
    kernel.mixture_means = torch.rand(3, 1, num_dims)
    return kernel


def with_lengths(kernel, *lengths):
    kernel.lengthscale = torch.tensor([lengths])
    return kernel


KERNELS = {
    "Matern": lambda: MaternKernel(nu=0.5),
    "ARD": lambda: with_lengths(MaternKernel(nu=1.5, ard_num_dims=2), 0.3, 0.9),
    "RBF": RBFKernel,
    "RQ": RQKernel,
    "Periodic": lambda: PeriodicKernel(ard_num_dims=2),
    "SpectralMixture": lambda: mixture(2),
    "scaled": lambda: ScaleKernel(RBFKernel()),
    "a sum": lambda: ScaleKernel(MaternKernel(nu=2.5)) + RBFKernel(ard_num_dims=2),
    "a product": lambda: MaternKernel(nu=0.5) * PeriodicKernel(),
    "a sum over axes": lambda: RBFKernel(active_dims=[0]) + ScaleKernel(MaternKernel(active_dims=[1])),
    "a product over axes": lambda: RBFKernel(active_dims=[1]) * MaternKernel(nu=0.5, active_dims=[0]),
    "active_dims": lambda: MaternKernel(active_dims=[1]),
    "active_dims inside a scale": lambda: ScaleKernel(MaternKernel(active_dims=[0])),
    "nested": lambda: ScaleKernel(RBFKernel() + MaternKernel(active_dims=[0])) * RQKernel(),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_stationary_kernels_of_two_axes(name, dtype):
    """Entries, products and gradients of every hyperparameter; one axis down, one with levels missing."""
    axes = [regular(6, -0.1, 3.0).to(dtype), axis(0.0, 0.2, 0.3, 0.7, 0.8).to(dtype), axis(0.0, 1.0, 5.0).to(dtype)]
    grid = grid_of(*axes)
    kernel = gaps.GappyGridKernel([KERNELS[name](), RBFKernel()], grid, blocks=[(0, 1), (2,)]).to(dtype)
    x = grid.points(dense.observed("random", grid.shape))
    covariance = kernel(x).evaluate_kernel()
    assert isinstance(covariance, SelectedKroneckerOperator)
    assert [torch.is_tensor(factor) for factor in covariance.factors] == [False, True]
    expected = plain(kernel.double(), x.double())
    # GPyTorch's own distances have the root of the rounding of their squares
    tolerance = 2e-9 if dtype == torch.float64 else 2e-6
    names, parameters = zip(*kernel.named_parameters(), strict=True)
    weights = dense.randn(len(x), 2)
    wanted = torch.autograd.grad((weights * (expected @ weights.flip(0))).sum(), parameters)
    kernel.to(dtype)
    covariance = kernel(x).evaluate_kernel()
    assert covariance.dtype == dtype
    assert dense.relative(covariance.to_dense().detach(), expected.detach()) <= tolerance
    weights = weights.to(dtype)
    product = covariance @ weights.flip(0)
    assert dense.relative(product.detach(), expected.detach() @ weights.flip(0).double()) <= tolerance
    got = torch.autograd.grad((weights * product).sum(), list(kernel.parameters()))
    for name_, own, other in zip(names, got, wanted, strict=True):
        assert dense.relative(own, other) <= (1e-4 if dtype == torch.float32 else 1e-8), name_


@pytest.mark.parametrize("name", ["Matern", "SpectralMixture 3", "ARD 3", "of two of three"])
def test_three_axes(name):
    kernel = {
        "Matern": lambda: MaternKernel(nu=1.5),
        "SpectralMixture 3": lambda: mixture(3),
        "ARD 3": lambda: with_lengths(RBFKernel(ard_num_dims=3), 0.2, 0.4, 0.9),
        "of two of three": lambda: MaternKernel(active_dims=[0, 2]) * RBFKernel(active_dims=[1]),
    }[name]()
    grid = grid_of(regular(4), regular(5, 0.2), axis(0.0, 0.3, 0.4))
    kernel = gaps.GappyGridKernel([kernel], grid, blocks=[(0, 1, 2)]).double()
    covariance = kernel(grid.points()).evaluate_kernel()
    assert [len(factor.torus) for factor in covariance.factors] == [3]
    expected = plain(kernel, grid.points())
    torch.testing.assert_close(covariance @ torch.eye(60, dtype=torch.float64), expected, rtol=1e-12, atol=1e-12)


def test_axes_that_are_not_regular_come_first():
    """Dense along the scattered axis, and along a regular one before it."""
    scattered = dense.randn(4)
    for axes, num_dense, circles in (
        ([scattered, regular(5), regular(3)], 4, 2),
        ([regular(3), scattered, regular(5)], 12, 1),
        ([dense.randn(4, 2), regular(5), axis(2.0)], 4, 2),
    ):
        grid = grid_of(*axes)
        kernel = gaps.GappyGridKernel([MaternKernel(nu=1.5)], grid, blocks=[(0, 1, 2)]).double()
        (factor,) = kernel(grid.points()).evaluate_kernel().factors
        assert isinstance(factor, CirculantOperator)
        assert factor.num_dense == (num_dense, num_dense)
        assert len(factor.torus) == circles
        product = factor @ torch.eye(grid.num_cells, dtype=torch.float64)
        torch.testing.assert_close(product, plain(kernel, grid.points()), rtol=1e-12, atol=1e-12)
    grid = grid_of(regular(5), scattered)
    kernel = gaps.GappyGridKernel([MaternKernel()], grid, blocks=[(0, 1)]).double()
    assert factors(kernel, grid.points()) == [torch.Tensor]


def test_columns_along_which_a_kernel_is_stationary():
    assert stationary_columns(RBFKernel(), 2) == {0: None, 1: None}
    assert stationary_columns(LinearKernel(), 2) == {}
    assert stationary_columns(RBFKernel() + LinearKernel(active_dims=[0]), 2) == {1: None}
    sphere = gaps.SphereKernel(RBFKernel(), active_dims=[1, 2])
    assert stationary_columns(RBFKernel(active_dims=[0]) * sphere, 3) == {0: None, 2: 360.0}
    assert stationary_columns(RBFKernel() * sphere, 3) == {0: None, 2: None}


def test_padding():
    """A torus holds all lags; for draws, it grows until it is positive definite."""
    axes = [regular(20).unsqueeze(-1), regular(30).unsqueeze(-1)]
    kernel = with_lengths(MaternKernel(nu=1.5, ard_num_dims=2), 2.0, 2.0).double()
    lattice = find_lattice(kernel, axes, axes)
    assert all(places >= 2 * span - 1 for places, span in zip(lattice.torus(1), (20, 30), strict=True))
    short, grown = (block_factor(kernel, axes, axes, lattice, definite) for definite in (False, True))
    assert negative_share(short) > 0.0
    assert negative_share(grown) < negative_share(short)
    assert math.prod(grown.torus) > math.prod(short.torus)
    assert grown.product_flops == short.product_flops  # more places, but not for products
    torch.testing.assert_close(short.to_dense(), grown.to_dense(), rtol=1e-12, atol=1e-12)
    kernel.lengthscale = 0.2
    assert block_factor(kernel, axes, axes, lattice, True).torus == short.torus
    # two grids: of the torus that holds both, some places are rows, others columns
    kernel.lengthscale = 2.0
    finer = [own[::2] for own in axes]
    cross = block_factor(kernel, finer, axes, find_lattice(kernel, finer, axes), True)
    assert negative_share(cross) == pytest.approx(negative_share(grown))


def test_products_of_kernels_whose_padding_differs():
    """As long as both are on the same places, a product is one on a torus, ready to draw from or not."""
    grid = grid_of(regular(12), regular(14))
    first, second = (
        gaps.GappyGridKernel([with_lengths(MaternKernel(nu=nu, ard_num_dims=2), length, length)], grid, blocks=[(0, 1)])
        for nu, length in ((1.5, 2.0), (2.5, 0.15))
    )
    product = (first * second).double()
    x = grid.points(dense.observed("random", grid.shape))
    for mode in (True, False):
        product.train(mode)
        tori = {kernel(x).evaluate_kernel().factors[0].torus for kernel in (first, second)}
        assert len(tori) == (1 if mode else 2)
        covariance = product(x).evaluate_kernel()
        assert isinstance(covariance, SelectedKroneckerOperator)
        assert isinstance(covariance.factors[0], CirculantOperator)
        expected = plain(first, x) * plain(second, x)
        torch.testing.assert_close(covariance.to_dense(), expected, rtol=1e-8, atol=1e-8)
        eye = torch.eye(len(x), dtype=torch.float64)
        torch.testing.assert_close(covariance @ eye, expected, rtol=1e-8, atol=1e-8)


# -- what is refused -------------------------------------------------------------------------------------------------

GRID = grid_of(regular(4), regular(5), regular(3))


@pytest.mark.parametrize("blocks", [[(0, 1)], [(0, 2), (1,)], [(0, 1), (1, 2)], [(1, 0), (2,)], [(0, 1, 2, 3)], []])
def test_blocks_that_are_no_partition(blocks):
    with pytest.raises(ValueError, match="expected each of the grid's axes 0 to 2 once, in order") as error:
        gaps.GappyGridKernel([RBFKernel()] * max(1, len(blocks)), GRID, blocks=blocks)
    assert str(error.value).startswith(f"blocks: got {blocks}")


def test_kernels_that_do_not_fit_the_blocks():
    blocks = [(0, 1), 2]  # a number is a block of one
    assert gaps.GappyGridKernel([RBFKernel(), RBFKernel()], GRID, blocks=blocks).blocks == ((0, 1), (2,))
    for kernels, message in (
        ([RBFKernel()] * 3, "kernels: got 3, expected one for each of the 2 blocks"),
        (RBFKernel(), "kernels: got one RBFKernel, expected a list of one kernel per block"),
        ([RBFKernel(ard_num_dims=3), RBFKernel()], r"block \(0, 1\): got ard_num_dims=3, expected 2, the columns of"),
        ([RBFKernel(), RBFKernel(ard_num_dims=2)], "axis 2: got ard_num_dims=2, expected 1"),
        ([RBFKernel(active_dims=[2]), RBFKernel()], r"block \(0, 1\): got active_dims=\[2\], .* 0 to 1"),
        ([RBFKernel(), "rbf"], "axis 2: got str, expected a gpytorch kernel"),
    ):
        with pytest.raises(ValueError, match=message):
            gaps.GappyGridKernel(kernels, GRID, blocks=blocks)
    with pytest.raises(ValueError, match="columns, expected the grid's 3"):
        gaps.GappyGridKernel([RBFKernel()], GRID, blocks=[(0, 1, 2)])(torch.zeros(4, 2)).to_dense()


def test_blocks_too_large_for_a_matrix():
    scattered = torch.rand(100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    grid = grid_of(regular(90), scattered)
    kernel = gaps.GappyGridKernel([MaternKernel()], grid, blocks=[(0, 1)]).double()
    x = grid.points(torch.arange(10))
    with pytest.raises(
        ValueError, match=r"block \(0, 1\): got 90 x 100 points with a MaternKernel, too many for a"
    ) as e:
        kernel(x).evaluate_kernel()
    assert "put axes that are not regular first" in str(e.value)
    turned = grid_of(scattered, regular(90))
    kernel = gaps.GappyGridKernel([MaternKernel()], turned, blocks=[(0, 1)]).double()
    assert factors(kernel, turned.points(torch.arange(10))) == [CirculantOperator]
    # scattered test points and other grids have no matrix of the block either, and need none
    x = turned.points(torch.arange(10))
    points = dense.randn(7, 2)
    torch.testing.assert_close(kernel(points, x).to_dense(), plain(kernel, points, x))


# -- a long axis -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_long_axis_goes_by_fft(dtype):
    grid = grid_of((torch.arange(7_000).double() / 24).to(dtype), torch.arange(2, dtype=dtype))
    kernel = gaps.GappyGridKernel([MaternKernel(nu=1.5), RBFKernel()], grid).to(dtype)
    index = torch.arange(0, grid.num_cells, 7)
    covariance = kernel(grid.points(index)).evaluate_kernel()
    assert [torch.is_tensor(factor) for factor in covariance.factors] == [False, True]
    rows, x = torch.arange(0, len(index), 100), dense.randn(len(index), 2).to(dtype)
    expected = plain(copy.deepcopy(kernel).double(), grid.points(index[rows]).double(), grid.points(index).double())
    error = dense.relative((covariance @ x)[rows].detach(), (expected @ x.double()).detach())
    assert error <= (1e-12 if dtype == torch.float64 else 1e-5)
    short = grid_of(torch.arange(2_500) / 24, torch.arange(2.0))
    kernel = gaps.GappyGridKernel([MaternKernel(nu=1.5), RBFKernel()], short)
    assert factors(kernel, short.points(torch.arange(5))) == [torch.Tensor, torch.Tensor]


def test_a_long_irregular_axis():
    levels = torch.rand(33_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64).unique()
    grid = grid_of(levels)
    kernel = gaps.GappyGridKernel([MaternKernel()], grid).double()
    with pytest.raises(ValueError, match=f"axis 0: got {len(levels)} points with a MaternKernel, too many"):
        kernel(grid.points(torch.arange(5))).evaluate_kernel()


# -- other points ----------------------------------------------------------------------------------------------------


def block_kernel():
    grid = grid_of(regular(6, 0.2), regular(5, 0.5, 1.0), axis(0.0, 1.0, 4.0))
    first = ScaleKernel(with_lengths(MaternKernel(nu=1.5, ard_num_dims=2), 0.4, 1.1))
    return gaps.GappyGridKernel([first, RBFKernel()], grid, blocks=[(0, 1), (2,)]).double()


OTHERS = {
    "a part of the grid": (lambda: grid_of(regular(3, 0.4), axis(1.5, 2.0), axis(1.0)), CirculantOperator),
    "a finer grid": (lambda: grid_of(regular(16, 0.05), regular(9, 0.25, 1.0), axis(0.0, 2.0)), CirculantOperator),
    "beyond the grid": (lambda: grid_of(regular(4, 0.2, 0.8), regular(4, 0.5, 2.5), axis(7.0)), CirculantOperator),
    "half a step away": (lambda: grid_of(regular(5, 0.2, 0.1), regular(5, 0.5, 1.0), axis(0.5)), CirculantOperator),
    "off the first axis": (lambda: grid_of(axis(0.0, 0.1234567), axis(1.0, 1.5), axis(0.0)), CirculantOperator),
    "off the second axis": (lambda: grid_of(axis(0.0, 0.2), axis(1.0, 1.1234567), axis(0.0)), torch.Tensor),
}


@pytest.mark.parametrize("name", OTHERS)
def test_covariances_with_other_grids(name):
    kernel, (make, kind) = block_kernel(), OTHERS[name]
    x = kernel.grid.points(dense.observed("random", kernel.grid.shape))
    other = make().points()
    covariance = kernel(other, x).evaluate_kernel()
    assert isinstance(covariance, SelectedKroneckerOperator)
    assert isinstance(covariance.factors[0], kind)
    expected = plain(kernel, other, x)
    weights, ours = dense.randn(len(x), 2), dense.randn(len(other), 2)
    for got, wanted in (
        (covariance.to_dense(), expected),
        (covariance @ weights, expected @ weights),
        (covariance.mT @ ours, expected.mT @ ours),
        (kernel(x, other).to_dense(), expected.mT),
        (kernel(other).to_dense(), plain(kernel, other)),
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-11)
    parameters = list(kernel.parameters())
    wanted = torch.autograd.grad((ours * (expected @ weights)).sum(), parameters)
    for got, own in zip(torch.autograd.grad((ours * (covariance @ weights)).sum(), parameters), wanted, strict=True):
        torch.testing.assert_close(got, own, rtol=1e-9, atol=1e-9)


def test_covariances_with_scattered_points():
    kernel = block_kernel()
    x, points = kernel.grid.points(dense.observed("random", kernel.grid.shape)), dense.randn(8, 3)
    covariance = kernel(points, x).evaluate_kernel()
    assert isinstance(covariance, KhatriRaoOperator)
    torch.testing.assert_close(covariance.to_dense(), plain(kernel, points, x))
    torch.testing.assert_close(kernel(points).to_dense(), plain(kernel, points))
    torch.testing.assert_close(kernel(points, diag=True), plain(kernel, points).diagonal())
    torch.testing.assert_close(kernel(x, diag=True), plain(kernel, x).diagonal())
    free = points.clone().requires_grad_(True)
    (got,) = torch.autograd.grad(kernel(free, x).to_dense().square().sum(), free)
    (wanted,) = torch.autograd.grad(plain(kernel, free, x).square().sum(), free)
    torch.testing.assert_close(got, wanted)


# -- copies and batches ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [copy.deepcopy, lambda kernel: pickle.loads(pickle.dumps(kernel))])
def test_copies(how):
    kernel = block_kernel()
    x = kernel.grid.points(dense.observed("random", kernel.grid.shape))
    before = kernel(x).to_dense()  # lattices are remembered
    copied = how(kernel)
    assert copied.blocks == kernel.blocks
    assert factors(copied, x) == factors(kernel, x)
    assert torch.equal(copied(x).to_dense(), before)
    copied.kernels[0].outputscale = 3.0
    assert not torch.equal(copied(x).to_dense(), before)
    assert torch.equal(kernel(x).to_dense(), before)


def test_state_dict():
    kernel, other = block_kernel(), block_kernel()
    x = kernel.grid.points(dense.observed("random", kernel.grid.shape))
    kernel.kernels[0].base_kernel.lengthscale = torch.tensor([[0.7, 0.2]])
    other.load_state_dict(kernel.state_dict())
    assert torch.equal(other(x).to_dense(), kernel(x).to_dense())


def test_a_batch_of_hyperparameters():
    kernel = block_kernel()
    grid = kernel.grid
    x = grid.points(dense.observed("random", grid.shape))
    batch = kernel.expand_batch(torch.Size([3]))
    assert batch.blocks == kernel.blocks
    assert batch.batch_shape == (3,)
    torch.testing.assert_close(batch(x).to_dense(), plain(kernel, x).expand(3, -1, -1))

    lengths = torch.tensor([[[0.3, 0.6]], [[0.5, 0.2]], [[1.0, 2.0]]], dtype=torch.float64)
    plane = MaternKernel(nu=1.5, ard_num_dims=2, batch_shape=torch.Size([3]))
    plane.lengthscale = lengths
    kernel = gaps.GappyGridKernel([plane, RBFKernel()], grid, blocks=[(0, 1), (2,)]).double()
    covariance = kernel(x).evaluate_kernel()
    assert isinstance(covariance.factors[0], CirculantOperator)
    expected = plain(kernel, x)
    weights = dense.randn(len(x), 2)
    torch.testing.assert_close(covariance.to_dense(), expected)
    torch.testing.assert_close(covariance @ weights, expected @ weights)
    torch.testing.assert_close(kernel[1](x).to_dense(), expected[1])
    wanted = torch.autograd.grad((expected @ weights).square().sum(), plane.raw_lengthscale)
    got = torch.autograd.grad((covariance @ weights).square().sum(), plane.raw_lengthscale)
    torch.testing.assert_close(got[0], wanted[0], rtol=1e-9, atol=1e-9)


def test_another_kernel_has_another_lattice():
    """What was found for a kernel says nothing about the one that replaces it."""
    grid = grid_of(regular(300), regular(4))
    kernel = gaps.GappyGridKernel([RBFKernel()], grid, blocks=[(0, 1)]).double()
    x = grid.points(torch.arange(0, grid.num_cells, 20))
    assert factors(kernel, x) == [CirculantOperator]
    kernel.kernels[0] = Drifting().double()
    torch.testing.assert_close(kernel(x).to_dense(), plain(kernel, x), rtol=1e-12, atol=1e-12)
