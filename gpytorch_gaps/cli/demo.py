"""The sea as a satellite sees it: a made-up scene with clouds and dead pixels, filled, and compared with the truth."""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.interpolate import griddata

from gpytorch_gaps.cli.outputs import check_picture
from gpytorch_gaps.filling.fill import Filled, fill_gaps
from gpytorch_gaps.utils.files import atomic_write

SHAPE = (96, 144)
PIXEL = 2.5  # km
NOISE = 0.1  # K
LOST_LINES = (25, 26, 70)
_INTERVAL = 1.959963984540054


@dataclass(frozen=True, eq=False)
class Scene:
    """Temperatures in degrees Celsius: the `truth`, its `measured` values, and what was `seen` of them, NaN at gaps."""

    axes: list[np.ndarray]
    truth: np.ndarray
    measured: np.ndarray
    seen: np.ndarray

    @property
    def gaps(self) -> np.ndarray:
        return np.isnan(self.seen)


def make_scene(seed: int = 7) -> Scene:
    """Warm water in the south, a front that meanders, eddies of all sizes; clouds over a third of it."""
    generator = np.random.default_rng(seed)
    y, x = (np.arange(size) / SHAPE[0] for size in SHAPE)
    meander = 0.5 + 0.1 * np.sin(4.1 * x + 0.6) + 0.05 * np.sin(9.7 * x + 2.0)
    distance = y[:, None] - meander - 0.06 * _noise(generator, 5.0, 0.08)
    truth = 19 + 1.8 * np.tanh(distance / 0.2) + 1.2 * distance + 0.7 * _noise(generator, 5.0, 0.06)
    measured = truth + NOISE * generator.standard_normal(SHAPE)
    clouds = _noise(generator, 4.0, 0.04)
    hidden = clouds > np.quantile(clouds, 0.65)
    hidden |= generator.random(SHAPE) < 0.05  # dead pixels
    hidden[list(LOST_LINES)] = True
    return Scene([PIXEL * np.arange(size) for size in SHAPE], truth, measured, np.where(hidden, np.nan, measured))


def _noise(generator: np.random.Generator, steepness: float, largest: float) -> np.ndarray:
    """Noise of all scales below about six times `largest`, a share of the height, where its power begins to fall as
    ``k^-steepness``. Of unit variance."""
    rows, columns = (np.fft.fftfreq(2 * size, 1 / SHAPE[0]) for size in SHAPE)  # twice the size: it does not repeat
    wavenumber = np.hypot(rows[:, None], columns)
    spectrum = ((2 * np.pi * wavenumber) ** 2 + largest**-2) ** (-steepness / 4)
    white = np.fft.fft2(generator.standard_normal((2 * SHAPE[0], 2 * SHAPE[1])))
    noise = np.fft.ifft2(spectrum * white).real[: SHAPE[0], : SHAPE[1]]
    return (noise - noise.mean()) / noise.std()


def interpolated(scene: Scene) -> np.ndarray:
    """Linearly between what was seen, as most people do; beyond it, the nearest value."""
    known, wanted = np.argwhere(~scene.gaps), np.argwhere(scene.gaps)
    values = scene.seen[~scene.gaps]
    linear = griddata(known, values, wanted, method="linear")
    outside = np.isnan(linear)
    linear[outside] = griddata(known, values, wanted[outside], method="nearest")
    result = scene.seen.copy()
    result[scene.gaps] = linear
    return result


def run_demo(output: Path) -> int:
    """Fills the scene, prints what it is worth, and draws it."""
    output.parent.mkdir(parents=True, exist_ok=True)
    check_picture("output", output)
    scene = make_scene()
    share = 100 * scene.gaps.mean()
    print(f"a made-up sea of {SHAPE[0]} x {SHAPE[1]} pixels, {share:.0f} % of them under clouds or dead")
    result = fill_gaps(scene.seen, scene.axes, progress=sys.stderr.isatty())
    report = result.report
    seconds = ", ".join(f"{what} {value:.1f} s" for what, value in report.seconds.items())
    print(f"time:     {sum(report.seconds.values()):.1f} s ({seconds})")
    print(f"kernel:   {report.kernel}; noise {report.noise_std:.3f} K, where it is {NOISE} K")
    print(f"method:   {report.solve.method}, {report.solve.iterations} iterations; std {report.std_method}")
    print(f"expected: {report.expected_error}, by pixels that were withheld")
    error, linear = _rmse(result.mean, scene), _rmse(interpolated(scene), scene)
    print(f"found:    RMSE in the gaps {error:.3f} K; linear interpolation has {linear:.3f} K")
    misses = np.abs(result.mean - scene.measured)[scene.gaps]
    cover = float((misses < _INTERVAL * result.std[scene.gaps]).mean())
    print(f"          95 % intervals cover {cover:.1%} of what the clouds hide".replace("%", " %").replace("  %", " %"))
    draw_scene(scene, result, output)
    print(f"picture:  {output}")
    return 0 if error < linear else 1


def _rmse(filled: np.ndarray, scene: Scene) -> float:
    return math.sqrt(float(np.square(filled - scene.truth)[scene.gaps].mean()))


def draw_scene(scene: Scene, result: Filled, output: Path) -> None:
    """Observed, truth, filled, standard deviation."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from gpytorch_gaps import plot

    panels: dict[str, Any] = {
        f"observed: {100 * scene.gaps.mean():.0f} % missing": scene.seen,
        "truth": scene.truth,
        "filled": result.mean,
        "standard deviation": result.std,
    }
    figure = plot.panels(panels, uncertain="standard deviation", cmap="RdYlBu_r")
    kind = output.suffix.lower().removeprefix(".")
    atomic_write(output, lambda stream: figure.savefig(stream, format=kind, dpi=110))
    pyplot.close(figure)
