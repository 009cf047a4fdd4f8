"""``|mean error at x| <= sd(x) error_in_std``: over random problems, by every way to a posterior mean."""

import warnings

import numpy as np
import pytest
import torch

import gpytorch_gaps as gaps
from gpytorch_gaps.operators import SelectedKroneckerOperator
from tests._posterior import Problem, exact_posterior

EPS = torch.finfo(torch.float64).eps
BATCH = 10  # problems of one test


def error_in_std(mean, expected, deviation, dtype="float64"):
    """The largest error over the cells, but for the rounding of the mean itself to its precision."""
    rounding = 4.0 * float(torch.finfo(getattr(torch, dtype)).eps) * np.abs(expected)
    return float(((np.abs(mean - expected) - rounding).clip(0.0) / deviation).max())


def means_by_solves(problem):
    """By every gap_method: the mean ``K_*X a`` of its solution, and its report."""
    factors, index = problem.tensors(), torch.from_numpy(problem.index)
    kernel = SelectedKroneckerOperator(*factors, row_index=index)
    cross = SelectedKroneckerOperator(*factors, row_index=torch.arange(problem.values.size), col_index=index)
    covariance = kernel.add_diagonal(torch.tensor(problem.noise, dtype=torch.float64))
    y = torch.from_numpy(problem.y)
    for method in ("auto", "fill", "ignore", "penalize", "spectral", "cholesky"):
        limit = gaps_cholesky(0 if method == "auto" else 800)
        with gaps.settings.gap_method(method), limit, gaps.record_solves() as solves:
            yield method, (cross @ covariance.solve(y, of_data=True)).numpy(), solves[-1]


def gaps_cholesky(size):
    import linear_operator

    return linear_operator.settings.max_cholesky_size(size)


def means(problem):
    """By every way, with the report of each."""
    yield from means_by_solves(problem)
    values = torch.from_numpy(problem.values).to(getattr(torch, problem.dtype))
    result = gaps.reconstruct(values, None, problem.tensors(), problem.noise, progress=False)
    yield "reconstruct", result.slab(0, result.shape[0]).double().numpy().reshape(-1), result.report


def check(seed):
    problem = Problem.random(seed)
    expected, deviation = exact_posterior(problem.factors, problem.index, problem.noise, problem.y)
    missed = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", gaps.NotConvergedWarning)
        for method, mean, report in means(problem):
            dtype = problem.dtype if method == "reconstruct" else "float64"
            true = error_in_std(mean, expected, deviation, dtype)
            warned = any(issubclass(one.category, gaps.NotConvergedWarning) for one in caught)
            caught.clear()
            honest = true <= report.error_in_std and report.converged != warned
            if not honest or (report.converged and report.error_in_std > report.std_tolerance):
                missed.append(f"seed {seed}, {method}: {true:.1e}, stated {report.error_in_std:.1e}, {report}")
    return missed


@pytest.mark.parametrize("start", range(0, 200, BATCH))
def test_every_mean_is_within_its_stated_error(start):
    assert [line for seed in range(start, start + BATCH) for line in check(seed)] == []


@pytest.mark.benchmark
def test_every_mean_of_5000_problems_is_within_its_stated_error():
    assert [line for seed in range(1000, 6000) for line in check(seed)] == []
