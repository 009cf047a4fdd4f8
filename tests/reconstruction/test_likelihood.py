"""The marginal likelihood of a swept grid and its derivatives, against dense float64 algebra."""

import math

import pytest
import torch

from gpytorch_gaps.linalg.masked_grid import MaskedGrid
from gpytorch_gaps.linalg.truncated import truncated_eigh
from gpytorch_gaps.reconstruction import likelihood as module
from gpytorch_gaps.reconstruction.likelihood import StreamedLikelihood, random_signs
from gpytorch_gaps.reconstruction.reference_matrix import ReferenceMatrix
from gpytorch_gaps.reconstruction.sharding import ReplicatedWeights
from gpytorch_gaps.reconstruction.weight_solver import WeightSolver
from gpytorch_gaps.reconstruction.weight_space import WeightSpace
from tests import _dense as dense
from tests._covering import covering

SHAPES = {"1 axis": (300,), "2 axes": (24, 20), "3 axes": (9, 8, 7)}
MATRICES = {"smooth": dense.se, "rough": dense.matern32}
LENGTH = 0.35


class Case:
    """Data with gaps drawn from a product kernel, and their log-likelihood by dense algebra, by autograd."""

    def __init__(self, shape, kind="smooth", pattern="random", noise=1e-2, seed=0):
        self.lengths = [torch.tensor(LENGTH, dtype=torch.float64, requires_grad=True) for _ in shape]
        self.factors = [MATRICES[kind](size, own) for size, own in zip(shape, self.lengths, strict=True)]
        self.index = dense.observed(pattern, shape, 0.4, seed)
        self.noise = torch.tensor(noise, dtype=torch.float64, requires_grad=True)
        matrix = dense.kron(self.factors)[self.index][:, self.index]
        system = matrix + self.noise * torch.eye(len(self.index), dtype=torch.float64)
        root = torch.linalg.cholesky(system)
        self.y = (root @ dense.randn(len(self.index), seed=seed + 1)).detach()
        scaled = torch.linalg.solve_triangular(root, self.y.unsqueeze(-1), upper=False)
        log_det = 2.0 * root.diagonal().log().sum()
        value = -0.5 * (scaled.square().sum() + log_det + len(self.index) * math.log(2.0 * math.pi))
        *self.gradient, by_noise = torch.autograd.grad(value, [*self.lengths, self.noise], retain_graph=True)
        self.value, self.by_log_noise = value.item(), by_noise.item() * noise

    def streamed(self, level=1e-9, tolerance=1e-6):
        noise = self.noise.item()
        basis = truncated_eigh(self.factors, level * noise)
        mask = torch.zeros(basis.shape, dtype=torch.bool)
        mask.view(-1)[self.index] = True
        rhs = dense.kron(basis.vectors)[self.index].mT @ self.y
        rhs = rhs.view(basis.ranks) * (basis.products > 0)
        space = WeightSpace(MaskedGrid(mask), ReplicatedWeights(basis), noise)
        solver = WeightSolver(space, rhs, tolerance, 5000, 2.0**31, lambda weights, iterations: None)
        return StreamedLikelihood(solver, rhs, float(self.y.norm()))

    def by_length(self, found, basis):
        """Derivatives by the length-scales: ``<S_i, Y_i> / 2`` with the derivatives of the factors by autograd."""
        result = []
        for length, factor, sums, vectors, values in zip(
            self.lengths, self.factors, found.axes, basis.vectors, basis.values, strict=True
        ):
            scaled = vectors / values.sqrt()
            contracted = 0.5 * (factor * (scaled @ sums @ scaled.mT)).sum()
            result.append(float(torch.autograd.grad(contracted, length, retain_graph=True)[0]))
        return result


@covering(shape=SHAPES, kind=MATRICES, pattern=["none", "random", "block", "slice"], noise=[1.0, 1e-2, 1e-4])
def test_with_a_complete_block_the_likelihood_is_exact(shape, kind, pattern, noise):
    case = Case(SHAPES[shape], kind, pattern, noise)
    streamed = case.streamed()
    assert streamed.is_exact
    value, error = streamed.value(0, 0)
    assert error == 0.0
    assert value == pytest.approx(case.value, abs=1e-6)
    found = streamed.derivatives(0, 0)
    assert not found.probes
    assert found.noise == pytest.approx(case.by_log_noise, abs=1e-5)
    for own, expected in zip(case.by_length(found, streamed.space.basis), case.gradient, strict=True):
        assert own * LENGTH == pytest.approx(float(expected) * LENGTH, abs=1e-5)


