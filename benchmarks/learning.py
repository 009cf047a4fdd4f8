"""Learning hyperparameters of 10^6 to 10^9 cells with ``fit_reconstruction``, and ``fit`` beside it on 10^6.

    python -m benchmarks.learning --output results/learning
    python -m benchmarks.learning --sizes 1b --directory /scratch --cap 2400

The data are a draw of a squared-exponential kernel with an output scale of 1 and the same length-scale on every axis,
plus noise, at the observed cells: frames of a video of 3840 x 2160 pixels, 120 frames per unit of time, or an image of
10^6 pixels. Half of the cells are random gaps. All hyperparameters start at twice their true values, and
those of ``fit`` at ``--fit-off`` times them, because its first-order steps would take too long from there.

"off" is the relative distance of what was learned to the truth, and "stated" its standard deviation given the data,
which no method can beat. The files are in float32 and are deleted after the run. Every run is a process of its own,
killed at ``--cap`` seconds; memory is the peak of what it allocates, without the mapped file.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gpytorch
import numpy as np
import torch
from gpytorch.kernels import Kernel, RBFKernel, ScaleKernel
from torch import Tensor
from tqdm.auto import tqdm

import gpytorch_gaps as gaps
from benchmarks._block_models import BlockModel, Stages
from benchmarks._machine import machine_facts
from benchmarks._results import Child, described, markdown_table, number, run_capped, write_results
from gpytorch_gaps.linalg.products import kron_matmul
from gpytorch_gaps.linalg.truncated import truncated_eigh

SIZES = {"1m": (1000, 1000), "16m": (3840, 2160, 2), "100m": (3840, 2160, 12), "1b": (3840, 2160, 121)}
COLUMNS = ("cells", "method", "outcome", "steps", "seconds", "CPU s", "peak GiB", "log-likelihood", "off (stated)")
_FRAMES_A_UNIT = 120
_LEVEL = 1e-8  # of the noise, below which eigenvalues are not drawn


def axes_of(shape: Sequence[int]) -> list[Tensor]:
    unit = [torch.linspace(0, 1, size, dtype=torch.float64) for size in shape[:2]]
    return [*unit, *(torch.arange(size, dtype=torch.float64) / _FRAMES_A_UNIT for size in shape[2:])]


def kernels_of(shape: Sequence[int], options: argparse.Namespace, off: float = 1.0) -> list[Kernel]:
    """The first kernel has the output scale."""
    kernels: list[Kernel] = [RBFKernel().double() for _ in shape]
    for kernel in kernels:
        kernel.lengthscale = off * options.lengthscale
    kernels[0] = ScaleKernel(kernels[0]).double()
    kernels[0].outputscale = off
    return kernels


def draw_file(path: Path, shape: Sequence[int], options: argparse.Namespace) -> None:
    """A draw with noise and gaps, slice by slice."""
    with torch.no_grad():
        pairs = zip(kernels_of(shape, options), axes_of(shape), strict=True)
        basis = truncated_eigh([kernel(x).to_dense() for kernel, x in pairs], _LEVEL * options.noise)
        generator = np.random.default_rng(options.seed)
        weights = basis.products.sqrt() * torch.from_numpy(generator.standard_normal(basis.ranks))
        target = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=tuple(shape))
        step = max(1, 2**23 // math.prod(shape[1:]))
        for start in range(0, shape[0], step):
            tables = [basis.vectors[0][start : start + step], *basis.vectors[1:]]
            field = kron_matmul(tables, weights.reshape(-1, 1)).view(-1, *shape[1:]).float().numpy()
            field += math.sqrt(options.noise) * generator.standard_normal(field.shape, dtype=np.float32)
            field[generator.random(field.shape, dtype=np.float32) < options.gaps] = np.nan
            target[start : start + step] = field
        target.flush()


# -- runs, each in a process of its own --------------------------------------------------------------------------------


def by_fit_reconstruction(child: Child, path: Path, options: argparse.Namespace) -> None:
    values, stages = np.load(path, mmap_mode="r"), Stages()
    axes, kernels = axes_of(values.shape), kernels_of(values.shape, options, off=2.0)
    settings = {"tolerance": options.tolerance, "progress": False}
    with child.clock(), stages.stage("all"):
        learned = gaps.fit_reconstruction(values, axes, kernels, 2.0 * options.noise, **settings)
    done = learned.steps
    child.report(
        outcome="converged" if learned.converged else "not converged",
        steps=[[step.num_train, step.distance, step.probe_error, step.iterations, step.seconds] for step in done],
        values=learned.values,
        deviations=learned.deviations,
        log_likelihood=learned.log_likelihood,
        log_likelihood_error=learned.log_likelihood_error,
        **stages.facts(),
    )


def by_fit(child: Child, path: Path, options: argparse.Namespace) -> None:
    """A model of all observations in memory, trained by `fit`."""
    values, stages = torch.from_numpy(np.load(path)).double(), Stages()
    grid, x, y = gaps.from_array(values, axes_of(values.shape))
    own = kernels_of(values.shape, options, off=options.fit_off)
    model = BlockModel(x, y, gaps.GappyGridKernel(own, grid), options.fit_off * options.noise)
    model.mean_module = gpytorch.means.ZeroMean()
    torch.manual_seed(options.seed)
    with child.clock(), stages.stage("all"):
        history = gaps.fit(model, options.steps, lr=options.fit_lr, progress=False)
    first: Any = own[0]
    found = [first.base_kernel.lengthscale, *(kernel.lengthscale for kernel in own[1:])]
    names = [f"axis {axis}: {'base_kernel.' if axis == 0 else ''}lengthscale" for axis in range(len(own))]
    learned = {name: value.item() for name, value in zip(names, found, strict=True)}
    child.report(
        outcome=history.stopped,
        steps=[[len(y), None, None, *pair] for pair in zip(history.iterations, history.seconds, strict=True)],
        values={
            "axis 0: outputscale": first.outputscale.item(),
            **learned,
            "noise": model.likelihood.noise.item(),
        },
        log_likelihood=-history.loss[-1] * len(y),
        log_likelihood_error=len(y) * (history.standard_error[-1] or 0.0),
        **stages.facts(),
    )


WORK = {"fit_reconstruction": by_fit_reconstruction, "fit": by_fit}


# -- tables ------------------------------------------------------------------------------------------------------------


def distances(row: dict[str, Any], options: argparse.Namespace) -> str:
    """Relative distances to the truth, with the stated deviations."""
    parts = []
    for name, value in row.get("values", {}).items():
        short = name.split(": ")[-1].replace("base_kernel.", "")
        truth = {"outputscale": 1.0, "lengthscale": options.lengthscale, "noise": options.noise}[short]
        stated = row.get("deviations", {}).get(name)
        text = f"{name.replace('base_kernel.', '')} {100 * (value / truth - 1):+.2f} %"
        parts.append(text if stated is None else f"{text} ({100 * stated:.2f})")
    return ", ".join(parts)


def line_of(row: dict[str, Any], options: argparse.Namespace) -> list[str]:
    outcome = row["outcome"] + (f": {row['note']}" if "note" in row else "")
    error = row.get("log_likelihood_error")
    value = f"{number(row.get('log_likelihood'), '.2f')} +- {number(error, '.2g')}"
    clocks = [number(row.get(clock, {}).get("all"), ".1f") for clock in ("wall", "cpu")]
    memory = row["memory_gib"] - row["before_gib"] if "memory_gib" in row else None
    steps = str(len(row.get("steps", [])))
    return [row["size"], row["method"], outcome, steps, *clocks, number(memory, ".2f"), value, distances(row, options)]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--sizes", nargs="+", default=["1m", "16m", "100m"], help=f"{', '.join(SIZES)}, or 300x200")
    made.add_argument("--methods", nargs="+", choices=WORK, default=list(WORK))
    made.add_argument("--lengthscale", type=float, default=0.02)
    made.add_argument("--noise", type=float, default=1e-2)
    made.add_argument("--gaps", type=float, default=0.5)
    made.add_argument("--tolerance", type=float, default=0.1, help="tolerance of the learning, in standard deviations")
    made.add_argument("--steps", type=int, default=100, help="largest number of steps of `fit`")
    made.add_argument("--fit-off", type=float, default=1.1, help="factor of all hyperparameters where `fit` starts")
    made.add_argument("--fit-lr", type=float, default=0.02, help="learning rate of `fit`")
    made.add_argument("--fit-cells", type=int, default=2_000_000, help="up to which `fit` is run")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--cap", type=float, default=1800.0, help="seconds of a run")
    made.add_argument("--memory", type=float, default=8.0, help="GiB that a run may allocate")
    made.add_argument(
        "--directory", type=Path, default=None, help="a folder for the data, which are deleted after each run"
    )
    made.add_argument("--output", type=Path, default=Path("results/learning"), metavar="DIR")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    facts = {**machine_facts(), "lengthscale": str(options.lengthscale), "noise": str(options.noise)}
    print(described(facts), flush=True)
    rows: list[dict[str, Any]] = []
    for size in tqdm(options.sizes, unit="size", dynamic_ncols=True):
        shape = SIZES.get(size) or tuple(map(int, size.split("x")))
        with TemporaryDirectory(dir=options.directory) as directory:
            path = Path(directory) / "values.npy"
            draw_file(path, shape, options)
            for method in options.methods:
                if method == "fit" and math.prod(shape) > options.fit_cells:
                    continue
                found = run_capped(WORK[method], path, options, cap=options.cap, memory_gib=options.memory)
                rows.append({"size": f"{math.prod(shape):,}", "method": method, **found})
                text = markdown_table(COLUMNS, [line_of(row, options) for row in rows])
                write_results(options.output, "learning", {"machine": facts, "runs": rows}, [described(facts), text])
    print(text)


if __name__ == "__main__":
    main()
