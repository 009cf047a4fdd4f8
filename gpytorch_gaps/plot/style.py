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

GAP: dict[str, Any] = {"facecolor": "0.95", "edgecolor": "0.8", "hatch": "////", "linewidth": 0.0}
COLOURS = ("#2a6f97", "#d1603d", "#5b8e3e", "#8a5a9e", "#b58b00", "#3b3b3b")
QUIET = "0.35"  # of what stands beside the data
INTERVAL = 1.959963984540054  # half the width of a 95 % interval, in standard deviations
_MOST_LABELS = 24


@contextmanager
def opened(width: float, height: float) -> Iterator[Figure]:
    """A new figure, for whoever asked for the picture; if drawing fails, none is left behind."""
    figure = plt.figure(figsize=(width, height), layout="constrained")
    try:
        yield figure
    except BaseException:
        plt.close(figure)
        raise


@contextmanager
def opened_axes(ax: Axes | None, width: float, height: float) -> Iterator[Axes]:
    """`ax` or, where it is None, that of a new figure."""
    if ax is not None:
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
        shown = np.arange(0, len(axis.labels), -(-len(axis.labels) // _MOST_LABELS))
        texts = [axis.labels[i] for i in shown]
        drawn.set_ticks(axis.places[shown], texts)
        if which == "x" and sum(map(len, texts)) > 40:
            drawn.set_tick_params(rotation=90)
    elif axis.kind == "positions":
        drawn.set_major_locator(MaxNLocator(nbins="auto", integer=True))
    if axis.title:
        getattr(ax, f"set_{which}label")(axis.title)


def write_title(ax: Axes, title: str | None) -> None:
    if title:
        ax.set_title(title, fontsize="medium")
