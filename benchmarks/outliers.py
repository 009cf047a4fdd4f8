"""Gross errors in the data: their effect on the values in the gaps, and the cost of robust methods without such errors.

    GPYTORCH_GAPS_DATA=... python -m benchmarks.outliers

Gross errors are put into 5 % of the observations. Their sizes are 10 to 1000 standard deviations of the data, or of the
noise, which are harder to find. All sizes between are equally likely on a logarithmic scale, and so are both signs. A
synthetic field of 40 x 40 cells is a draw of a Matern-3/2 kernel with noise; a quarter of the cells and a block are
gaps. The real data are ``colorado_monthly``, 300 months of 25 stations. A tenth of the observations is withheld.

Methods: ``fill_gaps`` with ``robust="auto"`` and ``robust=True``; an ``ExactGP`` with a robust likelihood; a
``LaplaceGP`` with Student's t. The first row of each is its non-robust form on data without gross errors. Ratios are
to that row. RMSE and coverage of 95 % intervals are of the field in the gaps, or of the withheld observations.
Seconds are CPU seconds.
"""

import argparse
import time
import warnings
from collections.abc import Iterator
from typing import Any

import gpytorch
import numpy as np
import torch
from gpytorch.kernels import MaternKernel, ScaleKernel

import gpytorch_gaps as gaps
from benchmarks.labels import table, withheld

SIDE, LENGTHSCALE, NOISE = 40, 8.0, 0.1
SHARE = 0.05
STATIONS = 25
STEPS = 150


def kernel_of(grid: gaps.CartesianGrid) -> ScaleKernel:
    """A Matern-3/2 kernel along each axis."""
    kernels = [MaternKernel(nu=1.5), MaternKernel(nu=1.5)]
    for kernel in kernels:
        kernel.lengthscale = 3.0
    return ScaleKernel(gaps.GappyGridKernel(kernels, grid))


class Field(gpytorch.models.ExactGP):
    """A constant mean and a Matern-3/2 kernel along each axis."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor, likelihood: Any, grid: gaps.CartesianGrid) -> None:
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = kernel_of(grid)

    def forward(self, x: torch.Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


class LaplaceField(Field, gaps.LaplaceGP):
    """The same for any likelihood."""


# -- data --------------------------------------------------------------------------------------------------------------


def draw(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A field without noise, and observations of it."""
    generator = np.random.default_rng(seed)
    distance = np.sqrt(3.0) * np.abs(np.subtract.outer(np.arange(SIDE), np.arange(SIDE))) / LENGTHSCALE
    half = np.linalg.cholesky((1.0 + distance) * np.exp(-distance) + 1e-10 * np.eye(SIDE))
    truth = half @ generator.standard_normal((SIDE, SIDE)) @ half.T
    gap = generator.random(truth.shape) < 0.25
    gap[10:16, 22:30] = True
    return truth, np.where(gap, np.nan, truth + NOISE * generator.standard_normal(truth.shape))


