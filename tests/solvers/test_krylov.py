"""Conjugate gradients on matrices with prescribed spectra: iterations, products, residuals and Lanczos matrices."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpytorch_gaps.solvers.krylov import conjugate_gradients

examples = settings(max_examples=40)


def with_spectrum(eigenvalues, seed=0):
    """A symmetric matrix with these eigenvalues and random eigenvectors, and the eigenvectors."""
    eigenvalues = torch.as_tensor(eigenvalues, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    size = eigenvalues.size(-1)
    vectors = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q
    matrix = vectors * eigenvalues @ vectors.mT
    return 0.5 * (matrix + matrix.mT), vectors


def until(rhs, tolerance):
    """Stops when every column has this relative residual; zero columns are solved."""
    return lambda residual: bool((residual.norm(dim=-2) <= tolerance * rhs.norm(dim=-2)).all())


def never(residual):
    return False


def normal(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Counted:
    """A product that counts how often it was asked for."""

    def __init__(self, matrix):
        self.matrix, self.calls = matrix, 0

    def __call__(self, x):
        self.calls += 1
        return self.matrix @ x


# -- iterations, products, residuals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("distinct", [[3.0], [1.0, 4.0], [1.0, 2.0, 7.0], [0.5, 1.0, 3.0, 9.0, 20.0], [0.1, 1.0, 10.0]])
def test_as_many_iterations_as_distinct_eigenvalues(distinct):
    spectrum = torch.tensor(distinct, dtype=torch.float64).repeat(8)
    matrix, _ = with_spectrum(spectrum)
    rhs, product = normal(len(spectrum), 3), Counted(matrix)
    x, iterations, tridiagonal = conjugate_gradients(product, rhs, stop=until(rhs, 1e-9), max_iterations=100)
    assert iterations == len(distinct)
    assert product.calls == iterations
    assert tridiagonal is None
    torch.testing.assert_close(matrix @ x, rhs, rtol=0, atol=1e-8)


@pytest.mark.parametrize("stop_after", [1, 2, 5, 11, 12, 30])
def test_no_product_is_made_after_the_stop(stop_after):
    matrix, _ = with_spectrum(torch.logspace(0, 4, 60))
    product, seen = Counted(matrix), []

    def stop(residual):
        seen.append(product.calls)
        return len(seen) == stop_after

    _, iterations, _ = conjugate_gradients(product, normal(60, 2), stop=stop, max_iterations=500)
    assert iterations == product.calls == stop_after
    assert seen == list(range(1, stop_after + 1))  # asked once after every product


@pytest.mark.parametrize("budget", [1, 2, 10, 11, 12, 25])
def test_the_budget_is_kept(budget):
    matrix, _ = with_spectrum(torch.logspace(0, 6, 80))
    product = Counted(matrix)
    _, iterations, _ = conjugate_gradients(product, normal(80, 2), stop=never, max_iterations=budget)
    assert iterations == product.calls == budget


@pytest.mark.parametrize("preconditioned", [False, True])
@pytest.mark.parametrize("budget", [1, 3, 7, 15])
def test_the_residual_shown_is_that_of_the_solution_returned(budget, preconditioned):
    matrix, _ = with_spectrum(torch.logspace(0, 2, 30))
    rhs = normal(30, 3) * torch.tensor([1e-8, 1.0, 1e8])
    shown = []
    x, _, _ = conjugate_gradients(
        lambda v: matrix @ v,
        rhs,
        stop=lambda residual: shown.append(residual.clone()) or False,
        max_iterations=budget,
        precondition=(lambda r: r / matrix.diagonal().unsqueeze(-1)) if preconditioned else None,
    )
    assert len(shown) == budget
    true = rhs - matrix @ x
    assert bool(((shown[-1] - true).norm(dim=-2) <= 1e-13 * rhs.norm(dim=-2)).all())
    assert bool((true.norm(dim=-2) > 1e-9 * rhs.norm(dim=-2)).all())  # far above the rounding it is compared within


def test_the_solution_at_the_stop_contains_the_last_step():
    matrix, _ = with_spectrum(torch.logspace(0, 2, 30))
    rhs, shown = normal(30, 1), []
    stop = lambda residual: shown.append(residual.clone()) or len(shown) == 6  # noqa: E731
    x, _, _ = conjugate_gradients(lambda v: matrix @ v, rhs, stop=stop, max_iterations=100)
    torch.testing.assert_close(shown[-1], rhs - matrix @ x, rtol=0, atol=1e-13)


def test_zero_right_hand_sides_stay_zero():
    matrix, _ = with_spectrum(torch.linspace(1, 5, 20))
    rhs = normal(20, 3)
    rhs[:, 1] = 0
    x, iterations, _ = conjugate_gradients(lambda v: matrix @ v, rhs, stop=until(rhs, 1e-11), max_iterations=100)
    assert torch.equal(x[:, 1], torch.zeros(20, dtype=torch.float64))
    torch.testing.assert_close(matrix @ x, rhs, rtol=0, atol=1e-9)
    nothing, few, _ = conjugate_gradients(
        lambda v: matrix @ v, torch.zeros_like(rhs), stop=until(torch.zeros_like(rhs), 1e-11), max_iterations=100
    )
    assert torch.equal(nothing, torch.zeros_like(rhs))
    assert few <= 1 < iterations


@pytest.mark.parametrize("preconditioned", [False, True])
def test_columns_of_any_scale_all_converge(preconditioned):
    matrix, _ = with_spectrum(torch.logspace(0, 3, 40))
    scales = torch.logspace(-8, 8, 9, dtype=torch.float64)
    rhs = normal(40, 9) * scales
    x, _, _ = conjugate_gradients(
        lambda v: matrix @ v,
        rhs,
        stop=until(rhs, 1e-10),
        max_iterations=500,
        precondition=(lambda r: r / matrix.diagonal().unsqueeze(-1)) if preconditioned else None,
    )
    relative = (rhs - matrix @ x).norm(dim=-2) / rhs.norm(dim=-2)
    assert float(relative.max()) <= 2e-10


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1.0, 1e15, 1e25])
def test_float32_columns_of_any_scale(scale):
    """Squares of 1e-30 and 1e25 are not float32 numbers, but the columns themselves are."""
    matrix = with_spectrum(torch.linspace(1, 5, 20))[0].float()
    rhs = (normal(20, 2) * scale).float()
    largest = rhs.abs().amax(-2)
    x, _, _ = conjugate_gradients(
        lambda v: matrix @ v,
        rhs,
        stop=lambda residual: bool((residual.abs().amax(-2) <= 1e-5 * largest).all()),
        max_iterations=100,
    )
    error = (rhs.double() - matrix.double() @ x.double()).abs().amax(-2) / largest.double()
    assert float(error.max()) <= 3e-5


def test_a_column_is_not_called_solved_because_the_others_are():
    matrix, vectors = with_spectrum(torch.logspace(0, 4, 50))
    rhs = torch.cat([vectors[:, :1].expand(-1, 30), normal(50, 1)], -1)  # thirty eigenvectors, one hard column
    x, iterations, _ = conjugate_gradients(lambda v: matrix @ v, rhs, stop=until(rhs, 1e-8), max_iterations=2000)
    relative = (rhs - matrix @ x).norm(dim=-2) / rhs.norm(dim=-2)
    assert float(relative[-1]) <= 1e-7
    assert iterations > 20


@pytest.mark.parametrize("batch", [(2,), (2, 3)])
def test_batches_equal_their_members(batch):
    members = [with_spectrum(torch.linspace(1, 3 + k, 25), seed=k)[0] for k in range(6)]
    count = torch.Size(batch).numel()
    matrix = torch.stack(members[:count]).reshape(*batch, 25, 25)
    rhs, product = normal(*batch, 25, 2), Counted(matrix)
    x, iterations, _ = conjugate_gradients(product, rhs, stop=until(rhs, 1e-12), max_iterations=200)
    assert product.calls == iterations
    torch.testing.assert_close(x, torch.linalg.solve(matrix, rhs), rtol=1e-9, atol=1e-11)


def test_the_exact_inverse_takes_one_iteration():
    matrix, _ = with_spectrum(torch.logspace(0, 5, 40))
    inverse = torch.linalg.inv(matrix)
    rhs, product = normal(40, 3), Counted(matrix)
    x, iterations, _ = conjugate_gradients(
        product, rhs, stop=until(rhs, 1e-8), max_iterations=50, precondition=lambda r: inverse @ r
    )
    assert iterations == product.calls == 1
    torch.testing.assert_close(matrix @ x, rhs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("outliers", [1, 3, 6])
def test_a_preconditioner_that_removes_all_but_k_outliers_takes_k_plus_one(outliers):
    spectrum = torch.cat([torch.logspace(1, 2, outliers, dtype=torch.float64), torch.ones(40, dtype=torch.float64)])
    matrix, _ = with_spectrum(spectrum)
    scaling = torch.logspace(-2, 2, len(spectrum), dtype=torch.float64)  # P = S, A = S^1/2 M S^1/2
    scaled = scaling.sqrt().unsqueeze(-1) * matrix * scaling.sqrt()
    rhs = normal(len(spectrum), 2)
    _, iterations, _ = conjugate_gradients(
        lambda v: scaled @ v,
        rhs,
        stop=until(rhs, 1e-7),
        max_iterations=200,
        precondition=lambda r: r / scaling.unsqueeze(-1),
    )
    assert iterations == outliers + 1


def test_a_preconditioner_may_return_what_it_was_given():
    """The identity, as a user would write it."""
    matrix, _ = with_spectrum(torch.linspace(1, 10, 20))
    rhs = normal(20, 2)
    x, iterations, _ = conjugate_gradients(
        lambda v: matrix @ v, rhs, stop=until(rhs, 1e-10), max_iterations=100, precondition=lambda r: r
    )
    torch.testing.assert_close(matrix @ x, rhs, rtol=0, atol=1e-8)
    assert iterations <= 20


def test_arguments_are_left_as_they_were():
    matrix, _ = with_spectrum(torch.linspace(1, 10, 20))
    rhs = normal(20, 2)
    before = rhs.clone()
    conjugate_gradients(lambda v: matrix @ v, rhs, stop=until(rhs, 1e-10), max_iterations=100)
    assert torch.equal(rhs, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_precision_and_division_guard_follow_the_right_hand_side(dtype):
    """Upstream's guard of 1e-10 stalls at a residual of 1e-5: squares below it count as zero."""
    matrix = with_spectrum(torch.linspace(1, 10, 30))[0].to(dtype)
    rhs = normal(30, 2).to(dtype)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-14
    x, iterations, _ = conjugate_gradients(
        lambda v: matrix @ v, rhs, stop=until(rhs, tolerance), max_iterations=200, lanczos=True
    )
    assert x.dtype == dtype
    assert iterations < 40
    assert float(((rhs - matrix @ x).norm(dim=-2) / rhs.norm(dim=-2)).max()) <= 20 * tolerance


