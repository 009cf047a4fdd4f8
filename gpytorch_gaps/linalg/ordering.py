"""Coarse-to-fine orderings of the observed cells of a grid, from the correlations along its axes.

On every axis the levels are ordered farthest first: each next level is the one least correlated with those before it,
at a distance ``1 - |corr|``. Levels at about the same distance are a generation. The levels of all axes up to some
generation form a sub-grid, and these sub-grids are nested. Cells come in the order in which the sub-grids reach them,
those of one sub-grid in a scattered order. Distances are in units of the correlation, so an axis with a long
length-scale is refined late, and an axis of labels is ordered like any other.

An axis that is given by lag is bisected instead, with nearly the same result: first the multiples of a large power of
two, then of half of it, down to one. Its levels up to some generation are the multiples of a power of two. Nothing
larger than the vector of lags is formed.

In a matrix by lag, each line is bisected by its own correlations. Circles of latitude near a pole, whose points are
close together, are thus refined later than the equator.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gpytorch_gaps.linalg.selection import unravel

_E_FOLDS_PER_GENERATION = 0.6  # range of log-distances of a generation: less than log 2, the step of a bisection
_HASH_BITS = 24
_MIXERS = (0x9E3779B1, 0x85EBCA77)  # odd constants of 32 bits


def generations(corr: Sequence[Tensor]) -> list[Tensor]:
    """The generation of every level of every axis. 0 is the coarsest. Generations of different axes are comparable.

    :param corr: ``|corr_i|``, shape (m_i, m_i), or by lag (m_i,) or (a_i, a_i, q_i), each.
    :return: integers, one for every level, shape (m_i,) each.

    >>> lags = (torch.arange(5.0).unsqueeze(-1) - torch.arange(5.0)).abs()
    >>> generations([torch.exp(-0.1 * lags)])
    [tensor([0, 3, 2, 3, 1])]
    >>> generations([torch.exp(-0.1 * torch.arange(5.0))])  # the same axis, by lag
    [tensor([0, 3, 2, 3, 1])]
    """
    rounded = []
    for axis in corr:
        distances = (_bisected, _taken, _taken_line_by_line)[axis.dim() - 1](axis)
        logs = distances.clamp_min(torch.finfo(axis.dtype).eps).log()
        rounded.append((-logs / _E_FOLDS_PER_GENERATION).round().long())
    known = torch.unique(torch.cat(rounded))
    return [torch.searchsorted(known, values) for values in rounded]


def _taken(corr: Tensor) -> Tensor:
    """The distance at which every level is taken, farthest first. shape: (m, m) -> (m,)"""
    order, distances = farthest_first(corr)
    return torch.empty_like(distances).scatter_(0, order, distances)


def _taken_line_by_line(corr: Tensor) -> Tensor:
    """The lines are taken farthest first, and every line is bisected. shape: (a, a, q) -> (a * q,)"""
    lines = _taken(corr[..., 0]).unsqueeze(-1)
    return torch.minimum(lines, _bisected(corr.diagonal().mT)).flatten()


def farthest_first(corr: Tensor) -> tuple[Tensor, Tensor]:
    """The levels of an axis, each as far as possible from earlier ones, and their distances. shape: (m,) and (m,)"""
    nearest = torch.zeros_like(corr[0])  # largest correlation with an earlier level
    current = torch.zeros(1, dtype=torch.long, device=corr.device)
    order, reached = [], []
    for _ in range(len(corr)):
        order.append(current)
        reached.append(nearest.index_select(0, current))
        nearest = torch.maximum(nearest, corr.index_select(0, current).squeeze(0)).index_fill_(0, current, torch.inf)
        current = nearest.argmin(0, keepdim=True)
    return torch.cat(order), 1.0 - torch.cat(reached)


def _bisected(corr: Tensor) -> Tensor:
    """The distance of every level from earlier ones, if an axis is bisected. shape: by lag (..., m) -> (..., m)

    A level that is an odd multiple of ``2^k`` comes after all multiples of ``2^(k + 1)``. Its lags from these are odd
    multiples of ``2^k``, hence

        distance_k = 1 - max {corr_l: l an odd multiple of 2^k}

    For a periodic kernel, the multiples of a period are nearly the same level, and this distance may be smallest at a
    large k. Smaller k then get the same distance: their levels form one generation, in a scattered order. If they were
    bisected, hours with a daily cycle that fades within weeks would take up to three times as many iterations.
    """
    size = corr.size(-1)
    depth = (size - 1).bit_length()
    level = torch.arange(size, device=corr.device)
    power = torch.where(level > 0, level & -level, 2**depth)  # the first level comes first
    k = power.to(corr.dtype).log2().round().long()
    nearest = corr.new_zeros(*corr.shape[:-1], depth + 1)
    nearest = nearest.scatter_reduce(-1, k.expand_as(corr), torch.where(level > 0, corr, 0.0), "amax")
    return (1.0 - nearest).flip(-1).cummin(-1).values.flip(-1)[..., k]


def coarse_to_fine(generation: Sequence[Tensor], index: Tensor) -> Tensor:
    """The place of each observation in a coarse-to-fine ordering.

    :param generation: generations of the levels of every axis, from :func:`generations`, shape (m_i,) each.
    :param index: flat cell of each observation, shape (N,).
    :return: a permutation of 0 .. N - 1, shape (N,).

    >>> lags = (torch.arange(5.0).unsqueeze(-1) - torch.arange(5.0)).abs()
    >>> coarse_to_fine(generations([torch.exp(-lags)]), torch.arange(5)).argsort()[:2]
    tensor([0, 4])
    """
    levels = unravel(index, [len(values) for values in generation])
    own = torch.stack([values[level] for values, level in zip(generation, levels, strict=True)])
    latest_first = own.sort(0, descending=True).values
    base = 1 + max(int(values.max()) for values in generation)
    key, room = torch.zeros_like(index), 2 ** (62 - _HASH_BITS)
    for value in latest_first:
        if room < base:
            break  # if there are many axes, only the latest generations are used
        key, room = key * base + value, room // base
    order = (key * 2**_HASH_BITS + _scattered(index)).argsort(stable=True)
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def _scattered(index: Tensor) -> Tensor:
    """A hash of every cell, the same on every device. shape: (N,)"""
    mask = 2**31 - 1
    mixed = (index * _MIXERS[0]) & mask
    mixed = ((mixed ^ (mixed >> 15)) * _MIXERS[1]) & mask
    return (mixed ^ (mixed >> 13)) & (2**_HASH_BITS - 1)