def with_gross_errors(values: np.ndarray, unit: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The same with gross errors, in this unit, and their flags."""
    generator = np.random.default_rng(100 + seed)
    wrong = (generator.random(values.shape) < SHARE) & ~np.isnan(values)
    size = unit * 10.0 ** generator.uniform(1, 3, values.shape) * generator.choice([-1.0, 1.0], values.shape)
    return np.where(wrong, values + size, values), wrong


# -- methods: means, standard deviations, and flags of what is distrusted ----------------------------------------------


def by_fill(values: Any, robust: Any, noisy: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    kernels = None if noisy else [MaternKernel(nu=1.5), MaternKernel(nu=1.5)]
    result = gaps.fill_gaps(values, kernels=kernels, robust=robust, smooth=not noisy, progress=False)
    distrusted = np.zeros(values.shape, dtype=bool) if result.distrusted is None else np.asarray(result.distrusted)
    return np.asarray(result.mean), np.asarray(result.std), distrusted


def by_exact(values: np.ndarray, robust: bool, noisy: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    grid, x, y = gaps.from_array(torch.from_numpy(values))
    model = Field(x, y, gaps.GappyGridLikelihood(robust=robust), grid).double()
    gaps.fit(model, steps=STEPS, progress=False)
    flags = np.zeros(values.shape, dtype=bool)
    if robust:
        flags[~np.isnan(values)] = model.likelihood.distrusted.numpy()
    return (*moments(model, grid), flags)


def by_student(values: np.ndarray, robust: bool, noisy: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    grid, x, y = gaps.from_array(torch.from_numpy(values))
    likelihood = gpytorch.likelihoods.StudentTLikelihood() if robust else gaps.GappyGridLikelihood()
    model = (LaplaceField if robust else Field)(x, y, likelihood, grid).double()
    gaps.fit(model, steps=STEPS, progress=False)
    return (*moments(model, grid), np.zeros(values.shape, dtype=bool))


def moments(model: Any, grid: gaps.CartesianGrid) -> tuple[np.ndarray, np.ndarray]:
    with torch.no_grad():
        f = model(grid.points())
        return f.mean.reshape(grid.shape).numpy(), f.stddev.reshape(grid.shape).numpy()


METHODS: dict[str, tuple[Any, Any]] = {  # and what makes them robust
    "fill_gaps, auto": (by_fill, "auto"),
    "fill_gaps, True": (by_fill, True),
    "ExactGP": (by_exact, True),
    "Student's t": (by_student, True),
}


# -- the table ---------------------------------------------------------------------------------------------------------


def problems(options: argparse.Namespace) -> Iterator[tuple[str, Any, np.ndarray, np.ndarray, dict[str, float], bool]]:
    """Name, values with gaps, truth, flags of the scored cells, units of gross errors, whether the truth is noisy."""
    for seed in range(options.seeds):
        truth, values = draw(seed)
        units = {"data": float(np.nanstd(values)), "noise": NOISE}
        yield f"40 x 40, {seed}", values, truth, np.isnan(values), units, False
    if options.stations:
        data = table("colorado", options.stations, 0)
        truth = data.to_numpy()
        held = withheld(truth, "random", 24, 0)
        yield "colorado_monthly", data.mask(held), truth, held, {"data": float(np.nanstd(truth))}, True


def rows(method: str, values: Any, truth: np.ndarray, scored: np.ndarray, units: dict[str, float], noisy: bool) -> Any:
    """Words, the RMSE, the coverage, gross errors, of them found, observations wrongly distrusted, and CPU seconds."""
    function, option = METHODS[method]
    none = np.zeros(truth.shape, dtype=bool)
    cases = [("none, believed", values, none, False), ("none", values, none, option)]
    for seed, (name, unit) in enumerate(units.items()):
        dirty, wrong = with_gross_errors(np.asarray(values), unit, seed)
        cases.append((f"of the {name}", values.where(~wrong, dirty) if noisy else dirty, wrong, option))
    for words, given, wrong, robust in cases:
        started = time.process_time()
        mean, std, flags = function(given, robust, noisy)
        seconds = time.process_time() - started
        error = (mean - truth)[scored]
        rmse, coverage = float(np.sqrt(np.mean(error**2))), float(np.mean(np.abs(error) <= 1.96 * std[scored]))
        yield words, rmse, coverage, int(wrong.sum()), int((flags & wrong).sum()), int((flags & ~wrong).sum()), seconds


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="number of synthetic fields")
    parser.add_argument(
        "--stations",
        type=int,
        default=STATIONS,
        help="number of stations of colorado_monthly; 0 for synthetic fields only",
    )
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore", gaps.CalibrationWarning)
    head = (
        f"{'':18}{'method':16}{'gross errors':16}{'RMSE':>9}{'ratio':>7}{'95 %':>7}{'wrong':>7}{'found':>7}{'false':>7}"
    )
    print(f"{head}{'s':>7}")
    for name, values, truth, scored, units, noisy in problems(options):
        for method in options.methods:
            if noisy and METHODS[method][0] is not by_fill:
                continue
            first = 0.0
            for words, rmse, coverage, *counts, seconds in rows(method, values, truth, scored, units, noisy):
                first = first or rmse
                listed = "".join(f"{count:7,}" for count in counts)
                print(
                    f"{name:18}{method:16}{words:16}{rmse:9.4g}{rmse / first:7.3f}{100 * coverage:7.1f}{listed}"
                    f"{seconds:7.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
