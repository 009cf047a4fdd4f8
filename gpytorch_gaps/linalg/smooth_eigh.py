"""Eigenpairs of a smooth kernel matrix at its numerical rank, without an m x m eigen-decomposition.

``F ~ L L'`` by pivoted Cholesky, then the thin SVD ``L = U S V'`` gives ``F ~ U S^2 U'``. For a positive
semi-definite F the error is certified: ``||F - L L'||_2 <= trace(F - L L')``, up to rounding of about m eps ||F||,
eps being that of the factor's own precision. Cost: m r^2 for rank r, against m^3.

>>> x = torch.linspace(0, 1, 500, dtype=torch.float64)
>>> F = torch.exp(-(x[:, None] - x) ** 2)
>>> vectors, values, error = lowrank_eigh(F, 1e-10)
>>> vectors.shape[1] < 15, error <= 1e-10
(True, True)
"""

import math

import torch
from torch import Tensor

_CHUNK_NUMBERS = 2**23  # numbers held at once: 64 MiB of float64
_LARGE = 1000  # below, ``eigh`` takes a fraction of a second


def lowrank_eigh(factor: Tensor, tolerance: float, max_rank: int | None = None) -> tuple[Tensor, Tensor, float]:
    """Leading eigenpairs of a positive semi-definite `factor`, up to an absolute error `tolerance` in the 2-norm.

    :param factor: shape (m, m).
    :return: eigenvectors (m, r) and eigenvalues (r,), ascending, float64; and the bound on the error achieved, which
        exceeds `tolerance` only if `max_rank` was reached or rounding (about m * 1e-16 * ||F||) forbids better.
    """
    if factor.dim() != 2 or factor.size(0) != factor.size(1):
        raise ValueError(f"factor: got shape {tuple(factor.shape)}, expected a square matrix (m, m)")
    eps = torch.finfo(factor.dtype).eps if factor.is_floating_point() else torch.finfo(torch.float64).eps
    factor = factor.detach().double()
    size = factor.size(0)
    remaining = factor.diagonal().clone()
    # rows of L', so that each step is one GEMV
    rows = factor.new_zeros(size if max_rank is None else min(size, max_rank), size)
    floor = eps * float(remaining.max().clamp_min(0.0))
    rank = 0
    while rank < len(rows):
        error = float(remaining.abs().sum())
        pivot_value, pivot = remaining.max(0)
        # below the rounding floor a pivot is noise, and dividing by its root would amplify it
        if error <= tolerance or float(pivot_value) <= floor:
            break
        row = factor[pivot] - rows[:rank, pivot] @ rows[:rank]
        rows[rank] = row / pivot_value.sqrt()
        remaining = remaining - rows[rank].square()
        remaining[pivot] = 0.0
        rank += 1
    left, singular, _ = torch.linalg.svd(rows[:rank].mT, full_matrices=False)
    return left.flip(-1), singular.square().flip(-1), float(remaining.abs().sum())


def low_rank_distance(factor: Tensor, vectors: Tensor, values: Tensor) -> float:
    """``|F - V diag(t) V'|`` in the Frobenius norm, which bounds the 2-norm, a few rows at a time."""
    scaled, square = vectors * values, 0.0
    step = max(1, _CHUNK_NUMBERS // len(factor))
    for start in range(0, len(factor), step):
        rows = slice(start, start + step)
        square += float(torch.addmm(factor[rows], scaled[rows], vectors.mT, alpha=-1.0).square().sum())
    return math.sqrt(square)


def eigh_of_smooth(factor: Tensor) -> tuple[Tensor, Tensor] | None:
    """All eigenpairs, ascending, of a large factor that has few above rounding; None for any other.

    The rest of the basis is any orthonormal one, with eigenvalues of zero. Cost: 4/3 m^3 at the rate of a QR
    decomposition, where ``eigh`` takes ten times as long.

    :param factor: symmetric, shape (m, m), float64.
    """
    size = len(factor)
    if size < _LARGE:
        return None
    limit = size // 4
    vectors, values, _ = lowrank_eigh(factor, 0.0, limit)
    rank = len(values)
    rounding = torch.finfo(torch.float64).eps * size * float(values[-1]) if rank else 0.0
    if not 0 < rank < limit or low_rank_distance(factor, vectors, values) > rounding:
        return None
    complete = torch.linalg.qr(vectors, mode="complete").Q
    return torch.cat([values.new_zeros(size - rank), values]), torch.cat([complete[:, rank:], vectors], -1)
