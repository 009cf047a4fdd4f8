"""Correlations of the levels of an axis, from a matrix, from a vector by lag, or from a matrix by lag.

An axis is given in one of three forms. They differ in the number of dimensions of the tensor:

- a matrix of shape (m, m), whose entry (a, b) is the covariance of the levels a and b. Levels may be labels.
- a vector of shape (m,), whose entry l is the covariance of any two levels that are l apart. This is a stationary
  kernel on a regular axis, however long. The values need not decrease: the kernel may be periodic.
- a matrix by lag, of shape (a, a, q): two axes whose covariances belong together, such as latitude and longitude on
  the sphere. Its levels are all a * q pairs, with q fastest. Entry (i, j, l) is the covariance of a level in line i
  and a level in line j that are l apart. If the lines are closed circles, the lags l and q - l have equal entries.

>>> lags = torch.exp(-torch.arange(3.0))
>>> matrix = lags[(torch.arange(3).unsqueeze(-1) - torch.arange(3)).abs()]
>>> torch.equal(axis_entries(lags, torch.tensor([0, 2]), torch.tensor([2, 1])), matrix[[0, 2], [2, 1]])
True
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gpytorch_gaps.linalg.selection import unravel


def num_levels(axis: Tensor) -> int:
    """The number of levels of an axis.

    >>> num_levels(torch.ones(5)), num_levels(torch.eye(5)), num_levels(torch.ones(2, 2, 5))
    (5, 5, 10)
    """
    return axis.size(0) * axis.size(2) if axis.dim() == 3 else len(axis)


def correlations(factors: Sequence[Tensor]) -> list[Tensor]:
    """``|corr_i|`` of the levels of every axis, with ones for a level and itself. Levels without variance have zeros.

    :param factors: covariances K_i, shape (m_i, m_i), or by lag (m_i,) or (a_i, a_i, q_i), each.
    :return: of the same shapes.
    :raises ValueError: if a factor has another number of dimensions.

    >>> correlations([torch.tensor([4.0, -2.0]), torch.tensor([[4.0, -2.0], [-2.0, 4.0]])])
    [tensor([1.0000, 0.5000]), tensor([[1.0000, 0.5000],
            [0.5000, 1.0000]])]
    """
    return [_correlation(factor) for factor in factors]


def _correlation(factor: Tensor) -> Tensor:
    if factor.dim() not in (1, 2, 3) or factor.size(0) != factor.shape[:2][-1]:
        raise ValueError(
            f"factors: got shape {tuple(factor.shape)}, expected (m, m), or (m,) or (a, a, q) for covariances by lag"
        )
    if factor.dim() == 1:
        variance = factor[:1].clamp_min(0.0)
        own = (factor * torch.where(variance > 0, 1.0 / variance, 0.0)).abs().clamp_max(1.0)
        own[:1] = 1.0
        return own
    together = factor[..., 0] if factor.dim() == 3 else factor  # shape: (m, m), at the same place of a line
    size = together.diagonal().clamp_min(0.0).sqrt()
    scale = torch.where(size > 0, 1.0 / size, 0.0)
    scales = scale.unsqueeze(-1) * scale
    own = (factor * (scales.unsqueeze(-1) if factor.dim() == 3 else scales)).abs().clamp_max(1.0)
    (own[..., 0] if factor.dim() == 3 else own).fill_diagonal_(1.0)
    return own


def axis_entries(corr: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Entries of an axis for pairs of levels, whose positions broadcast. shape: that of the axis -> positions"""
    if corr.dim() == 1:
        return corr[(rows - columns).abs()]
    if corr.dim() == 2:
        return corr[rows, columns]
    (row, start), (column, end) = (unravel(levels, corr.shape[1:]) for levels in (rows, columns))
    return corr[row, column, (start - end).abs()]


def relative_change(new: Tensor, old: Tensor) -> Tensor:
    """``||new - old|| / ||old||`` of the matrix of an axis, in the Frobenius norm. shape: ()

    A vector by lag represents a matrix with m entries of lag 0, and ``2 (m - l)`` entries of lag l. In a matrix by lag,
    every lag counts once.

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
