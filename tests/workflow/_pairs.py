"""Pairs of models that must agree: one on a grid with gaps, one of plain GPyTorch kernels, dense.

Each comes with about 1,500 observations, or about 300 where `small`.
"""

from dataclasses import dataclass
from typing import Any

import gpytorch
import torch
from gpytorch.kernels import (
    IndexKernel,
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    ProductKernel,
    RBFKernel,
    ScaleKernel,
)

import gpytorch_gaps as gaps


class Model(gpytorch.models.ExactGP):
    """The model of GPyTorch's regression tutorial."""

    def __init__(self, x, y, likelihood, kernel, batch_shape=()):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=torch.Size(batch_shape))
        self.covar_module = kernel

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


@dataclass
class Pair:
    """Models whose named parameters correspond, in order, and where to predict."""

    ours: Model
    dense: Model
    grid: gaps.CartesianGrid
    test_x: torch.Tensor
    test_noise: Any = None  # what the dense likelihood must be told

    def both(self):
        return self.ours, self.dense


class PerLevelNoise(gpytorch.likelihoods.GaussianLikelihood):
    """One learned noise for every value 0 .. T-1 of the last column, by the book."""

    def __init__(self, levels):
        noise = gpytorch.likelihoods.noise_models.MultitaskHomoskedasticNoise(levels)
        gpytorch.likelihoods.gaussian_likelihood._GaussianLikelihoodBase.__init__(self, noise)
        self.x = None

    def marginal(self, function_dist, *params, **kwargs):
        x = params[0][0] if isinstance(params[0], list | tuple) else params[0]
        noise = torch.diag_embed(self.noise[x[..., -1].long()])
        return type(function_dist)(function_dist.mean, function_dist.lazy_covariance_matrix.to_dense() + noise)


def on(column, kernel, length=None):
    """A kernel on one input column, or several."""
    columns = [column] if isinstance(column, int) else list(column)
    kernel = kernel(active_dims=columns, ard_num_dims=len(columns) if len(columns) > 1 else None)
    return with_length(kernel, length)


def with_length(kernel, length):
    if length is not None:
        kernel.lengthscale = length
    return kernel


def gappy(shape, fraction, seed, groups=None):
    """A grid with random gaps and smooth noisy values, NaN in the gaps."""
    generator = torch.Generator().manual_seed(seed)
    axes = []
    for i, size in enumerate(shape):
        if groups and i in groups:
            axes.append(torch.rand(size, groups[i], generator=generator, dtype=torch.float64))
        else:
            axes.append(torch.linspace(0, 1, size, dtype=torch.float64))
    values = torch.zeros(shape, dtype=torch.float64)
    for i, axis in enumerate(axes):
        wave = torch.sin((3 + i) * axis.sum(-1) if axis.dim() == 2 else (3 + i) * axis)
        values = values + wave.view([-1 if k == i else 1 for k in range(len(shape))])
    values = values + 0.2 * torch.randn(shape, generator=generator, dtype=torch.float64)
    values[torch.rand(shape, generator=generator) < fraction] = torch.nan
    return axes, values


def _size(small, large_shape, small_shape):
    return small_shape if small else large_shape


def two_axes(small=False, fraction=0.4):
    shape = _size(small, (45, 55), (20, 25))
    grid, x, y = gaps.from_array(*reversed(gappy(shape, fraction, 0)))
    ours = ScaleKernel(gaps.GappyGridKernel([with_length(RBFKernel(), 0.3), with_length(MaternKernel(), 0.4)], grid))
    dense = ScaleKernel(ProductKernel(on(0, RBFKernel, 0.3), on(1, MaternKernel, 0.4)))
    return _pair(grid, x, y, ours, dense)


def grouped(small=False, fraction=0.4):
    shape = _size(small, (14, 10, 18), (8, 6, 10))
    grid, x, y = gaps.from_array(*reversed(gappy(shape, fraction, 1, groups={1: 3})))
    ours = ScaleKernel(
        gaps.GappyGridKernel(
            [with_length(RBFKernel(), 0.4), with_length(MaternKernel(ard_num_dims=3), 0.8), PeriodicKernel()], grid
        )
    )
    dense = ScaleKernel(
        ProductKernel(on(0, RBFKernel, 0.4), on((1, 2, 3), MaternKernel, 0.8), PeriodicKernel(active_dims=[4]))
    )
    return _pair(grid, x, y, ours, dense)


def outputs(small=False, fraction=0.4, noise_axis=None):
    shape = _size(small, (25, 34, 3), (12, 14, 3))
    axes, values = gappy(shape, fraction, 2)
    axes[2] = torch.arange(shape[2], dtype=torch.float64)
    grid, x, y = gaps.from_array(values, axes)
    torch.manual_seed(0)
    ours = gaps.GappyGridKernel(
        [with_length(RBFKernel(), 0.3), with_length(RBFKernel(), 0.4), IndexKernel(num_tasks=shape[2], rank=1)], grid
    )
    index = IndexKernel(num_tasks=shape[2], rank=1, active_dims=[2])
    dense = ProductKernel(on(0, RBFKernel, 0.3), on(1, RBFKernel, 0.4), index)
    index.load_state_dict({**ours.kernels[2].state_dict(), "active_dims": index.active_dims})
    if noise_axis is None:
        return _pair(grid, x, y, ours, dense)
    likelihood = gaps.GappyGridLikelihood(noise_axis=noise_axis, grid=grid)
    return _pair(grid, x, y, ours, dense, likelihood, PerLevelNoise(shape[2]))


