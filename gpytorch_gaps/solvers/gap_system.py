"""One Kronecker product observed at some cells, ``(W K W' + D) a = y``: the system in which gaps can be filled.

If the noise is a product over axes, the factors are divided by it: ``K_i -> D_i^(-1/2) K_i D_i^(-1/2)``. The noise is
then one, so that fill-gaps applies. Residuals are still compared and reported in the original units.
"""

import copy
import math
import warnings
from collections.abc import Sequence
from functools import cached_property

import torch
from linear_operator.utils.cholesky import psd_safe_cholesky
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

from gpytorch_gaps.linalg.eigen import ROUNDING, KroneckerEigen
from gpytorch_gaps.linalg.factors import Basis, Factor
from gpytorch_gaps.linalg.products import product_flops
from gpytorch_gaps.linalg.selection import product_at, select_cells, spread_cells, unravel
from gpytorch_gaps.preconditioners import ShiftedEigenPreconditioner
from gpytorch_gaps.solvers.kronecker_term import KroneckerTerm
from gpytorch_gaps.solvers.planning.gappiness import local_gappiness
from gpytorch_gaps.solvers.system import NoisySystem
from gpytorch_gaps.utils.threads import threads_for

_CHUNK_NUMBERS = 2**23  # grid numbers held at once: 64 MiB of float64


