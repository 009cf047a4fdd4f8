"""Conjugate gradients on a system whose residual the original one amplifies: when to stop."""

from collections.abc import Callable

import torch
from torch import Tensor

from gpytorch_gaps.solvers.krylov import Closure, Stop, conjugate_gradients, waits

_TINY = 1e-300
_LOOK_EVERY = 8  # iterations after which the original residual is looked at, however far off it seems


def correct_amplified(
    residual: Tensor,
    dtype: torch.dtype,
    budget: int,
    *,
    matmul: Closure,
    precondition: Closure | None,
    original: Callable[[Tensor], Tensor],
    tolerance: float,
) -> tuple[Tensor, int]:
    """A correction that brings the *original* residual within the tolerance, and the iterations it took.

    :param residual: of the formulation's own system, shape (*batch, n, C).
    :param original: the measure of the original residual that one of the own system stands for, per column;
        it costs half an iteration.
    """
    floor = 10 * torch.finfo(dtype).eps
    until = _until_unread if waits(residual) else _until
    step, iterations, _ = conjugate_gradients(
        matmul,
        residual.to(dtype),
        stop=until(residual.norm(dim=-2), floor, original, tolerance),
        max_iterations=budget,
        precondition=precondition,
    )
    return step.double(), iterations


def _until(initial: Tensor, floor: float, original: Closure, tolerance: float) -> Stop:
    """Looks at the original residual where, by what it was last, it may have arrived."""
    first = _numbers(initial)
    amplification: list[float] = []
    since_look = 0

    def stop(current: Tensor) -> bool:
        nonlocal amplification, since_look
        sizes, since_look = _numbers(current.norm(dim=-2)), since_look + 1
        exhausted = [size <= floor * begun for size, begun in zip(sizes, first, strict=True)]
        if all(exhausted):
            return True
        far = any(size * factor > 1.5 * tolerance for size, factor in zip(sizes, amplification, strict=False))
        if far and since_look < _LOOK_EVERY:
            return False
        errors, since_look = _numbers(original(current)), 0
        amplification = [error / max(size, _TINY) for error, size in zip(errors, sizes, strict=True)]
        return all(error <= 0.9 * tolerance or done for error, done in zip(errors, exhausted, strict=True))

    return stop


def _until_unread(initial: Tensor, floor: float, original: Closure, tolerance: float) -> Stop:
    """The same on a device, where looks are rare: the original residual at each of them, and nothing is read."""

    def stop(current: Tensor) -> Tensor:
        exhausted = current.norm(dim=-2) <= floor * initial
        return (exhausted | (original(current) <= 0.9 * tolerance)).all()

    return stop


def _numbers(columns: Tensor) -> list[float]:
    """On the host, in one read: a few comparisons of numbers cost less there than as many calls."""
    return columns.flatten().tolist()
