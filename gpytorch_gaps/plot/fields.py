"""Fields of two dimensions and more: pictures at true coordinates, in which gaps look like gaps."""

from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.transforms import Bbox

from gpytorch_gaps.plot.inputs import Axis, Field, read_deviations, read_field
from gpytorch_gaps.plot.lines import draw_line
from gpytorch_gaps.plot.style import GAP, opened, opened_axes, write_axis, write_title

Limits = tuple[float, float]
_LONGEST = 3.0  # sides of a picture, one to the other, up to which its cells stay square


def field(
    values: Any,
    axes: Any = None,
    *,
    ax: Axes | None = None,
    title: str | None = None,
    cmap: str | Colormap = "viridis",
    vmin: float | None = None,
    vmax: float | None = None,
    colorbar: bool = True,
    rgb: bool = False,
    slices: int | Sequence[int] = 4,
) -> Axes | Figure:
    """A field with its gaps: a line, a picture or, of three dimensions and more, a row of slices.

    Coordinates rise to the right and upwards; rows that have none, or labels, are read from the top, as in a table.
    Time runs to the right, whichever of two dimensions it is. Of more than three dimensions, those between the first
    and the last two are cut in their middle.

    :param values: tensor, array, masked array, pandas Series or DataFrame, or xarray DataArray. Gaps are NaN or masked.
    :param axes: the coordinates of each dimension (numbers, dates, labels, or None), or a ``CartesianGrid``.
    :param ax: where to draw one panel; else in a figure of its own.
    :param rgb: the last dimension is red, green, blue and maybe opacity, from 0 to 255 or from 0 to 1.
    :param slices: how many along the first dimension, evenly spaced; or which ones.
    :returns: Axes; of three dimensions and more, the Figure.
    """
    whole = read_field("values", values, axes, rgb)
    bounds = limits([whole], vmin, vmax)
    if whole.ndim > 2:
        if ax is not None:
            raise ValueError(f"ax: got Axes; expected None: values of {whole.ndim} dimensions are drawn slice by slice")
        return _row_of_slices(whole, slices, title, cmap, bounds, colorbar)
    if whole.ndim == 1:
        with opened_axes(ax, 8.0, 3.0) as target:
            draw_line(whole, target)
            if vmin is not None or vmax is not None:
                target.set_ylim(vmin, vmax)
            write_title(target, title)
        return target
    width, height = panel_size(whole, 4.2)
    with opened_axes(ax, width + 1.0, height + 0.4) as target:
        image = draw_picture(whole, target, cmap, bounds)
        write_title(target, title)
        if colorbar and not rgb:
            add_colorbar(image, [target], whole.name)
    return target


def uncertainty(std: Any, axes: Any = None, ax: Axes | None = None, *, title: str | None = None) -> Axes | Figure:
    """Standard deviations, from zero on, in a colour map of their own; else as :func:`field`."""
    read = read_deviations("std", std, axes)
    label = title or "standard deviation"
    if read.ndim == 1:
        with opened_axes(ax, 8.0, 3.0) as target:
            draw_line(read, target, colour=UNCERTAIN_LINE, area=True)
            target.set_ylim(bottom=0)
            write_title(target, label)
        return target
    return field(std, axes, ax=ax, title=label, cmap="magma", vmin=0.0)


UNCERTAIN_LINE = "#b5367a"  # from the middle of magma


def draw_picture(field: Field, ax: Axes, cmap: str | Colormap, bounds: Limits) -> ScalarMappable:
    """A field of two dimensions; masked cells let the hatching under the picture through."""
    field = field.sorted()
    values, (down, across) = field.values, field.axes
    if down.kind == "dates" and across.kind != "dates":
        values, (down, across) = values.swapaxes(0, 1), (across, down)
    extent = (across.edges[0], across.edges[-1], down.edges[0], down.edges[-1])
    if field.gaps.any():
        left, right, bottom, top = extent
        ax.add_patch(Rectangle((left, bottom), right - left, top - bottom, zorder=0, label="gaps", **GAP))
    colours: dict[str, Any] = {"zorder": 1}
    drawn: np.ndarray = values
    if values.ndim == 3:
        drawn = _with_opacity(values)
    else:
        transparent = mpl.colormaps.get_cmap(cmap).with_extremes(bad=(0, 0, 0, 0))
        colours |= {"cmap": transparent, "vmin": bounds[0], "vmax": bounds[1]}
    image: Any
    if down.is_even and across.is_even:  # much faster than a mesh
        # whatever "auto" smooths in the direction of many cells, it also smears over the few of the other
        image = ax.imshow(drawn, origin="lower", extent=extent, aspect="auto", interpolation="nearest", **colours)
    else:
        image = ax.pcolormesh(across.edges, down.edges, drawn, rasterized=True, **colours)
    ax.set_xlim(*extent[:2])
    ax.set_ylim(*(extent[2:] if down.kind in ("numbers", "dates") else extent[:1:-1]))
    ax.set_aspect("equal" if _is_square(down, across) else "auto")
    write_axis(ax, "x", across)
    write_axis(ax, "y", down)
    return image


