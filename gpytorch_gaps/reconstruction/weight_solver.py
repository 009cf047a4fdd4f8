"""Weights of the posterior mean: iterations in float32, residuals in float64, until the mean is certified.

The refinement stops by the bound ``||T^(1/2) r|| / s2`` of :meth:`WeightSpace.error_in_std`. The dense block of the
preconditioner is set up as soon as the rate of convergence shows that it costs less than continuing without it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from gpytorch_gaps.reconstruction.weight_space import LeadingBlock, WeightSpace
from gpytorch_gaps.solvers.goal import Goal
from gpytorch_gaps.solvers.krylov import ITERATIONS_BETWEEN_READS, ConjugateGradients, on_device
from gpytorch_gaps.solvers.refine import Formulation, refine
from gpytorch_gaps.utils.progress import LateBar
from gpytorch_gaps.utils.rates import rates_of

_MIN_ITERATIONS_FOR_RATE = 10  # after so many iterations, the rate of convergence is known
# factor by which iterations may reduce a residual before it is computed again in float64
_REACH = {torch.float32: 2e-7, torch.float64: 1e-13}
_FLOAT32_SPEED = 2.0  # speed of a sweep in float32 relative to float64; a block is set up in float64
_CALLS_PER_ITERATION = 60.0  # number of torch calls
_NUMBERS_MOVED_PER_CELL = 5.0  # numbers that a sweep moves, in cache
_LONG_SWEEP_FLOPS = 1e10  # for such a sweep, the wait for a device is negligible
_SAFE_SCALE = 1e20  # right-hand sides within 1e-20 .. 1e20 are safe in float32

Watch = Callable[[Callable[[], Tensor], int], None]


@dataclass
class WeightSolution:
    """Weights, and their accuracy."""

    weights: Tensor
    left: Tensor  # residual in float64
    residual: float  # its norm, relative to that of the right-hand side
    error_in_std: float  # certified bound on the error of the mean
    iterations: int
    passes: int
    rank: int  # size of the dense block
    flops: float
    converged: bool


class WeightSolver(Formulation):
    """The spectral formulation for a large grid. Its right-hand side is one column, the flattened box.

    :param space: the system.
    :param rhs: ``Phi' W' y``, a box of weights.
    :param tolerance: largest error of the mean, in posterior standard deviations.
    :param max_iterations: largest total number of conjugate gradient iterations.
    :param memory: bytes that the dense block may take.
    :param watch: called after every check of the residual, with a function that returns the current weights, and with
        the number of iterations.
    """

    is_original = True
    restarts = 0

    def __init__(
        self,
        space: WeightSpace,
        rhs: Tensor,
        tolerance: float,
        max_iterations: int,
        memory: float,
        watch: Watch,
    ) -> None:
        largest = space.weights.largest(rhs)
        self._scale = 1.0 if largest == 0.0 or 1.0 / _SAFE_SCALE < largest < _SAFE_SCALE else largest
        self.space, self.tolerance, self.max_iterations, self.memory = space, tolerance, max_iterations, memory
        self.watch = watch
        self.block: LeadingBlock | None = None
        system: Any = space  # the refinement needs only its norms
        goal = Goal(system, tolerance, unit=rhs.new_tensor([1.0 / self._scale]))
        super().__init__(system, rhs.reshape(-1, 1) / self._scale, goal)
        self.matmul_flops = space.product_flops
        self._iterations, self._precondition, self._shape = 0, space.precondition, rhs.shape
        short = space.product_flops / space.weights.comm.size < _LONG_SWEEP_FLOPS
        self._iterations_per_look = ITERATIONS_BETWEEN_READS if short and on_device(rhs) else 1
        self._candidate = self._accepted = torch.zeros_like(self.rhs)
        self._least_error, self._at_zero = math.inf, False

    def for_rhs(self, rhs: Tensor, tolerance: float) -> "WeightSolver":
        """The same system for another right-hand side, with the same preconditioner."""
        other = WeightSolver(self.space, rhs, tolerance, self.max_iterations, self.memory, lambda *_: None)
        if self.block is not None:
            other.use_block(self.block)
        return other

    @cached_property
    def expected_iterations(self) -> float:
        """Expected number of iterations if the gaps are scattered."""
        return self.space.expected_iterations(self._reduction)

    @cached_property
    def _reduction(self) -> float:
        """The required reduction of the bound on the error, relative to weights of zero."""
        return min(0.5, self.tolerance / max(self._bound(self.rhs), self.tolerance))

    def solve(self, start: Tensor | None = None) -> WeightSolution:
        """The weights. Iterations begin at `start`, if it is given."""
        found = refine(self, start, torch.float32, self.max_iterations)
        norm = self.space.weights.norm
        return WeightSolution(
            weights=self._box(found.solution),
            left=self._scale * self._box(found.residual),
            residual=norm(found.residual) / (norm(self.rhs) or 1.0),
            error_in_std=self._least_error,
            iterations=found.iterations,
            passes=found.passes,
            rank=self.rank,
            flops=found.flops,
            converged=self._least_error <= self.tolerance,
        )

    def _box(self, column: Tensor) -> Tensor:
        return column.reshape(self._shape)

    def _weights_after(self, step: Tensor) -> Tensor:
        return (self._box(self._accepted) + step) * self._scale

    def _bound(self, residual: Tensor) -> float:
        return self._scale * self.space.error_in_std(self._box(residual))

    # -- the formulation -----------------------------------------------------------------------------------------------

    def start(self, guess: Tensor | None) -> Tensor:
        self._at_zero = guess is None
        return torch.zeros_like(self.rhs) if guess is None else guess.reshape(-1, 1) / self._scale

    def residual(self, iterate: Tensor) -> Tensor:
        self._candidate = iterate
        if self._at_zero:
            self._at_zero = False
            return self.rhs
        self.flops += self.matmul_flops
        return self.rhs - self.matmul(iterate)

    def original_error(self, residual: Tensor) -> Tensor:
        """The certified error of the last iterate, including rounding. shape: (1,)"""
        rounding = self._scale * self.space.rounding_in_std(self._box(self._candidate))
        error = math.hypot(self._bound(residual), rounding)
        if error < self._least_error:  # the refinement keeps the best iterate as well
            self._accepted, self._least_error = self._candidate, error
        return residual.new_tensor([error])

    def solution(self, iterate: Tensor) -> Tensor:
        return iterate * self._scale

    def matmul(self, x: Tensor) -> Tensor:
        return self.space.matmul(self._box(x)).reshape(-1, 1)

    def solve_correction(self, residual: Tensor, dtype: torch.dtype, budget: int) -> tuple[Tensor, int]:
        """Conjugate gradients from zero, until the estimated error of the mean is within the tolerance."""
        first = error = self._bound(residual)
        target = max(0.5 * self.tolerance, _REACH[dtype] * first)
        run = self._run(self._box(residual).clone(), torch.zeros_like(self._box(residual)), dtype)
        used, bar = 0, LateBar("conjugate gradients")
        while error > target and used < budget:
            for _ in range(min(self._iterations_per_look, budget - used)):
                run.step()
                used += 1
            error = self._bound(run.residual)
            if not math.isfinite(error):
                break
            bar.update()
            self.watch(partial(self._weights_after, run.solution), self._iterations + used)
            if self._block_pays(used, budget, error, first, dtype):
                self._set_up_block()
                run = self._run(run.residual, run.solution, dtype)
        bar.close()
        self._iterations += used
        self.flops += used * self.matmul_flops
        return run.solution.reshape(-1, 1), used

    def _run(self, residual: Tensor, solution: Tensor, dtype: torch.dtype) -> ConjugateGradients:
        return ConjugateGradients(
            lambda w: self.space.matmul(w, dtype),
            residual,
            solution=solution,
            precondition=self._precondition,
            dots=self.space.weights.dot,
        )

    # -- the dense block -----------------------------------------------------------------------------------------------

    def _block_pays(self, used: int, budget: int, error: float, first: float, dtype: torch.dtype) -> bool:
        """Whether the remaining iterations, at the current rate, exceed the budget or cost more than the dense block.

        Costs are FLOPs and not measured times, so that every process takes the same decision.
        """
        size, tolerance = self.space.block_size(self.memory), self.tolerance
        if self.rank or used < _MIN_ITERATIONS_FOR_RATE or error <= tolerance or not size:
            return False
        rate = math.log(error / first) / used
        left = math.log(tolerance / error) / rate if rate < 0 else math.inf
        speed = _FLOAT32_SPEED if dtype == torch.float32 else 1.0
        return left > budget - used or left * self.space.product_flops > speed * self.space.block_flops(size)

    def _set_up_block(self) -> None:
        rank = self.space.block_size(self.memory)
        self.flops += self.space.block_flops(rank)
        self.use_block(self.space.leading_block(rank))

    def use_block(self, block: LeadingBlock) -> None:
        """Use this block as preconditioner from now on."""
        self.block, self._precondition = block, block.precondition

    @property
    def rank(self) -> int:
        """The number of functions in the dense block."""
        return 0 if self.block is None else self.block.positions.size(-1)

    # -- what to expect ------------------------------------------------------------------------------------------------

    def expected_seconds(self) -> float:
        """Expected duration of the solve on this machine, in seconds, if the gaps are scattered."""
        space, processes = self.space, self.space.weights.comm.size
        iterations = self.expected_iterations / processes
        passes = max(1.0, math.log(self._reduction) / math.log(_REACH[torch.float32])) / processes
        total = 0.0
        for dtype, count in ((torch.float32, iterations), (torch.float64, passes)):  # a float64 residual per pass
            moved = count * dtype.itemsize * _NUMBERS_MOVED_PER_CELL * space.num_cells
            calls = count * _CALLS_PER_ITERATION
            total += rates_of(space.grid.device, dtype).seconds(count * space.product_flops, moved, calls)
        return total
