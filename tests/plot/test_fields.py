"""One field: values at true coordinates, gaps that look like gaps, axes that say what they are."""

import datetime
import pickle
from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.dates import date2num
from matplotlib.figure import Figure

from gpytorch_gaps import CartesianGrid, plot
from tests.plot._drawn import (
    colour_bars,
    image_of,
    is_grey,
    panels_of,
    patches_of,
    pixel_at,
    rises,
    tick_texts,
    value_at,
    values_at,
)

xarray = pytest.importorskip("xarray")
pd = pytest.importorskip("pandas")

NORTH, EAST = np.array([50.0, 51.0, 52.0]), np.array([-2.0, 0.0, 2.0, 4.0])
DAYS = np.arange("2020-01-01", "2020-01-05", dtype="datetime64[D]")


def gappy(*shape):
    values = np.arange(float(np.prod(shape))).reshape(shape)
    values[(0,) * len(shape)] = values[(-1,) * len(shape)] = np.nan
    return values


def masked():
    values = np.nan_to_num(gappy(3, 4), nan=-99.0)
    return np.ma.masked_equal(values, -99.0)


KINDS = {
    "ndarray": gappy(3, 4),
    "float32": gappy(3, 4).astype(np.float32),
    "masked": masked(),
    "list": gappy(3, 4).tolist(),
    "tensor": torch.tensor(gappy(3, 4)),
    "float32 tensor": torch.tensor(gappy(3, 4)).float(),
    "bfloat16 tensor": torch.tensor(gappy(3, 4)).bfloat16(),
    "gradient": torch.tensor(gappy(3, 4), requires_grad=True),
    "DataFrame": pd.DataFrame(gappy(3, 4)),
    "nullable DataFrame": pd.DataFrame(gappy(3, 4)).astype("Float64"),
    "DataArray": xarray.DataArray(gappy(3, 4)),
}


@pytest.mark.parametrize("values", KINDS.values(), ids=KINDS.keys())
def test_every_kind_of_array_is_drawn_with_its_gaps_and_left_as_it_was(values):
    axes = [NORTH[::-1].copy(), EAST.copy()]
    if isinstance(values, pd.DataFrame):
        values.to_numpy(dtype=float, na_value=np.nan)  # fills caches of pandas, which are pickled
    before = pickle.dumps((values, axes))
    ax = plot.field(values, axes)
    assert pickle.dumps((values, axes)) == before
    assert isinstance(ax, Axes)
    assert np.array_equal(values_at(ax, EAST, NORTH[::-1]), gappy(3, 4), equal_nan=True)
    assert len(patches_of(ax)) == 1
    left, right, bottom, top = image_of(ax).get_extent()
    assert (left, right, bottom, top) == (-3.0, 5.0, 49.5, 52.5)  # cells reach half a step beyond their centres
    assert ax.get_xlim() == (left, right)
    assert ax.get_ylim() == (bottom, top)


def test_a_gap_is_drawn_unlike_any_value():
    ax = plot.field(gappy(3, 4), cmap="RdBu_r")  # white in its middle
    gap, middle = pixel_at(ax, 0.2, 0.2), pixel_at(ax, 1, 1)
    assert is_grey(gap)
    assert np.abs(gap - middle).max() > 25
    assert not is_grey(pixel_at(ax, 0, 1))


def test_no_gaps_no_hatching():
    assert not patches_of(plot.field(np.ones((2, 3))))


@pytest.mark.parametrize(
    ("axes", "upwards"),
    [
        pytest.param(None, False, id="positions"),
        pytest.param([list("abc"), None], False, id="labels"),
        pytest.param([NORTH, EAST], True, id="numbers"),
        pytest.param([DAYS[:3], DAYS], True, id="dates"),
    ],
)
def test_coordinates_rise_upwards_and_tables_are_read_from_the_top(axes, upwards):
    ax = plot.field(gappy(3, 4), axes)
    assert rises(ax) is upwards
    left, right = ax.get_xlim()
    assert left < right


