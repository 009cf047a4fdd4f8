"""``where`` and ``max_gap``: which gaps are filled, for every type of array, in memory and streamed."""

import importlib.util
from datetime import timedelta

import gpytorch
import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
from scipy.ndimage import distance_transform_edt as depth

import gpytorch_gaps as gaps
from gpytorch_gaps.filling import fill as fill_module
from gpytorch_gaps.filling.arrays.max_gap import in_short_runs, read_max_gap
from gpytorch_gaps.filling.axes.describe import describe_axes
from gpytorch_gaps.filling.checking.holdout import withhold

RNG = np.random.default_rng(0)
SEEN = np.sin(np.arange(14) / 3)[:, None] * np.cos(np.arange(10) / 4) + 0.02 * RNG.standard_normal((14, 10))
LAND = np.zeros(SEEN.shape, dtype=bool)
LAND[9:, 6:] = True
SEEN[LAND] = np.nan
SEEN[3:6, 2:5] = np.nan
SEEN[0, 0] = SEEN[7, 8] = np.nan
CLOUD = np.isnan(SEEN) & ~LAND


def fill(values, **options):
    kernels = {} if "kernels" in options else {"kernels": [gpytorch.kernels.RBFKernel() for _ in range(values.ndim)]}
    return gaps.fill_gaps(values, steps=2, **({"check": False, "progress": False} | kernels | options))


def table(values):
    return pd.DataFrame(values, index=np.arange(14.0), columns=np.arange(10.0))


def cube(values):
    return xr.DataArray(values, dims=("y", "x"))


WAYS = {
    "array": (np.array, np.array),
    "masked array": (lambda v: np.ma.masked_invalid(v), np.array),
    "tensor": (torch.tensor, torch.tensor),
    "DataFrame": (table, table),
    "DataArray": (cube, lambda mask: cube(mask.astype(np.float32)).T),
    "chunks": (lambda v: cube(v).chunk({"y": 4}), cube),
    "lazy mask": (lambda v: cube(v).chunk({"y": 4}), lambda mask: cube(mask).chunk({"x": 3})),
}


@pytest.mark.parametrize(("kind", "mask"), WAYS.values(), ids=WAYS.keys())
def test_only_gaps_inside_of_the_mask_are_filled(kind, mask):
    result = fill(kind(SEEN), where=mask(~LAND))
    mean = np.ma.filled(result.mean, np.nan) if np.ma.isMaskedArray(result.mean) else np.asarray(result.mean)
    np.testing.assert_array_equal(np.isnan(mean), LAND)
    np.testing.assert_array_equal(mean[~np.isnan(SEEN)], SEEN[~np.isnan(SEEN)])
    np.testing.assert_array_equal(np.asarray(result.gaps), CLOUD)
    assert (result.report.num_gaps, result.report.num_left) == (CLOUD.sum(), LAND.sum())
    assert f"{LAND.sum()} gaps are not filled: outside where" in result.report.notes
    if result.std is not None:
        std = np.ma.getdata(result.std) if np.ma.isMaskedArray(result.std) else np.asarray(result.std)
        np.testing.assert_array_equal(np.isnan(std), LAND)
        assert (std[CLOUD] > 0).all()


def test_gaps_outside_do_not_change_what_is_filled():
    everywhere, inside = fill(SEEN), fill(SEEN, where=~LAND)
    np.testing.assert_allclose(inside.mean[CLOUD], everywhere.mean[CLOUD], rtol=1e-9)
    np.testing.assert_allclose(inside.std[CLOUD], everywhere.std[CLOUD], rtol=1e-9)
    assert inside.report.expected_rmse == pytest.approx(np.sqrt(np.mean(inside.std[CLOUD] ** 2)))


def test_smoothing_leaves_gaps_outside_too():
    for values in (SEEN, cube(SEEN).chunk({"y": 5})):
        smooth = fill(values, where=~LAND, smooth=True)
        np.testing.assert_array_equal(np.isnan(np.asarray(smooth.mean)), LAND)
        assert (np.asarray(smooth.mean)[~np.isnan(SEEN)] != SEEN[~np.isnan(SEEN)]).any()


