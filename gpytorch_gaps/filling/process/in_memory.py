"""Filling with an exact model of the whole grid in memory: mean and standard deviations."""

import math
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from gpytorch_gaps.filling.arrays.adapters import ArrayAdapter
from gpytorch_gaps.filling.arrays.covariates import read_covariates
from gpytorch_gaps.filling.arrays.grid_values import GridValues, Positions, coordinates
from gpytorch_gaps.filling.arrays.known_noise import known_variances
from gpytorch_gaps.filling.arrays.options import Options
from gpytorch_gaps.filling.arrays.outliers import about_wild, beyond_proportion
from gpytorch_gaps.filling.arrays.targets import Targets
from gpytorch_gaps.filling.axes.axis import Axis
from gpytorch_gaps.filling.checking.calibration import Check, check_withheld, sample_gaps
from gpytorch_gaps.filling.checking.factors import factors
from gpytorch_gaps.filling.checking.holdout import Withheld
from gpytorch_gaps.filling.checking.transformed import in_data_units
from gpytorch_gaps.filling.learning.budget import MOST_DRAWS
from gpytorch_gaps.filling.learning.candidates import goes_by_fft
from gpytorch_gaps.filling.learning.choose import ChosenModel, choose_model, refitted
from gpytorch_gaps.filling.learning.estimates import label_scales
from gpytorch_gaps.filling.learning.model import FillModel
from gpytorch_gaps.filling.learning.predict import Prediction, ignore_sparse_warning, prediction_settings, widening
from gpytorch_gaps.filling.process.pipeline import Filling, Results
from gpytorch_gaps.filling.transforms.fit import UNTRANSFORMED, FittedTransform
from gpytorch_gaps.filling.transforms.predictive import Normal, Transformed, predictive
from gpytorch_gaps.posterior.scoring import leave_out

_SCALED_NOTE = (
    "labels differ in scale: each was divided by its standard deviation; the held-out error, the noise and the model "
    "are in these units"
)
_SCALED_TRANSFORMED_NOTE = "labels differ in scale: transformed values of each were divided by their standard deviation"
_TRANSFORMED_NOTE = "the model, its hyperparameters and the noise are of transformed values"


