"""Forecasts: predictions beyond the end of an axis of a filled array, in the form of the array."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from gpytorch_gaps.filling.axes.axis import Axis
from gpytorch_gaps.filling.axes.continuation import continued
from gpytorch_gaps.filling.axes.index_grid import IndexGrid, is_a
from gpytorch_gaps.filling.results.fitted import Fitted
from gpytorch_gaps.filling.results.points import Estimate, axis_number, index_of, levels_of, quantile_of
from gpytorch_gaps.utils.checks import check_integer

_CONTINUED = ("number", "time", "position")  # kinds of axes that have a next coordinate


def forecast(fitted: Fitted, steps: int, axis: Any, noise: bool) -> Estimate:
    """Mean and standard deviation beyond the end of an axis: see :meth:`gpytorch_gaps.Filled.forecast`."""
    check_integer("steps", steps, at_least=1)
    axes, adapter = fitted.axes, fitted.adapter
    number = _continued_axis(axes, axis)
    further = continued(axes[number].name, index_of(adapter, number), axes[number].size, steps)
    points = [one.points for one in axes]
    points[number] = axes[number].encode(further)
    found = fitted.on_grid(points, noise)
    given = adapter.given
    like = adapter.wrap_like_input(np.zeros(adapter.shape)) if is_a(given, "xarray", "DataArray") else given
    return Estimate._of(
        _wrap(given, found.median, number, further),
        _wrap(like, found.std, number, further),
        partial(quantile_of, found, partial(_wrap, given, number=number, further=further)),
    )


def _continued_axis(axes: Sequence[Axis], asked: Any) -> int:
    """The axis to continue: the given one, the only axis of times, or the only one that can be continued."""
    names = [axis.name for axis in axes]
    if asked is None:
        times = [at for at, axis in enumerate(axes) if axis.kind == "time"]
        found = times if len(times) == 1 else [at for at, axis in enumerate(axes) if axis.kind in _CONTINUED]
        if len(found) != 1:
            raise ValueError(f"axis: got None, expected one of {names}: there is not exactly one that can be continued")
        return found[0]
    number = axis_number("axis", asked, names)
    if axes[number].kind not in _CONTINUED:
        raise ValueError(f"axis: got {axes[number]}, expected an axis of times or numbers, which has a next coordinate")
    return number


# -- in the form of the input ------------------------------------------------------------------------------------------


def _wrap(like: Any, values: np.ndarray, number: int, further: Any) -> Any:
    """Values in the form of the array `like`, except for the length of the axis that was continued."""
    if is_a(like, "xarray", "DataArray"):
        return _data_array(like, values, number, further)
    if is_a(like, "pandas", "Series"):
        import pandas

        return pandas.Series(values.ravel(), _continued_index(like.index, number, further), name=like.name)
    if is_a(like, "pandas", "DataFrame"):
        return _data_frame(like, values, number, further)
    if isinstance(like, torch.Tensor):
        dtype = like.dtype if like.is_floating_point() else torch.float64
        return torch.from_numpy(values).to(like.device, dtype)
    return values


def _data_array(like: Any, values: np.ndarray, number: int, further: Any) -> Any:
    """A DataArray with the other coordinates, the name and the attributes of `like`."""
    dim = like.dims[number]
    has_index = dim in like.coords
    rest = like.isel({dim: [0] * values.shape[number]})
    rest = rest.drop_vars([name for name, one in rest.coords.items() if dim in one.dims]).copy(data=values)
    return rest.assign_coords({dim: (dim, np.asarray(further), like[dim].attrs)}) if has_index else rest


def _data_frame(like: Any, values: np.ndarray, number: int, further: Any) -> Any:
    import pandas

    rows, columns = IndexGrid(like.index, "rows"), IndexGrid(like.columns, "columns")
    levels = len(rows.shape)
    if number < levels:
        index = _continued_index(like.index, number, further)
        table = values.reshape(len(index), columns.size)[:, columns.cells]
        return pandas.DataFrame(table, index=index, columns=like.columns)
    index = _continued_index(like.columns, number - levels, further)
    return pandas.DataFrame(values.reshape(rows.size, -1)[rows.cells], index=like.index, columns=index)


def _continued_index(index: Any, level: int, further: Any) -> Any:
    """A pandas index with further coordinates in place of those of one of its levels."""
    import pandas

    if is_a(index, "pandas", "MultiIndex"):
        levels = levels_of(index)
        levels[level] = further
        return pandas.MultiIndex.from_product(levels, names=index.names)
    return pandas.Index(further).rename(index.name)
