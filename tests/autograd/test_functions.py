"""Autograd Functions with implicit gradients, against dense autograd in float64."""

import math
import re
from functools import reduce

import pytest
import torch
from linear_operator.operators import ConstantDiagLinearOperator, DiagLinearOperator

from gpytorch_gaps import settings
from gpytorch_gaps.autograd import bilinear
from gpytorch_gaps.autograd.bilinear import kron_bilinear_gradient
from gpytorch_gaps.autograd.first_order import frozen_eigenvalues
from gpytorch_gaps.autograd.shifted_solve import ShiftedSolve
from gpytorch_gaps.linalg.eigen import kron_eigh
from gpytorch_gaps.operators import SelectedKroneckerDiagOperator, SelectedKroneckerOperator

CLOSE = {"rtol": 1e-8, "atol": 1e-8}
TRAIN = torch.tensor([0, 2, 3, 5, 7, 8, 11])


def kron(matrices):
    def pair(a, b):
        product = a[..., :, None, :, None] * b[..., None, :, None, :]
        return product.reshape(*product.shape[:-4], a.size(-2) * b.size(-2), a.size(-1) * b.size(-1))

    return reduce(pair, matrices)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def leaves(*tensors):
    return [tensor.clone().requires_grad_(True) for tensor in tensors]


def spd(root):
    """A covariance with a root to differentiate: any change of the root keeps it symmetric."""
    size = root.size(-1)
    return root @ root.mT / size + 0.1 * torch.eye(size, dtype=root.dtype)


def assert_same_gradients(own, dense, arguments, weight_seed=7):
    """Values, and gradients of a random linear function of them."""
    torch.testing.assert_close(own, dense, **CLOSE)
    weight = normal(*own.shape, seed=weight_seed)
    mine = torch.autograd.grad((weight * own).sum(), arguments, retain_graph=True)  # the factors are shared
    theirs = torch.autograd.grad((weight * dense).sum(), arguments, retain_graph=True)
    for argument, left, right in zip(arguments, mine, theirs, strict=True):
        assert left.shape == argument.shape
        torch.testing.assert_close(left, right, **CLOSE)


def assert_hessian_right_or_refused(own, dense, at):
    """A second derivative that is not implemented must say so: a wrong one looks like any other number."""
    try:
        hessian = torch.autograd.functional.hessian(own, at)
    except RuntimeError as error:
        assert re.search("twice|second derivative|once_differentiable", str(error))  # noqa: PT017
        return
    torch.testing.assert_close(hessian, torch.autograd.functional.hessian(dense, at), **CLOSE)


# -- kron_bilinear_gradient --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numbers", [1, 30, 2**23])
@pytest.mark.parametrize("batches", [((), ()), ((2,), (2,)), ((), (2,)), ((2, 3), (2, 3))])
@pytest.mark.parametrize("shapes", [[(4, 4)], [(3, 3), (4, 4)], [(2, 3), (5, 4)], [(2, 2), (3, 1), (2, 4)]])
def test_bilinear_gradient_equals_dense_autograd(monkeypatch, shapes, batches, numbers):
    monkeypatch.setattr(bilinear, "_CHUNK_NUMBERS", numbers)
    factor_batch, batch = batches
    factors = leaves(*(normal(*factor_batch, q, m, seed=k) for k, (q, m) in enumerate(shapes)))
    left = normal(*batch, math.prod(q for q, _ in shapes), 5, seed=10)
    right = normal(*batch, math.prod(m for _, m in shapes), 5, seed=11)
    own = kron_bilinear_gradient(factors, left, right)
    expected = torch.autograd.grad((left * (kron(factors) @ right)).sum(), factors)
    for mine, theirs in zip(own, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


def test_bilinear_columns_are_really_visited_in_chunks(monkeypatch):
    widths = []
    product = bilinear.kron_matmul
    monkeypatch.setattr(bilinear, "kron_matmul", lambda f, x: widths.append(x.size(-1)) or product(f, x))
    monkeypatch.setattr(bilinear, "_CHUNK_NUMBERS", 24)
    kron_bilinear_gradient([normal(3, 3), normal(4, 4)], normal(12, 5), normal(12, 5))
    assert widths == [2, 2, 1]


def test_bilinear_gradient_works_where_gradients_are_off():
    factors = [normal(3, 3), normal(2, 2)]
    u, v = normal(6, 2, seed=1), normal(6, 2, seed=2)
    expected = kron_bilinear_gradient(factors, u, v)
    with torch.no_grad():
        for mine, theirs in zip(kron_bilinear_gradient(factors, u, v), expected, strict=True):
            assert torch.equal(mine, theirs)


# -- ShiftedSolve ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "noise_shape", "x_batch"),
    [
        ((), (), ()),
        ((), (1,), ()),
        ((2,), (2, 1), (2,)),
        ((2,), (1,), (2,)),
        ((), (2, 1), ()),
        ((2,), (2, 1), ()),
        ((), (1,), (2,)),
        ((2, 3), (3, 1), (2, 3)),
    ],
)
@pytest.mark.parametrize("sizes", [(5,), (3, 4), (2, 3, 2)])
def test_shifted_solve_equals_dense_autograd(sizes, batch, noise_shape, x_batch):
    factors = leaves(*(spd(normal(*batch, m, m, seed=k)) for k, m in enumerate(sizes)))
    (noise,) = leaves(normal(*noise_shape, seed=20).abs() + 0.2)
    (x,) = leaves(normal(*x_batch, math.prod(sizes), 3, seed=21))
    own = ShiftedSolve.apply(kron_eigh(factors), noise, x, *factors)
    matrix = kron(factors)
    shift = noise.unsqueeze(-1) * torch.eye(matrix.size(-1), dtype=torch.float64)
    dense = torch.linalg.solve(matrix + shift, x)
    assert_same_gradients(own, dense, [noise, x, *factors])


