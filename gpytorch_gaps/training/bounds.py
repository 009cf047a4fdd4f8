"""Parameters whose optimum is at the lower bound of their constraint, such as the noise of data with hardly any.

Near its bound b, a raw parameter r stands for the value ``b + exp(r)``. The slope of the loss decreases with the
distance to the bound, so steps in r come closer and closer but never arrive, and the curvature tends to zero. A
parameter that is close to its bound and still moves down is put there and held, and its slope no longer counts. If the
loss turns out to decrease away from the bound, the parameter is released, once and for all.
"""

from collections.abc import Iterator, Mapping

import torch
from gpytorch.constraints import Interval
from torch import Tensor
from torch.nn import Module, Parameter

_CLOSE = 0.05  # to the bound, relative to it
_AT = 1e-6  # likewise, of parameters that are held

Bounds = Mapping[Parameter, Interval]


def bounds_of(model: Module) -> dict[Parameter, Interval]:
    """The constraints with a lower bound above zero: nothing tells how far from a bound of zero is close to it."""
    named: Iterator[tuple[str, Parameter, Interval | None]] = model.named_parameters_and_constraints()  # type: ignore[operator]
    return {parameter: own for _, parameter, own in named if own is not None and own.enforced and _is_positive(own)}


def _is_positive(constraint: Interval) -> bool:
    lower = constraint.lower_bound
    return bool((torch.isfinite(lower) & (lower > 0)).all())


def arrived(parameter: Parameter, bounds: Bounds) -> Tensor:
    """Which entries are close to their lower bound, and would be lowered further by their gradient."""
    if parameter not in bounds or parameter.grad is None:
        return torch.zeros_like(parameter, dtype=torch.bool)
    constraint = bounds[parameter]
    value = constraint.transform(parameter.detach())
    return (value <= (1 + _CLOSE) * constraint.lower_bound) & (parameter.grad > 0)


def put_at_bound(parameter: Parameter, entries: Tensor, bounds: Bounds, close: bool = False) -> None:
    """Sets some entries to their lower bound, apart from what the transform needs; or close to it."""
    if bool(entries.any()):
        constraint = bounds[parameter]
        value = (1 + (_CLOSE if close else _AT)) * constraint.lower_bound.to(parameter)
        with torch.no_grad():
            parameter.copy_(torch.where(entries, constraint.inverse_transform(value), parameter))
