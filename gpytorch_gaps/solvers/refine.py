"""Iterative refinement on the residual that matters.

A formulation of the system (ignore, fill, penalize) knows three things: its own residual, computed afresh in float64;
what that means for the original system; and how to correct an iterate, in whatever precision. The loop corrects until
every column of the *original* system meets its goal, and keeps the best iterate of every column:

    r = residual(x);   stop if original(r) <= tolerance;   x += correct(r)

Refining the formulation's own system contracts whatever the amplification between its residual and the original one.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gpytorch_gaps.solvers.goal import Goal

_MAX_PASSES = 12


class Formulation(Protocol):
    """One way to write the system, for one set of right-hand sides."""

    flops: float
    goal: Goal

    def start(self, guess: Tensor | None) -> Tensor:
        """The first iterate, from a guess of ``a`` where there is one."""

    def residual(self, iterate: Tensor) -> Tensor:
        """Of the formulation's own system, in float64."""

    def original(self, residual: Tensor) -> Tensor:
        """What the goal measures of the residual of ``(W K W' + D) a = y``, per column. shape: (*batch, C)"""

    def correct(self, residual: Tensor, dtype: torch.dtype, budget: int) -> tuple[Tensor, int]:
        """An approximate solution of the own system for `residual`, and the iterations it took."""

    def finish(self, iterate: Tensor) -> Tensor:
        """``a`` in float64."""


@dataclass(frozen=True)
class Outcome:
    solution: Tensor  # shape: (*batch, N, C), float64
    residual: Tensor  # of the formulation's own system
    iterations: int
    passes: int


def refine(form: Formulation, guess: Tensor | None, dtype: torch.dtype, budget: int) -> Outcome:
    """Corrects until every column meets the goal, for `budget` iterations, or until there is no more progress."""
    tolerance = form.goal.tolerance
    iterate = form.start(guess)
    residual = form.residual(iterate)
    error = form.original(residual)
    iterations = passes = 0
    for _ in range(_MAX_PASSES):
        if bool((error <= tolerance).all()) or iterations >= budget:
            break
        step, used = form.correct(residual, dtype, budget - iterations)
        iterations, passes = iterations + used, passes + 1
        candidate = iterate + step
        new_residual = form.residual(candidate)
        new_error = form.original(new_residual)
        better = new_error < error  # false for NaN: a column that blew up keeps its last good iterate
        pending = error > tolerance
        stalled = not bool((pending & (new_error < 0.5 * error)).any())
        iterate = torch.where(better.unsqueeze(-2), candidate, iterate)
        residual = torch.where(better.unsqueeze(-2), new_residual, residual)
        error = torch.where(better, new_error, error)
        if stalled:
            if dtype == torch.float64:
                break
            dtype = torch.float64  # the lower precision cannot contract this system any further
    return Outcome(form.finish(iterate), residual, iterations, passes)
