"""A sum of kernels on the same observations: ``(Σ_t W K_t W' + R R' + D) a = y``, some K_t Kronecker products.

The terms share no eigenbasis, so gaps are ignored, not filled. The preconditioner keeps the leading eigenvectors of
every term, those of all terms above one threshold, and low-rank terms whole: what is left has a norm of at most the
sum of the largest eigenvalues left out, so that the best rank is known before anything is solved.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from linear_operator.utils.cholesky import psd_safe_cholesky
from torch import Tensor

from gpytorch_gaps.linalg.eigen import columns_in_use
from gpytorch_gaps.linalg.selection import select_cells, spread_cells
from gpytorch_gaps.preconditioners.low_rank import LowRankPreconditioner, low_rank_flops
from gpytorch_gaps.solvers.kronecker_term import KroneckerTerm
from gpytorch_gaps.solvers.planning.plans import (
    DENSE_REACH,
    RANKS,
    Plan,
    cheaper_than_eigen,
    deeper,
    expected_iterations,
    in_turn,
    quicker,
    still_needed,
)
from gpytorch_gaps.solvers.system import Probes, noise_norms, rounding_norms, row_norm
from gpytorch_gaps.utils.threads import threads_for


@dataclass(frozen=True)
class SumPlan(Plan):
    """A plan that also says how many eigenvectors each Kronecker term gives to the preconditioner."""

    ranks: tuple[int, ...] = ()


class SumSystem:
    """What is worked out once for a sum.

    :param other_matmul: the product with all terms that are not Kronecker products, in float64; None for none.
    :param dense: the whole matrix, in float64.
    :param terms: the Kronecker terms.
    :param index: flat cells of the observations, the same for all of them. shape (N,).
    :param root: of the low-rank terms and, to some rank, of the others. shape (*batch, N, r).
    :param diagonal: D, shape (*batch, N).
    :param other_flops: of a product with the other terms and one column.
    :param other_trace: the trace of the other terms, shape batch.
    :param all_known: whether `root` is all there is of the other terms.
    """

    def __init__(
        self,
        other_matmul: Callable[[Tensor], Tensor] | None,
        dense: Callable[[], Tensor],
        terms: Sequence[KroneckerTerm],
        index: Tensor,
        root: Tensor | None,
        diagonal: Tensor,
        other_flops: float,
        other_trace: Tensor | None = None,
        all_known: bool = True,
    ) -> None:
        self._all_known, self._other_trace = all_known, other_trace
        self._other_matmul, self._dense, self._other_flops = other_matmul, dense, other_flops
        self.terms, self.index, self.root_columns = list(terms), index, root
        self.diagonal = diagonal.detach().double()
        self.num_train = diagonal.size(-1)
        self.probes = Probes()
        self.loan: LowRankPreconditioner | None = None  # for solves; log-determinants need their own
        self.last_preconditioner: LowRankPreconditioner | None = None
        self._low_rank: dict[tuple[bool, tuple[int, ...]], LowRankPreconditioner] = {}
        self._found: dict[int | None, list[tuple[SumPlan, float, float]]] = {}

    @property
    def product_flops(self) -> float:
        return sum(term.product_flops for term in self.terms) + self._other_flops

    def matmul(self, x: Tensor) -> Tensor:
        """The product with the whole matrix, in the precision of x. shape: (*batch, N, C)"""
        image = self.diagonal.unsqueeze(-1).to(x.dtype) * x
        if self.terms:
            grid = spread_cells(x, self.index, math.prod(self.terms[0].shape))
            total = self.terms[0].matmul(grid)
            for term in self.terms[1:]:
                total = total + term.matmul(grid)
            image = image + select_cells(total, self.index)
        return image if self._other_matmul is None else image + self._other_matmul(x.double()).to(x.dtype)

    def noise_norms(self, x: Tensor) -> Tensor:
        """``||D^(-1/2) x||`` per column. shape: (*batch, N, C) -> (*batch, C)"""
        return noise_norms(self.diagonal, x)

    def rounding_norms(self, x: Tensor) -> Tensor:
        """What rounding adds to ``||D^(-1/2) A x||`` per column. shape: (*batch, N, C) -> (*batch, C)"""
        return rounding_norms(self._row_norm, self.diagonal, x)

    @cached_property
    def _row_norm(self) -> Tensor:
        """About the largest norm of a row of the matrix without D; of other terms, ``sqrt(N)`` of a diagonal entry."""
        norms = [row_norm(term.factors) for term in self.terms]
        if self._other_trace is not None:
            norms.append(self._other_trace.detach().double().max() / math.sqrt(self.num_train))
        return torch.stack(norms).sum() if norms else self.diagonal.new_zeros(())

    @property
    def cells(self) -> Tensor:
        return self.index

    def parts(self) -> tuple[Tensor, ...]:
        """All that the matrix is made of, of terms without structure what is known of them."""
        known = () if self.root_columns is None else (self.root_columns,)
        return *(factor for term in self.terms for factor in term.factors), self.diagonal, *known

    def preconditioner_of_solves(self, ranks: tuple[int, ...]) -> LowRankPreconditioner:
        """The one on loan, if there is one; else of these ranks."""
        if self.loan is not None:
            return self.loan
        self.last_preconditioner = self.preconditioner(ranks)
        return self.last_preconditioner

    @property
    def is_factorised(self) -> bool:
        return "cholesky" in self.__dict__

    @cached_property
    def cholesky(self) -> Tensor:
        with threads_for(self.num_train**3 / 3.0):
            return psd_safe_cholesky(self._dense())

    def preconditioner(self, ranks: tuple[int, ...]) -> LowRankPreconditioner:
        """:meth:`low_rank_approximation` with the trace of the matrix: for conjugate gradients."""
        return self._once(ranks, with_trace=True)

    def low_rank_approximation(self, ranks: tuple[int, ...]) -> LowRankPreconditioner:
        """``Σ_t W Q_t T_t,p Q_t' W' + R R' + D``: eigenvectors of all terms, axis by axis, side by side."""
        return self._once(ranks, with_trace=False)

    def _once(self, ranks: tuple[int, ...], with_trace: bool) -> LowRankPreconditioner:
        key = (with_trace, ranks)
        if key not in self._low_rank:
            self._low_rank[key] = self._set_up(ranks, self.kernel_trace if with_trace else None)
        return self._low_rank[key]

    @cached_property
    def least_noise(self) -> float:
        return float(self.diagonal.min())

    @cached_property
    def kernel_trace(self) -> Tensor:
        """Trace of the matrix without D. shape: batch"""
        total = self.diagonal.new_zeros(()) if self._other_trace is None else self._other_trace.detach().double()
        return sum((term.trace(self.index) for term in self.terms), total)

    @cached_property
    def least_eigenvalue(self) -> float:
        """A lower bound on the eigenvalues of the matrix without D: the sum of the smallest ones of all terms."""
        if not self.terms:
            return 0.0
        ordered = self.index.sort().values
        repeated = (ordered[1:] == ordered[:-1]).any().double()
        smallest = torch.stack([term.least_eigenvalue for term in self.terms]).sum()
        return float((1.0 - repeated) * smallest)

    def _set_up(self, ranks: tuple[int, ...], trace: Tensor | None) -> LowRankPreconditioner:
        if not sum(ranks):
            alone = self.diagonal.new_ones(self.num_train, 1)
            nothing = torch.zeros(1, 0, dtype=torch.long, device=alone.device)
            rows = torch.arange(self.num_train, device=alone.device)
            return LowRankPreconditioner(
                [alone], nothing, alone.new_zeros(0), rows, self.diagonal, self.root_columns, trace=trace
            )
        positions, offsets = [], [0] * len(self.terms[0].shape)
        for term, rank in zip(self.terms, ranks, strict=True):
            own = term.leading(rank)[1] if rank else self.index.new_zeros(len(offsets), 0)
            positions.append(torch.stack([axis + offset for axis, offset in zip(own, offsets, strict=True)]))
            offsets = [offset + size for offset, size in zip(offsets, term.shape, strict=True)]
        batch = torch.broadcast_shapes(*(q.shape[:-2] for term in self.terms for q in term.eigen.vectors))
        by_axis = zip(*(term.eigen.vectors for term in self.terms), strict=True)
        left = sum(term.left_out(rank) for term, rank in zip(self.terms, ranks, strict=True))
        return LowRankPreconditioner(
            [torch.cat([q.expand(*batch, *q.shape[-2:]) for q in axis], -1) for axis in by_axis],
            torch.cat(positions, -1),
            self.coefficients(ranks, [term.factors for term in self.terms]),
            self.index,
            self.diagonal,
            self.root_columns,
            left_over=left / self.least_noise if self._all_known else math.inf,
            trace=trace,
        )

    def coefficients(self, ranks: Sequence[int], factors: Sequence[Sequence[Tensor]]) -> Tensor:
        """The eigenvalues kept of all terms, differentiable in the same factors as this system's. shape: (*batch, p)"""
        parts = [
            term.eigenvalues(own, term.leading(rank)[1])
            for term, own, rank in zip(self.terms, factors, ranks, strict=True)
            if rank
        ]
        batch = torch.broadcast_shapes(*(part.shape[:-1] for part in parts)) if parts else torch.Size()
        return torch.cat([self.diagonal.new_zeros(*batch, 0), *(part.expand(*batch, -1) for part in parts)], -1)

    def choose(
        self,
        method: str,
        rank: int | None,
        num_rhs: int,
        tolerance: float,
        max_cholesky: float,
        start: float = 1.0,
    ) -> SumPlan:
        """The plan that should cost least, or the one asked for; from a guess with a relative residual of `start`."""
        return self.plans(method, rank, num_rhs, tolerance, max_cholesky, start)[0]

    def plans(
        self,
        method: str,
        rank: int | None,
        num_rhs: int,
        tolerance: float,
        max_cholesky: float,
        start: float = 1.0,
    ) -> list[SumPlan]:
        """The same, and in "auto" what to try next where it does not converge."""
        if method in ("fill", "penalize", "spectral"):
            raise ValueError(
                f"gap_method: got {method!r} for a sum of kernels, expected 'auto', 'ignore' or 'cholesky': a sum of "
                "Kronecker products has no eigenbasis that fills gaps"
            )
        rows = self.num_train
        direct = SumPlan("cholesky", direct="data", flops=rows**3 / 3.0, reason=self._about("dense"))
        if method == "cholesky" or (method == "auto" and rows <= max_cholesky):
            return [direct]
        if method == "auto" and rank is None and self.dense_first(num_rhs, max_cholesky):
            return [direct]
        iterative = self._best_ranks(rank, num_rhs, tolerance, start)
        if method != "auto":
            return [iterative]
        if rows <= DENSE_REACH * max_cholesky:
            return [direct] if direct.flops < iterative.flops else in_turn([iterative, direct])
        free = rank is None and self.least_noise > 0
        reserve = deeper(self._rank_plans(None, num_rhs, tolerance), iterative) if free else []
        return in_turn([iterative, *reserve])

    def dense_first(self, num_rhs: int, max_cholesky: float) -> bool:
        """Whether a dense solve costs less than the eigen-decompositions by which anything else is planned."""
        shapes = [term.shape for term in self.terms if not term.is_decomposed]
        return cheaper_than_eigen(self.num_train, shapes, num_rhs, max_cholesky)

    def _about(self, what: str) -> str:
        kinds = f"{len(self.terms)} Kronecker term{'s' if len(self.terms) != 1 else ''}"
        return f"a sum with {kinds}, {what}"

    def _best_ranks(self, rank: int | None, num_rhs: int, tolerance: float, start: float) -> SumPlan:
        if rank == 0 or not self.least_noise > 0:
            return SumPlan("ignore", 0, reason=self._about("no preconditioner"), ranks=(0,) * len(self.terms))
        cold = min(self._rank_plans(rank, num_rhs, tolerance), key=lambda plan: plan.flops)
        if start >= 1.0:
            return cold
        return quicker(self._rank_plans(rank, num_rhs, still_needed(tolerance, start)), cold) or cold

    def _rank_plans(self, rank: int | None, num_rhs: int, tolerance: float) -> list[SumPlan]:
        plans, noise = [], self.least_noise
        above_noise = noise / (noise + self.least_eigenvalue)
        for plan, left, application in self._candidates(rank):
            iterations = expected_iterations(1.0 + above_noise * left, tolerance)
            cost = iterations * num_rhs * (self.product_flops + application)
            plans.append(replace(plan, iterations=iterations, flops=plan.flops + cost))
        return plans

    def low_rank_plan(self, level: float) -> tuple[SumPlan, float] | None:
        """The smallest preconditioner that leaves eigenvalues of no more than `level` times the noise, and of what."""
        batched = self.diagonal.dim() > 1 or any(t.dim() > 1 for term in self.terms for t in term.eigen.values)
        if self.root_columns is not None or batched or not self.least_noise > 0:
            return None
        return next(((plan, left) for plan, left, _ in self._candidates(None) if left <= level), None)

    def _candidates(self, rank: int | None) -> list[tuple[SumPlan, float, float]]:
        """Preconditioners with the FLOPs of their set-up; what they leave, over the noise; and FLOPs a column."""
        if rank not in self._found:
            self._found[rank] = list(self._find_candidates(rank))
        return self._found[rank]

    def _find_candidates(self, rank: int | None) -> Iterator[tuple[SumPlan, float, float]]:
        noise = self.least_noise
        limit = min(self.num_train, RANKS[-1])
        found = [term.leading(limit + 1) for term in self.terms]
        own = 0 if self.root_columns is None else self.root_columns.size(-1)
        sizes = (0, *(r for r in RANKS if r < limit), limit) if rank is None else (min(rank, limit),)
        ranks, left_after = self._cut(sizes, [values for values, _ in found])
        used = [
            columns_in_use(positions, term.shape, own_ranks)
            for term, (_, positions), own_ranks in zip(self.terms, found, ranks, strict=True)
        ]
        for i in range(len(sizes)):
            chosen = tuple(own_ranks[i] for own_ranks in ranks)
            left = sum(own_left[i] for own_left in left_after) / noise
            columns = [sum(counts) for counts in zip(*(counts[i] for counts in used), strict=True)]
            setup, application = self._flops(sum(chosen), columns, own)
            width = sum(chosen) + own
            reason = self._about(f"rank {width} leaves eigenvalues of {left:.1e} times the noise")
            yield SumPlan("ignore", width, flops=setup, reason=reason, ranks=chosen), left, application

    def _cut(self, sizes: Sequence[int], leading: Sequence[Tensor]) -> tuple[list[list[int]], list[list[float]]]:
        """Of every term and size: how many eigenvalues are among the largest of all, and the largest that is not."""
        if not leading:
            return [], []
        pooled = torch.cat(list(leading)).sort(descending=True).values
        nothing = pooled.new_full((), -1.0)
        levels = torch.stack([pooled[size] if size < len(pooled) else nothing for size in sizes])
        ranks = torch.stack([(values > levels.unsqueeze(-1)).sum(-1) for values in leading])
        left = [torch.cat([values, pooled.new_zeros(1)])[own] for values, own in zip(leading, ranks, strict=True)]
        counts, rest = torch.stack([ranks.double(), torch.stack(left)]).tolist()  # one read, where the host must decide
        return [[int(count) for count in own] for own in counts], rest

    def _flops(self, rank: int, columns: Sequence[int], own: int) -> tuple[float, float]:
        """Of setting up the preconditioner, and of applying it to one column."""
        if not rank:
            return 2.0 * self.num_train * own**2, 4.0 * self.num_train * own
        setup, application = low_rank_flops(list(zip(self.terms[0].shape, columns, strict=True)), rank)
        # columns without structure are projected onto the others, and multiplied densely
        return setup + own * application + 2.0 * self.num_train * own**2, application + 4.0 * self.num_train * own
