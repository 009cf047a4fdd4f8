"""``gaps.reconstruct(noise_axis=)``: a noise variance for every level of an axis, against dense algebra."""

import math

import numpy as np
import pytest
import torch

import gpytorch_gaps as gaps
from tests import _dense as dense
from tests._ranks import run_ranks
from tests.distributed.test_reconstruct import alone, check_same
from tests.reconstruction.test_sums import axes_of, prior_of, term

CASES = {
    "first axis": ((20, 14), 0, [term([0.4, 0.3])]),
    "last axis": ((20, 14), -1, [term([0.4, 0.3])]),
    "middle of three": ((9, 5, 8), 1, [term([0.4, 0.3, 0.5])]),
    "one axis": ((150,), 0, [term([0.2])]),
    "a sum": ((20, 14), 1, [term([0.5, 0.5]), term([0.1, 0.2], 0.3)]),
}


def problem(case, seed=0):
    """Values with a trend, the noise of every level and of every cell, and the posterior, dense."""
    shape, axis, terms = CASES[case]
    prior, size = prior_of(shape, terms), shape[axis]
    levels = torch.logspace(-3, 0.5, size, dtype=torch.float64)[dense.randn(size, seed=seed).argsort()]
    view = [1] * len(shape)
    view[axis] = size
    noise = levels.view(view).expand(shape).flatten()
    trend = torch.as_tensor(axes_of(shape)[0]).view(-1, *[1] * (len(shape) - 1)).expand(shape).flatten()
    root = torch.linalg.cholesky(prior + 1e-9 * torch.eye(len(prior)))
    y = trend + root @ dense.randn(len(prior), seed=seed) + noise.sqrt() * dense.randn(len(prior), seed=seed + 1)
    index = dense.observed("random", shape, 0.4, seed)
    values = torch.full_like(y, math.nan)
    values[index] = y[index]
    gain = torch.linalg.solve(prior[index][:, index] + noise[index].diag(), prior[index]).mT
    mean = trend + gain @ (y - trend)[index]
    std = (prior.diagonal() - (gain * prior[:, index]).sum(-1)).clamp_min(0).sqrt()
    return values.view(shape), levels, mean.view(shape), std.view(shape)


@pytest.mark.parametrize("case", CASES)
def test_means_and_deviations_are_dense(case):
    shape, axis, terms = CASES[case]
    values, levels, mean, std = problem(case)
    options = {"noise_axis": axis, "mean": lambda points: points[:, 0], "draws": 16, "progress": False}
    result = gaps.reconstruct(values, axes_of(shape), terms, levels, **options)
    assert result.report.converged
    assert float(((result.slab(0, shape[0]) - mean).abs() / std).max()) <= result.report.error_in_std
    points = gaps.CartesianGrid([torch.as_tensor(own) for own in axes_of(shape)]).points()
    assert float(((result.at(points).view(shape) - mean).abs() / std).max()) <= 2 * result.report.error_in_std
    found = result.std_slab(0, shape[0])
    assert float(((found / std - 1).abs() <= result.report.std_error).double().mean()) > 0.9
    cells = [np.arange(0, size, 3) for size in shape]
    torch.testing.assert_close(result.variance_at(cells), found.square()[np.ix_(*cells)])
    torch.testing.assert_close(result.slab(3, 7), result.slab(0, shape[0])[3:7])


def test_equal_levels_are_one_noise():
    shape, _, terms = CASES["first axis"]
    values, *_ = problem("first axis")
    options = {"draws": 8, "progress": False}
    one = gaps.reconstruct(values, axes_of(shape), terms, 0.3, **options)
    many = gaps.reconstruct(values, axes_of(shape), terms, torch.full((14,), 0.3), noise_axis=1, **options)
    torch.testing.assert_close(one.slab(0, 20), many.slab(0, 20), rtol=0, atol=1e-3)
    torch.testing.assert_close(one.std_slab(0, 20), many.std_slab(0, 20), rtol=1e-3, atol=0)


def test_processes_share_slices_of_different_noise():
    options = {"noise": np.geomspace(1e-3, 1.0, 14), "noise_axis": 0, "tolerance": 1e-6}
    check_same(run_ranks(2, "tests.distributed._work", "reconstruct", (14, 11), options), alone((14, 11), options))


@pytest.mark.parametrize(
    ("noise", "axis", "message"),
    [
        (np.ones(14), 0, "noise: got 14, expected 20, one for each level of axis 0"),
        (np.zeros(20), 0, "noise: got a variance that is not positive"),
        (np.ones(20), 2, "noise_axis: got 2"),
        (np.ones(20), None, "noise"),
    ],
)
def test_wrong_levels(noise, axis, message):
    shape, _, terms = CASES["first axis"]
    values, *_ = problem("first axis")
    with pytest.raises(ValueError, match=message):
        gaps.reconstruct(values, axes_of(shape), terms, noise, noise_axis=axis, progress=False)
