"""``(s2 T^-1 + Phi' W'W Phi) w = Phi' W' y`` by sweeps over a mask, against the posterior mean in dense float64."""

import math
from dataclasses import dataclass

import pytest
import torch

from gpytorch_gaps.linalg.masked_grid import MaskedGrid
from gpytorch_gaps.linalg.truncated import TruncatedEigen, truncated_eigh
from gpytorch_gaps.reconstruction.sharding import ReplicatedWeights
from gpytorch_gaps.reconstruction.weight_solver import WeightSolver
from gpytorch_gaps.reconstruction.weight_space import WeightSpace
from gpytorch_gaps.solvers.krylov import ConjugateGradients
from tests import _dense as dense
from tests._covering import covering

LOTS = 2.0**31


@dataclass
class Problem:
    """A mask, a kernel, a noise and data, with all that dense algebra makes of them."""

    factors: list
    index: torch.Tensor
    noise: float
    y: torch.Tensor
    basis: TruncatedEigen

    @property
    def shape(self):
        return self.basis.shape

    @property
    def mask(self):
        mask = torch.zeros(math.prod(self.shape), dtype=torch.bool)
        mask[self.index] = True
        return mask.view(self.shape)

    @property
    def phi(self):
        return dense.kron(self.basis.vectors)

    @property
    def rhs(self):
        """``Phi' W' y`` without what is dropped."""
        return (self.phi[self.index].mT @ self.y).view(self.basis.ranks) * (self.basis.products > 0)

    def space(self):
        return WeightSpace(MaskedGrid(self.mask), ReplicatedWeights(self.basis), self.noise)

    def solver(self, **options):
        options = {
            "tolerance": 1e-6,
            "max_iterations": 2000,
            "memory": LOTS,
            "watch": lambda weights, iterations: None,
            **options,
        }
        return WeightSolver(self.space(), self.rhs, **options)

    def solve(self, start=None, **options):
        return self.solver(**options).solve(start)

    # -- by the book ---------------------------------------------------------------------------------------------------

    def mean(self):
        """``K W' (W K W' + s2 I)^-1 y`` with the kernel that was given."""
        kernel, noise = dense.kron(self.factors), torch.tensor([self.noise], dtype=torch.float64)
        return kernel[:, self.index] @ torch.linalg.solve(dense.system(self.factors, self.index, noise), self.y)

    def matrix(self):
        """``s2 T^-1 + Phi' W'W Phi`` on what is kept, and where that is in the box."""
        kept = (self.basis.products.flatten() > 0).nonzero().squeeze(-1)
        rows = self.phi[self.index][:, kept]
        return rows.mT @ rows + torch.diag(self.noise / self.basis.products.flatten()[kept]), kept

    def own_residual(self, weights):
        matrix, kept = self.matrix()
        rhs = self.rhs.flatten()[kept]
        return float((rhs - matrix @ weights.flatten()[kept]).norm() / rhs.norm())

    def bound(self, weights):
        """``||T^(1/2) r|| / s2`` of the residual r that weights leave."""
        matrix, kept = self.matrix()
        residual = self.rhs.flatten()[kept] - matrix @ weights.flatten()[kept]
        return float((self.basis.products.flatten()[kept].sqrt() * residual).norm()) / self.noise

    def true_error(self, weights):
        """The largest error of the mean over all cells, in posterior standard deviations, for the truncated kernel."""
        matrix, kept = self.matrix()
        phi = self.phi[:, kept]
        root = torch.linalg.cholesky(matrix)
        error = phi @ (weights.flatten()[kept] - torch.cholesky_solve(self.rhs.flatten()[kept, None], root).squeeze(-1))
        deviation = math.sqrt(self.noise) * torch.linalg.solve_triangular(root, phi.mT, upper=False).norm(dim=0)
        return float((error.abs() / deviation).nan_to_num(0.0).max())

    def rounding(self, weights=None):
        """What float64 leaves of the bound, at best; here of dense algebra, which rounds more than sweeps do."""
        weighted = float((self.basis.products.sqrt() * self.rhs.abs()).norm())
        own = 0.0 if weights is None else float(self.basis.products.sum().sqrt() * weights.norm())
        return 1e-14 * max(weighted, own) / self.noise


def problem(factors, pattern="random", noise=1e-2, fraction=0.4, level=1e-12, seed=0):
    shape = tuple(len(factor) for factor in factors)
    index = dense.observed(pattern, shape, fraction, seed)
    y = dense.randn(len(index), seed=seed + 1)
    return Problem(factors, index, noise, y, truncated_eigh(factors, level * noise))