def test_positions_of_a_table():
    ax = plot.field(gappy(3, 4))
    assert np.array_equal(values_at(ax, range(4), range(3)), gappy(3, 4), equal_nan=True)
    assert ax.get_ylim() == (2.5, -0.5)
    assert tick_texts(ax.yaxis) == ["0", "1", "2"]


def test_unsorted_coordinates_are_drawn_where_they_belong():
    values = gappy(3, 4)
    down, across = [1, 2, 0], [3, 0, 2, 1]
    ax = plot.field(values[down][:, across], [NORTH[down], EAST[across]])
    assert np.array_equal(values_at(ax, EAST, NORTH), values, equal_nan=True)


def test_uneven_coordinates_meet_halfway():
    across = np.array([0.0, 1.0, 10.0, 11.0])
    values = gappy(3, 4)
    ax = plot.field(values, [NORTH, across])
    assert not ax.images
    assert np.array_equal(values_at(ax, across, NORTH), values, equal_nan=True)
    assert value_at(ax, 5.4, 51.0) == values[1, 1]
    assert value_at(ax, 5.6, 51.0) == values[1, 2]
    assert ax.get_xlim() == (-0.5, 11.5)


def test_a_grid_brings_its_coordinates():
    ax = plot.field(gappy(3, 4), CartesianGrid([torch.tensor(NORTH), torch.tensor(EAST)]))
    assert np.array_equal(values_at(ax, EAST, NORTH), gappy(3, 4), equal_nan=True)


def test_a_group_of_columns_is_counted():
    ax = plot.field(gappy(3, 4), CartesianGrid([torch.rand(3, 2).double(), torch.tensor(EAST)]))
    assert np.array_equal(values_at(ax, EAST, range(3)), gappy(3, 4), equal_nan=True)
    assert not rises(ax)


@pytest.mark.parametrize("transposed", [False, True])
def test_time_runs_to_the_right(transposed):
    values = gappy(3, 4)
    axes, given = [NORTH, DAYS], values
    if transposed:
        axes, given = axes[::-1], values.T
    ax = plot.field(given, axes)
    assert np.array_equal(values_at(ax, date2num(DAYS), NORTH), values, equal_nan=True)
    assert all("2020" in text or text.isdigit() or "Jan" in text for text in tick_texts(ax.xaxis))


DATES = {
    "datetime64": DAYS,
    "DatetimeIndex": pd.DatetimeIndex(DAYS),
    "with a zone": pd.DatetimeIndex(DAYS, tz="UTC"),
    "periods": pd.PeriodIndex(DAYS, freq="D"),
    "dates": [datetime.date(2020, 1, day) for day in range(1, 5)],
    "datetimes": [datetime.datetime(2020, 1, day) for day in range(1, 5)],
}


@pytest.mark.parametrize("days", DATES.values(), ids=DATES.keys())
def test_dates_of_every_kind(days):
    ax = plot.field(gappy(3, 4), [NORTH, days])
    assert image_of(ax).get_extent()[:2] == [date2num(DAYS[0]) - 0.5, date2num(DAYS[-1]) + 0.5]


def test_durations_are_days():
    ax = plot.field(gappy(3, 4), [NORTH, np.arange(4).astype("timedelta64[D]") * 2])
    assert ax.get_xlim() == (-1.0, 7.0)
    assert ax.get_xlabel() == "[days]"


def test_labels_stand_at_their_cells():
    frame = pd.DataFrame(gappy(3, 4), index=["x", "y", "z"], columns=pd.Index(list("abcd"), name="station"))
    ax = plot.field(frame)
    assert tick_texts(ax.yaxis) == ["x", "y", "z"]
    assert tick_texts(ax.xaxis) == list("abcd")
    assert ax.get_xlabel() == "station"
    assert not rises(ax)
    assert list(ax.get_yticks()) == [0, 1, 2]


