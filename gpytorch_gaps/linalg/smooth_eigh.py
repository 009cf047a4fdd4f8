"""Eigenpairs of a smooth kernel matrix at its numerical rank, without an m x m eigen-decomposition.

A pivoted Cholesky decomposition ``F ~ L L'`` and the thin SVD ``L = U S V'`` give ``F ~ U S^2 U'``. For a positive
semi-definite F the error is bounded by ``||F - L L'||_2 <= trace(F - L L')``, up to rounding of about m eps ||F||, with
the eps of the precision of F. Cost: m r^2 for rank r, instead of m^3.

>>> x = torch.linspace(0, 1, 500, dtype=torch.float64)
>>> F = torch.exp(-(x[:, None] - x) ** 2)
>>> vectors, values, error = lowrank_eigh(F, 1e-10)
>>> vectors.shape[1] < 15, error <= 1e-10
(True, True)
"""

import math

import torch
from torch import Tensor

_CHUNK_NUMBERS = 2**23  # numbers in memory at a time: 64 MiB of float64
_MIN_SIZE = 1000  # for smaller matrices, ``eigh`` takes a fraction of a second


def lowrank_eigh(factor: Tensor, tolerance: float, max_rank: int | None = None) -> tuple[Tensor, Tensor, float]:
    """Leading eigenpairs of a positive semi-definite `factor`, up to an absolute error `tolerance` in the 2-norm.

    :param factor: shape (m, m).
    :param tolerance: absolute error of the approximation.
    :param max_rank: largest rank r.
    :return: eigenvectors (m, r) and eigenvalues (r,), ascending, in float64; and a bound on the error, which exceeds
        `tolerance` only if `max_rank` was reached or rounding (about m * 1e-16 * ||F||) allows no better.
    :raises ValueError: if `factor` is not a square matrix.
    """
    if factor.dim() != 2 or factor.size(0) != factor.size(1):
        raise ValueError(f"factor: got shape {tuple(factor.shape)}, expected a square matrix (m, m)")
    eps = torch.finfo(factor.dtype).eps if factor.is_floating_point() else torch.finfo(torch.float64).eps
    factor = factor.detach().double()
    size = factor.size(0)
    remaining = factor.diagonal().clone()
    # rows of L', so that each step is one matrix-vector product
    rows = factor.new_zeros(size if max_rank is None else min(size, max_rank), size)
    floor = eps * float(remaining.max().clamp_min(0.0))
    rank = 0
    while rank < len(rows):
        error = float(remaining.abs().sum())
        pivot_value, pivot = remaining.max(0)
        # Below the rounding floor a pivot is noise, and division by its root would amplify it.
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
    """``||F - V diag(t) V'||`` in the Frobenius norm, a bound on the 2-norm, computed in chunks of rows."""
    scaled, square = vectors * values, 0.0
    step = max(1, _CHUNK_NUMBERS // len(factor))
    for start in range(0, len(factor), step):
        rows = slice(start, start + step)
        square += float(torch.addmm(factor[rows], scaled[rows], vectors.mT, alpha=-1.0).square().sum())
    return math.sqrt(square)


def eigh_of_smooth(factor: Tensor) -> tuple[Tensor, Tensor] | None:
    """All eigenpairs, ascending, of a large factor with few eigenvalues above rounding; None for any other factor.

    The other eigenvalues are zero, with any orthonormal eigenvectors. Cost: 4/3 m^3 at the rate of a QR decomposition;
    ``eigh`` takes ten times as long.

    :param factor: symmetric, shape (m, m), float64.
    """
    size = len(factor)
    if size < _MIN_SIZE:
        return None
    limit = size // 4
    vectors, values, _ = lowrank_eigh(factor, 0.0, limit)
    rank = len(values)
    rounding = torch.finfo(torch.float64).eps * size * float(values[-1]) if rank else 0.0
    if not 0 < rank < limit or low_rank_distance(factor, vectors, values) > rounding:
        return None
    complete = torch.linalg.qr(vectors, mode="complete").Q
    return torch.cat([values.new_zeros(size - rank), values]), torch.cat([complete[:, rank:], vectors], -1)
