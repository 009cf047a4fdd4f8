"""Evaluation of a filling: fold by fold, withheld observations are predicted from the others and scored."""

import copy
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import numpy as np

from gpytorch_gaps import settings
from gpytorch_gaps.filling.arrays.grid_values import Part, choose_part
from gpytorch_gaps.filling.checking.holdout import Withheld, distances_to_data
from gpytorch_gaps.filling.learning.choose import ChosenModel
from gpytorch_gaps.filling.learning.predict import seeded
from gpytorch_gaps.filling.process.in_memory import InMemoryFilling
from gpytorch_gaps.filling.process.joint import JointFilling
from gpytorch_gaps.filling.process.pipeline import Stopwatch
from gpytorch_gaps.filling.results.evaluation import FAR, Evaluation
from gpytorch_gaps.filling.results.fitted import Fitted
from gpytorch_gaps.filling.transforms.predictive import predictive
from gpytorch_gaps.utils.checks import check_integer
from gpytorch_gaps.utils.progress import with_bar

_HYPERPARAMETERS_NOTE = "hyperparameters are not learned again; each fold conditions on the observations not withheld"
_UNITS_NOTE = "labels differ in scale: errors are in units of the standard deviation of each label"


@dataclass(frozen=True, eq=False)
class _Predictions:
    """Withheld observations of all folds, in units of the model. `positions` are (n, d), all other fields are (n,)."""

    positions: np.ndarray
    means: np.ndarray
    errors: np.ndarray
    deviations: np.ndarray
    distances: np.ndarray
    fold: np.ndarray


def evaluate(models: Mapping[Hashable, Fitted], folds: int, seed: int, progress: bool) -> dict[Hashable, Evaluation]:
    """An evaluation of each variable. Variables that were filled together are predicted together."""
    check_integer("folds", folds, at_least=1)
    check_integer("seed", seed, at_least=0)
    predicted: dict[int, _Predictions] = {}
    with settings.progress(progress and settings.progress.value()), seeded(seed):
        for fitted in models.values():
            if id(fitted.filling) not in predicted:
                predicted[id(fitted.filling)] = _predict_folds(fitted, folds, seed)
    return {name: _evaluation(fitted, predicted[id(fitted.filling)]) for name, fitted in models.items()}


def _predict_folds(fitted: Fitted, folds: int, seed: int) -> _Predictions:
    """Withholds and predicts observations, each of them at most once."""
    filling = copy.copy(fitted.filling)
    source, filling.generator, filling.stopwatch = filling.source, np.random.default_rng(seed), Stopwatch()
    taken = np.zeros(source.shape, dtype=bool)
    found = []
    for number in with_bar(range(folds), "folds", unit="fold"):
        part = choose_part(source, filling.generator)
        withheld = filling.withhold(part, filling.generator)
        if withheld is None:
            break
        block = tuple(slice(int(p[0]), int(p[-1]) + 1) for p in part.positions)
        new = withheld.scored & ~taken[block]
        taken[block] |= new
        if new.any():
            filling.part, filling.withheld = part, Withheld(withheld.hidden, new)
            found.append(_predict(filling, fitted.chosen, number))
    if not found:
        raise ValueError("evaluate: got too few observations to withhold some, expected 30 or more")
    columns = zip(*([getattr(one, name) for name in _Predictions.__annotations__] for one in found), strict=True)
    return _Predictions(*map(np.concatenate, columns))


def _predict(filling: InMemoryFilling, chosen: ChosenModel, fold: int) -> _Predictions:
    """The errors of one fold, by the held-out check of the filling."""
    part, withheld, check = filling.part, filling.withheld, filling.check_model(chosen)
    assert withheld is not None
    assert check is not None
    assert check.predicted is not None
    means = check.predicted.mean.numpy()
    errors = part.values[withheld.scored] - means
    positions = np.argwhere(withheld.scored)
    return _Predictions(
        positions + part.corner,
        means,
        errors,
        check.predicted.variance.sqrt().numpy(),
        _distances(part, withheld.hidden)[withheld.scored],
        np.full(len(errors), fold),
    )


def _distances(part: Part, hidden: np.ndarray) -> np.ndarray:
    """Distances, in cells, of all cells to the nearest observation with the same label that is not hidden."""
    along = [axis.kind != "label" for axis in part.axes]
    return distances_to_data(np.isnan(part.values) | hidden, along, FAR)


def _evaluation(fitted: Fitted, found: _Predictions) -> Evaluation:
    """The evaluation of one variable, from its observations and in its units."""
    filling, notes = fitted.filling, [_HYPERPARAMETERS_NOTE]
    own, unit = slice(None), 1.0
    if isinstance(filling, JointFilling) and fitted.variable is not None:
        own, unit = found.positions[:, 0] == fitted.variable, filling.unit(fitted.variable)
    elif filling.scales is not None and filling.transform is None:
        notes.append(_UNITS_NOTE)
    stretch = fitted.calibration_of(found.deviations, found.positions)
    if filling.transform is not None:
        return _transformed_evaluation(filling, found, stretch, notes)
    return Evaluation(
        errors=unit * found.errors[own],
        deviations=unit * (found.deviations * stretch)[own],
        distances=found.distances[own],
        fold=found.fold[own],
        notes=tuple(notes),
    )


def _transformed_evaluation(
    filling: InMemoryFilling, found: _Predictions, stretch: np.ndarray | float, notes: list[str]
) -> Evaluation:
    """The evaluation of transformed values, in the units of the data. Errors are those of medians."""
    at = tuple(found.positions.T)
    unit = 1.0 if filling.scales is None else np.broadcast_to(filling.scales, filling.values.shape)[at]
    predicted = predictive(filling.transform, unit * found.means, unit * found.deviations * stretch)
    errors = filling.values[at] - predicted.median
    return Evaluation(errors, predicted.std, found.distances, found.fold, tuple(notes), predicted)
