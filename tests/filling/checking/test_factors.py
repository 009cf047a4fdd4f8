"""Standard deviations are multiplied by the factors that withheld observations of the same size ask for."""

import numpy as np
import torch

from gpytorch_gaps.filling.checking.calibration import Predicted, judge
from gpytorch_gaps.filling.checking.factors import factors

GENERATOR = np.random.default_rng(3)


def checked(std, stretch):
    """A check of independent errors, whose standard deviations are `stretch` times those that are expected."""
    variance = torch.from_numpy(std**2)
    predicted = Predicted(torch.zeros(len(std)).double(), variance, covariance=torch.diag(variance))
    return judge(predicted, std * stretch * GENERATOR.standard_normal(len(std)))


def test_errors_far_from_data_that_are_too_small_do_not_widen_those_among_data():
    near, far = np.full(600, 0.5), GENERATOR.uniform(1.9, 2.1, 600)
    found = checked(np.concatenate([near, far]), np.repeat([1.0, 1.8], 600))
    assert found.calibration > 1.2
    assert factors(found, np.array(0.5)) == 1.0
    assert 1.55 < factors(found, np.array(2.1)) < 2.05  # the 95 % quantile of 300 has an error of 6 %
    assert 1.0 < factors(found, np.array(1.0)) < factors(found, np.array(2.0))
    everywhere = factors(found, np.array([[0.0, 0.1], [3.0, np.nan]]))  # observations, extremes, and gaps that are left
    assert everywhere[0].tolist() == [1.0, 1.0]
    assert everywhere[1, 0] == factors(found, np.array(2.2))


def test_few_errors_have_one_factor_and_right_ones_none():
    found = checked(GENERATOR.uniform(0.5, 2.0, 150), 2.0)
    assert found.calibration > 1.5
    assert factors(found, np.array([0.5, 2.0])) == found.calibration
    assert factors(checked(GENERATOR.uniform(0.5, 2.0, 800), 1.0), np.array([0.5, 2.0])) == 1.0


def test_equal_standard_deviations_have_one_factor():
    """Groups of them would differ only by where the observations are, or by rounding."""
    std = 0.5 * (1.0 + 1e-9 * GENERATOR.standard_normal(800))
    std[::2] = 0.5
    found = checked(np.sort(std), np.repeat([1.0, 2.0], 400))
    assert found.calibration > 1.2
    assert factors(found, np.array([0.4, 0.5, 0.6])) == found.calibration
    apart = checked(np.concatenate([std, 2.0 * std]), np.repeat([1.0, 2.0], 800))
    low, high = factors(apart, np.array([0.5, 1.0]))
    assert low == 1.0
    assert 1.7 < high < 2.3