def test_a_mask_of_some_dimensions_serves_all_others():
    values = np.stack([SEEN, SEEN[::-1]])
    result = fill(xr.DataArray(values, dims=("t", "y", "x")), where=cube(~LAND))
    np.testing.assert_array_equal(np.isnan(result.mean.values), np.isnan(values) & LAND)


def test_a_dataset_takes_its_own_variable_as_a_mask():
    data = xr.Dataset({"sst": cube(SEEN), "sea": cube((~LAND).astype("int8"))})
    options = {"kernels": [gpytorch.kernels.RBFKernel()] * 2, "steps": 2, "check": False, "progress": False}
    by_name, by_mapping = data.gaps.fill(where="sea", **options), data.gaps.fill(where={"sst": data["sea"]}, **options)
    assert list(by_name.report) == ["sst"]
    for result in (by_name, by_mapping):
        np.testing.assert_array_equal(np.isnan(result.mean["sst"].values), LAND)
        assert result.mean["sea"].identical(data["sea"])
    with pytest.raises(ValueError, match="where: got 'land', expected one of"):
        data.gaps.fill(where="land")


def test_variables_that_are_filled_together_have_a_mask_each():
    data = xr.Dataset({"sst": cube(SEEN), "salt": cube(3 * SEEN).T})
    options = {"kernels": [gpytorch.kernels.RBFKernel()] * 2, "steps": 2, "check": False, "progress": False}
    for where in (cube(~LAND), {"sst": cube(~LAND)}):
        result = data.gaps.fill(where=where, joint=True, max_gap={"y": 6}, **options)
        np.testing.assert_array_equal(np.isnan(result.mean["sst"].values), LAND)
        assert result.report["sst"].num_left == LAND.sum()
        assert result.report["salt"].num_left == (0 if isinstance(where, dict) else LAND.sum())


def test_no_gap_inside_of_the_mask_leaves_everything():
    result = fill(SEEN, where=~np.isnan(SEEN))
    np.testing.assert_array_equal(result.mean, SEEN)
    assert result.report.num_gaps == 0
    assert "is it inverted?" in result.report.notes[1]
    assert "nothing was done" in result.report.notes[-1]


def test_withheld_cells_are_as_far_from_data_as_the_gaps_to_fill_not_as_land_is():
    values = RNG.standard_normal((40, 45))
    values[:, 25:] = np.nan  # land
    targets = np.zeros(values.shape, dtype=bool)
    targets[RNG.random(values.shape) < 0.1] = True
    targets[:, 25:] = False
    values[targets] = np.nan
    wanted = depth(np.isnan(values))[targets].mean()
    found = [
        depth(np.isnan(values) | held.hidden)[held.scored].mean()
        for held in (withhold(values, np.random.default_rng(0), some) for some in (targets, None))
    ]
    assert found[0] == pytest.approx(wanted, rel=0.2)
    assert found[1] > 1.5 * wanted


def test_the_held_out_error_with_a_mask_is_that_of_the_field_inside():
    result = fill(SEEN, where=~LAND, check=True)
    assert result.report.like_the_gaps
    assert result.report.held_out.count >= 10


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_a_run_of_more_cells_stays_a_gap(limit):
    series = np.sin(np.arange(40.0) / 3)
    for start, length in ((0, 2), (6, 1), (12, 3), (20, 2), (36, 4)):
        series[start : start + length] = np.nan
    found = fill(series, max_gap=limit, std=False)
    lengths = {0: 2, 6: 1, 12: 3, 20: 2, 36: 4}
    for start, length in lengths.items():
        assert np.isnan(found.mean[start : start + length]).all() == (length > limit)
    assert found.report.num_left == sum(length for length in lengths.values() if length > limit)


def length_by_its_neighbours(gap, x, i):
    """The length of a gap as the documentation of ``interpolate_na`` of xarray defines it."""
    before, after = i, i
    while before > 0 and gap[before]:
        before -= 1
    while after < len(x) - 1 and gap[after]:
        after += 1
    return x[after] - x[before]


