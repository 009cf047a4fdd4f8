"""What comes after conditioning: means, variances, draws and scores of an ordinary ``ExactGP`` on a grid."""

from gpytorch_gaps.posterior.covariance import NoisyPosteriorCovarianceOperator, PosteriorCovarianceOperator
from gpytorch_gaps.posterior.strategy import GappyGridPredictionStrategy

__all__ = ["GappyGridPredictionStrategy", "NoisyPosteriorCovarianceOperator", "PosteriorCovarianceOperator"]
