"""The paper's methods on its own model of a climate: one product of four kernels.

K = K_year (x) K_day (x) K_space (x) B,   the day on a circle, space with a length-scale for each of three directions
"""

import math
import time
import warnings
from typing import Any

import gpytorch
import numpy as np
import torch
from gpytorch.constraints import GreaterThan
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import IndexKernel, MaternKernel, ProductKernel
from gpytorch.models import ExactGP
from torch import Tensor

import gpytorch_gaps as gaps
from benchmarks._climate_model import Anomalies, positions
from benchmarks._climate_train import PROBES, log_likelihood, mean_of, withheld
from benchmarks._results import Child, markdown_table, number, run_capped
from benchmarks.datasets import StationClimate
from gpytorch_gaps import settings

METHODS: dict[str, tuple[str, int | None, float | None]] = {  # gap_method, preconditioner_rank, gap_penalty
    "FG": ("fill", None, None),
    "IG": ("ignore", 0, None),
    "IG_1000": ("ignore", 1000, None),
    "IG_3000": ("ignore", 3000, None),
    "PG_100": ("penalize", None, 100.0),
    "auto": ("auto", None, None),
}
IN_THE_PAPER = {"FG": 1.0, "IG": 15.0, "IG_1000": 3.2, "IG_3000": 1.7, "PG_100": 19.0}  # run times, over that of FG
MEMORY_GIB = 12.0


class PaperModel(ExactGP):
    """``K_year (x) K_day (x) K_space (x) B`` and a noise for every output."""

    def __init__(self, climate: StationClimate, anomalies: np.ndarray) -> None:
        angle = 2.0 * np.pi * climate.time / climate.period
        circle = climate.period / (2.0 * np.pi) * np.stack([np.cos(angle), np.sin(angle)], -1)  # in days
        where = positions(climate)
        axes = [climate.year.astype(np.float64), circle, where - where.mean(0), np.arange(len(climate.output)) * 1.0]
        grid, x, y = gaps.from_array(torch.from_numpy(anomalies), [torch.from_numpy(axis) for axis in axes])
        likelihood = gaps.GappyGridLikelihood(noise_axis=-1, grid=grid, noise_constraint=GreaterThan(1e-3))
        super().__init__(x, y, likelihood)
        spread = torch.from_numpy(np.nanvar(anomalies, (0, 1, 2)))
        self.grid, self.mean_module = grid, gpytorch.means.ZeroMean()
        year, day, space = MaternKernel(nu=0.5), MaternKernel(nu=0.5), MaternKernel(nu=1.5, ard_num_dims=3)
        output = IndexKernel(num_tasks=len(climate.output), rank=1)
        year.initialize(lengthscale=0.3)
        day.initialize(lengthscale=6.0 if climate.period > 300 else 1.0)
        space.initialize(lengthscale=torch.tensor([1.0, 1.0, 1.5]))
        with torch.no_grad():
            output.covar_factor.copy_((0.6 * spread).sqrt().unsqueeze(-1))
            output.initialize(var=(0.3 * spread).float())
        self.covar_module = gaps.GappyGridKernel([year, day, space, output], grid)
        self.double()
        self.likelihood.initialize(noise=0.12 * spread)

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))

    def learned(self) -> dict[str, float]:
        """Hyperparameters by name."""
        year, day, space, output = self.covar_module.kernels
        matrix = output.covar_matrix.to_dense().detach()
        found = {"year": year.lengthscale.item(), "day": day.lengthscale.item()}
        found |= dict(zip(("east", "north", "height"), space.lengthscale.flatten().tolist(), strict=True))
        for o in range(len(matrix)):
            found |= {f"variance {o}": matrix[o, o].item(), f"noise {o}": self.likelihood.noise[o].item()}
        return found


def _problem(climate: StationClimate) -> tuple[np.ndarray, Anomalies, PaperModel]:
    cells = withheld(climate)
    anomalies = Anomalies.of(climate, np.where(cells, np.nan, climate.values))
    return cells, anomalies, PaperModel(climate, anomalies.values)


def _rmse(climate: StationClimate, cells: np.ndarray, anomalies: Anomalies, mean: np.ndarray) -> list[float]:
    there = anomalies.recorded(mean.reshape(climate.values.shape)) + anomalies.cycle
    error = np.where(cells, climate.values - there, np.nan)
    return np.sqrt(np.nanmean(error**2, (0, 1, 2))).tolist()


