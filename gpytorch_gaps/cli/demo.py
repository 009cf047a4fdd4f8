"""``gpytorch-gaps demo``: a synthetic satellite picture of the sea with clouds and dead pixels, with known truth.

It is filled and compared with linear interpolation. With ``--methods``, it is solved by every method of the paper.
"""

import math
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

import linear_operator
import numpy as np
import torch
from scipy.interpolate import griddata
from torch import Tensor

from gpytorch_gaps import settings
from gpytorch_gaps.cli.files import check_picture, save_picture
from gpytorch_gaps.filling.fill import Filled, fill_gaps
from gpytorch_gaps.grid.data import from_array
from gpytorch_gaps.operators import SelectedKroneckerOperator
from gpytorch_gaps.reports import record_solves

SHAPE = (96, 144)
PIXEL_KM = 2.5
NOISE_KELVIN = 0.1
LOST_LINES = (25, 26, 70)

# Name in the table -> method, rank of the preconditioner (None: chosen by the method).
METHODS = {
    "auto": ("auto", None),
    "fill": ("fill", None),
    "ignore": ("ignore", 0),
    "ignore, rank 200": ("ignore", 200),
    "penalize": ("penalize", None),
    "spectral": ("spectral", None),
    "cholesky": ("cholesky", None),
}


@dataclass(frozen=True, eq=False)
class Scene:
    """Temperatures in degrees Celsius: the `truth`, the noisy `measured` values, and those `seen`, NaN at gaps."""

    axes: list[np.ndarray]
    truth: np.ndarray
    measured: np.ndarray
    seen: np.ndarray

    @property
    def gaps(self) -> np.ndarray:
        return np.isnan(self.seen)

    def rmse(self, filled: np.ndarray) -> float:
        """The root mean square error in the gaps."""
        return math.sqrt(float(np.square(filled - self.truth)[self.gaps].mean()))


def make_scene(seed: int = 7) -> Scene:
    """Warm water in the south, a meandering front, eddies of all sizes; clouds over a third of the picture."""
    generator = np.random.default_rng(seed)
    y, x = (np.arange(size) / SHAPE[0] for size in SHAPE)
    meander = 0.5 + 0.1 * np.sin(4.1 * x + 0.6) + 0.05 * np.sin(9.7 * x + 2.0)
    distance = y[:, None] - meander - 0.06 * _noise(generator, 5.0, 0.08)
    truth = 19 + 1.8 * np.tanh(distance / 0.2) + 1.2 * distance + 0.7 * _noise(generator, 5.0, 0.06)
    measured = truth + NOISE_KELVIN * generator.standard_normal(SHAPE)
    clouds = _noise(generator, 4.0, 0.04)
    hidden = clouds > np.quantile(clouds, 0.65)
    hidden |= generator.random(SHAPE) < 0.05  # dead pixels
    hidden[list(LOST_LINES)] = True
    return Scene([PIXEL_KM * np.arange(size) for size in SHAPE], truth, measured, np.where(hidden, np.nan, measured))


def _noise(generator: np.random.Generator, steepness: float, largest: float) -> np.ndarray:
    """Noise of unit variance. Its power decreases as ``k^-steepness`` below a scale of about ``6 largest`` heights."""
    rows, columns = (np.fft.fftfreq(2 * size, 1 / SHAPE[0]) for size in SHAPE)  # twice the size: it does not repeat
    wavenumber = np.hypot(rows[:, None], columns)
    spectrum = ((2 * np.pi * wavenumber) ** 2 + largest**-2) ** (-steepness / 4)
    white = np.fft.fft2(generator.standard_normal((2 * SHAPE[0], 2 * SHAPE[1])))
    noise = np.fft.ifft2(spectrum * white).real[: SHAPE[0], : SHAPE[1]]
    return (noise - noise.mean()) / noise.std()


def interpolated(scene: Scene) -> np.ndarray:
    """The scene filled by linear interpolation, and by the nearest value outside the convex hull of the data."""
    known, wanted = np.argwhere(~scene.gaps), np.argwhere(scene.gaps)
    values = scene.seen[~scene.gaps]
    linear = griddata(known, values, wanted, method="linear")
    outside = np.isnan(linear)
    linear[outside] = griddata(known, values, wanted[outside], method="nearest")
    result = scene.seen.copy()
    result[scene.gaps] = linear
    return result


