"""What a sum, a scale or a product of kernels is on a grid: a list of terms, each as structured as it can be.

GPyTorch evaluates ``AdditiveKernel`` and ``ProductKernel`` without knowing grids: it multiplies test x train
covariances densely. Here the same kernels are walked instead, by the distributive law:

    sums        their terms, side by side
    scales      their term, scaled
    products    each term of one times each term of the other, entry by entry: Kronecker times Kronecker is Kronecker,
                factor by factor; Kronecker times low rank is a sum of scaled Kronecker products; else dense
    any other   on the columns of one axis, it is a Kronecker product with ones; else as GPyTorch evaluates it
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gpytorch import Module
from gpytorch.kernels import AdditiveKernel, Kernel, ProductKernel, ScaleKernel
from gpytorch.lazy import LazyEvaluatedKernelTensor
from linear_operator import to_dense, to_linear_operator
from linear_operator.operators import (
    AddedDiagLinearOperator,
    LinearOperator,
    MatmulLinearOperator,
    RootLinearOperator,
    SumLinearOperator,
)
from torch import Tensor

from gpytorch_gaps import settings
from gpytorch_gaps.kernels.gappy_grid_kernel import GappyGridKernel
from gpytorch_gaps.operators import (
    HadamardLowRankOperator,
    KhatriRaoOperator,
    SelectedKroneckerOperator,
    SelectedKroneckerSumOperator,
)
from gpytorch_gaps.operators._base import same_cells
from gpytorch_gaps.solvers.memo import Memo

_memo = Memo(size=64)  # columns that kernels are restricted to, as numbers


@dataclass(frozen=True)
class Host:
    """A grid kernel found among others, and the input columns that it sees, in its order."""

    kernel: GappyGridKernel
    columns: tuple[int, ...]

    def points(self, x: Tensor) -> Tensor:
        """The columns of x that are the grid's."""
        if self.columns == tuple(range(x.size(-1))):
            return x
        return x[..., list(self.columns)]


def find_host(kernel: Kernel, columns: tuple[int, ...]) -> Host | None:
    """The first grid kernel inside `kernel`, whose inputs are the given columns of the original ones."""
    return next(_hosts(kernel, columns), None)


def _hosts(kernel: Kernel, columns: tuple[int, ...]) -> Iterator[Host]:
    if isinstance(kernel, GappyGridKernel):
        yield Host(kernel, columns)
    elif isinstance(kernel, ScaleKernel):
        yield from _hosts(kernel.base_kernel, columns)
    elif isinstance(kernel, AdditiveKernel | ProductKernel):
        for child in kernel.kernels:
            yield from _hosts(child, _restricted(child, columns))


def _restricted(kernel: Kernel, columns: tuple[int, ...]) -> tuple[int, ...]:
    """The columns that a kernel called on `columns` picks."""
    if kernel.active_dims is None:
        return columns
    active = _memo.get("active", (kernel.active_dims,), kernel.active_dims.tolist)
    return tuple(columns[i] for i in active)


def grid_points(covariance: LinearOperator) -> tuple[GappyGridKernel, Tensor] | None:
    """The grid kernel of a lazily evaluated covariance, and the points its rows belong to, in the grid's columns."""
    if isinstance(covariance, SumLinearOperator) and not isinstance(covariance, AddedDiagLinearOperator):
        return next(filter(None, map(grid_points, covariance.linear_ops)), None)
    if not isinstance(covariance, LazyEvaluatedKernelTensor):
        return None
    host = find_host(covariance.kernel, tuple(range(covariance.x1.size(-1))))
    return None if host is None else (host.kernel, host.points(covariance.x1))


def grid_covariance(covariance: LinearOperator) -> LinearOperator:
    """A lazily evaluated covariance, evaluated with its structure kept; others as GPyTorch evaluates them."""
    parts = _evaluated_terms(covariance)
    if parts is None:
        return covariance.evaluate_kernel() if isinstance(covariance, LazyEvaluatedKernelTensor) else covariance
    if len(parts) == 1 and isinstance(parts[0], SelectedKroneckerOperator):
        return parts[0]
    if _is_of_one_set(covariance):
        return SelectedKroneckerSumOperator(*parts)
    return parts[0] if len(parts) == 1 else SumLinearOperator(*parts)


def _is_of_one_set(covariance: LinearOperator) -> bool:
    """Whether rows and columns are the same points."""
    if isinstance(covariance, SumLinearOperator):
        return all(map(_is_of_one_set, covariance.linear_ops))
    if not isinstance(covariance, LazyEvaluatedKernelTensor):
        return covariance.is_square
    x1, x2 = covariance.x1, covariance.x2
    return x1 is x2 or (x1.shape == x2.shape and torch.equal(x1, x2))


def _evaluated_terms(covariance: LinearOperator) -> list[LinearOperator] | None:
    """The terms of a covariance that has a grid kernel in it, else None."""
    if isinstance(covariance, SumLinearOperator) and not isinstance(covariance, AddedDiagLinearOperator):
        found = [_evaluated_terms(part) for part in covariance.linear_ops]
        if all(terms is None for terms in found):
            return None
        pairs = zip(found, covariance.linear_ops, strict=True)
        return [t for terms, part in pairs for t in ([part.evaluate_kernel()] if terms is None else terms)]
    if not isinstance(covariance, LazyEvaluatedKernelTensor) or covariance.last_dim_is_batch:
        return None
    columns = tuple(range(covariance.x1.size(-1)))
    host = find_host(covariance.kernel, columns)
    if host is None:
        return None
    # as GPyTorch does: what was made without gradients stays without
    with torch.set_grad_enabled(covariance._is_grad_enabled):
        found_terms = _Walk(host, covariance.x1, covariance.x2, covariance.params).terms(covariance.kernel, columns)
        batch = covariance.batch_shape
        return [term if term.batch_shape == batch else term._expand_batch(batch) for term in found_terms]


