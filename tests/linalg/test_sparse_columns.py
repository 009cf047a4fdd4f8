"""Products and triangular solves with a sparse factor, against the dense matrix, on the CPU and off it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpytorch_gaps.linalg import sparse_rows
from gpytorch_gaps.linalg.sparse_columns import SparseColumns
from tests import _dense as dense
from tests._devices import CPU, STAND_IN, devices

examples = settings(max_examples=40)
APPLY = {
    "matmul": lambda matrix, x: matrix @ x,
    "mT_matmul": lambda matrix, x: matrix.mT @ x,
    "solve": torch.linalg.solve,
    "mT_solve": lambda matrix, x: torch.linalg.solve(matrix.mT, x),
}


def factor(size, width, seed, device=CPU, dtype=torch.float64):
    """A random one; the first rows of its ordering have fewer neighbours, and so have some others."""
    generator = torch.Generator().manual_seed(seed)
    rank = torch.randperm(size, generator=generator)
    order = rank.argsort()
    rows = torch.full((size, width), -1)
    for place, row in enumerate(order.tolist()):
        earlier = order[torch.randperm(place, generator=generator)[: width - 1]]
        rows[row, : len(earlier)] = earlier
        if place % 3 == 0 and len(earlier) > 1:
            rows[row, 0] = -1  # missing ones may be anywhere
    rows[:, -1] = torch.arange(size)
    values = 0.3 * torch.randn(size, width, generator=generator, dtype=torch.float64)
    values[:, -1] = 1.0 + values[:, -1].abs()
    values = values.masked_fill(rows < 0, 0.0).to(dtype)
    matrix = torch.zeros(size, size, dtype=dtype)
    for column in range(size):
        has = rows[column] >= 0
        matrix[rows[column][has], column] = values[column][has]
    return SparseColumns(rows.to(device), values.to(device), rank.to(device)), matrix


@examples
@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 3), st.integers(0, 999))
def test_products_and_solves_equal_dense_ones(size, width, columns, seed):
    sparse, matrix = factor(size, width, seed)
    x = dense.randn(size, columns, seed=seed)
    for name, reference in APPLY.items():
        torch.testing.assert_close(getattr(sparse, name)(x), reference(matrix, x), rtol=1e-9, atol=1e-9)


@devices
@pytest.mark.parametrize("name", APPLY)
def test_every_device_equals_dense(device, name):
    sparse, matrix = factor(60, 5, 0, device)
    x = dense.randn(60, 3)
    torch.testing.assert_close(getattr(sparse, name)(x.to(device)).cpu(), APPLY[name](matrix, x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", APPLY)
def test_a_processor_without_mkl_equals_dense(name, monkeypatch):
    """Torch has triangular solves with sparse matrices in MKL alone."""
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    monkeypatch.setattr(torch, "triangular_solve", None)
    sparse, matrix = factor(60, 5, 0)
    x = dense.randn(60, 3)
    torch.testing.assert_close(getattr(sparse, name)(x), APPLY[name](matrix, x), rtol=1e-9, atol=1e-9)


@devices
def test_products_in_single_precision(device):
    sparse, matrix = factor(50, 4, 1, device)
    x = dense.randn(50, 2).float()
    got = sparse.to(torch.float32).matmul(x.to(device)).cpu()
    assert got.dtype == torch.float32
    assert dense.relative(got, matrix @ x.double()) < 1e-6


@pytest.mark.parametrize("device", [pytest.param(CPU, id="cpu"), STAND_IN])
@pytest.mark.parametrize("name", ["solve", "mT_solve"])
def test_a_solve_whose_sweeps_overflow_ends_at_the_solution(device, name):
    """Differences of fourth order: sweeps grow by 15 each and overflow, where the solution grows like a cube.

    Rows are numbered backwards, so that row 0 is the last in the ordering.
    """
    size, width = 500, 5
    place = torch.arange(size).flip(0)
    rows = torch.stack([place - lag for lag in range(width - 1, -1, -1)], -1)
    rows = torch.where(rows >= 0, size - 1 - rows, -1)
    values = torch.tensor([1.0, -4.0, 6.0, -4.0, 1.0], dtype=torch.float64).expand(size, width)
    sparse = SparseColumns(rows.to(device), values.masked_fill(rows < 0, 0.0).to(device), place.to(device))
    exact = torch.ones(size, 1, dtype=torch.float64)
    image = (sparse.matmul if name == "solve" else sparse.mT_matmul)(exact.to(device))
    got = getattr(sparse, name)(image).cpu()
    assert dense.relative(got, exact) < 1e-4  # its condition number is some 1e10


@pytest.mark.parametrize("name", APPLY)
def test_more_entries_than_32_bits_can_count(name, monkeypatch):
    """Places of rows in 32 bits are then widened, so that all indices of a sparse matrix have one type."""
    monkeypatch.setattr(sparse_rows, "_MOST_SHORT", 10)
    found, matrix = factor(60, 5, seed=0)
    found.rows = found.rows.int()
    assert found._by_column.crow_indices().dtype == found._by_column.col_indices().dtype == torch.int64
    x = dense.randn(60, 3)
    torch.testing.assert_close(getattr(found, name)(x), APPLY[name](matrix, x), rtol=1e-9, atol=1e-9)
