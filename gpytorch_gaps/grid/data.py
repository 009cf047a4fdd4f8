"""Converts data with gaps to a grid and its observations."""

import warnings
from collections.abc import Hashable, Sequence
from datetime import timedelta
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from gpytorch_gaps.grid.cartesian import CartesianGrid, observed_entries
from gpytorch_gaps.utils.checks import read_tensor, refuse_entries, refuse_repeats, to_common_dtype
from gpytorch_gaps.utils.tensors import first_equal_row

if TYPE_CHECKING:
    import xarray

_WARN_CELLS_PER_POINT = 50  # above this ratio, the points are probably not meant as a grid

GridData = tuple[CartesianGrid, Tensor, Tensor]
"""A grid of D columns, the coordinates `(N, D)` of its observed cells, and the observations `(N,)`."""


def from_array(values: ArrayLike | Tensor, axes: Sequence[ArrayLike | Tensor | None] | None = None) -> GridData:
    """Grid and observations of an array with gaps.

    :param values: one value per cell. NaN, or a masked entry of a NumPy masked array, marks a gap.
    :param axes: coordinates of each dimension of `values`: shape (m_i,), or (m_i, d_i) for a group of d_i input
        columns, or None for 0, 1, .., m_i - 1. All arrays must share one floating-point dtype and one device; integers,
        booleans and Python numbers take that dtype, or torch's default one.
    :return: the grid, train_x (N, D) and train_y (N,), observations in grid order.
    :raises ValueError: if shapes, dtypes or devices do not match, a value is infinite, all values are gaps, or an axis
        is not valid for :class:`CartesianGrid`.

    >>> grid, train_x, train_y = from_array([[1.0, float("nan")], [2.0, 3.0]], [[0.0, 1.0], [10.0, 20.0]])
    >>> grid.shape, train_y.tolist()
    (torch.Size([2, 2]), [1.0, 2.0, 3.0])
    >>> train_x.tolist()
    [[0.0, 10.0], [1.0, 10.0], [1.0, 20.0]]
    """
    given = read_tensor("values", values, booleans=True)
    shape = given.tensor.shape
    if given.tensor.ndim == 0 or given.tensor.numel() == 0:
        raise ValueError(f"values: got shape {tuple(shape)}; expected one dimension or more, none of them 0")
    axes = [None] * len(shape) if axes is None else axes
    if len(axes) != len(shape):
        raise ValueError(f"axes: got {len(axes)}; expected {len(shape)}, one for each dimension of values")
    coordinates = [range(m) if axis is None else axis for axis, m in zip(axes, shape, strict=True)]
    tensor, *tables = to_common_dtype(given, *(read_tensor(f"axis {i}", axis) for i, axis in enumerate(coordinates)))
    grid = CartesianGrid(tables)
    for i, (m, expected) in enumerate(zip(grid.shape, shape, strict=True)):
        if m != expected:
            raise ValueError(f"axis {i}: got {m} coordinates; expected {expected}, as values has along dimension {i}")
    index = grid.observed(tensor)
    return grid, grid.points(index), tensor.flatten()[index]


def from_points(
    x: ArrayLike | Tensor, y: ArrayLike | Tensor, groups: Sequence[Sequence[int]] | None = None
) -> GridData:
    """Grid and observations of scattered rows that lie on some cells of a grid, in any order.

    Each column of x gives an axis: its distinct coordinates in ascending order. Rows where y is NaN contribute
    coordinates, but are not observations.

    :param x: points, shape (N, D). Coordinates that belong to the same row of an axis must be exactly equal.
    :param y: observations, shape (N,).
    :param groups: columns of x that form one axis, such as `[[0], [1], [2, 3]]`. Default: one axis per column.
    :return: the grid, train_x and train_y. Rows keep the order of x. Columns follow the axes: with `groups`, they are
        in the order in which the groups list them.
    :raises ValueError: if shapes, dtypes or devices do not match, x is not finite, y is infinite or NaN everywhere, two
        rows are equal, or a column is not in exactly one group.

    >>> x = torch.tensor([[0.0, 20.0], [1.0, 10.0], [0.0, 10.0]])
    >>> grid, train_x, train_y = from_points(x, torch.tensor([1.0, 2.0, 3.0]))
    >>> grid.shape, grid.index_of(train_x).tolist()
    (torch.Size([2, 2]), [1, 2, 0])
    """
    given = read_tensor("x", x)
    points, targets = to_common_dtype(given, read_tensor("y", y, booleans=True))
    if points.ndim != 2 or points.shape[1] == 0:
        raise ValueError(f"x: got shape {tuple(points.shape)}; expected (N, D)")
    if targets.shape != points.shape[:1]:
        raise ValueError(f"y: got shape {tuple(targets.shape)}; expected ({len(points)},), one for each row of x")
    columns = range(points.shape[1])
    groups = [[column] for column in columns] if groups is None else groups
    order = list(chain.from_iterable([group] if isinstance(group, int) else group for group in groups))
    groups = [[group] if isinstance(group, int) else group for group in groups]
    if sorted(order) != list(columns) or not all(groups):
        raise ValueError(f"groups: got {groups}; expected each column of x, 0 to {columns[-1]}, in exactly one group")
    refuse_entries(~points.isfinite(), points, "x", "finite coordinates")
    observed = observed_entries("y", targets)
    # Rows are made distinct before any cast, because the grid raises an error for a cast that merges coordinates.
    raw = given.tensor.detach()
    grid = CartesianGrid([_distinct_rows(raw[:, list(group)]).to(points) for group in groups])
    points = points[:, order]
    refuse_repeats("x", points, keys=grid.index_of(points))
    if grid.num_cells > _WARN_CELLS_PER_POINT * len(points):
        warnings.warn(
            f"x: {len(points)} points make a grid of {' x '.join(map(str, grid.shape))} cells, nearly all of them "
            "gaps. Are they scattered, or do coordinates that should be equal differ by rounding? Then round x first; "
            "columns that vary together belong in one of the groups.",
            UserWarning,
            stacklevel=2,
        )
    return grid, points[observed], targets[observed]


