"""Pictures of a series: a line, its band, and the observations."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes

from gpytorch_gaps.plot import drawing
from gpytorch_gaps.plot.drawing import BAND_OPACITY, COLOURS, LINE_FIGURE_INCHES, REFERENCE_COLOUR
from gpytorch_gaps.plot.inputs import Field, read_deviations, read_field, shared_places

_HALF_WIDTH_OF_95_PERCENT = 1.959963984540054  # in standard deviations


def series(
    x: Any, mean: Any, std: Any = None, observed: Any = None, truth: Any = None, *, ax: Axes | None = None,
    title: str | None = None,
) -> Axes:  # fmt: skip
    """Draw a line, its 95 % band, and dots at the observations.

    :param x: the coordinates `(m,)`: numbers, dates or labels; None for those of `mean`, or 0, 1, ..
    :param mean: the line `(m,)`.
    :param std: standard deviations `(m,)`. The band is ±1.96 of them. None for no band.
    :param observed: values `(m,)` with gaps, or a pair of other coordinates and the values there.
    :param truth: another line `(m,)`.
    :param ax: where to draw; None for a new figure.
    :param title: text above the line.
    :return: the Axes.
    :raises ValueError: if shapes or coordinates differ, or if a standard deviation is negative.

    >>> from gpytorch_gaps import plot
    >>> ax = plot.series(None, [0.0, 1.0, 0.5], std=[0.1, 0.3, 0.1], observed=[0.0, float("nan"), 0.5])
    >>> [text.get_text() for text in ax.get_legend().get_texts()]
    ['95 %', 'mean', 'observed']
    """
    line = _read_line("mean", mean, None if x is None else [x])
    others = {"std": std, "truth": truth, "observed": None if isinstance(observed, tuple) else observed}
    fields = {
        name: _read_line(name, given, like=line, keep_own=x is None)
        for name, given in others.items()
        if given is not None
    }
    if isinstance(observed, tuple):
        fields["observed"] = _read_line("observed", observed[1], [observed[0]])
    drawn = line.sorted()
    places, values = drawn.places[0].values, drawn.values
    with drawing.axes_or_new(ax, *LINE_FIGURE_INCHES) as target:
        if "std" in fields:
            half = _HALF_WIDTH_OF_95_PERCENT * fields["std"].sorted().values
            low, high = ((values + sign * half).filled(np.nan) for sign in (-1, 1))
            style: dict[str, Any] = {"color": COLOURS[0], "alpha": BAND_OPACITY, "linewidth": 0, "zorder": 1}
            target.fill_between(places, low, high, label="95 %", **style)
        if "truth" in fields:
            style = {"color": REFERENCE_COLOUR, "linewidth": 1.0, "linestyle": "--", "zorder": 2}
            target.plot(places, fields["truth"].sorted().values, label="truth", **style)
        target.plot(places, values, color=COLOURS[0], linewidth=1.5, label="mean", zorder=3)
        if "observed" in fields:
            dots = fields["observed"]
            style = {"linestyle": "", "marker": "o", "color": "0.15", "markeredgewidth": 0, "zorder": 4}
            size = drawing.marker_size(int((~dots.gaps).sum()))
            target.plot(dots.places[0].values, dots.values, markersize=size, label="observed", **style)
        target.margins(x=0.01)
        drawing.write_line_axes(target, line)
        if title:
            target.set_title(title, fontsize="medium", loc="left", pad=20)  # above the legend
        target.legend(frameon=False, fontsize="small", ncols=4, loc="lower right", bbox_to_anchor=(1, 1), borderpad=0)
    return target


def _read_line(name: str, values: Any, axes: Any = None, like: Field | None = None, keep_own: bool = False) -> Field:
    """Reads a series. With `like`, it has the coordinates of `like`, or its own coordinates if they agree."""
    field = read_deviations(name, values) if name == "std" else read_field(name, values, axes)
    if field.ndim != 1:
        raise ValueError(f"{name}: got shape {field.values.shape}; expected (m,), a series")
    if like is None:
        return field
    if field.values.shape != like.values.shape:
        raise ValueError(f"{name}: got shape {field.values.shape}; expected {like.values.shape}, as mean")
    return Field(field.values, shared_places(name, field, like) if keep_own else like.places, field.name)