class GapSystem(NoisySystem):
    """``(W K W' + D) a = y``.

    :param factors: K_i, symmetric positive semi-definite, shape (*batch, m_i, m_i) each.
    :param train_index: flat cell of each observation, last axis fastest, shape (N,).
    :param noise: D, shape (*batch, 1) or (*batch, N).
    :param axis_noise: instead of `noise`, a vector (*batch, m_i) for every axis whose product is the noise of a cell.
    :param shared: a cache in which systems with the same factors share the eigen-decomposition.
    :param dtype: precision of the model; default: of the factors.
    """

    def __init__(
        self,
        factors: Sequence[Factor],
        train_index: Tensor,
        noise: Tensor | None = None,
        axis_noise: Sequence[Tensor] | None = None,
        shared: dict[str, KroneckerEigen] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        row_scale = None
        own = [factor.detach() for factor in factors]
        if axis_noise is not None:
            roots = [axis.detach().double().sqrt() for axis in axis_noise]
            own = [whiten(factor.double(), root) for factor, root in zip(own, roots, strict=True)]
            shape = tuple(factor.size(-1) for factor in own)
            row_scale = product_at(roots, unravel(train_index, shape)).unsqueeze(-1)
            noise, shared = torch.ones(1, dtype=torch.float64, device=train_index.device), None
        assert noise is not None
        self.term = KroneckerTerm(own, shared)
        super().__init__([self.term], train_index, noise, len(train_index), dtype=dtype or factors[0].dtype)
        self.row_scale = row_scale
        self.shape = self.term.shape

    def in_own_units(self) -> "GapSystem":
        """The same system with residuals in its own units. Both share all cached results."""
        own = copy.copy(self)
        own.row_scale = None
        return own

    # -- gaps --------------------------------------------------------------------------------------------------------

    @property
    def constant_noise(self) -> bool:
        return self.noise.size(-1) == 1

    @cached_property
    def fillable(self) -> bool:
        """Whether fill-gaps applies: eigenvectors, constant noise, and no cell observed twice."""
        return self.term.has_eigenbasis and self.constant_noise and not self.has_repeats

    def require_fillable(self, method: str) -> None:
        if not self.fillable:
            came = "a cell observed twice" if self.constant_noise else "one noise per point"
            came = came if self.term.has_eigenbasis else "a block of axes, which has no eigenvectors"
            raise ValueError(
                f"gap_method: got {method!r} with {came}, expected one kernel per axis or all longitudes of the globe, "
                "noise constant or a product over axes, and no cell observed twice; use 'ignore' here"
            )

    @cached_property
    def gap_index(self) -> Tensor:
        """The L cells without an observation, in grid order."""
        gaps = torch.ones(self.num_cells, dtype=torch.bool, device=self.train_index.device)
        gaps[self.train_index] = False
        return gaps.nonzero().squeeze(-1)

    @cached_property
    def local_gappiness(self) -> float:
        """Gappiness in the neighbourhood of a gap: that of the grid if gaps are scattered, near one inside a cloud."""
        return local_gappiness(self.gap_index, self.term.axes)

    @property
    def gaps_are_scattered(self) -> bool:
        """Whether gaps are no closer together than expected by chance."""
        return self.local_gappiness <= len(self.gap_index) / self.num_cells

    def observed(self, dtype: torch.dtype) -> Tensor:
        """One where a cell is observed, zero in gaps. shape: (M, 1)"""

        def make() -> Tensor:
            mask = torch.zeros(self.num_cells, 1, dtype=dtype, device=self.train_index.device)
            mask[self.train_index] = 1.0
            return mask

        return self.cached(("observed", dtype), make)

    # -- spectrum ----------------------------------------------------------------------------------------------------

    def factors(self, dtype: torch.dtype = torch.float64) -> tuple[Factor, ...]:
        return self.term.factors(dtype)

    def eigen(self, dtype: torch.dtype = torch.float64) -> KroneckerEigen:
        found = self.term.eigen(dtype)
        self.cached("warned", lambda: self._warn_if_indefinite(found.negative))
        return found

    def _warn_if_indefinite(self, negative: float) -> None:
        if negative > max(self.least_noise, 0.0) > 0:
            warnings.warn(
                f"the kernel's factors are indefinite: eigenvalues reach {-negative:.1e}, beyond the noise of "
                f"{self.least_noise:.1e}. Results depend on the correction of rounding. Try: float64 factors, or more "
                "noise.",
                NumericalWarning,
                stacklevel=2,
            )

    @cached_property
    def is_definite(self) -> bool:
        """Whether the factors are positive semi-definite, up to rounding of float64."""
        largest = math.prod(float(values.amax()) for values in self.eigen().values)
        return self.eigen().negative <= ROUNDING * largest

    def truncated(self, tolerance: float) -> tuple[tuple[Basis, ...], tuple[Tensor, ...]]:
        """Eigenvectors and eigenvalues of each axis, without those for which no product exceeds :meth:`level`.

        shape: (*batch, m_i, r_i) and (*batch, r_i)
        """
        return self.cached(("truncated", tolerance), lambda: self.eigen().truncated(self.level(tolerance)))

    def level(self, tolerance: float) -> float:
        """The level below which eigenvalues of K are dropped. They add a tenth of the tolerance to residuals."""
        return 0.1 * tolerance * self.least_noise

    # -- products ----------------------------------------------------------------------------------------------------

    @cached_property
    def rotation_flops(self) -> float:
        """FLOPs of a product of all eigenvectors with one column, as many as for K. Fill-gaps iterations have two."""
        return product_flops(self.factors())

    def truncated_flops(self, tolerance: float) -> float:
        """FLOPs of a product of the truncated eigenvectors with one column. Spectral iterations have two."""
        return product_flops(self.truncated(tolerance)[0])

    def kernel_matmul(self, x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """``K[rows, columns] x``, in the precision of x. shape: (*batch, len(columns), C) -> (*batch, len(rows), C)"""
        return select_cells(self.term.matmul(spread_cells(x, columns, self.num_cells)), rows)

    def shifted_solve(self, x: Tensor) -> Tensor:
        """``(K + s2 I)^-1 x`` on the whole grid, in the precision of x. shape: (*batch, M, C)"""
        return self.eigen(x.dtype).shifted_solve(self.noise.to(x.dtype), x)

    def spread_solve(self, x: Tensor) -> Tensor:
        """``(K + s2 I)^-1 V' x``. shape: (*batch, L, C) -> (*batch, M, C)"""
        return self.shifted_solve(spread_cells(x, self.gap_index, self.num_cells))

    def gap_matmul(self, x: Tensor) -> Tensor:
        """``V (K + s2 I)^-1 V' x``, in the precision of x. shape: (*batch, L, C)"""
        return select_cells(self.spread_solve(x), self.gap_index)

    @property
    def columns_at_once(self) -> int:
        """How many columns over the whole grid are in memory at once, if there are many."""
        return max(1, _CHUNK_NUMBERS // self.num_cells)

    def gap_matrix(self) -> Tensor:
        """``V (K + s2 I)^-1 V'``. shape: (*batch, L, L)"""
        eye = torch.eye(len(self.gap_index), dtype=torch.float64, device=self.gap_index.device)
        matrix = torch.cat([self.gap_matmul(part) for part in eye.split(self.columns_at_once, dim=-1)], -1)
        return 0.5 * (matrix + matrix.mT)

    def gap_cholesky(self) -> Tensor:
        """Cholesky factor of ``V (K + s2 I)^-1 V'``, computed once. shape: (*batch, L, L)"""
        make = threads_for(len(self.gap_index) ** 3 / 3.0)(lambda: psd_safe_cholesky(self.gap_matrix()))
        return self.cached("gap cholesky", make)

    def shifted_preconditioner(self, rank: int) -> ShiftedEigenPreconditioner:
        """The preconditioner of fill-gaps, set up once per rank."""
        return self.cached(
            ("shifted", rank), lambda: ShiftedEigenPreconditioner(self.eigen(), self.gap_index, self.noise, rank)
        )


def whiten(factor: Tensor, root: Tensor) -> Tensor:
    """``D^(-1/2) K D^(-1/2)``. shape: (*batch, m, m) and (*batch, m)"""
    return factor / (root.unsqueeze(-1) * root.unsqueeze(-2))
