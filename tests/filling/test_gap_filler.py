"""The estimator of scikit-learn: its own checks, and what users of imputers expect."""

import pickle

import numpy as np
import pandas as pd
import pytest
from gpytorch.kernels import RBFKernel

pytest.importorskip("sklearn")

from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import estimator_checks_generator, parametrize_with_checks

import gpytorch_gaps as gaps

# one given kernel and one step: the checks are about conventions, not about fits
QUICK = gaps.GapFiller(kernels={0: RBFKernel()}, steps=1, check=False)
OVERWRITE = "check_estimators_overwrite_params"
EXPECTED_FAILURES = {OVERWRITE: "joblib hashes a kernel and its copy differently; without kernels it passes, below"}


@parametrize_with_checks([QUICK], expected_failed_checks=lambda _: EXPECTED_FAILURES)
def test_conventions_of_scikit_learn(estimator, check):
    check(estimator)


def test_fit_does_not_change_parameters(quick_choice):
    checks = estimator_checks_generator(gaps.GapFiller(steps=1, check=False))
    check = next(one for _, one in checks if getattr(one, "func", one).__name__ == OVERWRITE)
    check(gaps.GapFiller(steps=1, check=False))


SIZE = 50


def table(seed=0):
    """Two series that follow each other, of different scales. shape: (50, 2)"""
    rng = np.random.default_rng(seed)
    wave = np.sin(np.arange(SIZE) / 4)
    return np.stack([wave, 10 * wave + 30], axis=1) + 0.02 * rng.standard_normal((SIZE, 2)) * [1, 10]


def with_gaps(seed=1):
    values = table()
    values[np.random.default_rng(seed).random(values.shape) < 0.15] = np.nan
    values[20:23] = np.nan
    return values


def make(**options):
    return gaps.GapFiller(**{"kernels": {0: RBFKernel()}, "steps": 10, "check": False, **options})


def test_the_training_table_is_filled_as_fill_gaps_does():
    values = with_gaps()
    filler = make().fit(values)
    expected = gaps.fill_gaps(values, [None, ["x0", "x1"]], {0: RBFKernel()}, steps=10, check=False, progress=False)
    mean, std = filler.predict(values, return_std=True)
    np.testing.assert_allclose(mean, expected.mean, rtol=1e-6)
    np.testing.assert_allclose(std, expected.std, rtol=1e-3, atol=1e-9)
    np.testing.assert_array_equal(filler.transform(values), mean)
    assert np.abs(mean - table())[:, 0].max() < 0.3


def test_further_rows_are_predicted_from_the_training_table_and_their_own_observations():
    values = with_gaps()
    filler = make(coordinates="t").fit(pd.DataFrame({"t": np.arange(SIZE) / 2, "a": values[:, 0], "b": values[:, 1]}))
    between = pd.DataFrame({"t": [10.25, 30.0], "a": [np.nan, np.nan], "b": [np.nan, np.nan]})
    mean, std = filler.predict(between, return_std=True)
    rows, columns = np.repeat([[10.25], [30.0]], 2, axis=0), np.array([[0.0], [1.0], [0.0], [1.0]])
    expected = filler.fitted_.at([rows, columns], noise=True)
    np.testing.assert_allclose(mean[:, 1:], expected.mean.reshape(2, 2), rtol=1e-6)
    np.testing.assert_allclose(std[:, 1:], expected.std.reshape(2, 2), rtol=1e-6)
    seen = between.assign(b=[np.nan, 45.0])  # far above what was expected at 30
    informed, tighter = filler.predict(seen, return_std=True)
    assert informed[1, 1] > mean[1, 1] + 0.3
    assert tighter[1, 1] < 0.8 * std[1, 1]
    assert (informed[1, 2], tighter[1, 2]) == (45.0, 0.0)
    np.testing.assert_array_equal(informed[:, 0], [10.25, 30.0])


