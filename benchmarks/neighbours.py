"""Time saved by the neighbours preconditioner in solves, log-likelihoods and training, and a comparison with GPBoost.

    python -m benchmarks.neighbours --output results/neighbours
    python -m benchmarks.neighbours --parts table --grids 80x80 --lengths 0.1

``table``: cold solves to a residual of 1e-6 by fill-gaps ("fill"), by ignore-gaps with 300 eigenvectors ("eigen") or
with 20 neighbours ("neighbours"), by the automatic choice without neighbours ("before"), and by the automatic choice
("auto"). On grids of more than 10,000 cells, only "neighbours" and "auto" run, unless ``--columns`` names others.
``headline``: one solve for 54,750 observations with a rough kernel and clouds as gaps, including the set-up.
``likelihood``: the spread of 20 estimates of a log-likelihood and its gradient. ``training``: a cold value and gradient
of two models. ``gpboost``: the same with GPBoost, if it is installed.

Seconds are those of the CPU, which do not depend on what else the machine does: use one thread (``OMP_NUM_THREADS=1``).
On one core, the tables take about half an hour, all other parts together about ten minutes.
"""

import argparse
import math
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

import gpytorch_gaps as gaps
from benchmarks._machine import machine_facts
from benchmarks._neighbour_likelihoods import gpboost_part, likelihood_part, training_part
from benchmarks._neighbour_problems import GAPS, KERNELS, Problem, grid_of, labelled
from benchmarks._neighbour_tables import CAP, COLUMNS, NEIGHBOURS, RANK, Row, tables
from benchmarks._results import described, markdown_table, write_results

TOLERANCE = 1e-6
PARTS = ("table", "headline", "likelihood", "training", "gpboost")
_LARGE_CELLS = 10_000


# -- solves ------------------------------------------------------------------------------------------------------------


def solve(problem: Problem, column: str, rank: int | None = RANK, values: Tensor | None = None) -> Row:
    """A cold solve by the method of a column; "before" is ``"auto"`` without neighbours.

    :param rank: of "eigen"; None for the one that should be best.
    :param values: of the data on the grid; by default a wave and noise.
    """
    responses = (problem.values() if values is None else values).flatten()[problem.index()].unsqueeze(-1)
    covariance = problem.covariance()
    method = {"fill": "fill", "auto": "auto", "before": "auto"}.get(column, "ignore")
    preconditioner = {"fill": "auto", "before": "eigen"}.get(column, column)
    with (
        warnings.catch_warnings(),
        torch.no_grad(),
        gaps.settings.progress(False),
        gaps.settings.gap_method(method),
        gaps.settings.preconditioner(preconditioner),
        gaps.settings.preconditioner_rank(min(rank, len(responses)) if column == "eigen" and rank else None),
        gaps.settings.num_neighbours(NEIGHBOURS if column == "neighbours" else None),
        gaps.settings.solve_tolerance(TOLERANCE),
        gaps.settings.max_iterations(CAP),
        gaps.record_solves() as solves,
    ):
        warnings.simplefilter("ignore", gaps.NotConvergedWarning)  # the row says so
        started = time.process_time()
        covariance.solve(responses)
        seconds = time.process_time() - started
    report = solves[-1]
    return Row(
        shape=problem.shape,
        length=problem.length,
        kernel=problem.kernel,
        noise=problem.noise,
        gaps=problem.gaps,
        observations=len(responses),
        column=column,
        method=report.method,
        rank=report.rank,
        num_neighbours=report.num_neighbours,
        converged=report.converged,
        iterations=report.iterations,
        residual=report.worst_residual,
        seconds=seconds,
        reason=report.reason,
    )


def warm_up() -> None:
    """Loads libraries and measures rates of the machine, so that later times do not include this."""
    for column in COLUMNS:
        solve(Problem((40, 40), "scattered", "Matern-1/2", 0.1, 1e-2), column)


def columns_of(problem: Problem, columns: Sequence[str] | None) -> list[str]:
    """The columns that are run for a problem: gaps of sums cannot be filled."""
    large = math.prod(problem.shape) > _LARGE_CELLS
    wanted = set(columns or (("neighbours", "auto") if large else COLUMNS))
    wanted -= {"fill"} if len(KERNELS[problem.kernel]) > 1 else set()
    return [column for column in COLUMNS if column in wanted]


def run_table(problems: Sequence[Problem], columns: Sequence[str] | None) -> list[Row]:
    cases = [(problem, column) for problem in problems for column in columns_of(problem, columns)]
    rows = []
    with tqdm(cases, unit="solve", dynamic_ncols=True) as bar:
        for problem, column in bar:
            bar.set_description(f"{labelled(problem.shape)}, {problem.kernel}, {problem.noise:g}, {column}")
            rows.append(solve(problem, column))
    return rows


