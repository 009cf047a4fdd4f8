"""A sum of kernels on the same observations: ``(Σ_t W K_t W' + R R' + D) a = y``, some K_t Kronecker products.

The terms share no eigenbasis, so gaps are ignored, not filled. The preconditioner keeps the leading eigenvectors of
every term, those of all terms above one threshold, and low-rank terms whole: what is left has a norm of at most the
sum of the largest eigenvalues left out, so that the best rank is known before anything is solved.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from linear_operator.utils.cholesky import psd_safe_cholesky
from torch import Tensor

from gpytorch_gaps.functions.rayleigh import frozen_eigenvalues
from gpytorch_gaps.kronecker.eigen import KroneckerEigen, kron_eigh, leading_products
from gpytorch_gaps.kronecker.products import kron_matmul_flops
from gpytorch_gaps.kronecker.selection import product_at, unravel
from gpytorch_gaps.preconditioners.low_rank import lifted_root
from gpytorch_gaps.preconditioners.root import RootPreconditioner
from gpytorch_gaps.solvers.choose import DENSE_REACH, RANKS, Plan, expected_iterations
from gpytorch_gaps.solvers.system import Probes

_ROOT_NUMBERS = 2**27  # of a preconditioner's root: 1 GiB of float64


class KroneckerTerm:
    """``Σ_r diag(u_r) W K W' diag(u_r)``: one term, scaled row by row where `scales` are given.

    :param factors: K_i, shape (*batch, m_i, m_i) each.
    :param index: flat cells of the observations, shape (N,).
    :param scales: u, shape (*batch, N, r).
    """

    def __init__(self, factors: Sequence[Tensor], index: Tensor, scales: Tensor | None = None) -> None:
        self.factors = [factor.detach().double() for factor in factors]
        self.index = index
        self.scales = None if scales is None else scales.detach().double()
        self.shape = tuple(factor.size(-1) for factor in self.factors)

    @cached_property
    def eigen(self) -> KroneckerEigen:
        return kron_eigh(self.factors)

    @property
    def copies(self) -> int:
        return 1 if self.scales is None else self.scales.size(-1)

    @property
    def product_flops(self) -> float:
        return self.copies * float(kron_matmul_flops([(size, size) for size in self.shape], 1))

    @cached_property
    def largest_scale(self) -> float:
        return 1.0 if self.scales is None else float(self.scales.square().sum(-1).amax())

    def leading(self, count: int) -> Tensor:
        """The largest eigenvalues of K, the worst of a batch, times the largest scale. shape: (p,)"""
        values, _ = leading_products(self.eigen.values, count)
        return values.reshape(-1, values.size(-1)).amax(0) * self.largest_scale

    def root(self, rank: int, factors: Sequence[Tensor], scales: Tensor | None) -> Tensor:
        """``U W Q S_p' T_p^(1/2)`` with Q frozen: differentiable in factors and scales. shape: (*batch, N, p r)"""
        _, positions = leading_products(self.eigen.values, rank)
        columns = [q[..., p] for q, p in zip(self.eigen.vectors, positions, strict=True)]  # shape: (*batch, m_i, p)
        basis = columns[0].new_ones(())
        for column, rows in zip(columns, unravel(self.index, self.shape), strict=True):
            basis = basis * column[..., rows, :]
        eigenvalues = product_at(frozen_eigenvalues(factors, self.eigen.vectors), positions)
        root = basis * lifted_root(eigenvalues).unsqueeze(-2)
        if scales is None:
            return root
        return (scales.double().unsqueeze(-1) * root.unsqueeze(-2)).flatten(-2)


@dataclass(frozen=True)
class SumPlan(Plan):
    """A plan that also says how many eigenvectors each Kronecker term gives to the preconditioner."""

    ranks: tuple[int, ...] = ()


