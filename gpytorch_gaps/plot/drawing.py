"""Draws one field into one panel. Also the common parts of all pictures: style of gaps, axes and colour bars."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
import matplotlib.dates as mdates
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PolyCollection
from matplotlib.colors import Colormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Bbox

from gpytorch_gaps.plot.inputs import Field, Places

COLOURS = ("#2a6f97", "#d1603d", "#5b8e3e", "#8a5a9e", "#b58b00", "#3b3b3b")
REFERENCE_COLOUR = "0.35"  # for lines that are not data
BAND_OPACITY = 0.22
LINE_FIGURE_INCHES = (8.0, 3.0)
UNCERTAINTY_COLOURS = "magma"
_UNCERTAINTY_LINE_COLOUR = "#b5367a"  # from the middle of magma
# darker than the light ends and middles of colour maps, so that single cells remain visible
_GAP_STYLE: dict[str, Any] = {"facecolor": "0.84", "edgecolor": "0.6", "hatch": "////", "linewidth": 0.0}
_MAX_TICK_LABELS = {"x": 24, "y": 16}
_MAX_SQUARE_ASPECT = 3.0  # ratio of the sides of a picture up to which its cells stay square


@contextmanager
def new_figure(width: float, height: float) -> Iterator[Figure]:
    """A new figure, with its size in inches. It is closed only if drawing fails."""
    figure = plt.figure(figsize=(width, height), layout="compressed")
    try:
        yield figure
    except BaseException:
        plt.close(figure)
        raise


@contextmanager
def axes_or_new(ax: Axes | None, width: float, height: float) -> Iterator[Axes]:
    """`ax`, or the axes of a new figure if it is None."""
    if ax is not None:
        if not isinstance(ax, Axes):
            raise ValueError(f"ax: got {type(ax).__name__}; expected matplotlib Axes, or None")
        yield ax
        return
    with new_figure(width, height) as figure:
        yield figure.add_subplot()


def draw_line(field: Field, ax: Axes, uncertain: bool = False) -> None:
    """Draws a field of one dimension with markers and shaded gaps; standard deviations are filled from zero."""
    field = field.sorted()
    (places,), values = field.places, field.values
    _shade_gaps(ax, places, field.gaps)
    colour = _UNCERTAINTY_LINE_COLOUR if uncertain else COLOURS[0]
    if uncertain:
        ax.fill_between(places.values, values.filled(np.nan), color=colour, alpha=0.3, linewidth=0)
    # an observation between two gaps has no line, so it needs a marker
    size = marker_size(len(values))
    ax.plot(places.values, values, color=colour, linewidth=1.2, marker="o", markersize=size, markeredgewidth=0)
    ax.set_xlim(places.edges[0], places.edges[-1])
    write_line_axes(ax, field)


def _shade_gaps(ax: Axes, places: Places, gaps: np.ndarray) -> None:
    """Shades each run of gaps over the full height, from cell edge to cell edge."""
    steps = np.diff(np.concatenate([[0], gaps.astype(int), [0]]))
    starts, stops = places.edges[np.flatnonzero(steps == 1)], places.edges[np.flatnonzero(steps == -1)]
    if len(starts):
        patches = [[(a, 0), (a, 1), (b, 1), (b, 0)] for a, b in zip(starts, stops, strict=True)]
        shading = PolyCollection(patches, transform=ax.get_xaxis_transform(), zorder=0, label="gaps", **_GAP_STYLE)
        ax.add_collection(shading, autolim=False)


def draw_picture(field: Field, ax: Axes, cmap: str | Colormap, limits: tuple[float, float]) -> ScalarMappable:
    """Draws a field of two dimensions; masked cells show the hatching below the picture."""
    field = field.sorted()
    values, (down, across) = field.values, field.places
    if _is_transposed(down, across):
        values, (down, across) = values.swapaxes(0, 1), (across, down)
    extent = (across.edges[0], across.edges[-1], down.edges[0], down.edges[-1])
    if field.gaps.any():
        left, right, bottom, top = extent
        ax.add_patch(Rectangle((left, bottom), right - left, top - bottom, zorder=0, label="gaps", **_GAP_STYLE))
    options: dict[str, Any] = {"zorder": 1}
    drawn: np.ndarray = values
    if values.ndim == 3:
        drawn = _with_opacity(values)
    else:
        transparent = mpl.colormaps.get_cmap(cmap).with_extremes(bad=(0, 0, 0, 0))
        options |= {"cmap": transparent, "vmin": limits[0], "vmax": limits[1]}
    image: Any
    if down.is_even and across.is_even:  # much faster than a mesh
        # interpolation "auto" would smooth a direction with many cells, and blur one with few cells
        image = ax.imshow(drawn, origin="lower", extent=extent, aspect="auto", interpolation="nearest", **options)
    else:
        image = ax.pcolormesh(across.edges, down.edges, drawn, rasterized=True, **options)
    ax.set_xlim(*extent[:2])
    ax.set_ylim(*(extent[2:] if down.kind in ("numbers", "dates") else extent[:1:-1]))
    ax.set_aspect("equal" if _is_square(down, across) else "auto")
    write_axis(ax, "x", across)
    write_axis(ax, "y", down)
    return image


def add_colorbar(image: ScalarMappable, axes: Sequence[Axes], label: str = "") -> None:
    """Adds a colour bar at the right of `axes`, with their total height."""
    figure = axes[0].get_figure(root=True)
    assert figure is not None
    box = Bbox.union([ax.get_position() for ax in axes])
    width = 0.05 * axes[0].get_position().width
    aspect = 1.2 * box.height * figure.get_figheight() / (width * figure.get_figwidth())
    bar = figure.colorbar(image, ax=axes, pad=0.02, aspect=max(25.0, aspect), fraction=width / box.width)
    bar.outline.set_linewidth(0.4)
    if label:
        bar.set_label(label)


def panel_inches(field: Field, side: float) -> tuple[float, float]:
    """Width and height of a panel for the last two dimensions, with an area of `side` squared."""
    down, across = field.places[-2:]
    if _is_transposed(down, across):
        down, across = across, down
    ratio = float(np.ptp(across.edges) / np.ptp(down.edges)) if _is_square(down, across) else 1.35
    if len(down.values) == 1 < len(across.values):
        ratio = _MAX_SQUARE_ASPECT
    return side * ratio**0.5, side / ratio**0.5


def colour_limits(fields: Sequence[Field], vmin: float | None = None, vmax: float | None = None) -> tuple[float, float]:
    """`vmin` and `vmax`, or the smallest and largest value of all fields; a range of one if these are equal."""
    if vmin is not None and vmax is not None and not vmin < vmax:
        raise ValueError(f"vmin: got {vmin}; expected less than vmax, {vmax}")
    known = [field.values.compressed() for field in fields if field.values.count()] or [np.array([0.0, 1.0])]
    low = min(float(v.min()) for v in known) if vmin is None else float(vmin)
    high = max(float(v.max()) for v in known) if vmax is None else float(vmax)
    if high > low:
        return low, high
    if vmin is None and vmax is None:
        return low - 0.5, high + 0.5
    return (low, low + 1.0) if vmax is None else (high - 1.0, high)


def write_axis(ax: Axes, which: str, places: Places) -> None:
    """Writes ticks and label of one direction, ``"x"`` or ``"y"``."""
    axis: Any = getattr(ax, f"{which}axis")
    if places.kind == "dates":
        axis.axis_date()
        locator = mdates.AutoDateLocator(minticks=3, maxticks=7)
        axis.set_major_locator(locator)
        axis.set_major_formatter(mdates.ConciseDateFormatter(locator))
    elif places.kind == "labels":
        shown = np.arange(0, len(places.labels), -(-len(places.labels) // _MAX_TICK_LABELS[which]))
        texts = [places.labels[i] for i in shown]
        axis.set_ticks(places.values[shown], texts)
        if which == "x" and sum(map(len, texts)) > 30:
            axis.set_tick_params(rotation=90)
    elif len(places.values) == 1:
        axis.set_ticks(places.values)
    elif places.kind == "positions":
        use_integer_ticks(axis)
    if places.title:
        getattr(ax, f"set_{which}label")(places.title)


def write_line_axes(ax: Axes, field: Field) -> None:
    """Writes the axes of a field of one dimension."""
    write_axis(ax, "x", field.places[0])
    if field.name:
        ax.set_ylabel(field.name)
    ax.spines[["top", "right"]].set_visible(False)


def use_integer_ticks(axis: Any) -> None:
    axis.set_major_locator(MaxNLocator(nbins="auto", integer=True, min_n_ticks=1))


def write_title(ax: Axes, title: str | None) -> None:
    if title:
        ax.set_title(title, fontsize="medium")


def marker_size(count: int) -> float:
    return float(np.clip(60 / max(count, 1) ** 0.5, 1.2, 4.5))


def _is_transposed(down: Places, across: Places) -> bool:
    """Whether the two dimensions are exchanged, so that time runs to the right."""
    return down.kind == "dates" and across.kind != "dates"


def _is_square(down: Places, across: Places) -> bool:
    """Whether both directions have the same unit, so that the picture should keep the proportions of cells."""
    units = ["°" if places.unit in ("°N", "°E") else places.unit for places in (down, across)]
    alike = {down.kind, across.kind} == {"positions"} or (units[0] != "" and units[0] == units[1])
    ratio = np.ptp(across.edges) / np.ptp(down.edges)
    return bool(alike and 1 / _MAX_SQUARE_ASPECT <= ratio <= _MAX_SQUARE_ASPECT)


def _with_opacity(colours: np.ma.MaskedArray) -> np.ndarray:
    """Red, green, blue, opacity; gaps are transparent. shape: (H, W, 3 or 4) -> (H, W, 4)"""
    full = np.ones((*colours.shape[:2], 4))
    full[..., : colours.shape[-1]] = colours.filled(0.0)
    full[np.ma.getmaskarray(colours).any(-1), 3] = 0.0
    return full
