"""Pictures of an evaluation: the calibration of error bars, and errors by distance to data."""

import math
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gpytorch_gaps.filling.results.evaluation import FAR, Evaluation
from gpytorch_gaps.plot import drawing
from gpytorch_gaps.plot.drawing import BAND_OPACITY, COLOURS, REFERENCE_COLOUR

_LEVELS = np.linspace(0.02, 0.98, 49)


def evaluation(evaluation: Evaluation) -> Figure:
    """Draw an evaluation: observed against nominal coverage of intervals, and errors against the distance to data.

    If errors are independent, the observed coverage is inside the band around the diagonal with a probability of 95 %.
    Errors in the same hole are not independent, so that the coverage may leave the band.

    :param evaluation: the result of ``result.evaluate()``.
    :return: the Figure.
    :raises ValueError: if it is not an Evaluation.

    >>> import numpy as np
    >>> import gpytorch_gaps as gaps
    >>> from gpytorch_gaps import plot
    >>> one = np.ones(5)
    >>> figure = plot.evaluation(gaps.Evaluation(np.arange(5.0), one, one, np.zeros(5, int)))
    >>> [ax.get_title() for ax in figure.axes]
    ['coverage of intervals', 'error by distance to data']
    """
    if not isinstance(evaluation, Evaluation):
        raise ValueError(f"evaluation: got {type(evaluation).__name__}; expected the result of result.evaluate()")
    with drawing.new_figure(8.0, 3.4) as figure:
        left, right = figure.subplots(1, 2)
        _draw_coverage(left, evaluation)
        _draw_distances(right, evaluation)
    return figure


def _draw_coverage(ax: Axes, evaluation: Evaluation) -> None:
    half = 1.96 * np.sqrt(_LEVELS * (1 - _LEVELS) / len(evaluation.errors))
    style: dict[str, Any] = {"color": REFERENCE_COLOUR, "linewidth": 0, "alpha": BAND_OPACITY}
    ax.fill_between(_LEVELS, np.clip(_LEVELS - half, 0, 1), np.clip(_LEVELS + half, 0, 1), **style)
    ax.plot([0, 1], [0, 1], color=REFERENCE_COLOUR, linewidth=1.0, linestyle="--", label="calibrated")
    ax.plot(_LEVELS, evaluation.coverage(_LEVELS.tolist()), color=COLOURS[0], linewidth=1.8, label="observed")
    ax.set(xlim=(0, 1), ylim=(0, 1), xlabel="nominal", ylabel="share of observations inside")
    ax.set_aspect("equal")
    ax.legend(frameon=False, fontsize="small", loc="upper left")
    drawing.write_title(ax, "coverage of intervals")
    ax.spines[["top", "right"]].set_visible(False)


def _draw_distances(ax: Axes, evaluation: Evaluation) -> None:
    known = [one for one in evaluation.by_distance if one.up_to < FAR]
    places = [math.sqrt(max(one.above, 1.0) * one.up_to) for one in known]
    expected = [
        math.sqrt(float(np.mean(evaluation.deviations[_between(evaluation, one.above, one.up_to)] ** 2)))
        for one in known
    ]
    ax.plot(
        places, [one.score.rmse for one in known], color=COLOURS[0], marker="o", linewidth=1.5, label="error (RMSE)"
    )
    ax.plot(places, expected, color=COLOURS[1], marker="s", linewidth=1.2, linestyle="--", label="stated by std")
    if len(known) > 1:
        ax.set_xscale("log", base=2)
    ax.set_xticks(places, [f"{one.up_to:g}" if one.above < 1 else f"{one.above:g}-{one.up_to:g}" for one in known])
    ax.minorticks_off()
    ax.set_ylim(bottom=0)
    ax.set_xlabel("cells to the nearest observation")
    ax.legend(frameon=False, fontsize="small", loc="best")
    drawing.write_title(ax, "error by distance to data")
    ax.spines[["top", "right"]].set_visible(False)


def _between(evaluation: Evaluation, above: float, up_to: float) -> np.ndarray:
    distances = np.maximum(evaluation.distances, 1.0)
    return (distances > above) & (distances <= up_to)
