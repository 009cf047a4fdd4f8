"""Eigenpairs at numerical rank: the error they promise, against the one they make."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpytorch_gaps.linalg.smooth_eigh import eigh_of_smooth, lowrank_eigh

examples = settings(max_examples=60)
EPS = torch.finfo(torch.float64).eps


def squared_exponential(size, length, dtype=torch.float64):
    x = torch.linspace(0, 1, size, dtype=dtype)
    return torch.exp(-(((x[:, None] - x) / length) ** 2))


def rebuilt(vectors, values):
    return vectors * values @ vectors.mT


def two_norm(matrix):
    return float(torch.linalg.eigvalsh(0.5 * (matrix + matrix.mT)).abs().max()) if matrix.numel() else 0.0


def rounding(factor):
    """What the docstring grants: about ``m * 1e-16 * ||F||``."""
    return (factor.size(0) + 10) * EPS * two_norm(factor.double())


def assert_certified(factor, vectors, values, bound):
    error = two_norm(factor.double() - rebuilt(vectors, values))
    assert error <= bound + rounding(factor)


@pytest.mark.parametrize("tolerance", [1e-2, 1e-4, 1e-8, 1e-11])
@pytest.mark.parametrize("length", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("size", [40, 250])
def test_the_tolerance_is_met_and_certified(size, length, tolerance):
    factor = squared_exponential(size, length)
    vectors, values, bound = lowrank_eigh(factor, tolerance)
    assert bound <= tolerance
    assert_certified(factor, vectors, values, bound)
    assert vectors.dtype == values.dtype == torch.float64


@pytest.mark.parametrize(("length", "highest"), [(0.1, 45), (0.3, 22), (1.0, 12)])
def test_the_rank_is_far_below_the_size(length, highest):
    vectors, _, bound = lowrank_eigh(squared_exponential(400, length), 1e-10)
    assert bound <= 1e-10
    assert vectors.size(1) <= highest


@pytest.mark.parametrize("tolerance", [0.0, 1e-15, 1e-13])
def test_beyond_rounding_the_error_stays_at_rounding(tolerance):
    factor = squared_exponential(200, 0.3)
    vectors, values, bound = lowrank_eigh(factor, tolerance)
    assert_certified(factor, vectors, values, bound)
    assert vectors.size(1) < 60


def test_vectors_are_orthonormal_and_values_ascend():
    vectors, values, _ = lowrank_eigh(squared_exponential(120, 0.2), 1e-12)
    rank = len(values)
    torch.testing.assert_close(vectors.mT @ vectors, torch.eye(rank, dtype=torch.float64), rtol=0, atol=1e-13)
    assert bool((values.diff() >= 0).all())
    assert bool((values >= 0).all())


def test_pairs_equal_the_leading_ones_of_eigh():
    factor = squared_exponential(120, 0.2)
    vectors, values, bound = lowrank_eigh(factor, 1e-12)
    all_values, all_vectors = torch.linalg.eigh(factor)
    rank = len(values)
    # Weyl: no eigenvalue is further off than the error in the 2-norm
    torch.testing.assert_close(values, all_values[-rank:], rtol=0, atol=bound + rounding(factor))
    leading = all_values[-rank:] > 1e-4  # well separated from the rest and from each other
    overlap = (vectors.mT @ all_vectors[:, -rank:]).abs().diagonal()[leading]
    assert int(leading.sum()) > 5
    torch.testing.assert_close(overlap, torch.ones_like(overlap), rtol=0, atol=1e-9)


@pytest.mark.parametrize("max_rank", [0, 1, 3, 8])
def test_the_highest_rank_is_respected_and_its_error_told(max_rank):
    factor = squared_exponential(60, 0.2)
    vectors, values, bound = lowrank_eigh(factor, 1e-10, max_rank=max_rank)
    assert vectors.shape == (60, max_rank)
    assert values.shape == (max_rank,)
    assert bound > 1e-10
    assert_certified(factor, vectors, values, bound)


def test_a_highest_rank_above_the_size_changes_nothing():
    factor = squared_exponential(30, 0.5)
    plain, capped = lowrank_eigh(factor, 1e-9), lowrank_eigh(factor, 1e-9, max_rank=1000)
    assert torch.equal(plain[1], capped[1])
    assert plain[2] == capped[2]


@pytest.mark.parametrize("size", [1, 5])
def test_a_matrix_of_zeros_has_no_eigenvectors(size):
    vectors, values, bound = lowrank_eigh(torch.zeros(size, size, dtype=torch.float64), 0.0)
    assert vectors.shape == (size, 0)
    assert values.shape == (0,)
    assert bound == 0.0


@pytest.mark.parametrize("rank", [1, 3, 7])
def test_exact_rank_is_found(rank):
    torch.manual_seed(rank)
    root = torch.randn(50, rank, dtype=torch.float64)
    factor = root @ root.mT
    vectors, values, bound = lowrank_eigh(factor, 1e-9)
    assert vectors.shape == (50, rank)
    assert_certified(factor, vectors, values, bound)
    torch.testing.assert_close(values, torch.linalg.eigvalsh(factor)[-rank:], rtol=1e-12, atol=0)


def test_full_rank_is_an_eigen_decomposition():
    torch.manual_seed(0)
    root = torch.randn(20, 20, dtype=torch.float64)
    factor = root @ root.mT
    vectors, values, bound = lowrank_eigh(factor, 0.0)
    assert vectors.shape == (20, 20)
    torch.testing.assert_close(rebuilt(vectors, values), factor, rtol=1e-12, atol=1e-12)
    assert bound <= rounding(factor)


def test_indefinite_by_rounding():
    factor = squared_exponential(80, 1.0)
    assert float(torch.linalg.eigvalsh(factor)[0]) < 0  # or this test shows nothing
    vectors, values, bound = lowrank_eigh(factor, 1e-14)
    assert_certified(factor, vectors, values, bound)
    assert bool((values >= 0).all())


@pytest.mark.parametrize("tolerance", [1e-4, 1e-6, 1e-8, 1e-10])
@pytest.mark.parametrize("length", [0.3, 1.0])
def test_float32_rounding_is_in_the_bound(length, tolerance):
    """A float32 kernel matrix is indefinite at 1e-7: its diagonal is left below zero, which is an error too."""
    factor = squared_exponential(300, length, torch.float32)
    vectors, values, bound = lowrank_eigh(factor, tolerance)
    assert_certified(factor, vectors, values, bound)


def test_an_indefinite_matrix_is_not_certified_as_exact():
    factor = torch.tensor([[1.0, 2.0], [2.0, 1.0]], dtype=torch.float64)  # eigenvalues -1 and 3
    vectors, values, bound = lowrank_eigh(factor, 1e-3)
    assert_certified(factor, vectors, values, bound)


@examples
@given(st.integers(1, 12), st.integers(1, 12), st.floats(-10, 2), st.integers(0, 10**6))
def test_any_positive_semidefinite_matrix_is_certified(size, rank, exponent, seed):
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(size, rank, generator=generator, dtype=torch.float64)
    scales = torch.logspace(0, -6, rank, dtype=torch.float64)
    factor = root * scales @ root.mT
    factor = 0.5 * (factor + factor.mT)
    tolerance = 10.0**exponent
    vectors, values, bound = lowrank_eigh(factor, tolerance)
    assert_certified(factor, vectors, values, bound)
    assert bound <= tolerance + rounding(factor)
    assert vectors.size(1) <= min(size, rank)


@pytest.mark.parametrize("shape", [(3,), (3, 4), (2, 3, 3), (), (0, 3)])
def test_other_shapes_are_refused_by_name(shape):
    with pytest.raises(ValueError, match=r"factor: got shape .* expected a square matrix"):
        lowrank_eigh(torch.zeros(shape, dtype=torch.float64), 1e-6)


def test_all_eigenpairs_of_a_large_smooth_matrix():
    factor = squared_exponential(1000, 0.1)
    found = eigh_of_smooth(factor)
    assert found is not None
    values, vectors = found
    assert bool((values.diff() >= 0).all())
    assert float((vectors.mT @ vectors - torch.eye(1000, dtype=torch.float64)).norm()) < 1e-12
    assert float(((vectors * values) @ vectors.mT - factor).norm()) <= 1e-13 * float(values[-1])
    expected = torch.linalg.eigvalsh(factor)
    torch.testing.assert_close(values, expected.clamp_min(0.0), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("why", ["small", "rough", "indefinite", "zero"])
def test_any_other_matrix_is_left_to_eigh(why):
    x = torch.linspace(0, 1, 1000, dtype=torch.float64)
    factor = {
        "small": squared_exponential(999, 0.1),
        "rough": torch.exp(-(x[:, None] - x).abs() / 0.1),
        # the variances say nothing of what is wrong
        "indefinite": squared_exponential(1000, 0.1) + 1e-6 * torch.eye(1000, dtype=torch.float64).flip(0),
        "zero": torch.zeros(1000, 1000, dtype=torch.float64),
    }[why]
    assert eigh_of_smooth(factor) is None
