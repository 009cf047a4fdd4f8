"""Low-rank eigen preconditioners, against the dense matrices they stand for."""

import math
from functools import reduce

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpytorch_gaps.linalg.eigen import kron_eigh, leading_products
from gpytorch_gaps.linalg.selection import ravel
from gpytorch_gaps.preconditioners import EigenPreconditioner, ShiftedEigenPreconditioner

examples = settings(max_examples=40)
EPS = torch.finfo(torch.float64).eps
SIZES = (4, 5)
INDICES = {
    "some": [0, 2, 3, 7, 8, 11, 14, 19],
    "all": list(range(20)),
    "unsorted": [13, 2, 19, 0, 5],
    "repeated": [3, 3, 7, 12, 3, 16, 7],
    "one": [6],
}


def kron(matrices):
    def pair(a, b):
        product = a[..., :, None, :, None] * b[..., None, :, None, :]
        return product.reshape(*product.shape[:-4], a.size(-2) * b.size(-2), a.size(-1) * b.size(-1))

    return reduce(pair, matrices)


def random_factors(sizes, batch=()):
    roots = [torch.randn(*batch, m, m, dtype=torch.float64) for m in sizes]
    return [root @ root.mT / m for root, m in zip(roots, sizes, strict=True)]


def squared_exponential(size, length):
    x = torch.linspace(0, 1, size, dtype=torch.float64)
    return torch.exp(-(((x[:, None] - x) / length) ** 2))


def basis(eigen, index, rank, largest=True):
    """``W Q S_p'`` and the p eigenvalues, by sorting all of them."""
    values, positions = leading_products(eigen.values, rank, largest)
    shape = tuple(value.size(-1) for value in eigen.values)
    return kron(eigen.vectors)[..., index, :][..., ravel(positions, shape)], values


def low_rank_plus_diagonal(columns, coefficients, diagonal):
    size = columns.size(-2)
    return columns * coefficients.unsqueeze(-2) @ columns.mT + torch.diag_embed(
        diagonal.expand(*diagonal.shape[:-1], size)
    )


def make(index, rank, per_point, batch=(), noise_batch=None, sizes=SIZES, seed=0):
    """An EigenPreconditioner, its columns, and its dense matrix."""
    torch.manual_seed(seed)
    eigen = kron_eigh(random_factors(sizes, batch))
    index = torch.tensor(index)
    noise_batch = batch if noise_batch is None else noise_batch
    noise = torch.rand(*noise_batch, len(index) if per_point else 1, dtype=torch.float64) + 0.1
    columns, values = basis(eigen, index, rank)
    preconditioner = EigenPreconditioner(eigen, index, noise, rank)
    return preconditioner, columns, low_rank_plus_diagonal(columns, values, noise)


CASES = pytest.mark.parametrize(
    ("index", "rank", "per_point", "batch", "noise_batch"),
    [
        (index, 6, per_point, batch, noise_batch)
        for per_point in (False, True)
        for index, batch, noise_batch in [
            *((index, (), ()) for index in INDICES),
            ("some", (3,), ()),
            ("unsorted", (), (3,)),
            ("repeated", (3,), (3,)),
            ("repeated", (2, 2), (2, 2)),
        ]
    ],
)


# -- eqn:IG_precon -----------------------------------------------------------------------------------------------------