@examples
@given(st.integers(1, 12), st.integers(1, 4), st.floats(0, 3), st.integers(0, 10**6))
def test_any_positive_definite_system_is_solved(size, columns, decades, seed):
    matrix, _ = with_spectrum(torch.logspace(0, decades, size, dtype=torch.float64), seed=seed)
    rhs = normal(size, columns, seed=seed + 1)
    x, iterations, _ = conjugate_gradients(lambda v: matrix @ v, rhs, stop=until(rhs, 1e-10), max_iterations=20 * size)
    assert float(((rhs - matrix @ x).norm(dim=-2) / rhs.norm(dim=-2)).max()) <= 1e-9
    assert iterations <= 4 * size


# -- Lanczos matrices --------------------------------------------------------------------------------------------------


def function_of(matrix, function):
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * function(values).unsqueeze(-2) @ vectors.mT


def quadrature(tridiagonal, function):
    """``e_1' f(T) e_1``. shape: (..., k, k) -> (...)"""
    return function_of(tridiagonal, function)[..., 0, 0]


def quotient(matrix, z, function):
    """``z' f(A) z / z' z`` per column."""
    return (z * (function_of(matrix, function) @ z)).sum(-2) / z.square().sum(-2)


@pytest.mark.parametrize("spectrum", [[1.0, 2.0, 3.0, 5.0], [0.1, 1.0, 2.5, 7.0, 11.0, 30.0, 31.0], [2.0]])
def test_eigenvalues_of_the_full_tridiagonal_are_those_of_the_matrix(spectrum):
    matrix, _ = with_spectrum(spectrum)
    size = len(spectrum)
    _, iterations, tridiagonal = conjugate_gradients(
        lambda v: matrix @ v, normal(size, 3), stop=never, max_iterations=size, lanczos=True
    )
    assert iterations == size
    assert tridiagonal.shape == (3, size, size)
    assert torch.equal(tridiagonal, tridiagonal.mT)
    expected = torch.linalg.eigvalsh(matrix).expand(3, size)
    torch.testing.assert_close(torch.linalg.eigvalsh(tridiagonal), expected, rtol=1e-9, atol=1e-10)


