"""What tests of variances share."""

import warnings

import gpytorch
import pytest

import gpytorch_gaps as gaps


@pytest.fixture
def estimates_are_errors():
    """Warnings of estimated variances are errors; those of training points used for testing are no concern."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", gaps.ApproximateVarianceWarning)
        warnings.simplefilter("ignore", gpytorch.utils.warnings.GPInputWarning)
        yield
