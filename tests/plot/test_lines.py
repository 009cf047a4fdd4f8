"""A line, its band, and the dots it was drawn through."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.dates import date2num

from gpytorch_gaps import plot

X = np.linspace(0, 1, 5)
MEAN, STD = np.arange(5.0), np.array([0.1, 0.2, 0.3, 0.4, 0.5])


def lines_of(ax):
    return {line.get_label(): line for line in ax.lines}


def band_of(ax):
    """From x to (low, high)."""
    (band,) = ax.collections
    (path,) = band.get_paths()
    places = np.unique(path.vertices[:, 0])
    heights = [path.vertices[path.vertices[:, 0] == x, 1] for x in places]
    return {x: (y.min(), y.max()) for x, y in zip(places, heights, strict=True)}


@pytest.mark.parametrize("kind", [np.array, torch.tensor, lambda v: torch.tensor(v).requires_grad_(), list])
def test_the_band_is_a_95_percent_interval(kind):
    ax = plot.series(kind(X), kind(MEAN), kind(STD), title="level")
    assert lines_of(ax)["mean"].get_ydata().tolist() == MEAN.tolist()
    for (low, high), mean, std in zip(band_of(ax).values(), MEAN, STD, strict=True):
        assert (low, high) == pytest.approx((mean - 1.959964 * std, mean + 1.959964 * std))
    assert ax.get_title(loc="left") == "level"
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["95 %", "mean"]


def test_no_band_without_deviations():
    ax = plot.series(None, MEAN)
    assert not ax.collections
    assert lines_of(ax)["mean"].get_xdata().tolist() == [0, 1, 2, 3, 4]


def test_observed_values_with_gaps_or_at_places_of_their_own():
    gappy = np.where(MEAN == 2, np.nan, MEAN)
    dots = lines_of(plot.series(X, MEAN, observed=gappy))["observed"]
    assert np.array_equal(np.ma.filled(dots.get_ydata(), np.nan), gappy, equal_nan=True)
    elsewhere = lines_of(plot.series(X, MEAN, observed=([0.33, 0.1], [7, 8])))["observed"]
    assert elsewhere.get_xdata().tolist() == [0.33, 0.1]
    assert elsewhere.get_ydata().tolist() == [7, 8]
    assert elsewhere.get_linestyle() == "None"


def test_unsorted_coordinates_are_one_line_from_left_to_right():
    order = [3, 0, 4, 1, 2]
    ax = plot.series(X[order], MEAN[order], STD[order], MEAN[order], MEAN[order] + 1)
    lines = lines_of(ax)
    assert lines["mean"].get_xdata().tolist() == X.tolist()
    assert lines["mean"].get_ydata().tolist() == MEAN.tolist()
    assert lines["truth"].get_ydata().tolist() == (MEAN + 1).tolist()
    assert [high - low for low, high in band_of(ax).values()] == pytest.approx(2 * 1.959964 * STD)
    dots = dict(zip(lines["observed"].get_xdata(), lines["observed"].get_ydata(), strict=True))
    assert dots == dict(zip(X, MEAN, strict=True))


def test_gaps_in_the_line_stay_gaps():
    mean = np.where(MEAN == 2, np.nan, MEAN)
    ax = plot.series(X, mean, STD)
    assert np.ma.getmaskarray(lines_of(ax)["mean"].get_ydata()).tolist() == [False, False, True, False, False]
    (band,) = ax.collections
    assert all(np.isfinite(path.vertices).all() for path in band.get_paths())
    assert len(band.get_paths()) == 2


def test_series_of_pandas_meet_at_their_dates():
    pd = pytest.importorskip("pandas")
    days = pd.date_range("2020-01-01", periods=5)
    mean = pd.Series(MEAN, index=days, name="level")
    std = pd.Series(STD, index=days)[::-1]
    ax = plot.series(None, mean, std)
    assert ax.get_ylabel() == "level"
    widths = {x: high - low for x, (low, high) in band_of(ax).items()}
    assert widths == pytest.approx(dict(zip(date2num(days), 2 * 1.959964 * STD, strict=True)))
    with pytest.raises(ValueError, match=r"^truth: got other coordinates along axis 0"):
        plot.series(None, mean, truth=mean.set_axis(days + pd.Timedelta(days=1)))
    assert len(plt.get_fignums()) == 1
    assert plot.series(X, mean, std=pd.Series(STD)).get_xlim()[1] < 1.1  # x counts, whatever else there is


def test_a_long_title_keeps_clear_of_the_legend():
    ax = plot.series(X, MEAN, STD, MEAN, MEAN, title="a title " * 12)
    ax.figure.draw_without_rendering()
    title = next(one for one in ax.get_children() if getattr(one, "get_text", str)() == ax.get_title(loc="left"))
    assert not title.get_window_extent().overlaps(ax.get_legend().get_window_extent())
    assert title.get_window_extent().y1 <= ax.figure.bbox.y1


def test_an_axes_of_ones_own():
    figure, ax = plt.subplots()
    assert plot.series(X, MEAN, ax=ax) is ax
    assert plt.get_fignums() == [figure.number]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X, np.zeros((2, 3))), "axes: got 1; expected 2"),
        ((None, np.zeros((2, 3))), r"mean: got shape \(2, 3\); expected \(m,\), a series"),
        ((X[:3], MEAN), r"axes: axis 0: got shape \(3,\); expected 5"),
        ((X, MEAN, STD[:3]), r"std: got shape \(3,\); expected \(5,\), as mean"),
        ((X, MEAN, -STD), "std: got -0.5; expected standard deviations"),
        ((X, MEAN, STD, MEAN[:2]), r"observed: got shape \(2,\)"),
        ((X, MEAN, STD, None, "text"), "truth: got <U4"),
    ],
)
def test_errors_name_the_argument_and_leave_no_figure(arguments, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        plot.series(*arguments)
    assert not plt.get_fignums()
