"""The system every solver is given: ``(W K W' + D) a = y``, with all that can be worked out once and used again.

``K = (x) K_i`` on the grid, ``W`` selects the observed cells, D is constant or one noise per observation. Noise that
is a product over axes whitens into the factors: ``K_i -> D_i^(-1/2) K_i D_i^(-1/2)`` leaves unit noise, so that
fill-gaps applies; residuals are still judged, and reported, in the original units.
"""

import math
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from linear_operator.utils.cholesky import psd_safe_cholesky
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

from gpytorch_gaps.linalg.eigen import (
    ROUNDING,
    KroneckerEigen,
    factored_if_cheaper,
    kron_eigh,
    largest_left_out,
    leading_products,
)
from gpytorch_gaps.linalg.products import cast_without_denormals, kron_matmul, kron_matmul_flops
from gpytorch_gaps.linalg.selection import kron_block, product_at, select_cells, spread_cells, unravel
from gpytorch_gaps.preconditioners import EigenPreconditioner, ShiftedEigenPreconditioner
from gpytorch_gaps.preconditioners.low_rank import LowRankPreconditioner
from gpytorch_gaps.solvers.planning.gappiness import local_gappiness
from gpytorch_gaps.solvers.planning.rates import Rates, rates_of
from gpytorch_gaps.utils.threads import threads_for

_ROUNDINGS = 8.0  # of a float64 product and residual, in units of eps
_CHUNK_NUMBERS = 2**23  # grid numbers held at once: 64 MiB of float64


@dataclass
class Probes:
    """Of the last stochastic log-determinant: what each probe estimated, and the iterations of Lanczos."""

    estimates: Tensor | None = None  # shape: (probes, *batch)
    iterations: int = 0


