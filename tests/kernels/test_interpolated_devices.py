"""Structured kernel interpolation where its tensors live: products, training and predictions, compared with the CPU."""

import copy

import gpytorch
import pytest
import torch
from gpytorch.kernels import GridInterpolationKernel, MaternKernel, ScaleKernel

import gpytorch_gaps
from gpytorch_gaps import preconditioned_ski, settings
from tests._devices import CPU
from tests._devices import other_devices as devices
from tests._standin import count_transfers


@pytest.fixture(autouse=True)
def _accurate():
    with settings.solve_tolerance(1e-10), settings.train_tolerance(1e-10), settings.gap_method("ignore"):
        yield


class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y, kernel):
        super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = kernel

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def rand(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def on(device, **options):
    base = MaternKernel(nu=2.5, ard_num_dims=2)
    base.lengthscale = torch.tensor([0.3, 0.5])
    kernel = preconditioned_ski(ScaleKernel(GridInterpolationKernel(base, [14, 11], **options)))
    x = rand(150, 2)
    model = Model(x, torch.sin(6.0 * x[:, 0]) + 0.1 * rand(150, seed=1), kernel).double()
    return copy.deepcopy(model).to(device)


def within(counts):
    """Copies between host and device that this package asked for."""
    return [event for event in counts.within(gpytorch_gaps).events if event.kind != "sync"]


def check(got, expected, device, tolerance):
    for own, other in zip(got, expected, strict=True):
        assert own.device == device
        torch.testing.assert_close(own.detach().cpu(), other.detach(), rtol=tolerance, atol=tolerance)


@devices
def test_products_neither_copy_nor_wait(device):
    x = rand(150, 2)
    results = []
    for where in (CPU, device):
        kernel = on(where, grid_bounds=((0.0, 1.0), (0.0, 1.0))).covar_module
        operator, rhs = kernel(x.to(where)).evaluate_kernel(), rand(150, 3, seed=2).to(where)
        with torch.no_grad(), count_transfers() as counts:
            results.append([operator._matmul(rhs)])
        assert counts.events == []
    check(results[1], results[0], device, 1e-12)


@devices
@pytest.mark.parametrize("logdet", ["exact", "stochastic"])
@pytest.mark.parametrize("options", [{"num_dims": 2}, {"grid_bounds": ((0.0, 1.0), (0.0, 1.0))}], ids=["made", "given"])
def test_training(options, logdet, device):
    """After the first step, in which the points are placed on the grid, this package copies nothing."""
    results = []
    for where in (CPU, device):
        model = on(where, **options)
        model.train()
        likelihood = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
        torch.manual_seed(0)
        with settings.logdet_method(logdet):
            likelihood(model(*model.train_inputs), model.train_targets)
            with count_transfers() as counts:
                value = likelihood(model(*model.train_inputs), model.train_targets)
                gradients = torch.autograd.grad(value, list(model.parameters()))
        assert within(counts) == []
        results.append([value, *gradients])
    check(results[1], results[0], device, 1e-7)


@devices
def test_predictions(device):
    results = []
    for where in (CPU, device):
        model = on(where, grid_bounds=((0.0, 1.0), (0.0, 1.0))).eval()
        with torch.no_grad():
            posterior = model(rand(40, 2, seed=3).to(where))
            torch.manual_seed(0)
            results.append([posterior.mean, posterior.variance, posterior.rsample(torch.Size([3]))])
    check(results[1], results[0], device, 1e-6)
