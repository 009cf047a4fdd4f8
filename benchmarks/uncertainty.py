"""Error bars that include the uncertainty of hyperparameters, beside brute-force integration.

    python -m benchmarks.uncertainty

Draws of a squared exponential kernel along a series, with known noise and a gap of nine points in the middle. The scale
and the length-scale are learned. Standard deviations in the gap are divided by those of the true posterior, integrated
on a grid of 41 x 41 pairs of logarithms: at the optimum, with ``HyperparameterUncertainty.predict``, and with the
normal posterior that it assumes, integrated on the same grid.
"""

import argparse
from typing import Any

import gpytorch
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from torch import Tensor

import gpytorch_gaps as gaps

LENGTH, NOISE, GAP = 3.5, 0.01, 9


class Model(gpytorch.models.ExactGP):
    """A series without a mean."""

    def __init__(self, x: Tensor, y: Tensor, grid: gaps.CartesianGrid) -> None:
        super().__init__(x, y, gaps.GappyGridLikelihood(noise=NOISE))
        self.mean_module = gpytorch.means.ZeroMean()
        kernel = RBFKernel()
        kernel.lengthscale = 3.0
        self.covar_module = ScaleKernel(gaps.GappyGridKernel([kernel], grid))

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def problem(size: int, seed: int) -> tuple[Model, Tensor]:
    """A model of a draw, and points in its gap."""
    generator = torch.Generator().manual_seed(seed)
    t = torch.arange(size, dtype=torch.float64)
    kernel = torch.exp(-0.5 * ((t.unsqueeze(-1) - t) / LENGTH) ** 2) + 1e-8 * torch.eye(size, dtype=torch.float64)
    latent, noise = torch.randn(2, size, generator=generator, dtype=torch.float64)
    values = torch.linalg.cholesky(kernel) @ latent + NOISE**0.5 * noise
    first = size // 2 - 4
    values[first : first + GAP] = torch.nan
    grid, x, y = gaps.from_array(values)
    return Model(x, y, grid).double(), grid.points()[first + 2 : first + 7]


def dense(model: Model, points: Tensor, coordinates: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-likelihood, means and variances for pairs of log scale and log length-scale. shape: (n,), (n, m), (n, m)"""
    x, y = model.train_inputs[0], model.train_targets
    scale, length = coordinates.exp().unsqueeze(-1).unsqueeze(-1).unbind(1)

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return scale * torch.exp(-0.5 * ((a - b.mT) / length) ** 2)

    root = torch.linalg.cholesky(kernel(x, x) + NOISE * torch.eye(len(y), dtype=torch.float64))
    white = torch.linalg.solve_triangular(root, y.unsqueeze(-1), upper=False)
    cross = torch.linalg.solve_triangular(root, kernel(x, points), upper=False)
    log_likelihood = -0.5 * white.square().sum((-2, -1)) - root.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return log_likelihood, (cross.mT @ white).squeeze(-1), scale.squeeze(-1) - cross.square().sum(-2)


def deviation(log_weights: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Standard deviations by the law of total variance. shape: (m,)"""
    weights = log_weights.softmax(0).unsqueeze(-1)
    center = (weights * mean).sum(0)
    return (weights * (variance + (mean - center).square())).sum(0).sqrt()


def ratios(size: int, seed: int) -> dict[str, Any]:
    model, points = problem(size, seed)
    known = gaps.fit(model, steps=300, progress=False, uncertainty=True).uncertainty
    assert known is not None
    line = torch.linspace(-6, 6, 41, dtype=torch.float64)
    steps = torch.cartesian_prod(line, line)
    log_likelihood, mean, variance = dense(model, points, known.coordinates + steps @ known.axes.mT)
    exact = deviation(log_likelihood, mean, variance)
    with torch.no_grad():
        ours = {
            "optimum": model(points).stddev,
            "predict": known.predict(model, points).stddev,
            "normal": deviation(-0.5 * steps.square().sum(-1), mean, variance),
        }
    errors = known.covariance.diagonal().sqrt().tolist()
    return {"errors": errors, **{name: float((own / exact).mean()) for name, own in ours.items()}}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=(25, 40, 100, 400))
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args(arguments)
    print(
        f"{'observations':>12}{'seed':>5}{'log scale':>11}{'log length':>11}{'optimum':>9}{'predict':>9}{'normal':>9}"
    )
    for size in options.sizes:
        for seed in range(1, options.seeds + 1):
            row = ratios(size, seed)
            scale, length = row["errors"]
            words = "".join(f"{row[name]:9.3f}" for name in ("optimum", "predict", "normal"))
            print(f"{size - GAP:12,}{seed:5}{scale:11.2f}{length:11.2f}{words}", flush=True)


if __name__ == "__main__":
    main()
