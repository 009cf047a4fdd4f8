"""``fill_gaps(transform=, bounds=)``: medians, quantiles and scores in the units of the data."""

import pickle

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
from gpytorch.kernels import RBFKernel
from scipy import stats

import gpytorch_gaps as gaps
from gpytorch_gaps.filling import fill as fill_module
from gpytorch_gaps.filling.transforms.predictive import predictive
from tests._covering import in_turn

QUICK = {"steps": 8, "progress": False, "robust": False}
SHAPE = (16, 14)
KERNELS = [RBFKernel(), RBFKernel()]


def field(seed=0, shape=SHAPE, noise=0.15):
    """A smooth field with noise, and the flags of its gaps."""
    rng = np.random.default_rng(seed)
    factors = []
    for size in shape:
        t = np.arange(size)
        factors.append(np.linalg.cholesky(np.exp(-0.5 * ((t[:, None] - t) / 3.0) ** 2) + 1e-8 * np.eye(size)))
    z = factors[0] @ rng.standard_normal(shape) @ factors[1].T + noise * rng.standard_normal(shape)
    gap = rng.random(shape) < 0.25
    gap[4:8, 5:9] = True
    return z, gap


def positive(seed=0):
    z, gap = field(seed)
    return np.where(gap, np.nan, 3.0 * np.exp(z)), gap


def test_a_filling_after_a_logarithm_is_the_filling_of_logarithms():
    y, gap = positive()
    found = gaps.fill_gaps(y, kernels=KERNELS, transform="log", **QUICK)
    same = gaps.fill_gaps(np.log(y), kernels=KERNELS, **QUICK)
    exact = stats.lognorm(same.std[gap], scale=np.exp(same.mean[gap]))
    close = {"rtol": 1e-5}
    np.testing.assert_allclose(found.mean[gap], exact.median(), **close)
    np.testing.assert_allclose(found.std[gap], exact.std(), **close)
    np.testing.assert_allclose(found.expectation()[gap], exact.mean(), **close)
    np.testing.assert_allclose(found.quantile(0.9)[gap], exact.ppf(0.9), **close)
    for own in (found.mean, found.expectation(), found.quantile(0.9)):
        np.testing.assert_array_equal(own[~gap], y[~gap])
    error = np.sqrt(np.mean(exact.var() + (exact.mean() - exact.median()) ** 2))
    assert found.report.expected_rmse / error == pytest.approx(1.0, abs=0.3)  # times a factor from the check
    assert found.report.held_out.coverage == pytest.approx(same.report.held_out.coverage, abs=1e-12)
    assert found.report.transform == "log"
    points = np.array([[3.5, 2.0], [10.0, 20.0]])
    at, log_at = found.at(points), same.at(points)
    beyond = stats.lognorm(log_at.std, scale=np.exp(log_at.mean))
    np.testing.assert_allclose(at.mean, beyond.median(), **close)
    np.testing.assert_allclose(at.std, beyond.std(), **close)
    np.testing.assert_allclose(pickle.loads(pickle.dumps(at)).quantile(0.1), beyond.ppf(0.1), **close)
    forecast, log_forecast = found.forecast(2, 0), same.forecast(2, 0)
    np.testing.assert_allclose(forecast.mean, np.exp(log_forecast.mean), **close)
    np.testing.assert_allclose(np.log(forecast.quantile(0.7)), log_forecast.quantile(0.7), atol=1e-5)
    scores, log_scores = found.evaluate(2, progress=False), same.evaluate(2, progress=False)
    assert scores.score.coverage == pytest.approx(log_scores.score.coverage, abs=1e-12)
    assert scores.coverage([0.5]) == pytest.approx(log_scores.coverage([0.5]))
    assert scores.score.rmse == pytest.approx(np.sqrt(np.mean(scores.errors**2)))


def test_quantiles_without_a_transform_are_normal_ones():
    z, gap = field()
    found = gaps.fill_gaps(np.where(gap, np.nan, z), kernels=KERNELS, check=False, **QUICK)
    np.testing.assert_allclose(found.quantile(0.975)[gap], (found.mean + stats.norm.ppf(0.975) * found.std)[gap])
    np.testing.assert_array_equal(found.expectation(), found.mean)


def rain(seed):
    """Made-up rain: zero in half of the cells, with a heavy tail."""
    z, gap = field(seed, (26, 24))
    return 2.0 * np.maximum(z, 0.0) ** 3, gap


@in_turn(transform=["boxcox", "rank", "auto"])
def test_rain_is_never_negative_and_its_intervals_cover_what_they_say(transform):
    truth, gap = rain(4)
    y = np.where(gap, np.nan, truth)
    plain = gaps.fill_gaps(y, kernels=KERNELS, check=False, **QUICK)
    found = gaps.fill_gaps(y, kernels=KERNELS, transform=transform, **QUICK)
    filling = found._fitted.filling
    mean, std = (own[gap] for own in filling.predicted)
    score = predictive(filling.transform, mean, std).score(truth[gap])
    normal = predictive(None, plain.mean[gap], plain.std[gap]).score(truth[gap])
    assert score.crps < 0.7 * normal.crps
    assert 0.90 <= score.coverage <= 0.99
    assert found.mean.min() == 0
    assert found.quantile(0.001).min() == 0
    assert (plain.mean[gap] < 0).any()
    assert (found.quantile(0.975) >= found.mean).all()
    assert (found.expectation() >= 0).all()
    if transform == "auto":
        assert "held-out CRPS" in found.report.transform
        assert "with none" in found.report.transform


