"""The filling of an array in memory: the choice of observations that are used, of a transform, and of a model."""

import math
from dataclasses import replace
from functools import partial

import numpy as np

from gpytorch_gaps.filling.arrays.adapters import ArrayAdapter
from gpytorch_gaps.filling.arrays.options import Options
from gpytorch_gaps.filling.arrays.outliers import find_wild
from gpytorch_gaps.filling.arrays.targets import Targets
from gpytorch_gaps.filling.arrays.variables import VariablesAdapter
from gpytorch_gaps.filling.learning.choose import ChosenModel
from gpytorch_gaps.filling.learning.predict import MIN_OBSERVATIONS_TO_WITHHOLD
from gpytorch_gaps.filling.process.in_memory import InMemoryFilling
from gpytorch_gaps.filling.process.joint import JointFilling
from gpytorch_gaps.filling.transforms.fit import FittedTransform, candidates, fit_transform
from gpytorch_gaps.filling.transforms.transform import Transform


def choose_filling(
    adapter: ArrayAdapter, numbers: np.ndarray, targets: Targets, options: Options
) -> tuple[InMemoryFilling, ChosenModel]:
    """A filling of the observations that are used, and its chosen model.

    :param numbers: the values of the array, NaN at gaps.
    """
    kind = JointFilling if isinstance(adapter, VariablesAdapter) else InMemoryFilling
    make = partial(kind, adapter, numbers, targets)
    wild = find_wild(numbers, adapter.axes) if options.robust else None
    believed = numbers[~(np.isnan(numbers) if wild is None else np.isnan(numbers) | wild)]
    if options.transform == "auto":
        filling, chosen = _compared(make, options, wild, believed)
    else:
        filling = make(options, wild, fit_transform(options.transform, options.bounds, believed))
        chosen = filling.choose_model()
    if options.robust is True:
        more = filling.implausible(chosen)
        if more.any():
            filling = make(options, filling.distrusted | more, filling.fitted)
            chosen = filling.choose_model()
    return filling, chosen


def _compared(
    make: partial[InMemoryFilling], options: Options, wild: np.ndarray | None, believed: np.ndarray
) -> tuple[InMemoryFilling, ChosenModel]:
    """The filling with the best transform: withheld observations have the smallest CRPS in the units of the data.

    All transforms predict the same observations.
    """
    listed = candidates(options.bounds, believed)
    if len(believed) < MIN_OBSERVATIONS_TO_WITHHOLD:
        raise ValueError(
            f"transform: got 'auto' with {len(believed)} observations, expected {MIN_OBSERVATIONS_TO_WITHHOLD} or "
            "more, so that some can be withheld to compare transforms. Try: name one transform"
        )
    budget = None if options.budget is None else options.budget / len(listed)
    each = replace(options, check=True, budget=budget)
    found: list[tuple[float, InMemoryFilling, ChosenModel]] = []
    for transform in listed:
        filling = make(each, wild, FittedTransform(transform))
        chosen = filling.choose_model()
        found.append((_held_out_crps(filling, chosen), filling, chosen))
    order = sorted(range(len(found)), key=lambda number: found[number][0])
    crps, filling, chosen = found[order[0]]
    others = ", ".join(f"{found[number][0]:.4g} with {_words(found[number][1].transform)}" for number in order[1:])
    why = f"held-out CRPS {crps:.4g}" + (f"; {others}" if others else "")
    filling.fitted = FittedTransform(filling.transform, why)
    filling.options = options
    if not options.check:
        filling.withheld = None
    return filling, chosen


def _held_out_crps(filling: InMemoryFilling, chosen: ChosenModel) -> float:
    """The CRPS of withheld observations, with the standard deviations that results will have."""
    check = filling.check_model(chosen)
    if check is None:
        return math.inf
    assert check.predicted is not None
    std = check.predicted.variance.sqrt().numpy()
    factor = filling.calibration(check, std, np.zeros(1, dtype=int))
    return filling.predictive_of(check, factor).score(filling.withheld_values).crps


def _words(transform: Transform | None) -> str:
    return "none" if transform is None else transform.words
