"""What a reconstruction would take on so many processes, before there is any data: memory, FLOPs, bytes sent.

>>> plan((3840, 2160, 121), (44, 43, 19), 4)
<Plan 3840 x 2160 x 121 = 1.0e+09 cells on 4 processes: 35948 weights, whole; each holds 566 MiB, and for an iteration
does 26.3 GFLOP and sends 140 KiB>
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from gpytorch_gaps.distributed.communicator import shares
from gpytorch_gaps.linalg.masked_grid import sweep_flops
from gpytorch_gaps.linalg.products import kron_matmul_flops
from gpytorch_gaps.reconstruction.inputs import Problem
from gpytorch_gaps.reconstruction.weights import are_in_parts
from gpytorch_gaps.utils.progress import format_bytes

_SLAB_NUMBERS = 2**24  # read, or expanded to, at a time
_BOXES = 14  # of weights in float64: eigenvalues, diagonals, the right-hand side, iterates, and what is made of them
_HALVES = 4  # of weights expanded along the first axis, where they are in parts


@dataclass(frozen=True)
class Plan:
    """Of one process, unless it says otherwise. Memory is beyond that of Python and torch themselves."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    processes: int
    in_parts: bool
    memory: float
    flops: float
    """Of an iteration."""
    sent: float
    """Bytes handed to the others for an iteration. A ring sends twice as many for a sum, once for a transpose."""

    @property
    def cells(self) -> int:
        return math.prod(self.shape)

    @property
    def weights(self) -> int:
        """R, of all processes: the box of eigenvectors that are kept on each axis."""
        return math.prod(self.ranks)

    def seconds(self, flops_a_second: float, bytes_a_second: float) -> float:
        """An iteration, on such machines with such a network."""
        return self.flops / flops_a_second + (1.0 if self.in_parts else 2.0) * self.sent / bytes_a_second

    def __repr__(self) -> str:
        return f"<Plan {self}>"

    def __str__(self) -> str:
        grid = " x ".join(map(str, self.shape))
        return (
            f"{grid} = {self.cells:.1e} cells on {self.processes} processes: {self.weights} weights, "
            f"{'in parts' if self.in_parts else 'whole'}; each holds {format_bytes(self.memory)}, and for an "
            f"iteration\ndoes {self.flops / 1e9:.3g} GFLOP and sends {format_bytes(self.sent)}"
        )


def plan(shape: Sequence[int], ranks: Sequence[int], processes: int, value_bytes: int = 4) -> Plan:
    """For a grid of this shape, of which so many eigenvectors are kept on each axis; all of them: the shape itself.

    :param value_bytes: of a number that is read.
    """
    sizes, kept = tuple(map(int, shape)), tuple(map(int, ranks))
    if len(sizes) != len(kept) or not all(1 <= rank <= size for rank, size in zip(kept, sizes, strict=True)):
        raise ValueError(f"ranks: got {kept}, expected one for each axis of {sizes}, from 1 to its length")
    if processes < 1 or processes > sizes[0]:
        raise ValueError(f"processes: got {processes}, expected 1 to {sizes[0]}, the length of the first axis")
    cells, weights = math.prod(sizes), math.prod(kept)
    in_parts = are_in_parts(sizes, kept, processes)
    rows = max(part.stop - part.start for part in shares(sizes[0], processes))
    own_cells = cells // sizes[0] * rows
    half = rows * weights // kept[0]
    # kernel matrices, and two copies of the largest, are gone when the values are read
    matrices = [8.0 * size**2 for size in sizes]
    setting_up = sum(matrices) + 2.0 * max(matrices)
    memory = float(own_cells)  # the mask
    memory += sum(12.0 * size * rank for size, rank in zip(sizes, kept, strict=True))
    memory += min(_SLAB_NUMBERS, own_cells) * (value_bytes + 16.0)
    if in_parts:
        longest = max(kept[1:])
        own = weights // longest * math.ceil(longest / processes)
        memory += 8.0 * (_BOXES * own + _HALVES * half)
        sent = 4.0 * (own // kept[0] * sizes[0] + half) + 3.0 * 8.0
        flops = 4.0 * sizes[0] * own + 2.0 * rows * kron_matmul_flops(list(zip(sizes[1:], kept[1:], strict=True)), 1)
    else:
        memory += 8.0 * _BOXES * weights
        sent = 4.0 * weights + 8.0
        flops = sweep_flops((rows, *sizes[1:]), kept)
    held = max(setting_up, memory)
    return Plan(sizes, kept, processes, in_parts, held, flops, sent if processes > 1 else 0.0)


def plan_of(
    axes: Sequence[Any], kernels: Sequence[Kernel | Tensor], noise: float, processes: int, tolerance: float = 1e-2
) -> Plan:
    """The same for what `reconstruct` would be called with; the kernels are decomposed, no values are needed."""
    problem = Problem(
        _Nothing(tuple(len(axis) for axis in axes)), axes, kernels, noise, 0.0, tolerance, 1, 1.0, None, None
    )
    with torch.no_grad():
        basis = problem.basis()
    return plan(basis.shape, basis.ranks, processes)


class _Nothing:
    """The shape of values that are not there."""

    dtype = "float32"

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
