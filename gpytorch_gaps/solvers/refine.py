"""Iterative refinement on the original residual: one loop for all formulations.

Each formulation of the problem (ignore, fill, penalize, spectral) has its own system. The loop corrects an iterate of
this system, in any precision, and recomputes its residual in float64:

    r = residual(x);   x += solve_correction(r)

The residual of the original system may be amplified, but refinement of the formulation's own system converges anyway.
Once its own residual meets the goal, the original residual is checked. There are two reasons to continue: rounding may
be amplified too, to about ``1e-16 |K| / s2``; and the required accuracy of a variance is only known now. In both cases,
the same formulation starts again on the remaining original residual.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from gpytorch_gaps.solvers.goal import Goal, largest
from gpytorch_gaps.solvers.krylov import Closure, Stop, amplified_stop, conjugate_gradients
from gpytorch_gaps.solvers.system import NoisySystem

_MAX_PASSES = 12
_MAX_RESTARTS = 3
_WORTH_RESTART = 0.1  # if the relative residual is smaller, another solve should improve it


class Preconditioner(Protocol):
    """The interface of a preconditioner for conjugate gradients."""

    @property
    def rank(self) -> int: ...

    @property
    def flops(self) -> float:
        """FLOPs of applying it to one column."""

    @property
    def left_over(self) -> float:
        """A bound on its difference from the matrix, over the noise: below a tolerance, it equals the matrix."""

    @property
    def solve(self) -> Callable[[Tensor], Tensor]:
        """``P^-1 x``, in the precision of x. shape: (*batch, N, C)"""


class Formulation(ABC):
    """One way to write the system, for one set of right-hand sides.

    :param system: the original system.
    :param rhs: shape (*batch, N, C), float64.
    :param goal: the goal of its solution.
    :param patience: iterations after which a correction stops if they have not halved the residual. 0: never.
    """

    is_original = False
    """Whether the formulation's own system is the original one."""
    is_direct = False
    """Whether a correction is a factorised solve, which needs no special case for zero right-hand sides."""
    error_is_cheap = False
    """Whether `original_error` needs no product, so that it can be computed at every iteration."""
    restarts = _MAX_RESTARTS
    """How often the formulation may start again on the remaining original residual."""
    margin = 0.9
    """Factor of the tolerance for the recursive residual, which drifts away from the true one."""
    matmul_flops = 0.0
    """FLOPs of one product with the formulation's own matrix and one column."""

    def __init__(self, system: NoisySystem, rhs: Tensor, goal: Goal, patience: int = 0) -> None:
        self.system, self.rhs, self.goal, self.patience = system, rhs, goal, patience
        self.flops = 0.0
        self.num_columns = rhs.shape[:-2].numel() * rhs.size(-1)
        self._preconditioner: Preconditioner | None = None
        self.keeps_lanczos = False
        self.lanczos: Tensor | None = None  # Lanczos matrix of the first correction, if kept. shape: (*batch, C, k, k)

    @abstractmethod
    def start(self, guess: Tensor | None) -> Tensor:
        """The first iterate, from a guess of ``a`` if there is one."""

    @abstractmethod
    def residual(self, iterate: Tensor) -> Tensor:
        """The residual of the formulation's own system, in float64."""

    @abstractmethod
    def original_error(self, residual: Tensor) -> Tensor:
        """The error of the original system, in the unit of the goal, for an own residual. shape: (*batch, C)"""

    @abstractmethod
    def solution(self, iterate: Tensor) -> Tensor:
        """``a`` in float64. shape: (*batch, N, C)"""

    @abstractmethod
    def matmul(self, x: Tensor) -> Tensor:
        """The product with the formulation's own matrix, in the precision of x."""

    def preconditioner(self, dtype: torch.dtype) -> Closure | None:
        """The preconditioner of conjugate gradients."""
        return None if self._preconditioner is None else self._preconditioner.solve

    @property
    def preconditioner_flops(self) -> float:
        return 0.0 if self._preconditioner is None else self._preconditioner.flops

    def direct_solution(self, residual: Tensor) -> tuple[Tensor, int] | None:
        """A solution for `residual` that needs no conjugate gradients, and the iterations it counts as."""
        return None

    def solve_correction(self, residual: Tensor, dtype: torch.dtype, budget: int) -> tuple[Tensor, int]:
        """An approximate solution of the own system for `residual`, in float64, and the number of iterations."""
        direct = self.direct_solution(residual)
        if direct is not None:
            return direct
        wanted = self.keeps_lanczos and self.lanczos is None
        step, iterations, found = conjugate_gradients(
            self.matmul,
            residual.to(dtype),
            stop=self._stop(residual.norm(dim=-2), dtype),
            max_iterations=budget,
            precondition=self.preconditioner(dtype),
            lanczos=wanted,
            patience=self.patience,
        )
        self.lanczos = found if wanted else self.lanczos
        self.flops += iterations * self.num_columns * (self.matmul_flops + self.preconditioner_flops)
        return step.double(), iterations

    def _stop(self, initial: Tensor, dtype: torch.dtype) -> Stop:
        if not self.error_is_cheap:
            return amplified_stop(initial, dtype, self.original_error, self.goal.tolerance)
        floor = 10 * torch.finfo(dtype).eps * initial

        def stop(current: Tensor) -> Tensor:
            done = self.original_error(current) <= self.margin * self.goal.tolerance
            return (done | (current.norm(dim=-2) <= floor)).all()

        return stop

    def again(self, rhs: Tensor, goal: Goal) -> "Formulation":
        """The same formulation for other right-hand sides."""
        return type(self)(self.system, rhs, goal, patience=self.patience)


