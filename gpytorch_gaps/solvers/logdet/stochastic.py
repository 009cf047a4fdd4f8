"""Stochastic Lanczos quadrature: ``log|P^-1 A|`` from the tridiagonal matrices of preconditioned conjugate gradients.

For a probe z ~ N(0, P), Lanczos on ``P^-1/2 A P^-1/2`` from ``P^-1/2 z`` gives T with ``n e_1' log(T) e_1`` an
estimate of the log-determinant; the probes' spread is its standard error.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import linear_operator
import torch
from torch import Tensor


@contextmanager
def estimating() -> Iterator[None]:
    """Has linear_operator estimate log-determinants, whatever it would do by its own settings for a matrix so small,
    or in a process that has turned estimates off (importing BoTorch does): we have decided already.
    """
    with linear_operator.settings.max_cholesky_size(0), linear_operator.settings.fast_computations(log_prob=True):
        yield


def log_quadrature(tridiagonal: Tensor, size: int) -> Tensor:
    """``n e_1' log(T) e_1`` of every probe. shape: (..., k, k) -> (...)"""
    values, vectors = torch.linalg.eigh(tridiagonal.double())
    tiny = torch.finfo(values.dtype).tiny
    return size * (vectors[..., 0, :].square() * values.clamp_min(tiny).log()).sum(-1)


def standard_error(estimates: Tensor) -> Tensor:
    """Of the mean over probes. shape: (probes, *batch) -> batch"""
    if estimates.size(0) < 2:
        return torch.full_like(estimates[0], torch.inf)
    return estimates.std(0) / estimates.size(0) ** 0.5