def smooth(shape=(16, 14), theta=0.4):
    return [dense.se(size, theta) for size in shape]


def assert_true(found, case, rounding=1e-13):
    """What is reported is what dense algebra finds, and the error is within its bound."""
    assert found.residual == pytest.approx(case.own_residual(found.weights), rel=1e-3, abs=rounding)
    floor = case.rounding(found.weights)
    assert found.error_in_std == pytest.approx(case.bound(found.weights), rel=1e-2, abs=floor)
    assert case.true_error(found.weights) <= found.error_in_std + floor


FACTORS = {
    "1 axis": [dense.matern32(40)],
    "smooth": smooth(),
    "rough": [dense.matern32(13), dense.matern32(12)],
    "mixed": [dense.se(9, 0.5), dense.matern32(7), dense.random_psd(4)],
    "4 axes": [dense.se(5), dense.matern32(4), dense.identity(3), dense.se(4)],
    "identity": [dense.identity(8), dense.identity(7)],
    "pairs of eigenvalues": [dense.periodic(14), dense.periodic(12)],
    "very different norms": [1e4 * dense.se(12, 0.3), 1e-4 * dense.se(11, 0.3)],
}


@covering(
    factors=FACTORS,
    pattern=["none", "one gap", "one observation", "random", "block", "slice"],
    noise=[1e-6, 1e-2, 1e2],
)
def test_the_posterior_mean(factors, pattern, noise):
    case = problem(FACTORS[factors], pattern, noise)
    tolerance = 1e-6 if noise >= 1e-2 else 1e-3
    found = case.solve(tolerance=tolerance)
    assert found.converged
    assert found.error_in_std <= tolerance
    assert_true(found, case, rounding=1e-12)
    if noise >= 1e-2:  # and the mean is that of the kernel that was given, but for what was dropped of it
        deviation = math.sqrt(float(dense.kron(case.factors).diagonal().max()))
        dropped = math.sqrt(case.basis.error) * float(case.y.norm()) / noise
        apart = (case.phi @ found.weights.flatten() - case.mean()).abs().max()
        assert float(apart) <= deviation * (found.error_in_std + dropped)


@pytest.mark.parametrize("fraction", [0.02, 0.9, 0.98])
def test_few_and_many_gaps(fraction):
    case = problem(smooth(), fraction=fraction)
    found = case.solve()
    assert found.converged
    assert dense.relative(case.phi @ found.weights.flatten(), case.mean()) < 1e-8


@pytest.mark.parametrize("level", [1e-1, 1e-3])
def test_a_truncated_kernel_is_solved_as_such(level):
    """With much dropped the weights solve the truncated system, exactly, and stay zero outside of it."""
    case = problem(smooth(), level=level)
    found = case.solve(tolerance=1e-9)
    matrix, kept = case.matrix()
    assert len(kept) < case.basis.products.numel()
    expected = torch.linalg.solve(matrix, case.rhs.flatten()[kept])
    assert dense.relative(found.weights.flatten()[kept], expected) < 1e-10
    assert bool((found.weights[case.basis.products == 0] == 0).all())


# -- operators -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["random", "block", "one observation"])
@pytest.mark.parametrize("factors", ["1 axis", "smooth", "mixed"])
def test_products_and_norms(factors, pattern):
    case = problem(FACTORS[factors], pattern, level=1e-3)
    space = case.space()
    matrix, kept = case.matrix()
    weights = dense.randn(*case.basis.ranks, seed=3) * (case.basis.products > 0)
    image = space.matmul(weights)
    assert image.dtype == torch.float64
    assert dense.relative(image.flatten()[kept], matrix @ weights.flatten()[kept]) < 1e-12
    assert bool((image[case.basis.products == 0] == 0).all())
    single = space.matmul(weights, torch.float32)
    assert single.dtype == torch.float64
    assert 0 < dense.relative(single, image) < 1e-5
    weighted = (case.basis.products.sqrt() * weights).norm() / case.noise
    assert space.error_in_std(weights) == pytest.approx(float(weighted), rel=1e-12)
    diagonal = torch.diag(matrix) - torch.diag(case.phi[case.index].mT @ case.phi[case.index])[kept]
    share = len(case.index) / math.prod(case.shape)
    got = space.precondition(weights).flatten()[kept]
    torch.testing.assert_close(got, weights.flatten()[kept] / (diagonal + share), rtol=1e-9, atol=0)


