"""Parameters whose optimum is at the lower bound of their constraint, such as the noise of almost noise-free data.

Near its bound b, a raw parameter r has the value ``b + exp(r)``. The slope of the loss decreases with the distance to
the bound, so steps in r approach the bound but never reach it, and the curvature tends to zero. If a parameter is close
to its bound and still decreases, it is set to the bound and held there, and its slope is ignored. If the loss then
decreases away from the bound, the parameter is released, and not held again.
"""

from collections.abc import Iterator, Mapping

import torch
from gpytorch.constraints import Interval
from torch import Tensor
from torch.nn import Module, Parameter

_CLOSE = 0.05  # a value is close to its bound if the relative distance is smaller
_AT = 1e-6  # relative distance to the bound of parameters that are held

Bounds = Mapping[Parameter, Interval]


def bounds_of(model: Module) -> dict[Parameter, Interval]:
    """The constraints with a lower bound above zero. For a bound of zero, there is no relative distance."""
    named: Iterator[tuple[str, Parameter, Interval | None]] = model.named_parameters_and_constraints()  # type: ignore[operator]
    return {parameter: own for _, parameter, own in named if own is not None and own.enforced and _is_positive(own)}


def _is_positive(constraint: Interval) -> bool:
    lower = constraint.lower_bound
    return bool((torch.isfinite(lower) & (lower > 0)).all())


def arrived(parameter: Parameter, bounds: Bounds) -> Tensor:
    """Flags of entries that are close to their lower bound, and that a step against the gradient would decrease."""
    if parameter not in bounds or parameter.grad is None:
        return torch.zeros_like(parameter, dtype=torch.bool)
    constraint = bounds[parameter]
    value = constraint.transform(parameter.detach())
    return (value <= (1 + _CLOSE) * constraint.lower_bound) & (parameter.grad > 0)


def put_at_bound(parameter: Parameter, entries: Tensor, bounds: Bounds, close: bool = False) -> None:
    """Sets some entries to their lower bound, up to the distance that the transform needs; or close to it."""
    if bool(entries.any()):
        constraint = bounds[parameter]
        value = (1 + (_CLOSE if close else _AT)) * constraint.lower_bound.to(parameter)
        with torch.no_grad():
            parameter.copy_(torch.where(entries, constraint.inverse_transform(value), parameter))
