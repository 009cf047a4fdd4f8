"""The meaning of dimensions."""

import datetime

import cftime
import numpy as np
import pandas as pd
import pytest
import torch

from gpytorch_gaps.filling.axes.describe import describe_axes
from gpytorch_gaps.filling.learning.cycles import possible_periods

cftime_like = [datetime.datetime(2000, 1, 1) + datetime.timedelta(days=2 * i) for i in range(5)]


def only(coordinates, name="x", size=None, **attributes):
    (axis,) = describe_axes([len(coordinates) if size is None else size], [coordinates], [name], [attributes])
    return axis


def test_numbers_stay_what_they_are():
    axis = only([3.0, 1.0, 2.5])
    assert axis.kind == "number"
    assert axis.points.tolist() == [[3.0], [1.0], [2.5]]
    assert axis.extent == 2.0
    assert axis.spacing == 1.0


@pytest.mark.parametrize(
    "times",
    [
        pd.date_range("2000-01-01", periods=5, freq="2D"),
        pd.date_range("2000-01-01", periods=5, freq="2D", tz="Europe/Rome"),
        pd.period_range("2000-01-01", periods=5, freq="2D"),
        pd.timedelta_range("1D", periods=5, freq="2D"),
        np.array(["2000-01-01", "2000-01-03", "2000-01-05", "2000-01-07", "2000-01-09"], dtype="datetime64[D]"),
        np.array(cftime_like, dtype=object),
        [moment.date() for moment in cftime_like],
    ],
    ids=["dates", "zone", "periods", "durations", "numpy", "datetimes", "python dates"],
)
def test_times_are_days_since_the_first(times):
    axis = only(times)
    assert axis.kind == "time"
    assert axis.unit == "days"
    assert axis.points[:, 0].tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]


CALENDARS = [
    ("standard", 365.2425),
    ("proleptic_gregorian", 365.2425),
    ("julian", 365.25),
    ("noleap", 365.0),
    ("all_leap", 366.0),
    ("360_day", 360.0),
]


