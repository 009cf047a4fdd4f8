"""Time and memory of a streamed reconstruction of 10^4 to 10^9 cells, and of other packages on smaller grids.

    python -m benchmarks.scaling --output results/scaling
    python -m benchmarks.scaling --tiles --output results/scaling

The field is a vibrating membrane: 121 frames of a video whose sides double from size to size, up to 3840 x 2160. Half
of the cells are random gaps. The kernel is ``exp(-d^2 / theta^2)`` with theta = 0.1 of each axis, the noise 1e-6. Other
packages solve the same system: conjugate gradients on linear_operator's masked Kronecker product, BoTorch's
LatentKroneckerGP, GPyTorch's SKI with the grid itself as its inducing points, and dense GPyTorch. Those that iterate
stop at a residual of 0.01, the default of BoTorch. The error of every mean is shown. A package that was killed at the
cap, or ran out of memory, is not tried on more cells.

``--tiles`` times one product ``Phi' W'W Phi w`` on 3840 x 2160 x 8 cells for several sizes of the tiles.
"""

import argparse
import functools
import math
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gpytorch
import numpy as np
import torch
from gpytorch.constraints import Positive
from gpytorch.kernels import RBFKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.utils.interpolation import Interpolation
from linear_operator.operators import InterpolatedLinearOperator, KroneckerProductLinearOperator, ToeplitzLinearOperator
from torch import Tensor
from tqdm.auto import tqdm

from benchmarks._fields import random_gaps, squared_exponential
from benchmarks._machine import machine_facts
from benchmarks._results import (
    Child,
    described,
    markdown_table,
    number,
    power_of_ten,
    pyplot,
    tidy,
    whole_decades,
    write_results,
)
from benchmarks._runs import (
    ITERATIONS,
    Case,
    Limits,
    Problem,
    Results,
    Row,
    Solved,
    Watch,
    Work,
    by_masked_kronecker,
    by_peer,
    by_reconstruct,
    run_cases,
    too_large,
)
from benchmarks.stress import (
    NEUTRAL,
    RUN_COLUMNS,
    Style,
    add_common_options,
    draw_line,
    earlier_rows,
    handles,
    limits_of,
    run_line,
    shape_of,
    title,
)
from benchmarks.stress import STYLES as METHOD_STYLES
from gpytorch_gaps.linalg.masked_grid import MaskedGrid, sweep_flops
from gpytorch_gaps.linalg.truncated import truncated_eigh

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FULL = (3840, 2160, 121)
SHAPES = [(FULL[0] >> halvings, FULL[1] >> halvings, FULL[2]) for halvings in range(8, -1, -1)]
FIT_FROM = (0, 500_000, 50_000_000)  # cells
TILES_SHAPE = (3840, 2160, 8)
TILES = [2**power for power in range(14, 22)]


# -- peers -------------------------------------------------------------------------------------------------------------


def kernel_of(case: Case) -> RBFKernel:
    """``exp(-d^2 / theta^2)``, of as many axes as its inputs have."""
    kernel = RBFKernel().double()
    kernel.lengthscale = case.problem.theta / math.sqrt(2.0)
    return kernel


def points(shape: Sequence[int], index: Tensor) -> Tensor:
    """Coordinates of flat cells on axes of unit length. shape: (N, d)"""
    axes = [torch.linspace(0, 1, size, dtype=torch.float64) for size in shape]
    positions = torch.unravel_index(index, tuple(shape))
    return torch.stack([axis[position] for axis, position in zip(axes, positions, strict=True)], -1)


@contextmanager
def their_solver(case: Case) -> Iterator[None]:
    """GPyTorch's conjugate gradients for a mean, without the preconditioner: its set-up would take most of the time."""
    tolerance = 0.9 * case.problem.peer_tolerance
    with (
        torch.no_grad(),
        gpytorch.settings.fast_computations(solves=True),
        gpytorch.settings.cg_tolerance(tolerance),
        gpytorch.settings.eval_cg_tolerance(tolerance),
        gpytorch.settings.max_cg_iterations(ITERATIONS),
        gpytorch.settings.max_preconditioner_size(0),
        gpytorch.settings.skip_posterior_variances(),
    ):
        yield