@pytest.mark.parametrize("pattern", ["random", "block", "slice"])
@pytest.mark.parametrize("factors", ["1 axis", "smooth", "mixed"])
@pytest.mark.parametrize("share", [0.2, 1.0])
def test_the_leading_block(factors, pattern, share):
    """The inverse of the block on the leading functions, the diagonal's elsewhere; of all of them, of the matrix."""
    case = problem(FACTORS[factors], pattern, level=1e-3)
    space = case.space()
    matrix, kept = case.matrix()
    rank = max(1, round(share * len(kept)))
    preconditioner = space.leading_block(rank)
    residual = dense.randn(*case.basis.ranks, seed=4) * (case.basis.products > 0)
    before = residual.clone()
    got = preconditioner.precondition(residual)
    assert torch.equal(residual, before)
    assert got.shape == residual.shape
    products = case.basis.products.flatten()[kept]
    order = products.argsort(descending=True)
    inside, outside = order[:rank], order[rank:]
    # repeated eigenvalues may be taken in any order; the last one inside must not tie with the first outside
    assert not len(outside) or float(products[inside[-1]] / products[outside[0]]) >= 1.0 + 1e-9
    expected = space.precondition(residual).flatten()[kept]
    block = matrix[inside][:, inside]
    expected[inside] = torch.linalg.solve(block, residual.flatten()[kept][inside])
    assert dense.relative(got.flatten()[kept], expected) < 1e-8
    if share == 1.0:
        assert dense.relative(preconditioner.precondition(space.matmul(residual)), residual) < 1e-8


def test_size_and_cost_of_the_block():
    case = problem(smooth())
    space = case.space()
    above = int((case.basis.products > case.noise).sum())
    assert space.block_size(LOTS) == above
    assert space.block_size(1.0) == 0
    assert 1 <= space.block_size(40.0 * 25) <= 5
    assert space.block_flops(0) == math.inf
    assert 0 < space.block_flops(3) < space.block_flops(above)


# -- iterations ------------------------------------------------------------------------------------------------------


def test_without_gaps_one_iteration_does():
    """``Phi'Phi = I``: the preconditioner is the inverse."""
    case = problem(smooth(), "none", noise=1e-1)
    found = case.solve(tolerance=1e-3)
    assert found.iterations == 1
    assert found.rank == 0


def prescribed(values, shape=(12, 10), pattern="random", noise=1e-2, seed=0):
    """A kernel with the given eigenvalues on each axis, in a random basis."""
    vectors = [torch.linalg.qr(dense.randn(size, size, seed=seed + size)).Q for size in shape]
    factors = [q * t @ q.mT for q, t in zip(vectors, values, strict=True)]
    return problem(factors, pattern, noise, seed=seed)


@pytest.mark.parametrize(
    "decay", [lambda n: 2.0 ** -torch.arange(n), lambda n: 1.0 / (1.0 + torch.arange(n)) ** 2, lambda n: torch.ones(n)]
)
@pytest.mark.parametrize("noise", [1e-4, 1.0])
def test_prescribed_spectra_are_solved_exactly(decay, noise):
    case = prescribed([decay(12).double(), decay(10).double()], noise=noise)
    found = case.solve(tolerance=1e-9)
    assert found.converged
    matrix, kept = case.matrix()
    expected = torch.linalg.solve(matrix, case.rhs.flatten()[kept])
    assert dense.relative(found.weights.flatten()[kept], expected) < 1e-8
    assert dense.relative(case.phi @ found.weights.flatten(), case.mean()) < 1e-7


def test_one_eigenvalue_above_nothing():
    """A constant field: one function, one iteration, and its mean is the shrunk mean of the data."""
    ones = [torch.ones(8, 8, dtype=torch.float64), torch.ones(6, 6, dtype=torch.float64)]
    case = problem(ones, "random", noise=0.5)
    found = case.solve(tolerance=1e-5)
    assert found.iterations == 1
    count = len(case.index)
    expected = float(case.y.sum()) / (count + 0.5)
    mean = case.phi @ found.weights.flatten()
    torch.testing.assert_close(mean, torch.full((48,), expected, dtype=torch.float64), rtol=1e-6, atol=0)


def clustered():
    return problem(smooth((40, 36), 0.15), "block", noise=1e-4, fraction=0.5, level=1e-6)


def scattered():
    return problem(smooth((40, 36), 0.15), "random", noise=1e-4, fraction=0.3, level=1e-6)


