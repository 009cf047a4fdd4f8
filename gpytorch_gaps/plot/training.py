"""What the steps of a fit did."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gpytorch_gaps.plot.style import COLOURS, QUIET, count_in_integers, opened, write_title
from gpytorch_gaps.training.history import History


def history(history: History) -> Figure:
    """Loss per observation, with twice its standard error; noise; and CG iterations, step by step, where there are any.

    :param history: of :func:`gpytorch_gaps.training.fit`, or of the ``FitError`` that it raised.
    """
    if not isinstance(history, History):
        raise ValueError(f"history: got {type(history).__name__}; expected the History that fit returns")
    if not len(history):
        raise ValueError("history: got 0 steps; expected at least one")
    noise, iterations = _numbers(history.noise), np.array(history.iterations, dtype=float)
    drawn = [True, bool(np.isfinite(noise).any()), bool((iterations > 0).any())]
    with opened(4.3 * sum(drawn), 3.0) as figure:
        panels = iter(figure.subplots(1, sum(drawn), squeeze=False)[0])
        _draw_loss(next(panels), history)
        if drawn[1]:
            ax = next(panels)
            ax.plot(_steps(noise), noise, color=COLOURS[1], linewidth=1.5)
            if np.nanmin(noise) > 0 and np.nanmax(noise) > 10 * np.nanmin(noise):
                ax.set_yscale("log")
            _finish(ax, f"noise variance: {noise[np.isfinite(noise)][-1]:.3g} at last")
        if drawn[2]:
            ax = next(panels)
            ax.step(_steps(iterations), iterations, where="mid", color=COLOURS[2], linewidth=1.2)
            ax.set_ylim(bottom=0)
            _finish(ax, f"CG iterations: {int(iterations.sum())} in all")
    return figure


def _draw_loss(ax: Axes, history: History) -> None:
    loss, error = np.array(history.loss, dtype=float), _numbers(history.standard_error)
    steps = _steps(loss)
    if len(error) == len(loss) and np.nanmax(error, initial=0.0) > 0:
        ax.fill_between(steps, loss - 2 * error, loss + 2 * error, color=COLOURS[0], alpha=0.22, linewidth=0)
    ax.plot(steps, loss, color=COLOURS[0], linewidth=1.5, marker="o" if len(loss) == 1 else "")
    if np.isfinite(loss).any():
        best = int(np.nanargmin(loss))
        ax.plot([steps[best]], [loss[best]], marker="o", markersize=5, color=QUIET)
        _finish(ax, f"loss, nats per observation: {loss[best]:.4g} at best")
    else:
        _finish(ax, "loss, nats per observation")


def _finish(ax: Axes, title: str) -> None:
    ax.set_xlabel("step")
    count_in_integers(ax.xaxis)
    ax.spines[["top", "right"]].set_visible(False)
    write_title(ax, title)


def _steps(values: np.ndarray) -> np.ndarray:
    return np.arange(1, len(values) + 1)


def _numbers(values: Sequence[float | None]) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values], dtype=float)
