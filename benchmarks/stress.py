"""The paper's stress tests (Figure 1): every method over gappiness, on 10^4, 1.7 10^7 and 10^9 cells.

    python -m benchmarks.stress --output results/stress

Rastrigin's function on 100 x 100 points, and a vibrating membrane as videos of 3840 x 2160 pixels with 2 and with 121
frames. The kernel is ``exp(-d^2 / theta^2)`` along every axis of unit length, the noise 1e-6. Beside the package's
methods there are peers: fill-gaps in NumPy, dense Cholesky, and conjugate gradients on linear_operator's masked
Kronecker product.

Every run has a process of its own, which is killed at the cap. The data are in a file that is mapped into memory;
times include reading it, but not making it. Residuals are those of ``(K_XX + s2 I) a = y``, computed in float64. Our
methods must also reach a certified error of the mean, and the streamed reconstruction only this error. Results are
saved after every run, and ``--resume`` continues from there.
"""

import argparse
import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks._machine import machine_facts
from benchmarks._results import (
    available_gib,
    described,
    markdown_table,
    number,
    power_of_ten,
    pyplot,
    read_results,
    tidy,
    whole_decades,
    write_results,
)
from benchmarks._runs import TIGHTER, WORK, Case, Limits, Problem, Results, Row, run_cases, too_large
from benchmarks.gappiness import tuned_lengthscale

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

SIZES = {"10k": (100, 100), "16m": (3840, 2160, 2), "1b": (3840, 2160, 121)}
SMALL = 100_000  # cells up to which the methods and peers that keep dense matrices or repeat others are run as well
ONLY_SMALL = ("spectral", "numpy_fill", "cholesky")


def default_methods(cells: int) -> list[str]:
    return [method for method in WORK if cells <= SMALL or method not in ONLY_SMALL]


# -- tables ------------------------------------------------------------------------------------------------------------

LABELS = {
    "FG": "fill gaps (FG)",
    "IG": "ignore gaps (IG)",
    "IG_precon": "IG, preconditioned",
    "PG": "penalize gaps (PG)",
    "spectral": "spectral",
    "reconstruct": "spectral, streamed",
    "auto": "auto",
    "numpy_fill": "NumPy FG",
    "cholesky": "dense Cholesky",
    "masked_kronecker": "linear_operator CG",
}
RUN_COLUMNS = (
    "gappiness",
    "method",
    "outcome",
    "iterations",
    "true residual",
    "of the weights",
    "error / std",
    "seconds: read",
    "set-up",
    "solve",
    "sum",
    "GFLOP",
    "memory GiB",
    "RMSE in the gaps",
    "note",
)
STREAMED_COLUMNS = (
    "gappiness",
    "functions",
    "kernel error / noise",
    "GFLOP/s of a product: float64",
    "float32",
    "solve / time at float64 rate",
    f"change at {TIGHTER:g} of the tolerance",
)
EXPLANATION = """\
A capped run was killed at the cap. Memory is the peak of what the process held besides the mapped input, with some
0.2 GiB for the interpreter and its libraries. The RMSE is that of the mean on a few slices, against the function
without noise. "error / std" bounds the error of the mean, at every point, in posterior standard deviations: what
streamed reconstructions converge in, and our other methods besides their residual."""


def tables(rows: Sequence[Row]) -> list[str]:
    """Markdown for every size: all runs, further results of reconstructions, and ours compared with NumPy."""
    parts = [EXPLANATION]
    for size in sizes_of(rows):
        mine = [row for row in rows if row.size == size]
        parts += [f"## {size.replace('x', ' x ')} = {mine[0].cells:,} cells", run_table(mine)]
        streamed = [row for row in mine if row.method == "reconstruct" and row.weight_residual is not None]
        if streamed:
            parts.append(markdown_table(STREAMED_COLUMNS, map(_streamed_line, streamed)))
        parts += peer_ratios(mine)
    return parts


def sizes_of(rows: Iterable[Row]) -> list[str]:
    """Smallest first."""
    return sorted({row.size for row in rows}, key=lambda size: math.prod(map(int, size.split("x"))))


def run_table(rows: Iterable[Row]) -> str:
    return markdown_table(RUN_COLUMNS, (run_line(row, LABELS) for row in rows))