def run_demo(output: Path) -> int:
    """Fills the scene, prints the errors of the result, and draws it.

    :param output: path of the picture.
    :return: the exit code: 0 if the result is better than linear interpolation.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    check_picture("output", output)
    scene = make_scene()
    share = 100 * scene.gaps.mean()
    print(f"a synthetic sea of {SHAPE[0]} x {SHAPE[1]} pixels, {share:.0f} % of them under clouds or dead")
    result = fill_gaps(scene.seen, scene.axes, progress=sys.stderr.isatty())
    report = result.report
    seconds = ", ".join(f"{what} {value:.1f} s" for what, value in report.seconds.items())
    print(f"time:     {sum(report.seconds.values()):.1f} s ({seconds})")
    print(f"kernel:   {report.kernel}; noise {report.noise_std:.3f} K (true value: {NOISE_KELVIN} K)")
    print(f"method:   {report.solve.method}, {report.solve.iterations} iterations; std {report.std_method}")
    print(f"expected: {report.expected_error}, from withheld pixels")
    error, linear = scene.rmse(result.mean), scene.rmse(interpolated(scene))
    print(f"found:    RMSE in the gaps {error:.3f} K; linear interpolation has {linear:.3f} K")
    misses = np.abs(result.mean - scene.measured)[scene.gaps]
    cover = 100 * float((misses < 1.96 * result.std[scene.gaps]).mean())
    print(f"          95 % intervals cover {cover:.1f} % of the hidden measurements")
    draw_scene(scene, result, output)
    print(f"picture:  {output}")
    return 0 if error < linear else 1


def draw_scene(scene: Scene, result: Filled, output: Path) -> None:
    """Draws observations, truth, filled field and standard deviation next to each other."""
    import matplotlib

    matplotlib.use("Agg")
    from gpytorch_gaps import plot

    panels = {
        f"observed: {100 * scene.gaps.mean():.0f} % missing": scene.seen,
        "truth": scene.truth,
        "filled": result.mean,
        "standard deviation": result.std,
    }
    save_picture(plot.panels(panels, uncertain="standard deviation", cmap="RdYlBu_r"), output)


def run_methods() -> int:
    """Solves a coarse version of the scene by each method of the paper, with the same kernel, and prints a table.

    :return: the exit code: 0 if all methods converge and agree.
    """
    scene = make_scene()
    coarse = (slice(None, None, 2), slice(None, None, 2))
    seen, truth = (torch.from_numpy(np.ascontiguousarray(one[coarse])) for one in (scene.seen, scene.truth))
    offset, scale, gaps = seen.nanmean(), seen[~seen.isnan()].std(), seen.isnan()
    grid, train_x, train_y = from_array((seen - offset) / scale)
    factors = [_matern(size, 15.0) for size in seen.shape]
    index = grid.index_of(train_x)
    noise = (NOISE_KELVIN / scale).square()
    covariance = SelectedKroneckerOperator(*factors, row_index=index).add_diagonal(noise)
    cross = SelectedKroneckerOperator(*factors, col_index=index)
    size = " x ".join(map(str, seen.shape))
    print(f"{size} cells, {int(gaps.sum())} gaps; {platform.machine()}, {torch.get_num_threads()} threads")
    print(f"{'method':<18}{'iterations':>11}{'residual':>11}{'GFLOP':>9}{'seconds':>9}{'RMSE in gaps':>14}")
    means, reports = {}, {}
    for name, (method, rank) in METHODS.items():
        with (
            settings.gap_method(method),
            settings.preconditioner_rank(rank),
            settings.max_iterations(20000),
            linear_operator.settings.max_cholesky_size(0),  # show the iterative methods although the grid is small
            record_solves() as solves,
        ):
            weights = covariance.solve(train_y)
        means[name] = offset + scale * (cross @ weights).reshape(seen.shape)
        reports[name] = report = solves[-1]
        error = float((means[name] - truth)[gaps].square().mean().sqrt())
        print(
            f"{name:<18}{report.iterations:>11}{report.worst_residual:>11.1e}{report.flops / 1e9:>9.3f}"
            f"{report.seconds:>9.2f}{error:>14.4f}"
        )
    print(f"auto: {reports['auto']}")
    spread = max(float((mean - means["cholesky"]).abs().max()) for mean in means.values())
    print(f"largest difference between methods: {spread:.1e} K")
    return 0 if spread < 1e-3 and all(report.converged for report in reports.values()) else 1


def _matern(size: int, lengthscale_pixels: float) -> Tensor:
    """The covariance of a Matern-3/2 kernel along an axis of pixels. shape: (size, size)"""
    x = torch.arange(size, dtype=torch.float64)
    distance = math.sqrt(3.0) * (x.unsqueeze(-1) - x).abs() / lengthscale_pixels
    return (1 + distance) * torch.exp(-distance)
