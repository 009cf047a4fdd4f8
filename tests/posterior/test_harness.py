"""GPyTorch's own model harness, on the cells of a grid and off it."""

import unittest

import gpytorch
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel
from gpytorch.test.model_test_case import BaseModelTestCase

from gpytorch_gaps import CartesianGrid, GappyGridKernel, GappyGridLikelihood
from tests.workflow._pairs import Model

GRID = CartesianGrid([torch.linspace(0, 1, 7), torch.linspace(0, 1, 8)])


class TestOnGrid(BaseModelTestCase, unittest.TestCase):
    def create_model(self, train_x, train_y, likelihood):
        kernel = ScaleKernel(GappyGridKernel([RBFKernel(), MaternKernel()], GRID))
        return Model(train_x, train_y, likelihood, kernel)

    def create_test_data(self):
        return GRID.points(torch.randperm(GRID.num_cells)[:40])

    def create_likelihood_and_labels(self):
        return GappyGridLikelihood(), torch.randn(40)

    def create_batch_test_data(self, batch_shape=torch.Size([3])):  # noqa: B008
        return self.create_test_data().expand(*batch_shape, 40, 2)

    def create_batch_likelihood_and_labels(self, batch_shape=torch.Size([3])):  # noqa: B008
        return GappyGridLikelihood(batch_shape=batch_shape), torch.randn(*batch_shape, 40)


class TestOffGrid(TestOnGrid):
    def create_test_data(self):
        return torch.rand(40, 2)

    def create_batch_test_data(self, batch_shape=torch.Size([3])):  # noqa: B008
        return torch.rand(*batch_shape, 40, 2)


class TestSum(TestOnGrid):
    def create_model(self, train_x, train_y, likelihood):
        kernel = ScaleKernel(GappyGridKernel([RBFKernel(), MaternKernel()], GRID)) + gpytorch.kernels.LinearKernel()
        return Model(train_x, train_y, likelihood, kernel)
