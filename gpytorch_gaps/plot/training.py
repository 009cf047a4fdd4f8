"""Pictures of training: loss, noise and iterations, step by step."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gpytorch_gaps.plot import drawing
from gpytorch_gaps.plot.drawing import BAND_OPACITY, COLOURS, REFERENCE_COLOUR
from gpytorch_gaps.training.history import History


def history(history: History) -> Figure:
    """Draw the steps of a fit: loss with twice its standard error, and noise and CG iterations if there are any.

    :param history: the result of :func:`gpytorch_gaps.fit`, or of the ``FitError`` that it raised.
    :return: the Figure.
    :raises ValueError: if `history` is not a History, or has no steps.

    >>> import gpytorch_gaps as gaps
    >>> from gpytorch_gaps import plot
    >>> plot.history(gaps.History(loss=[1.5, 1.25, 1.2])).axes[0].get_title()
    'loss, nats per observation: 1.2 at best'
    """
    if not isinstance(history, History):
        raise ValueError(f"history: got {type(history).__name__}; expected the History that fit returns")
    if not len(history):
        raise ValueError("history: got 0 steps; expected at least one")
    noise, iterations = _with_nan(history.noise), np.array(history.iterations, dtype=float)
    drawn = [True, bool(np.isfinite(noise).any()), bool((iterations > 0).any())]
    with drawing.new_figure(4.3 * sum(drawn), 3.0) as figure:
        panels = iter(figure.subplots(1, sum(drawn), squeeze=False)[0])
        _draw_loss(next(panels), history)
        if drawn[1]:
            ax = next(panels)
            ax.plot(_steps(noise), noise, color=COLOURS[1], linewidth=1.5)
            if np.nanmin(noise) > 0 and np.nanmax(noise) > 10 * np.nanmin(noise):
                ax.set_yscale("log")
            _write(ax, f"noise variance: {noise[np.isfinite(noise)][-1]:.3g} at last")
        if drawn[2]:
            ax = next(panels)
            ax.step(_steps(iterations), iterations, where="mid", color=COLOURS[2], linewidth=1.2)
            ax.set_ylim(bottom=0)
            _write(ax, f"CG iterations: {int(iterations.sum())} in all")
    return figure


def _draw_loss(ax: Axes, history: History) -> None:
    loss, error = np.array(history.loss, dtype=float), _with_nan(history.standard_error)
    steps, title = _steps(loss), "loss, nats per observation"
    if len(error) == len(loss) and np.nanmax(error, initial=0.0) > 0:
        ax.fill_between(
            steps, loss - 2 * error, loss + 2 * error, color=COLOURS[0], alpha=BAND_OPACITY, linewidth=0
        )  # fmt: skip
    ax.plot(steps, loss, color=COLOURS[0], linewidth=1.5, marker="o" if len(loss) == 1 else "")
    if np.isfinite(loss).any():
        best = int(np.nanargmin(loss))
        ax.plot([steps[best]], [loss[best]], marker="o", markersize=5, color=REFERENCE_COLOUR)
        title = f"{title}: {loss[best]:.4g} at best"
    _write(ax, title)


def _write(ax: Axes, title: str) -> None:
    ax.set_xlabel("step")
    drawing.use_integer_ticks(ax.xaxis)
    ax.spines[["top", "right"]].set_visible(False)
    drawing.write_title(ax, title)


def _steps(values: np.ndarray) -> np.ndarray:
    return np.arange(1, len(values) + 1)


def _with_nan(values: Sequence[float | None]) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values], dtype=float)