@pytest.mark.parametrize("pattern", ["random", "block"])
def test_probes_estimate_the_rest_without_bias_and_state_their_error(monkeypatch, pattern):
    monkeypatch.setattr(module, "_MOST_EXACT_WEIGHTS", 0)
    case, count = Case((30, 26), pattern=pattern), 48
    streamed = case.streamed(level=1e-7)
    assert not streamed.is_exact
    assert (streamed.solver.block is not None) == (pattern == "block")  # of the leading functions
    value, error = streamed.value(count, 0)
    assert error < 0.5  # nats, of a likelihood that varies by sqrt(N / 2)
    assert abs(value - case.value) <= 4.0 * error
    found, basis = streamed.derivatives(count, 0), streamed.space.basis
    for axis, (own, expected) in enumerate(zip(case.by_length(found, basis), case.gradient, strict=True)):
        apart = torch.tensor([case.by_length(one, basis)[axis] for one in found.probes])
        assert abs(own - float(expected)) <= 4.0 * float(apart.std()) / math.sqrt(count) + 1e-3
    apart = torch.tensor([one.noise for one in found.probes])
    assert abs(found.noise - case.by_log_noise) <= 4.0 * float(apart.std()) / math.sqrt(count) + 1e-3


@pytest.mark.parametrize("rank", [0, 17, None])
def test_the_reference_matrix(rank):
    """Determinant, root, inverse and sums of ``I - B0``, with a block of none, some or all functions."""
    space = Case((7, 6, 5), noise=1e-2).streamed(level=1e-4).space
    kept = (space.products.flatten() > 0).nonzero().squeeze(-1)
    rank = len(kept) if rank is None else rank
    block = space.leading_block(rank) if rank else None
    reference = ReferenceMatrix(space, block)
    assert reference.is_exact == (rank == len(kept))
    phi = dense.kron(space.basis.vectors)[space.grid.observed.flatten()][:, kept]
    products = space.products.flatten()[kept]
    expected = torch.diag(space.noise / products + space.share)
    inside = torch.isin(kept, block.index).nonzero().squeeze(-1) if rank else kept[:0]
    exact = torch.diag(space.noise / products) + phi.mT @ phi
    expected[inside[:, None], inside] = exact[inside[:, None], inside]
    remaining = space.noise * torch.linalg.inv(expected) / (products[:, None] * products).sqrt()
    assert reference.log_determinant() == pytest.approx(-float(torch.logdet(remaining)), rel=1e-10)
    explained = torch.zeros(2 * [space.products.numel()], dtype=torch.float64)
    explained[kept[:, None], kept] = torch.eye(len(kept), dtype=torch.float64) - remaining
    assert reference.explained() == pytest.approx(float(explained.trace()), rel=1e-10)
    boxed = explained.view(2 * space.products.shape)
    for axis, equation in enumerate(["abcdbc->ad", "abcadc->bd", "abcabd->cd"]):
        assert dense.relative(reference.explained_along(axis), torch.einsum(equation, boxed)) < 1e-10
    x = dense.randn(*space.products.shape, seed=3) * (space.products > 0)
    assert dense.relative(reference.solve(x).flatten()[kept], torch.linalg.solve(expected, x.flatten()[kept])) < 1e-9
    rooted = reference.root_matmul(x)
    quadratic = float(rooted.flatten() @ reference.solve(rooted).flatten())
    assert quadratic == pytest.approx(float(x.square().sum()), rel=1e-9)


def test_signs_of_a_function_depend_on_its_positions_only():
    small, large = (random_signs(torch.ones(shape, dtype=torch.bool), 2, 5) for shape in ((6, 7, 5), (8, 9, 9)))
    torch.testing.assert_close(large[:6, :7, :5], small)
    other = random_signs(torch.ones(8, 9, 9, dtype=torch.bool), 3, 5)
    for mean in (large.mean(), (large * other).mean(), (large[1:] * large[:-1]).mean()):
        assert abs(float(mean)) < 4.0 / math.sqrt(large.numel())
    kept = large > 0
    assert torch.equal(random_signs(kept, 2, 5), torch.where(kept, large, 0.0))
