"""Traps in samples, roots and fantasies above 800 points: why `gpytorch_gaps.posterior.sampling` draws its own."""

import gpytorch
import linear_operator
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import MaternKernel
from linear_operator.operators import to_linear_operator

from tests.upstream._helpers import PlainGP, changed, exponential, gaussian_likelihood, normal

SAMPLING = "gpytorch_gaps.posterior.sampling"


def test_prior_samples_lose_variance_above_800():
    """Trap: roots above 800 are Lanczos of rank 100: samples of unit variance have 0.75. Answered by sampling."""
    variances = []
    for size in (800, 801):
        prior = MultivariateNormal(torch.zeros(size, dtype=torch.float64), to_linear_operator(exponential(size, 0.01)))
        variances.append(float(prior.rsample(torch.Size([300])).square().mean()))
    small, large = variances
    assert 0.95 < small < 1.05
    assert large < 0.85, changed("prior samples at 801 points no longer lose variance to Lanczos", SAMPLING)


def test_inverse_roots_are_low_rank_above_800():
    """Trap: `root_inv_decomposition` above 800 misses nearly all of the inverse. Answered by solves, never roots."""
    matrix = exponential(801, 0.1) + 1e-2 * torch.eye(801, dtype=torch.float64)
    root = to_linear_operator(matrix).root_inv_decomposition().root.to_dense()
    trace = torch.linalg.inv(matrix).trace()
    message = changed("root_inv_decomposition at 801 points is no longer a Lanczos root of rank 100", SAMPLING)
    assert root.size(-1) <= 100, message
    assert root.square().sum() < 0.5 * trace, message


def fantasy(size=30):
    """Points, a conditioned model and its fantasy at five more points."""
    axis = torch.linspace(0, 1, size, dtype=torch.float64)
    train_x = torch.cartesian_prod(axis, axis)
    kernel = MaternKernel(nu=0.5)
    kernel.lengthscale = 0.1
    likelihood = gaussian_likelihood(1e-2)
    model = PlainGP(train_x, torch.sin(6 * train_x.sum(-1)), likelihood, kernel).eval()
    test_x = torch.sigmoid(normal(10, 2))
    _ = model(test_x).mean  # caches must exist before a fantasy
    return test_x, model.get_fantasy_model(test_x[:5] + 0.01, torch.ones(5, dtype=torch.float64))


def test_fantasy_variances_are_off_above_800():
    """Trap: fantasies update Lanczos roots: with fast_pred_var variances are several times too large. See sampling."""

    def variance():
        with torch.no_grad(), gpytorch.settings.fast_pred_var():
            test_x, model = fantasy()
            return model(test_x).variance

    rough = variance()
    with linear_operator.settings.max_cholesky_size(2000):
        exact = variance()
    error = ((rough - exact).abs() / exact).max()
    assert error > 1, changed("variances of fantasies at 900 points are no longer off by a factor", SAMPLING)


def test_fantasy_mean_cache_is_written_but_never_read():
    """The updated mean is cached under a key that `mean_cache` does not look up, so fantasies solve afresh by accident.

    Should upstream mend this, means of fantasies go through Lanczos roots too. Answered by sampling: re-solve.
    """
    with torch.no_grad():
        test_x, model = fantasy(size=5)
        strategy = model.prediction_strategy
        written = strategy._memoize_cache.copy()
        strategy._memoize_cache = {key: torch.full_like(value, torch.nan) for key, value in written.items()}
        mean = model(test_x).mean
    assert any("mean_cache" in key for key in written)
    assert mean.isfinite().all(), changed("fantasies now use the mean cache that was updated for them", SAMPLING)
