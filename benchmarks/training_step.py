"""One Adam step at 300 x 365 cells, half of them gaps: ours, BoTorch's LatentKroneckerGP, and Nystrom in NumPy.

    python -m benchmarks.training_step --json results/training_step.json

All run the same squared-exponential model on the same data, in one process: ours at its default tolerance of 1e-6,
BoTorch at its default of 0.01, both in float64. NumPy uses the method of the paper's authors: a value with the Nystrom
log-determinant, which is biased, and a gradient by finite differences. On a grid small enough for a dense Cholesky, the
errors of the log-likelihoods are measured. The posterior variance of every cell is computed in a separate process, with
its peak memory.
"""

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gpytorch
import linear_operator
import numpy as np
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

import gpytorch_gaps as gaps
from benchmarks._machine import machine_facts


@dataclass(frozen=True)
class Setting:
    """A squared-exponential kernel on axes from 0 to 1, and noise."""

    shape: tuple[int, int]
    length: float
    noise: float

    def kernel(self) -> RBFKernel:
        kernel = RBFKernel().double()
        kernel.lengthscale = self.length
        return kernel


def problem(setting: Setting, gappiness: float, seed: int = 0) -> tuple[list[Tensor], Tensor]:
    """Axes and values: a draw from the model, NaN in the gaps."""
    generator = torch.Generator().manual_seed(seed)
    shape = setting.shape
    axes = [torch.linspace(0, 1, size, dtype=torch.float64) for size in shape]
    roots = []
    for axis in axes:
        factor = setting.kernel()(axis).to_dense().detach()
        roots.append(torch.linalg.cholesky(factor + 1e-9 * torch.eye(len(axis), dtype=torch.float64)))
    white = torch.randn(shape, generator=generator, dtype=torch.float64)
    values = roots[0] @ white @ roots[1].mT
    values = values + math.sqrt(setting.noise) * torch.randn(shape, generator=generator, dtype=torch.float64)
    values[torch.rand(shape, generator=generator) < gappiness] = math.nan
    return axes, values


class Model(gpytorch.models.ExactGP):
    def __init__(self, x: Tensor, y: Tensor, likelihood: Any, kernel: Any) -> None:
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = kernel

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def our_model(setting: Setting, axes: list[Tensor], values: Tensor) -> tuple[Model, gaps.CartesianGrid]:
    grid, x, y = gaps.from_array(values, axes)
    likelihood = gaps.GappyGridLikelihood().double()
    likelihood.noise = setting.noise
    kernel = ScaleKernel(gaps.GappyGridKernel([setting.kernel(), setting.kernel()], grid)).double()
    kernel.outputscale = 1.0
    return Model(x, y, likelihood, kernel), grid


def their_model(setting: Setting, axes: list[Tensor], values: Tensor) -> Any:
    from botorch.models.latent_kronecker_gp import LatentKroneckerGP

    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    likelihood.noise = setting.noise
    scaled = ScaleKernel(setting.kernel()).double()
    scaled.outputscale = 1.0
    return LatentKroneckerGP(
        axes[0].unsqueeze(-1),
        axes[1].unsqueeze(-1),
        values,
        likelihood=likelihood,
        covar_module_X=setting.kernel(),
        covar_module_T=scaled,
        outcome_transform=None,
    )


def steps(model: Any, count: int) -> tuple[list[float], float]:
    """Seconds of each Adam step, and the log marginal likelihood at the start."""
    model.train()
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    seconds, first = [], math.nan
    for number in range(count):
        started = time.perf_counter()
        optimizer.zero_grad()
        value = mll(model(*model.train_inputs), model.train_targets)
        (-value).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - started)
        if number == 0:
            first = float(value.detach()) * model.train_targets.size(-1)
    return seconds, first


# -- Nystrom and finite differences, in NumPy --------------------------------------------------------------------------


def numpy_value(points: list[np.ndarray], values: np.ndarray, logs: np.ndarray) -> float:
    """The log-likelihood with fill-gaps and the paper's Nystrom sum, at log(length_1, length_2, noise)."""
    lengths, noise = np.exp(logs[:2]), float(np.exp(logs[2]))
    pairs = [
        np.linalg.eigh(np.exp(-0.5 * ((x[:, None] - x) / length) ** 2))
        for x, length in zip(points, lengths, strict=True)
    ]
    (t1, q1), (t2, q2) = pairs
    spectrum = np.outer(t1, t2).clip(0.0) + noise
    observed = ~np.isnan(values)

    def inverse(grid: np.ndarray) -> np.ndarray:
        return q1 @ ((q1.T @ grid @ q2) / spectrum) @ q2.T

    known = np.where(observed, values, 0.0)
    residual = np.where(observed, 0.0, -inverse(known))
    filled, direction, inner = np.zeros_like(known), residual.copy(), float((residual**2).sum())
    stop = 1e-12 * inner
    for _ in range(500):
        if inner <= stop:
            break
        image = np.where(observed, 0.0, inverse(direction))
        step = inner / float((direction * image).sum())
        filled += step * direction
        residual -= step * image
        inner, before = float((residual**2).sum()), inner
        direction = residual + (inner / before) * direction
    weights = np.where(observed, inverse(known + filled), 0.0)
    number = int(observed.sum())
    leading = np.sort((spectrum - noise).ravel())[::-1][:number] * number / values.size
    return float(-0.5 * ((known * weights).sum() + np.log(leading + noise).sum() + number * math.log(2 * math.pi)))


