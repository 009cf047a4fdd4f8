"""The data from which hyperparameters are learned: first every k-th cell along each axis, then all cells.

Any part of the observations has an exact likelihood. If the kernel is smooth from cell to cell, every k-th cell
determines it nearly as well, as long as a few cells remain per eigenfunction.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gpytorch_gaps.distributed.communicator import SINGLE, Communicator, split_evenly
from gpytorch_gaps.grid.cartesian import CartesianGrid
from gpytorch_gaps.linalg.masked_grid import MaskedGrid
from gpytorch_gaps.reconstruction.prior_mean import PriorMean, mean_of_slices
from gpytorch_gaps.reconstruction.sharding import Weights
from gpytorch_gaps.reconstruction.slabs import Slabs, read_slabs

LEARNING_LEVEL = 1e-6  # eigenvalues below this fraction of the noise are dropped
PART_CELLS = 2**21  # number of cells of the first part
_CELLS_PER_FUNCTION = 4  # smallest number along an axis: the first length-scales may be too long by a factor of two
_WORTH_IT = 4  # the first part has at least so many times fewer cells; otherwise all steps use all cells


@dataclass(frozen=True)
class GridData:
    """Values on a grid with gaps that can be read several times."""

    grid: CartesianGrid
    slabs: Slabs
    mean: PriorMean

    def read(self, weights: Weights) -> tuple[MaskedGrid, Tensor, float]:
        """One pass over the values of this process: the mask, ``Phi' W' (y - mean)``, and ``|y - mean|``."""
        self.slabs.rows = weights.own_rows
        return read_slabs(self.slabs, weights, partial(mean_of_slices, self.mean, self.grid))


def strides_for(shape: Sequence[int], ranks: Sequence[int]) -> tuple[int, ...]:
    """The stride along each axis of the cells that the first steps use; ones if they use all cells.

    >>> strides_for((3840, 2160, 121), (44, 43, 19))
    (16, 8, 1)
    >>> strides_for((1000, 1000), (30, 30))
    (1, 1)

    :param ranks: number of eigenfunctions of each axis.
    """
    strides = [1] * len(shape)

    def spare(axis: int) -> float:
        return shape[axis] / (strides[axis] * max(1, ranks[axis]))

    while _cells(shape, strides) > PART_CELLS:
        axis = max(range(len(shape)), key=spare)
        if spare(axis) < 2 * _CELLS_PER_FUNCTION:
            break
        strides[axis] *= 2
    worth_it = math.prod(shape) >= _WORTH_IT * _cells(shape, strides)
    return tuple(strides) if worth_it else (1,) * len(shape)


def _cells(shape: Sequence[int], strides: Sequence[int]) -> int:
    return math.prod(-(-size // stride) for size, stride in zip(shape, strides, strict=True))


def every_kth(data: GridData, strides: Sequence[int], comm: Communicator = SINGLE) -> GridData:
    """A part of the data, in memory, minus their mean. All values are read once."""
    first, *others = strides
    inner = tuple(slice(None, None, stride) for stride in others)
    parts = []
    data.slabs.rows = split_evenly(data.grid.shape[0], comm.size, data.slabs.chunk)[comm.rank]

    def pieces() -> Iterator[None]:
        for start, slab in data.slabs:
            at = slice((-start) % first, None, first)
            mean = mean_of_slices(data.mean, data.grid, start, start + len(slab))
            mean = mean[(at, *inner)] if isinstance(mean, Tensor) else mean
            parts.append(slab[(at, *inner)].to(dtype=torch.float64, device=data.grid.device) - mean)
            yield

    comm.run_lockstep("reading its slices", pieces())
    gathered = comm.gather(torch.cat(parts).cpu().numpy(), "a part of the values")
    values = torch.cat([torch.from_numpy(own) for own in gathered]).to(data.grid.device)
    axes = [axis[::stride] for axis, stride in zip(data.grid.axes, strides, strict=True)]
    return GridData(CartesianGrid(axes), Slabs(values, values.shape), 0.0)
