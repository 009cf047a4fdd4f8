"""The observed cells of a grid, one byte each, and products that sweep the grid in tiles.

With bases ``Phi = (x) Phi_i`` of shape ``m_i x r_i``, a sweep computes ``Phi' W'W Phi w``. It expands one tile at a
time, masks it, projects it, and adds the result. A tile fits in cache. Only the mask has the size of the grid.

One axis is *carried*, the first or the last: it is expanded and projected tile by tile, in ``4 M r`` FLOPs. The other
axes are expanded before and projected after, for one block of rows of the first of them at a time. This costs little if
the carried axis is long.

>>> grid = MaskedGrid(torch.tensor([[True, False], [True, True]]))
>>> eye = torch.eye(2, dtype=torch.float64)
>>> grid.gram([eye, eye], torch.ones(2, 2, dtype=torch.float64)).tolist()
[[1.0, 0.0], [1.0, 1.0]]
"""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from gpytorch_gaps.linalg.products import kron_matmul, kron_matmul_flops
from gpytorch_gaps.utils.threads import threads_for

_TILE_BYTES = 2**21  # on a host, to stay in cache; half or twice that is as fast: see `benchmarks.scaling --tiles`
_TILE_BYTES_ON_DEVICE = 2**28  # a device has no such cache, and needs more work at a time
_TILE_ROWS = 256  # rows or columns of a tile, so that both of its matrix products are efficient
_MIN_CELLS_FOR_THREADS = 2**21
_BLOCK_NUMBERS = 2**24  # numbers that the other axes are expanded to at a time


