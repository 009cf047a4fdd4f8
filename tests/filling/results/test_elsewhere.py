"""Predictions at points in the user's coordinates, and forecasts in the form of the input."""

import copy
import pickle

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
from gpytorch.kernels import RBFKernel

import gpytorch_gaps as gaps

SIZE = 40
TABLE = np.sin(np.arange(SIZE) / 3)[:, None] * np.array([1.0, 5.0]) + np.array([0.0, 20.0])
TABLE[4:7] = np.nan
TABLE[20, 1] = np.nan
MONTHS = pd.date_range("2000-01-01", periods=SIZE, freq="MS")


def fill(values, axes=None, kernels=None, **options):
    options = {"steps": 2, "check": False, "progress": False, "kernels": kernels or {0: RBFKernel()}, **options}
    return gaps.fill_gaps(values, axes, **options)


@pytest.fixture(scope="module")
def by_label():
    """A field of two labels whose scales differ by five, so each is divided by its own."""
    return fill(xr.DataArray(TABLE, {"time": MONTHS, "site": ["Rome", "Oslo"]}, ("time", "site"), "t", {"units": "K"}))


def test_at_gaps_predictions_are_those_of_the_filled_array(by_label):
    mean, std = by_label.at({"time": ["2000-05-01", "2000-06-01", "2001-09-01"], "site": ["Rome", "Oslo", "Oslo"]})
    at = [4, 5, 20], [0, 1, 1]
    np.testing.assert_allclose(mean, by_label.mean.values[at], rtol=1e-9)
    np.testing.assert_allclose(std, by_label.std.values[at], rtol=1e-6)


def test_a_single_coordinate_stands_for_all_points_and_the_order_of_axes_is_free(by_label):
    mean, _ = by_label.at({"site": "Oslo", 0: MONTHS[4:7].to_numpy()})
    np.testing.assert_allclose(mean, by_label.mean.values[4:7, 1], rtol=1e-9)


def test_points_of_a_table_give_series_with_its_index(by_label):
    points = pd.DataFrame({"time": MONTHS[4:6], "site": ["Oslo", "Rome"]}, index=["first", "second"])
    mean, _ = by_label.at(points)
    assert list(mean.index) == ["first", "second"]
    np.testing.assert_allclose(mean, by_label.mean.values[[4, 5], [1, 0]], rtol=1e-9)


def test_the_field_is_more_certain_than_a_measurement_by_the_noise(by_label):
    point = {"time": "2000-06-01", "site": "Rome"}
    measured, field = by_label.at(point), by_label.at(point, noise=False)
    scale = by_label.std.values[5, 0] ** 2 - field.std[0] ** 2
    assert measured.mean == field.mean
    assert scale == pytest.approx(by_label.report.noise_std**2 * np.nanvar(TABLE[:, 0], ddof=1), rel=1e-6)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ({"time": "2000-05-01"}, r"points: got \['time'\], expected coordinates along each of \['time', 'site'\]"),
        ({"time": "2000-05-01", "place": "Rome"}, "points: got the axis 'place', expected one of"),
        ({"time": "2000-05-01", "site": "Paris"}, "site: got the label 'Paris', expected one of Rome, Oslo"),
        ({"time": 5.0, "site": "Rome"}, "time: got 5.0, expected times"),
        ({"time": MONTHS[:3], "site": ["Rome", "Oslo"]}, "got coordinates 3 of time, 2 of site, expected equally many"),
        (np.zeros((2, 3)), r"points: got float64 of shape \(2, 3\), expected numbers of shape \(Q, 2\)"),
    ],
)
def test_points_that_do_not_fit_the_axes_are_refused(by_label, points, message):
    with pytest.raises(ValueError, match=message):
        by_label.at(points)


def test_degrees_of_the_whole_circle_and_columns_of_numbers():
    values = np.cos(np.radians(np.arange(0.0, 360.0, 15.0)))[:, None] * np.linspace(1, 2, 5)
    values[[0, 23], 2] = np.nan
    result = fill(xr.DataArray(values, {"lon": np.arange(0.0, 360.0, 15.0), "lat": np.arange(5.0)}, ("lon", "lat")))
    mean, _ = result.at([[-15.0, 2.0], [360.0, 2.0]])
    np.testing.assert_allclose(mean, result.mean.values[[23, 0], 2], rtol=1e-9)


def test_stations_are_named_or_given_by_their_coordinates():
    places = {"lat": ("station", [40.0, 41, 42, 43]), "lon": ("station", [1.0, 5, 3, 7])}
    names = {"time": MONTHS, "station": ["A", "B", "C", "D"]}
    values = np.column_stack([TABLE, TABLE + 1])
    result = fill(xr.DataArray(values, {**names, **places}, ("time", "station")), kernels={"time": RBFKernel()})
    named = result.at({"time": MONTHS[5:6].to_numpy(), "station": ["C", "A"]})
    placed = result.at({"time": "2000-06-01", "station": [[42.0, 3.0], [40.0, 1.0]]})
    np.testing.assert_allclose(named.mean, result.mean.values[5, [2, 0]], rtol=1e-6)
    np.testing.assert_allclose(placed.mean, named.mean, rtol=1e-9)
    with pytest.raises(ValueError, match="station: got 'X', expected names of its points, or their coordinates"):
        result.at({"time": "2000-06-01", "station": "X"})


def test_results_survive_copies(by_label):
    expected = by_label.forecast(2).mean.values
    for one in (copy.deepcopy(by_label), pickle.loads(pickle.dumps(by_label))):
        np.testing.assert_allclose(one.forecast(2).mean.values, expected, rtol=1e-9)


