"""Predictions of an ordinary ``ExactGP`` on a grid: means, variances, draws and scores."""

from gpytorch_gaps.posterior.covariance import NoisyPosteriorCovarianceOperator, PosteriorCovarianceOperator
from gpytorch_gaps.posterior.strategy import GappyGridPredictionStrategy

__all__ = ["GappyGridPredictionStrategy", "NoisyPosteriorCovarianceOperator", "PosteriorCovarianceOperator"]
