"""The posterior of 1.9 million cells: mean, samples, standard deviations, new data. Also BoTorch's LatentKroneckerGP.

    python -m benchmarks.posterior --json results/posterior.json

The grid has 50 years x 366 days x 52 stations x 2 outputs. Two thirds of the cells are observed. If
``GPYTORCH_GAPS_DATA`` names a folder with trentino_daily_train.npz (CRAN package RMAWGEN, data set trentino), gaps are
those of this real network of weather stations, except for cells withheld at random. Otherwise, stations begin, end and
fail at random times. The values are a draw from the model, in degrees, so that the truth is known at every cell. Each
phase is timed. Peak memory is that of the process. BoTorch runs the same model, as (year, station, output) x day, in a
separate process, with limits of time and memory.
"""

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gpytorch
import numpy as np
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import IndexKernel, Kernel, MaternKernel, PeriodicKernel, ProductKernel, ScaleKernel
from linear_operator.operators import DiagLinearOperator
from torch import Tensor

import gpytorch_gaps as gaps
from benchmarks._machine import machine_facts
from gpytorch_gaps.autograd.kernel_root import kernel_root
from gpytorch_gaps.linalg.products import kron_matmul

SHAPE = (50, 366, 52, 2)
MEAN, SIGNAL, NOISE = 8.0, 9.0, 4.5  # degrees, and degrees squared
YEAR, DAY, SPACE = 5.0, 30.0, 1.0  # length-scales: years, days, 100 km (or 1000 m)


# -- the problem -------------------------------------------------------------------------------------------------------


def real_pattern(folder: Path) -> tuple[Tensor, Tensor]:
    """Which cells are observed, and where the stations are."""
    with np.load(folder / "trentino_daily_train.npz", allow_pickle=False) as data:
        known = ~np.isnan(data["values"])
        places = np.stack([0.78 * data["lon"], 1.11 * data["lat"], data["elev"] / 1000.0], -1)
    by_time = known.reshape(-1, *SHAPE[2:])
    nearby = np.stack([np.roll(by_time, shift, 0) for shift in range(-7, 8)]).mean(0)
    return torch.from_numpy((nearby > 0.3) | by_time).reshape(SHAPE), torch.from_numpy(places)


