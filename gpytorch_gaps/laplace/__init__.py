"""Gaussian processes with observations that are not Gaussian, by Laplace's approximation."""

from gpytorch_gaps.laplace.marginal import LaplaceMarginalLogLikelihood
from gpytorch_gaps.laplace.model import LaplaceGP

__all__ = ["LaplaceGP", "LaplaceMarginalLogLikelihood"]
