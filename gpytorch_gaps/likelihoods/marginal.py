"""The marginal distribution of noisy observations on a grid."""

import gpytorch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor


class MarginalNormal(MultivariateNormal):
    """``N(m, K + D)`` with a covariance that computes its own solves and log-determinants.

    In GPyTorch, ``gpytorch.settings.fast_computations.log_prob`` chooses between these and a dense N x N factorization.
    Importing BoTorch turns this setting off for the whole process. Here ``settings.logdet_method`` decides instead:
    ``logdet_method("exact")`` computes a dense log-determinant.
    """

    def log_prob(self, value: Tensor) -> Tensor:
        with gpytorch.settings.fast_computations.log_prob(True):
            return super().log_prob(value)