@dataclass(frozen=True)
class _Walk:
    """Through one kernel, for one pair of inputs."""

    host: Host
    x1: Tensor
    x2: Tensor
    params: dict[str, Any]

    def terms(self, kernel: Kernel, columns: tuple[int, ...]) -> list[LinearOperator]:
        """Of a kernel whose inputs are the given columns: its own `active_dims` have been taken."""
        if isinstance(kernel, GappyGridKernel):
            host = Host(kernel, columns)
            return [_evaluate(kernel, host.points(self.x1), host.points(self.x2), self.params)]
        if isinstance(kernel, ScaleKernel):
            scale = kernel.outputscale[..., None, None]
            return [term.mul(scale) for term in self.terms(kernel.base_kernel, columns)]
        if isinstance(kernel, AdditiveKernel):
            return [t for child in kernel.kernels for t in self.terms(child, _restricted(child, columns))]
        if isinstance(kernel, ProductKernel):
            first, *others = [self.terms(child, _restricted(child, columns)) for child in kernel.kernels]
            for other in others:
                first = [hadamard(a, b) for a in first for b in other]
            return first
        lifted = _lift(kernel, columns, self.host)
        if lifted is not None:
            points = self.host.points(self.x1), self.host.points(self.x2)
            return [_evaluate(lifted, *points, self.params)]
        picked = list(columns)
        return [_evaluate(kernel, self.x1[..., picked], self.x2[..., picked], self.params)]


def _evaluate(kernel: Kernel, x1: Tensor, x2: Tensor, params: dict[str, Any]) -> LinearOperator:
    """Without the kernel's `active_dims`, which have been taken."""
    return to_linear_operator(Module.__call__(kernel, x1, x2, **params)).evaluate_kernel()


def hadamard(first: LinearOperator, second: LinearOperator) -> LinearOperator:
    """The product entry by entry, with as much structure as is left."""
    for a, b in ((first, second), (second, first)):
        if isinstance(a, SelectedKroneckerOperator) and isinstance(b, SelectedKroneckerOperator):
            alike = a.row_shape == b.row_shape and a.col_shape == b.col_shape
            if alike and same_cells(a.row_index, b.row_index) and same_cells(a.col_index, b.col_index):
                factors = [f * g for f, g in zip(a.factors, b.factors, strict=True)]
                return SelectedKroneckerOperator(*factors, row_index=a.row_index, col_index=a.col_index)
        if isinstance(a, KhatriRaoOperator) and isinstance(b, KhatriRaoOperator):
            alike = a.col_shape == b.col_shape and a.transposed == b.transposed
            if alike and same_cells(a.col_index, b.col_index):
                factors = [f * g for f, g in zip(a.factors, b.factors, strict=True)]
                return KhatriRaoOperator(*factors, col_index=a.col_index, transposed=a.transposed)
        sides = _low_rank_sides(b)
        if sides is not None and isinstance(a, SelectedKroneckerOperator | KhatriRaoOperator):
            return HadamardLowRankOperator(a, *sides)
    _warn_if_large(first)
    return to_linear_operator(to_dense(first) * to_dense(second))


def _low_rank_sides(op: LinearOperator) -> tuple[Tensor, Tensor] | None:
    """U and V with ``op = U V'``, if they are narrow."""
    if isinstance(op, RootLinearOperator):
        left = right = to_dense(op.root)
    elif isinstance(op, MatmulLinearOperator):
        left, right = to_dense(op.left_linear_op), to_dense(op.right_linear_op).mT
    else:
        return None
    return (left, right) if left.size(-1) <= 32 else None


def _warn_if_large(op: LinearOperator) -> None:
    needed, allowed = op.shape.numel() * op.dtype.itemsize, settings.prediction_memory.value()
    if needed > allowed:
        warnings.warn(
            f"a product of kernels without a common grid is formed densely: {needed / 2**30:.1f} GiB for a matrix of "
            f"{op.size(-2)} x {op.size(-1)}, beyond prediction_memory of {allowed / 2**30:.1f} GiB. Try: kernels on "
            "the columns of one axis each, inside GappyGridKernel.",
            ResourceWarning,
            stacklevel=2,
        )


# -- kernels on the columns of one axis ------------------------------------------------------------------------------


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
        return Module.__call__(self.kernel, x1[..., self._columns], x2[..., self._columns], diag=diag, **params)


def _lift(kernel: Kernel, columns: tuple[int, ...], host: Host) -> GappyGridKernel | None:
    """A kernel on the columns of one axis as a grid kernel that is one on the others; None if it sees several axes.

    Low-rank kernels are left as they are: cheaper still.
    """
    grid = host.kernel.grid
    for axis, span in enumerate(grid.columns):
        own = host.columns[span]
        if set(columns) <= set(own):
            kernels: list[Kernel] = [_One() for _ in grid.axes]
            kernels[axis] = _OnColumns(kernel, [own.index(column) for column in columns])
            lifted = GappyGridKernel(kernels, grid)
            lifted._lookups = host.kernel._lookups
            return lifted
    return None
