"""The model that ``fill_gaps`` learns: an ordinary ExactGP whose kernel is a sum of products over axes.

    k(x, x') = Σ_t s_t Π_i k_ti(x_i, x_i')

With one term it is the product kernel of the paper. With several, squared exponentials of growing length-scale, it is a
mixture of scales: each term is separable and isotropic at once, so that their sum comes close to isotropic kernels,
rough or of several scales, that are no products.
"""

import math
from collections.abc import Sequence
from typing import Any

import gpytorch
import torch
from gpytorch.constraints import GreaterThan
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import AdditiveKernel, Kernel, ScaleKernel
from gpytorch.means import Mean
from torch import Tensor

from gpytorch_gaps.grid.cartesian import CartesianGrid
from gpytorch_gaps.kernels import GappyGridKernel
from gpytorch_gaps.likelihoods import GappyGridLikelihood

NOISE_FLOOR, NOISE_FLOOR_OF_MANY = 1e-6, 1e-3
"""Of the variance of the data. Many observations are solved for by iterations, whose number grows as noise falls."""

MANY = 4000


def positive(least: float = 0.0) -> GreaterThan:
    """Learned by its logarithm: a step of the optimizer is a share of it, whatever its units."""
    return GreaterThan(least, transform=torch.exp, inv_transform=torch.log)


class Term(torch.nn.Module):
    """``s Π_i k_i``, without a grid: what windows and the whole grid have in common."""

    def __init__(self, kernels: Sequence[Kernel], scale: float) -> None:
        super().__init__()
        self.kernels = torch.nn.ModuleList(kernels)
        self.raw_scale = torch.nn.Parameter(torch.tensor(math.log(scale), dtype=torch.float64))

    @property
    def scale(self) -> Tensor:
        return self.raw_scale.exp()

    def on(self, grid: CartesianGrid) -> ScaleKernel:
        """The same kernels, not copies, on a grid."""
        kernel = ScaleKernel(GappyGridKernel(list(self.kernels), grid), outputscale_constraint=positive())
        kernel.outputscale = self.scale.detach()
        return kernel


class PlaneMean(Mean):
    """``c + b'(x - x0)``: a constant and, where there is a trend, slopes. It is estimated before, and not trained.

    With labels, an offset for each on top: `offsets` are pairs of a column of x, which holds codes 0, 1, .., and them.
    """

    def __init__(
        self, constant: float, slopes: Tensor, centre: Tensor, offsets: Sequence[tuple[int, Tensor]] = ()
    ) -> None:
        super().__init__()
        self._columns = [column for column, _ in offsets]
        for column, values in offsets:
            self.register_buffer(f"offsets_{column}", values)
        self.register_buffer("constant", torch.tensor(constant, dtype=torch.float64))
        self.register_buffer("slopes", slopes)
        self.register_buffer("centre", centre)

    def forward(self, x: Tensor) -> Tensor:
        mean = self.constant + (x - self.centre) @ self.slopes
        for column in self._columns:
            mean = mean + getattr(self, f"offsets_{column}")[x[..., column].round().long()]
        return mean


class FillModel(gpytorch.models.ExactGP):
    """Coordinates are those of the axes: numbers as they are, times as days since the first, circles as points.

    ``model.likelihood(model(x))`` predicts measurements anywhere, in the units of the data.
    """

    def __init__(self, x: Tensor, y: Tensor, likelihood: GappyGridLikelihood, mean: Mean, kernel: Kernel) -> None:
        super().__init__(x, y, likelihood)
        self.mean_module, self.covar_module = mean, kernel

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def make_likelihood(variance: float, floor: float = NOISE_FLOOR, share: float = 0.02) -> GappyGridLikelihood:
    """Noise that begins as a share of the variance of the data, and is learned by its logarithm."""
    likelihood = GappyGridLikelihood(noise_constraint=positive(floor * variance)).double()
    likelihood.noise = max(share, 2 * floor) * variance
    return likelihood


def make_model(
    x: Tensor, y: Tensor, grid: CartesianGrid, terms: Sequence[Any], likelihood: GappyGridLikelihood, mean: Mean
) -> FillModel:
    kernels = [term.on(grid) for term in terms]
    kernel = kernels[0] if len(kernels) == 1 else AdditiveKernel(*kernels)
    return FillModel(x, y, likelihood, mean, kernel).double().eval()
