"""Learned hyperparameters against dense maximum likelihood, on data drawn from the model.

    python -m benchmarks.hyperparameters --json results/hyperparameters.json

Grids have 30 x 30 and 40 x 40 cells, three levels of gappiness, and five draws each. `fit` runs with its defaults, and
again with the paper's Nystrom sum. The reference is dense Cholesky, maximized by L-BFGS in plain torch until it
converges. The table shows the largest relative difference over length-scales, output scale and noise, and the ratio of
the noise learned by Nystrom to that of maximum likelihood.
"""

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

import gpytorch
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from torch import Tensor
from tqdm import tqdm

import gpytorch_gaps as gaps
from benchmarks._machine import machine_facts

LENGTHS, NOISE = (0.08, 0.12), 0.01


class Model(gpytorch.models.ExactGP):
    def __init__(self, x: Tensor, y: Tensor, grid: gaps.CartesianGrid) -> None:
        super().__init__(x, y, gaps.GappyGridLikelihood())
        self.mean_module = gpytorch.means.ZeroMean()
        self.covar_module = ScaleKernel(gaps.GappyGridKernel([RBFKernel(), RBFKernel()], grid))
        self.double()

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    def learned(self) -> Tensor:
        """Length-scales, output scale, noise."""
        lengths = [kernel.lengthscale.view(1) for kernel in self.covar_module.base_kernel.kernels]
        return torch.cat([*lengths, self.covar_module.outputscale.view(1), self.likelihood.noise.view(1)]).detach()

    def start_at(self, parameters: Tensor) -> None:
        for kernel, length in zip(self.covar_module.base_kernel.kernels, parameters[:2], strict=True):
            kernel.lengthscale = length
        self.covar_module.outputscale = parameters[2]
        self.likelihood.noise = parameters[3]


def squared_exponential(size: int, length: Tensor) -> Tensor:
    x = torch.linspace(0, 1, size, dtype=torch.float64)
    return torch.exp(-0.5 * ((x.unsqueeze(-1) - x) / length) ** 2)


def draw(size: int, gappiness: float, seed: int) -> Tensor:
    """A draw from the model, NaN in the gaps."""
    generator = torch.Generator().manual_seed(seed)
    jitter = 1e-10 * torch.eye(size, dtype=torch.float64)
    roots = [torch.linalg.cholesky(squared_exponential(size, torch.tensor(length)) + jitter) for length in LENGTHS]
    white = torch.randn(2, size, size, generator=generator, dtype=torch.float64)
    values = roots[0] @ white[0] @ roots[1].mT + math.sqrt(NOISE) * white[1]
    values[torch.rand(size, size, generator=generator) < gappiness] = math.nan
    return values


def maximum_likelihood(values: Tensor) -> Tensor:
    """Maximum likelihood by dense algebra and L-BFGS on the logarithms, starting at the truth."""
    cells = (~values.isnan()).nonzero()
    y = values[~values.isnan()]
    logs = torch.tensor([*LENGTHS, 1.0, NOISE], dtype=torch.float64).log().requires_grad_(True)
    optimizer = torch.optim.LBFGS([logs], max_iter=200, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        parameters = logs.exp()
        covariance = parameters[2]
        for axis in range(2):
            position = cells[:, axis]
            covariance = covariance * squared_exponential(len(values), parameters[axis])[position][:, position]
        covariance = covariance + parameters[3] * torch.eye(len(y), dtype=torch.float64)
        density = torch.distributions.MultivariateNormal(torch.zeros_like(y), covariance)
        value = -density.log_prob(y)
        value.backward()
        return value

    optimizer.step(loss)
    return logs.detach().exp()


def fitted(values: Tensor, steps: int, logdet: str = "auto") -> Tensor:
    """Hyperparameters learned by `fit`, from GPyTorch's default start."""
    size = len(values)
    axes = [torch.linspace(0, 1, size, dtype=torch.float64)] * 2
    grid, x, y = gaps.from_array(values, axes)
    model = Model(x, y, grid)
    model.start_at(torch.tensor([0.3, 0.3, 1.0, 0.1], dtype=torch.float64))
    with gaps.settings.logdet_method(logdet):
        gaps.fit(model, steps=steps, progress=False)
    return model.learned()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=int, default=[30, 40])
    parser.add_argument("--gappiness", nargs="+", type=float, default=[0.3, 0.5, 0.7])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--no-nystrom", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    facts = machine_facts()
    print(", ".join(f"{key}: {value}" for key, value in facts.items()))
    rows: list[dict[str, Any]] = []
    runs = [(size, gappiness) for size in options.sizes for gappiness in options.gappiness]
    with tqdm(total=len(runs) * options.seeds) as bar:
        for size, gappiness in runs:
            worst, inflation = [], []
            for seed in range(options.seeds):
                values = draw(size, gappiness, seed)
                reference = maximum_likelihood(values)
                worst.append(float((fitted(values, options.steps) / reference - 1).abs().max()))
                if not options.no_nystrom:
                    inflation.append(float(fitted(values, options.steps, "nystrom")[3] / reference[3]))
                bar.update()
            ratio = statistics.mean(inflation) if inflation else math.nan
            rows.append({"size": size, "gappiness": gappiness, "worst": max(worst), "nystrom_noise": ratio})
    print("| grid | gappiness | largest difference from maximum likelihood | Nystrom's noise over its |")
    print("|---|---|---|---|")
    for row in rows:
        grid = f"{row['size']} x {row['size']}"
        print(f"| {grid} | {row['gappiness']:g} | {row['worst']:.2%} | {row['nystrom_noise']:.2f} |")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"machine": facts, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