def test_clustered_gaps_get_a_dense_block_that_cuts_iterations():
    case = clustered()
    without, with_block = case.solve(memory=1.0), case.solve()
    assert without.rank == 0
    assert with_block.rank == int((case.basis.products > case.noise).sum())
    assert with_block.converged
    assert with_block.iterations < 0.5 * without.iterations
    assert with_block.flops < without.flops
    assert_true(with_block, case, rounding=1e-12)
    if without.converged:
        assert dense.relative(with_block.weights, without.weights) < 1e-3


def test_scattered_gaps_get_none():
    found = scattered().solve(tolerance=1e-2)
    assert found.converged
    assert found.rank == 0
    assert found.iterations < 50


def test_a_block_limited_by_memory_still_converges():
    case = clustered()
    full = int((case.basis.products > case.noise).sum())
    found = case.solve(memory=40.0 * (0.6 * full) ** 2, tolerance=1e-4)
    assert 0 < found.rank <= 0.6 * full
    assert found.converged
    assert_true(found, case, rounding=1e-12)


def test_a_block_set_up_in_a_discarded_pass_is_still_reported():
    """Its set-up has been paid for, and it goes on preconditioning."""
    case = clustered()

    class Unfaithful(WeightSpace):
        """Sweeps in float32 that are far off: their pass ends with an iterate worse than the one it began with."""

        def matmul(self, weights, dtype=torch.float64):
            image = super().matmul(weights, dtype)
            return image if dtype == torch.float64 else image / 3.0

        def leading_block(self, rank):
            self.blocks = [*getattr(self, "blocks", []), rank]
            return super().leading_block(rank)

    solver = case.solver(tolerance=1e-6)
    solver.space = Unfaithful(MaskedGrid(case.mask), ReplicatedWeights(case.basis), case.noise)
    found = solver.solve()
    assert found.converged
    assert len(solver.space.blocks) == 1, "one block is enough"
    assert found.rank == solver.space.blocks[0], "the report knows nothing of the block"


@pytest.mark.parametrize("pattern", ["random", "block"])
def test_float32_sweeps_reach_a_float64_residual(monkeypatch, pattern):
    case = problem(smooth((20, 18), 0.3), pattern, noise=1e-2)
    taken, gram = [], MaskedGrid.gram
    monkeypatch.setattr(
        MaskedGrid, "gram", lambda grid, bases, weights: taken.append(bases[0].dtype) or gram(grid, bases, weights)
    )
    found = case.solve(tolerance=1e-6)
    assert found.converged
    assert found.passes >= 2
    assert_true(found, case)
    assert taken.count(torch.float32) == found.iterations, "all iterations in float32"
    assert taken.count(torch.float64) == found.passes, "one residual a pass in float64"


def test_float64_takes_over_where_float32_stalls():
    """A noise so small that float32 cannot resolve what gaps leave of the spectrum."""
    case = problem(smooth((30, 25), 0.2), "block", noise=1e-9, fraction=0.3, level=1e-3)
    found = case.solve(tolerance=0.1)
    assert found.converged
    assert_true(found, case, rounding=1e-11)


@pytest.mark.parametrize("count", [1, 3, 7])
def test_iterations_run_out(count):
    case = clustered()
    found = case.solve(max_iterations=count)
    assert found.iterations == count
    assert not found.converged
    assert found.error_in_std > 1e-6
    assert_true(found, case)


def test_no_iterations_at_all():
    case = scattered()
    found = case.solve(max_iterations=0)
    assert not found.converged
    assert found.residual == 1.0
    assert float(found.weights.abs().max()) == 0.0
    assert_true(found, case)


def test_data_of_zeros():
    case = scattered()
    case.y = torch.zeros_like(case.y)
    found = case.solve()
    assert found.converged
    assert found.iterations == 0
    assert (found.residual, found.error_in_std) == (0.0, 0.0)
    assert float(found.weights.abs().max()) == 0.0


# -- the certificate -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["random", "block", "one observation", "none", "slice"])
@pytest.mark.parametrize("factors", ["smooth", "rough", "mixed"])
@pytest.mark.parametrize("noise", [1e-8, 1e-4, 1.0])
def test_the_error_of_the_mean_is_within_its_bound_wherever_iterations_end(factors, pattern, noise):
    case = problem(FACTORS[factors], pattern, noise)
    for count in (0, 1, 2, 5, 20):
        assert_true(case.solve(max_iterations=count), case, rounding=1e-12)


