"""Eigen-decomposition of a Kronecker product, against dense algebra and brute-force sorting."""

import math
from functools import reduce

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpytorch_gaps.linalg.eigen import KroneckerEigen, kron_eigh, leading_products
from gpytorch_gaps.linalg.products import kron_diagonal
from gpytorch_gaps.linalg.selection import ravel
from gpytorch_gaps.preconditioners import EigenPreconditioner, ShiftedEigenPreconditioner

examples = settings(max_examples=150)
EPS = torch.finfo(torch.float64).eps


def kron(matrices):
    def pair(a, b):
        product = a[..., :, None, :, None] * b[..., None, :, None, :]
        return product.reshape(*product.shape[:-4], a.size(-2) * b.size(-2), a.size(-1) * b.size(-1))

    return reduce(pair, matrices)


def random_factors(sizes, batch=(), dtype=torch.float64):
    roots = [torch.randn(*batch, m, m, dtype=torch.float64) for m in sizes]
    return [(root @ root.mT / m).to(dtype) for root, m in zip(roots, sizes, strict=True)]


def matern12(size, length):
    x = torch.linspace(0, 1, size, dtype=torch.float64)
    return torch.exp(-(x[:, None] - x).abs() / length)


# -- kron_eigh ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch", [(), (3,), (2, 2)])
@pytest.mark.parametrize("sizes", [(1,), (6,), (5, 4), (3, 1, 4), (2, 3, 2, 3)])
def test_every_factor_is_rebuilt_in_float64(sizes, batch, dtype):
    torch.manual_seed(0)
    factors = random_factors(sizes, batch, dtype)
    eigen = kron_eigh(factors)
    for factor, vectors, values in zip(factors, eigen.vectors, eigen.values, strict=True):
        assert vectors.dtype == values.dtype == torch.float64
        assert vectors.shape == factor.shape
        assert values.shape == factor.shape[:-1]
        assert bool((values >= 0).all())
        assert bool((values.diff(dim=-1) >= 0).all())
        # a float32 factor is decomposed as the float64 matrix it holds; only its rounding below zero is cut off
        tolerance = 1e-13 if dtype == torch.float64 else 1e-6
        rebuilt = vectors * values.unsqueeze(-2) @ vectors.mT
        torch.testing.assert_close(rebuilt, factor.double(), rtol=tolerance, atol=tolerance)
        gram = vectors.mT @ vectors
        torch.testing.assert_close(gram, torch.eye(vectors.size(-1)).double().expand_as(gram), rtol=0, atol=1e-13)


def test_float32_factors_lose_nothing_beyond_their_own_rounding():
    factor = matern12(20, 0.3).float()  # positive definite in float32 as well
    eigen = kron_eigh([factor])
    rebuilt = eigen.vectors[0] * eigen.values[0] @ eigen.vectors[0].mT
    torch.testing.assert_close(rebuilt, factor.double(), rtol=0, atol=1e-13)


def test_the_symmetric_part_is_decomposed():
    torch.manual_seed(1)
    (factor,) = random_factors((5,))
    skew = torch.randn(5, 5, dtype=torch.float64) * 1e-3
    eigen = kron_eigh([factor + skew - skew.mT])
    rebuilt = eigen.vectors[0] * eigen.values[0] @ eigen.vectors[0].mT
    torch.testing.assert_close(rebuilt, factor, rtol=1e-13, atol=1e-13)


def test_eigenvalues_that_rounding_made_negative_are_zero():
    x = torch.linspace(0, 1, 60, dtype=torch.float64)
    factor = torch.exp(-((x[:, None] - x) ** 2))
    assert float(torch.linalg.eigvalsh(factor)[0]) < 0  # or this test shows nothing
    (values,) = kron_eigh([factor]).values
    assert float(values.min()) == 0.0
    assert float(values.max()) == pytest.approx(float(torch.linalg.eigvalsh(factor)[-1]), rel=1e-14)


def test_no_gradient_passes_through():
    factors = [factor.requires_grad_(True) for factor in random_factors((3, 2))]
    eigen = kron_eigh(factors)
    assert not any(tensor.requires_grad for tensor in (*eigen.vectors, *eigen.values))


