"""``fill_gaps`` without options compared with common methods on public data: errors, coverage, time and memory.

    GPYTORCH_GAPS_DATA=... python -m benchmarks.fill --json results/fill.json

Observations are withheld at random and in the shape of gaps: clouds over a field, runs of a station, ends of learning
curves. Every method runs in a process of its own. CRPS of methods without error bars is their mean absolute error.
Memory is what the process took beyond what it had at the start. Peers need ``pip install 'gpytorch-gaps[benchmarks]'``.
"""

import argparse
import json
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks._fill_data import PROBLEMS, Problem, problem
from benchmarks._fill_peers import peers
from benchmarks._fill_splits import SHAPES, withheld
from benchmarks._machine import machine_facts
from benchmarks._results import Child, described, markdown_table, number, run_capped
from gpytorch_gaps import fill_gaps
from gpytorch_gaps.posterior.scoring import score_errors

OURS = "fill_gaps"
COLUMNS = ("method", "RMSE", "CRPS", "95 % coverage", "seconds", "CPU seconds", "GiB", "note")


def predictions(given: Problem, seen: np.ndarray, method: str) -> tuple[np.ndarray, np.ndarray | None, str]:
    """Mean and, if the method has one, standard deviation of every cell, and what the method says about itself."""
    if method != OURS:
        return peers(given)[method](given, seen), None, ""
    arguments, options = given.arguments(seen)
    found = fill_gaps(*arguments, **options, progress=False)
    return np.asarray(found.mean), np.asarray(found.std), str(found.report)


def fill_and_score(given: Problem, held: np.ndarray, method: str) -> dict[str, Any]:
    """Errors at the withheld cells, coverage if the method has error bars, and seconds."""
    seen = np.where(held, np.nan, given.values)
    started, cpu = time.perf_counter(), time.process_time()
    mean, std, report = predictions(given, seen, method)
    facts: dict[str, Any] = {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - cpu}
    error = (given.values - mean)[held]
    facts |= {"rmse": float(np.sqrt(np.mean(error**2))), "crps": float(np.mean(np.abs(error))), "report": report}
    if std is not None:
        score = score_errors(torch.from_numpy(error), torch.from_numpy(std[held]))
        facts |= {"crps": score.crps, "coverage": score.coverage}
    return facts


def measure(child: Child, given: Problem, shape: str, seed: int, method: str) -> None:
    """Fills and scores, in a process of its own."""
    warnings.simplefilter("ignore")
    held = withheld(given, shape, seed)
    with child.clock():
        facts = fill_and_score(given, held, method)
    child.report(**facts, outcome="done")


def compare(given: Problem, shape: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per method."""
    held = int(withheld(given, shape, options.seed).sum())
    wanted = tuple(options.methods or [""])
    listed = [name for name in (OURS, *peers(given)) if name.startswith(wanted)]
    rows = []
    for method in listed:
        facts = run_capped(measure, given, shape, options.seed, method, cap=options.cap, memory_gib=options.memory)
        rows.append({"data": given.name, "withheld": shape, "count": held, "method": method, **facts})
        if options.verbose and facts.get("report"):
            print(f"\n{given.name}, {shape}\n{facts['report']}", flush=True)
    return rows


def table(given: Problem, shape: str, rows: Sequence[dict[str, Any]]) -> str:
    """Measured rows, the best first, then published figures."""
    measured = sorted(rows, key=lambda row: row.get("rmse", np.inf))
    lines = [
        [
            f"**{row['method']}**" if row["method"] == OURS else row["method"],
            number(row.get("rmse"), ".4g"),
            number(row.get("crps"), ".4g"),
            number(row.get("coverage"), ".1%"),
            number(row.get("seconds"), ".1f"),
            number(row.get("cpu_seconds"), ".1f"),
            number(row["memory_gib"] - row["before_gib"] if "memory_gib" in row else None, ".2f"),
            "" if row["outcome"] == "done" else " ".join([row["outcome"], row.get("note", "")]).strip(),
        ]
        for row in measured
    ]
    published = [
        [name, f"{rmse:.4g}", *[""] * 5, "published"] for (name, of), rmse in given.published.items() if of == shape
    ]
    observed = int(np.isfinite(given.values).sum())
    head = f"### {given.name}, {shape}: {rows[0]['count']:,} of {observed:,} observations withheld"
    return f"{head}\n\n{markdown_table(COLUMNS, [*lines, *published])}"


def best_everywhere(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether no method has a smaller RMSE than ``fill_gaps`` anywhere."""
    smallest: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        key = (row["data"], row["withheld"])
        smallest[key] = min(smallest.get(key, row), row, key=lambda one: one.get("rmse", np.inf))
    return all(row["method"] == OURS for row in smallest.values())


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes = sorted({shape for listed in SHAPES.values() for shape in listed})
    made.add_argument("--data", nargs="+", choices=list(PROBLEMS), default=list(PROBLEMS))
    made.add_argument("--withheld", nargs="+", choices=shapes, default=shapes)
    made.add_argument("--methods", nargs="+", help="beginnings of names, such as fill_gaps or griddata. Default: all")
    made.add_argument("--small", action="store_true", help="parts of the data of some thousand cells")
    made.add_argument("--seed", type=int, default=0, help="seed of the withheld observations")
    made.add_argument("--cap", type=float, default=1800.0, help="seconds that a method may take")
    made.add_argument("--memory", type=float, default=12.0, help="GiB that a method may take")
    made.add_argument("--verbose", action="store_true", help="print the reports of fill_gaps")
    made.add_argument("--json", type=Path)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table per data set and shape. Returns 0 if ``fill_gaps`` is best in every one."""
    options = parser().parse_args(arguments)
    facts = machine_facts()
    print(described(facts), flush=True)
    rows: list[dict[str, Any]] = []
    for name in options.data:
        given = problem(name, options.small)
        for shape in SHAPES[given.kind]:
            if shape in options.withheld:
                rows += (added := compare(given, shape, options))
                print(f"\n{table(given, shape, added)}", flush=True)
                if options.json is not None:  # after each table: all of them take hours
                    write_json(options.json, {"machine": facts, "seed": options.seed, "rows": rows})
    return 0 if best_everywhere(rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
