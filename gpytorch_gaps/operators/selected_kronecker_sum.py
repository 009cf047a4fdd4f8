"""``Σ_t W K_t W' + ...``: sums of Kronecker products and other covariances, without and with noise."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from linear_operator import to_dense
from linear_operator.operators import (
    AddedDiagLinearOperator,
    DiagLinearOperator,
    LinearOperator,
    RootLinearOperator,
    SumLinearOperator,
    ZeroLinearOperator,
)
from linear_operator.utils.memoize import cached
from torch import Tensor

from gpytorch_gaps.linalg.factors import Factor, all_dense
from gpytorch_gaps.operators.base import KroneckerFactorsOperator
from gpytorch_gaps.operators.interpolated_kronecker import InterpolatedKroneckerOperator
from gpytorch_gaps.operators.noisy import NoisyGridOperator
from gpytorch_gaps.operators.selected_kronecker import SelectedKroneckerOperator
from gpytorch_gaps.operators.sums import as_diagonal, register_sum
from gpytorch_gaps.operators.traces import entries_of
from gpytorch_gaps.solvers.interpolated_system import InterpolatedSystem
from gpytorch_gaps.solvers.kronecker_term import KroneckerTerm
from gpytorch_gaps.solvers.system import NoisySystem, Unstructured
from gpytorch_gaps.utils.cache import TensorCache
from gpytorch_gaps.utils.precision import full_float32
from gpytorch_gaps.utils.tensors import same_values

_UNSTRUCTURED_RANK = 100  # rank of the pivoted Cholesky factor in the preconditioner, for a term without structure
_INTERPOLATED_RANK = 400  # rank of the stored root of an interpolated term whose points or grid differ from the first's
_STORED_NUMBERS = 2**25  # largest size of such a root: 256 MiB


class SelectedKroneckerSumOperator(SumLinearOperator):
    """A sum of covariances of the same points: Kronecker products, low-rank matrices and dense matrices.

    :param linear_ops: square operators of the same size.
    :param cache: results of earlier solves.

    >>> first, second = (SelectedKroneckerOperator(torch.full((2, 2), value)) for value in (1.0, 2.0))
    >>> type(first + second).__name__, (first + second).to_dense().tolist()
    ('SelectedKroneckerSumOperator', [[3.0, 3.0], [3.0, 3.0]])
    """

    def __init__(self, *linear_ops: LinearOperator, cache: TensorCache | None = None) -> None:
        flat = [part for op in linear_ops for part in (op.linear_ops if type(op) is SumLinearOperator else (op,))]
        self.cache = cache or TensorCache()
        super().__init__(*flat, cache=self.cache)

    def __add__(self, other: Any) -> LinearOperator | Tensor:
        if isinstance(other, ZeroLinearOperator):
            return self
        if isinstance(other, DiagLinearOperator):
            return SelectedKroneckerSumAddedDiagOperator(self, other)
        if isinstance(other, AddedDiagLinearOperator):
            return self + other._linear_op + other._diag_tensor
        parts = other.linear_ops if isinstance(other, SumLinearOperator) else (other,)
        return SelectedKroneckerSumOperator(*self.linear_ops, *parts)

    def add_diagonal(self, diag: float | Tensor) -> LinearOperator:
        return self + as_diagonal(self, diag)

    @full_float32()
    def _matmul(self, rhs: Tensor) -> Tensor:
        return super()._matmul(rhs)

    @full_float32()
    def _bilinear_derivative(self, left_vecs: Tensor, right_vecs: Tensor) -> tuple[Tensor | None, ...]:
        return super()._bilinear_derivative(left_vecs, right_vecs)

    @cached(name="kronecker_terms")
    def kronecker_terms(self) -> list[Any]:
        """The Kronecker products on the grid and cells of the first. If there are none: the interpolated terms."""
        terms = [op for op in self.linear_ops if isinstance(op, SelectedKroneckerOperator)]
        if not terms:
            interpolated = [op for op in self.linear_ops if isinstance(op, InterpolatedKroneckerOperator)]
            return [op for op in interpolated if op.rows == interpolated[0].rows]
        # a block of axes may be one factor in one term and several in another; cells have the same numbers in both
        blocks = not all(all_dense(op.factors) for op in terms)
        same = [op for op in terms if _cells(op, blocks) == _cells(terms[0], blocks)]
        return [op for op in same if same_values(op.row_index, terms[0].row_index)]

    def root(self) -> Tensor | None:
        """A root of the other terms: exact for low-rank terms, else an approximation that is constant for autograd."""
        terms, roots = self.kronecker_terms(), []
        for number, op in enumerate(self.linear_ops):
            if isinstance(op, RootLinearOperator) and op.root.size(-1) <= _UNSTRUCTURED_RANK:
                roots.append(to_dense(op.root))
            elif not any(op is term for term in terms):
                roots.append(self._remembered_root(number, op))
        if not roots:
            return None
        return torch.cat([root.expand(*self.batch_shape, *root.shape[-2:]) for root in roots], -1)

    def _remembered_root(self, number: int, op: LinearOperator) -> Tensor:
        rank = min(_UNSTRUCTURED_RANK, op.size(-1))

        def compute() -> Tensor:
            if isinstance(op, InterpolatedKroneckerOperator):
                return op.leading_root(min(_INTERPOLATED_RANK, max(1, _STORED_NUMBERS // op.size(-1))))
            # beyond the numerical rank of a smooth kernel, the factor has columns of NaN
            root = _as_float64(op).pivoted_cholesky(rank=rank, error_tol=1e-10).detach()
            return torch.where(root.isfinite().all(-2, keepdim=True), root, torch.zeros_like(root))

        return self.cache.cached(("root", number), _made_of(op), compute).to(self.dtype)


class SelectedKroneckerSumAddedDiagOperator(NoisyGridOperator):
    """A :class:`SelectedKroneckerSumOperator` plus noise. Solves use dense Cholesky or preconditioned ignore-gaps.

    The preconditioner is ``Σ_t W Q_t T_t,p Q_t' W' + R R' + D``: the leading eigenpairs of every Kronecker term, all of
    the low-rank terms, and low-rank approximations of the others.

    :param linear_ops: a :class:`SelectedKroneckerSumOperator` and a diagonal operator.
    :param preconditioner_override: a function of the operator that returns (P^-1, P, log|P|) for linear_operator.
    :raises ValueError: if an operator has another class, or another dtype or device than the other one.

    >>> first, second = (SelectedKroneckerOperator(value * torch.eye(2)) for value in (1.0, 2.0))
    >>> type((first + second).add_diagonal(0.5)).__name__
    'SelectedKroneckerSumAddedDiagOperator'
    """

    def __init__(self, *linear_ops: LinearOperator, preconditioner_override: Callable | None = None) -> None:
        super().__init__(*linear_ops, preconditioner_override=preconditioner_override)
        if not isinstance(self._linear_op, SelectedKroneckerSumOperator):
            raise ValueError(
                f"SelectedKroneckerSumAddedDiagOperator: got {type(self._linear_op).__name__}, expected a "
                "SelectedKroneckerSumOperator and a diagonal operator"
            )

    def term_factors(self) -> list[tuple[Factor, ...]]:
        return [op.factors for op in self._linear_op.kronecker_terms()]

    def unstructured_root(self) -> Tensor | None:
        return self._linear_op.root()

    def kernel_matrix(self) -> Tensor:
        return torch.stack([to_dense(op).double() for op in self._linear_op.linear_ops]).sum(0)

    def system(self) -> NoisySystem:
        kernel: SelectedKroneckerSumOperator = self._linear_op
        made_of = [tensor for op in kernel.linear_ops for tensor in _made_of(op)]
        return kernel.cache.cached("system", (*made_of, *self._diag_tensor.representation()), self._build)

    def _build(self) -> NoisySystem:
        kernel: SelectedKroneckerSumOperator = self._linear_op
        terms = kernel.kronecker_terms()
        others = [op for op in kernel.linear_ops if not any(op is term for term in terms)]
        products = [KroneckerTerm(op.factors, op.shared_eigen()) for op in terms]
        other, noise = _unstructured(others, kernel.root()) if others else None, self.noise_tensor()
        if terms and isinstance(terms[0], InterpolatedKroneckerOperator):
            return InterpolatedSystem(products, terms[0].rows, noise, other, dtype=self.dtype)
        index = terms[0].row_index if terms else torch.zeros(0, dtype=torch.long, device=self.device)
        return NoisySystem(products, index, noise, self.size(-1), other, dtype=self.dtype)


register_sum("kernel", SelectedKroneckerSumOperator)


def _unstructured(others: Sequence[LinearOperator], root: Tensor | None) -> Unstructured:
    wide = [_as_float64(op) for op in others]
    low_rank = [isinstance(op, RootLinearOperator) and op.root.size(-1) <= _UNSTRUCTURED_RANK for op in others]
    assert root is not None
    return Unstructured(
        matmul=lambda x: sum(op._matmul(x) for op in wide),
        dense=lambda: sum(op.to_dense() for op in wide),
        entries=lambda rows, columns: torch.stack([entries_of(op, rows, columns) for op in wide]).sum(0),
        root=root.detach().double(),
        trace=sum(op._diagonal().sum(-1) for op in wide),
        flops=sum(map(_product_flops, others)),
        is_low_rank=all(low_rank),
    )


def _cells(op: SelectedKroneckerOperator, blocks: bool) -> tuple[int, ...]:
    """The shape of the grid, or its number of cells if the terms may have different blocks of axes."""
    return (math.prod(op.row_shape),) if blocks else op.row_shape


def _made_of(op: LinearOperator) -> tuple[Tensor, ...]:
    """The tensors that determine a term. The points of an interpolated term are not in its representation."""
    points = (op.rows.first, op.rows.weights) if isinstance(op, InterpolatedKroneckerOperator) else ()
    return *op.representation(), *points


def _product_flops(op: LinearOperator) -> float:
    """FLOPs of a product with one column."""
    if isinstance(op, InterpolatedKroneckerOperator):
        return op.product_flops
    return 4.0 * op.size(-1) * (op.root.size(-1) if isinstance(op, RootLinearOperator) else op.size(-1) / 2)


def _as_float64(op: LinearOperator) -> LinearOperator:
    """The operator in float64, detached."""
    if isinstance(op, KroneckerFactorsOperator):
        return op._as_float64()
    tensors = (t.detach().double() if t.is_floating_point() else t for t in op.representation())
    return op.representation_tree()(*tensors)
