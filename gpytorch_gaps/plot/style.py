"""What all pictures have in common: how gaps look, how axes are written, how figures are opened."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib.dates as mdates
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from gpytorch_gaps.plot.inputs import Axis

# darker than the light ends and middles of colour maps, so that single cells are told apart
GAP: dict[str, Any] = {"facecolor": "0.84", "edgecolor": "0.6", "hatch": "////", "linewidth": 0.0}
COLOURS = ("#2a6f97", "#d1603d", "#5b8e3e", "#8a5a9e", "#b58b00", "#3b3b3b")
QUIET = "0.35"  # of what stands beside the data
INTERVAL = 1.959963984540054  # half the width of a 95 % interval, in standard deviations
_MOST_LABELS = {"x": 24, "y": 16}


@contextmanager
def opened(width: float, height: float) -> Iterator[Figure]:
    """A new figure, for whoever asked for the picture; if drawing fails, none is left behind."""
    figure = plt.figure(figsize=(width, height), layout="compressed")
    try:
        yield figure
    except BaseException:
        plt.close(figure)
        raise


@contextmanager
def opened_axes(ax: Axes | None, width: float, height: float) -> Iterator[Axes]:
    """`ax` or, where it is None, that of a new figure."""
    if ax is not None:
        if not isinstance(ax, Axes):
            raise ValueError(f"ax: got {type(ax).__name__}; expected matplotlib Axes, or None")
        yield ax
        return
    with opened(width, height) as figure:
        yield figure.add_subplot()


def write_axis(ax: Axes, which: str, axis: Axis) -> None:
    """Ticks and label of one direction, ``"x"`` or ``"y"``."""
    drawn: Any = getattr(ax, f"{which}axis")
    if axis.kind == "dates":
        drawn.axis_date()
        locator = mdates.AutoDateLocator(minticks=3, maxticks=7)
        drawn.set_major_locator(locator)
        drawn.set_major_formatter(mdates.ConciseDateFormatter(locator))
    elif axis.kind == "labels":
        shown = np.arange(0, len(axis.labels), -(-len(axis.labels) // _MOST_LABELS[which]))
        texts = [axis.labels[i] for i in shown]
        drawn.set_ticks(axis.places[shown], texts)
        if which == "x" and sum(map(len, texts)) > 30:
            drawn.set_tick_params(rotation=90)
    elif len(axis.places) == 1:
        drawn.set_ticks(axis.places)
    elif axis.kind == "positions":
        count_in_integers(drawn)
    if axis.title:
        getattr(ax, f"set_{which}label")(axis.title)


def count_in_integers(drawn: Any) -> None:
    """Ticks of an axis at integers only, be it one."""
    drawn.set_major_locator(MaxNLocator(nbins="auto", integer=True, min_n_ticks=1))


def write_title(ax: Axes, title: str | None) -> None:
    if title:
        ax.set_title(title, fontsize="medium")
