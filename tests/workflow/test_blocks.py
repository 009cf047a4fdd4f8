"""Models with kernels for blocks of axes against the same models of plain, dense GPyTorch kernels."""

import linear_operator
import pytest
import torch

import gpytorch_gaps as gaps
from gpytorch_gaps import settings
from gpytorch_gaps.linalg.factors import all_dense
from gpytorch_gaps.operators import SelectedKroneckerOperator
from tests import _dense as dense
from tests.posterior.test_new_data import by_the_book, noise_at
from tests.posterior.test_sampling import covariance_by_draws
from tests.posterior.test_scoring import brute_force
from tests.workflow._block_pairs import BLOCKS
from tests.workflow._pairs import PerLevelNoise
from tests.workflow.test_against_dense import _dense_posterior, log_likelihood, pairs_of_parameters

MAX_CHOLESKY = linear_operator.settings.max_cholesky_size
blocks = pytest.mark.parametrize("case", BLOCKS)


def terms(model, x):
    covariance = model.covar_module(x).evaluate_kernel()
    found = [covariance] if isinstance(covariance, SelectedKroneckerOperator) else covariance.linear_ops
    assert all(isinstance(term, SelectedKroneckerOperator) for term in found)
    return found


@blocks
def test_products_go_by_fft(case):
    """Otherwise the tests below would be about matrices."""
    model = BLOCKS[case](small=True).ours
    assert not all(all_dense(term.factors) for term in terms(model, model.train_inputs[0]))


@blocks
@pytest.mark.parametrize("max_cholesky", [10_000, 0], ids=["dense", "iterative"])
def test_likelihood_gradients_and_posterior(case, max_cholesky):
    pair = BLOCKS[case]()
    with (
        settings.logdet_method("exact"),
        settings.train_tolerance(1e-11),
        settings.solve_tolerance(1e-10),
        settings.dense_size(10_000),
    ):
        with MAX_CHOLESKY(max_cholesky), gaps.record_solves() as solves:
            value = log_likelihood(pair.ours)
            value.backward()
        with MAX_CHOLESKY(10_000):
            expected = log_likelihood(pair.dense)
            expected.backward()
        assert all(report.converged for report in solves)
        assert (solves[0].method == "cholesky") == bool(max_cholesky)
        assert value.item() == pytest.approx(expected.item(), rel=1e-8)
        for name, ours, plain in pairs_of_parameters(pair):
            assert torch.allclose(ours.grad, plain.grad, rtol=1e-6, atol=1e-8), name

        pair.ours.eval()
        pair.dense.eval()
        with torch.no_grad(), MAX_CHOLESKY(max_cholesky):
            posterior = pair.ours(pair.test_x)
            mean, variance, covariance = posterior.mean, posterior.variance, posterior.covariance_matrix
        with torch.no_grad(), MAX_CHOLESKY(10_000):
            reference = _dense_posterior(pair)
            assert torch.allclose(mean, reference.mean, rtol=1e-6, atol=1e-6)
            assert torch.allclose(variance, reference.variance, rtol=1e-6, atol=1e-6)
            assert torch.allclose(covariance, reference.covariance_matrix, rtol=1e-6, atol=1e-6)
