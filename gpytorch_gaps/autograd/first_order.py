"""Exact first derivatives. Second derivatives are not implemented, and raise an error instead of being wrong.

Eigenvalues are differentiated without their eigenvectors. ``d lambda = q' (dK) q`` holds for simple eigenvalues. It
also holds for repeated ones in symmetric functions of them, with any orthonormal basis of the eigenspace. In contrast,
``dq`` contains divisions by differences of eigenvalues. Eigenvalues therefore enter autograd as Rayleigh quotients with
frozen eigenvectors. Their values and first derivatives are exact.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from gpytorch_gaps.linalg.circle_eigen import CircleBasis
from gpytorch_gaps.linalg.circulant import CirculantOperator
from gpytorch_gaps.linalg.factors import Basis, Factor


def refuse_second_order() -> None:
    """Raises inside a backward pass that is itself differentiated: only ``create_graph=True`` enables gradients there.

    :raises RuntimeError: where gradients are enabled.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            "create_graph=True: second derivatives of solves, log-determinants and eigenvalues are not implemented; "
            "expected first derivatives only"
        )


class FirstOrderOnly(Function):
    """The identity, with a backward pass that raises an error if it is differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        refuse_second_order()
        return grad_outputs[0]


def frozen_eigenvalues(factors: Sequence[Factor], vectors: Sequence[Basis]) -> list[Tensor]:
    """``q' K q`` for every eigenvector of every factor, float64. shape: (*batch, m_i, m_i) -> (*batch, r_i)

    Values that rounding made negative are set to zero but keep their derivative, which a clamp would drop.
    """
    quotients = [_quotients(f.double(), q) for f, q in zip(factors, vectors, strict=True)]
    return [FirstOrderOnly.apply(quotient - quotient.detach().clamp_max(0.0)) for quotient in quotients]


def _quotients(factor: Factor, vectors: Basis) -> Tensor:
    if isinstance(factor, CirculantOperator):
        assert isinstance(vectors, CircleBasis)
        return vectors.quotients(factor)
    assert torch.is_tensor(vectors)
    return (vectors.detach() * (factor @ vectors.detach())).sum(-2)
