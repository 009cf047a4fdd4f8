"""The right picture for a result: maps, lines for a table of a few series, or colour pictures."""

import math
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from gpytorch_gaps.filling.axes.index_grid import is_a
from gpytorch_gaps.filling.results.filled import Filled
from gpytorch_gaps.plot import drawing
from gpytorch_gaps.plot.filling import fill
from gpytorch_gaps.plot.inputs import read_field
from gpytorch_gaps.plot.lines import series

_MOST_CELLS = 4_000_000  # of a larger array, only every n-th cell is drawn
_MOST_SERIES = 6  # a table with at most so many series is drawn as lines
_SERIES_INCHES = 2.3  # height of one


def draw_result(result: Filled, axes: Any = None, variable: Any = None) -> Figure:
    """A figure of one variable: before, after and uncertainty.

    :param axes: the coordinates of each dimension, if ``result.mean`` has none.
    """
    mean, std, gap = (
        one[variable] if hasattr(one, "data_vars") else one for one in (result.mean, result.std, result.gaps)
    )
    shape = tuple(mean.shape)
    step = math.ceil((math.prod(shape) / _MOST_CELLS) ** (1 / len(shape)))
    if step > 1:
        some = (slice(None, None, step),) * len(shape)
        mean, std, gap = mean[some], None if std is None else std[some], gap[some]
    shown, axes = Filled(mean, std, gap, None, None), None if step > 1 else axes
    if np.ma.isMaskedArray(mean) and mean.dtype == np.uint8 and len(shape) == 3:
        return fill(shown, rgb=shape[-1] == 3)
    labels = _labels(mean, axes)
    return _draw_series(shown, axes, labels) if 1 < len(labels) <= _MOST_SERIES else fill(shown, axes=axes)


def _labels(mean: Any, axes: Any) -> tuple[str, ...]:
    """The labels of the columns of a table; empty for any other array."""
    if len(mean.shape) != 2:
        return ()
    rows, columns = read_field("result.mean", mean, axes).places
    return columns.labels if columns.kind == "labels" and rows.kind != "labels" else ()


def _draw_series(result: Filled, axes: Any, labels: tuple[str, ...]) -> Figure:
    """The series of a table below each other, with their observations and a band of 95 %."""
    x = None if axes is None else axes[0]
    with drawing.new_figure(9.0, _SERIES_INCHES * len(labels)) as figure:
        for number, (ax, label) in enumerate(
            zip(figure.subplots(len(labels), sharex=True, squeeze=False)[:, 0], labels, strict=True)
        ):
            mean, gap = _column(result.mean, number), np.asarray(_column(result.gaps, number), dtype=bool)
            std = None if result.std is None else _column(result.std, number)
            observed = np.ma.masked_array(np.asarray(mean, dtype=float), mask=gap)
            series(x, mean, std, observed, ax=ax, title=label)
            ax.set_ylabel("")
    return figure


def _column(table: Any, number: int) -> Any:
    return table.iloc[:, number] if is_a(table, "pandas", "DataFrame") else table[:, number]
