"""The certificate of a truncated eigenbasis: ``|K - Phi T Phi'|_2 <= error``, measured against K written out."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpytorch_gaps.linalg import smooth_eigh as lowrank
from gpytorch_gaps.linalg import truncated
from gpytorch_gaps.linalg.truncated import truncated_eigh
from tests import _dense as dense
from tests._covering import covering

examples = settings(max_examples=60)
EPS = torch.finfo(torch.float64).eps


def low_rank(size, rank, seed=0):
    root = dense.randn(size, rank, seed=seed)
    return root @ root.mT


def matern12(size, length=0.3):
    x = torch.linspace(0, 1, size, dtype=torch.float64)
    return torch.exp(-(x[:, None] - x).abs() / length)


CASES = {
    "one smooth axis": [dense.se(60, 0.3)],
    "one rough axis": [matern12(50)],
    "smooth": [dense.se(14, 0.5), dense.se(12, 0.3)],
    "three smooth": [dense.se(7, 0.5), dense.se(8, 0.3), dense.se(6, 1.0)],
    "matern": [dense.matern32(14), matern12(15)],
    "smooth and rough": [dense.se(9, 0.4), dense.matern32(7), dense.identity(4)],
    "identity": [dense.identity(9), dense.identity(8)],
    "pairs of eigenvalues": [dense.periodic(16), dense.periodic(12)],
    "ones": [torch.ones(9, 9, dtype=torch.float64), dense.se(8)],
    "rank-deficient": [low_rank(12, 3), low_rank(10, 2, seed=1)],
    "very different norms": [1e6 * dense.se(9), 1e-6 * dense.matern32(8), 3.0 * dense.random_psd(4)],
    "a group": [dense.ard(15), dense.se(10)],
    "single points": [torch.tensor([[2.0]], dtype=torch.float64), dense.se(30), 0.5 * dense.identity(1)],
}


def two_norm(matrix):
    return float(torch.linalg.eigvalsh(0.5 * (matrix + matrix.mT)).abs().max())


def rebuilt(basis):
    phi = dense.kron(basis.vectors)
    return phi * basis.products.flatten() @ phi.mT


def assert_certified(factors, basis):
    """The bound holds, up to the rounding of the very matrix products that check it; returns ``|K|``."""
    kernel = dense.kron([factor.double() for factor in factors])
    norm = two_norm(kernel)
    assert two_norm(kernel - rebuilt(basis)) <= basis.error + 4 * EPS * norm + 1e-14 * basis.level
    for vectors in basis.vectors:
        eye = torch.eye(vectors.size(-1), dtype=torch.float64)
        torch.testing.assert_close(vectors.mT @ vectors, eye, rtol=0, atol=1e-14)
    for values in basis.values:
        assert bool((values >= 0).all())
        assert bool((values.diff() <= 0).all()), "largest first"
    return norm


@covering(case=CASES, share=[0.0, 1e-14, 1e-8, 1e-4, 0.1, 0.5], scale=[1e-8, 1.0, 1e8])
def test_the_bound_holds_and_is_no_looser_than_it_need_be(case, share, scale):
    """`share` of the norm of K may be dropped: from nothing to half of it."""
    first, *others = CASES[case]
    factors = [scale * first, *others]
    norm = math.prod(two_norm(factor) for factor in factors)
    basis = truncated_eigh(factors, share * norm)
    assert_certified(factors, basis)
    rounding = 1e-13 * norm
    assert basis.error <= 3.0 * share * norm + rounding
    assert share * norm <= basis.level <= max(share * norm, rounding)
    assert basis.level <= basis.error
    assert basis.shape == tuple(len(factor) for factor in factors)
    kept = basis.products > 0
    assert bool((basis.products[kept] >= basis.level).all())
    assert basis.size == int(kept.sum())
    assert basis.is_full == (basis.ranks == basis.shape)


@pytest.mark.parametrize("case", CASES)
def test_what_is_dropped_is_what_is_below_the_level(case):
    """As many products are kept as K has eigenvalues above the level, and no axis is wider than that takes."""
    factors = CASES[case]
    values = torch.linalg.eigvalsh(dense.kron(factors))
    level = 1e-3 * float(values.max())
    near = ((values / level - 1.0).abs() < 1e-6).any()
    assert not near, "a tie would be decided by rounding"
    basis = truncated_eigh(factors, level)
    assert basis.size == int((values > level).sum())
    for axis, rank in enumerate(basis.ranks):
        in_use = (basis.products > 0).transpose(0, axis).flatten(1) if len(basis.ranks) > 1 else basis.products > 0
        last = in_use[rank - 1].any()
        assert bool(last), f"axis {axis}: the last function is in no product"


def test_dropping_much_truncates_much():
    """Not only is the bound true when eps is large on purpose: it is large, and so is the error."""
    factors = [dense.se(14, 0.3), dense.se(12, 0.3)]
    kernel = dense.kron(factors)
    norm = two_norm(kernel)
    basis = truncated_eigh(factors, 0.1 * norm)
    actual = two_norm(kernel - rebuilt(basis))
    assert 0.01 * norm < actual <= basis.error <= 0.11 * norm
    assert basis.size < 20  # of 168


def test_a_level_above_the_kernel_leaves_nothing_of_it():
    """Noise so large that no function of the kernel can be distinguished from zero."""
    factors = [dense.se(6), dense.se(5)]
    norm = two_norm(dense.kron(factors))
    basis = truncated_eigh(factors, 2.0 * norm)
    assert basis.size == 0
    assert basis.ranks == (1, 1)
    assert float(basis.products.abs().max()) == 0.0
    assert basis.error >= norm


def test_a_kernel_of_zeros():
    factors = [torch.zeros(4, 4, dtype=torch.float64), dense.se(5)]
    basis = truncated_eigh(factors, 1e-8)
    assert basis.size == 0
    assert_certified(factors, basis)


@pytest.mark.parametrize("level", [1e-300, 0.0])
def test_a_level_below_rounding_stops_at_rounding(level):
    factors = [dense.se(40, 0.5), dense.se(8, 0.5)]
    basis = truncated_eigh(factors, level)
    norm = assert_certified(factors, basis)
    assert basis.error <= 1e-13 * norm
    assert basis.ranks[0] < 40  # what rounding has made up is left out


def test_an_indefinite_factor_is_certified_as_what_it_is():
    """Negative eigenvalues are set to zero; the bound says by how much that changes K."""
    factor = dense.se(8)
    indefinite = factor - 0.5 * torch.eye(8, dtype=torch.float64)
    basis = truncated_eigh([indefinite, dense.se(5)], 1e-8)
    assert_certified([indefinite, dense.se(5)], basis)
    assert basis.error > 0.1


def test_factors_of_float32():
    """They are taken for what they are: exact to their last bit, in float64."""
    factors = [dense.se(20, 0.3).float(), dense.matern32(6).float()]
    basis = truncated_eigh(factors, 1e-3)
    assert_certified(factors, basis)
    assert {tensor.dtype for tensor in (*basis.vectors, *basis.values, basis.products)} == {torch.float64}


def test_factors_are_neither_changed_nor_differentiated():
    factors = [dense.se(9).requires_grad_(True), dense.matern32(7)]
    before = [factor.detach().clone() for factor in factors]
    basis = truncated_eigh(factors, 1e-8)
    for factor, copy in zip(factors, before, strict=True):
        assert torch.equal(factor.detach(), copy)
    assert not any(tensor.requires_grad for tensor in (*basis.vectors, *basis.values))


@examples
@given(
    st.lists(
        st.tuples(
            st.integers(1, 9),
            st.sampled_from(["se", "matern", "periodic", "identity", "low rank", "psd"]),
            st.floats(-6, 6),
            st.integers(0, 99),
        ),
        min_size=1,
        max_size=3,
    ),
    st.floats(-15, 0.5),
)
def test_the_bound_holds_whatever_the_factors(axes, share):
    kinds = {
        "se": lambda n, seed: dense.se(n, 0.1 + seed / 50),
        "matern": lambda n, seed: dense.matern32(n, 0.1 + seed / 50),
        "periodic": lambda n, seed: dense.periodic(n, 0.2 + seed / 50),
        "identity": lambda n, seed: dense.identity(n),
        "low rank": lambda n, seed: low_rank(n, max(1, n // 2), seed),
        "psd": lambda n, seed: dense.random_psd(n, seed),
    }
    factors = [10.0**scale * kinds[kind](size, seed) for size, kind, scale, seed in axes]
    norm = math.prod(two_norm(factor) for factor in factors)
    level = 10.0**share * norm
    basis = truncated_eigh(factors, level)
    assert_certified(factors, basis)
    assert basis.error <= 3.0 * level + 1e-13 * norm


# -- how a factor is decomposed --------------------------------------------------------------------------------------


@pytest.fixture
def full_sizes(monkeypatch):
    """Sizes of the factors that are decomposed in full."""
    sizes, eigh = [], torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: sizes.append(len(matrix)) or eigh(matrix))
    return sizes


@pytest.mark.parametrize("level", [1e-9, 1e-3, 10.0])
def test_a_large_smooth_factor_goes_by_pivoted_cholesky(full_sizes, level):
    """Above the switch at 400 points; a factor of 3 beside it makes the product 1350 x 1350, checked as a whole."""
    factors = [dense.se(450, 0.4), 2.0 * dense.se(3)]
    basis = truncated_eigh(factors, level)
    assert full_sizes == [3]
    norm = assert_certified(factors, basis)
    assert basis.error <= 3.0 * level + 1e-12 * norm
    assert basis.ranks[0] < 25


def test_a_large_rough_factor_keeps_its_full_basis(full_sizes):
    factors = [matern12(450, 0.5), dense.se(2)]
    basis = truncated_eigh(factors, 1e-8)
    assert full_sizes == [450, 2]
    assert basis.is_full
    norm = assert_certified(factors, basis)
    assert basis.error <= 1e-8 + 1e-12 * norm


def test_a_large_rough_factor_may_be_cut_as_well(full_sizes):
    """Beyond a quarter of the size pivoted Cholesky gives up, and eigh is as exact as ever."""
    factors = [matern12(450, 0.5)]
    norm = two_norm(factors[0])
    basis = truncated_eigh(factors, 1e-3 * norm)
    assert full_sizes == [450]
    assert_certified(factors, basis)
    assert basis.error <= 1.1e-3 * norm
    assert basis.ranks[0] < 100


@pytest.mark.parametrize("size", [400, 401])
def test_at_the_switch(full_sizes, size):
    factors = [dense.se(size, 0.4)]
    basis = truncated_eigh(factors, 1e-8)
    assert full_sizes == ([400] if size == 400 else [])
    assert_certified(factors, basis)


def test_both_ways_agree(monkeypatch):
    factors = [dense.se(120, 0.3), dense.matern32(5)]
    by_eigh = truncated_eigh(factors, 1e-6)
    monkeypatch.setattr(truncated, "_MAX_FULL_SIZE", 100)
    by_cholesky = truncated_eigh(factors, 1e-6)
    assert by_eigh.ranks == by_cholesky.ranks
    assert two_norm(rebuilt(by_eigh) - rebuilt(by_cholesky)) <= by_eigh.error + by_cholesky.error
    torch.testing.assert_close(by_eigh.products, by_cholesky.products, rtol=0, atol=2e-6)


def test_the_difference_is_measured_in_chunks(monkeypatch):
    factors = [dense.se(37, 0.3)]
    whole = truncated_eigh(factors, 1e-2)
    monkeypatch.setattr(lowrank, "_CHUNK_NUMBERS", 100)  # two rows at a time
    assert truncated_eigh(factors, 1e-2).error == pytest.approx(whole.error, rel=1e-12)


def test_a_factor_that_serves_two_axes_is_decomposed_once(full_sizes):
    factor = dense.matern32(11)
    basis = truncated_eigh([factor, factor], 1e-8)
    assert full_sizes == [11]
    assert_certified([factor, factor], basis)


@pytest.mark.parametrize("step", [1, 2], ids=["leading block", "every other point"])
def test_factors_that_share_memory_are_not_mistaken_for_each_other(step):
    """Axes of different lengths may be given by views of one matrix, that begin at the same address."""
    matrix = torch.eye(8, dtype=torch.float64)
    part = matrix[:3, :3] if step == 1 else matrix[::2, ::2]
    basis = truncated_eigh([part, matrix], 1e-8)
    assert basis.shape == (len(part), 8), "the second factor was given the eigenvectors of the first"
    assert_certified([part, matrix], basis)