@CASES
def test_product_solve_and_logdet_equal_the_dense_matrix(index, rank, per_point, batch, noise_batch):
    preconditioner, _, dense = make(INDICES[index], rank, per_point, batch, noise_batch)
    x = torch.randn(*dense.shape[:-1], 3, dtype=torch.float64)
    torch.testing.assert_close(preconditioner.matmul(x), dense @ x, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(preconditioner.solve(x), torch.linalg.solve(dense, x), rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(preconditioner.solve(preconditioner.matmul(x)), x, rtol=1e-10, atol=1e-11)
    logdet = preconditioner.logdet()
    assert logdet.shape == dense.shape[:-2]
    torch.testing.assert_close(logdet, torch.logdet(dense), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("per_point", [False, True])
@pytest.mark.parametrize("sizes", [(12,), (3, 4), (2, 3, 2), (2, 2, 3, 2)])
def test_any_number_of_axes(sizes, per_point):
    preconditioner, _, dense = make([1, 4, 5, 9, 10, 11], 4, per_point, sizes=sizes)
    x = torch.randn(6, 2, dtype=torch.float64)
    torch.testing.assert_close(preconditioner.matmul(x), dense @ x, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(preconditioner.solve(x), torch.linalg.solve(dense, x), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("per_point", [False, True])
@pytest.mark.parametrize("rank", [20, 21, 10**6])
def test_with_every_eigenvalue_it_is_the_matrix_itself(rank, per_point):
    torch.manual_seed(1)
    factors = random_factors(SIZES)
    index = torch.tensor(INDICES["some"])
    noise = torch.rand(len(index) if per_point else 1, dtype=torch.float64) + 0.1
    preconditioner = EigenPreconditioner(kron_eigh(factors), index, noise, rank)
    assert preconditioner.rank == 20
    dense = kron(factors)[index][:, index] + torch.diag(noise.expand(len(index)))
    x = torch.randn(len(index), 2, dtype=torch.float64)
    torch.testing.assert_close(preconditioner.matmul(x), dense @ x, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(preconditioner.solve(x), torch.linalg.solve(dense, x), rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(preconditioner.logdet(), torch.logdet(dense), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("per_point", [False, True])
def test_rank_deficient_factors(per_point):
    torch.manual_seed(2)
    root = torch.randn(4, 1, dtype=torch.float64)
    factors = [root @ root.mT, torch.ones(5, 5, dtype=torch.float64)]  # one eigenvalue, nineteen zeros
    index = torch.tensor(INDICES["some"])
    noise = torch.rand(len(index) if per_point else 1, dtype=torch.float64) + 0.1
    preconditioner = EigenPreconditioner(kron_eigh(factors), index, noise, 15)
    dense = kron(factors)[index][:, index] + torch.diag(noise.expand(len(index)))
    x = torch.randn(len(index), 2, dtype=torch.float64)
    torch.testing.assert_close(preconditioner.solve(x), torch.linalg.solve(dense, x), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(preconditioner.logdet(), torch.logdet(dense), rtol=1e-11, atol=1e-11)


@examples
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple),
    st.integers(1, 30),
    st.booleans(),
    st.data(),
    st.integers(0, 10**6),
)
def test_solve_undoes_the_product(sizes, rank, per_point, data, seed):
    cells = math.prod(sizes)
    index = data.draw(st.lists(st.integers(0, cells - 1), min_size=1, max_size=cells + 2))
    preconditioner, _, dense = make(index, min(rank, cells), per_point, sizes=sizes, seed=seed)
    x = torch.randn(len(index), 2, dtype=torch.float64)
    torch.testing.assert_close(preconditioner.solve(preconditioner.matmul(x)), x, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(preconditioner.matmul(preconditioner.solve(x)), x, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(preconditioner.logdet(), torch.logdet(dense), rtol=1e-9, atol=1e-9)


def test_columns_are_projected_and_expanded():
    preconditioner, columns, _ = make(INDICES["repeated"], 6, True, (2,))
    x, c = torch.randn(2, 7, 3, dtype=torch.float64), torch.randn(2, 6, 3, dtype=torch.float64)
    torch.testing.assert_close(preconditioner.project(x), columns.mT @ x, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(preconditioner.expand(c), columns @ c, rtol=1e-12, atol=1e-12)


def test_coefficients_are_products_of_the_eigenvalues_in_use():
    torch.manual_seed(3)
    eigen = kron_eigh(random_factors(SIZES, (2,)))
    preconditioner = EigenPreconditioner(eigen, torch.arange(20), torch.ones(1, dtype=torch.float64), 7)
    used = [values[..., columns] for values, columns in zip(eigen.values, preconditioner.columns, strict=True)]
    torch.testing.assert_close(preconditioner.product_of(used), preconditioner.coefficients, rtol=1e-14, atol=0)


@pytest.mark.parametrize("kind", [EigenPreconditioner, ShiftedEigenPreconditioner])
def test_single_precision_in_single_precision_out(kind):
    torch.manual_seed(4)
    eigen = kron_eigh(random_factors(SIZES))
    preconditioner = kind(eigen, torch.tensor(INDICES["some"]), torch.tensor([0.3], dtype=torch.float32), 5)
    x = torch.randn(8, 2, dtype=torch.float32)
    for apply in (preconditioner.solve, preconditioner.matmul):
        single, double = apply(x), apply(x.double())
        assert single.dtype == torch.float32
        assert double.dtype == torch.float64
        assert torch.equal(single, double.float())  # worked out in float64 either way


# -- derivatives of the log-determinant --------------------------------------------------------------------------------


@CASES
def test_logdet_gradients_equal_dense_autograd(index, rank, per_point, batch, noise_batch):
    preconditioner, columns, _ = make(INDICES[index], rank, per_point, batch, noise_batch)
    coefficients = preconditioner.coefficients.clone().requires_grad_(True)
    diagonal = preconditioner.diagonal.clone().requires_grad_(True)
    weight = torch.randn(torch.broadcast_shapes(batch, noise_batch), dtype=torch.float64)
    own = torch.autograd.grad((weight * preconditioner.logdet(coefficients, diagonal)).sum(), (coefficients, diagonal))
    dense = low_rank_plus_diagonal(columns, coefficients, diagonal)
    expected = torch.autograd.grad((weight * torch.logdet(dense)).sum(), (coefficients, diagonal))
    for mine, theirs in zip(own, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("per_point", [False, True])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_logdet_passes_gradcheck(per_point, batch):
    preconditioner, _, _ = make(INDICES["repeated"], 4, per_point, batch)
    coefficients = preconditioner.coefficients.clone().requires_grad_(True)
    diagonal = preconditioner.diagonal.clone().requires_grad_(True)
    assert torch.autograd.gradcheck(preconditioner.logdet, (coefficients, diagonal))


def test_logdet_is_differentiable_in_one_argument_alone():
    preconditioner, columns, _ = make(INDICES["some"], 4, True)
    diagonal = preconditioner.diagonal.clone().requires_grad_(True)
    (own,) = torch.autograd.grad(preconditioner.logdet(diagonal=diagonal), diagonal)
    dense = low_rank_plus_diagonal(columns, preconditioner.coefficients, diagonal)
    torch.testing.assert_close(own, torch.linalg.inv(dense).diagonal().detach(), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("per_point", [False, True])
@pytest.mark.parametrize("small", [1e-10, 1e-40, 1e-140, 0.0])
def test_logdet_keeps_the_derivative_of_vanishing_coefficients(small, per_point):
    """``d log|P| / dc = f' P^-1 f`` whatever c: it is the same at zero as just above."""
    preconditioner, columns, _ = make(INDICES["some"], 6, per_point)
    coefficients = preconditioner.coefficients.clone()
    coefficients[3:] = small
    dense = low_rank_plus_diagonal(columns, coefficients, preconditioner.diagonal)
    expected = (columns * torch.linalg.solve(dense, columns)).sum(0)
    coefficients.requires_grad_(True)
    (own,) = torch.autograd.grad(preconditioner.logdet(coefficients), coefficients)
    torch.testing.assert_close(own, expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("per_point", [False, True])
@pytest.mark.parametrize("argument", ["coefficients", "diagonal"])
def test_logdet_of_given_values_does_not_depend_on_who_asks_for_gradients(argument, per_point):
    preconditioner, columns, _ = make(INDICES["some"], 4, per_point)
    given = {"coefficients": preconditioner.coefficients, "diagonal": preconditioner.diagonal}
    given[argument] = 2.0 * given[argument]
    expected = torch.logdet(low_rank_plus_diagonal(columns, **given))
    leaf = given[argument].clone().requires_grad_(True)
    torch.testing.assert_close(preconditioner.logdet(**{argument: leaf}).detach(), expected, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(preconditioner.logdet(**{argument: leaf}), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(preconditioner.logdet(**{argument: given[argument]}), expected, rtol=1e-12, atol=1e-12)


# -- how accurate, for a large ratio of eigenvalue to noise ------------------------------------------------------------


@pytest.mark.parametrize("exponent", [4, 8, 12])
def test_accuracy_falls_with_the_ratio_of_eigenvalue_to_noise(exponent):
    """Without gaps ``P = Q (T_p + s2) Q'``, so that its inverse and log-determinant are known to the last digits.

    The inversion lemma subtracts numbers of size 1 / s2 whose difference is 1 / (lambda + s2): relative to x it leaves
    about ``ratio * 1e-16``, whereas the log-determinant keeps its digits.
    """
    torch.manual_seed(5)
    eigen = kron_eigh([squared_exponential(12, 0.4), squared_exponential(10, 0.5)])
    largest = float(eigen.products.max())
    noise = torch.tensor([largest / 10.0**exponent], dtype=torch.float64)
    preconditioner = EigenPreconditioner(eigen, torch.arange(120), noise, 40)
    columns, values = basis(eigen, torch.arange(120), 40)
    y = torch.randn(120, 3, dtype=torch.float64)
    x = preconditioner.matmul(y)
    error = float((preconditioner.matmul(preconditioner.solve(x)) - x).norm() / x.norm())
    assert error <= 10 * EPS * 10.0**exponent
    # on the whole of the spectrum: (P^-1 x) by its eigenvectors
    inside = columns.mT @ x
    exact = columns @ (inside / (values + noise).unsqueeze(-1)) + (x - columns @ inside) / noise
    assert float((preconditioner.solve(x) - exact).norm() / exact.norm()) <= 20 * EPS * 10.0**exponent
    logdet = (values + noise).log().sum() + 80 * noise.log().sum()
    assert float(preconditioner.logdet()) == pytest.approx(float(logdet), rel=1e-10)


@pytest.mark.parametrize("exponent", [6, 8, 10, 12, 13])
def test_one_column_after_the_other_the_inverse_stays_an_inverse(exponent):
    """The spectrum of ``P^(1/2) P^-1 P^(1/2)``, where half the grid is a gap and the Gram matrix is singular.

    The Cholesky factor of the core leaves some ``eps ratio``; its explicit inverse left ``eps ratio^2``, and from 1e9
    on a matrix with large eigenvalues of either sign.
    """
    x = torch.linspace(0, 1, 12, dtype=torch.float64)
    scaled = (x[:, None] - x).abs() * math.sqrt(3) / 0.4
    eigen = kron_eigh([(1.0 + scaled) * torch.exp(-scaled)] * 2)
    noise = eigen.products.max().reshape(1) / 10.0**exponent
    preconditioner = EigenPreconditioner(eigen, torch.arange(72), noise, 120)
    eye = torch.eye(72, dtype=torch.float64)
    inverse = torch.cat([preconditioner.solve(column) for column in eye.split(1, -1)], -1)
    root = torch.linalg.cholesky(preconditioner.matmul(eye))
    spectrum = torch.linalg.eigvalsh(root.mT @ (0.5 * (inverse + inverse.mT)) @ root)
    assert float((spectrum - 1.0).abs().max()) <= 100 * EPS * 10.0**exponent


@pytest.mark.parametrize("exponent", [15, 17, 20])
@pytest.mark.parametrize("per_point", [False, True])
def test_a_diagonal_below_rounding_is_raised(exponent, per_point):
    """The preconditioner is then of a larger diagonal, and its inverse and log-determinant are those of that."""
    torch.manual_seed(6)
    eigen = kron_eigh([squared_exponential(12, 0.4), squared_exponential(10, 0.5)])
    index = torch.randperm(120)[:70]
    noise = (eigen.products.max() / 10.0**exponent).expand(70 if per_point else 1)
    preconditioner = EigenPreconditioner(eigen, index, noise, 70)
    dense = preconditioner.matmul(torch.eye(70, dtype=torch.float64))
    columns, values = basis(eigen, index, 70)
    raised = low_rank_plus_diagonal(columns, values, noise + preconditioner.added)
    torch.testing.assert_close(dense, raised, rtol=1e-12, atol=1e-12)
    assert float(preconditioner.diagonal.min()) >= 1e-14 * float(values.max())
    assert preconditioner.left_over >= 1.0  # no longer the matrix it stands for
    torch.testing.assert_close(preconditioner.logdet(), torch.linalg.slogdet(raised)[1], rtol=1e-4, atol=0)
    inverse = preconditioner.solve(torch.eye(70, dtype=torch.float64))
    assert float((inverse @ dense).diagonal().sub(1.0).abs().max()) < 0.5


def test_a_preconditioner_without_a_factor_names_the_noise():
    eigen = kron_eigh([squared_exponential(5, 0.4)])
    with pytest.raises(ValueError, match="noise: too small for a preconditioner: 3 eigenvectors"):
        EigenPreconditioner(eigen, torch.arange(5), torch.tensor([math.nan], dtype=torch.float64), 3)


# -- with the trace of the matrix --------------------------------------------------------------------------------------


def prescribed(size, spectrum, seed):
    """A symmetric matrix with these eigenvalues and random eigenvectors."""
    q, _ = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))
    return q * spectrum @ q.mT


@examples
@given(st.integers(1, 40), st.floats(0.0, 6.0), st.floats(-9.0, 0.0), st.booleans(), st.integers(0, 10**6))
def test_condition_with_the_trace_is_bounded_whatever_the_spectrum(rank, decades, noise, gappy, seed):
    """``cond(P^-1 A) <= (l + s2) / (m + s2) (1 + m / a)``: never worse than ``1 + l / s2``, and some ``2 l / a``."""
    sizes, noise = (6, 7), torch.tensor([10.0**noise], dtype=torch.float64)
    factors = [
        prescribed(size, torch.logspace(-decades / 2, 0, size, dtype=torch.float64), seed + size) for size in sizes
    ]
    index = torch.randperm(42, generator=torch.Generator().manual_seed(seed))[: 25 if gappy else 42]
    kernel = kron(factors)[index][:, index]
    matrix = kernel + noise * torch.eye(len(index), dtype=torch.float64)
    preconditioner = EigenPreconditioner(kron_eigh(factors), index, noise, rank, trace=kernel.trace())
    dense = preconditioner.matmul(torch.eye(len(index), dtype=torch.float64))
    torch.testing.assert_close(dense.trace(), matrix.trace(), rtol=1e-10, atol=1e-10)
    root = torch.linalg.inv(torch.linalg.cholesky(dense))
    found = torch.linalg.eigvalsh(root @ matrix @ root.mT)
    left = kron_eigh(factors).products.sort(descending=True).values[rank]
    added, least = preconditioner.added, torch.linalg.eigvalsh(matrix)[0]
    bound = float((left + noise) / (added + noise) * (1.0 + added / least))
    assert float(found[-1] / found[0]) <= bound * (1.0 + 1e-5)
    assert bound <= (1.0 + float(left / noise)) * (1.0 + 1e-5)


def test_solves_stay_positive_definite_at_a_ratio_of_1e12():
    torch.manual_seed(6)
    eigen = kron_eigh([squared_exponential(12, 0.4), squared_exponential(10, 0.5)])
    noise = eigen.products.max().reshape(1) * 1e-12
    preconditioner = EigenPreconditioner(eigen, torch.randperm(120)[:70], noise, 40)
    inverse = preconditioner.solve(torch.eye(70, dtype=torch.float64))
    torch.testing.assert_close(inverse, inverse.mT, rtol=0, atol=1e-12 * float(inverse.abs().max()))
    assert float(torch.linalg.eigvalsh(0.5 * (inverse + inverse.mT))[0]) > 0


# -- eqn:FG_precon -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 7, 20, 50])
@pytest.mark.parametrize("batches", [((), ()), ((3,), (3,)), ((), (3,)), ((3,), ())])
@pytest.mark.parametrize("index", ["some", "all", "unsorted", "one"])
def test_shifted_equals_the_dense_matrix(index, batches, rank):
    torch.manual_seed(7)
    batch, noise_batch = batches
    eigen = kron_eigh(random_factors(SIZES, batch))
    gaps = torch.tensor(INDICES[index])
    noise = torch.rand(*noise_batch, 1, dtype=torch.float64) + 0.1
    preconditioner = ShiftedEigenPreconditioner(eigen, gaps, noise, rank)
    columns, values = basis(eigen, gaps, min(rank, 20), largest=False)
    # 0 < zeta < 1 / (lambda_p + s2), lambda_p the largest of the p smallest
    ceiling = 1.0 / (values.max(-1, keepdim=True).values + noise)
    shift = preconditioner.shift
    assert bool((shift > 0).all())
    assert bool((shift < ceiling).all())
    dense = low_rank_plus_diagonal(columns, 1.0 / (values + noise) - shift, shift)
    assert bool((torch.linalg.eigvalsh(dense) > 0).all())
    x = torch.randn(*dense.shape[:-1], 2, dtype=torch.float64)
    torch.testing.assert_close(preconditioner.matmul(x), dense @ x, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(preconditioner.solve(x), torch.linalg.solve(dense, x), rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(preconditioner.logdet(), torch.logdet(dense), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("batch", [(), (2,)])
def test_shifted_with_every_eigenvalue_is_the_fill_gaps_matrix(batch):
    torch.manual_seed(8)
    factors = random_factors(SIZES, batch)
    gaps = torch.tensor(INDICES["some"])
    noise = torch.tensor([0.2], dtype=torch.float64)
    preconditioner = ShiftedEigenPreconditioner(kron_eigh(factors), gaps, noise, 20)
    inverse = torch.linalg.inv(kron(factors) + 0.2 * torch.eye(20, dtype=torch.float64))[..., gaps, :][..., gaps]
    x = torch.randn(*batch, 8, 2, dtype=torch.float64)
    torch.testing.assert_close(preconditioner.matmul(x), inverse @ x, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(preconditioner.solve(x), torch.linalg.solve(inverse, x), rtol=1e-9, atol=1e-10)


def test_shifted_keeps_the_p_smallest_eigenvalues_apart():
    """On the whole grid the eigenvalues of P are 1 / (lambda + s2) for the p smallest lambda, and zeta for the rest."""
    torch.manual_seed(9)
    eigen = kron_eigh(random_factors(SIZES))
    noise = torch.tensor([0.1], dtype=torch.float64)
    preconditioner = ShiftedEigenPreconditioner(eigen, torch.arange(20), noise, 6)
    spectrum = torch.linalg.eigvalsh(preconditioner.matmul(torch.eye(20, dtype=torch.float64)))
    smallest = eigen.products.sort().values[:6]
    expected = torch.cat([preconditioner.shift.expand(14), (1.0 / (smallest + noise)).flip(0)])
    torch.testing.assert_close(spectrum, expected, rtol=1e-11, atol=0)
