"""What a sum, a scale or a product of kernels is on a grid: a list of terms, each as structured as it can be.

GPyTorch evaluates ``AdditiveKernel`` and ``ProductKernel`` without knowing grids: it multiplies test x train
covariances densely. :func:`patch_composite_kernels` expands them into a sum of structured terms
instead, by the distributive law:

    sums        their terms, side by side
    scales      their term, scaled
    products    each term of one times each term of the other, entry by entry: Kronecker times Kronecker is Kronecker,
                factor by factor; else dense, or made row by row
    any other   on the columns of one axis, it is a Kronecker product with ones; else as GPyTorch evaluates it. A
                linear kernel of several axes is a sum of linear kernels of one
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from gpytorch import Module
from gpytorch.kernels import AdditiveKernel, Kernel, LinearKernel, ProductKernel, ScaleKernel
from linear_operator import to_dense, to_linear_operator
from linear_operator.operators import (
    DenseLinearOperator,
    LinearOperator,
    SumLinearOperator,
)
from torch import Tensor

from gpytorch_gaps import settings
from gpytorch_gaps.kernels.grid_kernel import GappyGridKernel
from gpytorch_gaps.kernels.lift import as_grid_kernels
from gpytorch_gaps.operators import (
    KernelRowsOperator,
    KhatriRaoOperator,
    SelectedKroneckerOperator,
    SelectedKroneckerSumOperator,
)
from gpytorch_gaps.operators.float64_covariance import covariance_in_float64
from gpytorch_gaps.operators.inspect import GridKernelRef, find_grid_kernel, resolve_active_dims, select_columns
from gpytorch_gaps.utils.precision import cast_entries, full_float32
from gpytorch_gaps.utils.tensors import same_values


@full_float32()
def structured_covariance(kernel: Kernel, x1: Tensor, x2: Tensor, params: dict[str, Any]) -> LinearOperator | None:
    """What a sum or product with a grid kernel in it is; None if there is none. Its `active_dims` have been taken."""
    columns = tuple(range(x1.size(-1)))
    host = find_grid_kernel(kernel, columns)
    if host is None:
        return None
    terms = _TermExpansion(host, x1, x2, params).terms(kernel, columns)
    batch = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2], kernel.batch_shape)
    terms = [term if term.batch_shape == batch else term.expand(*batch, *term.matrix_shape) for term in terms]
    if len(terms) == 1 and isinstance(terms[0], SelectedKroneckerOperator):
        return terms[0]
    if same_values(x1, x2):
        return SelectedKroneckerSumOperator(*terms)
    return terms[0] if len(terms) == 1 else SumLinearOperator(*terms)


def patch_composite_kernels() -> None:
    """Makes GPyTorch's ``AdditiveKernel`` and ``ProductKernel`` keep the structure of a grid kernel inside them.

    Upstream they multiply test x train covariances densely, and unlike ``ScaleKernel`` they do not delegate to the
    prediction strategy of the kernels inside them. Kernels without a grid kernel inside are not affected. Called when
    ``gpytorch_gaps.kernels`` is imported; a second call changes nothing.
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
        if isinstance(kernel, GappyGridKernel):
            return kernel.prediction_strategy(*args, **kwargs)
    return Kernel.prediction_strategy(self, *args, **kwargs)


