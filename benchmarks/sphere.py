"""A global field by month, isotropic on the sphere, with half of it missing: mean and draws everywhere.

    python -m benchmarks.sphere --output results/sphere
    python -m benchmarks.sphere --degrees 5 --months 3

The field is a draw from a Matern-3/2 kernel of the distance through the sphere times one of the time, plus noise, in
cells of one degree: 180 x 360 x 12. Gaps are land, which is the same in every month, and swaths between the tracks of a
satellite, which change. The model has the kernel that the field was drawn with. Solves are measured, not training, and
intervals should have their nominal coverage. Steps of the mean from one longitude to the next are compared: the largest
step across the date line, divided by the median of the largest steps across all meridians.
"""

import argparse
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpytorch.kernels import MaternKernel

import gpytorch_gaps as gaps
from benchmarks._block_models import BlockModel, Stages, measurements_at, peak_gib
from benchmarks._machine import machine_facts
from benchmarks._results import described, write_results
from gpytorch_gaps.posterior.scoring import score_errors

MISSING = 0.5
LENGTH, MEMORY, NOISE = 0.3, 3.0, 0.01  # radii, months, and a variance; that of the field is one
_WAVES = 600  # of a draw
_LAND = 0.3  # of the cells
_TRACKS = 10.0  # around the globe


def axes_of(degrees: float, months: int) -> list[np.ndarray]:
    """Centres of cells: latitude, longitude and month."""
    rows, columns = round(180 / degrees), round(360 / degrees)
    latitudes, longitudes = (np.arange(rows) + 0.5) * degrees - 90, (np.arange(columns) + 0.5) * degrees - 180
    return [latitudes, longitudes, np.arange(months, dtype=np.float64)]


def on_the_sphere(latitudes: np.ndarray, longitudes: np.ndarray) -> np.ndarray:
    """shape: (latitudes, longitudes, 3)"""
    up, around = np.deg2rad(latitudes)[:, None], np.deg2rad(longitudes)[None, :]
    parts = [np.cos(up) * np.cos(around), np.cos(up) * np.sin(around), np.sin(up) + 0.0 * around]
    return np.stack(parts, axis=-1)


def matern_frequencies(count: int, columns: int, length: float, generator: np.random.Generator) -> np.ndarray:
    """Draws of the spectral density of a Matern-3/2 kernel: Student's t with three degrees of freedom."""
    return generator.standard_normal((count, columns)) / np.sqrt(generator.chisquare(3, (count, 1)) / 3) / length


def draw(axes: Sequence[np.ndarray], seed: int = 0) -> np.ndarray:
    """``sqrt(2 / n) sum cos(w . s + v t + phase)``, without noise. shape: (latitudes, longitudes, months)"""
    generator = np.random.default_rng(seed)
    space = on_the_sphere(axes[0], axes[1]).reshape(-1, 3)
    w, v = matern_frequencies(_WAVES, 3, LENGTH, generator), matern_frequencies(_WAVES, 1, MEMORY, generator)
    angles = space @ w.T + generator.uniform(0, 2 * math.pi, _WAVES)
    turns = v @ axes[2][None, :]
    # cos(a + b) = cos(a) cos(b) - sin(a) sin(b)
    field = np.cos(angles) @ np.cos(turns) - np.sin(angles) @ np.sin(turns)
    return math.sqrt(2 / _WAVES) * field.reshape([len(axis) for axis in axes])


def missing(axes: Sequence[np.ndarray], seed: int = 1) -> np.ndarray:
    """Land, and swaths beside slanted tracks that move from month to month: half of the cells."""
    latitudes, longitudes, months = axes
    height = draw([latitudes, longitudes, np.zeros(1)], seed)
    land = height > np.quantile(height, 1 - _LAND)
    spin = longitudes[None, :, None] / 360 + np.sin(np.deg2rad(latitudes))[:, None, None] / 3 + 0.37 * months
    share = (MISSING - _LAND) / (1 - _LAND)
    return land | (np.mod(_TRACKS * spin, 1.0) < share)


