"""Filling with an exact model of the whole grid in memory: mean and standard deviations."""

import math
import warnings
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
from gpytorch_gaps.filling.checking.holdout import Withheld
from gpytorch_gaps.filling.learning.budget import MOST_DRAWS
from gpytorch_gaps.filling.learning.candidates import goes_by_fft
from gpytorch_gaps.filling.learning.choose import ChosenModel, choose_model, refitted
from gpytorch_gaps.filling.learning.estimates import label_scales
from gpytorch_gaps.filling.learning.model import FillModel
from gpytorch_gaps.filling.learning.predict import Prediction, ignore_sparse_warning, prediction_settings, widening
from gpytorch_gaps.filling.process.pipeline import Filling, Results
from gpytorch_gaps.posterior.scoring import leave_out

_SCALED_NOTE = (
    "labels differ in scale: each was divided by its standard deviation; the held-out error, the noise and the model "
    "are in these units"
)


class InMemoryFilling(Filling):
    """Fills an array with a model of all of its cells.

    :param numbers: the values of the array, NaN at gaps.
    :param targets: which of the gaps are filled.
    :param distrusted: flags of observations that are not believed. They are neither used nor filled.
    """

    def __init__(
        self,
        adapter: ArrayAdapter,
        numbers: np.ndarray,
        targets: Targets,
        options: Options,
        distrusted: np.ndarray | None = None,
    ) -> None:
        self.unknown = np.isnan(numbers)
        self.gaps = self.unknown & targets.rows(0, len(numbers))
        self.distrusted = np.zeros_like(self.unknown) if distrusted is None else distrusted
        numbers = np.where(self.distrusted, np.nan, numbers)
        self.scales = label_scales(numbers, adapter.axes, always=adapter.units_differ)
        self.numbers = numbers if self.scales is None else numbers / self.scales
        noise = None if options.noise is None else known_variances(adapter, options.noise, numbers)
        if noise is not None and self.scales is not None:
            noise = noise / self.scales**2
        may_fill = None if targets.are_all and not self.distrusted.any() else self._may_fill
        covariates = None
        if options.mean is not None:
            needed = self.gaps | ~self.unknown
            covariates = read_covariates(adapter, options.mean, self.observed, needed, self.scales)
        source = GridValues.in_memory(self.numbers, adapter.axes, may_fill, noise, covariates)
        super().__init__(adapter, source, targets, options)
        self._solved: tuple[FillModel, Prediction] | None = None
        self._affordable: tuple[bool, int] | None = None

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
        """The chosen model with all observations."""
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
        some_gaps = None if self.options.std else sample_gaps(self.part.targets, self.generator, self.part.orientation)
        model = refit.conditioned(self.part.without(withheld.hidden), self.adapter.device)
        return check_withheld(model, self.part, withheld, self.options, chosen.noise_at, some_gaps)

    @property
    def _predicted(self) -> np.ndarray:
        """Flags of the cells that are predicted."""
        return self.gaps | ~self.unknown if self.options.smooth else self.gaps

    def _solve(self, chosen: ChosenModel) -> tuple[FillModel, Prediction]:
        """The model of all observations, and its predictions, whose mean is solved for once."""
        if self._solved is None:
            model = self.condition(chosen)
            x = coordinates(self.source.axes, np.argwhere(self._predicted)).to(self.adapter.device)
            with self.stopwatch("mean"):
                self._solved = model, Prediction(model, x, self.options)
        return self._solved

    def _affords_check(self, chosen: ChosenModel) -> bool:
        return self._afford(chosen)[0]

    def _afford(self, chosen: ChosenModel) -> tuple[bool, int]:
        """Whether the budget allows a check, and how many draws for error bars. The mean is solved for first."""
        if not self.budget.is_limited:
            return True, MOST_DRAWS
        if self._affordable is None:
            _, prediction = self._solve(chosen)
            flops = 0.0 if prediction.solve is None else prediction.solve.flops
            wanted = self.withheld is not None, self.options.std
            self._affordable = self.budget.predictions(flops, prediction.is_factorized, *wanted)
        return self._affordable

    def predict(self, chosen: ChosenModel, check: Check | None) -> Results:
        options, gaps, where = self.options, self.gaps, self._predicted
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
            std_method = f"from {prediction.num_samples} samples" if prediction.num_samples else "exact"
        report = self._reports(chosen, check, std, solve=prediction.solve, std_method=std_method)
        if std is not None and check is not None:
            std *= self.calibration(check)
        if self.scales is not None:
            mean, std = mean * self.scales, None if std is None else std * self.scales
        return Results(
            self.adapter.wrap_filled(mean, gaps, options.smooth),
            None if std is None else self.adapter.wrap_like_input(std),
            self.adapter.wrap_like_input(gaps),
            model,
            report,
            self.adapter.wrap_like_input(self.distrusted),
        )

    def implausible(self, chosen: ChosenModel) -> np.ndarray:
        """Flags of the observations that the model does not explain, given all others."""
        model, flags = self.condition(chosen), np.zeros_like(self.distrusted)
        with self.stopwatch("search for outliers"), prediction_settings(self.options):
            predicted = leave_out(model, progress=self.options.progress)
        off = (model.train_targets - predicted.mean) / predicted.variance.sqrt()
        flags[self.observed] = beyond_proportion(off.cpu().numpy())
        return flags

    def _reports(self, chosen: ChosenModel, check: Check | None, std: np.ndarray | None, **about: Any) -> Any:
        """The report, or those of several variables.

        :param std: standard deviations, in the units of the model.
        """
        unknown, gaps = self.unknown, self.gaps
        gap_variance = None if check is None else check.gap_variance
        if std is not None and gaps.any():
            gap_variance = self._mean_square(std, gaps, chosen)
        noise_std, notes = self._about_noise(chosen, self.observed)
        notes += [*about_wild(self.adapter, self.distrusted), *self._notes(int(self.observed.sum()))]
        if self.scales is not None:
            notes.append(_SCALED_NOTE)
        about |= {"noise_std": noise_std, "num_distrusted": int(self.distrusted.sum())}
        num_gaps, num_left = int(gaps.sum()), int((unknown & ~gaps).sum())
        return self._report(chosen, check, gap_variance, notes, num_gaps, num_left, **about)

    def calibration(self, check: Check) -> Any:
        """The factor by which standard deviations are multiplied, or an array of those of several variables."""
        return check.calibration

    def _noise(self, chosen: ChosenModel, cells: np.ndarray) -> np.ndarray:
        """Variances of the errors of measurements in these cells, flags of the grid."""
        known = self.source.noise
        learned = chosen.noise_at(coordinates(self.source.axes, np.argwhere(cells))).numpy()
        return learned if known is None else learned + known[cells]

    def _mean_square(self, std: np.ndarray, cells: np.ndarray, chosen: ChosenModel) -> float:
        """Mean square of the errors of measurements that these standard deviations stand for."""
        return float(np.mean(std[cells] ** 2)) + (self._noise(chosen, cells).mean() if self.options.smooth else 0.0)

    def _about_noise(self, chosen: ChosenModel, cells: np.ndarray, unit: float = 1.0) -> tuple[float, list[str]]:
        """The root mean square of the noise of measurements in these cells, and what is known of it."""
        typical = unit * math.sqrt(float(np.mean(self._noise(chosen, cells))))
        if self.source.noise is None:
            return typical, []
        known = unit * math.sqrt(float(np.mean(self.source.noise[cells])))
        learned = unit * math.sqrt(float(np.mean(self._noise(chosen, cells) - self.source.noise[cells])))
        given = f"errors of measurements are as given, {known:.3g} in root mean square"
        return typical, [f"{given}; more noise was learned, {learned:.3g}"]

    def _notes(self, num_observed: int) -> list[str]:
        wider = widening(num_observed)
        if wider == 1.0 or not self.options.std:
            return []
        return [
            f"only {num_observed} observations, so hyperparameters are uncertain: std was multiplied by {wider:.2g}"
        ]
