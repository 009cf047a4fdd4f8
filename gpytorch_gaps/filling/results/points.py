"""Predictions of a filled array at points between and outside its cells.

Points are given in the user's coordinates: dates, degrees, labels. :meth:`Axis.encode` converts them to the columns
that the model receives.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from gpytorch_gaps.filling.arrays.adapters import ArrayAdapter
from gpytorch_gaps.filling.axes.axis import Axis
from gpytorch_gaps.filling.axes.index_grid import is_a
from gpytorch_gaps.filling.results.cells import Marginals, check_level
from gpytorch_gaps.filling.results.fitted import Fitted


class _Pair(NamedTuple):
    mean: Any
    """Posterior means, or medians if values were transformed."""
    std: Any
    """Standard deviations of the errors of the means."""


class Estimate(_Pair):
    """Means and standard deviations, such as those of a forecast. ``mean, std = estimate`` unpacks them.

    >>> import gpytorch_gaps as gaps
    >>> mean, std = gaps.Estimate([1.0], [0.5])
    >>> mean
    [1.0]
    """

    _quantile: Callable[[float], Any] | None = None

    @classmethod
    def _of(cls, mean: Any, std: Any, quantile: Callable[[float], Any]) -> "Estimate":
        """An estimate with its quantiles as a function of the probability. The function can be pickled."""
        estimate = cls(mean, std)
        estimate._quantile = quantile
        return estimate

    def quantile(self, level: float) -> Any:
        """Values that are not exceeded with probability `level`, in the form of `mean`.

        :param level: the probability, between 0 and 1.
        :return: an array like `mean`.
        :raises ValueError: if `level` is not between 0 and 1, or if this is not the result of a filling.

        >>> import numpy as np, gpytorch_gaps as gaps
        >>> values = np.exp(np.sin(np.arange(30.0) / 4))
        >>> values[10:14] = np.nan
        >>> result = gaps.fill_gaps(values, transform="log", steps=5, check=False, progress=False)
        >>> estimate = result.at([11.5])
        >>> bool(estimate.quantile(0.025) < estimate.mean < estimate.quantile(0.975))
        True
        """
        if self._quantile is None:
            raise ValueError("quantile: got an Estimate of numbers only, expected one from a filling")
        return self._quantile(check_level(level))


def of_variables(found: Mapping[Any, Estimate]) -> Estimate:
    """The estimates of several variables as one: of Datasets, or of dictionaries by variable."""

    means, stds = (_joined({name: getattr(one, part) for name, one in found.items()}) for part in ("mean", "std"))
    return Estimate._of(means, stds, partial(_joined_quantiles, found))


def _joined(parts: dict[Any, Any]) -> Any:
    if all(is_a(one, "xarray", "DataArray") for one in parts.values()):
        import xarray

        return xarray.Dataset(parts)
    return parts


def _joined_quantiles(found: Mapping[Any, Estimate], level: float) -> Any:
    return _joined({name: one.quantile(level) for name, one in found.items()})


def predict_at(fitted: Fitted, points: Any, noise: bool) -> Estimate:
    """Mean and standard deviation at points: see :meth:`gpytorch_gaps.Filled.at`."""
    columns = _columns(points, fitted.axes)
    for number, axis in enumerate(fitted.axes):
        if axis.kind == "group" and np.ndim(columns[number]) == 1:
            columns[number] = _places(axis, columns[number], index_of(fitted.adapter, number))
    encoded = [axis.encode(one) for axis, one in zip(fitted.axes, columns, strict=True)]
    given = fitted.adapter.given
    found, wrap = fitted.at(encoded, noise), partial(_in_form, points, given)
    return Estimate._of(wrap(found.median), wrap(found.std), partial(quantile_of, found, wrap))


def quantile_of(found: Marginals, wrap: Callable[[np.ndarray], Any], level: float) -> Any:
    """Quantiles in the form of results."""
    return wrap(found.quantile(level))


def _in_form(points: Any, given: Any, values: np.ndarray) -> Any:
    """Values at points as a Series if these are a DataFrame, as a tensor if the input was one."""
    if is_a(points, "pandas", "DataFrame"):
        import pandas

        return pandas.Series(values, points.index, name=given.name if is_a(given, "pandas", "Series") else None)
    return torch.from_numpy(values).to(given.device) if isinstance(given, torch.Tensor) else values


def _columns(points: Any, axes: Sequence[Axis]) -> list[Any]:
    """The coordinates of points along each axis, with the same number for all axes."""
    names = [axis.name for axis in axes]
    if isinstance(points, Mapping) or is_a(points, "pandas", "DataFrame"):
        keys = [axis_number("points", key, names) for key in points]
        missing = [name for at, name in enumerate(names) if at not in keys]
        if missing or len(keys) > len(names):
            raise ValueError(f"points: got {list(points)}, expected coordinates along each of {names}")
        listed = dict(zip(keys, (points[key] for key in points), strict=True))
        columns = [listed[at] for at in range(len(axes))]
    elif len(axes) == 1:
        columns = [points]
    else:
        array = np.asarray(points.detach().cpu() if isinstance(points, torch.Tensor) else points)
        if array.ndim != 2 or array.shape[1] != len(axes) or array.dtype.kind not in "iuf":
            raise ValueError(
                f"points: got {array.dtype} of shape {array.shape}, expected numbers of shape (Q, {len(axes)}), or a "
                f"mapping or DataFrame with coordinates along each of {names}"
            )
        columns = list(array.T)
    columns = [_at_least_1d(one, axis) for one, axis in zip(columns, axes, strict=True)]
    count = max(map(len, columns))
    if any(len(one) not in (1, count) for one in columns):
        sizes = ", ".join(f"{len(one)} of {name}" for one, name in zip(columns, names, strict=True))
        raise ValueError(f"points: got coordinates {sizes}, expected equally many along each axis, or one")
    return [one if len(one) == count else one[[0] * count] for one in columns]


def _at_least_1d(given: Any, axis: Axis) -> Any:
    """The coordinates along one axis. A single coordinate becomes an array."""
    if hasattr(given, "dims"):  # an xarray object
        given = given.values
    if axis.kind == "group" and np.asarray(given).dtype.kind in "iuf":
        return np.atleast_2d(np.asarray(given))
    if isinstance(given, str) or np.ndim(given) == 0:
        array = np.empty(1, dtype=object)
        array[0] = given
        return np.array([given]) if np.array(given).dtype.kind in "iufbUmM" else array
    return given if hasattr(given, "dtype") else np.array(given)


def _places(axis: Axis, names: Any, index: Any) -> np.ndarray:
    """The coordinates of places, such as stations, from their names in the index of an axis."""
    found = index.get_indexer(names) if hasattr(index, "get_indexer") else np.full(len(names), -1)
    if (found < 0).any() or axis.coordinates is None:
        name = str(names[int((found < 0).argmax())])
        raise ValueError(f"{axis.name}: got {name!r}, expected names of its points, or their coordinates (Q, d)")
    return axis.coordinates[found]


def axis_number(argument: str, key: Any, names: Sequence[str]) -> int:
    """The number of an axis by its name or number."""
    if isinstance(key, int) and not isinstance(key, bool) and -len(names) <= key < len(names):
        return key % len(names)
    if str(key) not in names:
        raise ValueError(f"{argument}: got the axis {key!r}, expected one of {list(names)}, or its number")
    return [str(name) for name in names].index(str(key))


def index_of(adapter: ArrayAdapter, number: int) -> Any:
    """The coordinates of an axis as an object of its library, with frequency and time zone; None if it has none."""
    given, known = adapter.given, adapter.axes[number].coordinates
    if known is None:
        return None
    own = None
    if is_a(given, "xarray", "DataArray"):
        own = given.indexes.get(given.dims[number])
    elif is_a(given, "pandas", "Series") or is_a(given, "pandas", "DataFrame"):
        indices = [given.index, given.columns] if hasattr(given, "columns") else [given.index]
        own = [level for index in indices for level in levels_of(index)][number]
    return own if own is not None and len(own) == len(known) else known


def levels_of(index: Any) -> list[Any]:
    return list(index.remove_unused_levels().levels) if is_a(index, "pandas", "MultiIndex") else [index]
