"""Draws the pictures of these pages: ``python -m docs.figures``, or ``python -m docs.figures gallery`` for some."""

import base64
import contextlib
import json
import math
import re
import sys
import tempfile
from pathlib import Path

import gpytorch
import matplotlib.pyplot as plt
import numpy as np
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, ScaleKernel

import gpytorch_gaps as gaps
from benchmarks._fields import cloud_gaps, membrane, random_gaps, squared_exponential

HERE = Path(__file__).parent / "images"


class Model(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood, kernel):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = kernel

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def network():
    """Twenty stations on a line, 200 days; some begin late, some fail for two months."""
    torch.manual_seed(3)
    place, day = torch.linspace(0, 1, 20).double(), torch.arange(200).double()
    truth = 12 + 6 * torch.sin(2 * math.pi * day / 120) + 3 * torch.cos(9 * place)[:, None] * torch.sin(day / 7)
    values = truth + 0.8 * torch.randn(20, 200).double()
    values[torch.rand(20, 200) < 0.1] = torch.nan
    values[4:7, :90] = torch.nan
    for station, (start, stop) in zip(range(6, 15), torch.randint(0, 12, (9, 2)).tolist(), strict=True):
        values[station, 70 + start : 130 - stop] = torch.nan
    values[10, 65:135] = torch.nan
    return place, day, values, truth