# -- Table 1 of the paper ----------------------------------------------------------------------------------------------


def by_method(child: Child, climate: StationClimate, name: str, steps: int) -> None:
    """Trains by one method and predicts every cell. Results are sent at once, so that a run that is killed has some."""
    method, rank, penalty = METHODS[name]
    cells, anomalies, model = _problem(climate)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.1)
    memory, iterations = gaps.WarmStart(num_probes=PROBES), 0
    warnings.simplefilter("ignore", gaps.NotConvergedWarning)  # told by the residual
    with (
        settings.mixed_precision(),
        settings.progress(False),
        settings.gap_method(method),
        settings.preconditioner_rank(rank),
        settings.gap_penalty(penalty),
        child.clock(),
    ):
        started = time.perf_counter()
        for step in range(steps):
            history = gaps.fit(model, 1, optimizer=optimizer, warm_start=memory, patience=None, progress=False)
            iterations += sum(history.iterations)
            child.report(steps=step + 1, iterations=iterations, residual=history.worst_residual[-1])
        with gaps.record_solves() as record:
            mean = mean_of(model)
        child.report(seconds=time.perf_counter() - started)
    child.report(iterations=iterations + record[-1].iterations, residual=record[-1].worst_residual)
    chosen = f"{record[-1].method}{f', rank {record[-1].rank}' if record[-1].rank else ''}"
    child.report(rmse=_rmse(climate, cells, anomalies, mean), chosen=chosen)
    with settings.progress(False):
        value, error = log_likelihood(model)
    child.report(log_likelihood=value, log_likelihood_error=error, outcome="done")


def compare_methods(climate: StationClimate, names: list[str], steps: int, cap: float) -> tuple[dict[str, Any], str]:
    rows: dict[str, dict[str, Any]] = {}
    for name in names:
        started = time.perf_counter()
        rows[name] = run_capped(by_method, climate, name, steps, cap=cap, memory_gib=MEMORY_GIB)
        print(f"{name}: {rows[name]} in {time.perf_counter() - started:.0f} s", flush=True)
    base = rows.get("FG", {}).get("seconds")
    lines = []
    for name, row in rows.items():
        rmse = row.get("rmse", [math.nan, math.nan])
        took = row.get("seconds")
        ratio = f"{took / base:.1f}" if base and took else f"> {cap / base:.1f}" if base else ""
        lines.append(
            [
                name,
                row.get("outcome", "") if row.get("outcome") != "done" else number(took, ".0f"),
                ratio,
                number(IN_THE_PAPER.get(name), "g"),
                f"{row.get('steps', 0)}",
                f"{row.get('iterations', 0):,}",
                number(row.get("residual"), ".0e"),
                *(number(value, ".3f") for value in rmse),
                number(row.get("log_likelihood"), ".4f"),
                row.get("chosen", ""),
            ]
        )
    columns = ["", "seconds", "over FG", "in the paper", "steps", "iterations", "last residual"]
    columns += [f"RMSE {output}" for output in climate.output] + ["log-likelihood", "last solve"]
    title = f"## Methods: {steps} steps of Adam and the mean at every cell, capped at {cap:g} s\n"
    return rows, title + "\n" + markdown_table(columns, lines)


# -- warm starts -------------------------------------------------------------------------------------------------------