def solve_by_latent_kronecker(case: Case, index: Tensor, y: Tensor) -> Solved:
    """The posterior mean of the grid by BoTorch, of whose two factors one is the first axis, the other all the rest."""
    from botorch.models.latent_kronecker_gp import LatentKroneckerGP

    watch = Watch()
    first, *rest = case.shape
    values = torch.full((case.cells,), math.nan, dtype=torch.float64)
    values[index] = y[:, 0]
    values = values.view(first, -1).mT.contiguous()
    others = points(rest, torch.arange(math.prod(rest)))
    likelihood = GaussianLikelihood(noise_constraint=Positive()).double()
    likelihood.noise = case.problem.noise
    model: Any = LatentKroneckerGP(
        others,
        points([first], torch.arange(first)),
        values,
        likelihood=likelihood,
        covar_module_X=kernel_of(case),
        covar_module_T=kernel_of(case),
        outcome_transform=None,
    ).eval()
    setup = watch.lap()
    with their_solver(case):
        _ = model.posterior(others).mean
    solve = watch.lap()
    solution = torch.zeros_like(values)
    solution[~values.isnan()] = model.prediction_strategy.mean_cache.view(-1)
    return Solved(solution.mT.reshape(-1, 1)[index], setup, solve)


def solve_by_ski(case: Case, index: Tensor, y: Tensor) -> Solved:
    """Kernel interpolation, which is exact here: observations are among its inducing points.

    Put together from GPyTorch's parts, since its GridInterpolationKernel mixes up axes of different lengths.
    """
    watch, kernel = Watch(), kernel_of(case)
    grid = [_with_margin(size) for size in case.shape]
    with their_solver(case):
        axes = [ToeplitzLinearOperator(kernel(axis[:1], axis).to_dense().squeeze(0)) for axis in grid]
        weights = Interpolation().interpolate(grid, points(case.shape, index))
        interpolated = InterpolatedLinearOperator(KroneckerProductLinearOperator(*axes), *weights, *weights)
        covariance = interpolated.add_diagonal(_noise(case))
        setup = watch.lap()
        solution = covariance.solve(y)
    return Solved(solution, setup, watch.lap())


def _with_margin(size: int) -> Tensor:
    """`size` points of [0, 1] and two more on either side, which cubic interpolation looks at."""
    step = 1.0 / (size - 1)
    return torch.linspace(-2.0 * step, 1.0 + 2.0 * step, size + 4, dtype=torch.float64)


def solve_by_dense_gpytorch(case: Case, index: Tensor, y: Tensor) -> Solved:
    """By Cholesky, because conjugate gradients, GPyTorch's default, do not converge."""
    watch = Watch()
    with torch.no_grad(), gpytorch.settings.fast_computations(solves=False):
        covariance = kernel_of(case)(points(case.shape, index)).evaluate_kernel().add_diagonal(_noise(case))
        setup = watch.lap()
        solution = covariance.solve(y)
    return Solved(solution, setup, watch.lap())


def _noise(case: Case) -> Tensor:
    return torch.tensor([case.problem.noise], dtype=torch.float64)


def by_latent_kronecker(child: Child, case: Case, path: Path) -> None:
    import botorch.models.latent_kronecker_gp  # noqa: F401  loading it is no part of the time

    by_peer(child, case, path, solve_by_latent_kronecker)


def by_ski(child: Child, case: Case, path: Path) -> None:
    by_peer(child, case, path, solve_by_ski)


def by_dense_gpytorch(child: Child, case: Case, path: Path) -> None:
    by_peer(child, case, path, solve_by_dense_gpytorch)


WORK: dict[str, Work] = {
    "reconstruct": by_reconstruct,
    "masked_kronecker": by_masked_kronecker,
    "latent_kronecker": by_latent_kronecker,
    "ski": by_ski,
    "dense": by_dense_gpytorch,
}


def gave_up(case: Case, rows: Sequence[Row]) -> str:
    """Why a peer need not be tried: it was killed, or out of memory, on fewer cells."""
    lost = [row for row in rows if row.method == case.method and row.outcome in ("capped", "out of memory")]
    smaller = [row for row in lost if row.cells < case.cells]
    return f"{smaller[0].outcome} at {smaller[0].cells:,} cells" if smaller else ""


# -- fits --------------------------------------------------------------------------------------------------------------

