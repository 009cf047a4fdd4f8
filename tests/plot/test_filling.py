"""Fields beside each other: what was observed, what filled it, and how sure that is."""

import copy
from itertools import pairwise
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
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
    same,
    value_at,
    values_at,
)

xarray = pytest.importorskip("xarray")
pd = pytest.importorskip("pandas")

NORTH, EAST = np.array([50.0, 51.0, 52.0]), np.array([-2.0, 0.0, 2.0, 4.0])
MEAN = np.arange(12.0).reshape(3, 4)
GAPS = MEAN % 5 == 0
STD = np.where(GAPS, 0.8, 0.2)
OBSERVED = np.where(GAPS, np.nan, MEAN)


def frame(values):
    return pd.DataFrame(values, index=pd.Index(NORTH, name="north"), columns=EAST)


def data_array(values, name="sst"):
    return xarray.DataArray(values, {"north": NORTH, "east": EAST}, ("north", "east"), name, {"units": "K"})


def dataset(values):
    return xarray.Dataset({"sst": data_array(values), "ice": data_array(values + 1, "ice")})


KINDS = {
    "ndarray": np.array,
    "tensor": torch.tensor,
    "float32 gradient": lambda v: torch.tensor(v).float().requires_grad_() if v.dtype == float else torch.tensor(v),
    "DataFrame": frame,
    "DataArray": data_array,
    "Dataset": dataset,
}


def result(make=np.array, std=STD):
    return SimpleNamespace(mean=make(MEAN), std=None if std is None else make(std), gaps=make(GAPS))


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("with_std", [True, False])
def test_before_after_and_how_sure(make, with_std):
    given = result(make, STD if with_std else None)
    if make is dataset:
        given.gaps = xarray.Dataset({"sst": data_array(GAPS), "ice": data_array(~GAPS)})
    before = copy.deepcopy(given)
    brings_coordinates = make in (frame, data_array, dataset)
    figure = plot.fill(given, axes=None if brings_coordinates else [NORTH, EAST], variable="sst")
    assert isinstance(figure, Figure)
    assert all(same(part, vars(before)[name]) for name, part in vars(given).items())
    panels = panels_of(figure)
    titles = ["observed", "filled", *(["standard deviation"] if with_std else [])]
    assert [ax.get_title() for ax in panels] == titles
    for ax, shown in zip(panels, (OBSERVED, MEAN, STD), strict=False):
        assert values_at(ax, EAST, NORTH) == pytest.approx(shown, nan_ok=True)
        assert (ax.get_xlim(), ax.get_ylim()) == ((-3.0, 5.0), (49.5, 52.5))
    assert [len(patches_of(ax)) for ax in panels] == [1, 0, 0][: len(panels)]
    assert image_of(panels[0]).get_clim() == image_of(panels[1]).get_clim() == (0.0, 11.0)
    assert len(colour_bars(figure)) == len(titles) - 1
    if with_std:
        assert image_of(panels[2]).get_clim() == pytest.approx((0.0, 0.8))
        assert image_of(panels[2]).get_cmap().name == "magma"


def test_the_other_variable_of_a_dataset():
    gaps = xarray.Dataset({"sst": data_array(~GAPS), "ice": data_array(GAPS)})
    given = SimpleNamespace(mean=dataset(MEAN), std=None, gaps=gaps)
    panels = panels_of(plot.fill(given, variable="ice", truth=dataset(MEAN + 5)))
    assert values_at(panels[0], EAST, NORTH) == pytest.approx(OBSERVED + 1, nan_ok=True)
    assert values_at(panels[2], EAST, NORTH) == pytest.approx(MEAN + 6)


def test_the_only_variable_of_a_dataset_needs_no_name():
    given = SimpleNamespace(mean=data_array(MEAN).to_dataset(), std=None, gaps=data_array(GAPS).to_dataset())
    assert values_at(panels_of(plot.fill(given))[1], EAST, NORTH) == pytest.approx(MEAN)


def test_the_truth_is_a_panel_on_the_same_scale():
    panels = panels_of(plot.fill(result(), truth=MEAN + 10))
    assert [ax.get_title() for ax in panels] == ["observed", "filled", "truth", "standard deviation"]
    assert {image_of(ax).get_clim() for ax in panels[:3]} == {(0.0, 21.0)}


