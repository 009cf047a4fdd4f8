"""A noise variance for every level of an axis.

Let ``D = s2 diag(c)^2`` with c that varies along one axis only. Then ``c^-1 y`` has the noise s2 and the covariance
``c^-1 K c^-1``, which is still a product: only the factor of that axis changes. Therefore, values are divided by c when
they are read, and means and standard deviations are multiplied by c when they are evaluated. Everything in between has
a single noise. Errors in standard deviations are the same in both units.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gpytorch_gaps.utils.checks import check_integer, check_number, read_tensor


class NoiseLevels:
    """One noise variance, or one per level of an axis.

    `noise` is s2: the variance, or the geometric mean of all levels.

    :param noise: a number, or shape (m_k,).
    :param axis: the number k of the axis whose levels differ in noise; None for one noise.
    :param shape: shape of the grid.
    :raises ValueError: if a variance is not positive and finite, or if their number is wrong.
    """

    def __init__(self, noise: Any, axis: int | None, shape: Sequence[int], device: torch.device) -> None:
        self.axis: int | None = None
        self.scale: Tensor | None = None  # c
        self._dim = len(shape)
        if axis is None:
            self.noise = check_number("noise", noise, above=0, what="variance")
            return
        axis = check_integer("noise_axis", axis, at_least=-len(shape))
        if axis >= len(shape):
            raise ValueError(f"noise_axis: got {axis}, expected an axis of a grid with {len(shape)}")
        self.axis = axis % len(shape)
        levels = read_tensor("noise", noise).tensor.detach().to(device=device, dtype=torch.float64).flatten()
        if len(levels) != shape[self.axis]:
            raise ValueError(
                f"noise: got {len(levels)}, expected {shape[self.axis]}, one for each level of axis {axis}"
            )
        if not bool(((levels > 0) & levels.isfinite()).all()):
            raise ValueError("noise: got a variance that is not positive and finite, expected one for every level")
        self.noise = float(levels.log().mean().exp())
        self.scale = (levels / self.noise).sqrt()

    def whiten(self, axis: int, factor: Tensor) -> Tensor:
        """``c^-1 K_i c^-1`` for the factor of an axis. shape: (m_i, m_i)"""
        if axis != self.axis or self.scale is None:
            return factor
        return factor / self.scale / self.scale.unsqueeze(-1)

    def whiten_columns(self, axis: int, factor: Tensor) -> Tensor:
        """``K_i c^-1`` for covariances with the levels of an axis. shape: (Q, m_i)"""
        return factor if axis != self.axis or self.scale is None else factor / self.scale

    def of_slices(self, start: int, stop: int) -> float | Tensor:
        """c in some slices of the first axis: a number, or broadcastable to (stop - start, m_2, .., m_d)."""
        return 1.0 if self.scale is None else self._along_axis(self.scale[start:stop] if self.axis == 0 else self.scale)

    def at(self, positions: Sequence[Tensor]) -> float | Tensor:
        """c at a product of positions on the grid: a number, or a tensor that broadcasts with them."""
        if self.scale is None or self.axis is None:
            return 1.0
        return self._along_axis(self.scale[positions[self.axis]])

    def _along_axis(self, scale: Tensor) -> Tensor:
        assert self.axis is not None
        return scale.view([-1 if axis == self.axis else 1 for axis in range(self._dim)])
