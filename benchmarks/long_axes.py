"""Long regular axes, by FFT: hourly tables of a year, and a series of a million points. Seconds and peak memory.

    python -m benchmarks.long_axes --output results/long_axes
    python -m benchmarks.long_axes --parts series --points 100000

``tables``: synthetic temperatures of 8,760 hours at 36 and at 400 stations, with cycles of the day and the year,
weather of some days and of some hours, and 30 % gaps, half of them outages of one to ten days. ``own``: an ``ExactGP``
with a kernel of the time and one of the place, trained on a window, then conditioned on the whole table. ``fill``:
``fill_gaps`` with no options. ``series``: a draw with a Matern-3/2 kernel, 30 % gaps, trained on all of it.

Every run is a process of its own, killed at ``--cap`` seconds. Memory is the peak of what it allocates.
"""

import argparse
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpytorch.kernels import Kernel, MaternKernel, PeriodicKernel, ScaleKernel
from tqdm.auto import tqdm

import gpytorch_gaps as gaps
from benchmarks._block_models import BlockModel, Stages, measurements_at
from benchmarks._long_data import DAY, YEAR, Table, matern_series, weather_table
from benchmarks._machine import machine_facts
from benchmarks._results import Child, described, markdown_table, number, run_capped, write_results
from gpytorch_gaps.posterior.scoring import score_errors

PARTS = ("tables", "series")
METHODS = ("own", "fill")


# -- tables ------------------------------------------------------------------------------------------------------------


def cycles(table: Table) -> np.ndarray:
    """Mean, year and day of every station, by least squares. shape: (hours, stations)"""
    phase = 2 * np.pi * table.hours[:, None] / np.array([YEAR, DAY])
    design = np.concatenate([np.ones((len(phase), 1)), np.cos(phase), np.sin(phase)], axis=1)
    found = np.empty_like(table.values)
    for station, known in enumerate(~table.gaps.T):
        weights, *_ = np.linalg.lstsq(design[known], table.values[known, station], rcond=None)
        found[:, station] = design @ weights
    return found


def weather_kernel(grid: gaps.CartesianGrid) -> Kernel:
    """Weather that forgets, and days that resemble the days before them, times a kernel of the place."""
    weather, day, fading = ScaleKernel(MaternKernel(nu=0.5)), PeriodicKernel(), MaternKernel(nu=0.5)
    weather.base_kernel.lengthscale, fading.lengthscale = 48.0, 240.0
    day.period_length, day.lengthscale = DAY, 1.0
    day.raw_period_length.requires_grad_(False)
    place = MaternKernel(nu=0.5)
    place.lengthscale = 150.0
    return ScaleKernel(gaps.GappyGridKernel([weather + ScaleKernel(day * fading), place], grid))


def table_model(table: Table, values: np.ndarray) -> tuple[BlockModel, gaps.CartesianGrid]:
    axes = [torch.from_numpy(table.hours[: len(values)]), torch.from_numpy(table.places[: values.shape[1]])]
    grid, x, y = gaps.from_array(torch.from_numpy(values), axes)
    return BlockModel(x, y, weather_kernel(grid), 0.05), grid


def table_by_own_model(child: Child, hours: int, stations: int, options: argparse.Namespace) -> None:
    """Trains on the first hours at some stations, and asks for the whole table."""
    table, stages = weather_table(hours, stations), Stages()
    with child.clock(), stated(child), gaps.settings.mixed_precision(), gaps.settings.progress(False):
        mean = cycles(table)
        scale = float(np.nanstd(table.values - mean))
        scaled = (table.values - mean) / scale
        torch.manual_seed(0)
        with stages.stage("training"):
            window, _ = table_model(table, scaled[: options.train_hours, : options.train_stations])
            history = gaps.fit(window, options.steps, warm_start=True, progress=False)
        child.report(history=str(history), parameters=parameters(window), **stages.facts())
        model, grid = table_model(table, scaled)
        learned = {name: value for name, value in window.state_dict().items() if ".grid." not in name}
        model.load_state_dict(learned, strict=False)
        model.eval()
        predicted, deviation = predict(child, stages, model, grid)
    errors = mean + scale * predicted.reshape(scaled.shape) - table.truth
    report_scores(child, table, errors, scale * deviation.reshape(scaled.shape))


def table_by_fill_gaps(child: Child, hours: int, stations: int, options: argparse.Namespace) -> None:
    table, stages = weather_table(hours, stations), Stages()
    times = np.datetime64("2023-01-01T00", "h") + table.hours.astype("timedelta64[h]")
    with child.clock(), stated(child), stages.stage("all"):
        filled = gaps.fill_gaps(table.values, [times, table.places], progress=False)
    report = filled.report
    child.report(history=f"{report.kernel}; {report.expected_error}", notes=list(report.notes), **stages.facts())
    child.report(phases=report.seconds)
    if filled.std is not None:
        report_scores(child, table, filled.mean - table.truth, filled.std)


def report_scores(child: Child, table: Table, errors: np.ndarray, deviation: np.ndarray) -> None:
    """Reports how good the filling is in the gaps."""
    scores = score_errors(torch.from_numpy(errors[table.gaps]), torch.from_numpy(deviation[table.gaps]))
    child.report(outcome="done", scores=scores.as_dict())


# -- the series --------------------------------------------------------------------------------------------------------


