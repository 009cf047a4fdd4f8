"""Pictures of fields: one field, or several next to each other."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap
from matplotlib.figure import Figure

from gpytorch_gaps.plot import drawing
from gpytorch_gaps.plot.drawing import LINE_FIGURE_INCHES, UNCERTAINTY_COLOURS
from gpytorch_gaps.plot.inputs import Field, read_deviations, read_field, shared_places

_SLICES, _MOST_BANDS = 4, 8  # by default, draw so many slices of an ordered dimension, and at most so many bands


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
    slices: int | Sequence[int] | None = None,
) -> Axes | Figure:
    """Draw a field with its gaps: a line, a picture or, for three dimensions and more, a row of slices.

    Coordinates increase to the right and upwards. Rows with labels, or without coordinates, are drawn from the top, as
    in a table. A dimension of time is always horizontal. If there are four dimensions or more, only the middle of those
    between the first and the last two is drawn.

    :param values: tensor, array, masked array, pandas Series or DataFrame, or xarray DataArray. Gaps are NaN or masked.
    :param axes: the coordinates of each dimension (numbers, dates, labels, or None), or a ``CartesianGrid``.
    :param ax: where to draw one panel; None for a new figure.
    :param title: text above the picture.
    :param cmap: colour map.
    :param vmin: lower end of the colours; None for the smallest value.
    :param vmax: upper end of the colours; None for the largest value.
    :param colorbar: whether to add a colour bar.
    :param rgb: whether the last dimension is red, green, blue and maybe opacity, from 0 to 255 or from 0 to 1.
    :param slices: number of slices along the first dimension, or along that of bands or labels, evenly spaced; or their
        positions. Default: all of up to eight bands, four slices of other dimensions.
    :return: Axes; for three dimensions and more, the Figure.
    :raises ValueError: if `values` are not real numbers, or do not fit `axes`, `ax`, `rgb` or `slices`.

    >>> import numpy as np
    >>> from gpytorch_gaps import plot
    >>> plot.field(np.array([[1.0, np.nan], [3.0, 4.0]]), title="one gap").get_title()
    'one gap'
    """
    whole = read_field("values", values, axes, rgb).bands_first()
    return _draw_field(whole, ax, title, cmap, (vmin, vmax), colorbar and not rgb, slices)


def uncertainty(std: Any, axes: Any = None, ax: Axes | None = None, *, title: str | None = None) -> Axes | Figure:
    """Draw standard deviations like :func:`field`, but with another colour map, which starts at zero.

    :param std: standard deviations, of any type that :func:`field` takes.
    :param axes: the coordinates of each dimension, or a ``CartesianGrid``.
    :param ax: where to draw one panel; None for a new figure.
    :param title: text above the picture; None for "standard deviation".
    :return: Axes; for three dimensions and more, the Figure.
    :raises ValueError: as in :func:`field`, and if a standard deviation is negative.

    >>> from gpytorch_gaps import plot
    >>> plot.uncertainty([0.0, 0.3, 0.1]).get_title()
    'standard deviation'
    """
    whole, title = read_deviations("std", std, axes).bands_first(), title or "standard deviation"
    return _draw_field(whole, ax, title, UNCERTAINTY_COLOURS, (0.0, None), uncertain=True)


def panels(
    fields: Mapping[str, Any],
    axes: Any = None,
    *,
    uncertain: str | Sequence[str] = (),
    cmap: str | Colormap = "viridis",
    vmin: float | None = None,
    vmax: float | None = None,
    rgb: bool = False,
    slices: int | Sequence[int] | None = None,
) -> Figure:
    """Draw several fields of the same shape next to each other, with titles and a common scale of colours.

    Series are drawn below each other. Fields of three dimensions or more have a row for each slice.

    :param fields: fields by title, of any type that :func:`field` takes.
    :param axes: the coordinates of each dimension, or a ``CartesianGrid``.
    :param uncertain: titles of the fields that are standard deviations. They are drawn last, with a separate scale that
        starts at zero.
    :param cmap: colour map of the other fields.
    :param vmin: lower end of the colours of the other fields; None for the smallest value.
    :param vmax: upper end of the colours of the other fields; None for the largest value.
    :param rgb: whether the last dimension is red, green, blue and maybe opacity.
    :param slices: number of slices along the first dimension, or along that of bands or labels, evenly spaced; or their
        positions. Default: all of up to eight bands, four slices of other dimensions.
    :return: the Figure.
    :raises ValueError: if there are no fields, or if their shapes or coordinates differ.

    >>> import numpy as np
    >>> from gpytorch_gaps import plot
    >>> figure = plot.panels({"before": np.zeros((4, 5)), "after": np.ones((4, 5))})
    >>> [ax.get_title() for ax in figure.axes][:2]
    ['before', 'after']
    """
    uncertain = (uncertain,) if isinstance(uncertain, str) else tuple(uncertain)
    if not fields:
        raise ValueError("fields: got none; expected at least one")
    unknown = [title for title in uncertain if title not in fields]
    if unknown:
        raise ValueError(f"uncertain: got {unknown}; expected titles among {list(fields)}")
    order = sorted(fields, key=lambda title: title in uncertain)
    read = _read_alike({title: fields[title] for title in order}, axes, uncertain, rgb)
    first = next(iter(read.values()))
    limits = {
        True: drawing.colour_limits([one for title, one in read.items() if title in uncertain], vmin=0.0),
        False: drawing.colour_limits([one for title, one in read.items() if title not in uncertain], vmin, vmax),
    }
    if first.ndim == 1:
        return _stack_lines(read, uncertain, limits)
    cuts = [[("", one)] if one.ndim == 2 else _cut(one, slices) for one in read.values()]
    rows = [[pieces[row][1] for pieces in cuts] for row in range(len(cuts[0]))]
    with drawing.new_figure(*_grid_inches(rows, 3.2 if len(rows) == 1 else 2.6)) as figure:
        images, used = _draw_grid(figure, rows, list(read), cmap, limits, [title in uncertain for title in read])
        for (words, _), ax in zip(cuts[0], used[False] or used[True], strict=False):  # the first column comes first
            ax.set_ylabel("\n".join(filter(None, [words, ax.get_ylabel()])))
        for unsure, image in images.items():
            if unsure or not rgb:
                drawing.add_colorbar(image, used[unsure], "" if unsure else first.name)
    return figure


def _draw_field(
    whole: Field, ax: Axes | None, title: str | None, cmap: str | Colormap, given: tuple[float | None, float | None],
    colorbar: bool = True, slices: int | Sequence[int] | None = None, uncertain: bool = False,
) -> Axes | Figure:  # fmt: skip
    """Draws a field of any number of dimensions, with the given limits."""
    limits = drawing.colour_limits([whole], *given)
    if whole.ndim == 1:
        with drawing.axes_or_new(ax, *LINE_FIGURE_INCHES) as target:
            drawing.draw_line(whole, target, uncertain)
            if given != (None, None):
                target.set_ylim(*given)
            drawing.write_title(target, title)
        return target
    if whole.ndim == 2:
        width, height = drawing.panel_inches(whole, 4.2)
        with drawing.axes_or_new(ax, width + 1.0, height + 0.4) as target:
            image = drawing.draw_picture(whole, target, cmap, limits)
            drawing.write_title(target, title)
            if colorbar:
                drawing.add_colorbar(image, [target], whole.name)
        return target
    if ax is not None:
        raise ValueError(f"ax: got Axes; expected None: values of {whole.ndim} dimensions are drawn slice by slice")
    words, pieces = zip(*_cut(whole, slices), strict=True)
    width, height = _grid_inches([pieces], 3.0)
    with drawing.new_figure(width, height + (0.3 if title else 0.0)) as figure:
        images, used = _draw_grid(figure, [pieces], words, cmap, {False: limits}, [False] * len(pieces))
        if colorbar:
            drawing.add_colorbar(images[False], used[False], whole.name)
        if title:
            figure.suptitle(title)
    return figure


def _cut(field: Field, slices: int | Sequence[int] | None) -> list[tuple[str, Field]]:
    """Two-dimensional slices along the first dimension, each with a text for its place."""
    first, middle = field.places[0], field.places[1:-2]
    size = len(first.values)
    if slices is None:
        slices = _MOST_BANDS if first.are_bands and size <= _MOST_BANDS else _SLICES
    if isinstance(slices, int | np.integer):
        if slices < 1:
            raise ValueError(f"slices: got {slices}; expected 1 or more")
        which = np.unique(np.linspace(0, size - 1, min(slices, size)).round().astype(int)).tolist()
    else:
        which = [int(i) for i in slices]
        if not which or any(not -size <= i < size for i in which):
            raise ValueError(f"slices: got {slices}; expected positions from 0 to {size - 1}")
    pieces = []
    for i in which:
        piece, words = field[i], [first.describe(i, "axis 0")]
        for number, places in enumerate(middle, 1):
            centre = len(places.values) // 2
            piece, words = piece[centre], [*words, places.describe(centre, f"axis {number}")]
        pieces.append((", ".join(words), piece))
    return pieces


def _grid_inches(rows: Sequence[Sequence[Field]], side: float) -> tuple[float, float]:
    width, height = drawing.panel_inches(rows[0][0], side)
    return len(rows[0]) * width + 1.4, len(rows) * height + 0.5


def _draw_grid(
    figure: Figure, rows: Sequence[Sequence[Field]], titles: Sequence[str], cmap: str | Colormap,
    limits: Mapping[bool, tuple[float, float]], unsure: Sequence[bool],
) -> tuple[dict[bool, Any], dict[bool, list[Axes]]]:  # fmt: skip
    """Draws rows of pictures. `unsure` are flags of the columns that are standard deviations.

    :return: the last image and all axes, in the order of columns, of each kind.
    """
    grid = figure.subplots(len(rows), len(titles), sharex=True, sharey=True, squeeze=False)
    images: dict[bool, Any] = {}
    used: dict[bool, list[Axes]] = {True: [], False: []}
    for column, (title, kind) in enumerate(zip(titles, unsure, strict=True)):
        for row, ax in enumerate(grid[:, column]):
            images[kind] = drawing.draw_picture(
                rows[row][column], ax, UNCERTAINTY_COLOURS if kind else cmap, limits[kind]
            )
            used[kind].append(ax)
            drawing.write_title(ax, title if row == 0 else None)
            ax.label_outer()
    return images, used


def _stack_lines(read: dict[str, Field], uncertain: Sequence[str], limits: dict[bool, tuple[float, float]]) -> Figure:
    """Draws series below each other."""
    with drawing.new_figure(LINE_FIGURE_INCHES[0], 1.9 * len(read) + 0.4) as figure:
        column = figure.subplots(len(read), 1, sharex=True, squeeze=False)[:, 0]
        for ax, (title, one) in zip(column, read.items(), strict=True):
            unsure = title in uncertain
            drawing.draw_line(one, ax, unsure)
            low, high = limits[unsure]
            margin = 0.05 * (high - low)
            ax.set_ylim(low if unsure else low - margin, high + margin)
            drawing.write_title(ax, title)
            ax.label_outer()
    return figure


def _read_alike(fields: dict[str, Any], axes: Any, uncertain: tuple[str, ...], rgb: bool) -> dict[str, Field]:
    """Reads fields of the same shape. Fields without coordinates get those of the first field that has some."""
    read = {}
    for title, values in fields.items():
        if title not in uncertain:
            read[title] = read_field(title, values, axes, rgb)
        else:
            std = read_deviations(title, values, None if rgb else axes)
            if rgb:  # the root mean square over the colours of a pixel
                std = Field(np.ma.sqrt((std.values**2).mean(-1)), std.places[:-1], std.name)
            read[title] = std
    first_title, first = next(iter(read.items()))
    shape = first.gaps.shape
    for title, one in read.items():
        if one.gaps.shape != shape:
            raise ValueError(f"{title}: got shape {one.gaps.shape}; expected {shape}, as {first_title}")
    known = [one for one in read.values() if any(places.kind != "positions" for places in one.places)]
    donor = known[0] if known else first
    name = next((one.name for title, one in read.items() if one.name and title not in uncertain), "")
    return {
        title: Field(one.values, shared_places(title, one, donor), name).bands_first() for title, one in read.items()
    }
