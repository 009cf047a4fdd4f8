"""Solves in the settings in force, for operators."""

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gpytorch_gaps import settings
from gpytorch_gaps.reports import NotConvergedWarning, SolveReport
from gpytorch_gaps.solvers.goal import largest
from gpytorch_gaps.solvers.krylov import conjugate_gradients, waits
from gpytorch_gaps.solvers.solve import solve_system
from gpytorch_gaps.solvers.system import GapSystem
from gpytorch_gaps.utils.precision import full_float32


def solve_in_force(
    system: GapSystem, rhs: Tensor, training: bool = False, guess: Tensor | None = None, of_data: bool = False
) -> Tensor:
    """``(W K W' + D)^-1 rhs`` by the current method, rank and tolerance. shape: (*batch, N, C)

    :param of_data: whether a posterior mean follows from the solution: its certified error is then held to
        ``settings.mean_tolerance``.
    """
    solution, _ = solve_system(
        system,
        rhs,
        method=settings.gap_method.value(),
        rank=settings.preconditioner_rank.value(),
        tolerance=settings.tolerance_in_force(training),
        error_in_std=settings.mean_tolerance_in_force() if of_data else None,
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
    error_in_std: float = math.inf  # of the worst column, where the noise is known
    std_tolerance: float | None = None

    @cached_property
    def excess(self) -> float:
        """By what factor the worst column misses what was asked for; at most 1 where it does not."""
        relative = largest(self.residual) / self.tolerance
        return relative if self.std_tolerance is None else max(relative, self.error_in_std / self.std_tolerance)

    @property
    def converged(self) -> bool:
        return self.excess <= 1.0

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
            error_in_std=self.error_in_std,
            std_tolerance=self.std_tolerance,
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
    noise: Tensor | None = None,
    error_in_std: float | None = None,
    patience: int = 0,
    rounding: Callable[[Tensor], Tensor] | None = None,
) -> KrylovResult:
    """Conjugate gradients to the current tolerance, checked on the true residual.

    :param matmul: the product with a matrix of batch shape `batch_shape`, in float64, and in that of `inner`.
    :param num_tridiag: how many leading columns are probes whose Lanczos matrices are wanted.
    :param guess: of the solution, to start from; not with probes.
    :param inner: precision of the iterations; what they come to is refined in float64.
    :param noise: D of a matrix ``K + D``, shape (*batch, N): the error of a posterior mean is then certified.
    :param error_in_std: what that error must reach.
    :param patience: iterations that need not halve the residual; after more, it gives up. 0: never.
    :param rounding: what rounding may add to the certified error of a solution, per column.
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
                noise,
                error_in_std,
                patience,
                rounding,
            )
            for number, column in enumerate(rhs.split(1, -1))
        ]
        return _side_by_side(some)
    started = time.perf_counter()
    wide = rhs.double().expand(*torch.broadcast_shapes(batch_shape, rhs.shape[:-2]), *rhs.shape[-2:])
    tolerance, budget = settings.tolerance_in_force(training), settings.max_iterations.value()
    norm = wide.norm(dim=-2)
    unit = torch.where(norm > 0, norm, torch.ones_like(norm))
    in_noise = None if noise is None else noise.double().rsqrt().unsqueeze(-1)
    if error_in_std is not None and (in_noise is None or not bool(in_noise.isfinite().all())):
        error_in_std = None  # without noise there is no certificate

    def measure(left: Tensor) -> Tensor:
        """The larger of the relative residual and the certified error, each over what it may be, times `tolerance`."""
        relative = left.norm(dim=-2) / unit
        if error_in_std is None or in_noise is None:
            return relative
        return relative.maximum((left * in_noise.to(left.dtype)).norm(dim=-2) * (tolerance / error_in_std))

    def result(lanczos: Tensor | None, left: Tensor, iterations: int) -> KrylovResult:
        seconds = time.perf_counter() - started
        more = 0.0 if rounding is None else rounding(solution)
        bound = math.inf if in_noise is None else largest((left * in_noise).norm(dim=-2) + more)
        return KrylovResult(
            solution.to(rhs.dtype), _staying(lanczos), left.norm(dim=-2) / unit, iterations, seconds, tolerance, bound,
            error_in_std,
        )  # fmt: skip

    left_over = getattr(getattr(precondition, "__self__", None), "left_over", math.inf)
    if guess is None and precondition is not None and left_over <= tolerance:
        # the preconditioner is the matrix to this tolerance: one application, and one product to see that it is
        solution = precondition(wide)
        image = matmul(solution)
        if bool((measure(wide - image) <= tolerance).all()):
            quotient = _quotient((solution * image).sum(-2), (solution * wide).sum(-2))  # shape: (*batch, C)
            lanczos = quotient[..., :num_tridiag, None, None].movedim(-3, 0) if num_tridiag else None
            return result(lanczos, wide - image, 1)

    solution = torch.zeros_like(wide) if guess is None else guess.double()
    residual = wide if guess is None else wide - matmul(solution)
    iterations, tridiagonal = 0, None
    for attempt in range(_MAX_PASSES):
        error, size = measure(residual), residual.norm(dim=-2)
        if ((attempt or guess is not None) and not bool((error > tolerance).any())) or iterations >= budget:
            break
        floor = 0.0 if inner == torch.float64 else 10 * torch.finfo(inner).eps

        def stop(current: Tensor, least: Tensor = floor * size) -> Tensor:
            return ((measure(current) <= 0.9 * tolerance) | (current.norm(dim=-2) <= least)).all()

        step, used, found = conjugate_gradients(
            matmul,
            residual.to(inner),
            stop=stop,
            max_iterations=budget - iterations,
            precondition=precondition,
            lanczos=bool(num_tridiag) and not attempt,
            patience=patience,
        )
        tridiagonal = found if found is not None else tridiagonal
        candidate, iterations = solution + step.double(), iterations + used
        left = wide - matmul(candidate)
        better = (measure(left) < error).unsqueeze(-2)  # false for NaN
        solution, residual = torch.where(better, candidate, solution), torch.where(better, left, residual)
        if bool((residual.norm(dim=-2) > 0.5 * size).all()):
            # no further in this precision: the recursive residual has parted from the true one
            if inner == torch.float64 and (attempt or patience):
                break
            inner = torch.float64
    # shape: (*batch, C, k, k) -> (num_tridiag, *batch, k, k)
    return result(
        None if tridiagonal is None else tridiagonal[..., :num_tridiag, :, :].movedim(-3, 0), residual, iterations
    )


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
        max(result.error_in_std for result in results),
        results[0].std_tolerance,
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
