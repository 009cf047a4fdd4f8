"""For cells of a grid, the observed cells most correlated with them, under a Kronecker product.

``corr(x, x') = prod_i corr_i(x_i, x'_i)``. On every axis, the levels are sorted by their correlation with each level.
Combinations of the first places in these orders are then looked up, the most correlated first. Only correlations are
used, so levels may be labels.

An axis is a matrix, a vector by lag, or a matrix by lag: see :mod:`gpytorch_gaps.linalg.axis_correlations`.

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

from gpytorch_gaps.linalg.axis_correlations import axis_entries, correlations, num_levels
from gpytorch_gaps.linalg.places import AxisPlaces, axis_places
from gpytorch_gaps.linalg.products import kron_diagonal
from gpytorch_gaps.linalg.selection import ravel, unravel
from gpytorch_gaps.utils.tensors import look_up

_CANDIDATES_PER_NEIGHBOUR = (4, 16, 64)  # cells that are looked up for each neighbour wanted, round by round
_MAX_COMBINATIONS = 2**16  # combinations of places, over all axes, that are ranked
_CHUNK_NUMBERS = 2**20  # numbers in memory at a time: 8 MiB of int64, about what a cache holds
_COARSER = 4  # ratio of the spacings of one sub-grid and the next finer one
_COMPARED_WITH_ALL = 512  # so many first rows of an ordering are compared with every earlier row


def correlated_rows(factors: Sequence[Tensor], index: Tensor, cells: Tensor, count: int) -> Tensor:
    """For each of some cells, which may be gaps, the rows of up to `count` observations, the most correlated first.

    In the middle of large gaps, a search may find too few observations. Then coarser and coarser sub-grids are
    searched, which reach farther.

    :param factors: K_i, or their correlations, shape (m_i, m_i), or by lag (m_i,) or (a_i, a_i, q_i), each.
    :param index: flat cell of each observation, last axis fastest, shape (N,).
    :param cells: flat cells, which may be observed: their own row then comes first. shape (Q,).
    :param count: number of neighbours.
    :return: rows, -1 where fewer are found, shape (Q, count).
    """
    corr = correlations(factors)
    shape = [num_levels(own) for own in corr]
    result, step = _rows_around(corr, index, cells, count, 1), _COARSER
    while step < max(max(own.shape) for own in corr):
        missing = (result[:, -1] < 0).nonzero().squeeze(-1)
        if not len(missing):
            break
        nearest = [_nearest_of(own, step) for own in corr]
        moved = [own[level] for own, level in zip(nearest, unravel(cells[missing], shape), strict=True)]
        some, inverse = ravel(moved, shape).unique(return_inverse=True)
        found = _rows_around(corr, index, some, count, step)[inverse]
        more = (found >= 0).sum(-1) > (result[missing] >= 0).sum(-1)
        result[missing[more]] = found[more]
        step *= _COARSER
    return result


def _coarser(corr: Tensor, step: int) -> Tensor:
    """The levels of a sub-grid: every `step`-th one; with lines, every `step`-th line too. shape: (n,)"""
    if corr.dim() < 3:
        return torch.arange(0, len(corr), step, device=corr.device)
    lines, positions = (torch.arange(0, size, step, device=corr.device) for size in corr.shape[1:])
    return (lines.unsqueeze(-1) * corr.size(-1) + positions).flatten()


def _nearest_of(corr: Tensor, step: int) -> Tensor:
    """For every level of an axis, the most correlated level of a sub-grid. shape: (m,)"""
    if corr.dim() == 3:
        lines, positions = _nearest_of(corr[..., 0], step), _nearest_of(corr[0, 0], step)
        return (lines.unsqueeze(-1) * corr.size(-1) + positions).flatten()
    kept = _coarser(corr, step)
    if corr.dim() == 2:
        return kept[corr[:, kept].argmax(-1)]
    level = torch.arange(len(corr), device=corr.device)
    return kept[((level + step // 2) // step).clamp_max(len(kept) - 1)]


def _rows_around(corr: Sequence[Tensor], index: Tensor, cells: Tensor, count: int, step: int) -> Tensor:
    """The rows nearest to some cells, on the sub-grid of every `step`-th level of each axis. shape: (Q, count)"""
    together = torch.cat([index, cells])  # cells are rows after all observations
    search = _Search.of(corr, together).on_subgrid([_coarser(own, step) for own in corr])
    rows = torch.arange(len(index), len(together), device=index.device)
    return search.nearest(rows, torch.full_like(rows, len(index)), count)


def earlier_rows(
    corr: Sequence[Tensor], index: Tensor, generation: Sequence[Tensor], rank: Tensor, count: int
) -> Tensor:
    """For each observation, the rows of up to `count` observations that come earlier in an ordering.

    :param corr: ``|corr_i|`` of every axis, shape (m_i, m_i), or by lag (m_i,) or (a_i, a_i, q_i), each.
    :param generation: generation of every level, shape (m_i,) each: see :mod:`gpytorch_gaps.linalg.ordering`. The
        neighbours of an observation are searched on the sub-grid of its own generation and earlier ones.
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
    """A search for the most correlated cells of a grid, or of a sub-grid.

    :param corr: ``|corr_i|`` of every axis.
    :param index: flat cell of each row.
    :param rank_of: rank of the observation of each cell, N for gaps. If several rows share a cell, the first. After the
        last cell, there is one more gap, for cells that do not exist.
    :param order: row at each rank.
    :param kept: the levels of the sub-grid on each axis, in the form for :func:`axis_places`.
    """

    corr: Sequence[Tensor]
    index: Tensor
    rank_of: Tensor
    order: Tensor
    kept: Sequence[Tensor]

    @classmethod
    def of(cls, corr: Sequence[Tensor], index: Tensor, rank: Tensor | None = None) -> "_Search":
        rank = torch.arange(len(index), device=index.device) if rank is None else rank
        num_cells = math.prod(map(num_levels, corr))
        rank_of = torch.full((num_cells + 1,), len(index), dtype=torch.long, device=index.device)
        rank_of = rank_of.scatter_reduce(0, index, rank, "amin")
        kept = [torch.arange(num_levels(axis), device=index.device) for axis in corr]
        return cls(corr, index, rank_of, rank.argsort(), kept)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(num_levels, self.corr))

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
        """The most correlated observed cells of the sub-grid with a rank below a given one.

        :param rows: rows whose neighbours are wanted, shape (q,).
        :param below: upper limit of the rank of a neighbour, shape (q,).
        :return: rows, -1 where fewer are found, shape (q, count).
        """
        axes = self._places()
        typical = kron_diagonal([axis.typical for axis in axes])  # shape: (groups, combinations)
        best = typical.sort(dim=-1, descending=True, stable=True).indices[:, : _CANDIDATES_PER_NEIGHBOUR[-1] * count]
        places = unravel(best, [axis.typical.size(-1) for axis in axes])
        result = torch.full((len(rows), count), -1, dtype=torch.long, device=rows.device)
        todo = torch.arange(len(rows), device=rows.device)
        for per_neighbour in _CANDIDATES_PER_NEIGHBOUR:
            width = min(per_neighbour * count, best.size(-1))
            for part in todo.split(max(1, _CHUNK_NUMBERS // width)):
                own = [place[:, :width] for place in places]
                result[part] = self._look_up(rows[part], below[part], count, axes, own)
            todo = todo[result[todo, -1] < 0]
            if width == best.size(-1) or not len(todo):
                break
        return result

    def _places(self) -> list[AxisPlaces]:
        """The places for the search on each axis."""
        most = max(2, int(_MAX_COMBINATIONS ** (1.0 / len(self.shape))))
        strides = [math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]
        sides = zip(self.corr, self.kept, strides, strict=True)
        return [axis_places(corr, kept, most, stride) for corr, kept, stride in sides]

    def _look_up(
        self, rows: Tensor, below: Tensor, count: int, axes: Sequence[AxisPlaces], places: Sequence[Tensor]
    ) -> Tensor:
        """The first `count` candidates that are observed and earlier in the ordering.

        :param places: place of each candidate on every axis, for every group of levels. shape (groups, candidates) each
        :return: shape (q,) -> (q, count)
        """
        levels = unravel(self.index[rows], self.shape)
        grouped = [axis.group(level) for axis, level in zip(axes, levels, strict=True) if len(axis.typical) > 1]
        group = grouped[0] if grouped else 0
        cells = torch.zeros((), dtype=torch.long, device=rows.device)
        for axis, level, place in zip(axes, levels, places, strict=True):
            cells = cells + axis.cells(level, place[group])
        found = look_up(self.rank_of, torch.where(cells < 0, self.rank_of.numel() - 1, cells))  # shape: (q, candidates)
        fits = found < below.unsqueeze(-1)
        number = fits.cumsum(-1)
        # candidates after the first `count`, and unsuitable ones, go to a last column, which is dropped
        target = torch.where(fits & (number <= count), number - 1, count)
        ranks = torch.full((len(rows), count + 1), -1, dtype=torch.long, device=rows.device)
        ranks = ranks.scatter_(-1, target, found)[:, :count]
        return torch.where(ranks >= 0, self.order[ranks], -1)