def test_many_labels_are_thinned_out_and_turned():
    ax = plot.field(np.zeros((100, 100)), [[f"row {i}" for i in range(100)], [f"column {i}" for i in range(100)]])
    rows, columns = tick_texts(ax.yaxis), tick_texts(ax.xaxis)
    assert rows[:2] == ["row 0", "row 7"]
    assert len(rows) <= 16
    assert len(columns) <= 24
    ax.figure.draw_without_rendering()
    for axis in (ax.xaxis, ax.yaxis):
        boxes = [text.get_window_extent() for text in axis.get_ticklabels() if text.get_text()]
        assert not any(a.overlaps(b) for a, b in pairwise(boxes))


def data_array():
    return xarray.DataArray(
        gappy(3, 4),
        dims=("lat", "lon"),
        coords={
            "lat": ("lat", NORTH, {"units": "degrees_north", "long_name": "latitude"}),
            "lon": ("lon", EAST, {"units": "degrees_east"}),
        },
        name="sst",
        attrs={"units": "K", "long_name": "sea surface temperature"},
    )


def test_names_and_units_of_a_data_array():
    array = data_array()
    ax = plot.field(array, title="today")
    assert ax.get_title() == "today"
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("lon [°E]", "latitude [°N]")
    (bar,) = colour_bars(ax.figure)
    assert bar.get_ylabel() == "sea surface temperature [K]"
    assert np.array_equal(values_at(ax, EAST, NORTH), array.values, equal_nan=True)


def test_a_data_array_with_other_coordinates_keeps_its_names():
    ax = plot.field(data_array(), [NORTH, EAST + 100])
    assert ax.get_xlabel() == "lon [°E]"
    assert ax.get_xlim() == (97.0, 105.0)


@pytest.mark.parametrize(
    ("shape", "axes", "aspect"),
    [
        pytest.param((30, 40), None, 1.0, id="pixels"),
        pytest.param((30, 40), [np.arange(30.0), np.arange(40.0)], "auto", id="numbers of unknown units"),
        pytest.param((4, 300), None, "auto", id="too long"),
    ],
)
def test_cells_are_square_where_both_directions_count_the_same(shape, axes, aspect):
    assert plot.field(gappy(*shape), axes).get_aspect() == aspect


def test_degrees_are_square():
    assert plot.field(data_array()).get_aspect() == 1.0


def test_cells_are_not_smeared_over_each_other():
    values = np.tile([0.0, 1.0], (300, 2))  # many rows, few columns
    ax = plot.field(values, cmap="Greys")
    shown = [pixel_at(ax, x, 150)[0] for x in (0.45, 0.55, 1.45, 1.55)]
    assert shown == [255, 0, 0, 255]


def test_colours_span_the_values_unless_told():
    assert image_of(plot.field(gappy(3, 4))).get_clim() == (1.0, 10.0)
    assert image_of(plot.field(gappy(3, 4), vmin=-5, vmax=5)).get_clim() == (-5.0, 5.0)
    assert image_of(plot.field(gappy(3, 4), vmin=20)).get_clim() == (20.0, 21.0)  # above all there is
    assert image_of(plot.field(gappy(3, 4), vmax=-1)).get_clim() == (-2.0, -1.0)
    assert image_of(plot.field(np.full((3, 4), 7.0))).get_clim() == (6.5, 7.5)


def test_infinite_values_are_gaps_and_no_limits():
    values = gappy(3, 4)
    values[1, 1], values[1, 2] = np.inf, -np.inf
    ax = plot.field(values)
    assert image_of(ax).get_clim() == (1.0, 10.0)
    assert np.isnan(values_at(ax, [1, 2], [1])).all()


def test_nothing_but_gaps():
    ax = plot.field(np.full((3, 4), np.nan))
    assert image_of(ax).get_clim() == (0.0, 1.0)
    assert is_grey(pixel_at(ax, 1.2, 1.2))


@pytest.mark.parametrize(("shape", "single"), [((1, 6), "yaxis"), ((6, 1), "xaxis")])
@pytest.mark.parametrize("coordinates", [False, True])
def test_one_row_or_one_column(shape, single, coordinates):
    axes = [10.0 + np.arange(size) for size in shape] if coordinates else None
    ax = plot.field(gappy(*shape), axes)
    start = 10 if coordinates else 0
    shown = values_at(ax, start + np.arange(shape[1]), start + np.arange(shape[0]))
    assert np.array_equal(shown, gappy(*shape), equal_nan=True)
    assert tick_texts(getattr(ax, single)) == [str(start)]


