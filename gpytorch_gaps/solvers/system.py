"""The system that all solvers receive: ``(Σ_t W K_t W' + E + D) a = y``, detached, in float64.

``K_t`` are Kronecker products on the grid, ``W`` selects the observed cells, E is everything without that structure,
D is diagonal. :class:`~gpytorch_gaps.solvers.gap_system.GapSystem` is the case of one Kronecker product and nothing
else, in which gaps can be filled. The system owns the cache of all results computed from it: decompositions, dense
factors, preconditioners and plans.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from linear_operator.utils.cholesky import psd_safe_cholesky
from torch import Tensor

from gpytorch_gaps.linalg.selection import kron_entries_at, select_cells, spread_cells
from gpytorch_gaps.preconditioners.low_rank import LowRankPreconditioner
from gpytorch_gaps.solvers.kronecker_term import KroneckerTerm
from gpytorch_gaps.utils.tensors import look_up
from gpytorch_gaps.utils.threads import threads_for

_ROUNDINGS_OF_A_RESIDUAL = 8.0  # rounding of a float64 product and residual, in units of eps


@dataclass(frozen=True)
class Unstructured:
    """E, the terms of a covariance that are not Kronecker products.

    :param matmul: the product with E, in float64.
    :param dense: E itself, in float64. shape: (*batch, N, N)
    :param entries: ``E[rows, columns]`` in float64, for positions that broadcast.
    :param root: R with ``E ~ R R'``: exact for low-rank terms, to some rank for others. shape (*batch, N, r).
    :param trace: trace of E. shape: batch
    :param flops: FLOPs of a product with one column.
    :param is_low_rank: whether ``R R'`` equals E.
    """

    matmul: Callable[[Tensor], Tensor]
    dense: Callable[[], Tensor]
    entries: Callable[[Tensor, Tensor], Tensor]
    root: Tensor
    trace: Tensor
    flops: float
    is_low_rank: bool


class NoisySystem:
    """``(Σ_t W K_t W' + E + D) a = y``.

    :param terms: the Kronecker products K_t, on one grid.
    :param train_index: flat cell of each observation, last axis fastest, shape (N,). Empty without terms.
    :param noise: D, shape (*batch, 1) or (*batch, N).
    :param num_train: N.
    :param other: E.
    :param dtype: precision of the model.
    """

    row_scale: Tensor | None = None
    """Factor that converts residuals of a whitened system to the original units. shape: (*batch, N, 1)"""
    gain = 1.0  # a bound on the eigenvalues of ``W W'``: those of ``W K W'`` are at most as many times those of K
    kind = "a sum of kernels"  # name in messages
    on_cells = True  # whether every row is a cell of the grid, which has neighbours

    def __init__(
        self,
        terms: Sequence[KroneckerTerm],
        train_index: Tensor,
        noise: Tensor,
        num_train: int,
        other: Unstructured | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.terms, self.train_index, self.num_train, self.other = list(terms), train_index, num_train, other
        self.dtype = dtype
        self.noise = noise.detach().double()
        self._check()
        self._cache: dict[Hashable, Any] = {}
        self.reused_preconditioner: Any = None
        """A preconditioner of a similar system. It is used in solves; log-determinants need their own."""
        self.last_preconditioner: Any = None

    def _check(self) -> None:
        """Checks that the noise is not negative and the factors are symmetric, with one read by the host."""
        good_noise = (self.noise >= 0).all().double().reshape(1)  # false for NaN, too
        noise_is_good, *asymmetry = torch.cat([good_noise, *(term.asymmetry() for term in self.terms)]).tolist()
        if not noise_is_good:
            raise ValueError(f"noise: got {float(self.noise.min())}, expected variances of at least 0")
        for term in self.terms:
            size = 2 * len(term.shape)
            term.symmetrize(asymmetry[:size])
            asymmetry = asymmetry[size:]

    # -- cached results ----------------------------------------------------------------------------------------------

    def cached(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """``make()``, computed on the first call."""
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    def is_cached(self, key: Hashable) -> bool:
        return key in self._cache

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """All parts of the matrix, with what is known about unstructured terms."""
        known = () if self.other is None else (self.other.root,)
        return *(tensor for term in self.terms for tensor in term.leaves), self.noise, *known

    @property
    def num_cells(self) -> int:
        return math.prod(self.terms[0].shape) if self.terms else 0

    @property
    def fillable(self) -> bool:
        """Whether fill-gaps applies: terms of a sum share no eigenbasis."""
        return False

    @property
    def has_eigenvectors(self) -> bool:
        """Whether single eigenvectors of every term are available."""
        return all(term.has_eigenvectors for term in self.terms)

    @cached_property
    def least_noise(self) -> float:
        return float(self.noise.min())

    # -- products ----------------------------------------------------------------------------------------------------

    @property
    def product_flops(self) -> float:
        """FLOPs of one product with the matrix and one column."""
        return sum(term.product_flops for term in self.terms) + (0.0 if self.other is None else self.other.flops)

    def matmul(self, x: Tensor) -> Tensor:
        """The product with the whole matrix, in the precision of x. shape: (*batch, N, C)"""
        noise = self.noise.to(x.dtype).unsqueeze(-1)
        if self.terms:
            grid = self._spread(x)
            total = self.terms[0].matmul(grid)
            for term in self.terms[1:]:
                total = total + term.matmul(grid)
            image = torch.addcmul(self._select(total), noise, x)
        else:
            image = noise * x
        return image if self.other is None else image + self.other.matmul(x.double()).to(x.dtype)

    def _spread(self, x: Tensor) -> Tensor:
        return spread_cells(x, self.train_index, self.num_cells)

    def _select(self, grid: Tensor) -> Tensor:
        return select_cells(grid, self.train_index)

    def original_matmul(self, x: Tensor) -> Tensor:
        """The product with the matrix before it was whitened. shape: (*batch, N, C)"""
        return self.matmul(x) if self.row_scale is None else self.row_scale * self.matmul(self.row_scale * x)

    def dense(self) -> Tensor:
        """The whole matrix. shape: (*batch, N, N)"""
        blocks = [term.block(self.train_index) for term in self.terms]
        if len(blocks) == 1 and self.other is None and blocks[0].shape[:-2] == self.noise.shape[:-1]:
            blocks[0].diagonal(dim1=-2, dim2=-1).add_(self.noise)  # entries are copies: no second matrix is made
            return blocks[0]
        blocks += [] if self.other is None else [self.other.dense()]
        return sum(blocks, torch.diag_embed(self.noise.expand(*self.noise.shape[:-1], self.num_train)))

    def entries(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Some entries of the matrix without D, for positions that broadcast. shape: (*batch, *positions)"""
        total: Any = 0.0
        for term in self.terms:
            places = self.cached(("places", term), partial(term.places, self.train_index))
            own, other = ([[look_up(place, side) for place in every] for every in places] for side in (rows, columns))
            total = total + kron_entries_at(term.factors(), own, other)
        return total if self.other is None else total + self.other.entries(rows, columns)

    def cholesky(self) -> Tensor:
        """Cholesky factor of the whole matrix, computed once. Cost: N^3 / 3. shape: (*batch, N, N)"""
        return self.cached("cholesky", threads_for(self.num_train**3 / 3.0)(lambda: psd_safe_cholesky(self.dense())))

    @property
    def is_factorised(self) -> bool:
        return self.is_cached("cholesky")

    # -- norms -------------------------------------------------------------------------------------------------------

    def column_norms(self, x: Tensor) -> Tensor:
        """``||x||`` per column, in the original units. shape: (*batch, N, C) -> (*batch, C)"""
        return (x if self.row_scale is None else x * self.row_scale).norm(dim=-2)

    def residual_unit(self, rhs: Tensor) -> Tensor:
        """The unit of a relative residual: ``||rhs||``, or one, so that a zero right-hand side counts as solved."""
        norm = self.column_norms(rhs)
        return torch.where(norm > 0, norm, torch.ones_like(norm))

    def noise_norms(self, x: Tensor) -> Tensor:
        """``||D^(-1/2) x||`` per column, in the units of the right-hand side. shape: (*batch, N, C) -> (*batch, C)

        A whitened x is ``D^(-1/2) x`` already, and has unit noise.
        """
        return (x * self.noise.rsqrt().to(x.dtype).unsqueeze(-1)).norm(dim=-2)

    def rounding_norms(self, x: Tensor) -> Tensor:
        """The rounding error of ``||D^(-1/2) A x||`` per column: a few eps times the norm of a row of ``K diag(x)``.

        shape: (*batch, N, C) -> (*batch, C)
        """
        in_noise = self.noise.reciprocal().mean(-1, keepdim=True).sqrt()
        eps = _ROUNDINGS_OF_A_RESIDUAL * torch.finfo(torch.float64).eps
        return eps * self._row_norm * in_noise * x.norm(dim=-2)

    @cached_property
    def _row_norm(self) -> Tensor:
        """About the largest norm of a row of the matrix without D; for E, ``sqrt(N)`` times a diagonal entry."""
        norms = [term.row_norm for term in self.terms]
        if self.other is not None:
            norms.append(self.other.trace.detach().double().max() / math.sqrt(self.num_train))
        return torch.stack(norms).sum() if norms else self.noise.new_zeros(())

    # -- spectrum ----------------------------------------------------------------------------------------------------

    @cached_property
    def has_repeats(self) -> bool:
        """Whether a cell is observed twice."""
        ordered = self.train_index.sort().values
        return bool((ordered[1:] == ordered[:-1]).any())

    @cached_property
    def kernel_trace(self) -> Tensor:
        """Trace of the matrix without D. shape: batch"""
        total = self.noise.new_zeros(()) if self.other is None else self.other.trace.detach().double()
        return sum((term.trace(self.train_index) for term in self.terms), total)

    @cached_property
    def least_eigenvalue(self) -> float:
        """A lower bound on the eigenvalues of the matrix without D: the sum of the smallest ones of all terms.

        ``W K W'`` is a principal submatrix of K, unless a cell is observed twice. In a batch, the smallest counts.
        """
        if not self.terms or self.has_repeats:
            return 0.0
        return float(torch.stack([term.least_eigenvalue for term in self.terms]).sum())

    @property
    def batched(self) -> bool:
        return self.noise.dim() > 1 or any(factor.dim() > 2 for term in self.terms for factor in term.factors())

    # -- low-rank preconditioners ------------------------------------------------------------------------------------

    def low_rank(self, vectors: Any, positions: Tensor, values: Tensor, **kind: Any) -> LowRankPreconditioner:
        """A low-rank matrix plus the noise, from eigenvectors on the grid."""
        return LowRankPreconditioner(vectors, positions, values, self.train_index, self.noise, **kind)

    @property
    def gram_shape(self) -> tuple[int, ...]:
        """The axes over which the Gram matrix of a preconditioner is contracted."""
        return self.terms[0].shape
