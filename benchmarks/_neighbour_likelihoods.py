"""Log-likelihoods by eigenvectors and by neighbours: the spread of estimates, and the cost of a value and its gradient.

GPBoost (Sigrist 2022) computes the likelihood of Vecchia's approximation itself, which is biased. Here the same sparse
factor is only a preconditioner. In two dimensions, the squared exponential is the only kernel that both packages have,
because it is a product over axes and also a function of the distance. Matern kernels of GPBoost are functions of the
distance, ours are products over axes. Each package is timed, and compared with dense algebra, with its own kernel.
"""

import importlib
import logging
import math
import statistics
import time
import warnings
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor
from tqdm.auto import tqdm

import gpytorch_gaps as gaps
from benchmarks._neighbour_problems import KERNELS, Problem, axis_kernel, labelled
from benchmarks._results import markdown_table
from gpytorch_gaps.linalg.selection import unravel

Part = tuple[list[dict[str, Any]], list[str]]


class Value(NamedTuple):
    """A log-likelihood with its gradient, by raw hyperparameter; what it states of its error, and took."""

    value: float
    gradient: Tensor
    stated: float
    value_seconds: float
    seconds: float
    how: str


def log_likelihood(problem: Problem, values: Tensor, preconditioner: str) -> Value:
    """A cold estimate. Nothing is kept from earlier ones."""
    model = problem.model(values)
    objective = ExactMarginalLogLikelihood(model.likelihood, model)
    with (
        warnings.catch_warnings(),
        gaps.settings.progress(False),
        gaps.settings.preconditioner(preconditioner),
        gaps.settings.logdet_method("stochastic"),
        gaps.settings.dense_size(0),
        gaps.record_solves() as solves,
    ):
        warnings.simplefilter("ignore", gaps.NotConvergedWarning)  # the table says so
        started = time.process_time()
        value = objective(model(*model.train_inputs), model.train_targets) * len(model.train_targets)
        value_seconds = time.process_time() - started
        value.backward()
        seconds = time.process_time() - started
    error, solve = solves.logdets[-1].standard_error, solves[-1]
    kind = f"{solve.num_neighbours} neighbours" if solve.num_neighbours else f"{solve.method}, rank {solve.rank}"
    state = "" if all(report.converged for report in solves) else ", not converged"
    return Value(
        float(value.detach()),
        gradient_of(model),
        math.nan if error is None else 0.5 * float(error),
        value_seconds,
        seconds,
        f"{kind}, {solve.iterations} iterations{state}; {solves.logdets[-1].reason}",
    )


def gradient_of(model: torch.nn.Module) -> Tensor:
    """The gradient with respect to all raw hyperparameters. shape: (parameters,)"""
    return torch.stack([own.grad.sum() for own in model.parameters() if own.grad is not None])


def dense_log_likelihood(problem: Problem, values: Tensor) -> tuple[float, Tensor]:
    """The value and the gradient by dense algebra."""
    model = problem.model(values)
    covariance = model.covar_module(*model.train_inputs).to_dense()
    covariance = covariance + model.likelihood.noise * torch.eye(len(covariance), dtype=torch.float64)
    value = gaussian_log_density(covariance, model.train_targets)
    value.backward()
    return float(value.detach()), gradient_of(model)


def gaussian_log_density(covariance: Tensor, y: Tensor) -> Tensor:
    root = torch.linalg.cholesky(covariance)
    white = torch.linalg.solve_triangular(root, y.unsqueeze(-1), upper=False)
    return -0.5 * white.square().sum() - root.diagonal().log().sum() - 0.5 * len(y) * math.log(2 * math.pi)


# -- what estimates scatter by -----------------------------------------------------------------------------------------


def likelihood_part(shape: tuple[int, int], seeds: int) -> Part:
    """Mean error and standard deviation over seeds, eigenvectors beside neighbours, against dense algebra."""
    rows: list[dict[str, Any]] = []
    cases = [(kernel, noise) for kernel in ("Matern-1/2", "Matern-3/2", "Matern-5/2") for noise in (1e-2, 1e-4)]
    for kernel, noise in tqdm(cases, unit="kernel", dynamic_ncols=True):
        problem = Problem(shape, "clouds", kernel, 0.03, noise)
        values = problem.draw()
        truth, slope = dense_log_likelihood(problem, values)
        for name in ("eigen", "neighbours"):
            found = []
            for seed in range(seeds):
                torch.manual_seed(seed)
                found.append(log_likelihood(problem, values, name))
            rows.append({"kernel": kernel, "noise": noise, "preconditioner": name, **_scatter(found, truth, slope)})
    lines = []
    for eigen, neighbours in zip(rows[::2], rows[1::2], strict=True):
        for row in (eigen, neighbours):
            lines.append(_scatter_line(row, eigen))
    head = ["kernel, noise", "preconditioner", "bias, in standard errors", "deviation", "stated", "rms z-score"]
    head += ["gradient: largest bias, in standard errors", "deviation, relative", "less deviation: value, gradient"]
    observations = len(Problem(shape, "clouds", "Matern-1/2", 0.03, 1.0).index())
    title = f"{labelled(shape)}, clouds, {observations} observations, length-scale 0.03, in nats; {seeds} seeds"
    return rows, [title, markdown_table(head, lines)]


