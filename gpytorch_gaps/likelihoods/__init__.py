"""Gaussian likelihoods of observations on a grid."""

from gpytorch_gaps.likelihoods.grid_likelihood import GappyGridLikelihood

__all__ = ["GappyGridLikelihood"]
