"""The prior mean of a reconstruction: a number, a background on the grid, or a function of the coordinates."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpytorch_gaps.distributed.agreement import describe_values
from gpytorch_gaps.grid.cartesian import CartesianGrid
from gpytorch_gaps.utils.checks import check_number
from gpytorch_gaps.utils.files import digest

PriorMean = float | Callable[[Tensor], Tensor] | Any
"""A number; a function of points, shape (Q, D) -> (Q,); or an object with the shape of the grid that can be sliced."""

_SLICES_COMPARED = 8


def check_mean(mean: Any, shape: tuple[int, ...]) -> PriorMean:
    """The mean, checked, and as a float if it is a number.

    :raises ValueError: if it is neither a number nor a function, and does not have the shape of the grid.
    """
    if callable(mean):
        return mean
    own = getattr(mean, "shape", ())
    if len(own) == 0 or (isinstance(mean, Tensor) and mean.numel() == 1):
        return check_number("mean", mean)
    if tuple(own) != tuple(shape):
        raise ValueError(
            f"mean: got shape {tuple(own)}, expected a number, a function, or {tuple(shape)}, the shape of values"
        )
    return mean


def mean_of_slices(mean: PriorMean, grid: CartesianGrid, start: int, stop: int) -> float | Tensor:
    """The mean in some slices of the first axis: a number, or float64 of shape (stop - start, m_2, .., m_d).

    :raises ValueError: if it is not finite there.
    """
    if isinstance(mean, float):
        return mean
    if callable(mean):
        part = CartesianGrid([grid.axes[0][start:stop], *grid.axes[1:]])
        found = torch.as_tensor(mean_at(mean, part.points())).view(part.shape)
    else:
        rows = mean[start:stop]
        found = rows.detach() if isinstance(rows, Tensor) else torch.from_numpy(np.array(rows, dtype=np.float64))
        found = found.to(device=grid.axes[0].device, dtype=torch.float64)
    if not bool(found.isfinite().all()):
        raise ValueError(f"mean: got NaN or infinite values in slices {start} to {stop}, expected finite ones")
    return found


def mean_at(mean: PriorMean, points: Tensor) -> float | Any:
    """The mean at points, shape (Q, D): a number, or shape (Q,).

    :raises ValueError: if it is known on the grid only, or if a function gives another shape.
    """
    if isinstance(mean, float):
        return mean
    if not callable(mean):
        raise ValueError("points: the mean is an array, given on the grid only; expected a number or a function")
    with torch.no_grad():
        found = torch.as_tensor(mean(points))
    if found.shape != points.shape[:1]:
        raise ValueError(f"mean: the function gave shape {tuple(found.shape)}, expected {tuple(points.shape[:1])}")
    return found.detach().to(points)


def describe_mean(mean: PriorMean) -> str:
    """A description that several processes compare."""
    if isinstance(mean, float):
        return repr(mean)
    return f"function {type(mean).__name__}" if callable(mean) else f"{tuple(mean.shape)} {describe_values(mean)}"


def name_of_mean(mean: PriorMean, grid: CartesianGrid) -> str:
    """A name for files that depends on the mean: on its number, or on some of its slices."""
    if isinstance(mean, float):
        return repr(mean)
    size = grid.shape[0]
    starts = sorted({round(at) for at in np.linspace(0, size - 1, min(size, _SLICES_COMPARED))})
    return digest(*(torch.as_tensor(mean_of_slices(mean, grid, start, start + 1)) for start in starts))
