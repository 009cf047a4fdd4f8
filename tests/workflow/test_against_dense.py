"""A model with gaps and the same model of plain, dense GPyTorch kernels: likelihood, gradients, posterior, training."""

from dataclasses import dataclass

import gpytorch
import linear_operator
import pytest
import torch

import gpytorch_gaps as gaps
from tests.workflow._pairs import CASES, PerLevelNoise

DENSE = linear_operator.settings.max_cholesky_size


def log_likelihood(model):
    """As in GPyTorch's tutorial, summed over a batch; dense or not is up to the settings in force."""
    model.train()
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    params = model.train_inputs if isinstance(model.likelihood, PerLevelNoise) else ()
    return mll(model(*model.train_inputs), model.train_targets, *params).sum()


def pairs_of_parameters(pair):
    ours, dense = dict(pair.ours.named_parameters()), dict(pair.dense.named_parameters())
    assert len(ours) == len(dense)
    return [(name, a, b) for (name, a), b in zip(ours.items(), dense.values(), strict=True)]


@pytest.fixture(scope="module", params=CASES)
def dense_case(request):
    """The name of a case, and what its dense model says: computed once for all ways to solve."""
    return request.param, dense_results(CASES[request.param]())


@pytest.mark.parametrize("max_cholesky", [10_000, 0], ids=["dense", "iterative"])
def test_likelihood_gradients_and_posterior(dense_case, max_cholesky):
    case, expected = dense_case
    pair = CASES[case]()
    assert 1_300 <= pair.ours.train_targets.size(-1) <= 1_800
    agrees_with_dense(pair, max_cholesky, expected)


@dataclass
class DenseResults:
    """Results of the dense model of a pair. `gradients` are those of its parameters, in order."""

    likelihood: float
    gradients: list
    mean: torch.Tensor
    variance: torch.Tensor
    covariance: torch.Tensor


def dense_results(pair):
    with DENSE(10_000):
        likelihood = log_likelihood(pair.dense)
        likelihood.backward()
        gradients = [parameter.grad for parameter in pair.dense.parameters()]
        pair.dense.eval()
        with torch.no_grad():
            posterior = _dense_posterior(pair)
            moments = posterior.mean, posterior.variance, posterior.covariance_matrix
    return DenseResults(likelihood.item(), gradients, *moments)


def agrees_with_dense(pair, max_cholesky, expected=None):
    """Log-likelihood, gradients and posterior of both models of a pair.

    :param max_cholesky: up to which size ours is factorised.
    :param expected: results of the dense model. Default: they are computed.
    """
    expected = dense_results(pair) if expected is None else expected
    with (
        gaps.settings.logdet_method("exact"),
        gaps.settings.train_tolerance(1e-11),
        gaps.settings.solve_tolerance(1e-10),
        gaps.settings.dense_size(10_000),
    ):
        with DENSE(max_cholesky), gaps.record_solves() as solves:
            value = log_likelihood(pair.ours)
            value.backward()
        assert all(report.converged for report in solves)
        assert (solves[0].method == "cholesky") == bool(max_cholesky)
        assert value.item() == pytest.approx(expected.likelihood, rel=1e-8)
        assert len(pairs_of_parameters(pair)) == len(expected.gradients)
        for (name, ours, _), gradient in zip(pairs_of_parameters(pair), expected.gradients, strict=True):
            assert torch.allclose(ours.grad, gradient, rtol=1e-6, atol=1e-8), name

        pair.ours.eval()
        with torch.no_grad(), DENSE(max_cholesky):
            posterior = pair.ours(pair.test_x)
            mean, variance, covariance = posterior.mean, posterior.variance, posterior.covariance_matrix
        assert torch.allclose(mean, expected.mean, rtol=1e-6, atol=1e-6)
        assert torch.allclose(variance, expected.variance, rtol=1e-6, atol=1e-6)
        assert torch.allclose(covariance, expected.covariance, rtol=1e-6, atol=1e-6)


def _dense_posterior(pair):
    model = pair.dense
    if not isinstance(model.likelihood, PerLevelNoise):
        return model(pair.test_x)
    # by the book: GPyTorch has no such likelihood
    (x,), y = model.train_inputs, model.train_targets
    noise = torch.diag(model.likelihood.noise[x[:, -1].long()])
    joint = model.forward(torch.cat([x, pair.test_x]))
    covariance, n = joint.covariance_matrix, len(y)
    weights = torch.linalg.solve(covariance[:n, :n] + noise, covariance[:n, n:])
    mean = joint.mean[n:] + weights.mT @ (y - joint.mean[:n])
    return gpytorch.distributions.MultivariateNormal(mean, covariance[n:, n:] - weights.mT @ covariance[:n, n:])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("small", [True, pytest.param(False, marks=pytest.mark.benchmark)], ids=["small", "large"])
def test_steps_of_adam(case, small):
    """Twenty steps; ``make compare`` takes fifty with about 1,500 observations, which takes minutes."""
    pair = CASES[case](small)
    with gaps.settings.logdet_method("exact"):
        for model in pair.both():
            optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
            # 100: iterations also where a dense factorisation would do
            with DENSE(10_000 if model is pair.dense else 100):
                for _ in range(20 if small else 50):
                    optimizer.zero_grad()
                    loss = -log_likelihood(model)
                    loss.backward()
                    optimizer.step()
    for name, ours, dense in pairs_of_parameters(pair):
        assert torch.allclose(ours, dense, rtol=1e-4, atol=1e-4), name
