"""The result of a filling, and further predictions from it."""

from dataclasses import dataclass
from typing import Any

from gpytorch_gaps.filling.results.cells import check_level, expectations, of_dataset, quantiles
from gpytorch_gaps.filling.results.evaluate import evaluate
from gpytorch_gaps.filling.results.fitted import Fitted
from gpytorch_gaps.filling.results.forecast import forecast
from gpytorch_gaps.filling.results.points import Estimate, of_variables, predict_at
from gpytorch_gaps.utils.html import table


@dataclass(frozen=True, eq=False)
class Filled:
    """The result of ``fill_gaps``.

    For a Dataset, `mean`, `std` and `gaps` are Datasets, and `model` and `report` are dictionaries by variable.

    >>> import numpy as np, gpytorch_gaps as gaps
    >>> result = gaps.fill_gaps(np.array([2.0, np.nan, 2.0]), progress=False)
    >>> result.mean
    array([2., 2., 2.])
    >>> result.gaps
    array([False,  True, False])
    """

    mean: Any
    """The input with its gaps filled, in the same form. Observed values are unchanged unless `smooth` was set.

    The value of a gap is the mean of a measurement there or, for transformed values, its median."""
    std: Any
    """Standard deviation of the mean's error, in the same form as the input.

    In a gap, it is that of a measurement, including noise. At observed values it is 0, and at gaps that are not filled
    it is NaN. With `smooth`, it is that of the field without noise, at observed values too. It is widened if there are
    fewer than 30 observations, and multiplied by ``report.calibrated_by`` if withheld observations show that it is
    wrong. It is NaN in gaps if there is only one observation, or if all are equal. None with ``std=False``, and if
    values were streamed and draws do not fit in memory.
    """
    gaps: Any
    """Flags of the gaps that are filled, in the same form as the input. Other gaps are not flagged: they are gaps in
    `mean` too."""
    model: Any
    """The trained :class:`FillModel`, an ``ExactGP`` in the units of the data: ``model.likelihood(model(x))`` predicts
    at any point. Its variances are not multiplied by ``report.calibrated_by``. None if there was nothing to learn or if
    values were streamed."""
    report: Any
    """A :class:`FillReport`: how gaps were filled, and the expected error."""
    distrusted: Any = None
    """Flags of wild values, which were not used, in the same form as the input. They are unchanged in `mean`, and NaN
    in `std`. None for a result without a model."""
    _fitted: Any = None  # a `Fitted`, or a dictionary of them by variable, for the methods below

    def quantile(self, level: float) -> Any:
        """The input with quantiles in its gaps: a measurement is below its quantile with probability `level`.

        Observed values are unchanged, and gaps that are not filled remain gaps. If `smooth` was set, quantiles are
        those of the field without noise, at observed values too.

        :param level: the probability, between 0 and 1.
        :return: an array in the form of the input; for a Dataset, a Dataset.
        :raises ValueError: if there are no standard deviations, if values were streamed, if there was nothing to learn,
            or if `level` is not between 0 and 1.

        >>> import numpy as np, gpytorch_gaps as gaps
        >>> values = np.exp(np.sin(np.arange(30.0) / 4))
        >>> values[10:14] = np.nan
        >>> result = gaps.fill_gaps(values, transform="log", steps=5, check=False, progress=False)
        >>> low, high = result.quantile(0.025), result.quantile(0.975)
        >>> bool((0 < low).all() and (low <= result.mean).all() and (result.mean <= high).all())
        True
        """
        level = check_level(level)
        found = {name: quantiles(one, level) for name, one in self._models("quantile").items()}
        return of_dataset(found) if isinstance(self._fitted, dict) else found[None]

    def expectation(self) -> Any:
        """The input with means in its gaps. It differs from `mean` if values were transformed: `mean` has medians then.

        Use it for sums and averages over cells. The mean of a skewed distribution, such as that of rain, is larger than
        the median.

        :return: an array in the form of the input; for a Dataset, a Dataset.
        :raises ValueError: as in :meth:`quantile`.

        >>> import numpy as np, gpytorch_gaps as gaps
        >>> values = np.exp(np.sin(np.arange(30.0) / 4))
        >>> values[10:14] = np.nan
        >>> result = gaps.fill_gaps(values, transform="log", steps=5, check=False, progress=False)
        >>> bool((result.expectation() >= result.mean).all())
        True
        """
        found = {name: expectations(one) for name, one in self._models("expectation").items()}
        return of_dataset(found) if isinstance(self._fitted, dict) else found[None]

    def at(self, points: Any, *, noise: bool = True) -> Estimate:
        """Mean and standard deviation of measurements at any points, between the cells and outside the grid.

        At the coordinates of an observation, this is the prediction of another measurement there. If values were
        transformed, the mean is the median; quantiles are ``result.at(points).quantile(0.975)``.

        :param points: a mapping or DataFrame with the coordinates along each axis, by its name or number. All axes have
            the same number of coordinates, or a single one. Coordinates have the form of those of the axis: dates,
            degrees, labels. An array of numbers (Q, d) has one column per axis. For a single axis, an array of its
            coordinates is enough.
        :param noise: whether standard deviations include the noise of a measurement. Otherwise they are those of the
            field.
        :return: an :class:`Estimate` with arrays (Q,) in the units of the data: tensors if the input was one, Series if
            points are a DataFrame. For a Dataset, both are dictionaries by variable.
        :raises ValueError: if values were streamed, if there was nothing to learn, or if points do not fit the axes.

        >>> import numpy as np, gpytorch_gaps as gaps
        >>> values = np.sin(np.arange(30.0) / 4)
        >>> values[10:14] = np.nan
        >>> result = gaps.fill_gaps(values, steps=5, check=False, progress=False)
        >>> mean, std = result.at([11.5, 12.5])
        >>> mean.shape, bool((std > 0).all())
        ((2,), True)
        """
        found = {name: predict_at(one, points, noise) for name, one in self._models("at").items()}
        return of_variables(found) if isinstance(self._fitted, dict) else found[None]

    def forecast(self, steps: int, axis: Any = None, *, noise: bool = True) -> Estimate:
        """Mean and standard deviation of the next measurements along an axis.

        :param steps: number of coordinates to add at the end of the axis. The axis must be regular: numbers with a
            constant step, times with a constant step or a frequency, such as months, or no coordinates.
        :param axis: the name or number of the axis. Default: the only axis of times, or the only one that can be
            continued.
        :param noise: whether standard deviations include the noise of a measurement.
        :return: an :class:`Estimate` of arrays in the form of the input, with the new coordinates along this axis.
        :raises ValueError: if values were streamed, if there was nothing to learn, or if the axis is not regular.

        >>> import numpy as np, gpytorch_gaps as gaps
        >>> result = gaps.fill_gaps(np.sin(np.arange(30.0)), smooth=True, steps=5, check=False, progress=False)
        >>> result.forecast(3).mean.shape
        (3,)
        """
        found = {name: forecast(one, steps, axis, noise) for name, one in self._models("forecast").items()}
        return of_variables(found) if isinstance(self._fitted, dict) else found[None]

    def evaluate(self, folds: int = 5, *, seed: int = 0, progress: bool = True) -> Any:
        """Scores of predictions of withheld observations, fold by fold.

        In each fold, some observations are withheld and predicted from the others. They are as far from the others as
        the gaps are from all observations. No observation is scored twice. The hyperparameters are not learned again;
        they come from all observations except those of the held-out check. Therefore this is a test of predictions with
        these hyperparameters, and not of learning. If the array has more than 200,000 cells, a fold uses a part of it.

        :param folds: number of folds. Each takes as long as the held-out check of ``fill_gaps``.
        :param seed: seed of the choice of withheld observations.
        :param progress: whether to show a progress bar after some seconds.
        :return: an :class:`Evaluation`; for a Dataset, a dictionary of them by variable.
        :raises ValueError: if values were streamed, if there was nothing to learn, or if there are fewer than 30
            observations.

        >>> import numpy as np, gpytorch_gaps as gaps
        >>> values = np.sin(np.arange(80.0) / 5)
        >>> values[30:34] = np.nan
        >>> result = gaps.fill_gaps(values, steps=5, check=False, progress=False)
        >>> evaluation = result.evaluate(folds=2, progress=False)
        >>> len(evaluation.folds), evaluation.score.rmse < 0.1
        (2, True)
        """
        found = evaluate(self._models("evaluate"), folds, seed, progress)
        return found if isinstance(self._fitted, dict) else found[None]

    def _models(self, method: str) -> dict[Any, Fitted]:
        """The fitted model of each variable; with the key None if there is only one."""
        fitted = self._fitted if isinstance(self._fitted, dict) else {None: self._fitted}
        known = {name: one for name, one in fitted.items() if one is not None}
        if len(known) < len(fitted):
            raise ValueError(
                f"{method}: got a result without a model in memory, expected one. Try: fill a smaller part of an array "
                "that was streamed, or pass smooth=True if there are no gaps; equal observations have no model"
            )
        return known

    def __repr__(self) -> str:
        return f"<Filled {self.report}>"

    def _repr_html_(self) -> str:
        reports = self.report if isinstance(self.report, dict) else {"": self.report}
        kind = f"{type(self.mean).__module__.partition('.')[0]}.{type(self.mean).__name__}"
        std = "no std" if self.std is None else "std"
        parts = [table([("Filled", f"mean, {std} and gaps: {kind}")])]
        parts += [one.table(name) for name, one in reports.items()]
        return "".join(parts)
