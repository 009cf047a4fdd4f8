"""For each observed cell, the observed cells most correlated with it, under a Kronecker product.

``corr(x, x') = prod_i corr_i(x_i, x'_i)``. On every axis, the levels are sorted by their correlation with each level.
Combinations of the first places in these orders are then looked up, the most correlated first. Only covariances are
used, so levels may be labels.

>>> K = torch.exp(-(torch.arange(5.0).unsqueeze(-1) - torch.arange(5.0)).abs())
>>> correlated_rows([K], torch.tensor([0, 2, 3]), 2)  # the neighbours of row 0 (cell 0) are rows 1 and 2 (cells 2, 3)
tensor([[1, 2],
        [2, 0],
        [1, 0]])
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gpytorch_gaps.linalg.products import kron_diagonal
from gpytorch_gaps.linalg.selection import ravel, unravel

_CANDIDATES_PER_NEIGHBOUR = 4  # cells that are looked up for each neighbour wanted: some are gaps
_MAX_COMBINATIONS = 2**16  # combinations of places, over all axes, that are ranked
_CHUNK_NUMBERS = 2**22  # numbers in memory at a time: 32 MiB of int64


def correlated_rows(factors: Sequence[Tensor], index: Tensor, count: int) -> Tensor:
    """For each observation, the rows of up to `count` others, the most correlated first.

    :param factors: K_i, shape (m_i, m_i) each.
    :param index: flat cell of each observation, last axis fastest, shape (N,).
    :param count: number of neighbours.
    :return: rows, -1 where fewer neighbours are found among the cells looked up, shape (N, count).
    """
    shape = tuple(factor.size(-1) for factor in factors)
    most = max(2, int(_MAX_COMBINATIONS ** (1.0 / len(shape))))
    ordered = [_by_correlation(factor, most) for factor in factors]
    widths = tuple(levels.size(-1) for levels, _ in ordered)
    typical = kron_diagonal([correlation for _, correlation in ordered])
    num_candidates = min(_CANDIDATES_PER_NEIGHBOUR * count, math.prod(widths) - 1)
    best = typical[1:].topk(num_candidates).indices + 1  # 0 is the cell itself
    places = unravel(best, widths)
    row_of = torch.full((math.prod(shape),), -1, dtype=torch.long, device=index.device)
    row_of[index] = torch.arange(len(index), device=index.device)
    result = torch.full((len(index), count), -1, dtype=torch.long, device=index.device)
    size = max(1, _CHUNK_NUMBERS // max(1, len(best)))
    for start in range(0, len(index), size):
        own = unravel(index[start : start + size], shape)
        sides = zip(ordered, own, places, strict=True)
        cells = ravel(tuple(levels[level][:, place] for (levels, _), level, place in sides), shape)
        rows = row_of[cells]  # shape: (q, cells looked up)
        first = (rows < 0).to(torch.int8).sort(dim=-1, stable=True).indices[:, :count]
        result[start : start + size, : first.size(-1)] = rows.gather(-1, first)
    return result


def _by_correlation(factor: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """For each level, the levels sorted by correlation, itself first; and the mean correlation at each place.

    shape: (m, w) and (w,), w at most `most`
    """
    size = factor.diagonal().clamp_min(0.0).sqrt()
    scale = torch.where(size > 0, 1.0 / size, 0.0)
    correlation = (factor * scale.unsqueeze(-1) * scale).abs().fill_diagonal_(2.0)  # above all others
    values, levels = correlation.topk(min(most, factor.size(-1)), dim=-1)
    return levels, values.clamp_max(1.0).mean(-2)