def test_what_was_filled_may_be_given_instead_of_gaps():
    given = SimpleNamespace(mean=MEAN, std=STD)
    panels = panels_of(plot.fill(given, values=OBSERVED + 1))
    assert values_at(panels[0], range(4), range(3)) == pytest.approx(OBSERVED + 1, nan_ok=True)
    assert not rises(panels[0])


def test_a_grid_of_coordinates():
    figure = plot.fill(result(torch.tensor), axes=CartesianGrid([torch.tensor(NORTH), torch.tensor(EAST)]))
    assert values_at(panels_of(figure)[1], EAST, NORTH) == pytest.approx(MEAN)


def test_names_and_units():
    figure = plot.fill(result(data_array), truth=MEAN)
    assert [bar.get_ylabel() for bar in colour_bars(figure)] == ["sst [K]", ""]
    panels = panels_of(figure)
    assert panels[0].get_ylabel() == "north"
    assert [ax.get_xlabel() for ax in panels] == ["east"] * 4
    assert [ax.yaxis.get_tick_params()["labelleft"] for ax in panels] == [True, False, False, False]


def test_each_field_is_drawn_at_its_own_coordinates():
    turned = data_array(MEAN).isel(north=slice(None, None, -1))
    figure = plot.panels({"up": data_array(MEAN), "down": turned, "plain": MEAN})
    for ax in panels_of(figure):
        assert values_at(ax, EAST, NORTH) == pytest.approx(MEAN)


def test_other_coordinates_are_an_error():
    moved = data_array(MEAN).assign_coords(east=EAST + 1)
    with pytest.raises(ValueError, match=r"^moved: got other coordinates along axis 1"):
        plot.panels({"here": data_array(MEAN), "moved": moved})
    renamed = frame(MEAN).set_axis(list("abc"))
    with pytest.raises(ValueError, match=r"^renamed: got other coordinates along axis 0"):
        plot.panels({"here": frame(MEAN), "renamed": renamed})
    assert not plt.get_fignums()


def test_coordinates_that_were_rounded_are_the_same():
    rounded = data_array(MEAN).assign_coords(east=np.float32(EAST + 0.1))
    exact = data_array(MEAN).assign_coords(east=EAST + 0.1)
    assert len(panels_of(plot.panels({"exact": exact, "rounded": rounded}))) == 2


def test_one_row_a_slice():
    mean = np.arange(5.0 * 12).reshape(5, 3, 4)
    gaps = mean % 7 == 0
    days = np.arange("2020-01-01", "2020-01-06", dtype="datetime64[D]")
    given = SimpleNamespace(mean=mean, std=1 + 0 * mean, gaps=gaps)
    figure = plot.fill(given, axes=[days, NORTH, EAST], slices=[1, 4])
    grid = np.array(panels_of(figure)).reshape(2, 3)
    for row, number in zip(grid, (1, 4), strict=True):
        assert row[0].get_ylabel() == f"2020-01-0{number + 1}"
        assert values_at(row[1], EAST, NORTH) == pytest.approx(mean[number])
        observed = np.where(gaps[number], np.nan, mean[number])
        assert values_at(row[0], EAST, NORTH) == pytest.approx(observed, nan_ok=True)
        assert image_of(row[0]).get_clim() == (0.0, 59.0)
    assert [ax.get_title() for ax in grid[0]] == ["observed", "filled", "standard deviation"]
    assert not any(ax.get_title() for ax in grid[1])


def test_four_dimensions():
    mean = np.arange(2.0 * 3 * 2 * 2).reshape(2, 3, 2, 2)
    figure = plot.fill(SimpleNamespace(mean=mean, std=None, gaps=mean < 0))
    panels = panels_of(figure)
    assert [value_at(ax, 1, 0) for ax in panels[1::2]] == [mean[0, 1, 0, 1], mean[1, 1, 0, 1]]
    assert panels[0].get_ylabel() == "axis 0 = 0, axis 1 = 1"