PARTS = {
    "read_seconds": "read",
    "setup_seconds": "set-up",
    "solve_seconds": "solve",
    "total_seconds": "sum",
    "memory_gib": "memory",
}


def exponent(rows: Sequence[Row], quantity: str, least: int) -> float | None:
    """x of ``quantity ~ M^x``, by least squares over the logarithms, for at least so many cells."""
    pairs = [(row.cells, getattr(row, quantity)) for row in rows if row.outcome == "converged" and row.cells >= least]
    if len({cells for cells, _ in pairs}) < 2:
        return None
    cells, values = np.log(np.array(pairs, dtype=np.float64)).T
    return float(np.polyfit(cells, values, 1)[0])


def fit_table(rows: Sequence[Row]) -> str:
    """Exponents of every method and part, over all sizes and over the larger ones."""
    lines = []
    for method, least in product(WORK, FIT_FROM):
        mine = [row for row in rows if row.method == method]
        fitted = [exponent(mine, quantity, least) for quantity in PARTS]
        if any(value is not None for value in fitted):
            lines.append([LABELS[method], f"{least:,}", *(number(value, ".2f") for value in fitted)])
    return markdown_table(["method", "from cells", *PARTS.values()], lines)


# -- table -------------------------------------------------------------------------------------------------------------

LABELS = {
    "reconstruct": "spectral, streamed",
    "masked_kronecker": "linear_operator CG",
    "latent_kronecker": "BoTorch LatentKroneckerGP",
    "ski": "GPyTorch SKI",
    "dense": "GPyTorch, dense",
}
COLUMNS = ("cells", "shape", *RUN_COLUMNS[1:-1], "input GiB", "solve / time at float64 GEMM rate", "note")
EXPLANATION = """\
Memory is the peak of what the process held besides the mapped input, with some 0.2 GiB for the interpreter and its
libraries. Exponents x are those of M^x; the time of small sizes is that of the set-up."""


def tables(rows: Sequence[Row]) -> list[str]:
    ordered = sorted(rows, key=lambda row: (list(WORK).index(row.method), row.cells))
    return [EXPLANATION, markdown_table(COLUMNS, map(_line, ordered)), "## Exponents", fit_table(rows)]


def _line(row: Row) -> list[str]:
    _, _, *run, note = run_line(row, LABELS)
    extra = [f"{_input_gib(row.cells):.3f}", number(row.gemm_ratio, ".2f")]
    return [f"{row.cells:,}", row.size.replace("x", " x "), LABELS[row.method], *run, *extra, note]


def _input_gib(cells: int) -> float:
    """Size of the input in float32."""
    return 4 * cells / 2**30


# -- figure ------------------------------------------------------------------------------------------------------------

STYLES: dict[str, Style] = {
    "reconstruct": METHOD_STYLES["reconstruct"],
    "masked_kronecker": {"color": "#D55E00", "marker": "s"},
    "latent_kronecker": {"color": "#0072B2", "marker": "o"},
    "ski": {"color": "#CC79A7", "marker": "v"},
    "dense": {"color": "#E69F00", "marker": "D"},
}
SMALL: Style = {"fontsize": "small", "title_fontsize": "small"}
PART_STYLES: dict[str, Style] = {
    "read_seconds": {"linestyle": ":"},
    "setup_seconds": {"linestyle": "-."},
    "solve_seconds": {"linestyle": "--"},
}


def plot(rows: Sequence[Row], problem: Problem, path: Path) -> None:
    """Seconds and memory over the number of cells."""
    plt = pyplot()
    figure, (seconds, memory) = plt.subplots(1, 2, figsize=(11.5, 5.6), layout="constrained")
    for axis in (seconds, memory):
        axis.set(xscale="log", yscale="log", xlabel="cells M")
        axis.xaxis.set_minor_formatter("")
        tidy(axis)
    _draw_seconds(seconds, rows)
    _draw_memory(memory, rows)
    gappiness = " and ".join(f"{share:.0%}" for share in sorted({row.gappiness for row in rows}))
    figure.suptitle(f"{title(problem)}; {gappiness} of cells are gaps", fontsize="medium")
    figure.legend(
        handles=handles(rows, LABELS, STYLES), loc="outside lower center", ncols=4, frameon=False, fontsize="small"
    )
    figure.savefig(path, dpi=160)
    plt.close(figure)


