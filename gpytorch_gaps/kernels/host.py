"""Where a grid kernel sits among others, and which input columns each of them sees."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from gpytorch.kernels import AdditiveKernel, Kernel, ProductKernel, ScaleKernel
from torch import Tensor

from gpytorch_gaps.kernels.gappy_grid_kernel import GappyGridKernel
from gpytorch_gaps.solvers.memo import Memo

_memo = Memo(size=64)  # columns that kernels are restricted to, as numbers


@dataclass(frozen=True)
class Host:
    """A grid kernel found among others, and the input columns that it sees, in its order."""

    kernel: GappyGridKernel
    columns: tuple[int, ...]

    def points(self, x: Tensor) -> Tensor:
        """The columns of x that are the grid's."""
        return pick(x, self.columns)


def pick(x: Tensor, columns: Sequence[int]) -> Tensor:
    """Some columns of x, without an index that would have to be copied to its device."""
    if tuple(columns) == tuple(range(x.size(-1))):
        return x
    return torch.stack([x[..., column] for column in columns], -1)


def find_host(kernel: Kernel, columns: tuple[int, ...]) -> Host | None:
    """The first grid kernel inside `kernel`, whose inputs are the given columns of the original ones."""
    return next(hosts_in(kernel, columns), None)


def hosts_in(kernel: Kernel, columns: tuple[int, ...]) -> Iterator[Host]:
    if isinstance(kernel, GappyGridKernel):
        yield Host(kernel, columns)
    elif isinstance(kernel, ScaleKernel):
        yield from hosts_in(kernel.base_kernel, columns)
    elif isinstance(kernel, AdditiveKernel | ProductKernel):
        for child in kernel.kernels:
            yield from hosts_in(child, restricted(child, columns))


def restricted(kernel: Kernel, columns: tuple[int, ...]) -> tuple[int, ...]:
    """The columns that a kernel called on `columns` picks."""
    if kernel.active_dims is None:
        return columns
    active = _memo.get("active", (kernel.active_dims,), kernel.active_dims.tolist)
    return tuple(columns[i] for i in active)