def test_time_runs_to_the_right_in_every_panel():
    days = pd.date_range("2020-01-01", periods=3)
    given = SimpleNamespace(mean=frame(MEAN).set_axis(days), std=frame(STD).set_axis(days), gaps=GAPS)
    for ax in panels_of(plot.fill(given)):
        assert ax.get_xlim() == (18261.5, 18264.5)
        assert rises(ax)


@pytest.mark.parametrize("scale", [1, 255])
def test_pictures_in_colour(scale):
    mean = np.zeros((2, 3, 3))
    mean[0, 0], mean[1, 1] = [1, 0, 0], [0, 1, 0]
    gaps = np.zeros((2, 3, 3), dtype=bool)
    gaps[1, 1] = True
    std = np.zeros((2, 3, 3))
    std[1, 1] = [3, 4, 0]
    figure = plot.fill(SimpleNamespace(mean=scale * mean, std=std, gaps=gaps), rgb=True)
    before, after, unsure = panels_of(figure)
    assert pixel_at(before, 0, 0).tolist() == pixel_at(after, 0, 0).tolist() == [255, 0, 0]
    assert pixel_at(after, 1, 1).tolist() == [0, 255, 0]
    assert is_grey(pixel_at(before, 1.2, 1.2))
    assert value_at(unsure, 1, 1) == pytest.approx((25 / 3) ** 0.5)  # root mean square of the colours
    assert len(colour_bars(figure)) == 1


@pytest.mark.parametrize("kind", ["Series", "tensor", "with axes"])
def test_a_series_is_a_line_with_a_band(kind):
    x = np.array([3.0, 1.0, 2.0, 4.0])
    mean, std, gaps = np.array([30.0, 10.0, 20.0, 40.0]), np.array([1.0, 2.0, 1.0, 0.5]), x == 2.0
    if kind == "Series":
        given = SimpleNamespace(
            **{n: pd.Series(v, index=x) for n, v in {"mean": mean, "std": std, "gaps": gaps}.items()}
        )
        figure = plot.fill(given, truth=mean + 1)
    else:
        given = SimpleNamespace(mean=torch.tensor(mean), std=torch.tensor(std), gaps=torch.tensor(gaps))
        axes = [torch.tensor(x)] if kind == "with axes" else CartesianGrid([torch.tensor(x)])
        figure = plot.fill(given, truth=mean + 1, axes=axes)
    (ax,) = figure.axes
    lines = {line.get_label(): line for line in ax.lines}
    assert set(lines) == {"mean", "truth", "observed"}
    assert lines["mean"].get_xdata().tolist() == [1, 2, 3, 4]
    assert lines["mean"].get_ydata().tolist() == [10, 20, 30, 40]
    assert lines["truth"].get_ydata().tolist() == [11, 21, 31, 41]
    observed = dict(
        zip(lines["observed"].get_xdata(), np.ma.filled(lines["observed"].get_ydata(), np.nan), strict=True)
    )
    assert observed == pytest.approx({1.0: 10.0, 2.0: np.nan, 3.0: 30.0, 4.0: 40.0}, nan_ok=True)
    (band,) = ax.collections
    top = {x: y for x, y in band.get_paths()[0].vertices if y > 10 * x}
    assert top == pytest.approx({x: 10 * x + 1.959964 * s for x, s in zip(x, std, strict=True)})


def test_panels_order_and_scales():
    fields = {"sd": STD, "a": MEAN, "b": -MEAN}
    panels = panels_of(plot.panels(fields, uncertain="sd", cmap="cividis", vmax=5))
    assert [ax.get_title() for ax in panels] == ["a", "b", "sd"]
    assert [image_of(ax).get_clim() for ax in panels] == [(-11.0, 5.0), (-11.0, 5.0), (0.0, 0.8)]
    assert image_of(panels[0]).get_cmap().name == "cividis"


def test_nothing_uncertain_at_all_starts_at_zero():
    panels = panels_of(plot.panels({"a": MEAN, "sd": 0 * STD}, uncertain=["sd"]))
    assert image_of(panels[1]).get_clim() == (0.0, 1.0)


