"""Expands the kernel of a model into terms. Each term is a product over the axes of its grid."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
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

_MATERN_NAMES = {0.5: "1/2", 1.5: "3/2", 2.5: "5/2"}
_STATIONARITY_TOLERANCE = 1e-3  # relative difference of covariances between places; float32 must pass


@dataclass(frozen=True)
class AxisKernel:
    """The kernel of a term along one axis: the product of one or more GPyTorch kernels."""

    kernels: tuple[Kernel, ...]

    def __call__(self, x1: Tensor, x2: Tensor) -> Tensor:
        """Covariance matrix of the first member of a batch. shape: (N, d) and (Q, d) -> (N, Q)"""
        with torch.no_grad():
            value = reduce(torch.mul, [to_dense(kernel(x1, x2)) for kernel in self.kernels])
            return value.reshape(-1, *value.shape[-2:])[0].double().cpu()

    def correlation(self, start: Tensor, steps: Tensor) -> Tensor:
        """``k(s, s + d) / k(s, s)`` of a stationary kernel. shape: s (columns,), d (n, columns) -> (n,)"""
        return self(start[None], start + steps)[0] / self(start[None], start[None])[0, 0]

    def matrix(self, points: Tensor) -> Tensor:
        """Correlations between all points; NaN where the variance is zero."""
        covariance = self(points, points)
        deviation = covariance.diagonal().clamp_min(0).sqrt()
        scale = torch.outer(deviation, deviation)
        return covariance / scale.masked_fill(scale == 0, torch.nan)

    def is_stationary(self, points: Tensor, steps: Tensor) -> bool:
        """Whether covariances depend only on the step, tested at three places. Kernels of codes are not stationary."""
        if any(isinstance(module, IndexKernel) for module in self.modules()):
            return False
        starts = [points.amin(0) + steps[i] for i in (0, len(steps) // 3, -1)]
        try:
            first, *others = [self(start[None], start + steps)[0] for start in starts]
        except (IndexError, RuntimeError, ValueError):
            return False  # the kernel is defined only at the points of its axis
        tolerance = _STATIONARITY_TOLERANCE * float(first.abs().max())
        return all(torch.allclose(first, other, rtol=0, atol=tolerance) for other in others)

    def modules(self) -> Iterator[torch.nn.Module]:
        for kernel in self.kernels:
            yield from kernel.modules()

    @property
    def length_scales(self) -> list[float]:
        """Length-scales in units of the axis, one per kernel or column; those of periodic kernels have no unit."""
        found = []
        for kernel in self.kernels:
            columns = kernel.columns if isinstance(kernel, _AlongAxis) else slice(None)
            for module in kernel.modules():
                if isinstance(module, Kernel) and module.has_lengthscale and not isinstance(module, PeriodicKernel):
                    ard = module.lengthscale.size(-1) > 1
                    found.append(module.lengthscale[..., columns] if ard else module.lengthscale)
        return _first_members(found)

    @property
    def periods(self) -> list[float]:
        return _first_members([one.period_length for one in self.modules() if isinstance(one, PeriodicKernel)])

    @property
    def name(self) -> str:
        return " × ".join(map(describe, self.kernels))


_Term = tuple[CartesianGrid, list[AxisKernel]]


def kernel_terms(model: Any) -> tuple[CartesianGrid, list[list[AxisKernel]]]:
    """The grid of a model, or of a kernel, and its terms that are products over axes; other terms are left out."""
    roots = list(_topmost(model)) if isinstance(model, torch.nn.Module) else []
    if not roots:
        raise ValueError(f"model: got {type(model).__name__} without a GappyGridKernel; expected a model that has one")
    inputs = getattr(model, "train_inputs", None)
    terms: list[_Term] = []
    for root in roots:
        first = next(module for module in root.modules() if isinstance(module, GappyGridKernel))
        width = inputs[0].size(-1) if inputs else _columns_needed(root, first)
        columns = resolve_active_dims(root, tuple(range(width)))
        terms += _terms(root, columns, find_grid_kernel(root, columns) or GridKernelRef(first, columns))
    if not terms:
        raise ValueError(f"model: got {describe(roots[0])}; expected a sum with a term that is a product over axes")
    grid = terms[0][0]
    for other, _ in terms:
        if any(not same_values(a, b) for a, b in zip(other.axes, grid.axes, strict=True)):
            raise ValueError(f"model: got terms on the grids {grid} and {other}; expected one grid")
    return grid, [axis_kernels for _, axis_kernels in terms]


def describe(kernel: Any) -> str:
    """A short name of a kernel, such as "Matérn 3/2 + Periodic"."""
    if isinstance(kernel, AdditiveKernel | ProductKernel):
        joined = [describe(child) for child in kernel.kernels]
        if isinstance(kernel, AdditiveKernel):
            return " + ".join(joined)
        return " × ".join(f"({name})" if " + " in name else name for name in joined)
    inside = getattr(kernel, "base_kernel", getattr(kernel, "kernel", None))  # of a scale, or on columns
    if isinstance(inside, Kernel):
        return describe(inside)
    if isinstance(kernel, MaternKernel):
        return f"Matérn {_MATERN_NAMES.get(kernel.nu, kernel.nu)}"
    name = type(kernel).__name__.removesuffix("Kernel").strip("_")
    return "constant" if name == "One" else name


def _terms(kernel: Kernel, columns: tuple[int, ...], host: GridKernelRef) -> list[_Term]:
    """Expands a kernel by the distributive law, like `kernels.composite`. Scales do not change correlations."""
    if isinstance(kernel, GappyGridKernel):
        return [_in_order_of_inputs(kernel)]
    if isinstance(kernel, gpytorch.kernels.ScaleKernel):
        return _terms(kernel.base_kernel, columns, host)
    if isinstance(kernel, AdditiveKernel | ProductKernel):
        children = [_terms(child, resolve_active_dims(child, columns), host) for child in kernel.kernels]
        return reduce(add if isinstance(kernel, AdditiveKernel) else _products, children)
    inside = [module for module in kernel.modules() if isinstance(module, GappyGridKernel)]
    return [term for part in inside or as_grid_kernels(kernel, columns, host) for term in _terms(part, columns, host)]


class _AlongAxis(Kernel):
    """The kernel of a block of axes along one axis, with equal coordinates on the others.

    :param kernel: kernel on all columns of the block.
    :param columns: the columns of the axis, within the block.
    :param width: number of columns of the block.
    """

    def __init__(self, kernel: Kernel, columns: slice, width: int) -> None:
        super().__init__()
        self.kernel, self.columns, self.width = kernel, columns, width

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Any:
        return self.kernel(self._wide(x1), self._wide(x2), diag=diag, **params)

    def _wide(self, x: Tensor) -> Tensor:
        wide = x.new_zeros(*x.shape[:-1], self.width)
        wide[..., self.columns] = x
        return wide


def _axis_kernels(kernel: GappyGridKernel) -> Iterator[AxisKernel]:
    for own, axes in zip(kernel.kernels, kernel.blocks, strict=True):
        start, stop = kernel.grid.columns[axes[0]].start, kernel.grid.columns[axes[-1]].stop
        for axis in axes:
            columns = kernel.grid.columns[axis]
            here = slice(columns.start - start, columns.stop - start)
            yield AxisKernel((own if len(axes) == 1 else _AlongAxis(own, here, stop - start),))


def _in_order_of_inputs(kernel: GappyGridKernel) -> _Term:
    """The axes of a grid kernel, which may be rearranged, in the order of their input columns."""
    grid, kernels = kernel.grid, list(_axis_kernels(kernel))
    if kernel.active_dims is None:
        return grid, kernels
    order = sorted(range(len(kernels)), key=lambda axis: int(kernel.active_dims[grid.columns[axis].start]))
    return CartesianGrid([grid.axes[axis] for axis in order]), [kernels[axis] for axis in order]


def _products(first: list[_Term], second: list[_Term]) -> list[_Term]:
    return [
        (grid, [AxisKernel(p.kernels + q.kernels) for p, q in zip(own, others, strict=True)])
        for grid, own in first
        for _, others in second
    ]


def _topmost(module: torch.nn.Module) -> Iterator[Kernel]:
    """The outermost kernels with a grid kernel inside; a model may add several in its ``forward``."""
    if isinstance(module, Kernel):
        if any(isinstance(inside, GappyGridKernel) for inside in module.modules()):
            yield module
        return
    for child in module.children():
        yield from _topmost(child)


def _columns_needed(root: Kernel, first: GappyGridKernel) -> int:
    active = [one.active_dims for one in root.modules() if isinstance(one, Kernel) and one.active_dims is not None]
    return max([first.grid.num_columns, *(int(dims.max()) + 1 for dims in active)])


def _first_members(parameters: Sequence[Tensor]) -> list[float]:
    """The values of the first member of each batch of parameters."""
    return [value for one in parameters for value in one.detach().reshape(-1, one.size(-1))[0].tolist()]
