"""Common runs of benchmarks: a problem, its data in a file, and each method or other package in a separate process.

The data are mapped into memory. Times include reading the data, but not making them. Residuals are those of
``(K_XX + s2 I) a = y``, computed again in float64. For the streamed reconstruction, they are those of its weights.
"""

import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from linear_operator.operators import KroneckerProductLinearOperator, MaskedLinearOperator
from linear_operator.utils.linear_cg import linear_cg
from torch import Tensor
from tqdm.auto import tqdm

import gpytorch_gaps as gaps
from benchmarks._fields import (
    Slabs,
    cloud_gaps,
    membrane,
    random_gaps,
    rastrigin,
    squared_exponential,
    write_gappy,
)
from benchmarks._numpy_fill import numpy_fill
from benchmarks._results import GIB, Child, gemm_gflops, run_capped
from gpytorch_gaps import settings
from gpytorch_gaps.linalg.eigen import leading_products
from gpytorch_gaps.linalg.products import kron_matmul
from gpytorch_gaps.linalg.selection import spread_cells
from gpytorch_gaps.solvers.config import SolveConfig
from gpytorch_gaps.solvers.gap_system import GapSystem
from gpytorch_gaps.solvers.preconditioning import eigen_preconditioner
from gpytorch_gaps.solvers.solve import solve_system

MAX_RANK = 5000  # of the preconditioner, the paper's p
ITERATIONS = 100_000  # of a named method; its time is capped long before
REPEATS = 8  # runs of which the fastest counts, as long as they take less than
REPEAT_FOR = 3.0  # seconds altogether
SLICES = 16  # of the first axis, on which reconstructions are compared
TIGHTER = 0.01  # times the tolerance

# our methods: what solve_system is asked for; and vectors of the grid's size in float64 that are held at once
METHODS: dict[str, tuple[str, int | None]] = {
    "FG": ("fill", None),
    "IG": ("ignore", 0),
    "IG_precon": ("ignore", MAX_RANK),
    "PG": ("penalize", None),
    "spectral": ("spectral", None),
    "auto": ("auto", None),
}
VECTORS = {"FG": 13, "IG": 6, "IG_precon": 12, "PG": 15, "spectral": 9, "auto": 12, "masked_kronecker": 7}


@dataclass(frozen=True)
class Problem:
    """The common properties of all runs of a result file."""

    gaps: str
    kernel: str
    theta: float
    noise: float
    tolerance: float
    std_tolerance: float  # certified error of our means, in posterior standard deviations
    peer_tolerance: float
    seed: int


@dataclass(frozen=True)
class Case:
    """One run."""

    problem: Problem
    shape: tuple[int, ...]
    gappiness: float
    method: str
    gemm_size: int = 2000
    tighter: bool = False

    @property
    def size(self) -> str:
        return "x".join(map(str, self.shape))

    @property
    def cells(self) -> int:
        return math.prod(self.shape)

    @property
    def key(self) -> tuple[str, float, str]:
        return self.size, self.gappiness, self.method


@dataclass(frozen=True)
class Row:
    """The results of a run; None if they do not apply, or were not reached."""

    size: str
    gappiness: float
    method: str
    cap: float  # seconds
    outcome: str  # "converged", "stalled" above the tolerance, "capped", "out of memory", "failed" or "not run"
    note: str = ""
    iterations: int | None = None
    residual: float | None = None  # of the original system, relative
    weight_residual: float | None = None
    error_in_std: float | None = None  # certified bound on the error of the mean
    read_seconds: float | None = None
    setup_seconds: float | None = None
    solve_seconds: float | None = None
    total_seconds: float | None = None
    repeats: int | None = None  # runs of which the fastest counts
    gflop: float | None = None  # of the solve
    before_gib: float | None = None  # anonymous memory before reading
    memory_gib: float | None = None  # its peak: all that the process holds but the mapped input
    kernel_error: float | None = None  # a bound on |K - Phi T Phi'| / s2
    ranks: str | None = None  # of the axes
    basis_size: int | None = None
    gemm_gflops_64: float | None = None  # of the machine, just before
    gemm_gflops_32: float | None = None
    gemm_ratio: float | None = None  # seconds of the solve over those its FLOPs take at the rate for float64
    rmse: float | None = None  # in the gaps, against the function without noise
    tighter: str | None = None  # outcome of a run with a hundredth of the tolerance
    change: float | None = None  # of the mean in that run, relative

    @property
    def key(self) -> tuple[str, float, str]:
        return self.size, self.gappiness, self.method

    @property
    def cells(self) -> int:
        return math.prod(map(int, self.size.split("x")))


