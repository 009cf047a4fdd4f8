"""Before, after, and how sure: fields next to each other."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap
from matplotlib.figure import Figure

from gpytorch_gaps.filling.index_grid import is_a
from gpytorch_gaps.grid.cartesian import CartesianGrid
from gpytorch_gaps.plot.fields import UNCERTAIN_LINE, add_colorbar, cut, draw_picture, limits, panel_size
from gpytorch_gaps.plot.inputs import Field, read_deviations, read_field, shared_axes
from gpytorch_gaps.plot.lines import draw_line, series
from gpytorch_gaps.plot.style import COLOURS, opened, write_title


def fill(
    result: Any,
    *,
    values: Any = None,
    truth: Any = None,
    axes: Any = None,
    variable: Any = None,
    rgb: bool = False,
    slices: int | Sequence[int] = 4,
) -> Figure:
    """What ``fill_gaps`` made of a field: before, after and its standard deviation; of a series, a line with a band.

    :param result: anything with `mean` and `std` (None for no error bars), and `gaps`: which cells were gaps.
    :param values: what was filled; needed only where `result` has no `gaps`.
    :param truth: what should have come out, if known: one panel more.
    :param axes: coordinates, where `result.mean` brings none along; as in :func:`field`.
    :param variable: which one, if the result is of an xarray Dataset.
    """

    def pick(name: str, given: Any) -> Any:
        if not is_a(given, "xarray", "Dataset"):
            return given
        known = list(given.data_vars)
        wanted = known[0] if variable is None and len(known) == 1 else variable
        if wanted not in known:
            raise ValueError(f"variable: got {variable!r}; expected one of {name}'s, {known}")
        return given[wanted]

    if not hasattr(result, "mean"):
        raise ValueError(f"result: got {type(result).__name__}; expected something with mean, std and gaps")
    mean, std = pick("mean", result.mean), pick("std", getattr(result, "std", None))
    truth, before = pick("truth", truth), pick("values", values)
    after = read_field("result.mean", mean, axes, rgb)
    if before is None:
        gaps = pick("gaps", getattr(result, "gaps", None))
        if gaps is None:
            raise ValueError("values: got None; expected what was filled, as result has no gaps")
        before = _without(read_field("result.mean", mean), read_field("result.gaps", gaps))
    if after.ndim == 1:
        listed = axes.axes if isinstance(axes, CartesianGrid) else axes
        target = series(None if listed is None else listed[0], mean, std, before, truth)
        figure = target.get_figure(root=True)
        assert figure is not None
        return figure
    shown = {"observed": before, "filled": mean}
    shown |= {} if truth is None else {"truth": truth}
    shown |= {} if std is None else {"standard deviation": std}
    return panels(shown, axes, uncertain=("standard deviation",) if std is not None else (), rgb=rgb, slices=slices)


def panels(
    fields: Mapping[str, Any],
    axes: Any = None,
    *,
    uncertain: Sequence[str] = (),
    cmap: str | Colormap = "viridis",
    vmin: float | None = None,
    vmax: float | None = None,
    rgb: bool = False,
    slices: int | Sequence[int] = 4,
) -> Figure:
    """Fields of one shape next to each other, under their titles and on one scale of colours.

    Those named in `uncertain` come last, on a scale of their own from zero. Series stand below each other; of three
    dimensions and more, there is a row for each slice.
    """
    uncertain = (uncertain,) if isinstance(uncertain, str) else tuple(uncertain)
    if not fields:
        raise ValueError("fields: got none; expected at least one")
    unknown = [title for title in uncertain if title not in fields]
    if unknown:
        raise ValueError(f"uncertain: got {unknown}; expected titles among {list(fields)}")
    order = sorted(fields, key=lambda title: title in uncertain)
    read = _read_alike({title: fields[title] for title in order}, axes, uncertain, rgb)
    bounds = {
        True: limits([one for title, one in read.items() if title in uncertain], vmin=0.0),
        False: limits([one for title, one in read.items() if title not in uncertain], vmin, vmax),
    }
    if next(iter(read.values())).ndim == 1:
        return _stack(read, uncertain, bounds)
    return _table(read, uncertain, bounds, cmap, rgb, slices)


def _table(
    read: dict[str, Field], uncertain: tuple[str, ...], bounds: dict[bool, tuple[float, float]],
    cmap: str | Colormap, rgb: bool, slices: int | Sequence[int],
) -> Figure:  # fmt: skip
    """Pictures: a column for each field, a row for each slice."""
    first = next(iter(read.values()))
    cuts = {title: [("", one)] if one.ndim == 2 else cut(one, slices) for title, one in read.items()}
    rows = len(cuts[next(iter(cuts))])
    width, height = panel_size(first, 3.2 if rows == 1 else 2.6)
    with opened(len(read) * width + 1.4, rows * height + 0.5) as figure:
        grid = figure.subplots(rows, len(read), sharex=True, sharey=True, squeeze=False)
        images: dict[bool, Any] = {}
        columns: dict[bool, list[Axes]] = {True: [], False: []}
        for column, (title, pieces) in enumerate(cuts.items()):
            sure = title not in uncertain
            for row, (words, piece) in enumerate(pieces):
                ax = grid[row, column]
                images[sure] = draw_picture(piece, ax, cmap if sure else "magma", bounds[not sure])
                columns[sure].append(ax)
                write_title(ax, title if row == 0 else None)
                ax.label_outer()
                if words and column == 0:
                    ax.set_ylabel("\n".join(filter(None, [words, ax.get_ylabel()])))
        for sure, image in images.items():
            if not (rgb and sure):
                add_colorbar(image, columns[sure], first.name if sure else "")
    return figure


def _stack(read: dict[str, Field], uncertain: tuple[str, ...], bounds: dict[bool, tuple[float, float]]) -> Figure:
    """Series, below each other."""
    with opened(8.0, 1.9 * len(read) + 0.4) as figure:
        column = figure.subplots(len(read), 1, sharex=True, squeeze=False)[:, 0]
        for ax, (title, one) in zip(column, read.items(), strict=True):
            unsure = title in uncertain
            draw_line(one, ax, colour=UNCERTAIN_LINE if unsure else COLOURS[0], area=unsure)
            low, high = bounds[unsure]
            margin = 0.05 * (high - low)
            ax.set_ylim(low if unsure else low - margin, high + margin)
            write_title(ax, title)
            ax.label_outer()
    return figure


def _read_alike(fields: dict[str, Any], axes: Any, uncertain: tuple[str, ...], rgb: bool) -> dict[str, Field]:
    """All fields, of one shape; those without coordinates borrow them from the first that has some."""
    read = {}
    for title, values in fields.items():
        if title not in uncertain:
            read[title] = read_field(title, values, axes, rgb)
        else:
            read[title] = _over_colours(read_deviations(title, values)) if rgb else read_deviations(title, values, axes)
    first_title, first = next(iter(read.items()))
    shape = first.gaps.shape
    for title, one in read.items():
        if one.gaps.shape != shape:
            raise ValueError(f"{title}: got shape {one.gaps.shape}; expected {shape}, as {first_title}")
    known = [one for one in read.values() if any(axis.kind != "positions" for axis in one.axes)]
    donor = known[0] if known else first
    name = next((one.name for title, one in read.items() if one.name and title not in uncertain), "")
    return {title: Field(one.values, shared_axes(title, one, donor), name) for title, one in read.items()}


def _over_colours(std: Field) -> Field:
    """The root mean square of the standard deviations of a pixel's colours."""
    return Field(np.ma.sqrt((std.values**2).mean(-1)), std.axes[:-1], std.name)


def _without(field: Field, gaps: Field) -> np.ma.MaskedArray:
    if gaps.values.shape != field.values.shape:
        raise ValueError(f"result.gaps: got shape {gaps.values.shape}; expected {field.values.shape}, as result.mean")
    return np.ma.masked_array(field.values, mask=(gaps.values.filled(1) != 0) | np.ma.getmaskarray(field.values))
