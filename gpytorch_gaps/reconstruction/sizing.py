"""The memory, FLOPs and bytes sent of a reconstruction on several processes, estimated without data.

>>> print(plan((3840, 2160, 121), (44, 43, 19), 4))
3840 x 2160 x 121 = 1.0e+09 cells on 4 processes: 35948 weights, replicated; each holds 566 MiB, and per iteration does
26.3 GFLOP and sends 140 KiB
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from gpytorch_gaps.distributed.communicator import split_evenly
from gpytorch_gaps.linalg.masked_grid import sweep_flops
from gpytorch_gaps.linalg.products import kron_matmul_flops
from gpytorch_gaps.reconstruction.inputs import Problem
from gpytorch_gaps.reconstruction.learning_data import LEARNING_LEVEL, PART_CELLS
from gpytorch_gaps.reconstruction.sharding import is_sharded
from gpytorch_gaps.utils.progress import format_bytes

_SLAB_NUMBERS = 2**24  # numbers that are read or expanded at once
_BOXES = 14  # boxes of weights in float64: eigenvalues, diagonals, the right-hand side, iterates and temporaries
_LEARNING_BOXES = 10  # further boxes in float64: shares of the prior, probes, and the rest that these estimate
_BYTES_PER_DRAW = 20.0  # bytes per weight: three boxes in float32, one in float64
_HALVES = 4  # number of boxes of sharded weights that are expanded along the first axis


@dataclass(frozen=True)
class Plan:
    """The memory, work and messages of one process of a reconstruction.

    >>> plan((1000, 800), ranks=(40, 30), processes=2).sharded
    False

    :param shape: cells along each axis.
    :param ranks: number of eigenvectors that are kept on each axis.
    :param processes: number of processes.
    :param sharded: whether the weights are divided among the processes. Otherwise every process holds all of them.
    :param memory: bytes held by each process, beyond those of Python and torch.
    :param flops: FLOPs of each process per iteration.
    :param sent: bytes that each process sends per iteration. A ring sends a sum twice and a transpose once.
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    processes: int
    sharded: bool
    memory: float
    flops: float
    sent: float

    @property
    def cells(self) -> int:
        """M, the number of cells."""
        return math.prod(self.shape)

    @property
    def weights(self) -> int:
        """R, the number of weights of all processes."""
        return math.prod(self.ranks)

    def seconds(self, flops_a_second: float, bytes_a_second: float) -> float:
        """Seconds per iteration.

        >>> plan((3840, 2160, 121), (44, 43, 19), 4).seconds(flops_a_second=1e11, bytes_a_second=1e9) < 1
        True

        :param flops_a_second: FLOPs per second of each process.
        :param bytes_a_second: bytes per second of the network between them.
        :return: seconds, if computing and sending do not overlap.
        """
        return self.flops / flops_a_second + (1.0 if self.sharded else 2.0) * self.sent / bytes_a_second

    def __repr__(self) -> str:
        return f"<Plan {self}>"

    def __str__(self) -> str:
        grid = " x ".join(map(str, self.shape))
        return (
            f"{grid} = {self.cells:.1e} cells on {self.processes} processes: {self.weights} weights, "
            f"{'sharded' if self.sharded else 'replicated'}; each holds {format_bytes(self.memory)}, and per "
            f"iteration does\n{self.flops / 1e9:.3g} GFLOP and sends {format_bytes(self.sent)}"
        )