def test_series_stand_below_each_other():
    figure = plot.panels({"a": OBSERVED[0], "b": MEAN[0], "sd": STD[0]}, [EAST], uncertain=["sd"])
    first, second, unsure = panels_of(figure)
    assert first.get_ylim() == second.get_ylim()
    assert unsure.get_ylim()[0] == 0.0
    assert len(patches_of(first)) == 1
    assert not patches_of(second)
    assert {ax.get_xlim() for ax in (first, second, unsure)} == {(-3.0, 5.0)}
    places = [ax.get_position().y0 for ax in (first, second, unsure)]
    assert places == sorted(places, reverse=True)


LABELS = [f"station {i}" for i in range(40)]
LAYOUTS = {
    "wide": ((30, 60), None, 4),
    "labels": ((40, 12), [LABELS, LABELS[:12]], 4),
    "slices": ((6, 30, 40), None, 2),
}


@pytest.mark.parametrize(("shape", "axes", "slices"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_nothing_is_cut_off_or_drawn_over_anything_else(shape, axes, slices):
    mean = np.arange(float(np.prod(shape))).reshape(shape)
    given = SimpleNamespace(mean=mean, std=mean, gaps=mean % 3 == 0)
    figure = plot.fill(given, axes=axes, slices=slices)
    figure.draw_without_rendering()
    boxes = [ax.get_tightbbox() for ax in figure.axes]
    assert all(figure.bbox.padded(1).containsx(x) for box in boxes for x in box.intervalx)
    assert all(figure.bbox.padded(1).containsy(y) for box in boxes for y in box.intervaly)
    panels = [ax.get_window_extent() for ax in figure.axes]
    assert not any(a.overlaps(b) for i, a in enumerate(panels) for b in panels[:i])
    for axis in (one for ax in panels_of(figure) for one in (ax.xaxis, ax.yaxis)):
        texts = [text.get_window_extent() for text in axis.get_ticklabels() if text.get_text()]
        assert not any(a.overlaps(b) for a, b in pairwise(texts))
    lowest, highest = (
        pick(box for ax in panels_of(figure) for box in ax.get_position().intervaly) for pick in (min, max)
    )
    for bar in colour_bars(figure):
        assert bar.get_position().height == pytest.approx(highest - lowest, rel=0.05)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plot.fill(3), "result: got int; expected an object with mean, std and gaps"),
        (lambda: plot.fill(SimpleNamespace(mean=MEAN, std=None)), "values: got None; expected the values"),
        (lambda: plot.fill(SimpleNamespace(mean=MEAN, std=None, gaps=GAPS[:2])), r"result.gaps: got shape \(2, 4\)"),
        (lambda: plot.fill(SimpleNamespace(mean="text", std=None, gaps=GAPS)), "result.mean: got <U4"),
        (lambda: plot.fill(result(std=STD[:2])), r"standard deviation: got shape \(2, 4\); expected \(3, 4\), as"),
        (lambda: plot.fill(result(std=-STD)), "standard deviation: got -0.8; expected standard deviations"),
        (lambda: plot.fill(result(), truth=MEAN[0]), r"truth: got shape \(4,\); expected \(3, 4\), as observed"),
        (lambda: plot.fill(result(dataset)), r"variable: got None; expected one of mean's, \['sst', 'ice'\]"),
        (lambda: plot.fill(result(dataset), variable="fog"), "variable: got 'fog'"),
        (lambda: plot.fill(result(), rgb=True), r"result.mean: got shape \(3, 4\); expected \(.., H, W, 3\)"),
        (lambda: plot.fill(result(), axes=[NORTH]), "axes: got 1; expected 2"),
        (lambda: plot.panels({}), "fields: got none"),
        (lambda: plot.panels({"a": MEAN}, uncertain=["b"]), r"uncertain: got \['b'\]; expected titles among \['a'\]"),
        (lambda: plot.panels({"a": MEAN, "b": MEAN.T}), r"b: got shape \(4, 3\); expected \(3, 4\), as a"),
        (lambda: plot.panels({"a": MEAN}, vmin=1, vmax=1), "vmin: got 1; expected less than vmax"),
    ],
)  # fmt: skip
def test_errors_name_the_argument_and_leave_no_figure(call, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        call()
    assert not plt.get_fignums()
