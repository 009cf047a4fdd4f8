"""``fill_gaps(noise=)``: errors of the measurements that are known."""

import gpytorch
import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr

import gpytorch_gaps as gaps
from gpytorch_gaps.filling import fill as fill_module

SHAPE = (24, 20)
QUICK = {"steps": 15, "progress": False}


def kernels():
    return [gpytorch.kernels.RBFKernel(), gpytorch.kernels.RBFKernel()]


def sample(seed=0, own=0.0):
    """A smooth field, errors that differ by a factor of 30 between cells, and what was measured.

    :param own: the standard deviation of noise beside the errors.
    """
    rng = np.random.default_rng(seed)
    y, x = np.ogrid[: SHAPE[0], : SHAPE[1]]
    truth = np.sin(y / 4) * np.cos(x / 5) + 0.5 * np.cos((x + y) / 6)
    errors = np.where(rng.random(SHAPE) < 0.5, 0.02, 0.6)
    seen = truth + errors * rng.standard_normal(SHAPE) + own * rng.standard_normal(SHAPE)
    seen[rng.random(SHAPE) < 0.4] = np.nan
    return truth, errors, seen


def rmse(found, truth, seen):
    return np.sqrt(np.mean((found.mean - truth)[np.isnan(seen)] ** 2))


def test_known_errors_weigh_the_observations():
    truth, errors, seen = sample()
    given = np.where(np.isnan(seen), np.nan, errors)
    found = gaps.fill_gaps(seen, kernels=kernels(), noise=given, **QUICK)
    same = gaps.fill_gaps(seen, kernels=kernels(), check=False, **QUICK)
    assert rmse(found, truth, seen) < 0.4 * rmse(same, truth, seen)
    field = gaps.fill_gaps(seen, kernels=kernels(), noise=given, smooth=True, check=False, **QUICK)
    inside = np.abs(field.mean - truth) < 1.96 * field.std
    assert inside.mean() > 0.85
    assert found.report.held_out.coverage > 0.85
    noise = found.model.likelihood.noise
    learned = noise - torch.from_numpy(given[~np.isnan(seen)]) ** 2
    torch.testing.assert_close(learned, learned[:1].expand_as(learned))
    assert learned[0].sqrt() < 0.05
    assert "errors of measurements are as given" in " ".join(found.report.notes)


def test_standard_deviations_in_gaps_are_those_of_measurements_with_the_errors_given_there_or_the_root_mean_square():
    _, errors, seen = sample()
    gap, options = np.isnan(seen), {"kernels": kernels(), "check": False, "tolerance": 1e-8, **QUICK}
    unknown = gaps.fill_gaps(seen, noise=np.where(gap, -9.0, errors), **options)
    known = gaps.fill_gaps(seen, noise=errors, **options)
    np.testing.assert_allclose(known.mean, unknown.mean, rtol=1e-6, atol=1e-8)
    more = errors[gap] ** 2 - np.mean(errors[~gap] ** 2)
    np.testing.assert_allclose(known.std[gap] ** 2 - unknown.std[gap] ** 2, more, atol=1e-8)
    with torch.no_grad():
        points = gaps.CartesianGrid([np.arange(size, dtype=float) for size in SHAPE]).points()
        posterior = unknown.model.likelihood(unknown.model(points))
    np.testing.assert_allclose(posterior.stddev.numpy()[gap.ravel()], unknown.std[gap], rtol=1e-5)
    np.testing.assert_allclose(unknown.at(np.argwhere(gap)).std, unknown.std[gap], rtol=1e-5)


def test_noise_beside_the_known_errors_is_learned():
    _, errors, seen = sample(own=0.3)
    errors = np.minimum(errors, 0.05)
    rng = np.random.default_rng(5)
    seen = np.where(np.isnan(seen), np.nan, sample()[0] + (0.3**2 + errors**2) ** 0.5 * rng.standard_normal(SHAPE))
    found = gaps.fill_gaps(seen, kernels=kernels(), noise=errors, check=False, **QUICK | {"steps": 30})
    assert found.report.noise_std == pytest.approx(0.3, rel=0.15)


def test_one_number_is_a_lower_bound_on_the_noise_of_all():
    _, _, seen = sample()
    options = {"kernels": kernels(), "check": False, **QUICK}
    found = gaps.fill_gaps(seen, noise=1.0, **options)
    assert found.report.noise_std >= 1.0
    assert found.model.likelihood.noise.shape == (1,)
    array = gaps.fill_gaps(seen, noise=np.ones(SHAPE), **options)
    np.testing.assert_array_equal(array.mean, found.mean)