def test_equal_coordinates_are_still_a_picture():
    ax = plot.field(gappy(3, 4), [[5.0, 5.0, 5.0], EAST])
    assert ax.get_ylim() == (4.5, 5.5)


def test_an_axes_of_ones_own():
    figure, axes = plt.subplots(1, 2)
    assert plot.field(gappy(3, 4), ax=axes[0], colorbar=False) is axes[0]
    assert plot.uncertainty(np.ones((3, 4)), ax=axes[1]) is axes[1]
    assert plt.get_fignums() == [figure.number]
    assert len(colour_bars(figure)) == 1


def test_a_colour_bar_is_as_high_as_its_picture():
    for shape in ((50, 20), (20, 50)):
        ax = plot.field(gappy(*shape))
        ax.figure.draw_without_rendering()
        (bar,) = colour_bars(ax.figure)
        assert bar.get_position().height == pytest.approx(ax.get_position().height, rel=0.05)


def test_a_line_with_gaps():
    values = pd.Series(np.arange(6.0), index=pd.date_range("2020-01-01", periods=6), name="level")
    values.iloc[[1, 2, 4]] = np.nan
    ax = plot.field(values, title="a line")
    (line,) = ax.lines
    start = date2num(np.datetime64("2020-01-01"))
    assert np.array_equal(line.get_xdata(), start + np.arange(6))
    assert np.array_equal(np.ma.getmaskarray(line.get_ydata()), values.isna())
    assert line.get_marker() == "o"  # or the value between two gaps would not be seen
    (shading,) = patches_of(ax)
    spans = [(path.vertices[:, 0].min() - start, path.vertices[:, 0].max() - start) for path in shading.get_paths()]
    assert spans == [(0.5, 2.5), (3.5, 4.5)]
    assert ax.get_ylabel() == "level"
    assert ax.get_title() == "a line"
    assert is_grey(pixel_at(ax, start + 1.4, 2.5))


def test_a_line_in_limits():
    assert plot.field(np.arange(5.0), vmin=-1, vmax=9).get_ylim() == (-1.0, 9.0)


def test_a_line_of_unsorted_coordinates():
    ax = plot.field([3.0, 1.0, 2.0], [[30, 10, 20]])
    assert ax.lines[0].get_xdata().tolist() == [10, 20, 30]
    assert ax.lines[0].get_ydata().tolist() == [1, 2, 3]


def test_slices_share_colours_and_axes():
    values = gappy(9, 3, 4)
    figure = plot.field(values, [np.arange(9) * 0.5, NORTH, EAST], title="all of it")
    assert isinstance(figure, Figure)
    panels = panels_of(figure)
    assert [ax.get_title() for ax in panels] == [f"axis 0 = {place:g}" for place in (0, 1.5, 2.5, 4)]
    for ax, number in zip(panels, (0, 3, 5, 8), strict=True):
        assert np.array_equal(values_at(ax, EAST, NORTH), values[number], equal_nan=True)
        assert image_of(ax).get_clim() == (1.0, 106.0)
        assert (ax.get_xlim(), ax.get_ylim()) == (panels[0].get_xlim(), panels[0].get_ylim())
    assert len(colour_bars(figure)) == 1
    assert figure.get_suptitle() == "all of it"


@pytest.mark.parametrize(
    ("slices", "shown"),
    [(1, [0]), (2, [0, 5]), (np.int64(3), [0, 2, 5]), (99, range(6)), ([2, 4], [2, 4]), ([-1], [5]), ((0, 0), [0, 0])],
)
def test_which_slices(slices, shown):
    values = np.arange(24.0).reshape(6, 2, 2)
    panels = panels_of(plot.field(values, slices=slices))
    assert [value_at(ax, 0, 0) for ax in panels] == [values[i, 0, 0] for i in shown]


