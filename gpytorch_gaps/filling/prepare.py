"""From values on axes to kernels with hyperparameters: cycles, labels, windows, candidates."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gpytorch_gaps.filling.auto_kernels import candidates, label_correlations
from gpytorch_gaps.filling.axes import Axis
from gpytorch_gaps.filling.cycles import cycles_of
from gpytorch_gaps.filling.learn import Learned, learn
from gpytorch_gaps.filling.model import MANY, NOISE_FLOOR, NOISE_FLOOR_OF_MANY, PlaneMean
from gpytorch_gaps.filling.options import Options
from gpytorch_gaps.filling.trend import fit_mean, sample_of
from gpytorch_gaps.filling.windows import OBSERVATIONS, Reader, Window, all_of, choose_windows

WINDOWS = 6
_SEEN = 0.3  # of the mean square of all data, that windows must see
_OUTLIERS = 0.999
_ROUNDING = 1e-13  # of the largest value


@dataclass(frozen=True, eq=False)
class Prepared:
    """What the model is made of."""

    learned: Learned
    mean: PlaneMean
    notes: tuple[str, ...]


def prepare(
    read: Reader, shape: Sequence[int], axes: Sequence[Axis], options: Options, generator: np.random.Generator,
    part: np.ndarray, one_term: bool = False, shortest: float = 0.0, corner: Sequence[int] | None = None,
) -> Prepared:  # fmt: skip
    """Everything that is learned, from windows of the grid.

    :param part: values in which cycles, the trend and the correlations of labels are looked for: of the whole grid if
        it is in memory, else of what the windows hold.
    :param one_term: whether the kernel has to be a single product.
    :param shortest: the least length-scale, in cells.
    :param corner: the first cell of `part`. Default: that of the grid.
    """
    whole = part.shape == tuple(shape)
    density = float(np.mean(~np.isnan(part)))
    labels = [axis.kind == "label" for axis in axes]
    few = whole and np.count_nonzero(~np.isnan(part)) <= 1.2 * OBSERVATIONS

    def windows_through(cells: np.ndarray | None) -> list[Window]:
        return choose_windows(read, shape, labels, WINDOWS, generator, density, cells)

    windows = [all_of(part)] if few else windows_through(None)
    if sum(map(len, windows)) < 2:
        raise ValueError("values: all that was looked at are gaps; expected observations, some of them near each other")
    given = options.kernels_of(axes)
    asked = options.periods_of(axes)
    found = cycles_of(part, list(axes)) if whole else [[] for _ in axes]
    periods = [cycles if own is None else own for own, cycles in zip(asked, found, strict=True)]
    at, values = sample_of(part, generator)
    if whole:
        mean = fit_mean(axes, at, values, trend=options.trend and not one_term)
    else:
        places = np.concatenate([_positions(w.positions, w.cells.numpy()) for w in windows])
        seen = np.concatenate([w.values.numpy() for w in windows])
        mean = fit_mean(axes, places, seen, trend=False)
        at = np.concatenate([at + (0 if corner is None else np.asarray(corner)), places])
        values = np.concatenate([values, seen])
    squares = _squares(_residuals(axes, mean, at, values), _ROUNDING * float(np.abs(values).max()))
    spread = float(squares.mean())
    if not few and _variance_of(windows, axes, mean) < _SEEN * spread:
        windows = windows_through(at[generator.choice(len(at), WINDOWS, p=squares / squares.sum())])
    variance = max(_variance_of(windows, axes, mean), spread) or 1.0
    correlations = [
        label_correlations(part, i) if label and whole and own is None else None
        for i, (label, own) in enumerate(zip(labels, given, strict=True))
    ]
    choices = candidates(axes, variance, periods, correlations, given, one_term, shortest)
    floor = NOISE_FLOOR if whole and np.count_nonzero(~np.isnan(part)) <= MANY else NOISE_FLOOR_OF_MANY
    learned = learn(
        choices, windows, axes, mean, variance, floor, options.steps, options.progress, density * math.prod(shape)
    )
    return Prepared(learned, mean, tuple(_notes(axes, periods, mean, given)))


def _variance_of(windows: Sequence[Window], axes: Sequence[Axis], mean: PlaneMean) -> float:
    """What the process has to explain: a trend's own variance would set noise and scales far too high."""
    places = [_positions(window.positions, window.cells.numpy()) for window in windows]
    left = [_residuals(axes, mean, at, w.values.numpy()) for at, w in zip(places, windows, strict=True)]
    return float(np.mean(np.concatenate(left) ** 2))


def _residuals(axes: Sequence[Axis], mean: PlaneMean, at: np.ndarray, values: np.ndarray) -> np.ndarray:
    x = np.concatenate([axis.points[column] for axis, column in zip(axes, at.T, strict=True)], axis=1)
    return values - mean(torch.from_numpy(x)).numpy()


def _squares(residuals: np.ndarray, rounding: float) -> np.ndarray:
    """About their median, the largest one in a thousand cut: one bad value is not the data.

    Unless nothing else varies, beyond rounding.
    """
    squares = (residuals - np.median(residuals)) ** 2
    largest = float(np.quantile(squares, _OUTLIERS))
    return np.minimum(squares, largest) if largest > rounding**2 else squares


def _positions(positions: Sequence[np.ndarray], cells: np.ndarray) -> np.ndarray:
    return np.stack([p[c] for p, c in zip(positions, cells.T, strict=True)], axis=1)


def _notes(
    axes: Sequence[Axis], periods: Sequence[Sequence[float]], mean: PlaneMean, given: Sequence[object]
) -> list[str]:
    notes = []
    kinds = {axis.kind: axis.name for axis in axes}
    around = next((axis.name for axis in axes if axis.kind == "circle"), None)
    if "latitude" in kinds:
        longitude = kinds.get("longitude") or around
        latitudes = next(axis.points for axis in axes if axis.kind == "latitude")
        widest, narrowest = (math.cos(math.radians(value)) for value in (abs(latitudes).min(), abs(latitudes).max()))
        if longitude is not None:
            notes.append(
                f"{kinds['latitude']} and {longitude} are not treated as a sphere: a degree of longitude counts the "
                f"same everywhere, though here it is {widest:.2f} to {narrowest:.2f} times one of latitude"
            )
    if around is not None:
        notes.append(f"{around} closes to a circle")
    for axis, cycles, own in zip(axes, periods, given, strict=True):
        if cycles and own is None:
            words = " and ".join(f"{period:.6g} {axis.unit}".strip() for period in cycles)
            notes.append(f"{axis.name} has a cycle of {words}")
    if bool((mean.slopes != 0).any()):
        notes.append("a linear trend is taken off first")
    return notes
