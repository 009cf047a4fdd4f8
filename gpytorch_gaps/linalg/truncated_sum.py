"""A sum of Kronecker products in one basis: ``sum_t (x)_i K_ti ~ Psi T Psi'``.

Every term is truncated separately (:mod:`gpytorch_gaps.linalg.truncated`). ``Psi`` has the columns of all terms, and T
is diagonal. Columns of different terms are not orthogonal to each other.

The columns along an axis are expressed in an orthonormal basis J_i of this axis, ``Psi_ti = J_i Z_ti``. A term that is
smoother than another one adds little to J_i. A product with ``Psi' W'W Psi`` therefore costs about as much as one with
the basis of the roughest term: the sweep uses the basis ``(x) J_i``, and products with the small matrices Z_ti.

>>> x = torch.linspace(0, 1, 400, dtype=torch.float64)
>>> smooth, rough = (torch.exp(-((x[:, None] - x) / length) ** 2) for length in (0.5, 0.1))
>>> basis = truncated_sum([[smooth, smooth], [rough, rough]], 1e-6)
>>> len(basis.terms), basis.ranks[0] < sum(term.ranks[0] for term in basis.terms)
(2, True)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gpytorch_gaps.linalg.products import kron_matmul
from gpytorch_gaps.linalg.truncated import TruncatedEigen, truncated_eigh

_JOINT_SHARE = 0.01  # directions of an axis below this fraction of the level are not in J_i


@dataclass(frozen=True)
class TruncatedSum:
    """The truncated eigenpairs of every term, and their coefficients in a common basis.

    :param terms: eigenpairs of each term.
    :param vectors: orthonormal J_i, shape (m_i, j_i) each.
    :param error: a bound on ``|K - Psi T Psi'|`` in the 2-norm.
    """

    terms: tuple[TruncatedEigen, ...]
    vectors: tuple[Tensor, ...]
    error: float

    @cached_property
    def tables(self) -> tuple[tuple[Tensor, ...], ...]:
        """Z_ti of each term and axis, shape (j_i, r_ti)."""
        return tuple(
            tuple(joint.mT @ own for joint, own in zip(self.vectors, term.vectors, strict=True)) for term in self.terms
        )

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(vectors.size(-2) for vectors in self.vectors)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(vectors.size(-1) for vectors in self.vectors)

    @property
    def level(self) -> float:
        """Eigenvalues of terms below it are dropped."""
        return max(term.level for term in self.terms)

    @cached_property
    def kept(self) -> tuple[Tensor, ...]:
        """Flat positions, in the box of each term, of the products that are kept. shape: (R_t,) each"""
        return tuple(term.products.flatten().nonzero().squeeze(-1) for term in self.terms)

    @cached_property
    def products(self) -> Tensor:
        """T, term after term. shape: (R,)"""
        return torch.cat([term.products.flatten()[own] for term, own in zip(self.terms, self.kept, strict=True)])

    @property
    def size(self) -> int:
        """R, the number of products of all terms that are kept."""
        return len(self.products)

    @property
    def is_full(self) -> bool:
        """Whether there is a term none of whose axes was truncated."""
        return any(term.is_full for term in self.terms)

    @property
    def parts(self) -> list[slice]:
        """The weights of each term."""
        ends = torch.tensor([len(own) for own in self.kept]).cumsum(0).tolist()
        return [slice(end - len(own), end) for end, own in zip(ends, self.kept, strict=True)]

    def positions(self, term: int) -> Tensor:
        """Positions of the weights of a term on all axes. shape: (d, R_t)"""
        return torch.stack(torch.unravel_index(self.kept[term], self.terms[term].ranks))

    def boxes(self, weights: Tensor) -> list[Tensor]:
        """The weights of every term in its own box. shape: (R,) -> (r_t1, .., r_td) each"""
        found = []
        for term, kept, part in zip(self.terms, self.kept, self.parts, strict=True):
            box = weights.new_zeros(math.prod(term.ranks))
            box[kept] = weights[part]
            found.append(box.view(term.ranks))
        return found

    def to_box(self, weights: Tensor) -> Tensor:
        """Coefficients of ``Psi w`` in the basis ``(x) J_i``. shape: (R,) -> (j_1, .., j_d)"""
        boxes = zip(self.tables, self.boxes(weights), strict=True)
        total = weights.new_zeros(self.ranks)
        for tables, box in boxes:
            total += kron_matmul(tables, box.reshape(-1, 1)).view(self.ranks)
        return total

    def from_box(self, box: Tensor) -> Tensor:
        """``Psi' f``, given ``(x) J_i' f``. shape: (j_1, .., j_d) -> (R,)"""
        column = box.reshape(-1, 1)
        found = [kron_matmul([one.mT for one in tables], column).flatten() for tables in self.tables]
        return torch.cat([own[kept] for own, kept in zip(found, self.kept, strict=True)])


def truncated_sum(terms: Sequence[Sequence[Tensor]], level: float) -> TruncatedSum:
    """A basis of a sum of Kronecker products, without eigenvalues below `level`.

    :param terms: the factors K_ti of every term, positive semi-definite, shape (m_i, m_i) each.
    :param level: eigenvalues below it may be dropped, in the sum of all terms.
    """
    found = tuple(truncated_eigh(factors, level / len(terms)) for factors in terms)
    return in_one_basis(found, level)


def in_one_basis(terms: tuple[TruncatedEigen, ...], level: float) -> TruncatedSum:
    """The eigenpairs of several terms in one orthonormal basis of every axis."""
    axes = range(len(terms[0].vectors))
    others = [_norms_of_others(term) for term in terms]
    level = _JOINT_SHARE * max(level, *(term.level for term in terms)) / len(axes)
    vectors = []
    for axis in axes:
        values = [term.values[axis] * scale[axis] for term, scale in zip(terms, others, strict=True)]
        vectors.append(_joint([term.vectors[axis] for term in terms], values, level))
    error = sum(term.error for term in terms)
    for term, scale in zip(terms, others, strict=True):
        error += sum(scale[axis] * _left_out(term, axis, vectors[axis]) for axis in axes)
    return TruncatedSum(terms, tuple(vectors), error)


def _norms_of_others(term: TruncatedEigen) -> list[float]:
    """For every axis, the norm of the product of all other axes."""
    tops = [float(values[0]) for values in term.values]
    return [math.prod(tops[:axis] + tops[axis + 1 :]) for axis in range(len(tops))]


def _joint(vectors: Sequence[Tensor], values: Sequence[Tensor], level: float) -> Tensor:
    """An orthonormal basis of the columns of all terms, without directions below a level.

    :param vectors: eigenvectors of each term, shape (m, r_t).
    :param values: eigenvalues, times the largest ones of the other axes. shape: (r_t,)
    """
    size, columns = len(vectors[0]), sum(own.size(-1) for own in vectors)
    if columns >= size:
        return torch.eye(size, dtype=vectors[0].dtype, device=vectors[0].device)
    left, right = torch.linalg.qr(torch.cat([own * value for own, value in zip(vectors, values, strict=True)], dim=-1))
    directions, sizes, _ = torch.linalg.svd(right)
    return left @ directions[:, : max(1, int((sizes > level).sum()))]


def _left_out(term: TruncatedEigen, axis: int, joint: Tensor) -> float:
    """A bound on ``|K_i - P K_i P|`` for the projection P on the joint basis."""
    if joint.size(0) == joint.size(1):
        return 0.0
    values, vectors = term.values[axis], term.vectors[axis]
    rest = vectors - joint @ (joint.mT @ vectors)
    return float(2.0 * (rest * values).norm() + (rest * values.sqrt()).norm() ** 2)