@dataclass
class Refined:
    """A solution, its residual in the original system, and the work it took."""

    solution: Tensor  # shape: (*batch, N, C), float64
    residual: Tensor  # residual of the original system, shape: (*batch, N, C), float64
    goal: Goal
    error: float  # error of the worst column, in the unit of the goal
    iterations: int = 0
    passes: int = 0
    flops: float = 0.0

    @property
    def converged(self) -> bool:
        return self.error <= self.goal.tolerance


def refine(form: Formulation, guess: Tensor | None, dtype: torch.dtype, budget: int) -> Refined:
    """Corrects until every column meets the goal, for `budget` iterations, or until there is no more progress.

    Every column keeps its best iterate.

    :param guess: starting value of ``a``. shape (*batch, N, C).
    :param dtype: the precision of the first iterations. If they do not converge in it, they continue in float64.
    """
    system, rhs, goal = form.system, form.rhs, form.goal
    current, best, restarts_left = _Iterate.first(form, guess), None, form.restarts
    iterations = passes = 0
    flops, size = 0.0, torch.ones((), dtype=rhs.dtype, device=rhs.device)
    while True:
        if not current.met and iterations < budget and current.passes < _MAX_PASSES:
            used, stalled = current.correct(dtype, budget - iterations)
            iterations, passes = iterations + used, passes + 1
            if not (stalled and dtype == torch.float64):
                dtype = torch.float64 if stalled else dtype  # no further convergence in the lower precision
                continue
        # the formulation cannot improve its own residual: check the original system
        own = current.form.solution(current.value) * size
        solution = own if best is None else best.solution + own
        same = best is None and form.is_original
        left = current.residual if same else rhs - system.matmul(solution)
        flops += current.form.flops + (0.0 if same else form.num_columns * system.product_flops)
        assessed = goal.assessed(rhs, solution, left)
        known = same and assessed is goal and math.isfinite(current.worst)
        goal = assessed
        before = math.inf if best is None else goal.worst(best.residual)
        found = Refined(solution, left, goal, current.worst if known else goal.worst(left))
        best = found if best is None or found.error < before else replace(best, goal=goal, error=before)
        gained = found.error <= 0.5 * before or math.isinf(before)
        done = best.converged or not gained or iterations >= budget or not restarts_left
        if done or largest(system.column_norms(best.residual) / system.residual_unit(rhs)) >= _WORTH_RESTART:
            return replace(best, iterations=iterations, passes=passes, flops=flops)
        # the rest may be solved for with a larger relative residual
        restarts_left, unit = restarts_left - 1, system.residual_unit(best.residual)
        size = unit.unsqueeze(-2)
        current = _Iterate.first(form.again(best.residual / size, goal.of_correction(unit, best.error)), None)


@dataclass
class _Iterate:
    """An iterate of a formulation's own system, its residual, and the error of the original system."""

    form: Formulation
    value: Tensor
    residual: Tensor
    error: Tensor  # shape: (*batch, C)
    worst: float  # the largest error that the host has read; infinite at first
    passes: int = 0

    @classmethod
    def first(cls, form: Formulation, guess: Tensor | None) -> "_Iterate":
        value = form.start(guess)
        residual = form.residual(value)
        error = form.original_error(residual)
        # a factorisation needs no starting value
        return cls(form, value, residual, error, math.inf if form.is_direct and guess is None else largest(error))

    @property
    def met(self) -> bool:
        return self.worst <= self.form.goal.tolerance

    def correct(self, dtype: torch.dtype, budget: int) -> tuple[int, bool]:
        """One correction: its number of iterations, and whether no column above the goal had its error halved."""
        step, iterations = self.form.solve_correction(self.residual, dtype, budget)
        candidate = self.value + step
        residual = self.form.residual(candidate)
        error = self.form.original_error(residual)
        better = error < self.error  # false for NaN: a diverged column keeps its last good iterate
        halved = (self.error > self.form.goal.tolerance) & (error < 0.5 * self.error)
        self.value = torch.where(better.unsqueeze(-2), candidate, self.value)
        self.residual = torch.where(better.unsqueeze(-2), residual, self.residual)
        self.error = torch.where(better, error, self.error)
        self.passes += 1
        if not error.numel():
            self.worst = 0.0
            return iterations, True
        numbers = torch.stack([self.error.nan_to_num(math.inf, math.inf).max(), halved.any().to(error)])
        self.worst, any_halved = numbers.tolist()  # both in one read
        return iterations, not any_halved
