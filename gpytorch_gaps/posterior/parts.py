"""The parts of a posterior covariance ``K_** - K_*X A^-1 K_X*``, ``A = K_XX + D``, and its exact values."""

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from linear_operator import to_dense
from linear_operator.operators import ConstantMulLinearOperator, LinearOperator, SumLinearOperator
from linear_operator.utils.getitem import _noop_index
from torch import Tensor

from gpytorch_gaps.operators.kernel_rows import KernelRowsOperator
from gpytorch_gaps.operators.khatri_rao import KhatriRaoOperator
from gpytorch_gaps.operators.noisy import NoisyGridOperator
from gpytorch_gaps.posterior.train_covariance import (
    UNSQUARED_TOLERANCE,
    TrainCovariance,
    has_float64_entries,
    summands,
    train_covariance,
)
from gpytorch_gaps.reports import one_report
from gpytorch_gaps.solvers.config import SolveConfig
from gpytorch_gaps.utils.precision import float64_entries
from gpytorch_gaps.utils.progress import with_bar

_CPU_CACHE_NUMBERS = 2**21  # with more numbers, products with several columns are slower than one column at a time
ROUNDINGS = 8.0  # units of rounding in a sum that cancels; comparisons with longer arithmetic found at most three


@dataclass(frozen=True)
class PredictionPoints:
    """Coordinates of the points of a prediction and of the observations."""

    x: Tensor  # shape: (Q, D), the grid's columns
    train_x: Tensor  # shape: (N, D)
    cells: Tensor | None  # cells of the points, if all of them lie on the training grid. shape: (Q,)

    def at(self, index: Any) -> "PredictionPoints":
        return replace(self, x=self.x[index], cells=None if self.cells is None else self.cells[index])


