"""Pairs of models that must agree: one with a kernel for a block of axes, multiplied by FFT, one of plain GPyTorch.

Each comes with about 1,500 observations, or about 150 where `small`.
"""

import torch
from gpytorch.kernels import IndexKernel, MaternKernel, ProductKernel, RBFKernel, ScaleKernel

import gpytorch_gaps as gaps
from tests.workflow._pairs import PerLevelNoise, _pair, _size, gappy, on, with_length


def plane(nu=1.5, lengths=(0.2, 0.3), **columns):
    """A Matern kernel of the distance in the plane."""
    kernel = MaternKernel(nu=nu, ard_num_dims=2, **columns)
    return with_length(kernel, torch.tensor([lengths]))


def torus(small=False, fraction=0.4):
    grid, x, y = gaps.from_array(*reversed(gappy(_size(small, (45, 55), (14, 18)), fraction, 0)))
    ours = ScaleKernel(gaps.GappyGridKernel([plane(1.5, (0.06, 0.08))], grid, blocks=[(0, 1)]))
    return _pair(grid, x, y, ours, ScaleKernel(plane(1.5, (0.06, 0.08))))


def torus_and_time(small=False, fraction=0.4):
    grid, x, y = gaps.from_array(*reversed(gappy(_size(small, (18, 20, 7), (7, 9, 4)), fraction, 1)))
    ours = ScaleKernel(gaps.GappyGridKernel([plane(), with_length(RBFKernel(), 0.6)], grid, blocks=[(0, 1), (2,)]))
    dense = ScaleKernel(ProductKernel(plane(active_dims=[0, 1]), on(2, RBFKernel, 0.6)))
    return _pair(grid, x, y, ours, dense)


def sphere_and_time(small=False, fraction=0.4):
    shape = _size(small, (14, 30, 6), (5, 12, 4))
    axes, values = gappy(shape, fraction, 2)
    axes[0] = 90.0 * (2.0 * axes[0] ** 1.5 - 1.0)  # both poles; latitudes need not be regular
    axes[1] = torch.arange(shape[1], dtype=torch.float64) * (360.0 / shape[1])
    grid, x, y = gaps.from_array(values, axes)

    def sphere(**columns):
        return gaps.SphereKernel(with_length(MaternKernel(nu=1.5), 0.8), **columns)

    ours = ScaleKernel(gaps.GappyGridKernel([sphere(), with_length(RBFKernel(), 0.6)], grid, blocks=[(0, 1), (2,)]))
    dense = ScaleKernel(ProductKernel(sphere(active_dims=[0, 1]), on(2, RBFKernel, 0.6)))
    return _pair(grid, x, y, ours, dense)


def long_axis(small=False, fraction=0.766):
    """So long that it goes by FFT by itself, mostly gaps."""
    fraction = 0.976 if small else fraction
    grid, x, y = gaps.from_array(*reversed(gappy((6_400,), fraction, 3)))
    kernel = with_length(MaternKernel(nu=1.5), 0.05)
    ours = ScaleKernel(gaps.GappyGridKernel([kernel], grid))
    return _pair(grid, x, y, ours, ScaleKernel(with_length(MaternKernel(nu=1.5), 0.05)))


def torus_and_product(small=False, fraction=0.4):
    """A sum of terms with different blocks."""
    grid, x, y = gaps.from_array(*reversed(gappy(_size(small, (45, 55), (14, 18)), fraction, 4)))
    ours = ScaleKernel(gaps.GappyGridKernel([plane(0.5, (0.1, 0.2))], grid, blocks=[(0, 1)])) + ScaleKernel(
        gaps.GappyGridKernel([with_length(RBFKernel(), 0.6), with_length(RBFKernel(), 0.7)], grid)
    )
    dense = ScaleKernel(plane(0.5, (0.1, 0.2))) + ScaleKernel(
        ProductKernel(on(0, RBFKernel, 0.6), on(1, RBFKernel, 0.7))
    )
    return _pair(grid, x, y, ours, dense)


def noise_per_output(small=False, fraction=0.4):
    shape = _size(small, (26, 32, 3), (8, 10, 3))
    axes, values = gappy(shape, fraction, 5)
    axes[2] = torch.arange(shape[2], dtype=torch.float64)
    grid, x, y = gaps.from_array(values, axes)
    torch.manual_seed(0)
    ours = gaps.GappyGridKernel([plane(), IndexKernel(num_tasks=3, rank=1)], grid, blocks=[(0, 1), (2,)])
    index = IndexKernel(num_tasks=3, rank=1, active_dims=[2])
    index.load_state_dict({**ours.kernels[1].state_dict(), "active_dims": index.active_dims})
    dense = ProductKernel(plane(active_dims=[0, 1]), index)
    likelihood = gaps.GappyGridLikelihood(noise_axis=-1, grid=grid)
    pair = _pair(grid, x, y, ours, dense, likelihood, PerLevelNoise(shape[2]))
    for model in pair.both():
        model.likelihood.noise = torch.tensor([0.05, 0.2, 0.6], dtype=torch.float64)
    return pair


BLOCKS = {
    "a torus": torus,
    "a torus and time": torus_and_time,
    "a sphere and time": sphere_and_time,
    "a long axis": long_axis,
    "a torus plus a product": torus_and_product,
    "a torus and a noise per output": noise_per_output,
}
