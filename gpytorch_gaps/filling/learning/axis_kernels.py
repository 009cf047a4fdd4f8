"""Kernels of one axis: stationary ones, with cycles or on a circle, and those of the user's."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from gpytorch.kernels import Kernel, MaternKernel, PeriodicKernel, ProductKernel, RBFKernel, ScaleKernel
from gpytorch.priors import NormalPrior
from torch import Tensor

from gpytorch_gaps.filling.axes.axis import Axis
from gpytorch_gaps.filling.learning.cycles import PERIODS_PER_STRETCH
from gpytorch_gaps.filling.learning.model import positive
from gpytorch_gaps.kernels.circle import CircleKernel

_LOG_LENGTHSCALE_STD = 1.5  # standard deviation of the prior of log length-scales: a factor of about four


def closed(kernel: Kernel, axis: Axis) -> Kernel:
    """The kernel of the points of a circle, if the axis is one."""
    return kernel if axis.period is None else CircleKernel(kernel, axis.period)


def initialized(kernel: Kernel, axis: Axis, share: float) -> Kernel:
    """The user's kernel. Length-scales that were not set start between the spacing and the extent of the axis."""
    for part in kernel.modules():
        if isinstance(part, Kernel) and part.has_lengthscale and not bool(part.raw_lengthscale.any()):
            part.lengthscale = between(axis, share)
    return kernel


def between(axis: Axis, share: float, shortest: float = 0.0) -> float:
    """An initial length-scale, from the spacing (share 0) to half of the extent (share 1) of the axis."""
    near = max(1.5, 1.1 * shortest) * axis.spacing
    return near ** (1 - share) * max(axis.extent / 2, near) ** share


def distance_kernel(
    axis: Axis, roughness: float, share: float, shortest: float, cycles: Sequence[tuple[float, bool]]
) -> Kernel:
    """A stationary kernel, plus a periodic one for each cycle: its period, and whether it lasts."""
    kernel: Kernel = _stationary(axis, roughness, between(axis, share, shortest), shortest * axis.spacing)
    for period, lasting in cycles:
        shape = PeriodicKernel(period_length_constraint=positive(), lengthscale_constraint=positive())
        shape.period_length, shape.lengthscale = period, 2.0
        shape.raw_period_length.requires_grad_(False)  # it is known, and the likelihood has many maxima in it
        slow = RBFKernel(lengthscale_constraint=positive())
        slow.lengthscale = max(axis.extent, 5 * period) if lasting else PERIODS_PER_STRETCH * period
        repeated = ScaleKernel(ProductKernel(shape, slow), outputscale_constraint=positive())
        kernel = kernel + repeated
    return kernel.double()


def _stationary(axis: Axis, roughness: float, start: float, least: float) -> Kernel:
    columns = axis.points.shape[1] if axis.kind == "group" else 1
    options = {
        "ard_num_dims": columns if columns > 1 else None,
        "lengthscale_constraint": positive(least),
    }
    kernel = RBFKernel(**options) if math.isinf(roughness) else MaternKernel(nu=roughness, **options)
    if columns == 1:  # a prior of the logarithm, because one of the length-scale itself would depend on its units
        kernel.register_prior("lengthscale_prior", NormalPrior(math.log(start), _LOG_LENGTHSCALE_STD), _log_lengthscale)
    ranges = np.ptp(axis.points, axis=0)
    kernel.lengthscale = torch.tensor(
        start * (np.where(ranges > 0, ranges, 1.0) / max(axis.extent, 1e-300)) if columns > 1 else [start]
    )
    return kernel.double()


def _log_lengthscale(kernel: Kernel) -> Tensor:
    return kernel.lengthscale.log()
