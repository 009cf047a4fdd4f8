"""The options of ``fill_gaps``, checked before anything is computed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
from gpytorch.kernels import Kernel

from gpytorch_gaps.filling.arrays.max_gap import MaxGap, read_max_gap
from gpytorch_gaps.filling.axes.axis import Axis
from gpytorch_gaps.filling.transforms.fit import check_transform
from gpytorch_gaps.utils.checks import check_integer, check_number

_SINGLE = (Kernel, float, int, str, timedelta, np.generic)  # entries that may be given without a list for one axis


@dataclass(frozen=True)
class Options:
    """The options of ``fill_gaps``. Its docstring describes them."""

    kernels: Any = "auto"
    periods: Any = None
    trend: bool = True
    smooth: bool = False
    joint: bool = False
    noise: Any = None
    mean: Any = None
    std: bool = True
    check: bool = True
    steps: int = 40
    tolerance: float = 1e-2
    memory: float = 2**32
    seed: int = 0
    progress: bool = True
    budget: float | None = None
    where: Any = None
    max_gap: Any = None
    untrusted: Any = None
    robust: Any = "auto"
    transform: Any = None
    bounds: Any = None

    def __post_init__(self) -> None:
        for name in ("trend", "smooth", "joint", "std", "check", "progress"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}: got {getattr(self, name)!r}, expected True or False")
        if self.robust not in (True, False, "auto"):
            raise ValueError(f"robust: got {self.robust!r}, expected True, False or 'auto'")
        for name, least in (("steps", 1), ("seed", 0)):
            check_integer(name, getattr(self, name), at_least=least)
        check_number("tolerance", self.tolerance, above=0)
        check_number("memory", self.memory, above=0)
        if self.budget is not None:
            check_number("budget", self.budget, above=0)
        if self.is_transformed:
            self._check_transform()

    @property
    def is_transformed(self) -> bool:
        """Whether values are transformed before they are modelled."""
        return self.transform is not None or self.bounds is not None

    def _check_transform(self) -> None:
        """Raises if there is no such transform, or if it cannot be combined with the other options."""
        if not isinstance(self.transform, Mapping) and not isinstance(self.bounds, Mapping):  # mappings: checked later
            check_transform(self.transform, self.bounds)
        named = "transform" if self.transform is not None else "bounds"
        for other, given in (("joint", self.joint or None), ("noise", self.noise)):
            if given is not None:
                raise ValueError(f"{named}: got one together with {other}, expected only one of these two options")

    def kernels_of(self, axes: Sequence[Axis]) -> list[Kernel | None]:
        """The user's kernel for each axis; None if a kernel is to be chosen."""
        return [_kernel(axis, one) for axis, one in zip(axes, _by_axis("kernels", self.kernels, axes), strict=True)]

    def periods_of(self, axes: Sequence[Axis]) -> list[list[float] | None]:
        """The user's periods for each axis, in its units; None if periods are to be detected."""
        found: list[list[float] | None] = []
        for axis, given in zip(axes, _by_axis("periods", self.periods, axes), strict=True):
            if given is None:
                found.append(None)
                continue
            listed = given if isinstance(given, Sequence) else [given]
            found.append([check_number(f"periods: {axis.name}", one, above=0) for one in listed])
            if found[-1] and (axis.points.shape[1] > 1 or axis.period is not None):
                raise ValueError(f"periods: {axis.name} is a {axis.kind}, expected an axis of one column")
        return found

    def max_gaps_of(self, axes: Sequence[Axis]) -> list[MaxGap]:
        """The longest runs of gaps to fill, along the axes that the user named."""
        given = enumerate(zip(axes, _by_axis("max_gap", self.max_gap, axes), strict=True))
        return [read_max_gap(number, axis, length) for number, (axis, length) in given if length is not None]


def _by_axis(argument: str, given: Any, axes: Sequence[Axis]) -> list[Any]:
    """One entry per axis, from a list or from a mapping by name or number."""
    names = [axis.name for axis in axes]
    if given is None or (isinstance(given, str) and given == "auto"):
        return [None] * len(axes)
    if isinstance(given, _SINGLE) and len(axes) == 1:
        return [given]
    if isinstance(given, Mapping):
        result: list[Any] = [None] * len(axes)
        for key, value in given.items():
            number = isinstance(key, int) and -len(axes) <= key < len(axes)
            if not number and key not in names:
                raise ValueError(f"{argument}: got the axis {key!r}, expected one of {names}, or its number")
            result[key if number else names.index(key)] = value
        return result
    if isinstance(given, str) or not isinstance(given, Sequence) or len(given) != len(axes):
        came = f"{len(given)}" if isinstance(given, list | tuple) else type(given).__name__
        came = repr(given) if isinstance(given, str) else came
        raise ValueError(f"{argument}: got {came}, expected one for each of {names}, or a mapping by name")
    return list(given)


def _kernel(axis: Axis, given: Any) -> Kernel | None:
    if given is None or (isinstance(given, str) and given == "auto"):
        return None
    if not isinstance(given, Kernel):
        raise ValueError(f"kernels: {axis.name} got {type(given).__name__}, expected a GPyTorch kernel or 'auto'")
    if given.batch_shape:
        raise ValueError(f"kernels: {axis.name} got a batch of kernels, expected one")
    return given
