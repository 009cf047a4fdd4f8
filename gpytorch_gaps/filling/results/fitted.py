"""The part of a filling that its result keeps: it predicts outside the cells of the array, and evaluates the model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gpytorch_gaps.filling.arrays.adapters import ArrayAdapter
from gpytorch_gaps.filling.axes.axis import Axis
from gpytorch_gaps.filling.checking.calibration import Check
from gpytorch_gaps.filling.learning.choose import ChosenModel
from gpytorch_gaps.filling.learning.model import FillModel
from gpytorch_gaps.filling.learning.predict import Prediction, seeded, widening
from gpytorch_gaps.filling.process.in_memory import InMemoryFilling
from gpytorch_gaps.filling.process.joint import JointFilling
from gpytorch_gaps.filling.transforms.predictive import Normal, Transformed, predictive


@dataclass(frozen=True, eq=False)
class Fitted:
    """A filling in memory, its chosen model, its held-out check, and the model conditioned on all data.

    :param variable: the number of the variable, if several were filled together.
    """

    filling: InMemoryFilling
    chosen: ChosenModel
    check: Check | None
    model: FillModel
    variable: int | None = None

    @property
    def adapter(self) -> ArrayAdapter:
        """The adapter of the array, or of the variable."""
        if self.variable is None:
            return self.filling.adapter
        assert isinstance(self.filling, JointFilling)
        return list(self.filling.adapter.by_name.values())[self.variable]

    @property
    def axes(self) -> Sequence[Axis]:
        axes = self.filling.source.axes
        return axes if self.variable is None else axes[1:]

    def on_grid(self, points: Sequence[np.ndarray], noise: bool) -> Normal | Transformed:
        """Predictions on a grid, in the units of the data and with the shape of the grid.

        :param points: (m_i, d_i), the points along each axis.
        :param noise: whether standard deviations are those of measurements, including noise.
        """
        shape = tuple(map(len, points))
        cells = np.indices(shape).reshape(len(shape), -1)
        found = self.at([own[at] for own, at in zip(points, cells, strict=True)], noise)
        return found.at(np.arange(math.prod(shape)).reshape(shape))

    def at(self, points: Sequence[np.ndarray], noise: bool) -> Normal | Transformed:
        """Predictions at scattered points, in the units of the data. shape: (Q,)

        :param points: (Q, d_i), the coordinates along each axis.
        :param noise: as in :meth:`on_grid`.
        """
        if self.variable is not None:
            points = [np.full((len(points[0]), 1), float(self.variable)), *points]
        x = torch.from_numpy(np.concatenate(points, axis=1)).to(self.model.train_targets.device)
        options = self.filling.options
        with seeded(options.seed):  # for variances from samples
            prediction = Prediction(self.model, x, options)
            variance = prediction.variance().clamp_min(0.0)
        measured = variance + self._noise(x).to(variance.device)
        codes = np.stack([own[:, 0].round().astype(int) for own in points], axis=1)  # only those of labels are used
        unit = _at_labels(self.filling.scales, codes)
        wider = widening(int(self.filling.observed.sum()))
        factor = self.calibration_of(measured.sqrt().cpu().numpy(), codes)
        std = (measured if noise else variance).sqrt().cpu().numpy() * factor * wider
        return predictive(self.filling.transform, prediction.mean.cpu().numpy() * unit, std * unit)

    def _noise(self, x: torch.Tensor) -> torch.Tensor:
        """Variances of measurement errors: the learned noise plus the mean of known variances."""
        known = self.filling.known_noise
        return self.chosen.noise_at(x) + (0.0 if known is None else float(np.mean(known[self.filling.observed])))

    def calibration_of(self, std: np.ndarray, positions: np.ndarray) -> np.ndarray | float:
        """The factors by which the held-out check calibrates standard deviations of measurements.

        :param std: (Q,), in the units of the model, noise included.
        :param positions: (Q, d), those on the grid, of which labels are used.
        """
        return 1.0 if self.check is None else self.filling.calibration(self.check, std, positions[:, 0])


def _at_labels(factors: np.ndarray | float | None, positions: np.ndarray) -> np.ndarray | float:
    """Factors at some positions, from an array of size one along all axes except those of labels; 1 for None.

    Positions along other axes are not used.
    """
    if not isinstance(factors, np.ndarray):
        return 1.0 if factors is None else factors
    return factors[tuple(positions.T % np.array(factors.shape)[:, None])]