def test_errors_come_in_the_forms_of_the_values():
    _, errors, seen = sample()
    options = {"kernels": kernels(), "check": False, **QUICK}
    plain = gaps.fill_gaps(seen, noise=errors, **options).mean
    field = xr.DataArray(seen, dims=("y", "x"), name="sst")
    of_field = field.copy(data=errors).transpose("x", "y")
    np.testing.assert_array_equal(field.gaps.fill(noise=of_field, **options).mean, plain)
    dataset = xr.Dataset({"sst": field, "sst_error": of_field})
    found = dataset.gaps.fill(noise={"sst": "sst_error"}, **options)
    np.testing.assert_array_equal(found.mean["sst"], plain)
    assert list(found.report) == ["sst"]
    xr.testing.assert_identical(found.mean["sst_error"], dataset["sst_error"])
    np.testing.assert_array_equal(dataset.gaps.fill(noise="sst_error", **options).mean["sst"], plain)
    tensor = gaps.fill_gaps(torch.from_numpy(seen), noise=torch.from_numpy(errors), **options)
    np.testing.assert_array_equal(tensor.mean, plain)
    table, rows = pd.DataFrame(seen), pd.DataFrame(errors)
    np.testing.assert_array_equal(gaps.fill_gaps(table, noise=rows, **options).mean, plain)
    per_column = pd.Series(errors[0], index=table.columns)
    of_columns = gaps.fill_gaps(seen, noise=np.broadcast_to(errors[0], SHAPE), **options).mean
    np.testing.assert_array_equal(gaps.fill_gaps(table, noise=per_column, **options).mean, of_columns)


def test_errors_of_variables_that_are_filled_together_are_in_the_units_of_each():
    truth, errors, seen = sample()
    data = xr.Dataset({"a": (("y", "x"), seen), "b": (("y", "x"), 1e3 * np.where(errors > 0.1, np.nan, truth))})
    noise = {"a": errors, "b": None}
    options = {"kernels": kernels(), "joint": True, "check": False, **QUICK}
    found = data.gaps.fill(noise=noise, **options)
    scaled = data.assign(a=50 * data["a"]).gaps.fill(noise={"a": 50 * errors}, **options)
    np.testing.assert_allclose(scaled.mean["a"], 50 * found.mean["a"], rtol=1e-5)
    np.testing.assert_allclose(scaled.std["a"], 50 * found.std["a"], rtol=1e-4)
    typical = 50 * np.sqrt(np.mean(errors[~np.isnan(seen)] ** 2))
    assert f"as given, {typical:.3g} in root mean square" in " ".join(scaled.report["a"].notes)


def test_streamed_values_have_one_error(monkeypatch):
    monkeypatch.setattr(fill_module, "MAX_CELLS_IN_MEMORY", 100)
    truth, _, seen = sample()
    noisy = seen + 0.3 * np.random.default_rng(1).standard_normal(SHAPE)
    found = gaps.fill_gaps(noisy, kernels=kernels(), noise=0.3, check=False, **QUICK)
    assert found.report.noise_std >= 0.3
    assert np.sqrt(np.mean((found.mean - truth)[np.isnan(seen)] ** 2)) < 0.5
    with pytest.raises(ValueError, match="noise: got ndarray, expected one standard deviation for values of more"):
        gaps.fill_gaps(noisy, noise=np.ones(SHAPE), **QUICK)


@pytest.mark.parametrize(
    ("noise", "message"),
    [
        (0.0, "noise: got 0.0, expected a standard deviation above 0"),
        (np.zeros(SHAPE), r"noise: entry \(\d+, \d+\) is 0.0, where values has an observation"),
        (np.full(SHAPE, np.nan), r"noise: entry \(\d+, \d+\) is nan, where values has an observation"),
        (np.ones(7), r"noise: got an array of the shape \(7,\), expected \(24, 20\)"),
        ("sst_error", "noise: got 'sst_error', expected a finite standard deviation"),
        (np.array([["a"]]), "noise: got <U1, expected flags or numbers"),
    ],
)
def test_errors_that_cannot_be_are_refused(noise, message):
    with pytest.raises(ValueError, match=message):
        gaps.fill_gaps(sample()[2], noise=noise, **QUICK)


def test_errors_of_a_dataset_name_their_variables():
    seen = sample()[2]
    data = xr.Dataset({"a": (("y", "x"), seen), "b": (("y", "x"), seen)})
    with pytest.raises(ValueError, match=r"noise: got one for all of a, b, .* expected a mapping from names"):
        data.gaps.fill(noise=0.1, **QUICK)
    with pytest.raises(ValueError, match="noise: got 'a_error', expected one of"):
        data.gaps.fill(noise={"a": "a_error"}, **QUICK)
