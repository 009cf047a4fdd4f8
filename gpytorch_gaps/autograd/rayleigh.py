"""Eigenvalues that may be differentiated although their eigenvectors may not.

``d lambda = q' (dK) q`` holds for simple and repeated eigenvalues alike (any orthonormal basis of the eigenspace
serves for symmetric functions of them), while ``dq`` divides by eigenvalue differences. So eigenvalues enter autograd
as Rayleigh quotients with frozen eigenvectors: their value and first derivative are exact.
"""

from collections.abc import Sequence

from torch import Tensor

from gpytorch_gaps.autograd.first_order import FirstOrderOnly


def frozen_eigenvalues(factors: Sequence[Tensor], vectors: Sequence[Tensor]) -> list[Tensor]:
    """``q' K q`` for every eigenvector of every factor, float64. shape: (*batch, m_i, m_i) -> (*batch, r_i)

    Values that rounding made negative are zero, with their derivative kept: a clamp would drop it.
    """
    quotients = [(q.detach() * (f.double() @ q.detach())).sum(-2) for f, q in zip(factors, vectors, strict=True)]
    return [FirstOrderOnly.apply(quotient - quotient.detach().clamp_max(0.0)) for quotient in quotients]
