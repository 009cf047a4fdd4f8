"""The held-out check in the units of the data."""

import numpy as np
import pytest
import torch

from gpytorch_gaps.filling.checking.calibration import Predicted, judge
from gpytorch_gaps.filling.checking.transformed import in_data_units
from gpytorch_gaps.filling.transforms.functions import Functions
from gpytorch_gaps.filling.transforms.predictive import Transformed
from gpytorch_gaps.filling.transforms.transform import Power

COUNT = 400


def checks(make, deviation=0.5, transform=None):
    """The check of z, and that of y, of observations that are made from normal errors."""
    transform = transform or Power(0.0, 1.0)
    generator = np.random.default_rng(0)
    mean, std = generator.standard_normal(COUNT), np.full(COUNT, deviation)
    z = mean + make(std * generator.standard_normal(COUNT))
    covariance = torch.diag(torch.from_numpy(std**2))
    predicted = Predicted(torch.from_numpy(mean), torch.from_numpy(std**2), covariance=covariance)
    truth = transform.inverse(z)
    own = judge(predicted, z)
    return own, in_data_units(own, Transformed(transform, mean, std), truth), z


def test_coverage_and_stretch_are_those_before_the_transform():
    own, found, _ = checks(lambda errors: 2.0 * errors)
    assert found.score.coverage == own.score.coverage < 0.8
    assert found.stretch == own.stretch == pytest.approx(2.0, rel=0.15)


def test_mean_square_errors_are_of_medians_and_skewed_ones_have_fewer_degrees_of_freedom():
    own, found, z = checks(lambda errors: errors)
    median = Power(0.0, 1.0).inverse(np.random.default_rng(0).standard_normal(COUNT))
    assert found.ratio * found.variance == pytest.approx(np.mean((np.exp(z) - median) ** 2))
    assert own.freedom == pytest.approx(COUNT)
    assert 1.0 < found.freedom < 0.2 * COUNT
    straight = Functions(lambda y: 2 * y, lambda z: z / 2, np.linspace(-3, 3, 9))
    own, same, _ = checks(lambda errors: errors, transform=straight)
    assert same.freedom == pytest.approx(own.freedom, rel=1e-6)
    assert same.ratio == pytest.approx(own.ratio, rel=1e-6)


def test_the_stretch_of_censored_observations_makes_their_intervals_cover():
    transform = Power(0.5, 1.0)  # zero is at -2
    _, found, z = checks(lambda errors: 2.5 * errors - 1.0, 0.5, transform)
    assert 0.1 < np.mean(z <= -2) < 0.5
    generator = np.random.default_rng(0)
    mean = generator.standard_normal(COUNT)
    wider = Transformed(transform, mean, np.full(COUNT, 0.5 * found.stretch))
    assert found.score.coverage < 0.85
    assert wider.coverage(transform.inverse(z), 0.95) == pytest.approx(0.95, abs=0.01)
