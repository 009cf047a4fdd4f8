"""The errors that ``fill_gaps`` states: held-out scores, the error to expect, calibrated standard deviations."""

import math
import warnings
from dataclasses import replace
from functools import partial

import gpytorch
import numpy as np
import pytest

import gpytorch_gaps as gaps
from gpytorch_gaps.filling import fill as fill_module
from gpytorch_gaps.filling.checking import calibration
from gpytorch_gaps.filling.learning import choose
from gpytorch_gaps.filling.process import streamed


def matern():
    return [gpytorch.kernels.MaternKernel(nu=1.5) for _ in range(2)]


def draw(shape, lengthscale, seed):
    """A draw from a product of Matern-3/2 kernels, with noise of 0.05."""
    generator = np.random.default_rng(seed)
    values = generator.standard_normal(shape)
    for axis, size in enumerate(shape):
        apart = np.abs(np.subtract.outer(np.arange(size), np.arange(size))) * math.sqrt(3) / lengthscale
        root = np.linalg.cholesky((1 + apart) * np.exp(-apart) + 1e-9 * np.eye(size))
        values = np.moveaxis(np.tensordot(root, values, (1, axis)), 0, axis)
    return values + 0.05 * generator.standard_normal(shape)


def rms(values):
    return math.sqrt(np.mean(np.square(values)))


def cut(truth, *boxes):
    seen = truth.copy()
    for box in boxes:
        seen[box] = np.nan
    return seen


FAR = {"hole": np.s_[6:16, 7:17], "strip": np.s_[:, 8:16]}


@pytest.mark.parametrize("box", FAR.values(), ids=FAR.keys())
def test_the_stated_error_is_that_of_a_large_gap(box):
    stated, held_out, true = [], [], []
    for seed in range(3):
        truth = draw((22, 24), 3.0, seed)
        found = gaps.fill_gaps(cut(truth, box), kernels=matern(), steps=15, progress=False, seed=seed)
        stated.append(found.report.expected_rmse)
        held_out.append(found.report.held_out.rmse)
        true.append(rms((found.mean - truth)[box]))
        assert found.report.like_the_gaps
    assert rms(stated) == pytest.approx(rms(true), rel=0.35)
    assert rms(held_out) == pytest.approx(rms(true), rel=0.5)
    within = [1 / 1.5 < one / other < 1.5 for one, other in zip(stated, true, strict=True)]
    assert sum(within) >= 2


def test_where_nothing_like_the_gap_can_be_withheld_the_report_says_so():
    truth = draw((22, 24), 3.0, 1)
    box = np.s_[1:21, 1:23]  # almost everything
    found = gaps.fill_gaps(cut(truth, box), kernels=matern(), steps=15, progress=False)
    assert found.report.like_the_gaps is False
    assert "no observations as far from data as the gaps could be withheld" in str(found.report)
    assert found.report.expected_rmse == pytest.approx(rms(found.std[box]), rel=0.25)  # what the model expects
    assert 1 / 1.5 < found.report.expected_rmse / rms((found.mean - truth)[box]) < 1.5


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_what_is_stated_does_not_depend_on_units(scale):
    seen = cut(draw((22, 24), 3.0, 2), FAR["hole"])
    plain, other = (
        gaps.fill_gaps(u * (seen + 10.0), kernels=matern(), steps=4, progress=False).report for u in (1.0, scale)
    )
    assert other.expected_rmse == pytest.approx(scale * plain.expected_rmse, rel=1e-4)
    assert other.held_out.crps == pytest.approx(scale * plain.held_out.crps, rel=1e-4)
    assert other.held_out.coverage == plain.held_out.coverage


def test_an_error_is_stated_without_standard_deviations_and_without_a_check():
    seen = cut(draw((22, 24), 3.0, 3), FAR["hole"])
    options = {"kernels": matern(), "steps": 15, "progress": False}
    both = gaps.fill_gaps(seen, **options).report
    no_std = gaps.fill_gaps(seen, std=False, **options).report
    no_check = gaps.fill_gaps(seen, check=False, **options).report
    neither = gaps.fill_gaps(seen, std=False, check=False, **options).report
    assert no_std.expected_rmse == pytest.approx(both.expected_rmse, rel=0.3)
    assert no_check.expected_rmse == pytest.approx(both.expected_rmse, rel=0.3)
    assert no_check.held_out is None
    assert "estimated by the model" in str(no_check)
    assert neither.expected_rmse is None


# -- streamed ----------------------------------------------------------------------------------------------------------


def test_a_streamed_fill_is_checked_by_reconstruct_itself(monkeypatch):
    monkeypatch.setattr(fill_module, "MAX_CELLS_IN_MEMORY", 100)
    seen = cut(draw((22, 24), 3.0, 3), FAR["hole"])
    options = {"kernels": matern(), "steps": 15, "progress": False}
    found = gaps.fill_gaps(seen, **options)
    assert found.report.held_out.rmse < 1.0

    def wrong(*args, **kwargs):
        result = right(*args, **kwargs)
        mean = result.mean  # with a trend
        result.mean = lambda x: mean(x) + 5.0
        return result

    right = streamed.reconstruct
    monkeypatch.setattr(streamed, "reconstruct", wrong)
    with pytest.warns(gaps.CalibrationWarning, match="95% intervals cover 0%"):
        report = gaps.fill_gaps(seen, **options).report
    assert report.held_out.rmse == pytest.approx(5.0, rel=0.3)
    assert report.expected_rmse > 4 * found.report.expected_rmse