class InMemoryFilling(Filling):
    """Fills an array with a model of all of its cells.

    :param numbers: the values of the array, NaN at gaps.
    :param targets: the gaps that are filled.
    :param distrusted: flags of wild values. They are neither used nor filled.
    :param fitted: the transform of the values.
    """

    def __init__(
        self,
        adapter: ArrayAdapter,
        numbers: np.ndarray,
        targets: Targets,
        options: Options,
        distrusted: np.ndarray | None = None,
        fitted: FittedTransform = UNTRANSFORMED,
    ) -> None:
        self.unknown = np.isnan(numbers)
        self.gaps = self.unknown & targets.rows(0, len(numbers))
        self.distrusted = np.zeros_like(self.unknown) if distrusted is None else distrusted
        self.values, self.fitted, self.transform = np.where(self.distrusted, np.nan, numbers), fitted, fitted.transform
        latent, noise = self._transformed(self.values)
        if options.noise is not None:
            noise = known_variances(adapter, options.noise, self.values)
        self.scales = label_scales(latent, adapter.axes, always=adapter.units_differ)
        self.numbers = latent if self.scales is None else latent / self.scales
        if noise is not None and self.scales is not None:
            noise = noise / self.scales**2
        may_fill = None if targets.are_all and not self.distrusted.any() else self._may_fill
        covariates = None
        if options.mean is not None:
            needed = self.gaps | ~self.unknown
            covariates = read_covariates(adapter, options.mean, self.observed, needed, self.scales)
        source = GridValues.in_memory(self.numbers, adapter.axes, may_fill, noise, covariates)
        if self.transform is not None:  # the same order for all transforms, so that they withhold the same cells
            source = replace(source, content=self.values)
        super().__init__(adapter, source, targets, options)
        self._solved: tuple[FillModel, Prediction] | None = None
        self._affordable: tuple[bool, int] | None = None
        self.predicted: tuple[np.ndarray, np.ndarray | None] | None = None
        """Means and standard deviations of all predicted cells, before the inverse transform."""

    def latent(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Further values in the units of the model, and the variances of their errors."""
        found, variance = self._transformed(values)
        variance = np.zeros(values.shape) if variance is None else variance
        return (found, variance) if self.scales is None else (found / self.scales, variance / self.scales**2)

    def _transformed(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Transformed values, and the variances of their errors, if there are any."""
        if self.transform is None:
            return values, None
        found, variance = self.transform.latent(values)
        return found, variance if variance.any() else None

    @property
    def observed(self) -> np.ndarray:
        """Flags of the observations that are used."""
        return ~(self.unknown | self.distrusted)

    def _may_fill(self, positions: Positions) -> np.ndarray:
        """Flags of the cells at a product of positions that may be filled."""
        return self.targets.read(positions) & ~self.distrusted[np.ix_(*positions)]

    def _has_matrix(self, axis: Axis) -> bool:
        return not goes_by_fft(axis, len(self.source.axes))

    def condition(self, chosen: ChosenModel) -> FillModel:
        """The chosen model, conditioned on all observations."""
        return chosen.conditioned(self.source.whole(), self.adapter.device)

    def _choose(self, seen: GridValues) -> ChosenModel:
        with warnings.catch_warnings():
            ignore_sparse_warning()
            variables = 0 if self.adapter.units_differ else None
            return choose_model(
                seen, seen.whole(), self.options, self.generator, budget=self.budget, variables=variables
            )

    def _check(self, chosen: ChosenModel, withheld: Withheld) -> Check:
        others = self.source.without(self.part, withheld.hidden)
        refit = refitted(chosen, others, self.options.trend, self.generator)
        model, part = refit.conditioned(self.part.without(withheld.hidden), self.adapter.device), self.part
        if self.transform is not None:
            check = check_withheld(model, replace(part, noise=None), withheld, self.options, chosen.noise_at)
            predicted = self.predictive_of(check)
            assert isinstance(predicted, Transformed)
            return in_data_units(check, predicted, self.withheld_values)
        some_gaps = None if self.options.std else sample_gaps(part.targets, self.generator, part.orientation)
        return check_withheld(model, part, withheld, self.options, chosen.noise_at, some_gaps)

    def predictive_of(self, check: Check, factor: np.ndarray | float = 1.0) -> Normal | Transformed:
        """The predictions of the withheld observations, in the units of the data.

        :param factor: factor on standard deviations.
        """
        assert self.withheld is not None
        assert check.predicted is not None
        mean, std = check.predicted.mean.numpy(), check.predicted.variance.sqrt().numpy() * factor
        unit = self._withheld_entries(np.ones(1) if self.scales is None else self.scales)
        return predictive(self.transform, unit * mean, unit * std)

    @property
    def withheld_values(self) -> np.ndarray:
        """The withheld observations, in the units of the data."""
        return self._withheld_entries(self.values)

    def _withheld_entries(self, array: np.ndarray) -> np.ndarray:
        """The entries of an array of the whole grid, or one that broadcasts to it, at the withheld observations."""
        assert self.withheld is not None
        return np.broadcast_to(array, self.numbers.shape)[np.ix_(*self.part.positions)][self.withheld.scored]

    @property
    def are_predicted(self) -> np.ndarray:
        """Flags of the cells that are predicted."""
        return self.gaps | ~self.unknown if self.options.smooth else self.gaps

    def _solve(self, chosen: ChosenModel) -> tuple[FillModel, Prediction]:
        """The model of all observations, and its predictions. The solve for their mean is done once."""
        if self._solved is None:
            model = self.condition(chosen)
            x = coordinates(self.source.axes, np.argwhere(self.are_predicted)).to(self.adapter.device)
            with self.stopwatch("mean"):
                self._solved = model, Prediction(model, x, self.options)
        return self._solved

    def _affords_check(self, chosen: ChosenModel) -> bool:
        return self._afford(chosen)[0]

    def _afford(self, chosen: ChosenModel) -> tuple[bool, int]:
        """Whether the budget allows a check, and the number of draws for error bars. Solves for the mean first."""
        if not self.budget.is_limited:
            return True, MOST_DRAWS
        if self._affordable is None:
            _, prediction = self._solve(chosen)
            flops = 0.0 if prediction.solve is None else prediction.solve.flops
            wanted = self.withheld is not None, self.options.std
            self._affordable = self.budget.predictions(flops, prediction.is_factorized, *wanted)
        return self._affordable

    def predict(self, chosen: ChosenModel, check: Check | None) -> Results:
        options, gaps, where = self.options, self.gaps, self.are_predicted
        (model, prediction), (_, draws) = self._solve(chosen), self._afford(chosen)
        self._solved = None  # it holds more than the result needs
        mean, std, std_method = self.numbers.copy(), None, ""
        mean[where] = prediction.mean.cpu().numpy()
        if options.std and draws:
            with self.stopwatch("standard deviations"):
                noise = 0.0 if options.smooth else torch.as_tensor(self._noise(chosen, where))
                variance = prediction.variance(draws).cpu() + noise
            std = np.where(self.observed, 0.0, np.nan)
            std[where] = variance.clamp_min(0.0).sqrt().numpy() * widening(int(self.observed.sum()))
            std_method = prediction.how_variances
        report = self._reports(chosen, check, mean, std, solve=prediction.solve, std_method=std_method)
        if std is not None and check is not None:
            measured = np.sqrt(std[where] ** 2 + (self._noise(chosen, where) if options.smooth else 0.0))
            std[where] *= self.calibration(check, measured, np.nonzero(where)[0])
        if self.scales is not None:
            mean, std = mean * self.scales, None if std is None else std * self.scales
        self.predicted = mean, std
        if self.transform is not None:
            mean, std = self._back(mean, std)
        return Results(
            self.adapter.wrap_filled(mean, gaps, options.smooth),
            None if std is None else self.adapter.wrap_like_input(std),
            self.adapter.wrap_like_input(gaps),
            model,
            report,
            self.adapter.wrap_like_input(self.distrusted),
        )

    def _back(self, mean: np.ndarray, std: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
        """Medians and standard deviations in the units of the data. Observations are unchanged."""
        where, medians = self.are_predicted, self.values.copy()
        found = predictive(self.transform, mean[where], np.zeros(1) if std is None else std[where])
        medians[where] = found.median
        if std is not None:
            std = std.copy()
            std[where] = found.std
        return medians, std

    def implausible(self, chosen: ChosenModel) -> np.ndarray:
        """Flags of the observations that the model does not explain, given all others."""
        model, flags = self.condition(chosen), np.zeros_like(self.distrusted)
        with self.stopwatch("search for outliers"), prediction_settings(self.options):
            predicted = leave_out(model, progress=self.options.progress)
        off = (model.train_targets - predicted.mean) / predicted.variance.sqrt()
        flags[self.observed] = beyond_proportion(off.cpu().numpy())
        return flags

    def _reports(
        self, chosen: ChosenModel, check: Check | None, mean: np.ndarray, std: np.ndarray | None, **about: Any
    ) -> Any:
        """The report, or those of several variables.

        :param mean: predictions, in the units of the model.
        :param std: their standard deviations.
        """
        unknown, gaps = self.unknown, self.gaps
        gap_variance = None if check is None else check.gap_variance
        if std is not None and gaps.any():
            square = self._mean_square(std, gaps, chosen)
            gap_variance = square if self.transform is None else self._transformed_square(mean, std, gaps, chosen)
        noise_std, notes = self._about_noise(chosen, self.observed)
        notes += [*about_wild(self.adapter, self.distrusted), *self._notes(int(self.observed.sum()))]
        if self.transform is not None:
            notes.append(_TRANSFORMED_NOTE)
            about["transform"] = f"{self.transform.words}{f' ({self.fitted.why})' if self.fitted.why else ''}"
        elif self.fitted.why:
            about["transform"] = f"none ({self.fitted.why})"
        if self.scales is not None:
            notes.append(_SCALED_NOTE if self.transform is None else _SCALED_TRANSFORMED_NOTE)
        about |= {"noise_std": noise_std, "num_distrusted": int(self.distrusted.sum())}
        num_gaps, num_left = int(gaps.sum()), int((unknown & ~gaps).sum())
        return self._report(chosen, check, gap_variance, notes, num_gaps, num_left, **about)

    def calibration(self, check: Check, std: np.ndarray, first: np.ndarray) -> np.ndarray | float:
        """Factors on standard deviations `std` of measurements, (Q,), at these positions along the first axis."""
        return factors(check, std) if self.transform is None else check.calibration

    def _noise(self, chosen: ChosenModel, cells: np.ndarray) -> np.ndarray:
        """Variances of measurement errors in the flagged cells of the grid."""
        known = self.known_noise
        learned = chosen.noise_at(coordinates(self.source.axes, np.argwhere(cells))).numpy()
        return learned if known is None else learned + known[cells]

    def _mean_square(self, std: np.ndarray, cells: np.ndarray, chosen: ChosenModel) -> float:
        """Mean square error of measurements, from the given standard deviations of the field."""
        return float(np.mean(std[cells] ** 2)) + (self._noise(chosen, cells).mean() if self.options.smooth else 0.0)

    def _transformed_square(self, mean: np.ndarray, std: np.ndarray, cells: np.ndarray, chosen: ChosenModel) -> float:
        """Mean square error of the medians of measurements, in the units of the data."""
        variance = std[cells] ** 2 + (self._noise(chosen, cells) if self.options.smooth else 0.0)
        unit = 1.0 if self.scales is None else np.broadcast_to(self.scales, cells.shape)[cells]
        assert self.transform is not None
        return float(np.mean(Transformed(self.transform, unit * mean[cells], unit * np.sqrt(variance)).mean_square))

    @property
    def known_noise(self) -> np.ndarray | None:
        """Known variances of measurement errors. Variances of censored values are not measurement errors."""
        return self.source.noise if self.transform is None else None

    def _about_noise(self, chosen: ChosenModel, cells: np.ndarray, unit: float = 1.0) -> tuple[float, list[str]]:
        """The root mean square of the noise of measurements in the flagged cells, and notes on it."""
        typical = unit * math.sqrt(float(np.mean(self._noise(chosen, cells))))
        if self.known_noise is None:
            return typical, []
        known = unit * math.sqrt(float(np.mean(self.known_noise[cells])))
        learned = unit * math.sqrt(float(np.mean(self._noise(chosen, cells) - self.known_noise[cells])))
        given = f"errors of measurements are as given, {known:.3g} in root mean square"
        return typical, [f"{given}; more noise was learned, {learned:.3g}"]

    def _notes(self, num_observed: int) -> list[str]:
        wider = widening(num_observed)
        note = f"only {num_observed} observations, so hyperparameters are uncertain: std was multiplied by {wider:.2g}"
        return [note] if wider != 1.0 and self.options.std else []
