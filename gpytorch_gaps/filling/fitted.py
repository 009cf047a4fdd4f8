"""What a result keeps of its filling: enough to predict beyond the cells of the array, and to evaluate the model."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gpytorch_gaps.filling.adapters import ArrayAdapter
from gpytorch_gaps.filling.axes import Axis
from gpytorch_gaps.filling.calibration import Check
from gpytorch_gaps.filling.choose import ChosenModel
from gpytorch_gaps.filling.in_memory import InMemoryFilling
from gpytorch_gaps.filling.joint import JointFilling
from gpytorch_gaps.filling.model import FillModel
from gpytorch_gaps.filling.predict import Prediction, widening


@dataclass(frozen=True, eq=False)
class Fitted:
    """A filling in memory, the model that it chose, what the held-out check said, and the model given all data.

    :param variable: the number of the variable that is meant, if several were filled together.
    """

    filling: InMemoryFilling
    chosen: ChosenModel
    check: Check | None
    model: FillModel
    variable: int | None = None

    @property
    def adapter(self) -> ArrayAdapter:
        """The array, or that of the variable."""
        if self.variable is None:
            return self.filling.adapter
        assert isinstance(self.filling, JointFilling)
        return list(self.filling.adapter.by_name.values())[self.variable]

    @property
    def axes(self) -> Sequence[Axis]:
        axes = self.filling.source.axes
        return axes if self.variable is None else axes[1:]

    def on_grid(self, points: Sequence[np.ndarray], noise: bool) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation on a grid, in the units of the data.

        :param points: (m_i, d_i), the points along each axis.
        :param noise: whether standard deviations are those of measurements, noise included.
        """
        shape = tuple(map(len, points))
        cells = np.indices(shape).reshape(len(shape), -1)
        mean, std = self.at([own[at] for own, at in zip(points, cells, strict=True)], noise)
        return mean.reshape(shape), std.reshape(shape)

    def at(self, points: Sequence[np.ndarray], noise: bool) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation at scattered points, in the units of the data. shape: (Q,)

        :param points: (Q, d_i), the coordinates along each axis.
        :param noise: as in :meth:`on_grid`.
        """
        if self.variable is not None:
            points = [np.full((len(points[0]), 1), float(self.variable)), *points]
        x = torch.from_numpy(np.concatenate(points, axis=1)).to(self.model.train_targets.device)
        prediction = Prediction(self.model, x, self.filling.options)
        variance = prediction.variance().clamp_min(0.0) + (self.chosen.noise if noise else 0.0)
        unit = self._at_labels(self.filling.scales, points)
        std = variance.sqrt().cpu().numpy() * self._stretch(points)
        return prediction.mean.cpu().numpy() * unit, std * unit

    def _stretch(self, points: Sequence[np.ndarray]) -> np.ndarray | float:
        """The factor on standard deviations at some points, which is that of the gaps."""
        calibration = None if self.check is None else self.filling.calibration(self.check)
        return self._at_labels(calibration, points) * widening(int((~np.isnan(self.filling.numbers)).sum()))

    def _at_labels(self, factors: np.ndarray | float | None, points: Sequence[np.ndarray]) -> np.ndarray | float:
        """Factors at some points, from an array of size one along all axes but those of labels; 1 for None."""
        if factors is None or isinstance(factors, float):
            return 1.0 if factors is None else factors
        codes = [
            own[:, 0].round().astype(int) if size > 1 else np.zeros(len(own), int)
            for own, size in zip(points, factors.shape, strict=True)
        ]
        return factors[tuple(codes)]
