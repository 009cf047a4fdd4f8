"""Cubic convolution (Keys 1981) along one axis: the places that a point depends on, and their weights."""

import torch
from torch import Tensor

_CUBIC = 4  # number of places that a point depends on
_OUTSIDE = 1e-7  # allowed rounding of points on the border of the grid, as a fraction of the spacing


def cubic_on_axis(number: int, axis: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The first place and the weights of four. shape: (m,) and (N,) -> (N,) and (N, 4)"""
    size, wide = len(axis), axis.double()
    if axis.dim() != 1 or size < _CUBIC:
        raise ValueError(f"axes: axis {number} has shape {tuple(axis.shape)}, expected at least {_CUBIC} places")
    step = (wide[-1] - wide[0]) / (size - 1)
    place = (x.double() - wide[0]) / step  # in units of the spacing
    steps = wide.diff() / step - 1.0
    smallest, largest = (place.amin(), place.amax()) if len(x) else (place.new_zeros(()), place.new_zeros(()))
    checks = torch.stack([step, steps.abs().amax(), smallest, largest, wide[0], wide[-1]]).tolist()  # one read
    if not checks[0] > 0 or not checks[1] < 1e-2:
        raise ValueError(f"axes: axis {number} has other spacings, expected ascending, equally spaced places")
    if not (checks[2] >= -_OUTSIDE and checks[3] <= size - 1 + _OUTSIDE):
        low, high = (checks[4] + checks[0] * own for own in checks[2:4])
        raise ValueError(
            f"x: column {number} reaches from {low:.6g} to {high:.6g}, expected points on the grid, from "
            f"{checks[4]:.6g} to {checks[5]:.6g}; a larger grid_bounds gives a larger grid"
        )
    lower = place.floor()
    first = lower.long() - 1
    distance = (place - lower).unsqueeze(-1) + torch.tensor([1.0, 0.0, -1.0, -2.0], device=x.device).double()
    weights = _keys(distance.abs())
    # near the border, a point may not have two places on either side: use the nearest place only
    inside = first.clamp(0, size - _CUBIC)
    nearest = (place.round().long().unsqueeze(-1) - inside.unsqueeze(-1)).clamp(0, _CUBIC - 1)
    alone = torch.zeros_like(weights).scatter(-1, nearest, 1.0)
    return inside, torch.where((inside == first).unsqueeze(-1), weights, alone)


def _keys(u: Tensor) -> Tensor:
    """The kernel of cubic convolution at distances u of up to two spacings."""
    near = (1.5 * u - 2.5) * u * u + 1.0
    far = ((-0.5 * u + 2.5) * u - 4.0) * u + 2.0
    return torch.where(u < 1.0, near, far)
