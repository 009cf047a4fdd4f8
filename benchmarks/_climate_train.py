"""Trains the model of a climate of stations, predicts it everywhere, and scores the withheld cells."""

import math
import resource
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import gpytorch
import numpy as np
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.models import ExactGP
from linear_operator.operators import DiagLinearOperator

import gpytorch_gaps as gaps
from benchmarks._climate_model import Anomalies, ClimateModel
from benchmarks.datasets import StationClimate
from gpytorch_gaps import settings

RANK = 1024  # of the preconditioner
PROBES = 2  # the data are so many that two determine the gradient better than they do
ENOUGH = 1e-3  # nats an observation, in as many steps as are averaged: beyond that held-out errors no longer change
LEARNING_RATES = (0.1, 0.03)  # until the loss no longer falls; then to settle
STEPS = (30, 10)  # at most
MONTHLY_STEPS = (6, 2)  # monthly means have little noise: training on is slow, and errors no longer fall
SAMPLES = 32  # of the posterior, for its standard deviations
MEAN_TOLERANCE, SAMPLE_TOLERANCE = 1e-4, 1e-2


@dataclass
class Trained:
    """A model, what was subtracted from its data, and the record of its training."""

    climate: StationClimate
    anomalies: Anomalies
    model: ClimateModel
    histories: list[gaps.History] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)  # by phase

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


def withheld(climate: StationClimate, share: float = 0.2, seed: int = 0) -> np.ndarray:
    """Cells to validate on: those that come with the data, or a random share of the observed ones."""
    known = ~np.isnan(climate.values)
    if climate.test_cells is not None:
        return climate.test_cells & known
    return known & (np.random.default_rng(seed).random(known.shape) < share)


def train(
    climate: StationClimate, values: np.ndarray, progress: bool = True, steps: tuple[int, ...] | None = None
) -> Trained:
    """:param values: those of the climate, or fewer of them.
    :param steps: at most, at each of the learning rates.
    """
    started = time.perf_counter()
    anomalies = Anomalies.of(climate, values)
    found = Trained(climate, anomalies, ClimateModel(climate, anomalies.values))
    found.seconds["anomalies and first guess"] = time.perf_counter() - started
    memory = gaps.WarmStart(num_probes=PROBES)
    steps = steps or (STEPS if climate.period > 300 else MONTHLY_STEPS)
    with found.phase("training"), fast():
        for rate, most in zip(LEARNING_RATES, steps, strict=True):
            history = gaps.fit(
                found.model,
                most,
                lr=rate,
                warm_start=memory,
                patience=3,
                min_improvement=ENOUGH * len(found.model.train_targets),
                progress=progress,
            )
            found.histories.append(history)
    return found


@contextmanager
def fast(rank: int | None = RANK) -> Iterator[None]:
    with settings.mixed_precision(), settings.preconditioner_rank(rank):
        yield


def predict(trained: Trained, samples: int = SAMPLES) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of a new observation of every cell, in degrees, on the calendar of the records."""
    model, shape = trained.model, trained.climate.values.shape
    with trained.phase("mean"):
        mean = posterior_mean(model).reshape(shape)
    with (
        trained.phase("standard deviation"),
        torch.no_grad(),
        fast(),
        settings.solve_tolerance(SAMPLE_TOLERANCE),
        settings.variance_method("pathwise"),
        settings.variance_samples(samples),
    ):
        variance = model(model.grid.points()).variance.reshape(-1, model.likelihood.noise.numel())
        deviation = (variance + model.likelihood.noise).sqrt().reshape(shape).numpy()
    return trained.anomalies.recorded(mean) + trained.anomalies.cycle, trained.anomalies.recorded(deviation)


def posterior_mean(model: ExactGP, rank: int | None = RANK) -> np.ndarray:
    """The posterior mean at every cell of the grid, by the methods that make training fast."""
    with fast(rank):
        return mean_of(model)


def mean_of(model: ExactGP) -> np.ndarray:
    """The posterior mean at every cell of the grid, by the method that is set."""
    with (
        torch.no_grad(),
        settings.solve_tolerance(MEAN_TOLERANCE),
        gpytorch.settings.skip_posterior_variances(),
    ):
        return model(model.grid.points()).mean.numpy()


def scores(
    climate: StationClimate, cells: np.ndarray, mean: np.ndarray, deviation: np.ndarray
) -> dict[str, gaps.Score]:
    """Scores of every output on the withheld cells."""
    found = {}
    for o, name in enumerate(climate.output):
        own = cells[..., o]
        truth, m, s = (
            torch.from_numpy(np.asarray(x[..., o][own], dtype=np.float64)) for x in (climate.values, mean, deviation)
        )
        found[name] = gaps.score(MultivariateNormal(m, DiagLinearOperator(s.square())), truth)
    return found


# -- simple references -------------------------------------------------------------------------------------------------


def references(climate: StationClimate, cells: np.ndarray) -> Mapping[str, tuple[np.ndarray, np.ndarray]]:
    """Mean and deviation everywhere by climatology, and by climatology and the mean anomaly of all other stations."""
    values = np.where(cells, np.nan, climate.values).astype(np.float64)
    cycle = Anomalies.of(climate, values).cycle
    anomalies = values - cycle
    known = ~np.isnan(anomalies)
    total, count = np.where(known, anomalies, 0.0).sum(2, keepdims=True), known.sum(2, keepdims=True)
    regional = np.where(count > 0, total / np.maximum(count, 1), 0.0)
    without = (total - np.where(known, anomalies, 0.0)) / np.maximum(count - known, 1)
    left_out = np.where(count > 1, anomalies - without, anomalies)
    everywhere = np.ones_like(anomalies)
    return {
        "climatology": (cycle + 0.0 * everywhere, np.sqrt(np.nanmean(anomalies**2, (0, 1, 2))) * everywhere),
        "climatology + regional anomaly": (
            cycle + regional * everywhere,
            np.sqrt(np.nanmean(left_out**2, (0, 1, 2))) * everywhere,
        ),
    }


def steps_by_phase(histories: list[gaps.History]) -> dict[str, float]:
    """Seconds of a training step, on average."""
    count = sum(map(len, histories))
    whole, solves, gradient = (
        sum(sum(getattr(history, name)) for history in histories) / max(1, count)
        for name in ("seconds", "solve_seconds", "gradient_seconds")
    )
    return {
        "a step": whole,
        "solves": solves,
        "gradient": gradient,
        "kernels, preconditioner, log-determinant": whole - solves - gradient,
    }


def peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def log_likelihood(model: ExactGP, probes: int = 4) -> tuple[float, float]:
    """Nats per observation, and the standard error: a new estimate that does not depend on the training."""
    model.train()
    with (
        torch.no_grad(),
        fast(None),
        settings.train_tolerance(1e-3),
        gpytorch.settings.num_trace_samples(probes),
        gaps.record_solves() as record,
    ):
        objective = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
        value = float(objective(model(*model.train_inputs), model.train_targets))
    model.eval()
    error = record.logdets[-1].standard_error
    count = len(model.train_targets)
    return value, math.nan if error is None else 0.5 * float(error) / count
