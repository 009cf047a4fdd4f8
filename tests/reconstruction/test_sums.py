"""``gaps.reconstruct`` for a sum of products: dense algebra, its preconditioner, several processes, wrong arguments."""

import math
from functools import reduce

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel

import gpytorch_gaps as gaps
from gpytorch_gaps.linalg.truncated_sum import truncated_sum
from gpytorch_gaps.reconstruction.sum_preconditioner import SumPreconditioner
from tests import _dense as dense
from tests._ranks import run_ranks
from tests.distributed import _work as work
from tests.distributed.test_reconstruct import alone, check_same


def term(lengths, scale=1.0, kind=RBFKernel):
    """One kernel per axis, the first with a scale."""
    kernels = [kind().double() for _ in lengths]
    for kernel, length in zip(kernels, lengths, strict=True):
        kernel.lengthscale = length
    kernels[0] = ScaleKernel(kernels[0]).double()
    kernels[0].outputscale = scale
    return kernels


CASES = {
    "one axis": ((300,), [term([0.5]), term([0.05])], 1e-2),
    "a trend and details": ((24, 18), [term([0.5, 0.5]), term([0.08, 0.1], 0.3)], 1e-2),
    "rough on one axis each": ((18, 14), [term([0.5, 0.05]), term([0.06, 0.6])], 1e-3),
    "a small noise": ((24, 18), [term([0.6, 0.5]), term([0.3, 0.35])], 1e-6),
    "smooth and not": ((20, 15), [term([0.5, 0.5]), term([0.3, 0.3], 0.2, MaternKernel)], 1e-2),
    "three terms": (
        (9, 8, 7),
        [term([a, b, c]) for a, b, c in ((0.5, 0.5, 0.5), (0.2, 0.1, 0.4), (0.2, 0.8, 0.1))],
        1e-2,
    ),
    "the same twice": ((24, 18), [term([0.3, 0.3])] * 2, 1e-2),
}


def axes_of(shape):
    return [np.linspace(0.0, 1.0, size) for size in shape]


@torch.no_grad()
def prior_of(shape, terms):
    axes = [torch.as_tensor(axis) for axis in axes_of(shape)]
    return sum(reduce(torch.kron, [k(x).to_dense() for k, x in zip(own, axes, strict=True)]) for own in terms)


def field_of(shape, prior, noise, pattern="random", seed=0):
    """A draw with noise and gaps, and the observed cells."""
    root = torch.linalg.cholesky(prior + 1e-9 * torch.eye(len(prior)))
    y = root @ dense.randn(len(prior), seed=seed) + math.sqrt(noise) * dense.randn(len(prior), seed=seed + 1)
    index = dense.observed(pattern, shape, 0.4, seed)
    values = torch.full_like(y, math.nan)
    values[index] = y[index]
    return values.view(shape), index


def posterior(prior, values, index, noise, mean=0.0):
    """Mean and standard deviation of f at all cells, dense."""
    system = prior[index][:, index] + noise * torch.eye(len(index))
    gain = torch.linalg.solve(system, prior[index]).mT
    means = mean + torch.zeros_like(values).flatten()
    found = means + gain @ (values.flatten() - means)[index]
    return found, (prior.diagonal() - (gain * prior[:, index]).sum(-1)).clamp_min(0).sqrt()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("pattern", ["random", "block"])
def test_means_and_deviations_are_dense(case, pattern):
    shape, terms, noise = CASES[case]
    prior = prior_of(shape, terms)
    values, index = field_of(shape, prior, noise, pattern)
    mean, std = posterior(prior, values, index, noise)
    result = gaps.reconstruct(values, axes_of(shape), terms, noise, draws=16, progress=False)
    assert result.report.converged
    found = result.slab(0, shape[0]).flatten()
    assert float(((found - mean).abs() / std).max()) <= result.report.error_in_std
    points = gaps.CartesianGrid([torch.as_tensor(axis) for axis in axes_of(shape)]).points()
    assert float(((result.at(points) - mean).abs() / std).max()) <= 2 * result.report.error_in_std
    off = (result.std_slab(0, shape[0]).flatten() / std - 1).abs()
    assert float((off <= result.report.std_error).double().mean()) > 0.9


