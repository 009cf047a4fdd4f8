"""Noise variances that are known, not learned."""

from typing import Any

import torch
from gpytorch.likelihoods.noise_models import Noise
from linear_operator.operators import ConstantDiagLinearOperator, DiagLinearOperator
from numpy.typing import ArrayLike
from torch import Tensor


class GivenNoise(Noise):
    """Known variances: one for all observations, or one for each. shape: (*batch, 1) or (*batch, N)"""

    def __init__(self, noise: Tensor) -> None:
        super().__init__()
        self.register_buffer("noise", noise.detach().clone())

    def forward(self, *params: Any, shape: torch.Size, **kwargs: Any) -> DiagLinearOperator:
        if self.noise.size(-1) not in (1, shape[-1]):
            raise ValueError(
                f"noise: got variances of shape {tuple(self.noise.shape)} for {shape[-1]} points, expected one for "
                "each observation, in the order of train_y; pass noise= for other points"
            )
        if self.noise.size(-1) == 1:
            return ConstantDiagLinearOperator(self.noise.expand(*shape[:-1], 1), diag_shape=shape[-1])
        return DiagLinearOperator(self.noise.expand(*shape[:-1], shape[-1]))


def as_variances(noise: ArrayLike | Tensor) -> Tensor:
    """Finite variances above 0 as a floating-point tensor of at least one dimension.

    >>> as_variances(0.5)
    tensor([0.5000])
    """
    tensor = noise if isinstance(noise, Tensor) else torch.as_tensor(noise)
    if not torch.is_tensor(noise) and (tensor.dim() == 0 or not tensor.is_floating_point()):
        tensor = tensor.to(torch.get_default_dtype())
    tensor = tensor.unsqueeze(-1) if tensor.dim() == 0 else tensor
    if not tensor.is_floating_point() or not bool((tensor > 0).all()) or not bool(tensor.isfinite().all()):
        came = f"{tensor.dtype} with a minimum of {float(tensor.min())}"
        raise ValueError(f"noise: got {came}, expected finite variances above 0")
    return tensor
