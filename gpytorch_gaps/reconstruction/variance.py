"""Posterior variances of a grid from a few draws of its weights, with control variates whose means are known.

At a cell, let d be the deviation of a draw, d0 its deviation for the diagonal ``H0 = s2 T^-1 + N/M`` in place of the
matrix H of the weights, and m the part of the prior draw that the data explain. For the draws of
:mod:`gpytorch_gaps.reconstruction.draws`,

    ``E d^2 = v``, which is wanted;   ``E d d0 = v0 = s2 phi' H0^-1 phi``;   ``E m^2 = t - v``, t the prior variance,

and m is independent of d and d0. v0 and t are known: products of tables of squared eigenvectors. This gives two
estimates:

1. The maximum of the likelihood of v and ``E d0^2`` for normal pairs (d, d0) with the known covariance v0. With the
   means A of ``d^2``, B of ``d d0`` and D of ``d0^2`` over draws, it is ``A / k``, where k is the root between 1 and
   ``B / v0`` of ``k^3 + (1 - 2b) k^2 + a^2 k - a^2``, ``a^2 = A D / v0^2``, ``b = B / v0``. Its variance for n draws is
   ``(2/n) v^2 (1 - rho^2) / (1 + rho^2)``, rho the correlation of d and d0. This is very small if gaps are scattered.
2. ``t - mean of m^2``, with the variance ``(2/n) (t - v)^2``. It is precise far from data.

The result is their mean, weighted by precision. Inside large gaps but close to data, neither is precise. The error is
then that of plain draws, and it is reported.

Let delta be the diagonal and kappa the norm of the part of the kernel that is dropped by truncation. It increases the
variance by at most ``2 delta + 2 v kappa / s2``, and does not decrease it. delta is added.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpytorch_gaps.linalg.products import kron_diagonal, kron_matmul
from gpytorch_gaps.posterior.drawn_variance import quantile_of_draws
from gpytorch_gaps.reconstruction.draws import WeightDraws
from gpytorch_gaps.reconstruction.weight_space import WeightSpace

_BLOCK_NUMBERS = 2**25  # numbers to which draws are expanded at once
_SAMPLE_CELLS = 2**16  # number of cells from which the reported errors are computed
_NEWTON_STEPS = 4


@dataclass(frozen=True)
class DrawnStd:
    """Relative errors of standard deviations, from a sample of cells."""

    median: float
    """Median of the errors. Each cell is within its error with a probability of 95 %."""
    nearly_all: float
    """The 95 % quantile of these errors."""
    truncation: float
    """A bound on the part of the largest error that is due to dropped eigenvalues."""


class DrawnVariance:
    """Estimates of the posterior variance of f at the cells of a grid.

    :param space: the system of the weights.
    :param draws: draws of the weights.
    :param diagonals: prior variances ``k_i(x, x)`` of each term along each axis, shape (m_i,).
    """

    def __init__(self, space: WeightSpace, draws: WeightDraws, diagonals: Sequence[Sequence[Tensor]]) -> None:
        self.shape, self.noise, self.draws = space.basis.shape, space.noise, draws
        self.kernel_error = space.basis.error / space.noise
        self._tables = [vectors.float() for vectors in space.basis.vectors]
        self._squares = [[vectors.square() for vectors in term.vectors] for term in space.basis.terms]
        pairs = zip(space.basis.boxes(space.inverse), space.basis.boxes(space.products / space.noise), strict=True)
        self._boxes = [torch.stack(pair) for pair in pairs]  # boxes of v0 / s2 and t / s2 of each term
        self._diagonals = diagonals

    def slab(self, start: int, stop: int) -> Tensor:
        """The variance at some slices of the first axis. shape: (stop - start, m_2, .., m_d)"""
        result = self._boxes[0].new_empty(stop - start, *self.shape[1:])
        for cells in self._blocks(start, stop):
            inside = (slice(cells[0].start - start, cells[0].stop - start), *cells[1:])
            variance, _, dropped = self._at(cells)
            result[inside] = variance + dropped
        return result

    def at(self, positions: Sequence[Tensor]) -> Tensor:
        """The variance at a product of positions, one list of them for each axis. shape: (k_1, .., k_d)"""
        variance, _, dropped = self._at(positions)
        return variance + dropped

    def errors(self, seed: int) -> DrawnStd:
        """Relative errors of the standard deviations, from a sample of cells."""
        generator, most = np.random.default_rng(seed), math.ceil(_SAMPLE_CELLS ** (1 / len(self.shape)))
        cells = [np.sort(generator.choice(size, min(size, most), replace=False)) for size in self.shape]
        variance, error, dropped = self._at([torch.from_numpy(own) for own in cells])
        total = (variance + dropped).clamp_min(torch.finfo(torch.float64).tiny)
        relative = (0.5 * error / total + self.draws.error_in_std).flatten()
        truncation = float((0.5 * dropped / total).max()) + self.kernel_error
        median, nearly_all = (float(relative.kthvalue(math.ceil(share * len(relative)))[0]) for share in (0.5, 0.95))
        return DrawnStd(median, nearly_all, truncation)

    def _blocks(self, start: int, stop: int) -> Iterator[tuple[slice, ...]]:
        """Boxes of cells for which all draws can be expanded at once: slices of the first axis, or parts of one."""
        most = max(1, _BLOCK_NUMBERS // (3 * len(self.draws)))
        sizes = [stop - start, *self.shape[1:]]
        steps = []
        for axis, size in enumerate(sizes):
            steps.append(max(1, min(size, most // math.prod(sizes[axis + 1 :]))))
        for corner in np.ndindex(*(-(-size // step) for size, step in zip(sizes, steps, strict=True))):
            lows = [at * step for at, step in zip(corner, steps, strict=True)]
            ends = [min(low + step, size) for low, step, size in zip(lows, steps, sizes, strict=True)]
            yield slice(start + lows[0], start + ends[0]), *map(slice, lows[1:], ends[1:])

    def _at(self, cells: Sequence[slice | Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Variances, their 95 % errors, and the dropped part of the prior variance, at a product of positions."""
        parts = [table[own] for table, own in zip(self._tables, cells, strict=True)]
        d, d0, m = (_expand(parts, one) for one in (self.draws.deviation, self.draws.unmasked, self.draws.explained))
        unmasked, prior = self._known(cells)
        moments = (_mean_product(d, d), _mean_product(d, d0), _mean_product(d0, d0), _mean_product(m, m))
        variance, spread = combined_estimate(*moments, unmasked, prior)
        whole = torch.zeros_like(prior)
        for diagonals in self._diagonals:
            whole += kron_diagonal([own[at] for own, at in zip(diagonals, cells, strict=True)]).view(prior.shape)
        dropped = (whole - self.noise * prior).clamp_min(0.0)
        return self.noise * variance, self.noise * quantile_of_draws(len(self.draws)) * spread, dropped

    def _known(self, cells: Sequence[slice | Tensor]) -> Tensor:
        """v0 and t, over s2, at a product of positions. shape: (2, k_1, .., k_d)"""
        parts = [
            _expand([table[own] for table, own in zip(squares, cells, strict=True)], boxes)
            for squares, boxes in zip(self._squares, self._boxes, strict=True)
        ]
        return torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]


