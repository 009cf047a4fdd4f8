"""Stochastic Lanczos quadrature: ``log|P^-1 A|`` from the tridiagonal matrices of preconditioned conjugate gradients.

For a probe z ~ N(0, P), Lanczos on ``P^-1/2 A P^-1/2`` from ``P^-1/2 z`` gives a tridiagonal T, and
``n e_1' log(T) e_1`` is an estimate of the log-determinant. The standard error of the mean over probes comes from their
spread. Without P, probes are random signs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_OTHER_STREAM = 0x5DEECE66D  # added to the seed: the data may have been drawn with it


def log_quadrature(tridiagonal: Tensor, size: int, mean_is_one: bool = False) -> Tensor:
    """``n e_1' log(T) e_1`` of every probe. shape: (*batch, probes, k, k) -> (*batch, probes)

    :param mean_is_one: whether the eigenvalues of the matrix have a mean of exactly one. A multiple of
        ``n (e_1' T e_1 - 1)`` is then subtracted, which has the expectation zero. The factor with the least variance is
        ``<log x, x - 1> / <x - 1, x - 1>`` over the spectrum. It is computed from the other probes, because a factor
        that depends on the same probe would cause bias. For a single probe it is one, as for eigenvalues near one.
    """
    weights, logs = log_residuals(tridiagonal, mean_is_one)
    return size * (weights * logs).sum(-1)


def log_residuals(tridiagonal: Tensor, mean_is_one: bool, own_slope: bool = False) -> tuple[Tensor, Tensor]:
    """Weights of the Ritz values x of every probe, and ``log x`` or ``log x - c (x - 1)``.

    :param own_slope: whether c may come from the same probe if there is no other. This is right for variances only.

    shape: (*batch, probes, k) each
    """
    values, vectors = torch.linalg.eigh(tridiagonal.double())
    weights, logs = vectors[..., 0, :].square(), values.clamp_min(torch.finfo(values.dtype).tiny).log()
    if not mean_is_one:
        return weights, logs
    excess = values - 1.0
    products, squares = ((weights * excess * other).sum(-1) for other in (logs, excess))
    if products.size(-1) > 1 or not own_slope:
        products, squares = (own.sum(-1, keepdim=True) - own for own in (products, squares))  # of all other probes
    slopes = torch.where(squares > 0, products / squares.masked_fill(squares <= 0, 1.0), torch.ones_like(squares))
    return weights, logs - slopes.unsqueeze(-1) * excess


def standard_error(estimates: Tensor) -> Tensor:
    """Standard error of the mean over probes. shape: (probes, *batch) -> batch"""
    if estimates.size(0) < 2:
        return torch.full_like(estimates[0], torch.inf)
    return estimates.std(0) / estimates.size(0) ** 0.5


def draw_probes(preconditioner: Any, size: int, batch: torch.Size, count: int, like: Tensor, repeat: bool) -> Tensor:
    """Probes with covariance P, or random signs without one. shape: (*batch, n, count)

    :param like: a tensor with the dtype and device of the result.
    :param repeat: whether every call draws the same numbers, which depend on ``torch.manual_seed``.
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
