"""Observations that are no observations: untrusted ones, invalid ones, flags, and numbers that stand for gaps."""

import warnings

import gpytorch
import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr

import gpytorch_gaps as gaps
from gpytorch_gaps.filling.arrays.sentinels import find_sentinels

RNG = np.random.default_rng(0)
FIELD = 5 + np.sin(np.arange(12) / 3)[:, None] * np.cos(np.arange(9) / 4) + 0.02 * RNG.standard_normal((12, 9))
FIELD[2, 3] = np.nan
QC = np.zeros(FIELD.shape, dtype="int8")
QC[5:7, 5:7] = 4
SPOILT = np.where(QC > 0, FIELD + 40, FIELD)
BAD = np.isnan(FIELD) | (QC > 0)


def fill(values, **options):
    kernels = [gpytorch.kernels.RBFKernel(), gpytorch.kernels.RBFKernel()]
    return gaps.fill_gaps(values, kernels=kernels, steps=2, check=False, progress=False, **options)


def cube(values, **about):
    return xr.DataArray(values, dims=("y", "x"), name="t", attrs=about)


WAYS = {
    "array": (np.array, np.array),
    "masked array": (np.ma.masked_invalid, np.array),
    "list": (lambda v: v.tolist(), np.array),
    "tensor": (torch.tensor, torch.tensor),
    "DataFrame": (pd.DataFrame, lambda flags: pd.DataFrame(flags, dtype="boolean")),
    "DataArray": (cube, cube),
    "chunks": (lambda v: cube(v).chunk({"y": 5}), cube),
    "Dataset": (lambda v: cube(v).to_dataset(), lambda flags: {"t": cube(flags)}),
}


@pytest.mark.parametrize(("kind", "mask"), WAYS.values(), ids=WAYS.keys())
def test_untrusted_observations_are_gaps(kind, mask):
    expected = fill(kind(np.where(BAD, np.nan, FIELD)))
    found = fill(kind(SPOILT), untrusted=mask(QC > 0))
    pick = (lambda result: result["t"]) if isinstance(found.report, dict) else (lambda result: result)
    np.testing.assert_array_equal(np.asarray(pick(found.gaps)), BAD)
    np.testing.assert_allclose(np.asarray(pick(found.mean)), np.asarray(pick(expected.mean)), rtol=1e-12)


def test_untrusted_integers_are_gaps_of_masked_arrays():
    counts = np.rint(100 * np.nan_to_num(FIELD, nan=5.0)).astype(np.int16)
    found = fill(counts, untrusted=QC > 0)
    assert found.mean.dtype == np.int16
    np.testing.assert_array_equal(np.asarray(found.gaps), QC > 0)
    np.testing.assert_array_equal(found.mean[QC == 0], counts[QC == 0])


def test_a_dataset_takes_a_flag_variable_of_its_own():
    found = xr.Dataset({"t": cube(SPOILT), "bad": cube(QC)}).gaps.fill(
        untrusted="bad", kernels=[gpytorch.kernels.RBFKernel()] * 2, steps=2, check=False, progress=False
    )
    assert list(found.report) == ["t"]
    np.testing.assert_array_equal(found.gaps["t"], BAD)


def test_flags_are_carried_along_and_never_averaged():
    flags = cube(np.where(np.isnan(FIELD), np.nan, 1.0), flag_values=[0, 1], flag_meanings="bad good")
    data = xr.Dataset({"t": cube(FIELD), "scl": flags})
    found = data.gaps.fill(kernels=[gpytorch.kernels.RBFKernel()] * 2, steps=2, check=False, progress=False)
    assert list(found.report) == ["t"]
    assert found.mean["scl"].identical(data["scl"])
    with pytest.raises(ValueError, match="has flag_values, so it holds flags"):
        fill(flags)


@pytest.mark.parametrize(
    "about", [{"valid_min": 0.0, "valid_max": 20.0}, {"valid_range": [0, 20]}, {"valid_range": np.array([0.0, 20.0])}]
)
def test_values_outside_of_valid_limits_are_gaps(about):
    found = fill(cube(SPOILT, **about))
    np.testing.assert_array_equal(found.gaps, BAD)
    assert found.mean.max() < 20
    assert f"4 values outside of {', '.join(about)} are gaps" in found.report.notes


def test_filled_values_are_valid():
    for values in (cube(FIELD, valid_min=5.5), cube(FIELD, valid_min=5.5).chunk()):
        found = fill(values)
        filled = found.mean.values[found.gaps.values]
        assert filled.min() == 5.5
        assert found.gaps.values.sum() == (~(FIELD >= 5.5)).sum()


def test_limits_of_packed_numbers_are_packed():
    values = cube(SPOILT, valid_range=np.array([0, 2000], dtype="int16"))
    values.encoding = {"scale_factor": 0.01, "add_offset": 1.0, "dtype": np.dtype("int16")}
    np.testing.assert_array_equal(fill(values).gaps, BAD)  # up to 21
    values.encoding = {}
    np.testing.assert_array_equal(fill(values).gaps, np.isnan(FIELD))  # the packing is not known any more


@pytest.mark.parametrize("mark", [-9999.0, 1e20, -32768.0, 9.969209968386869e36, 65535.0, -123456.0])
def test_a_number_that_stands_out_is_named(mark):
    values = np.where(QC > 0, mark, FIELD)
    message = "stands out: 4 cells hold it.*gap_value="
    with pytest.raises(ValueError, match=message) if mark > 1e18 else pytest.warns(UserWarning, match=message):
        fill(values)
    assert find_sentinels(values) == [(mark, 4)]
    assert find_sentinels(values.astype(np.float32).astype(np.float64))[0][1] == 4


@pytest.mark.parametrize(
    "values",
    [
        np.array([0.0, 0, 0, 0, 3, 80]),
        np.array([99.0, 98, 97, 60, 99, 99]),
        np.arange(-9999.0, 0),
        np.array([0.0, 1, 1, 0]),
        np.exp(RNG.standard_normal(1000)),
    ],
    ids=["rain", "percentages", "range", "flags", "skewed"],
)
def test_ordinary_values_do_not_stand_out(values):
    assert find_sentinels(values) == []


def test_values_without_sentinels_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fill(FIELD)
