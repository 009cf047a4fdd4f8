"""Eigen-decomposition of a Kronecker product: ``K_1 ⊗ ... ⊗ K_d = Q T Q'``, ``Q = ⊗ Q_i`` and ``T = ⊗ T_i``.

Factors are decomposed one by one in float64; on whole circles, Q_i is an operator. If only the p largest (or smallest)
eigenvalues are needed, the M eigenvalues of the product are neither formed nor sorted.

>>> values = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 10.0])]
>>> leading_products(values, 2)[0].tolist()
[30.0, 20.0]
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gpytorch_gaps.linalg.circle_eigen import CircleBasis, circle_eigh
from gpytorch_gaps.linalg.factors import Basis, Factor, all_dense, eigh_cubes
from gpytorch_gaps.linalg.products import (
    cast_without_denormals,
    kron_diagonal,
    kron_matmul,
    kron_matmul_flops,
    product_flops,
)
from gpytorch_gaps.linalg.selection import product_at, ravel
from gpytorch_gaps.linalg.smooth_eigh import eigh_of_smooth
from gpytorch_gaps.utils.threads import Work, sized, threads_for

_TIE_TOLERANCE = 1e-9  # products of eigenvalues with a smaller relative difference count as equal
ROUNDING = 1e-13  # of the largest eigenvalue: rounding may make eigenvalues of a kernel negative by as much
_MAX_ROOT_FLOPS = 0.6  # relative to a square product: two products with roots run at a lower rate


def _solve_work(eigen: "KroneckerEigen", noise: Tensor, x: Tensor) -> Work:
    columns = x.shape[:-2].numel() * x.size(-1)
    return product_flops(eigen.vectors, columns), x.numel()


@dataclass(frozen=True)
class KroneckerEigen:
    """Orthonormal eigenvectors and non-negative eigenvalues of each factor. It is not differentiable.

    Eigenvalues of a matrix are in ascending order. Those of a factor on whole circles are so at every frequency.
    """

    vectors: tuple[Basis, ...]  # shape: (*batch, m_i, m_i) each
    values: tuple[Tensor, ...]  # shape: (*batch, m_i) each
    negative: float = 0.0  # size of the most negative eigenvalue of the product before clamping to zero

    @property
    def num_cells(self) -> int:
        return math.prod(values.size(-1) for values in self.values)

    @cached_property
    def products(self) -> Tensor:
        """All M eigenvalues of the product, in grid order. shape: (*batch, M)"""
        return kron_diagonal(self.values)

    @cached_property
    def transposed(self) -> tuple[Basis, ...]:
        return tuple(vectors.mT for vectors in self.vectors)

    def to(self, dtype: torch.dtype) -> "KroneckerEigen":
        if dtype == self.vectors[0].dtype:
            return self
        vectors, values = (
            tuple(
                q.to(dtype) if isinstance(q, CircleBasis) else cast_without_denormals(q, dtype) for q in self.vectors
            ),
            tuple(t.to(dtype) for t in self.values),
        )
        return KroneckerEigen(vectors, values, self.negative)

    @property
    def matrices(self) -> Sequence[Tensor]:
        """Q_i, if all of them are matrices, from which single eigenvectors can be taken."""
        assert all_dense(self.vectors)
        return self.vectors

    def truncated(self, level: float) -> tuple[tuple[Basis, ...], tuple[Tensor, ...]]:
        """Q_i and T_i without eigenvalues for which no product exceeds a level.

        On whole circles, the same number is kept at every frequency. shape: (*batch, m_i, r_i) and (*batch, r_i)
        """
        tops = [values.amax() for values in self.values]
        total = torch.stack(tops).prod()
        ascending = [  # shape: (*batch, m_i, 1), or (*batch, a, n) on whole circles
            values.unflatten(-1, (-1, vectors.num_places if isinstance(vectors, CircleBasis) else 1))
            for vectors, values in zip(self.vectors, self.values, strict=True)
        ]
        kept = [(values * (total / top) >= level).sum(-2).max() for values, top in zip(ascending, tops, strict=True)]
        ranks = torch.stack(kept).clamp_min(1).tolist()  # one read of a few numbers, where the host must decide
        return (
            tuple(
                q.last(rank) if isinstance(q, CircleBasis) else q[..., -rank:]
                for q, rank in zip(self.vectors, ranks, strict=True)
            ),
            tuple(values[..., -rank:, :].flatten(-2) for values, rank in zip(ascending, ranks, strict=True)),
        )

    @cached_property
    def roots(self) -> tuple[Tensor, ...]:
        """``U_i`` with ``K_i = U_i U_i'``, without eigenvalues below rounding. shape: (*batch, m_i, r_i)

        For smooth kernels, few eigenvalues remain. A product with the roots is equally exact and much cheaper.
        """
        found = []
        for vectors, values in zip(self.matrices, self.values, strict=True):
            floor = torch.finfo(torch.float64).eps * values.amax(-1, keepdim=True)
            kept = max(1, int((values > floor).sum(-1).max()))  # ascending: the last ones
            found.append(vectors[..., -kept:] * values[..., -kept:].sqrt().unsqueeze(-2))
        return tuple(found)

    @cached_property
    def root_flops(self) -> float:
        """FLOPs of ``U U' x`` for one column."""
        shapes = [(root.size(-2), root.size(-1)) for root in self.roots]
        return float(kron_matmul_flops([(r, m) for m, r in shapes]) + kron_matmul_flops(shapes))

    @cached_property
    def is_low_rank(self) -> bool:
        """Whether products with the roots are cheaper than with K, and K has no negative eigenvalues."""
        if not all_dense(self.vectors):
            return False
        largest = math.prod(float(values.amax()) for values in self.values)
        if self.negative > ROUNDING * largest:
            return False
        full = kron_matmul_flops([(q.size(-2), q.size(-2)) for q in self.vectors])
        return self.root_flops < _MAX_ROOT_FLOPS * full

    def matmul(self, x: Tensor) -> Tensor:
        """``K x = U (U' x)``, in the precision of x. shape: (*batch, M, C)"""
        roots = self.roots if x.dtype == self.roots[0].dtype else self._narrow_roots
        return kron_matmul(roots, kron_matmul([root.mT for root in roots], x))

    @cached_property
    def _narrow_roots(self) -> tuple[Tensor, ...]:
        return tuple(cast_without_denormals(root, torch.float32) for root in self.roots)

    @sized(_solve_work)
    def shifted_solve(self, noise: Tensor, x: Tensor) -> Tensor:
        """``(K + s2 I)^-1 x = Q (T + s2)^-1 Q' x`` in two Kronecker products. shape: (*batch, M, C)"""
        spectrum = (self.products + noise).unsqueeze(-1)
        return kron_matmul(self.vectors, kron_matmul(self.transposed, x) / spectrum)


