"""Fields of one dimension: lines with gaps, and bands."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection

from gpytorch_gaps.plot.inputs import Axis, Field, read_deviations, read_field, shared_axes
from gpytorch_gaps.plot.style import COLOURS, GAP, INTERVAL, QUIET, opened_axes, write_axis

_SIZE = (8.0, 3.0)


def series(
    x: Any, mean: Any, std: Any = None, observed: Any = None, truth: Any = None, *, ax: Axes | None = None,
    title: str | None = None,
) -> Axes:  # fmt: skip
    """A line, its 95 % band, and dots where something was observed.

    :param x: the coordinates `(m,)`: numbers, dates or labels; None for those that `mean` brings along, or 0, 1, ...
    :param mean: the line `(m,)`.
    :param std: standard deviations `(m,)`; the band is ±1.96 of them. None for no band.
    :param observed: dots: values `(m,)` with gaps, or a pair of other coordinates and values there.
    :param truth: another line `(m,)`.
    """
    line: Field = _read_line("mean", mean, None if x is None else [x])
    deviation = None if std is None else _read_line("std", std, like=line, own=x is None)
    reference = None if truth is None else _read_line("truth", truth, like=line, own=x is None)
    dots: Field | None = None
    if isinstance(observed, tuple) and len(observed) == 2:
        dots = _read_line("observed", observed[1], [observed[0]])
    elif observed is not None:
        dots = _read_line("observed", observed, like=line, own=x is None)
    with opened_axes(ax, *_SIZE) as target:
        drawn = line.sorted()
        places, values = drawn.axes[0].places, drawn.values
        if deviation is not None:
            half = INTERVAL * deviation.sorted().values
            target.fill_between(
                places, (values - half).filled(np.nan), (values + half).filled(np.nan),
                color=COLOURS[0], alpha=0.22, linewidth=0, label="95 %", zorder=1,
            )  # fmt: skip
        if reference is not None:
            other = reference.sorted()
            target.plot(places, other.values, color=QUIET, linewidth=1.0, linestyle="--", label="truth", zorder=2)
        target.plot(places, values, color=COLOURS[0], linewidth=1.5, label="mean", zorder=3)
        if dots is not None:
            size = _marker_size(int((~dots.gaps).sum()))
            target.plot(
                dots.axes[0].places, dots.values, linestyle="", marker="o", markersize=size, color="0.15",
                markeredgewidth=0, label="observed", zorder=4,
            )  # fmt: skip
        target.margins(x=0.01)
        _finish(target, line, title)
        target.legend(frameon=False, fontsize="small", ncols=4, loc="lower right", bbox_to_anchor=(1, 1), borderpad=0)
    return target


def draw_line(field: Field, ax: Axes, *, colour: str = COLOURS[0], area: bool = False) -> None:
    """A line with markers, its gaps shaded; or, with `area`, filled from zero."""
    field = field.sorted()
    (axis,), values = field.axes, field.values
    shade_gaps(ax, axis, field.gaps)
    if area:
        ax.fill_between(axis.places, values.filled(np.nan), color=colour, alpha=0.3, linewidth=0)
    # an observation between two gaps has no line: only its marker shows it
    size = _marker_size(len(values))
    ax.plot(axis.places, values, color=colour, linewidth=1.2, marker="o", markersize=size, markeredgewidth=0)
    ax.set_xlim(axis.edges[0], axis.edges[-1])
    _finish(ax, field, None)


def shade_gaps(ax: Axes, axis: Axis, gaps: np.ndarray) -> None:
    """Over the full height, from cell edge to cell edge, one patch for each run of gaps."""
    steps = np.diff(np.concatenate([[0], gaps.astype(int), [0]]))
    starts, stops = axis.edges[np.flatnonzero(steps == 1)], axis.edges[np.flatnonzero(steps == -1)]
    if len(starts):
        patches = [[(a, 0), (a, 1), (b, 1), (b, 0)] for a, b in zip(starts, stops, strict=True)]
        shading = PolyCollection(patches, transform=ax.get_xaxis_transform(), zorder=0, label="gaps", **GAP)
        ax.add_collection(shading, autolim=False)


def _finish(ax: Axes, field: Field, title: str | None) -> None:
    write_axis(ax, "x", field.axes[0])
    if field.name:
        ax.set_ylabel(field.name)
    ax.spines[["top", "right"]].set_visible(False)
    if title:
        ax.set_title(title, fontsize="medium", loc="left", pad=20)  # above the legend


def _read_line(name: str, values: Any, axes: Any = None, like: Field | None = None, own: bool = False) -> Field:
    """A series of one dimension; with `like`, at its coordinates: in the order of its `own`, if it has some."""
    field = read_deviations(name, values) if name == "std" else read_field(name, values, axes)
    if field.ndim != 1:
        raise ValueError(f"{name}: got shape {field.values.shape}; expected (m,), a series")
    if like is None:
        return field
    if field.values.shape != like.values.shape:
        raise ValueError(f"{name}: got shape {field.values.shape}; expected {like.values.shape}, as mean")
    return Field(field.values, shared_axes(name, field, like) if own else like.axes, field.name)


def _marker_size(count: int) -> float:
    return float(np.clip(60 / max(count, 1) ** 0.5, 1.2, 4.5))
