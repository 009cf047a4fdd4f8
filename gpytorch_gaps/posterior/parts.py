"""What a posterior covariance ``K_** - K_*X A^-1 K_X*`` is made of, ``A = K_XX + D``, and its exact solves."""

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from linear_operator import to_dense
from linear_operator.operators import (
    AddedDiagLinearOperator,
    ConstantMulLinearOperator,
    LinearOperator,
    SumLinearOperator,
)
from linear_operator.utils.getitem import _noop_index
from torch import Tensor

from gpytorch_gaps.operators.base import KroneckerFactorsOperator
from gpytorch_gaps.operators.kernel_rows import KernelRowsOperator
from gpytorch_gaps.operators.khatri_rao import KhatriRaoOperator
from gpytorch_gaps.operators.noisy import NoisyGridOperator
from gpytorch_gaps.reports import one_report
from gpytorch_gaps.solvers.config import SolveConfig
from gpytorch_gaps.utils.precision import float64_entries
from gpytorch_gaps.utils.progress import with_bar

_CACHE = 2**21  # numbers: where products of several columns begin to cost more than those of one at a time
TIGHTER = 1e-3  # of the tolerance, where an error of a solution is not squared
ROUNDINGS = 8.0  # of a sum that cancels, as found against long arithmetic: three at most


@dataclass(frozen=True)
class PredictionPoints:
    """Where the points of a prediction lie, and where the observations."""

    x: Tensor  # shape: (Q, D), the grid's columns
    train_x: Tensor  # shape: (N, D)
    cells: Tensor | None  # of the training grid, if all points are on it. shape: (Q,)

    def at(self, index: Any) -> "PredictionPoints":
        return replace(self, x=self.x[index], cells=None if self.cells is None else self.cells[index])


