"""A climate of stations, trained end to end: the paper's study of weather stations, on public data.

    python -m benchmarks.climate                                      # trains, predicts, scores what was withheld
    python -m benchmarks.climate --data colorado_monthly
    python -m benchmarks.climate --data FILE.npz --predict CELLS.npz -o OUT.npz
    python -m benchmarks.climate --part methods --part warm --part botorch

``--data`` is the name of a data set (see `benchmarks.datasets`; ``GPYTORCH_GAPS_DATA`` is their folder), an .npz file
with the same arrays, or "synthetic". With ``--predict``, `cells` of CELLS.npz (k x 4 integers: year, day, station,
output, counted from 0) are predicted. OUT.npz then contains `mean` and `std` of a new observation there, in degrees.
Cells that the data mark as `test_cells` are never used in training.

study     the model of `_climate_model`: RMSE, CRPS and coverage of withheld cells, beside simple references; seconds by
          phase; memory
methods   the paper's Table 1: one product of four kernels, trained and predicted by each method
warm      solver iterations of a training run with warm starts and fixed probes, and without both
botorch   LatentKroneckerGP on the monthly data, as (station, output) x month
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._climate_methods import METHODS, botorch_row, compare_methods, compare_starts
from benchmarks._climate_train import (
    Trained,
    log_likelihood,
    peak_gib,
    predict,
    references,
    scores,
    steps_by_phase,
    train,
    withheld,
)
from benchmarks._machine import machine_facts
from benchmarks._results import described, markdown_table, write_results
from benchmarks.datasets import StationClimate, load_climate, synthetic_climate
from gpytorch_gaps import settings
from gpytorch_gaps.utils.files import atomic_write, require_place

PARTS = ("study", "methods", "warm", "botorch")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="trentino_daily", help="a name, an .npz file, or 'synthetic'")
    parser.add_argument("--predict", type=Path, help="an .npz with `cells`, k x 4 integers")
    parser.add_argument("-o", "--output", type=Path, help="an .npz for the predictions")
    parser.add_argument("--part", action="append", choices=PARTS, help="what to do; default: study")
    parser.add_argument("--cap", type=float, default=240.0, help="seconds that a method may take")
    parser.add_argument("--steps", type=int, default=10, help="training steps in 'methods' and 'warm'")
    parser.add_argument(
        "--method",
        action="append",
        choices=list(METHODS),
        help="methods in 'methods' (default: all) and 'warm' (IG_1000)",
    )
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of the results")
    parser.add_argument("--quiet", action="store_true", help="without progress bars")
    options = parser.parse_args(arguments)
    if (options.predict is None) != (options.output is None):
        parser.error("--predict and -o go together")
    climate = synthetic_climate() if options.data == "synthetic" else load_climate(options.data)
    with settings.progress(not options.quiet):
        if options.predict is not None:
            predict_cells(climate, options)
            return
        facts = machine_facts()
        print(described(facts), climate, sep="\n", flush=True)
        content: dict[str, Any] = {"machine": facts, "data": str(climate)}
        texts = [f"# {climate.name}", described(facts), str(climate)]
        for part in options.part or ["study"]:
            found, text = {"study": study, "methods": methods, "warm": warm, "botorch": botorch}[part](climate, options)
            content[part] = found
            texts.append(text)
            print(text, flush=True)
    write_results(options.results, f"climate_{climate.name}", content, texts)


def predict_cells(climate: StationClimate, options: argparse.Namespace) -> None:
    cells = checked_cells(options.predict, climate.values.shape)
    require_place("-o", options.output)
    trained = train(climate, np.where(withheld_only_if_marked(climate), np.nan, climate.values), not options.quiet)
    mean, deviation = predict(trained)
    where = tuple(cells.T)
    atomic_write(options.output, lambda file: np.savez(file, mean=mean[where], std=deviation[where]))
    print(json.dumps({"cells": len(cells), "seconds": sum(trained.seconds.values()), "peak GiB": peak_gib()}))


def withheld_only_if_marked(climate: StationClimate) -> np.ndarray:
    return np.zeros(climate.values.shape, dtype=bool) if climate.test_cells is None else climate.test_cells


def checked_cells(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    with np.load(path, allow_pickle=False) as file:
        if "cells" not in file:
            raise ValueError(f"--predict: {path} holds {', '.join(file) or 'nothing'}, expected an array `cells`")
        cells = file["cells"]
    if cells.ndim != 2 or cells.shape[1] != 4 or not np.issubdtype(cells.dtype, np.integer):
        raise ValueError(f"--predict: cells: got {cells.dtype} of shape {cells.shape}, expected integers, k x 4")
    outside = ((cells < 0) | (cells >= np.array(shape))).any(-1)
    if outside.any():
        first = int(np.flatnonzero(outside)[0])
        raise ValueError(f"--predict: cells: row {first} is {cells[first].tolist()}, expected indices below {shape}")
    return cells


# -- parts -------------------------------------------------------------------------------------------------------------


def study(climate: StationClimate, options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    cells = withheld(climate)
    started = time.perf_counter()
    trained = train(climate, np.where(cells, np.nan, climate.values), not options.quiet)
    mean, deviation = predict(trained)
    took, memory = time.perf_counter() - started, peak_gib()
    rows = {"this model": (mean, deviation), **references(climate, cells)}
    found = {name: scores(climate, cells, *pair) for name, pair in rows.items()}
    likelihood, error = log_likelihood(trained.model)
    lines = [
        [name, output, f"{s.rmse:.3f}", f"{s.crps:.3f}", f"{s.coverage:.1%}", f"{s.count:,}"]
        for name, own in found.items()
        for output, s in own.items()
    ]
    text = [
        f"## Study: {len(trained.model.train_targets):,} observations of {climate.values.size:,} cells\n",
        markdown_table(["", "output", "RMSE", "CRPS", "95 % intervals cover", "cells"], lines),
        f"\nTrained and predicted at every cell in {took:.0f} s, peak memory {memory:.2f} GiB. "
        f"Log-likelihood {likelihood:.4f} +- {error:.4f} nats an observation.",
        _in_seconds("Seconds", trained.seconds),
        _in_seconds("A training step, on average", steps_by_phase(trained.histories)),
        *(f"Training: {history}" for history in trained.histories),
        _about_convergence(trained),
    ]
    content = {
        "seconds": took,
        "phases": trained.seconds,
        "step": steps_by_phase(trained.histories),
        "peak_gib": memory,
        "log_likelihood": [likelihood, error],
        "loss": [loss for history in trained.histories for loss in history.loss],
        "scores": {name: {output: s.as_dict() for output, s in own.items()} for name, own in found.items()},
    }
    return content, "\n".join(text)


def _in_seconds(what: str, seconds: dict[str, float]) -> str:
    return f"{what}: " + ", ".join(f"{name} {value:.1f}" for name, value in seconds.items())


def _about_convergence(trained: Trained) -> str:
    last = trained.histories[-1].loss
    fallen = (last[0] - last[-1]) / max(1, len(last) - 1)
    return f"In the last {len(last)} steps the loss fell by {fallen:.1e} nats an observation and step."


def methods(climate: StationClimate, options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    return compare_methods(climate, options.method or list(METHODS), options.steps, options.cap)


def warm(climate: StationClimate, options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    return compare_starts(climate, options.steps, (options.method or ["IG_1000"])[0])


def botorch(climate: StationClimate, options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    return botorch_row(climate, options.cap, options.steps)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, FileNotFoundError) as error:
        sys.exit(str(error))