def series_by_own_model(child: Child, points: int, options: argparse.Namespace) -> None:
    series, stages = matern_series(points), Stages()
    with child.clock(), stated(child), gaps.settings.mixed_precision(), gaps.settings.progress(False):
        # in units of 100 points, length-scales are about one: Adam takes steps of that size
        grid, x, y = gaps.from_array(torch.from_numpy(series.values), [torch.arange(points).double() / 100.0])
        kernel = MaternKernel(nu=1.5)
        model = BlockModel(x, y, ScaleKernel(gaps.GappyGridKernel([kernel], grid)), 0.1)
        kernel.lengthscale = 0.1
        torch.manual_seed(0)
        with stages.stage("training"):
            history = gaps.fit(model, options.steps, warm_start=True, progress=False)
        child.report(history=str(history), parameters=parameters(model), **stages.facts())
        predicted, deviation = predict(child, stages, model, grid)
    missing = np.isnan(series.values)
    errors = torch.from_numpy((predicted - series.truth)[missing])
    child.report(outcome="done", scores=score_errors(errors, torch.from_numpy(deviation[missing])).as_dict())


# -- all runs ----------------------------------------------------------------------------------------------------------


@contextmanager
def stated(child: Child) -> Iterator[None]:
    """Reports every warning but the one of sampled variances, which are asked for."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", gaps.ApproximateVarianceWarning)
        yield
        child.report(warnings=sorted({f"{each.category.__name__}: {each.message}" for each in caught}))


def parameters(model: BlockModel) -> dict[str, list[float]]:
    """Those that were trained, as their constraints have them."""
    found = {}
    for name, raw, constraint in model.named_parameters_and_constraints():
        value = raw if constraint is None else constraint.transform(raw)
        found[name.rpartition(".")[0] + "." + name.rpartition(".")[2].removeprefix("raw_")] = value.flatten().tolist()
    return found


def predict(child: Child, stages: Stages, model: BlockModel, grid: gaps.CartesianGrid) -> tuple[np.ndarray, np.ndarray]:
    """Mean, then mean and standard deviation of a measurement in every cell. shape: (M,) each"""
    with stages.stage("mean"), torch.no_grad():
        _ = model(grid.points()).mean
    child.report(**stages.facts())
    with stages.stage("standard deviations"), gaps.settings.variance_method("pathwise"):
        mean, variance = measurements_at(model, grid.points())
    child.report(**stages.facts())
    return mean.numpy(), variance.sqrt().numpy()


def line_of(row: dict[str, Any]) -> list[str]:
    scores = row.get("scores", {})
    texts = [f"{name} {seconds:.1f}" for name, seconds in row.get("wall", {}).items()]
    outcome = row["outcome"] + (f": {row['note']}" if "note" in row else "")
    numbers = [number(scores.get("rmse"), ".3f"), number(scores.get("coverage"), ".3f")]
    return [row["run"], row["method"], outcome, ", ".join(texts), number(row.get("memory_gib"), ".2f"), *numbers]


def run_table(rows: Sequence[dict[str, Any]]) -> str:
    head = ["", "method", "outcome", "seconds", "peak GiB", "RMSE in the gaps", "coverage of 95 %"]
    return markdown_table(head, [line_of(row) for row in rows])


def runs_of(options: argparse.Namespace) -> list[tuple[str, str, Callable[..., None], tuple[Any, ...]]]:
    """Name, method, work and its arguments."""
    found: list[tuple[str, str, Callable[..., None], tuple[Any, ...]]] = []
    works = {"own": table_by_own_model, "fill": table_by_fill_gaps}
    if "tables" in options.parts:
        for stations in options.stations:
            name = f"{options.hours} x {stations}"
            found += [(name, method, works[method], (options.hours, stations, options)) for method in options.methods]
    if "series" in options.parts:
        found.append((f"{options.points}", "own", series_by_own_model, (options.points, options)))
    return found


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    made.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    made.add_argument("--hours", type=int, default=8760)
    made.add_argument("--stations", type=int, nargs="+", default=[36, 400])
    made.add_argument("--points", type=int, default=1_000_000, help="number of points of the series")
    made.add_argument(
        "--train-hours", type=int, default=500, help="hours of the window for the training of the own model"
    )
    made.add_argument("--train-stations", type=int, default=36, help="stations of this window")
    made.add_argument("--steps", type=int, default=30, help="largest number of training steps")
    made.add_argument("--cap", type=float, default=600.0, help="seconds of a run")
    made.add_argument("--memory", type=float, default=8.0, help="GiB that a run may allocate")
    made.add_argument("--output", type=Path, default=Path("results/long_axes"), metavar="DIR")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    facts = machine_facts()
    print(described(facts), flush=True)
    rows: list[dict[str, Any]] = []
    with tqdm(runs_of(options), unit="run", dynamic_ncols=True) as bar:
        for name, method, work, given in bar:
            bar.set_description(f"{name}, {method}")
            found = run_capped(work, *given, cap=options.cap, memory_gib=options.memory)
            rows.append({"run": name, "method": method, **found})
            text = run_table(rows)
            write_results(options.output, "long_axes", {"machine": facts, "runs": rows}, [described(facts), text])
    print(text)
    for row in rows:
        shown = {
            key: row[key] for key in ("history", "parameters", "solves", "phases", "notes", "warnings") if key in row
        }
        print(f"\n{row['run']}, {row['method']}", *(f"- {key}: {value}" for key, value in shown.items()), sep="\n")


if __name__ == "__main__":
    main()
