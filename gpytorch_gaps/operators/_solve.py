"""Solves in the settings in force, for operators."""

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpytorch_gaps import settings
from gpytorch_gaps.precision import full_float32
from gpytorch_gaps.reports import NotConvergedWarning, SolveReport
from gpytorch_gaps.solvers.conjugate_gradients import conjugate_gradients, waits
from gpytorch_gaps.solvers.solve import solve_system
from gpytorch_gaps.solvers.system import GapSystem


def solve_in_force(system: GapSystem, rhs: Tensor, training: bool = False, guess: Tensor | None = None) -> Tensor:
    """``(W K W' + D)^-1 rhs`` by the method, rank and tolerance in force. shape: (*batch, N, C)"""
    solution, _ = solve_system(
        system,
        rhs,
        method=settings.gap_method.value(),
        rank=settings.preconditioner_rank.value(),
        tolerance=settings.tolerance_in_force(training),
        max_iterations=settings.max_iterations.value(),
        max_cholesky=settings.dense_size_in_force(),
        penalty=settings.gap_penalty.value(),
        guess=guess,
        mixed=settings.mixed_precision.value(),
    )
    return solution


_MAX_PASSES = 6
_LARGE = 2**17  # rows
_ON_HOST = 32  # linear_operator takes the eigenvalues of Lanczos matrices smaller than this on the host


@dataclass(frozen=True)
class KrylovResult:
    """Conjugate gradients on any matrix: what came out, and how well."""

    solution: Tensor  # shape: (*batch, n, C)
    lanczos: Tensor | None  # of the first columns, shape: (num_tridiag, *batch, k, k), float64
    residual: Tensor  # relative, shape: (*batch, C)
    iterations: int
    seconds: float
    tolerance: float

    @property
    def converged(self) -> bool:
        return bool((self.residual <= self.tolerance).all())

    def report(self, method: str, rank: int, flops: float, reason: str) -> SolveReport:
        return SolveReport(
            method=method,
            iterations=self.iterations,
            residual=self.residual,
            seconds=self.seconds,
            rank=rank,
            num_rhs=self.residual.numel(),
            converged=self.converged,
            tolerance=self.tolerance,
            flops=flops,
            reason=reason,
        )

    def as_upstream(self) -> Any:
        """What linear_operator expects of ``_solve``; a warning if it did not converge."""
        if not self.converged:
            warnings.warn(
                f"conjugate gradients stopped after {self.iterations} iterations with a relative residual of "
                f"{float(self.residual.max()):.1e} where {self.tolerance:.1e} was asked for. Try: more "
                "max_iterations, a diagonal added to the matrix, or a preconditioner_rank if the operator takes one.",
                NotConvergedWarning,
                stacklevel=2,
            )
        return self.solution if self.lanczos is None else (self.solution, self.lanczos.to(self.solution.dtype))


