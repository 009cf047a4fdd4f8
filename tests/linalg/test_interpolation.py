"""Interpolation matrices against GPyTorch's rows written out densely, and what is contracted with them."""

import math
from functools import reduce

import pytest
import torch
from gpytorch.utils.interpolation import Interpolation

from gpytorch_gaps.linalg import interpolation
from gpytorch_gaps.linalg.interpolation import GridInterpolation

SHAPES = [(9,), (8, 11), (6, 5, 7)]
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def grid(shape):
    return [torch.linspace(-1.0, 1.0 + i, size, dtype=torch.float64) for i, size in enumerate(shape)]


def points(axes, count=60, seed=0):
    """Points all over the grid, the corners among them."""
    low, high = (torch.stack([axis[end] for axis in axes]) for end in (0, -1))
    unit = torch.rand(count, len(axes), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.cat([low + (high - low) * unit, low[None], high[None]])


def rows_and_dense(shape, **options):
    axes = grid(shape)
    x = points(axes, **options)
    index, values = Interpolation().interpolate(axes, x)
    dense = torch.zeros(len(x), math.prod(shape), dtype=torch.float64).scatter_add_(1, index, values)
    return GridInterpolation.cubic(axes, x), dense


def kron(matrices):
    def pair(a, b):
        product = a[..., :, None, :, None] * b[..., None, :, None, :]
        return product.reshape(*product.shape[:-4], a.size(-2) * b.size(-2), a.size(-1) * b.size(-1))

    return reduce(pair, matrices)


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_gpytorchs(shape):
    rows, dense = rows_and_dense(shape)
    torch.testing.assert_close(rows.dense(), dense, **CLOSE)
    torch.testing.assert_close(rows.dense().sum(-1), torch.ones(len(rows), dtype=torch.float64), **CLOSE)


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_and_their_gradients(shape, batch):
    rows, dense = rows_and_dense(shape)
    for product, matrix in ((rows.select, dense), (rows.spread, dense.mT)):
        x = randn(*batch, matrix.size(-1), 3).requires_grad_(True)
        torch.testing.assert_close(product(x), matrix @ x, **CLOSE)
        weights = randn(*batch, matrix.size(-2), 3, seed=1)
        (gradient,) = torch.autograd.grad((weights * product(x)).sum(), x)
        torch.testing.assert_close(gradient, matrix.mT @ weights, **CLOSE)
        narrow = product(x.detach().float())
        assert narrow.dtype == torch.float32
        torch.testing.assert_close(narrow.double(), matrix @ x.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_and_entries(shape, batch):
    rows, dense = rows_and_dense(shape)
    columns, other = rows_and_dense(shape, seed=1)
    factors = [randn(*batch, size, size, seed=i) for i, size in enumerate(shape)]
    block = dense @ kron(factors) @ other.mT
    torch.testing.assert_close(rows.block(factors, columns), block, **CLOSE)
    torch.testing.assert_close(rows.entries(factors, columns), block.diagonal(dim1=-2, dim2=-1), **CLOSE)


@pytest.mark.parametrize("chunk", [2**22, 500])
@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("shape", SHAPES)
def test_gram_matrix_and_column_squares(shape, batch, chunk, monkeypatch):
    monkeypatch.setattr(interpolation, "_CHUNK_NUMBERS", chunk)
    rows, dense = rows_and_dense(shape)
    vectors = [randn(*batch, size, 4, seed=i) for i, size in enumerate(shape)]
    positions = torch.randint(4, (len(shape), 7), generator=torch.Generator().manual_seed(0))
    flat = reduce(lambda total, axis: 4 * total + axis, positions)
    basis = dense @ kron(vectors)
    scales = torch.rand(*batch, len(rows), dtype=torch.float64).requires_grad_(True)
    expected = basis[..., flat].mT @ (scales.unsqueeze(-1) * basis[..., flat])
    found = rows.gram(vectors, positions, scales)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    weights = randn(*batch, 7, 7, seed=9)
    gradients = [torch.autograd.grad((weights * value).sum(), scales)[0] for value in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(rows.column_squares(vectors), basis.square().sum(-2), **CLOSE)


@pytest.mark.parametrize("shape", SHAPES)
def test_norm_bound(shape):
    rows, dense = rows_and_dense(shape)
    largest = torch.linalg.matrix_norm(dense, 2).square()
    assert largest <= rows.norm_bound() <= 6.0 * largest


def test_a_selection():
    cells = torch.tensor([5, 0, 5, 11])
    rows = GridInterpolation.selecting(cells, (3, 4))
    assert torch.equal(rows.dense(), torch.eye(12, dtype=torch.float64)[cells])
    assert torch.equal(rows.at(slice(1, 3)).dense(), rows.dense()[1:3])


def test_equality_is_by_value():
    (first, _), (second, _), (other, _) = rows_and_dense((9,)), rows_and_dense((9,)), rows_and_dense((9,), seed=1)
    assert first == second
    assert first != other
    assert first != first.at(slice(3))


def test_no_points():
    rows = GridInterpolation.cubic(grid((5, 6)), torch.zeros(0, 2, dtype=torch.float64))
    assert rows.spread(torch.zeros(0, 2, dtype=torch.float64)).abs().sum() == 0
    assert rows.select(torch.ones(30, 2, dtype=torch.float64)).shape == (0, 2)


@pytest.mark.parametrize(
    ("axes", "x", "message"),
    [
        ([torch.linspace(0, 1, 5)], torch.tensor([[1.2]]), r"column 0 reaches from 1.2 to 1.2, .* from 0 to 1"),
        ([torch.linspace(0, 1, 5)], torch.tensor([[float("nan")]]), "column 0"),
        ([torch.linspace(0, 1, 5)], torch.rand(3, 2), r"expected \(N, 1\)"),
        ([torch.linspace(0, 1, 3)], torch.rand(3, 1), "at least 4 places"),
        ([torch.linspace(1, 0, 5)], torch.rand(3, 1), "ascending, equally spaced"),
        ([torch.tensor([0.0, 0.1, 0.5, 0.7, 1.0])], torch.rand(3, 1), "ascending, equally spaced"),
    ],
)
def test_refused_points_and_axes(axes, x, message):
    with pytest.raises(ValueError, match=message):
        GridInterpolation.cubic(axes, x)


@pytest.mark.parametrize(
    ("first", "weights", "shape", "message"),
    [
        (torch.zeros(3, 1), torch.zeros(3, 1, 4), (5,), "int64"),
        (torch.zeros(3, 1).long(), torch.zeros(3, 2, 4), (5,), "expected int64 of shape"),
        (torch.zeros(3, 1).long(), torch.zeros(3, 1, 4), (5, 5), "got 2 axes, expected 1"),
        (torch.full((3, 1), 2), torch.zeros(3, 1, 4), (5,), "exceed axes"),
        (torch.full((3, 1), -1), torch.zeros(3, 1, 4), (5,), "exceed axes"),
    ],
)
def test_refused_rows(first, weights, shape, message):
    with pytest.raises(ValueError, match=message):
        GridInterpolation(first, weights, shape)