@dataclass(frozen=True)
class PosteriorParts:
    """K_**, K_*X and A, of one batch shape, how to solve with A, and where the points lie."""

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
    def differentiated(self) -> bool:
        return torch.is_grad_enabled() and any(op.requires_grad for op in (self.prior, self.cross, self.train))

    def at(self, index: Any, *batch_indices: Any) -> "PosteriorParts":
        """Some of the points."""
        train = self.train._getitem(_noop_index, _noop_index, *batch_indices) if batch_indices else self.train
        batch_indices = batch_indices or (_noop_index,) * len(self.prior.batch_shape)
        prior = self.prior._getitem(index, _noop_index, *batch_indices)[..., index]
        cross = self.cross._getitem(index, _noop_index, *batch_indices)
        return PosteriorParts(prior, cross, train, self.config, None if self.points is None else self.points.at(index))

    def pieces(self, drawn: bool = False) -> Iterator["PosteriorParts"]:
        """Of scattered points too many for their covariances to be held: some at a time, with these worked out.

        :param drawn: whether they must be few enough for joint draws, too.
        """
        by_rows, memory = _rows_of(self.cross), self.config.memory
        size = math.sqrt(memory / 40.0)
        if by_rows:
            size = min(size, memory // (32 * self.train.batch_shape.numel() * max(op.width for op in by_rows)))
        size = int(max(1, size))
        scattered = any(isinstance(term, KhatriRaoOperator) for term in summands(self.cross))
        if not by_rows and not (drawn and scattered and self.num_points > size):
            yield self
            return
        for start in range(0, self.num_points, size):
            part = self.at(slice(start, start + size))
            yield replace(part, prior=_at_once(part.prior), cross=_at_once(part.cross))

    def prior_variance(self) -> Tensor:
        """In float64. shape: (*batch, Q)"""
        prior = copy.copy(self.prior)
        prior.__dict__.pop("_memoize_cache", None)  # rounded, maybe, and others expect it to be
        with float64_entries():
            return prior.diagonal(dim1=-1, dim2=-2).double()

    def columns_at_once(self, more: int = 0) -> int:
        """As many as memory allows: a solve holds about ten numbers an observation and column.

        And on a CPU as many as its cache: columns of a large grid are faster one after the other.

        :param more: further numbers a column.
        """
        cells = self._grid_numbers()
        numbers = 10 * self.train.shape[:-1].numel() + 4 * cells + more
        by_memory = self.config.memory // (8 * numbers)
        by_cache = _CACHE // cells if self.train.device.type == "cpu" else by_memory
        return int(max(1, min(by_memory, by_cache)))

    def _grid_numbers(self) -> int:
        """Cells that a product with the covariance of the observations visits for one column."""
        kernel = getattr(self.train, "_linear_op", None)
        shapes = [getattr(term, "row_shape", ()) for term in summands(kernel)] if kernel is not None else []
        return max(map(math.prod, shapes), default=1) * self.train.batch_shape.numel()

    # -- exact solves --------------------------------------------------------------------------------------------------

    def explained(self, rows: slice, prior: Tensor) -> tuple[Tensor, Tensor]:
        """``g' A^-1 g`` of some of the points, g a column of K_X*, and how far it may be off. shape: (*batch, q) each

        As ``2 a'g - a'Aa`` for weights a close to ``A^-1 g``: an error in a enters squared, where in ``a'g`` it would
        drown variances far below the prior's. It is also stationary in a, which need not be differentiated.
        What rounding of entries of K, and of sums of them, makes of ``k - 2 a'g + a'Aa`` is of the size of
        ``eps (sqrt(k) + |a| sqrt(k_X))^2``.

        :param prior: variances of all points.
        """
        with float64_entries():
            columns = to_dense(self.cross[..., rows, :]).mT.contiguous().double()  # shape: (*batch, N, q)
        weights, residual = self.weights(columns.detach(), prior[..., rows].detach())
        image = self._differentiable_product(weights) if self.differentiated else columns - residual
        explained = (weights * (2.0 * columns - image)).sum(-2)
        missed = self._missed(residual)
        scale = self.train._diagonal().detach().double().amax(-1, keepdim=True).sqrt()
        terms = prior[..., rows].detach().clamp_min(0.0).sqrt() + scale * weights.norm(dim=-2)
        return explained, missed + ROUNDINGS * self._eps * terms.square()

    def weights(self, columns: Tensor, prior: Tensor) -> tuple[Tensor, Tensor]:
        """``A^-1 g`` so close that variances are right to the tolerance, and ``g - A a``, in float64. No graph.

        :param columns: g, shape (*batch, N, q).
        :param prior: variances of their points, shape (*batch, q).
        """
        with torch.no_grad():
            if isinstance(self.train, NoisyGridOperator):
                solved = self.train.solve_columns(columns.double(), self.expecting(self.num_points), prior=prior)
                return solved.solution, solved.residual
            weights = self.train.solve(columns.to(self.dtype)).double()
            return weights, torch.zeros_like(weights)

    def _missed(self, residual: Tensor) -> Tensor:
        """``r' D^-1 r``, by which variances are off at most. shape: (*batch, N, q) -> (*batch, q)"""
        if not isinstance(self.train, NoisyGridOperator):
            return residual.square().sum(-2)
        noise = self.train.noise_tensor().detach().double().clamp_min(torch.finfo(torch.float64).tiny)
        return (residual.square() / noise.unsqueeze(-1)).sum(-2)

    def all_explained(self) -> Tensor:
        """``K_*X A^-1 K_X*``, a few columns at a time. Not differentiable. shape: (*batch, Q, Q)

        An error of the weights enters as it is, not squared, so that they are solved for more tightly.
        """
        size, found = self.columns_at_once(), []
        slices = [slice(start, start + size) for start in range(0, self.num_points, size)]
        with one_report():
            for rows in with_bar(slices, "covariances", unit="chunk"):
                columns = to_dense(self.cross[..., rows, :]).mT.contiguous()
                found.append(self.cross @ self.solve_tightly(columns, self.num_points))
        explained = torch.cat(found, -1)
        return 0.5 * (explained + explained.mT)

    def solve(self, columns: Tensor) -> Tensor:
        """``A^-1`` times columns, differentiable. shape: (*batch, N, q)"""
        if not isinstance(self.train, NoisyGridOperator):
            return self.train.solve(columns)
        return self.train.solve(columns, config=self.config)

    def solve_tightly(self, columns: Tensor, expected: int = 0) -> Tensor:
        """``A^-1`` times columns whose errors are not squared later on. shape: (*batch, N, q)

        :param expected: how many columns there will be in all.
        """
        if not isinstance(self.train, NoisyGridOperator):
            return self.train.solve(columns)
        return self.train.solve(columns, config=self.expecting(expected, TIGHTER * self.config.tolerance))

    def solve_data(self, data: Tensor, expected: int = 0) -> Tensor:
        """``A^-1`` times data, with a certified error of their posterior mean. shape: (*batch, N, n)"""
        if not isinstance(self.train, NoisyGridOperator):
            return self.train.solve(data)
        return self.train.solve(data, of_data=True, config=self.expecting(expected))

    def expecting(self, columns: int, tolerance: float | None = None) -> SolveConfig:
        """The configuration for right-hand sides that come some at a time."""
        expected = self.config.planned_columns(columns * self.train.batch_shape.numel())
        return self.config.replace(expected_columns=expected, tolerance=tolerance or self.config.tolerance)

    def _differentiable_product(self, x: Tensor) -> Tensor:
        """``A x`` in float64. shape: (*batch, N, q)"""
        if not isinstance(self.train, NoisyGridOperator):
            return (self.train @ x.to(self.dtype)).double()
        noise = self.train._diag_tensor._diagonal().double().unsqueeze(-1)
        return wide_product(self.train._linear_op, x).double() + noise * x

    @property
    def _eps(self) -> float:
        """Precision of the entries of the covariances."""
        own = isinstance(self.train, NoisyGridOperator) and is_wide(self.train._linear_op) and is_wide(self.cross)
        return torch.finfo(torch.float64 if own else self.dtype).eps


def is_wide(op: LinearOperator) -> bool:
    """Whether all entries of a covariance are known in float64."""
    return all(_own_dtype(term) == torch.float64 for term in summands(op))


def _own_dtype(term: LinearOperator) -> torch.dtype | None:
    return term.factors[0].dtype if isinstance(term, KroneckerFactorsOperator) else term.dtype


def wide_product(op: LinearOperator, x: Tensor) -> Tensor:
    """``K x``, in float64 where the entries of K are. shape: (*batch, N, C)"""
    return op @ (x if is_wide(op) else x.to(op.dtype))


def summands(op: LinearOperator) -> Sequence[LinearOperator]:
    """The terms of a sum; anything else is its only term."""
    plain_sum = isinstance(op, SumLinearOperator) and not isinstance(op, AddedDiagLinearOperator)
    return op.linear_ops if plain_sum else (op,)


def _rows_of(cross: LinearOperator) -> list[KernelRowsOperator]:
    """The terms of a covariance that are made row by row although a grid is on their other side."""
    bases = [getattr(term, "base_linear_op", term) for term in summands(cross)]
    return [op for op in bases if isinstance(op, KernelRowsOperator) and op.row_points is not None]


def _at_once(cross: LinearOperator) -> LinearOperator:
    if isinstance(cross, KernelRowsOperator):
        return cross.at_once()
    if isinstance(cross, ConstantMulLinearOperator) and isinstance(cross.base_linear_op, KernelRowsOperator):
        return cross.base_linear_op.at_once()._mul_constant(cross._constant)
    if len(summands(cross)) > 1:
        return SumLinearOperator(*map(_at_once, summands(cross)))
    return cross
