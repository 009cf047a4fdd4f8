"""Further fields of a filling: quantiles, and means of skewed distributions."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np

from gpytorch_gaps.filling.arrays.variables import VariablesAdapter
from gpytorch_gaps.filling.results.fitted import Fitted
from gpytorch_gaps.filling.transforms.predictive import Normal, Transformed, predictive
from gpytorch_gaps.utils.checks import check_number

Marginals = Normal | Transformed


def check_level(level: Any) -> float:
    """A probability strictly between 0 and 1."""
    found = check_number("quantile", level, above=0, what="probability")
    if found >= 1:
        raise ValueError(f"quantile: got {level}, expected a probability below 1")
    return found


def quantiles(fitted: Fitted, level: float) -> Any:
    """The array with quantiles in place of its gaps, in the form of the input."""
    if fitted.filling.predicted is None or fitted.filling.predicted[1] is None:
        raise ValueError("quantile: got a result without standard deviations, expected one with them. Try: std=True")
    return _field(fitted, lambda found: found.quantile(level))


def expectations(fitted: Fitted) -> Any:
    """The array with means of the distributions in place of its gaps, in the form of the input."""
    if fitted.filling.transform is not None and fitted.filling.predicted and fitted.filling.predicted[1] is None:
        raise ValueError("expectation: got a result without standard deviations, expected one with them. Try: std=True")
    return _field(fitted, lambda found: found.mean)


def _field(fitted: Fitted, of: Callable[[Marginals], np.ndarray]) -> Any:
    """The array with a property of the distributions in the predicted cells."""
    filling = fitted.filling
    assert filling.predicted is not None
    mean, std = filling.predicted
    where, values = filling.are_predicted, filling.values.copy()
    values[where] = of(predictive(filling.transform, mean[where], np.zeros(1) if std is None else std[where]))
    wrapped = filling.adapter.wrap_filled(values, filling.gaps, filling.options.smooth)
    if fitted.variable is None:
        return wrapped
    assert isinstance(filling.adapter, VariablesAdapter)
    return list(wrapped.values())[fitted.variable]


def of_dataset(found: Mapping[Hashable, Any]) -> Any:
    """The fields of several variables as a Dataset."""
    import xarray

    return xarray.Dataset(dict(found))
