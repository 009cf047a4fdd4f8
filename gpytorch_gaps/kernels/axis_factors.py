"""A kernel as a product over the columns of its input: one matrix for every axis of a grid.

    scale           the factors of its kernel; the scale multiplies the first of them, once
    product         the factors of its kernels, entry by entry
    one column      the kernel itself on that axis, any kernel; ones on all others
    several         a stationary kernel of unit variance, on each axis as if the other coordinates were equal. That is
                    the kernel itself for a squared-exponential or periodic kernel, with or without ARD, and for others,
                    such as Matern kernels, the product of their one-dimensional versions

Sums, and kernels such as a linear one, are no products over columns.
"""

from collections.abc import Sequence
from typing import Any

import torch
from gpytorch.kernels import AdditiveKernel, Kernel, ProductKernel, ScaleKernel, SpectralMixtureKernel
from torch import Tensor

from gpytorch_gaps.operators.float64_covariance import covariance_in_float64
from gpytorch_gaps.operators.inspect import resolve_active_dims


def check_factorises(kernel: Kernel, num_axes: int) -> None:
    """Refuses a kernel that is no product over the columns of its input.

    :raises ValueError: naming the part that is none.
    """
    _check(kernel, resolve_active_dims(kernel, tuple(range(num_axes))))


def _check(kernel: Kernel, columns: tuple[int, ...]) -> None:
    if len(columns) == 1:
        return None
    if isinstance(kernel, ScaleKernel):
        return _check(kernel.base_kernel, columns)
    if isinstance(kernel, ProductKernel):
        for child in kernel.kernels:
            _check(child, resolve_active_dims(child, columns))
        return None
    name = f"base_kernel: got {type(kernel).__name__} on {len(columns)} columns"
    if isinstance(kernel, AdditiveKernel):
        raise ValueError(
            f"{name}, expected a product over columns; a sum is none: add kernels, GridInterpolationKernel(first) + "
            "GridInterpolationKernel(second), instead"
        )
    if not kernel.is_stationary or isinstance(kernel, SpectralMixtureKernel) or not _has_unit_variance(kernel, columns):
        raise ValueError(
            f"{name}, expected a stationary kernel of unit variance, such as RBFKernel or MaternKernel, a product of "
            "kernels with one column each (active_dims), or these in a ScaleKernel: no other factors over the columns"
        )
    return None


def _has_unit_variance(kernel: Kernel, columns: Sequence[int]) -> bool:
    like = next(kernel.parameters(), torch.zeros(()))
    origin = torch.zeros(1, len(columns), dtype=like.dtype, device=like.device)
    with torch.no_grad():
        value = covariance_in_float64(kernel, origin, origin, columns_selected=True)
    return bool(((value - 1.0).abs() < 1e-6).all())


def axis_factors(kernel: Kernel, axes: Sequence[Tensor], params: dict[str, Any]) -> list[Tensor]:
    """The matrices whose Kronecker product is the kernel on a grid, in float64 for float32 axes.

    :param kernel: as :func:`check_factorises` accepts it.
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
    if isinstance(kernel, ScaleKernel):
        inner = _factors(kernel.base_kernel, columns, axes, params)
        first = columns[0]
        own = inner[first]
        assert own is not None
        inner[first] = kernel.outputscale[..., None, None].to(own.dtype) * own
        return inner
    found: list[Tensor | None] = [None] * len(axes)
    if isinstance(kernel, ProductKernel):
        for child in kernel.kernels:
            inner = _factors(child, resolve_active_dims(child, columns), axes, params)
            pairs = zip(found, inner, strict=True)
            found = [b if a is None else a if b is None else a * b for a, b in pairs]
        return found
    for place, column in enumerate(columns):
        x = torch.zeros(len(axes[column]), len(columns), dtype=axes[column].dtype, device=axes[column].device)
        x[:, place] = axes[column]
        found[column] = covariance_in_float64(kernel, x, x, columns_selected=True, **params)
    return found


def _ones(axis: Tensor, like: Tensor) -> Tensor:
    return torch.ones(len(axis), len(axis), dtype=like.dtype, device=axis.device)