@in_turn(kind=["tensor", "frame", "array", "integers"])
def test_quantiles_have_the_form_of_the_input(kind):
    y, gap = positive()
    make = {
        "tensor": lambda: torch.tensor(y, dtype=torch.float32),
        "frame": lambda: pd.DataFrame(y, columns=np.arange(SHAPE[1], dtype=float)),
        "array": lambda: xr.DataArray(y, dims=("y", "x"), name="rain", attrs={"units": "mm"}),
        "integers": lambda: np.ma.MaskedArray(np.nan_to_num(np.round(10 * y)).astype(np.int16), mask=gap),
    }
    given = make[kind]()
    found = gaps.fill_gaps(given, transform="log", kernels=KERNELS, check=False, **QUICK)
    for own in (found.quantile(0.1), found.expectation()):
        assert type(own) is type(found.mean)
        assert own.shape == found.mean.shape
        assert getattr(own, "dtype", None) == getattr(found.mean, "dtype", None)
    if kind == "array":
        assert found.quantile(0.1).attrs == {"units": "mm"}
    low = np.asarray(found.quantile(0.1))
    assert (low <= np.asarray(found.mean)).all()
    assert (low[gap] < np.asarray(found.mean)[gap]).any()


def test_variables_of_a_dataset_have_transforms_and_bounds_of_their_own():
    y, gap = positive()
    z, _ = field()
    data = xr.Dataset({"rain": (("y", "x"), y), "t": (("y", "x"), np.where(gap, np.nan, z))})
    found = data.gaps.fill(transform={"rain": "rank"}, kernels=KERNELS, check=False, **QUICK)
    assert {name: one.transform for name, one in found.report.items()} == {"rain": "rank", "t": ""}
    assert (found.quantile(0.01)["rain"] > 0).all()
    assert set(found.quantile(0.5).data_vars) == {"rain", "t"}
    bounded = data[["rain"]].gaps.fill(bounds={"rain": (0, None)}, kernels=KERNELS, check=False, **QUICK)
    assert bounded.report["rain"].transform == "log (for bounds (0, None))"
    with pytest.raises(ValueError, match="transform: got the variable 'snow', expected one of"):
        data.gaps.fill(transform={"snow": "log"}, **QUICK)


def test_labels_of_other_scales_are_divided_after_the_transform():
    z, gap = field(1, (40, 3))
    truth = np.exp(z * np.array([0.2, 1.0, 2.0]))
    table = pd.DataFrame(np.where(gap, np.nan, truth), columns=list("abc"))
    found = gaps.fill_gaps(table, bounds=(0, None), **QUICK)
    inside = (found.quantile(0.025) <= truth) & (truth <= found.quantile(0.975))
    assert inside.to_numpy()[gap].mean() > 0.85
    score = found.evaluate(2, progress=False).score
    assert 0.8 < score.coverage <= 1.0
    assert (found.at({"rows": [50], "columns": ["c"]}).quantile(0.01) > 0).all()


def test_gap_filler_predicts_within_bounds_also_of_further_rows():
    sklearn = pytest.importorskip("sklearn")
    z, gap = field(2, (40, 2))
    truth = np.maximum(z, 0.0) ** 2
    filler = gaps.GapFiller(bounds=(0, None), data_transform="boxcox", check=False, steps=8)
    copy = sklearn.base.clone(filler)
    assert copy.get_params()["data_transform"] == "boxcox"
    y = np.where(gap, np.nan, truth)
    filled = copy.fit(y[:30]).transform(y[30:])
    assert (filled >= 0).all()
    np.testing.assert_array_equal(filled[~gap[30:]], truth[30:][~gap[30:]])
    mean, std = copy.predict(y[:30], return_std=True)
    same = gaps.fill_gaps(
        pd.DataFrame(y[:30], columns=["x0", "x1"]), transform="boxcox", check=False, steps=8, progress=False
    )
    np.testing.assert_allclose(mean, same.mean, rtol=1e-3, atol=1e-3)
    assert (std[gap[:30]] > 0).all()


def test_what_is_not_supported_is_refused(monkeypatch):
    y, _ = positive()
    data = xr.Dataset({"a": (("y", "x"), y), "b": (("y", "x"), y)})
    with pytest.raises(ValueError, match="transform: got one together with joint"):
        gaps.fill_gaps(data, transform="log", joint=True)
    with pytest.raises(ValueError, match="bounds: got one together with noise"):
        gaps.fill_gaps(y, bounds=(0, None), noise=0.1)
    with pytest.raises(ValueError, match="transform: got 'auto' with 5 observations, expected 30 or more"):
        gaps.fill_gaps(np.array([1.0, 2.0, np.nan, 4.0, 2.0, 1.5]), transform="auto", progress=False)
    with pytest.raises(ValueError, match=r"transform: got \{'a': 'log'\}, expected one of"):
        gaps.fill_gaps(y, transform={"a": "log"})
    found = gaps.fill_gaps(y, transform="log", kernels=KERNELS, std=False, check=False, **QUICK)
    with pytest.raises(ValueError, match="quantile: got a result without standard deviations"):
        found.quantile(0.5)
    with pytest.raises(ValueError, match="quantile: got 1, expected a probability below 1"):
        found.quantile(1)
    monkeypatch.setattr(fill_module, "MAX_CELLS_IN_MEMORY", 100)
    with pytest.raises(ValueError, match="transform: got one, or bounds, for 16 x 14 cells, which are streamed"):
        gaps.fill_gaps(y, transform="log", progress=False)