class GapSystem:
    """``(W K W' + D) a = y``.

    :param factors: K_i, symmetric positive semi-definite, shape (*batch, m_i, m_i) each.
    :param train_index: flat cell of each observation, last axis fastest, shape (N,).
    :param noise: D, shape (*batch, 1) or (*batch, N).
    :param axis_noise: instead of `noise`, a vector (*batch, m_i) for every axis whose product is the noise of a cell.
    :param shared: where the eigen-decomposition is kept for others who have the same factors, and may be found.
    :param dtype: precision of the model; default: of the factors.
    """

    def __init__(
        self,
        factors: Sequence[Tensor],
        train_index: Tensor,
        noise: Tensor | None = None,
        axis_noise: Sequence[Tensor] | None = None,
        shared: dict[str, KroneckerEigen] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        factors = [factor.detach() for factor in factors]
        self.dtype = dtype or factors[0].dtype
        self.shape = tuple(factor.size(-1) for factor in factors)
        self.num_cells = math.prod(self.shape)
        self.train_index = train_index
        self.row_scale: Tensor | None = None  # shape: (*batch, N, 1)
        if axis_noise is not None:
            roots = [axis.detach().double().sqrt() for axis in axis_noise]
            factors = [whiten(factor.double(), root) for factor, root in zip(factors, roots, strict=True)]
            self.row_scale = product_at(roots, unravel(train_index, self.shape)).unsqueeze(-1)
            noise = torch.ones(1, dtype=torch.float64, device=train_index.device)
        assert noise is not None
        self.noise = noise.detach().double()
        if bool((self.noise < 0).any()) or bool(self.noise.isnan().any()):
            raise ValueError(f"noise: got {float(self.noise.min())}, expected variances of at least 0")
        self._factors = {torch.float64: tuple(_symmetric(axis, factor.double()) for axis, factor in enumerate(factors))}
        self._eigen: dict[torch.dtype, KroneckerEigen] = {}
        self._shared: dict[str, KroneckerEigen] = {} if shared is None or axis_noise is not None else shared
        self._made: dict[Hashable, Any] = {}
        self.loan: LowRankPreconditioner | None = None  # for solves; log-determinants need their own
        self.last_preconditioner: LowRankPreconditioner | None = None
        self.probes = Probes()

    # -- sizes -------------------------------------------------------------------------------------------------------

    @property
    def num_train(self) -> int:
        return len(self.train_index)

    @property
    def constant_noise(self) -> bool:
        return self.noise.size(-1) == 1

    @cached_property
    def fillable(self) -> bool:
        """Whether fill-gaps applies: constant noise, and no cell observed twice."""
        return self.constant_noise and int(self.observed(torch.float64).sum()) == self.num_train

    def require_fillable(self, method: str) -> None:
        if not self.fillable:
            came = "a cell observed twice" if self.constant_noise else "one noise per point"
            raise ValueError(
                f"gap_method: got {method!r} with {came}, expected noise constant or a product over axes, and no "
                "cell observed twice; use 'ignore' here"
            )

    @cached_property
    def gap_index(self) -> Tensor:
        """The L cells without an observation, in grid order."""
        gaps = torch.ones(self.num_cells, dtype=torch.bool, device=self.train_index.device)
        gaps[self.train_index] = False
        return gaps.nonzero().squeeze(-1)

    @cached_property
    def local_gappiness(self) -> float:
        """Gappiness as a gap sees it: that of the grid if gaps are scattered, near one inside a cloud."""
        return local_gappiness(self.gap_index, self.shape)

    @cached_property
    def rates(self) -> Rates:
        return rates_of(self.train_index.device, torch.float64)

    @cached_property
    def is_definite(self) -> bool:
        """Whether the factors are positive semi-definite, but for rounding of float64."""
        largest = math.prod(float(values.amax()) for values in self.eigen().values)
        return self.eigen().negative <= ROUNDING * largest

    @cached_property
    def rotation_flops(self) -> float:
        """FLOPs of one product with all eigenvectors and one column: fill-gaps takes two."""
        return float(kron_matmul_flops([(size, size) for size in self.shape], 1))

    @property
    def product_flops(self) -> float:
        """FLOPs of one product with K and one column, as :meth:`kernel_matmul` takes it."""
        thin = factored_if_cheaper(self._shared.get("eigen"))
        return self.rotation_flops if thin is None else thin.root_flops

    # -- products ----------------------------------------------------------------------------------------------------

    def factors(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
        if dtype not in self._factors:
            self._factors[dtype] = tuple(cast_without_denormals(f, dtype) for f in self._factors[torch.float64])
        return self._factors[dtype]

    @property
    def is_decomposed(self) -> bool:
        """Whether the eigen-decomposition is there already."""
        return torch.float64 in self._eigen or "eigen" in self._shared

    def eigen(self, dtype: torch.dtype = torch.float64) -> KroneckerEigen:
        if torch.float64 not in self._eigen:
            if "eigen" not in self._shared:
                self._shared["eigen"] = kron_eigh(self.factors())
            self._eigen[torch.float64] = self._shared["eigen"]
            self._warn_if_indefinite(self._eigen[torch.float64].negative)
        if dtype not in self._eigen:
            self._eigen[dtype] = self._eigen[torch.float64].to(dtype)
        return self._eigen[dtype]

    def _warn_if_indefinite(self, negative: float) -> None:
        noise = float(self.noise.min())
        if negative > max(noise, 0.0) > 0:
            warnings.warn(
                f"the kernel's factors are indefinite: eigenvalues reach {-negative:.1e}, beyond the noise of "
                f"{noise:.1e}. Results depend on how rounding is undone. Try: float64 factors, or more noise.",
                NumericalWarning,
                stacklevel=2,
            )

    def truncated(self, tolerance: float) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Eigenvectors and eigenvalues of each axis, without those that no product brings above :meth:`level`.

        shape: (*batch, m_i, r_i) and (*batch, r_i)
        """
        return self.once(("truncated", tolerance), lambda: self._truncated(self.level(tolerance)))

    def level(self, tolerance: float) -> float:
        """An eigenvalue of K that may be dropped: all of them cost a tenth of the tolerance in the residual."""
        return 0.1 * tolerance * float(self.noise.min())

    def _truncated(self, level: float) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        values = self.eigen().values
        tops = [value.amax() for value in values]
        total = torch.stack(tops).prod()
        kept = [(value * (total / top) >= level).sum(-1).max() for value, top in zip(values, tops, strict=True)]
        ranks = torch.stack(kept).clamp_min(1).tolist()  # one read of a few numbers, where the host must decide
        return (
            tuple(q[..., -rank:] for q, rank in zip(self.eigen().vectors, ranks, strict=True)),
            tuple(value[..., -rank:] for value, rank in zip(values, ranks, strict=True)),
        )

    def truncated_flops(self, tolerance: float) -> float:
        """FLOPs of one product with the truncated eigenvectors and one column: the spectral method takes two."""
        return float(kron_matmul_flops([(q.size(-2), q.size(-1)) for q in self.truncated(tolerance)[0]], 1))

    def observed(self, dtype: torch.dtype) -> Tensor:
        """One where a cell is observed, zero in gaps. shape: (M, 1)"""

        def make() -> Tensor:
            mask = torch.zeros(self.num_cells, 1, dtype=dtype, device=self.train_index.device)
            mask[self.train_index] = 1.0
            return mask

        return self.once(("observed", dtype), make)

    def kernel_matmul(self, x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """``K[rows, columns] x``, in the precision of x. shape: (*batch, len(columns), C) -> (*batch, len(rows), C)"""
        grid = spread_cells(x, columns, self.num_cells)
        thin = factored_if_cheaper(self._shared.get("eigen"))
        image = kron_matmul(self.factors(x.dtype), grid) if thin is None else self.eigen(x.dtype).matmul(grid)
        return select_cells(image, rows)

    def matmul(self, x: Tensor) -> Tensor:
        """``(W K W' + D) x``. shape: (*batch, N, C)"""
        image = self.kernel_matmul(x, self.train_index, self.train_index)
        return torch.addcmul(image, self.noise.to(x.dtype).unsqueeze(-1), x)

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
        """How many columns over the whole grid are held at a time where many are visited."""
        return max(1, _CHUNK_NUMBERS // self.num_cells)

    def gap_matrix(self) -> Tensor:
        """``V (K + s2 I)^-1 V'``. shape: (*batch, L, L)"""
        eye = torch.eye(len(self.gap_index), dtype=torch.float64, device=self.gap_index.device)
        matrix = torch.cat([self.gap_matmul(part) for part in eye.split(self.columns_at_once, dim=-1)], -1)
        return 0.5 * (matrix + matrix.mT)

    def dense(self) -> Tensor:
        """``W K W' + D``. shape: (*batch, N, N)"""
        diagonal = self.noise.expand(*self.noise.shape[:-1], self.num_train)
        return kron_block(self.factors(), self.train_index, self.train_index) + torch.diag_embed(diagonal)

    def cholesky(self) -> Tensor:
        """Cholesky factor of ``W K W' + D``, computed once. Cost: N^3 / 3. shape: (*batch, N, N)"""
        make = threads_for(self.num_train**3 / 3.0)(lambda: psd_safe_cholesky(self.dense()))
        return self.once("cholesky", make)

    def gap_cholesky(self) -> Tensor:
        """Cholesky factor of ``V (K + s2 I)^-1 V'``, computed once. shape: (*batch, L, L)"""
        make = threads_for(len(self.gap_index) ** 3 / 3.0)(lambda: psd_safe_cholesky(self.gap_matrix()))
        return self.once("gap cholesky", make)

    def column_norms(self, x: Tensor) -> Tensor:
        """``||x||`` per column, in the original units. shape: (*batch, N, C) -> (*batch, C)"""
        return (x if self.row_scale is None else x * self.row_scale).norm(dim=-2)

    def noise_norms(self, x: Tensor) -> Tensor:
        """``||D^(-1/2) x||`` per column, in the units of the right-hand side. shape: (*batch, N, C) -> (*batch, C)"""
        return noise_norms(self.noise, x)  # a whitened x is D^(-1/2) x already, and has unit noise

    def rounding_norms(self, x: Tensor) -> Tensor:
        """What rounding adds to ``||D^(-1/2) A x||`` per column: a few eps times the norm of a row of ``K diag(x)``.

        shape: (*batch, N, C) -> (*batch, C)
        """
        return rounding_norms(self.once("row", lambda: row_norm(self.factors())), self.noise, x)

    def residual_unit(self, rhs: Tensor) -> Tensor:
        """What a residual is relative to: ``||rhs||``, or one, so that a zero right-hand side counts as solved."""
        norm = self.column_norms(rhs)
        return torch.where(norm > 0, norm, torch.ones_like(norm))

    def eigenvalue_after(self, rank: int) -> float:
        """The largest eigenvalue of K that a rank-`rank` approximation leaves out."""
        _, positions = leading_products(self.eigen().values, rank)
        return largest_left_out(self.eigen().values, positions)

    def rank_to(self, level: float, limit: int) -> int | None:
        """The rank that leaves no eigenvalue of K above `level`; None above `limit`, or for a batch."""
        values, _ = leading_products(self.eigen().values, limit + 1)
        if values.dim() > 1:
            return None
        rank = int((values > level).sum())
        return rank if rank <= limit else None

    # -- preconditioners, set up once a rank ---------------------------------------------------------------------------

    def eigen_preconditioner(self, rank: int) -> EigenPreconditioner:
        """The preconditioner of conjugate gradients, which has the trace of the matrix."""
        return self.once(
            ("eigen", rank),
            lambda: EigenPreconditioner(self.eigen(), self.train_index, self.noise, rank, self.kernel_trace),
        )

    def low_rank_approximation(self, rank: int) -> EigenPreconditioner:
        """``W Q S_p' T_p S_p Q' W' + D`` with nothing added: what variances are read off."""
        return self.once(
            ("low rank", rank), lambda: EigenPreconditioner(self.eigen(), self.train_index, self.noise, rank)
        )

    @cached_property
    def kernel_trace(self) -> Tensor:
        """Trace of ``W K W'``. shape: batch"""
        diagonals = [factor.diagonal(dim1=-2, dim2=-1) for factor in self.factors()]
        return product_at(diagonals, unravel(self.train_index, self.shape)).sum(-1)

    @cached_property
    def least_eigenvalue(self) -> float:
        """A lower bound on the eigenvalues of ``W K W'``: the smallest of K, as it is a principal submatrix.

        Zero where a cell is observed twice. Of a batch, the smallest.
        """
        if int(self.observed(torch.float64).sum()) < self.num_train:
            return 0.0
        return float(torch.stack([values.amin() for values in self.eigen().values]).prod())

    @property
    def cells(self) -> Tensor:
        return self.train_index

    def parts(self) -> tuple[Tensor, ...]:
        """All that the matrix is made of."""
        return *self.factors(), self.noise

    def preconditioner_of_solves(self, rank: int) -> LowRankPreconditioner:
        """The one on loan, if there is one; else of this rank."""
        if self.loan is not None:
            return self.loan
        self.last_preconditioner = self.eigen_preconditioner(rank)
        return self.last_preconditioner

    def shifted_preconditioner(self, rank: int) -> ShiftedEigenPreconditioner:
        return self.once(
            ("shifted", rank), lambda: ShiftedEigenPreconditioner(self.eigen(), self.gap_index, self.noise, rank)
        )

    def is_set_up(self, key: Hashable) -> bool:
        """Whether :meth:`once` has made it."""
        return key in self._made

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """``make()``, the first time."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def _symmetric(axis: int, factor: Tensor) -> Tensor:
    """The symmetric part: float32 kernels are symmetric to rounding only, and that would bound the residual."""
    difference, size = (factor - factor.mT).abs().amax(), factor.abs().amax()
    if bool(difference > 1e-3 * size):
        raise ValueError(
            f"factors: axis {axis} differs from its transpose by {float(difference):.1e}, expected symmetry"
        )
    return factor if not bool(difference > 0) else 0.5 * (factor + factor.mT)


def noise_norms(noise: Tensor, x: Tensor) -> Tensor:
    """``||D^(-1/2) x||`` per column. shape: (*batch, 1 or N) and (*batch, N, C) -> (*batch, C)"""
    return (x * noise.rsqrt().to(x.dtype).unsqueeze(-1)).norm(dim=-2)


def rounding_norms(row: Tensor, noise: Tensor, x: Tensor) -> Tensor:
    """What rounding adds to ``||D^(-1/2) (K + D) x||`` per column, where rows of K have at most the norm `row`."""
    in_noise = noise.reciprocal().mean(-1, keepdim=True).sqrt()
    return _ROUNDINGS * torch.finfo(torch.float64).eps * row * in_noise * x.norm(dim=-2)


def row_norm(factors: Sequence[Tensor]) -> Tensor:
    """The largest norm of a row of ``(x) K_i``, over a batch; not read by the host."""
    return torch.stack([factor.square().sum(-1).max() for factor in factors]).prod().sqrt()


def whiten(factor: Tensor, root: Tensor) -> Tensor:
    """``D^(-1/2) K D^(-1/2)``. shape: (*batch, m, m) and (*batch, m)"""
    return factor / (root.unsqueeze(-1) * root.unsqueeze(-2))