# -- data --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """An array as slabs."""

    values: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def slab(self, start: int, stop: int) -> np.ndarray:
        return self.values[start:stop].astype(np.float32)


def field_of(shape: tuple[int, ...], seed: int) -> Slabs:
    """Rastrigin's function on two axes, the membrane on three."""
    if len(shape) == 2:
        return Held(rastrigin(shape[0]).numpy())
    return membrane((shape[0], shape[1], shape[2]), seed=seed)


def gaps_of(problem: Problem, shape: tuple[int, ...], gappiness: float) -> Slabs:
    make = random_gaps if problem.gaps == "random" else cloud_gaps
    return make(shape, gappiness, seed=problem.seed)


class Inputs:
    """Files of data in a directory, made when they are first asked for.

    :param keep: whether files stay that the latest case does not need.
    """

    def __init__(self, directory: Path, keep: bool) -> None:
        self._directory, self._keep = directory, keep
        directory.mkdir(parents=True, exist_ok=True)

    def file_of(self, case: Case) -> Path:
        problem = case.problem
        path = self._directory / f"{case.size}-{problem.gaps}-{case.gappiness:g}-seed{problem.seed}.npy"
        if not self._keep:
            for other in self._directory.glob("*.npy"):
                if other != path:
                    other.unlink()
        if not path.exists():
            partial = path.with_suffix(".partial")
            holes = gaps_of(problem, case.shape, case.gappiness)
            write_gappy(partial, field_of(case.shape, problem.seed), holes, progress=False)
            partial.replace(path)
        return path


def factors_of(case: Case) -> list[Tensor]:
    """The kernel of each axis on its points in [0, 1]; axes of one length share theirs."""
    make = squared_exponential if case.problem.kernel == "se" else matern32
    by_size = {size: make(size, case.problem.theta) for size in set(case.shape)}
    return [by_size[size] for size in case.shape]


def matern32(size: int, theta: float) -> Tensor:
    """``(1 + sqrt(3) d / theta) exp(-sqrt(3) d / theta)`` between `size` points of [0, 1]. shape: (size, size)"""
    x = torch.linspace(0, 1, size, dtype=torch.float64)
    scaled = math.sqrt(3.0) * (x.unsqueeze(-1) - x).abs() / theta
    return (1.0 + scaled) * torch.exp(-scaled)


def observations(path: Path) -> tuple[Tensor, Tensor]:
    """Flat cells that are observed, and their values. shape: (N,) and (N, 1)"""
    values = np.load(path, mmap_mode="r").reshape(-1)
    observed = np.flatnonzero(~np.isnan(values))
    return torch.from_numpy(observed), torch.from_numpy(values[observed].astype(np.float64)).unsqueeze(-1)


# -- runs, each in a process of its own --------------------------------------------------------------------------------


class Attempts:
    """Runs of one case until their time is known; the fastest counts."""

    def __init__(self, child: Child) -> None:
        self._child, self._best, self._count, self._spent = child, math.inf, 0, 0.0

    @property
    def go_on(self) -> bool:
        return not self._count or (self._count < REPEATS and self._spent < REPEAT_FOR)

    def add(self, read_seconds: float, setup_seconds: float, solve_seconds: float, **facts: Any) -> None:
        total = read_seconds + setup_seconds + solve_seconds
        self._count, self._spent = self._count + 1, self._spent + total
        self._child.report(repeats=self._count)
        if total < self._best:
            self._best = total
            seconds = {"read_seconds": read_seconds, "setup_seconds": setup_seconds, "solve_seconds": solve_seconds}
            self._child.report(**seconds, total_seconds=total, **facts)


