"""Kernels on a circle against kernels of points of the plane."""

import math

import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel

import gpytorch_gaps as gaps
from gpytorch_gaps.kernels.circle import CircleKernel
from gpytorch_gaps.linalg.circulant import CirculantOperator


def around(x, period):
    angle = 2 * math.pi * x / period
    return torch.cat([angle.cos(), angle.sin()], -1) * period / (2 * math.pi)


@pytest.mark.parametrize("make", [RBFKernel, lambda: MaternKernel(nu=0.5)])
def test_points_of_a_circle(make):
    kernel = make().double()
    x = torch.tensor([[0.0], [1.0], [11.5], [12.0], [-3.0]], dtype=torch.float64)
    closed = CircleKernel(kernel, 12.0)
    torch.testing.assert_close(closed(x).to_dense(), kernel(around(x, 12.0)).to_dense())
    torch.testing.assert_close(
        closed(x[:2], x[2:4], diag=True), kernel(around(x[:2], 12), around(x[2:4], 12), diag=True)
    )
    assert closed(x).to_dense()[0, 3].item() == pytest.approx(1.0)


@pytest.mark.parametrize("ends", ["one", "both"])
def test_a_long_axis_closes_on_its_circle(ends):
    """Products use FFTs without padding."""
    axis = torch.arange(3601 if ends == "both" else 3600, dtype=torch.float64) / 10
    grid = gaps.CartesianGrid([axis])
    kernel = MaternKernel(nu=1.5).double()
    kernel.lengthscale = 20.0
    block = gaps.GappyGridKernel([CircleKernel(kernel, 360.0)], grid)
    index = torch.cat([torch.arange(0, 3600, 90), torch.arange(3590, len(axis))])
    covariance = block(grid.points(index)).evaluate_kernel()
    (factor,) = covariance.factors
    assert isinstance(factor, CirculantOperator)
    assert factor.torus == (3600,)
    expected = kernel(around(grid.points(index), 360.0)).to_dense()
    # points of a large circle are rounded, and so are distances of close ones
    torch.testing.assert_close(covariance.to_dense(), expected, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(covariance @ torch.eye(len(index)).double(), expected, rtol=1e-7, atol=1e-7)


def test_an_ellipse_is_not_stationary_along_the_circle():
    kernel = RBFKernel(ard_num_dims=2).double()
    assert CircleKernel(kernel, 12.0).stationary_columns == {}
    assert CircleKernel(RBFKernel(), 12.0).stationary_columns == {0: 12.0}
