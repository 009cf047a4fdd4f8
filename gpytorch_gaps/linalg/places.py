"""Along one axis of a grid, the levels most correlated with each level, for the search for neighbours.

The levels of a sub-grid that are most correlated with a level are its *places*, the most correlated first. Their form
depends on that of the axis (see :mod:`gpytorch_gaps.linalg.axis_correlations`): a table for a matrix, steps to both
sides for a vector by lag, and lines with steps along them for a matrix by lag.

Levels are in groups whose places have similar correlations. All levels of an axis are one group, except for a matrix by
lag, where each line is a group.

>>> K = torch.exp(-(torch.arange(5.0).unsqueeze(-1) - torch.arange(5.0)).abs())
>>> places = axis_places(K, torch.arange(5), most=3, stride=10)
>>> places.cells(torch.tensor([0, 4]), torch.arange(3))  # the numbers of levels 0, 1, 2 and 4, 3, 2, times the stride
tensor([[ 0, 10, 20],
        [40, 30, 20]])
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gpytorch_gaps.linalg.axis_correlations import axis_entries, num_levels
from gpytorch_gaps.linalg.selection import unravel
from gpytorch_gaps.utils.tensors import look_up

_MAX_TABULATED = 1024  # up to so many levels, an axis by lag has a table too: no place lies beyond an end
_NO_CELL = -(2**50)  # negative in every sum with contributions of other axes
_MOST_LINES = 48  # number of nearby lines that are searched for places of a line
_MOST_STEPS = 48  # number of steps to either side that are searched


class AxisPlaces(Protocol):
    """The places of every level of a sub-grid along one axis.

    `typical` is the mean correlation at each place, for each group of levels. shape: (groups, w)
    """

    @property
    def typical(self) -> Tensor: ...

    def group(self, level: Tensor) -> Tensor:
        """The group of each level. shape: (q,)"""
        ...

    def cells(self, level: Tensor, place: Tensor) -> Tensor:
        """The contribution of the level at a place to the number of a cell; below -1 if there is no level.

        shape: (q,), and (candidates,) or (q, candidates) -> (q, candidates)
        """
        ...


def axis_places(corr: Tensor, kept: Tensor, most: int, stride: int) -> AxisPlaces:
    """The places of every level of a sub-grid.

    :param corr: ``|corr|`` of the axis, shape (m, m), or by lag (m,) or (a, a, q).
    :param kept: the levels of the sub-grid, ascending. For an axis by lag: all multiples of one number, which may
        differ between lines.
    :param most: largest number of places.
    :param stride: contribution of one level to the number of a cell.
    """
    if corr.dim() == 3:
        return _Lines.of(corr, kept, most, stride)
    kind = _Steps if corr.dim() == 1 and len(kept) > _MAX_TABULATED else _Table
    return kind.of(corr, kept, most, stride)


@dataclass(frozen=True)
class _Table:
    """The levels of an axis most correlated with each level.

    :param kept: the levels of the sub-grid, ascending, shape (n,).
    :param added: contribution of the level at a place to the number of a cell, shape (n, w).
    """

    kept: Tensor
    added: Tensor
    typical: Tensor

    @classmethod
    def of(cls, corr: Tensor, kept: Tensor, most: int, stride: int) -> "_Table":
        values, places = axis_entries(corr, kept.unsqueeze(-1), kept).topk(min(most, len(kept)), dim=-1)
        return cls(kept, kept[places] * stride, values.mean(-2, keepdim=True))

    def group(self, level: Tensor) -> Tensor:
        return torch.zeros_like(level)

    def cells(self, level: Tensor, place: Tensor) -> Tensor:
        rows = torch.searchsorted(self.kept, level).unsqueeze(-1) * self.added.size(-1)
        return look_up(self.added.flatten(), rows + place)


@dataclass(frozen=True)
class _Steps:
    """Steps along a regular axis, from any level to the most correlated ones.

    :param steps: steps to both sides, in levels, shape (w,).
    :param length: number of levels of the axis.
    :param stride: contribution of one level to the number of a cell.
    """

    steps: Tensor
    typical: Tensor
    length: int
    stride: int

    @classmethod
    def of(cls, corr: Tensor, kept: Tensor, most: int, stride: int) -> "_Steps":
        # the levels are multiples of one number, and so are their lags; of equal correlations, take the shorter lag
        values, places = corr[kept].sort(descending=True, stable=True)
        lags = kept[places[: most // 2 + 1]]
        both = torch.stack([lags, -lags], -1).flatten()[1:]  # lag 0 comes first, and once
        typical = values.repeat_interleave(2)[1 : len(both) + 1][:most]
        return cls(both[:most], typical.unsqueeze(0), len(corr), stride)

    def group(self, level: Tensor) -> Tensor:
        return torch.zeros_like(level)

    def cells(self, level: Tensor, place: Tensor) -> Tensor:
        reached = level.unsqueeze(-1) + self.steps[place]
        inside = (reached >= 0) & (reached < self.length)
        return torch.where(inside, reached * self.stride, _NO_CELL)


@dataclass(frozen=True)
class _Lines:
    """Lines most correlated with each line, and steps along them. Circles of latitude are an example.

    A level is a line and a position on it. On line j of the sub-grid, every ``spacing_j``-th position is kept. A step
    starts at the kept position closest to that of the level, and may go around if lines are closed.

    :param line: the line of a place, -1 if there is no such place, shape (a, w).
    :param step: step to a place, in spacings of that line, shape (a, w).
    :param spacing: spacing of the positions kept on each line, shape (a,).
    :param length: positions on a line.
    :param closed: whether lines are circles.
    """

    line: Tensor
    step: Tensor
    typical: Tensor
    spacing: Tensor
    length: int
    closed: bool
    stride: int

    @classmethod
    def of(cls, corr: Tensor, kept: Tensor, most: int, stride: int) -> "_Lines":
        num_lines, length = corr.shape[1:]
        is_kept = torch.zeros(num_levels(corr), dtype=torch.bool, device=corr.device).index_fill_(0, kept, True)
        is_kept = is_kept.reshape(num_lines, length)
        later = is_kept[:, 1:]
        spacing = torch.where(later.any(-1), later.to(torch.uint8).argmax(-1) + 1, length)
        closed = length > 2 and torch.allclose(corr[..., 1:], corr[..., 1:].flip(-1))
        lines = is_kept[:, 0].nonzero().squeeze(-1)  # all lines with levels of the sub-grid
        most_steps = min(_MOST_STEPS, (length - 1) // int(spacing[lines].min()))
        step = torch.arange(-most_steps, most_steps + 1, device=corr.device)
        near = lines[corr[lines.unsqueeze(-1), lines, 0].topk(min(_MOST_LINES, len(lines))).indices].unsqueeze(-1)
        around = -(-length // spacing[near])  # positions kept on a line
        inside = (2 * step > -around) & (2 * step <= around) if closed else step.abs() < around
        lag = (step.abs() * spacing[near]).clamp_max(length - 1)
        values = torch.where(inside, corr[lines[:, None, None], near, lag], -1.0).flatten(1)
        values, places = values.topk(min(most, values.size(-1)), dim=-1)
        typical = corr.new_zeros(num_lines, values.size(-1)).index_copy(0, lines, values)
        line, by = (torch.full_like(typical, -1, dtype=torch.long) for _ in range(2))
        line[lines] = torch.where(values < 0, -1, near.squeeze(-1).gather(-1, places // len(step)))
        by[lines] = step[places % len(step)]
        return cls(line, by, typical, spacing, length, closed, stride)

    def group(self, level: Tensor) -> Tensor:
        return level // self.length

    def cells(self, level: Tensor, place: Tensor) -> Tensor:
        own, position = unravel(level.unsqueeze(-1), (len(self.line), self.length))
        where = own * self.line.size(-1) + place
        line = look_up(self.line.flatten(), where)
        spacing = look_up(self.spacing, line.clamp_min(0))
        reached = (position + spacing // 2) // spacing + look_up(self.step.flatten(), where)
        if self.closed:
            reached = reached % (-(-self.length // spacing))
        reached = reached * spacing
        inside = (reached >= 0) & (reached < self.length) & (line >= 0)
        return torch.where(inside, (line * self.length + reached) * self.stride, _NO_CELL)