def test_shifted_solve_with_repeated_eigenvalues():
    """The gradient of an eigen-decomposition is NaN here; this one does not pass through it."""
    factors = leaves(torch.eye(3, dtype=torch.float64), 2.0 * torch.eye(4, dtype=torch.float64))
    noise, x = leaves(torch.tensor([0.5], dtype=torch.float64), normal(12, 2))
    own = ShiftedSolve.apply(kron_eigh(factors), noise, x, *factors)
    dense = torch.linalg.solve(kron(factors) + noise * torch.eye(12, dtype=torch.float64), x)
    assert_same_gradients(own, dense, [noise, x, *factors])


@pytest.mark.parametrize("wanted", [0, 1, 2, 3])
def test_shifted_solve_gives_the_gradient_of_one_argument_alone(wanted):
    values = [torch.tensor([0.5], dtype=torch.float64), normal(6, 2), spd(normal(3, 3)), spd(normal(2, 2))]
    values[wanted].requires_grad_(True)
    noise, x, *factors = values
    own = ShiftedSolve.apply(kron_eigh(factors), noise, x, *factors)
    dense = torch.linalg.solve(kron(factors) + noise * torch.eye(6, dtype=torch.float64), x)
    assert_same_gradients(own, dense, [values[wanted]])


def test_shifted_solve_in_single_precision():
    factors = [spd(normal(3, 3)).float().requires_grad_(True), spd(normal(2, 2)).float().requires_grad_(True)]
    noise = torch.tensor([0.5], requires_grad=True)
    x = normal(6, 2).float().requires_grad_(True)
    solution = ShiftedSolve.apply(kron_eigh(factors), noise, x, *factors)
    assert solution.dtype == torch.float32
    gradients = torch.autograd.grad(solution.square().sum(), [noise, x, *factors])
    wide = leaves(*(tensor.detach().double() for tensor in (noise, x, *factors)))
    dense = torch.linalg.solve(kron(wide[2:]) + wide[0] * torch.eye(6, dtype=torch.float64), wide[1])
    for mine, theirs in zip(gradients, torch.autograd.grad(dense.square().sum(), wide), strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-4)


def hyperparameters():
    return torch.tensor([0.5, 0.7], dtype=torch.float64)


def matrices_at(theta):
    generators = (normal(3, 3, seed=1), normal(4, 4, seed=2))
    return [torch.matrix_exp(theta[0] * (g + g.mT) / 4) for g in generators]


def test_shifted_solve_second_derivatives_are_right_or_refused():
    b = normal(12, 1, seed=3)

    def own(theta):
        factors = matrices_at(theta)
        return ShiftedSolve.apply(kron_eigh(factors), theta[1:], b, *factors).pow(3).sum()

    def dense(theta):
        matrix = kron(matrices_at(theta)) + theta[1] * torch.eye(12, dtype=torch.float64)
        return torch.linalg.solve(matrix, b).pow(3).sum()

    assert_hessian_right_or_refused(own, dense, hyperparameters())


