"""The model that ``fill_gaps`` learns: an ordinary ExactGP whose kernel is a sum of products over axes, or blocks.

    k(x, x') = Σ_t s_t Π_i k_ti(x_i, x_i')

One term is the product kernel of Evans & Nair (2018). Several squared exponentials with increasing length-scales are a
mixture of scales. Each of these terms is both separable and isotropic. Therefore, their sum can approximate isotropic
kernels that are not products: rough kernels, and kernels with several scales.
"""

import itertools
import math
from collections.abc import Sequence

import gpytorch
import torch
from gpytorch.constraints import GreaterThan
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import AdditiveKernel, Kernel, ScaleKernel
from gpytorch.means import Mean
from torch import Tensor

from gpytorch_gaps.filling.arrays.covariates import Covariates
from gpytorch_gaps.filling.learning.cycles import Cycles
from gpytorch_gaps.grid.cartesian import CartesianGrid
from gpytorch_gaps.kernels import GappyGridKernel
from gpytorch_gaps.likelihoods import GappyGridLikelihood

NOISE_FLOOR, NOISE_FLOOR_OF_MANY = 1e-6, 1e-3
"""Smallest noise variance, as a fraction of the variance of the data.

Large systems are solved by iterations, and small noise needs more of them.
"""

MANY_OBSERVATIONS = 4000


def positive(least: float = 0.0) -> GreaterThan:
    """Constraint of a parameter that is learned by its logarithm: steps are relative, and units do not matter."""
    return GreaterThan(least, transform=torch.exp, inv_transform=torch.log)


class ProductTerm(torch.nn.Module):
    """``s Π_i k_i`` without a grid. Windows and the whole grid share its parameters.

    :param kernels: one kernel per axis, or per block of axes.
    :param scale: the initial value of s.
    :param blocks: the axes of each kernel. Default: one axis each.
    """

    def __init__(self, kernels: Sequence[Kernel], scale: float, blocks: Sequence[Sequence[int]] | None = None) -> None:
        super().__init__()
        self.blocks = tuple(map(tuple, blocks)) if blocks else tuple((axis,) for axis in range(len(kernels)))
        self.kernels = torch.nn.ModuleList(kernels)
        self.cost = 1.0  # penalty in the choice of a kernel, in units of one term
        self.raw_outputscale = torch.nn.Parameter(torch.tensor(math.log(scale), dtype=torch.float64))

    @property
    def scale(self) -> Tensor:
        return self.raw_outputscale.exp()

    def on(self, grid: CartesianGrid) -> ScaleKernel:
        """The term as a kernel on a grid, with the same parameters, not copies of them.

        The axes of a block must be neighbours in a grid kernel. If they are not, axes are rearranged, but not inputs.
        """
        order = [axis for block in self.blocks for axis in block]
        if order == sorted(order):
            product = GappyGridKernel(list(self.kernels), grid, blocks=self.blocks)
        else:
            places = itertools.count()
            product = GappyGridKernel(
                list(self.kernels),
                CartesianGrid([grid.axes[axis] for axis in order]),
                active_dims=grid_columns(grid, order),
                blocks=[[next(places) for _ in block] for block in self.blocks],
            )
        kernel = ScaleKernel(product, outputscale_constraint=positive())
        kernel.raw_outputscale = self.raw_outputscale
        return kernel


def grid_columns(grid: CartesianGrid, axes: Sequence[int]) -> list[int]:
    """The columns of the inputs that belong to the given axes of a grid, in their order."""
    return [column for axis in axes for column in range(grid.columns[axis].start, grid.columns[axis].stop)]


