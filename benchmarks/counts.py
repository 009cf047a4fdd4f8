"""Counts and classes on grids with gaps: ``LaplaceGP`` beside GPyTorch's variational Gaussian process.

    python -m benchmarks.counts
    python -m benchmarks.counts --parts field --side 1000

``peers``: draws of a latent function on 60 x 60 cells, observed as counts (Poisson) or classes (Bernoulli), half of the
cells missing in clouds and at random. Both methods start from the same hyperparameters and train them with Adam, the
variational one with a Cholesky factor over inducing points on a sub-grid, on all observations at once. The score is the
mean log probability of what was withheld. ``field``: a Poisson field with half of its cells missing, trained on all of
its observations, then the latent mean and standard deviation of all cells.

Training ends when the last ten steps gain less than a thousandth of a nat per observation, or at ``--steps``.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gpytorch
import torch
from gpytorch.kernels import Kernel, RBFKernel, ScaleKernel
from linear_operator.operators import DiagLinearOperator
from scipy.ndimage import gaussian_filter
from torch import Tensor

import gpytorch_gaps as gaps
from benchmarks._block_models import Stages, peak_gib
from benchmarks._machine import machine_facts
from benchmarks._results import described, markdown_table, number, write_results

PARTS = ("peers", "field")
LIKELIHOODS = {"poisson": gpytorch.likelihoods.PoissonLikelihood, "bernoulli": gpytorch.likelihoods.BernoulliLikelihood}

_LENGTH = 0.15  # of the latent function, as a share of the side of a small field
_FIELD_CELLS = 100.0  # the same in cells, of the large field
_SCALE, _LEVEL = 1.5, 1.0  # standard deviation and mean of the latent function
_MISSING = 0.5
_PATIENCE, _MIN_GAIN = 10, 1e-3


class Laplace(gaps.LaplaceGP):
    """A constant mean and a squared exponential kernel on a grid."""

    def __init__(self, x: Tensor, y: Tensor, likelihood: gpytorch.likelihoods.Likelihood, grid: Any) -> None:
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = ScaleKernel(gaps.GappyGridKernel([RBFKernel(), RBFKernel()], grid))

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Variational(gpytorch.models.ApproximateGP):
    """The same process with a Gaussian of any covariance over inducing points."""

    def __init__(self, inducing: Tensor) -> None:
        distribution = gpytorch.variational.CholeskyVariationalDistribution(len(inducing))
        strategy = gpytorch.variational.VariationalStrategy(
            self, inducing, distribution, learn_inducing_locations=False
        )
        super().__init__(strategy)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = ScaleKernel(RBFKernel(ard_num_dims=2))

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


# -- data --------------------------------------------------------------------------------------------------------------


def draw_latent(side: int, length: float, generator: torch.Generator) -> Tensor:
    """A draw of the latent function on a square; its length-scale in cells. shape: (side, side)"""
    kernel = RBFKernel().double()
    kernel.lengthscale = length
    points = torch.arange(side, dtype=torch.float64)
    with torch.no_grad():
        covariance = kernel(points).to_dense()
    values, vectors = torch.linalg.eigh(covariance)
    root = vectors * values.clamp_min(0.0).sqrt()
    white = torch.randn(side, side, generator=generator, dtype=torch.float64)
    return _LEVEL + _SCALE * root @ white @ root.mT


def observe(name: str, f: Tensor, generator: torch.Generator) -> Tensor:
    if name == "poisson":
        return torch.poisson(torch.nn.functional.softplus(f), generator=generator)
    return (torch.rand(f.shape, generator=generator, dtype=torch.float64) < torch.special.ndtr(f - _LEVEL)).double()


def missing_cells(side: int, generator: torch.Generator) -> Tensor:
    """Half of the cells: clouds, and as many again at random. shape: (side, side)"""
    height = gaussian_filter(torch.randn(side, side, generator=generator).numpy(), side / 20)
    clouds = torch.from_numpy(height) > torch.quantile(torch.from_numpy(height).flatten()[:1_000_000], 1 - _MISSING / 2)
    left = _MISSING / 2 / (1 - _MISSING / 2)
    return clouds | (torch.rand(side, side, generator=generator) < left)


# -- methods -----------------------------------------------------------------------------------------------------------


def train(loss: Callable[[], Tensor], parameters: Any, steps: int, lr: float) -> tuple[int, float]:
    """Steps of Adam until the last ten gain little. Returns the number of steps and the best loss per observation."""
    optimizer = torch.optim.Adam(parameters, lr=lr)
    losses: list[float] = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        losses.append(value.item())
        if len(losses) > 2 * _PATIENCE and min(losses[:-_PATIENCE]) - min(losses) < _MIN_GAIN:
            break
    return len(losses), min(losses)


def train_and_predict(
    model: Any, mll: Any, data: tuple[Tensor, Tensor], points: Tensor, stages: Stages, steps: int, lr: float
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Latent mean and variance at some points, and what the training did."""
    x, y = data
    with stages.stage("training"):
        model.train()
        taken, loss = train(lambda: -mll(model(x), y), model.parameters(), steps, lr)
    with stages.stage("prediction"), torch.no_grad():
        posterior = model.eval()(points)
        mean, variance = posterior.mean, posterior.variance
    return mean, variance, {"steps": taken, "loss": loss}


