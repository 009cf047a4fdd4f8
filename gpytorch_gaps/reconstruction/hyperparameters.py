"""The hyperparameters of product kernels and the noise as one vector, and derivatives of the factors in a basis.

A hyperparameter that has only a lower bound is represented by the logarithm of its distance to the bound. Any other is
represented by its raw value. The last entry of the vector is the logarithm of the noise variance.

The derivative of a factor with respect to hyperparameter p, in units of its eigenvalues,

    Y_ip = t_i^(-1/2) Phi_i' dK_i/dp Phi_i t_i^(-1/2),

has only the size of the basis. It is a central difference of the projected factor. Its relative error at an eigenvalue
with the logarithmic derivative c is ``(c h)^2 / 6``. This works for any kernel, and no eigenvector is differentiated.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from gpytorch.constraints import Interval
from gpytorch.kernels import Kernel
from torch import Tensor
from torch.nn import Parameter

from gpytorch_gaps.grid.cartesian import CartesianGrid
from gpytorch_gaps.linalg.truncated import TruncatedEigen
from gpytorch_gaps.reconstruction.inputs import kernel_matrix

_DIFFERENCE = 3e-4  # h, a difference of logarithms
_MOST = 500  # largest number of hyperparameters: all derivatives are held in memory

AxisDerivatives = dict[int, Tensor]
"""Y_ip of one hyperparameter p for every axis i that it belongs to. shape: (r_i, r_i)"""


class Hyperparameters:
    """The noise, and the hyperparameters of the given kernels that require a gradient.

    :param kernels: one kernel or matrix per axis, in float64. Their parameters are set in place.
    :param noise: the noise variance.
    :raises ValueError: if there are too many hyperparameters.
    """

    def __init__(self, kernels: Sequence[Kernel | Tensor], noise: float) -> None:
        self.kernels, self.noise = list(kernels), noise
        self.names: list[str] = []
        self._entries: list[tuple[Parameter, Interval | None, list[int]]] = []
        known: dict[int, int] = {}
        for axis, kernel in enumerate(self.kernels):
            if isinstance(kernel, Tensor):
                continue
            for name, parameter, constraint in kernel.named_parameters_and_constraints():
                if not parameter.requires_grad:
                    continue
                if id(parameter) in known:  # several axes share a kernel
                    self._entries[known[id(parameter)]][2].append(axis)
                    continue
                known[id(parameter)] = len(self._entries)
                self._entries.append((parameter, constraint, [axis]))
                self.names += self._names_of(f"axis {axis}: {name.replace('raw_', '')}", parameter)
        self.names.append("noise")
        if len(self.names) > _MOST:
            raise ValueError(f"kernels: got {len(self.names) - 1} hyperparameters, expected fewer than {_MOST}")

    @staticmethod
    def _names_of(name: str, parameter: Parameter) -> list[str]:
        return [name] if parameter.numel() == 1 else [f"{name}[{entry}]" for entry in range(parameter.numel())]

    def __len__(self) -> int:
        return len(self.names)

    @property
    def vector(self) -> Tensor:
        """All hyperparameters, the noise last. shape: (P,)"""
        parts = []
        for parameter, constraint, _ in self._entries:
            raw, positive = parameter.detach().double().flatten(), _positive(constraint)
            parts.append(raw if positive is None else (positive.transform(raw) - positive.lower_bound).log())
        return torch.cat([*parts, torch.tensor([math.log(self.noise)], dtype=torch.float64)])

    def set(self, vector: Tensor) -> None:
        """Set the kernels and the noise."""
        start = 0
        for parameter, constraint, _ in self._entries:
            part = vector[start : start + parameter.numel()]
            start += parameter.numel()
            if (positive := _positive(constraint)) is not None:
                part = positive.inverse_transform(positive.lower_bound + part.exp())
            with torch.no_grad():
                parameter.copy_(part.view_as(parameter))
        self.noise = math.exp(float(vector[-1]))

    @property
    def values(self) -> dict[str, float]:
        """Values of the hyperparameters by name."""
        parts = [_value(parameter.detach().flatten(), constraint) for parameter, constraint, _ in self._entries]
        numbers = torch.cat([*parts, torch.tensor([self.noise], dtype=torch.float64)])
        return dict(zip(self.names, numbers.tolist(), strict=True))

    def copies(self) -> list[Kernel | Tensor]:
        """Copies of the kernels. A kernel that several axes share remains a single kernel."""
        return copy.deepcopy(self.kernels)

    @torch.no_grad()
    def factors(self, grid: CartesianGrid) -> list[Tensor]:
        """K_i of a grid. shape: (m_i, m_i) each"""
        axes = enumerate(zip(self.kernels, grid.axes, strict=True))
        return [kernel_matrix(axis, kernel, x) for axis, (kernel, x) in axes]

    @torch.no_grad()
    def derivatives(self, grid: CartesianGrid, basis: TruncatedEigen) -> list[AxisDerivatives]:
        """Y_ip of every hyperparameter except the noise."""
        scaled = [vectors / values.sqrt() for vectors, values in zip(basis.vectors, basis.values, strict=True)]
        vector, found = self.vector, []
        with self._restored():
            for place, axes in enumerate(self._axes()):
                difference: AxisDerivatives = {}
                for step in (_DIFFERENCE, -_DIFFERENCE):
                    moved = vector.clone()
                    moved[place] += step
                    self.set(moved)
                    for axis in axes:
                        matrix = kernel_matrix(axis, self.kernels[axis], grid.axes[axis])
                        part = (scaled[axis].mT @ (matrix @ scaled[axis])) / (2.0 * step)
                        difference[axis] = difference[axis] + part if axis in difference else part
                found.append(difference)
        return found

    def _axes(self) -> Iterator[list[int]]:
        """The axes of every entry of the vector except the noise."""
        for parameter, _, axes in self._entries:
            for _ in range(parameter.numel()):
                yield axes

    @contextmanager
    def _restored(self) -> Iterator[None]:
        """At the end, restores the parameters bit for bit."""
        before, noise = [parameter.detach().clone() for parameter, _, _ in self._entries], self.noise
        try:
            yield
        finally:
            self.noise = noise
            with torch.no_grad():
                for (parameter, _, _), old in zip(self._entries, before, strict=True):
                    parameter.copy_(old)


def _positive(constraint: Interval | None) -> Interval | None:
    """The constraint if it is only a lower bound, else None."""
    if constraint is None or not bool(constraint.lower_bound.isfinite().all() & constraint.upper_bound.isinf().all()):
        return None
    return constraint


def _value(raw: Tensor, constraint: Interval | None) -> Tensor:
    return raw if constraint is None else constraint.transform(raw)
