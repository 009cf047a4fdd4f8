"""A matrix close to that of the weights. Its determinant and inverse are known.

The matrix of the weights is ``H = s2 T^-1 + G``, ``G = Phi' W'W Phi``. Here H0 is the dense block of H on the leading
functions, if there is one, and the diagonal ``s2 T^-1 + N/M`` elsewhere. The contribution of H0 is exact. Random probes
estimate only the rest, which is zero if the block contains all functions.

Everything is in units of the prior: ``B = s2 T^(-1/2) H^-1 T^(-1/2)`` is the posterior variance in these units, with
eigenvalues between 0 and 1. B0 is the same for H0.
"""

import math
from functools import cached_property

import torch
from torch import Tensor

from gpytorch_gaps.linalg.selection import ravel
from gpytorch_gaps.reconstruction.weight_space import LeadingBlock, WeightSpace


class ReferenceMatrix:
    """H0, for replicated weights.

    :param space: the system of the weights.
    :param block: the dense block, or None.
    """

    def __init__(self, space: WeightSpace, block: LeadingBlock | None) -> None:
        self.space, self.block = space, block
        self._outside = space.products > 0
        if block is not None:
            self._outside = self._outside.flatten().index_fill(0, block.index, False).view(self._outside.shape)

    @property
    def is_exact(self) -> bool:
        """Whether H0 is H."""
        return not bool(self._outside.any())

    def solve(self, weights: Tensor) -> Tensor:
        """``H0^-1 x``"""
        return (self.space if self.block is None else self.block).precondition(weights)

    def root_matmul(self, weights: Tensor) -> Tensor:
        """``F x`` with ``F F' = H0``."""
        result = torch.where(self._outside, (self.space.shift + self.space.share).sqrt(), 0.0) * weights
        if self.block is not None:
            flat = result.view(-1)
            flat[self.block.index] = self.block.root @ weights.reshape(-1)[self.block.index]
        return result

    @cached_property
    def explained_outside(self) -> Tensor:
        """The diagonal of ``I - B0`` outside the block, and zero inside it. shape: (r_1, .., r_d)"""
        space = self.space
        return torch.where(self._outside, space.share / (space.shift + space.share), 0.0)

    @cached_property
    def explained_inside(self) -> Tensor:
        """``I - B0`` within the block. shape: (p, p)"""
        if self.block is None:
            return self.space.products.new_zeros(0, 0)
        roots = self.space.products.flatten()[self.block.index].sqrt()
        inverse = torch.linalg.solve_triangular(self.block.root, torch.diag(1.0 / roots), upper=False)
        explained = (inverse.mT @ inverse).mul_(-self.space.noise)
        explained.diagonal().add_(1.0)
        return explained

    def explained(self) -> float:
        """``tr(I - B0)``"""
        return float(self.explained_outside.sum() + self.explained_inside.diagonal().sum())

    def log_determinant(self) -> float:
        """``-log|B0|``, which is ``log|I + T^(1/2) G0 T^(1/2) / s2|``."""
        space = self.space
        ratios = torch.where(self._outside, space.share * space.products / space.noise, 0.0)
        total = float(ratios.log1p().sum())
        if self.block is not None:
            inside = space.products.flatten()[self.block.index]
            total += float(2.0 * self.block.root.diagonal().log().sum() + inside.log().sum())
            total -= len(inside) * math.log(space.noise)
        return total

    def explained_along(self, axis: int) -> Tensor:
        """Sums of ``I - B0`` over equal positions on all other axes. shape: (r_i, r_i)"""
        others = [other for other in range(self._outside.dim()) if other != axis]
        sums = torch.diag(self.explained_outside.sum(others) if others else self.explained_outside)
        if self.block is not None:
            _add_pairs(sums, self.explained_inside, self.block.positions, axis, self._outside.shape)
        return sums


def _add_pairs(sums: Tensor, matrix: Tensor, positions: Tensor, axis: int, ranks: torch.Size) -> None:
    """Add ``matrix[a, b]`` to ``sums[a_i, b_i]`` for all a and b with equal positions on the other axes."""
    own, others = positions[axis], positions.clone()
    others[axis] = 0
    place = ravel(others, ranks)
    order = (place * ranks[axis] + own).argsort()
    for apart in range(ranks[axis]):  # functions with the same place are neighbours in this order
        first, second = order[: len(order) - apart], order[apart:]
        same = place[first] == place[second]
        if not bool(same.any()):
            return
        first, second = first[same], second[same]
        sums.index_put_((own[first], own[second]), matrix[first, second], accumulate=True)
        if apart:
            sums.index_put_((own[second], own[first]), matrix[second, first], accumulate=True)