def laplace(name: str, values: Tensor, stages: Stages, steps: int) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Latent mean and variance of all cells, and the learned parameters."""
    points = torch.linspace(0, 1, len(values), dtype=torch.float64)
    grid, x, y = gaps.from_array(values, [points, points])
    model = Laplace(x, y, LIKELIHOODS[name](), grid).double()
    start_from(model.covar_module)
    mll = gaps.LaplaceMarginalLogLikelihood(model.likelihood, model)
    mean, variance, facts = train_and_predict(model, mll, (x, y), grid.points(), stages, steps, lr=0.1)
    return mean, variance, {**facts, "newton": model.mode.steps}


def variational(
    name: str, values: Tensor, stages: Stages, steps: int, inducing: int
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    points = torch.linspace(0, 1, len(values), dtype=torch.float64)
    grid, x, y = gaps.from_array(values, [points, points])
    sub = torch.linspace(0, 1, inducing, dtype=torch.float64)
    model = Variational(torch.cartesian_prod(sub, sub)).double()
    start_from(model.covar_module)
    likelihood = LIKELIHOODS[name]()
    mll = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(y))
    return train_and_predict(model, mll, (x, y), grid.points(), stages, steps, lr=0.05)


def start_from(kernel: ScaleKernel) -> None:
    """The same first hyperparameters for every method."""
    for part in kernel.modules():
        if isinstance(part, Kernel) and part.has_lengthscale:
            part.lengthscale = 0.3


def log_score(name: str, mean: Tensor, variance: Tensor, truth: Tensor) -> float:
    """Mean log probability of observations, by GPyTorch's own quadrature."""
    latent = gpytorch.distributions.MultivariateNormal(mean, DiagLinearOperator(variance))
    return float(LIKELIHOODS[name]().log_marginal(truth, latent).mean())


# -- parts -------------------------------------------------------------------------------------------------------------


def compare(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Both methods on the same data, one row each."""
    generator = torch.Generator().manual_seed(options.seed)
    f = draw_latent(options.small, _LENGTH * options.small, generator)
    complete = observe(name, f, generator)
    held = missing_cells(options.small, generator)
    values = torch.where(held, torch.nan, complete)
    rows = []
    for method in ("LaplaceGP", "variational"):
        stages = Stages()
        if method == "LaplaceGP":
            mean, variance, facts = laplace(name, values, stages, options.steps)
        else:
            mean, variance, facts = variational(name, values, stages, options.steps, options.inducing)
        away = held.flatten()
        score = log_score(name, mean[away], variance[away], complete[held])
        rows.append({"data": name, "method": method, "log_score": score, **facts, **stages.facts()})
    return rows


def field(options: argparse.Namespace) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(options.seed)
    f = draw_latent(options.side, _FIELD_CELLS, generator)
    complete, held = observe("poisson", f, generator), missing_cells(options.side, generator)
    stages = Stages()
    mean, variance, facts = laplace("poisson", torch.where(held, torch.nan, complete), stages, options.steps)
    z = (mean - f.flatten())[held.flatten()] / variance.sqrt()[held.flatten()]
    rmse = float((mean - f.flatten())[held.flatten()].square().mean().sqrt())
    coverage = float((z.abs() < 1.959964).double().mean())
    cells = f"{options.side} x {options.side} counts"
    return {
        "data": cells,
        "method": "LaplaceGP",
        "rmse": rmse,
        "coverage": coverage,
        "peak_gib": peak_gib(),
        **facts,
        **stages.facts(),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    head = [
        "data",
        "method",
        "steps",
        "training, CPU s",
        "prediction, CPU s",
        "seconds",
        "log score",
        "latent RMSE",
        "coverage",
    ]
    lines = [
        [
            row["data"],
            row["method"],
            str(row["steps"]),
            *(f"{row['cpu'][stage]:.1f}" for stage in ("training", "prediction")),
            f"{sum(row['wall'].values()):.1f}",
            *(number(row.get(key), ".4f") for key in ("log_score", "rmse", "coverage")),
        ]
        for row in rows
    ]
    return markdown_table(head, lines)


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--small", type=int, default=60, help="side of the field on which methods are compared")
    parser.add_argument("--inducing", type=int, default=20, help="inducing points along each side")
    parser.add_argument("--side", type=int, default=1000, help="side of the large field")
    parser.add_argument("--steps", type=int, default=300, help="largest number of steps of Adam")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("results/counts"), metavar="DIR")
    options = parser.parse_args(arguments)
    facts = machine_facts()
    print(described(facts), flush=True)
    rows: list[dict[str, Any]] = []
    torch.optim.Adam([torch.zeros(1, requires_grad=True)])  # the first one loads modules of torch, for a second or two
    if "peers" in options.parts:
        for name in LIKELIHOODS:
            rows += compare(name, options)
    if "field" in options.parts:
        rows.append(field(options))
    text = table(rows)
    write_results(options.output, "counts", {"machine": facts, "runs": rows}, [described(facts), text])
    print(text)
    return rows


if __name__ == "__main__":
    main()
