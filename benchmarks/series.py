"""``fill_gaps`` on one long series: CPU seconds per phase, and how many matrices of its size are decomposed.

    python -m benchmarks.series --places 4000

The series is a random walk plus a wave plus noise. A quarter of it are gaps, most of them 20 positions long. CPU
seconds do not depend on what else the machine does.
"""

import argparse
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from gpytorch_gaps import fill_gaps
from gpytorch_gaps.filling.process import pipeline

_GAP_POSITIONS = 20


def series(places: int, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    walk = 0.2 * np.cumsum(generator.standard_normal(places))
    values = walk + np.sin(np.arange(places) / 4) + 0.05 * generator.standard_normal(places)
    for start in generator.integers(0, max(1, places - _GAP_POSITIONS), places // 100):
        values[start : start + _GAP_POSITIONS] = np.nan
    values[generator.random(places) < 0.1] = np.nan
    return values


@contextmanager
def decompositions(least: int) -> Iterator[Counter]:
    """Counts decompositions of matrices with at least `least` rows, by function."""
    counts: Counter = Counter()
    kinds = ("eigh", "svd", "cholesky_ex")
    originals = {kind: getattr(torch.linalg, kind) for kind in kinds}

    def counted(kind: str) -> Any:
        def count(matrix: torch.Tensor, *args: Any, **options: Any) -> Any:
            counts[kind] += int(matrix.size(-2) >= least)
            return originals[kind](matrix, *args, **options)

        return count

    try:
        for kind in kinds:
            setattr(torch.linalg, kind, counted(kind))
        yield counts
    finally:
        for kind in kinds:
            setattr(torch.linalg, kind, originals[kind])


@contextmanager
def cpu_clock() -> Iterator[None]:
    """Measures phases in CPU seconds instead of wall-clock seconds."""
    before = pipeline.time
    pipeline.time = SimpleNamespace(perf_counter=time.process_time)  # type: ignore[assignment]
    try:
        yield
    finally:
        pipeline.time = before


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--places", type=int, default=4000)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args(arguments)
    values = series(options.places)
    with cpu_clock(), decompositions(options.places // 2) as counts:
        found = fill_gaps(values, steps=options.steps, progress=False)
    observed = int((~np.isnan(values)).sum())
    print(f"{options.places} places, {observed} observed; {found.report.kernel}; {found.report.solve}")
    for stage, seconds in found.report.seconds.items():
        print(f"{stage:>20} {seconds:8.1f} s")
    print("decompositions:", ", ".join(f"{count} {kind}" for kind, count in counts.items() if count))
    return found.report.seconds


if __name__ == "__main__":
    main()
