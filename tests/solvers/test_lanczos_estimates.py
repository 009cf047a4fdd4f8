"""Log-determinants, their variance and condition numbers from Lanczos matrices, where the spectrum is known."""

import math

import pytest
import torch

from gpytorch_gaps.solvers.krylov import ConjugateGradients
from gpytorch_gaps.solvers.logdet.stochastic import log_quadrature
from gpytorch_gaps.solvers.planning.trial import expected_condition, expected_log_variance, lanczos_trial
from tests import _dense as dense

SIZE, PROBES = 60, 6000
SPECTRUM = torch.logspace(-1.0, 1.0, SIZE, dtype=torch.float64)
SPECTRUM /= SPECTRUM.mean()
TRUTH = float(SPECTRUM.log().sum())
VECTORS = torch.linalg.qr(dense.randn(SIZE, SIZE)).Q
MATRIX = VECTORS * SPECTRUM @ VECTORS.mT


@pytest.fixture(scope="module")
def lanczos():
    """Lanczos matrices of many random signs. shape: (probes, k, k)"""
    torch.manual_seed(0)
    signs = torch.randint(2, (SIZE, PROBES)).mul(2).sub(1).double()
    run = ConjugateGradients(lambda x: MATRIX @ x, signs, keep_lanczos=True)
    for _ in range(25):
        run.step()
    return run.lanczos()


def estimates(lanczos, count, mean_is_one):
    """Estimates from `count` probes each. shape: (repeats, count)"""
    return log_quadrature(lanczos.view(-1, count, *lanczos.shape[-2:]), SIZE, mean_is_one)


@pytest.mark.parametrize("count", [1, 2, 3, 10])
@pytest.mark.parametrize("mean_is_one", [False, True])
def test_estimates_are_unbiased_whatever_the_number_of_probes(lanczos, count, mean_is_one):
    means = estimates(lanczos, count, mean_is_one).mean(-1)
    assert abs(float(means.mean()) - TRUTH) < 3.0 * float(means.std()) / len(means) ** 0.5


@pytest.mark.parametrize("count", [2, 10])
def test_stated_errors_are_those_of_the_mean(lanczos, count):
    """The slope that one probe takes from the others ties their estimates by some percent, in a matrix this small."""
    found = estimates(lanczos, count, True)
    stated = (found.var(-1) / count).mean().sqrt()
    assert float(stated / found.mean(-1).std()) == pytest.approx(1.0, abs=0.1)


def test_a_known_mean_of_the_spectrum_takes_most_of_the_variance(lanczos):
    plain, centred = (estimates(lanczos, 10, known).std() for known in (False, True))
    assert float(centred) < 0.6 * float(plain)


@pytest.mark.parametrize("mean_is_one", [False, True])
def test_a_trial_foretells_the_variance_of_a_probe(lanczos, mean_is_one):
    trial = lanczos_trial(lambda x: MATRIX @ x, SIZE, torch.Size(), MATRIX)
    expected = expected_log_variance(trial, SIZE, mean_is_one)
    assert 0.5 < expected / float(estimates(lanczos, 10, mean_is_one).var()) < 2.0


@pytest.mark.parametrize("condition", [1.0, 30.0, 300.0])
def test_a_trial_foretells_the_condition_number(condition):
    spectrum = torch.logspace(0.0, math.log10(condition), 400, dtype=torch.float64).unsqueeze(-1)
    trial = lanczos_trial(lambda x: spectrum * x, 400, torch.Size((2,)), spectrum)
    assert 0.5 < expected_condition(trial) / condition < 4.0
