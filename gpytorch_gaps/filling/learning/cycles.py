"""Cycles along an axis: their detection, and lasting cycles as a part of the mean.

A cycle of period p along an axis of time is accepted if

    R2 = 1 - |y - a - b t - Σ_h (c_h cos + s_h sin)(2 pi h t / p)|^2 / |y - a - b t|^2,    h = 1, 2

is large enough over the series of all other cells, each with its own coefficients.

On most axes, a cycle is modelled by a periodic kernel. Along an axis of thousands of points, products use FFTs, and
only the neighbours preconditioner is available. If a cycle repeats hundreds of times, an observation is correlated with
all others at a distance of whole periods, and solves take very many iterations. In this case, the mean of the Gaussian
process includes the level and the harmonics of every series. They are estimated by least squares, with a penalty on
differences from the coefficients common to all series:

    min_w |y - X w|^2 + k |w - w_common|^2

The kernel then models only the changes of a cycle over several periods, if there are any.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gpytorch_gaps.filling.axes.axis import DAY, Axis
from gpytorch_gaps.utils.tensors import first_equal_row

_MIN_EXPLAINED_SHARE = 0.05  # smallest R2
_HARMONICS = 2
_MIN_PERIODS_SEEN = 1.5
_MIN_PERIODS_SUBTRACTED = 0.9  # a single year is enough, because all of its phases are observed
_MIN_PERIODS_OF_ONE = 50.0  # smallest number of periods of one of the cycles: with fewer, neighbours are enough
_MIN_PERIODS_OF_TABLES = 9.9  # ten years of months, minus one month
_MIN_POINTS_PER_PERIOD = 4
_MAX_SERIES = 300  # largest number of series that are searched for cycles
_MANY_PERIODS, _MANY_HARMONICS = 10.0, 4  # with so many periods, a cycle has so many harmonics
_PENALTY = 0.01  # k over the number of points of the axis
_MIN_DETERMINED = 0.1  # smallest eigenvalue of X'X / N; it is 0.5 for a wave that is observed in all phases

_MIN_STRETCHES = 4  # smallest number of sections of an axis for the detection of changes
_APART = 0.5  # smallest difference of two frequencies, in cycles over the whole axis

PERIODS_PER_STRETCH = 10
"""Length of a section, in periods: for the detection of a changing cycle, it is constant within a section."""


# -- which there are ---------------------------------------------------------------------------------------------------


def find_cycles(numbers: np.ndarray, axes: Sequence[Axis]) -> list[list[float]]:
    """The periods of the cycles in the data along each axis."""
    return [_explaining(numbers, i, axis, possible_periods(axis)) for i, axis in enumerate(axes)]


def find_lasting(numbers: np.ndarray, axis: int, described: Axis) -> list[float]:
    """The periods of the cycles along one axis that may be part of the mean, including the year of a single year."""
    return _explaining(numbers, axis, described, possible_periods(described, _MIN_PERIODS_SUBTRACTED))


def last_long(axis: Axis, periods: Sequence[float], table: bool = False) -> bool:
    """Whether one of the cycles repeats so often that it is part of the mean.

    :param table: whether all other axes are labels. A kernel has the same covariance of labels for cycles and weather.
    """
    least = _MIN_PERIODS_OF_TABLES if table else _MIN_PERIODS_OF_ONE
    return any(axis.extent >= least * period for period in periods)


def find_changing(left: np.ndarray, axis: int, described: Axis, periods: Sequence[float]) -> list[float]:
    """The cycles that remain in sections of the axis after lasting cycles have been subtracted.

    :param left: the values minus lasting cycles.
    :param periods: periods of the lasting cycles.
    """
    times, changing = described.points[:, 0], []
    for period in periods:
        points = math.ceil(PERIODS_PER_STRETCH * period / described.spacing)
        count = described.size // points
        if count >= _MIN_STRETCHES:
            series = np.moveaxis(left, axis, 0)[: count * points].reshape(count, points, -1)
            share = explained_share(series, 1, times[:points], period)
            changing += [period] if share > _MIN_EXPLAINED_SHARE else []
    return changing


def _explaining(numbers: np.ndarray, number: int, axis: Axis, periods: Sequence[float]) -> list[float]:
    times = axis.points[:, 0]
    return [own for own in periods if explained_share(numbers, number, times, own) > _MIN_EXPLAINED_SHARE]


def possible_periods(axis: Axis, min_seen: float = _MIN_PERIODS_SEEN) -> list[float]:
    """The year of the calendar, and the day, if the axis has a fine enough spacing and at least `min_seen` periods."""
    if axis.kind != "time" or axis.size < 8:
        return []
    return [
        period
        for period in (axis.year, DAY)
        if axis.extent >= min_seen * period and axis.spacing * _MIN_POINTS_PER_PERIOD <= period
    ]


def explained_share(numbers: np.ndarray, axis: int, times: np.ndarray, period: float) -> float:
    """The fraction of the variance along `axis` that a cycle explains, minus the fraction expected by chance."""
    series = np.moveaxis(numbers, axis, 0).reshape(len(times), -1)
    counts = (~np.isnan(series)).sum(axis=0)
    parameters = 2 + 2 * _HARMONICS
    long_enough = np.flatnonzero(counts > 2 * parameters)
    if not len(long_enough):
        return 0.0
    if len(long_enough) > _MAX_SERIES:  # a choice by number of observations and level, for any arrangement of series
        levels = np.nanmean(series[:, long_enough], axis=0)
        long_enough = long_enough[np.lexsort((levels, counts[long_enough]))]
        long_enough = long_enough[np.linspace(0, len(long_enough) - 1, _MAX_SERIES).astype(int)]
    angle = 2 * np.pi * times / period
    line = np.stack([np.ones_like(times), (times - times.mean()) / max(np.ptp(times), 1e-300)], axis=1)
    waves = [wave(h * angle) for h in range(1, _HARMONICS + 1) for wave in (np.cos, np.sin)]
    full = np.concatenate([line, np.stack(waves, axis=1)], axis=1)
    before = after = 0.0
    for column in long_enough:
        known = ~np.isnan(series[:, column])
        y = series[known, column]
        before += _residual_square(line[known], y) / (len(y) - line.shape[1])
        after += _residual_square(full[known], y) / (len(y) - parameters)
    return 1.0 - after / before if before > 0 else 0.0


def _residual_square(design: np.ndarray, y: np.ndarray) -> float:
    coefficients, *_ = np.linalg.lstsq(design, y, rcond=None)
    return float(np.square(y - design @ coefficients).sum())


# -- those that last, in the mean --------------------------------------------------------------------------------------


class Cycles(torch.nn.Module):
    """``Σ_f (c_f cos + s_f sin)(2 pi f t)`` with coefficients for every series; f = 0 is its level.

    A series extends along one axis, at given levels of the others. A point off these levels has the coefficients of the
    nearest series.

    :param axis: number of the axis along which t runs.
    :param levels: coordinates of all axes. shape (m_i, d_i) each.
    :param frequencies: f, in cycles per unit of t. shape (F,).
    :param coefficients: c and s. shape (series, 2, F), the last of the other axes fastest.
    :param periods: periods of the cycles.
    """

    frequencies: Tensor
    coefficients: Tensor

    def __init__(
        self, axis: int, levels: Sequence[Tensor], frequencies: Tensor, coefficients: Tensor, periods: Sequence[float]
    ) -> None:
        super().__init__()
        self.axis, self.periods = axis, tuple(periods)
        self._widths = [own.size(-1) for own in levels]
        for number, own in enumerate(levels):
            if number != axis:
                self.register_buffer(f"levels_{number}", own)
        self.register_buffer("frequencies", frequencies)
        self.register_buffer("coefficients", coefficients)

    def forward(self, x: Tensor) -> Tensor:
        """shape: (*, D) -> (*)"""
        parts = x.split(self._widths, -1)
        time, series = parts[self.axis].squeeze(-1), self._series(parts)
        total = torch.zeros_like(time)
        for number, frequency in enumerate(self.frequencies):
            angle, own = 2.0 * math.pi * frequency * time, self.coefficients[..., number]
            total = total + own[:, 0][series] * angle.cos()
            if number:
                total = total + own[:, 1][series] * angle.sin()
        return total

    def _series(self, parts: Sequence[Tensor]) -> Tensor:
        """The series of each point. shape: (*, d_i) each -> (*)"""
        found = torch.zeros(parts[0].shape[:-1], dtype=torch.long, device=parts[0].device)
        for number, part in enumerate(parts):
            if number == self.axis:
                continue
            levels = getattr(self, f"levels_{number}")
            place = first_equal_row(levels, part)
            off = place < 0
            if bool(off.any()):
                place[off] = torch.cdist(part[off], levels).argmin(-1)
            found = found * len(levels) + place
        return found

    def on(self, times: np.ndarray) -> np.ndarray:
        """All series at the given times. shape: (m,) -> (m, series)"""
        return _design(times, self.frequencies.numpy()) @ _stacked(self.coefficients.numpy()).T


def fit_cycles(numbers: np.ndarray, axes: Sequence[Axis], axis: int, periods: Sequence[float]) -> Cycles | None:
    """Levels and harmonics of every series along one axis, by penalized least squares.

    :param numbers: values on the grid, NaN at gaps.
    :param axis: number of the axis.
    :param periods: periods of the cycles. The longest are left out if some of their phases are not observed.
    :return: the cycles; None if none remains.
    """
    own, left = axes[axis], sorted(periods, reverse=True)
    series = np.moveaxis(numbers, axis, 0).reshape(own.size, -1)
    while left:
        frequencies = _frequencies(own, left)
        found = _least_squares(_design(own.points[:, 0], frequencies), series, _PENALTY * own.size)
        if found is not None:
            found = np.stack([found[:, : len(frequencies)], np.insert(found[:, len(frequencies) :], 0, 0.0, 1)], 1)
            levels = [torch.from_numpy(other.points) for other in axes]
            return Cycles(axis, levels, torch.from_numpy(frequencies), torch.from_numpy(found), left)
        left = left[1:]
    return None


def _frequencies(axis: Axis, periods: Sequence[float]) -> np.ndarray:
    """Zero, and the harmonics of all cycles that the spacing resolves, each once. shape: (F,)

    A single year has one harmonic: others cannot be distinguished from the weather of its seasons.
    """
    found = [0.0]
    for period in periods:
        seen = axis.extent / period
        count = 1 if seen < _MIN_PERIODS_SEEN else _HARMONICS if seen < _MANY_PERIODS else _MANY_HARMONICS
        for frequency in (h / period for h in range(1, count + 1)):
            distinct = min(abs(frequency - other) for other in found) * axis.extent > _APART
            if distinct and 2.0 * frequency * axis.spacing < 1.0:
                found.append(frequency)
    return np.array(found)


def _design(times: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """Cosines, then sines except the first. shape: (m, 2 F - 1)"""
    angle = 2.0 * np.pi * times[:, None] * frequencies
    return np.concatenate([np.cos(angle), np.sin(angle[:, 1:])], axis=1)


def _stacked(coefficients: np.ndarray) -> np.ndarray:
    """Coefficients in the order of the columns of a design. shape: (series, 2, F) -> (series, 2 F - 1)"""
    return np.concatenate([coefficients[:, 0], coefficients[:, 1, 1:]], axis=1)


def _least_squares(design: np.ndarray, series: np.ndarray, penalty: float) -> np.ndarray | None:
    """Coefficients of every series, shrunk towards the common ones; None if these are not well determined.

    :param design: shape (m, q).
    :param series: NaN at gaps. shape (m, S).
    :return: shape (S, q).
    """
    known, width = ~np.isnan(series), design.shape[1]
    pairs = (design[:, :, None] * design[:, None, :]).reshape(len(design), -1)
    gram = (known.T.astype(np.float64) @ pairs).reshape(-1, width, width)
    target = np.where(known, series, 0.0).T @ design
    whole = gram.sum(axis=0)
    if np.linalg.eigvalsh(whole)[0] < _MIN_DETERMINED * known.sum():
        return None
    common = np.linalg.solve(whole, target.sum(axis=0))
    own = np.linalg.solve(gram + penalty * np.eye(width), (target - gram @ common)[..., None])
    return common + own[..., 0]