def _draw_seconds(axis: "Axes", rows: Sequence[Row]) -> None:
    """The sum of every method, the parts of ours, and a line of slope one through the last of ours."""
    axis.set_title("(a) seconds: reading, set-up and solve", fontsize="medium")
    for position, (method, style) in enumerate(STYLES.items()):
        shift = 1.25 ** (position - 0.5 * (len(STYLES) - 1))
        own = [row for row in rows if row.method == method]
        draw_line(axis, own, "cells", style, functools.partial(operator.mul, shift))
    for cap in {row.cap for row in rows if row.outcome == "capped"}:
        axis.axhline(cap, color=NEUTRAL, linestyle="--", linewidth=0.8, zorder=0)
    ours = _converged(rows, "reconstruct")
    if ours:
        cells = [row.cells for row in ours]
        for quantity, style in PART_STYLES.items():
            label = f"{PARTS[quantity]} ~ {_power(ours, quantity)}"
            seconds = [getattr(row, quantity) for row in ours]
            axis.plot(cells, seconds, color=STYLES["reconstruct"]["color"], label=label, **style)
        linear = [(ours[-1].total_seconds or 0.0) * count / cells[-1] for count in cells]
        axis.plot(cells, linear, color=NEUTRAL, linewidth=0.8, label="linear in M", zorder=0)
        axis.legend(loc="lower right", frameon=False, title=_legend_title(ours, "total_seconds"), **SMALL)
    whole_decades(axis)


def _draw_memory(axis: "Axes", rows: Sequence[Row]) -> None:
    """The peak of every run that was not refused, with that of the input; killed ones as crosses."""
    axis.set_title("(b) GiB: peak memory besides the mapped input", fontsize="medium")
    for method, style in STYLES.items():
        mine = [row for row in rows if row.method == method and row.memory_gib]
        for outcome, look in (("converged", {}), ("capped", {"linestyle": "", "marker": "x", "markersize": 7})):
            some = sorted((row.cells, row.memory_gib) for row in mine if row.outcome == outcome)
            if some:
                axis.plot(*zip(*some, strict=True), **{"markersize": 5, "linewidth": 1.5, **style, **look})
    whole_decades(axis)
    ours = _converged(rows, "reconstruct")
    if ours:
        bottom, cells = axis.get_ylim()[0], [row.cells for row in ours]
        axis.plot(cells, [_input_gib(count) for count in cells], color=NEUTRAL, linewidth=0.8, label="the input itself")
        axis.set_ylim(bottom=bottom)
        axis.legend(loc="upper left", frameon=False, title=_legend_title(ours, "memory_gib"), **SMALL)


def _converged(rows: Sequence[Row], method: str) -> list[Row]:
    """The converged runs of a method, by size."""
    mine = [row for row in rows if row.method == method and row.outcome == "converged"]
    return sorted(mine, key=lambda row: row.cells)


def _legend_title(rows: Sequence[Row], quantity: str) -> str:
    """The exponent of ours, and the number of cells from which it was fitted."""
    least = _fitted_from(rows)
    return f"streamed ~ {_power(rows, quantity)}" + (f" from M = {power_of_ten(least)}" if least else "")


def _power(rows: Sequence[Row], quantity: str) -> str:
    value = exponent(rows, quantity, _fitted_from(rows))
    return "?" if value is None else f"$M^{{{value:.2f}}}$"


def _fitted_from(rows: Sequence[Row]) -> int:
    """The largest start of a fit from which on there are two sizes."""
    return max(least for least in FIT_FROM if least == 0 or exponent(rows, "total_seconds", least) is not None)


# -- tiles -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TileRow:
    """One product of a precision and a tile size."""

    tile: int  # numbers
    precision: str
    seconds: float  # the fastest
    gflops: float