def factored_if_cheaper(known: KroneckerEigen | None) -> KroneckerEigen | None:
    """The known decomposition, if products with its low-rank roots are cheaper than products with K; else None."""
    return known if known is not None and known.is_low_rank else None


def kron_eigh(factors: Sequence[Factor]) -> KroneckerEigen:
    """Eigen-decomposition of every factor, in float64 for any precision. Cost: sum m_i^3.

    Factors are matrices, or operators on whole circles. The cost of these is that of one matrix per frequency.

    Kernel matrices are positive semi-definite: eigenvalues that rounding made negative are set to zero.

    >>> eigen = kron_eigh([torch.diag(torch.tensor([1.0, 2.0])), 3 * torch.eye(2)])
    >>> eigen.products.tolist()
    [3.0, 3.0, 6.0, 6.0]
    """
    known: dict[tuple, tuple[Tensor, Tensor]] = {}  # a factor shared by several axes is decomposed once
    pairs: list[tuple[Tensor, Basis]] = []
    for factor in factors:
        if not torch.is_tensor(factor):
            with threads_for(9.0 * eigh_cubes(factor)):
                pairs.append(circle_eigh(factor))
            continue
        key = (factor.data_ptr(), factor.shape, factor.stride(), factor.dtype)
        if key not in known:
            own = _without_repeats(factor.detach()).double()
            own = 0.5 * (own + own.mT)
            with threads_for(9.0 * own.size(-1) ** 3):
                smooth = eigh_of_smooth(own) if own.dim() == 2 else None
                values, vectors = torch.linalg.eigh(own) if smooth is None else smooth
                known[key] = values, fix_signs(vectors)
        pairs.append(known[key])
    largest = [float(t.amax()) for t, _ in pairs]
    lowest = [max(0.0, -float(t.amin())) for t, _ in pairs]
    total = math.prod(largest)
    negative = max(low * (total / top if top > 0 else 0.0) for low, top in zip(lowest, largest, strict=True))
    return KroneckerEigen(tuple(q for _, q in pairs), tuple(t.clamp_min(0.0) for t, _ in pairs), negative)


def fix_signs(vectors: Tensor) -> Tensor:
    """Chooses the sign of each eigenvector, the same on every machine and for any number of threads.

    LAPACK may return either sign, and random draws depend on it. The sign is chosen by the inner product with a fixed
    pseudo-random vector. The largest entry is not suitable, because symmetric kernels have two of them.
    """
    place = torch.arange(1, vectors.size(-2) + 1, dtype=vectors.dtype, device=vectors.device)
    side = (place * place * 0.7548776662).frac() - 0.5
    return vectors * torch.where(side @ vectors < 0, -1.0, 1.0).unsqueeze(-2)


def _without_repeats(factor: Tensor) -> Tensor:
    """The tensor with a single member in every expanded batch dimension, whose members are all the same matrix."""
    for dim in range(factor.dim() - 2):
        if factor.stride(dim) == 0:
            factor = factor.narrow(dim, 0, 1)
    return factor


