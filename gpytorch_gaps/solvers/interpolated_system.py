"""Kronecker products interpolated at scattered points, ``(W K W' + D) a = y``: structured kernel interpolation."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gpytorch_gaps.linalg.interpolation import GridInterpolation
from gpytorch_gaps.preconditioners.interpolated import InterpolatedPreconditioner
from gpytorch_gaps.preconditioners.low_rank import LowRankPreconditioner
from gpytorch_gaps.solvers.kronecker_term import KroneckerTerm
from gpytorch_gaps.solvers.system import NoisySystem, Unstructured


class InterpolatedSystem(NoisySystem):
    """``(Σ_t W K_t W' + E + D) a = y``, W interpolating.

    :param terms: the Kronecker products K_t, on one grid.
    :param rows: W.
    :param noise: D, shape (*batch, 1) or (*batch, N).
    :param other: E.
    :param dtype: precision of the model.
    """

    on_cells = False

    def __init__(
        self,
        terms: Sequence[KroneckerTerm],
        rows: GridInterpolation,
        noise: Tensor,
        other: Unstructured | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.rows = rows
        # for selected cells, the cells identify observations; here, places and weights do
        places = torch.cat([rows.first.double(), rows.weights.flatten(1)], -1)
        super().__init__(terms, places, noise, len(rows), other, dtype=dtype)
        self.gain = float(rows.norm_bound())
        alone = len(self.terms) == 1 and other is None
        self.kind = "an interpolated Kronecker product" if alone else "a sum of interpolated kernels"

    def _spread(self, x: Tensor) -> Tensor:
        return self.rows.spread(x)

    def _select(self, grid: Tensor) -> Tensor:
        return self.rows.select(grid)

    @property
    def product_flops(self) -> float:
        return super().product_flops + 2.0 * self.rows.flops

    def dense(self) -> Tensor:
        blocks = [self.rows.block(term.factors(), self.rows) for term in self.terms]
        blocks += [] if self.other is None else [self.other.dense()]
        return sum(blocks, torch.diag_embed(self.noise.expand(*self.noise.shape[:-1], self.num_train)))

    @cached_property
    def kernel_trace(self) -> Tensor:
        total = self.noise.new_zeros(()) if self.other is None else self.other.trace.detach().double()
        return sum((self.rows.entries(term.factors(), self.rows).sum(-1) for term in self.terms), total)

    @cached_property
    def least_eigenvalue(self) -> float:
        """Zero: points may be arbitrarily close together."""
        return 0.0

    @cached_property
    def _row_norm(self) -> Tensor:
        return self.gain * super()._row_norm

    @property
    def gram_shape(self) -> tuple[int, ...]:
        return tuple(self.rows.width * size for size in self.terms[0].shape)

    def low_rank(self, vectors: Any, positions: Tensor, values: Tensor, **kind: Any) -> LowRankPreconditioner:
        return InterpolatedPreconditioner(vectors, positions, values, self.rows, self.noise, **kind)