class MaskedGrid:
    """The observed cells of a grid, and products of their mask with a product basis.

    :param observed: True, or 1, where a cell is observed; boolean or uint8, of the shape of the grid. It is not copied.
    :param tile: numbers in a tile. Default: a suitable number for the device.
    """

    def __init__(self, observed: Tensor, tile: int | None = None) -> None:
        if observed.dtype not in (torch.bool, torch.uint8):
            raise ValueError(f"observed: got {observed.dtype}, expected torch.bool or torch.uint8")
        self.shape = tuple(observed.shape)
        self._bytes = observed.contiguous().view(torch.uint8)
        self._tile = tile

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
        return self._sweep(bases, weights.to(bases[0].dtype))

    def project(self, bases: Sequence[Tensor]) -> Tensor:
        """``Phi' W' 1``, the product with the mask itself. shape: (r_1, .., r_d)"""
        return self._sweep(bases, None)

    def _sweep(self, bases: Sequence[Tensor], weights: Tensor | None) -> Tensor:
        """:meth:`gram`, or :meth:`project` without weights. It carries the axis that makes the sweep cheaper."""
        if len(self.shape) == 1:  # add a second axis, which is expanded first
            bases, weights = [bases[0].new_ones(1, 1), *bases], None if weights is None else weights.unsqueeze(0)
        sizes = [basis.size(-2) for basis in bases]
        ranks = [basis.size(-1) for basis in bases]
        first, last = (_carry_flops(sizes, ranks, carry_first) for carry_first in (True, False))
        with threads_for(min(first, last)):
            sums = self._carry(bases, weights, first <= last)
        return sums.view(ranks[1:] if len(self.shape) == 1 else ranks)

    def _carry(self, bases: Sequence[Tensor], weights: Tensor | None, first: bool) -> Tensor:
        """The sweep that carries the first or the last axis.

        The first of the other axes is expanded and projected block by block, the inner ones at once.
        """
        carried, lead, *inner = bases if first else [bases[-1], *bases[:-1]]
        within, rank, lead_rank = math.prod(basis.size(-2) for basis in inner), carried.size(-1), lead.size(-1)
        mask = self._bytes.view(len(carried), -1).mT if first else self._bytes.view(-1, len(carried))
        expanded = None
        if weights is not None:  # shape: (lead_rank, inner ranks, rank) -> (lead_rank, within * rank)
            inside = weights.reshape(rank, lead_rank, -1).permute(1, 2, 0) if first else weights
            inside = inside.reshape(lead_rank, -1, rank)
            expanded = (kron_matmul(inner, inside) if inner else inside).reshape(lead_rank, -1)
        sums = lead.new_zeros(lead_rank, within * rank)
        for rows in blocks(len(lead), _BLOCK_NUMBERS // (within * max(rank, 1))):
            along = None if expanded is None else (lead[rows] @ expanded).view(-1, rank)
            found = self._tiles(mask[rows.start * within : rows.stop * within], carried, along)
            sums.addmm_(lead[rows].mT, found.view(-1, within * rank))
        inside = sums.view(lead_rank, within, rank)
        inside = kron_matmul([basis.mT for basis in inner], inside) if inner else inside
        return inside.permute(2, 0, 1).contiguous() if first else inside

    def _tile_shape(self, basis: Tensor, by_rows: bool) -> tuple[int, int]:
        """Height and width of a tile. With a narrow basis, tiles must fit in cache.

        With a wide basis they may be larger, because the matrix product works on small blocks anyway.
        """
        rank, available = basis.size(-1), _TILE_BYTES if basis.device.type == "cpu" else _TILE_BYTES_ON_DEVICE
        size = max(self._tile or available // basis.element_size(), 4 * rank * _TILE_ROWS)
        short = max(_TILE_ROWS, rank // 2)
        long = max(1, size // short)
        return (short, long) if by_rows else (long, short)

    def _tiles(self, mask: Tensor, basis: Tensor, weights: Tensor | None) -> Tensor:
        """``X basis`` for ``X = mask * (weights basis')``, computed tile by tile. Without weights, X is the mask.

        Strips of X are independent, and each runs in one thread. If threads shared the product of a single tile, they
        would often wait for each other, and for other programs.

        :param mask: shape (n, m), or the transpose of a contiguous (m, n).
        :param basis: basis of the carried axis, shape (m, r).
        :param weights: shape (n, r).
        """
        by_rows = mask.stride(-1) == 1  # otherwise tiles are held as their transposes
        sums = basis.new_empty(len(mask), basis.size(-1))
        height, width = self._tile_shape(basis, by_rows)

        def strip(rows: slice) -> None:
            count, rank = rows.stop - rows.start, basis.size(-1)
            own = basis.new_zeros((count, rank) if by_rows else (rank, count))  # wide products run best
            tile, factor = basis.new_empty(2, count * min(width, mask.size(-1)))
            for columns in blocks(mask.size(-1), width):
                cells = mask[rows, columns] if by_rows else mask[rows, columns].mT
                x = tile[: cells.numel()].view(cells.shape)
                if weights is None:
                    x.copy_(cells)
                else:
                    left, right = (weights[rows], basis[columns]) if by_rows else (basis[columns], weights[rows])
                    torch.mm(left, right.mT, out=x)
                    # copied bytes multiply far faster than booleans, and than a masked fill, which branches
                    x.mul_(factor[: cells.numel()].view(cells.shape).copy_(cells))
                if by_rows:
                    own.addmm_(x, basis[columns])
                else:
                    own.addmm_(basis[columns].mT, x)
            sums[rows] = own if by_rows else own.mT

        run_in_threads(strip, list(_even_blocks(len(mask), height, torch.get_num_threads())), mask)
        return sums


def run_in_threads(work: Callable[[slice], None], parts: Sequence[slice], size: Tensor) -> None:
    """Call ``work(part)`` for every part, in as many threads as torch uses; on a device, one after the other."""
    threads = torch.get_num_threads()
    if size.device.type != "cpu" or threads == 1 or size.numel() < _MIN_CELLS_FOR_THREADS or len(parts) == 1:
        for part in parts:
            work(part)
        return
    inference = torch.is_inference_mode_enabled()  # threads do not inherit it

    def in_thread(part: slice) -> None:
        torch.set_num_threads(1)
        with torch.inference_mode(inference), torch.no_grad():
            work(part)

    try:
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(in_thread, parts):
                pass
    finally:
        torch.set_num_threads(threads)  # new threads inherit what the last one has set


def sweep_flops(shape: Sequence[int], ranks: Sequence[int]) -> float:
    """FLOPs of :meth:`MaskedGrid.gram`: expanding and projecting, with the better axis carried."""
    if len(shape) == 1:
        shape, ranks = [1, *shape], [1, *ranks]
    return 2.0 * min(_carry_flops(shape, ranks, True), _carry_flops(shape, ranks, False))


def project_flops(shape: Sequence[int], ranks: Sequence[int]) -> float:
    """FLOPs of :meth:`MaskedGrid.project`."""
    return 0.5 * sweep_flops(shape, ranks)


def _carry_flops(shape: Sequence[int], ranks: Sequence[int], carry_first: bool) -> float:
    """FLOPs of expanding the inner axes, then the leading one of the others, then the carried one."""
    carried, lead = (0, 1) if carry_first else (len(shape) - 1, 0)
    inner = [i for i in range(len(shape)) if i not in (carried, lead)]
    within = math.prod(shape[i] for i in inner)
    inside = kron_matmul_flops([(shape[i], ranks[i]) for i in inner], ranks[carried] * ranks[lead])
    along = 2.0 * ranks[carried] * ranks[lead] * shape[lead] * within
    return inside + along + 2.0 * math.prod(shape) * ranks[carried]


def _even_blocks(size: int, step: int, threads: int) -> Iterator[slice]:
    """Blocks of at most `step`, the same number for each thread."""
    count = math.ceil(math.ceil(size / max(1, step)) / threads) * threads
    return blocks(size, math.ceil(size / max(1, count)))


def blocks(size: int, step: int) -> Iterator[slice]:
    """Slices from 0 to `size`, of at most `step` each."""
    step = max(1, step)
    return (slice(start, min(start + step, size)) for start in range(0, size, step))