def compare_starts(
    climate: StationClimate, steps: int, name_of_method: str = "IG_1000", tolerance: float = 1e-3
) -> tuple[dict[str, Any], str]:
    """Iterations with warm starts and without, to the same tolerance, and the learned hyperparameters."""
    method, rank, _ = METHODS[name_of_method]
    rows: dict[str, dict[str, Any]] = {}
    for name in ("warm", "cold"):
        _, _, model = _problem(climate)
        memory = gaps.WarmStart(num_probes=PROBES, tolerance=tolerance)
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.05)
        started, iterations = time.perf_counter(), []  # of solves, all columns together; not for the loss's value
        with (
            settings.mixed_precision(),
            settings.progress(False),
            settings.gap_method(method),
            settings.preconditioner_rank(rank),
        ):
            for step in range(steps):
                if name == "cold":
                    memory = gaps.WarmStart(num_probes=PROBES, tolerance=tolerance, seed=step, loosest=tolerance)
                with gaps.record_solves() as record:
                    gaps.fit(model, 1, optimizer=optimizer, warm_start=memory, patience=None, progress=False)
                iterations.append(sum(s.iterations for s in record if "log-determinant" not in s.reason))
        rows[name] = {
            "iterations": iterations,
            "seconds": time.perf_counter() - started,
            "learned": model.learned(),
        }
        print(f"{name}: {rows[name]}", flush=True)
    totals = {name: sum(row["iterations"]) for name, row in rows.items()}
    first, second = rows["warm"]["learned"], rows["cold"]["learned"]
    lines = [[key, f"{first[key]:.4g}", f"{second[key]:.4g}", f"{first[key] / second[key] - 1:+.1%}"] for key in first]
    text = (
        f"## Warm starts: {steps} steps of Adam by {name_of_method}, to a tolerance of {tolerance:g}\n\n"
        f"Iterations: {totals['warm']:,} with warm starts and fixed probes, {totals['cold']:,} from nothing with new "
        f"probes at every step ({totals['warm'] / totals['cold']:.2f}).\n\n"
    )
    return rows, text + markdown_table(["", "warm", "cold", "difference"], lines)


# -- theirs ------------------------------------------------------------------------------------------------------------


def by_botorch(child: Child, climate: StationClimate, steps: int) -> None:
    """LatentKroneckerGP of (station, output) x month, trained by Adam at its own settings; mean of four samples."""
    from botorch.models.latent_kronecker_gp import LatentKroneckerGP

    cells = withheld(climate)
    anomalies = Anomalies.of(climate, np.where(cells, np.nan, climate.values))
    where = np.repeat(positions(climate), len(climate.output), axis=0)
    codes = np.tile(np.arange(len(climate.output)), len(climate.lat))
    rows = torch.from_numpy(np.concatenate([where - where.mean(0), codes[:, None]], -1))
    months = torch.arange(climate.values.shape[0] * climate.values.shape[1], dtype=torch.float64).unsqueeze(-1)
    values = torch.from_numpy(np.moveaxis(anomalies.values, (2, 3), (0, 1)).reshape(len(rows), -1))
    space = MaternKernel(nu=1.5, ard_num_dims=3, active_dims=(0, 1, 2))
    outputs = IndexKernel(num_tasks=len(climate.output), rank=1, active_dims=(3,))
    space.initialize(lengthscale=torch.tensor([1.0, 1.0, 1.5]))
    time_kernel = gpytorch.kernels.ScaleKernel(MaternKernel(nu=0.5))
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    model = LatentKroneckerGP(
        rows,
        months,
        values,
        likelihood=likelihood,
        covar_module_X=ProductKernel(space, outputs).double(),
        covar_module_T=time_kernel.double(),
        outcome_transform=None,
    )
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with child.clock():
        started = time.perf_counter()
        model.train()
        for step in range(steps):
            with model.use_iterative_methods():
                optimizer.zero_grad()
                loss = -objective(model(*model.train_inputs), model.train_targets)
                loss.backward()
                optimizer.step()
            child.report(steps=step + 1)
        model.eval()
        with torch.no_grad(), model.use_iterative_methods():
            mean = model.posterior(rows).rsample(torch.Size([4])).mean(0)
        child.report(seconds=time.perf_counter() - started)
    there = mean.reshape(len(climate.lat), len(climate.output), *climate.values.shape[:2]).permute(2, 3, 0, 1).numpy()
    child.report(rmse=_rmse(climate, cells, anomalies, there), outcome="done")


def botorch_row(climate: StationClimate, cap: float, steps: int = 10) -> tuple[dict[str, Any], str]:
    row = run_capped(by_botorch, climate, steps, cap=cap, memory_gib=MEMORY_GIB)
    took = number(row.get("seconds"), ".0f") if row.get("outcome") == "done" else row.get("outcome", "")
    lines = [["LatentKroneckerGP", took, f"{row.get('steps', 0)}", str(row.get("rmse", "")), row.get("note", "")]]
    title = f"## BoTorch, {steps} steps of Adam and four samples, capped at {cap:g} s\n\n"
    return row, title + markdown_table(["", "seconds", "steps", "RMSE", "note"], lines)