def _scatter(found: list[Value], truth: float, slope: Tensor) -> dict[str, Any]:
    errors = torch.tensor([own.value - truth for own in found], dtype=torch.float64)
    slopes = torch.stack([own.gradient - slope for own in found])
    count = math.sqrt(len(found))
    stated = torch.tensor([own.stated for own in found], dtype=torch.float64)
    return {
        "truth": truth,
        "bias": float(errors.mean()),
        "deviation": float(errors.std()),
        "bias_in_errors": float(errors.mean() / errors.std() * count),
        "stated": float(stated.mean()),
        "z_score": float((errors / stated).square().mean().sqrt()),
        "gradient_bias_in_errors": float((slopes.mean(0) / slopes.std(0) * count).abs().max()),
        "gradient_deviation": float(slopes.std(0).norm() / slope.norm()),
        "how": found[-1].how,
    }


def _scatter_line(row: dict[str, Any], eigen: dict[str, Any]) -> list[str]:
    gain = ""
    if row is not eigen:
        ratios = [eigen[key] / row[key] if row[key] else math.inf for key in ("deviation", "gradient_deviation")]
        gain = ", ".join(f"{ratio:.1f} x" for ratio in ratios)
    return [
        f"{row['kernel']}, {row['noise']:g}",
        row["preconditioner"],
        f"{row['bias_in_errors']:.1f}",
        f"{row['deviation']:.2f}",
        f"{row['stated']:.2f}",
        f"{row['z_score']:.2f}",
        f"{row['gradient_bias_in_errors']:.1f}",
        f"{row['gradient_deviation']:.1e}",
        gain,
    ]


# -- a step of training ------------------------------------------------------------------------------------------------

TRAINED = ("Matern-3/2", "Matern-3/2 + long squared-exponential")


def training_part(shape: tuple[int, int], lengths: Sequence[float], noise: Sequence[float], repeats: int) -> Part:
    """A cold value and gradient of two models, by eigenvectors and by the automatic choice, in turn."""
    rows: list[dict[str, Any]] = []
    lines = []
    cases = list(product(TRAINED, lengths, noise))
    for kernel, length, level in tqdm(cases, unit="model", dynamic_ncols=True):
        problem = Problem(shape, "clouds", kernel, length, level)
        values = problem.draw()
        found: dict[str, list[Value]] = {"eigen": [], "auto": []}
        for seed, name in product(range(repeats), found):
            torch.manual_seed(seed)
            found[name].append(log_likelihood(problem, values, name))
        for name, own in found.items():
            facts = [value._asdict() | {"gradient": value.gradient.tolist()} for value in own]
            what = {"kernel": kernel, "length": length, "noise": level, "preconditioner": name}
            rows += [what | {"seed": seed} | fact for seed, fact in enumerate(facts)]
            lines.append(_training_line(f"{kernel}, {length:g}, {level:g}", name, found))
    observations = len(Problem(shape, "clouds", TRAINED[0], 0.1, 1.0).index())
    title = f"{labelled(shape)}, clouds, {observations} observations: a cold value and gradient (the best of {repeats})"
    head = ["model, length-scale, noise", "preconditioner", "CPU seconds", "times faster", "stated error, nats", "how"]
    return rows, [title, markdown_table(head, lines)]


def _training_line(title: str, name: str, found: dict[str, list[Value]]) -> list[str]:
    best = {key: min(values, key=lambda value: value.seconds) for key, values in found.items()}
    times = "" if name == "eigen" else f"{best['eigen'].seconds / best[name].seconds:.1f}"
    stated = statistics.mean(value.stated for value in found[name])
    return [title, f"`{name}`", f"{best[name].seconds:.1f}", times, f"{stated:.1f}", best[name].how]


# -- GPBoost -----------------------------------------------------------------------------------------------------------

NEIGHBOURS = 20
LENGTH, NOISE = 0.1, 1e-2
_THEIR_KERNELS: dict[str, tuple[str, float, float]] = {  # name, shape, and its range in units of our length-scale
    "squared-exponential": ("gaussian", 0.0, math.sqrt(2.0)),
    "Matern-3/2": ("matern", 1.5, 1.0),
    "Matern-1/2": ("matern", 0.5, 1.0),
}


