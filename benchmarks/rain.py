"""Skewed data: ``fill_gaps`` with and without a transform, on synthetic rain and on fine dust.

    GPYTORCH_GAPS_DATA=... python -m benchmarks.rain

Synthetic rain is a smooth normal field with noise, cut off below and cubed: 30 to 70 % of the cells are zero, the
others have a heavy tail. A quarter of the cells and a block are gaps. The real data are ``german_pm10``, daily fine
dust of stations. A tenth of the observations is withheld, at random or in runs of half a year of one station.

A split has at most five runs, and errors within a run are correlated. Therefore there are several splits. The last
lines are means over fields of rain, and over splits.

For each method: the smallest filled value and the smallest 2.5 % quantile; the CRPS of all gaps, also as a ratio to
that without a transform; and the coverage of 95 % intervals. For a zero in a cell that is dry with probability p,
coverage counts the fraction of p inside the interval. `holds` is the fraction of intervals that contain the value. It
is larger if many cells are certainly dry. Seconds are CPU seconds.
"""

import argparse
import json
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import ndtri

from benchmarks._machine import machine_facts
from benchmarks.labels import table, withheld
from gpytorch_gaps import fill_gaps
from gpytorch_gaps.filling.transforms.predictive import predictive
from gpytorch_gaps.reports import CalibrationWarning

SIDE = 40  # cells along each side of the field of rain
LENGTHSCALE, NOISE = 4.0, 0.1  # of its normal field, in cells and in standard deviations
TRANSFORMS = (None, "auto")
RUN = 182  # days


def rain(seed: int, dry: float) -> np.ndarray:
    """A field of rain, with about this share of dry cells."""
    generator = np.random.default_rng(seed)
    t = np.arange(SIDE)
    kernel = np.exp(-0.5 * ((t[:, None] - t) / LENGTHSCALE) ** 2) + 1e-9 * np.eye(SIDE)
    half = np.linalg.cholesky(kernel)
    z = half @ generator.standard_normal((SIDE, SIDE)) @ half.T + NOISE * generator.standard_normal((SIDE, SIDE))
    return 3.0 * np.maximum(z - float(ndtri(dry)), 0.0) ** 3


def problems(seeds: int, stations: int, days: int, splits: int) -> Iterator[tuple[str, Any, np.ndarray]]:
    """Names, the values with gaps, and the flags and values of the cells that are scored."""
    for dry in (0.3, 0.5, 0.7):
        for seed in range(seeds):
            truth = rain(seed, dry)
            gap = np.random.default_rng(1000 + seed).random(truth.shape) < 0.25
            gap[8:16, 20:28] = True
            yield f"rain, {dry:.0%} dry", np.where(gap, np.nan, truth), truth
    for how in ("random", "runs") if stations else ():
        data = table("pm10", stations, 0).iloc[-days:]
        data = data.loc[:, data.notna().sum() > RUN]
        truth = data.to_numpy()
        for split in range(splits):
            yield f"german_pm10, {how}", data.mask(withheld(truth, how, RUN, split)), truth


def scores(given: Any, truth: np.ndarray, transform: str | None, steps: int) -> dict[str, Any]:
    """The scores of one way to fill."""
    started = time.process_time()
    result = fill_gaps(given, transform=transform, steps=steps, progress=False)
    seconds = time.process_time() - started
    low, high = (np.asarray(result.quantile(level)) for level in (0.025, 0.975))
    gap = np.isnan(np.asarray(given)) & ~np.isnan(truth)
    filling = result._fitted.filling
    found = predictive(filling.transform, *(own[gap] for own in filling.predicted))
    score = found.score(truth[gap])
    return {
        "transform": str(transform),
        "chosen": result.report.transform,
        "cells": int(gap.sum()),
        "smallest": float(np.nanmin(np.asarray(result.mean)[gap])),
        "smallest_quantile": float(low[gap].min()),
        "crps": score.crps,
        "rmse": score.rmse,
        "mae": score.mae,
        "coverage": score.coverage,
        "holds": float(np.mean((truth[gap] >= low[gap]) & (truth[gap] <= high[gap]))),
        "held_out_coverage": None if result.report.held_out is None else result.report.held_out.coverage,
        "expected_rmse": result.report.expected_rmse,
        "cpu_seconds": seconds,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="fields of rain of each kind")
    parser.add_argument("--stations", type=int, default=12, help="number of stations of german_pm10; 0 for rain only")
    parser.add_argument(
        "--splits", type=int, default=4, help="number of splits of german_pm10, each at random and into runs"
    )
    parser.add_argument("--days", type=int, default=1000, help="number of days of german_pm10, the last ones")
    parser.add_argument(
        "--transforms", nargs="*", default=TRANSFORMS[1:], help="transforms to compare with no transform"
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--output", type=Path, default=None, help="a file for all figures, as JSON")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore", CalibrationWarning)
    rows: list[dict[str, Any]] = []
    print(
        f"{'':24}{'transform':30}{'cells':>7}"
        f"{'least':>8}{'q2.5':>8}{'CRPS':>8}{'ratio':>7}{'95 %':>7}{'holds':>7}{'s':>6}"
    )
    for name, given, truth in problems(options.seeds, options.stations, options.days, options.splits):
        plain = 0.0
        for transform in (None, *options.transforms):
            row = {"problem": name, **scores(given, truth, transform, options.steps)}
            plain = row["crps"] if transform is None else plain
            row["ratio"] = row["crps"] / plain
            rows.append(row)
            chosen = row["chosen"].partition(" (")[0] or "none"
            words = chosen if transform is None else f"{transform}: {chosen}"
            print(
                f"{name:24}{words:30}{row['cells']:7,}{row['smallest']:8.3g}{row['smallest_quantile']:8.3g}"
                f"{row['crps']:8.3g}{row['ratio']:7.2f}{100 * row['coverage']:6.1f} {100 * row['holds']:6.1f} "
                f"{row['cpu_seconds']:6.1f}",
                flush=True,
            )
    for name in dict.fromkeys(row["problem"] for row in rows):
        for transform in ("None", *map(str, options.transforms)):
            own = [row for row in rows if row["problem"] == name and row["transform"] == transform]
            ratio, coverage = (float(np.mean([row[key] for row in own])) for key in ("ratio", "coverage"))
            print(f"{name:24}{transform:10}{len(own):2} times: CRPS ratio {ratio:.2f}, 95 % {100 * coverage:.1f}")
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps({"machine": machine_facts(), "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