@dataclass(frozen=True)
class PosteriorParts:
    """K_**, K_*X and A with one batch shape, the configuration of solves, and the points."""

    prior: LinearOperator  # shape: (*batch, Q, Q)
    cross: LinearOperator  # shape: (*batch, Q, N)
    train: LinearOperator  # shape: (*batch, N, N)
    config: SolveConfig
    points: PredictionPoints | None = None

    @property
    def num_points(self) -> int:
        return self.prior.size(-1)

    @property
    def dtype(self) -> torch.dtype:
        return self.train.dtype

    @property
    def cells(self) -> Tensor | None:
        return None if self.points is None else self.points.cells

    @property
    def grid_train(self) -> NoisyGridOperator | None:
        """A if it is one of our operators, which has a system, eigenvectors and plans; None otherwise."""
        return self.train if isinstance(self.train, NoisyGridOperator) else None

    @cached_property
    def observed(self) -> TrainCovariance:
        """A with its solves."""
        return train_covariance(self.train, self.config)

    @property
    def differentiated(self) -> bool:
        return torch.is_grad_enabled() and any(op.requires_grad for op in (self.prior, self.cross, self.train))

    def at(self, index: Any, *batch_indices: Any) -> "PosteriorParts":
        """The parts for a subset of the points."""
        train = self.train._getitem(_noop_index, _noop_index, *batch_indices) if batch_indices else self.train
        batch_indices = batch_indices or (_noop_index,) * len(self.prior.batch_shape)
        prior = self.prior._getitem(index, _noop_index, *batch_indices)[..., index]
        cross = self.cross._getitem(index, _noop_index, *batch_indices)
        return PosteriorParts(prior, cross, train, self.config, None if self.points is None else self.points.at(index))

    def prior_variance(self) -> Tensor:
        """The diagonal of K_** in float64. shape: (*batch, Q)"""
        prior = copy.copy(self.prior)
        prior.__dict__.pop("_memoize_cache", None)  # the cache may hold values that are rounded to float32
        with float64_entries():
            return prior.diagonal(dim1=-1, dim2=-2).double()

    # -- as much as memory allows ------------------------------------------------------------------------------------

    def pieces(self, for_draws: bool = False) -> Iterator["PosteriorParts"]:
        """The parts for a few points at a time, evaluated, if the covariances of all points exceed the memory.

        :param for_draws: whether pieces must also be small enough for joint draws.
        """
        by_rows, memory = _rows_of(self.cross), self.config.memory
        size = math.sqrt(memory / 40.0)
        if by_rows:
            size = min(size, memory // (32 * self.train.batch_shape.numel() * max(op.width for op in by_rows)))
        size = int(max(1, size))
        scattered = any(isinstance(term, KhatriRaoOperator) for term in summands(self.cross))
        if not by_rows and not (for_draws and scattered and self.num_points > size):
            yield self
            return
        for start in range(0, self.num_points, size):
            part = self.at(slice(start, start + size))
            yield replace(part, prior=_evaluated(part.prior), cross=_evaluated(part.cross))

    def columns_at_once(self, more: int = 0) -> int:
        """The number of columns that are solved for at once.

        A solve stores about ten numbers per observation and column, which must fit in memory. On a CPU, they must also
        fit in its cache: on a large grid, single columns are faster.

        :param more: further numbers per column.
        """
        cells = self._grid_numbers()
        numbers = 10 * self.train.shape[:-1].numel() + 4 * cells + more
        by_memory = self.config.memory // (8 * numbers)
        by_cache = _CPU_CACHE_NUMBERS // cells if self.train.device.type == "cpu" else by_memory
        return int(max(1, min(by_memory, by_cache)))

    def _grid_numbers(self) -> int:
        """Number of cells that a product with A visits for one column."""
        kernel = getattr(self.train, "_linear_op", None)
        shapes = [getattr(term, "row_shape", ()) for term in summands(kernel)] if kernel is not None else []
        return max(map(math.prod, shapes), default=1) * self.train.batch_shape.numel()

    # -- exact values --------------------------------------------------------------------------------------------------

    def explained_variance(self, rows: slice, prior: Tensor) -> tuple[Tensor, Tensor]:
        """``g' A^-1 g`` for some points, g a column of K_X*, and a bound on its error. shape: (*batch, q) each

        It is computed as ``2 a'g - a'Aa`` for weights a close to ``A^-1 g``. Its error is quadratic in that of a. The
        error of ``a'g`` is linear, and would exceed variances that are far below the prior variance. The expression is
        stationary in a, so that a needs no gradient. Rounding of the entries of K, and of sums of them, changes
        ``k - 2 a'g + a'Aa`` by about ``eps (sqrt(k) + |a| sqrt(k_X))^2``.

        :param prior: prior variances of all points.
        """
        with float64_entries():
            columns = to_dense(self.cross[..., rows, :]).mT.contiguous().double()  # shape: (*batch, N, q)
        known = prior[..., rows].detach()
        weights, residual = self.observed.solve_for_variances(columns.detach(), known, self.num_points)
        image = self.observed.matmul(weights) if self.differentiated else columns - residual
        explained = (weights * (2.0 * columns - image)).sum(-2)
        exact_entries = self.observed.has_float64_entries and has_float64_entries(self.cross)
        eps = torch.finfo(torch.float64 if exact_entries else self.dtype).eps
        scale = self.train._diagonal().detach().double().amax(-1, keepdim=True).sqrt()
        terms = known.clamp_min(0.0).sqrt() + scale * weights.norm(dim=-2)
        return explained, self.observed.variance_error(residual) + ROUNDINGS * eps * terms.square()

    def explained_covariance(self) -> Tensor:
        """``K_*X A^-1 K_X*``, computed a few columns at a time. Not differentiable. shape: (*batch, Q, Q)"""
        found = []
        with one_report():
            for rows in chunks(self.num_points, self.columns_at_once(), "covariances"):
                found.append(self.cross @ self.solve_covariances(rows))
        explained = torch.cat(found, -1)
        return 0.5 * (explained + explained.mT)

    def solve_covariances(self, rows: slice = slice(None)) -> Tensor:
        """``A^-1 K_X*`` for a subset of points. The tolerance is tighter, since the error of results is linear in its.

        shape: (*batch, N, q)
        """
        columns = to_dense(self.cross[..., rows, :]).mT.contiguous()
        tolerance = UNSQUARED_TOLERANCE * self.config.tolerance
        return self.observed.solve(columns, expected=self.num_points, tolerance=tolerance)


def chunks(count: int, size: int, what: str, unit: str = "point") -> Iterator[slice]:
    """Slices of at most `size` of `count` columns, with a progress bar that counts columns.

    >>> list(chunks(5, 2, "variances"))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    with with_bar(None, what, total=count, unit=unit) as bar:
        for start in range(0, count, size):
            stop = min(start + size, count)
            yield slice(start, stop)
            bar.update(stop - start)


def _rows_of(cross: LinearOperator) -> list[KernelRowsOperator]:
    """The terms of a covariance that are evaluated row by row, although their columns are on a grid."""
    bases = [getattr(term, "base_linear_op", term) for term in summands(cross)]
    return [op for op in bases if isinstance(op, KernelRowsOperator) and op.row_points is not None]


def _evaluated(cross: LinearOperator) -> LinearOperator:
    """A covariance with the rows of :func:`_rows_of` evaluated once."""
    if isinstance(cross, KernelRowsOperator):
        return cross.at_once()
    if isinstance(cross, ConstantMulLinearOperator) and isinstance(cross.base_linear_op, KernelRowsOperator):
        return cross.base_linear_op.at_once()._mul_constant(cross._constant)
    if len(summands(cross)) > 1:
        return SumLinearOperator(*map(_evaluated, summands(cross)))
    return cross
