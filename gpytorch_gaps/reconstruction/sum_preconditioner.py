"""A preconditioner for a sum of products: the matrix of the weights for evenly spread gaps.

With ``Psi = [Psi_1 .. Psi_n]`` it is ``H0 = s2 T^-1 + N/M Psi' Psi``. It is diagonal for one term. Functions of
different terms overlap: if two terms share a function, the data determine the sum of both weights, and only the prior
divides it between them. A diagonal preconditioner would leave a condition number of T/s2.

H0 is inverted by blocks. The block of the term with the most functions, the *main* one, is the diagonal
``D = s2/T + N/M``. The p functions of the other terms with the largest eigenvalues get the dense Schur complement

    S = s2 T^-1 + N/M (Psi_2' Psi_2 - X' (N/M) D^-1 X),        X = Psi_1' Psi_2,

computed axis by axis. The block of all other functions is diagonal. They have less variance than the noise, or there
is no memory for them.
"""

import math
from collections.abc import Sequence

import torch
from linear_operator.utils.cholesky import psd_safe_cholesky
from torch import Tensor

from gpytorch_gaps.linalg.gram import structured_gram
from gpytorch_gaps.linalg.products import kron_matmul
from gpytorch_gaps.linalg.truncated_sum import TruncatedSum

_LEAST_RATIO = 0.03  # if the variance of a function over that of the noise is smaller, its overlap is negligible


class SumPreconditioner:
    """``H0^-1`` for a sum of products.

    :param basis: the basis of the sum.
    :param shift: ``s2 T^-1``. shape: (R,)
    :param share: ``N/M``.
    :param most: the largest p.
    """

    def __init__(self, basis: TruncatedSum, shift: Tensor, share: float, most: int) -> None:
        self.basis, self.share, self.inverse = basis, share, 1.0 / (shift + share)
        self._main = max(range(len(basis.terms)), key=lambda term: len(basis.kept[term]))
        self._part = basis.parts[self._main]
        others = torch.ones_like(shift, dtype=torch.bool)
        others[self._part] = False
        matter = (others & (_LEAST_RATIO * shift < share)).nonzero().squeeze(-1)
        self._chosen = matter[shift[matter].argsort()[:most]]
        schur = share * (self._overlaps() - self._explained())
        schur.diagonal().add_(shift[self._chosen])
        self._scale = self.inverse[self._chosen].sqrt()
        self._cholesky = psd_safe_cholesky(schur.mul_(self._scale).mul_(self._scale.unsqueeze(-1)))

    def __call__(self, residual: Tensor) -> Tensor:
        """``H0^-1 r``. shape: (R,) -> (R,)"""
        result = self.inverse * residual
        if not len(self._chosen):
            return result
        main = torch.zeros_like(residual)
        main[self._part] = result[self._part]
        right = self._scale * (residual - self._overlap_matmul(main))[self._chosen]
        inside = self._scale * torch.cholesky_solve(right.unsqueeze(-1), self._cholesky).squeeze(-1)
        result[self._chosen] = inside
        moved = self._overlap_matmul(torch.zeros_like(residual).index_copy_(0, self._chosen, inside))
        result[self._part] -= (self.inverse * moved)[self._part]
        return result

    def _overlap_matmul(self, weights: Tensor) -> Tensor:
        """``N/M Psi' Psi w``"""
        return self.share * self.basis.from_box(self.basis.to_box(weights))

    def _side_by_side(self) -> tuple[list[Tensor], Tensor]:
        """Z_i of all terms except the main one, concatenated, and the columns of the chosen functions in it."""
        others = [term for term in range(len(self.basis.terms)) if term != self._main]
        axes = range(len(self.basis.vectors))
        tables = [torch.cat([self.basis.tables[term][axis] for term in others], dim=-1) for axis in axes]
        columns = self._chosen.new_zeros(len(axes), len(self.inverse))
        start = [0 for _ in axes]
        for term in others:
            columns[:, self.basis.parts[term]] = self.basis.positions(term) + columns.new_tensor(start).unsqueeze(-1)
            start = [at + rank for at, rank in zip(start, self.basis.terms[term].ranks, strict=True)]
        return tables, columns[:, self._chosen]

    def _overlaps(self) -> Tensor:
        """``Psi_2' Psi_2`` of the chosen functions. shape: (p, p)"""
        tables, columns = self._side_by_side()
        result = self.inverse.new_ones(len(self._chosen), len(self._chosen))
        for table, own in zip(tables, columns, strict=True):
            result *= (table.mT @ table)[own][:, own]
        return result

    def _explained(self) -> Tensor:
        """``X' (N/M) D^-1 X``. shape: (p, p)"""
        tables, columns = self._side_by_side()
        crossed = [one.mT @ own for one, own in zip(self.basis.tables[self._main], tables, strict=True)]
        box = self.basis.boxes(self.share * self.inverse)[self._main].reshape(-1, 1)

        def contract(bases: Sequence[Tensor]) -> Tensor:
            return kron_matmul([one.mT for one in bases], box).view([one.size(-1) for one in bases])

        if not math.prod(columns.shape):
            return self.inverse.new_zeros(0, 0)
        return structured_gram(crossed, columns, contract)
