"""Selection matrices as index operations, against the matrices themselves."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpytorch_gaps.kronecker.selection import ravel, select_cells, spread_cells, unravel

examples = settings(max_examples=50, deadline=None)


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
