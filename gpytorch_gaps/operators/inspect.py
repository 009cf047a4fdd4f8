"""Finds grid kernels among composite kernels, the input columns they use, and the points of a covariance."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from gpytorch.kernels import AdditiveKernel, Kernel, ProductKernel, ScaleKernel
from gpytorch.lazy import LazyEvaluatedKernelTensor
from linear_operator.operators import AddedDiagLinearOperator, LinearOperator, SumLinearOperator
from torch import Tensor

from gpytorch_gaps.grid.cartesian import CartesianGrid
from gpytorch_gaps.grid.protocol import GridKernel
from gpytorch_gaps.operators.interpolated_kronecker import InterpolatedKroneckerOperator
from gpytorch_gaps.operators.selected_kronecker import SelectedKroneckerOperator
from gpytorch_gaps.operators.selected_kronecker_sum import SelectedKroneckerSumOperator
from gpytorch_gaps.utils.cache import TensorCache
from gpytorch_gaps.utils.tensors import same_values

_active_dims = TensorCache(size=64)  # lists of numbers: reading them from a device takes time

# -- kernels and their columns -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GridKernelRef:
    """A grid kernel inside a composite kernel, and the input columns that it receives, in its own order."""

    kernel: GridKernel
    columns: tuple[int, ...]

    def points(self, x: Tensor) -> Tensor:
        """The grid's columns of x."""
        return select_columns(x, self.columns)


def find_grid_kernel(kernel: Kernel, columns: tuple[int, ...]) -> GridKernelRef | None:
    """The first grid kernel inside `kernel`, which is evaluated on the given input columns."""
    return next(iter_grid_kernels(kernel, columns), None)


def iter_grid_kernels(kernel: Kernel, columns: tuple[int, ...]) -> Iterator[GridKernelRef]:
    """All grid kernels inside scales, sums and products."""
    if isinstance(kernel, GridKernel):
        yield GridKernelRef(kernel, columns)
    elif isinstance(kernel, ScaleKernel):
        yield from iter_grid_kernels(kernel.base_kernel, columns)
    elif isinstance(kernel, AdditiveKernel | ProductKernel):
        for child in kernel.kernels:
            yield from iter_grid_kernels(child, resolve_active_dims(child, columns))


def resolve_active_dims(kernel: Kernel, columns: tuple[int, ...]) -> tuple[int, ...]:
    """The input columns that the `active_dims` of a kernel, called on `columns`, select."""
    if kernel.active_dims is None:
        return columns
    active = _active_dims.cached("active", (kernel.active_dims,), kernel.active_dims.tolist)
    return tuple(columns[i] for i in active)


def select_columns(x: Tensor, columns: Sequence[int]) -> Tensor:
    """Columns of x, selected without an index tensor, which would have to be copied to the device of x."""
    if tuple(columns) == tuple(range(x.size(-1))):
        return x
    return torch.stack([x[..., column] for column in columns], -1)


# -- points of a covariance --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GridPoints:
    """The grid's columns of some points, and their grid kernel if it is known."""

    x: Tensor  # shape: (*batch, N, D)
    kernel: GridKernel | None = None

    def cells_on(self, grid: CartesianGrid) -> Tensor | None:
        """Flat cells of the points, if all members of a batch share them and all lie on `grid`. shape: (N,)"""
        shared = one_member(self.x)
        cells = None if shared is None or self.kernel is None else self.kernel.cells_of(shared)
        if cells is None or not all(map(same_values, cells.axes, grid.axes)):
            return None
        return cells.index


def grid_points(covariance: LinearOperator) -> GridPoints | None:
    """The points of the rows of a covariance, or None if they are not stored.

    The kernel is only known if the covariance has not been evaluated yet.
    """
    if isinstance(covariance, AddedDiagLinearOperator):
        found = grid_points(covariance._linear_op)
        return None if found is None else GridPoints(found.x)
    if isinstance(covariance, SumLinearOperator):
        return next(filter(None, map(grid_points, covariance.linear_ops)), None)
    if isinstance(covariance, LazyEvaluatedKernelTensor):
        ref = find_grid_kernel(covariance.kernel, tuple(range(covariance.x1.size(-1))))
        return None if ref is None else GridPoints(ref.points(covariance.x1), ref.kernel)
    x = getattr(getattr(covariance, "base_linear_op", covariance), "row_points", None)  # unwraps a scaled operator
    return None if x is None else GridPoints(x)


def one_member(x: Tensor) -> Tensor | None:
    """The points that all members of a batch share; None if they differ. shape: (*batch, N, D) -> (N, D)"""
    if x.dim() == 2:
        return x
    if x.shape[:-2].numel() == 0:
        return None
    first = x[(0,) * (x.dim() - 2)]
    expanded = all(size == 1 or stride == 0 for size, stride in zip(x.shape[:-2], x.stride()[:-2], strict=True))
    return first if expanded or bool((x == first).all()) else None


def on_one_grid(covariance: LinearOperator) -> bool:
    """Whether all grid kernels of an unevaluated covariance use the same input columns and the same axes."""
    first, *others = _iter_lazy_grid_kernels(covariance)
    return all(
        ref.columns == first.columns and all(map(same_values, ref.kernel.grid.axes, first.kernel.grid.axes))
        for ref in others
        if ref.kernel.grid is not first.kernel.grid or ref.columns != first.columns
    )


def _iter_lazy_grid_kernels(covariance: LinearOperator) -> Iterator[GridKernelRef]:
    if isinstance(covariance, SumLinearOperator):
        for part in covariance.linear_ops:
            yield from _iter_lazy_grid_kernels(part)
    elif isinstance(covariance, LazyEvaluatedKernelTensor):
        yield from iter_grid_kernels(covariance.kernel, tuple(range(covariance.x1.size(-1))))


def grid_covariance(covariance: LinearOperator) -> LinearOperator:
    """Evaluates a covariance. A sum that contains a covariance on a grid becomes one of our operators."""
    lazy = LazyEvaluatedKernelTensor
    if isinstance(covariance, lazy):
        return covariance.evaluate_kernel()
    if type(covariance) is not SumLinearOperator:
        return covariance
    parts = [part.evaluate_kernel() if isinstance(part, lazy) else part for part in covariance.linear_ops]
    ours = SelectedKroneckerOperator | InterpolatedKroneckerOperator
    if any(isinstance(part, ours) and part.is_symmetric for part in parts):
        return SelectedKroneckerSumOperator(*parts)
    return SumLinearOperator(*parts)
