"""What a solve reports is true: residuals of the original system recomputed densely, convergence, warm starts."""

import warnings

import linear_operator
import pytest
import torch

from gpytorch_gaps import NotConvergedWarning, record_solves, settings
from gpytorch_gaps.solvers.gap_system import GapSystem
from tests import _dense as dense
from tests._dense import solve_system

SHAPE = (9, 8)
METHODS = ("fill", "ignore", "penalize", "cholesky", "auto")


def number(value):
    return torch.tensor([value], dtype=torch.float64)


def factors():
    return [dense.matern32(9), dense.se(8, 0.4)]


def axes(shape=SHAPE, spread=2.0):
    """Noise over `spread` orders of magnitude on every axis."""
    return tuple(torch.logspace(-spread, 0, size, dtype=torch.float64).roll(size // 2) for size in shape)


def make(factor_list, index, noise):
    if isinstance(noise, tuple):
        return GapSystem(factor_list, index, axis_noise=noise)
    return GapSystem(factor_list, index, noise)


def recomputed(factor_list, index, noise, solution, rhs):
    """``||(K_XX + D) a - y|| / ||y||`` per column, dense float64."""
    matrix = dense.system([f.double() for f in factor_list], index, noise)
    return (matrix @ solution.double() - rhs.double()).norm(dim=-2) / rhs.double().norm(dim=-2)


def check_report(report, factor_list, index, noise, solution, rhs, rounding=1e-13):
    """The reported residual is the recomputed one, up to the rounding of a product with the matrix."""
    expected = recomputed(factor_list, index, noise, solution, rhs)
    assert report.residual.shape == expected.shape
    assert torch.allclose(report.residual, expected, rtol=1e-3, atol=rounding)
    assert report.converged == bool((report.residual <= report.tolerance).all())
    assert report.worst_residual == float(report.residual.max())
    assert report.num_rhs == rhs.shape[:-2].numel() * rhs.size(-1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("tolerance", [1e-2, 1e-6, 1e-10])
@pytest.mark.parametrize("kind", ["constant", "product"])
def test_the_reported_residual_is_the_true_one(kind, tolerance, method):
    index = dense.observed("random", SHAPE)
    noise = number(1e-2) if kind == "constant" else axes()
    rhs = dense.randn(len(index), 4) * torch.tensor([1.0, 1e-6, 1e4, 1.0], dtype=torch.float64)
    solution, report = solve_system(
        make(factors(), index, noise), rhs, method=method, tolerance=tolerance, dense_size=0
    )
    check_report(report, factors(), index, noise, solution, rhs)
    assert report.converged
    assert report.tolerance == tolerance


@pytest.mark.parametrize("method", ["ignore", "cholesky", "auto"])
def test_reported_residual_noise_per_point(method):
    index = dense.observed("block", SHAPE)
    noise = torch.logspace(-4, 1, len(index), dtype=torch.float64)
    rhs = dense.randn(len(index), 3)
    solution, report = solve_system(make(factors(), index, noise), rhs, method=method, tolerance=1e-8, dense_size=0)
    check_report(report, factors(), index, noise, solution, rhs)
    assert report.converged


@pytest.mark.parametrize("method", METHODS)
def test_reported_residual_batches(method):
    index = dense.observed("random", (5, 4))
    batch = [dense.random_psd(5, 1, batch=(3,)), dense.random_psd(4, 2, batch=(3,))]
    noise = torch.tensor([[1e-3], [1.0], [1e2]], dtype=torch.float64)
    rhs = dense.randn(3, len(index), 2)
    solution, report = solve_system(make(batch, index, noise), rhs, method=method, tolerance=1e-7, dense_size=0)
    assert report.residual.shape == (3, 2)
    check_report(report, batch, index, noise, solution, rhs)


@pytest.mark.parametrize("whose", ["solve", "inv_quad", "inv_quad_logdet"])
def test_reported_residual_through_the_operator_with_product_noise(whose):
    """Whitening happens inside; the report is in the units of the right-hand side, whichever call made the solve."""
    index, noise = dense.observed("random", SHAPE), axes()
    rhs = dense.randn(len(index), 3)
    operator = dense.build(factors(), index, noise)
    with (
        linear_operator.settings.max_cholesky_size(0),
        settings.logdet_method("exact"),
        settings.gap_method("fill"),
        settings.solve_tolerance(1e-3),
        settings.train_tolerance(1e-3),
        record_solves() as solves,
    ):
        solution = operator.solve(rhs)
        if whose == "inv_quad":
            operator.inv_quad(rhs)
        elif whose == "inv_quad_logdet":
            operator.inv_quad_logdet(rhs, logdet=True)
    expected = recomputed(factors(), index, noise, solution, rhs)
    # the same method at the same tolerance from the same start: the same iterate
    assert torch.allclose(solves[-1].residual, expected, rtol=1e-3, atol=1e-13)


@pytest.mark.parametrize("logdet", ["exact", "stochastic"])
@pytest.mark.parametrize("rank", [None, 8], ids=["auto", "rank 8"])
def test_every_solve_of_a_likelihood_is_reported(logdet, rank):
    """A recorder sees the solve with the data, also where the log-determinant's probes are solved for along with it."""
    index, noise = dense.observed("random", SHAPE), number(1e-2)
    with (
        linear_operator.settings.max_cholesky_size(0),
        settings.logdet_method(logdet),
        settings.preconditioner_rank(rank),
        record_solves() as solves,
    ):
        dense.build(factors(), index, noise).inv_quad_logdet(dense.randn(len(index), 1), logdet=True)
    assert len(solves) == 1
    assert len(solves.logdets) == 1
    assert solves[0].converged


@pytest.mark.parametrize("method", ["fill", "auto"])
def test_fill_residual_at_small_noise_is_the_original_one(method):
    """At s2 = 1e-6 fill-gaps' own residual is amplified by |K| / s2, about 1e7; the original one is reported."""
    shape = (16, 14)
    smooth, noise = [dense.se(16, 0.4), dense.se(14, 0.4)], number(1e-6)
    index = dense.observed("random", shape)
    rhs = dense.randn(len(index), 2)
    solution, report = solve_system(make(smooth, index, noise), rhs, method=method, tolerance=1e-5, dense_size=0)
    # ||a|| is up to ||y|| / s2, so a product with the matrix rounds at about 1e-16 * |K| / s2 = 1e-9
    check_report(report, smooth, index, noise, solution, rhs, rounding=1e-8)
    assert report.converged


def test_fill_stopped_early_at_small_noise_reports_a_large_residual():
    """A handful of iterations make fill-gaps' own residual small and the original one not: the report must show it."""
    shape = (16, 14)
    smooth, noise = [dense.se(16, 0.4), dense.se(14, 0.4)], number(1e-6)
    index = dense.observed("block", shape)
    gaps = dense.gaps_of(index, shape)
    rhs = dense.kron(smooth)[index][:, gaps[:1]]  # smooth data
    with pytest.warns(NotConvergedWarning):
        solution, report = solve_system(make(smooth, index, noise), rhs, method="fill", max_iterations=12)
    check_report(report, smooth, index, noise, solution, rhs, rounding=1e-7)
    assert not report.converged
    assert report.worst_residual > 1e-6


@pytest.mark.parametrize("method", ["fill", "ignore", "penalize"])
def test_not_converged_warns_and_says_so(method):
    index, noise = dense.observed("block", SHAPE), number(1e-4)
    rhs = dense.randn(len(index), 3)
    with record_solves() as solves, pytest.warns(NotConvergedWarning, match=f"'{method}' stopped after 3 iterations"):
        solution, report = solve_system(
            make(factors(), index, noise), rhs, method=method, rank=0, max_iterations=3, tolerance=1e-8
        )
    assert solves == [report]
    assert not report.converged
    assert "NOT CONVERGED" in str(report)
    assert report.iterations == 3
    assert report.worst_residual > 1e-8
    check_report(report, factors(), index, noise, solution, rhs)


def test_auto_warns_when_all_its_plans_fail():
    index, noise = dense.observed("block", SHAPE), number(1e-5)
    rhs = dense.randn(len(index), 1)
    with pytest.warns(NotConvergedWarning):
        solution, report = solve_system(
            make(factors(), index, noise), rhs, max_iterations=1, dense_size=0, tolerance=1e-13
        )
    assert not report.converged
    check_report(report, factors(), index, noise, solution, rhs)


def test_a_converged_solve_does_not_warn():
    index = dense.observed("random", SHAPE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for method in METHODS:
            solve_system(make(factors(), index, number(0.1)), dense.randn(len(index), 1), method=method)


@pytest.mark.parametrize("method", ["fill", "ignore", "penalize", "auto"])
@pytest.mark.parametrize("noise", [1e-2, 1e-4])
def test_float32_systems_are_refined(noise, method):
    """Factors in float32, a right-hand side in float64 to see the solution before it is rounded: residual 1e-6.

    Plain float32 conjugate gradients stall near 1e-4 here.
    """
    single = [factor.float() for factor in factors()]
    index = dense.observed("random", SHAPE)
    rhs = dense.randn(len(index), 3)
    solution, report = solve_system(
        make(single, index, number(noise)), rhs, method=method, tolerance=1e-6, dense_size=0
    )
    assert report.converged
    assert float(recomputed(single, index, number(noise), solution, rhs).max()) <= 1e-6
    check_report(report, single, index, number(noise), solution, rhs, rounding=1e-11)
    rounded, _ = solve_system(
        make(single, index, number(noise)), rhs.float(), method=method, tolerance=1e-6, dense_size=0
    )
    assert rounded.dtype == torch.float32


@pytest.mark.parametrize("method", METHODS)
def test_columns_of_different_difficulty(method):
    """Every column meets the tolerance: rough, smooth, an eigenvector, zero, and tiny."""
    index, noise = dense.observed("random", SHAPE), number(1e-3)
    matrix = dense.system(factors(), index, noise)
    columns = dense.randn(len(index), 6)
    columns[:, 1] = matrix[:, 0]
    columns[:, 2] = torch.linalg.eigh(matrix).eigenvectors[:, -1]
    columns[:, 3] = 0.0
    columns[:, 4] *= 1e-30
    columns[:, 5] = torch.linalg.eigh(matrix).eigenvectors[:, 0]
    solution, report = solve_system(make(factors(), index, noise), columns, method=method, tolerance=1e-9, dense_size=0)
    assert report.converged
    assert report.residual.shape == (6,)
    assert bool((solution[:, 3] == 0).all())
    nonzero = [0, 1, 2, 4, 5]
    residual = recomputed(factors(), index, noise, solution[:, nonzero], columns[:, nonzero])
    assert float(residual.max()) <= 1e-9
    for column in nonzero:
        exact = torch.linalg.solve(matrix, columns[:, column])
        assert dense.relative(solution[:, column], exact) < 1e-9 * 1e4


@pytest.mark.parametrize("method", ["fill", "ignore", "penalize"])
@pytest.mark.parametrize("kind", ["constant", "product"])
def test_a_good_guess_saves_iterations(kind, method):
    """From a good guess: fewer iterations, the same solution. From the solution: none."""
    shape, rough = (16, 14), [dense.matern32(16), dense.matern32(14)]
    index = dense.observed("random", shape)
    noise = number(1e-2) if kind == "constant" else axes(shape, spread=1.0)
    rhs, system = dense.randn(len(index), 2), make(rough, index, noise)
    options = {"method": method, "tolerance": 1e-8, "rank": 0, "penalty": 1e10}
    cold, cold_report = solve_system(system, rhs, **options)
    exact = torch.linalg.solve(dense.system(rough, index, noise), rhs)
    guess = exact + 1e-4 * exact.norm() * dense.randn(*exact.shape, seed=3) / len(index) ** 0.5
    warm, warm_report = solve_system(system, rhs, guess=guess, **options)
    assert warm_report.iterations < cold_report.iterations
    assert dense.relative(warm, cold) < 1e-5
    check_report(warm_report, rough, index, noise, warm, rhs)
    again, again_report = solve_system(system, rhs, guess=exact, **{**options, "tolerance": 1e-6})
    assert again_report.iterations == 0
    assert dense.relative(again, exact) < 1e-6


def test_a_bad_guess_does_no_harm():
    index, noise = dense.observed("random", SHAPE), number(1e-2)
    rhs = dense.randn(len(index), 2)
    for method in ("fill", "ignore"):
        guess = 1e8 * dense.randn(len(index), 2, seed=8)
        solution, report = solve_system(make(factors(), index, noise), rhs, method=method, guess=guess)
        assert report.converged
        check_report(report, factors(), index, noise, solution, rhs, rounding=1e-8)


@pytest.mark.parametrize("method", ["fill", "penalize"])
@pytest.mark.parametrize("kind", ["per point", "duplicates"])
def test_what_cannot_be_filled_is_refused(kind, method):
    index = dense.observed("random", SHAPE)
    if kind == "duplicates":
        index, noise = torch.cat([index, index[:1]]), number(0.1)
    else:
        noise = torch.linspace(0.1, 0.2, len(index), dtype=torch.float64)
    rhs = dense.randn(len(index), 1)
    with pytest.raises(ValueError, match=f"gap_method: got '{method}' .*'ignore'"):
        solve_system(make(factors(), index, noise), rhs, method=method)
    with settings.gap_method(method), pytest.raises(ValueError, match="gap_method"):
        dense.build(factors(), index, noise).solve(rhs)


@pytest.mark.parametrize("kind", ["per point", "duplicates"])
def test_what_cannot_be_filled_goes_to_ignore(kind):
    index = dense.observed("random", SHAPE)
    noise = number(0.1)
    if kind == "duplicates":
        index = torch.cat([index, index[:1]])
    else:
        noise = torch.linspace(0.1, 0.2, len(index), dtype=torch.float64)
    rhs = dense.randn(len(index), 1)
    solution, report = solve_system(make(factors(), index, noise), rhs, dense_size=0)
    assert report.method == "ignore"
    check_report(report, factors(), index, noise, solution, rhs)


def test_operator_settings_reach_the_solver():
    index, noise = dense.observed("random", SHAPE), number(1e-2)
    rhs = dense.randn(len(index), 1)
    operator = dense.build(factors(), index, noise)
    with (
        linear_operator.settings.max_cholesky_size(0),
        settings.gap_method("ignore"),
        settings.preconditioner_rank(11),
        settings.solve_tolerance(1e-3),
        settings.train_tolerance(1e-9),
        record_solves() as solves,
    ):
        operator.solve(rhs)
        operator.inv_quad(rhs)
    assert [report.rank for report in solves] == [11, 11]
    assert [report.tolerance for report in solves] == [1e-3, 1e-9]
    assert solves[0].iterations < solves[1].iterations
    assert solves[1].worst_residual <= 1e-9 < solves[0].worst_residual <= 1e-3


def test_noise_on_other_cells_than_the_kernel_is_refused():
    """Product noise names its own cells; were they others than the kernel's, products and solves would disagree."""
    from gpytorch_gaps.operators import (
        SelectedKroneckerAddedDiagOperator,
        SelectedKroneckerDiagOperator,
        SelectedKroneckerOperator,
    )

    index = dense.observed("random", SHAPE)
    kernel = SelectedKroneckerOperator(*factors(), row_index=index, col_index=index)
    with pytest.raises(ValueError, match="index"):
        SelectedKroneckerAddedDiagOperator(kernel, SelectedKroneckerDiagOperator(*axes(), index=index.flip(0)))


@pytest.mark.parametrize("method", ["spectral", "fill"])
def test_what_rounding_leaves_is_solved_for_again(method, monkeypatch):
    """At ``|K| / s2 = 1e12`` rounding of the own system is amplified to 6e-5; the original residual gets below 1e-6."""
    size, noise = 40, 1e-9
    x = torch.linspace(0, 1, size, dtype=torch.float64)
    distance = 3**0.5 * (x[:, None] - x).abs() / 0.5
    factor = (1 + distance) * torch.exp(-distance)
    generator = torch.Generator().manual_seed(0)
    index = (torch.rand(size * size, generator=generator) < 0.7).nonzero().squeeze(-1)
    kernel = torch.kron(factor, factor)
    root = torch.linalg.cholesky(kernel + 1e-12 * torch.eye(size * size, dtype=torch.float64))
    rhs = (root @ torch.randn(size * size, 1, generator=generator, dtype=torch.float64))[index]
    system = GapSystem([factor, factor], index, torch.tensor([noise], dtype=torch.float64))
    solution, report = solve_system(system, rhs, method=method, max_iterations=20_000)
    block = kernel[index][:, index]
    residual = float((block @ solution + noise * solution - rhs).norm() / rhs.norm())
    assert report.converged
    assert residual <= 1.1e-6
    if method == "spectral":
        monkeypatch.setattr("gpytorch_gaps.solvers.refine.Formulation.restarts", 0)
        with pytest.warns(NotConvergedWarning):
            _, once = solve_system(system, rhs, method=method, max_iterations=20_000)
        assert once.worst_residual > 10 * report.worst_residual
