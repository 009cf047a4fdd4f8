"""CPU seconds of ``fill_gaps`` by phase, and the accuracy of the result.

    GPYTORCH_GAPS_DATA=... OMP_NUM_THREADS=1 python -m benchmarks.fill_speed --json results/fill_speed.json

Everything is left at its default: error bars and the held-out check are computed. Cells are withheld in the shape of
clouds, or of runs along the time axis, and scored: RMSE, continuous ranked probability score, coverage of 95 %
intervals. CPU seconds hardly depend on what else runs on the machine; on two cores, a filling takes less than these.

| case | cells | observations withheld |
|---|---|---|
| demo | 96 x 144, the scene of ``gpytorch-gaps demo`` | its clouds |
| modis | 300 x 500, satellite | the clouds, moved |
| pacific | 399 x 30 x 84, months of sea surface temperature | clouds |
| hourly | 8,760 x 36, a table of weather stations (synthetic) | its outages |
| pm10 | 4,383 x 70, daily particulate matter, stations as labels | runs of 30 days |
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from scipy.ndimage import gaussian_filter

from benchmarks._long_data import weather_table
from benchmarks._machine import machine_facts
from benchmarks.datasets import FOLDER_VARIABLE, load_field
from benchmarks.heaton import split
from gpytorch_gaps import fill_gaps
from gpytorch_gaps.cli.demo import make_scene
from gpytorch_gaps.filling.process.pipeline import Stopwatch
from gpytorch_gaps.posterior.scoring import score_errors

_CLOUD, _CLOUDY_SHARE = (2.0, 4.0, 6.0), 0.15  # extent of a cloud in cells, and the share of the cells that clouds hide
_RUN, _RUNS_SHARE = 30, 0.1  # days of a run, and the share of the cells that runs cover


@dataclass(frozen=True, eq=False)
class Case:
    """Measurements, flags of the cells that are scored, and the axes."""

    values: np.ndarray
    scored: np.ndarray
    axes: list


def demo(seed: int, months: int | None) -> Case:
    scene = make_scene(7 + seed)
    return Case(scene.measured, scene.gaps, scene.axes)


def modis(seed: int, months: int | None) -> Case:
    arrays = load_field("modis_lst")
    values = arrays["satellite"].astype(np.float64)
    moved = (60 + 40 * seed, 110 + 70 * seed)
    return Case(values, split(values, moved)[1], [arrays["lat"], arrays["lon"]])


def pacific(seed: int, months: int | None) -> Case:
    arrays = load_field("sst_pacific")
    values = arrays["values"][:months].astype(np.float64)
    axes = [arrays["month_index"][:months], arrays["lat"], arrays["lon"]]
    height = gaussian_filter(np.random.default_rng(seed).standard_normal(values.shape), _CLOUD)
    return Case(values, (height > np.quantile(height, 1 - _CLOUDY_SHARE)) & ~np.isnan(values), axes)


def hourly(seed: int, months: int | None) -> Case:
    table = weather_table(8760, 36, seed)
    return Case(
        table.truth,
        table.gaps,
        [np.datetime64("2023-01-01T00", "h") + table.hours.astype("timedelta64[h]"), table.places],
    )


def pm10(seed: int, months: int | None) -> Case:
    arrays = np.load(Path(os.environ[FOLDER_VARIABLE]) / "german_pm10.npz")
    values = arrays["values"].astype(np.float64)
    generator = np.random.default_rng(seed)
    runs = np.zeros(values.shape, dtype=bool)
    while runs.mean() < _RUNS_SHARE:
        start, station = int(generator.integers(0, len(values))), int(generator.integers(0, values.shape[1]))
        runs[start : start + _RUN, station] = True
    names = [f"station {number}" for number in range(values.shape[1])]
    return Case(values, runs & ~np.isnan(values), [arrays["date"].astype("datetime64[D]"), names])


CASES: dict[str, Callable[[int, int | None], Case]] = {
    one.__name__: one for one in (demo, modis, pacific, hourly, pm10)
}


def measure(name: str, seed: int, months: int | None) -> dict:
    """Fills one case without options, and scores it."""
    case = CASES[name](seed, months)
    seen = np.where(case.scored, np.nan, case.values)
    started = time.process_time()
    found = fill_gaps(seen, case.axes, progress=False)
    seconds = time.process_time() - started
    error = torch.from_numpy((case.values - found.mean)[case.scored])
    score = score_errors(error, torch.from_numpy(found.std[case.scored])).as_dict()
    report = found.report.as_dict()
    phases = ", ".join(f"{phase} {value:.1f}" for phase, value in report["seconds"].items())
    print(
        f"{name:<9}{seed:>5}{seconds:>9.1f}{score['rmse']:>10.4f}{score['crps']:>10.4f}{score['coverage']:>8.1%}  "
        f"{phases}; {report['kernel']}",
        flush=True,
    )
    return {"case": name, "seed": seed, "cpu_seconds": seconds, **score, "report": report}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--months", type=int, help="use only the first months of pacific")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    facts = machine_facts()
    print(", ".join(f"{key}: {value}" for key, value in facts.items()))
    print(f"{'case':<9}{'seed':>5}{'CPU s':>9}{'RMSE':>10}{'CRPS':>10}{'covers':>8}  CPU seconds by phase")
    Stopwatch.clock = staticmethod(time.process_time)
    rows = [measure(name, seed, options.months) for name in options.cases for seed in options.seeds]
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"machine": facts, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