class Watch:
    """A stopwatch: seconds since it was last read."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    def lap(self) -> float:
        before, self._since = self._since, time.perf_counter()
        return self._since - before


def system_of(case: Case, index: Tensor) -> GapSystem:
    return GapSystem(factors_of(case), index, torch.tensor([case.problem.noise], dtype=torch.float64))


def by_solve_system(child: Child, case: Case, path: Path) -> None:
    """One of our methods for grids that are held in memory."""
    method, _ = METHODS[case.method]
    tolerance = case.problem.tolerance
    most = settings.max_iterations.value() if method == "auto" else ITERATIONS
    with child.clock(), settings.progress(False):
        attempts = Attempts(child)
        while attempts.go_on:
            watch = Watch()
            index, y = observations(path)
            read = watch.lap()
            system = system_of(case, index)
            rank = set_up(system, case)
            setup = watch.lap()
            config = SolveConfig(
                method=method,
                rank=rank,
                tolerance=tolerance,
                mean_tolerance=case.problem.std_tolerance,
                max_iterations=most,
            )
            solved = solve_system(system, y, config, of_data=True)
            solution, report = solved.solution, solved.report
            attempts.add(
                read,
                setup,
                watch.lap(),
                outcome="converged" if report.converged else "stalled",
                note=_choice(report, method),
                iterations=report.iterations,
                residual=report.worst_residual,
                error_in_std=report.error_in_std,
                gflop=report.flops / 1e9,
            )
    report_rmse(child, case, path, mean_of(case, index, solution))


def set_up(system: GapSystem, case: Case) -> int | None:
    """Makes the system compute everything that the method needs; returns the rank of its preconditioner."""
    _, rank = METHODS[case.method]
    if rank == 0:
        return 0
    system.eigen()
    if not rank:
        return None
    level = case.problem.tolerance * case.problem.noise
    leading, _ = leading_products(system.eigen().values, rank)
    rank = min(max(1, int((leading > level).sum())), system.num_train)
    eigen_preconditioner(system, (rank,))
    return rank


def _choice(report: gaps.SolveReport, asked: str) -> str:
    """The automatic choices: the method, and the rank of the preconditioner."""
    parts = [report.method] if asked == "auto" else []
    return ", ".join([*parts, f"rank {report.rank}"] if report.rank else parts)


def by_reconstruct(child: Child, case: Case, path: Path) -> None:
    """The spectral method, streamed; then how good its mean is, and what a tighter tolerance changes."""
    rates = {f"gemm_gflops_{bits}": gemm_gflops(kind, case.gemm_size) for bits, kind in _PRECISIONS.items()}
    child.report(**rates)
    values = np.load(path, mmap_mode="r")
    with child.clock():
        attempts = Attempts(child)
        while attempts.go_on:
            found, factor_seconds = _reconstruct(case, values, 1.0)
            report = found.report
            at_full_rate = report.flops / (1e9 * rates["gemm_gflops_64"])
            attempts.add(
                report.read_seconds,
                factor_seconds + report.setup_seconds,
                report.seconds,
                outcome="converged" if report.converged else "stalled",
                note=f"dense block of {report.rank}" if report.rank else "",
                iterations=report.iterations,
                error_in_std=report.error_in_std,
                weight_residual=report.worst_residual,
                gflop=report.flops / 1e9,
                kernel_error=report.kernel_error,
                ranks=" x ".join(map(str, report.ranks)),
                basis_size=report.basis_size,
                gemm_ratio=report.seconds / at_full_rate if at_full_rate else None,
            )
    report_rmse(child, case, path, found.slab)
    if case.tighter:
        child.report(tighter="capped")
        with child.clock():
            again, _ = _reconstruct(case, values, TIGHTER)
        child.report(tighter="converged" if again.report.converged else "stalled", change=_change(found, again))


_PRECISIONS = {"64": torch.float64, "32": torch.float32}


def _reconstruct(case: Case, values: np.ndarray, share: float) -> tuple[gaps.Reconstruction, float]:
    """The reconstruction at a fraction of the tolerance, and the seconds for the matrices of the kernel."""
    watch, problem = Watch(), case.problem
    factors = factors_of(case)
    factor_seconds = watch.lap()
    found = gaps.reconstruct(
        values, None, factors, problem.noise, tolerance=share * problem.std_tolerance, progress=False
    )
    return found, factor_seconds


def _change(found: gaps.Reconstruction, again: gaps.Reconstruction) -> float:
    pairs = [(found.slab(at, at + 1), again.slab(at, at + 1)) for at in _some_slices(found.shape[0])]
    square = sum(float((first.double() - second).square().sum()) for first, second in pairs)
    return math.sqrt(square / sum(float(second.double().square().sum()) for _, second in pairs))


# -- how good a mean is ------------------------------------------------------------------------------------------------


def report_rmse(child: Child, case: Case, path: Path, mean: Callable[[int, int], Tensor]) -> None:
    """Reports the RMSE of a mean, given slab by slab, in the gaps of a few slices. The truth has no noise."""
    values, field = np.load(path, mmap_mode="r"), field_of(case.shape, case.problem.seed)
    square, count = 0.0, 0
    for at in _some_slices(case.shape[0]):
        error = (mean(at, at + 1).numpy() - field.slab(at, at + 1))[np.isnan(values[at : at + 1])]
        square, count = square + float(np.square(error, dtype=np.float64).sum()), count + error.size
    child.report(rmse=math.sqrt(square / max(count, 1)))


def mean_of(case: Case, index: Tensor, solution: Tensor) -> Callable[[int, int], Tensor]:
    """``K W' a``, as slabs of the grid."""
    grid = kron_matmul(factors_of(case), spread_cells(solution, index, case.cells)).view(case.shape)
    return lambda start, stop: grid[start:stop]


