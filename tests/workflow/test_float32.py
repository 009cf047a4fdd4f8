"""Single precision: solves are refined in double, so that a model trained in float32 predicts as float64 does."""

import warnings

import gpytorch
import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel

import gpytorch_gaps as gaps
from tests.workflow._pairs import Model, gappy, with_length


def trained(dtype, kernels, noise):
    axes, values = gappy((30, 40), 0.5, 0)
    grid, x, y = gaps.from_array(values.to(dtype), [axis.to(dtype) for axis in axes])
    kernel = ScaleKernel(gaps.GappyGridKernel(kernels(), grid))
    model = Model(x, y, gaps.GappyGridLikelihood(), kernel).to(dtype)
    model.likelihood.noise = noise
    with gaps.settings.logdet_method("exact"):
        gaps.fit(model, steps=15, lr=0.05, progress=False)
    return model, grid


def rough_kernels():
    return [with_length(MaternKernel(nu=1.5), 0.3), with_length(MaternKernel(), 0.3)]


def smooth_kernels():
    return [with_length(RBFKernel(), 0.3), with_length(MaternKernel(), 0.3)]


@pytest.mark.parametrize("kernels", [rough_kernels, smooth_kernels])
@pytest.mark.parametrize("noise", [0.1, 1e-3])
def test_means_agree_or_a_warning_says_that_they_cannot(kernels, noise):
    means = []
    for dtype in (torch.float64, torch.float32):
        model, grid = trained(dtype, kernels, noise)
        with torch.no_grad(), gaps.record_solves() as solves, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            means.append(model(grid.points()).mean.double())
        assert all(report.converged for report in solves)
    warned = any("rounded to float32" in str(warning.message) for warning in caught)
    difference = (means[0] - means[1]).abs().max() / means[0].abs().max()
    assert difference < (1e-3 if warned else 1e-4)
    assert warned == (noise < 0.01)


def test_training_in_float32_is_the_same_training():
    """Fifteen steps of Adam end where those in double precision do."""
    ours, _ = trained(torch.float32, smooth_kernels, 0.1)
    double, _ = trained(torch.float64, smooth_kernels, 0.1)
    for (name, single), other in zip(ours.named_parameters(), double.parameters(), strict=True):
        assert single.dtype == torch.float32
        assert torch.allclose(single.double(), other, rtol=1e-3, atol=1e-3), name


def test_where_float32_cannot_it_says_so():
    """Kernels rounded to float32 are indefinite by 1e-7 of their size: beyond that noise, results would be noise."""
    axes = [torch.linspace(0, 1, 30), torch.linspace(0, 1, 30)]
    values = torch.sin(3 * axes[0][:, None]) * torch.cos(2 * axes[1])
    values[::2, ::3] = torch.nan
    grid, x, y = gaps.from_array(values, axes)
    kernel = ScaleKernel(gaps.GappyGridKernel([with_length(RBFKernel(), 1.0), with_length(RBFKernel(), 1.0)], grid))
    constraint = gpytorch.constraints.GreaterThan(1e-12)
    model = Model(x, y, gaps.GappyGridLikelihood(noise_constraint=constraint), kernel)
    model.likelihood.noise = 1e-8
    model.eval()
    with (
        torch.no_grad(),
        gpytorch.settings.max_cholesky_size(0),
        pytest.warns(gpytorch.utils.warnings.NumericalWarning, match="float64|NOT CONVERGED|residual"),
    ):
        model(grid.points()).mean  # noqa: B018  # computed for its warning