def gpboost_part(dense_shape: tuple[int, int], large_shape: tuple[int, int]) -> Part:
    """Errors against dense algebra, and seconds of a value and of a gradient, one thread."""
    try:
        boost = importlib.import_module("gpboost")
    except ImportError as error:
        return [], [f"GPBoost is not installed ({error}): `pip install '.[peers]'` brings it. This part was skipped."]
    boost.register_logger(logging.getLogger("gpboost"))  # it warns that one iteration is not enough to converge
    logging.getLogger("gpboost").setLevel(logging.ERROR)
    rows: list[dict[str, Any]] = []
    for kernel in _THEIR_KERNELS:
        for shape, is_dense in ((dense_shape, True), (large_shape, False)):
            problem = Problem(shape, "clouds", kernel, LENGTH, NOISE)
            rows.append({"package": "gpytorch_gaps", **_our_row(problem, is_dense)})
            rows.append({"package": "GPBoost", **_their_row(boost, problem, is_dense)})
    lines = [
        [
            row["kernel"],
            str(row["observations"]),
            row["package"],
            "" if row["truth"] is None else f"{row['value'] - row['truth']:+.2f}",
            row["stated"],
            f"{row['value_seconds']:.2f}",
            f"{row['seconds']:.2f}",
        ]
        for row in rows
    ]
    head = [
        "kernel",
        "N",
        "",
        "error of the log-likelihood, nats",
        "stated",
        "CPU seconds: value",
        "value and gradient",
    ]
    title = (
        f"Clouds, length-scale {LENGTH:g}, noise {NOISE:g}, one thread; GPBoost {boost.__version__} with {NEIGHBOURS} "
        "neighbours in a random order. Seconds include finding neighbours. GPBoost has no function for a gradient: its "
        "last column is the value and one short iteration of its gradient descent. The squared exponential is the same "
        "kernel in both; Matern kernels are of the distance in GPBoost, products over axes here."
    )
    return rows, [title, markdown_table(head, lines)]


def _our_row(problem: Problem, is_dense: bool) -> dict[str, Any]:
    values = problem.draw()
    torch.manual_seed(0)
    own = log_likelihood(problem, values, "auto")
    truth = dense_log_likelihood(problem, values)[0] if is_dense else None
    facts = {"value": own.value, "value_seconds": own.value_seconds, "seconds": own.seconds, "how": own.how}
    return (
        {"kernel": problem.kernel, "observations": len(problem.index()), "truth": truth}
        | facts
        | {"stated": f"± {own.stated:.2g}"}
    )


def _their_row(boost: Any, problem: Problem, is_dense: bool) -> dict[str, Any]:
    """GPBoost on the same data, with its own kernel."""
    name, smoothness, times = _THEIR_KERNELS[problem.kernel]
    levels = unravel(problem.index(), problem.shape)
    points = torch.stack([axis[level] for axis, level in zip(problem.axes(), levels, strict=True)], -1)
    y = problem.draw().flatten()[problem.index()]
    parameters = torch.tensor([NOISE, 1.0, times * LENGTH], dtype=torch.float64).numpy()
    started = time.process_time()
    model = boost.GPModel(
        gp_coords=points.numpy(),
        cov_function=name,
        cov_fct_shape=smoothness,
        gp_approx="vecchia",
        num_neighbors=NEIGHBOURS,
        likelihood="gaussian",
        num_parallel_threads=torch.get_num_threads(),
        seed=0,
    )
    value = -float(model.neg_log_likelihood(cov_pars=parameters, y=y.numpy()))
    value_seconds = time.process_time() - started
    # so short a step is accepted at once: no line search follows
    options = {"init_cov_pars": parameters, "maxit": 1, "optimizer_cov": "gradient_descent", "lr_cov": 1e-6}
    model.fit(y=y.numpy(), params=options)
    seconds = time.process_time() - started
    truth = float(gaussian_log_density(_of_distance(problem.kernel, points), y)) if is_dense else None
    facts = {"value": value, "value_seconds": value_seconds, "seconds": seconds, "stated": "none"}
    return {"kernel": problem.kernel, "observations": len(y), "truth": truth} | facts


def _of_distance(kernel: str, points: Tensor) -> Tensor:
    """The kernel of the distance between points, with noise. shape: (N, N)"""
    ((smoothness, times),) = KERNELS[kernel]
    covariance = axis_kernel(smoothness, times * LENGTH)(points).to_dense().detach()
    return covariance + NOISE * torch.eye(len(points), dtype=torch.float64)