def _distinct_rows(rows: Tensor) -> Tensor:
    """The distinct rows of `rows` `(N, d)`, in lexicographic order."""
    if rows.shape[1] == 1:
        return torch.unique(rows).unsqueeze(-1)
    is_first = first_equal_row(rows, rows) == torch.arange(len(rows), device=rows.device)
    return torch.unique(rows[is_first], dim=0)  # sorting rows is slow, but few are left


def from_xarray(data_array: "xarray.DataArray") -> GridData:
    """Grid and observations of an xarray DataArray with gaps.

    The coordinate of each dimension gives an axis in the dtype of the values. Numbers are kept; times and durations
    become days since the first; labels (strings, objects, booleans) and missing coordinates become 0, 1, .., m - 1.

    :param data_array: the values. NaN marks a gap.
    :return: the grid, train_x (N, D) and train_y (N,), observations in grid order.
    :raises ImportError: if xarray is not installed.
    :raises TypeError: if `data_array` is not a DataArray.
    :raises ValueError: if a coordinate is neither a number, a time nor a label, or as :func:`from_array`.

    >>> import xarray
    >>> days = xarray.DataArray([1.0, float("nan"), 3.0], coords={"day": [0.0, 1.0, 5.0]})
    >>> grid, train_x, train_y = from_xarray(days)
    >>> train_x.flatten().tolist(), train_y.tolist()
    ([0.0, 5.0], [1.0, 3.0])
    """
    try:
        import xarray
    except ImportError as error:
        raise ImportError("from_xarray needs xarray: pip install gpytorch-gaps[xarray]") from error
    if isinstance(data_array, xarray.Dataset):
        raise TypeError(f"data_array: got a Dataset; pick a variable, one of {list(data_array.data_vars)}")
    if not isinstance(data_array, xarray.DataArray):
        raise TypeError(f"data_array: got {type(data_array).__name__}; expected an xarray DataArray")
    try:
        return from_array(data_array.values, [_dimension_axis(data_array, dim) for dim in data_array.dims])
    except ValueError as error:
        raise ValueError(f"data_array with dimensions {data_array.dims}: {error}") from error


def _dimension_axis(data_array: "xarray.DataArray", dim: Hashable) -> list[float] | None:
    """A dimension's coordinates as Python numbers, which take the dtype of the values; None for 0, 1, .., m - 1."""
    coordinate = data_array.coords[dim].values if dim in data_array.coords else np.empty(0, dtype=object)
    if coordinate.dtype.kind in "mM":
        if np.isnat(coordinate).any():
            raise ValueError(f"coordinate {dim!r} has NaT; expected times")
        return days_since(coordinate, coordinate[:1]).tolist()
    if coordinate.dtype.kind == "O" and len(coordinate):
        return _days_or_labels(dim, coordinate)
    return coordinate.tolist() if coordinate.dtype.kind in "iufc" else None


def _days_or_labels(dim: Hashable, objects: np.ndarray) -> list[float] | None:
    """Dates of any calendar as days since the first; for labels None, which means 0, 1, .., m - 1."""
    if all(isinstance(entry, (str, bool, tuple)) for entry in objects):
        return None
    try:
        spans = [entry - objects[0] for entry in objects]
    except TypeError:
        spans = []
    if not spans or not all(isinstance(span, timedelta) for span in spans):
        raise ValueError(
            f"coordinate {dim!r} holds {type(objects[0]).__name__}; expected numbers, times, or strings as labels"
        )
    return [span / timedelta(days=1) for span in spans]


def days_since(times: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Days since `first`, an array of one entry, of `times`, datetime64 or timedelta64 of any unit.

    Whole days and the rest of the day are subtracted as integers, separately: neither overflows, for any span and unit,
    and the rest keeps its precision.
    """
    day, first_day = (one.astype(f"{times.dtype.kind}8[D]") for one in (times, first))
    return (day - first_day).astype(np.int64) + ((times - day) - (first - first_day)) / np.timedelta64(1, "D")