def _some_slices(size: int) -> list[int]:
    """Spread evenly over an axis, its ends included."""
    return sorted({round(x) for x in np.linspace(0, size - 1, SLICES)})


# -- peers -------------------------------------------------------------------------------------------------------------


def by_peer(child: Child, case: Case, path: Path, solve: "Callable[[Case, Tensor, Tensor], Solved]") -> None:
    """Times another package, and computes the residual of its solution again."""
    with child.clock():
        attempts = Attempts(child)
        while attempts.go_on:
            watch = Watch()
            index, y = observations(path)
            read = watch.lap()
            solved = solve(case, index, y)
            residual = true_residual(case, index, y, solved.solution)
            attempts.add(
                read,
                solved.setup_seconds,
                solved.solve_seconds,
                outcome="converged" if residual <= case.problem.peer_tolerance else "stalled",
                iterations=solved.iterations,
                residual=residual,
            )
    report_rmse(child, case, path, mean_of(case, index, solved.solution))


@dataclass(frozen=True)
class Solved:
    """``a`` with ``(K_XX + s2 I) a = y`` by a peer. shape: (N, 1)"""

    solution: Tensor
    setup_seconds: float
    solve_seconds: float
    iterations: int | None = None


def true_residual(case: Case, index: Tensor, y: Tensor, solution: Tensor) -> float:
    return float((y - system_of(case, index).matmul(solution)).norm() / y.norm())


def solve_by_numpy(case: Case, index: Tensor, y: Tensor) -> Solved:
    """Fill-gaps; its eigen-decompositions are part of the solve."""
    observed, values = np.zeros(case.cells, dtype=bool), np.full(case.cells, np.nan)
    observed[index.numpy()], values[index.numpy()] = True, y.numpy()[:, 0]
    watch = Watch()
    factors = [factor.numpy() for factor in factors_of(case)]
    setup = watch.lap()
    a, iterations = numpy_fill(
        factors,
        observed.reshape(case.shape),
        values.reshape(case.shape),
        case.problem.noise,
        case.problem.peer_tolerance,
        ITERATIONS,
    )
    solve = watch.lap()
    return Solved(torch.from_numpy(a.reshape(-1, 1))[index], setup, solve, iterations)


def solve_by_cholesky(case: Case, index: Tensor, y: Tensor) -> Solved:
    """Dense: the set-up is the matrix, the solve its factorisation."""
    watch = Watch()
    positions = torch.unravel_index(index, case.shape)
    covariance = torch.ones(len(y), len(y), dtype=torch.float64)
    for factor, position in zip(factors_of(case), positions, strict=True):
        covariance.mul_(factor[position][:, position])
    covariance.diagonal().add_(case.problem.noise)
    setup = watch.lap()
    solution = torch.cholesky_solve(y, torch.linalg.cholesky(covariance))
    return Solved(solution, setup, watch.lap())


