"""Learned kernels, axis by axis: correlation against distance, or between places."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from gpytorch_gaps.plot.fields import add_colorbar, draw_picture
from gpytorch_gaps.plot.inputs import read_field
from gpytorch_gaps.plot.learned import Factor, learned
from gpytorch_gaps.plot.style import COLOURS, QUIET, opened, write_title

_DISTANCES = 600
_MOST_PLACES = 200  # of an axis, in a matrix
_FADED = 0.02  # correlations below need no room
_IN_A_ROW = 4


def kernels(
    model: Any, *, names: Sequence[str] | None = None, distance: float | Sequence[float | None] | None = None
) -> Figure:
    """The learned kernels of a model, one panel an axis, from a ``GappyGridKernel`` anywhere inside its kernel.

    A stationary kernel is drawn as its correlation ``k(d) / k(0)`` against the distance d in units of its axis, with
    length-scales and periods marked; in an axis of several columns, along each column in turn. Any other kernel, and
    one of codes, is drawn as the matrix of correlations between the places of its axis. In a sum there is a line, or a
    matrix, for each term that is a product over axes; others, and scales, are left out. Of a batch, the first member.

    :param model: a model, or a kernel.
    :param names: of the axes.
    :param distance: the largest drawn, or one (or None) an axis. None: where correlations have faded, or the extent.
    """
    found = learned(model)
    axes = found.grid.axes
    titles = [f"axis {i}" for i in range(len(axes))] if names is None else [str(name) for name in names]
    if len(titles) != len(axes):
        raise ValueError(f"names: got {len(titles)}; expected {len(axes)}, one for each axis of the grid")
    if distance is None or isinstance(distance, int | float | np.number):
        given = [distance] * len(axes)
    else:
        given = list(distance)
    if len(given) != len(axes) or any(one is not None and not 0 < one < np.inf for one in given):
        raise ValueError(f"distance: got {distance}; expected a positive number, or one for each of {len(axes)} axes")
    drawings: list[Any] = []
    for i, points in enumerate(axes):
        factors = {number: term[i] for number, term in enumerate(found.terms)}
        steps = _unit_steps(points)
        lines = {number: one for number, one in factors.items() if all(one.is_stationary(points, s) for s in steps)}
        if lines:
            drawings.append((_draw_lines, lines, points, titles[i], given[i], len(factors)))
        drawings += [
            (_draw_matrix, number, one, points, titles[i], len(factors))
            for number, one in factors.items()
            if number not in lines
        ]
    columns = min(len(drawings), _IN_A_ROW)
    rows = -(-len(drawings) // columns)
    entries = len(found.terms) * max(points.size(-1) for points in axes)
    with opened(3.9 * columns + 0.2, (3.2 + 0.2 * entries * (entries > 1)) * rows) as figure:
        figure.set_layout_engine("compressed", w_pad=0.1)  # between a colour bar's label and the next axis's
        panels = list(figure.subplots(rows, columns, squeeze=False).flat)
        for ax, (draw, *arguments) in zip(panels, drawings, strict=False):
            draw(ax, *arguments)
        for ax in panels[len(drawings) :]:
            ax.remove()
    return figure


def _unit_steps(points: Tensor) -> list[Tensor]:
    """For each column of an axis, steps along it from none to its extent. shape: (n, columns)"""
    extent = points.amax(0) - points.amin(0)
    extent = torch.where(extent > 0, extent, torch.ones_like(extent))
    # an odd share of the extent: no step falls on the spacing of the axis only
    shares = torch.linspace(0, 1, 17, dtype=points.dtype, device=points.device) * 0.737
    return [torch.outer(shares, direction) for direction in torch.diag(extent)]


def _draw_lines(
    ax: Axes, factors: dict[int, Factor], points: Tensor, title: str, distance: float | None, terms: int
) -> None:
    extent = (points.amax(0) - points.amin(0)).tolist()
    several = len(extent) > 1  # columns, each of a unit of its own
    start = points.amin(0)
    reach = _reach(list(factors.values()), points) if distance is None else 1.0
    lowest = 0.0
    for number, factor in factors.items():
        colour = COLOURS[number % len(COLOURS)]
        for column, size in enumerate(extent):
            furthest = distance or reach * (size or 1.0)
            distances = torch.linspace(0, furthest, _DISTANCES, dtype=points.dtype, device=points.device)
            steps = torch.zeros(_DISTANCES, len(extent), dtype=points.dtype, device=points.device)
            steps[:, column] = distances
            curve = factor.correlation(start, steps).numpy()
            x = distances.double().cpu().numpy() / (furthest / reach if several and distance is None else 1.0)
            label = _label(factor, number, terms, column if several else None)
            style = ("-", "--", ":", "-.")[column % 4]
            ax.plot(x, curve, color=colour, linestyle=style, linewidth=1.6, label=label)
            lowest = min(lowest, float(curve.min()))
            if not several:
                _mark(ax, factor, x, curve, colour)
    ax.axhline(0, color=QUIET, linewidth=0.6, zorder=0)
    ax.set_ylim(lowest - 0.05 if lowest < 0 else 0.0, 1.05)
    ax.set_xlim(left=0)
    shares = several and distance is None
    ax.set(xlabel="distance / extent of the column" if shares else "distance", ylabel="correlation")
    ax.spines[["top", "right"]].set_visible(False)
    if terms > 1 or several:
        # below: curves leave no room that would do for all of them
        ax.legend(frameon=False, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.24), borderpad=0)
    _write(ax, title, list(factors.values()))


def _mark(ax: Axes, factor: Factor, x: np.ndarray, curve: np.ndarray, colour: str) -> None:
    """Length-scales by a dot, periods by a ring, each with a line down."""
    for places, face in ((factor.length_scales, colour), (factor.periods, "white")):
        for place in places:
            if place <= x[-1]:
                height = float(np.interp(place, x, curve))
                ax.vlines(place, min(height, 0.0), max(height, 0.0), color=colour, linewidth=0.9, linestyle=":")
                ax.plot([place], [height], marker="o", markersize=5, color=colour, markerfacecolor=face)


def _reach(factors: list[Factor], points: Tensor) -> float:
    """The share of the extent, at most 1, at which all correlations have faded; of those that recur, three periods."""
    extent = points.amax(0) - points.amin(0)
    shares = torch.logspace(-6, 0, _DISTANCES, dtype=points.dtype, device=points.device)
    furthest = 0.0
    for factor in factors:
        own = 0.0
        for direction in torch.diag(torch.where(extent > 0, extent, torch.ones_like(extent))):
            strong = factor.correlation(points.amin(0), torch.outer(shares, direction)).abs() > _FADED
            own = max(own, float(shares[strong.nonzero().max()]) if bool(strong.any()) else float(shares[0]))
        if factor.periods and len(extent) == 1 and float(extent) > 0:
            own = min(own, 3 * max(factor.periods) / float(extent))
        furthest = max(furthest, own)
    return min(1.0, 1.15 * furthest)


def _draw_matrix(ax: Axes, number: int, factor: Factor, points: Tensor, title: str, terms: int) -> None:
    kept = points[np.linspace(0, len(points) - 1, min(len(points), _MOST_PLACES)).round().astype(int)]
    matrix = factor.matrix(kept).numpy()
    codes = bool((kept == kept.round()).all()) and len(kept) <= 12
    places: Any = [str(int(code)) for code in kept[:, 0].tolist()] if codes and kept.size(-1) == 1 else kept
    picture = read_field("correlation", matrix, [places, places])
    image = draw_picture(picture, ax, "RdBu_r", (-1.0, 1.0))
    ax.set_aspect("equal")
    add_colorbar(image, [ax], "correlation")
    if len(matrix) <= 8:
        for (i, j), value in np.ndenumerate(matrix):
            if np.isfinite(value):
                ink = "white" if abs(value) > 0.6 else "black"
                x, y = (float(axis.places[k]) for axis, k in zip(picture.axes, (j, i), strict=True))
                ax.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize="small", color=ink)
    _write(ax, f"{title}, term {number + 1}" if terms > 1 else title, [factor])


def _label(factor: Factor, number: int, terms: int, column: int | None) -> str:
    words = [f"{number + 1}: {factor.name}"] if terms > 1 else []
    return ", ".join(words + ([] if column is None else [f"column {column}"]))


def _write(ax: Axes, title: str, factors: list[Factor]) -> None:
    """The axis; then kernels, length-scales and periods."""
    scales = [value for factor in factors for value in factor.length_scales]
    periods = [value for factor in factors for value in factor.periods]
    words = [factors[0].name] if len(factors) == 1 else []
    for symbol, values in (("length-scale", scales), ("period", periods)):
        if values:
            words.append(f"{symbol} {', '.join(f'{value:.3g}' for value in values)}")
    write_title(ax, f"{title}\n{', '.join(words)}" if words else title)
