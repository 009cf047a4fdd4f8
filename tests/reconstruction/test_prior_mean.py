"""``reconstruct(mean=)``: numbers, backgrounds and functions of the coordinates."""

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel

import gpytorch_gaps as gaps

AXES = [np.linspace(0, 1, 14), np.linspace(0, 2, 11)]
BACKGROUND = 5.0 + 3.0 * AXES[0][:, None] - 2.0 * AXES[1]


def field():
    generator = np.random.default_rng(0)
    values = BACKGROUND + np.sin(4 * AXES[0])[:, None] * np.cos(3 * AXES[1]) + 0.1 * generator.standard_normal((14, 11))
    values[4:8, 3:7] = np.nan
    return values


def run(values, mean, **options):
    kernels = [RBFKernel(), MaternKernel(nu=1.5)]
    return gaps.reconstruct(values, AXES, kernels, 0.01, mean=mean, tolerance=1e-6, progress=False, **options)


def trend(x):
    return 5.0 + 3.0 * x[:, 0] - 2.0 * x[:, 1]


def linear():
    """A GPyTorch mean."""
    module = gpytorch.means.LinearMean(2).double()
    with torch.no_grad():
        module.weights.copy_(torch.tensor([[3.0], [-2.0]]))
        module.bias.fill_(5.0)
    return module


@pytest.mark.parametrize(
    "mean", [trend, linear(), BACKGROUND, torch.from_numpy(BACKGROUND)], ids=["function", "module", "array", "tensor"]
)
def test_a_mean_is_subtracted_and_added_again(mean):
    expected = run(field() - BACKGROUND, 0.0)
    result = run(field(), mean)
    np.testing.assert_allclose(result.slab(2, 9).numpy(), expected.slab(2, 9).numpy() + BACKGROUND[2:9], atol=1e-8)
    if callable(mean):
        points = [[0.33, 1.21], [0.0, 2.0]]
        np.testing.assert_allclose(
            result.at(points), expected.at(points) + trend(torch.tensor(points, dtype=torch.float64)), atol=1e-8
        )


def test_a_mean_in_a_file_is_written_with_the_result(tmp_path):
    np.save(tmp_path / "background.npy", BACKGROUND)
    result = run(field(), np.load(tmp_path / "background.npy", mmap_mode="r"), output=tmp_path / "mean.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "mean.npy"), result.slab(0, 14))
    with pytest.raises(ValueError, match="points: the mean is an array, given on the grid only"):
        result.at([[0.5, 0.5]])


def test_means_that_do_not_fit_are_refused():
    holes = np.where(BACKGROUND > 7.5, np.nan, BACKGROUND)
    for mean, message in (
        (BACKGROUND[:5], r"mean: got shape \(5, 11\), expected a number, a function, or \(14, 11\)"),
        (holes, "mean: got NaN or infinite values in slices"),
        (lambda x: x, r"mean: the function gave shape \(154, 2\), expected \(154,\)"),
        ("3", "mean"),
        (float("nan"), "mean"),
    ):
        with pytest.raises(ValueError, match=message):
            run(field(), mean)
