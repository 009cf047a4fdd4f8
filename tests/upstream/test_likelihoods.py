"""Traps in GPyTorch's Gaussian likelihoods: why `gpytorch_gaps.likelihoods` has a noise model of its own."""

import pytest
import torch
from gpytorch.constraints import GreaterThan
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood

from tests.upstream._helpers import changed, raised

LIKELIHOODS = "gpytorch_gaps.likelihoods"


def unit(size):
    return MultivariateNormal(torch.zeros(size), torch.eye(size))


def test_noise_floor():
    """Trap: GaussianLikelihood refuses noise below 1e-4; the paper has 1e-6. Answered by our noise_constraint."""
    likelihood = GaussianLikelihood()
    error = raised(lambda: likelihood.initialize(noise=1e-6), RuntimeError)
    assert error is not None, changed("GaussianLikelihood now takes a noise of 1e-6", LIKELIHOODS)
    likelihood.raw_noise.data.fill_(-100.0)
    floor = float(likelihood.noise.detach())
    assert floor == pytest.approx(1e-4), changed("the noise floor of GaussianLikelihood is no longer 1e-4", LIKELIHOODS)
    lower = GaussianLikelihood(noise_constraint=GreaterThan(1e-8))
    lower.noise = 1e-6
    assert float(lower.noise.detach()) == pytest.approx(1e-6, rel=1e-2)


@pytest.mark.filterwarnings("ignore:You have passed data through a FixedNoiseGaussianLikelihood")
def test_fixed_noise_at_test_points():
    """Trap: FixedNoise adds nothing at test points, or the training points' noise when their number is the same.

    Answered by likelihoods/noise.
    """
    likelihood = FixedNoiseGaussianLikelihood(torch.tensor([0.1, 0.2, 0.3, 0.4]))
    message = changed("FixedNoiseGaussianLikelihood now adds noise to three test points", LIKELIHOODS)
    assert torch.equal(likelihood(unit(3)).variance, torch.ones(3)), message
    elsewhere = torch.full((4, 1), 100.0)
    by_position = likelihood(unit(4), [elsewhere]).variance
    message = changed("FixedNoiseGaussianLikelihood no longer adds the training noise by position", LIKELIHOODS)
    assert torch.allclose(by_position, torch.tensor([1.1, 1.2, 1.3, 1.4])), message
