"""Which observations are withheld: some at random, or in the shape of the gaps of such data."""

import numpy as np
from scipy.ndimage import gaussian_filter

from benchmarks._fill_data import CURVES, FIELD, STATIONS, Problem

RANDOM, CLOUDS, RUNS, ENDS = "random", "clouds", "runs", "ends"
SHAPES = {FIELD: (RANDOM, CLOUDS), STATIONS: (RANDOM, RUNS), CURVES: (RANDOM, ENDS)}
"""What is withheld from each kind of data: cells at random, clouds, pauses of a station, the ends of curves."""

_RANDOM_SHARE, _CLOUDY_SHARE, _RUN_SHARE = 0.1, 0.15, 0.1
_CLEANEST = 0.3  # share of the dates, the clearest, that the clouds of other dates are laid over


def withheld(problem: Problem, shape: str, seed: int) -> np.ndarray:
    """Flags of withheld observations. With seed 0, random ones are those that come with the data, if any do."""
    generator = np.random.default_rng(seed)
    observed = ~np.isnan(problem.values)
    if shape == RANDOM:
        tests = problem.test_cells
        chosen = generator.random(observed.shape) < _RANDOM_SHARE if seed or tests is None else tests
        return observed & chosen
    if shape == CLOUDS:
        return observed & (_moved_clouds(problem, generator) if problem.cloud is None else _clouds(problem, generator))
    if shape == RUNS:
        return observed & _runs(observed, problem.run, generator)
    if shape == ENDS:
        epochs = observed.shape[1]
        last = np.where(generator.random(len(observed)) < 0.5, generator.integers(1, epochs, len(observed)), epochs)
        return observed & (np.arange(epochs) >= last[:, None])
    raise ValueError(f"shape: got {shape!r}; expected one of {SHAPES[problem.kind]}")


def _clouds(problem: Problem, generator: np.random.Generator) -> np.ndarray:
    """Where smoothed noise is largest."""
    height = gaussian_filter(generator.standard_normal(problem.values.shape), problem.cloud)
    return height > np.quantile(height, 1 - _CLOUDY_SHARE)


def _moved_clouds(problem: Problem, generator: np.random.Generator) -> np.ndarray:
    """The clouds of other dates, laid over the clearest dates, as for the cross-validation of DINEOF.

    Alvera-Azcarate et al. (2005), Ocean Modelling 9:325-346; ``Scripts/Julia/dineof_cvp.jl`` of DINEOF.
    """
    missing = np.isnan(problem.values)
    inside = np.ones(missing.shape[1:], dtype=bool) if problem.inside is None else problem.inside
    dates = len(missing)
    clearest = np.argsort(missing[:, inside].mean(axis=1))[: max(1, round(_CLEANEST * dates))]
    chosen = np.zeros_like(missing)
    for date in clearest:
        other = generator.choice([one for one in range(dates) if one != date])
        chosen[date] = missing[other] & inside
    return chosen


def _runs(observed: np.ndarray, run: int, generator: np.random.Generator) -> np.ndarray:
    """Runs of `run` times that stations lose, until a share of the observations is gone; each keeps some."""
    chosen = np.zeros_like(observed)
    total = observed.sum()
    for _ in range(100 * observed.size // run):
        if (chosen & observed).sum() >= _RUN_SHARE * total:
            break
        station, start = generator.integers(observed.shape[1]), generator.integers(max(1, len(observed) - run))
        before = chosen[:, station].copy()
        chosen[start : start + run, station] = True
        if (chosen & observed)[:, station].sum() > 0.5 * observed[:, station].sum():
            chosen[:, station] = before
    return chosen