def test_tridiagonal_equals_the_lanczos_process():
    """Against the textbook recursion with full re-orthogonalisation."""
    matrix, _ = with_spectrum(torch.linspace(1, 20, 15))
    z = normal(15, 1)
    _, _, tridiagonal = conjugate_gradients(lambda v: matrix @ v, z, stop=never, max_iterations=6, lanczos=True)
    basis = [z / z.norm()]
    for _ in range(5):
        step = matrix @ basis[-1]
        for _ in range(2):
            for vector in basis:
                step = step - vector * (vector * step).sum()
        basis.append(step / step.norm())
    basis = torch.cat(basis, -1)
    torch.testing.assert_close(tridiagonal[0].abs(), (basis.mT @ matrix @ basis).abs(), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("function", [torch.log, torch.reciprocal, torch.sqrt])
def test_quadrature_equals_the_dense_function_once_converged(function):
    matrix, _ = with_spectrum(torch.logspace(-1, 1, 50))
    z = normal(50, 4)
    _, iterations, tridiagonal = conjugate_gradients(
        lambda v: matrix @ v, z, stop=until(z, 1e-12), max_iterations=500, lanczos=True
    )
    assert tridiagonal.shape == (4, iterations, iterations)
    torch.testing.assert_close(quadrature(tridiagonal, function), quotient(matrix, z, function), rtol=1e-8, atol=1e-8)


def test_the_first_steps_are_exact_for_low_moments():
    """k steps integrate polynomials up to degree 2k - 1 exactly."""
    matrix, _ = with_spectrum(torch.linspace(1, 4, 30))
    z = normal(30, 2)
    for steps in (1, 2, 3):
        _, _, tridiagonal = conjugate_gradients(lambda v: matrix @ v, z, stop=never, max_iterations=steps, lanczos=True)
        for degree in range(2 * steps):
            power = lambda t, degree=degree: t**degree  # noqa: E731
            torch.testing.assert_close(
                quadrature(tridiagonal, power), quotient(matrix, z, power), rtol=1e-12, atol=1e-12
            )


def test_columns_that_converge_early_keep_their_quadrature():
    matrix, vectors = with_spectrum(torch.logspace(0, 3, 60))
    easy = vectors[:, [4, 20, 50]] @ torch.tensor([[1.0, 1.0, 0.0], [0.0, -2.0, 0.0], [0.0, 0.5, 3.0]]).double()
    z = torch.cat([easy, torch.zeros(60, 1, dtype=torch.float64), normal(60, 2)], -1)
    _, iterations, tridiagonal = conjugate_gradients(
        lambda v: matrix @ v, z, stop=until(z, 1e-12), max_iterations=1000, lanczos=True
    )
    assert iterations > 60  # whereas the first three columns were done after 1, 3 and 1
    expected = quotient(matrix, z, torch.log)
    expected[3] = 0.0  # a zero column has the identity, and log(1) = 0
    torch.testing.assert_close(quadrature(tridiagonal, torch.log), expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_a_batch_member_that_converges_early_keeps_its_quadrature(scale):
    """Its residual falls through 1e-154, where squares vanish, long before the other member is done."""
    easy, _ = with_spectrum(torch.linspace(1, 1.1, 60))
    hard, _ = with_spectrum(torch.logspace(0, 4, 60), seed=1)
    matrix = scale * torch.stack([easy, hard])
    z = normal(2, 60, 2)
    _, iterations, tridiagonal = conjugate_gradients(
        lambda v: matrix @ v, z, stop=until(z, 1e-10), max_iterations=3000, lanczos=True
    )
    assert iterations > 150
    assert bool(torch.isfinite(tridiagonal).all())
    torch.testing.assert_close(quadrature(tridiagonal, torch.log), quotient(matrix, z, torch.log), rtol=1e-8, atol=1e-8)


def test_preconditioned_lanczos_is_that_of_the_split_matrix():
    """``P^-1/2 A P^-1/2`` from ``P^-1/2 z``."""
    matrix, _ = with_spectrum(torch.logspace(0, 3, 40))
    root, _ = with_spectrum(torch.logspace(-0.5, 1, 40), seed=5)  # P^1/2
    preconditioner = root @ root
    split = torch.linalg.solve(root, torch.linalg.solve(root, matrix).mT)
    z = normal(40, 3)
    _, _, tridiagonal = conjugate_gradients(
        lambda v: matrix @ v,
        z,
        stop=until(z, 1e-11),
        max_iterations=2000,
        precondition=lambda r: torch.linalg.solve(preconditioner, r),
        lanczos=True,
    )
    expected = quotient(0.5 * (split + split.mT), torch.linalg.solve(root, z), torch.log)
    torch.testing.assert_close(quadrature(tridiagonal, torch.log), expected, rtol=1e-8, atol=1e-8)


def test_preconditioned_eigenvalues_of_the_full_tridiagonal():
    matrix, _ = with_spectrum([1.0, 2.0, 4.0, 9.0, 11.0])
    scaling = torch.tensor([1.0, 2.0, 0.5, 3.0, 1.5], dtype=torch.float64)
    _, _, tridiagonal = conjugate_gradients(
        lambda v: matrix @ v,
        normal(5, 2),
        stop=never,
        max_iterations=5,
        precondition=lambda r: r / scaling.unsqueeze(-1),
        lanczos=True,
    )
    split = matrix / (scaling.sqrt().unsqueeze(-1) * scaling.sqrt())
    expected = torch.linalg.eigvalsh(split).expand(2, 5)
    torch.testing.assert_close(torch.linalg.eigvalsh(tridiagonal), expected, rtol=1e-9, atol=1e-9)


def test_listening_for_lanczos_changes_nothing_else():
    matrix, _ = with_spectrum(torch.logspace(0, 3, 40))
    rhs = normal(40, 2)
    plain = conjugate_gradients(lambda v: matrix @ v, rhs, stop=until(rhs, 1e-9), max_iterations=500)
    listening = conjugate_gradients(lambda v: matrix @ v, rhs, stop=until(rhs, 1e-9), max_iterations=500, lanczos=True)
    assert torch.equal(plain[0], listening[0])
    assert plain[1] == listening[1]