class SumSystem:
    """What is worked out once for a sum.

    :param matmul: the product with the whole matrix, in float64.
    :param dense: the whole matrix, in float64.
    :param terms: the Kronecker terms.
    :param roots: of the low-rank terms and, to some rank, of the others. shape (*batch, N, r) each.
    :param diagonal: D, shape (*batch, N).
    """

    def __init__(
        self,
        matmul: Callable[[Tensor], Tensor],
        dense: Callable[[], Tensor],
        terms: Sequence[KroneckerTerm],
        roots: Sequence[Tensor],
        diagonal: Tensor,
        other_flops: float,
    ) -> None:
        self.matmul, self._dense = matmul, dense
        self.terms, self.roots = list(terms), list(roots)
        self.diagonal = diagonal.detach().double()
        self.num_train = diagonal.size(-1)
        self.product_flops = sum(term.product_flops for term in terms) + other_flops
        self.probes = Probes(self.product_flops)
        self._preconditioners: dict[tuple[int, ...], RootPreconditioner] = {}

    @cached_property
    def cholesky(self) -> Tensor:
        return psd_safe_cholesky(self._dense())

    def preconditioner(self, ranks: tuple[int, ...]) -> RootPreconditioner | None:
        if ranks not in self._preconditioners:
            root = self.root(ranks, [(term.factors, term.scales) for term in self.terms], self.roots)
            if root is None:
                return None
            self._preconditioners[ranks] = RootPreconditioner(root, self.diagonal)
        return self._preconditioners[ranks]

    def root(
        self,
        ranks: Sequence[int],
        terms: Sequence[tuple[Sequence[Tensor], Tensor | None]],
        roots: Sequence[Tensor],
    ) -> Tensor | None:
        """R, from the same terms and roots as this system's, which may be differentiable."""
        parts = [
            own.root(rank, factors, scales)
            for own, rank, (factors, scales) in zip(self.terms, ranks, terms, strict=True)
            if rank
        ]
        parts += [root.double() for root in roots]
        if not parts:
            return None
        batch = torch.broadcast_shapes(*(part.shape[:-2] for part in parts))
        return torch.cat([part.expand(*batch, *part.shape[-2:]) for part in parts], -1)

    def choose(self, method: str, rank: int | None, num_rhs: int, tolerance: float, max_cholesky: float) -> SumPlan:
        """The plan that should cost least, or the one asked for."""
        if method in ("fill", "penalize"):
            raise ValueError(
                f"gap_method: got {method!r} for a sum of kernels, expected 'auto', 'ignore' or 'cholesky': a sum of "
                "Kronecker products has no eigenbasis that fills gaps"
            )
        rows = self.num_train
        direct = SumPlan("cholesky", direct="data", flops=rows**3 / 3.0, reason=self._about("dense"))
        if method == "cholesky" or (method == "auto" and rows <= max_cholesky):
            return direct
        iterative = self._best_ranks(rank, num_rhs, tolerance)
        if method == "auto" and rows <= DENSE_REACH * max_cholesky and direct.flops < iterative.flops:
            return direct
        return iterative

    def _about(self, what: str) -> str:
        kinds = f"{len(self.terms)} Kronecker term{'s' if len(self.terms) != 1 else ''}"
        return f"a sum with {kinds}, {what}"

    def _best_ranks(self, rank: int | None, num_rhs: int, tolerance: float) -> SumPlan:
        noise = float(self.diagonal.min())
        if rank == 0 or not noise > 0:
            return SumPlan("ignore", 0, reason=self._about("no preconditioner"), ranks=(0,) * len(self.terms))
        batch = self.diagonal.shape[:-1].numel()
        limit = max(1, min(self.num_train, RANKS[-1], _ROOT_NUMBERS // (batch * self.num_train)))
        leading = [term.leading(limit + 1) for term in self.terms]
        pooled = torch.cat([*leading, self.diagonal.new_zeros(0)]).sort(descending=True).values
        copies = max((term.copies for term in self.terms), default=1)
        own = sum(root.size(-1) for root in self.roots)
        plans = []
        for size in (0, *(r for r in RANKS if r < limit), limit) if rank is None else (min(rank, limit),):
            threshold = float(pooled[size]) if size < len(pooled) else -1.0
            ranks = tuple(int((values > threshold).sum()) for values in leading)
            left = sum(float(v[r]) for v, r in zip(leading, ranks, strict=True) if r < len(v))
            width = copies * sum(ranks) + own
            setup = 2.0 * self.num_train * width**2 + width**3 / 3.0
            an_iteration = self.product_flops + 4.0 * self.num_train * width
            cost = setup + expected_iterations(1.0 + left / noise, tolerance) * num_rhs * an_iteration
            reason = self._about(f"rank {width} leaves eigenvalues of {left / noise:.1e} times the noise")
            plans.append(SumPlan("ignore", width, flops=cost, reason=reason, ranks=ranks))
        return min(plans, key=lambda plan: plan.flops)