def test_zeros_in_the_gaps_are_not_taken_for_a_solution():
    """They leave a relative residual of the size of the noise, which says nothing of the mean in the gaps."""
    case = problem([dense.matern32(20, 0.3), dense.matern32(22, 0.3)], "random", noise=1e-8, fraction=0.05)
    zeros = torch.zeros(math.prod(case.shape), dtype=torch.float64)
    zeros[case.index] = case.y
    weights = (case.phi.mT @ zeros).view(case.basis.ranks)
    assert case.own_residual(weights) < 1e-3
    assert case.true_error(weights) > 1.0
    found = case.solve(weights, tolerance=1e-2)
    assert found.iterations > 1
    assert found.converged
    assert case.true_error(found.weights) <= 1e-2


def test_a_tolerance_that_rounding_forbids_is_not_met_and_said_so():
    case = problem(smooth(), "random", noise=1e-8, level=1e-3)
    found = case.solve(tolerance=1e-12)
    assert not found.converged
    assert found.error_in_std > 1e-12
    assert_true(found, case, rounding=1e-12)


# -- starting, watching ----------------------------------------------------------------------------------------------


def test_from_the_solution_nothing_is_left_to_do():
    case = clustered()
    first = case.solve(tolerance=1e-4)
    again = case.solve(first.weights, tolerance=1e-4)
    assert again.iterations == 0
    assert again.converged
    assert torch.equal(again.weights, first.weights)
    assert again.residual == pytest.approx(first.residual, rel=1e-6)


def test_from_a_good_start_fewer_iterations():
    case = clustered()
    cold = case.solve(tolerance=1e-4, memory=1.0)
    start = case.solve(tolerance=1.0, memory=1.0).weights
    before = start.clone()
    warm = case.solve(start, tolerance=1e-4, memory=1.0)
    assert torch.equal(start, before), "the start is the caller's"
    assert warm.converged
    assert warm.iterations < cold.iterations
    assert dense.relative(warm.weights, cold.weights) < 1e-3


def test_from_a_bad_start():
    case = scattered()
    found = case.solve(1e8 * dense.randn(*case.basis.ranks) * (case.basis.products > 0), tolerance=1e-2)
    assert found.converged
    assert_true(found, case, rounding=1e-12)


def test_the_right_hand_side_is_left_alone_and_every_iteration_watched():
    case, seen = clustered(), []
    solver = case.solver(
        tolerance=1e-2, watch=lambda weights, count: seen.append((count, case.own_residual(weights())))
    )
    before = solver.rhs.clone()
    found = solver.solve()
    assert torch.equal(solver.rhs, before)
    assert [count for count, _ in seen] == list(range(1, found.iterations + 1))
    assert seen[-1][1] == pytest.approx(found.residual, rel=0.5)
    assert seen[-1][1] < seen[0][1]


def test_twice_is_the_same():
    first, second = clustered().solve(), clustered().solve()
    assert torch.equal(first.weights, second.weights)
    assert (first.iterations, first.rank, first.flops) == (second.iterations, second.rank, second.flops)


def test_descent_is_conjugate_gradients():
    """On any matrix: in exact arithmetic it ends after as many steps as there are eigenvalues, here three."""
    vectors = torch.linalg.qr(dense.randn(12, 12)).Q
    matrix = vectors * torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64).repeat(4) @ vectors.mT
    rhs = dense.randn(12, seed=1)
    descent = ConjugateGradients(lambda x: matrix @ x, rhs.clone(), dots=torch.dot)
    sizes = []
    for _ in range(3):
        descent.step()
        torch.testing.assert_close(descent.residual, rhs - matrix @ descent.solution, rtol=0, atol=1e-13)
        error = descent.solution - torch.linalg.solve(matrix, rhs)
        sizes.append(float(error @ matrix @ error))
    assert sizes[0] > sizes[1] > sizes[2]
    assert dense.relative(descent.solution, torch.linalg.solve(matrix, rhs)) < 1e-13


def test_a_block_is_set_up_where_iterations_would_run_out(monkeypatch):
    """However dear it is: twenty iterations have halved the residual, and hundreds are still to come."""
    monkeypatch.setattr(WeightSpace, "block_flops", lambda self, rank: 1e18)
    for most, pays in ((100_000, False), (100, True)):
        solver = clustered().solver(tolerance=1e-8, max_iterations=most)
        assert solver._block_pays(20, most, 0.5, 1.0, torch.float32) is pays