@pytest.mark.parametrize("batch", [(), (3,)])
def test_products_are_the_eigenvalues_of_the_product(batch):
    torch.manual_seed(2)
    factors = random_factors((3, 4, 2), batch)
    eigen = kron_eigh(factors)
    dense = kron(factors)
    basis = kron(eigen.vectors)
    torch.testing.assert_close(basis * eigen.products.unsqueeze(-2) @ basis.mT, dense, rtol=1e-12, atol=1e-12)
    values = eigen.products.sort(-1).values
    torch.testing.assert_close(values, torch.linalg.eigvalsh(dense), rtol=1e-11, atol=1e-12)


def test_casting_keeps_the_decomposition():
    torch.manual_seed(3)
    eigen = kron_eigh(random_factors((3, 4)))
    assert eigen.to(torch.float64) is eigen
    single = eigen.to(torch.float32)
    assert single.vectors[0].dtype == single.products.dtype == torch.float32
    torch.testing.assert_close(single.products.double(), eigen.products, rtol=1e-6, atol=0)


# -- shifted_solve -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise_batch", [False, True])
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
@pytest.mark.parametrize("sizes", [(7,), (4, 5), (3, 2, 4), (2, 3, 2, 2)])
def test_shifted_solve_equals_the_dense_inverse(sizes, batch, noise_batch):
    torch.manual_seed(4)
    factors = random_factors(sizes, batch)
    noise = torch.rand(*(batch if noise_batch else ()), 1, dtype=torch.float64) + 0.1
    x = torch.randn(*batch, math.prod(sizes), 3, dtype=torch.float64)
    dense = kron(factors)
    dense = dense + noise.unsqueeze(-1) * torch.eye(dense.size(-1), dtype=torch.float64)
    torch.testing.assert_close(
        kron_eigh(factors).shifted_solve(noise, x), torch.linalg.solve(dense, x), rtol=1e-11, atol=1e-12
    )


