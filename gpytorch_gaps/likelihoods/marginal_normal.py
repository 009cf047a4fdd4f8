"""The distribution of noisy observations, whose log-density is the operator's business."""

import gpytorch
from gpytorch.distributions import MultivariateNormal
from torch import Tensor


class MarginalNormal(MultivariateNormal):
    """``N(m, K + D)`` with a covariance that owns its solves and log-determinants.

    ``gpytorch.settings.fast_computations.log_prob`` would choose between that and a dense N x N factorisation. It is a
    setting of the process: importing BoTorch turns it off for everyone. Here ``settings.logdet_method`` decides, and
    ``logdet_method("exact")`` is how to ask for a dense log-determinant.
    """

    def log_prob(self, value: Tensor) -> Tensor:
        with gpytorch.settings.fast_computations.log_prob(True):
            return super().log_prob(value)
