"""How well ``fill_gaps`` estimates its own error: the RMSE that its report states and the true one, over many seeds.

    python -m benchmarks.heldout --seeds 20 --json results/heldout.json

Every field is a draw of an isotropic Matern process (not a product of kernels) of random roughness and length-scale
plus 5 % noise, with gaps of one shape: a hole, a strip, clouds, cells at random, or a long gap in a series. The true
values are known, and so is the true error, that of a measurement, noise included. A single gap has few independent
values, so its true RMSE differs from the expected one by chance. `model` is the error that the true kernel and noise
expect, which no report can improve on. `stated`, `true`, `held out` and `model` are root mean squares over all runs.
`within` is the share of runs with a stated error within a factor of 1.5 of the true one. `stated / true` is a geometric
mean, `least` its smallest value.
"""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from scipy.linalg import cho_factor, cho_solve
from scipy.ndimage import gaussian_filter

from benchmarks._machine import machine_facts
from gpytorch_gaps import fill_gaps

NOISE = 0.05
WITHIN = 1.5  # factor between the stated and the true error
SIDE, LENGTH = 36, 300
COLUMNS = (
    "stated",
    "true",
    "held out",
    "model",
    "within",
    "stated / true",
    "least",
    "held-out coverage",
    "true coverage",
)


def hole(generator: np.random.Generator) -> np.ndarray:
    flags = np.zeros((SIDE, SIDE), dtype=bool)
    row, column = generator.integers(2, SIDE - 16, 2)
    flags[row : row + 14, column : column + 14] = True
    return flags


def strip(generator: np.random.Generator) -> np.ndarray:
    flags = np.zeros((SIDE, SIDE), dtype=bool)
    column = int(generator.integers(2, SIDE - 12))
    flags[:, column : column + 10] = True
    return flags


def clouds(generator: np.random.Generator) -> np.ndarray:
    height = gaussian_filter(generator.standard_normal((SIDE, SIDE)), 2.5)
    return height > np.quantile(height, 0.7)


def scattered(generator: np.random.Generator) -> np.ndarray:
    return generator.random((SIDE, SIDE)) < 0.4


def series(generator: np.random.Generator) -> np.ndarray:
    flags = generator.random(LENGTH) < 0.05
    start = int(generator.integers(20, LENGTH - 80))
    flags[start : start + 60] = True
    return flags


SHAPES: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "hole": hole, "strip": strip, "clouds": clouds, "scattered": scattered, "series": series,
}  # fmt: skip


def covariance(shape: tuple[int, ...], roughness: float, length: float) -> np.ndarray:
    """Isotropic Matern-1/2, 3/2 or 5/2 between all cells."""
    cells = np.stack(np.unravel_index(np.arange(math.prod(shape)), shape), axis=1).astype(float)
    distance = np.sqrt(((cells[:, None] - cells[None]) ** 2).sum(-1)) * math.sqrt(2 * roughness) / length
    polynomial = {0.5: 1.0, 1.5: 1 + distance, 2.5: 1 + distance + distance**2 / 3}[roughness]
    return polynomial * np.exp(-distance)


def root_mean_square(errors: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(errors))))


def one_run(shape: str, seed: int) -> dict[str, Any]:
    """Fills one field and compares the stated errors with the true ones."""
    generator = np.random.default_rng([seed, sorted(SHAPES).index(shape)])
    gaps = SHAPES[shape](generator)
    roughness = float(generator.choice([0.5, 1.5, 2.5]))
    length = float(np.exp(generator.uniform(math.log(3.0), math.log(10.0))))
    prior = covariance(gaps.shape, roughness, length) + NOISE**2 * np.eye(gaps.size)
    values = (np.linalg.cholesky(prior) @ generator.standard_normal(gaps.size)).reshape(gaps.shape)
    found = fill_gaps(np.where(gaps, np.nan, values), progress=False, seed=seed)
    errors = (found.mean - values)[gaps]
    report = found.report
    return {
        "shape": shape,
        "seed": seed,
        "stated": report.expected_rmse,
        "true": root_mean_square(errors),
        "held out": report.held_out.rmse,
        "model": expected_by(prior, gaps),
        "held-out coverage": report.held_out.coverage,
        "true coverage": float(np.mean(np.abs(errors) < 1.96 * found.std[gaps])),
        "withheld are like the gaps": report.like_the_gaps,
        "seconds": report.seconds,
    }


def expected_by(prior: np.ndarray, gaps: np.ndarray) -> float:
    """Root mean square error that the true covariance expects in the gaps, noise included."""
    missing, known = np.flatnonzero(gaps), np.flatnonzero(~gaps)
    cross = prior[np.ix_(known, missing)]
    explained = (cross * cho_solve(cho_factor(prior[np.ix_(known, known)]), cross)).sum(0)
    return float(np.sqrt(np.mean(np.diag(prior)[missing] - explained)))


def summary(runs: list[dict[str, Any]]) -> dict[str, float]:
    ratios = np.array([run["stated"] / run["true"] for run in runs])
    return {
        **{key: root_mean_square(np.array([run[key] for run in runs])) for key in COLUMNS[:4]},
        "within": float(np.mean((ratios < WITHIN) & (ratios > 1 / WITHIN))),
        "stated / true": float(np.exp(np.log(ratios).mean())),
        "least": float(ratios.min()),
        **{key: float(np.mean([run[key] for run in runs])) for key in COLUMNS[7:]},
    }


def main(arguments: list[str] | None = None) -> int:
    """Returns 0 if stated errors are within a factor of 1.5 in 80 % of runs, and above half of the truth on average."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    facts = machine_facts()
    print(", ".join(f"{key}: {value}" for key, value in facts.items()))
    print(f"{'gaps':<11}" + "".join(f"{name:>19}" for name in COLUMNS))
    runs: list[dict[str, Any]] = []
    rows: dict[str, dict[str, float]] = {}
    for shape in options.shapes:
        these = [one_run(shape, seed) for seed in range(options.first, options.first + options.seeds)]
        runs, rows[shape] = runs + these, summary(these)
        print(f"{shape:<11}" + "".join(f"{rows[shape][name]:>19.3g}" for name in COLUMNS), flush=True)
        if options.json is not None:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps({"machine": facts, "rows": rows, "runs": runs}, indent=1))
    everything = summary(runs)
    print(f"{'all':<11}" + "".join(f"{everything[name]:>19.3g}" for name in COLUMNS))
    return 0 if everything["within"] >= 0.8 and all(row["stated / true"] > 0.5 for row in rows.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
