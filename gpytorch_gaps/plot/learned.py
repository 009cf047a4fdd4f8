"""What a model's kernel is along each axis of its grid: terms of a sum, each a product over axes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import gpytorch
import torch
from gpytorch.kernels import AdditiveKernel, IndexKernel, Kernel, MaternKernel, PeriodicKernel, ProductKernel
from linear_operator import to_dense
from torch import Tensor

from gpytorch_gaps.grid.cartesian import CartesianGrid
from gpytorch_gaps.kernels import GappyGridKernel
from gpytorch_gaps.kernels.composite import as_grid_kernels
from gpytorch_gaps.operators.inspect import GridKernelRef, find_grid_kernel, resolve_active_dims
from gpytorch_gaps.utils.tensors import same_values

_NU = {0.5: "1/2", 1.5: "3/2", 2.5: "5/2"}
_STATIONARY = 1e-3  # covariances that differ by less from place to place, relatively; float32 must pass


@dataclass(frozen=True)
class Factor:
    """A term's kernel along one axis: the product of one kernel or more."""

    kernels: tuple[Kernel, ...]

    def __call__(self, x1: Tensor, x2: Tensor) -> Tensor:
        """Its covariance, of the first member of a batch. shape: (N, d) and (Q, d) -> (N, Q)"""
        with torch.no_grad():
            parts = [to_dense(kernel(x1, x2)) for kernel in self.kernels]
            value = reduce(torch.mul, parts)
            return value.reshape(-1, *value.shape[-2:])[0].double().cpu()

    def correlation(self, start: Tensor, steps: Tensor) -> Tensor:
        """``k(s, s + d) / k(s, s)`` of a stationary one, for steps d `(n, columns)` from s `(columns,)`."""
        return self(start[None], start + steps)[0] / self(start[None], start[None])[0, 0]

    def matrix(self, points: Tensor) -> Tensor:
        """Correlations of all pairs; NaN where there is no variance."""
        covariance = self(points, points)
        deviation = covariance.diagonal().clamp_min(0).sqrt()
        scale = torch.outer(deviation, deviation)
        return covariance / scale.masked_fill(scale == 0, torch.nan)

    def is_stationary(self, points: Tensor, steps: Tensor) -> bool:
        """Whether covariances depend on the step alone, tried from three places. Codes have no steps."""
        if any(isinstance(module, IndexKernel) for module in self.modules()):
            return False
        starts = [points.amin(0) + steps[i] for i in (0, len(steps) // 3, -1)]
        try:
            first, *others = [self(start[None], start + steps)[0] for start in starts]
        except (IndexError, RuntimeError, ValueError):
            return False  # a kernel that knows the places of its axis only
        tolerance = _STATIONARY * float(first.abs().max())
        return all(torch.allclose(first, other, rtol=0, atol=tolerance) for other in others)

    def modules(self) -> Iterator[torch.nn.Module]:
        for kernel in self.kernels:
            yield from kernel.modules()

    @property
    def length_scales(self) -> list[float]:
        """In units of the axis: one per kernel, or per column. Those of periodic kernels are not in its units."""
        found = [
            module.lengthscale
            for module in self.modules()
            if isinstance(module, Kernel) and module.has_lengthscale and not isinstance(module, PeriodicKernel)
        ]
        return [float(value) for one in found for value in _first_member(one)]

    @property
    def periods(self) -> list[float]:
        found = [module.period_length for module in self.modules() if isinstance(module, PeriodicKernel)]
        return [float(value) for one in found for value in _first_member(one)]

    @property
    def name(self) -> str:
        return " × ".join(map(describe, self.kernels))


@dataclass(frozen=True)
class Learned:
    """The grid of a model, and of each term of its kernel one factor an axis."""

    grid: CartesianGrid
    terms: list[list[Factor]]


def learned(model: torch.nn.Module) -> Learned:
    """What is drawn of a model, or of a kernel. Terms that are no product over axes are left out."""
    roots = list(_topmost(model)) if isinstance(model, torch.nn.Module) else []
    if not roots:
        raise ValueError(f"model: got {type(model).__name__} without a GappyGridKernel; expected one with it inside")
    inputs = getattr(model, "train_inputs", None)
    terms: list[list[Factor]] = []
    grid = None
    for root in roots:
        first = next(module for module in root.modules() if isinstance(module, GappyGridKernel))
        grid = first.grid if grid is None else grid
        width = inputs[0].size(-1) if inputs else _columns_needed(root, first)
        columns = resolve_active_dims(root, tuple(range(width)))
        host = find_grid_kernel(root, columns) or GridKernelRef(first, columns)
        for term in _terms(root, columns, host):
            if any(not same_values(a, b) for a, b in zip(term.grid.axes, grid.axes, strict=True)):
                raise ValueError(f"model: got terms on the grids {grid} and {term.grid}; expected one grid")
            terms.append([Factor(tuple(parts)) for parts in term.parts])
    assert grid is not None
    if not terms:
        raise ValueError(f"model: got {describe(roots[0])}; expected a sum with a term that is a product over axes")
    return Learned(grid, terms)


def describe(kernel: Any) -> str:
    """Such as "Matérn 3/2 + Periodic"."""
    if isinstance(kernel, AdditiveKernel | ProductKernel):
        joined = [describe(child) for child in kernel.kernels]
        if isinstance(kernel, AdditiveKernel):
            return " + ".join(joined)
        return " × ".join(f"({name})" if " + " in name else name for name in joined)
    inside = getattr(kernel, "base_kernel", getattr(kernel, "kernel", None))  # scaled, or lifted
    if isinstance(inside, Kernel):
        return describe(inside)
    name = type(kernel).__name__.removesuffix("Kernel").strip("_")
    if isinstance(kernel, MaternKernel):
        return f"Matérn {_NU.get(kernel.nu, kernel.nu)}"
    return "constant" if name == "One" else name


@dataclass(frozen=True)
class _Term:
    grid: CartesianGrid
    parts: list[list[Kernel]]  # of each axis


def _terms(kernel: Kernel, columns: tuple[int, ...], host: GridKernelRef) -> list[_Term]:
    """By the distributive law, as in `kernels.composite`; scales do not change correlations."""
    if isinstance(kernel, GappyGridKernel):
        return [_Term(kernel.grid, [[own] for own in kernel.kernels])]
    if isinstance(kernel, gpytorch.kernels.ScaleKernel):
        return _terms(kernel.base_kernel, columns, host)
    if isinstance(kernel, AdditiveKernel):
        return [term for child in kernel.kernels for term in _terms(child, resolve_active_dims(child, columns), host)]
    if isinstance(kernel, ProductKernel):
        first, *others = [_terms(child, resolve_active_dims(child, columns), host) for child in kernel.kernels]
        for other in others:
            first = [
                _Term(a.grid, [p + q for p, q in zip(a.parts, b.parts, strict=True)]) for a in first for b in other
            ]
        return first
    inside = [module for module in kernel.modules() if isinstance(module, GappyGridKernel)]
    found = inside or as_grid_kernels(kernel, columns, host)
    return [term for grid_kernel in found for term in _terms(grid_kernel, columns, host)]


def _topmost(module: torch.nn.Module) -> Iterator[Kernel]:
    """The outermost kernels with a grid kernel inside: a model may add up several in its ``forward``."""
    if isinstance(module, Kernel):
        if any(isinstance(inside, GappyGridKernel) for inside in module.modules()):
            yield module
        return
    for child in module.children():
        yield from _topmost(child)


def _columns_needed(root: Kernel, first: GappyGridKernel) -> int:
    active: Sequence[Tensor] = [
        module.active_dims for module in root.modules() if isinstance(module, Kernel) and module.active_dims is not None
    ]
    return max([first.grid.num_columns, *(int(dims.max()) + 1 for dims in active)])


def _first_member(parameter: Tensor) -> list[float]:
    return parameter.detach().reshape(-1, parameter.size(-1))[0].tolist()