def plan(
    shape: Sequence[int],
    ranks: Sequence[int],
    processes: int,
    value_bytes: int = 4,
    draws: int = 0,
    learn: bool = False,
) -> Plan:
    """The cost of a reconstruction, from the number of eigenvectors that its kernel keeps.

    >>> plan((1000, 800), ranks=(40, 30), processes=2).weights
    1200

    :param shape: cells along each axis.
    :param ranks: number of eigenvectors that are kept on each axis. A kernel that does not truncate keeps `shape`.
    :param processes: number of processes.
    :param value_bytes: bytes per value that is read.
    :param draws: number of posterior draws. Each takes about as many iterations as the mean.
    :param learn: whether hyperparameters are learned, by :func:`fit_reconstruction`. Every process then holds all
        weights.
    :return: the cost of each process.
    :raises ValueError: if a rank exceeds its axis, if there are more processes than slices of the first axis, or if
        there are draws of weights that are divided among processes.
    """
    sizes, kept = tuple(map(int, shape)), tuple(map(int, ranks))
    if len(sizes) != len(kept) or not all(1 <= rank <= size for rank, size in zip(kept, sizes, strict=True)):
        raise ValueError(f"ranks: got {kept}, expected one for each axis of {sizes}, from 1 to its length")
    if processes < 1 or processes > sizes[0]:
        raise ValueError(f"processes: got {processes}, expected 1 to {sizes[0]}, the length of the first axis")
    weights, sharded = math.prod(kept), not learn and is_sharded(sizes, kept, processes)
    rows = max(part.stop - part.start for part in split_evenly(sizes[0], processes))
    own_cells, half = math.prod(sizes[1:]) * rows, rows * weights // kept[0]
    vectors = sum(12.0 * size * rank for size, rank in zip(sizes, kept, strict=True))
    memory = own_cells + vectors + min(_SLAB_NUMBERS, own_cells) * (value_bytes + 16.0)  # own_cells: the mask
    if sharded and draws:
        raise ValueError(f"draws: got {draws} for {weights} weights, divided among {processes} processes; expected 0")
    memory += _BYTES_PER_DRAW * draws * weights
    if learn:
        memory += 8.0 * _LEARNING_BOXES * weights + 16.0 * min(math.prod(sizes), 2 * PART_CELLS)
    if sharded:
        longest = max(kept[1:])
        own = weights // longest * math.ceil(longest / processes)
        memory += 8.0 * (_BOXES * own + _HALVES * half)
        sent = 4.0 * (own // kept[0] * sizes[0] + half) + 3.0 * 8.0
        flops = 4.0 * sizes[0] * own + 2.0 * rows * kron_matmul_flops(list(zip(sizes[1:], kept[1:], strict=True)), 1)
    else:
        memory += 8.0 * _BOXES * weights
        sent = 4.0 * weights + 8.0
        flops = sweep_flops((rows, *sizes[1:]), kept)
    # before the values are read: all kernel matrices, and two copies of the largest one
    matrices = [8.0 * size**2 for size in sizes]
    memory = max(memory, sum(matrices) + 2.0 * max(matrices))
    return Plan(sizes, kept, processes, sharded, memory, flops, sent if processes > 1 else 0.0)


def plan_of(
    axes: Sequence[Any],
    kernels: Sequence[Kernel | Tensor],
    noise: float,
    processes: int,
    tolerance: float = 1e-2,
    draws: int = 0,
    learn: bool = False,
) -> Plan:
    """The cost of a call of :func:`reconstruct`, or of :func:`fit_reconstruction`.

    The kernels are decomposed; no values are needed.

    >>> from gpytorch.kernels import RBFKernel
    >>> x, y = torch.linspace(0, 1, 300), torch.linspace(0, 1, 200)
    >>> plan_of([x, y], [RBFKernel(), RBFKernel()], noise=1e-2, processes=2).cells
    60000

    :param axes: coordinates of each axis.
    :param kernels: one kernel, or its matrix, per axis.
    :param noise: the noise variance.
    :param processes: number of processes.
    :param tolerance: largest error of the mean, in posterior standard deviations.
    :param draws: number of posterior draws.
    :param learn: whether hyperparameters are learned, by :func:`fit_reconstruction`, with these as the present ones.
    :return: the cost of each process.
    :raises ValueError: if an argument is wrong.
    """
    values = SimpleNamespace(shape=tuple(len(axis) for axis in axes), dtype="float32")
    with torch.no_grad():
        basis = Problem(values, axes, kernels, noise, tolerance=tolerance).basis(LEARNING_LEVEL if learn else None)
    return plan(basis.shape, basis.ranks, processes, draws=draws, learn=learn)
