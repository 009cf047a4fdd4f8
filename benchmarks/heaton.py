"""Surface temperatures of a satellite, and a simulated field, beside the published comparison of methods on them.

    GPYTORCH_GAPS_DATA=... python -m benchmarks.heaton --output results/heaton

Heaton et al. (2019), "A Case Study Competition Among Methods for Analyzing Large Spatial Data", JABES 24:398-425, asked
twelve groups for predictions of 300 x 500 cells with gaps in the shape of clouds. The data here do not include their
test cells. Instead, the clouds are moved by 60 and 110 cells, and the observations that they then cover are withheld:
33,330 of 105,569. Published figures are for other cells, from more data, on the machine of the comparison.

``own``: an ``ExactGP`` with an exponential kernel of the distance in the plane, trained by ``fit``: Adam, then L-BFGS
until it has converged. For the satellite, there is one length-scale per axis. ``fill``: ``fill_gaps`` with no options.
The simulated field was drawn from an exponential covariance ``v exp(-d / r)`` of the distance in degrees, plus a
nugget. Its parameters are printed beside the learned ones. The data determine hardly more of variance and range than
their ratio: for the true ``v / r``, ranges from 0.7 to 8 degrees have log-likelihoods within 3 nats.
"""

import argparse
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpytorch.kernels import MaternKernel, ScaleKernel

import gpytorch_gaps as gaps
from benchmarks._block_models import BlockModel, Stages, measurements_at, peak_gib
from benchmarks._machine import machine_facts
from benchmarks._results import described, markdown_table, write_results
from benchmarks.datasets import load_field
from gpytorch_gaps.posterior.scoring import score_errors

FIELDS = ("satellite", "simulated")
METHODS = ("own", "fill")
MOVED = (60, 110)  # cells by which the clouds are moved
DRAWN_WITH = {"variance": 16.40771, "range": 1 / 0.75, "nugget": 0.05}
"""The simulated field was drawn from ``RMmatern(nu=0.5, scale=1/0.75, var=16.40771) + RMnugget(var=0.05)``, with mean
44.49105: ``Code/FormatData/FormatData.R`` of GitHub finnlindgren/heatoncomparison."""
PUBLISHED: dict[str, dict[str, float]] = {
    "satellite": {"SPDE": 1.53, "NNGP": 1.64, "LatticeKrig": 1.68},
    "simulated": {},
}
"""RMSE on the published test cells, which are others."""
_START = {"noise": 0.002, "length": 0.5}  # of values of variance one


@dataclass(frozen=True, eq=False)
class Result:
    """Predictions of measurements in all cells, and how they were made."""

    mean: np.ndarray
    std: np.ndarray
    stages: Stages
    learned: dict[str, Any] | None
    notes: list[str]


def split(values: np.ndarray, moved: tuple[int, int] = MOVED) -> tuple[np.ndarray, np.ndarray]:
    """Values with the cells under moved clouds withheld, and flags of these."""
    known = np.isfinite(values)
    withheld = known & np.roll(~known, moved, (0, 1))
    return np.where(withheld, np.nan, values), withheld


def scored(truth: np.ndarray, mean: np.ndarray, deviation: np.ndarray) -> dict[str, float]:
    """Scores of normal predictions of measurements."""
    return score_errors(torch.from_numpy(truth - mean), torch.from_numpy(deviation)).as_dict()


# -- methods -----------------------------------------------------------------------------------------------------------


def exponential(values: np.ndarray, axes: Sequence[np.ndarray], ard: bool) -> tuple[BlockModel, gaps.CartesianGrid]:
    """A model of values of mean zero and variance one, before it is trained."""
    grid, x, y = gaps.from_array(torch.from_numpy(values), [torch.from_numpy(axis) for axis in axes])
    kernel = MaternKernel(nu=0.5, ard_num_dims=2 if ard else None)
    model = BlockModel(x, y, ScaleKernel(gaps.GappyGridKernel([kernel], grid, blocks=[(0, 1)])), _START["noise"])
    kernel.lengthscale = _START["length"]
    model.covar_module.outputscale = 1.0
    return model, grid


def by_own_model(values: np.ndarray, axes: Sequence[np.ndarray], ard: bool, options: argparse.Namespace) -> Result:
    """An ``ExactGP``, trained and asked for all cells."""
    centre, scale = float(np.nanmean(values)), float(np.nanstd(values))
    stages = Stages()
    torch.manual_seed(0)
    with warnings.catch_warnings(), gaps.settings.mixed_precision(options.mixed), gaps.settings.progress(False):
        warnings.simplefilter("ignore", gaps.ApproximateVarianceWarning)  # that is what is asked for
        model, grid = exponential((values - centre) / scale, axes, ard)
        with stages.stage("training"):
            history = gaps.fit(model, options.steps, lr=options.lr, warm_start=options.warm, progress=False)
        with stages.stage("mean and standard deviations"), gaps.settings.variance_method("pathwise"):
            mean, variance = measurements_at(model, grid.points())
    kernel = model.covar_module
    learned = {
        "variance": scale**2 * kernel.outputscale.item(),
        "range": kernel.base_kernel.kernels[0].lengthscale.flatten().tolist(),
        "nugget": scale**2 * model.likelihood.noise.item(),
        "mean": centre + scale * model.mean_module.constant.item(),
    }
    notes = [str(history), *stages.solves.values()]
    means = (centre + scale * mean).reshape(values.shape).numpy()
    return Result(means, (scale * variance.sqrt()).reshape(values.shape).numpy(), stages, learned, notes)


