"""What a solve must reach: a relative residual and, for data, a certified error of the posterior mean.

For the residual ``r = y - (K_XX + D) a`` of any approximate solution, at every point x, on the grid or off it,

    ``|mean error at x| <= sd(x) ||D^(-1/2) r||``,

sd the posterior standard deviation of the latent function. (The error of the mean is that of the weights w in
``f = Phi w``. With the posterior precision ``H = T^-1 + Phi_X' D^-1 Phi_X`` it is at most ``sd(x) ||e||_H``, and
``||e||_H^2 = r' (D^-1 - A^-1) r``.) So a residual in units of the noise bounds every prediction in units of its own
error bar. A relative residual bounds none of them where the noise is small.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpytorch_gaps.solvers.sum_system import SumSystem
from gpytorch_gaps.solvers.system import GapSystem


@dataclass(frozen=True, eq=False)
class Goal:
    """Both requirements as one number per column, which must not exceed `tolerance`.

    :param unit: the residual norm that counts as 1. shape: (*batch, C)
    :param noise_unit: the residual in units of the noise that counts as 1; None where no error of a mean is asked for.
        shape: (*batch, C)
    """

    system: GapSystem
    tolerance: float
    unit: Tensor
    noise_unit: Tensor | None = None
    reduction: float = 1.0
    """By what factor the worst column must fall, from the right-hand side on: what plans are made for."""

    @classmethod
    def of(cls, system: GapSystem, rhs: Tensor, tolerance: float, error_in_std: Tensor | None = None) -> "Goal":
        """For one set of right-hand sides.

        :param error_in_std: the certified error allowed, in the units of rhs; None for any. shape: (*batch, 1, C)
        """
        noise_unit = None if error_in_std is None else error_in_std.squeeze(-2) / tolerance
        goal = cls(system, tolerance, system.residual_unit(rhs), noise_unit)
        if noise_unit is None or not rhs.numel():
            return replace(goal, reduction=tolerance)
        needed = tolerance / max(1.0, float(goal.measure(rhs).max()))
        # rounded to a power of ten, by which truncated bases and plans are kept for other right-hand sides
        return replace(goal, reduction=needed if needed == tolerance else 10.0 ** math.floor(math.log10(needed)))

    def measure(self, residual: Tensor) -> Tensor:
        """The larger of both, relative to what they may be, times `tolerance`. shape: (*batch, N, C) -> (*batch, C)"""
        relative = self.relative(residual)
        if self.noise_unit is None:
            return relative
        return torch.maximum(relative, self.system.noise_norms(residual) / self.noise_unit)

    def relative(self, residual: Tensor) -> Tensor:
        """``||r|| / ||rhs||``. shape: (*batch, N, C) -> (*batch, C)"""
        return self.system.column_norms(residual) / self.unit

    def worst(self, residual: Tensor) -> float:
        """The measure of the worst column; infinite for one that is not a number."""
        return largest(self.measure(residual))

    def of_correction(self, size: Tensor, error: float) -> "Goal":
        """The goal of solving for a residual of measure `error`, divided by `size`; with a factor of two to spare."""
        noise_unit = None if self.noise_unit is None else self.noise_unit / size
        reduction = 0.5 * self.tolerance / error
        return replace(
            self, tolerance=0.5 * self.tolerance, unit=self.unit / size, noise_unit=noise_unit, reduction=reduction
        )


def certified_error(system: GapSystem | SumSystem, residual: Tensor, solution: Tensor) -> float:
    """``||D^(-1/2) r||`` of the worst column, with what rounding of the residual itself may add."""
    return largest(system.noise_norms(residual) + system.rounding_norms(solution))


def largest(columns: Tensor) -> float:
    """The largest entry; zero if there are none, infinite if one is not a number."""
    return float(columns.nan_to_num(math.inf, math.inf).max()) if columns.numel() else 0.0
