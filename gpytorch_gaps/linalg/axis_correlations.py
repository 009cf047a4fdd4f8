"""Correlations of the levels of an axis, from a matrix or from a vector by lag.

An axis is given in one of two ways, which the number of dimensions of the tensor tells apart:

- a matrix of shape (m, m), whose entry (a, b) is the covariance of the levels a and b. Levels may be labels.
- a vector of shape (m,), whose entry l is the covariance of any two levels that are l apart. This is a stationary
  kernel on a regular axis, however long. The values need not decrease: the kernel may be periodic.

>>> lags = torch.exp(-torch.arange(3.0))
>>> matrix = lags[(torch.arange(3).unsqueeze(-1) - torch.arange(3)).abs()]
>>> torch.equal(axis_entries(lags, torch.tensor([0, 2]), torch.tensor([2, 1])), matrix[[0, 2], [2, 1]])
True
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def correlations(factors: Sequence[Tensor]) -> list[Tensor]:
    """``|corr_i|`` of the levels of every axis, each level with itself one. A level without variance has no others.

    :param factors: covariances K_i, shape (m_i, m_i) or by lag (m_i,) each.
    :return: of the same shapes.
    :raises ValueError: if a factor has another number of dimensions.

    >>> correlations([torch.tensor([4.0, -2.0]), torch.tensor([[4.0, -2.0], [-2.0, 4.0]])])
    [tensor([1.0000, 0.5000]), tensor([[1.0000, 0.5000],
            [0.5000, 1.0000]])]
    """
    return [_correlation(factor) for factor in factors]


def _correlation(factor: Tensor) -> Tensor:
    if factor.dim() not in (1, 2):
        raise ValueError(f"factors: got shape {tuple(factor.shape)}, expected (m, m), or (m,) for covariances by lag")
    if factor.dim() == 1:
        variance = factor[:1].clamp_min(0.0)
        own = (factor * torch.where(variance > 0, 1.0 / variance, 0.0)).abs().clamp_max(1.0)
        own[:1] = 1.0
        return own
    size = factor.diagonal().clamp_min(0.0).sqrt()
    scale = torch.where(size > 0, 1.0 / size, 0.0)
    return (factor * scale.unsqueeze(-1) * scale).abs().clamp_max(1.0).fill_diagonal_(1.0)


def axis_entries(corr: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Entries of an axis for pairs of levels, whose positions broadcast. shape: (m, m) or (m,) -> positions"""
    return corr[(rows - columns).abs()] if corr.dim() == 1 else corr[rows, columns]


def relative_change(new: Tensor, old: Tensor) -> Tensor:
    """``||new - old|| / ||old||`` of the matrix of an axis, in the Frobenius norm. shape: ()

    A vector by lag stands for a matrix with m entries of lag 0, and ``2 (m - l)`` entries of lag l.

    >>> lags = torch.tensor([1.0, 0.5, 0.25])
    >>> matrix = lags[(torch.arange(3).unsqueeze(-1) - torch.arange(3)).abs()]
    >>> torch.allclose(relative_change(lags**2, lags), relative_change(matrix**2, matrix))
    True
    """
    if old.dim() == 1:
        number = torch.arange(2 * len(old), 0, -2, dtype=old.dtype, device=old.device)
        number[:1] /= 2.0
        new, old = new * number.sqrt(), old * number.sqrt()
    return (new - old).norm() / old.norm()
