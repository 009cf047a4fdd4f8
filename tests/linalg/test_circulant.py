"""Circulant operators against their entries written out one by one: products, parts, batches, gradients."""

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from gpytorch_gaps.linalg.circulant import CirculantOperator
from tests import _dense as dense
from tests._torus import circulant, lag_table, written_out

EXACT = {torch.float64: 1e-13, torch.float32: 1e-5}

# torus, places of rows and of columns, levels of a dense axis
SOME = torch.tensor([1, 3, 4, 7])
SHUFFLED = torch.tensor([5, 0, 3])
CASES = {
    "an even circle": ((8,), (5,), None, 0),
    "an odd circle": ((9,), (5,), None, 0),
    "a whole circle": ((7,), (7,), None, 0),
    "a circle of one": ((1,), (1,), None, 0),
    "some places": ((9,), (SOME,), None, 0),
    "some places in another order": ((8,), (SHUFFLED,), (SOME,), 0),
    "more columns than rows": ((10,), (3,), (5,), 0),
    "two axes": ((8, 9), (4, 5), None, 0),
    "two axes, rectangular": ((8, 10), (SOME, 3), (4, SHUFFLED), 0),
    "three axes": ((4, 5, 6), (2, 3, 3), None, 0),
    "three axes, rectangular": ((5, 8, 7), (torch.tensor([2, 0]), 3, 4), (3, SHUFFLED, torch.tensor([1, 6])), 0),
    "a dense axis": ((9,), (9,), None, 4),
    "a dense axis and some places": ((8,), (SOME,), (SHUFFLED,), 3),
    "a dense axis and two others": ((6, 5), (3, 3), None, 2),
    "a dense axis and three others": ((4, 3, 4), (2, torch.tensor([2, 0]), 2), (2, 2, 3), 2),
}


def make(name, batch=(), dtype=torch.float64):
    torus, rows, columns, num_dense = CASES[name]
    return circulant(torus, rows, columns, num_dense, batch=batch, dtype=dtype)


def close(got, expected, tolerance=None):
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    assert dense.relative(got, expected) <= (tolerance or EXACT[expected.dtype])


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_entries(name, batch):
    op = make(name, batch)
    expected = written_out(op)
    assert torch.equal(op.to_dense(), expected)
    assert op.shape == expected.shape
    rows, columns = (torch.randint(size, (4,), generator=torch.Generator().manual_seed(0)) for size in op.shape[-2:])
    assert torch.equal(op.entries(rows.unsqueeze(-1), columns), expected[..., rows, :][..., columns])
    if batch:
        where = tuple(torch.tensor([0, 1, 1, 0]) for _ in batch)
        assert torch.equal(op._get_indices(rows, columns, *where), expected[(*where, rows, columns)])
    if op.is_symmetric:
        assert torch.equal(op.diagonal(dim1=-2, dim2=-1), expected.diagonal(dim1=-2, dim2=-1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_products(name, batch, dtype):
    op = make(name, batch, dtype)
    matrix = written_out(op)
    for shape in ((op.size(-1),), (op.size(-1), 1), (op.size(-1), 3), (*batch, op.size(-1), 2)):
        x = dense.randn(*shape).to(dtype)
        close(op @ x, matrix @ x)
    y = dense.randn(*batch, op.size(-2), 2, seed=1).to(dtype)
    close(op.mT @ y, matrix.mT @ y)
    close(op.mT.to_dense(), matrix.mT)
    close(op.mT.mT @ x, matrix @ x)


def test_a_batch_of_right_hand_sides():
    """More batch dimensions than the operator has."""
    op = make("a dense axis and two others", (3,))
    x = dense.randn(2, 3, op.size(-1), 4)
    close(op @ x, op.to_dense() @ x)
    single = make("two axes, rectangular")
    x = dense.randn(2, 3, single.size(-1), 4)
    close(single @ x, single.to_dense() @ x)


def test_products_in_the_precision_of_the_right_hand_side():
    """A table known in float64 serves float32, and keeps both spectra."""
    op = make("a dense axis")
    x = dense.randn(op.size(-1), 2)
    for dtype in (torch.float32, torch.float64, torch.float32):
        close(op._matmul(x.to(dtype)), (op.to_dense() @ x).to(dtype))


@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_gradients_of_the_table(name, batch):
    torus, rows, columns, num_dense = CASES[name]
    table = lag_table(torus, num_dense, batch).requires_grad_(True)
    op = CirculantOperator(table, torus=torus, row_positions=rows, col_positions=columns)
    x = dense.randn(*batch, op.size(-1), 3).requires_grad_(True)
    y = dense.randn(*batch, op.size(-2), 3, seed=1)
    expected = torch.autograd.grad((y * (written_out(op) @ x)).sum(), (table, x))
    for got, wanted in zip(torch.autograd.grad((y * (op @ x)).sum(), (table, x)), expected, strict=True):
        close(got, wanted)
    (own,) = op._bilinear_derivative(y, x.detach())
    close(own, expected[0])
    weights = dense.randn(*op.shape, seed=2)
    (wanted,) = torch.autograd.grad((weights * written_out(op)).sum(), table, retain_graph=True)
    close(torch.autograd.grad((weights * op.to_dense()).sum(), table)[0], wanted)


def test_gradients_after_a_product_without_them():
    """The spectrum that a product keeps is no constant."""
    table = lag_table((8, 6)).requires_grad_(True)
    op = CirculantOperator(table, torus=(8, 6), row_positions=(4, 3))
    x = dense.randn(12, 2)
    with torch.no_grad():
        op @ x
    (op @ x).sum().backward()
    (expected,) = torch.autograd.grad((written_out(op) @ x).sum(), table)
    close(table.grad, expected)


@given(st.data())
@hypothesis_settings(max_examples=60)
def test_products_are_those_of_the_dense_matrix(data):
    torus = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3), label="torus"))

    def places(circle):
        chosen = st.lists(st.integers(0, circle - 1), min_size=1, max_size=circle, unique=True).map(torch.tensor)
        return data.draw(st.one_of(st.integers(1, circle), chosen))

    rows, columns = (tuple(map(places, torus)) for _ in range(2))
    batch = tuple(data.draw(st.lists(st.integers(1, 2), max_size=2), label="batch"))
    num_dense = data.draw(st.integers(0, 3), label="dense")
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32]))
    op = circulant(torus, rows, columns, num_dense, batch=batch, dtype=dtype)
    assert torch.equal(op.to_dense(), written_out(op))
    x = dense.randn(op.size(-1), data.draw(st.integers(1, 3))).to(dtype)
    close(op @ x, op.to_dense() @ x)