def numpy_step(setting: Setting, axes: list[Tensor], values: Tensor) -> float:
    """Seconds of a value and a forward-difference gradient in the three hyperparameters."""
    points, grid = [axis.numpy() for axis in axes], values.numpy()
    start = np.log(np.array([setting.length, setting.length, setting.noise]))
    started = time.perf_counter()
    base = numpy_value(points, grid, start)
    for i in range(3):
        (numpy_value(points, grid, start + 1e-5 * np.eye(3)[i]) - base) / 1e-5
    return time.perf_counter() - started


# -- the truth, on small grids -----------------------------------------------------------------------------------------


def dense_log_likelihood(setting: Setting, axes: list[Tensor], values: Tensor) -> float:
    observed = ~values.isnan()
    cells = observed.nonzero()
    y = values[observed]
    covariance = torch.ones((), dtype=torch.float64)
    for axis, position in zip(axes, cells.unbind(-1), strict=True):
        covariance = covariance * setting.kernel()(axis).to_dense().detach()[position][:, position]
    covariance = covariance + setting.noise * torch.eye(len(y), dtype=torch.float64)
    cholesky = torch.linalg.cholesky(covariance)
    white = torch.linalg.solve_triangular(cholesky, y.unsqueeze(-1), upper=False)
    logdet = 2.0 * cholesky.diagonal().log().sum()
    return float(-0.5 * (white.square().sum() + logdet + len(y) * math.log(2 * math.pi)))


def accuracy(setting: Setting, repeats: int, with_botorch: bool) -> list[dict[str, Any]]:
    """Mean error of the log-likelihood in nats, its standard deviation, and the standard error that ours reports."""
    setting = replace(setting, shape=(100, 98))
    axes, values = problem(setting, 0.497)
    truth = dense_log_likelihood(setting, axes, values)
    number = int((~values.isnan()).sum())

    def ours() -> tuple[float, float]:
        with gaps.record_solves() as solves, linear_operator.settings.max_cholesky_size(0):
            value = steps(our_model(setting, axes, values)[0], 1)[1]
        error = solves.logdets[-1].standard_error
        return value, math.nan if error is None else 0.5 * float(error)

    def theirs() -> tuple[float, float]:
        model = their_model(setting, axes, values)
        with model.use_iterative_methods():
            return steps(model, 1)[1], math.nan

    rows = []
    draws: dict[str, Callable[[], tuple[float, float]]] = {"gpytorch_gaps": ours}
    if with_botorch:
        draws["BoTorch"] = theirs
    for name, draw in draws.items():
        torch.manual_seed(0)
        found = [draw() for _ in range(repeats)]
        errors = [value - truth for value, _ in found]
        rows.append(
            {
                "method": name,
                "observations": number,
                "truth": truth,
                "bias": statistics.mean(errors),
                "deviation": statistics.stdev(errors) if repeats > 1 else math.nan,
                "stated": statistics.mean(error for _, error in found),
            }
        )
    return rows


# -- the posterior variance of every cell, in a process of its own -----------------------------------------------------


def variance_alone(who: str, setting: Setting, limit: float) -> None:
    """Prints seconds and peak memory as JSON."""
    axes, values = problem(setting, 0.5)
    if who == "ours":
        model, grid = our_model(setting, axes, values)
        model.eval()
        before = _peak_gib()
        started = time.perf_counter()
        with torch.no_grad(), gaps.record_solves() as solves:
            variance = model(grid.points()).variance
        note = str(solves[-1])
    else:
        model = their_model(setting, axes, values)
        model.eval()
        before = _peak_gib()
        allowed = int(limit * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (allowed, allowed))
        started = time.perf_counter()
        with torch.no_grad(), model.use_iterative_methods():
            variance = model.posterior(axes[0].unsqueeze(-1)).variance
        note = ""
    seconds = time.perf_counter() - started
    facts = {"seconds": seconds, "peak_gib": _peak_gib(), "before_gib": before, "note": note}
    print(json.dumps({**facts, "cells": variance.numel(), "largest": float(variance.max())}))