def test_rows_without_coordinates_follow_the_training_table():
    values = with_gaps()
    further = np.array([[np.nan, np.nan], [0.5, np.nan]])
    mean = make().fit(values).transform(further)
    longer = make().fit(np.concatenate([values, further])).transform(np.concatenate([values, further]))
    assert mean[1, 0] == 0.5
    np.testing.assert_allclose(mean, longer[SIZE:], rtol=0.1)  # the same rows, though not used in training


def test_the_index_of_a_table_may_be_dates():
    days = pd.date_range("2020-01-01", periods=SIZE)
    values = pd.DataFrame(with_gaps(), days, ["a", "b"])
    filler = make(coordinates="index").set_output(transform="pandas").fit(values)
    filled = filler.transform(values)
    assert isinstance(filled, pd.DataFrame)
    assert list(filled.columns) == list(filler.get_feature_names_out()) == ["a", "b"]
    assert (filled.index == days).all()
    known = values.notna()
    pd.testing.assert_frame_equal(filled[known], values[known])
    shuffled = values.sample(frac=1.0, random_state=0)
    pd.testing.assert_frame_equal(filler.transform(shuffled).sort_index(), filled, rtol=1e-6, check_freq=False)


def test_it_works_in_pipelines_with_clone_and_pickle():
    values = with_gaps()
    target = table()[:, 0]
    pipeline = make_pipeline(make(), LinearRegression())
    scores = cross_val_score(pipeline, values, target, cv=2)
    assert len(scores) == 2
    columns = ColumnTransformer([("fill", make(), [0, 1])]).fit(values)
    filler = make().fit(values)
    np.testing.assert_allclose(columns.transform(values), filler.transform(values))
    again = clone(filler).fit(values)
    np.testing.assert_array_equal(again.transform(values), filler.transform(values))
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(filler)).transform(values), filler.transform(values))


def test_the_check_gives_a_score_and_tables_without_gaps_are_learned_too():
    filler = make(check=True).fit(table())
    assert filler.score_.count >= 5
    broken = table()
    broken[5, 0] = np.nan
    mean, std = filler.predict(broken, return_std=True)
    assert abs(mean[5, 0] - table()[5, 0]) < 4 * std[5, 0]


def test_equal_values_leave_nothing_to_learn():
    values = np.full((6, 2), 3.0)
    values[2, 0] = np.nan
    mean, std = make().fit(values).predict(values, return_std=True)
    assert mean[2, 0] == 3.0
    assert np.isnan(std[2, 0])


@pytest.mark.parametrize(
    ("options", "values", "message"),
    [
        (
            {},
            np.array([[1.0, np.nan], [2.0, np.nan], [3.0, np.nan]]),
            "X: got no observation in x1, expected one or more",
        ),
        ({"coordinates": "t"}, np.ones((3, 2)), "coordinates: got 't', expected a column, one of 0 to 1"),
        (
            {"coordinates": "index"},
            np.ones((3, 2)),
            "coordinates: got 'index' with a table of type ndarray",
        ),
        ({"coordinates": 0}, np.array([[1.0, 1], [1, 2], [2, 3]]), "got the coordinate 1.0 twice"),
        ({"coordinates": 0}, np.ones((3, 1)), "X: got only the column of coordinates"),
        ({"steps": 0}, np.array([[1.0], [2.0]]), "steps: got 0, expected an integer of at least 1"),
    ],
)
def test_what_cannot_be_meant_is_refused(options, values, message):
    with pytest.raises(ValueError, match=message):
        make(**options).fit(values)


def test_repeated_coordinates_of_further_rows_are_refused():
    filler = make(coordinates=0).fit(np.column_stack([np.arange(SIZE), table()]))
    with pytest.raises(ValueError, match="got 2 rows, some of them at the same coordinate"):
        filler.transform(np.array([[60.0, np.nan, 1.0], [60.0, 1.0, 1.0]]))
