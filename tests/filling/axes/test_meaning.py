"""What names, CF attributes, auxiliary coordinates and reference systems say of an axis."""

import numpy as np
import pandas as pd
import pytest
import xarray as xr

import gpytorch_gaps as gaps
from gpytorch_gaps.filling.arrays.adapters import adapt
from gpytorch_gaps.filling.axes.stations import LocalFrame

UTM = 'PROJCS["WGS 84 / UTM zone 30N", GEOGCS["WGS 84", UNIT["degree", 0.0174]], UNIT["m", 1.0]]'
PLATE = 'GEOGCRS["WGS 84", CS[ellipsoidal, 2], ANGLEUNIT["degree", 0.0174]]'
RNG = np.random.default_rng(0)


def kinds(values, axes=None, **options):
    return [axis.kind for axis in adapt(values, axes, **options).axes]


def axis_of(coordinates, name="x", **attributes):
    field = xr.DataArray(np.zeros((len(coordinates), 3)), {name: (name, coordinates, attributes)}, [name, "other"])
    return adapt(field).axes[0]


@pytest.mark.parametrize(
    ("name", "attributes", "kind"),
    [
        ("y", {"units": "degrees North"}, "latitude"),  # not quite CF
        ("northing", {"units": "degrees_north"}, "latitude"),
        ("rlat", {"standard_name": "grid_latitude", "units": "degrees"}, "latitude"),
        ("y", {"axis": "Y", "units": "degrees"}, "latitude"),
        ("x", {"axis": "X", "units": "degrees"}, "longitude"),
        ("lat", {}, "latitude"),
        ("lat", {"units": "degrees"}, "latitude"),
        ("lat", {"units": "km"}, "number"),
        ("lon", {"standard_name": "projection_x_coordinate"}, "number"),
        ("lat", {"standard_name": "longitude"}, "longitude"),
    ],
)
def test_attributes_count_more_than_names(name, attributes, kind):
    assert axis_of([10.0, 20.0, 30.0], name, **attributes).kind == kind


@pytest.mark.parametrize(
    ("coordinates", "name", "attributes", "kind"),
    [
        ([10382, 10384, 10400], "station", {}, "label"),
        ([1, 2, 3], "station_id", {}, "label"),
        ([1, 2, 3], "x", {"cf_role": "timeseries_id"}, "label"),
        ([0, 1, 2], "member", {}, "label"),
        ([0, 1, 2], "number", {"standard_name": "realization"}, "label"),
        ([1, 2, 3], "band", {}, "label"),
        ([1, 7, 9], "basin_code", {}, "label"),
        ([1, 2, 3], "id", {}, "number"),  # they count
        ([0.4, 0.5, 0.7], "band", {}, "number"),  # wavelengths
        ([0, 5, 20], "depth", {}, "number"),
        ([1990, 1991, 1995], "when", {}, "number"),
    ],
)
def test_numbers_that_identify_something_are_labels(coordinates, name, attributes, kind):
    described = axis_of(coordinates, name, **attributes)
    assert (described.kind, described.note) == (kind, "")


def test_a_note_asks_about_uneven_integers(quick_choice):
    described = axis_of([10382, 10384, 10400], "x1")
    assert described.kind == "number"
    assert described.note == "x1: uneven integers were taken for numbers; if they identify something, pass them as text"
    table = pd.DataFrame(RNG.standard_normal((5, 3)), columns=[10382, 10384, 10400])
    table.iloc[1, 1] = np.nan
    assert kinds(table) == ["position", "label"]
    report = gaps.fill_gaps(table, steps=1, std=False, progress=False).report
    assert "note: columns: uneven integers were taken for labels" in str(report)
    assert kinds(table.rename_axis(columns="depth")) == ["position", "number"]
    assert kinds(pd.Series(np.arange(3.0), index=[10382, 10384, 10400])) == ["number"]


def test_a_note_asks_about_series_without_names():
    days = pd.date_range("2020-01-01", periods=20)
    time, place = adapt(np.zeros((20, 6)), {"date": days, "axis 1": None}).axes
    assert (time.note, place.kind) == ("", "position")
    assert "6 places without coordinates were taken for neighbours at equal distances; if they are" in place.note
    assert not any(axis.note for axis in adapt(np.zeros((20, 6, 5)), [days, None, None]).axes)  # pictures