def leading_products(values: Sequence[Tensor], count: int, largest: bool = True) -> tuple[Tensor, Tensor]:
    """The `count` largest (or smallest) entries of ``v_1 ⊗ ... ⊗ v_d`` and their positions.

    Axes are merged one at a time. With both sides sorted, at least (i+1)(j+1) - 1 others precede entry (i, j), so only
    pairs with (i+1)(j+1) <= count are candidates: count * log(count) per merge, never all M.

    All members of a batch share the positions, which are chosen by their geometric-mean spectrum.

    :param values: non-negative, shape (*batch, m_i) each.
    :param count: number of entries.
    :param largest: whether the largest or the smallest entries are wanted.
    :return: entries, best first, shape (*batch, p); and their position on each axis, shape (d, p); p <= count.
    """
    order = 1.0 if largest else -1.0
    ranking = [_batch_ranking(value) for value in values]
    score, position = torch.sort(order * ranking[0], descending=True)
    score, positions = order * score[:count], position[:count].unsqueeze(0)
    for axis in ranking[1:]:
        axis_score, axis_position = torch.sort(order * axis, descending=True)
        axis_score = order * axis_score
        left, right = _hyperbolic_pairs(len(score), len(axis_score), count, score.device)
        candidates = order * (score[left] * axis_score[right])
        keep = torch.topk(candidates, min(count, len(candidates))).indices
        score = order * candidates[keep]
        positions = torch.cat([positions[:, left[keep]], axis_position[right[keep]].unsqueeze(0)])
    return product_at(values, positions), positions


def leading_products_stable(values: Sequence[Tensor], count: int, largest: bool = True) -> tuple[Tensor, Tensor]:
    """As :func:`leading_products`, but rounding does not decide the order of equal entries.

    Equal axes have equal entries at (i, j) and (j, i). Random draws depend on their order, and on which are included.
    """
    apart = []
    for axis, value in enumerate(values):
        place = torch.arange(value.size(-1), dtype=value.dtype, device=value.device)
        apart.append(value * (1.0 + _TIE_TOLERANCE * axis / value.size(-1) * place))
    _, positions = leading_products(apart, count, largest)
    return product_at(values, positions), positions


def columns_in_use(positions: Tensor, sizes: Sequence[int], ranks: Sequence[int]) -> list[list[int]]:
    """How many columns of each axis the first `rank` products use.

    :param positions: shape (d, p), as returned by :func:`leading_products`.
    :param sizes: m_i of each axis.
    :param ranks: the ranks.
    :return: for each rank, one number per axis.
    """
    count = positions.size(-1)
    order = torch.arange(count, device=positions.device)
    used = []
    for axis, size in zip(positions, sizes, strict=True):
        # the product at which each column first appears
        first = order.new_full((size,), count).scatter_reduce(0, axis, order, "amin")
        used.append(torch.stack([(first < min(rank, count)).sum() for rank in ranks]))
    return torch.stack(used, -1).tolist()  # one read from the device


def largest_left_out(values: Sequence[Tensor], positions: Tensor) -> float:
    """The largest entry of ``v_1 ⊗ ... ⊗ v_d``, over the batch, that is not at `positions`; zero if there is none."""
    count = positions.size(-1)
    shape = tuple(value.size(-1) for value in values)
    batch = torch.broadcast_shapes(*(value.shape[:-1] for value in values))
    members = zip(*(value.expand(*batch, -1).reshape(-1, value.size(-1)) for value in values), strict=True)
    taken, largest = ravel(positions, shape), 0.0
    for member in members:
        # At least one of the count + 1 largest is left out, and the first of these is the largest.
        own, where = leading_products(member, count + 1)
        left = own[~torch.isin(ravel(where, shape), taken)]
        largest = max(largest, float(left[0]) if len(left) else 0.0)
    return largest


def _batch_ranking(value: Tensor) -> Tensor:
    """The geometric mean over the batch. shape: (m,)"""
    if value.dim() == 1:
        return value
    # below rounding, an eigenvalue carries no information
    floor = torch.finfo(value.dtype).eps * value.amax(-1, keepdim=True)
    floor = floor.clamp_min(torch.finfo(value.dtype).tiny)
    return value.maximum(floor).log().reshape(-1, value.size(-1)).mean(0).exp()


def _hyperbolic_pairs(left: int, right: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """All (i, j) with i < left, j < right and (i+1)(j+1) <= count."""
    j = torch.arange(min(right, count), device=device)
    lengths = torch.clamp(count // (j + 1), max=left)
    ends = lengths.cumsum(0)
    columns = torch.repeat_interleave(j, lengths)
    rows = torch.arange(len(columns), device=device) - (ends - lengths)[columns]
    return rows, columns
