"""Weights of the posterior mean: iterations in float32, residuals in float64, until the mean is certified.

Iterations stop on the bound ``||T^(1/2) r|| / s2`` of :meth:`WeightSpace.error_in_std`. The dense block of the
preconditioner is set up once the iterations so far show that continuing without it costs more.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpytorch_gaps.reconstruction.weight_space import WeightSpace
from gpytorch_gaps.solvers.krylov import LOOK, Descent
from gpytorch_gaps.solvers.planning.rates import rates_of
from gpytorch_gaps.solvers.refine import refine
from gpytorch_gaps.utils.progress import LateBar

_MIN_ITERATIONS_FOR_RATE = 10  # after which the rate of convergence is known
# factor by which iterations may reduce a residual before it is computed again in float64
_REACH = {torch.float32: 2e-7, torch.float64: 1e-13}
_FLOAT32_SPEED = 2.0  # of a sweep, relative to float64, in which a block is set up
_CALLS_PER_ITERATION = 60.0  # of torch
_NUMBERS_MOVED_PER_CELL = 5.0  # by a sweep, in cache
_LONG_SWEEP_FLOPS = 1e10  # beside which waiting for a device costs nothing
_SAFE_SCALE = 1e20  # right-hand sides within 1e-20 .. 1e20 are safe in float32


@dataclass
class WeightSolution:
    """Weights, and how good they are."""

    weights: Tensor
    residual: float  # relative, of the weights' own system
    error_in_std: float  # certified bound on the error of the mean
    iterations: int
    passes: int
    rank: int  # size of the dense block
    flops: float
    converged: bool


@dataclass
class _ErrorOfMean:
    """The goal of the refinement: a bound on the error of the mean."""

    tolerance: float


class WeightSolver:
    """The spectral formulation of a grid that is swept, for one right-hand side.

    :param space: the system.
    :param rhs: ``Phi' W' y``.
    :param tolerance: largest error of the mean, in posterior standard deviations.
    :param max_iterations: of conjugate gradients, in all.
    :param memory: bytes that the dense block may take.
    :param watch: called with the weights and the number of iterations so far, after every look at the residual.
    """

    def __init__(
        self,
        space: WeightSpace,
        rhs: Tensor,
        tolerance: float,
        max_iterations: int,
        memory: float,
        watch: Callable[[Tensor, int], None],
    ) -> None:
        largest = space.weights.largest(rhs)
        self._scale = 1.0 if largest == 0.0 or 1.0 / _SAFE_SCALE < largest < _SAFE_SCALE else largest
        self.space, self.rhs, self.goal = space, rhs / self._scale, _ErrorOfMean(tolerance)
        self.max_iterations, self.memory, self.watch = max_iterations, memory, watch
        self.flops, self.rank, self._iterations = 0.0, 0, 0
        self._precondition = space.precondition
        short = space.product_flops / space.weights.comm.size < _LONG_SWEEP_FLOPS
        self._iterations_per_look = LOOK if short and space.grid.device.type != "cpu" else 1
        self._candidate = self._accepted = torch.zeros_like(rhs)
        self._rounding, self._least_error, self._at_zero = 0.0, math.inf, False

    @property
    def reduction(self) -> float:
        """The factor by which the bound on the error must fall from that of weights of zero."""
        tolerance = self.goal.tolerance
        return min(0.5, tolerance / max(self._bound(self.rhs), tolerance))

    def solve(self, start: Tensor | None = None) -> WeightSolution:
        """The weights, from a start if there is one."""
        found = refine(self, start, torch.float32, self.max_iterations)  # type: ignore[arg-type]
        norm = self.space.weights.norm
        return WeightSolution(
            weights=found.solution,
            residual=norm(found.residual) / (norm(self.rhs) or 1.0),
            error_in_std=self._least_error,
            iterations=found.iterations,
            passes=found.passes,
            rank=self.rank,
            flops=self.flops,
            converged=self._least_error <= self.goal.tolerance,
        )

    # -- as a formulation: iterates and residuals are columns of shape (R, 1) ------------------------------------------

    def start(self, guess: Tensor | None) -> Tensor:
        self._at_zero = guess is None
        return (torch.zeros_like(self.rhs) if guess is None else guess / self._scale).reshape(-1, 1)

    def residual(self, iterate: Tensor) -> Tensor:
        self._candidate = iterate.view(self.rhs.shape)
        self._rounding = self._scale * self.space.rounding_in_std(self._candidate)
        if self._at_zero:
            self._at_zero = False
            return self.rhs.view(-1, 1)
        self.flops += self.space.product_flops
        return (self.rhs - self.space.matmul(self._candidate)).view(-1, 1)

    def original(self, residual: Tensor) -> Tensor:
        """The certified error of the last iterate. shape: (1,)"""
        error = math.hypot(self._bound(residual), self._rounding)
        if error < self._least_error:  # as the refinement does: it keeps the best iterate
            self._accepted, self._least_error = self._candidate, error
        return residual.new_tensor([error])

    def correct(self, residual: Tensor, dtype: torch.dtype, budget: int) -> tuple[Tensor, int]:
        """Conjugate gradients from zero, until the error of the mean should be within the tolerance."""
        residual = residual.view(self.rhs.shape).clone()
        first = error = self._bound(residual)
        target = max(0.5 * self.goal.tolerance, _REACH[dtype] * first)
        run = self._run(residual, torch.zeros_like(residual), dtype)
        used, bar = 0, LateBar("conjugate gradients")
        while error > target and used < budget:
            for _ in range(min(self._iterations_per_look, budget - used)):
                run.step()
                used += 1
            error = self._bound(run.residual)
            if not math.isfinite(error):
                break
            bar.update()
            self.watch((self._accepted + run.solution) * self._scale, self._iterations + used)
            if self._block_pays(used, budget, error, first, dtype):
                self._set_up_block()
                run = self._run(run.residual, run.solution, dtype)
        bar.close()
        self._iterations += used
        self.flops += used * self.space.product_flops
        return run.solution.view(-1, 1), used

    def finish(self, iterate: Tensor) -> Tensor:
        return iterate.view(self.rhs.shape) * self._scale

    def _run(self, residual: Tensor, solution: Tensor, dtype: torch.dtype) -> Descent:
        dot = self.space.weights.dot
        return Descent(lambda w: self.space.matmul(w, dtype), self._precondition, residual, solution, dot)

    def _bound(self, residual: Tensor) -> float:
        return self._scale * self.space.error_in_std(residual.view(self.rhs.shape))

    # -- the dense block -----------------------------------------------------------------------------------------------

    def _block_pays(self, used: int, budget: int, error: float, first: float, dtype: torch.dtype) -> bool:
        """Whether the remaining iterations, at the rate so far, exceed the budget or cost more than the dense block.

        FLOPs decide, not measured rates: every process must come to the same decision.
        """
        size, tolerance = self.space.block_size(self.memory), self.goal.tolerance
        if self.rank or used < _MIN_ITERATIONS_FOR_RATE or error <= tolerance or not size:
            return False
        rate = math.log(error / first) / used
        left = math.log(tolerance / error) / rate if rate < 0 else math.inf
        speed = _FLOAT32_SPEED if dtype == torch.float32 else 1.0
        return left > budget - used or left * self.space.product_flops > speed * self.space.block_flops(size)

    def _set_up_block(self) -> None:
        self.rank = self.space.block_size(self.memory)
        self.flops += self.space.block_flops(self.rank)
        self._precondition = self.space.leading_block(self.rank).precondition

    # -- what to expect ------------------------------------------------------------------------------------------------

    def expected_seconds(self) -> float:
        """Seconds that the solve should take on this machine if the gaps are scattered."""
        space, processes = self.space, self.space.weights.comm.size
        iterations = space.expected_iterations(self.reduction) / processes
        passes = max(1.0, math.log(self.reduction) / math.log(_REACH[torch.float32])) / processes
        total = 0.0
        for dtype, count in ((torch.float32, iterations), (torch.float64, passes)):  # a float64 residual per pass
            moved = count * dtype.itemsize * _NUMBERS_MOVED_PER_CELL * space.num_cells
            calls = count * _CALLS_PER_ITERATION
            total += rates_of(space.grid.device, dtype).seconds(count * space.product_flops, moved, calls)
        return total