def combined_estimate(
    squares: Tensor, products: Tensor, unmasked_squares: Tensor, explained: Tensor, unmasked: Tensor, prior: Tensor
) -> tuple[Tensor, Tensor]:
    """The estimate of v from means over n draws, and its standard deviation times ``sqrt(n / 2)``.

    :param squares: means of ``d^2``.
    :param products: means of ``d d0``.
    :param unmasked_squares: means of ``d0^2``.
    :param explained: means of ``m^2``.
    :param unmasked: v0.
    :param prior: t.
    """
    tiny = torch.finfo(squares.dtype).tiny
    first, correlation = _paired_estimate(squares, products, unmasked_squares, unmasked.clamp_min(tiny))
    rough = prior * first / (first + explained).clamp_min(tiny)
    paired = rough.square() * (1.0 - correlation) / (1.0 + correlation)  # variances, times n / 2
    by_prior = (prior - rough).square()
    share = by_prior / (paired + by_prior).clamp_min(tiny)
    variance = share * first + (1.0 - share) * (prior - explained)
    spread = (share * paired).sqrt()
    return variance.clamp_min(0.0).minimum(prior), spread


def _paired_estimate(squares: Tensor, products: Tensor, others: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """The most likely variance of d, given pairs of d and d0 whose covariance is known.

    Also the squared correlation of d and d0.
    """
    a2, b = (squares / known) * (others / known), products / known
    low, high = b.clamp(1e-6, 1.0), b.clamp_min(1.0)
    k = (1.0 + 2.0 * (b - 1.0) / (2.0 + (a2 - b.square()).clamp_min(0.0))).clamp(low, high)
    for _ in range(_NEWTON_STEPS):
        value = ((k + 1.0 - 2.0 * b) * k + a2) * k - a2
        slope = (3.0 * k + 2.0 - 4.0 * b) * k + a2
        k = torch.where(slope > 0, k - value / slope, k).clamp(low, high)
    return squares / k, (k.square() / a2.clamp_min(torch.finfo(a2.dtype).tiny)).clamp_max(1.0)


def _expand(tables: Sequence[Tensor], boxes: Tensor) -> Tensor:
    """``Phi w`` for every box of weights. shape: (n, r_1, .., r_d) -> (n, k_1, .., k_d)"""
    sizes = [len(table) for table in tables]
    return kron_matmul(tables, boxes.reshape(len(boxes), -1, 1)).reshape(len(boxes), *sizes)


def _mean_product(first: Tensor, second: Tensor) -> Tensor:
    """Means of products over draws, in float64. shape: (n, ..) twice -> (..)"""
    total = torch.zeros(first.shape[1:], dtype=torch.float64, device=first.device)
    for one, other in zip(first, second, strict=True):
        total.addcmul_(one.double(), other.double())
    return total / len(first)
