"""Variances far below the prior's: what a solve leaves must not drown them."""

import linear_operator
import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel

import gpytorch_gaps as gaps
from tests.workflow._pairs import Model, with_length

GRID = gaps.CartesianGrid([torch.linspace(0, 1, 24, dtype=torch.float64)] * 2)
TRAIN = GRID.points(torch.randperm(576, generator=torch.Generator().manual_seed(0))[:300].sort().values)
POINTS = {
    "cells": GRID.points(torch.arange(0, 576, 7)),
    "scattered": torch.rand(40, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),
}


def dense_variance(kernel, x, noise):
    covariance = kernel(torch.cat([TRAIN, x])).to_dense().detach()
    n = len(TRAIN)
    train = covariance[:n, :n] + noise * torch.eye(n, dtype=torch.float64)
    half = torch.linalg.solve_triangular(torch.linalg.cholesky(train), covariance[:n, n:], upper=False)
    return covariance[n:, n:].diagonal() - half.square().sum(0)


@pytest.mark.parametrize("where", POINTS)
@pytest.mark.parametrize("kind", [RBFKernel, MaternKernel])
@pytest.mark.parametrize("noise", [1e-2, 1e-4, 1e-6])
@pytest.mark.parametrize("sum_of_two", [False, True])
def test_variances_are_right_to_their_own_size(where, kind, noise, sum_of_two):
    kernel = ScaleKernel(gaps.GappyGridKernel([with_length(kind(), 0.4), with_length(kind(), 0.3)], GRID))
    if sum_of_two:
        kernel = kernel + gaps.GappyGridKernel([with_length(kind(), 1.0), with_length(kind(), 1.5)], GRID)
    y = torch.sin(5 * TRAIN[:, 0]) + TRAIN[:, 1]
    model = Model(TRAIN, y, gaps.GappyGridLikelihood(noise), kernel).double().eval()
    expected = dense_variance(model.covar_module, POINTS[where], noise)
    for max_cholesky in (800, 0):
        with torch.no_grad(), linear_operator.settings.max_cholesky_size(max_cholesky):
            posterior = model(POINTS[where])
            variance = posterior.lazy_covariance_matrix.diagonal()  # as it is: `.variance` hides what is negative
            covariance = posterior.covariance_matrix
        assert torch.allclose(variance, expected, rtol=1e-4, atol=1e-12)
        assert torch.allclose(covariance.diagonal(), expected, rtol=1e-4, atol=1e-12)


def test_the_gradient_of_a_variance_needs_no_second_solve():
    """It is stationary in the weights: one solve forward, none backward."""
    kernel = ScaleKernel(gaps.GappyGridKernel([RBFKernel(), MaternKernel()], GRID))
    model = Model(TRAIN, TRAIN.sum(-1), gaps.GappyGridLikelihood(), kernel).double().eval()
    x = POINTS["scattered"][:5].clone().requires_grad_(True)
    variance = model(x).variance.sum()
    with gaps.record_solves() as solves:
        variance.backward()
    assert not len(solves)
    expected = torch.autograd.functional.jacobian(
        lambda t: _plain_variance(model, t).sum(), x.detach(), vectorize=False
    )
    assert torch.allclose(x.grad, expected, rtol=1e-5, atol=1e-8)


def _plain_variance(model, x):
    outputscale = model.covar_module.outputscale.detach()
    first, second = (kernel.lengthscale.detach() for kernel in model.covar_module.base_kernel.kernels)

    def kernel(a, b):
        d = 5**0.5 * (a[:, None, 1] - b[None, :, 1]).abs() / second
        smooth = torch.exp(-0.5 * ((a[:, None, 0] - b[None, :, 0]) / first) ** 2)
        return outputscale * smooth * (1 + d + d**2 / 3) * torch.exp(-d)

    train = kernel(TRAIN, TRAIN) + model.likelihood.noise.detach() * torch.eye(len(TRAIN), dtype=torch.float64)
    cross = kernel(TRAIN, x)
    return outputscale - (cross * torch.linalg.solve(train, cross)).sum(0)