def posterior() -> None:
    place, day, values, truth = network()
    grid, x, y = gaps.from_array(values, [place, day])
    space, time = RBFKernel(), MaternKernel()
    space.lengthscale, time.lengthscale = 0.2, 15.0
    model = Model(x, y, gaps.GappyGridLikelihood(), ScaleKernel(gaps.GappyGridKernel([space, time], grid))).double()
    model.covar_module.outputscale, model.mean_module.constant.data = 30.0, torch.tensor(12.0).double()
    gaps.fit(model, steps=150, progress=False)
    station, ahead = 10, torch.arange(260).double()
    line = gaps.CartesianGrid([place[station : station + 1], ahead])
    with torch.no_grad():
        there = model(line.points())
        mean, deviation = there.mean, there.stddev
        draws = gaps.sample_posterior(model, line, 12, seed=1).squeeze(1)
        later = gaps.CartesianGrid([place, ahead]).points()
        exact = model(later).variance
        with gaps.settings.variance_method("pathwise"), gaps.record_solves() as solves:
            sampled = model(later).variance
    error = solves.variances[-1].error
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4.2), width_ratios=(2, 1), layout="constrained")
    left.plot(ahead, draws.T, color="tab:blue", alpha=0.35, lw=0.8)
    left.fill_between(ahead, mean - 2 * deviation, mean + 2 * deviation, color="tab:blue", alpha=0.15, lw=0)
    left.plot(ahead, mean, color="tab:blue", lw=2, label="posterior mean, ± 2 sd, draws")
    left.plot(day, truth[station], "k--", lw=1, label="truth")
    left.plot(day, values[station], ".", color="k", ms=4, label="observations of this station")
    left.axvline(day[-1], color="gray", lw=0.8)
    left.set(xlabel="day", ylabel="degrees", title="One of twenty stations: a failure of two months, and a forecast")
    left.legend(loc="lower left", fontsize=8)
    order = exact.argsort()[:: len(exact) // 120]
    ends = torch.stack([sampled - error, sampled + error]).clamp_min(1e-3)[:, order]
    right.vlines(exact[order], *ends, color="tab:orange", alpha=0.6, lw=1)
    right.plot(exact[order], sampled[order], ".", color="tab:orange", ms=3, label="64 samples, with stated error")
    bounds = [float(exact.min()), float(exact.max())]
    right.plot(bounds, bounds, "k", lw=1)
    right.set(xscale="log", yscale="log", xlabel="exact variance", ylabel="pathwise variance")
    right.set_title("Variances from samples")
    right.legend(loc="upper left", fontsize=8)
    figure.savefig(HERE / "posterior.png", dpi=110)


def membrane_video() -> None:
    """A frame of a vibrating membrane, behind noise and behind clouds, and what is reconstructed of it."""
    shape, noise = (480, 640, 41), 1e-4
    field = membrane(shape, modes=18, duration=0.6).slab(0, shape[0])
    kernels = [squared_exponential(size, 0.12) for size in shape]
    figure, axes = plt.subplots(2, 3, figsize=(12, 6.2), layout="constrained", sharex=True, sharey=True)
    gappy = [
        (random_gaps(shape, 0.9, seed=1), "90 % of pixels lost"),
        (cloud_gaps(shape, 0.5, seed=3), "half in clouds"),
    ]
    for row, (gaps_of, what) in zip(axes, gappy, strict=True):
        values = field + noise**0.5 * np.random.default_rng(0).standard_normal(shape)
        values[~gaps_of.slab(0, shape[0])] = np.nan
        result = gaps.reconstruct(values, None, kernels, noise, progress=False)
        mean, frame, limit = result.slab(0, shape[0]).numpy(), shape[-1] // 2, 2.5
        print(result.report)
        for axis, picture, title in zip(
            row,
            (values[..., frame], mean[..., frame], 10.0 * (mean - field)[..., frame]),
            (f"One frame of {shape[-1]}: {what}", "reconstruction", "error, ten times enlarged"),
            strict=True,
        ):
            image = axis.imshow(picture, cmap="coolwarm", vmin=-limit, vmax=limit, interpolation="nearest")
            axis.set(title=title, xticks=[], yticks=[])
        figure.colorbar(image, ax=row, shrink=0.8)
    figure.savefig(HERE / "membrane.png", dpi=100)


def neighbours() -> None:
    """The coarse-to-fine order of the cells around a hole, and the neighbours of two of them."""
    rows, columns = 45, 60
    x, y = torch.linspace(0, 1, rows).double(), torch.linspace(0, 4 / 3, columns).double()
    hole = (x[:, None] - 0.5) ** 2 + (y - 0.72) ** 2 < 0.085
    index = (~hole).flatten().nonzero().squeeze(-1)
    factors = [torch.exp(-(axis[:, None] - axis).abs() / 0.3) for axis in (x, y)]
    lists = gaps.preconditioners.neighbour_lists(factors, index, 20)
    row, column = index // columns, index % columns
    figure, panels = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained", sharex=True, sharey=True)
    order = torch.full((rows, columns), torch.nan)
    order[row, column] = 1.0 + lists.rank.float()
    image = panels[0].imshow(order.log2(), cmap="viridis_r", interpolation="nearest")
    bar = figure.colorbar(image, ax=panels[0], shrink=0.8, ticks=[0, 3, 6, 9])
    bar.ax.set_yticklabels(["1", "8", "64", "512"])
    panels[0].set_title("the order, coarse to fine")
    at_hole = (row - 22).abs() + (column - 16).abs()  # left of the hole
    for panel, when in zip(panels[1:], (150, len(index) - 1), strict=True):
        late = (lists.rank - when).abs() <= max(40, when // 8)
        cell = int(torch.where(late, at_hole, rows * columns).argmin())
        earlier = lists.rank < lists.rank[cell]
        own = lists.rows[cell][lists.rows[cell] >= 0]
        panel.imshow(torch.where(hole, 0.75, 1.0), cmap="gray", vmin=0, vmax=1)
        panel.plot(column[earlier], row[earlier], ".", color="0.75", ms=3, label="earlier cells")
        panel.plot(column[own], row[own], "o", color="tab:blue", ms=4, label="its 20 neighbours")
        panel.plot(column[cell], row[cell], "*", color="tab:red", ms=10, label=f"cell {int(lists.rank[cell]) + 1}")
        panel.set_title(f"cell {int(lists.rank[cell]) + 1} of {len(index)}")
        panel.legend(loc="upper right", fontsize=7)
    for panel in panels:
        panel.set(xticks=[], yticks=[])
    figure.savefig(HERE / "neighbours.png", dpi=110)


def notebooks() -> None:
    """Pictures of notebooks, as they are stored: a lake in colour, stations, counts of birds."""
    for name, (notebook, sign) in {
        "quickstart_picture": ("quickstart", "imshow(values"),
        "quickstart_series": ("quickstart", "for axes, name in zip(panels"),
        "counts": ("counts_and_outliers", "def rate_at(quantile)"),
    }.items():
        cells = json.loads((HERE.parents[1] / "notebooks" / f"{notebook}.ipynb").read_text())["cells"]
        (cell,) = (cell for cell in cells if sign in "".join(cell["source"]))
        (image,) = (output["data"]["image/png"] for output in cell["outputs"] if "image/png" in output.get("data", {}))
        (HERE / f"{name}.png").write_bytes(base64.b64decode(image))


def gallery() -> None:
    """The pictures of the gallery, each drawn by the code above it on the page."""
    page = (HERE.parent / "gallery.md").read_text()
    names: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for code, picture in re.findall(
            r"^```python\n(.*?)^```$|\((images/gallery_\w+\.png)\)", page, re.DOTALL | re.MULTILINE
        ):
            if code:
                exec(compile(code, "gallery.md", "exec"), names)
            else:
                names["figure"].savefig(HERE.parent / picture, dpi=80)


if __name__ == "__main__":
    drawings = {one.__name__: one for one in (notebooks, posterior, membrane_video, neighbours, gallery)}
    for name in sys.argv[1:] or drawings:
        drawings[name]()
