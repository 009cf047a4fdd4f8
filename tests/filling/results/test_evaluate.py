"""Scores of withheld observations, fold by fold."""

import json
import math

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
from gpytorch.kernels import RBFKernel

import gpytorch_gaps as gaps
from gpytorch_gaps.filling.results import evaluate as module
from gpytorch_gaps.filling.results.evaluation import Evaluation

OPTIONS = {"steps": 3, "check": False, "progress": False}


def field(shape=(24, 30), seed=0):
    rng = np.random.default_rng(seed)
    rows, columns = np.indices(shape)
    values = np.sin(rows / 4) + np.cos(columns / 5) + 0.1 * rng.standard_normal(shape)
    values[6:12, 8:16] = np.nan
    return values


@pytest.fixture(scope="module")
def result():
    return gaps.fill_gaps(field(), kernels=[RBFKernel(), RBFKernel()], trend=False, **OPTIONS)


@pytest.fixture(scope="module")
def evaluation(result):
    return result.evaluate(folds=3, progress=False)


def test_errors_are_those_of_the_model_without_the_hidden_observations(result, monkeypatch):
    folds = []
    predict = module._predict

    def spy(filling, chosen, fold):
        found = predict(filling, chosen, fold)
        folds.append((filling.part, filling.withheld, found))
        return found

    monkeypatch.setattr(module, "_predict", spy)
    result.evaluate(folds=1, progress=False)
    part, withheld, found = folds[0]
    kernel, noise = result.model.covar_module, result.model.likelihood.noise.item()
    x = torch.cartesian_prod(*(torch.arange(float(size)).double() for size in part.values.shape))
    known = torch.from_numpy(~np.isnan(part.values) & ~withheld.hidden).flatten()
    scored = torch.from_numpy(withheld.scored).flatten()
    mean = torch.from_numpy(part.values[~np.isnan(part.values) & ~withheld.hidden]).mean()
    y = torch.from_numpy(part.values).flatten()
    with torch.no_grad():
        full = kernel(x).to_dense()
        system = full[known][:, known] + noise * torch.eye(int(known.sum()), dtype=torch.float64)
        gain = torch.linalg.solve(system, full[known][:, scored])
        error = y[scored] - mean - gain.mT @ (y[known] - mean)
        variance = full[scored][:, scored].diagonal() - (gain * full[known][:, scored]).sum(0) + noise
    np.testing.assert_allclose(found.errors, error, atol=2e-3 * error.abs().max())
    np.testing.assert_allclose(found.deviations, variance.sqrt(), rtol=1e-2)


def test_every_observation_is_scored_once_at_most_and_hidden_ones_are_as_deep_as_the_gap(evaluation):
    assert sorted(set(evaluation.fold)) == [0, 1, 2]
    assert len(np.unique(np.round(evaluation.errors, 12))) == len(evaluation.errors)
    assert evaluation.distances.max() >= 2.0  # the gap of 6 x 8 cells is 3 deep


def test_scores_are_those_of_the_errors(evaluation):
    assert evaluation.score.rmse == pytest.approx(math.sqrt(np.mean(evaluation.errors**2)))
    assert sum(one.count for one in evaluation.folds) == evaluation.score.count
    assert sum(one.score.count for one in evaluation.by_distance) == evaluation.score.count
    assert evaluation.folds[1].mae == pytest.approx(np.abs(evaluation.errors[evaluation.fold == 1]).mean())
    far = evaluation.by_distance[-1]
    inside = (evaluation.distances > far.above) & (evaluation.distances <= far.up_to)
    assert far.score.rmse == pytest.approx(math.sqrt(np.mean(evaluation.errors[inside] ** 2)))
    assert evaluation.coverage([0.95]) == [pytest.approx(evaluation.score.coverage)]


def test_the_model_is_calibrated_where_it_is_true(evaluation):
    assert 0.85 < evaluation.score.coverage <= 1.0
    assert 0.08 < evaluation.score.rmse < 0.3  # the noise is 0.1


def test_the_same_evaluation_twice_and_the_random_state_is_kept(result, evaluation):
    torch.manual_seed(3)
    state = torch.random.get_rng_state()
    again = result.evaluate(folds=3, progress=False)
    assert torch.equal(torch.random.get_rng_state(), state)
    np.testing.assert_array_equal(again.errors, evaluation.errors)


def test_it_is_text_json_and_html(evaluation):
    assert "fold 3" in str(evaluation)
    assert "hyperparameters are not learned again" in str(evaluation)
    assert json.loads(json.dumps(evaluation.as_dict()))["score"]["count"] == evaluation.score.count
    assert "<table" in evaluation._repr_html_()
    assert repr(evaluation).startswith("<Evaluation of")


def test_labels_are_no_neighbours():
    one = np.ones(3)
    far = Evaluation(one, one, np.array([1.0, 2.5, 1e6]), np.zeros(3, int))
    assert [str(part) for part in far.by_distance] == ["1 cell", "above 2, up to 4 cells", "no other of its label"]


def test_variables_are_evaluated_each_in_its_units():
    days = pd.date_range("2000-01-01", periods=24, freq="D")
    one = xr.DataArray(field(), {"time": days}, ("time", "x"))
    for joint in (False, True):
        kernels = {"time": RBFKernel(), "x": RBFKernel()}
        result = gaps.fill_gaps(xr.Dataset({"a": one, "b": 100 * one + 50}), joint=joint, kernels=kernels, **OPTIONS)
        found = result.evaluate(folds=2, progress=False)
        assert list(found) == ["a", "b"]
        assert 20 < found["b"].score.rmse / found["a"].score.rmse < 500


def test_what_cannot_be_evaluated_is_refused(result):
    with pytest.raises(ValueError, match="folds: got 0, expected an integer of at least 1"):
        result.evaluate(folds=0)
    few = gaps.fill_gaps(np.array([1.0, 2.0, np.nan, 1.5, 2.5]), kernels=[RBFKernel()], **OPTIONS)
    with pytest.raises(ValueError, match="evaluate: got too few observations to withhold some, expected 30"):
        few.evaluate()
