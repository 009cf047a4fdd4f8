"""The paper's study of preconditioners (Figure 2): time saved at rank p, for ignore-gaps and for fill-gaps.

    python -m benchmarks.preconditioner --output results/preconditioner

A 100 x 100 grid on the unit square, half of it gaps at random, responses ``y ~ N(0, I)``, noise 1e-6 and the kernel
``exp(-d^2 / theta^2)``. Times are relative to the same method, theta and seed without a preconditioner (p = 0), with
and without the set-up: the eigen-decomposition and the p x p factorisation. A run that does not reach a true residual
of 1e-6 is shown as such, and never as converged. The defaults take about a quarter of an hour on one core.
"""

import argparse
import math
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from tqdm.auto import tqdm

from benchmarks._machine import machine_facts
from benchmarks._results import described, markdown_table, power_of_ten, pyplot, tidy, write_results
from gpytorch_gaps import NotConvergedWarning, SolveReport, settings
from gpytorch_gaps.solvers.config import SolveConfig
from gpytorch_gaps.solvers.gap_system import GapSystem
from gpytorch_gaps.solvers.preconditioning import eigen_preconditioner
from gpytorch_gaps.solvers.solve import solve_system

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

GAPPINESS = 0.5
NOISE = 1e-6
TOLERANCE = 1e-6
METHODS = ("ignore", "fill")
REPEATS = 8  # solves of which the fastest counts, as long as they take less than
REPEAT_FOR = 3.0  # seconds altogether


@dataclass(frozen=True)
class Row:
    """One method, theta, rank and seed. Seconds and GFLOP of conjugate gradients are without the set-up."""

    theta: float
    method: str
    rank: int
    seed: int
    dominant: int  # eigenvalues of the kernel above the noise for ignore-gaps, below it for fill-gaps
    outcome: str  # "converged", "capped" at so many iterations, or "stalled" before that
    iterations: int
    residual: float  # of the original system, relative
    cg_gflop: float
    setup_gflop: float
    cg_seconds: float  # with all set-up there to be used again
    setup_seconds: float
    total_seconds: float  # of the set-up and the first solve


