"""Sums, scales and products of kernels on a grid, expanded into a list of terms that keep the grid's structure.

GPyTorch evaluates ``AdditiveKernel`` and ``ProductKernel`` without regard to grids: it multiplies test x train
covariances densely. :func:`patch_composite_kernels` expands them by the distributive law instead:

    sum          the terms of all its kernels
    scale        the terms of its kernel, scaled
    product      the entry-wise product of each term of one kernel and each term of the other. The entry-wise product of
                 two Kronecker products is a Kronecker product; any other is dense, or computed row by row
    any other    if it uses the columns of one axis: a Kronecker product with ones on the other axes. Otherwise GPyTorch
                 evaluates it. In a product, a linear kernel on several axes is a sum of linear kernels on one axis
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from gpytorch import Module
from gpytorch.kernels import AdditiveKernel, Kernel, LinearKernel, ProductKernel, ScaleKernel
from linear_operator import to_dense, to_linear_operator
from linear_operator.operators import DenseLinearOperator, LinearOperator, SumLinearOperator
from torch import Tensor

from gpytorch_gaps import settings
from gpytorch_gaps.kernels.grid_kernel import GappyGridKernel
from gpytorch_gaps.kernels.interpolated import InterpolatedGridKernel
from gpytorch_gaps.linalg.factors import entrywise, same_kind
from gpytorch_gaps.operators import (
    KernelRowsOperator,
    KhatriRaoOperator,
    SelectedKroneckerOperator,
    SelectedKroneckerSumOperator,
)
from gpytorch_gaps.operators.float64_covariance import covariance_in_float64
from gpytorch_gaps.operators.inspect import GridKernelRef, find_grid_kernel, resolve_active_dims, select_columns
from gpytorch_gaps.operators.kernel_rows import fits_memory
from gpytorch_gaps.utils.precision import cast_entries, full_float32
from gpytorch_gaps.utils.tensors import same_values


def patch_composite_kernels() -> None:
    """Makes GPyTorch's ``AdditiveKernel`` and ``ProductKernel`` keep the structure of a grid kernel inside them.

    In GPyTorch, they multiply test x train covariances densely, and unlike ``ScaleKernel`` they do not delegate to the
    prediction strategy of the kernels inside them. Kernels without a grid kernel inside are not affected. This function
    is called when ``gpytorch_gaps.kernels`` is imported. A second call changes nothing.
    """
    for kind in (AdditiveKernel, ProductKernel):
        kind.forward = _keeping_structure(getattr(kind.forward, "upstream", kind.forward))
        kind.prediction_strategy = _delegate_strategy


def _keeping_structure(upstream: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(upstream)
    def forward(self: Kernel, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Any:
        if not diag and not params.get("last_dim_is_batch", False):
            own = {name: value for name, value in params.items() if name != "last_dim_is_batch"}
            covariance = structured_covariance(self, x1, x2, own)
            if covariance is not None:
                return covariance
        return upstream(self, x1, x2, diag=diag, **params)

    forward.upstream = upstream  # type: ignore[attr-defined]
    return forward


def _delegate_strategy(self: Kernel, *args: Any, **kwargs: Any) -> Any:
    for kernel in self.modules():
        if isinstance(kernel, GappyGridKernel | InterpolatedGridKernel):
            return kernel.prediction_strategy(*args, **kwargs)
    return Kernel.prediction_strategy(self, *args, **kwargs)


@full_float32()
def structured_covariance(kernel: Kernel, x1: Tensor, x2: Tensor, params: dict[str, Any]) -> LinearOperator | None:
    """Covariance of a sum or product with a grid kernel inside; None if there is no grid kernel.

    :param x1: points, with the columns selected by the kernel's `active_dims`, shape (*batch, N, D).
    :param x2: points, likewise, shape (*batch, Q, D).
    """
    columns = tuple(range(x1.size(-1)))
    grid_kernel = find_grid_kernel(kernel, columns)
    if grid_kernel is None:
        return None
    terms = _TermExpansion(grid_kernel, x1, x2, params).terms(kernel, columns)
    batch = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2], kernel.batch_shape)
    terms = [term if term.batch_shape == batch else term.expand(*batch, *term.matrix_shape) for term in terms]
    if len(terms) == 1 and isinstance(terms[0], SelectedKroneckerOperator):
        return terms[0]
    if same_values(x1, x2):
        return SelectedKroneckerSumOperator(*terms)
    return terms[0] if len(terms) == 1 else SumLinearOperator(*terms)


@dataclass(frozen=True)
class _TermExpansion:
    """Expands a kernel into terms for one pair of inputs.

    `grid_kernel` is the first grid kernel inside: kernels on one axis are expressed on its grid.
    """

    grid_kernel: GridKernelRef
    x1: Tensor
    x2: Tensor
    params: dict[str, Any]

    def terms(self, kernel: Kernel, columns: tuple[int, ...], in_product: bool = False) -> list[LinearOperator]:
        """Terms of a kernel that is evaluated on the given input columns, its `active_dims` already applied."""
        if isinstance(kernel, GappyGridKernel):
            return self._on_grid([kernel], GridKernelRef(kernel, columns))
        if isinstance(kernel, ScaleKernel):
            scale = kernel.outputscale[..., None, None]
            return [term.mul(scale) for term in self.terms(kernel.base_kernel, columns, in_product)]
        if isinstance(kernel, AdditiveKernel):
            children = [(child, resolve_active_dims(child, columns)) for child in kernel.kernels]
            return [term for child, own in children for term in self.terms(child, own, in_product)]
        if isinstance(kernel, ProductKernel):
            return self._product_terms(kernel, columns)
        # A linear kernel has low rank, which is the cheapest form, except in a product with a Kronecker product.
        is_linear = type(kernel) is LinearKernel
        if not is_linear or in_product:
            parts = as_grid_kernels(kernel, columns, self.grid_kernel)
            if parts:
                return self._on_grid(parts, self.grid_kernel)
        if is_linear or isinstance(kernel, InterpolatedGridKernel) or self._may_be_dense(kernel):
            x1, x2 = select_columns(self.x1, columns), select_columns(self.x2, columns)
            return [_evaluate(kernel, x1, x2, self.params)]
        return [self._by_rows(kernel, columns)]

    def _on_grid(self, kernels: Sequence[GappyGridKernel], ref: GridKernelRef) -> list[LinearOperator]:
        x1, x2 = ref.points(self.x1), ref.points(self.x2)
        return [_evaluate(kernel, x1, x2, self.params) for kernel in kernels]

    def _product_terms(self, kernel: ProductKernel, columns: tuple[int, ...]) -> list[LinearOperator]:
        first, *others = [
            self.terms(child, resolve_active_dims(child, columns), in_product=True) for child in kernel.kernels
        ]
        for other in others:
            pairs = [(a, b) for a in first for b in other]
            if not all(_share_cells(a, b) for a, b in pairs) and not self._may_be_dense(kernel):
                return [self._by_rows(kernel, columns)]
            first = [hadamard(a, b) for a, b in pairs]
        return first

    def _may_be_dense(self, kernel: Kernel) -> bool:
        """Whether a covariance without structure is stored: it is small, or it must be differentiated."""
        if fits_memory(self.x1.size(-2), self.x2.size(-2)):
            return True
        if not (torch.is_grad_enabled() and any(p.requires_grad for p in kernel.parameters())):
            return False
        _warn_if_large(self.x1.size(-2), self.x2.size(-2), self.x1.dtype)
        return True

    def _by_rows(self, kernel: Kernel, columns: tuple[int, ...]) -> KernelRowsOperator:
        x1, x2 = select_columns(self.x1, columns), select_columns(self.x2, columns)
        return KernelRowsOperator(x1, x2, kernel=kernel, params=self.params)


def _evaluate(kernel: Kernel, x1: Tensor, x2: Tensor, params: dict[str, Any]) -> LinearOperator:
    """Evaluates a kernel whose `active_dims` have been applied. Dense float32 entries are rounded from float64."""
    covariance = to_linear_operator(Module.__call__(kernel, x1, x2, **params)).evaluate_kernel()
    if x1.dtype == torch.float32 and isinstance(covariance, DenseLinearOperator):
        entries = covariance_in_float64(kernel, x1, x2, columns_selected=True, **params)
        return to_linear_operator(cast_entries(entries, x1.dtype))
    return covariance


def hadamard(first: LinearOperator, second: LinearOperator) -> LinearOperator:
    """Entry-wise product: factor by factor where both have factors on the same cells, else dense."""
    if not _share_cells(first, second):
        return to_linear_operator(to_dense(first) * to_dense(second))
    return first.with_factors([entrywise(f, g) for f, g in zip(first.factors, second.factors, strict=True)])


def _share_cells(a: LinearOperator, b: LinearOperator) -> bool:
    """Whether two covariances have Kronecker (or Khatri-Rao) factors on the same cells."""
    if isinstance(a, SelectedKroneckerOperator) and isinstance(b, SelectedKroneckerOperator):
        same_shapes = a.row_shape == b.row_shape and a.col_shape == b.col_shape
        alike = same_shapes and all(map(same_kind, a.factors, b.factors))
        return alike and same_values(a.row_index, b.row_index) and same_values(a.col_index, b.col_index)
    if isinstance(a, KhatriRaoOperator) and isinstance(b, KhatriRaoOperator):
        same_shapes = a.col_shape == b.col_shape and a.transposed == b.transposed
        return same_shapes and same_values(a.col_index, b.col_index)
    return False


def _warn_if_large(rows: int, columns: int, dtype: torch.dtype) -> None:
    needed, allowed = rows * columns * dtype.itemsize, settings.prediction_memory.value()
    if needed > allowed:
        warnings.warn(
            f"kernels without a common grid are stored densely: {needed / 2**30:.1f} GiB for a matrix of {rows} x "
            f"{columns}, more than prediction_memory of {allowed / 2**30:.1f} GiB. Try: kernels on the columns of one "
            "axis each, inside GappyGridKernel.",
            ResourceWarning,
            stacklevel=2,
        )


# -- kernels on the columns of one axis --------------------------------------------------------------------------------


class _One(Kernel):
    """``k(x, x') = 1``."""

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Tensor:
        shape = (x1.size(-2),) if diag else (x1.size(-2), x2.size(-2))
        return torch.ones(shape, dtype=x1.dtype, device=x1.device)


class _OnColumns(Kernel):
    """A kernel applied to given columns of an axis, in the given order, instead of its own `active_dims`."""

    def __init__(self, kernel: Kernel, columns: Sequence[int]) -> None:
        super().__init__()
        self.kernel, self.replaced_active_dims = kernel, list(columns)

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Any:
        first, second = (select_columns(x, self.replaced_active_dims) for x in (x1, x2))
        return Module.__call__(self.kernel, first, second, diag=diag, **params)


class _LinearPart(Kernel):
    """The part of a linear kernel on several axes that belongs to the columns of one axis.

    :param axis_columns: the columns, counted within the axis.
    :param kernel_columns: the same columns, counted within the input of the linear kernel.
    """

    def __init__(self, kernel: LinearKernel, axis_columns: Sequence[int], kernel_columns: Sequence[int]) -> None:
        super().__init__()
        self.kernel, self._axis_columns, self._kernel_columns = kernel, list(axis_columns), list(kernel_columns)

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Tensor:
        variance = self.kernel.variance  # shape: (*batch, 1, 1 or columns)
        variance = variance if variance.size(-1) == 1 else select_columns(variance, self._kernel_columns)
        first, second = (select_columns(x, self._axis_columns) for x in (x1, x2))
        return (first * variance * second).sum(-1) if diag else (first * variance) @ second.mT


def as_grid_kernels(kernel: Kernel, columns: tuple[int, ...], ref: GridKernelRef) -> list[GappyGridKernel]:
    """A kernel on one axis as a grid kernel that is one on the other axes; an empty list if it uses several axes.

    A linear kernel on several axes becomes one grid kernel per axis.

    :param columns: the input columns that `kernel` is evaluated on.
    :param ref: the grid kernel whose grid is used.
    """
    axis_columns = [ref.columns[span] for span in ref.kernel.grid.columns]
    touched = [axis for axis, own in enumerate(axis_columns) if set(columns) & set(own)]
    if not set(columns) <= set(ref.columns):
        return []
    if len(touched) == 1:
        (axis,) = touched
        own_columns = [axis_columns[axis].index(column) for column in columns]
        return [_with_ones(ref, axis, _OnColumns(kernel, own_columns))]
    if type(kernel) is not LinearKernel:
        return []
    parts = []
    for axis in touched:
        own = axis_columns[axis]
        positions = [(own.index(column), i) for i, column in enumerate(columns) if column in own]
        parts.append(_with_ones(ref, axis, _LinearPart(kernel, *zip(*positions, strict=True))))
    return parts


def _with_ones(ref: GridKernelRef, axis: int, kernel: Kernel) -> GappyGridKernel:
    kernels: list[Kernel] = [_One() for _ in ref.kernel.grid.axes]
    kernels[axis] = kernel
    grid_kernel = GappyGridKernel(kernels, ref.kernel.grid)
    grid_kernel.share_lookups(ref.kernel)
    return grid_kernel
