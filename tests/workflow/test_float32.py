"""Single precision: kernels are evaluated and solves refined in double, so that float32 predicts as float64 does."""

import re
import warnings

import gpytorch
import pytest
import torch
from gpytorch.kernels import (
    IndexKernel,
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
)

import gpytorch_gaps as gaps
from gpytorch_gaps.operators.float64_covariance import covariance_in_float64
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
def test_means_of_models_trained_in_either_precision_agree(kernels, noise):
    means = []
    for dtype in (torch.float64, torch.float32):
        model, grid = trained(dtype, kernels, noise)
        with torch.no_grad(), gaps.record_solves() as solves, warnings.catch_warnings():
            warnings.simplefilter("error", gpytorch.utils.warnings.NumericalWarning)
            means.append(model(grid.points()).mean.double())
        assert all(report.converged for report in solves)
    assert (means[0] - means[1]).abs().max() < 1e-4 * means[0].abs().max()


def test_training_in_float32_is_the_same_training():
    """Fifteen steps of Adam end where those in double precision do."""
    ours, _ = trained(torch.float32, smooth_kernels, 0.1)
    double, _ = trained(torch.float64, smooth_kernels, 0.1)
    for (name, single), other in zip(ours.named_parameters(), double.parameters(), strict=True):
        assert single.dtype == torch.float32
        assert torch.allclose(single.double(), other, rtol=1e-3, atol=1e-3), name


# -- the same hyperparameters in both precisions -----------------------------------------------------------------------


def periodic():
    kernel = with_length(PeriodicKernel(), 0.1)
    kernel.period_length = 0.3
    return kernel


UNIT = torch.linspace(0, 1, 100)
YEARS = 2000 + torch.arange(100) / 365.25
AXES = {
    "periodic": (periodic, UNIT),
    "squared exponential": (lambda: with_length(RBFKernel(), 0.2), UNIT),
    "Matern-1/2": (lambda: with_length(MaternKernel(nu=0.5), 0.2), UNIT),
    "Matern-3/2": (lambda: with_length(MaternKernel(nu=1.5), 0.2), UNIT),
    "Matern-5/2": (lambda: with_length(MaternKernel(nu=2.5), 0.2), UNIT),
    "rational quadratic": (lambda: with_length(RQKernel(), 0.2), UNIT),
    "years": (lambda: with_length(RBFKernel(), 0.05), YEARS),
    "years, rough": (lambda: with_length(MaternKernel(nu=1.5), 0.05), YEARS),
    "a sum": (lambda: LinearKernel() + periodic(), UNIT),
    "a product": (lambda: with_length(RBFKernel(), 0.4) * periodic(), UNIT),
}


def both(kernel, axis, noise, other=None):
    """The same model of the same data, all of them float32 numbers, in either precision."""
    torch.manual_seed(0)  # an IndexKernel begins at random
    t = axis - axis.min()
    values = torch.sin(7 * t / t.max()) * torch.tensor([[1.0], [0.5], [-0.3]]) + 0.1 * torch.randn(
        3, len(axis), generator=torch.Generator().manual_seed(0)
    )
    values[torch.rand(values.shape, generator=torch.Generator().manual_seed(1)) < 0.3] = torch.nan
    models = []
    for dtype in (torch.float32, torch.float64):
        grid, x, y = gaps.from_array(values.to(dtype), [torch.arange(3).to(dtype), axis.to(dtype)])
        covariance = ScaleKernel(gaps.GappyGridKernel([IndexKernel(3, 1), kernel()], grid))
        covariance = covariance if other is None else covariance + other()
        likelihood = gaps.GappyGridLikelihood(noise_constraint=gpytorch.constraints.GreaterThan(1e-12))
        models.append(Model(x, y, likelihood, covariance))
    single, double = models
    with torch.no_grad():
        for parameter in single.covar_module.parameters():
            parameter.add_(0.1 * torch.sin(torch.arange(parameter.numel())).reshape(parameter.shape))
    single.likelihood.noise = noise
    double.double().load_state_dict({name: value.to(double.state_dict()[name]) for name, value in
                                     single.state_dict().items()})  # fmt: skip
    return single.eval(), double.eval()


def predicted(model, x):
    """Mean and variance, in float64, and the warnings of rounding."""
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        posterior = model(x)
        variance = posterior.lazy_covariance_matrix.diagonal(dim1=-1, dim2=-2)
        messages = [str(warning.message) for warning in caught]
    return posterior.mean.double(), variance.double(), [text for text in messages if "rounded to float32" in text]


LEVELS = [(0.02, 0), (1e-4, 0), (1e-4, 800), (1e-6, 800)]  # noise, and up to which size it is factorised


@pytest.mark.parametrize(  # every case by iterations and by a factorisation
    ("case", "noise", "max_cholesky"), [(case, *LEVELS[(i + k) % 4]) for i, case in enumerate(AXES) for k in (0, 2)]
)
def test_a_float32_model_predicts_as_float64_does(case, noise, max_cholesky):
    """To the rounding of the results and the tolerance of solves, however small the noise; on the grid and off it."""
    single, double = both(*AXES[case], noise)
    axis = AXES[case][1]
    off = torch.stack([torch.ones(20), axis[:20] + 0.3 * (axis[1] - axis[0])], -1)
    for x in (single.train_inputs[0][::3], off, single.covar_module.base_kernel.grid.points()[::7]):
        with gpytorch.settings.max_cholesky_size(max_cholesky), gaps.settings.solve_tolerance(1e-9):
            mean, variance, warned = predicted(single, x)
            expected, expected_variance, _ = predicted(double, x.double())
        assert warned == []
        assert (mean - expected).abs().max() < 1e-6 * expected.abs().max()
        torch.testing.assert_close(variance, expected_variance, rtol=1e-5, atol=0)


