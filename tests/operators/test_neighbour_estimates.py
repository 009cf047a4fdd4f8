"""Log-likelihoods of rough kernels and their gradients from few neighbours and probes: unbiased, and of small variance.

At 2,000 observations instead of 900, deviations are those of the square root of twice as many.
"""

import functools
import math

import linear_operator
import pytest
import torch

from gpytorch_gaps import record_solves, settings
from tests import _dense as dense

SIDE, REPEATS = 36, 20
INDEX = dense.observed("random", (SIDE, SIDE), 0.3)
THETA = torch.tensor([math.log(0.03), 0.0, math.log(1e-2)], dtype=torch.float64)  # length-scale, variance, noise


def factors(theta, smoothness):
    x = torch.linspace(0.0, 1.0, SIDE, dtype=torch.float64)
    scaled = (x.unsqueeze(-1) - x).abs() / theta[0].exp() * (2.0 * smoothness) ** 0.5
    matrix = torch.exp(-scaled) if smoothness == 0.5 else (1.0 + scaled) * torch.exp(-scaled)
    return [theta[1].exp() * matrix, matrix]


@functools.cache
def exact(smoothness):
    """Data, their log-likelihood (but for a constant), and its gradient."""
    (theta,) = dense.leaves(THETA)
    factor = torch.linalg.cholesky(dense.system(factors(theta, smoothness), INDEX, theta[2:].exp()))
    data = (factor @ dense.randn(len(INDEX), 1, seed=5)).detach()
    value = -0.5 * (data * torch.cholesky_solve(data, factor)).sum() - factor.diagonal().log().sum()
    return data, value.detach(), torch.autograd.grad(value, theta)[0]


@functools.cache
def errors(smoothness, kind):
    """Errors of values and gradients from many draws of ten probes, and the stated errors."""
    data, value, gradient = exact(smoothness)
    values, gradients, stated = [], [], []
    (theta,) = dense.leaves(THETA)
    operator = dense.build(factors(theta, smoothness), INDEX, theta[2:].exp())
    torch.manual_seed(1)
    for _ in range(REPEATS):
        with (
            settings.preconditioner(kind),
            settings.logdet_method("stochastic"),
            linear_operator.settings.max_cholesky_size(0),
            linear_operator.settings.num_trace_samples(10),
            record_solves() as solves,
        ):
            quad, logdet = operator.inv_quad_logdet(data, logdet=True)
        own = -0.5 * (quad + logdet)
        gradients.append(torch.autograd.grad(own, theta, retain_graph=True)[0] - gradient)
        values.append(own.detach() - value)
        stated.append(0.5 * solves.logdets[-1].standard_error)
        assert solves.logdets[-1].reason == "data side"
    return torch.stack(values), torch.stack(gradients), torch.stack(stated)


kernels = pytest.mark.parametrize("smoothness", [0.5, 1.5])


@kernels
def test_values_and_gradients_are_unbiased(smoothness):
    values, gradients, _ = errors(smoothness, "neighbours")
    for own in (values.unsqueeze(-1), gradients):
        assert bool((own.mean(0).abs() < 3.0 * own.std(0) / REPEATS**0.5).all())


@kernels
def test_stated_errors_are_honest(smoothness):
    values, _, stated = errors(smoothness, "neighbours")
    scores = values / stated
    assert abs(float(scores.mean())) < 3.0 / REPEATS**0.5
    assert 0.6 < float(scores.std()) < 1.6


@kernels
def test_deviations_are_far_below_those_of_eigenvectors(smoothness):
    """Deviations are compared for values, for whole gradients, and for the first entry of gradients."""
    (values, gradients, _), (others, other_gradients, _) = (
        errors(smoothness, kind) for kind in ("neighbours", "eigen")
    )
    assert float(others.std()) > 100.0 * float(values.std())
    assert float(other_gradients.std(0).norm()) > 10.0 * float(gradients.std(0).norm())
    assert float(other_gradients[:, 0].std()) > 10.0 * float(gradients[:, 0].std())
