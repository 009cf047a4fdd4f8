"""Roots of covariances: values, and gradients of what does not depend on the choice of eigenvectors, against dense."""

import mpmath
import pytest
import torch

from gpytorch_gaps.autograd.kernel_root import kernel_root
from tests import _dense as dense

EPS = torch.finfo(torch.float64).eps


def rank_of(rank, m, seed=0, batch=()):
    root = torch.randn(*batch, m, rank, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return root @ root.mT / rank


def duplicated(m):
    """A kernel at points that come twice."""
    return dense.matern32(m)[:, [*range(m), *range(m)]][[*range(m), *range(m)]]


MATRICES = {
    "well conditioned": dense.random_psd(7),
    "repeated eigenvalues": dense.periodic(8),
    "all eigenvalues equal": 3.0 * dense.identity(6),
    "duplicate rows": duplicated(5),
    "rank 2 of 6": rank_of(2, 6),
    "nearly singular": dense.se(25, 1.0),
    "tiny": 1e-200 * dense.random_psd(4),
    "huge": 1e200 * dense.random_psd(4),
    "1 x 1": torch.full((1, 1), 2.5, dtype=torch.float64),
    "a batch": dense.random_psd(5, batch=(2, 3)),
    "a batch of ranks 2, 4 and 5": torch.stack([rank_of(2, 5), rank_of(4, 5, 1), dense.random_psd(5)]),
}
RANKS = {"duplicate rows": 5, "rank 2 of 6": 2}
matrices = pytest.mark.parametrize("name", MATRICES)


# -- values ------------------------------------------------------------------------------------------------------------


@matrices
def test_the_root_and_its_inverse_meet_the_conditions_of_penrose(name):
    """``R R' = K`` to rounding, and ``R^+'`` meets all four of Penrose's conditions."""
    matrix = MATRICES[name]
    root, inverse = kernel_root(matrix)
    size = matrix.diagonal(dim1=-2, dim2=-1).amax()
    assert root.shape == inverse.shape == (*matrix.shape[:-1], RANKS.get(name, root.size(-1)))
    assert float((root @ root.mT - matrix).abs().max() / size) <= 10 * EPS * matrix.size(-1)
    pinv = inverse.mT
    projector, kept = root @ pinv, pinv @ root  # shape: (*batch, m, m) and (*batch, r, r)
    for got, expected in [(projector @ root, root), (kept @ pinv, pinv), (projector, projector.mT), (kept, kept.mT)]:
        # what rounding leaves of eigenvectors is multiplied by the root of the condition, up to 1 / sqrt(eps)
        tolerance = EPS**0.5 if name == "nearly singular" else 1e-12
        assert float((got - expected).abs().max()) <= tolerance * float(expected.abs().max())


@pytest.mark.parametrize("name", ["well conditioned", "rank 2 of 6", "duplicate rows", "a batch of ranks 2, 4 and 5"])
def test_the_pseudo_inverse_is_torchs(name):
    root, inverse = kernel_root(MATRICES[name])
    torch.testing.assert_close(inverse.mT, torch.linalg.pinv(root, rtol=1e-7), rtol=1e-10, atol=1e-10)
    own = torch.linalg.pinv(MATRICES[name], hermitian=True, rtol=1e-12)
    torch.testing.assert_close(inverse @ inverse.mT, own, rtol=1e-9, atol=1e-9)


def test_the_zero_matrix():
    """One column of zeros, and no gradient: there is no first derivative to have."""
    (matrix,) = dense.leaves(torch.zeros(3, 3, dtype=torch.float64))
    root, inverse = kernel_root(matrix)
    assert torch.equal(root, torch.zeros(3, 1, dtype=torch.float64))
    assert torch.equal(inverse, torch.zeros(3, 1, dtype=torch.float64))
    (gradient,) = torch.autograd.grad((root.sum() + inverse.sum()), matrix)
    assert torch.equal(gradient, torch.zeros_like(gradient))


def test_negative_eigenvalues_of_rounding_are_dropped():
    values = torch.tensor([-1e-17, 1e-17, 0.5, 2.0], dtype=torch.float64)
    root, _ = kernel_root(torch.diag(values))
    assert root.shape == (4, 2)
    torch.testing.assert_close(root @ root.mT, torch.diag(values.clamp_min(1e-16) - 1e-16), rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize(
    ("floor", "rank"), [(None, 5), (0.0, 5), (1e-3, 4), (0.05, 3), (0.7, 2), (5.0, 1), (10.0 + 1e-9, 1)]
)
def test_eigenvalues_up_to_the_floor_are_left_out(floor, rank):
    """Eigenvalues up to it are left out: of the root, of its inverse and of gradients; one column is always there."""
    values = torch.tensor([1e-4, 1e-2, 0.5, 2.0, 10.0], dtype=torch.float64)
    vectors = torch.linalg.qr(dense.randn(5, 5)).Q
    (matrix,) = dense.leaves(vectors @ torch.diag(values) @ vectors.mT)
    root, inverse = kernel_root(matrix, floor)
    kept = values > (floor or 0.0)
    assert root.shape == inverse.shape == (5, rank)
    left = vectors @ torch.diag(torch.where(kept, values, 0.0)) @ vectors.mT
    torch.testing.assert_close(root @ root.mT, left, rtol=1e-10, atol=1e-12)
    inverted = vectors @ torch.diag(torch.where(kept, 1 / values, 0.0)) @ vectors.mT
    torch.testing.assert_close(inverse @ inverse.mT, inverted, rtol=1e-9, atol=1e-9)
    weight = dense.symmetric(dense.randn(5, 5))
    (gradient,) = torch.autograd.grad((weight * (root @ root.mT)).sum(), matrix)
    lost = vectors[:, ~kept] @ vectors[:, ~kept].mT
    torch.testing.assert_close(gradient, weight - lost @ weight @ lost, rtol=1e-9, atol=1e-9)


def test_single_precision_is_worked_out_in_double():
    (matrix,) = dense.leaves(dense.random_psd(5).float())
    root, inverse = kernel_root(matrix)
    assert root.dtype == inverse.dtype == torch.float64
    torch.testing.assert_close(root @ root.mT, matrix.detach().double(), rtol=1e-13, atol=1e-13)
    (gradient,) = torch.autograd.grad((root @ root.mT).trace(), matrix)
    assert gradient.dtype == torch.float32
    torch.testing.assert_close(gradient, torch.eye(5))


def test_only_the_symmetric_part_counts():
    matrix, extra = dense.random_psd(4), dense.randn(4, 4, seed=1)
    root, _ = kernel_root(matrix + extra - extra.mT)
    torch.testing.assert_close(root @ root.mT, matrix, rtol=1e-12, atol=1e-12)


# -- gradients of R R' -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [name for name in MATRICES if name not in ("duplicate rows", "rank 2 of 6", "a batch of ranks 2, 4 and 5")]
)
def test_linear_functions_of_the_square(name):
    """``d tr(W'R R') = tr(W'dK)``, as if there had been no root."""
    (matrix,) = dense.leaves(MATRICES[name])
    weight = dense.randn(*matrix.shape, seed=3)
    root, _ = kernel_root(matrix)
    (gradient,) = torch.autograd.grad((weight * (root @ root.mT)).sum(), matrix)
    expected = dense.symmetric(weight)
    if name == "nearly singular":  # but for directions in which K was zero to rounding
        values, vectors = torch.linalg.eigh(matrix.detach())
        lost = vectors[:, values <= EPS * values.max()]
        expected = expected - lost @ (lost.mT @ expected @ lost) @ lost.mT
    tolerance = 1e-8 if name == "nearly singular" else 1e-9
    torch.testing.assert_close(gradient, expected, rtol=tolerance, atol=tolerance)


FAMILIES = {
    "full rank": (6, 6, ()),
    "rank 2 of 6": (6, 2, ()),
    "rank 1": (4, 1, ()),
    "1 x 1": (1, 1, ()),
    "a batch of rank 3": (5, 3, (2,)),
}
families = pytest.mark.parametrize("family", FAMILIES)


def of_rank(family, tests=4):
    """A root of a joint covariance of points and test points, whatever its rank: all of K, F and K_** follow it."""
    m, rank, batch = FAMILIES[family]
    return dense.leaves(dense.randn(*batch, m, rank, seed=5), dense.randn(*batch, tests, rank, seed=6))


@families
def test_gradients_of_the_square_where_rank_is_kept(family):
    here, _ = of_rank(family)
    weight = dense.randn(*here.shape[:-2], here.size(-2), here.size(-2), seed=7)
    root, _ = kernel_root(here @ here.mT)
    (got,) = torch.autograd.grad((weight * (root @ root.mT)).sum(), here)
    (expected,) = torch.autograd.grad((weight * (here @ here.mT)).sum(), here)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def test_gradients_at_duplicate_points():
    """Gradients for a length-scale and for a point that occurs twice."""
    results = []
    for own in (True, False):
        length, x = dense.leaves(torch.tensor(0.4).double(), dense.randn(5, 1))
        both = torch.cat([x, x[:3]])
        matrix = torch.exp(-(both - both.mT).abs() / length)
        if own:
            root, _ = kernel_root(matrix, 1e-12)  # above what rounding makes of the three zeros, on any machine
            assert root.size(-1) == 5
            matrix = root @ root.mT
        results.append(torch.autograd.grad((dense.randn(8, 8, seed=2) * matrix).sum(), [length, x]))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


# -- gradients of what a grid says about a point -----------------------------------------------------------------------


def told(matrix, cross):
    """``F R^+'`` and R."""
    root, inverse = kernel_root(matrix)
    return cross @ inverse, root


@families
def test_gradients_of_the_covariance_with_the_grid(family):
    """``F R^+' R' = F``, also after a change of K, F being in its range."""
    here, there = of_rank(family)
    cross = there @ here.mT
    known, root = told(here @ here.mT, cross)
    torch.testing.assert_close(known @ root.mT, cross, rtol=1e-9, atol=1e-9)
    weight = dense.randn(*cross.shape, seed=8)
    got = torch.autograd.grad((weight * (known @ root.mT)).sum(), [here, there], retain_graph=True)
    expected = torch.autograd.grad((weight * cross).sum(), [here, there])
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("size", [1, 4, 9])
def test_gradients_of_what_is_left(size, batch):
    """``K_** - (F R^+')(F R^+')'`` against the Schur complement, K, F and K_** moving freely."""
    inputs = dense.leaves(
        dense.random_psd(size, batch=batch), dense.randn(*batch, 5, size), dense.random_psd(5, 1, batch=batch)
    )
    matrix, cross, prior = inputs
    symmetric = dense.symmetric(matrix)
    known, _ = told(matrix, cross)
    left, expected = prior - known @ known.mT, prior - cross @ torch.linalg.solve(symmetric, cross.mT)
    torch.testing.assert_close(left, expected, rtol=1e-10, atol=1e-10)
    weight = dense.randn(*prior.shape, seed=8)
    got, wanted = (torch.autograd.grad((weight * value).sum(), inputs) for value in (left, expected))
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


@families
def test_gradients_of_what_is_left_where_rank_is_kept(family):
    """With joint root ``[L; T]``: ``T (I - L^+ L) T'``, and L^+ differentiated by torch."""
    here, there = of_rank(family)
    known, _ = told(here @ here.mT, there @ here.mT)
    got_value = there @ there.mT - known @ known.mT
    expected_value = there @ there.mT - there @ torch.linalg.pinv(here) @ here @ there.mT
    torch.testing.assert_close(got_value, expected_value, rtol=1e-9, atol=1e-9)
    weight = dense.symmetric(dense.randn(*got_value.shape, seed=8))
    got, expected = (
        torch.autograd.grad((weight * value).sum(), [here, there], retain_graph=True)
        for value in (got_value, expected_value)
    )
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("size", [8, 16, 30])
def test_what_a_nearly_singular_kernel_leaves(size):
    """Smooth kernels have inverses that float64 cannot represent. The reference has 60 digits, derivatives included."""
    x = [i / (size - 1) for i in range(size)]
    tested = [0.033, 0.47, 1.2]
    length = torch.tensor(0.6, dtype=torch.float64, requires_grad=True)

    def covariance(rows, columns):
        return torch.exp(-((torch.tensor(rows).double()[:, None] - torch.tensor(columns).double()) / length).square())

    known, _ = told(covariance(x, x), covariance(tested, x))
    left = (covariance(tested, tested) - known @ known.mT).diagonal()
    derivative = torch.stack([torch.autograd.grad(value, length, retain_graph=True)[0] for value in left])
    with mpmath.workdps(60):

        def exact(at):
            def entry(a, b):
                return mpmath.exp(-(((mpmath.mpf(a) - mpmath.mpf(b)) / at) ** 2))

            matrix = mpmath.matrix([[entry(a, b) for b in x] for a in x])
            columns = [mpmath.matrix([entry(a, t) for a in x]) for t in tested]
            return [1 - (column.T * mpmath.lu_solve(matrix, column))[0] for column in columns]

        centre, step = mpmath.mpf(0.6), mpmath.mpf(10) ** -20
        values = exact(centre)
        slopes = [(b - a) / (2 * step) for a, b in zip(exact(centre - step), exact(centre + step), strict=True)]
        expected = torch.tensor([[float(v) for v in values], [float(v) for v in slopes]], dtype=torch.float64)
    # beyond the axis, rounding of K itself is multiplied by large weights
    allowed = torch.tensor([[1e-12, 1e-12, 1e-6], [1e-11, 1e-11, 2e-5]], dtype=torch.float64)
    error = (torch.stack([left, derivative]) - expected).abs()
    assert bool((error <= allowed).all()), error


# -- draws and derivatives that are refused ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["well conditioned", "repeated eigenvalues", "all eigenvalues equal"])
def test_the_gradient_of_a_draw(name):
    """``R z`` with ``Q_r`` held fixed is ``S Q_r z``: finite differences of the symmetric root."""
    (matrix,) = dense.leaves(MATRICES[name])
    size = matrix.size(-1)
    root, _ = kernel_root(matrix)
    weight, z, change = dense.randn(size), dense.randn(root.size(-1), seed=1), dense.symmetric(dense.randn(size, size))
    (gradient,) = torch.autograd.grad(weight @ (root @ z), matrix)

    def symmetric_root(at):
        values, vectors = torch.linalg.eigh(at)
        return vectors @ torch.diag(values.sqrt()) @ vectors.mT

    with torch.no_grad():
        vectors = torch.linalg.solve(symmetric_root(matrix), root)
        step = 1e-5
        above, below = (weight @ (symmetric_root(matrix + sign * step * change) @ vectors @ z) for sign in (1, -1))
    torch.testing.assert_close((gradient * change).sum(), (above - below) / (2 * step), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("output", [0, 1])
def test_second_derivatives_are_refused(output):
    (matrix,) = dense.leaves(dense.random_psd(3))
    value = kernel_root(matrix)[output].square().sum()
    with pytest.raises(RuntimeError, match="create_graph=True: second derivatives"):
        torch.autograd.grad(value, matrix, create_graph=True)


def test_the_input_is_left_alone():
    matrix = dense.random_psd(4)
    before = matrix.clone()
    kernel_root(matrix, 0.3)
    assert torch.equal(matrix, before)
