"""Cycles of axes of time: the year and the day, where there is room for them, and where the data follow them.

    R2 = 1 - |y - a - b t - Σ_h (c_h cos + s_h sin)(2 pi h t / p)|^2 / |y - a - b t|^2,    h = 1, 2

over the series of all other cells, each with coefficients of its own.
"""

import numpy as np

from gpytorch_gaps.filling.axes import DAY, Axis

_HARMONICS = 2
_PERIODS_SEEN = 1.5
_POINTS_A_PERIOD = 4
_WORTH = 0.05
_SERIES = 300


def possible_periods(axis: Axis) -> list[float]:
    """Periods of the year, by its calendar, and of the day, if the axis is long and fine enough for them."""
    if axis.kind != "time" or axis.size < 8:
        return []
    return [
        period
        for period in (axis.year, DAY)
        if axis.extent >= _PERIODS_SEEN * period and axis.spacing * _POINTS_A_PERIOD <= period
    ]


def explained(numbers: np.ndarray, axis: int, times: np.ndarray, period: float) -> float:
    """The share of the variance along `axis` that a cycle explains, less what it would explain by chance."""
    series = np.moveaxis(numbers, axis, 0).reshape(len(times), -1)
    counts = (~np.isnan(series)).sum(axis=0)
    parameters = 2 + 2 * _HARMONICS
    rich = np.flatnonzero(counts > 2 * parameters)
    if not len(rich):
        return 0.0
    chosen = rich[np.linspace(0, len(rich) - 1, min(len(rich), _SERIES)).astype(int)]
    angle = 2 * np.pi * times / period
    plain = np.stack([np.ones_like(times), (times - times.mean()) / max(np.ptp(times), 1e-300)], axis=1)
    waves = [wave(h * angle) for h in range(1, _HARMONICS + 1) for wave in (np.cos, np.sin)]
    full = np.concatenate([plain, np.stack(waves, axis=1)], axis=1)
    before = after = 0.0
    for column in chosen:
        known = ~np.isnan(series[:, column])
        y = series[known, column]
        before += _left(plain[known], y) / (len(y) - plain.shape[1])
        after += _left(full[known], y) / (len(y) - parameters)
    return 1.0 - after / before if before > 0 else 0.0


def cycles_of(numbers: np.ndarray, axes: list[Axis]) -> list[list[float]]:
    """For each axis, the periods that its data follow."""
    return [
        [period for period in possible_periods(axis) if explained(numbers, i, axis.points[:, 0], period) > _WORTH]
        for i, axis in enumerate(axes)
    ]


def _left(design: np.ndarray, y: np.ndarray) -> float:
    coefficients, *_ = np.linalg.lstsq(design, y, rcond=None)
    return float(np.square(y - design @ coefficients).sum())