def run_line(row: Row, labels: Mapping[str, str]) -> list[str]:
    outcome = f"{row.outcome} at {row.cap:g} s" if row.outcome == "capped" else row.outcome
    return [
        f"{row.gappiness:g}",
        labels[row.method],
        outcome,
        number(row.iterations, "d"),
        number(row.residual, ".1e"),
        number(row.weight_residual, ".1e"),
        number(row.error_in_std, ".1e"),
        number(row.read_seconds, ".3g"),
        number(row.setup_seconds, ".3g"),
        number(row.solve_seconds, ".3g"),
        number(row.total_seconds, ".3g"),
        number(row.gflop, ".3g"),
        number(row.memory_gib, ".2f"),
        number(row.rmse, ".1e"),
        row.note,
    ]


def _streamed_line(row: Row) -> list[str]:
    change = number(row.change, ".1e") if row.tighter in (None, "converged") else f"{row.tighter}"
    return [
        f"{row.gappiness:g}",
        f"{row.basis_size:,} of {row.ranks}",
        number(row.kernel_error, ".1e"),
        number(row.gemm_gflops_64, ".0f"),
        number(row.gemm_gflops_32, ".0f"),
        number(row.gemm_ratio, ".2f"),
        change,
    ]


def peer_ratios(rows: Sequence[Row]) -> list[str]:
    """Seconds of fill-gaps in NumPy over those of ours, set-up and solve to the same residual, where both converged."""
    of = {(row.method, row.gappiness): row for row in rows if row.outcome == "converged"}
    lines = []
    for gappiness in sorted({row.gappiness for row in rows}):
        pair = [of[method, gappiness] for method in ("numpy_fill", "auto") if (method, gappiness) in of]
        if len(pair) == 2:
            theirs, ours = ((row.setup_seconds or 0.0) + (row.solve_seconds or 0.0) for row in pair)
            lines.append([f"{gappiness:g}", f"{theirs:.4f}", f"{ours:.4f}", f"{theirs / ours:.2f}"])
    if not lines:
        return []
    return [markdown_table(("gappiness", "NumPy FG, seconds", "auto, seconds", "NumPy / auto"), lines)]


# -- figure ------------------------------------------------------------------------------------------------------------

NEUTRAL = "0.35"
Style = dict[str, Any]
STYLES: dict[str, Style] = {
    "FG": {"color": "#0072B2", "marker": "o"},
    "IG": {"color": "#E69F00", "marker": "s"},
    "IG_precon": {"color": "#D55E00", "marker": "D"},
    "PG": {"color": "#CC79A7", "marker": "v"},
    "spectral": {"color": "#56B4E9", "marker": "P"},
    "reconstruct": {"color": "#009E73", "marker": "*", "linewidth": 2.2, "markersize": 9},
    "auto": {"color": "black", "marker": ".", "linestyle": "--"},
    "numpy_fill": {"color": "0.45", "marker": "^", "linestyle": ":"},
    "cholesky": {"color": "0.6", "marker": "h", "linestyle": ":"},
    "masked_kronecker": {"color": "0.25", "marker": "<", "linestyle": ":"},
}
KERNELS = {"se": "squared-exponential kernel", "matern32": "Matérn-3/2 kernel"}


def plot(rows: Sequence[Row], problem: Problem, path: Path) -> None:
    """A panel for every size: seconds over gappiness, a line for every method."""
    plt = pyplot()
    sizes = sizes_of(rows)
    figure, axes = plt.subplots(1, len(sizes), figsize=(2.2 + 4.1 * len(sizes), 5.2), layout="constrained")
    for letter, size, axis in zip("abcdefgh", sizes, np.atleast_1d(axes), strict=False):
        mine = [row for row in rows if row.size == size]
        axis.set(yscale="log", xlabel="share of gaps", xlim=(0.0, 1.0))
        axis.set_title(f"({letter}) M = {mine[0].cells:,}\n{size.replace('x', ' × ')}", fontsize="medium")
        capped = [method for method in STYLES if any((row.method, row.outcome) == (method, "capped") for row in mine)]
        for method in STYLES:
            own = [row for row in mine if row.method == method]
            shift = 0.018 * (capped.index(method) - 0.5 * (len(capped) - 1)) if method in capped else 0.0
            draw_line(axis, own, "gappiness", STYLES[method], functools.partial(operator.add, shift))
        for cap in {row.cap for row in mine if row.outcome == "capped"}:
            axis.axhline(cap, color=NEUTRAL, linestyle="--", linewidth=0.8, zorder=0)
        _name_absent(axis, mine)
        axis.xaxis.set_major_formatter("{x:.0%}")
        whole_decades(axis)
        tidy(axis)
    np.atleast_1d(axes)[0].set_ylabel("seconds: reading, set-up and solve")
    figure.suptitle(title(problem), fontsize="medium")
    columns = min(5, 1 + 2 * len(sizes))
    legend: Style = {"loc": "outside lower center", "ncols": columns, "frameon": False, "fontsize": "small"}
    figure.legend(handles=handles(rows, LABELS, STYLES), **legend)
    figure.savefig(path, dpi=160)
    plt.close(figure)


