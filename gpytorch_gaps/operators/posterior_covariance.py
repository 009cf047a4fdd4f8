"""``K_** - K_*X (K_XX + D)^-1 K_X*``: the covariance of a posterior, worked out when and as far as it is asked for."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from linear_operator import to_dense
from linear_operator.operators import LinearOperator, SumLinearOperator
from linear_operator.utils.getitem import _equal_indices, _noop_index
from linear_operator.utils.memoize import cached
from torch import Tensor

from gpytorch_gaps import settings
from gpytorch_gaps.kronecker.selection import unravel
from gpytorch_gaps.operators._added_diag import OwnAddedDiagOperator
from gpytorch_gaps.operators._base import same_cells
from gpytorch_gaps.operators.khatri_rao import KhatriRaoOperator
from gpytorch_gaps.operators.selected_kronecker import SelectedKroneckerOperator
from gpytorch_gaps.preconditioners.low_rank import LowRankPreconditioner
from gpytorch_gaps.reports import SolveReport, report_solve
from gpytorch_gaps.solvers.solve import ADVICE


@dataclass(frozen=True)
class PredictionPoints:
    """Where the points of a prediction lie, and where the observations."""

    x: Tensor  # shape: (Q, D), the grid's columns
    train_x: Tensor  # shape: (N, D)
    cells: Tensor | None  # of the training grid, if all points are on it. shape: (Q,)

    def at(self, index: Any) -> "PredictionPoints":
        return replace(self, x=self.x[index], cells=None if self.cells is None else self.cells[index])


_MAX_PASSES = 3  # each takes the residual down by the tolerance of a solve


class PosteriorCovarianceOperator(LinearOperator):
    """The posterior covariance of Q points, with the solves of the covariance of the N observations.

    A diagonal is worked out in chunks of columns that fit in ``settings.prediction_memory``, one solve each: nothing
    of size Q x N is ever held. All solves are made in the settings in force when the operator was made.

    :param prior: K_**, which may still be lazy. shape (*batch, Q, Q).
    :param cross: K_*X, shape (*batch, Q, N).
    :param train: K_XX + D, shape (*batch, N, N).
    :param snapshot: settings; those in force by default.
    :param points: where the Q points lie.
    """

    def __init__(
        self,
        prior: LinearOperator,
        cross: LinearOperator,
        train: LinearOperator,
        snapshot: settings.Snapshot | None = None,
        points: PredictionPoints | None = None,
    ) -> None:
        snapshot = snapshot or settings.in_force()
        batch = torch.broadcast_shapes(prior.batch_shape, cross.batch_shape, train.batch_shape)
        prior, cross, train = (
            op if op.batch_shape == batch else op.expand(*batch, *op.matrix_shape) for op in (prior, cross, train)
        )
        super().__init__(prior, cross, train, snapshot=snapshot, points=points)
        self.prior, self.cross, self.train, self.snapshot = prior, cross, train, snapshot
        self.points = points

    @property
    def dtype(self) -> torch.dtype:
        return self.train.dtype

    @property
    def device(self) -> torch.device:
        return self.train.device

    def _size(self) -> torch.Size:
        return self.prior.shape

    def _transpose_nonbatch(self) -> "PosteriorCovarianceOperator":
        # symmetric, but its gradient is not: that of the prior is transposed with it
        return PosteriorCovarianceOperator(self.prior.mT, self.cross, self.train, self.snapshot, self.points)

    def _matmul(self, rhs: Tensor) -> Tensor:
        columns = rhs.unsqueeze(-1) if rhs.dim() == 1 else rhs
        with self.snapshot.restored():
            result = self.prior @ columns - self.cross @ self.train.solve(self.cross.mT @ columns)
        return result.squeeze(-1) if rhs.dim() == 1 else result

    @cached(name="posterior_variance")
    def _diagonal(self) -> Tensor:
        prior = self.prior.diagonal(dim1=-1, dim2=-2)
        if not self.size(-1):
            return prior
        with self.snapshot.restored():
            explained = self._explained_by_low_rank()
            if explained is None:
                explained = torch.cat([self._explained(rows, prior) for rows in self._chunks()], -1)
        return prior - explained

    def _explained_by_low_rank(self) -> Tensor | None:
        """Where the covariance is of low rank to the tolerance: no solves at all.

        With ``K = Φ C Φ' + E`` and ``|E| <= e s2``, the variance is off by no more than about e times the prior's.
        """
        differentiated = torch.is_grad_enabled() and self.requires_grad
        count = self.size(-1)
        if differentiated or self.batch_shape or not isinstance(self.train, OwnAddedDiagOperator):
            return None
        started = time.perf_counter()
        found, tolerance = self.train.low_rank_form(count), settings.tolerance_in_force()
        basis = None if found is None else self._basis(found[0])
        if found is None or basis is None:
            return None
        form, error = found
        size = int(max(1, settings.prediction_memory.value() // (8 * 4 * form.rank)))
        parts = [form.explained(basis(slice(start, start + size))) for start in range(0, count, size)]
        report = SolveReport(
            method="ignore",
            iterations=0,
            residual=torch.tensor([error]),
            seconds=time.perf_counter() - started,
            rank=form.rank,
            num_rhs=count,
            converged=error <= tolerance,
            tolerance=tolerance,
            flops=form.setup_flops + count * float(form.rank) ** 2,
            reason=f"variances without solves: rank {form.rank} leaves eigenvalues of {error:.1e} times the noise",
        )
        report_solve(report, ADVICE["ignore"])
        return torch.cat(parts, -1).to(self.dtype)

    def _basis(self, form: LowRankPreconditioner) -> Callable[[slice], Tensor] | None:
        """Φ at some of the points: eigenvectors at cells of the training grid, their extension at others.

        The extension of an eigenvector q of K_i to a point is ``k_i(x, axis_i) q / t``; rounding of the numerator
        enters a variance with up to ``eps sqrt(M) |K|``. None where that is too much, and for other points of a sum.
        """
        cells = None if self.points is None else self.points.cells
        if cells is not None:
            return lambda rows: form.basis_at(cells[rows])
        cross, kernel = self.cross, self.train._linear_op
        structured = isinstance(cross, SelectedKroneckerOperator | KhatriRaoOperator)
        if not structured or not isinstance(kernel, SelectedKroneckerOperator) or cross.shape[-2] != self.size(-1):
            return None
        eigen = kernel.shared_eigen().get("eigen")
        alike = cross.col_shape == kernel.row_shape and same_cells(cross.col_index, kernel.row_index)
        if eigen is None or not alike or getattr(cross, "transposed", False):
            return None
        largest = math.prod(float(values.amax()) for values in eigen.values)
        rounding = 5.0 * torch.finfo(torch.float64).eps * math.sqrt(eigen.num_cells) * largest
        if rounding > settings.tolerance_in_force() * float(form.diagonal.min()):
            return None
        used = [values[columns] for values, columns in zip(eigen.values, form.columns, strict=True)]
        sides = zip(cross.factors, form.vectors, used, strict=True)
        tables = [factor.double() @ vectors / values for factor, vectors, values in sides]
        if isinstance(cross, KhatriRaoOperator):
            return lambda rows: form.basis_from([table[rows] for table in tables])
        where = unravel(cross.row_index, cross.row_shape)
        return lambda rows: form.basis_from([table[own[rows]] for table, own in zip(tables, where, strict=True)])

    def _explained(self, rows: slice, prior: Tensor) -> Tensor:
        """``g' A^-1 g`` of some of the points, g a column of K_X* and A = K_XX + D. shape: (*batch, q)

        As ``2 a'g - a'Aa`` for weights a close to ``A^-1 g``: an error in a enters squared, where in ``a'g`` it would
        drown variances far below the prior's. It is also stationary in a, which need not be differentiated.
        """
        columns = to_dense(self.cross[..., rows, :]).mT.contiguous()  # shape: (*batch, N, q)
        weights = self._weights(columns, prior[..., rows])
        if torch.is_grad_enabled() and self.requires_grad:
            image = self.train @ weights.to(self.dtype)
            return (weights.to(self.dtype) * (2.0 * columns - image)).sum(-2)
        image = self._wide_product(weights)
        return (weights * (2.0 * columns.double() - image)).sum(-2).to(self.dtype)

    def _wide_product(self, x: Tensor) -> Tensor:
        """``A x`` in float64, not differentiable. shape: (*batch, N, q)"""
        if isinstance(self.train, OwnAddedDiagOperator):
            return self.train.wide_matmul(x)
        return self.train._matmul(x.to(self.dtype)).double()

    def _weights(self, columns: Tensor, prior: Tensor) -> Tensor:
        """``A^-1 g`` in float64, so close that variances are right to the tolerance in force. Not differentiable.

        With ``r = g - A a`` the variance is off by ``r'A^-1 r <= |r|^2 / s2``.
        """
        with torch.no_grad():
            wide, own = columns.double(), isinstance(self.train, OwnAddedDiagOperator)
            tolerance, floor = settings.tolerance_in_force(), 10.0 * torch.finfo(torch.float64).eps * prior.double()
            noise = self.train._diag_tensor._diagonal().double().amin(-1, keepdim=True) if own else None
            weights, residual = torch.zeros_like(wide), wide
            for _ in range(_MAX_PASSES if own else 1):
                solve = self.train._solve if own else self.train.solve
                weights = weights + solve(residual if own else residual.to(self.dtype)).double()
                if noise is None:
                    break
                residual = wide - self._wide_product(weights)
                variance = prior.double() - (weights * (wide + residual)).sum(-2)
                error = residual.square().sum(-2) / noise.clamp_min(torch.finfo(noise.dtype).tiny)
                if bool((error <= tolerance * variance.maximum(floor)).all()):
                    break
        return weights

    def _chunks(self) -> list[slice]:
        """Of points, as many at a time as memory allows: a solve holds about ten numbers an observation and column."""
        numbers = 10 * self.train.shape[:-1].numel() + 4 * self._grid_numbers()
        size = int(max(1, settings.prediction_memory.value() // (8 * numbers)))
        return [slice(start, start + size) for start in range(0, self.size(-1), size)]

    def _grid_numbers(self) -> int:
        """Cells that a product with the covariance of the observations visits for one column."""
        kernel = getattr(self.train, "_linear_op", None)
        terms = kernel.linear_ops if isinstance(kernel, SumLinearOperator) else (kernel,)
        return max(math.prod(getattr(term, "row_shape", ())) for term in terms) * self.batch_shape.numel()

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        simple = all(isinstance(index, slice) or index.dim() == 1 for index in (row_index, col_index))
        if not simple or not _equal_indices(row_index, col_index):
            return super()._getitem(row_index, col_index, *batch_indices)
        prior = self.prior._getitem(row_index, _noop_index, *batch_indices)[..., col_index]
        cross = self.cross._getitem(row_index, _noop_index, *batch_indices)
        train = self.train._getitem(_noop_index, _noop_index, *batch_indices) if batch_indices else self.train
        points = None if self.points is None else self.points.at(row_index)
        return PosteriorCovarianceOperator(prior, cross, train, self.snapshot, points)

    @cached
    def to_dense(self) -> Tensor:
        prior, columns = to_dense(self.prior), to_dense(self.cross).mT
        with self.snapshot.restored():
            weights = self._weights(columns, prior.diagonal(dim1=-2, dim2=-1).detach()).to(self.dtype)
            # a'G - a'Aa / 2 and its transpose: A is symmetric, and so must its gradient be
            half = weights.mT @ (columns - 0.5 * (self.train @ weights))
            return prior - (half + half.mT)

    def root_decomposition(self, method: str | None = None) -> LinearOperator:
        """By Cholesky, whatever the size: a Lanczos root loses a third of the variance."""
        return super().root_decomposition(method=method or "cholesky")