def made_up_pattern(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Stations that begin, end and fail at random times."""
    generator = torch.Generator().manual_seed(seed)
    years, days, stations, _ = SHAPE
    time_of = torch.arange(years * days).unsqueeze(-1) / (years * days)
    begin = 0.6 * torch.rand(stations, generator=generator) - 0.2
    end = 0.85 + 0.3 * torch.rand(stations, generator=generator)
    known = ((time_of >= begin) & (time_of < end)).unsqueeze(-1).repeat(1, 1, SHAPE[3])
    for station in range(stations):
        for _ in range(6):
            start = int(torch.randint(years * days, (1,), generator=generator))
            known[start : start + int(torch.randint(30, 400, (1,), generator=generator)), station] = False
    known &= torch.rand(known.shape, generator=generator) > 0.02
    return known.reshape(SHAPE), 1.5 * torch.rand(stations, 3, generator=generator, dtype=torch.float64)


def axis_kernels() -> list[Kernel]:
    """The kernels of years, days of the year, places and outputs."""
    year, day = MaternKernel(nu=1.5), PeriodicKernel()
    space, output = MaternKernel(nu=2.5, ard_num_dims=3), IndexKernel(num_tasks=2, rank=1)
    year.lengthscale, space.lengthscale = YEAR, SPACE
    day.period_length = 365.25
    day.lengthscale = (2.0 * math.pi * DAY / 365.25) ** 2  # the squared-exponential kernel of chords of the year
    with torch.no_grad():
        output.covar_factor.copy_(torch.full((2, 1), math.sqrt(0.7)))
    output.var = torch.full((2,), 0.3)
    return [kernel.double() for kernel in (year, day, space, output)]


def problem(folder: Path | None, seed: int = 0) -> tuple[list[Tensor], Tensor, Tensor]:
    """Axes; values with NaN in the gaps; and the function they are noisy observations of."""
    known, places = made_up_pattern() if folder is None else real_pattern(folder)
    years, days, outputs = (torch.arange(size, dtype=torch.float64) for size in (SHAPE[0], SHAPE[1], SHAPE[3]))
    axes = [years, days, places.double(), outputs]
    tables = [axis if axis.dim() == 2 else axis.unsqueeze(-1) for axis in axes]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        factors = [kernel(axis).to_dense() for kernel, axis in zip(axis_kernels(), tables, strict=True)]
        roots = [kernel_root(factor)[0] for factor in factors]
        white = torch.randn(math.prod(r.size(-1) for r in roots), 1, generator=generator, dtype=torch.float64)
        truth = MEAN + math.sqrt(SIGNAL) * kron_matmul(roots, white).reshape(SHAPE)
    values = truth + math.sqrt(NOISE) * torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    return axes, values.masked_fill(~known, math.nan), truth


class Model(gpytorch.models.ExactGP):
    def __init__(self, x: Tensor, y: Tensor, likelihood: Any, kernel: Kernel) -> None:
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = kernel

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def our_model(axes: list[Tensor], values: Tensor) -> tuple[Model, gaps.CartesianGrid]:
    grid, x, y = gaps.from_array(values, axes)
    likelihood = gaps.GappyGridLikelihood()
    model = Model(x, y, likelihood, ScaleKernel(gaps.GappyGridKernel(axis_kernels(), grid))).double()
    model.covar_module.outputscale, likelihood.noise = SIGNAL, NOISE
    model.mean_module.constant.data.fill_(MEAN)
    return model.eval(), grid


# -- ours --------------------------------------------------------------------------------------------------------------


class Phases:
    """Seconds, solves and peak memory of each phase, printed as they end."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        with gaps.record_solves() as solves:
            yield
        columns, iterations = sum(solve.num_rhs for solve in solves), sum(solve.iterations for solve in solves)
        row = {
            "phase": name,
            "seconds": time.perf_counter() - started,
            "columns": columns,
            "iterations": iterations,
            "gflop": sum(solve.flops for solve in solves) / 1e9,
            "method": f"{solves[-1].method}, rank {solves[-1].rank}" if solves else "",
            "residual": max((solve.worst_residual for solve in solves), default=0.0),
            "peak_gib": peak_gib(),
        }
        self.rows.append(row)
        print(
            f"| {name} | {row['seconds']:.1f} | {columns} | {iterations} | {row['gflop']:.0f} | {row['method']} | "
            f"{row['residual']:.1e} | {row['peak_gib']:.2f} |",
            flush=True,
        )


def peak_gib() -> float:
    """Peak memory of this process alone. (For a child, getrusage starts with the peak of its parent.)"""
    status = Path("/proc") / "self" / "status"
    lines = status.read_text().splitlines() if status.exists() else []
    found = [line.split()[1] for line in lines if line.startswith("VmHWM")]
    return (int(found[0]) if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) / 2**20


def run(options: argparse.Namespace) -> dict[str, Any]:
    phases = Phases()
    print("| phase | seconds | columns solved | iterations | GFLOP | method | worst residual | peak GiB |")
    print("|---|---|---|---|---|---|---|---|")
    with torch.no_grad(), gaps.settings.solve_tolerance(options.tolerance):
        with phases.phase("draw the data"):
            axes, values, truth = problem(options.data)
            later = withhold(values, 0.01)  # to come in when all else is done
        with phases.phase("model, grid and look-ups"):
            model, grid = our_model(axes, values.masked_fill(later, math.nan))
            everywhere = grid.points()
        with phases.phase("mean everywhere"):
            mean = model(everywhere).mean
        cells = torch.randperm(grid.num_cells, generator=torch.Generator().manual_seed(1))[: options.cells]
        with (
            gaps.record_solves() as record,
            gaps.settings.variance_method("pathwise"),
            gaps.settings.variance_samples(options.samples),
            phases.phase(f"standard deviation everywhere, {options.samples} samples"),
        ):
            variance = model(everywhere).variance
        with phases.phase(f"exact variance at {len(cells)} cells"), gaps.settings.variance_method("exact"):
            exact = model(grid.points(cells)).variance
        with phases.phase("mean of the year that follows"):
            ahead = gaps.CartesianGrid([torch.tensor([float(SHAPE[0])], dtype=torch.float64), *axes[1:]])
            _ = model(ahead.points()).mean
        with phases.phase("1 % new observations, from the solution without them"):
            new = later.flatten().nonzero().squeeze(-1)
            _ = model.get_fantasy_model(grid.points(new), values.flatten()[new])(everywhere).mean
        with phases.phase("the same from scratch"):
            _ = our_model(axes, values)[0](everywhere).mean
    gap, truth = values.isnan().flatten(), truth.flatten()
    fresh = truth + math.sqrt(NOISE) * torch.randn(truth.shape, dtype=torch.float64)
    score = gaps.score(MultivariateNormal(mean[gap], DiagLinearOperator(variance[gap] + NOISE)), fresh[gap])
    inside = (variance[cells] - exact).abs() <= record.variances[-1].error[cells]
    error = float((mean - truth)[gap].square().mean().sqrt())
    facts = {
        "observed": f"{1.0 - float(gap.double().mean()):.1%}",
        "RMSE of the mean in the gaps, against the function": f"{error:.4f}",
        "what exact variances say it should be": f"{float(exact[gap[cells]].mean().sqrt()):.4f}",
        "new observations in the gaps": str(score),
        "pathwise variances within their stated error": f"{float(inside.double().mean()):.1%} of {len(cells)}",
        "peak GiB": f"{peak_gib():.2f}",
    }
    return {"phases": phases.rows, "facts": facts}


def withhold(values: Tensor, share: float) -> Tensor:
    """Some of the observations."""
    generator = torch.Generator().manual_seed(2)
    return ~values.isnan() & (torch.rand(values.shape, generator=generator) < share)


# -- theirs ------------------------------------------------------------------------------------------------------------


def botorch(options: argparse.Namespace) -> None:
    """Draws of the posterior by LatentKroneckerGP; prints seconds and peak memory as JSON."""
    axes, values, _ = problem(options.data)
    from botorch.models.latent_kronecker_gp import LatentKroneckerGP

    rows = gaps.CartesianGrid([axes[0], axes[2], axes[3]]).points()  # year, place, output
    year, day, space, output = axis_kernels()
    for kernel, columns in ((year, [0]), (space, [1, 2, 3]), (output, [4])):
        kernel.active_dims = torch.tensor(columns)
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    likelihood.noise = NOISE
    scaled = ScaleKernel(day).double()
    scaled.outputscale = SIGNAL
    model = LatentKroneckerGP(
        rows,
        axes[1].unsqueeze(-1),
        (values - MEAN).movedim(1, -1).reshape(len(rows), SHAPE[1]),
        likelihood=likelihood,
        covar_module_X=ProductKernel(year, space, output),
        covar_module_T=scaled,
        outcome_transform=None,
    )
    allowed = int(options.limit * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (allowed, allowed))
    started = time.perf_counter()
    with torch.no_grad(), model.use_iterative_methods():
        draws = model.posterior(rows).rsample(torch.Size([options.their_samples]))
    facts = {"seconds": time.perf_counter() - started, "peak_gib": peak_gib(), "samples": options.their_samples}
    print(json.dumps({**facts, "finite": bool(draws.isfinite().all())}))


def peer(options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.posterior", "--only-botorch", "--limit", str(options.limit)]
    command += ["--their-samples", str(options.their_samples)]
    if options.data is not None:
        command += ["--data", str(options.data)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=60 * options.minutes)
    except subprocess.TimeoutExpired:
        return {"failed": f"{options.their_samples} samples not done in {options.minutes:g} minutes"}
    if result.returncode != 0:
        return {"failed": (result.stderr.strip().splitlines() or [f"exit code {result.returncode}"])[-1][:160]}
    return json.loads(result.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--cells", type=int, default=1000, help="whose variance is exact")
    parser.add_argument("--tolerance", type=float, default=1e-6)
    parser.add_argument("--their-samples", type=int, default=1, help="number of samples of BoTorch")
    parser.add_argument("--minutes", type=float, default=30.0, help="time limit of BoTorch")
    parser.add_argument("--limit", type=float, default=16.0, help="GiB that BoTorch may take")
    parser.add_argument("--no-botorch", action="store_true", help="without the peer, of pip install '.[peers]'")
    parser.add_argument("--only-botorch", action="store_true", help=argparse.SUPPRESS)
    known = os.environ.get("GPYTORCH_GAPS_DATA")
    parser.add_argument("--data", type=Path, default=None if known is None else Path(known), help="folder of the data")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.data is not None and not (options.data / "trentino_daily_train.npz").exists():
        parser.error(f"--data: no trentino_daily_train.npz in {options.data}; without --data the pattern is made up")
    if options.only_botorch:
        warnings.filterwarnings("ignore")
        botorch(options)
        return
    machine = machine_facts()
    print(", ".join(f"{key}: {value}" for key, value in machine.items()))
    pattern = "made up" if options.data is None else "of the weather stations"
    print(f"{' x '.join(map(str, SHAPE))} = {math.prod(SHAPE)} cells, pattern {pattern}, float64\n", flush=True)
    content = {"machine": machine, **run(options)}
    print()
    for name, fact in content["facts"].items():
        print(f"{name}: {fact}")
    if not options.no_botorch:
        content["botorch"] = peer(options)
        print(f"BoTorch's LatentKroneckerGP at its tolerance of 0.01: {content['botorch']}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
