"""Kronecker products axis by axis, against the dense matrix."""

import itertools
from functools import reduce
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpytorch_gaps.linalg import products
from gpytorch_gaps.linalg.products import kron_diagonal, kron_matmul, kron_matmul_flops
from tests._covering import covering

examples = settings(max_examples=60)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
SQUARE = [[(5, 5)], [(4, 4), (3, 3)], [(3, 3), (4, 4), (2, 2)], [(2, 2), (3, 3), (1, 1), (4, 4)]]
RECTANGULAR = [
    [(3, 5)],
    [(2, 4), (3, 5)],  # one order
    [(5, 4), (2, 6)],  # the other
    [(3, 2), (2, 5), (4, 4)],
    [(2, 3), (4, 4), (3, 2)],
    [(1, 3), (4, 1), (2, 2), (3, 4)],
]
BATCHES = [
    ([(), ()], (3,)),
    ([(3,), (3,)], ()),
    ([(3,), ()], (3,)),
    ([(), (3,)], (2, 1)),
    ([(2, 1), (3,)], (2, 3)),
    ([(1,), (2, 3)], (3,)),
]
sizes = st.integers(1, 4)
lists_of_shapes = st.lists(st.tuples(sizes, sizes), min_size=1, max_size=4)


def kron_dense(factors):
    def pair(a, b):
        product = a[..., :, None, :, None] * b[..., None, :, None, :]
        return product.reshape(*product.shape[:-4], a.size(-2) * b.size(-2), a.size(-1) * b.size(-1))

    return reduce(pair, factors)


def normal(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed + sum(shape)))


def problem(shapes, num_rhs=3, dtype=torch.float64, batches=None, batch=()):
    batches = batches or [()] * len(shapes)
    pairs = zip(batches, shapes, strict=True)
    factors = [normal(*b, *shape, dtype=dtype, seed=i) for i, (b, shape) in enumerate(pairs)]
    return factors, normal(*batch, prod(m for _, m in shapes), num_rhs, dtype=dtype)


