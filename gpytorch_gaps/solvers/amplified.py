"""Conjugate gradients on a system whose residual the original one amplifies: when to stop."""

from collections.abc import Callable

import torch
from torch import Tensor

from gpytorch_gaps.solvers.conjugate_gradients import Closure, conjugate_gradients

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
    :param original: the relative residual of the original system that one of the own system stands for, per column;
        it costs half an iteration, and is asked for only when it may have arrived.
    """
    floor = 10 * torch.finfo(dtype).eps
    initial = residual.norm(dim=-2)
    amplification: Tensor | None = None
    since_look = 0

    def stop(current: Tensor) -> bool:
        nonlocal amplification, since_look
        size, since_look = current.norm(dim=-2), since_look + 1
        exhausted = size <= floor * initial
        if bool(exhausted.all()):
            return True
        expected = None if amplification is None else size * amplification
        far = expected is not None and bool((expected > 1.5 * tolerance).any())
        if far and since_look < _LOOK_EVERY:
            return False
        error, since_look = original(current), 0
        amplification = error / size.clamp_min(torch.finfo(size.dtype).tiny)
        return bool(((error <= 0.9 * tolerance) | exhausted).all())

    step, iterations, _ = conjugate_gradients(
        matmul, residual.to(dtype), stop=stop, max_iterations=budget, precondition=precondition
    )
    return step.double(), iterations