def test_names_of_a_mapping_have_a_meaning():
    given = {"lat": [10.0, 20.0], "longitude": [0.0, 5.0, 10.0], "band": None}
    assert kinds(np.zeros((2, 3, 2)), given) == ["latitude", "longitude", "label"]
    coordinate = xr.DataArray([1.0, 2.0], dims="y", name="y", attrs={"units": "degrees_north"})
    assert kinds(np.zeros((2, 3)), [coordinate, None]) == ["latitude", "position"]
    assert adapt(np.zeros((2, 3)), [coordinate, None]).axes[0].name == "y"


# -- dates -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "texts",
    [
        ["2020-01-30", "2020-02-01"],
        ["2020/01/30 12:00", "2020/02/01 12:00"],
        ["30.01.2020", "01.02.2020"],
        ["30/01/2020", "01/02/2020"],
        ["01/30/2020 01:30 PM", "02/01/2020 01:30 pm"],
        ["2020-01-30T23:30:00+01:00", "2020-02-01T22:30:00Z"],
        [20200130, 20200201],
    ],
)
def test_dates_in_text_are_times(texts):
    described = axis_of(texts, "when")
    assert (described.kind, described.points[:, 0].tolist()) == ("time", [0.0, 2.0])


def test_months_in_digits_are_times_if_they_are_named_so():
    assert axis_of([202012, 202101, 202102], "month").points[:, 0].tolist() == [0.0, 31.0, 62.0]
    assert axis_of([202012, 202101, 202102], "x").kind == "number"


@pytest.mark.parametrize("texts", [["03/04/2020", "05/04/2020"], ["01-02-2020", "02-02-2020"]])
def test_dates_whose_day_may_be_their_month_are_asked_about(texts):
    with pytest.raises(ValueError, match=rf"when: got '{texts[0]}', which may be 2020-.* or 2020-.*dayfirst=True"):
        axis_of(texts, "when")
    with pytest.raises(ValueError, match="whose year has two digits; expected dates as 2020-04-03"):
        axis_of(["30/01/20", "31/01/20"], "when")


def test_labels_that_are_no_dates_stay_labels():
    assert axis_of(["12-2020-1", "b", "c"]).kind == "label"
    assert axis_of(["31/31/2020", "01/02/2020"]).kind == "label"


@pytest.mark.parametrize(("unit", "step"), [("months", 365.2425 / 12), ("years", 365.2425)])
def test_months_and_years_since_a_date(unit, step):
    described = axis_of(np.arange(30), "T", units=f"{unit} since 1960-01-01")
    assert described.kind == "time"
    np.testing.assert_allclose(described.points[:, 0], step * np.arange(30))


def test_an_unknown_calendar_is_named():
    described = axis_of(np.arange(30), "time", units="days since 1960-01-01", calendar="martian")
    assert "no search for cycles, because the calendar 'martian' is not known" in described.note


# -- stations ----------------------------------------------------------------------------------------------------------


def field_of_stations(**coordinates):
    along = {name: ("station", one) for name, one in coordinates.items()}
    times = pd.date_range("2020-01-01", periods=6)
    return xr.DataArray(np.zeros((6, 4)), {"time": times, **along}, ["time", "station"])


LAT, LON, ELEV = [46.0, 46.5, 47.0, 46.2], [10.0, 11.0, 10.5, 11.4], [200.0, 900.0, 1500.0, 300.0]


@pytest.mark.parametrize("station", [["a", "b", "c", "d"], [10382, 10384, 10400, 10410]])
def test_auxiliary_coordinates_place_stations_in_space(station):
    _, place = adapt(field_of_stations(station=station, lat=LAT, lon=LON, elev=ELEV)).axes
    assert (place.kind, place.points.shape, place.note) == ("group", (4, 3), "")
    np.testing.assert_array_equal(place.points[:, 2], ELEV)
    # as on the sphere: haversine distances in degrees, chords of which are shorter by less than 1e-4
    phi, theta = np.radians(LAT), np.radians(LON)
    half = (
        np.sin((phi[:, None] - phi) / 2) ** 2
        + np.cos(phi[:, None]) * np.cos(phi) * np.sin((theta[:, None] - theta) / 2) ** 2
    )
    distance = np.linalg.norm(place.points[:, None, :2] - place.points[:, :2], axis=-1)
    np.testing.assert_allclose(distance, 2 * np.degrees(np.arcsin(np.sqrt(half))), rtol=2e-4)


def frame_points(latitude, longitude):
    return LocalFrame.of(latitude, longitude)("station", np.stack([latitude, longitude], axis=1))


