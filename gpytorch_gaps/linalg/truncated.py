"""``(x) K_i ~ Phi T Phi'``: the eigenpairs of a Kronecker product above a level, with a bound on what is left out.

Products of eigenvalues below a level are dropped (hyperbolic truncation). What is left out is at most the level in the
2-norm. The errors of the factorisations add to it; they are measured afterwards and carried over to the product by

    ``|(x) (K_i + E_i) - (x) K_i| <= prod_i (|K_i| + |E_i|) - prod_i |K_i|``.

A factor that does not truncate keeps its full basis.

>>> x = torch.linspace(0, 1, 400, dtype=torch.float64)
>>> smooth, rough = torch.exp(-(x[:, None] - x) ** 2), torch.eye(3, dtype=torch.float64)
>>> basis = truncated_eigh([smooth, rough], 1e-8)
>>> basis.ranks, basis.error < 2e-8
((8, 3), True)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gpytorch_gaps.linalg.products import kron_diagonal
from gpytorch_gaps.linalg.smooth_eigh import low_rank_distance, lowrank_eigh
from gpytorch_gaps.linalg.symmetry import symmetric_part
from gpytorch_gaps.utils.threads import threads_for

_MAX_FULL_SIZE = 400  # a factor of at most this size is decomposed in full: that is as fast
_ROUNDING_SHARE = 0.1  # eigenvalues below this share of the rounding errors are dropped


@dataclass(frozen=True)
class TruncatedEigen:
    """Truncated eigenpairs of a Kronecker product.

    :param vectors: orthonormal ``Phi_i``, shape (m_i, r_i) each.
    :param values: eigenvalues of each factor, largest first, shape (r_i,) each.
    :param level: products of eigenvalues below it are dropped.
    :param error: a bound on ``|K - Phi T Phi'|`` in the 2-norm.
    """

    vectors: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    level: float
    error: float

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(vectors.size(-2) for vectors in self.vectors)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(values.size(-1) for values in self.values)

    @cached_property
    def products(self) -> Tensor:
        """T on the box of all products, zero where they are dropped. shape: (r_1, .., r_d)"""
        products = kron_diagonal(self.values).view(self.ranks)
        return torch.where(products >= self.level, products, 0.0)

    @cached_property
    def size(self) -> int:
        """R, the number of products that are kept."""
        return int(self.products.count_nonzero())

    @property
    def is_full(self) -> bool:
        """Whether no axis was truncated: a vector of weights is then as long as the grid."""
        return self.ranks == self.shape

    # -- as a sum of one term, see linalg/truncated_sum ----------------------------------------------------------------

    @property
    def terms(self) -> "tuple[TruncatedEigen, ...]":
        """The products that are summed: this one."""
        return (self,)

    def boxes(self, weights: Tensor) -> list[Tensor]:
        """The weights of every term in a box."""
        return [weights]

    def to_box(self, weights: Tensor) -> Tensor:
        """Coefficients of ``Phi w`` in the product basis of `vectors`: the weights."""
        return weights

    def from_box(self, box: Tensor) -> Tensor:
        """``Phi' f``, given the products of f with the basis of `vectors`."""
        return box


def truncated_eigh(factors: Sequence[Tensor], level: float) -> TruncatedEigen:
    """Eigenpairs of a Kronecker product down to `level`, or to a tenth of the rounding errors.

    Cost: ``sum m_i r_i^2 + m_i^2 r_i`` for factors of numerical rank r_i, ``m_i^3`` for the others.

    :param factors: K_i, positive semi-definite, shape (m_i, m_i) each.
    :param level: products of eigenvalues below it may be dropped.
    """
    factors = [factor.detach().double() for factor in factors]
    norms = [_norm_bound(factor) for factor in factors]
    others = [math.prod(norms[:axis] + norms[axis + 1 :]) for axis in range(len(norms))]
    shares = [level / (10.0 * len(factors) * other) if other > 0 else 0.0 for other in others]
    distinct: dict[tuple, tuple[Tensor, Tensor, float]] = {}  # a factor of several axes is decomposed once
    pairs = []
    for factor, share in zip(factors, shares, strict=True):
        key = (factor.data_ptr(), factor.shape, factor.stride(), share)
        if key not in distinct:
            with threads_for(9.0 * len(factor) ** 3):
                distinct[key] = _factor_eigh(factor, share)
        pairs.append(distinct[key])
    tops = [float(values[0]) if len(values) else 0.0 for _, values, _ in pairs]
    carried = _carried_error(tops, [error for _, _, error in pairs])
    level = max(level, _ROUNDING_SHARE * carried)
    kept = []
    for axis, (_, values, _) in enumerate(pairs):
        rest = math.prod(tops[:axis] + tops[axis + 1 :])
        kept.append(max(1, int((values * rest >= level).sum())))
    return TruncatedEigen(
        tuple(vectors[:, :rank].contiguous() for (vectors, _, _), rank in zip(pairs, kept, strict=True)),
        tuple(values[:rank] for (_, values, _), rank in zip(pairs, kept, strict=True)),
        level,
        level + carried,
    )


def _factor_eigh(factor: Tensor, tolerance: float) -> tuple[Tensor, Tensor, float]:
    """Eigenpairs of one factor, largest first, and a bound on ``|K_i - Phi T Phi'|``."""
    factor = symmetric_part(factor)
    size = len(factor)
    if size > _MAX_FULL_SIZE:
        limit = size // 4
        vectors, values, _ = lowrank_eigh(factor, tolerance, limit)
        if len(values) < limit:
            return _largest_first(factor, vectors, values)
    values, vectors = torch.linalg.eigh(factor)
    return _largest_first(factor, vectors, values)


def _largest_first(factor: Tensor, vectors: Tensor, values: Tensor) -> tuple[Tensor, Tensor, float]:
    vectors, values = vectors.flip(-1), values.flip(-1).clamp_min(0.0)
    # one step of Newton's iteration makes them orthonormal to the last bit, as the preconditioner assumes
    vectors = vectors @ (
        1.5 * torch.eye(len(values), dtype=vectors.dtype, device=vectors.device) - 0.5 * (vectors.mT @ vectors)
    )
    return vectors, values, low_rank_distance(factor, vectors, values)


def _carried_error(norms: Sequence[float], errors: Sequence[float]) -> float:
    """``prod (n_i + e_i) - prod n_i``, without cancellation."""
    total, product = 0.0, 1.0
    for norm, error in zip(norms, errors, strict=True):
        total, product = total * (norm + error) + product * error, product * norm
    return total


def _norm_bound(factor: Tensor) -> float:
    """``|K_i|`` is at most its trace, and at most its largest row sum."""
    return min(float(factor.diagonal().sum()), float(factor.abs().sum(-1).max()))