def test_shifted_solve_with_repeated_eigenvalues():
    torch.manual_seed(5)
    circulant = torch.tensor([[2.0, 1.0, 0.0, 1.0], [1.0, 2.0, 1.0, 0.0], [0.0, 1.0, 2.0, 1.0], [1.0, 0.0, 1.0, 2.0]])
    factors = [torch.eye(3).double(), circulant.double(), torch.full((2, 2), 0.5).double()]
    x = torch.randn(24, 2, dtype=torch.float64)
    noise = torch.tensor([0.01], dtype=torch.float64)
    dense = kron(factors) + 0.01 * torch.eye(24, dtype=torch.float64)
    torch.testing.assert_close(
        kron_eigh(factors).shifted_solve(noise, x), torch.linalg.solve(dense, x), rtol=1e-11, atol=1e-11
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shifted_solve_keeps_the_precision_of_its_eigenvectors(dtype):
    torch.manual_seed(6)
    factors = random_factors((4, 3))
    x = torch.randn(12, 1, dtype=dtype)
    solution = kron_eigh(factors).to(dtype).shifted_solve(torch.tensor([0.5], dtype=dtype), x)
    assert solution.dtype == dtype
    expected = torch.linalg.solve(kron(factors) + 0.5 * torch.eye(12).double(), x.double())
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(solution.double(), expected, rtol=tolerance, atol=tolerance)


# -- leading_products --------------------------------------------------------------------------------------------------

ENTRIES = st.sampled_from([0.0, 1e-12, 0.25, 0.5, 1.0, 1.0, 2.0, 3.0]) | st.floats(0.0, 100.0)
AXES = st.lists(st.lists(ENTRIES, min_size=1, max_size=6), min_size=1, max_size=4)


@examples
@given(AXES, st.integers(1, 1300), st.booleans())
def test_leading_products_equal_a_sort_of_all_products(axes, count, largest):
    values = [torch.tensor(axis, dtype=torch.float64) for axis in axes]
    shape = tuple(len(axis) for axis in axes)
    selected, positions = leading_products(values, count, largest)
    everything = kron_diagonal(values)
    assert positions.shape == (len(axes), min(count, len(everything)))
    # rounded products are monotone in their factors, so that even the last bit agrees
    assert torch.equal(selected, everything.sort(descending=largest).values[:count])
    cells = ravel(positions, shape)
    assert torch.equal(everything[cells], selected)
    assert len(cells.unique()) == len(cells)


@examples
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.sampled_from([(1,), (2,), (3,), (2, 2)]),
    st.integers(1, 40),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_a_batch_shares_the_choice_of_its_geometric_mean(sizes, batch, count, largest, seed):
    generator = torch.Generator().manual_seed(seed)
    values = [torch.rand(*batch, m, generator=generator, dtype=torch.float64) * 5 + 1e-3 for m in sizes]
    selected, positions = leading_products(values, count, largest)
    everything = kron_diagonal(values)  # shape: (*batch, M)
    cells = ravel(positions, tuple(sizes))
    assert len(cells.unique()) == len(cells) == min(count, everything.size(-1))
    # what each member has at the shared cells
    torch.testing.assert_close(selected, everything[..., cells], rtol=1e-14, atol=0)
    mean = everything.log().reshape(-1, everything.size(-1)).mean(0)
    expected = mean.sort(descending=largest).values[:count]
    torch.testing.assert_close(mean[cells], expected, rtol=1e-12, atol=1e-12)


def test_one_axis_may_be_batched_and_the_other_not():
    values = [torch.tensor([[1.0, 4.0], [9.0, 1.0]]), torch.tensor([1.0, 10.0, 0.1])]
    selected, positions = leading_products(values, 2)  # geometric means 3 and 2
    assert positions.tolist() == [[0, 1], [1, 1]]
    assert selected.tolist() == [[10.0, 40.0], [90.0, 10.0]]


def test_rounding_to_zero_in_one_member_costs_another_nothing():
    """Eigenvalues below rounding are zero or 1e-17 by chance; a batch must not choose by that chance."""
    smooth = torch.tensor([1.0, 0.0, 1e-17], dtype=torch.float64)
    rough = torch.tensor([1.0, 0.9, 1e-3], dtype=torch.float64)
    _, positions = leading_products([torch.stack([smooth, rough])], 2)
    assert sorted(positions[0].tolist()) == [0, 1]


class Largest(TorchDispatchMode):
    """Remembers how many numbers the largest tensor has that an operation returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.numel = max(self.numel, *(leaf.numel() for leaf in tree_leaves(result) if torch.is_tensor(leaf)), 0)
        return result


@pytest.mark.parametrize("largest", [True, False])
def test_eight_billion_products_are_never_formed(largest):
    torch.manual_seed(7)
    values = [torch.rand(2000, dtype=torch.float64) for _ in range(3)]
    with Largest() as made:
        selected, positions = leading_products(values, 50, largest)
    assert made.numel <= 2000  # of 8e9, which would take 64 GB
    # an entry among the best 50 has a position among the best 50 of every axis
    best = [value.sort(descending=largest).values[:50] for value in values]
    expected = kron_diagonal(best).sort(descending=largest).values[:50]
    assert torch.equal(selected, expected)
    again = values[0][positions[0]] * values[1][positions[1]] * values[2][positions[2]]
    assert torch.equal(again, selected)


@pytest.mark.parametrize("preconditioner", [EigenPreconditioner, ShiftedEigenPreconditioner])
def test_a_preconditioner_does_not_form_all_products(preconditioner):
    """The M eigenvalues of the product are never all formed when only the p largest are wanted."""
    eigen = kron_eigh(random_factors((4, 3)))
    preconditioner(eigen, torch.arange(6), torch.tensor([0.1], dtype=torch.float64), 3)
    assert "products" not in vars(eigen)  # where a cached_property keeps them


def test_no_entries_asked_for():
    selected, positions = leading_products([torch.ones(3), torch.ones(2)], 0)
    assert selected.shape == (0,)
    assert positions.shape == (2, 0)


@pytest.mark.parametrize("largest", [True, False])
def test_all_equal_entries_are_all_found(largest):
    values = [torch.ones(4, dtype=torch.float64), torch.ones(3, dtype=torch.float64)]
    selected, positions = leading_products(values, 12, largest)
    assert selected.tolist() == [1.0] * 12
    assert ravel(positions, (4, 3)).unique().tolist() == list(range(12))


def test_a_decomposition_is_immutable():
    eigen = KroneckerEigen((torch.eye(2),), (torch.ones(2),))
    with pytest.raises(AttributeError):
        eigen.values = ()