def test_as_many_iterations_as_one_term_takes():
    """Functions that terms share make a diagonal preconditioner useless: here it would take hundreds."""
    shape, long, short = (120, 90), term([0.4, 0.4]), term([0.15, 0.15], 0.1)
    values, _ = field_of((24, 18), prior_of((24, 18), [long]), 1e-2)
    values = torch.kron(values, torch.ones(5, 5, dtype=torch.float64)) + 0.1 * dense.randn(*shape, seed=3)
    found = [gaps.reconstruct(values, axes_of(shape), k, 1e-2, progress=False).report for k in (short, [long, short])]
    assert all(report.converged for report in found)
    assert found[1].iterations <= 2 * found[0].iterations + 5


def test_a_trend_goes_with_it():
    shape, terms, noise = CASES["a trend and details"]
    prior = prior_of(shape, terms)
    values, index = field_of(shape, prior, noise)
    axes = axes_of(shape)
    trend = torch.as_tensor(5.0 * axes[0][:, None] - 2.0 * axes[1])
    mean, std = posterior(prior, values + trend, index, noise, trend.flatten())
    for given in (trend, lambda points: 5.0 * points[:, 0] - 2.0 * points[:, 1]):
        result = gaps.reconstruct(values + trend, axes, terms, noise, mean=given, progress=False)
        assert float(((result.slab(0, shape[0]).flatten() - mean).abs() / std).max()) <= 1e-2


def test_it_is_what_a_model_in_memory_predicts():
    shape, terms, noise = CASES["a trend and details"]
    values, _ = field_of(shape, prior_of(shape, terms), noise)
    grid, x, y = gaps.from_array(values, [torch.as_tensor(axis) for axis in axes_of(shape)])
    own = [gaps.GappyGridKernel(kernels, grid) for kernels in terms]

    class Model(gpytorch.models.ExactGP):
        def __init__(self, likelihood):
            super().__init__(x, y, likelihood)
            self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), own[0] + own[1]

        def forward(self, points):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(points), self.covar_module(points))

    likelihood = gaps.GappyGridLikelihood().double()
    likelihood.noise = noise
    model = Model(likelihood).eval()
    with torch.no_grad():
        expected = model(grid.points()).mean.view(shape)
    kernels = [kernel.kernels for kernel in own]  # as a user has them
    result = gaps.reconstruct(values, axes_of(shape), kernels, likelihood.noise, tolerance=1e-6, progress=False)
    torch.testing.assert_close(result.slab(0, shape[0]), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_the_preconditioner_inverts_the_matrix_without_gaps(case):
    shape, terms, noise = CASES[case]
    axes = [torch.as_tensor(axis) for axis in axes_of(shape)]
    with torch.no_grad():
        factors = [[kernel(x).to_dense() for kernel, x in zip(own, axes, strict=True)] for own in terms]
    basis, share = truncated_sum(factors, 0.1 * noise), 0.6
    psi = torch.stack([basis.to_box(own).flatten() for own in torch.eye(basis.size).double()], dim=-1)
    matrix = torch.diag(noise / basis.products) + share * psi.mT @ psi
    solve = SumPreconditioner(basis, noise / basis.products, share, most=10**4)
    inverse = torch.stack([solve(own) for own in torch.eye(basis.size).double()], dim=-1)
    torch.testing.assert_close(inverse, inverse.mT, rtol=1e-6, atol=1e-6 * float(inverse.abs().max()))
    spectrum = torch.linalg.eigvals(inverse @ matrix)
    assert float(spectrum.imag.abs().max()) < 1e-6
    assert 0.5 < float(spectrum.real.min()) <= float(spectrum.real.max()) < 1.5


def test_a_small_memory_only_takes_longer():
    shape, terms, noise = CASES["a trend and details"]
    values, _ = field_of(shape, prior_of(shape, terms), noise)
    few, many = (
        gaps.reconstruct(values, axes_of(shape), terms, noise, memory=memory, progress=False) for memory in (4e3, 2**31)
    )
    assert few.report.converged
    assert few.report.iterations > many.report.iterations


def test_several_processes_share_it():
    options = {"kind": "sum", "tolerance": 1e-6}
    check_same(run_ranks(2, "tests.distributed._work", "reconstruct", (14, 11), options), alone((14, 11), options))
    assert work.kernels_of("sum", 2, 0.3)[1][0].lengthscale < 0.3


def test_what_it_does_not_take():
    shape, terms, noise = CASES["a trend and details"]
    values, _ = field_of(shape, prior_of(shape, terms), noise)
    with pytest.raises(ValueError, match="kernels: got 1, expected 2, one for each axis"):
        gaps.reconstruct(values, None, [terms[0], terms[1][:1]], noise)
    with pytest.raises(ValueError, match="kernels: got a sum of 2 products; expected one"):
        gaps.fit_reconstruction(values, axes_of(shape), terms, noise, progress=False)
