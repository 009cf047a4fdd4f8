"""What the benchmark of stated errors compares with."""

import numpy as np
import pytest

from benchmarks.heldout import SHAPES, covariance, expected_by, summary


@pytest.mark.parametrize("shape", SHAPES)
def test_gaps_leave_most_of_the_field(shape):
    flags = SHAPES[shape](np.random.default_rng(0))
    assert 0.1 < flags.mean() < 0.5


def test_the_error_of_the_true_covariance_is_that_of_dense_algebra():
    prior = covariance((3, 4), 1.5, 2.0) + 0.1 * np.eye(12)
    gaps = np.zeros((3, 4), dtype=bool)
    gaps[1, 1:3] = True
    precision = np.linalg.inv(prior)
    inside = np.flatnonzero(gaps)
    conditional = np.linalg.inv(precision[np.ix_(inside, inside)])
    assert expected_by(prior, gaps) == pytest.approx(np.sqrt(np.trace(conditional) / 2))


def test_ratios_within_a_factor_are_counted():
    common = {"held out": 1.0, "model": 1.0, "held-out coverage": 0.9, "true coverage": 0.8}
    found = summary([{"stated": stated, "true": 1.0, **common} for stated in (0.5, 0.8, 1.2, 1.4)])
    assert found["within"] == 0.75
    assert found["least"] == 0.5
    assert found["stated / true"] == pytest.approx((0.5 * 0.8 * 1.2 * 1.4) ** 0.25)
