"""A Kronecker product interpolated at scattered points, ``(W K W' + D) a = y``: structured kernel interpolation."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gpytorch_gaps.linalg.eigen import KroneckerEigen
from gpytorch_gaps.linalg.interpolation import GridInterpolation
from gpytorch_gaps.preconditioners.interpolated import InterpolatedPreconditioner
from gpytorch_gaps.preconditioners.low_rank import LowRankPreconditioner
from gpytorch_gaps.solvers.kronecker_term import KroneckerTerm
from gpytorch_gaps.solvers.system import NoisySystem


class InterpolatedSystem(NoisySystem):
    """``(W K W' + D) a = y``, W interpolating.

    :param factors: K_i, symmetric positive semi-definite, shape (*batch, m_i, m_i) each.
    :param rows: W.
    :param noise: D, shape (*batch, 1) or (*batch, N).
    :param shared: where the eigen-decomposition is kept for others who have the same factors, and may be found.
    :param dtype: precision of the model.
    """

    kind = "an interpolated Kronecker product"

    def __init__(
        self,
        factors: Sequence[Tensor],
        rows: GridInterpolation,
        noise: Tensor,
        shared: dict[str, KroneckerEigen] | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.rows = rows
        # where W selects, cells tell observations apart; here, the places and weights do
        places = torch.cat([rows.first.double(), rows.weights.flatten(1)], -1)
        super().__init__([KroneckerTerm(factors, shared)], places, noise, len(rows), dtype=dtype)
        self.gain = float(rows.norm_bound())

    def _spread(self, x: Tensor) -> Tensor:
        return self.rows.spread(x)

    def _select(self, grid: Tensor) -> Tensor:
        return self.rows.select(grid)

    @property
    def product_flops(self) -> float:
        return super().product_flops + 2.0 * self.rows.flops

    def dense(self) -> Tensor:
        block = self.rows.block(self.terms[0].factors(), self.rows)
        return block + torch.diag_embed(self.noise.expand(*self.noise.shape[:-1], self.num_train))

    @cached_property
    def kernel_trace(self) -> Tensor:
        return self.rows.entries(self.terms[0].factors(), self.rows).sum(-1)

    @cached_property
    def least_eigenvalue(self) -> float:
        """Zero: points may lie as close together as they like."""
        return 0.0

    @cached_property
    def _row_norm(self) -> Tensor:
        return self.gain * self.terms[0].row_norm

    @property
    def gram_shape(self) -> tuple[int, ...]:
        return tuple(self.rows.width * size for size in self.terms[0].shape)

    def _preconditioner_of(self, vectors: Any, positions: Tensor, values: Tensor, **kind: Any) -> LowRankPreconditioner:
        return InterpolatedPreconditioner(vectors, positions, values, self.rows, self.noise, **kind)