def test_four_dimensions_are_cut_in_the_middle():
    values = np.arange(2.0 * 5 * 2 * 3).reshape(2, 5, 2, 3)
    array = xarray.DataArray(values, {"time": DAYS[:2], "depth": 10 * np.arange(5)}, dims=("time", "depth", "y", "x"))
    panels = panels_of(plot.field(array))
    assert [ax.get_title() for ax in panels] == ["time = 2020-01-01, depth = 20", "time = 2020-01-02, depth = 20"]
    assert [value_at(ax, 2, 1) for ax in panels] == [values[0, 2, 1, 2], values[1, 2, 1, 2]]
    plain = panels_of(plot.field(values))
    assert plain[1].get_title() == "axis 0 = 1, axis 1 = 2"


def test_times_of_day_are_told():
    hours = np.arange("2020-01-01T00", "2020-01-01T02", dtype="datetime64[h]")
    titles = [ax.get_title() for ax in panels_of(plot.field(gappy(2, 3, 4), [hours, None, None]))]
    assert titles == ["2020-01-01 00:00", "2020-01-01 01:00"]


def test_slices_with_labels():
    figure = plot.field(gappy(2, 3, 4), [["minimum", "maximum"], None, None])
    assert [ax.get_title() for ax in panels_of(figure)] == ["minimum", "maximum"]


@pytest.mark.parametrize("scale", [1, 255])
@pytest.mark.parametrize("opacity", [False, True])
def test_a_picture_in_colour(scale, opacity):
    colours = np.zeros((2, 3, 4 if opacity else 3))
    colours[0, 0] = [1, 0, 0, 1][: colours.shape[-1]]
    colours[1, 2] = [0, 1, 0, 1][: colours.shape[-1]]
    if opacity:
        colours[..., 3] = 1
    given = scale * colours
    given[0, 1, 2] = np.nan  # of one colour: the cell is a gap
    ax = plot.field(given, rgb=True)
    assert pixel_at(ax, 0, 0).tolist() == [255, 0, 0]
    assert pixel_at(ax, 2, 1).tolist() == [0, 255, 0]
    assert pixel_at(ax, 0, 1).tolist() == [0, 0, 0]
    assert is_grey(pixel_at(ax, 1.1, 0.1))
    assert not colour_bars(ax.figure)


def test_dark_pictures_of_bytes_stay_dark():
    ax = plot.field(np.full((2, 2, 3), 2, dtype=np.uint8), rgb=True)
    assert pixel_at(ax, 0, 0).tolist() == [2, 2, 2]


def test_colour_overshoots_are_clipped():
    ax = plot.field(np.full((2, 2, 3), [1.2, -0.2, 0.0]), rgb=True)
    assert pixel_at(ax, 0, 0).tolist() == [255, 0, 0]


def test_colour_at_uneven_coordinates():
    colours = np.zeros((2, 3, 3))
    colours[1, 2] = [0, 0, 1]
    colours[0, 0] = np.nan
    ax = plot.field(colours, [[0, 1], [0, 1, 5]], rgb=True)
    assert pixel_at(ax, 5, 1).tolist() == [0, 0, 255]
    assert is_grey(pixel_at(ax, 0.1, 0.1))


def test_a_film_in_colour():
    film = np.zeros((3, 2, 2, 3))
    film[1, 0, 0] = [1, 0, 0]
    panels = panels_of(plot.field(film, rgb=True))
    assert [pixel_at(ax, 0, 0).tolist() for ax in panels] == [[0, 0, 0], [255, 0, 0], [0, 0, 0]]


