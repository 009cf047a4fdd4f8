"""Structured kernel interpolation at scattered points: interpolated eigenvectors against pivoted Cholesky.

    python -m benchmarks.ski

50,000 points at random on the unit square, a grid of 200 x 150 places, data drawn from the model. The same system is
solved to a relative residual of 1e-6 by our solver, which chooses its rank, and by linear_operator's conjugate
gradients with its own preconditioner, a pivoted Cholesky factor. Both use our product with the matrix, so that
iterations and seconds are those of the preconditioner alone. The defaults take three to five minutes on one core.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import linear_operator
import torch
from linear_operator.operators import AddedDiagLinearOperator, ConstantDiagLinearOperator
from linear_operator.utils import linear_cg
from linear_operator.utils.cholesky import psd_safe_cholesky
from torch import Tensor

from benchmarks._machine import machine_facts
from benchmarks._results import markdown_table
from gpytorch_gaps import record_solves, settings
from gpytorch_gaps.linalg.products import kron_matmul
from gpytorch_gaps.operators import GridInterpolation, InterpolatedKroneckerOperator

TOLERANCE = 1e-6
_BORDER = 0.02  # of the unit square, by which the grid is larger


@dataclass(frozen=True)
class Row:
    """One system and one preconditioner."""

    kernel: str
    noise: float
    preconditioner: str
    rank: int
    iterations: int
    residual: float
    setup_seconds: float
    seconds: float  # with the set-up

    @property
    def converged(self) -> bool:
        return self.residual <= TOLERANCE


@dataclass(frozen=True)
class Problem:
    """A covariance of scattered points, without noise, and data drawn from it with noise."""

    kernel: str
    noise: float
    covariance: InterpolatedKroneckerOperator
    data: Tensor  # shape: (N, 1)


def squared_exponential(distance: Tensor) -> Tensor:
    return torch.exp(-0.5 * distance.square())


def matern52(distance: Tensor) -> Tensor:
    scaled = math.sqrt(5.0) * distance
    return (1.0 + scaled + scaled.square() / 3.0) * torch.exp(-scaled)


KERNELS: dict[str, Callable[[Tensor], Tensor]] = {"SE": squared_exponential, "Matern-5/2": matern52}


def problem(kernel: str, noise: float, num_points: int, shape: Sequence[int], lengthscale: float, seed: int) -> Problem:
    """Points at random, and a draw from the model."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.rand(num_points, len(shape), generator=generator, dtype=torch.float64)
    axes = [torch.linspace(-_BORDER, 1.0 + _BORDER, size, dtype=torch.float64) for size in shape]
    factors = [KERNELS[kernel]((axis[:, None] - axis).abs() / lengthscale) for axis in axes]
    rows = GridInterpolation.cubic(axes, points)
    roots = [psd_safe_cholesky(factor + 1e-10 * torch.eye(len(factor), dtype=factor.dtype)) for factor in factors]
    normals = torch.randn(math.prod(shape), 1, generator=generator, dtype=torch.float64)
    errors = torch.randn(num_points, 1, generator=generator, dtype=torch.float64)
    data = rows.select(kron_matmul(roots, normals)) + math.sqrt(noise) * errors
    return Problem(kernel, noise, InterpolatedKroneckerOperator(*factors, rows=rows), data)


def by_eigenvectors(own: Problem) -> Row:
    """Our solver. The time of the set-up is the difference between the first and the second solve."""
    operator = own.covariance.with_factors([factor.clone() for factor in own.covariance.factors])
    noisy = operator.add_diagonal(own.noise)
    seconds = []
    with settings.solve_tolerance(TOLERANCE), settings.gap_method("ignore"), record_solves() as reports:
        for _ in range(2):
            started = time.perf_counter()
            noisy.solve(own.data)
            seconds.append(time.perf_counter() - started)
    report = reports[-1]
    return Row(
        own.kernel,
        own.noise,
        "eigenvectors",
        report.rank,
        report.iterations,
        report.worst_residual,
        seconds[0] - seconds[1],
        seconds[0],
    )


def by_pivoted_cholesky(own: Problem, rank: int, cap: int) -> Row:
    """linear_operator's conjugate gradients and preconditioner, for at most `cap` iterations."""
    noise = ConstantDiagLinearOperator(torch.tensor([own.noise], dtype=torch.float64), diag_shape=len(own.data))
    products = 0

    def matmul(x: Tensor) -> Tensor:
        nonlocal products
        products += 1
        return own.covariance._matmul(x) + own.noise * x

    started = time.perf_counter()
    with (
        torch.no_grad(),
        linear_operator.settings.max_preconditioner_size(rank),
        linear_operator.settings.min_preconditioning_size(1),
        linear_operator.settings.terminate_cg_by_size(False),
    ):
        apply, *_ = AddedDiagLinearOperator(own.covariance, noise)._preconditioner()
        setup = time.perf_counter() - started
        solution = linear_cg(
            matmul, own.data, tolerance=TOLERANCE, max_iter=cap, max_tridiag_iter=0, preconditioner=apply
        )
    seconds, iterations = time.perf_counter() - started, products - 1  # the first product is the initial residual
    residual = float((own.data - matmul(solution)).norm() / own.data.norm())
    return Row(own.kernel, own.noise, "pivoted Cholesky", rank, iterations, residual, setup, seconds)


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    for kernel in KERNELS:
        for noise in arguments.noise:
            own = problem(kernel, noise, arguments.points, arguments.shape, arguments.lengthscale, arguments.seed)
            yield by_eigenvectors(own)
            for rank in arguments.ranks:
                yield by_pivoted_cholesky(own, rank, arguments.cap)


def table(rows: Iterable[Row]) -> str:
    """One line a row; what did not converge is shown by its residual."""
    lines = [
        [
            row.kernel,
            f"{row.noise:.0e}",
            row.preconditioner,
            str(row.rank),
            str(row.iterations) if row.converged else f"> {row.iterations} (at {row.residual:.0e})",
            f"{row.setup_seconds:.2f}",
            f"{row.seconds:.2f}",
        ]
        for row in rows
    ]
    return markdown_table(
        ["kernel", "noise", "preconditioner", "rank", "iterations", "set-up (s)", "with set-up (s)"], lines
    )


def main(words: Sequence[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ski", description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=50_000)
    parser.add_argument("--shape", type=int, nargs="+", default=[200, 150], help="places on each axis of the grid")
    parser.add_argument("--lengthscale", type=float, default=0.1)
    parser.add_argument("--noise", type=float, nargs="+", default=[1e-2, 1e-4])
    parser.add_argument("--ranks", type=int, nargs="+", default=[15, 100], help="ranks of pivoted Cholesky")
    parser.add_argument("--cap", type=int, default=10_000, help="largest number of iterations")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(words)
    print(", ".join(f"{name}: {value}" for name, value in machine_facts().items()))
    print(f"{arguments.points} points, {arguments.shape} places, length-scale {arguments.lengthscale}\n")
    rows = list(measure(arguments))
    print(table(rows))
    return rows


if __name__ == "__main__":
    main()
