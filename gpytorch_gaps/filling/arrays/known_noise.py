"""Known errors of measurements: standard deviations from the user, as variances for every cell of the grid.

    y = f + e + e',    var e = known variance of the cell,    var e' = learned, as without known errors

The error of a measurement in a gap is the one given there. If none is given, it is the root mean square of the errors
of the observations.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gpytorch_gaps.filling.arrays.adapters import ArrayAdapter
from gpytorch_gaps.filling.arrays.same_grid import on_grid
from gpytorch_gaps.filling.arrays.variables import VariablesAdapter
from gpytorch_gaps.utils.checks import check_number


def known_variances(adapter: ArrayAdapter, given: Any, numbers: np.ndarray) -> np.ndarray:
    """Variances of the measurement errors in every cell.

    :param given: the argument ``noise`` of ``fill_gaps``: standard deviations, a number or an array, or a mapping by
        variable.
    :param numbers: the values, NaN at gaps.
    :raises ValueError: if the error of an observation is not a finite number above 0.
    """
    if isinstance(adapter, VariablesAdapter):
        return np.stack(
            [
                np.zeros(own.shape) if given.get(name) is None else known_variances(one, given[name], own)
                for (name, one), own in zip(adapter.by_name.items(), numbers, strict=True)
            ]
        )
    if _is_number(given):
        return same_variances(given, numbers.shape)
    errors = np.asarray(on_grid(adapter, given, "noise"), dtype=np.float64)
    known, usable = ~np.isnan(numbers), np.isfinite(errors) & (errors > 0)
    if not usable[known].all():
        cell = tuple(map(int, np.argwhere(known & ~usable)[0]))
        raise ValueError(
            f"noise: entry {cell} is {errors[cell]}, where values has an observation; expected a standard deviation "
            "above 0 for each observation. Try untrusted= for those without"
        )
    return np.where(usable, errors, np.sqrt(np.mean(errors[known] ** 2))) ** 2


def same_variances(given: Any, shape: Sequence[int]) -> np.ndarray:
    """Variances of the measurement errors in every cell, all equal, as a broadcast view.

    :raises ValueError: if the argument ``noise`` is not one number above 0.
    """
    if not _is_number(given):
        raise ValueError(
            f"noise: got {type(given).__name__}, expected one standard deviation for values of more than four million "
            "cells, which are streamed; or fill a part"
        )
    deviation = check_number("noise", given, above=0, what="standard deviation")
    return np.broadcast_to(np.float64(deviation) ** 2, tuple(shape))


def _is_number(given: Any) -> bool:
    return np.ndim(given) == 0 and not hasattr(given, "dims") and not isinstance(given, Mapping)
