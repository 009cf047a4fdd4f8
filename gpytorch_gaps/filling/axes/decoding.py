"""The user's coordinates for the points of an axis: the inverse of :meth:`Axis.encode`."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from gpytorch_gaps.filling.axes.axis import Axis
from gpytorch_gaps.filling.axes.encodings import Circle, Degrees, Numbers
from gpytorch_gaps.utils.tensors import first_equal_row


def broadcastable(axes: Sequence[Axis]) -> list[np.ndarray]:
    """The coordinates of all axes as arrays that broadcast to the grid; several columns come first, as (d, 1, m, 1)."""
    found = []
    for number, axis in enumerate(axes):
        own = _coordinates(axis)
        shape = [1] * len(axes)
        shape[number] = axis.size
        found.append(own.T.reshape(*own.shape[1:], *shape))
    return found


def decoded(axis: Axis, points: np.ndarray) -> np.ndarray:
    """The coordinates of points (Q, d'), which may lie between or outside those of the axis. shape: (Q,) or (d, Q)

    :raises ValueError: if the axis has no coordinates between its points. Labels have none.
    """
    known = _coordinates(axis)
    place = first_equal_row(torch.from_numpy(axis.points), torch.from_numpy(points)).numpy()
    found = known[np.maximum(place, 0)]
    off = place < 0
    if off.any():
        between = _between(axis, known, points[off])
        found = found if found.dtype == object else found.astype(np.result_type(found, between))
        found[off] = between
    return found.T


def _coordinates(axis: Axis) -> np.ndarray:
    return np.arange(axis.size) if axis.coordinates is None else axis.coordinates


def _between(axis: Axis, known: np.ndarray, points: np.ndarray) -> Any:
    """Coordinates of points that the axis does not have."""
    if axis.kind == "time":
        return _times(known, axis.points[:, 0], points[:, 0])
    if isinstance(axis.encoding, Circle):
        start, period = float(np.min(known)), axis.encoding.period
        return start + (points[:, 0] - start) % period
    if axis.kind == "label" or not isinstance(axis.encoding, Numbers | Degrees):
        raise ValueError(f"mean: got a point off {axis.name}, which has only its {axis.size} points; expected these")
    return points if known.ndim > 1 else points[:, 0]


def _times(known: np.ndarray, days: np.ndarray, wanted: np.ndarray) -> Any:
    """Dates, durations, or numbers in units of time, from days."""
    if known.dtype.kind in "mM":
        unit = "datetime64[ns]" if known.dtype.kind == "M" else "timedelta64[ns]"
        return known[0].astype(unit) + np.rint((wanted - days[0]) * 86_400e9).astype("timedelta64[ns]")
    if known.dtype.kind == "O":
        return np.array([known[0] + timedelta(days=float(one)) for one in wanted - days[0]])
    order = np.argsort(days)
    first, last = order[0], order[-1]
    rate = (known[last] - known[first]) / (days[last] - days[first])
    inside = np.interp(wanted, days[order], known[order])
    beyond = np.minimum(wanted - days[first], 0.0) + np.maximum(wanted - days[last], 0.0)
    return inside + rate * beyond