@dataclass(frozen=True)
class _TermExpansion:
    """Through one kernel, for one pair of inputs."""

    host: GridKernelRef
    x1: Tensor
    x2: Tensor
    params: dict[str, Any]

    def terms(self, kernel: Kernel, columns: tuple[int, ...], in_product: bool = False) -> list[LinearOperator]:
        """Of a kernel whose inputs are the given columns: its own `active_dims` have been taken."""
        if isinstance(kernel, GappyGridKernel):
            host = GridKernelRef(kernel, columns)
            return [_evaluate(kernel, host.points(self.x1), host.points(self.x2), self.params)]
        if isinstance(kernel, ScaleKernel):
            scale = kernel.outputscale[..., None, None]
            return [term.mul(scale) for term in self.terms(kernel.base_kernel, columns, in_product)]
        if isinstance(kernel, AdditiveKernel):
            children = [(child, resolve_active_dims(child, columns)) for child in kernel.kernels]
            return [term for child, own in children for term in self.terms(child, own, in_product)]
        if isinstance(kernel, ProductKernel):
            first, *others = [
                self.terms(child, resolve_active_dims(child, columns), in_product=True) for child in kernel.kernels
            ]
            for other in others:
                pairs = [(a, b) for a in first for b in other]
                if not all(_have_structure(a, b) for a, b in pairs) and not self._may_be_dense(kernel):
                    return [self._by_rows(kernel, columns)]
                first = [hadamard(a, b) for a, b in pairs]
            return first
        # a low-rank kernel by itself is cheapest as it is, but its product with a Kronecker one is only that if lifted
        is_linear = type(kernel) is LinearKernel
        lifted = [] if is_linear and not in_product else as_grid_kernels(kernel, columns, self.host)
        if lifted:
            points = self.host.points(self.x1), self.host.points(self.x2)
            return [_evaluate(part, *points, self.params) for part in lifted]
        if is_linear or self._may_be_dense(kernel):
            return [_evaluate(kernel, select_columns(self.x1, columns), select_columns(self.x2, columns), self.params)]
        return [self._by_rows(kernel, columns)]

    def _may_be_dense(self, kernel: Kernel) -> bool:
        """Whether a covariance without structure is formed at once: it is small, or must be differentiated."""
        if KernelRowsOperator.is_small(self.x1, self.x2):
            return True
        if not (torch.is_grad_enabled() and any(p.requires_grad for p in kernel.parameters())):
            return False
        _warn_if_large(self.x1.size(-2), self.x2.size(-2), self.x1.dtype)
        return True

    def _by_rows(self, kernel: Kernel, columns: tuple[int, ...]) -> KernelRowsOperator:
        return KernelRowsOperator(
            select_columns(self.x1, columns), select_columns(self.x2, columns), kernel=kernel, params=self.params
        )


def _evaluate(kernel: Kernel, x1: Tensor, x2: Tensor, params: dict[str, Any]) -> LinearOperator:
    """Without the kernel's `active_dims`, which have been taken. Dense float32 entries are rounded from float64."""
    covariance = to_linear_operator(Module.__call__(kernel, x1, x2, **params)).evaluate_kernel()
    if x1.dtype == torch.float32 and isinstance(covariance, DenseLinearOperator):
        return to_linear_operator(cast_entries(covariance_in_float64(kernel, x1, x2, taken=True, **params), x1.dtype))
    return covariance


def hadamard(first: LinearOperator, second: LinearOperator) -> LinearOperator:
    """The product entry by entry: factor by factor where both have factors, else dense."""
    if not _have_structure(first, second):
        return to_linear_operator(to_dense(first) * to_dense(second))
    return first.with_factors([f * g for f, g in zip(first.factors, second.factors, strict=True)])


def _have_structure(a: LinearOperator, b: LinearOperator) -> bool:
    """Whether two covariances are of the same cells of the same grid, or of the same points with these."""
    if isinstance(a, SelectedKroneckerOperator) and isinstance(b, SelectedKroneckerOperator):
        alike = a.row_shape == b.row_shape and a.col_shape == b.col_shape
        return alike and same_values(a.row_index, b.row_index) and same_values(a.col_index, b.col_index)
    if isinstance(a, KhatriRaoOperator) and isinstance(b, KhatriRaoOperator):
        alike = a.col_shape == b.col_shape and a.transposed == b.transposed
        return alike and same_values(a.col_index, b.col_index)
    return False


def _warn_if_large(rows: int, columns: int, dtype: torch.dtype) -> None:
    needed, allowed = rows * columns * dtype.itemsize, settings.prediction_memory.value()
    if needed > allowed:
        warnings.warn(
            f"kernels without a common grid are formed densely: {needed / 2**30:.1f} GiB for a matrix of {rows} x "
            f"{columns}, beyond prediction_memory of {allowed / 2**30:.1f} GiB. Try: kernels on the columns of one "
            "axis each, inside GappyGridKernel.",
            ResourceWarning,
            stacklevel=2,
        )