@pytest.mark.parametrize("days", [1.5, 2, 3, 4, 100])
def test_lengths_in_units_are_those_of_xarray(days):
    times = np.datetime64("2024-01-01", "ns") + np.cumsum(RNG.integers(6, 40, 60)) * np.timedelta64(1, "h")
    missing = RNG.random((60, 3)) < 0.5
    missing[0, 0] = missing[-1, 1] = True
    x = (times - times[0]) / np.timedelta64(1, "D")
    expected = [
        [not gap[i] or length_by_its_neighbours(gap, x, i) <= days + 1e-9 for gap in missing.T] for i in range(60)
    ]
    axes = describe_axes(missing.shape, [times, None], ["time", "k"])
    for given in (f"{days} days", timedelta(days=days), f"{24 * days} h"):
        ours = in_short_runs(missing, axes, [read_max_gap(0, axes[0], given)])
        np.testing.assert_array_equal(ours, expected)
    if importlib.util.find_spec("bottleneck"):
        data = xr.DataArray(np.where(missing, np.nan, 1.0), coords={"time": times}, dims=("time", "k"))
        theirs = data.interpolate_na("time", max_gap=pd.Timedelta(days=days), fill_value="extrapolate")
        np.testing.assert_array_equal(theirs.notnull().values, expected)


def test_runs_are_followed_in_the_order_of_coordinates_and_around_a_circle():
    longitude = np.arange(0, 360, 30.0)
    missing = np.isin(longitude, [330, 0, 30, 120])
    order = RNG.permutation(12)
    axes = describe_axes((12,), [longitude[order]], ["lon"])
    assert axes[0].kind == "circle"
    for given, kept in ((2, [120]), ("60 degrees", [120]), (3, [330, 0, 30, 120]), ("120 degrees", [330, 0, 30, 120])):
        short = in_short_runs(missing[order], axes, [read_max_gap(0, axes[0], given)])
        assert sorted(longitude[order][short & missing[order]]) == sorted(kept)


def test_runs_along_several_axes_and_in_chunks():
    for values in (SEEN, cube(SEEN).chunk({"y": 3, "x": 4})):
        found = fill(values, max_gap={0: 2, 1: 1})
        left = np.isnan(np.asarray(found.mean))
        np.testing.assert_array_equal(left, np.isnan(SEEN) & ~np.isin(np.arange(140).reshape(14, 10), [0, 78]))
        assert "in runs longer than 2 cells along" in found.report.notes[0]


def test_large_arrays_are_streamed_with_a_mask(monkeypatch):
    monkeypatch.setattr(fill_module, "MAX_CELLS_IN_MEMORY", 100)
    found = fill(np.ma.masked_invalid(SEEN), where=~LAND, max_gap={0: 2})
    np.testing.assert_array_equal(
        np.ma.getmaskarray(found.mean), LAND | np.isnan(SEEN) & (np.arange(14) // 3 == 1)[:, None]
    )
    assert found.report.num_gaps == found.gaps.sum() == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"where": np.ones(3)}, "where: got an array of the shape"),
        ({"where": np.array(["a"] * 10)}, "where: got <U1, expected flags or numbers"),
        ({"where": xr.DataArray(np.ones(14), dims="z")}, "where: got the dimensions"),
        ({"where": xr.DataArray(np.ones(14), {"y": np.arange(14) + 0.5}, "y")}, "where: its coordinates differ"),
        ({"max_gap": {"time": 3}}, "max_gap: got the axis 'time'"),
        ({"max_gap": {"y": 2.5}}, "max_gap: y: got 2.5, expected an integer, which counts cells, or a length with its"),
        ({"max_gap": {"y": "3 days"}}, "max_gap: y: got the unit 'days', expected one of unit"),
        ({"max_gap": {"y": 0}}, "max_gap: y: got 0"),
        ({"max_gap": {"x": 3}}, "max_gap: x is an axis of labels"),
    ],
)
def test_masks_and_lengths_that_do_not_fit_are_refused(options, message):
    data = xr.DataArray(SEEN, {"y": np.arange(14.0), "x": list("abcdefghij")}, ("y", "x"))
    with pytest.raises(ValueError, match=message):
        fill(data, **options)


def test_tables_with_another_index_are_refused():
    with pytest.raises(ValueError, match="where: its index differs"):
        fill(table(SEEN), where=table(~LAND).iloc[::-1])
