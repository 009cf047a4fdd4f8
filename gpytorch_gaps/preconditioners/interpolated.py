"""The eigen preconditioner where W interpolates a grid at scattered points, instead of selecting cells."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gpytorch_gaps.linalg.interpolation import GridInterpolation
from gpytorch_gaps.linalg.selection import select_cells
from gpytorch_gaps.preconditioners.low_rank import LowRankPreconditioner


class InterpolatedPreconditioner(LowRankPreconditioner):
    """``P = F C F' + R R' + D'`` with ``F = W Q S_p'``, W interpolating.

    The paper's remark on structured kernel interpolation (Evans & Nair 2018, on preconditioning). Nothing of size
    N x p is stored. Interpolated eigenvectors are neither orthogonal nor of norm one; their Gram matrix is exact.

    :param vectors: Q_i, shape (*batch, m_i, m_i) each.
    :param positions: column of each Q_i that makes up eigenvector a, shape (d, p).
    :param coefficients: c, shape (*batch, p).
    :param rows: W.
    :param diagonal: D, shape (*batch, 1) or (*batch, N).
    :param kind: the other arguments of :class:`LowRankPreconditioner`.
    """

    def __init__(
        self,
        vectors: Sequence[Tensor],
        positions: Tensor,
        coefficients: Tensor,
        rows: GridInterpolation,
        diagonal: Tensor,
        **kind: Any,
    ) -> None:
        self.rows = rows
        super().__init__(vectors, positions, coefficients, rows.first[:, 0], diagonal, **kind)
        self.flops += 2.0 * rows.flops

    def _spread(self, x: Tensor) -> Tensor:
        return self.rows.spread(x)

    def _select(self, grid: Tensor) -> Tensor:
        return self.rows.select(grid)

    def _column_squares(self) -> Tensor:
        return select_cells(self.rows.column_squares(self.vectors).unsqueeze(-1), self.basis_index).squeeze(-1)

    def _gram(self, diagonal: Tensor) -> Tensor:
        if not self._leading:
            return diagonal.new_zeros(0, 0)
        scales = diagonal.reciprocal().expand(*diagonal.shape[:-1], self.num_rows)
        if self.constant and scales.dim() > 1:  # one Gram matrix serves all members of a batch
            scales = scales[(0,) * (scales.dim() - 1)]
        return self.rows.gram(self.vectors, self._local, scales)

    def basis_at(self, cells: Tensor) -> Tensor:
        """Not available, because rows are points and not cells. Use :meth:`basis_of`."""
        raise NotImplementedError("interpolated eigenvectors are evaluated by basis_of")

    def basis_of(self, rows: GridInterpolation) -> Tensor:
        """Φ: the eigenvectors, interpolated at other points of the same grid. shape: (*batch, q, p)"""
        return self.basis_from([rows.table(axis, q) for axis, q in enumerate(self.vectors)])
