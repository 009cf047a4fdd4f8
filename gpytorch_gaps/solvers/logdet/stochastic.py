"""Stochastic Lanczos quadrature: ``log|P^-1 A|`` from the tridiagonal matrices of preconditioned conjugate gradients.

For a probe z ~ N(0, P), Lanczos on ``P^-1/2 A P^-1/2`` from ``P^-1/2 z`` gives T with ``n e_1' log(T) e_1`` an
estimate of the log-determinant; the probes' spread is its standard error. Without P, probes are random signs.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from gpytorch_gaps.preconditioners.low_rank import LowRankPreconditioner

_OTHER_STREAM = 0x5DEECE66D  # added to the seed: the data may have been drawn with it


def log_quadrature(tridiagonal: Tensor, size: int) -> Tensor:
    """``n e_1' log(T) e_1`` of every probe. shape: (..., k, k) -> (...)"""
    values, vectors = torch.linalg.eigh(tridiagonal.double())
    tiny = torch.finfo(values.dtype).tiny
    return size * (vectors[..., 0, :].square() * values.clamp_min(tiny).log()).sum(-1)


def standard_error(estimates: Tensor) -> Tensor:
    """Standard error of the mean over probes. shape: (probes, *batch) -> batch"""
    if estimates.size(0) < 2:
        return torch.full_like(estimates[0], torch.inf)
    return estimates.std(0) / estimates.size(0) ** 0.5


def draw_probes(
    preconditioner: LowRankPreconditioner | None, size: int, batch: torch.Size, count: int, like: Tensor, repeat: bool
) -> Tensor:
    """Probes with covariance P, or random signs without one. shape: (*batch, n, count)

    :param like: a tensor of the dtype and on the device that they are wanted in.
    :param repeat: whether every call draws the same numbers, those that follow from ``torch.manual_seed``.
    """
    with torch.no_grad(), _repeatable(like.device) if repeat else _as_it_is():
        if preconditioner is not None:
            return preconditioner.draw(count, batch).to(like.dtype)
        signs = torch.randint(2, (count, *batch, size), device=like.device)
        return signs.mul_(2).sub_(1).to(like.dtype).movedim(0, -1)


@contextmanager
def _repeatable(device: torch.device) -> Iterator[None]:
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed((torch.initial_seed() + _OTHER_STREAM) % 2**63)
        yield


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield
