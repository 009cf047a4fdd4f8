"""The observed cells of a grid of which every rank has some slices of the first axis: sweeps, added up over ranks."""

import math
from collections.abc import Iterator, Sequence

from torch import Tensor

from gpytorch_gaps.linalg.masked_grid import MaskedGrid, blocks
from gpytorch_gaps.linalg.products import kron_matmul
from gpytorch_gaps.reconstruction.weights import ReplicatedWeights, ShardedWeights, Weights

_BLOCK = 2**22  # numbers of the grid that are held at a time
_SUM = "sums of weights"


def masked_grid(observed: Tensor, weights: Weights) -> "MaskedGrid | SharedGrid":
    """Of a mask of the slices that are here."""
    own = MaskedGrid(observed)
    if weights.ranks.size == 1:
        return own
    return ShardedGrid(own, weights) if isinstance(weights, ShardedWeights) else SharedGrid(own, weights)


class SharedGrid:
    """A :class:`MaskedGrid` by slices; every rank has all weights. Sent for a product: as many numbers as weights."""

    def __init__(self, own: MaskedGrid, weights: ReplicatedWeights | ShardedWeights) -> None:
        self._own, self._rows, self.ranks = own, weights.own_rows, weights.ranks
        self.num_cells = math.prod(weights.basis.shape)
        self.device = own.device

    def count(self) -> int:
        return sum(self.ranks.gather(self._own.count(), "the number of observations"))

    def gram(self, bases: Sequence[Tensor], weights: Tensor) -> Tensor:
        return self.ranks.sum(self._own.gram(self._here(bases), weights), _SUM)

    def project(self, bases: Sequence[Tensor]) -> Tensor:
        return self.ranks.sum(self._own.project(self._here(bases)), "the dense block")

    def _here(self, bases: Sequence[Tensor]) -> list[Tensor]:
        first, *others = bases
        return [first[self._rows], *others]


class ShardedGrid(SharedGrid):
    """The same where every rank has some weights only. Sent for a product: ``m_1 r_2 .. r_d`` numbers, twice."""

    def __init__(self, own: MaskedGrid, weights: ShardedWeights) -> None:
        super().__init__(own, weights)
        self._weights = weights

    def gram(self, bases: Sequence[Tensor], weights: Tensor) -> Tensor:
        first, *others = bases
        transposed = [basis.mT for basis in others]
        half = self._weights.expand_first(first, weights.to(first.dtype))
        for rows in self._blocks():
            masked = self._masked(others, half, rows)
            half[rows] = kron_matmul(transposed, masked).view(half[rows].shape)
        return self._weights.project_first(first, half)

    def _masked(self, others: Sequence[Tensor], half: Tensor, rows: slice) -> Tensor:
        """``W'W Phi w`` at some of the slices. shape: (k, m_2 .. m_d, 1)"""
        part = kron_matmul(others, half[rows].reshape(rows.stop - rows.start, -1, 1))
        return part.mul_(self._own.observed[rows].reshape(part.shape))

    def _blocks(self) -> Iterator[slice]:
        return blocks(self._own.shape[0], _BLOCK // math.prod(self._own.shape[1:]))