# -- OwnSolve and OwnInvQuad -------------------------------------------------------------------------------------------


def noise_operator(kind, values, batch):
    """An operator, and the diagonal it stands for."""
    if kind == "constant":
        return ConstantDiagLinearOperator(values[0], diag_shape=len(TRAIN)), values[0].expand(*batch, len(TRAIN))
    if kind == "any":
        return DiagLinearOperator(values[0]), values[0]
    grid = (values[0].unsqueeze(-1) * values[1].unsqueeze(-2)).flatten(-2)
    return SelectedKroneckerDiagOperator(*values, index=TRAIN), grid[..., TRAIN]


def noise_values(kind, batch):
    shapes = {"constant": [(1,)], "any": [(len(TRAIN),)], "product": [(4,), (3,)]}[kind]
    return leaves(*(normal(*batch, *shape, seed=30 + k).abs() + 0.3 for k, shape in enumerate(shapes)))


def system(kind, batch):
    """Roots of the factors, noise, the operator and its dense equal."""
    roots = leaves(normal(*batch, 4, 4, seed=1), normal(*batch, 3, 3, seed=2))
    factors = [spd(root) for root in roots]
    values = noise_values(kind, batch)
    diagonal_operator, diagonal = noise_operator(kind, values, batch)
    operator = SelectedKroneckerOperator(*factors, row_index=TRAIN, col_index=TRAIN) + diagonal_operator
    dense = kron(factors)[..., TRAIN, :][..., TRAIN] + torch.diag_embed(diagonal)
    return [*roots, *values], operator, dense


METHODS = [
    ("constant", "cholesky"),
    ("constant", "fill"),
    ("constant", "ignore"),
    ("any", "ignore"),
    ("any", "cholesky"),
    ("product", "fill"),
    ("product", "cholesky"),
    ("product", "ignore"),
]


@pytest.fixture
def tight():
    with settings.solve_tolerance(1e-12), settings.train_tolerance(1e-12):
        yield


@pytest.mark.usefixtures("tight")
@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize(("kind", "method"), METHODS)
def test_solve_equals_dense_autograd(kind, method, batch):
    arguments, operator, dense = system(kind, batch)
    (rhs,) = leaves(normal(*batch, len(TRAIN), 3, seed=40))
    with settings.gap_method(method):
        assert_same_gradients(operator.solve(rhs), torch.linalg.solve(dense, rhs), [rhs, *arguments])


@pytest.mark.usefixtures("tight")
@pytest.mark.parametrize("reduce_columns", [True, False])
@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize(("kind", "method"), METHODS)
def test_inv_quad_equals_dense_autograd(kind, method, batch, reduce_columns):
    arguments, operator, dense = system(kind, batch)
    (rhs,) = leaves(normal(*batch, len(TRAIN), 3, seed=41))
    expected = (rhs * torch.linalg.solve(dense, rhs)).sum(-2)
    expected = expected.sum(-1) if reduce_columns else expected
    with settings.gap_method(method):
        own = operator.inv_quad(rhs, reduce_inv_quad=reduce_columns)
        assert_same_gradients(own, expected, [rhs, *arguments])


@pytest.mark.usefixtures("tight")
def test_a_batch_of_right_hand_sides_for_one_matrix():
    arguments, operator, dense = system("constant", ())
    (rhs,) = leaves(normal(2, len(TRAIN), 2, seed=42))
    assert_same_gradients(operator.solve(rhs), torch.linalg.solve(dense, rhs), [rhs, *arguments])
    quad = (rhs * torch.linalg.solve(dense, rhs)).sum((-2, -1))
    assert_same_gradients(operator.inv_quad(rhs), quad, [rhs, *arguments])


