"""Where a grid kernel sits among others, and which input columns each of them sees."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from gpytorch.kernels import AdditiveKernel, Kernel, ProductKernel, ScaleKernel
from gpytorch.lazy import LazyEvaluatedKernelTensor
from linear_operator.operators import AddedDiagLinearOperator, LinearOperator, SumLinearOperator
from torch import Tensor

from gpytorch_gaps.grid.protocol import GridKernel
from gpytorch_gaps.operators.selected_kronecker import SelectedKroneckerOperator
from gpytorch_gaps.operators.selected_kronecker_sum import SelectedKroneckerSumOperator
from gpytorch_gaps.utils.cache import TensorCache
from gpytorch_gaps.utils.tensors import same_values

_active_dims = TensorCache(size=64)  # active_dims as lists of numbers


@dataclass(frozen=True)
class GridKernelRef:
    """A grid kernel found among others, and the input columns that it sees, in its order."""

    kernel: GridKernel
    columns: tuple[int, ...]

    def points(self, x: Tensor) -> Tensor:
        """The columns of x that are the grid's."""
        return select_columns(x, self.columns)


def select_columns(x: Tensor, columns: Sequence[int]) -> Tensor:
    """Some columns of x, without an index that would have to be copied to its device."""
    if tuple(columns) == tuple(range(x.size(-1))):
        return x
    return torch.stack([x[..., column] for column in columns], -1)


def find_grid_kernel(kernel: Kernel, columns: tuple[int, ...]) -> GridKernelRef | None:
    """The first grid kernel inside `kernel`, whose inputs are the given columns of the original ones."""
    return next(iter_grid_kernels(kernel, columns), None)


def iter_grid_kernels(kernel: Kernel, columns: tuple[int, ...]) -> Iterator[GridKernelRef]:
    if isinstance(kernel, GridKernel):
        yield GridKernelRef(kernel, columns)
    elif isinstance(kernel, ScaleKernel):
        yield from iter_grid_kernels(kernel.base_kernel, columns)
    elif isinstance(kernel, AdditiveKernel | ProductKernel):
        for child in kernel.kernels:
            yield from iter_grid_kernels(child, resolve_active_dims(child, columns))


def resolve_active_dims(kernel: Kernel, columns: tuple[int, ...]) -> tuple[int, ...]:
    """The columns that a kernel called on `columns` picks."""
    if kernel.active_dims is None:
        return columns
    active = _active_dims.cached("active", (kernel.active_dims,), kernel.active_dims.tolist)
    return tuple(columns[i] for i in active)


def one_member(x: Tensor) -> Tensor | None:
    """The points that all members of a batch share, or None if they differ. shape: (*batch, N, D) -> (N, D)"""
    if x.dim() == 2:
        return x
    if x.shape[:-2].numel() == 0:
        return None
    first = x[(0,) * (x.dim() - 2)]
    expanded = all(size == 1 or stride == 0 for size, stride in zip(x.shape[:-2], x.stride()[:-2], strict=True))
    return first if expanded or bool((x == first).all()) else None


def grid_points(covariance: LinearOperator) -> tuple[GridKernel, Tensor] | None:
    """The grid kernel of a lazily evaluated covariance, and the points its rows belong to, in the grid's columns."""
    if isinstance(covariance, SumLinearOperator) and not isinstance(covariance, AddedDiagLinearOperator):
        return next(filter(None, map(grid_points, covariance.linear_ops)), None)
    if not isinstance(covariance, LazyEvaluatedKernelTensor):
        return None
    host = find_grid_kernel(covariance.kernel, tuple(range(covariance.x1.size(-1))))
    return None if host is None else (host.kernel, host.points(covariance.x1))


def on_one_grid(covariance: LinearOperator) -> bool:
    """Whether all grid kernels of a lazily evaluated covariance agree on what a cell is: same columns, same axes."""
    first, *others = _iter_lazy_grid_kernels(covariance)
    return all(
        host.columns == first.columns and all(map(same_values, host.kernel.grid.axes, first.kernel.grid.axes))
        for host in others
        if host.kernel.grid is not first.kernel.grid or host.columns != first.columns
    )


def _iter_lazy_grid_kernels(covariance: LinearOperator) -> Iterator[GridKernelRef]:
    if isinstance(covariance, SumLinearOperator):
        for part in covariance.linear_ops:
            yield from _iter_lazy_grid_kernels(part)
    elif isinstance(covariance, LazyEvaluatedKernelTensor):
        yield from iter_grid_kernels(covariance.kernel, tuple(range(covariance.x1.size(-1))))


def row_points(covariance: LinearOperator) -> Tensor | None:
    """The points that the rows of an evaluated covariance belong to, in the grid's columns, as far as known."""
    if isinstance(covariance, SumLinearOperator):
        found = map(row_points, covariance.linear_ops)
        return next((points for points in found if points is not None), None)
    return getattr(getattr(covariance, "base_linear_op", covariance), "row_points", None)  # of a scaled one


def grid_covariance(covariance: LinearOperator) -> LinearOperator:
    """A covariance, evaluated; a sum that was added up outside of a kernel becomes one of ours."""
    lazy = LazyEvaluatedKernelTensor
    if isinstance(covariance, lazy):
        return covariance.evaluate_kernel()
    if type(covariance) is not SumLinearOperator:
        return covariance
    parts = [part.evaluate_kernel() if isinstance(part, lazy) else part for part in covariance.linear_ops]
    if any(isinstance(part, SelectedKroneckerOperator) and part.is_symmetric for part in parts):
        return SelectedKroneckerSumOperator(*parts)
    return SumLinearOperator(*parts)
