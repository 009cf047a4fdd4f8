"""How will training runs end? ``GappyGridModel`` and BoTorch's ``LatentKroneckerGP`` on learning curves of LCBench.

    GPYTORCH_GAPS_DATA=... python -m benchmarks.lcbench --curves 200

Every curve is cut at a random epoch, from a tenth of its length on. Both have the same model and predict the accuracy
at the last epoch of the runs that were stopped. Both are trained by ``fit_gpytorch_mll``: GappyGridModel for some
steps, LatentKroneckerGP, which iterates to its default tolerance, until its optimizer stops. The likelihoods of the
hyperparameters that they found are computed exactly. Needs ``pip install 'gpytorch-gaps[botorch]'``.
"""

import argparse
import json
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpytorch.kernels import MaternKernel, ScaleKernel
from gpytorch.means import ZeroMean
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

import gpytorch_gaps as gaps
from benchmarks._fill_data import problem
from benchmarks._machine import machine_facts
from benchmarks._results import described, markdown_table, number
from gpytorch_gaps.posterior.scoring import score_errors

TASKS = ("adult", "higgs", "Fashion-MNIST")
OURS, THEIRS = "GappyGridModel", "LatentKroneckerGP"
COLUMNS = {
    "task": ("task", ""),
    "model": ("model", ""),
    "likelihood": ("log-likelihood per observation", ".3f"),
    "rmse": ("RMSE", ".4f"),
    "log_score": ("log score", ".3f"),
    "coverage": ("covered", ".1%"),
    "cpu_seconds": ("training, CPU s", ".1f"),
}
_SHORTEST = 0.1  # share of its epochs that every curve keeps


@dataclass(frozen=True, eq=False)
class Curves:
    """Accuracies of configurations at epochs, and which of them are seen.

    :param configurations: shape (n, d).
    :param epochs: shape (t,), from 0 to 1.
    :param values: shape (n, t).
    :param seen: flags of the values that models are given, shape (n, t).
    """

    configurations: Tensor
    epochs: Tensor
    values: Tensor
    seen: Tensor

    @property
    def stopped(self) -> Tensor:
        return ~self.seen[:, -1]

    @property
    def ends(self) -> Tensor:
        return self.values[self.stopped, -1]


def cut(configurations: Tensor, values: Tensor, seed: int) -> Curves:
    """Curves that stop at random epochs."""
    count, epochs = values.shape
    shortest = max(1, round(_SHORTEST * epochs))
    kept = torch.as_tensor(np.random.default_rng(seed).integers(shortest, epochs + 1, count))
    axis = torch.linspace(0, 1, epochs, dtype=torch.float64)
    return Curves(configurations, axis, values, torch.arange(epochs) < kept[:, None])


def load(task: str, count: int, seed: int) -> Curves:
    given = problem(f"lcbench_{task}")
    configurations = torch.as_tensor(given.coordinates["configuration"][:count])
    return cut(configurations, torch.as_tensor(given.values[:count]), seed)


def gappy_model(curves: Curves) -> Any:
    """The model of LatentKroneckerGP, with its defaults, as a GappyGridModel."""
    from gpytorch_gaps.botorch import GappyGridModel

    gappy = torch.where(curves.seen, curves.values, torch.nan)
    _, train_x, train_y = gaps.from_array(gappy, [curves.configurations, curves.epochs])
    width = curves.configurations.size(-1)
    return GappyGridModel(
        train_x,
        train_y.unsqueeze(-1),
        groups=[[*range(width)], [width]],
        kernels=[MaternKernel(ard_num_dims=width), ScaleKernel(MaternKernel())],
        mean_module=ZeroMean(),
        likelihood=gaps.GappyGridLikelihood(),
    )


def likelihood_of(model: Any) -> float:
    """The exact log marginal likelihood for each observation, in standardized units."""
    model.train()
    with torch.no_grad(), gaps.settings.logdet_method("exact"), gaps.settings.gap_method("cholesky"):
        value = ExactMarginalLogLikelihood(model.likelihood, model)(model(*model.train_inputs), model.train_targets)
    model.eval()
    return float(value)