class TrendMean(Mean):
    """``c + b'(x - x0)`` plus offsets of labels, cycles and backgrounds, estimated before training and not trained.

    :param constant: c.
    :param slopes: b, zero for columns without a trend. shape (D,).
    :param centre: x0. shape (D,).
    :param offsets: pairs of a column of x with codes 0, 1, .. and the offset of each code.
    :param cycles: lasting cycles, a function of x.
    :param covariates: backgrounds, functions of x.
    :param coefficients: coefficients of the backgrounds. shape (K,).
    """

    coefficients: Tensor

    def __init__(
        self,
        constant: float,
        slopes: Tensor,
        centre: Tensor,
        offsets: Sequence[tuple[int, Tensor]] = (),
        cycles: Cycles | None = None,
        covariates: Covariates | None = None,
        coefficients: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.cycles, self.covariates = cycles, covariates
        self.register_buffer("coefficients", coefficients)
        self._columns = [column for column, _ in offsets]
        for column, values in offsets:
            self.register_buffer(f"offsets_{column}", values)
        self.register_buffer("constant", torch.tensor(constant, dtype=torch.float64))
        self.register_buffer("slopes", slopes)
        self.register_buffer("centre", centre)

    @property
    def varies(self) -> bool:
        """Whether the mean is not constant."""
        parts = (self.cycles, self.covariates)
        return bool((self.slopes != 0).any() or self._columns or any(part is not None for part in parts))

    def with_coefficients(self, constant: Tensor, slopes: Tensor, coefficients: Tensor) -> "TrendMean":
        """The same mean with another constant, other coefficients and, if there are any, other slopes."""
        offsets = [(column, getattr(self, f"offsets_{column}")) for column in self._columns]
        all_slopes = self.slopes.clone()
        all_slopes[self.slopes != 0] = slopes
        return TrendMean(
            float(constant), all_slopes, self.centre, offsets, self.cycles, self.covariates, coefficients.clone()
        )

    def forward(self, x: Tensor) -> Tensor:
        mean = self.constant + (x - self.centre) @ self.slopes
        for column in self._columns:
            mean = mean + getattr(self, f"offsets_{column}")[x[..., column].round().long()]
        if self.covariates is not None:
            mean = mean + self.covariates(x) @ self.coefficients
        return mean if self.cycles is None else mean + self.cycles(x)


class FillModel(gpytorch.models.ExactGP):
    """The exact Gaussian process behind ``fill_gaps``, an ordinary ``ExactGP`` in the units of the data.

    ``model.likelihood(model(x))`` predicts measurements at any point. The columns of x are the coordinates of the axes:
    days since the first time, and other numbers unchanged.

    :param x: coordinates of the observations, shape (N, D).
    :param y: observations, shape (N,).
    :param likelihood: Gaussian noise.
    :param mean: the mean function.
    :param kernel: a kernel on a grid, or a sum of such kernels.

    >>> import gpytorch, numpy as np, torch
    >>> import gpytorch_gaps as gaps
    >>> values = np.sin(np.arange(12.0) / 3)
    >>> values[4:6] = np.nan
    >>> model = gaps.fill_gaps(values, kernels=[gpytorch.kernels.RBFKernel()], steps=5, progress=False).model
    >>> with torch.no_grad():
    ...     between = model.likelihood(model(torch.tensor([[2.5]], dtype=torch.float64)))
    >>> between.mean.shape
    torch.Size([1])
    """

    def __init__(self, x: Tensor, y: Tensor, likelihood: GappyGridLikelihood, mean: Mean, kernel: Kernel) -> None:
        super().__init__(x, y, likelihood)
        self.mean_module, self.covar_module = mean, kernel

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def make_likelihood(
    variance: float,
    floor: float = NOISE_FLOOR,
    share: float = 0.02,
    grid: CartesianGrid | None = None,
    noise_axis: int | None = None,
) -> GappyGridLikelihood:
    """Noise, initially a fraction of the variance of the data: one for all, or one per level of an axis of a grid."""
    likelihood = GappyGridLikelihood(
        noise_axis=noise_axis,
        grid=None if noise_axis is None else grid,
        noise_constraint=positive(floor * variance),
    ).double()
    likelihood.noise = torch.full_like(likelihood.noise, max(share, 2 * floor) * variance)
    return likelihood


def with_known_noise(learned: Tensor, known: Tensor, elsewhere: float) -> GappyGridLikelihood:
    """Noise with a known part: its variance at each observation is ``learned + known``, both of shape (N,).

    :param elsewhere: the known part at points without an observation.
    """
    variances = learned + known
    if bool((variances == variances[0]).all()):  # for a single variance, all methods of solution are available
        variances = variances[:1]
    return GappyGridLikelihood(noise=variances, noise_elsewhere=float(learned.mean()) + elsewhere)


def make_model(
    grid: CartesianGrid,
    index: Tensor,
    y: Tensor,
    terms: Sequence[ProductTerm],
    likelihood: GappyGridLikelihood,
    mean: Mean,
) -> FillModel:
    """The model of observations `y` at the cells `index` of a grid."""
    kernels = [term.on(grid) for term in terms]
    kernel = kernels[0] if len(kernels) == 1 else AdditiveKernel(*kernels)
    return FillModel(grid.points(index), y, likelihood, mean, kernel).double().eval()
