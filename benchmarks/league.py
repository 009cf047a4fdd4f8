"""The league table: ``fill_gaps`` with no options on every public data set, beside other methods in the same process.

    GPYTORCH_GAPS_DATA=... python -m benchmarks.league --json results/league.json

Observations are withheld in the shape of the gaps that such data have: clouds over a field, runs of a station, ends of
learning curves. By default the data sets are cut to some thousand cells, which takes minutes; `--full` takes hours.
Methods without error bars have their mean absolute error as CRPS. Published figures are on other cells, and are marked.
`--draw` makes the picture and the table again from the JSON file. It needs ``pip install 'gpytorch-gaps[benchmarks]'``.
"""

import argparse
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._fill_data import PROBLEMS, problem
from benchmarks._fill_peers import peers
from benchmarks._fill_splits import SHAPES, withheld
from benchmarks._machine import machine_facts
from benchmarks._results import described, markdown_table, number, pyplot, tidy
from benchmarks.fill import OURS, fill_and_score, write_json

COLUMNS = (
    "data",
    "cells",
    "withheld",
    "`fill_gaps`: RMSE",
    "CRPS",
    "95 % intervals cover",
    "CPU s",
    "best other: RMSE",
    "CRPS",
    "CPU s",
    "published RMSE",
)


def compare(name: str, full: bool, seed: int) -> dict[str, Any]:
    """All methods on one data set. A method that fails has its error instead of scores."""
    given = problem(name, small=not full)
    shape = SHAPES[given.kind][-1]
    held = withheld(given, shape, seed)
    methods: dict[str, dict[str, Any]] = {}
    for method in (OURS, *peers(given)):
        try:
            methods[method] = fill_and_score(given, held, method)
        except (ValueError, ArithmeticError, ImportError, np.linalg.LinAlgError) as error:
            methods[method] = {"error": f"{type(error).__name__}: {error}"}
    published = {label: rmse for (label, of), rmse in given.published.items() if of == shape}
    shown = " x ".join(map(str, given.values.shape))
    return {
        "data": name,
        "cells": shown,
        "withheld": f"{int(held.sum()):,}, {shape}",
        "methods": methods,
        "published": published,
    }


def others(case: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The other methods that did not fail, the best first."""
    done = {name: facts for name, facts in case["methods"].items() if name != OURS and "rmse" in facts}
    return dict(sorted(done.items(), key=lambda item: item[1]["rmse"]))


def table(cases: Sequence[dict[str, Any]]) -> str:
    """One line per data set."""
    lines = []
    for case in cases:
        mine, ranked = case["methods"][OURS], others(case)
        name, best = next(iter(ranked.items()), ("none", {}))
        lines.append(
            [
                case["data"],
                case["cells"],
                case["withheld"],
                number(mine.get("rmse"), ".4g"),
                number(mine.get("crps"), ".4g"),
                number(mine.get("coverage"), ".1%"),
                number(mine.get("cpu_seconds"), ".1f"),
                f"{number(best.get('rmse'), '.4g')} ({name})",
                number(best.get("crps"), ".4g"),
                number(best.get("cpu_seconds"), ".1f"),
                ", ".join(f"{rmse:.4g} ({label})" for label, rmse in case["published"].items()),
            ]
        )
    return markdown_table(COLUMNS, lines)


def failures(cases: Sequence[dict[str, Any]]) -> str:
    """The methods that gave no result, such as those whose package is missing."""
    listed = [(case["data"], name, facts) for case in cases for name, facts in case["methods"].items()]
    return "\n".join(f"No result: {data}, {name}: {facts['error']}" for data, name, facts in listed if "error" in facts)


def draw(cases: Sequence[dict[str, Any]], path: Path) -> None:
    """RMSE of every other method, as a multiple of that of ``fill_gaps``."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8, 0.45 * len(cases) + 1.2), layout="constrained")
    for row, case in enumerate(reversed(cases)):
        ratios = [facts["rmse"] / case["methods"][OURS]["rmse"] for facts in others(case).values()]
        axes.plot(ratios, [row] * len(ratios), "o", color="tab:gray", alpha=0.6)
        axes.plot(ratios[:1], [row] * len(ratios[:1]), "o", color="tab:blue")
    axes.axvline(1, color="tab:red")
    axes.set_xscale("log")
    axes.set_xticks([0.2, 0.5, 1, 2, 5, 10], ["0.2", "0.5", "1", "2", "5", "10"])
    axes.minorticks_off()
    axes.set_yticks(range(len(cases)), [case["data"] for case in reversed(cases)])
    axes.set_xlabel("RMSE as a multiple of that of fill_gaps (red line); the best other method in blue")
    tidy(axes)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", choices=list(PROBLEMS), default=list(PROBLEMS))
    parser.add_argument("--full", action="store_true", help="whole data sets")
    parser.add_argument("--seed", type=int, default=0, help="seed of the withheld observations")
    parser.add_argument("--json", type=Path, help="where results go; those of other data sets in it are kept")
    parser.add_argument("--draw", type=Path, help="the picture; with --json alone, of what the file has")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    facts = machine_facts()
    print(described(facts), flush=True)
    known = json.loads(options.json.read_text())["cases"] if options.json and options.json.exists() else []
    cases = {case["data"]: case for case in known}
    for name in options.data if options.draw is None else []:
        cases[name] = compare(name, options.full, options.seed)
        print(f"\n{table([cases[name]])}", flush=True)
        if options.json is not None:
            write_json(options.json, {"machine": facts, "full": options.full, "cases": list(cases.values())})
    ordered = [cases[name] for name in PROBLEMS if name in cases]
    print(f"\n{table(ordered)}\n\n{failures(ordered)}".rstrip())
    if options.draw is not None:
        draw(ordered, options.draw)
    return ordered


if __name__ == "__main__":
    main()
