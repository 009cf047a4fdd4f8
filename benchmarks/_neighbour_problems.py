"""Covariances on a grid with gaps that the preconditioners are compared on: kernels, gaps, noise and data."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gpytorch.constraints import GreaterThan
from gpytorch.kernels import Kernel, MaternKernel, RBFKernel, ScaleKernel
from torch import Tensor

import gpytorch_gaps as gaps
from benchmarks._fields import cloud_gaps
from benchmarks.training_step import Model
from gpytorch_gaps.operators import SelectedKroneckerOperator

GAPS = ("scattered", "a hole", "clouds")
_MISSING = {"scattered": 0.4, "clouds": 0.5}
_HOLE_RADIUS_SQUARED = 0.13  # of the unit square: 41 % of it
# of a kernel, its terms: the smoothness, and the length-scale in units of that of the problem
KERNELS: dict[str, tuple[tuple[float, float], ...]] = {
    "Matern-1/2": ((0.5, 1.0),),
    "Matern-3/2": ((1.5, 1.0),),
    "Matern-5/2": ((2.5, 1.0),),
    "squared-exponential": ((math.inf, 1.0),),
    "Matern-3/2 + long squared-exponential": ((1.5, 1.0), (math.inf, 5.0)),
    "Matern-1/2 + long Matern-5/2": ((0.5, 1.0), (2.5, 5.0)),
}


def axis_kernel(smoothness: float, length: float) -> Kernel:
    """A kernel of one axis in float64; infinitely smooth is the squared exponential."""
    kernel = RBFKernel() if math.isinf(smoothness) else MaternKernel(nu=smoothness)
    kernel = kernel.double()
    kernel.lengthscale = length
    return kernel


@dataclass(frozen=True)
class Problem:
    """A kernel of :data:`KERNELS` on a grid on the unit square with gaps of one of :data:`GAPS`.

    The terms of a sum have a variance of one half each.
    """

    shape: tuple[int, int]
    gaps: str
    kernel: str
    length: float
    noise: float
    seed: int = 0

    def axes(self) -> list[Tensor]:
        return [torch.linspace(0, 1, size, dtype=torch.float64) for size in self.shape]

    def missing(self) -> Tensor:
        """True in the gaps. shape: (m_1, m_2)"""
        if self.gaps == "clouds":
            field = cloud_gaps(self.shape, _MISSING["clouds"], seed=self.seed)
            return torch.from_numpy(~field.slab(0, self.shape[0]))
        if self.gaps == "scattered":
            generator = torch.Generator().manual_seed(self.seed)
            return torch.rand(self.shape, generator=generator) < _MISSING["scattered"]
        rows, columns = torch.meshgrid(*self.axes(), indexing="ij")
        return (rows - 0.5) ** 2 + (columns - 0.5) ** 2 < _HOLE_RADIUS_SQUARED

    def index(self) -> Tensor:
        """Flat cell of every observation: a new tensor at every call, so that no neighbours are known. shape: (N,)"""
        return (~self.missing()).flatten().nonzero().squeeze(-1)

    def terms(self) -> list[list[Tensor]]:
        """The factors of every term. shape: (m_i, m_i) each"""
        own = KERNELS[self.kernel]
        found = []
        for smoothness, times in own:
            kernel = axis_kernel(smoothness, times * self.length)
            factors = [kernel(axis).to_dense().detach() for axis in self.axes()]
            found.append([factors[0] / len(own), *factors[1:]])
        return found

    def covariance(self) -> Any:
        """``K_XX + s2 I`` as a new operator, without cached results."""
        index = self.index()
        total: Any = None
        for factors in self.terms():
            term = SelectedKroneckerOperator(*factors, row_index=index)
            total = term if total is None else total + term
        return total.add_diagonal(torch.tensor([self.noise], dtype=torch.float64))

    def values(self) -> Tensor:
        """A wave and noise, NaN in the gaps. shape: (m_1, m_2)"""
        generator = torch.Generator().manual_seed(self.seed + 1)
        rows, columns = torch.meshgrid(*self.axes(), indexing="ij")
        white = torch.randn(self.shape, generator=generator, dtype=torch.float64)
        field = torch.sin(9 * rows) * torch.cos(7 * columns) + math.sqrt(self.noise) * white
        return field.masked_fill(self.missing(), math.nan)

    def draw(self) -> Tensor:
        """A draw from the model, NaN in the gaps. shape: (m_1, m_2)"""
        generator = torch.Generator().manual_seed(self.seed + 2)
        field = torch.zeros(self.shape, dtype=torch.float64)
        for factors in self.terms():
            first, second = (_root(factor) for factor in factors)
            field += first @ torch.randn(self.shape, generator=generator, dtype=torch.float64) @ second.mT
        field += math.sqrt(self.noise) * torch.randn(self.shape, generator=generator, dtype=torch.float64)
        return field.masked_fill(self.missing(), math.nan)

    def model(self, values: Tensor) -> Model:
        """An ``ExactGP`` with a zero mean that has this covariance, in training mode."""
        grid, x, y = gaps.from_array(values, self.axes())
        own = KERNELS[self.kernel]
        total: Any = None
        for smoothness, times in own:
            factors = [axis_kernel(smoothness, times * self.length) for _ in self.shape]
            term = ScaleKernel(gaps.GappyGridKernel(factors, grid)).double()
            term.outputscale = 1.0 / len(own)
            total = term if total is None else total + term
        likelihood = gaps.GappyGridLikelihood(noise_constraint=GreaterThan(1e-3 * self.noise)).double()
        likelihood.noise = self.noise
        return Model(x, y, likelihood, total).double().train()


def _root(factor: Tensor) -> Tensor:
    """R with ``R R' = K``, eigenvalues that are negative by rounding left out. shape: (m, m)"""
    values, vectors = torch.linalg.eigh(factor)
    return vectors * values.clamp_min(0.0).sqrt()


def grid_of(words: str) -> tuple[int, int]:
    """``"80x80"`` as a shape."""
    first, second = words.split("x")
    return int(first), int(second)


def labelled(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))
