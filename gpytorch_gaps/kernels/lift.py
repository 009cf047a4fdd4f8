"""Kernels on the columns of one axis, as grid kernels: a Kronecker product with ones on the other axes."""

from collections.abc import Sequence
from typing import Any

import torch
from gpytorch import Module
from gpytorch.kernels import Kernel, LinearKernel
from torch import Tensor

from gpytorch_gaps.kernels.grid_kernel import GappyGridKernel
from gpytorch_gaps.operators.inspect import GridKernelRef, select_columns


class _One(Kernel):
    """``k(x, x') = 1``."""

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Tensor:
        shape = (x1.size(-2),) if diag else (x1.size(-2), x2.size(-2))
        return torch.ones(shape, dtype=x1.dtype, device=x1.device)


class _OnColumns(Kernel):
    """A kernel applied to some columns of an axis, in a given order, instead of its own `active_dims`."""

    def __init__(self, kernel: Kernel, columns: Sequence[int]) -> None:
        super().__init__()
        self.kernel, self._columns = kernel, list(columns)

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Any:
        first, second = select_columns(x1, self._columns), select_columns(x2, self._columns)
        return Module.__call__(self.kernel, first, second, diag=diag, **params)


class _LinearPart(Kernel):
    """A linear kernel's share of some of its columns."""

    def __init__(self, kernel: LinearKernel, local: Sequence[int], of_kernel: Sequence[int]) -> None:
        super().__init__()
        self.kernel, self._local, self._of_kernel = kernel, list(local), list(of_kernel)

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Tensor:
        variance = self.kernel.variance  # shape: (*batch, 1, 1 or columns)
        variance = variance if variance.size(-1) == 1 else select_columns(variance, self._of_kernel)
        first, second = select_columns(x1, self._local) * variance, select_columns(x2, self._local)
        return (first * second).sum(-1) if diag else first @ second.mT


def as_grid_kernels(kernel: Kernel, columns: tuple[int, ...], host: GridKernelRef) -> list[GappyGridKernel]:
    """A kernel on the columns of one axis as a grid kernel that is one on the others; none if it sees several axes."""
    spans = [host.columns[span] for span in host.kernel.grid.columns]
    touched = [axis for axis, own in enumerate(spans) if set(columns) & set(own)]
    if not set(columns) <= set(host.columns):
        return []
    if len(touched) == 1:
        (axis,) = touched
        return [_with_ones(host, axis, _OnColumns(kernel, [spans[axis].index(column) for column in columns]))]
    if type(kernel) is not LinearKernel:
        return []
    parts = []
    for axis in touched:
        own = [(spans[axis].index(column), i) for i, column in enumerate(columns) if column in spans[axis]]
        local, of_kernel = zip(*own, strict=True)
        parts.append(_with_ones(host, axis, _LinearPart(kernel, local, of_kernel)))
    return parts


def _with_ones(host: GridKernelRef, axis: int, kernel: Kernel) -> GappyGridKernel:
    kernels: list[Kernel] = [_One() for _ in host.kernel.grid.axes]
    kernels[axis] = kernel
    lifted = GappyGridKernel(kernels, host.kernel.grid)
    lifted._lookups = host.kernel._lookups
    return lifted