def noise_per_output(small=False):
    pair = outputs(small, noise_axis=-1)
    levels = torch.tensor([0.05, 0.2, 0.6], dtype=torch.float64)
    for model in pair.both():
        model.likelihood.noise = levels
    return pair


def sum_of_two(small=False, fraction=0.4):
    shape = _size(small, (45, 55), (20, 25))
    grid, x, y = gaps.from_array(*reversed(gappy(shape, fraction, 3)))

    def short_and_long(make):
        return ScaleKernel(make(0.5, 0.6)) + ScaleKernel(make(0.1, 0.15))

    ours = short_and_long(
        lambda a, b: gaps.GappyGridKernel([with_length(RBFKernel(), a), with_length(MaternKernel(), b)], grid)
    )
    dense = short_and_long(lambda a, b: ProductKernel(on(0, RBFKernel, a), on(1, MaternKernel, b)))
    return _pair(grid, x, y, ours, dense)


def plus_linear(small=False, fraction=0.4):
    shape = _size(small, (45, 55), (20, 25))
    grid, x, y = gaps.from_array(*reversed(gappy(shape, fraction, 4)))
    ours = ScaleKernel(gaps.GappyGridKernel([with_length(RBFKernel(), 0.3), with_length(RBFKernel(), 0.2)], grid))
    dense = ScaleKernel(ProductKernel(on(0, RBFKernel, 0.3), on(1, RBFKernel, 0.2)))
    return _pair(grid, x, y, ours + LinearKernel(), dense + LinearKernel())


def noise_per_point(small=False, fraction=0.4):
    shape = _size(small, (45, 55), (20, 25))
    grid, x, y = gaps.from_array(*reversed(gappy(shape, fraction, 5)))
    noise = 0.02 + 0.3 * torch.rand(len(y), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours = ScaleKernel(gaps.GappyGridKernel([with_length(RBFKernel(), 0.3), with_length(MaternKernel(), 0.4)], grid))
    dense = ScaleKernel(ProductKernel(on(0, RBFKernel, 0.3), on(1, MaternKernel, 0.4)))
    fixed = gpytorch.likelihoods.FixedNoiseGaussianLikelihood(noise)
    return _pair(grid, x, y, ours, dense, gaps.GappyGridLikelihood(noise), fixed)


def batch_of_three(small=False, fraction=0.4):
    shape = _size(small, (45, 55), (20, 25))
    grid, x, y = gaps.from_array(*reversed(gappy(shape, fraction, 6)))
    batch = torch.Size([3])
    y = torch.stack([y, y.flip(0), y.roll(7)])
    lengths = torch.tensor([0.2, 0.3, 0.4], dtype=torch.float64).view(3, 1, 1)

    def kernels(**columns):
        rbf = RBFKernel(batch_shape=batch, active_dims=columns.get("a"))
        matern = MaternKernel(batch_shape=batch, active_dims=columns.get("b"))
        return [with_length(rbf, lengths), with_length(matern, lengths + 0.1)]

    ours = ScaleKernel(gaps.GappyGridKernel(kernels(), grid), batch_shape=batch)
    dense = ScaleKernel(ProductKernel(*kernels(a=[0], b=[1])), batch_shape=batch)
    likelihoods = (
        gaps.GappyGridLikelihood(batch_shape=batch),
        gpytorch.likelihoods.GaussianLikelihood(batch_shape=batch),
    )
    return _pair(grid, x, y, ours, dense, *likelihoods, batch_shape=batch)


def _pair(grid, x, y, ours, dense, our_likelihood=None, dense_likelihood=None, batch_shape=()):
    our_likelihood = our_likelihood or gaps.GappyGridLikelihood()
    dense_likelihood = dense_likelihood or gpytorch.likelihoods.GaussianLikelihood()
    generator = torch.Generator().manual_seed(9)
    cells = torch.randperm(grid.num_cells, generator=generator)[:60]
    off = torch.rand(20, grid.num_columns, generator=generator, dtype=torch.float64)
    if any(isinstance(module, IndexKernel) for module in ours.modules()):
        off[:, -1] = (3 * off[:, -1]).floor()
    test_x = torch.cat([grid.points(cells), off])
    pair = Pair(
        Model(x, y, our_likelihood, ours, batch_shape).double(),
        Model(x, y, dense_likelihood, dense, batch_shape).double(),
        grid,
        test_x,
    )
    torch.manual_seed(0)
    return pair


CASES = {
    "two axes": two_axes,
    "three axes with a group": grouped,
    "an output axis": outputs,
    "a sum of two grid kernels": sum_of_two,
    "a grid kernel plus LinearKernel": plus_linear,
    "a noise per output": noise_per_output,
    "a noise per point": noise_per_point,
    "a batch of three": batch_of_three,
}
