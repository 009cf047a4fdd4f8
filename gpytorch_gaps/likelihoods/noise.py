"""Noise that is known, not learned."""

from typing import Any

import torch
from gpytorch.likelihoods.noise_models import Noise
from linear_operator.operators import ConstantDiagLinearOperator, DiagLinearOperator
from torch import Tensor


class GivenNoise(Noise):
    """Known variances, not learned. shape: (*batch, N) or (*batch, 1)"""

    def __init__(self, noise: Tensor) -> None:
        super().__init__()
        self.register_buffer("noise", noise.detach().clone())

    def forward(self, *params: Any, shape: torch.Size, **kwargs: Any) -> DiagLinearOperator:
        if self.noise.size(-1) not in (1, shape[-1]):
            raise ValueError(
                f"noise: got variances of shape {tuple(self.noise.shape)} for {shape[-1]} points; expected one for "
                "each observation, in the order of train_y; pass noise= for other points"
            )
        if self.noise.size(-1) == 1:
            return ConstantDiagLinearOperator(self.noise.expand(*shape[:-1], 1), diag_shape=shape[-1])
        return DiagLinearOperator(self.noise.expand(*shape[:-1], shape[-1]))