# -- the large solve ---------------------------------------------------------------------------------------------------

HEADLINE = {  # columns
    "eigen": '`gap_method("ignore")`, `preconditioner("eigen")`',
    "before": '`preconditioner("eigen")`',
    "auto": '`preconditioner("auto")`',
}


def headline(shape: tuple[int, int], repeats: int) -> tuple[list[Row], str]:
    """Solves of a draw from the model, in turn: by the best rank, without neighbours, and by the automatic choice."""
    problem = Problem(shape, "clouds", "Matern-1/2", 0.1, 1e-4)
    values = problem.draw()
    rows = [solve(problem, column, rank=None, values=values) for _ in range(repeats) for column in HEADLINE]
    best = {name: min((row for row in rows if row.column == name), key=lambda row: row.seconds) for name in HEADLINE}
    now = best["auto"]
    lines = []
    for column, row in best.items():
        numbers = [row.iterations_text, f"{row.residual:.1e}", f"{row.seconds:.2f}", f"{row.seconds / now.seconds:.1f}"]
        lines.append([HEADLINE[column], row.method_text, *numbers, row.reason])
    head = ["", "preconditioner", "iterations", "residual", "CPU seconds, with set-up", "times the last", "reason"]
    title = (
        f"{labelled(shape)}, clouds, {now.observations} observations, Matern-1/2, length-scale 0.1, noise 1e-4 (the "
        f"best of {repeats}):"
    )
    return rows, f"{title}\n\n{markdown_table(head, lines)}"


# -- command -----------------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    made.add_argument(
        "--grids", nargs="+", type=grid_of, default=[(80, 80), (300, 365)], help="grids of the table, such as 80x80"
    )
    made.add_argument("--lengths", nargs="+", type=float, default=[0.03, 0.1])
    made.add_argument("--noise", nargs="+", type=float, default=[1e-2, 1e-4, 1e-6])
    made.add_argument("--training-noise", nargs="+", type=float, default=[1e-2, 1e-4])
    made.add_argument("--gaps", nargs="+", choices=GAPS, default=GAPS)
    made.add_argument("--kernels", nargs="+", choices=list(KERNELS), default=list(KERNELS))
    made.add_argument(
        "--columns", nargs="+", choices=COLUMNS, help="columns of the table (default: by the size of the grid)"
    )
    made.add_argument("--grid", type=grid_of, default=(300, 365), help="grid of the headline and of training")
    made.add_argument("--repeats", type=int, default=2, help="repeats of the headline and of training steps")
    made.add_argument("--small-grid", type=grid_of, default=(65, 62), help="grid of the log-likelihoods")
    made.add_argument("--seeds", type=int, default=20, help="log-likelihoods estimated")
    made.add_argument("--dense-grid", type=grid_of, default=(100, 80), help="where GPBoost is judged by dense algebra")
    made.add_argument("--large-grid", type=grid_of, default=(400, 500), help="where GPBoost is timed")
    made.add_argument("--output", type=Path, default=Path("results/neighbours"), metavar="DIR")
    return made


def run_parts(options: argparse.Namespace) -> Iterable[tuple[str, list[dict[str, Any]], list[str]]]:
    """Name, rows and texts of every part that is asked for."""
    if "table" in options.parts:
        axes = (options.grids, options.lengths, options.kernels, options.noise, options.gaps)
        problems = [
            Problem(grid, where, kernel, length, noise) for grid, length, kernel, noise, where in product(*axes)
        ]
        rows = run_table(problems, options.columns)
        yield "table", [asdict(row) for row in rows], tables(rows)
    if "headline" in options.parts:
        rows, text = headline(options.grid, options.repeats)
        yield "headline", [asdict(row) for row in rows], [text]
    if "likelihood" in options.parts:
        yield "likelihood", *likelihood_part(options.small_grid, options.seeds)
    if "training" in options.parts:
        yield "training", *training_part(options.grid, options.lengths, options.training_noise, options.repeats)
    if "gpboost" in options.parts:
        yield "gpboost", *gpboost_part(options.dense_grid, options.large_grid)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    facts = machine_facts()
    print(described(facts), flush=True)
    warm_up()
    content: dict[str, Any] = {"machine": facts}
    texts = [described(facts)]
    for name, rows, part in run_parts(options):
        content[name] = rows
        texts += [f"## {name}", *part]
        print("\n\n".join([f"\n## {name}", *part]), flush=True)
        write_results(options.output, "neighbours", content, texts)


if __name__ == "__main__":
    main()