@pytest.mark.usefixtures("tight")
def test_the_gradient_of_a_factor_is_symmetric():
    factors = leaves(spd(normal(4, 4, seed=1)), spd(normal(3, 3, seed=2)))
    operator = SelectedKroneckerOperator(*factors, row_index=TRAIN, col_index=TRAIN) + ConstantDiagLinearOperator(
        torch.tensor([0.5], dtype=torch.float64), diag_shape=len(TRAIN)
    )
    solution = operator.solve(normal(len(TRAIN), 2))
    for gradient in torch.autograd.grad((solution * normal(len(TRAIN), 2, seed=5)).sum(), factors):
        torch.testing.assert_close(gradient, gradient.mT, rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("tight")
@pytest.mark.parametrize("what", ["solve", "inv_quad"])
def test_second_derivatives_are_right_or_refused(what):
    b = normal(len(TRAIN), 1, seed=3)

    def own(theta):
        diagonal = ConstantDiagLinearOperator(theta[1:], diag_shape=len(TRAIN))
        operator = SelectedKroneckerOperator(*matrices_at(theta), row_index=TRAIN, col_index=TRAIN) + diagonal
        return operator.solve(b).pow(3).sum() if what == "solve" else operator.inv_quad(b)

    def dense(theta):
        matrix = kron(matrices_at(theta))[TRAIN][:, TRAIN] + theta[1] * torch.eye(len(TRAIN), dtype=torch.float64)
        solution = torch.linalg.solve(matrix, b)
        return solution.pow(3).sum() if what == "solve" else (b * solution).sum()

    assert_hessian_right_or_refused(own, dense, hyperparameters())


# -- frozen_eigenvalues ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_values_and_gradients_equal_eigvalsh_for_distinct_eigenvalues(batch):
    factors = leaves(spd(normal(*batch, 4, 4, seed=1)), spd(normal(*batch, 3, 3, seed=2)))
    own = frozen_eigenvalues(factors, kron_eigh(factors).vectors)
    for mine, factor in zip(own, factors, strict=True):
        assert_same_gradients(mine, torch.linalg.eigvalsh(factor), [factor])


def test_a_part_of_the_eigenvectors():
    (factor,) = leaves(spd(normal(5, 5)))
    columns = torch.tensor([4, 1])
    (own,) = frozen_eigenvalues([factor], [kron_eigh([factor]).vectors[0][:, columns]])
    assert_same_gradients(own, torch.linalg.eigvalsh(factor)[columns], [factor])


@pytest.mark.parametrize(
    "matrix", [torch.eye(4), torch.ones(4, 4), torch.zeros(3, 3), torch.diag(torch.tensor([1.0, 1.0, 2.0, 2.0, 2.0]))]
)
def test_repeated_eigenvalues_have_the_gradient_of_symmetric_functions(matrix):
    """``sum log(lambda + s)`` is ``log|K + s I|`` however often an eigenvalue repeats."""
    (factor,) = leaves(matrix.double())
    (own,) = frozen_eigenvalues([factor], kron_eigh([factor]).vectors)
    (gradient,) = torch.autograd.grad((own + 0.3).log().sum(), factor)
    assert bool(torch.isfinite(gradient).all())
    expected = torch.linalg.inv(matrix.double() + 0.3 * torch.eye(len(matrix), dtype=torch.float64))
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-11)


def test_eigenvalues_that_rounding_made_negative_are_zero_with_their_derivative():
    basis = torch.linalg.qr(normal(3, 3)).Q
    (factor,) = leaves(basis * torch.tensor([-1e-3, 0.0, 2.0], dtype=torch.float64) @ basis.mT)
    (own,) = frozen_eigenvalues([factor], [basis])
    torch.testing.assert_close(own, torch.tensor([0.0, 0.0, 2.0], dtype=torch.float64), rtol=0, atol=1e-15)
    assert bool((own >= 0).all())
    (gradient,) = torch.autograd.grad((own * torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)).sum(), factor)
    expected = basis * torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64) @ basis.mT
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-14)


def test_eigenvectors_get_no_gradient():
    (factor,) = leaves(spd(normal(3, 3)))
    (vectors,) = leaves(kron_eigh([factor]).vectors[0])
    (own,) = frozen_eigenvalues([factor], [vectors])
    own.sum().backward()
    assert vectors.grad is None
    torch.testing.assert_close(factor.grad, torch.eye(3, dtype=torch.float64), rtol=0, atol=1e-13)  # of the trace


def test_single_precision_factors_are_worked_on_in_double():
    factor = spd(normal(4, 4)).float().requires_grad_(True)
    (own,) = frozen_eigenvalues([factor], kron_eigh([factor]).vectors)
    assert own.dtype == torch.float64
    torch.testing.assert_close(own, torch.linalg.eigvalsh(factor.double()), rtol=1e-12, atol=1e-12)
    (gradient,) = torch.autograd.grad(own.sum(), factor)
    assert gradient.dtype == torch.float32