def ours(curves: Curves, steps: int, lr: float) -> dict[str, Any]:
    from botorch.fit import fit_gpytorch_mll

    model = gappy_model(curves)
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    trained = timed(lambda: fit_gpytorch_mll(mll, optimizer_kwargs={"steps": steps, "lr": lr}))
    last = curves.epochs[-1:].expand(int(curves.stopped.sum()), 1)
    with torch.no_grad():
        found = model.posterior(torch.cat([curves.configurations[curves.stopped], last], -1), observation_noise=True)
        scores = scored(curves, found.mean.squeeze(-1), found.variance.squeeze(-1))
    return {"model": OURS, **trained, **scores, "likelihood": likelihood_of(model), "history": model.history.loss}


def theirs(curves: Curves) -> dict[str, Any]:
    """As :func:`ours`, by LatentKroneckerGP. Its moments are in standardized units, and are converted here."""
    from botorch.fit import fit_gpytorch_mll
    from botorch.models.latent_kronecker_gp import LatentKroneckerGP

    gappy = torch.where(curves.seen, curves.values, torch.nan)
    model = LatentKroneckerGP(curves.configurations, curves.epochs.unsqueeze(-1), gappy)
    mll = ExactMarginalLogLikelihood(model.likelihood, model)
    units = model.outcome_transform
    with model.use_iterative_methods():
        trained = timed(lambda: fit_gpytorch_mll(mll))
        with torch.no_grad():
            found = model.posterior(curves.configurations[curves.stopped], curves.epochs[-1:].unsqueeze(-1))
            variance = (found.variance.flatten() + model.likelihood.noise) * units.stdvs.squeeze() ** 2
            mean = found.mean.flatten() * units.stdvs.squeeze() + units.means.squeeze()
    same = gappy_model(curves)  # to evaluate their hyperparameters exactly
    same.likelihood.noise = model.likelihood.noise.detach()
    for kernel, other in zip(same.covar_module.kernels, (model.covar_module_X, model.covar_module_T), strict=True):
        kernel.load_state_dict(other.state_dict())
    return {"model": THEIRS, **trained, **scored(curves, mean, variance), "likelihood": likelihood_of(same)}


def timed(train: Callable[[], Any]) -> dict[str, float]:
    torch.manual_seed(0)
    started, cpu = time.perf_counter(), time.process_time()
    train()
    return {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - cpu}


def scored(curves: Curves, mean: Tensor, variance: Tensor) -> dict[str, float]:
    """Errors of the predicted ends, and their mean log density."""
    error = curves.ends - mean
    score = score_errors(error, variance.sqrt())
    log_score = -0.5 * (torch.log(2 * torch.pi * variance) + error**2 / variance).mean()
    return {"rmse": score.rmse, "coverage": score.coverage, "log_score": float(log_score)}


def compare(curves: Curves, steps: int, lr: float) -> list[dict[str, Any]]:
    """A row for each model. Ours has the share of its training after which its likelihood reached that of theirs."""
    first, second = ours(curves, steps, lr), theirs(curves)
    losses = first.pop("history")
    reached = [step for step, loss in enumerate(losses, 1) if -loss >= second["likelihood"]]
    first["reached_after"] = first["cpu_seconds"] * reached[0] / len(losses) if reached else None
    return [first, second]


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--curves", type=int, default=200)
    parser.add_argument("--steps", type=int, default=40, help="steps of Adam for GappyGridModel")
    parser.add_argument("--lr", type=float, default=0.3, help="learning rate of Adam")
    parser.add_argument("--seed", type=int, default=0, help="seed of the epochs at which curves are cut")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    facts = machine_facts()
    print(described(facts), flush=True)
    rows = []
    for task in options.tasks:
        curves = load(task, options.curves, options.seed)
        print(f"\n{task}: {int(curves.seen.sum()):,} observations, {int(curves.stopped.sum())} ends", flush=True)
        rows += (added := [{"task": task, **row} for row in compare(curves, options.steps, options.lr)])
        lines = [[format(row[key], how) for key, (_, how) in COLUMNS.items()] for row in added]
        print(markdown_table([name for name, _ in COLUMNS.values()], lines))
        print(f"{OURS} had their likelihood after {number(added[0]['reached_after'], '.1f')} CPU s", flush=True)
        if options.json is not None:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps({"machine": facts, "rows": rows}, indent=1) + "\n")
    return rows


if __name__ == "__main__":
    main()