def solve_by_masked_kronecker(case: Case, index: Tensor, y: Tensor) -> Solved:
    """Conjugate gradients of linear_operator, started again while the true residual is above the tolerance."""
    watch, iterations = Watch(), 0
    observed = torch.zeros(case.cells, dtype=torch.bool)
    observed[index] = True
    kernel = MaskedLinearOperator(KroneckerProductLinearOperator(*factors_of(case)), observed, observed)
    setup = watch.lap()

    def matmul(x: Tensor) -> Tensor:
        nonlocal iterations
        iterations += 1
        return torch.add(kernel @ x, x, alpha=case.problem.noise)

    solution, residual, before = torch.zeros_like(y), 1.0, math.inf
    while case.problem.peer_tolerance < residual < 0.5 * before and iterations < ITERATIONS:
        solution = linear_cg(
            matmul,
            y,
            initial_guess=solution,
            tolerance=0.9 * case.problem.peer_tolerance,
            max_iter=ITERATIONS - iterations,
            eps=1e-30,  # by default no direction shorter than 1e-10 is followed
        )
        before, residual = residual, float((y - matmul(solution)).norm() / y.norm())
    return Solved(solution, setup, watch.lap(), iterations)


def by_numpy(child: Child, case: Case, path: Path) -> None:
    by_peer(child, case, path, solve_by_numpy)


def by_cholesky(child: Child, case: Case, path: Path) -> None:
    by_peer(child, case, path, solve_by_cholesky)


def by_masked_kronecker(child: Child, case: Case, path: Path) -> None:
    by_peer(child, case, path, solve_by_masked_kronecker)


Work = Callable[[Child, Case, Path], None]
WORK: dict[str, Work] = {
    **dict.fromkeys(METHODS, by_solve_system),
    "reconstruct": by_reconstruct,
    "numpy_fill": by_numpy,
    "cholesky": by_cholesky,
    "masked_kronecker": by_masked_kronecker,
}


# -- all runs ----------------------------------------------------------------------------------------------------------


@dataclass
class Results:
    """The rows of a benchmark so far, in the order of their cases; saved by `save` with every new one."""

    rows: dict[tuple[str, float, str], Row]
    save: Callable[[], None]

    def add(self, row: Row) -> None:
        self.rows[row.key] = row
        self.save()


@dataclass(frozen=True)
class Limits:
    """Limits of one run: seconds, and memory that it may allocate."""

    cap: float
    memory_gib: float


def run_cases(
    cases: Sequence[Case],
    work: Mapping[str, Work],
    results: Results,
    limits: Limits,
    scratch: Path | None,
    hopeless: Callable[[Case], str],
) -> None:
    """Runs the cases that are not in the results yet. Cases of one input follow each other.

    :param scratch: where inputs are kept; None: in a temporary directory, as long as they are needed.
    :param hopeless: why a case should not be run, or nothing.
    """
    with tempfile.TemporaryDirectory(prefix="stress-") as temporary, tqdm(cases, unit="run", dynamic_ncols=True) as bar:
        inputs = Inputs(scratch or Path(temporary), keep=scratch is not None)
        for case in bar:
            bar.set_description(f"{case.size}, {case.gappiness:.0%} gaps, {case.method}")
            if not is_known(case, results.rows.get(case.key), limits):
                facts = run_case(case, work[case.method], inputs, limits, hopeless(case))
                results.add(Row(case.size, case.gappiness, case.method, limits.cap, **facts))


def run_case(case: Case, work: Work, inputs: Inputs, limits: Limits, why_not: str) -> dict[str, Any]:
    """The facts of a row."""
    if why_not:
        return {"outcome": "not run", "note": why_not}
    return run_capped(work, case, inputs.file_of(case), cap=limits.cap, memory_gib=limits.memory_gib)


def is_known(case: Case, row: Row | None, limits: Limits) -> bool:
    """Whether a row contains everything that another run could find."""
    if row is None or row.outcome in ("not run", "failed") or (row.outcome == "capped" and row.cap < limits.cap):
        return False
    return not (case.tighter and case.method == "reconstruct" and row.outcome == "converged" and row.tighter is None)


def too_large(case: Case, memory_gib: float) -> str:
    """Why a method that holds vectors of the whole grid cannot be run, or nothing."""
    needed = VECTORS.get(case.method, 0) * 8 * case.cells / GIB
    if needed <= memory_gib:
        return ""
    return f"needs {VECTORS[case.method]} vectors of {8 * case.cells / GIB:.1f} GiB, {needed:.3g} GiB in all"
