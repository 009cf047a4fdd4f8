"""A system for a symmetric positive definite matrix of which only products are available."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from gpytorch_gaps.solvers.system import NoisySystem


class MatrixSystem(NoisySystem):
    """``A x = y`` for an operator without noise of its own, or for the matrix of fill-gaps.

    :param matmul: the product with A, in the precision of its argument. shape: (*batch, n, C)
    """

    def __init__(self, matmul: Callable[[Tensor], Tensor], size: int, device: torch.device, flops: float = 0.0) -> None:
        nothing = torch.zeros(1, dtype=torch.float64, device=device)
        super().__init__([], torch.zeros(0, dtype=torch.long, device=device), nothing, size)
        self._matmul, self._flops = matmul, flops

    def matmul(self, x: Tensor) -> Tensor:
        return self._matmul(x)

    @property
    def product_flops(self) -> float:
        return self._flops


@dataclass(frozen=True)
class GivenPreconditioner:
    """A preconditioner of which only solves are available, such as one of the user."""

    solve: Callable[[Tensor], Tensor]
    rank: int = 0
    flops: float = 0.0
    left_over: float = inf
