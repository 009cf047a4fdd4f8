"""A 2-D field with clouds and dead pixels, solved by every method of the paper, side by side."""

import math
import platform

import linear_operator
import torch
from torch import Tensor

from gpytorch_gaps import settings
from gpytorch_gaps.grid.data import from_array
from gpytorch_gaps.linalg.products import kron_matmul
from gpytorch_gaps.operators import SelectedKroneckerOperator
from gpytorch_gaps.reports import SolveReport, record_solves

SHAPE = (60, 90)
NOISE = 1e-2
METHODS = {
    "auto": ("auto", None),
    "fill": ("fill", None),
    "ignore": ("ignore", 0),
    "ignore, rank 200": ("ignore", 200),
    "penalize": ("penalize", None),
    "spectral": ("spectral", None),
    "cholesky": ("cholesky", None),
}


def matern(size: int, lengthscale: float) -> Tensor:
    """Matern-3/2 on [0, 1]. shape: (size, size)"""
    x = torch.linspace(0, 1, size, dtype=torch.float64)
    distance = math.sqrt(3.0) * (x.unsqueeze(-1) - x).abs() / lengthscale
    return (1 + distance) * torch.exp(-distance)


def draw(factors: list[Tensor], generator: torch.Generator) -> Tensor:
    """A sample of the prior on the grid."""
    roots = [torch.linalg.cholesky(factor + 1e-9 * torch.eye(len(factor), dtype=factor.dtype)) for factor in factors]
    white = torch.randn(math.prod(SHAPE), 1, dtype=torch.float64, generator=generator)
    return kron_matmul(roots, white).reshape(SHAPE)


def gappy_field(generator: torch.Generator) -> tuple[list[Tensor], Tensor, Tensor]:
    """The kernel's factors, the true field, and what was seen of it: noisy, NaN under clouds and at dead pixels."""
    factors = [matern(SHAPE[0], 0.3), matern(SHAPE[1], 0.3)]
    truth = draw(factors, generator)
    clouds = draw([matern(SHAPE[0], 0.2), matern(SHAPE[1], 0.2)], generator)
    seen = truth + math.sqrt(NOISE) * torch.randn(SHAPE, dtype=torch.float64, generator=generator)
    hidden = (clouds > clouds.quantile(0.75)) | (torch.rand(SHAPE, generator=generator) < 0.3)
    return factors, truth, seen.masked_fill(hidden, torch.nan)


def run_methods() -> int:
    """Prints a line a method, and returns 0 if all of them agree."""
    factors, truth, seen = gappy_field(torch.Generator().manual_seed(3))
    grid, train_x, train_y = from_array(seen)
    index = grid.index_of(train_x)
    gaps = seen.isnan()
    covariance = SelectedKroneckerOperator(*factors, row_index=index).add_diagonal(torch.tensor(NOISE).double())
    cross = SelectedKroneckerOperator(*factors, col_index=index)
    threads = torch.get_num_threads()
    print(f"{SHAPE[0]} x {SHAPE[1]} cells, {int(gaps.sum())} gaps; {platform.machine()}, {threads} threads")
    print(f"{'method':<18}{'iterations':>11}{'residual':>11}{'GFLOP':>9}{'seconds':>9}{'RMSE in gaps':>14}")
    means: dict[str, Tensor] = {}
    reports: dict[str, SolveReport] = {}
    for name, (method, rank) in METHODS.items():
        with (
            settings.gap_method(method),
            settings.preconditioner_rank(rank),
            settings.max_iterations(20000),
            linear_operator.settings.max_cholesky_size(0),  # show the iterative methods, small as this is
            record_solves() as solves,
        ):
            weights = covariance.solve(train_y)
        means[name] = (cross @ weights).reshape(SHAPE)
        reports[name] = report = solves[-1]
        error = float((means[name] - truth)[gaps].square().mean().sqrt())
        print(
            f"{name:<18}{report.iterations:>11}{report.worst_residual:>11.1e}{report.flops / 1e9:>9.3f}"
            f"{report.seconds:>9.2f}{error:>14.4f}"
        )
    print(f"auto: {reports['auto']}")
    spread = max(float((mean - means["cholesky"]).abs().max()) for mean in means.values())
    print(f"largest difference between methods: {spread:.1e}")
    return 0 if spread < 1e-3 and all(report.converged for report in reports.values()) else 1
