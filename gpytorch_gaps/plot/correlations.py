"""Pictures of learned kernels, one panel per axis: correlation against distance, or between places."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from gpytorch_gaps.plot import drawing
from gpytorch_gaps.plot.drawing import COLOURS, REFERENCE_COLOUR
from gpytorch_gaps.plot.inputs import read_field
from gpytorch_gaps.plot.kernel_terms import AxisKernel, kernel_terms

_POINTS_PER_CURVE = 600
_PANELS_PER_ROW = 4
_MAX_MATRIX_SIZE = 200  # largest number of places of an axis in a matrix
_MAX_SIZE_WITH_NUMBERS = 8  # largest size of a matrix that shows its entries as numbers
_FADED_CORRELATION = 0.02  # smaller correlations are not shown
_LINE_STYLES = ("-", "--", ":", "-.")  # one for each column of an axis


def kernels(
    model: Any, *, names: Sequence[str] | None = None, distance: float | Sequence[float | None] | None = None
) -> Figure:
    """Draw the learned kernels of a model, one panel per axis of its grid.

    A stationary kernel is drawn as its correlation $k(d) / k(0)$ against the distance $d$ in units of its axis, with
    marks at length-scales and periods. If its axis has several columns, there is a line along each column. Any other
    kernel, and a kernel of codes, is drawn as the matrix of correlations between the places of its axis. A sum has a
    line, or a matrix, for each term that is a product over axes. Other terms, and scales, are not drawn. For a batch,
    the first member is drawn.

    :param model: a model or a kernel with a ``GappyGridKernel`` inside.
    :param names: names of the axes.
    :param distance: largest distance: one number for all axes, or one (or None) per axis. None: the distance at which
        correlations are almost zero, or the extent of the axis.
    :return: the Figure.
    :raises ValueError: if there is no grid kernel inside, if its terms have different grids, or if `names` or
        `distance` do not fit the axes.

    >>> import torch, gpytorch_gaps as gaps
    >>> from gpytorch.kernels import MaternKernel, RBFKernel
    >>> from gpytorch_gaps import plot
    >>> grid = gaps.CartesianGrid([torch.linspace(0, 1, 5), torch.linspace(0, 1, 4)])
    >>> figure = plot.kernels(gaps.GappyGridKernel([RBFKernel(), MaternKernel()], grid), names=["north", "time"])
    >>> [ax.get_title().splitlines()[0] for ax in figure.axes]
    ['north', 'time']
    """
    grid, terms = kernel_terms(model)
    axes = grid.axes
    titles = [f"axis {i}" for i in range(len(axes))] if names is None else [str(name) for name in names]
    if len(titles) != len(axes):
        raise ValueError(f"names: got {len(titles)}; expected {len(axes)}, one for each axis of the grid")
    one_for_all = distance is None or isinstance(distance, int | float | np.number)
    given: list[Any] = [distance] * len(axes) if one_for_all else list(distance)  # type: ignore[arg-type]
    if len(given) != len(axes) or any(one is not None and not 0 < one < np.inf for one in given):
        raise ValueError(f"distance: got {distance}; expected a positive number, or one for each of {len(axes)} axes")
    drawings: list[Any] = []
    for i, points in enumerate(axes):
        own = {number: term[i] for number, term in enumerate(terms)}
        # an odd fraction of the extent, so that steps do not all coincide with the spacing of the axis
        steps = [0.737 * along for along in _along_columns(points, np.linspace(0, 1, 17))]
        lines = {number: one for number, one in own.items() if all(one.is_stationary(points, s) for s in steps)}
        if lines:
            drawings.append((_draw_lines, lines, points, titles[i], given[i], len(own)))
        others = [(number, one) for number, one in own.items() if number not in lines]
        drawings += [(_draw_matrix, number, one, points, titles[i], len(own)) for number, one in others]
    columns = min(len(drawings), _PANELS_PER_ROW)
    rows = -(-len(drawings) // columns)
    entries = len(terms) * max(points.size(-1) for points in axes)
    with drawing.new_figure(3.9 * columns + 0.2, (3.2 + 0.2 * entries * (entries > 1)) * rows) as figure:
        figure.set_layout_engine("compressed", w_pad=0.1)  # between the label of a colour bar and the next panel
        panels = list(figure.subplots(rows, columns, squeeze=False).flat)
        for ax, (draw, *arguments) in zip(panels, drawings, strict=False):
            draw(ax, *arguments)
        for ax in panels[len(drawings) :]:
            ax.remove()
    return figure


def _along_columns(points: Tensor, shares: np.ndarray) -> list[Tensor]:
    """For each column of an axis, steps along it by shares of its extent (1 if it has none). shape: (n, columns)"""
    extent = points.amax(0) - points.amin(0)
    directions = torch.diag(torch.where(extent > 0, extent, torch.ones_like(extent)))
    return [torch.outer(torch.as_tensor(shares).to(points), direction) for direction in directions]


def _draw_lines(
    ax: Axes, kernels: dict[int, AxisKernel], points: Tensor, title: str, distance: float | None, terms: int
) -> None:
    """Draws correlations against distance, of each term and along each column."""
    several = points.size(-1) > 1  # several columns, each with its own unit
    in_shares = several and distance is None
    reach = _reach(list(kernels.values()), points) if distance is None else 1.0
    lowest = 0.0
    shares = np.linspace(0, 1, _POINTS_PER_CURVE)
    for number, kernel in kernels.items():
        colour = COLOURS[number % len(COLOURS)]
        for column, unit_steps in enumerate(_along_columns(points, shares)):
            extent = float(unit_steps[-1, column])
            furthest = distance or reach * extent
            curve = kernel.correlation(points.amin(0), unit_steps * (furthest / extent)).numpy()
            x = shares * (reach if in_shares else furthest)
            words = [f"{number + 1}: {kernel.name}"] * (terms > 1) + [f"column {column}"] * several
            style = _LINE_STYLES[column % len(_LINE_STYLES)]
            ax.plot(x, curve, color=colour, linestyle=style, linewidth=1.6, label=", ".join(words))
            lowest = min(lowest, float(curve.min()))
            if not several:
                _mark_scales(ax, kernel, x, curve, colour)
    ax.axhline(0, color=REFERENCE_COLOUR, linewidth=0.6, zorder=0)
    ax.set_ylim(lowest - 0.05 if lowest < 0 else 0.0, 1.05)
    ax.set_xlim(left=0)
    ax.set(xlabel="distance / extent of the column" if in_shares else "distance", ylabel="correlation")
    ax.spines[["top", "right"]].set_visible(False)
    if terms > 1 or several:
        # below the panel: inside it, a legend would cover a curve
        ax.legend(frameon=False, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.24), borderpad=0)
    _write_title(ax, title, list(kernels.values()))


def _mark_scales(ax: Axes, kernel: AxisKernel, x: np.ndarray, curve: np.ndarray, colour: str) -> None:
    """Marks length-scales by a dot and periods by a ring, each with a line down."""
    for places, face in ((kernel.length_scales, colour), (kernel.periods, "white")):
        for place in (one for one in places if one <= x[-1]):
            height = float(np.interp(place, x, curve))
            ax.vlines(place, min(height, 0.0), max(height, 0.0), color=colour, linewidth=0.9, linestyle=":")
            ax.plot([place], [height], marker="o", markersize=5, color=colour, markerfacecolor=face)


def _reach(kernels: list[AxisKernel], points: Tensor) -> float:
    """The fraction of the extent, at most 1, at which all correlations are almost zero; three periods if periodic."""
    extent = points.amax(0) - points.amin(0)
    shares = np.logspace(-6, 0, _POINTS_PER_CURVE)
    furthest = 0.0
    for kernel in kernels:
        curves = [kernel.correlation(points.amin(0), steps).abs() for steps in _along_columns(points, shares)]
        own = max(shares[np.flatnonzero(curve > _FADED_CORRELATION).max(initial=0)] for curve in curves)
        if kernel.periods and len(extent) == 1 and float(extent) > 0:
            own = min(own, 3 * max(kernel.periods) / float(extent))
        furthest = max(furthest, float(own))
    return min(1.0, 1.15 * furthest)


def _draw_matrix(ax: Axes, number: int, kernel: AxisKernel, points: Tensor, title: str, terms: int) -> None:
    """Draws correlations between the places of an axis."""
    kept = points[np.linspace(0, len(points) - 1, min(len(points), _MAX_MATRIX_SIZE)).round().astype(int)]
    matrix = kernel.matrix(kept).numpy()
    codes = kept.size(-1) == 1 and len(kept) <= 12 and bool((kept == kept.round()).all())
    places: Any = [str(int(code)) for code in kept[:, 0].tolist()] if codes else kept
    picture = read_field("correlation", matrix, [places, places])
    image = drawing.draw_picture(picture, ax, "RdBu_r", (-1.0, 1.0))
    ax.set_aspect("equal")
    drawing.add_colorbar(image, [ax], "correlation")
    if len(matrix) <= _MAX_SIZE_WITH_NUMBERS:
        for (i, j), value in np.ndenumerate(matrix):
            if np.isfinite(value):
                ink = "white" if abs(value) > 0.6 else "black"
                x, y = (float(one.values[k]) for one, k in zip(picture.places, (j, i), strict=True))
                ax.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize="small", color=ink)
    _write_title(ax, f"{title}, term {number + 1}" if terms > 1 else title, [kernel])


def _write_title(ax: Axes, title: str, kernels: list[AxisKernel]) -> None:
    """Writes the name of the axis; then kernels, length-scales and periods."""
    scales = [value for kernel in kernels for value in kernel.length_scales]
    periods = [value for kernel in kernels for value in kernel.periods]
    words = [kernels[0].name] if len(kernels) == 1 else []
    for symbol, values in (("length-scale", scales), ("period", periods)):
        if values:
            words.append(f"{symbol} {', '.join(f'{value:.3g}' for value in values)}")
    drawing.write_title(ax, f"{title}\n{', '.join(words)}" if words else title)
