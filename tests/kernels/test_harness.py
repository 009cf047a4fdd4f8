"""GPyTorch's own kernel harness. Only its two `active_dims` tests are restated: they assume any number of columns."""

import unittest

import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.test.base_kernel_test_case import BaseKernelTestCase

from gpytorch_gaps import CartesianGrid, GappyGridKernel


def grid_of(columns):
    """One axis, or two, of that many columns in all, in the default precision."""
    if columns == 1:
        return CartesianGrid([torch.linspace(0, 1, 5)])
    first = torch.randn(4, columns - 1)
    return CartesianGrid([first, torch.linspace(0, 1, 5)])


class TestGappyGridKernel(BaseKernelTestCase, unittest.TestCase):
    columns = 2

    def create_kernel_no_ard(self, active_dims=None, batch_shape=None, **kwargs):
        kernels = [RBFKernel(batch_shape=batch_shape, **kwargs), MaternKernel(batch_shape=batch_shape, **kwargs)]
        columns = self.columns if active_dims is None else len(active_dims)
        return GappyGridKernel(kernels, grid_of(columns), active_dims=active_dims)

    def create_kernel_ard(self, num_dims, batch_shape=None, **kwargs):
        kernels = [RBFKernel(ard_num_dims=num_dims - 1, batch_shape=batch_shape), MaternKernel(batch_shape=batch_shape)]
        return GappyGridKernel(kernels, grid_of(num_dims), **kwargs)

    def _test_active_dims(self, active_dims):
        kernel = self.create_kernel_no_ard(active_dims=active_dims)
        x = self.create_data_no_batch()
        covariance = kernel(x).evaluate_kernel().to_dense()
        basic = GappyGridKernel(kernel.kernels, kernel.grid)
        expected = basic(x[:, active_dims]).evaluate_kernel().to_dense()
        self.assertAllClose(covariance, expected, rtol=1e-3, atol=1e-5)

    def test_active_dims_list(self):
        self._test_active_dims([0, 2, 4, 6])

    def test_active_dims_range(self):
        self._test_active_dims(list(range(3, 9)))


class TestScaledGappyGridKernel(TestGappyGridKernel):
    """Inside a ScaleKernel, which calls `forward` directly."""

    def create_kernel_no_ard(self, active_dims=None, batch_shape=None, **kwargs):
        base = super().create_kernel_no_ard(active_dims=active_dims, batch_shape=batch_shape, **kwargs)
        return ScaleKernel(base, batch_shape=batch_shape or torch.Size())

    def create_kernel_ard(self, num_dims, batch_shape=None, **kwargs):
        base = super().create_kernel_ard(num_dims, batch_shape=batch_shape, **kwargs)
        return ScaleKernel(base, batch_shape=batch_shape or torch.Size())

    def _test_active_dims(self, active_dims):
        kernel = self.create_kernel_no_ard(active_dims=active_dims)
        x = self.create_data_no_batch()
        basic = ScaleKernel(GappyGridKernel(kernel.base_kernel.kernels, kernel.base_kernel.grid))
        covariance = kernel(x).evaluate_kernel().to_dense()
        self.assertAllClose(covariance, basic(x[:, active_dims]).evaluate_kernel().to_dense(), rtol=1e-3, atol=1e-5)


class TestOnGrid(TestGappyGridKernel):
    """The same with cells of the grid as inputs, so that the operators are ours."""

    def setUp(self):
        super().setUp()
        torch.manual_seed(0)
        self._grid = CartesianGrid([torch.linspace(0, 1, 9), torch.linspace(0, 1, 8)])

    def create_kernel_no_ard(self, active_dims=None, batch_shape=None, **kwargs):
        if active_dims is not None:
            return super().create_kernel_no_ard(active_dims=active_dims, batch_shape=batch_shape, **kwargs)
        kernels = [RBFKernel(batch_shape=batch_shape, **kwargs), MaternKernel(batch_shape=batch_shape, **kwargs)]
        return GappyGridKernel(kernels, self._grid)

    def create_kernel_ard(self, num_dims, batch_shape=None, **kwargs):
        return self.create_kernel_no_ard(batch_shape=batch_shape, **kwargs)

    def create_data_single_batch(self):
        return self._grid.points(torch.randperm(72)[:3]).expand(2, 3, 2)

    def create_data_double_batch(self):
        return self._grid.points(torch.randperm(72)[:50]).expand(3, 2, 50, 2)