def test_dense_axes_of_different_sizes():
    """Rows and columns on other latitudes."""
    table = dense.randn(2, 3, 4, 5)  # two by three levels, on circles of 6 and 8 places
    op = CirculantOperator(table, torus=(6, 8), row_positions=(3, SOME), col_positions=(2, 4))
    assert op.row_axes == (2, 3, 4)
    assert op.col_axes == (3, 2, 4)
    assert not op.is_symmetric
    matrix, x, y = written_out(op), dense.randn(24, 2), dense.randn(24, 2, seed=1)
    assert torch.equal(op.to_dense(), matrix)
    close(op @ x, matrix @ x)
    close(op.mT @ y, matrix.mT @ y)


@pytest.mark.parametrize(
    ("torus", "inner", "rows", "columns", "num_dense"),
    [
        ((20,), (9,), (5,), None, 0),
        ((21, 16), (7, 8), (SHUFFLED[1:], 4), (4, SHUFFLED[1:]), 0),
        ((12, 12), (5, 12), (3, 12), None, 0),
        ((14,), (8,), (4,), (torch.tensor([3, 1]),), 3),
    ],
)
def test_products_on_smaller_circles(torus, inner, rows, columns, num_dense):
    """The same as on the whole torus, of less work; values, gradients and the other side."""
    table = lag_table(torus, num_dense).requires_grad_(True)
    sides = {"row_positions": rows, "col_positions": columns}
    op = CirculantOperator(table, torus=torus, inner=inner, **sides)
    whole = CirculantOperator(table, torus=torus, **sides)
    matrix = written_out(whole)
    x, y = dense.randn(op.size(-1), 2), dense.randn(op.size(-2), 2, seed=1)
    assert torch.equal(op.to_dense(), matrix)
    assert op.product_flops < whole.product_flops
    for same in (op, op.to(torch.float32).to(torch.float64).with_table(table), op.mT.mT, op * 1.0, op.on_torus(inner)):
        assert same.inner == inner
        close((same @ x).detach(), (matrix @ x).detach())
    close((op.mT @ y).detach(), (matrix.mT @ y).detach())
    (expected,) = torch.autograd.grad((y * (matrix @ x)).sum(), table)
    close(torch.autograd.grad((y * (op @ x)).sum(), table)[0], expected)
    with torch.no_grad():
        close(op @ x, matrix.detach() @ x)
        close(op.spectrum(), whole.spectrum())  # still that of the whole torus
    assert op.is_like(
        CirculantOperator(table[..., : inner[-1] // 2 + 1], torus=(*torus[:-1], inner[-1]), inner=inner, **sides)
    )
    assert not op.is_like(whole)


# -- staying what it is ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["two axes, rectangular", "a dense axis and two others"])
def test_operations_that_keep_it_a_circulant_operator(name):
    op = make(name, (2, 3))
    matrix = op.to_dense()
    scale = torch.tensor([[1.0], [2.0]], dtype=torch.float64)
    kept = {
        "a member": (op[1], matrix[1]),
        "some members": (op[:, 1:], matrix[:, 1:]),
        "picked members": (op[torch.tensor([0, 1, 1]), 2], matrix[torch.tensor([0, 1, 1]), 2]),
        "permuted": (op.permute(1, 0, 2, 3), matrix.permute(1, 0, 2, 3)),
        "unsqueezed": (op.unsqueeze(1), matrix.unsqueeze(1)),
        "expanded": (op.expand(4, 2, 3, *op.matrix_shape), matrix.expand(4, *matrix.shape)),
        "scaled": (op * 3.0, 3.0 * matrix),
        "scaled by member": (op.mul(scale[..., None, None]), scale[..., None, None] * matrix),
        "detached": (op.detach(), matrix),
        "in float32": (op.to(torch.float32), matrix.float()),
        "float": (op.float(), matrix.float()),
        "double": (op.float().double(), matrix.float().double()),
        "transposed": (op.mT, matrix.mT),
    }
    for what, (got, expected) in kept.items():
        assert isinstance(got, CirculantOperator), what
        assert got.dtype == expected.dtype, what
        assert got.shape == expected.shape, what
        assert dense.relative(got.to_dense(), expected) <= EXACT[expected.dtype], what
    rows = op[..., 1:4, :]
    close(rows.to_dense(), matrix[..., 1:4, :])
    assert op.to(torch.float64) is op


def test_likeness():
    op = make("two axes, rectangular")
    assert op.is_like(op.with_table(2.0 * op.table))
    assert not op.is_like(op.mT)
    assert not op.is_like(circulant((8, 9), (SOME, 3), (4, SHUFFLED)))
    assert not op.is_like(circulant((8, 10), (SOME, 3), (4, SHUFFLED.flip(0))))
    assert not op.is_like(circulant((8, 10), (SOME, 3), (4, 3)))
    assert not op.is_like(circulant((8, 10), (SOME, 3), (4, SHUFFLED), dense=2))
    assert make("two axes").is_symmetric
    assert make("some places").is_symmetric
    assert not make("more columns than rows").is_symmetric


def test_what_is_refused():
    table = lag_table((8, 6))
    with pytest.raises(ValueError, match=r"table: got shape \(1, 1, 5, 4\), expected \(\*batch, a, b, 5, 5\)"):
        CirculantOperator(table, torus=(8, 8), row_positions=(4, 4))
    with pytest.raises(ValueError, match=r"table: got shape \(5, 4\)"):
        CirculantOperator(table[0, 0], torus=(8, 6), row_positions=(4, 3))
    with pytest.raises(ValueError, match="row_positions: got 1, expected 2, as the torus"):
        CirculantOperator(table, torus=(8, 6), row_positions=(4,))
    with pytest.raises(ValueError, match=r"inner: got \(7, 8\), expected at most the torus of \(8, 6\)"):
        CirculantOperator(table, torus=(8, 6), row_positions=(4, 3), inner=(7, 8))
    with pytest.raises(ValueError, match="inner: got 1, expected 2, as the torus"):
        CirculantOperator(table, torus=(8, 6), row_positions=(4, 3), inner=(7,))
    with pytest.raises(ValueError, match="col_positions: got 3, expected 2, as the torus"):
        CirculantOperator(table, torus=(8, 6), row_positions=(4, 3), col_positions=(4, 3, 1))
