"""The goal of a solve: a relative residual, a certified error of a posterior mean, or the error of a variance.

**Means.** For the residual ``r = y - (K_XX + D) a`` of any approximate solution, at every point x, on the grid or off,

    ``|mean error at x| <= sd(x) ||D^(-1/2) r||``,

with sd the posterior standard deviation of the latent function. (Let e be the error of the weights w in ``f = Phi w``,
and ``H = T^-1 + Phi_X' D^-1 Phi_X`` their posterior precision. The error of the mean is at most ``sd(x) ||e||_H``, and
``||e||_H^2 = r' (D^-1 - A^-1) r``.) Thus the residual in units of the noise bounds the error of every prediction in
units of its own error bar. If the noise is small, a relative residual gives no useful bound.

**Variances.** With weights a close to ``A^-1 g``, g the covariances of a point with the data, the variance
``k - 2 a'g + a'Aa`` has the error ``r' A^-1 r <= ||D^(-1/2) r||^2``. The allowed error depends on the variance itself,
which is known after a first solve to a relative residual. The goal is then computed again.
"""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from gpytorch_gaps.solvers.system import NoisySystem


@dataclass(frozen=True, eq=False)
class Goal:
    """All requirements as one number per column, which must not exceed `tolerance`.

    :param unit: the residual norm that counts as 1. shape: (*batch, C)
    :param noise_unit: the residual in units of the noise that counts as 1; None if the error of a mean is not bounded.
        shape: (*batch, C)
    """

    system: "NoisySystem"
    tolerance: float
    unit: Tensor
    noise_unit: Tensor | None = None
    reduction: float = 1.0
    """Required reduction of the worst column, relative to the right-hand side. Plans depend on it."""
    prior: Tensor | None = None
    """Prior variances, if the right-hand sides are covariances for posterior variances. shape: (*batch, C)"""

    @classmethod
    def of(
        cls,
        system: "NoisySystem",
        rhs: Tensor,
        tolerance: float,
        mean_tolerance: Tensor | None = None,
        prior: Tensor | None = None,
    ) -> "Goal":
        """The goal for one set of right-hand sides.

        :param mean_tolerance: the largest certified error, in the units of rhs; None: no limit. shape (*batch, 1, C)
        :param prior: prior variances, in the units of rhs squared, if the goal is a variance. shape (*batch, C)
        """
        noise_unit = None if mean_tolerance is None else mean_tolerance.squeeze(-2) / tolerance
        goal = cls(system, tolerance, system.residual_unit(rhs), noise_unit, prior=prior)
        if noise_unit is None or not rhs.numel():
            return replace(goal, reduction=tolerance)
        needed = tolerance / max(1.0, float(goal.measure(rhs).max()))
        # rounded to a power of ten, so that truncated bases and plans can be used for other right-hand sides
        return replace(goal, reduction=needed if needed == tolerance else 10.0 ** math.floor(math.log10(needed)))

    def measure(self, residual: Tensor) -> Tensor:
        """The largest ratio of a quantity to its limit, times `tolerance`. shape: (*batch, C)"""
        relative = self.system.column_norms(residual) / self.unit
        if self.noise_unit is None:
            return relative
        return torch.maximum(relative, self.system.noise_norms(residual) / self.noise_unit)

    def worst(self, residual: Tensor) -> float:
        """The measure of the worst column; infinite for one that is not a number."""
        return largest(self.measure(residual))

    def assessed(self, rhs: Tensor, solution: Tensor, residual: Tensor) -> "Goal":
        """The goal, given a solution: for variances, the residual that they allow. Other goals are unchanged."""
        if self.prior is None:
            return self
        floor = (10.0 * torch.finfo(torch.float64).eps * self.prior).clamp_min(torch.finfo(torch.float64).tiny)
        # if a solution has diverged, the sum below is meaningless: no variance is above that of the prior
        variance = (self.prior - (solution * (rhs + residual)).sum(-2)).minimum(self.prior).maximum(floor)
        allowed = (self.tolerance * variance).sqrt()  # in units of the noise; without noise, always too small
        return replace(self, unit=torch.full_like(self.unit, math.inf), noise_unit=allowed / self.tolerance)

    def of_correction(self, size: Tensor, error: float) -> "Goal":
        """The goal of a solve for a residual with the measure `error`, divided by `size`; twice as strict."""
        noise_unit = None if self.noise_unit is None else self.noise_unit / size
        return replace(
            self,
            tolerance=0.5 * self.tolerance,
            unit=self.unit / size,
            noise_unit=noise_unit,
            reduction=min(0.5, 0.5 * self.tolerance / error),
            prior=None,
        )


def certified_error(system: "NoisySystem", residual: Tensor, solution: Tensor) -> float:
    """``||D^(-1/2) r||`` of the worst column, plus the rounding error of the residual itself."""
    return largest(system.noise_norms(residual) + system.rounding_norms(solution))


def largest(columns: Tensor) -> float:
    """The largest entry; zero if there are none, infinite if one is not a number."""
    return float(columns.nan_to_num(math.inf, math.inf).max()) if columns.numel() else 0.0
