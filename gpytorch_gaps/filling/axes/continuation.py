"""The next coordinates of a regular axis: numbers, times of any calendar, and indices with a frequency."""

from typing import Any

import numpy as np

from gpytorch_gaps.filling.axes.index_grid import is_a

_SAME_STEP = 1e-3  # a smaller relative difference of steps may be rounding
_MIN_INFERRED = 3  # smallest number of times from which a frequency can be inferred


def continued(name: str, index: Any, size: int, steps: int) -> Any:
    """The next coordinates of an axis.

    :param name: the name of the axis, for errors.
    :param index: its coordinates: an array, or a pandas index; None for 0, 1, ..
    :param size: number of coordinates.
    :param steps: number of coordinates to add.
    :return: an array, or an index of the same kind.
    :raises ValueError: if the coordinates are not regular.

    >>> continued("x", np.array([1.0, 1.5, 2.0]), 3, 2)
    array([2.5, 3. ])
    """
    if index is None:
        return range(size, size + steps)
    by_frequency = _by_frequency(index, steps)
    if by_frequency is not None:
        return by_frequency
    array = np.asarray(index)
    step = _step(array) if array.ndim == 1 else None
    if step is None:
        raise ValueError(
            f"{name}: got irregular coordinates, which do not determine the next one, expected regular ones. Try: pass "
            "coordinates to result.at(...), or fill an array on regular coordinates, with gaps"
        )
    if array.dtype.kind == "O":  # dates of Python or cftime
        further = np.empty(steps, dtype=object)
        further[:] = [array[-1] + step * number for number in range(1, steps + 1)]
        return further
    return array[-1] + step * np.arange(1, steps + 1)


def _by_frequency(index: Any, steps: int) -> Any:
    """The continuation of times with a frequency, such as months; None if there is no frequency."""
    if is_a(index, "pandas", "PeriodIndex"):
        import pandas

        further = pandas.period_range(index[-1], periods=steps + 1, freq=index.freq)[1:]
        return further if (np.diff(index.asi8) == 1).all() else None
    if is_a(index, "pandas", "DatetimeIndex") or _is_of_dates(index):
        import pandas

        dates = pandas.DatetimeIndex(index)
        frequency = dates.freq or (pandas.infer_freq(dates) if len(dates) >= _MIN_INFERRED else None)
        if frequency is None:
            return None
        further = pandas.date_range(dates[-1], periods=steps + 1, freq=frequency)[1:]
        return further if is_a(index, "pandas", "DatetimeIndex") else further.to_numpy().astype(index.dtype)
    if is_a(index, "xarray", "CFTimeIndex") and len(index) >= _MIN_INFERRED:
        import xarray

        frequency = xarray.infer_freq(index)
        if frequency is not None:
            start, calendar = index[-1], index.calendar
            return xarray.date_range(start, periods=steps + 1, freq=frequency, calendar=calendar, use_cftime=True)[1:]
    return None


def _is_of_dates(index: Any) -> bool:
    """Whether these are dates for which pandas may infer a frequency."""
    if not isinstance(index, np.ndarray) or index.dtype.kind != "M" or _step(index) is not None:
        return False
    try:
        import pandas  # noqa: F401
    except ImportError:
        return False
    return True


def _step(array: np.ndarray) -> Any:
    """The constant difference of neighbours; None if there is none."""
    if len(array) < 2:
        return None
    try:
        steps = array[1:] - array[:-1]
    except TypeError:  # labels
        return None
    if array.dtype.kind not in "iuf":
        return steps[0] if (steps == steps[0]).all() else None
    whole = array.astype(np.float64)
    step = (whole[-1] - whole[0]) / (len(array) - 1)
    if (np.abs(np.diff(whole) - step) > _SAME_STEP * abs(step)).any():
        return None
    return round(step) if array.dtype.kind in "iu" else step
