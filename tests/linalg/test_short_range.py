"""Products with long Toeplitz matrices by short transforms, against those of the whole circle."""

import pytest
import torch

from gpytorch_gaps.linalg import short_range
from gpytorch_gaps.linalg.circulant import CirculantOperator
from gpytorch_gaps.linalg.short_range import ShortRange
from tests import _dense as dense


@pytest.fixture(autouse=True)
def small_axes(monkeypatch):
    monkeypatch.setattr(short_range, "_LEAST_PLACES", 300)
    monkeypatch.setattr(short_range, "_LEAST_BLOCK", 32)
    monkeypatch.setattr(short_range, "_BLOCKS_PER_AXIS", 2)
    monkeypatch.setattr(short_range, "_NUMBERS", 100)


def lags_of(kind, levels, dtype=torch.float64):
    lag = torch.arange(levels, dtype=torch.float64)
    known = {
        "exponential": (-lag).exp(),
        "square": (-lag.square()).exp(),
        "none": (lag == 0).double(),
        "zero": 0.0 * lag,
    }
    return known[kind].to(dtype)


@pytest.mark.parametrize("kind", ["exponential", "square", "none", "zero"])
@pytest.mark.parametrize(("rows", "columns"), [(600, 600), (601, 999), (999, 310), (640, 640)])
def test_products_are_those_of_the_dense_matrix(kind, rows, columns):
    lags = lags_of(kind, max(rows, columns))
    matrix = lags[(torch.arange(rows).unsqueeze(-1) - torch.arange(columns)).abs()]
    short = ShortRange.of(lags, torch.float64)
    x = dense.randn(2, columns)
    torch.testing.assert_close(short.product(x, rows), x @ matrix.mT, rtol=0.0, atol=1e-13)


def test_lags_that_rounding_does_not_hide_are_kept():
    """A range as long as the axis, and one that a sum of many small lags makes long."""
    assert ShortRange.of(torch.exp(-torch.arange(400.0) / 100.0), torch.float64) is None
    tail = torch.zeros(2000, dtype=torch.float64)
    tail[0], tail[1000:] = 1.0, 1e-17  # together 1e-14
    assert ShortRange.of(tail, torch.float64) is None
    assert ShortRange.of(tail, torch.float32).reach == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_circulant_operators_use_them(dtype, monkeypatch):
    """Along one axis of which the lags do not go around the circle; the gradient is that of the whole circle."""
    table = lags_of("exponential", 801).reshape(1, 1, -1)
    x = dense.randn(800, 3).to(dtype)
    open_axis = CirculantOperator(table, torus=(1600,), row_positions=(800,))
    closed = CirculantOperator(table, torus=(1600,), row_positions=(1600,))
    assert open_axis._short_range(x) is not None
    assert closed._short_range(dense.randn(1600, 3)) is None
    got = open_axis._matmul(x)
    tolerance = 1e-13 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(got, open_axis.to_dense().to(dtype) @ x, rtol=0.0, atol=tolerance)
    torch.testing.assert_close(open_axis._matmul(x[:, 0]), got[:, 0], rtol=0.0, atol=tolerance)
    attached = CirculantOperator(table.clone().requires_grad_(), torus=(1600,), row_positions=(800,))
    assert attached._short_range(x) is None
