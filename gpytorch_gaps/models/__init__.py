"""Predictions of an ordinary ``gpytorch.models.ExactGP`` whose kernel knows a grid."""

from gpytorch_gaps.models.prediction_strategy import GappyGridPredictionStrategy

__all__ = ["GappyGridPredictionStrategy"]