@pytest.mark.parametrize("case", ["periodic", "years", "a sum"])
def test_gradients_of_a_float32_model(case):
    """Those of float64, in the parameters' own precision."""
    gradients = []
    for model in both(*AXES[case], 0.01):
        model.train()
        mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
        mll(model(*model.train_inputs), model.train_targets).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    largest = max(float(double.abs().max()) for double in gradients[1])
    for single, double in zip(*gradients, strict=True):
        assert single.dtype == torch.float32
        torch.testing.assert_close(single.double(), double, rtol=1e-3, atol=3e-5 * largest)


@pytest.mark.parametrize("noise", [1e-1, 1e-3, 1e-4])
def test_kernels_off_the_grid_are_rounded_and_a_warning_says_by_how_much(noise):
    """A kernel of both columns at once has float32 entries: predictions are as close as the warning states."""
    single, double = both(*AXES["Matern-3/2"], noise, lambda: MaternKernel(nu=1.5, ard_num_dims=2))
    x = single.train_inputs[0][::3]
    mean, _, warned = predicted(single, x)
    expected, _, _ = predicted(double, x.double())
    stated = float(re.search(r"about (\S+) of their size", warned[0])[1]) if warned else 1e-4
    assert (mean - expected).abs().max() < 2 * stated * expected.abs().max()
    assert bool(warned) == (noise < 1e-1)


class OfItsOwn(RBFKernel):
    """Multiplies by a float32 matrix that is neither a parameter nor a buffer."""

    def forward(self, x1, x2, diag=False, **params):
        return super().forward(x1 @ torch.eye(1), x2 @ torch.eye(1), diag=diag, **params)


def test_a_kernel_that_knows_float32_only_is_evaluated_as_it_is():
    single, double = both(lambda: with_length(OfItsOwn(), 0.2), UNIT, 1e-4)
    double.covar_module.base_kernel.kernels[1] = with_length(RBFKernel().double(), 0.2)
    double.covar_module.base_kernel.kernels[1].raw_lengthscale.data.copy_(
        single.covar_module.base_kernel.kernels[1].raw_lengthscale.data
    )
    x = single.train_inputs[0][::3]
    mean, _, warned = predicted(single, x)
    expected, _, _ = predicted(double, x.double())
    assert warned
    assert (mean - expected).abs().max() < 1e-2 * expected.abs().max()


class Network(RBFKernel):
    """A kernel of what a network makes of the axis."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))

    def forward(self, x1, x2, diag=False, **params):
        return super().forward(self.net(x1), self.net(x2), diag=diag, **params)


def test_running_averages_of_a_network_inside_are_kept():
    torch.manual_seed(0)
    kernel = Network()
    grid = gaps.CartesianGrid([UNIT])
    gaps.GappyGridKernel([kernel], grid)(grid.points()).to_dense().sum().backward()
    assert kernel.net[1].running_mean.abs().max() > 0
    assert all(parameter.dtype == torch.float32 for parameter in kernel.parameters())
    assert all(buffer.dtype in (torch.float32, torch.long) for buffer in kernel.buffers())
    assert kernel.net[0].weight.grad.abs().max() > 0


def test_smooth_kernels_and_tiny_noise_need_no_other_model():
    """Kernels rounded to float32 would be indefinite by 1e-7 of their size, beyond that noise."""
    axes = [torch.linspace(0, 1, 30), torch.linspace(0, 1, 30)]
    values = torch.sin(3 * axes[0][:, None]) * torch.cos(2 * axes[1])
    values[::2, ::3] = torch.nan
    means = []
    for dtype in (torch.float32, torch.float64):
        grid, x, y = gaps.from_array(values.to(dtype), [axis.to(dtype) for axis in axes])
        kernel = gaps.GappyGridKernel([with_length(RBFKernel(), 1.0), with_length(RBFKernel(), 1.0)], grid)
        constraint = gpytorch.constraints.GreaterThan(1e-12)
        likelihood = gaps.GappyGridLikelihood(noise_constraint=constraint)
        model = Model(x, y, likelihood, ScaleKernel(kernel)).to(dtype).eval()
        model.likelihood.noise = 1e-8
        with torch.no_grad(), gpytorch.settings.max_cholesky_size(0), warnings.catch_warnings():
            warnings.simplefilter("error", gpytorch.utils.warnings.NumericalWarning)
            means.append(model(grid.points()).mean.double())
    assert (means[0] - means[1]).abs().max() < 1e-5


def test_a_kernel_that_is_used_twice_stays_what_it_is():
    """Its parameters are replaced while it is evaluated, and put back once."""
    kernel = RBFKernel()
    parameter = kernel.raw_lengthscale
    value = covariance_in_float64(kernel + kernel * ScaleKernel(kernel), torch.rand(5, 1), torch.rand(5, 1))
    assert value.dtype == torch.float64
    assert kernel.raw_lengthscale is parameter
    assert parameter.dtype == torch.float32
    value.sum().backward()
    assert parameter.grad.dtype == torch.float32
