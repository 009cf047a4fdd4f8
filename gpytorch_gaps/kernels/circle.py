"""Kernels on a circle: longitudes of the whole globe, months of a year, hours of a day."""

import math
from typing import Any

import torch
from gpytorch.kernels import Kernel
from torch import Tensor

from gpytorch_gaps.kernels.blocks import Period


class CircleKernel(Kernel):
    """A kernel of the points ``p / 2 pi (cos, sin)(2 pi x / p)`` of a circle, given by the coordinate x, one column.

    Close points are as far from each other as their coordinates, and both sides of the seam are close.

    :param base_kernel: a kernel of two columns, or of the distance.
    :param period: p, in units of the coordinate.

    >>> from gpytorch.kernels import MaternKernel
    >>> months = torch.tensor([[12.0], [1.0], [2.0]])
    >>> covariance = CircleKernel(MaternKernel(), 12.0)(months).to_dense()
    >>> torch.allclose(covariance[0, 1], covariance[1, 2])  # as far from December to January as on to February
    True
    """

    def __init__(self, base_kernel: Kernel, period: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.base_kernel, self.period = base_kernel, float(period)

    @property
    def batch_shape(self) -> torch.Size:
        return self.base_kernel.batch_shape

    @property
    def is_stationary(self) -> bool:
        return self.base_kernel.is_stationary

    @property
    def stationary_columns(self) -> dict[int, Period]:
        """The covariance does not change under rotations: see :mod:`gpytorch_gaps.kernels.blocks`.

        This holds for a function of the distance. One length-scale per column makes an ellipse of the circle.
        """
        round_ = self.is_stationary and not any(
            (getattr(part, "ard_num_dims", None) or 1) > 1 for part in self.base_kernel.modules()
        )
        return {0: self.period} if round_ else {}

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Any:
        return self.base_kernel(self._points(x1), self._points(x2), diag=diag, **params)

    def _points(self, x: Tensor) -> Tensor:
        angle = (2.0 * math.pi / self.period) * x
        return torch.cat([angle.cos(), angle.sin()], -1) * (self.period / (2.0 * math.pi))

    def __getitem__(self, index: Any) -> "CircleKernel":
        return CircleKernel(self.base_kernel[index], self.period, active_dims=self.active_dims)