def add_colorbar(image: ScalarMappable, axes: list[Axes], label: str = "") -> None:
    """At the right of `axes`, as high as they are together."""
    figure = axes[0].get_figure(root=True)
    assert figure is not None
    box = Bbox.union([ax.get_position() for ax in axes])
    width = 0.05 * axes[0].get_position().width
    slender = 1.2 * box.height * figure.get_figheight() / (width * figure.get_figwidth())
    bar = figure.colorbar(image, ax=axes, pad=0.02, aspect=max(25.0, slender), fraction=width / box.width)
    bar.outline.set_linewidth(0.4)
    if label:
        bar.set_label(label)


def panel_size(field: Field, side: float) -> tuple[float, float]:
    """Width and height in inches that suit the last two dimensions."""
    down, across = field.axes[-2:]
    if down.kind == "dates" and across.kind != "dates":
        down, across = across, down
    ratio = float(np.ptp(across.edges) / np.ptp(down.edges)) if _is_square(down, across) else 1.35
    if len(down.places) == 1 < len(across.places):
        ratio = _LONGEST
    return side * ratio**0.5, side / ratio**0.5


def limits(fields: Sequence[Field], vmin: float | None = None, vmax: float | None = None) -> Limits:
    """`vmin` and `vmax`; else the smallest and the largest value of several fields. Where they meet, a range of one."""
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


def cut(field: Field, slices: int | Sequence[int]) -> list[tuple[str, Field]]:
    """Slices of two dimensions along the first one, each with its place in words."""
    first, middle = field.axes[0], field.axes[1:-2]
    if isinstance(slices, int | np.integer):
        if slices < 1:
            raise ValueError(f"slices: got {slices}; expected 1 or more")
        size = len(first.places)
        which = np.unique(np.linspace(0, size - 1, min(slices, size)).round().astype(int)).tolist()
    else:
        which = [int(i) for i in slices]
        wrong = [i for i in which if not -len(first.places) <= i < len(first.places)]
        if wrong or not which:
            raise ValueError(f"slices: got {slices}; expected positions from 0 to {len(first.places) - 1}")
    pieces = []
    for i in which:
        piece, words = field[i], [first.describe(i, "axis 0")]
        for number, axis in enumerate(middle, 1):
            centre = len(axis.places) // 2
            piece, words = piece[centre], [*words, axis.describe(centre, f"axis {number}")]
        pieces.append((", ".join(words), piece))
    return pieces


def _row_of_slices(
    whole: Field, slices: int | Sequence[int], title: str | None, cmap: str | Colormap, bounds: Limits, colorbar: bool
) -> Figure:
    pieces = cut(whole, slices)
    width, height = panel_size(whole, 3.0)
    with opened(len(pieces) * width + 1.0, height + (0.8 if title else 0.5)) as figure:
        row = list(figure.subplots(1, len(pieces), sharex=True, sharey=True, squeeze=False)[0])
        for ax, (words, piece) in zip(row, pieces, strict=True):
            image = draw_picture(piece, ax, cmap, bounds)
            write_title(ax, words)
            ax.label_outer()
        if colorbar and whole.values.ndim == whole.ndim:
            add_colorbar(image, row, whole.name)
        if title:
            figure.suptitle(title)
    return figure


def _is_square(down: Axis, across: Axis) -> bool:
    """Whether both directions count the same, so that a cell as high as wide should look it."""
    alike = {down.kind, across.kind} == {"positions"} or (down.unit and _plain(down.unit) == _plain(across.unit))
    ratio = np.ptp(across.edges) / np.ptp(down.edges)
    return bool(alike) and 1 / _LONGEST <= ratio <= _LONGEST


def _plain(unit: str) -> str:
    return "°" if unit in ("°N", "°E") else unit


def _with_opacity(colours: np.ma.MaskedArray) -> np.ndarray:
    """Red, green, blue, opacity; gaps are transparent. shape: (H, W, 3 or 4) -> (H, W, 4)"""
    full = np.ones((*colours.shape[:2], 4))
    full[..., : colours.shape[-1]] = colours.filled(0.0)
    full[np.ma.getmaskarray(colours).any(-1), 3] = 0.0
    return full
