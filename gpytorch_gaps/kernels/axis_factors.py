"""A kernel as a product over the columns of its input: one matrix for every axis of a grid.

    scale           the factors of its kernel; the scale multiplies the first factor
    product         the entry-wise products of the factors of its kernels
    one column      any kernel: its matrix on that axis, and ones on all other axes
    several         a stationary kernel of unit variance: on each axis, its matrix for points that differ only in the
                    coordinate of this axis. The product of these is the kernel itself if it is squared-exponential or
                    periodic, with or without ARD. For others, such as Matern kernels, it is the product of their
                    one-dimensional versions

Sums are not products over columns, and neither are kernels such as a linear one on several columns.
"""

from collections.abc import Sequence
from typing import Any

import torch
from gpytorch.kernels import AdditiveKernel, Kernel, ProductKernel, ScaleKernel, SpectralMixtureKernel
from torch import Tensor

from gpytorch_gaps.operators.float64_covariance import covariance_in_float64
from gpytorch_gaps.operators.inspect import resolve_active_dims


def check_factorises(kernel: Kernel, num_axes: int) -> None:
    """Checks that a kernel is a product over the columns of its input.

    :raises ValueError: if it is not. The message names the part that is not a product.
    """
    _check(kernel, resolve_active_dims(kernel, tuple(range(num_axes))))


def _check(kernel: Kernel, columns: tuple[int, ...]) -> None:
    seen = _seen(kernel, columns)
    if len(seen) == 1:
        return
    if isinstance(kernel, ScaleKernel | ProductKernel):
        for child, own in _children(kernel, columns):
            _check(child, own)
        return
    name = f"base_kernel: got {type(kernel).__name__} on {len(seen)} columns"
    if isinstance(kernel, AdditiveKernel):
        raise ValueError(
            f"{name}, expected a product over columns; a sum is not a product. Try: add the kernels outside, "
            "GridInterpolationKernel(first) + GridInterpolationKernel(second)"
        )
    if not kernel.is_stationary or isinstance(kernel, SpectralMixtureKernel) or not _has_unit_variance(kernel, columns):
        raise ValueError(
            f"{name}, expected a stationary kernel of unit variance, such as RBFKernel or MaternKernel, a product of "
            "kernels with one column each (active_dims), or one of these in a ScaleKernel: only these are products "
            "over columns"
        )


def _children(kernel: Kernel, columns: tuple[int, ...]) -> list[tuple[Kernel, tuple[int, ...]]]:
    """The kernels inside a scale, a sum or a product, each with the columns that it is evaluated on."""
    if isinstance(kernel, ScaleKernel):  # it has the `active_dims` of its kernel
        return [(kernel.base_kernel, columns)]
    if isinstance(kernel, AdditiveKernel | ProductKernel):
        return [(child, resolve_active_dims(child, columns)) for child in kernel.kernels]
    return []


def _seen(kernel: Kernel, columns: tuple[int, ...]) -> set[int]:
    """The subset of `columns` that the kernel depends on."""
    children = _children(kernel, columns)
    return set(columns) if not children else set().union(*(_seen(child, own) for child, own in children))


def _has_unit_variance(kernel: Kernel, columns: Sequence[int]) -> bool:
    like = next(kernel.parameters(), torch.zeros(()))
    origin = torch.zeros(1, len(columns), dtype=like.dtype, device=like.device)
    with torch.no_grad():
        value = covariance_in_float64(kernel, origin, origin, columns_selected=True)
    return bool(((value - 1.0).abs() < 1e-6).all())


def axis_factors(kernel: Kernel, axes: Sequence[Tensor], params: dict[str, Any]) -> list[Tensor]:
    """The matrices whose Kronecker product is the kernel on a grid, in float64 for float32 axes.

    :param kernel: a kernel that passes :func:`check_factorises`.
    :param axes: coordinates, shape (m_i,) each.
    :param params: further arguments of the kernel.
    :return: shape (*batch, m_i, m_i) each.
    """
    found = _factors(kernel, resolve_active_dims(kernel, tuple(range(len(axes)))), axes, params)
    known = next((factor for factor in found if factor is not None), axes[0].double())
    return [_ones(axis, known) if factor is None else factor for factor, axis in zip(found, axes, strict=True)]


def _factors(
    kernel: Kernel, columns: tuple[int, ...], axes: Sequence[Tensor], params: dict[str, Any]
) -> list[Tensor | None]:
    """A factor for every axis; None for ones."""
    found: list[Tensor | None] = [None] * len(axes)
    if isinstance(kernel, ScaleKernel | ProductKernel):
        for child, own in _children(kernel, columns):
            pairs = zip(found, _factors(child, own, axes, params), strict=True)
            found = [b if a is None else a if b is None else a * b for a, b in pairs]
        if isinstance(kernel, ScaleKernel):
            number, first = next((number, factor) for number, factor in enumerate(found) if factor is not None)
            found[number] = kernel.outputscale[..., None, None].to(first.dtype) * first
        return found
    seen = _seen(kernel, columns)
    for place, column in enumerate(columns):
        if column in seen:
            axis = axes[column]
            x = torch.zeros(len(axis), len(columns), dtype=axis.dtype, device=axis.device)
            x[:, place] = axis
            found[column] = covariance_in_float64(kernel, x, x, columns_selected=True, **params)
    return found


def _ones(axis: Tensor, like: Tensor) -> Tensor:
    return torch.ones(len(axis), len(axis), dtype=like.dtype, device=axis.device)
