"""The observed cells of a grid, one byte each, swept in cache-sized tiles: expand, mask, project, add up.

With bases ``Phi = (x) Phi_i`` of shape ``m_i x r_i`` a sweep computes ``Phi' W'W Phi w`` while the grid passes through
the cache: nothing of the size of the grid is held but its mask.

One axis is *carried*, the first or the last: it is expanded and projected tile by tile, in ``4 M r`` FLOPs. The other
axes are expanded before and projected after, a block of rows of the leading one of them at a time, which costs little
where the carried axis is long.

>>> grid = MaskedGrid(torch.tensor([[True, False], [True, True]]))
>>> eye = torch.eye(2, dtype=torch.float64)
>>> grid.gram([eye, eye], torch.ones(2, 2, dtype=torch.float64)).tolist()
[[1.0, 0.0], [1.0, 1.0]]
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gpytorch_gaps.kronecker.products import kron_matmul, kron_matmul_flops

_TILE = 2**18  # numbers of a tile on a host, to stay in cache: see `benchmarks.scaling --tiles`
_TILE_ON_DEVICE = 2**25  # a device has no such cache, and wants more work at a time
_ROWS = 256  # of a tile, so that both of its matrix products run well
_BLOCK = 2**22  # numbers that the other axes are expanded to at a time


class MaskedGrid:
    """Which cells of a grid are observed, and what follows from it for a product basis.

    :param observed: True, or one, where a cell is observed; boolean or uint8, of the grid's shape. Kept, not copied.
    :param tile: numbers in a tile; None for what suits the device.
    """

    def __init__(self, observed: Tensor, tile: int | None = None) -> None:
        if observed.dtype not in (torch.bool, torch.uint8):
            raise ValueError(f"observed: got {observed.dtype}, expected torch.bool or torch.uint8")
        self.shape = tuple(observed.shape)
        # multiplying by bytes is far faster than by booleans, and than a masked fill, which branches
        self._bytes = observed.contiguous().view(torch.uint8)
        self._tile = tile or (_TILE if observed.device.type == "cpu" else _TILE_ON_DEVICE)

    @property
    def num_cells(self) -> int:
        return math.prod(self.shape)

    @property
    def device(self) -> torch.device:
        return self._bytes.device

    @property
    def observed(self) -> Tensor:
        return self._bytes.view(torch.bool)

    def count(self) -> int:
        """N, the number of observed cells."""
        return sum(int(part.count_nonzero()) for part in self._bytes.view(-1).split(2**26))

    def gram(self, bases: Sequence[Tensor], weights: Tensor) -> Tensor:
        """``Phi' W'W Phi w``, in the precision of the bases. shape: (r_1, .., r_d) -> (r_1, .., r_d)"""
        return self._sweep(bases, weights.to(bases[0].dtype), True)

    def squared_norm(self, bases: Sequence[Tensor], weights: Tensor) -> float:
        """``|W Phi w|^2``."""
        return float(self._sweep(bases, weights.to(bases[0].dtype), False))

    def project(self, bases: Sequence[Tensor]) -> Tensor:
        """``Phi' W' 1``: the mask itself. shape: (r_1, .., r_d)"""
        return self._sweep(bases, None, True)

    def _sweep(self, bases: Sequence[Tensor], weights: Tensor | None, project: bool) -> Tensor:
        if len(self.shape) == 1:  # a second axis to carry the first along
            bases, weights = [bases[0].new_ones(1, 1), *bases], None if weights is None else weights.unsqueeze(0)
        sizes = [basis.size(-2) for basis in bases]
        ranks = [basis.size(-1) for basis in bases]
        first, last = (_sweep_flops(sizes, ranks, carry_first) for carry_first in (True, False))
        sums = (self._carry_first if first <= last else self._carry_last)(bases, weights, project)
        return sums.view(ranks[1:] if len(self.shape) == 1 else ranks) if project else sums

    def _carry_last(self, bases: Sequence[Tensor], weights: Tensor | None, project: bool) -> Tensor:
        lead, *inner, last = bases
        middle, rank = math.prod(basis.size(-2) for basis in inner), last.size(-1)
        mask = self._bytes.view(-1, last.size(-2))
        expanded = None
        if weights is not None:
            inside = weights.reshape(lead.size(-1), -1, rank)
            expanded = (kron_matmul(inner, inside) if inner else inside).reshape(lead.size(-1), -1)
        sums = lead.new_zeros(lead.size(-1), middle * rank) if project else lead.new_zeros((), dtype=torch.float64)
        for rows in _blocks(lead.size(-2), _BLOCK // (middle * max(rank, 1))):
            left = None if expanded is None else (lead[rows] @ expanded).view(-1, rank)
            part = mask[rows.start * middle : rows.stop * middle]
            found = self._tiles(part, left, last, by_columns=True, project=project)
            sums = sums.addmm_(lead[rows].mT, found.view(-1, middle * rank)) if project else sums + found
        if not project:
            return sums
        inside = sums.view(lead.size(-1), middle, rank)
        return kron_matmul([basis.mT for basis in inner], inside) if inner else inside

    def _carry_first(self, bases: Sequence[Tensor], weights: Tensor | None, project: bool) -> Tensor:
        first, lead, *inner = bases
        within, rank = math.prod(basis.size(-2) for basis in inner), first.size(-1)
        mask = self._bytes.view(first.size(-2), -1)
        expanded = None
        if weights is not None:
            inside = weights.reshape(rank, lead.size(-1), -1).transpose(0, 1)  # the leading axis first
            expanded = inside.reshape(lead.size(-1) * rank, -1, 1)
            expanded = (kron_matmul(inner, expanded) if inner else expanded).reshape(lead.size(-1), -1)
        sums = lead.new_zeros(lead.size(-1), rank * within) if project else lead.new_zeros((), dtype=torch.float64)
        for rows in _blocks(lead.size(-2), _BLOCK // (within * max(rank, 1))):
            right = None
            if expanded is not None:
                right = (lead[rows] @ expanded).view(-1, rank, within).transpose(0, 1).reshape(rank, -1)
            part = mask[:, rows.start * within : rows.stop * within]
            found = self._tiles(part, first, right, by_columns=False, project=project)
            if project:
                found = found.view(rank, -1, within).transpose(0, 1).reshape(-1, rank * within)
            sums = sums.addmm_(lead[rows].mT, found) if project else sums + found
        if not project:
            return sums
        inside = sums.view(-1, within, 1)
        inside = kron_matmul([basis.mT for basis in inner], inside) if inner else inside
        return inside.reshape(lead.size(-1), rank, -1).transpose(0, 1).contiguous()

    def _tiles(
        self, mask: Tensor, left: Tensor | None, right: Tensor | None, by_columns: bool, project: bool
    ) -> Tensor:
        """``X = mask * (left right')`` a tile at a time: ``X right`` if `by_columns`, else ``left' X``, or ``|X|^2``.

        The factor that is not projected onto may be None: then X is the mask.
        """
        basis = right if by_columns else left
        assert basis is not None
        size = (len(mask), basis.size(-1)) if by_columns else (basis.size(-1), mask.size(-1))
        sums = basis.new_zeros(size) if project else basis.new_zeros((), dtype=torch.float64)
        height = min(len(mask), _ROWS)
        width = min(mask.size(-1), max(1, self._tile // height))
        tile, factor = basis.new_empty(2, height * width)
        for columns in _blocks(mask.size(-1), width):
            across, found = None, sums
            if right is not None:
                across = right[columns].mT if by_columns else right[:, columns].contiguous()
            if project and not by_columns:
                found = torch.zeros_like(sums[:, columns], memory_format=torch.contiguous_format)
            for rows in _blocks(len(mask), height):
                cells = mask[rows, columns]
                x = tile[: cells.numel()].view(cells.shape)
                if left is None or across is None:
                    x.copy_(cells)
                else:
                    torch.mm(left[rows], across, out=x)
                    x.mul_(factor[: cells.numel()].view(cells.shape).copy_(cells))
                if not project:
                    sums = sums + x.square().sum(dtype=torch.float64)
                elif by_columns:
                    sums[rows].addmm_(x, basis[columns])
                else:
                    found.addmm_(basis[rows].mT, x)
            if project and not by_columns:
                sums[:, columns] = found
        return sums


def sweep_flops(shape: Sequence[int], ranks: Sequence[int]) -> float:
    """FLOPs of one Gram product: expanding and projecting, with the better axis carried."""
    if len(shape) == 1:
        shape, ranks = [1, *shape], [1, *ranks]
    return 2.0 * min(_sweep_flops(shape, ranks, True), _sweep_flops(shape, ranks, False))


def project_flops(shape: Sequence[int], ranks: Sequence[int]) -> float:
    """FLOPs of :meth:`MaskedGrid.project`."""
    return 0.5 * sweep_flops(shape, ranks)


def _sweep_flops(shape: Sequence[int], ranks: Sequence[int], carry_first: bool) -> float:
    """Of one way: the inner axes, then the leading one of the others, then the one that is carried."""
    carried, lead = (0, 1) if carry_first else (len(shape) - 1, 0)
    inner = [i for i in range(len(shape)) if i not in (carried, lead)]
    within = math.prod(shape[i] for i in inner)
    inside = kron_matmul_flops([(shape[i], ranks[i]) for i in inner], ranks[carried] * ranks[lead])
    along = 2.0 * ranks[carried] * ranks[lead] * shape[lead] * within
    return inside + along + 2.0 * math.prod(shape) * ranks[carried]


def _blocks(size: int, step: int) -> Iterator[slice]:
    step = max(1, step)
    return (slice(start, min(start + step, size)) for start in range(0, size, step))