def assert_close(actual, expected):
    """Relative to the largest entry: a sum of terms is only known to the precision of the largest."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    assert (actual - expected).abs().max() <= TOLERANCE[expected.dtype] * expected.abs().max()


@pytest.fixture(params=["whole", "blocks"])
def strategy(request, monkeypatch):
    """Blocks are for large grids: lower the bounds so that small ones are worked in several blocks, too."""
    if request.param == "blocks":
        monkeypatch.setattr(products, "_BLOCK_NUMBERS", 7)
        monkeypatch.setattr(products, "_MIN_BATCHED_ROWS", 1)


def test_kron_dense_is_torch_kron():
    (a, b), _ = problem([(2, 3), (4, 5)])
    assert torch.equal(kron_dense([a, b]), torch.kron(a, b))


@pytest.mark.usefixtures("strategy")
class TestAgainstDense:
    @covering(shapes=SQUARE + RECTANGULAR, num_rhs=[1, 3], dtype=TOLERANCE)
    def test_the_product_is_that_of_the_dense_matrix(self, shapes, num_rhs, dtype):
        factors, x = problem(shapes, num_rhs, dtype)
        assert_close(kron_matmul(factors, x), kron_dense(factors) @ x)

    @pytest.mark.parametrize(("batches", "batch"), BATCHES, ids=str)
    @pytest.mark.parametrize("shapes", [[(3, 3), (4, 4)], [(5, 4), (2, 6)], [(2, 4), (3, 5)]], ids=str)
    def test_batches_of_factors_and_columns_broadcast(self, shapes, batches, batch):
        factors, x = problem(shapes, 3, batches=batches, batch=batch)
        assert_close(kron_matmul(factors, x), kron_dense(factors) @ x)

    @pytest.mark.parametrize("batches", [[(2,), (), ()], [(), (2,), ()], [(), (), (2,)]], ids=str)
    def test_batch_on_one_of_three(self, batches):
        factors, x = problem([(3, 3), (4, 4), (2, 2)], batches=batches)
        assert_close(kron_matmul(factors, x), kron_dense(factors) @ x)

    @pytest.mark.parametrize("batch", [(), (2,)], ids=str)
    @pytest.mark.parametrize("shapes", SQUARE + RECTANGULAR, ids=str)
    def test_layout_of_x_is_free(self, shapes, batch):
        factors, x = problem(shapes, 3, batch=batch)
        expected = kron_dense(factors) @ x
        columns_whole = x.mT.contiguous().mT
        every_other = torch.stack([x, torch.full_like(x, torch.nan)], -1).flatten(-2)[..., ::2]
        expanded = x[..., :1].expand(x.shape)
        assert_close(kron_matmul(factors, columns_whole), expected)
        assert_close(kron_matmul(factors, every_other), expected)
        assert_close(kron_matmul(factors, expanded), expected[..., :1].expand(expected.shape))

    @pytest.mark.parametrize("shapes", SQUARE + RECTANGULAR, ids=str)
    def test_arguments_are_left_alone(self, shapes):
        factors, x = problem(shapes)
        before = [t.clone() for t in (*factors, x)]
        kron_matmul(factors, x)
        assert all(map(torch.equal, (*factors, x), before))

    @examples
    @given(lists_of_shapes, sizes, st.data())
    def test_product_of_products(self, shapes, num_rhs, data):
        """``(A ⊗ B) (C ⊗ D) = AC ⊗ BD``."""
        outer, _ = problem([(data.draw(sizes), q) for q, _ in shapes])
        inner, x = problem(shapes, num_rhs)
        both = [a @ b for a, b in zip(outer, inner, strict=True)]
        expected = kron_dense([a.abs() @ b.abs() for a, b in zip(outer, inner, strict=True)]) @ x.abs()
        error = kron_matmul(outer, kron_matmul(inner, x)) - kron_matmul(both, x)
        assert (error.abs() <= 1e-12 * expected).all()

    @pytest.mark.parametrize("shapes", [*SQUARE, *RECTANGULAR], ids=str)
    def test_no_right_hand_sides(self, shapes):
        factors, x = problem(shapes, 0)
        assert kron_matmul(factors, x).shape == (prod(q for q, _ in shapes), 0)

    @pytest.mark.parametrize("shapes", [[(2, 4), (0, 3)], [(0, 2), (3, 3), (2, 2)], [(2, 0), (3, 2), (2, 4)]], ids=str)
    def test_factors_without_rows_or_columns_are_taken(self, shapes):
        factors, x = problem(shapes)
        assert torch.equal(kron_matmul(factors, x), kron_dense(factors) @ x)

    @pytest.mark.filterwarnings("ignore:There is a performance drop")
    def test_forward_mode_and_vmap(self):
        factors, x = problem([(3, 3), (4, 4), (2, 2)])
        dense = kron_dense(factors)
        value, slope = torch.func.jvp(lambda x: kron_matmul(factors, x), (x,), (2 * x,))
        assert_close(value, dense @ x)
        assert_close(slope, dense @ (2 * x))
        batch = torch.stack([x, -x])
        assert_close(torch.vmap(lambda x: kron_matmul(factors, x))(batch), dense @ batch)


@pytest.mark.usefixtures("strategy")
class TestGradients:
    @pytest.mark.parametrize("num_rhs", [1, 3])
    @pytest.mark.parametrize("shapes", SQUARE + RECTANGULAR, ids=str)
    def test_equal_those_of_dense(self, shapes, num_rhs):
        factors, x = problem(shapes, num_rhs)
        inputs = [t.requires_grad_() for t in (*factors, x)]
        result = kron_matmul(factors, x)
        weights = normal(*result.shape, seed=7)
        actual = torch.autograd.grad((result * weights).sum(), inputs)
        expected = torch.autograd.grad((kron_dense(factors) @ x * weights).sum(), inputs)
        for a, e in zip(actual, expected, strict=True):
            assert_close(a, e)

    @pytest.mark.parametrize(("batches", "batch"), BATCHES, ids=str)
    def test_gradients_of_batches_equal_those_of_dense(self, batches, batch):
        factors, x = problem([(5, 4), (2, 3)], batches=batches, batch=batch)
        inputs = [t.requires_grad_() for t in (*factors, x)]
        actual = torch.autograd.grad(kron_matmul(factors, x).square().sum(), inputs)
        expected = torch.autograd.grad((kron_dense(factors) @ x).square().sum(), inputs)
        for a, e in zip(actual, expected, strict=True):
            assert_close(a, e)

    def test_gradients_pass_a_numerical_check(self):
        factors, x = problem([(2, 3), (2, 2), (3, 2)], 2)
        inputs = [t.requires_grad_() for t in (*factors, x)]
        assert torch.autograd.gradcheck(lambda *t: kron_matmul(t[:-1], t[-1]), inputs)


def test_large_grid_in_blocks_equals_whole():
    shapes = [(40, 40), (30, 30), (25, 25)]
    factors, x = problem(shapes, 40)
    assert products._blocks_pay(factors, x)
    assert_close(products._blocked(factors, x), products._rotated(factors, x).mT)


def test_whole_columns_are_not_copied():
    """Column by column in memory in, column by column out: solvers that keep this layout never pay a transposition."""
    factors, x = problem([(3, 3), (4, 4), (2, 2)])
    assert kron_matmul(factors, x.mT.contiguous().mT).mT.is_contiguous()


def test_size_must_match():
    factors, x = problem([(3, 3), (4, 4)])
    with pytest.raises(ValueError, match="do not apply to 11 rows"):
        kron_matmul(factors, x[:-1])


class TestFlops:
    def test_flops_are_those_counted_by_hand(self):
        assert kron_matmul_flops([(3, 5)], 2) == 2 * 3 * 5 * 2
        assert kron_matmul_flops([(4, 4), (3, 3)]) == 2 * (4 * 4 * 3 + 4 * 3 * 3)
        # 5 -> 1 first, on the 2 columns of the first axis; then 2 -> 6, with one column left
        assert kron_matmul_flops([(6, 2), (1, 5)], 7) == 2 * 7 * (1 * 5 * 2 + 6 * 2 * 1)
        assert kron_matmul_flops([(0, 2), (3, 3)]) == 0

    @examples
    @given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4), st.integers(0, 3))
    def test_no_order_is_cheaper(self, shapes, num_rhs):
        def cost(order):
            current = [m for _, m in shapes]
            total = 0
            for i in order:
                q, m = shapes[i]
                total += 2 * q * m * prod(current[:i]) * prod(current[i + 1 :]) * num_rhs
                current[i] = q
            return total

        orders = itertools.permutations(range(len(shapes)))
        assert kron_matmul_flops(shapes, num_rhs) == min(map(cost, orders))


@pytest.mark.parametrize("batches", [[(), (), ()], [(2,), (), (3, 1)]], ids=str)
def test_the_diagonal_is_that_of_the_dense_product(batches):
    vectors = [normal(*batch, m) for batch, m in zip(batches, (3, 1, 4), strict=True)]
    expected = kron_dense([torch.diag_embed(v) for v in vectors]).diagonal(dim1=-2, dim2=-1)
    assert torch.equal(kron_diagonal(vectors), expected)


def test_diagonal_of_one_is_itself():
    v = normal(5)
    assert torch.equal(kron_diagonal([v]), v)
