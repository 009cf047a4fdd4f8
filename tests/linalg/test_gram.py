"""The masked Gram matrix by both contractions, against ``S Q' diag(w) Q S'`` in dense algebra."""

import math
from functools import reduce

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpytorch_gaps.linalg import gram
from gpytorch_gaps.linalg.selection import ravel
from tests._covering import covering

examples = settings(max_examples=60)
CONTRACTIONS = [gram.masked_gram, gram._gram_by_axis, gram._gram_by_columns]
SHAPES = [(9,), (4, 5), (3, 4, 2), (2, 3, 2, 3)]
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def kron(matrices):
    def pair(a, b):
        product = a[..., :, None, :, None] * b[..., None, :, None, :]
        return product.reshape(*product.shape[:-4], a.size(-2) * b.size(-2), a.size(-1) * b.size(-1))

    return reduce(pair, matrices)


def dense_gram(vectors, positions, weights):
    columns = kron(vectors)[..., ravel(positions, tuple(q.size(-1) for q in vectors))]
    return columns.mT @ (weights.unsqueeze(-1) * columns)


def problem(shape, rank, batch=(), weight_batch=(), columns=None, seed=0):
    """Any vectors: the identity needs no orthonormal ones. Positions repeat; weights have both signs and zeros."""
    generator = torch.Generator().manual_seed(seed)
    columns = columns or shape
    vectors = [
        torch.randn(*batch, m, r, generator=generator, dtype=torch.float64) for m, r in zip(shape, columns, strict=True)
    ]
    positions = torch.stack([torch.randint(r, (rank,), generator=generator) for r in columns])
    weights = torch.randn(*weight_batch, math.prod(shape), generator=generator, dtype=torch.float64)
    weights = weights * (torch.rand(weights.shape, generator=generator) > 0.3)
    return vectors, positions, weights


@covering(
    batches=[((), ()), ((3,), ()), ((), (3,)), ((3,), (3,)), ((2, 1), (3,)), ((2, 2), (2, 2))],
    shape=SHAPES,
    contraction=CONTRACTIONS,
)
def test_both_contractions_equal_the_dense_matrix(contraction, shape, batches):
    vectors, positions, weights = problem(shape, 11, *batches)
    result = contraction(vectors, positions, weights)
    expected = dense_gram(vectors, positions, weights)
    assert result.shape == expected.shape
    torch.testing.assert_close(result, expected, **CLOSE)


@pytest.mark.parametrize("contraction", CONTRACTIONS)
def test_fewer_vectors_than_cells_are_taken(contraction):
    vectors, positions, weights = problem((4, 5, 3), 7, columns=(2, 3, 1))
    torch.testing.assert_close(
        contraction(vectors, positions, weights), dense_gram(vectors, positions, weights), **CLOSE
    )


@covering(shape=SHAPES, numbers=[1, 10, 40, 100], batches=[((), ()), ((2,), (2,)), ((), (2,)), ((2,), ())])
def test_chunks_add_up(monkeypatch, shape, numbers, batches):
    vectors, positions, weights = problem(shape, 9, *batches)
    expected = dense_gram(vectors, positions, weights)
    monkeypatch.setattr(gram, "_CHUNK_NUMBERS", numbers)
    torch.testing.assert_close(gram._gram_by_axis(vectors, positions, weights), expected, **CLOSE)
    torch.testing.assert_close(gram._gram_by_columns(vectors, positions, weights), expected, **CLOSE)


def test_chunks_are_really_visited_one_by_one(monkeypatch):
    vectors, positions, weights = problem((4, 5), 9)
    calls = []
    product = gram.kron_matmul
    monkeypatch.setattr(gram, "kron_matmul", lambda factors, x: calls.append(factors) or product(factors, x))
    gram._gram_by_axis(vectors, positions, weights)
    assert len(calls) == 1
    calls.clear()
    monkeypatch.setattr(gram, "_CHUNK_NUMBERS", 1)
    gram._gram_by_axis(vectors, positions, weights)
    assert len(calls) == 10  # 4 * 5 / 2 pairs on the first axis