def test_a_forecast_agrees_with_points_and_continues_the_coordinates(by_label):
    mean, std = by_label.forecast(3)
    assert mean.dims == ("time", "site")
    assert mean.attrs == {"units": "K"}
    assert mean.name == "t"
    assert list(mean.indexes["time"]) == list(pd.date_range("2003-05-01", periods=3, freq="MS"))
    assert list(mean.indexes["site"]) == ["Rome", "Oslo"]
    assert std.attrs["long_name"] == "standard deviation of t"
    at = by_label.at({"time": "2003-06-01", "site": "Oslo"})
    np.testing.assert_allclose((mean.values[1, 1], std.values[1, 1]), (at.mean[0], at.std[0]), rtol=1e-6)


SERIES = TABLE[:, 1]
INDICES = {
    "months": MONTHS,
    "business days": pd.bdate_range("2000-01-03", periods=SIZE),
    "days in a zone": pd.date_range("2000-03-01", periods=SIZE, freq="D", tz="Europe/Rome"),
    "periods": pd.period_range("2000-01", periods=SIZE, freq="M"),
    "durations": pd.timedelta_range("0h", periods=SIZE, freq="6h"),
    "numbers": pd.Index(np.arange(SIZE) * 0.1 + 3),
    "counts": pd.RangeIndex(SIZE),
}


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
def test_a_series_continues_its_own_index(index):
    longer = index.append(index[-1:] + (index[-1] - index[-2])) if not hasattr(index, "freq") else None
    mean, std = fill(pd.Series(SERIES, index, name="t"), kernels=[RBFKernel()]).forecast(1)
    assert type(mean.index) is type(index)
    expected = longer[-1] if longer is not None else index[-1] + 1 * index.freq
    assert mean.index[0] == pytest.approx(expected) if isinstance(expected, float) else mean.index[0] == expected
    assert (mean.name, len(mean), len(std)) == ("t", 1, 1)


def test_dates_of_360_days_are_continued_by_months():
    months = xr.date_range("2000-01-01", periods=SIZE, freq="MS", calendar="360_day", use_cftime=True)
    mean, _ = fill(xr.DataArray(SERIES, {"time": months}, ("time",)), kernels=[RBFKernel()]).forecast(2)
    assert [str(one) for one in mean["time"].values] == ["2003-05-01 00:00:00", "2003-06-01 00:00:00"]
    assert mean["time"].values[0].calendar == "360_day"


def test_a_table_is_continued_by_rows_and_a_stacked_one_with_each_of_its_labels():
    table = pd.DataFrame(TABLE, MONTHS, ["Rome", "Oslo"])
    mean, _ = fill(table).forecast(2)
    assert list(mean.columns) == ["Rome", "Oslo"]
    stacked, _ = fill(table.rename_axis(index="month", columns="site").stack(future_stack=True)).forecast(2)
    assert stacked.index.names == ["month", "site"]
    for site in table:
        np.testing.assert_allclose(stacked.xs(site, level="site"), mean[site], rtol=1e-3)


def test_arrays_and_tensors_are_continued_as_such():
    from_array = fill(SERIES, kernels=[RBFKernel()]).forecast(2)
    from_tensor = fill(torch.tensor(SERIES).float(), kernels=[RBFKernel()]).forecast(2)
    assert isinstance(from_array.mean, np.ndarray)
    assert from_tensor.mean.dtype == torch.float32
    np.testing.assert_allclose(from_tensor.mean, from_array.mean, rtol=1e-4)


def test_a_dataset_is_continued_variable_by_variable():
    one = xr.DataArray(SERIES, {"time": MONTHS}, ("time",))
    mean, std = fill(xr.Dataset({"a": one, "b": -one}), kernels=[RBFKernel()]).forecast(2)
    np.testing.assert_allclose(mean["a"], -mean["b"], rtol=1e-6)
    np.testing.assert_allclose(std["a"], std["b"], rtol=1e-6)


def test_variables_that_were_filled_together_are_each_predicted_in_their_units():
    fields = xr.DataArray(TABLE, {"time": MONTHS}, ("time", "site")).to_dataset("site").rename({0: "a", 1: "b"})
    result = fill(fields, joint=True, kernels={"time": RBFKernel()})
    mean, std = result.at({"time": "2001-09-01"})
    assert mean["b"][0] == pytest.approx(float(result.mean["b"][20]), rel=1e-6)
    assert std["b"][0] == pytest.approx(float(result.std["b"][20]), rel=1e-6)
    assert result.forecast(2).mean["b"].mean() > 10 > result.forecast(2).mean["a"].mean()


def test_irregular_axes_and_results_without_a_model_are_refused():
    irregular = fill(SERIES, [np.arange(SIZE) ** 1.5], kernels=[RBFKernel()])
    with pytest.raises(ValueError, match=r"axis 0: got irregular coordinates.*result.at"):
        irregular.forecast(2)
    with pytest.raises(ValueError, match=r"axis: got axis 1: 2 labels, expected an axis of times or numbers"):
        fill(TABLE, [None, ["a", "b"]]).forecast(2, axis=1)
    with pytest.raises(ValueError, match=r"axis: got None, expected one of \['axis 0', 'axis 1'\]"):
        fill(TABLE, [None, [0.0, 1.0]]).forecast(2)
    with pytest.raises(ValueError, match="at: got a result without a model in memory"):
        fill(np.array([1.0, np.nan])).at([0.5])
