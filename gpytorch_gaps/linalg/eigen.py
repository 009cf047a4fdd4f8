"""Eigen-decomposition of a Kronecker product: ``(x) K_i = Q T Q'`` with ``Q = (x) Q_i`` and ``T = (x) T_i``.

Factors are decomposed one by one in float64; the M eigenvalues of the product are never all formed or sorted when only
the p largest (or smallest) are wanted.

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

from gpytorch_gaps.linalg.products import cast_without_denormals, kron_diagonal, kron_matmul, kron_matmul_flops
from gpytorch_gaps.linalg.selection import product_at, ravel
from gpytorch_gaps.linalg.smooth_eigh import eigh_of_smooth
from gpytorch_gaps.utils.threads import threads_for

_TIE = 1e-9  # relative: products that close are as good as each other
ROUNDING = 1e-13  # of the largest eigenvalue: what a positive semi-definite kernel may be below zero by
_WORTH_THE_WAY = 0.6  # two thin products run at a lower rate than one square one


@dataclass(frozen=True)
class KroneckerEigen:
    """Orthonormal eigenvectors and non-negative eigenvalues of each factor, ascending. Never differentiated."""

    vectors: tuple[Tensor, ...]  # shape: (*batch, m_i, m_i) each
    values: tuple[Tensor, ...]  # shape: (*batch, m_i) each
    negative: float = 0.0  # how far below zero an eigenvalue of the product was before rounding was undone

    @property
    def num_cells(self) -> int:
        return math.prod(values.size(-1) for values in self.values)

    @cached_property
    def products(self) -> Tensor:
        """All M eigenvalues of the product, in grid order. shape: (*batch, M)"""
        return kron_diagonal(self.values)

    @cached_property
    def transposed(self) -> tuple[Tensor, ...]:
        return tuple(vectors.mT for vectors in self.vectors)

    def to(self, dtype: torch.dtype) -> "KroneckerEigen":
        if dtype == self.vectors[0].dtype:
            return self
        vectors, values = (
            tuple(cast_without_denormals(q, dtype) for q in self.vectors),
            tuple(t.to(dtype) for t in self.values),
        )
        return KroneckerEigen(vectors, values, self.negative)

    @cached_property
    def roots(self) -> tuple[Tensor, ...]:
        """``U_i`` with ``K_i = U_i U_i'``, without the eigenvalues that are lost in rounding. shape: (*batch, m_i, r_i)

        Smooth kernels have few others: a product by way of the roots is exact to rounding, like any, and far cheaper.
        """
        found = []
        for vectors, values in zip(self.vectors, self.values, strict=True):
            floor = torch.finfo(torch.float64).eps * values.amax(-1, keepdim=True)
            kept = max(1, int((values > floor).sum(-1).max()))  # ascending: the last ones
            found.append(vectors[..., -kept:] * values[..., -kept:].sqrt().unsqueeze(-2))
        return tuple(found)

    @cached_property
    def root_flops(self) -> float:
        """Of one product with K by way of its roots, for one column."""
        shapes = [(root.size(-2), root.size(-1)) for root in self.roots]
        return float(kron_matmul_flops([(r, m) for m, r in shapes]) + kron_matmul_flops(shapes))

    @cached_property
    def is_low_rank(self) -> bool:
        """Whether the roots are worth the way round: narrow, and of all of K, nothing of which is negative."""
        largest = math.prod(float(values.amax()) for values in self.values)
        if self.negative > ROUNDING * largest:
            return False
        full = kron_matmul_flops([(q.size(-2), q.size(-2)) for q in self.vectors])
        return self.root_flops < _WORTH_THE_WAY * full

    def matmul(self, x: Tensor) -> Tensor:
        """``K x`` by way of the roots, in the precision of x. shape: (*batch, M, C)"""
        roots = self.roots if x.dtype == self.roots[0].dtype else self._narrow_roots
        return kron_matmul(roots, kron_matmul([root.mT for root in roots], x))

    @cached_property
    def _narrow_roots(self) -> tuple[Tensor, ...]:
        return tuple(cast_without_denormals(root, torch.float32) for root in self.roots)

    def shifted_solve(self, noise: Tensor, x: Tensor) -> Tensor:
        """``(K + s2 I)^-1 x = Q (T + s2)^-1 Q' x`` in two Kronecker products. shape: (*batch, M, C)"""
        spectrum = (self.products + noise).unsqueeze(-1)
        return kron_matmul(self.vectors, kron_matmul(self.transposed, x) / spectrum)


