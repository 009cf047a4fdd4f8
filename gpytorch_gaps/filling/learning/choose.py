"""Choice of the model: a mean function, a kernel and noise, with hyperparameters, for values on axes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from gpytorch_gaps.filling.arrays.grid_values import GridValues, Part, coordinates
from gpytorch_gaps.filling.arrays.options import Options
from gpytorch_gaps.filling.axes.axis import Axis
from gpytorch_gaps.filling.learning.budget import Budget
from gpytorch_gaps.filling.learning.candidates import MAX_FREE_LABELS, KernelLimits, KernelTask, candidates, goes_by_fft
from gpytorch_gaps.filling.learning.cycles import (
    Cycles,
    find_changing,
    find_cycles,
    find_lasting,
    fit_cycles,
    last_long,
)
from gpytorch_gaps.filling.learning.estimates import fit_mean, less_backgrounds, refit_mean, sample_observations
from gpytorch_gaps.filling.learning.generalized import generalized
from gpytorch_gaps.filling.learning.label_factors import LabelFactors, label_factors
from gpytorch_gaps.filling.learning.label_kernel import on_part
from gpytorch_gaps.filling.learning.learn import Learned, TrainingData, learn
from gpytorch_gaps.filling.learning.model import (
    MANY_OBSERVATIONS,
    NOISE_FLOOR,
    NOISE_FLOOR_OF_MANY,
    FillModel,
    ProductTerm,
    TrendMean,
    make_model,
    with_known_noise,
)
from gpytorch_gaps.filling.learning.windows import MAX_WINDOW_OBSERVATIONS, Window, choose_windows, whole_window
from gpytorch_gaps.grid.cartesian import CartesianGrid
from gpytorch_gaps.kernels import SphereKernel

NUM_WINDOWS, NUM_WINDOWS_OF_GROUPS = 6, 15
"""Windows to learn from. A window has few of the rows of a group, such as curves, and rows differ."""

_MIN_SEEN_SHARE = 0.3  # smallest mean square of the residuals in windows, relative to that of all residuals
_OUTLIER_QUANTILE = 0.999
_FEW = 1.2 * MAX_WINDOW_OBSERVATIONS  # so few observations form a single window
_ROUNDING = 1e-13  # relative to the largest value


@dataclass(frozen=True, eq=False)
class ChosenModel:
    """Mean, kernel and noise with their hyperparameters, not yet conditioned on observations."""

    learned: Learned
    mean: TrendMean
    notes: tuple[str, ...]

    @property
    def noise(self) -> float:
        """The variance of the learned noise, without known errors. If labels have different noise, their mean."""
        return float(self.learned.likelihood.noise.detach().mean())

    def noise_at(self, x: Tensor) -> Tensor:
        """The variances of the learned noise at points, without known errors. shape: (Q, D) -> (Q,)"""
        likelihood, noise = self.learned.likelihood, self.learned.likelihood.noise.detach().to(x.device)
        if likelihood.noise_axis is None or likelihood.grid is None:
            return noise.expand(len(x))
        return noise[x[:, likelihood.grid.columns[likelihood.noise_axis]].squeeze(-1).round().long()]

    def conditioned(self, part: Part, device: torch.device | None = None) -> FillModel:
        """The model, conditioned on all observations in a part of the grid."""
        grid = CartesianGrid([torch.from_numpy(axis.points).to(device) for axis in part.axes])
        y = torch.from_numpy(part.values).to(device).flatten()
        index = (~y.isnan()).nonzero().squeeze(-1)
        likelihood = on_part(self.learned.likelihood, grid)
        if part.noise is not None:
            known = torch.from_numpy(part.noise).to(device).flatten()
            learned = self.noise_at(grid.points(index))
            likelihood = with_known_noise(learned, known[index], elsewhere=float(known[index].mean()))
        model = make_model(grid, index, y[index], self.learned.terms, likelihood, self.mean)
        return model.to(device)


def choose_model(
    source: GridValues,
    part: Part,
    options: Options,
    generator: np.random.Generator,
    limits: KernelLimits | None = None,
    budget: Budget | None = None,
    variables: int | None = None,
) -> ChosenModel:
    """Chooses mean, kernel and noise, and trains them on windows of the grid.

    :param source: the grid and its values.
    :param part: values for estimates of cycles, the trend and correlations of labels: the whole grid if that is in
        memory. From a smaller part, cycles and correlations are not estimated, and the trend is that of wide windows.
    :param limits: restrictions of the kernel.
    :param budget: limits of the training.
    :param variables: number of the axis of variables, if several are filled together.
    :raises ValueError: if windows contain no observations.
    """
    limits, axes = limits or KernelLimits(), source.axes
    whole = part.values.shape == source.shape
    observed = ~np.isnan(part.values)
    density = float(np.mean(observed))
    few = whole and np.count_nonzero(observed) <= _FEW
    windows = _windows(source, part, generator)
    if sum(map(len, windows)) < 2:
        raise ValueError("values: found only gaps in all windows; expected observations, some of them near each other")
    given = options.kernels_of(axes)
    covariates, turn = source.covariates, part.orientation
    left = less_backgrounds(part.values, axes, covariates, generator, turn) if whole else part.values
    periods, cycles = _cycles(left, axes, options, given, whole, whole and not limits.one_term)
    cells, values = sample_observations(part.values, generator, turn)
    if whole:
        mean = fit_mean(axes, cells, values, options.trend, cycles, covariates)
    else:
        seen_cells, seen = map(np.concatenate, zip(*map(_observations, windows), strict=True))
        wide = [window for window in windows if window.spans(source.shape)]
        sample_cells, sample = map(np.concatenate, zip(*map(_observations, wide or windows), strict=True))
        mean = fit_mean(axes, sample_cells, sample, options.trend and bool(wide), covariates=covariates)
        cells, values = np.concatenate([cells + part.corner, seen_cells]), np.concatenate([values, seen])
    squares = _robust_squares(_residuals(axes, mean, cells, values), _ROUNDING * float(np.abs(values).max()))
    spread = float(squares.mean())
    if not few and _mean_square(windows, axes, mean) < _MIN_SEEN_SHARE * spread:
        through = cells[generator.choice(len(cells), _num_windows(axes), p=squares / squares.sum())]
        windows = choose_windows(source, len(through), generator, density, through)
    variance = max(_mean_square(windows, axes, mean), spread) or 1.0
    factors = [
        label_factors(part.values, axes, i, mean, generator) if axis.kind == "label" and whole and own is None else None
        for i, (axis, own) in enumerate(zip(axes, given, strict=True))
    ]
    floor = NOISE_FLOOR if whole and np.count_nonzero(observed) <= MANY_OBSERVATIONS else NOISE_FLOOR_OF_MANY
    if part.noise is not None:  # known errors are noise as well
        floor = max(NOISE_FLOOR, floor - float(part.noise[observed].min()) / variance)
    listed = candidates(KernelTask(axes, variance, periods, factors, given, limits, cycles, variables))
    labels = None if limits.one_term or part.noise is not None else _labels_with_noise(factors)
    data = TrainingData(windows, axes, mean, variance, floor, density * math.prod(source.shape), labels, variables)
    learned = learn(listed, data, options.steps, options.progress, budget)
    mean = generalized(mean, learned, axes, windows)
    notes = _about_sphere(axes, learned.terms) + _notes(axes, periods, mean, given)
    return ChosenModel(learned, mean, tuple(notes))


def _windows(source: GridValues, part: Part, generator: np.random.Generator) -> list[Window]:
    """All observations of a small grid, or windows with some of them."""
    observed = ~np.isnan(part.values)
    if part.values.shape == source.shape and np.count_nonzero(observed) <= _FEW:
        return [whole_window(part.values, part.noise)]
    return choose_windows(source, _num_windows(source.axes), generator, float(np.mean(observed)))


def _num_windows(axes: Sequence[Axis]) -> int:
    return NUM_WINDOWS_OF_GROUPS if any(axis.kind == "group" for axis in axes) else NUM_WINDOWS


def refitted(chosen: ChosenModel, source: GridValues, trend: bool, generator: np.random.Generator) -> ChosenModel:
    """The model with a mean function that is fitted to other observations, those of `source`."""
    whole = source.whole()
    mean = refit_mean(chosen.mean, source.axes, whole.values, trend, generator, whole.orientation)
    if mean.covariates is not None:
        mean = generalized(mean, chosen.learned, source.axes, _windows(source, whole, generator))
    return replace(chosen, mean=mean)


def _labels_with_noise(factors: Sequence[LabelFactors | None]) -> tuple[int, LabelFactors] | None:
    """The axis with the most labels and their covariance, if there are many. Noise differs along one axis only."""
    known = [(number, own) for number, own in enumerate(factors) if own is not None and len(own.own) > MAX_FREE_LABELS]
    return max(known, key=lambda one: len(one[1].own), default=None)


def _cycles(
    values: np.ndarray,
    axes: Sequence[Axis],
    options: Options,
    given: Sequence[Kernel | None],
    whole: bool,
    in_memory: bool,
) -> tuple[list[list[float]], Cycles | None]:
    """The periods of the cycles in the kernel of each axis, and the cycles of the mean.

    Cycles of the mean are those of the first long axis, or of the only axis besides many labels. It must not have a
    kernel of the user, and one of its cycles must repeat often enough. For few labels, a periodic kernel is better,
    because it includes the uncertainty of the cycle.
    """
    labels = [axis.size for axis in axes if axis.kind == "label"]
    table = len(labels) == len(axes) - 1 and max(labels, default=0) > MAX_FREE_LABELS
    asked = options.periods_of(axes)
    found = find_cycles(values, axes) if whole else [[] for _ in axes]
    periods = [cycles if own is None else own for own, cycles in zip(asked, found, strict=True)]
    for number, axis in enumerate(axes if in_memory else []):
        long = goes_by_fft(axis, len(axes)) or (table and axis.kind != "label")
        if given[number] is None and axis.points.shape[1] == 1 and axis.period is None and long:
            named = asked[number]
            lasting = find_lasting(values, number, axis) if named is None else named
            cycles = fit_cycles(values, axes, number, lasting) if last_long(axis, lasting, table) else None
            if cycles is not None:
                left = np.moveaxis(values, number, 0).reshape(axis.size, -1) - cycles.on(axis.points[:, 0])
                periods[number] = find_changing(left, 0, axis, cycles.periods)
                return periods, cycles
    return periods, None


def _observations(window: Window) -> tuple[np.ndarray, np.ndarray]:
    """Positions on the grid (N, d) and values (N,)."""
    positions = [p[c] for p, c in zip(window.positions, window.cells.numpy().T, strict=True)]
    return np.stack(positions, axis=1), window.values.numpy()


def _residuals(axes: Sequence[Axis], mean: TrendMean, cells: np.ndarray, values: np.ndarray) -> np.ndarray:
    return values - mean(coordinates(axes, cells)).numpy()


def _mean_square(windows: Sequence[Window], axes: Sequence[Axis], mean: TrendMean) -> float:
    """Mean square of the residuals. (With the variance of a trend, noise and kernel would be far too large.)"""
    return float(np.mean(np.concatenate([_residuals(axes, mean, *_observations(w)) for w in windows]) ** 2))


def _robust_squares(residuals: np.ndarray, rounding: float) -> np.ndarray:
    """Squared differences from the median. The largest one in a thousand is clipped, against single wrong values.

    They are not clipped if all others are equal up to `rounding`.
    """
    squares = (residuals - np.median(residuals)) ** 2
    largest = float(np.quantile(squares, _OUTLIER_QUANTILE))
    return np.minimum(squares, largest) if largest > rounding**2 else squares


def _about_sphere(axes: Sequence[Axis], terms: Sequence[ProductTerm]) -> list[str]:
    """A note if latitudes and longitudes are treated as a plane."""
    latitude = next((axis for axis in axes if axis.kind == "latitude"), None)
    longitudes = [axis.name for kind in ("longitude", "circle") for axis in axes if axis.kind == kind]
    on_sphere = all(any(isinstance(kernel, SphereKernel) for kernel in term.kernels) for term in terms)
    if latitude is None or not longitudes or on_sphere:
        return []
    degrees = np.abs(latitude.points)
    widest, narrowest = (math.cos(math.radians(value)) for value in (degrees.min(), degrees.max()))
    return [
        f"{latitude.name} and {longitudes[0]} are not treated as a sphere: all degrees of longitude have the same "
        f"length in the model, but here they are {widest:.2f} to {narrowest:.2f} degrees of latitude"
    ]


def _notes(
    axes: Sequence[Axis], periods: Sequence[Sequence[float]], mean: TrendMean, given: Sequence[object]
) -> list[str]:
    notes = [axis.note for axis in axes if axis.note]
    notes += [f"{axis.name} closes to a circle" for axis in axes if axis.kind == "circle"][:1]
    for axis, cycles, own in zip(axes, periods, given, strict=True):
        if cycles and own is None:
            changes = " that changes" if mean.cycles is not None and axes[mean.cycles.axis] is axis else ""
            notes.append(f"{axis.name} has a cycle of {_words(axis, cycles)}{changes}")
    if mean.cycles is not None:
        axis = axes[mean.cycles.axis]
        notes.append(f"{axis.name} has a cycle of {_words(axis, mean.cycles.periods)}, which is subtracted first")
    if bool((mean.slopes != 0).any()):
        notes.append("a linear trend is subtracted first")
    if mean.covariates is not None:
        terms = zip(mean.coefficients.tolist(), mean.covariates.names, strict=True)
        notes.append(f"the mean has {' + '.join(f'{value:.4g} times {name}' for value, name in terms)}")
    return notes


def _words(axis: Axis, periods: Sequence[float]) -> str:
    return " and ".join(f"{period:.6g} {axis.unit}".strip() for period in periods)
