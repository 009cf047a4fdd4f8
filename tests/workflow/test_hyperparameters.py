"""Learned hyperparameters are those of dense maximum likelihood; with the Nystrom log-determinant they are not."""

import pytest

from benchmarks.hyperparameters import draw, fitted, maximum_likelihood


@pytest.mark.parametrize(("gappiness", "seed"), [(0.3, 0), (0.7, 1)])
def test_fit_finds_maximum_likelihood(gappiness, seed):
    """The whole table, five draws of two sizes at three levels: ``python -m benchmarks.hyperparameters``."""
    values = draw(30, gappiness, seed)
    assert (fitted(values, steps=120) / maximum_likelihood(values) - 1).abs().max() < 1e-3


def test_nystrom_inflates_the_noise():
    """Its log-determinant is biased, and so is what is learned with it: hence an option, not the default."""
    values = draw(30, 0.7, 0)
    inflation = fitted(values, steps=120, logdet="nystrom")[3] / maximum_likelihood(values)[3]
    assert inflation > 1.1
