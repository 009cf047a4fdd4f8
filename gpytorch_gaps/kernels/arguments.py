"""Checks of the arguments of a grid kernel, and of the codes that an ``IndexKernel`` receives."""

from collections.abc import Sequence
from typing import Any

import torch
from gpytorch.kernels import AdditiveKernel, IndexKernel, Kernel, ProductKernel
from torch import Tensor

from gpytorch_gaps.grid.cartesian import CartesianGrid
from gpytorch_gaps.kernels.blocks import MAX_DENSE, MAX_DENSE_AXIS


def check_blocks(blocks: Any, grid: Any) -> tuple[tuple[int, ...], ...]:
    """The axes of every block, checked."""
    if not isinstance(grid, CartesianGrid):
        raise ValueError(f"grid: got {type(grid).__name__}, expected a CartesianGrid")
    if blocks is None:
        return tuple((axis,) for axis in range(len(grid.axes)))
    found = tuple(tuple(axes) if isinstance(axes, Sequence) else (axes,) for axes in blocks)
    if [axis for axes in found for axis in axes] != list(range(len(grid.axes))):
        raise ValueError(
            f"blocks: got {blocks}, expected each of the grid's axes 0 to {len(grid.axes) - 1} once, in order, as in "
            "[(0, 1), (2,)]; put axes that belong together next to each other in the grid"
        )
    return found


def check_kernels(kernels: Any, grid: CartesianGrid, blocks: tuple[tuple[int, ...], ...]) -> None:
    """Checks that there is one kernel per block, which takes the columns of that block."""
    alone = all(len(axes) == 1 for axes in blocks)
    if isinstance(kernels, Kernel):
        one = "one kernel per axis" if alone else "one kernel per block"
        raise ValueError(f"kernels: got one {type(kernels).__name__}, expected a list of {one}")
    if len(kernels) != len(blocks):
        each = f"the grid's {len(blocks)} axes" if alone else f"the {len(blocks)} blocks"
        raise ValueError(f"kernels: got {len(kernels)}, expected one for each of {each}")
    for axes, kernel in zip(blocks, kernels, strict=True):
        which = f"axis {axes[0]}" if len(axes) == 1 else f"block {axes}"
        that = "that axis" if len(axes) == 1 else "that block"
        if not isinstance(kernel, Kernel):
            raise ValueError(f"kernels: {which}: got {type(kernel).__name__}, expected a gpytorch kernel")
        ard, columns = getattr(kernel, "ard_num_dims", None), sum(grid.axes[axis].size(-1) for axis in axes)
        if ard is not None and kernel.active_dims is None and ard != columns:
            raise ValueError(f"kernels: {which}: got ard_num_dims={ard}, expected {columns}, the columns of {that}")
        active = kernel.active_dims
        if active is not None and (int(active.max()) >= columns or int(active.min()) < -columns):
            raise ValueError(
                f"kernels: {which}: got active_dims={active.tolist()}, expected columns of {that} only, 0 "
                f"to {columns - 1}, or none: it receives only its own {'axis' if len(axes) == 1 else 'block'}"
            )


def no_fast_product(kernel: Kernel, axes: Sequence[int], points: Sequence[Tensor]) -> str:
    size = " x ".join(str(len(axis)) for axis in points)
    what = f"axis {axes[0]}" if len(axes) == 1 else f"block {tuple(axes)}"
    limit = MAX_DENSE_AXIS if len(axes) == 1 else MAX_DENSE
    return (
        f"{what}: got {size} points with a {type(kernel).__name__}, too many for a matrix, and no fast product: "
        f"expected a stationary kernel and coordinates that are multiples of a step, or at most {limit} points. Try: "
        "round the coordinates to a regular axis (places without data are gaps), or one kernel per axis; in a block, "
        "put axes that are not regular first"
    )


def check_axis_codes(name: str, kernels: Any, blocks: Sequence[Sequence[int]], axes: Sequence[Tensor]) -> None:
    """Calls :func:`check_codes` for every axis that is a block of its own."""
    for kernel, own in zip(kernels, blocks, strict=True):
        if len(own) == 1:
            check_codes(f"{name} {own[0]}", kernel, axes[own[0]])


def check_codes(name: str, kernel: Kernel, points: Tensor, selects: bool = True) -> None:
    """Checks that an IndexKernel receives integer codes. It truncates other numbers: 0.5 would silently be output 0.

    Only the columns that reach the IndexKernel count. A sum or product calls the kernels inside it, which select
    columns by their own `active_dims`; any other kernel selects columns for the kernel that it wraps.

    :param selects: whether the kernel selects columns itself.
    """
    points = points.unsqueeze(-1) if points.dim() == 1 else points
    columns = getattr(kernel, "replaced_active_dims", kernel.active_dims if selects else None)
    if columns is not None:
        points = points[..., torch.as_tensor(columns, device=points.device).reshape(-1)]
    if isinstance(kernel, IndexKernel):
        tasks = kernel.covar_factor.size(-2)
        wrong = (points != points.round()) | (points < 0) | (points >= tasks)
        if bool(wrong.any()):
            value = points[wrong][0].item()
            raise ValueError(f"{name}: got {value:g}, expected the codes 0 to {tasks - 1} of its IndexKernel")
    calls = isinstance(kernel, AdditiveKernel | ProductKernel)
    for child in kernel.children():
        for part in child if isinstance(child, torch.nn.ModuleList) else [child]:
            if isinstance(part, Kernel):
                check_codes(name, part, points, calls)