def time_tiles(shape: tuple[int, ...], tiles: Sequence[int], problem: Problem, repeats: int = 3) -> list[TileRow]:
    """``Phi' W'W Phi w`` for random gaps and weights, on the truncated basis of the kernel."""
    level = problem.tolerance * problem.noise
    basis = truncated_eigh([squared_exponential(size, problem.theta) for size in shape], level)
    observed = torch.from_numpy(random_gaps(shape, 0.5, seed=problem.seed).slab(0, shape[0]))
    weights = torch.randn(basis.ranks, generator=torch.Generator().manual_seed(problem.seed), dtype=torch.float64)
    flops = sweep_flops(basis.shape, basis.ranks)
    rows = []
    for kind, tile in tqdm(list(product((torch.float32, torch.float64), tiles)), unit="tile", dynamic_ncols=True):
        grid, bases = MaskedGrid(observed, tile), [vectors.to(kind) for vectors in basis.vectors]
        seconds = min(_seconds_of_gram(grid, bases, weights) for _ in range(repeats))
        rows.append(TileRow(tile, str(kind).removeprefix("torch."), seconds, flops / seconds / 1e9))
    return rows


def _seconds_of_gram(grid: MaskedGrid, bases: Sequence[Tensor], weights: Tensor) -> float:
    watch = Watch()
    grid.gram(bases, weights)
    return watch.lap()


def tile_table(rows: Sequence[TileRow]) -> str:
    of = {(row.tile, row.precision): row for row in rows}
    lines = []
    for tile in sorted({row.tile for row in rows}):
        pair = [of[tile, precision] for precision in ("float32", "float64")]
        cells = [text for row in pair for text in (f"{row.seconds:.3f}", f"{row.gflops:.0f}")]
        lines.append([f"2^{math.log2(tile):g}", *cells])
    return markdown_table(("numbers in a tile", "float32: seconds", "GFLOP/s", "float64: seconds", "GFLOP/s"), lines)


def run_tiles(options: argparse.Namespace, problem: Problem, facts: dict[str, str]) -> None:
    shape = options.tiles_shape
    rows = time_tiles(shape, TILES, problem)
    about = {"shape": " x ".join(map(str, shape)), "gappiness": 0.5, **asdict(problem)}
    content = {"machine": facts, "problem": about, "rows": [asdict(row) for row in rows]}
    write_results(options.output, "tiles", content, [described(facts), described(about), tile_table(rows)])
    print(tile_table(rows))


# -- command line ------------------------------------------------------------------------------------------------------


def parser_of_options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=shape_of, default=SHAPES, metavar="AxBxC")
    parser.add_argument("--methods", nargs="+", choices=list(WORK), default=list(WORK))
    parser.add_argument("--gappiness", type=float, default=0.5)
    parser.add_argument("--theta", type=float, default=0.1, help="length-scale, of axes of length 1")
    parser.add_argument("--tiles", action="store_true", help="time one product over the size of its tiles instead")
    parser.add_argument(
        "--tiles-shape", type=shape_of, default=TILES_SHAPE, metavar="AxBxC", help="shape of the grid for --tiles"
    )
    add_common_options(parser, "scaling", cap=300.0, peer_tolerance=0.01)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser_of_options().parse_args(arguments)
    problem = Problem(
        "random",
        "se",
        options.theta,
        options.noise,
        options.tolerance,
        options.std_tolerance,
        options.peer_tolerance,
        options.seed,
    )
    facts, limits = machine_facts(), limits_of(options)
    print(described(facts))
    print(described(asdict(problem)), flush=True)
    if options.tiles:
        run_tiles(options, problem, facts)
    else:
        run_sizes(options, problem, facts, limits)


def run_sizes(options: argparse.Namespace, problem: Problem, facts: dict[str, str], limits: Limits) -> None:
    cases = [
        Case(problem, shape, options.gappiness, method, options.gemm_size)
        for shape in sorted(options.sizes, key=math.prod)
        for method in options.methods
    ]

    def save() -> None:
        rows = list(results.rows.values())
        content = {"machine": facts, "problem": asdict(problem), "rows": [asdict(row) for row in rows]}
        write_results(options.output, "scaling", content, [described(facts), described(asdict(problem)), *tables(rows)])

    def hopeless(case: Case) -> str:
        return too_large(case, limits.memory_gib) or gave_up(case, list(results.rows.values()))

    results = Results({row.key: row for row in earlier_rows(options, "scaling", problem)}, save)
    try:
        run_cases(cases, WORK, results, limits, options.scratch, hopeless)
    finally:
        if results.rows:
            plot(list(results.rows.values()), problem, options.output / "scaling.png")
    print("\n\n".join(tables(list(results.rows.values()))))


if __name__ == "__main__":
    main()