@examples
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple),
    st.integers(1, 12),
    st.sampled_from([1, 13, 2**24]),
    st.integers(0, 10**6),
)
def test_contractions_agree_whatever_the_shape(shape, rank, numbers, seed):
    vectors, positions, weights = problem(shape, rank, seed=seed)
    expected = dense_gram(vectors, positions, weights)
    scale = max(1.0, float(expected.abs().max()))
    before = gram._CHUNK_NUMBERS
    gram._CHUNK_NUMBERS = numbers
    try:
        for contraction in CONTRACTIONS:
            result = contraction(vectors, positions, weights)
            torch.testing.assert_close(result, expected, rtol=0, atol=1e-13 * scale)
    finally:
        gram._CHUNK_NUMBERS = before


@pytest.mark.parametrize("contraction", CONTRACTIONS)
def test_a_mask_of_orthonormal_vectors_without_gaps_gives_the_identity(contraction):
    torch.manual_seed(1)
    vectors = [torch.linalg.qr(torch.randn(m, m, dtype=torch.float64)).Q for m in (4, 3)]
    positions = torch.tensor([[0, 1, 3, 3], [2, 0, 1, 2]])
    result = contraction(vectors, positions, torch.ones(12, dtype=torch.float64))
    torch.testing.assert_close(result, torch.eye(4, dtype=torch.float64), rtol=0, atol=1e-14)


@pytest.mark.parametrize("contraction", CONTRACTIONS)
def test_no_cell_observed(contraction):
    vectors, positions, weights = problem((4, 3), 5)
    result = contraction(vectors, positions, torch.zeros_like(weights))
    assert torch.equal(result, torch.zeros(5, 5, dtype=torch.float64))


@pytest.mark.parametrize("numbers", [1, 20, 2**24])
@pytest.mark.parametrize("contraction", CONTRACTIONS)
@pytest.mark.parametrize("weight_batch", [(), (2,)])
def test_differentiable_in_the_weights(monkeypatch, contraction, numbers, weight_batch):
    monkeypatch.setattr(gram, "_CHUNK_NUMBERS", numbers)
    vectors, positions, weights = problem((3, 4), 4, weight_batch=weight_batch)
    weights = (weights + 0.05).requires_grad_(True)  # no zero: a gap's weight is a constant
    assert torch.autograd.gradcheck(lambda w: contraction(vectors, positions, w), (weights,))


@pytest.mark.parametrize(("spread", "expected"), [(False, "axis"), (True, "columns")])
def test_the_cheaper_contraction_is_taken(monkeypatch, spread, expected):
    """Few columns an axis make few pairs; a new column on every axis for every eigenvector makes too many."""
    vectors, positions, weights = problem((12, 12, 12), 12)
    positions = torch.arange(12).repeat(3, 1) if spread else positions % 2
    used = [q[:, axis.unique()] for q, axis in zip(vectors, positions, strict=True)]
    by_axis, by_columns = gram.gram_flops(used, 12)
    assert (by_columns < by_axis) == spread
    taken = []
    monkeypatch.setattr(gram, "_gram_by_axis", lambda *args: taken.append("axis"))
    monkeypatch.setattr(gram, "_gram_by_columns", lambda *args: taken.append("columns"))
    gram.masked_gram(vectors, positions, weights)
    assert taken == [expected]


def test_weights_of_a_batch_that_cancel_are_not_gaps():
    vectors, positions, weights = problem((4, 3), 5)
    weights = torch.stack([weights, -weights])
    for contraction in CONTRACTIONS:
        result = contraction(vectors, positions, weights)
        torch.testing.assert_close(result, dense_gram(vectors, positions, weights), **CLOSE)


def test_pairs_that_do_not_fit_in_memory_are_not_formed(monkeypatch):
    vectors, positions, weights = problem((4, 5, 3), 7)
    expected = dense_gram(vectors, positions, weights)
    monkeypatch.setattr(gram, "_MAX_PAIR_NUMBERS", 10)
    monkeypatch.setattr(gram, "_pair_basis", lambda _: pytest.fail("formed"))
    torch.testing.assert_close(gram.masked_gram(vectors, positions, weights), expected, **CLOSE)