def test_uncertainty_starts_at_zero():
    ax = plot.uncertainty(np.array([[1.0, 2.0], [np.nan, 3.0]]))
    assert image_of(ax).get_clim() == (0.0, 3.0)
    assert image_of(ax).get_cmap().name == "magma"
    assert ax.get_title() == "standard deviation"
    assert image_of(plot.uncertainty(np.zeros((2, 2)))).get_clim()[0] == 0.0
    line = plot.uncertainty([1.0, 2.0], title="so sure")
    assert line.get_ylim()[0] == 0.0
    assert line.get_title() == "so sure"


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("text",), {}, "values: got <U4"),
        ((np.array([["a", "b"]]),), {}, "values: got <U1"),
        ((np.array([[1j]]),), {}, "values: got complex128"),
        ((DAYS,), {}, r"values: got datetime64\[D\]"),
        ((pd.DataFrame({"a": ["x"]}),), {}, "values: got could not convert"),
        ((3.0,), {}, r"values: got shape \(\); expected one dimension"),
        ((np.zeros((0, 3)),), {}, r"values: got shape \(0, 3\)"),
        ((xarray.Dataset({"a": ("x", [1.0])}),), {}, r"values: got a Dataset; expected one of its variables, \['a'\]"),
        ((gappy(3, 4), [NORTH]), {}, r"axes: got 1; expected 2, one for each dimension of shape \(3, 4\)"),
        ((gappy(3, 4), 7), {}, "axes: got int"),
        ((gappy(3, 4), [NORTH, NORTH]), {}, r"axes: axis 1: got shape \(3,\); expected 4 coordinates"),
        ((gappy(3, 4), [NORTH, [0, 1, np.nan, 2]]), {}, "axes: axis 1: got nan; expected finite"),
        ((gappy(3, 4), [[1, 2, np.inf], None]), {}, "axes: axis 0: got inf"),
        ((gappy(2, 2), [None, np.array(["2020-01-01", "NaT"], dtype="M8[D]")]), {}, "axes: axis 1: got NaT"),
        ((gappy(2, 2), [None, pd.DatetimeIndex(["2020-01-01", None], tz="UTC")]), {}, "axes: axis 1: got NaT"),
        ((gappy(2, 2), [None, np.array([1, "NaT"], dtype="m8[D]")]), {}, "axes: axis 1: got nan"),
        ((gappy(3, 4),), {"rgb": True}, r"values: got shape \(3, 4\); expected \(.., H, W, 3\)"),
        ((gappy(3, 4),), {"vmin": 2, "vmax": 1}, "vmin: got 2; expected less than vmax, 1"),
        ((gappy(3, 4),), {"ax": "here"}, "ax: got str; expected matplotlib Axes"),
        ((gappy(3, 4, 5),), {"slices": 0}, "slices: got 0; expected 1 or more"),
        ((gappy(3, 4, 5),), {"slices": [3]}, r"slices: got \[3\]; expected positions from 0 to 2"),
        ((gappy(3, 4, 5),), {"slices": []}, r"slices: got \[\]"),
    ],
)
def test_errors_name_the_argument_and_leave_no_figure(arguments, options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        plot.field(*arguments, **options)
    assert not plt.get_fignums()


def test_slices_have_no_single_axes():
    _, ax = plt.subplots()
    with pytest.raises(ValueError, match=r"^ax: got Axes; expected None: values of 3 dimensions"):
        plot.field(gappy(3, 4, 5), ax=ax)
    assert len(plt.get_fignums()) == 1


def test_negative_deviations_are_refused():
    with pytest.raises(ValueError, match=r"^std: got -1; expected standard deviations"):
        plot.uncertainty([[1.0, -1.0]])
    assert not plt.get_fignums()


def test_no_figure_is_left_when_drawing_fails():
    with pytest.raises(ValueError, match="nothing"):
        plot.field(gappy(3, 4), cmap="nothing")
    assert not plt.get_fignums()


@pytest.mark.parametrize("at", [0, 1, 2])
def test_each_band_has_a_panel(at):
    names = ["y", "x"]
    names.insert(at, "band")
    bands = xarray.DataArray(np.moveaxis(np.arange(60.0).reshape(5, 3, 4), 0, at), {"band": list("ABCDE")}, names)
    figure = plot.field(bands)
    shown = [ax for ax in figure.axes if ax.get_title()]
    assert [ax.get_title() for ax in shown] == [f"band = {name}" for name in "ABCDE"]
    limits = [np.ptp(np.ma.compressed((ax.images or ax.collections)[0].get_array())) for ax in shown]
    assert limits == [11.0] * 5  # of the twelve numbers of one band
