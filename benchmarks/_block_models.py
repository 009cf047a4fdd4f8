"""Models with kernels of blocks of axes, as users write them, and measurements of these models."""

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gpytorch
import torch
from torch import Tensor

import gpytorch_gaps as gaps
from benchmarks._results import markdown_table


class BlockModel(gpytorch.models.ExactGP):
    """A constant mean and a kernel on the grid of the observations."""

    def __init__(self, x: Tensor, y: Tensor, kernel: Any, noise: float) -> None:
        super().__init__(x, y, gaps.GappyGridLikelihood())
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = kernel
        self.double()
        self.likelihood.noise = noise

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Stages:
    """Seconds of every stage, by the wall and of the CPU; and solves, in the order of their end."""

    def __init__(self) -> None:
        self.wall: dict[str, float] = {}
        self.cpu: dict[str, float] = {}
        self.solves: dict[str, str] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        with gaps.record_solves() as solves:
            yield
        self.wall[name], self.cpu[name] = time.perf_counter() - wall, time.process_time() - cpu
        if solves:
            self.solves[name] = str(solves[-1])

    @property
    def seconds(self) -> float:
        return sum(self.wall.values())

    def facts(self) -> dict[str, Any]:
        return {"wall": dict(self.wall), "cpu": dict(self.cpu), "solves": dict(self.solves)}

    def table(self) -> str:
        lines = [
            [name, f"{self.wall[name]:.1f}", f"{self.cpu[name]:.1f}", self.solves.get(name, "")] for name in self.wall
        ]
        return markdown_table(["stage", "seconds", "CPU seconds", "last solve"], lines)


def peak_gib() -> float:
    """The most memory that this process has had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def measurements_at(model: gpytorch.models.ExactGP, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean of the field and variance of a measurement. shape: (Q,) each"""
    with torch.no_grad():
        posterior = model.likelihood(model(x))
        return posterior.mean, posterior.variance