# -- error bars --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("smooth", [False, True])
def test_error_bars_that_cover_too_little_or_too_much_are_rescaled_with_a_warning(monkeypatch, smooth):
    def scaled(factor, *args):
        found = predicted(*args)
        return replace(found.at(slice(None), factor**0.5), mean=found.mean)

    predicted = calibration.predict_measurements
    seen = draw((40, 40), 1.0, 5)
    seen[np.random.default_rng(0).random(seen.shape) < 0.3] = np.nan
    options = {"kernels": matern(), "steps": 15, "progress": False, "smooth": smooth}
    with warnings.catch_warnings():
        warnings.simplefilter("error", gaps.CalibrationWarning)
        right = gaps.fill_gaps(seen, **options)
    assert right.report.calibrated_by is None
    assert "calibrated" not in str(right.report)
    factors = []
    for factor, words in ((1 / 16, "too small. They have been"), (16.0, "too large. They have been")):
        monkeypatch.setattr(calibration, "predict_measurements", partial(scaled, factor))
        with pytest.warns(gaps.CalibrationWarning, match=f"of .* withheld observations: .* are {words} multiplied by"):
            found = gaps.fill_gaps(seen, **options)
        by = found.report.calibrated_by
        assert by == found.report.as_dict()["calibrated_by"]
        factors.append(by)
        assert f"calibrated by {by:.2g}" in str(found.report)
        np.testing.assert_allclose(found.std, by * right.std, rtol=1e-6)
        np.testing.assert_array_equal(found.mean, right.mean)
    assert factors[0] == pytest.approx(16 * factors[1])
    with pytest.warns(gaps.CalibrationWarning, match="They would have to be multiplied"):
        unscaled = gaps.fill_gaps(seen, std=False, **options).report
    assert unscaled.calibrated_by is None


@pytest.mark.parametrize("observed", [2, 4, 8])
def test_error_bars_of_a_few_observations_cover_what_they_should(observed):
    covered = []
    for seed in range(12):
        truth = draw((10, 10), 4.0, [observed, seed])
        kept = np.random.default_rng([1, observed, seed]).permutation(100)[:observed]
        seen = np.full(100, np.nan)
        seen[kept] = truth.flat[kept]
        found = gaps.fill_gaps(seen.reshape(10, 10), kernels=matern(), progress=False)
        covered.append(np.mean((np.abs(found.mean - truth) < 1.96 * found.std)[found.gaps]))
        assert any("std was multiplied by" in note for note in found.report.notes)
    assert np.mean(covered) > 0.85


@pytest.mark.parametrize("values", [[np.nan, 3.0, np.nan], [3.0, np.nan, 3.0]], ids=["one", "equal"])
@pytest.mark.parametrize("smooth", [False, True])
def test_nothing_is_claimed_where_nothing_is_known_of_errors(values, smooth):
    found = gaps.fill_gaps(np.array(values), smooth=smooth, progress=False)
    assert (found.mean == 3.0).all()
    np.testing.assert_array_equal(np.isnan(found.std), np.isnan(values) | smooth)
    assert "No uncertainty estimate is available" in str(found.report)


def test_equal_up_to_rounding_is_equal():
    values = np.full(50, 273.15)
    values[3], values[7] = np.nextafter(273.15, 300), np.nan
    assert np.isnan(gaps.fill_gaps(values, progress=False).std[7])


@pytest.mark.parametrize("seed", range(2))
def test_windows_see_what_varies(seed):
    generator = np.random.default_rng(seed)
    truth = np.full((40, 40), 273.15)
    truth[:6, :6] += np.cumsum(generator.standard_normal((6, 6)), axis=1)
    seen = np.where(generator.random(truth.shape) < 0.2, np.nan, truth)
    found = gaps.fill_gaps(seen, kernels=matern(), steps=4, check=False, progress=False)
    assert found.std[found.gaps].max() > 0.05
    lone = np.zeros((40, 40))
    lone[tuple(generator.integers(0, 40, 2))] = 1.0
    seen = np.where((generator.random(lone.shape) < 0.2) & (lone == 0), np.nan, lone)
    found = gaps.fill_gaps(seen, kernels=matern(), steps=4, check=False, progress=False)
    assert found.std[found.gaps].min() > 1e-3 * lone.std()


def test_one_bad_value_is_not_what_varies():
    residuals = np.random.default_rng(7).standard_normal(3000)
    residuals[5] = 1e6
    assert choose._robust_squares(residuals, 1e-9).mean() < 1.2
    lone = np.zeros(3000)
    lone[5] = 1.0  # but for it, nothing does
    assert choose._robust_squares(lone, 1e-13).sum() == 1.0
