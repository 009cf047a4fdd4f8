"""Row-wise Kronecker products against their rows written out: values, batches, chunk boundaries, gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpytorch_gaps.linalg import khatri_rao
from gpytorch_gaps.linalg.khatri_rao import khatri_rao_matmul, khatri_rao_t_matmul
from tests._dense import kron_vectors, randn, relative

SHAPES = [(5,), (4, 3), (3, 4), (2, 5, 3), (3, 2, 4, 2), (1, 6, 1)]


def factors_of(shape, rows, batch=(), seed=0):
    return [randn(*batch, rows, size, seed=seed + axis) for axis, size in enumerate(shape)]


def cells(shape):
    return torch.Size(shape).numel()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)], ids=str)
def test_products_are_those_with_the_rows(shape, columns, batch):
    factors = factors_of(shape, 7, batch)
    rows = kron_vectors(factors)
    values, weights = randn(*batch, cells(shape), columns, seed=8), randn(*batch, 7, columns, seed=9)
    product, transposed = khatri_rao_matmul(factors, values), khatri_rao_t_matmul(factors, weights)
    assert product.shape == (*batch, 7, columns)
    assert transposed.shape == (*batch, cells(shape), columns)
    assert relative(product, rows @ values) < 1e-14
    assert relative(transposed, rows.mT @ weights) < 1e-14


@pytest.mark.parametrize("shape", [(4, 3), (2, 5, 3)], ids=str)
@pytest.mark.parametrize(
    ("batches", "values_batch"),
    [([(2, 3), ()], ()), ([(), (3,)], (2, 1)), ([(), ()], (3,)), ([(2, 1), (3,)], (2, 3)), ([(1,), (3,)], (1,))],
    ids=str,
)
def test_batches_of_factors_and_values_broadcast(shape, batches, values_batch):
    """Between factors, and between factors and values."""
    factors = [randn(*batches[axis % 2], 6, size, seed=axis) for axis, size in enumerate(shape)]
    rows = kron_vectors(factors)
    values, weights = randn(*values_batch, cells(shape), 2, seed=8), randn(*values_batch, 6, 2, seed=9)
    for got, expected in (
        (khatri_rao_matmul(factors, values), rows @ values),
        (khatri_rao_t_matmul(factors, weights), rows.mT @ weights),
    ):
        assert got.shape == expected.shape
        assert relative(got, expected) < 1e-14


@pytest.mark.parametrize("numbers", [1, 7, 24, 25, 48, 10**6])
@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
def test_chunks_do_not_show(monkeypatch, numbers, batch):
    """One row a chunk, chunks that divide the rows and ones that do not, all rows at once: values and gradients."""
    shape, rows = (4, 3, 2), 11
    factors = [factor.requires_grad_() for factor in factors_of(shape, rows, batch)]
    values = randn(*batch, cells(shape), 2, seed=8).requires_grad_()
    weights = randn(*batch, rows, 2, seed=9).requires_grad_()
    written_out = kron_vectors(factors)
    expected = (written_out @ values, written_out.mT @ weights)
    monkeypatch.setattr(khatri_rao, "_CHUNK_NUMBERS", numbers)
    got = (khatri_rao_matmul(factors, values), khatri_rao_t_matmul(factors, weights))
    for ours, theirs, inputs in zip(got, expected, ([*factors, values], [*factors, weights]), strict=True):
        assert relative(ours.detach(), theirs.detach()) < 1e-14
        outer = randn(*ours.shape, seed=10)
        gradients = torch.autograd.grad((outer * ours).sum(), inputs)
        exact_ones = torch.autograd.grad((outer * theirs).sum(), inputs, retain_graph=True)
        for gradient, exact in zip(gradients, exact_ones, strict=True):
            assert relative(gradient, exact) < 1e-13


@pytest.mark.parametrize("rows", [1, 5, 6])
def test_chunks_are_bounded_and_cover_the_rows(monkeypatch, rows):
    """A chunk holds no more numbers than allowed, unless one row alone does; every row is in one chunk."""
    monkeypatch.setattr(khatri_rao, "_CHUNK_NUMBERS", 2 * 3 * 2)  # two rows of axes (4, 3), the longest contracted
    factors, values = factors_of((4, 3), rows), randn(12, 2)
    chunks = list(khatri_rao._chunks(factors, values))
    assert [row for chunk in chunks for row in range(chunk.start, chunk.stop)] == list(range(rows))
    assert max(chunk.stop - chunk.start for chunk in chunks) <= 2


@pytest.mark.parametrize("numbers", [2**23, 6])
def test_gradients_pass_a_numerical_check(monkeypatch, numbers):
    monkeypatch.setattr(khatri_rao, "_CHUNK_NUMBERS", numbers)
    factors = [factor.requires_grad_() for factor in factors_of((3, 2, 2), 3, (2,))]
    values, weights = randn(2, 12, 2, seed=8).requires_grad_(), randn(2, 3, 2, seed=9).requires_grad_()
    assert torch.autograd.gradcheck(lambda v, *f: khatri_rao_matmul(f, v), (values, *factors))
    assert torch.autograd.gradcheck(lambda w, *f: khatri_rao_t_matmul(f, w), (weights, *factors))


def test_second_derivatives_pass_a_numerical_check():
    """Polynomials of degree one in each factor: nothing about them is hidden from autograd."""
    factors = [factor.requires_grad_() for factor in factors_of((3, 2), 2)]
    values = randn(6, 1, seed=8).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda v, *f: khatri_rao_matmul(f, v), (values, *factors))


def test_only_what_needs_a_gradient_gets_one():
    first, second = factors_of((3, 2), 4)
    second.requires_grad_()
    value = khatri_rao_matmul([first, second], randn(6, 1)).sum()
    (gradient,) = torch.autograd.grad(value, second)
    assert relative(gradient, torch.einsum("qi,ij->qj", first, randn(6, 1).view(3, 2))) < 1e-14


@pytest.mark.parametrize("numbers", [2**23, 1])
@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
def test_no_points_give_no_rows(monkeypatch, numbers, batch):
    """Without rows the product is empty, its transpose zero."""
    monkeypatch.setattr(khatri_rao, "_CHUNK_NUMBERS", numbers)
    factors = [factor.requires_grad_() for factor in factors_of((4, 3), 0, batch)]
    assert khatri_rao_matmul(factors, randn(*batch, 12, 2)).shape == (*batch, 0, 2)
    transposed = khatri_rao_t_matmul(factors, randn(*batch, 0, 2))
    assert torch.equal(transposed, torch.zeros(*batch, 12, 2, dtype=torch.float64))


def test_no_columns_give_no_columns():
    factors = factors_of((4, 3), 5)
    assert khatri_rao_matmul(factors, randn(12, 0)).shape == (5, 0)
    assert khatri_rao_t_matmul(factors, randn(5, 0)).shape == (12, 0)


def test_rows_of_zeros():
    """A point far from the whole grid has a covariance of zero with it: no NaN, and nothing leaks to other rows."""
    factors = factors_of((4, 3), 5)
    factors[1][2] = 0.0
    product = khatri_rao_matmul(factors, randn(12, 2, seed=8))
    assert torch.equal(product[2], torch.zeros(2, dtype=torch.float64))
    keep = torch.tensor([0, 1, 3, 4])
    assert relative(product[keep], khatri_rao_matmul([f[keep] for f in factors], randn(12, 2, seed=8))) < 1e-14
    weights = randn(5, 2, seed=9)
    rest = khatri_rao_t_matmul([f[keep] for f in factors], weights[keep])
    assert relative(khatri_rao_t_matmul(factors, weights), rest) < 1e-14


def test_float32_stays_float32():
    factors = [factor.float() for factor in factors_of((4, 3), 5)]
    values, weights = randn(12, 2).float(), randn(5, 2).float()
    rows = kron_vectors(factors).double()
    for got, exact in (
        (khatri_rao_matmul(factors, values), rows @ values.double()),
        (khatri_rao_t_matmul(factors, weights), rows.mT @ weights.double()),
    ):
        assert got.dtype == torch.float32
        assert relative(got, exact) < 1e-6


@st.composite
def problems(draw):
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    batch = draw(st.sampled_from([(), (1,), (2,), (2, 2)]))
    rows, columns, seed = draw(st.integers(0, 6)), draw(st.integers(1, 3)), draw(st.integers(0, 2**16))
    return (
        factors_of(shape, rows, batch, seed),
        randn(*batch, cells(shape), columns, seed=seed + 10),
        randn(*batch, rows, columns, seed=seed + 11),
    )


@settings(max_examples=60)
@given(problems())
def test_the_transpose_is_the_adjoint(problem):
    """``u' (R v) = (R' u)' v``, and both are linear in every factor."""
    factors, values, weights = problem
    product, transposed = khatri_rao_matmul(factors, values), khatri_rao_t_matmul(factors, weights)
    scale = float((product.abs() * weights.abs()).sum()) + 1.0
    torch.testing.assert_close((weights * product).sum(), (transposed * values).sum(), rtol=0.0, atol=1e-12 * scale)
    doubled = [*factors[:-1], 2.0 * factors[-1]]
    assert torch.equal(khatri_rao_matmul(doubled, values), 2.0 * product)
    assert torch.equal(khatri_rao_t_matmul(doubled, weights), 2.0 * transposed)


@settings(max_examples=40)
@given(problems(), st.randoms(use_true_random=False))
def test_order_of_the_points_does_not_matter(problem, random):
    factors, values, weights = problem
    order = list(range(factors[0].size(-2)))
    random.shuffle(order)
    shuffled = [factor[..., order, :] for factor in factors]
    torch.testing.assert_close(khatri_rao_matmul(shuffled, values), khatri_rao_matmul(factors, values)[..., order, :])
    moved = khatri_rao_t_matmul(shuffled, weights[..., order, :])
    torch.testing.assert_close(moved, khatri_rao_t_matmul(factors, weights), rtol=1e-10, atol=1e-10)