def _peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def variances(setting: Setting, limit: float, with_botorch: bool) -> list[dict[str, Any]]:
    rows = []
    for who in ("ours", "botorch") if with_botorch else ("ours",):
        command = [sys.executable, "-m", "benchmarks.training_step", "--variance-of", who, "--limit", str(limit)]
        command += ["--length", str(setting.length), "--noise", str(setting.noise), "--shape", *map(str, setting.shape)]
        result = subprocess.run(command, capture_output=True, text=True, env={**os.environ})
        last = result.stdout.strip().splitlines()[-1:] if result.returncode == 0 else []
        failure = result.stderr.strip().splitlines()[-1:] or [f"exit code {result.returncode}"]
        rows.append({"method": who, **(json.loads(last[0]) if last else {"failed": failure[0][:160]})})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs=2, type=int, default=[300, 365])
    parser.add_argument("--length", type=float, default=0.1, help="length-scale; the axes run from 0 to 1")
    parser.add_argument("--noise", type=float, default=1e-2)
    parser.add_argument("--steps", type=int, default=7, help="timed steps of ours, after one to warm up")
    parser.add_argument("--their-steps", type=int, default=2, help="timed steps of BoTorch, after one to warm up")
    parser.add_argument("--repeats", type=int, default=5, help="log-likelihoods compared with the dense one")
    parser.add_argument("--limit", type=float, default=16.0, help="GiB that BoTorch may take for the variance")
    parser.add_argument(
        "--no-botorch", action="store_true", help="without the peer, which pip install '.[peers]' brings"
    )
    parser.add_argument("--variance-of", choices=("ours", "botorch"), help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    setting = Setting((options.shape[0], options.shape[1]), options.length, options.noise)
    warnings.filterwarnings("ignore")
    if options.variance_of:
        variance_alone(options.variance_of, setting, options.limit)
        return
    facts = machine_facts()
    print(", ".join(f"{key}: {value}" for key, value in facts.items()))
    torch.manual_seed(0)
    axes, values = problem(setting, 0.5)
    number = int((~values.isnan()).sum())
    print(
        f"{setting.shape[0]} x {setting.shape[1]} cells, {number} observations, squared-exponential, "
        f"length-scale {setting.length:g}, noise {setting.noise:g}, float64\n"
    )

    # ours first: importing BoTorch changes linear_operator's defaults for the whole process
    model, _ = our_model(setting, axes, values)
    with gaps.record_solves() as solves:
        ours, value = steps(model, options.steps + 1)
    our_seconds = statistics.median(ours[1:])
    error = solves.logdets[0].standard_error
    stated = math.nan if error is None else 0.5 * float(error)
    rows: list[dict[str, Any]] = [
        {"method": "gpytorch_gaps", "seconds": our_seconds, "value": value, "standard_error": stated}
    ]
    print(f"ours: {solves[-1]}\n      log-determinant {solves.logdets[-1]}\n")
    numpy_seconds = statistics.median(numpy_step(setting, axes, values) for _ in range(3))
    rows.append({"method": "NumPy, Nystrom and finite differences", "seconds": numpy_seconds})
    if not options.no_botorch:
        theirs = their_model(setting, axes, values)
        with theirs.use_iterative_methods():
            seconds, their_value = steps(theirs, options.their_steps + 1)
        rows.append({"method": "BoTorch", "seconds": statistics.median(seconds[1:]), "value": their_value})
    print("| method | seconds a step | times ours | log-likelihood | its stated standard error |")
    print("|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['method']} | {row['seconds']:.3f} | {row['seconds'] / our_seconds:.1f} | "
            f"{row.get('value', math.nan):.2f} | {row.get('standard_error', math.nan):.2g} |",
            flush=True,
        )
    checked = accuracy(setting, options.repeats, not options.no_botorch)
    print(
        f"\nAgainst dense Cholesky, {checked[0]['observations']} observations, truth {checked[0]['truth']:.3f} nats:\n"
    )
    print("| method | mean error | standard deviation | stated standard error |")
    print("|---|---|---|---|")
    for row in checked:
        print(f"| {row['method']} | {row['bias']:.3g} | {row['deviation']:.2g} | {row['stated']:.2g} |", flush=True)
    covered = variances(setting, options.limit, not options.no_botorch)
    print("\n| posterior variance of every cell | seconds | peak GiB (before) | |")
    print("|---|---|---|---|")
    for row in covered:
        if "failed" in row:
            print(f"| {row['method']} | | over {options.limit:g} | {row['failed']} |")
        else:
            memory = f"{row['peak_gib']:.2f} ({row['before_gib']:.2f})"
            print(f"| {row['method']} | {row['seconds']:.2f} | {memory} | {row['note']} |")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        content = {"machine": facts, "steps": rows, "accuracy": checked, "variance": covered}
        options.json.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