def test_stations_around_the_date_line_and_all_over_the_earth():
    near = frame_points(np.zeros(2), np.array([179.5, -179.5]))
    assert near.shape == (2, 2)
    assert np.linalg.norm(near[0] - near[1]) == pytest.approx(1.0, rel=1e-4)
    latitude, longitude = np.array([80.0, 10.0, -60.0, 30.0]), np.array([0.0, 90.0, 180.0, 270.0])
    points = frame_points(latitude, longitude)
    assert points.shape == (4, 3)
    np.testing.assert_allclose(np.linalg.norm(points, axis=1), np.degrees(1.0))


def test_further_places_are_encoded_as_those_of_the_stations():
    _, place = adapt(field_of_stations(lat=LAT, lon=LON, elev=ELEV)).axes
    np.testing.assert_allclose(place.encode(np.stack([LAT, LON, ELEV], axis=1)), place.points)
    with pytest.raises(ValueError, match=r"station: got coordinates of shape \(1,\), expected \(m, 2\) or \(m, 3\)"):
        place.encode([46.0])


@pytest.mark.parametrize("kind", [list, np.array])
def test_further_dates_may_be_texts_or_digits_too(kind):
    for axis in (axis_of(kind(["30/01/2020", "01/02/2020"])), axis_of(kind([20200130, 20200201]))):
        assert axis.encode(kind(["2020-02-03"])).tolist() == [[4.0]]
        assert axis.encode(kind([20200203])).tolist() == [[4.0]]


@pytest.mark.parametrize(
    ("coordinates", "kind", "note"),
    [
        ({"lat": LAT, "lon": [10.0, np.nan, 10.5, 11.4]}, "label", "lat, lon are not used, because entry 1 has none"),
        ({"lat": [46.0] * 4, "lon": [10.0, 11.0, 10.0, 12.0]}, "label", "two entries are at the same place"),
        (
            {"lat": LAT, "lon": LON, "elev": [1.0, np.nan, 2.0, 3.0]},
            "group",
            "elev is not used, because some are missing",
        ),
        ({"lat": LAT}, "label", ""),
        ({"x": LAT, "y": LON}, "group", ""),
        ({"station_name": ["a", "b", "c", "d"]}, "label", ""),
    ],
)
def test_stations_without_usable_places_are_labels(coordinates, kind, note):
    axis = adapt(field_of_stations(**coordinates)).axes[1]
    assert axis.kind == kind
    assert note in axis.note


def test_the_track_of_a_ship_stays_an_axis_of_times():
    times = pd.date_range("2020-01-01", periods=4)
    track = xr.DataArray(np.zeros(4), {"time": times, "lat": ("time", LAT), "lon": ("time", LON)}, ["time"])
    assert kinds(track) == ["time"]


# -- rasters -----------------------------------------------------------------------------------------------------------


def raster(**attributes):
    y, x = [30.0, 20.0, 10.0], [1.0, 2.0, 3.0, 4.0]
    values = xr.DataArray(np.zeros((2, 3, 4)), {"band": [1, 2], "y": y, "x": x}, ["band", "y", "x"], name="ndvi")
    return values.assign_coords(spatial_ref=xr.DataArray(0, attrs=attributes))


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({"crs_wkt": UTM}, ["number", "number"]),
        ({"crs_wkt": PLATE}, ["latitude", "longitude"]),
        ({"spatial_ref": PLATE}, ["latitude", "longitude"]),
        ({"grid_mapping_name": "latitude_longitude"}, ["latitude", "longitude"]),
        ({"grid_mapping_name": "transverse_mercator"}, ["number", "number"]),
        ({}, ["number", "number"]),
    ],
)
def test_the_reference_system_tells_degrees_from_lengths(attributes, expected):
    assert kinds(raster(**attributes)) == ["label", *expected]


def test_a_dataset_may_keep_its_grid_mapping_in_a_variable(quick_choice):
    field = raster().isel(band=0, drop=True).drop_vars("spatial_ref")
    field = field + xr.DataArray(RNG.standard_normal((3, 4)), dims=["y", "x"])
    field[0, 0] = np.nan
    dataset = field.assign_attrs(grid_mapping="crs").to_dataset(name="ndvi").assign(crs=((), b"", {"crs_wkt": PLATE}))
    filled = gaps.fill_gaps(dataset, steps=1, std=False, progress=False)
    assert [text.split()[2].rstrip(",") for text in filled.report["ndvi"].axes] == ["latitudes", "longitudes"]
    assert filled.mean.crs.equals(dataset.crs)
    assert set(filled.mean.coords) == set(dataset.coords)
