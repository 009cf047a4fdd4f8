"""Unbounded coordinates of hyperparameters, as one vector, for a quadratic expansion of the likelihood.

A value above a bound b has the coordinate ``log(value - b)``, and a value below it ``log(b - value)``. The coordinate
of a value between two bounds is the logarithm of its odds. Other parameters are their own coordinates. The posterior
of a scale is much closer to a normal distribution in the logarithm than in GPyTorch's raw parameter, where a wide one
would extend below zero. In addition, differences of these coordinates do not depend on the units of the data.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from gpytorch import Module
from gpytorch.constraints import Interval
from torch import Tensor
from torch.nn import Parameter

_CLOSEST = 1e-12  # smallest distance to a bound, relative to the bound or to the distance of the bounds


@dataclass(frozen=True)
class Coordinate:
    """One parameter, with one or several entries.

    :param name: name of its value, such as "covar_module.outputscale".
    :param parameter: GPyTorch's raw parameter.
    :param constraint: maps the raw parameter to its value; None if they are the same.
    :param kind: "log above", "log below", "odds" or "value".
    """

    name: str
    parameter: Parameter
    constraint: Any
    kind: str

    @property
    def is_bounded(self) -> bool:
        return self.kind != "value"

    def value(self, coordinate: Tensor) -> Tensor:
        """Values, as a differentiable function of coordinates. Same shapes."""
        lower, upper = self._bounds()
        if self.kind == "log above":
            return lower + coordinate.exp()
        if self.kind == "log below":
            return upper - coordinate.exp()
        return lower + (upper - lower) * coordinate.sigmoid() if self.kind == "odds" else coordinate

    def raw(self, coordinate: Tensor) -> Tensor:
        """Raw parameters, as a differentiable function of coordinates. Same shapes."""
        value = self.value(coordinate)
        return value if self.constraint is None else self.constraint.inverse_transform(value)

    def present(self) -> Tensor:
        """The coordinates of the current value, in float64."""
        raw = self.parameter.detach().double()
        value = raw if self.constraint is None else self.constraint.transform(raw)
        lower, upper = self._bounds()
        if self.kind == "log above":
            return (value - lower).clamp_min(_CLOSEST * lower.abs().clamp_min(_CLOSEST)).log()
        if self.kind == "log below":
            return (upper - value).clamp_min(_CLOSEST * upper.abs().clamp_min(_CLOSEST)).log()
        return ((value - lower) / (upper - lower)).logit(_CLOSEST) if self.kind == "odds" else value

    def _bounds(self) -> tuple[Tensor, Tensor]:
        if self.constraint is None:
            return torch.tensor(0.0), torch.tensor(0.0)
        return self.constraint.lower_bound.double(), self.constraint.upper_bound.double()


class Coordinates:
    """All parameters of a module that require a gradient.

    :param module: a model.
    """

    def __init__(self, module: Module) -> None:
        self.parts = [
            _coordinate(name, parameter, constraint)
            for name, parameter, constraint in module.named_parameters_and_constraints()
            if parameter.requires_grad
        ]

    @property
    def names(self) -> list[str]:
        """A name for every entry, such as "covar_module.base_kernel.kernels.0.lengthscale"."""
        found = []
        for part in self.parts:
            count = part.parameter.numel()
            found += [part.name] if count == 1 else [f"{part.name}[{entry}]" for entry in range(count)]
        return found

    @property
    def is_bounded(self) -> Tensor:
        """Flags of the entries whose coordinates are logarithms. shape: (P,)"""
        return torch.tensor([part.is_bounded for part in self.parts for _ in range(part.parameter.numel())])

    def present(self) -> Tensor:
        """The coordinates of the module's parameters. shape: (P,)"""
        return torch.cat([part.present().reshape(-1) for part in self.parts])

    def values(self, coordinates: Tensor) -> Tensor:
        """Values, as a differentiable function of coordinates. shape: (P,)"""
        return self._each(coordinates, lambda part, own: part.value(own))

    @torch.no_grad()
    def set(self, coordinates: Tensor) -> None:
        """Sets the parameters to the given coordinates. shape: (P,)"""
        for part, own in zip(self.parts, self._split(coordinates), strict=True):
            part.parameter.copy_(part.raw(own))

    @contextmanager
    def restored(self) -> Iterator[None]:
        """At the end, restores the parameters bit for bit."""
        before = [part.parameter.detach().clone() for part in self.parts]
        try:
            yield
        finally:
            with torch.no_grad():
                for part, own in zip(self.parts, before, strict=True):
                    part.parameter.copy_(own)

    def gradient(self, coordinates: Tensor) -> Tensor:
        """The gradient with respect to coordinates, from the gradients of the parameters. shape: (P,)"""
        coordinates = coordinates.detach().requires_grad_()
        raw = self._each(coordinates, lambda part, own: part.raw(own))
        gradients = [
            torch.zeros_like(part.parameter) if part.parameter.grad is None else part.parameter.grad
            for part in self.parts
        ]
        (found,) = torch.autograd.grad(raw, coordinates, torch.cat([own.double().reshape(-1) for own in gradients]))
        return found

    def _each(self, coordinates: Tensor, function: Callable[[Coordinate, Tensor], Tensor]) -> Tensor:
        parts = zip(self.parts, self._split(coordinates), strict=True)
        return torch.cat([function(part, own).reshape(-1) for part, own in parts])

    def _split(self, coordinates: Tensor) -> list[Tensor]:
        """Coordinates of every parameter, in its shape."""
        pieces = coordinates.split([part.parameter.numel() for part in self.parts])
        return [own.view(part.parameter.shape) for part, own in zip(self.parts, pieces, strict=True)]


def _coordinate(name: str, parameter: Parameter, constraint: Interval | None) -> Coordinate:
    if constraint is not None and not constraint.enforced:
        constraint = None  # the parameter is the value
    kind = "value"
    if constraint is not None:
        lower, upper = (bool(bound.isfinite().all()) for bound in (constraint.lower_bound, constraint.upper_bound))
        kind = {(True, True): "odds", (True, False): "log above", (False, True): "log below"}.get((lower, upper), kind)
    owner, _, last = name.rpartition(".")
    last = last.removeprefix("raw_")
    return Coordinate(f"{owner}.{last}" if owner else last, parameter, constraint, kind)