def title(problem: Problem) -> str:
    tolerance = f"means within {problem.std_tolerance:g} standard deviations, relative residual "
    tolerance += f"{power_of_ten(problem.tolerance)} (streamed: any)"
    if problem.peer_tolerance != problem.tolerance:
        tolerance += f", of peers {power_of_ten(problem.peer_tolerance)}"
    noise = power_of_ten(problem.noise)
    return f"{KERNELS[problem.kernel]}, θ = {problem.theta:.3g}, noise {noise}, {problem.gaps} gaps\n{tolerance}"


def draw_line(
    axis: "Axes", rows: Sequence[Row], x: str, style: Style, beside: Callable[[float], float] = lambda x: x
) -> None:
    """Converged runs as a line; a cross at the cap is a run that was killed there, an open symbol one that stalled.

    :param beside: where a cross goes, so that those of several methods do not hide each other.
    """
    style = {"markersize": 5, "linewidth": 1.5, **style}

    def points(outcome: str) -> list[list[float]]:
        found = sorted((getattr(row, x), row.total_seconds) for row in rows if row.outcome == outcome)
        return [list(coordinate) for coordinate in zip(*found, strict=True)] or [[], []]

    axis.plot(*points("converged"), **style)
    axis.plot(*points("stalled"), **{**style, "linestyle": "", "markerfacecolor": "white"})
    capped = [row for row in rows if row.outcome == "capped"]
    cross = {"color": style["color"], "markersize": 7, "markeredgewidth": 1.8}
    axis.plot([beside(getattr(row, x)) for row in capped], [row.cap for row in capped], "x", **cross)


def _name_absent(axis: "Axes", rows: Sequence[Row]) -> None:
    """Says which methods were not run, or did not fit into memory."""
    absent = {row.method for row in rows if row.outcome in ("not run", "out of memory")}
    shown = {row.method for row in rows if row.outcome not in ("not run", "out of memory", "failed")}
    names = [LABELS[method] for method in STYLES if method in absent - shown]
    if names:
        text = "more than the memory:\n" + "\n".join(names)
        look: Style = {"ha": "right", "va": "bottom", "fontsize": "small", "color": NEUTRAL}
        axis.text(0.97, 0.03, text, transform=axis.transAxes, **look)


def handles(rows: Sequence[Row], labels: Mapping[str, str], styles: Mapping[str, Style]) -> "list[Artist]":
    """Handles for the methods that were run, and for runs that did not converge."""
    from matplotlib.lines import Line2D

    shown = {row.method for row in rows if row.outcome in ("converged", "capped", "stalled")}
    found: list[Artist] = [
        Line2D([], [], label=labels[method], **{"markersize": 5, **style})
        for method, style in styles.items()
        if method in shown
    ]
    outcomes = {row.outcome for row in rows}
    if "capped" in outcomes:
        found.append(
            Line2D([], [], color=NEUTRAL, marker="x", linestyle="--", linewidth=0.8, label="capped: took longer")
        )
    if "stalled" in outcomes:
        empty = Line2D([], [], color=NEUTRAL, marker="o", markerfacecolor="white", linestyle="")
        empty.set_label("stalled above the tolerance")
        found.append(empty)
    return found


# -- command line ------------------------------------------------------------------------------------------------------


def shape_of(text: str) -> tuple[int, ...]:
    """A size by its name, or as AxBxC."""
    if text in SIZES:
        return SIZES[text]
    shape = tuple(int(size) if size.isdigit() else 0 for size in text.split("x"))
    square = len(shape) == 2 and shape[0] == shape[1] > 1
    video = len(shape) == 3 and min(shape[:2]) > 2 and shape[2] > 0
    if not (square or video):
        raise argparse.ArgumentTypeError(f"got {text}, expected {', '.join(SIZES)}, AxA, or AxBxC with A and B above 2")
    return shape