@pytest.mark.parametrize(("calendar", "year"), CALENDARS)
def test_a_year_is_as_long_as_the_calendar_has_it(calendar, year):
    months = [cftime.datetime(2000 + i // 12, 1 + i % 12, 1, calendar=calendar) for i in range(400 * 12 + 1)]
    axis = only(np.array(months))
    assert axis.kind == "time"
    assert axis.points[-1, 0] == 400 * year
    assert possible_periods(axis) == [year]


@pytest.mark.parametrize(("calendar", "year"), CALENDARS)
@pytest.mark.parametrize(("unit", "days"), [("days", 1.0), ("hours", 1 / 24), ("seconds", 1 / 86400)])
def test_cf_times_that_were_not_decoded_are_times(calendar, year, unit, days):
    axis = only(30 * np.arange(40) / days, units=f"{unit} since 1850-01-01 00:00", calendar=calendar)
    assert (axis.kind, axis.unit) == ("time", "days")
    np.testing.assert_allclose(axis.points[:, 0], 30.0 * np.arange(40), rtol=1e-15)
    assert possible_periods(axis) == [year]


def test_twelve_cf_months_are_a_year():
    axis = only(np.arange(40), units="months since 1850-01-01")
    np.testing.assert_allclose(axis.points[12], possible_periods(axis))


def test_dates_of_several_calendars_and_missing_labels_are_refused():
    mixed = [cftime.datetime(2000, 1, 1, calendar="360_day"), cftime.datetime(2000, 1, 1, calendar="noleap")]
    with pytest.raises(
        ValueError, match="x: entry 0 is 2000-01-01 00:00:00, expected labels, or dates of one calendar"
    ):
        only(np.array(mixed))
    with pytest.raises(ValueError, match="x: entry 1 is nan, expected labels"):
        only(np.array(["a", np.nan, "c"], dtype=object))


def test_unsorted_times_keep_their_order():
    axis = only(np.array(["2000-01-05", "2000-01-01", "2000-01-03"], dtype="datetime64[ns]"))
    assert axis.points[:, 0].tolist() == [0.0, -4.0, -2.0]


@pytest.mark.parametrize(
    ("name", "attributes"), [("lat", {}), ("Latitude", {}), ("y", {"units": "degrees_north"}),
                             ("y", {"standard_name": "latitude"})],
)  # fmt: skip
def test_latitudes_by_name_unit_or_standard_name(name, attributes):
    assert only([10.0, 20.0, 30.0], name, **attributes).kind == "latitude"


def test_latitudes_beyond_the_poles_are_numbers():
    assert only([10.0, 200.0], "lat").kind == "number"


def test_longitudes_of_a_region_and_all_around():
    assert only([10.0, 20.0, 30.0], "lon").kind == "longitude"
    around = only(np.arange(0.0, 360.0, 10.0), "lon")
    assert around.kind == "circle"
    assert around.period == 360.0
    assert around.unit == "degrees"
    assert around.encode([-10.0, 360.0, 400.0, 90.0])[:, 0].tolist() == [350.0, 360.0, 40.0, 90.0]


def test_both_ends_of_a_circle_may_be_one_point_but_no_others():
    around = only(np.arange(-180.0, 181.0, 10.0), "lon")
    assert around.kind == "circle"
    assert around.points[[0, -1], 0].tolist() == [-180.0, 180.0]
    assert only(np.arange(0.0, 25.0), "hour").kind == "circle"
    assert only(np.arange(0.0, 26.0), "hour").kind == "number"  # 0 is 24, and 1 is 25


def test_months_of_a_year_close_to_a_circle():
    assert only(range(1, 13), "month").kind == "circle"
    assert only(range(1, 5), "month").kind == "number"
    assert only(range(399), "month").kind == "number"  # months since some time


def test_labels_and_groups_and_positions():
    assert only(["a", "b", "c"]).kind == "label"
    assert only(np.array([[1.0, 2.0], [3.0, 4.0]])).kind == "group"
    assert only(torch.tensor([1.0, 2.0])).kind == "number"
    shapes = describe_axes([40, 50, 3])
    assert [axis.kind for axis in shapes] == ["position", "position", "label"]
    assert [axis.kind for axis in describe_axes([3, 3])] == ["position", "position"]  # too little to learn them from


@pytest.mark.parametrize(
    ("coordinates", "size", "message"),
    [
        ([1.0, np.nan, 3.0], None, "x: entry 1 is nan, expected finite"),
        ([1.0, np.inf], None, "x: entry 1 is inf, expected finite"),
        ([1.0, 2.0, 1.0], None, r"x: got the coordinate 1\.0 twice"),
        (["a", "b", "a"], None, "x: got the label 'a' twice"),
        ([1.0, 2.0], 3, "x: got 2 coordinates, expected 3"),
        (np.array(["2000-01-01", "NaT"], dtype="datetime64[D]"), None, "x: entry 1 is NaT"),
        (np.array(["2000-01-01", "2000-01-01"], dtype="datetime64[D]"), None, "x: got the coordinate 0.0 twice"),
        (np.zeros((2, 2, 2)), None, r"x: got float64 of shape \(2, 2, 2\)"),
        (np.array([1j, 2j]), None, "x: got complex128"),
    ],
)
def test_coordinates_that_cannot_be_used(coordinates, size, message):
    with pytest.raises(ValueError, match=message):
        only(coordinates, size=size)


def test_as_many_axes_as_dimensions():
    with pytest.raises(ValueError, match="axes: got 1, expected 2"):
        describe_axes([3, 4], [None])


def test_what_the_user_holds_is_not_shared():
    held = np.array([1.0, 2.0, 3.0])
    only(held).points[0] = 7.0
    assert held[0] == 1.0


def test_durations_do_not_close_and_series_are_coordinates():
    assert only(range(19), "lead", units="hour").kind == "number"
    assert only(range(24), "hour").kind == "circle"
    assert only(pd.Series([1.0, 2.0], index=[7, 8])).points[:, 0].tolist() == [1.0, 2.0]
    assert only(pd.Series(pd.date_range("2000-01-01", periods=3))).points[:, 0].tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("known", "further", "points"),
    [
        (pd.date_range("2000-01-01", periods=5, freq="2D"), ["2000-02-01", "1999-12-31T12:00"], [31, -0.5]),
        (pd.date_range("2000-01-01", periods=5, tz="Europe/Rome"), ["2000-01-02", "2000-07-01"], [1, 182 - 1 / 24]),
        (pd.period_range("2000-01", periods=5, freq="M"), pd.period_range("2000-06", periods=1, freq="M"), [152]),
        (pd.timedelta_range("1D", periods=5), np.array([36], dtype="timedelta64[h]"), [0.5]),
        ([moment.date() for moment in cftime_like], [datetime.date(2000, 3, 1)], [60]),
        (in_360_days := [cftime.Datetime360Day(2000, 1, 1), cftime.Datetime360Day(2001, 1, 1)], ["2000-02-30"], [59]),
        (in_360_days, [cftime.Datetime360Day(2000, 3, 1, 12)], [60.5]),
        (in_360_days, np.array(["2000-02-01"], dtype="datetime64[ns]"), [30]),
    ],
    ids=["dates", "zone", "periods", "durations", "python dates", "text in 360 days", "360 days", "numpy in 360 days"],
)
def test_further_times_are_counted_from_the_same_first(known, further, points):
    axis = only(known if hasattr(known, "freq") else np.array(known)).at(np.array([1]))
    np.testing.assert_allclose(axis.encode(further)[:, 0], points, rtol=1e-12)


def test_coordinates_are_encoded_as_those_of_the_axis_were():
    hours = only(np.arange(5.0) + 100, units="hours since 1850-01-01")
    assert hours.encode([124.0]).tolist() == [[1.0]]
    around = only(np.arange(0.0, 360.0, 10.0), "lon")
    np.testing.assert_allclose(around.encode([-10.0, 375.0])[0], around.points[35])
    assert only([-20.0, 20.0], "lon").encode([350.0, 5.0]).tolist() == [[-10.0], [5.0]]
    assert only(["a", "b", "c"]).encode(["c", "a"]).tolist() == [[2.0], [0.0]]
    assert only([[0.0, 1.0], [2.0, 3.0]]).encode([[0.5, 0.5]]).tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize(
    ("known", "further", "message"),
    [
        (["Rome", "Roma", "Paris"], ["Rom"], "x: got the label 'Rom', expected one of Rom., Rom., ..."),
        (pd.date_range("2000-01-01", periods=3), [5.0], "x: got 5.0, expected times of the same kind as 2000-01-01"),
        ([1.0, 2.0], ["a"], r"x: got <U1 of shape \(1,\), expected numbers of shape \(m,\)"),
        ([[1.0, 2.0], [3.0, 4.0]], [1.0], r"expected numbers of shape \(m, 2\)"),
        ([1.0, 2.0], [np.nan], "x: entry 0 is nan, expected finite coordinates"),
    ],
)
def test_coordinates_of_another_kind_are_refused(known, further, message):
    with pytest.raises(ValueError, match=message):
        only(known).encode(further)
