"""Weights solved for a variance: every method reaches the variance's own tolerance, against dense float64."""

import warnings

import pytest
import torch

from gpytorch_gaps.solvers import solve
from gpytorch_gaps.solvers.config import SolveConfig
from gpytorch_gaps.solvers.gap_system import GapSystem
from gpytorch_gaps.solvers.goal import Goal
from tests import _dense as dense

SHAPE = (14, 12)
FACTORS = [dense.matern32(SHAPE[0], 0.4), dense.matern32(SHAPE[1], 0.3)]
INDEX = dense.observed("random", SHAPE)
METHODS = ["fill", "ignore", "spectral", "cholesky", "auto"]
NOISES = [1e-6, 1e-4, 1e-2, 1.0]


def problem(noise, columns):
    """The system, covariances of some cells with the data, their prior variances, and their posterior variances."""
    diagonal = torch.tensor([noise], dtype=torch.float64)
    kernel = dense.kron(FACTORS)
    cells = torch.linspace(0, SHAPE[0] * SHAPE[1] - 1, columns).long()
    cross, prior = kernel[INDEX][:, cells], kernel.diagonal()[cells]
    weights = torch.linalg.solve(dense.system(FACTORS, INDEX, diagonal), cross)
    return GapSystem(FACTORS, INDEX, diagonal), cross, prior, prior - (weights * cross).sum(0)


def variances(solved, cross, prior):
    """``k - a'(g + r)``, which is ``k - 2 a'g + a'A a``."""
    return prior - (solved.solution * (cross + solved.residual)).sum(0)


@pytest.mark.parametrize("tolerance", [1e-2, 1e-4])
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("method", METHODS)
def test_variances_are_within_the_tolerance(method, noise, tolerance):
    system, cross, prior, exact = problem(noise, 9)
    config = SolveConfig(method=method, tolerance=tolerance, dense_size=0, max_iterations=5000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        solved = solve.solve_system(system, cross, config, prior=prior)
    assert solved.report.converged
    error = (variances(solved, cross, prior) - exact) / exact
    assert float(error.abs().max()) <= 1.01 * tolerance
    # weights that are not exact never make a variance smaller, but for rounding
    assert float(error.min()) >= -1e-9 / float(exact.min())


def test_weights_that_have_blown_up_do_not_meet_their_own_variance():
    """``k - a'(g + r)`` is then far above the prior variance, and would allow any residual."""
    system, cross, prior, _ = problem(1e-12, 3)
    weights = 1e11 * dense.randn(*cross.shape)
    residual = cross - system.matmul(weights)
    goal = Goal.of(system, cross, 1e-6, prior=prior).assessed(cross, weights, residual)
    assert bool((goal.measure(residual) > 1e6 * goal.tolerance).all())


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("method", ["fill", "ignore", "auto"])
def test_units_do_not_matter(method, scale):
    """Data in other units: covariances and variances scale with their square."""
    _, cross, prior, exact = problem(1e-3, 5)
    factors = [scale**2 * FACTORS[0], FACTORS[1]]
    system = GapSystem(factors, INDEX, torch.tensor([1e-3 * scale**2], dtype=torch.float64))
    config = SolveConfig(method=method, tolerance=1e-3, dense_size=0)
    solved = solve.solve_system(system, scale**2 * cross, config, prior=scale**2 * prior)
    assert solved.report.converged
    found = variances(solved, scale**2 * cross, scale**2 * prior) / scale**2
    torch.testing.assert_close(found, exact, rtol=1e-3, atol=0)


@pytest.mark.parametrize("noise", NOISES)
def test_per_point_noise(noise):
    diagonal = noise * (1.0 + dense.randn(len(INDEX)).abs())
    _, cross, prior, _ = problem(noise, 7)
    matrix = dense.system(FACTORS, INDEX, diagonal)
    exact = prior - (cross * torch.linalg.solve(matrix, cross)).sum(0)
    system = GapSystem(FACTORS, INDEX, diagonal)
    config = SolveConfig(tolerance=1e-3, dense_size=0, max_iterations=5000)
    solved = solve.solve_system(system, cross, config, prior=prior)
    assert solved.report.converged
    torch.testing.assert_close(variances(solved, cross, prior), exact, rtol=1.01e-3, atol=0)


def test_a_cell_without_covariance_keeps_its_prior():
    system, cross, prior, exact = problem(1e-2, 3)
    cross[:, 1] = 0.0
    solved = solve.solve_system(system, cross, SolveConfig(method="ignore", tolerance=1e-3), prior=prior)
    found = variances(solved, cross, prior)
    assert float(found[1]) == float(prior[1])
    torch.testing.assert_close(found[[0, 2]], exact[[0, 2]], rtol=1.01e-3, atol=0)


@pytest.mark.parametrize("zeros", ["one", "all"])
@pytest.mark.parametrize("method", ["ignore", "cholesky"])
def test_without_noise_a_residual_is_what_counts(method, zeros):
    """No residual bounds a variance then: it must not be called not converged, nor lose what restarts have gained."""
    noise = torch.zeros(1) if zeros == "all" else torch.full((len(INDEX),), 1e-2).index_fill(0, torch.tensor([3]), 0.0)
    _, cross, prior, _ = problem(1.0, 9)
    system = GapSystem(FACTORS, INDEX, noise.double())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = SolveConfig(method=method, rank=0, max_iterations=5000)
        solved = solve.solve_system(system, cross, config, prior=prior)
    assert solved.report.converged
    assert solved.report.worst_residual < 1e-8
    exact = prior - (cross * torch.linalg.solve(dense.system(FACTORS, INDEX, noise.double()), cross)).sum(0)
    assert float((variances(solved, cross, prior) - exact).abs().max()) < 1e-9
