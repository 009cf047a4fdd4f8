"""Draws of the posterior of the weights. Each takes one solve and one pass over the grid.

The weights have the prior ``N(0, T)`` and the posterior covariance ``s2 H^-1`` with ``H = s2 T^-1 + Phi' W'W Phi``. For
``w0`` from the prior and noise ``eps`` at the observed cells,

    r = s2 T^-1 w0 - Phi' W' eps        has the covariance ``s2 H`` and is independent of ``y = W Phi w0 + eps``,
    e = H^-1 r                          is a draw of the deviations from the posterior mean,
    w0 - e                              is the part of w0 that y explains. It is independent of r, and so of e.

The noise consists of random signs, because variances depend only on its second moments. It depends on the seed and on
the cell, but not on the division of the grid among processes.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpytorch_gaps.linalg.products import kron_matmul
from gpytorch_gaps.reconstruction.weight_solver import WeightSolver
from gpytorch_gaps.reconstruction.weight_space import WeightSpace
from gpytorch_gaps.utils.progress import with_bar

_BLOCK_NUMBERS = 2**20  # number of cells whose noise is drawn at once
_BITS = 16  # number of draws whose signs come from one random number
_TOLERANCE = 1e-2  # in posterior standard deviations: far below the spread of draws
_NORMALS, _SIGNS = 0, 1  # identify streams of random numbers


@dataclass(frozen=True)
class WeightDraws:
    """Draws in float32, in units of the noise standard deviation. shape: (n, r_1, .., r_d) each.

    They are coefficients of f in the product basis, in which weights of several terms are added: those of functions
    that terms share are large and cancel.
    """

    deviation: Tensor  # e
    unmasked: Tensor  # H0^-1 r, the deviation for the diagonal H0 = s2 T^-1 + N/M in place of H
    explained: Tensor  # w0 - e
    error_in_std: float  # certified bound on the error of every draw of f, in posterior standard deviations

    def __len__(self) -> int:
        return len(self.deviation)


def draw_weights(
    solver: WeightSolver, count: int, seed: int, known: Sequence[Tensor], keep: Callable[[int, Tensor], None]
) -> WeightDraws:
    """Draws of the posterior of the weights.

    :param solver: the solver for the mean. Its preconditioner is used for the draws too.
    :param count: number of draws.
    :param seed: seed of the random numbers.
    :param known: deviations from an earlier call. Solves start from them.
    :param keep: called with the number of each draw and its deviation.
    """
    space, size = solver.space, math.sqrt(solver.space.noise)
    box, in_box = space.basis.ranks, space.basis.to_box
    deviation, unmasked, explained = space.products.new_empty(3, count, *box, dtype=torch.float32)
    projections = _noise_projections(space, count, seed)
    worst = 0.0
    with with_bar(None, "draws", total=count, unit="draw") as bar:
        for draw in range(count):
            normals = _normals(space, draw, seed)
            rhs = space.shift.sqrt() * normals - projections[draw]  # divided by s
            solver = solver.for_rhs(size * rhs, max(solver.tolerance, _TOLERANCE))
            found = solver.solve(known[draw] if draw < len(known) else None)
            keep(draw, found.weights)
            step = found.weights / size
            deviation[draw], unmasked[draw] = in_box(step), in_box(space.inverse * rhs)
            explained[draw] = in_box((space.products / space.noise).sqrt() * normals - step)
            worst = max(worst, found.error_in_std)
            bar.update()
    return WeightDraws(deviation, unmasked, explained, worst)


def _normals(space: WeightSpace, draw: int, seed: int) -> Tensor:
    """Standard normal numbers for the weights that are kept, the same on every process."""
    generator = np.random.default_rng([seed, _NORMALS, draw])
    numbers = torch.from_numpy(generator.standard_normal(tuple(space.products.shape))).to(space.products.device)
    return space.weights.comm.broadcast(numbers, "draws") * (space.products > 0)


def _noise_projections(space: WeightSpace, count: int, seed: int) -> Tensor:
    """``Phi' W' eps / s`` of every draw, in one pass over the grid. shape: (count, r_1, .., r_d)"""
    weights, rows = space.weights, space.weights.own_rows
    others = [vectors.mT for vectors in space.basis.vectors[1:]]
    sums = [weights.empty_projection() for _ in range(count)]

    def pieces() -> Iterator[None]:
        for part, signs in _signs(space, count, seed):
            observed = space.grid.observed[part.start - rows.start : part.stop - rows.start]
            for draw, own in enumerate(signs):
                y = (own * observed).double().reshape(len(observed), -1, 1)
                y = kron_matmul(others, y) if others else y
                weights.add_rows(sums[draw], part, y.reshape(len(observed), -1))
            yield

    weights.comm.run_lockstep("drawing noise", pieces())
    kept = space.products > 0
    return torch.stack([weights.sum_projection(own) * kept for own in sums])


def _signs(space: WeightSpace, count: int, seed: int) -> Iterator[tuple[slice, Iterator[Tensor]]]:
    """Blocks of this process's slices, and the random signs of each draw. shape: (k, m_2, .., m_d), int8"""
    rows, shape, device = space.weights.own_rows, space.basis.shape, space.products.device
    step = max(1, _BLOCK_NUMBERS // math.prod(shape[1:]))
    for block in range(rows.start // step, -(-rows.stop // step)):
        whole = slice(block * step, min((block + 1) * step, shape[0]))
        part = slice(max(whole.start, rows.start), min(whole.stop, rows.stop))
        inside = slice(part.start - whole.start, part.stop - whole.start)

        def of_draws(block: int = block, whole: slice = whole, inside: slice = inside) -> Iterator[Tensor]:
            for first in range(0, count, _BITS):
                generator = np.random.default_rng([seed, _SIGNS, first, block])
                size = (whole.stop - whole.start, *shape[1:])
                bits = torch.from_numpy(generator.integers(-(2**15), 2**15, size, dtype=np.int16)[inside]).to(device)
                for bit in range(min(_BITS, count - first)):
                    yield ((bits >> bit) & 1).to(torch.int8).mul_(2).sub_(1)

        yield part, of_draws()