def add_common_options(parser: argparse.ArgumentParser, name: str, cap: float, peer_tolerance: float) -> None:
    """Those that all benchmarks of capped runs have."""
    parser.add_argument("--noise", type=float, default=1e-6)
    parser.add_argument("--tolerance", type=float, default=1e-6, help="relative residual")
    parser.add_argument(
        "--peer-tolerance", type=float, default=peer_tolerance, help="true residual; default: %(default)s"
    )
    parser.add_argument(
        "--std-tolerance", type=float, default=1e-2, help="certified error of our means, in standard deviations"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cap", type=float, default=cap, metavar="SECONDS", help="time after which a run is killed")
    parser.add_argument(
        "--memory", type=float, metavar="GIB", help="memory that a run may take; default: 90 %% of the free memory"
    )
    parser.add_argument(
        "--gemm-size", type=int, default=2000, help="size of the matrix product that serves as reference"
    )
    parser.add_argument(
        "--scratch", type=Path, metavar="DIR", help="a directory that keeps the inputs; default: a temporary one"
    )
    parser.add_argument("--resume", action="store_true", help="keep the results in the output, run what is missing")
    parser.add_argument("--output", type=Path, default=Path("results") / name, metavar="DIR")


def limits_of(options: argparse.Namespace) -> Limits:
    return Limits(options.cap, options.memory or 0.9 * available_gib())


def earlier_rows(options: argparse.Namespace, name: str, problem: Problem) -> list[Row]:
    """With --resume those of the output, which must be of the same problem."""
    found = read_results(options.output, name) if options.resume else None
    if found is None:
        return []
    if found["problem"] != asdict(problem):
        raise SystemExit(
            f"--resume: {options.output} has results of another problem ({described(found['problem'])}), expected "
            f"{described(asdict(problem))}; choose another --output"
        )
    return [Row(**row) for row in found["rows"]]


def parser_of_options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"nargs": "+", "type": shape_of, "default": list(SIZES.values())}
    parser.add_argument("--size", **sizes, metavar="SIZE", help=f"{', '.join(SIZES)}, or AxBxC")  # type: ignore[arg-type]
    parser.add_argument("--methods", nargs="+", choices=list(WORK), help="methods; default: all that suit the size")
    parser.add_argument("--gappiness", nargs="+", type=float, default=[k / 10 for k in range(1, 10)])
    parser.add_argument("--gaps", choices=("random", "clouds"), default="random")
    parser.add_argument("--kernel", choices=list(KERNELS), default="se")
    parser.add_argument("--theta", default="0.1", help="length-scale, of axes of length 1; 'tuned': to 100x100 points")
    parser.add_argument(
        "--tighter", action="store_true", help="run reconstructions again with a hundredth of tolerance"
    )
    add_common_options(parser, "stress", cap=60.0, peer_tolerance=1e-6)
    return parser


def theta_of(options: argparse.Namespace, parser: argparse.ArgumentParser) -> float:
    if options.theta == "tuned":
        if options.kernel != "se" or set(options.size) != {SIZES["10k"]}:
            parser.error("--theta: 'tuned' is for --kernel se and --size 10k alone")
        return tuned_lengthscale(options.noise)
    try:
        return float(options.theta)
    except ValueError:
        parser.error(f"--theta: got {options.theta}, expected a number or 'tuned'")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of_options()
    options = parser.parse_args(arguments)
    problem = Problem(
        options.gaps,
        options.kernel,
        theta_of(options, parser),
        options.noise,
        options.tolerance,
        options.std_tolerance,
        options.peer_tolerance,
        options.seed,
    )
    cases = [
        Case(problem, shape, gappiness, method, options.gemm_size, options.tighter)
        for shape, gappiness in product(options.size, options.gappiness)
        for method in options.methods or default_methods(math.prod(shape))
    ]
    facts, limits = machine_facts(), limits_of(options)
    print(described(facts))
    print(described(asdict(problem)), flush=True)

    def save() -> None:
        rows = list(results.rows.values())
        content = {"machine": facts, "problem": asdict(problem), "rows": [asdict(row) for row in rows]}
        write_results(options.output, "stress", content, [described(facts), described(asdict(problem)), *tables(rows)])

    results = Results({row.key: row for row in earlier_rows(options, "stress", problem)}, save)
    try:
        run_cases(cases, WORK, results, limits, options.scratch, lambda case: too_large(case, limits.memory_gib))
    finally:
        if results.rows:
            plot(list(results.rows.values()), problem, options.output / "stress.png")
    print("\n\n".join(tables(list(results.rows.values()))))


if __name__ == "__main__":
    main()
