"""A differentiable root of a covariance, although eigenvectors have no derivative if eigenvalues are repeated.

``K = Q T Q'`` has the symmetric root ``S = Q T^(1/2) Q'``, which does not depend on the choice of Q, and whose
derivative solves ``S dS + dS S = dK``: entry by entry, ``dS_ab = dK_ab / (s_a + s_b)`` in the eigenbasis. Repeated
eigenvalues are no problem. A thin root is ``R = S Q_r``, where Q_r are the r eigenvectors whose eigenvalues exceed
rounding. They are held fixed, and ``R R' = K`` holds for values and first derivatives. A draw is ``S z = R (Q_r' z)``
with m standard normal numbers z. It does not depend on the choice of eigenvectors, as ``R z'`` with r numbers would,
and is a smooth function of K.

>>> root, _ = kernel_root(torch.tensor([[4.0, 0.0], [0.0, 0.0]], dtype=torch.float64))
>>> root.abs().tolist()
[[2.0], [0.0]]
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from gpytorch_gaps.autograd.first_order import refuse_second_order
from gpytorch_gaps.linalg.circulant import CirculantOperator
from gpytorch_gaps.linalg.frequencies import by_frequency


def kernel_root(matrix: Tensor, floor: float | None = None) -> tuple[Tensor, Tensor]:
    """R with ``R R' = K``, and ``R^+'``, the transpose of its pseudo-inverse, in float64. Cost: m^3.

    :param matrix: symmetric positive semi-definite up to rounding, shape (*batch, m, m).
    :param floor: eigenvalues up to here count as rounding; default: eps times the largest.
    :return: shape (*batch, m, r) each.
    """
    return _KernelRoot.apply(matrix.double(), floor)


def directions(root: Tensor) -> Tensor:
    """Q_r of a root ``R = Q_r T_r^(1/2)``, held fixed. shape: (*batch, m, r)"""
    length = root.detach().norm(dim=-2, keepdim=True)
    return root.detach() / length.masked_fill(length == 0, 1.0)


def symmetric_root(matrix: Tensor) -> Tensor:
    """S with ``S S = K``, in float64. shape: (*batch, m, m)"""
    root, _ = kernel_root(matrix)
    return root @ directions(root).mT


def circulant_root(covariance: CirculantOperator) -> CirculantOperator:
    """``W_r C^(1/2)``: rows of the symmetric root of a torus, in float64; negative eigenvalues become zero.

    shape: (*batch, q, places of the torus)
    """
    torus_dims, spectrum = len(covariance.torus), covariance.spectrum()
    if covariance.num_dense == (1, 1):
        lost = torch.finfo(spectrum.dtype).eps * spectrum.detach().flatten(-torus_dims).amax(-1)
        kept = spectrum > lost.reshape(*lost.shape, *[1] * torus_dims)
        root = torch.where(kept, spectrum.masked_fill(~kept, 1.0).sqrt(), 0.0)
    else:
        roots = symmetric_root(by_frequency(spectrum, torus_dims))
        root = roots.movedim(-3, -1).unflatten(-1, spectrum.shape[-torus_dims:])
    table = torch.fft.irfftn(root, s=covariance.torus, dim=tuple(range(-torus_dims, 0)))
    for axis, places in enumerate(covariance.torus, start=-torus_dims):
        table = table.narrow(axis, 0, places // 2 + 1)  # it is even
    torus = covariance.torus
    return CirculantOperator(table, torus=torus, row_positions=covariance.row_positions, col_positions=torus)


class _KernelRoot(Function):
    @staticmethod
    def forward(ctx: Any, matrix: Tensor, floor: float | None) -> tuple[Tensor, Tensor]:
        values, vectors = torch.linalg.eigh(0.5 * (matrix + matrix.mT))
        lost = torch.finfo(values.dtype).eps * values.amax(-1, keepdim=True) if floor is None else floor
        kept = values > lost
        width = max(1, int(kept.sum(-1).max()))  # ascending: the last ones
        roots = torch.where(kept, values.clamp_min(0.0).sqrt(), torch.zeros_like(values))
        inverse = torch.where(kept, 1.0 / roots.masked_fill(~kept, 1.0), torch.zeros_like(values))
        ctx.save_for_backward(vectors, roots, inverse)
        thin = vectors[..., -width:]
        return thin * roots[..., None, -width:], thin * inverse[..., None, -width:]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        refuse_second_order()
        vectors, roots, inverse = ctx.saved_tensors
        grad_root, grad_inverse = grad_outputs
        thin = vectors[..., -grad_root.size(-1) :]
        # d tr(G'S Q_r) = tr(Q_r G' dS), and dS^-1 = -S^-1 dS S^-1; in the eigenbasis
        direct = vectors.mT @ grad_root @ (thin.mT @ vectors)
        by_inverse = inverse.unsqueeze(-1) * (vectors.mT @ grad_inverse @ (thin.mT @ vectors)) * inverse.unsqueeze(-2)
        total = roots.unsqueeze(-1) + roots.unsqueeze(-2)
        gone = total == 0
        image = (direct - by_inverse).masked_fill(gone, 0.0) / total.masked_fill(gone, 1.0)
        gradient = vectors @ image @ vectors.mT
        return 0.5 * (gradient + gradient.mT), None
