"""The paper's stress test at M = 10,000 (fig:10K): every method over gappiness and noise.

    python -m benchmarks.gappiness --json results/gappiness.json --plot results/gappiness.png

The response is the two-dimensional Rastrigin function on 100 x 100 points, standardised; the kernel is
squared-exponential with its length-scale tuned on the full grid, as in the paper; gaps are random. A run over its
iteration cap is shown as capped.
"""

import argparse
import functools
import json
import math
import warnings
from pathlib import Path

import torch
from torch import Tensor

from benchmarks._machine import machine_facts
from gpytorch_gaps import NotConvergedWarning, SolveReport
from gpytorch_gaps.linalg.eigen import kron_eigh
from gpytorch_gaps.linalg.products import kron_matmul
from gpytorch_gaps.solvers.config import SolveConfig
from gpytorch_gaps.solvers.gap_system import GapSystem
from gpytorch_gaps.solvers.solve import solve_system

SIZE = 100
METHODS: dict[str, tuple[str, int | None]] = {
    "auto": ("auto", None),
    "FG": ("fill", None),
    "IG": ("ignore", 0),
    "IG_precon": ("ignore", 1000),
    "PG": ("penalize", None),
}


def squared_exponential(theta: float) -> Tensor:
    x = torch.linspace(0, 1, SIZE, dtype=torch.float64)
    return torch.exp(-(((x.unsqueeze(-1) - x) / theta) ** 2))


@functools.cache
def rastrigin() -> Tensor:
    """Standardised, in grid order. shape: (M, 1)"""
    x = torch.linspace(-5.12, 5.12, SIZE, dtype=torch.float64)
    axis = x**2 - 10 * torch.cos(2 * math.pi * x)
    values = (20 + axis.unsqueeze(-1) + axis).reshape(-1, 1)
    return (values - values.mean()) / values.std()


@functools.cache
def tuned_lengthscale(noise: float) -> float:
    """The theta of largest marginal likelihood on the full grid, where it costs two Kronecker products."""

    def loss(theta: float) -> float:
        eigen = kron_eigh([squared_exponential(theta)] * 2)
        spectrum = eigen.products + noise
        rotated = kron_matmul(eigen.transposed, rastrigin()).squeeze(-1)
        return float(spectrum.log().sum() + (rotated.square() / spectrum).sum())

    return min((10 ** (-2.3 + 2.3 * k / 59) for k in range(60)), key=loss)


def rastrigin_problem(noise: float, gappiness: float, seed: int) -> tuple[GapSystem, Tensor]:
    """The system and its right-hand side, shape (N, 1)."""
    cells = SIZE * SIZE
    generator = torch.Generator().manual_seed(seed)
    observed = torch.randperm(cells, generator=generator)[: round(cells * (1 - gappiness))].sort().values
    factor = squared_exponential(tuned_lengthscale(noise))
    system = GapSystem([factor, factor], observed, torch.tensor([noise], dtype=torch.float64))
    return system, rastrigin()[observed]


def run_method(name: str, system: GapSystem, rhs: Tensor, cap: int = 2000) -> tuple[Tensor, SolveReport]:
    method, rank = METHODS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotConvergedWarning)  # the table shows it
        solved = solve_system(system, rhs, SolveConfig(method=method, rank=rank, max_iterations=cap))
        return solved.solution, solved.report


def plot(rows: list[dict[str, float | str]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    noises = sorted({float(row["noise"]) for row in rows})
    figure, axes = plt.subplots(1, len(noises), figsize=(5 * len(noises), 3.6), layout="constrained", squeeze=False)
    for axis, noise in zip(axes[0], noises, strict=True):
        for name in METHODS:
            mine = [row for row in rows if row["method"] == name and row["noise"] == noise]
            x, y = [row["gappiness"] for row in mine], [row["gflop"] for row in mine]
            (line,) = axis.plot(x, y, "-", label=name)
            for row, a, b in zip(mine, x, y, strict=True):
                axis.plot(a, b, "o" if row["converged"] else "x", color=line.get_color())
        axis.set(yscale="log", xlabel="gappiness", ylabel="GFLOP", title=f"noise {noise:g}")
    axes[0][0].legend(title="x: not converged")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--noise", nargs="+", type=float, default=[1e-6, 1e-2])
    parser.add_argument("--gappiness", nargs="+", type=float, default=[k / 10 for k in range(1, 10)])
    parser.add_argument("--cap", type=int, default=2000, help="iterations after which a run is capped")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    facts = machine_facts()
    print(", ".join(f"{key}: {value}" for key, value in facts.items()))
    print("| noise | gappiness | method | chosen | iterations | true residual | GFLOP | seconds |")
    print("|---|---|---|---|---|---|---|---|")
    rows: list[dict[str, float | str]] = []
    for noise in options.noise:
        for gappiness in options.gappiness:
            for name in options.methods:
                system, rhs = rastrigin_problem(noise, gappiness, seed=0)
                _, report = run_method(name, system, rhs, options.cap)
                chosen = f"{report.method} {report.rank}" if report.rank else report.method
                capped = "" if report.converged else " (not converged)"
                print(
                    f"| {noise:g} | {gappiness:.1f} | {name} | {chosen} | {report.iterations}{capped} "
                    f"| {report.worst_residual:.1e} | {report.flops / 1e9:.3f} | {report.seconds:.2f} |",
                    flush=True,
                )
                rows.append(
                    {
                        "noise": noise,
                        "gappiness": gappiness,
                        "method": name,
                        "chosen": chosen,
                        "iterations": report.iterations,
                        "residual": report.worst_residual,
                        "gflop": report.flops / 1e9,
                        "seconds": report.seconds,
                        "converged": report.converged,
                    }
                )
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"machine": facts, "rows": rows}, indent=1))
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
