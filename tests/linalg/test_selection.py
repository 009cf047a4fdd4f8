"""Selection matrices as index operations, against the matrices themselves."""

import math
from functools import reduce

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpytorch_gaps.linalg.products import kron_diagonal
from gpytorch_gaps.linalg.selection import (
    kron_block,
    kron_entries,
    product_at,
    ravel,
    select_cells,
    spread_cells,
    unravel,
)

examples = settings(max_examples=50)


def kron(matrices):
    def pair(a, b):
        product = a[..., :, None, :, None] * b[..., None, :, None, :]
        return product.reshape(*product.shape[:-4], a.size(-2) * b.size(-2), a.size(-1) * b.size(-1))

    return reduce(pair, matrices)


def selection_matrix(index, num_cells):
    """W, one row a selected cell."""
    return torch.eye(num_cells, dtype=torch.float64)[index]


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
@pytest.mark.parametrize("index", [[], [4], [0, 2, 5], [5, 0, 3], [1, 1, 4, 1]])
def test_both_directions_equal_the_selection_matrix(batch, index):
    torch.manual_seed(0)
    index = torch.tensor(index, dtype=torch.long)
    matrix = selection_matrix(index, 6)
    x = torch.randn(*batch, 6, 3, dtype=torch.float64)
    v = torch.randn(*batch, len(index), 3, dtype=torch.float64)
    assert torch.equal(select_cells(x, index), matrix @ x)
    torch.testing.assert_close(spread_cells(v, index, 6), matrix.mT @ v, rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_precision_is_kept(dtype):
    index = torch.tensor([1, 0])
    assert select_cells(torch.ones(3, 1, dtype=dtype), index).dtype == dtype
    assert spread_cells(torch.ones(2, 1, dtype=dtype), index, 3).dtype == dtype


def test_gradients_are_each_others_adjoint():
    torch.manual_seed(1)
    index = torch.tensor([3, 1, 3])  # one cell twice
    x = torch.randn(2, 5, 2, dtype=torch.float64, requires_grad=True)
    v = torch.randn(2, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: select_cells(x, index), (x,))
    assert torch.autograd.gradcheck(lambda v: spread_cells(v, index, 5), (v,))
    left, right = (select_cells(x, index) * v).sum(), (x * spread_cells(v, index, 5)).sum()
    torch.testing.assert_close(left, right, rtol=1e-14, atol=0.0)


@examples
@given(st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple), st.data())
def test_flat_cells_are_numbered_last_axis_fastest(shape, data):
    num_cells = int(torch.tensor(shape).prod())
    cells = torch.tensor(data.draw(st.lists(st.integers(0, num_cells - 1), max_size=8)), dtype=torch.long)
    positions = unravel(cells, shape)
    grid = torch.arange(num_cells).reshape(shape)
    assert torch.equal(grid[positions], cells)
    assert torch.equal(ravel(positions, shape), cells)
    assert torch.equal(ravel(torch.stack(positions), shape), cells)


# -- entries of Kronecker products -------------------------------------------------------------------------------------


@pytest.mark.parametrize("batches", [((), ()), ((2,), (2,)), ((), (2,)), ((2, 1), (3,))])
@pytest.mark.parametrize("shapes", [[(4, 4), (3, 3)], [(2, 5), (4, 3)]])
def test_blocks_equal_rows_and_columns_of_the_dense_product(shapes, batches):
    torch.manual_seed(2)
    factors = [torch.randn(*batch, q, m, dtype=torch.float64) for batch, (q, m) in zip(batches, shapes, strict=True)]
    dense = kron(factors)
    rows = torch.randint(dense.size(-2), (6,))  # any order, cells repeated
    columns = torch.randint(dense.size(-1), (4,))
    expected = dense[..., rows, :][..., columns]
    torch.testing.assert_close(kron_block(factors, rows, columns), expected, rtol=1e-15, atol=0)
    pairs = kron_entries(
        factors,
        unravel(rows[:4], tuple(factor.size(-2) for factor in factors)),
        unravel(columns, tuple(factor.size(-1) for factor in factors)),
    )
    torch.testing.assert_close(pairs, dense[..., rows[:4], columns], rtol=1e-15, atol=0)


@pytest.mark.parametrize("sizes", [(6,), (2, 3), (2, 4, 3)])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_entries_of_a_product_of_vectors(sizes, batch):
    torch.manual_seed(3)
    vectors = [torch.randn(*batch, m, dtype=torch.float64) for m in sizes]
    cells = torch.randint(math.prod(sizes), (7,))
    positions = unravel(cells, sizes)
    expected = kron_diagonal(vectors)[..., cells]
    assert torch.equal(product_at(vectors, positions), expected)
    assert torch.equal(product_at(vectors, torch.stack(positions)), expected)