def factored_if_cheaper(known: KroneckerEigen | None) -> KroneckerEigen | None:
    """A decomposition by whose roots products are better taken, where one is known."""
    return known if known is not None and known.is_low_rank else None


def kron_eigh(factors: Sequence[Tensor]) -> KroneckerEigen:
    """Eigen-decomposition of every factor, in float64 whatever their precision. Cost: sum m_i^3.

    Kernel matrices are positive semi-definite: eigenvalues that rounding made negative are zero.
    """
    known: dict[tuple, tuple[Tensor, Tensor]] = {}  # a factor that serves several axes is decomposed once
    pairs = []
    for factor in factors:
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
    """Each eigenvector, or its negative: the same on every machine, however many threads it has.

    What is drawn by way of eigenvectors depends on their signs, which LAPACK is free to choose. A fixed vector that is
    at right angles to none of them decides; their largest entries would not, of which symmetric kernels have two.
    """
    place = torch.arange(1, vectors.size(-2) + 1, dtype=vectors.dtype, device=vectors.device)
    side = (place * place * 0.7548776662).frac() - 0.5  # as good as random
    return vectors * torch.where(side @ vectors < 0, -1.0, 1.0).unsqueeze(-2)


def _without_repeats(factor: Tensor) -> Tensor:
    """One member of every batch dimension that was merely expanded: the others are the same matrix."""
    for dim in range(factor.dim() - 2):
        if factor.stride(dim) == 0:
            factor = factor.narrow(dim, 0, 1)
    return factor


def leading_products(values: Sequence[Tensor], count: int, largest: bool = True) -> tuple[Tensor, Tensor]:
    """The `count` largest (or smallest) entries of ``(x) values`` and where they are.

    Axes are merged one at a time. With both sides sorted, entry (i, j) is dominated by (i+1)(j+1) - 1 others, so only
    pairs with (i+1)(j+1) <= count can matter: count * log(count) candidates a merge, never all M.

    A batch shares one choice, made from its geometric-mean spectrum, so that one index set serves all of it.

    :param values: non-negative, shape (*batch, m_i) each.
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
    """The same, but for products that are as good as each other, whose order is not left to rounding.

    Axes that are alike have such products: (i, j) and (j, i). What is drawn by way of eigenvectors depends on which of
    them come first, and which are the last that count.
    """
    apart = []
    for axis, value in enumerate(values):
        place = torch.arange(value.size(-1), dtype=value.dtype, device=value.device)
        apart.append(value * (1.0 + _TIE * axis / value.size(-1) * place))
    _, positions = leading_products(apart, count, largest)
    return product_at(values, positions), positions


def columns_in_use(positions: Tensor, sizes: Sequence[int], ranks: Sequence[int]) -> list[list[int]]:
    """How many columns of each axis the first `rank` products use, for every rank: one list of d numbers a rank.

    :param positions: shape (d, p), as :func:`leading_products` gives them.
    :param sizes: m_i of each axis.
    """
    count = positions.size(-1)
    order = torch.arange(count, device=positions.device)
    used = []
    for axis, size in zip(positions, sizes, strict=True):
        # the product at which each column first appears
        first = order.new_full((size,), count).scatter_reduce(0, axis, order, "amin")
        used.append(torch.stack([(first < min(rank, count)).sum() for rank in ranks]))
    return torch.stack(used, -1).tolist()  # one read of a few numbers, where the host must decide


def largest_left_out(values: Sequence[Tensor], positions: Tensor) -> float:
    """The largest entry of ``(x) values``, over the batch, that is not at `positions`. Zero if all are taken."""
    count = positions.size(-1)
    shape = tuple(value.size(-1) for value in values)
    batch = torch.broadcast_shapes(*(value.shape[:-1] for value in values))
    members = zip(*(value.expand(*batch, -1).reshape(-1, value.size(-1)) for value in values), strict=True)
    taken, largest = ravel(positions, shape), 0.0
    for member in members:
        # of its count + 1 largest at least one is left out, and the first such is the largest
        own, where = leading_products(member, count + 1)
        left = own[~torch.isin(ravel(where, shape), taken)]
        largest = max(largest, float(left[0]) if len(left) else 0.0)
    return largest


def _batch_ranking(value: Tensor) -> Tensor:
    """The geometric mean over the batch. shape: (m,)"""
    if value.dim() == 1:
        return value
    # what rounding left of an eigenvalue, zero or 1e-17, says nothing
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