def by_fill_gaps(values: np.ndarray, axes: Sequence[np.ndarray]) -> Result:
    stages = Stages()
    with stages.stage("all"):
        filled = gaps.fill_gaps(values, axes, progress=False)
    report = filled.report
    notes = [f"kernel: {report.kernel}", report.expected_error, *report.notes, *stages.solves.values()]
    notes.append(", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in report.seconds.items()))
    return Result(filled.mean, filled.std, stages, None, notes)


# -- tables ------------------------------------------------------------------------------------------------------------


def row_of(name: str, scores: dict[str, float], seconds: float) -> list[str]:
    texts = [f"{scores[key]:.3f}" for key in ("mae", "rmse", "crps", "interval")]
    return [name, *texts, f"{scores['coverage']:.3f}", f"{seconds:.0f}", f"{scores['count']:.0f} here"]


def score_table(field: str, rows: Sequence[Sequence[str]]) -> str:
    """Measured rows, then the published ones."""
    published = [[name, "", f"{rmse:.2f}", "", "", "", "", "others"] for name, rmse in PUBLISHED[field].items()]
    head = ["", "MAE", "RMSE", "CRPS", "interval score", "coverage of 95 %", "seconds", "cells"]
    return markdown_table(head, [*rows, *published])


def parameter_table(learned: dict[str, Any]) -> str:
    """Learned parameters and those of the simulation. The data determine variance over range best."""
    found = {"variance": learned["variance"], "range": float(np.mean(learned["range"])), "nugget": learned["nugget"]}
    ratio = "variance / range"
    found[ratio] = found["variance"] / found["range"]
    drawn = {**DRAWN_WITH, ratio: DRAWN_WITH["variance"] / DRAWN_WITH["range"]}
    lines = [
        [name, f"{found[name]:.4g}", f"{drawn[name]:.4g}", f"{100 * (found[name] / drawn[name] - 1):+.1f} %"]
        for name in found
    ]
    return markdown_table(["", "learned", "drawn with", "difference"], lines)


# -- command -----------------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--fields", nargs="+", choices=FIELDS, default=FIELDS)
    made.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    made.add_argument("--every", type=int, default=1, help="keep every n-th cell of both axes")
    made.add_argument("--steps", type=int, default=100, help="largest number of training steps of the own model")
    made.add_argument("--lr", type=float, default=0.1)
    made.add_argument("--warm", action=argparse.BooleanOptionalAction, default=True, help="start from the last step")
    made.add_argument("--mixed", action=argparse.BooleanOptionalAction, default=True, help="iterate in float32")
    made.add_argument("--output", type=Path, default=Path("results/heaton"), metavar="DIR")
    return made


def run_field(field: str, options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows and texts of one field."""
    arrays, every = load_field("modis_lst"), slice(None, None, options.every)
    truth = arrays[field].astype(np.float64)[every, every]
    axes = [arrays[name].astype(np.float64)[every] for name in ("lat", "lon")]
    values, withheld = split(truth, (MOVED[0] // options.every, MOVED[1] // options.every))
    rows: list[dict[str, Any]] = []
    lines: list[list[str]] = []
    texts: list[str] = []
    for method in options.methods:
        if method == "own":
            found = by_own_model(values, axes, field == "satellite", options)
        else:
            found = by_fill_gaps(values, axes)
        scores = scored(truth[withheld], found.mean[withheld], found.std[withheld])
        name = {"own": "`ExactGP`, exponential kernel", "fill": "`fill_gaps`"}[method]
        lines.append(row_of(name, scores, found.stages.seconds))
        own = [f"{name}:", found.stages.table(), "\n".join(f"- {note}" for note in found.notes)]
        if found.learned is not None:
            own.append(described(found.learned))
            own += [parameter_table(found.learned)] if field == "simulated" else []
        print("\n\n".join(["", *own]), flush=True)
        texts += own
        rows.append({"method": method, **scores, **found.stages.facts(), "learned": found.learned, "gib": peak_gib()})
    return rows, [score_table(field, lines), *texts]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    facts = machine_facts()
    print(described(facts), flush=True)
    content: dict[str, Any] = {"machine": facts}
    texts = [described(facts)]
    for field in options.fields:
        content[field], part = run_field(field, options)
        texts += [f"## {field}", *part]
        print(f"\n## {field}\n\n{part[0]}", flush=True)
        write_results(options.output, "heaton", content, texts)


if __name__ == "__main__":
    main()