@dataclass(frozen=True)
class Ratio:
    """A time relative to that without a preconditioner: geometric mean over seeds, smallest and largest."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Summary:
    """The rows of one method, theta and rank, over seeds."""

    theta: float
    method: str
    rank: int
    dominant: int
    failures: str  # such as "2 of 3 capped"; empty where all seeds converged
    base_failed: bool  # a run without a preconditioner did not converge: the time it would need is not known
    iterations: float
    residual: float  # the worst
    cg_gflop: float
    setup_gflop: float
    cg_seconds: float
    setup_seconds: float
    cg_ratio: Ratio
    total_ratio: Ratio


# -- runs --------------------------------------------------------------------------------------------------------------


def random_gaps_problem(size: int, theta: float, seed: int) -> tuple[GapSystem, Tensor]:
    """The system on a grid of size x size, and responses of white noise, shape (N, 1)."""
    x = torch.linspace(0, 1, size, dtype=torch.float64)
    factor = torch.exp(-(((x.unsqueeze(-1) - x) / theta) ** 2))
    generator = torch.Generator().manual_seed(seed)
    cells = size * size
    observed = torch.randperm(cells, generator=generator)[: num_observed(size)].sort().values
    responses = torch.randn(cells, 1, generator=generator, dtype=torch.float64)
    return GapSystem([factor, factor], observed, torch.tensor([NOISE], dtype=torch.float64)), responses[observed]


def num_observed(size: int) -> int:
    return round(size * size * (1 - GAPPINESS))


def set_up(system: GapSystem, method: str, rank: int) -> float:
    """Has the system make, and keep, what a solve of this rank needs. Returns GFLOP."""
    system.eigen()
    if not rank:
        return 0.0
    made = eigen_preconditioner(system, (rank,)) if method == "ignore" else system.shifted_preconditioner(rank)
    return made.setup_flops / 1e9


def solve(system: GapSystem, rhs: Tensor, method: str, rank: int, cap: int) -> SolveReport:
    with warnings.catch_warnings(), settings.progress(False):
        warnings.simplefilter("ignore", NotConvergedWarning)  # the row says so
        config = SolveConfig(method=method, rank=rank, tolerance=TOLERANCE, max_iterations=cap)
        return solve_system(system, rhs, config).report


def dominant_eigenvalues(system: GapSystem, method: str) -> int:
    """How many eigenvalues a preconditioner needs: those above the noise or, for the inverse of K + s2 I, below it."""
    eigenvalues = system.eigen().products
    return int(((eigenvalues > NOISE) if method == "ignore" else (eigenvalues < NOISE)).sum())


def outcome_of(report: SolveReport, cap: int) -> str:
    if report.converged:
        return "converged"
    return "capped" if report.iterations >= cap else "stalled"


def measure(size: int, theta: float, method: str, rank: int, seed: int, cap: int) -> Row:
    """Sets up once, then solves until the time is known."""
    system, rhs = random_gaps_problem(size, theta, seed)
    started = time.perf_counter()
    setup_gflop = set_up(system, method, rank)
    setup_seconds = time.perf_counter() - started
    first = solve(system, rhs, method, rank, cap)
    seconds = [first.seconds]
    while len(seconds) < REPEATS and sum(seconds) < REPEAT_FOR:
        seconds.append(solve(system, rhs, method, rank, cap).seconds)
    return Row(
        theta=theta,
        method=method,
        rank=rank,
        seed=seed,
        dominant=dominant_eigenvalues(system, method),
        outcome=outcome_of(first, cap),
        iterations=first.iterations,
        residual=first.worst_residual,
        cg_gflop=first.flops / 1e9,
        setup_gflop=setup_gflop,
        cg_seconds=min(seconds),
        setup_seconds=setup_seconds,
        total_seconds=setup_seconds + first.seconds,
    )


def run(size: int, thetas: Sequence[float], ranks: Iterable[int], seeds: Sequence[int], cap: int) -> list[Row]:
    """Every seed, theta, method and rank, always with rank 0, which the others are compared with."""
    measure(8, 0.5, "ignore", 4, 0, 10)  # what is loaded at first use is no part of a time
    cases = list(product(seeds, thetas, METHODS, sorted({0, *ranks})))
    rows = []
    with tqdm(cases, unit="run", dynamic_ncols=True) as bar:
        for seed, theta, method, rank in bar:
            bar.set_description(f"seed {seed}, theta {theta:g}, {method}, rank {rank}")
            rows.append(measure(size, theta, method, rank, seed, cap))
    return rows


# -- summary -----------------------------------------------------------------------------------------------------------


def summarise(rows: Sequence[Row]) -> list[Summary]:
    """Averages over seeds, by method, theta and rank."""
    by_case: dict[tuple[str, float, int], list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.seed):
        by_case.setdefault((row.method, row.theta, row.rank), []).append(row)
    order = sorted(by_case, key=lambda case: (METHODS.index(case[0]), case[1:]))
    return [_summary(by_case[case], by_case[(*case[:2], 0)]) for case in order]


def _summary(rows: Sequence[Row], without: Sequence[Row]) -> Summary:
    """:param without: the rows of rank 0, of the same seeds in the same order."""
    first = rows[0]
    failed = [row.outcome for row in rows if row.outcome != "converged"]
    return Summary(
        theta=first.theta,
        method=first.method,
        rank=first.rank,
        dominant=first.dominant,
        failures=f"{len(failed)} of {len(rows)} {' and '.join(sorted(set(failed)))}" if failed else "",
        base_failed=any(row.outcome != "converged" for row in without),
        iterations=_mean(row.iterations for row in rows),
        residual=max(row.residual for row in rows),
        cg_gflop=_mean(row.cg_gflop for row in rows),
        setup_gflop=_mean(row.setup_gflop for row in rows),
        cg_seconds=_mean(row.cg_seconds for row in rows),
        setup_seconds=_mean(row.setup_seconds for row in rows),
        cg_ratio=_ratio([row.cg_seconds / base.cg_seconds for row, base in zip(rows, without, strict=True)]),
        total_ratio=_ratio([row.total_seconds / base.total_seconds for row, base in zip(rows, without, strict=True)]),
    )


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)


def _ratio(values: Sequence[float]) -> Ratio:
    return Ratio(math.exp(_mean(math.log(value) for value in values)), min(values), max(values))


# -- table -------------------------------------------------------------------------------------------------------------

EXPLANATION = """\
Means over seeds, and the worst residual. Dominant eigenvalues are those of the kernel that a preconditioner has to
know: above the noise for ignore-gaps, below it for fill-gaps."""
COLUMNS = (
    "method",
    "theta",
    "dominant eigenvalues",
    "p",
    "iterations",
    "true residual",
    "GFLOP: CG",
    "set-up",
    "seconds: CG",
    "set-up",
    "relative to p = 0: CG",
    "CG and set-up",
)


def table(summaries: Sequence[Summary]) -> str:
    """The summaries as a table in Markdown."""
    return f"{EXPLANATION}\n\n{markdown_table(COLUMNS, map(_table_line, summaries))}"


def _table_line(summary: Summary) -> list[str]:
    failures = f" ({summary.failures})" if summary.failures else ""
    return [
        summary.method,
        f"{summary.theta:g}",
        str(summary.dominant),
        str(summary.rank),
        f"{summary.iterations:.0f}{failures}",
        f"{summary.residual:.1e}",
        f"{summary.cg_gflop:.3f}",
        f"{summary.setup_gflop:.3f}",
        f"{summary.cg_seconds:.4f}",
        f"{summary.setup_seconds:.4f}",
        _ratio_text(summary, summary.cg_ratio),
        _ratio_text(summary, summary.total_ratio),
    ]


def _ratio_text(summary: Summary, ratio: Ratio) -> str:
    """The ratio as text. A run that was cut short gives a bound. If both runs were cut short, there is no ratio."""
    if not summary.rank:
        return "1"
    if summary.failures and summary.base_failed:
        return "unknown"
    bound = "≥ " if summary.failures else "≤ " if summary.base_failed else ""
    return f"{bound}{ratio.mean:.2g}"


# -- figure ------------------------------------------------------------------------------------------------------------

PANELS = (
    ("ignore", "cg_ratio", "(a) ignore-gaps, CG"),
    ("fill", "cg_ratio", "(b) fill-gaps, CG"),
    ("ignore", "total_ratio", "(c) ignore-gaps, set-up and CG"),
)
NEUTRAL = "0.35"  # the grey of what belongs to no theta


def plot(summaries: Sequence[Summary], title: str, path: Path) -> None:
    """Three panels over p, a line for every theta, with the range over seeds."""
    from matplotlib.colors import to_hex
    from matplotlib.ticker import LogLocator, NullFormatter

    plt = pyplot()
    thetas = sorted({summary.theta for summary in summaries})
    shades = [0.9 * i / max(1, len(thetas) - 1) for i in range(len(thetas))]
    colours = {theta: to_hex(plt.get_cmap("viridis")(shade)) for theta, shade in zip(thetas, shades, strict=True)}
    figure, axes = plt.subplots(1, 3, figsize=(12, 4.6), layout="constrained")
    axes[2].sharey(axes[0])
    for axis, (method, quantity, panel) in zip(axes, PANELS, strict=True):
        axis.set(xscale="log", yscale="log", xlabel="rank p of the preconditioner", title=panel)
        axis.axhline(1.0, color=NEUTRAL, linestyle="--", linewidth=1)
        for theta, colour in colours.items():
            line = [s for s in summaries if (s.method, s.theta) == (method, theta) and s.rank]
            _draw_line(axis, line, quantity, colour)
        axis.xaxis.set_major_formatter("{x:g}")
        tidy(axis)
    axes[0].set_ylabel("time relative to no preconditioner")
    axes[1].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes[1].yaxis.set_major_formatter("{x:g}")
    axes[1].yaxis.set_minor_formatter(NullFormatter())
    figure.suptitle(title, fontsize="medium")
    axes[0].legend(handles=_theta_handles(colours), loc="lower left", frameon=False)
    figure.legend(handles=_symbol_handles(summaries), loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(path, dpi=160)
    plt.close(figure)


def _draw_line(axis: "Axes", line: Sequence[Summary], quantity: str, colour: str) -> None:
    """A cross is a run that did not converge; a hollow circle an upper bound, since that at p = 0 did not."""
    ranks, ratios = [s.rank for s in line], [getattr(s, quantity) for s in line]
    axis.plot(ranks, [ratio.mean for ratio in ratios], "-", color=colour, linewidth=1.6)
    axis.fill_between(ranks, [r.low for r in ratios], [r.high for r in ratios], color=colour, alpha=0.2, linewidth=0)
    for summary, ratio in zip(line, ratios, strict=True):
        if summary.failures:
            axis.plot(summary.rank, ratio.mean, "x", color=colour, markersize=8, markeredgewidth=2)
        else:
            inside = "white" if summary.base_failed else colour
            axis.plot(summary.rank, ratio.mean, "o", color=colour, markerfacecolor=inside, markersize=5)
    if line and min(ranks) <= line[0].dominant <= max(ranks):
        on_axis = axis.get_xaxis_transform()
        axis.plot(line[0].dominant, 0.0, "^", color=colour, markersize=8, clip_on=False, transform=on_axis, zorder=3)


def _theta_handles(colours: dict[float, str]) -> "list[Artist]":
    from matplotlib.lines import Line2D

    return [
        Line2D([], [], color=colour, marker="o", markersize=5, label=f"θ = {theta:g}")
        for theta, colour in colours.items()
    ]


def _symbol_handles(summaries: Sequence[Summary]) -> "list[Artist]":
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    def symbol(marker: str, label: str, inside: str = NEUTRAL) -> Line2D:
        return Line2D([], [], color=NEUTRAL, marker=marker, markerfacecolor=inside, linestyle="", label=label)

    with_rank = [summary for summary in summaries if summary.rank]
    handles: list[Artist] = [
        Line2D([], [], color=NEUTRAL, linestyle="--", linewidth=1, label="no preconditioner"),
        Patch(color=NEUTRAL, alpha=0.2, linewidth=0, label="range over seeds"),
        symbol("^", "number of eigenvalues above the noise, in (b) below"),
    ]
    if any(summary.failures for summary in with_rank):
        handles.append(symbol("x", "capped or stalled"))
    if any(summary.base_failed and not summary.failures for summary in with_rank):
        handles.append(symbol("o", "at most: p = 0 did not converge", "white"))
    return handles


# -- files -------------------------------------------------------------------------------------------------------------


def write(directory: Path, rows: Sequence[Row], problem: dict[str, float], facts: dict[str, str]) -> None:
    """``preconditioner.json`` with every row, and their averages as ``.md`` and ``.png``."""
    summaries = summarise(rows)
    content = {"machine": facts, "problem": problem, "rows": [asdict(row) for row in rows]}
    write_results(directory, "preconditioner", content, [described(facts), described(problem), table(summaries)])
    size, seeds, noise = problem["size"], problem["seeds"], power_of_ten(NOISE)
    title = f"{size} × {size} grid, {GAPPINESS:.0%} random gaps, noise {noise}: geometric mean over {seeds} seeds"
    plot(summaries, title, directory / "preconditioner.png")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=100, help="points along each of the two axes")
    parser.add_argument("--thetas", nargs="+", type=float, default=[0.02, 0.05, 0.1, 0.2, 0.4], help="length-scales")
    parser.add_argument(
        "--ranks", nargs="+", type=int, default=[10, 30, 100, 300, 1000, 3000], help="ranks; 0 is always included"
    )
    parser.add_argument("--seeds", type=int, default=3, help="samples of gaps and responses to average over")
    parser.add_argument("--cap", type=int, default=100_000, help="iterations after which a run is capped")
    parser.add_argument("--output", type=Path, default=Path("results/preconditioner"), metavar="DIR")
    options = parser.parse_args(arguments)
    if not all(0 <= rank <= num_observed(options.size) for rank in options.ranks):
        parser.error(f"--ranks: expected 0 .. {num_observed(options.size)}, the number of observations")
    facts = machine_facts()
    print(described(facts))
    problem = {
        "size": options.size,
        "gappiness": GAPPINESS,
        "noise": NOISE,
        "tolerance": TOLERANCE,
        "cap": options.cap,
        "seeds": options.seeds,
    }
    print(described(problem), flush=True)
    rows = run(options.size, options.thetas, options.ranks, range(options.seeds), options.cap)
    print(table(summarise(rows)))
    write(options.output, rows, problem, facts)


if __name__ == "__main__":
    main()
