"""Several processes on one problem, compared with one process: equality of results, messages and scaling.

    python -m benchmarks.distributed --output results/distributed

- strong scaling: the membrane of 3840 x 2160 x 2 cells, half of them gaps, reconstructed by 1, 2 and 4 processes;
- weak scaling: as many cells for every process;
- a kernel that does not truncate, whose weights are divided among the processes;
- training: 20 steps of Adam on 1000 x 1000 cells, cold, with the default probes.

Every run is started by torchrun, by default with one thread per process. More processes than cores bring no speed.
Messages and memory are the same on any machine. The table compares measured values with those that
:mod:`gpytorch_gaps.reconstruction.sizing` expects. Means and hyperparameters are compared with those of one process.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gpytorch
import numpy as np
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel

import gpytorch_gaps as gaps
from benchmarks._fields import membrane
from benchmarks._machine import machine_facts
from benchmarks._results import GIB, anonymous_gib, markdown_table
from gpytorch_gaps.distributed.communicator import Communicator
from gpytorch_gaps.utils.progress import format_bytes

THETA, NOISE = 0.1, 1e-6
FULL = (128, 128, 96)
TRAIN = (1000, 1000)
THREADS = [1]  # of each process


# -- in each of the processes ------------------------------------------------------------------------------------------


class Memory:
    """The peak of the allocated memory since the beginning."""

    def __init__(self) -> None:
        self.start = self.peak = anonymous_gib()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._done.wait(0.01):
            self.peak = max(self.peak, anonymous_gib())

    def taken(self) -> float:
        self._done.set()
        self._thread.join()
        return self.peak - self.start


def kernels_of(kind: str, count: int) -> list[gpytorch.kernels.Kernel]:
    made: list[gpytorch.kernels.Kernel] = []
    for _ in range(count):
        kernel = RBFKernel() if kind == "smooth" else MaternKernel(nu=1.5)
        kernel.lengthscale = THETA / math.sqrt(2.0) if kind == "smooth" else 0.2
        made.append(kernel)
    return made


def reconstruct(group: Any, job: dict[str, Any]) -> dict[str, Any]:
    values = np.load(job["values"], mmap_mode="r")
    axes = [np.linspace(0, 1, size) if size > 1 else np.zeros(1) for size in values.shape]
    gaps.reconstruct(
        np.ones((8, 8)), None, kernels_of("smooth", 2), 1.0, progress=False, group=Communicator()
    )  # loads all
    memory, started = Memory(), time.perf_counter()
    result = gaps.reconstruct(
        values, axes, kernels_of(job["kind"], values.ndim), job["noise"], group=group, progress=False
    )
    seconds, taken = time.perf_counter() - started, memory.taken()
    result.write(job["mean"])
    report = result.report
    expected = gaps.sizing.plan(values.shape, report.ranks, report.num_processes)
    return {
        "seconds": seconds,
        "solve_seconds": report.seconds,
        "iterations": report.iterations,
        "residual": report.worst_residual,
        "weights": math.prod(report.ranks),
        "sent": report.bytes_per_iteration,
        "expected_sent": expected.sent,
        "traffic": str(report.traffic),
        "memory_gib": taken,
        "expected_gib": expected.memory / GIB,
        "tflop": report.flops / 1e12,
    }


class Model(gpytorch.models.ExactGP):
    def __init__(self, x: torch.Tensor, y: torch.Tensor, kernel: gpytorch.kernels.Kernel) -> None:
        super().__init__(x, y, gaps.GappyGridLikelihood())
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = kernel

    def forward(self, x: torch.Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def train(group: Any, job: dict[str, Any]) -> dict[str, Any]:
    values = torch.from_numpy(np.load(job["values"])).double()
    grid, x, y = gaps.from_array(values, [torch.linspace(0, 1, size, dtype=torch.float64) for size in values.shape])
    kernel = gaps.GappyGridKernel([RBFKernel() for _ in values.shape], grid)
    model = Model(x, y, ScaleKernel(kernel)).double()
    for axis in kernel.kernels:
        axis.lengthscale = THETA
    model.likelihood.noise = 1e-2
    torch.manual_seed(0)
    memory, started = Memory(), time.perf_counter()
    with gaps.record_solves() as record:
        history = gaps.fit(model, job["steps"], group=group, progress=False, patience=None)
    seconds = time.perf_counter() - started
    return {
        "seconds": seconds,
        "loss": history.loss,
        "iterations": sum(history.iterations),
        "sent": sum(history.sent_bytes) / len(history),
        "columns": sum(report.num_rhs for report in record) / len(history),
        "method": f"{record[-1].method}, rank {record[-1].rank}; {record.logdets[-1].reason}",
        "memory_gib": memory.taken(),
        "parameters": {name: p.detach().flatten().tolist() for name, p in model.named_parameters()},
        "observations": len(y),
    }


def work(job: dict[str, Any]) -> None:
    with gaps.distributed.process_group(timeout=job["timeout"]) as group:
        ranks = Communicator(group)
        found = (reconstruct if job["what"] == "reconstruct" else train)(group, job)
        everybody = ranks.gather(found, "results")
        if ranks.is_main:
            found["memory_gib"] = max(other["memory_gib"] for other in everybody)
            Path(job["result"]).write_text(json.dumps(found))


# -- in the one that starts them ---------------------------------------------------------------------------------------


def run(folder: Path, processes: int, **job: Any) -> dict[str, Any]:
    """Runs one job with so many processes."""
    job = {"timeout": 600.0, "result": str(folder / "result.json"), **job}
    (folder / "job.json").write_text(json.dumps(job))
    threads = THREADS[0]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [*launcher, "-m", "benchmarks.distributed", "--job", str(folder / "job.json")]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": str(threads)})
    return {"processes": processes, "threads": threads, **json.loads((folder / "result.json").read_text())}


def make_values(path: Path, shape: Sequence[int], seed: int = 0) -> None:
    """The membrane, half of it missing, slab by slab."""
    if path.exists():
        return
    field, rng = membrane((shape[0], shape[1], shape[2]), seed=seed), np.random.default_rng(seed)
    values = np.lib.format.open_memmap(path, "w+", "float32", tuple(shape))
    for start in range(0, shape[0], 256):
        slab = field.slab(start, min(start + 256, shape[0]))
        slab += math.sqrt(NOISE) * rng.standard_normal(slab.shape, dtype="float32")
        slab[rng.random(slab.shape, dtype="float32") < 0.5] = np.nan
        values[start : start + len(slab)] = slab
    values.flush()


def make_training_values(path: Path, shape: Sequence[int]) -> None:
    rng = np.random.default_rng(0)
    x, y = (np.linspace(0, 1, size) for size in shape)
    waves = [np.outer(np.sin(a * x + b), np.cos(c * y + b)) for a, b, c in rng.uniform(2, 18, (12, 3))]
    values = np.sum(waves, 0) / math.sqrt(6.0) + 0.1 * rng.standard_normal(tuple(shape))
    values[rng.random(tuple(shape)) < 0.5] = np.nan
    np.save(path, values)


def difference(path: Path, reference: Path) -> float:
    """``|a - b| / |b|``, slab by slab."""
    ours, theirs = (np.load(p, mmap_mode="r") for p in (path, reference))
    above = below = 0.0
    for start in range(0, len(ours), 256):
        a, b = (np.asarray(part[start : start + 256], dtype="float64") for part in (ours, theirs))
        above, below = above + float(((a - b) ** 2).sum()), below + float((b**2).sum())
    return math.sqrt(above / below)


def parameter_difference(found: dict[str, Any], reference: dict[str, Any]) -> float:
    """The largest, relative to the parameter or to one, of hyperparameters and losses."""
    worst = max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(found["loss"], reference["loss"], strict=True))
    for name, values in reference["parameters"].items():
        for a, b in zip(found["parameters"][name], values, strict=True):
            worst = max(worst, abs(a - b) / max(1.0, abs(b)))
    return worst


def reconstruct_runs(
    folder: Path, title: str, runs: Sequence[tuple[int, tuple[int, ...]]], kind: str, noise: float
) -> list:
    """One row for every (processes, shape)."""
    print(f"\n## {title}\n", flush=True)
    rows: list[dict[str, Any]] = []
    known: set[tuple[int, ...]] = set()  # shapes that one process has solved

    def by(processes: int, shape: tuple[int, ...], mean: Path) -> dict[str, Any]:
        mean.unlink(missing_ok=True)
        values = folder / f"values-{'x'.join(map(str, shape))}.npy"
        make_values(values, shape)
        return run(folder, processes, what="reconstruct", values=str(values), mean=str(mean), kind=kind, noise=noise)

    for processes, shape in runs:
        mean, alone = folder / f"mean-{processes}.npy", folder / f"alone-{'x'.join(map(str, shape))}.npy"
        found = by(processes, shape, alone if processes == 1 else mean)
        if processes > 1 and shape not in known:
            by(1, shape, alone)
        known.add(shape)
        off = 0.0 if processes == 1 else difference(mean, alone)
        rows.append({**found, "shape": shape, "cells": math.prod(shape), "off": off})
        print(f"- {processes} processes, {math.prod(shape):,} cells: {found['traffic']}", flush=True)
    first = rows[0]
    table = [
        (
            str(row["processes"]),
            str(row["threads"]),
            f"{row['cells']:,}",
            f"{row['weights']:,}",
            str(row["iterations"]),
            f"{row['seconds'] / first['seconds']:.2f}",
            f"{row['solve_seconds'] / first['solve_seconds']:.2f}",
            "-" if row["processes"] == 1 else f"{row['off']:.1e}",
            format_bytes(row["sent"]),
            format_bytes(row["expected_sent"]),
            f"{row['memory_gib']:.2f}",
            f"{row['expected_gib']:.2f}",
        )
        for row in rows
    ]
    header = (
        "processes",
        "threads each",
        "cells",
        "weights",
        "iterations",
        "time, of the first",
        "of which solve",
        "from one process",
        "sent an iteration",
        "expected",
        "GiB a process",
        "expected",
    )
    print("\n" + markdown_table(header, table), flush=True)
    return rows


def training_runs(folder: Path, counts: Sequence[int], shape: Sequence[int], steps: int) -> list[dict[str, Any]]:
    print(f"\n## Training: {steps} steps of Adam on {' x '.join(map(str, shape))} cells\n", flush=True)
    make_training_values(folder / "train.npy", shape)
    rows: list[dict[str, Any]] = []
    for processes in counts:
        found = run(folder, processes, what="train", values=str(folder / "train.npy"), steps=steps)
        found["off"] = parameter_difference(found, rows[0]) if rows else 0.0
        rows.append(found)
        print(f"- {processes} processes: {found['observations']} observations, {found['method']}", flush=True)
    table = [
        (
            str(row["processes"]),
            str(row["threads"]),
            str(row["iterations"]),
            f"{row['columns']:.3g}",
            f"{row['seconds'] / rows[0]['seconds']:.2f}",
            "-" if row["processes"] == 1 else f"{row['off']:.1e}",
            format_bytes(row["sent"] * len(row["loss"]) / max(1, row["iterations"])),
            format_bytes(row["sent"]),
            f"{row['memory_gib']:.2f}",
        )
        for row in rows
    ]
    header = (
        "processes",
        "threads each",
        "iterations",
        "columns a step of the first",
        "time, of the first",
        "from one process",
        "sent an iteration",
        "sent a step",
        "GiB a process",
    )
    print("\n" + markdown_table(header, table), flush=True)
    return rows


@contextmanager
def a_folder(given: str | None) -> Any:
    if given is None:
        with tempfile.TemporaryDirectory() as made:
            yield Path(made)
    else:
        Path(given).mkdir(parents=True, exist_ok=True)
        yield Path(given)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--processes", type=int, nargs="+", default=[1, 2, 4], help="numbers of processes, with one run each"
    )
    parser.add_argument(
        "--shape", type=int, nargs=3, default=[3840, 2160, 2], help="shape of the grid for strong scaling"
    )
    parser.add_argument(
        "--full", type=int, nargs=3, default=list(FULL), help="shape of the grid for the kernel that does not truncate"
    )
    parser.add_argument("--train", type=int, nargs=2, default=list(TRAIN), help="shape of the grid for training")
    parser.add_argument("--steps", type=int, default=20, help="steps of Adam")
    parser.add_argument("--threads", type=int, default=1, help="threads of each process")
    parser.add_argument("--only", choices=["strong", "weak", "parts", "training"], nargs="+", help="parts to run")
    parser.add_argument("--work", help="a folder for the data, which are created if it has none")
    parser.add_argument("--output", help="a folder for results.json")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.job:
        work(json.loads(Path(given.job).read_text()))
        return {}
    THREADS[0] = given.threads
    wanted = given.only or ["strong", "weak", "parts", "training"]
    facts = {name: value for name, value in machine_facts().items() if name != "threads"}
    print(", ".join(f"{name}: {value}" for name, value in facts.items()), flush=True)
    found: dict[str, Any] = {"machine": facts}
    shape, counts = tuple(given.shape), given.processes
    with a_folder(given.work) as folder:
        if "strong" in wanted:
            runs = [(count, shape) for count in counts]
            found["strong"] = reconstruct_runs(folder, "Strong scaling", runs, "smooth", NOISE)
        if "weak" in wanted:
            runs = [(count, (shape[0] * count // max(counts), *shape[1:])) for count in counts]
            found["weak"] = reconstruct_runs(folder, "Weak scaling", runs, "smooth", NOISE)
        if "parts" in wanted:
            runs = [(count, tuple(given.full)) for count in counts]
            found["parts"] = reconstruct_runs(folder, "Weights in parts", runs, "rough", 1e-2)
        if "training" in wanted:
            found["training"] = training_runs(folder, counts, given.train, given.steps)
    if given.output:
        Path(given.output).mkdir(parents=True, exist_ok=True)
        (Path(given.output) / "results.json").write_text(json.dumps(found, indent=1))
    return found


if __name__ == "__main__":
    main()
