"""Withheld observations: the errors to expect, and whether intervals are calibrated."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from gpytorch_gaps import settings
from gpytorch_gaps.filling.arrays.options import Options
from gpytorch_gaps.filling.checking.calibration import Check, Predicted, judge, predict_measurements, stated_error
from gpytorch_gaps.filling.learning import predict
from gpytorch_gaps.filling.learning.predict import widening
from gpytorch_gaps.posterior.scoring import Score


def a_check(coverage=0.95, count=400, independent=400.0, ratio=1.0, freedom=100.0):
    score = Score(rmse=1.0, mae=1.0, crps=1.0, nlpd=1.0, interval=1.0, coverage=coverage, count=count)
    return Check(score, 1.0, None, ratio, freedom, independent, 1.0)


def test_degrees_of_freedom_are_those_of_the_covariance():
    torch.manual_seed(0)
    places = torch.arange(60.0, dtype=torch.float64)
    covariance = 1e-12 * torch.exp(-(places - places[:, None]).abs() / 8) + 1e-13 * torch.eye(60)
    draws = torch.randn(2000, 60, dtype=torch.float64) @ torch.linalg.cholesky(covariance).mT
    found = judge(Predicted(torch.zeros(60).double(), covariance.diagonal(), draws), np.full(60, 1e-6))
    expected = covariance.trace() ** 2 / covariance.square().sum()
    assert found.freedom == pytest.approx(float(expected), rel=0.1)
    assert found.ratio == pytest.approx(1 / 1.1)


@pytest.mark.parametrize(
    ("ratio", "freedom", "factor"),
    [
        (2.0, 1e6, 2.0),
        (2.0, 15.0, 1.5),
        (2.0, 1.0, 1.0625),
        (0.4, 15.0, 0.7),
        (9.0, 15.0, 9.0),  # no chance: the model is wrong
        (0.01, 15.0, 0.01),
    ],
)
def test_few_degrees_of_freedom_leave_it_to_the_model_unless_it_is_refuted(ratio, freedom, factor):
    assert a_check(ratio=ratio, freedom=freedom).factor == pytest.approx(factor, rel=1e-3)


@pytest.mark.parametrize(
    ("coverage", "count", "independent", "calibrated"),
    [
        (0.95, 400, 400, True),
        (0.86, 400, 400, True),
        (0.80, 400, 400, False),
        (0.80, 400, 5, True),  # errors in one hole are correlated
        (0.83, 12, 12, True),  # two of twelve may be chance
        (0.5, 12, 12, False),
        (1.0, 40, 40, True),
        (1.0, 400, 400, False),
        (1.0, 400, 20, True),
    ],
)
def test_a_coverage_outside_is_no_alarm_where_it_may_be_chance(coverage, count, independent, calibrated):
    assert a_check(coverage, count, independent).is_calibrated == calibrated


@pytest.mark.parametrize(
    ("coverage", "independent", "rescaled"),
    [
        (0.90, 400.0, True),  # too narrow, though not far off
        (0.90, 20.0, False),  # may be chance
        (0.94, 400.0, False),
        (0.98, 400.0, False),  # the gaps may be harder to predict
        (1.0, 400.0, True),
        (0.80, 400.0, True),
    ],
)
def test_error_bars_are_widened_for_any_lack_of_coverage_and_narrowed_for_a_great_excess(
    coverage, independent, rescaled
):
    check = dataclasses.replace(a_check(coverage, independent=independent), stretch=1.3)
    assert check.calibration == (1.3 if rescaled else 1.0)


def small_model():
    from gpytorch.kernels import RBFKernel

    import gpytorch_gaps as gaps

    values = np.sin(np.arange(12.0))[:, None] * np.cos(np.arange(10.0) / 2)
    values[4:7, 3:8] = np.nan
    return gaps.fill_gaps(values, kernels=[RBFKernel(), RBFKernel()], steps=3, check=False, progress=False).model


def test_coverage_is_counted_on_the_intervals_that_are_stated(monkeypatch):
    model, x = small_model(), torch.tensor([[5.0, 5.0], [5.0, 4.0]], dtype=torch.float64)
    sampled = lambda *_: settings.variance_method("pathwise")  # noqa: E731
    monkeypatch.setattr(predict, "variance_budget", sampled)
    torch.manual_seed(3)
    found = predict_measurements(model, x, Options())
    torch.manual_seed(3)
    with torch.no_grad(), settings.variance_method("pathwise"):
        stated = model(x).lazy_covariance_matrix.diagonal(dim1=-1, dim2=-2) + model.likelihood.noise
    torch.testing.assert_close(found.variance, stated)  # no wider than those, though they come from a few samples
    error = found.variance.sqrt() * torch.tensor([1.9, 2.0])
    assert judge(found, (found.mean + error).numpy()).score.coverage == 0.5


def test_error_bars_of_few_observations_are_wider():
    assert widening(2) == pytest.approx(12.7062 / 1.95996 * math.sqrt(2), rel=1e-4)  # Student's t of one degree
    factors = [widening(count) for count in range(2, 31)]
    assert factors == sorted(factors, reverse=True)
    assert factors[-2] < 1.15
    assert factors[-1] == 1.0


def test_a_check_without_gaps_to_look_at_says_nothing_of_them():
    found = stated_error(a_check(), None, ["a note"])
    assert found["notes"] == ("a note",)
    assert "expected_rmse" not in found


def test_withheld_cells_nearer_to_data_than_the_gaps_are_said_to_be():
    near = dataclasses.replace(a_check(), variance=0.1)
    found = stated_error(near, 1.0)
    assert found["expected_rmse"] == pytest.approx(1.0)
    assert found["like_the_gaps"] is False
    assert "no observations as far from data as the gaps could be withheld" in found["notes"][0]
    assert stated_error(a_check(), 1.0)["like_the_gaps"] is True
