"""For cells of a grid, the observed cells most correlated with them, under a Kronecker product.

``corr(x, x') = prod_i corr_i(x_i, x'_i)``. On every axis, the levels are sorted by their correlation with each level.
Combinations of the first places in these orders are then looked up, the most correlated first. Only correlations are
used, so levels may be labels.

An axis is a matrix, or a vector by lag: see :mod:`gpytorch_gaps.linalg.axis_correlations`. On a long axis by lag, the
places are steps from a level to others. They are the same for all levels, and are sorted once.

>>> K = torch.exp(-(torch.arange(5.0).unsqueeze(-1) - torch.arange(5.0)).abs())
>>> correlated_rows([K], torch.tensor([0, 2, 3]), torch.tensor([0, 4]), 2)  # those of cell 0 are rows 0 and 1
tensor([[0, 1],
        [2, 1]])
>>> correlated_rows([torch.exp(-torch.arange(5.0))], torch.tensor([0, 2, 3]), torch.tensor([0, 4]), 2)  # by lag
tensor([[0, 1],
        [2, 1]])
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpytorch_gaps.linalg.axis_correlations import axis_entries, correlations
from gpytorch_gaps.linalg.products import kron_diagonal
from gpytorch_gaps.linalg.selection import ravel, unravel
from gpytorch_gaps.utils.tensors import look_up

_CANDIDATES_PER_NEIGHBOUR = (4, 16, 64)  # cells that are looked up for each neighbour wanted, round by round
_MAX_COMBINATIONS = 2**16  # combinations of places, over all axes, that are ranked
_CHUNK_NUMBERS = 2**20  # numbers in memory at a time: 8 MiB of int64, about what a cache holds
_MAX_TABULATED = 1024  # levels of an axis by lag, up to which each has places of its own: none lies beyond an end
_NO_CELL = -(2**50)  # so far below zero that no other axis makes a cell of it
_COARSER = 4  # times as far apart are the levels of each coarser sub-grid on which rows are looked for
_COMPARED_WITH_ALL = 512  # first rows of an ordering, which are compared with every earlier row


def correlated_rows(factors: Sequence[Tensor], index: Tensor, cells: Tensor, count: int) -> Tensor:
    """For each of some cells, gaps among them, the rows of up to `count` observations, the most correlated first.

    Around cells with too few observations among those looked up, in the middle of large gaps, coarser and coarser
    sub-grids are searched, which reach farther.

    :param factors: K_i, or their correlations, shape (m_i, m_i), or by lag (m_i,), each.
    :param index: flat cell of each observation, last axis fastest, shape (N,).
    :param cells: flat cells, which may be observed: their own row then comes first. shape (Q,).
    :param count: number of neighbours.
    :return: rows, -1 where fewer are found, shape (Q, count).
    """
    corr = correlations(factors)
    result, step = _rows_around(corr, index, cells, count, 1), _COARSER
    while step < max(len(matrix) for matrix in corr):
        missing = (result[:, -1] < 0).nonzero().squeeze(-1)
        if not len(missing):
            break
        kept = [torch.arange(0, len(matrix), step, device=index.device) for matrix in corr]
        nearest = [_nearest_of(own, some, step) for own, some in zip(corr, kept, strict=True)]
        levels = unravel(cells[missing], [len(matrix) for matrix in corr])
        moved = [own[level] for own, level in zip(nearest, levels, strict=True)]
        some, inverse = ravel(moved, [len(matrix) for matrix in corr]).unique(return_inverse=True)
        found = _rows_around(corr, index, some, count, step)[inverse]
        more = (found >= 0).sum(-1) > (result[missing] >= 0).sum(-1)
        result[missing[more]] = found[more]
        step *= _COARSER
    return result


def _nearest_of(corr: Tensor, kept: Tensor, step: int) -> Tensor:
    """For every level of an axis, the most correlated of those that are kept: every so-manieth. shape: (m,)"""
    if corr.dim() == 2:
        return kept[corr[:, kept].argmax(-1)]
    level = torch.arange(len(corr), device=corr.device)
    return kept[((level + step // 2) // step).clamp_max(len(kept) - 1)]


def _rows_around(corr: Sequence[Tensor], index: Tensor, cells: Tensor, count: int, step: int) -> Tensor:
    """The rows nearest to some cells among those of every so-manieth level of each axis. shape: (Q, count)"""
    together = torch.cat([index, cells])  # the cells as rows that come after all observations
    search = _Search.of(corr, together).on_subgrid([torch.arange(0, len(c), step, device=c.device) for c in corr])
    rows = torch.arange(len(index), len(together), device=index.device)
    return search.nearest(rows, torch.full_like(rows, len(index)), count)


def earlier_rows(
    corr: Sequence[Tensor], index: Tensor, generation: Sequence[Tensor], rank: Tensor, count: int
) -> Tensor:
    """For each observation, the rows of up to `count` observations that come earlier in an ordering.

    :param corr: ``|corr_i|`` of every axis, shape (m_i, m_i) or by lag (m_i,) each.
    :param generation: of every level, shape (m_i,) each: see :mod:`gpytorch_gaps.linalg.ordering`. The neighbours of an
        observation are looked for on the sub-grid of the generations that are not later than its own.
    :param rank: place of each observation in the ordering, shape (N,).
    :return: rows, -1 where fewer are found, shape (N, count).
    """
    search = _Search.of(corr, index, rank)
    result = torch.full((len(index), count), -1, dtype=torch.long, device=index.device)
    order = search.order
    first = order[: max(_COMPARED_WITH_ALL, 2 * count)]
    result[first] = search.nearest_of_all(first, count)
    if len(order) <= len(first):
        return result
    levels = unravel(index, search.shape)
    own = torch.stack([values[level] for values, level in zip(generation, levels, strict=True)]).amax(0)
    rest = torch.ones_like(rank, dtype=torch.bool).index_fill_(0, first, False)
    for value in torch.unique(own[rest]).tolist():
        rows = (rest & (own == value)).nonzero().squeeze(-1)
        kept = [(values <= value).nonzero().squeeze(-1) for values in generation]
        result[rows] = search.on_subgrid(kept).nearest(rows, rank[rows], count)
    return result


@dataclass(frozen=True)
class _Search:
    """A look-up of the most correlated cells of a grid, or of a sub-grid of it.

    :param corr: ``|corr_i|`` of every axis, a matrix or by lag.
    :param index: flat cell of each row.
    :param rank_of: rank of the observation of each cell, N for gaps; of rows that share a cell, the first. After the
        last cell, there is one more gap, which stands for cells that do not exist.
    :param order: row at each rank.
    :param kept: the levels of the sub-grid on each axis; of an axis by lag, all multiples of one number.
    """

    corr: Sequence[Tensor]
    index: Tensor
    rank_of: Tensor
    order: Tensor
    kept: Sequence[Tensor]

    @classmethod
    def of(cls, corr: Sequence[Tensor], index: Tensor, rank: Tensor | None = None) -> "_Search":
        rank = torch.arange(len(index), device=index.device) if rank is None else rank
        num_cells = math.prod(len(axis) for axis in corr)
        rank_of = torch.full((num_cells + 1,), len(index), dtype=torch.long, device=index.device)
        rank_of = rank_of.scatter_reduce(0, index, rank, "amin")
        kept = [torch.arange(len(axis), device=index.device) for axis in corr]
        return cls(corr, index, rank_of, rank.argsort(), kept)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(axis) for axis in self.corr)

    def on_subgrid(self, kept: Sequence[Tensor]) -> "_Search":
        return _Search(self.corr, self.index, self.rank_of, self.order, kept)

    def nearest_of_all(self, rows: Tensor, count: int) -> Tensor:
        """For each of some rows, given in order, the most correlated rows before it. shape: (q,) -> (q, count)"""
        levels = unravel(self.index[rows], self.shape)
        pairs = math.prod(
            axis_entries(axis, own.unsqueeze(-1), own) for axis, own in zip(self.corr, levels, strict=True)
        )
        place = torch.arange(len(rows), device=rows.device)
        earlier = torch.where(place < place.unsqueeze(-1), pairs, -1.0)
        values, places = earlier.topk(min(count, len(rows)), dim=-1)
        result = torch.full((len(rows), count), -1, dtype=torch.long, device=rows.device)
        result[:, : places.size(-1)] = torch.where(values >= 0, rows[places], -1)
        return result

    def nearest(self, rows: Tensor, below: Tensor, count: int) -> Tensor:
        """The most correlated observed cells of the sub-grid whose rank is below a given one.

        :param rows: whose neighbours are looked for, shape (q,).
        :param below: rank that a neighbour must be below, shape (q,).
        :return: rows, -1 where fewer are found, shape (q, count).
        """
        axes = self._places()
        typical = kron_diagonal([axis.typical for axis in axes])
        best = typical.sort(descending=True, stable=True).indices[: _CANDIDATES_PER_NEIGHBOUR[-1] * count]
        places = unravel(best, [len(axis.typical) for axis in axes])
        result = torch.full((len(rows), count), -1, dtype=torch.long, device=rows.device)
        todo = torch.arange(len(rows), device=rows.device)
        for per_neighbour in _CANDIDATES_PER_NEIGHBOUR:
            width = min(per_neighbour * count, len(best))
            for part in todo.split(max(1, _CHUNK_NUMBERS // width)):
                own = [place[:width] for place in places]
                result[part] = self._look_up(rows[part], below[part], count, axes, own)
            todo = todo[result[todo, -1] < 0]
            if width == len(best) or not len(todo):
                break
        return result

    def _places(self) -> list["_Table | _Steps"]:
        """What is looked up on each axis."""
        most = max(2, int(_MAX_COMBINATIONS ** (1.0 / len(self.shape))))
        places: list[_Table | _Steps] = []
        for axis, (corr, kept) in enumerate(zip(self.corr, self.kept, strict=True)):
            kind = _Steps if corr.dim() == 1 and len(kept) > _MAX_TABULATED else _Table
            places.append(kind.of(corr, kept, most, math.prod(self.shape[axis + 1 :])))
        return places

    def _look_up(
        self, rows: Tensor, below: Tensor, count: int, axes: Sequence["_Table | _Steps"], places: Sequence[Tensor]
    ) -> Tensor:
        """The first `count` candidates that are observed and come before. shape: (q,) -> (q, count)"""
        cells = torch.zeros((), dtype=torch.long, device=rows.device)
        for axis, level, place in zip(axes, unravel(self.index[rows], self.shape), places, strict=True):
            cells = cells + axis.cells(level, place)
        found = look_up(self.rank_of, torch.where(cells < 0, self.rank_of.numel() - 1, cells))  # shape: (q, candidates)
        fits = found < below.unsqueeze(-1)
        number = fits.cumsum(-1)
        # those beyond `count`, and all that do not fit, go to a last column that is dropped
        target = torch.where(fits & (number <= count), number - 1, count)
        ranks = torch.full((len(rows), count + 1), -1, dtype=torch.long, device=rows.device)
        ranks = ranks.scatter_(-1, target, found)[:, :count]
        return torch.where(ranks >= 0, self.order[ranks], -1)


@dataclass(frozen=True)
class _Table:
    """The levels of an axis most correlated with each level.

    :param kept: the levels of the sub-grid, ascending, shape (n,).
    :param added: what the level at a place adds to the number of a cell, shape (n, w).
    :param typical: mean correlation at each place, shape (w,).
    """

    kept: Tensor
    added: Tensor
    typical: Tensor

    @classmethod
    def of(cls, corr: Tensor, kept: Tensor, most: int, stride: int) -> "_Table":
        values, places = axis_entries(corr, kept.unsqueeze(-1), kept).topk(min(most, len(kept)), dim=-1)
        return cls(kept, kept[places] * stride, values.mean(-2))

    def cells(self, level: Tensor, place: Tensor) -> Tensor:
        """shape: (q,) and (candidates,) -> (q, candidates)"""
        rows = torch.searchsorted(self.kept, level).unsqueeze(-1) * self.added.size(-1)
        return look_up(self.added.flatten(), rows + place)


@dataclass(frozen=True)
class _Steps:
    """Steps along a regular axis, from any level to those most correlated with it.

    :param steps: in levels, to both sides, shape (w,).
    :param typical: correlation at each step, shape (w,).
    :param length: number of levels of the axis.
    :param stride: what one level adds to the number of a cell.
    """

    steps: Tensor
    typical: Tensor
    length: int
    stride: int

    @classmethod
    def of(cls, corr: Tensor, kept: Tensor, most: int, stride: int) -> "_Steps":
        # the levels kept are multiples of one number, so their lags are the same multiples. Of equals, the shorter
        values, places = corr[kept].sort(descending=True, stable=True)
        lags = kept[places[: most // 2 + 1]]
        both = torch.stack([lags, -lags], -1).flatten()[1:]  # lag 0 comes first, and once
        return cls(both[:most], values.repeat_interleave(2)[1 : len(both) + 1][:most], len(corr), stride)

    def cells(self, level: Tensor, place: Tensor) -> Tensor:
        """Below -1 beyond the ends, whatever other axes add. shape: (q,) and (candidates,) -> (q, candidates)"""
        reached = level.unsqueeze(-1) + self.steps[place]
        inside = (reached >= 0) & (reached < self.length)
        return torch.where(inside, reached * self.stride, _NO_CELL)