def sphere_model(axes: Sequence[np.ndarray], values: np.ndarray) -> tuple[BlockModel, gaps.CartesianGrid]:
    grid, x, y = gaps.from_array(torch.from_numpy(values), [torch.from_numpy(axis) for axis in axes])
    place, time = MaternKernel(nu=1.5), MaternKernel(nu=1.5)
    kernel = gaps.GappyGridKernel([gaps.SphereKernel(place), time], grid, blocks=[(0, 1), (2,)])
    model = BlockModel(x, y, kernel, NOISE)
    place.lengthscale, time.lengthscale = LENGTH, MEMORY
    return model, grid


def seam(mean: np.ndarray) -> float:
    """The largest step across the date line, over the median of the largest steps across all meridians."""
    steps = np.abs(mean - np.roll(mean, 1, axis=1)).max(axis=(0, 2))
    return float(steps[0] / np.median(steps))


def run(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    axes, stages = axes_of(options.degrees, options.months), Stages()
    generator = np.random.default_rng(2)
    field = draw(axes)
    truth = field + math.sqrt(NOISE) * generator.standard_normal(field.shape)
    gap = missing(axes)
    model, grid = sphere_model(axes, np.where(gap, np.nan, truth))
    model.eval()
    with warnings.catch_warnings(record=True) as caught, gaps.settings.mixed_precision(options.mixed):
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", gaps.ApproximateVarianceWarning)  # that is what is asked for
        with stages.stage("mean"), torch.no_grad():
            mean = model(grid.points()).mean.reshape(field.shape).numpy()
        with stages.stage(f"{options.draws} draws"), torch.no_grad():
            draws = gaps.sample_posterior(model, grid, options.draws, seed=0, progress=False)
        if options.std:
            with stages.stage("standard deviations"), gaps.settings.variance_method("pathwise"):
                _, variance = measurements_at(model, grid.points())
    facts: dict[str, Any] = {
        "shape": list(field.shape),
        "observations": int((~gap).sum()),
        **stages.facts(),
        "rmse": float(np.sqrt(np.mean((mean - truth)[gap] ** 2))),
        "rmse expected by draws": float((draws - torch.from_numpy(mean)).square().numpy()[:, gap].mean() + NOISE)
        ** 0.5,
        "seam": seam(mean),
        "peak_gib": peak_gib(),
        "warnings": sorted({f"{each.category.__name__}: {each.message}" for each in caught}),
    }
    if options.std:
        std = variance.sqrt().reshape(field.shape)[torch.from_numpy(gap)]
        facts["scores"] = score_errors(torch.from_numpy((mean - truth)[gap]), std).as_dict()
    return facts, texts_of(facts, stages)


def texts_of(facts: dict[str, Any], stages: Stages) -> list[str]:
    shape = " x ".join(map(str, facts["shape"]))
    lines = [
        f"- RMSE in the gaps: {facts['rmse']:.3f}; as the draws expect: {facts['rmse expected by draws']:.3f}",
        f"- steps across the date line over those elsewhere: {facts['seam']:.2f}",
    ]
    if "scores" in facts:
        lines.append(f"- 95 % intervals cover {facts['scores']['coverage']:.1%} of the gaps")
    lines += [f"- {text}" for text in facts["warnings"]]
    title = f"{shape}, {facts['observations']} observations, peak {facts['peak_gib']:.2f} GiB"
    return [title, stages.table(), "\n".join(lines)]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--degrees", type=float, default=1.0, help="size of a cell, a divisor of 180")
    made.add_argument("--months", type=int, default=12)
    made.add_argument("--draws", type=int, default=4)
    made.add_argument("--std", action="store_true", help="standard deviations of all cells, too, from 64 draws")
    made.add_argument("--mixed", action=argparse.BooleanOptionalAction, default=True, help="iterate in float32")
    made.add_argument("--output", type=Path, default=Path("results/sphere"), metavar="DIR")
    return made


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = parser().parse_args(arguments)
    facts = machine_facts()
    print(described(facts), flush=True)
    with gaps.settings.progress(False):
        found, texts = run(options)
    print("\n\n".join(texts))
    write_results(options.output, "sphere", {"machine": facts, **found}, [described(facts), *texts])
    return found


if __name__ == "__main__":
    main()