@full_float32()
def krylov_solve(
    matmul: Callable[[Tensor], Tensor],
    rhs: Tensor,
    precondition: Callable[[Tensor], Tensor] | None,
    num_tridiag: int,
    batch_shape: torch.Size,
    training: bool = False,
    guess: Tensor | None = None,
    inner: torch.dtype = torch.float64,
) -> KrylovResult:
    """Conjugate gradients to the tolerance in force, checked on the true residual.

    :param matmul: the product with a matrix of batch shape `batch_shape`, in float64, and in that of `inner`.
    :param num_tridiag: how many leading columns are probes whose Lanczos matrices are wanted.
    :param guess: of the solution, to start from; not with probes.
    :param inner: precision of the iterations; what they come to is refined in float64.
    """
    if _one_by_one(rhs, batch_shape):
        some = [
            krylov_solve(
                matmul,
                column,
                precondition,
                int(number < num_tridiag),
                batch_shape,
                training,
                None if guess is None else guess[..., number : number + 1],
                inner,
            )
            for number, column in enumerate(rhs.split(1, -1))
        ]
        return _side_by_side(some)
    started = time.perf_counter()
    wide = rhs.double().expand(*torch.broadcast_shapes(batch_shape, rhs.shape[:-2]), *rhs.shape[-2:])
    tolerance, budget = settings.tolerance_in_force(training), settings.max_iterations.value()
    norm = wide.norm(dim=-2)
    unit = torch.where(norm > 0, norm, torch.ones_like(norm))

    left_over = getattr(getattr(precondition, "__self__", None), "left_over", math.inf)
    if guess is None and precondition is not None and left_over <= tolerance:
        # the preconditioner is the matrix to this tolerance: one application, and one product to see that it is
        solution = precondition(wide)
        image = matmul(solution)
        error = (wide - image).norm(dim=-2) / unit
        if bool((error <= tolerance).all()):
            quotient = _quotient((solution * image).sum(-2), (solution * wide).sum(-2))  # shape: (*batch, C)
            lanczos = quotient[..., :num_tridiag, None, None].movedim(-3, 0) if num_tridiag else None
            seconds = time.perf_counter() - started
            return KrylovResult(solution.to(rhs.dtype), _staying(lanczos), error, 1, seconds, tolerance)

    solution = torch.zeros_like(wide) if guess is None else guess.double()
    residual = wide if guess is None else wide - matmul(solution)
    iterations, tridiagonal = 0, None
    for attempt in range(_MAX_PASSES):
        size = residual.norm(dim=-2)
        if ((attempt or guess is not None) and not bool((size > tolerance * norm).any())) or iterations >= budget:
            break
        floor = 0.0 if inner == torch.float64 else 10 * torch.finfo(inner).eps

        def stop(current: Tensor, least: Tensor = floor * size) -> Tensor:
            return (current.norm(dim=-2) <= (0.9 * tolerance * norm).maximum(least)).all()

        step, used, found = conjugate_gradients(
            matmul,
            residual.to(inner),
            stop=stop,
            max_iterations=budget - iterations,
            precondition=precondition,
            lanczos=bool(num_tridiag) and not attempt,
        )
        tridiagonal = found if found is not None else tridiagonal
        candidate, iterations = solution + step.double(), iterations + used
        left = wide - matmul(candidate)
        better = (left.norm(dim=-2) < size).unsqueeze(-2)  # false for NaN
        solution, residual = torch.where(better, candidate, solution), torch.where(better, left, residual)
        if bool((residual.norm(dim=-2) > 0.5 * size).all()):
            # no further in this precision: the recursive residual has parted from the true one
            if inner == torch.float64 and attempt:
                break
            inner = torch.float64
    # shape: (*batch, C, k, k) -> (num_tridiag, *batch, k, k)
    lanczos = _staying(None if tridiagonal is None else tridiagonal[..., :num_tridiag, :, :].movedim(-3, 0))
    seconds = time.perf_counter() - started
    return KrylovResult(solution.to(rhs.dtype), lanczos, residual.norm(dim=-2) / unit, iterations, seconds, tolerance)


def _one_by_one(rhs: Tensor, batch_shape: torch.Size) -> bool:
    """On a CPU the columns of a large grid are faster one after the other, and each stops where it is done."""
    alone = not batch_shape and rhs.dim() == 2 and rhs.size(-1) > 1
    return alone and rhs.device.type == "cpu" and rhs.size(-2) >= _LARGE


def _side_by_side(results: Sequence[KrylovResult]) -> KrylovResult:
    lanczos = [result.lanczos for result in results if result.lanczos is not None]
    longest = max((matrix.size(-1) for matrix in lanczos), default=0)
    padded = [_padded(matrix, longest) for matrix in lanczos]
    return KrylovResult(
        torch.cat([result.solution.mT for result in results]).mT,
        torch.cat(padded) if padded else None,
        torch.cat([result.residual for result in results], -1),
        max(result.iterations for result in results),
        sum(result.seconds for result in results),
        results[0].tolerance,
    )


def _staying(lanczos: Tensor | None) -> Tensor | None:
    """On a device, large enough not to be copied to the host for its eigenvalues."""
    if lanczos is None or not waits(lanczos) or lanczos.size(-1) >= _ON_HOST:
        return lanczos
    return _padded(lanczos, _ON_HOST)


def _padded(tridiagonal: Tensor, size: int) -> Tensor:
    """Goes on as the identity, decoupled. shape: (..., k, k) -> (..., size, size)"""
    short = tridiagonal.size(-1)
    result = torch.eye(size, dtype=tridiagonal.dtype, device=tridiagonal.device)
    result = result.expand(*tridiagonal.shape[:-2], size, size).clone()
    result[..., :short, :short] = tridiagonal
    return result


def _quotient(numerator: Tensor, denominator: Tensor) -> Tensor:
    """One where there is nothing to divide."""
    empty = denominator <= 0
    return torch.where(empty, torch.ones_like(numerator), numerator / denominator.masked_fill(empty, 1.0))
