"""Filling with an exact model of the whole grid, in memory: mean, standard deviations, and a held-out check."""

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import gpytorch
import linear_operator
import numpy as np
import torch
from torch import Tensor

from gpytorch_gaps import settings
from gpytorch_gaps.filling.axes import Axis
from gpytorch_gaps.filling.check import choose_part, score_withheld, withheld
from gpytorch_gaps.filling.deviations import in_reasonable_time
from gpytorch_gaps.filling.model import FillModel, make_model
from gpytorch_gaps.filling.options import Options
from gpytorch_gaps.filling.prepare import Prepared, prepare
from gpytorch_gaps.filling.report import FillReport
from gpytorch_gaps.filling.trend import label_scales
from gpytorch_gaps.grid import CartesianGrid
from gpytorch_gaps.reports import ApproximateVarianceWarning, record_solves
from gpytorch_gaps.score import Score

LARGEST = 4_000_000
"""Cells up to which a model of the whole grid is made; beyond, values are streamed."""

_ROUGHER = 10.0  # times the tolerance, for draws: their own error is larger
_MATRICES = 3  # of the covariances of the longest axis, that are held at once
_DENSE = 1600  # observations that are always factorized, five times as many where that is cheaper


class Clock:
    """Seconds by what they went to."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - started


def refuse_long_axes(axes: Sequence[Axis], options: Options) -> None:
    """Before anything is learned: kernels of an axis are dense."""
    for axis in axes:
        needed = 8.0 * _MATRICES * axis.size**2
        if needed > options.memory:
            raise ValueError(
                f"{axis.name}: got {axis.size:,} places, whose covariances take "
                f"{needed / 2**30:.3g} GiB, expected at most {options.memory / 2**30:.3g}: pass a larger memory, or "
                "fill it in parts"
            )


def fit_in_memory(
    numbers: np.ndarray, axes: Sequence[Axis], options: Options, clock: Clock, device: torch.device | None = None
) -> tuple[FillModel, Prepared, Score | None]:
    """A model of everything observed, with what was learned and what it is worth."""
    refuse_long_axes(axes, options)
    generator = np.random.default_rng(options.seed)
    positions, part = choose_part(lambda p: numbers[np.ix_(*p)], numbers.shape, generator)
    held = withheld(part, generator) if options.check else np.zeros(part.shape, dtype=bool)
    known = numbers
    if held.any():
        known = numbers.copy()
        known[np.ix_(*positions)] = np.where(held, np.nan, part)
    with clock("training"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse invariant checks")
        prepared = prepare(lambda p: known[np.ix_(*p)], known.shape, axes, options, generator, known)
    score = None
    if held.any():
        with clock("held-out check"), quietly(options, _ROUGHER):
            there = [Axis(a.name, a.kind, a.points[p], a.unit) for a, p in zip(axes, positions, strict=True)]
            model = condition(np.where(held, np.nan, part), there, prepared, device)
            score = score_withheld(model, axes, positions, held, part)
    return condition(numbers, axes, prepared, device), prepared, score


def condition(
    numbers: np.ndarray, axes: Sequence[Axis], prepared: Prepared, device: torch.device | None = None
) -> FillModel:
    """The model with these observations."""
    grid = CartesianGrid([torch.from_numpy(axis.points).to(device) for axis in axes])
    y = torch.from_numpy(numbers).to(device).flatten()
    index = (~y.isnan()).nonzero().squeeze(-1)
    learned = prepared.learned
    model = make_model(grid.points(index), y[index], grid, learned.terms, learned.likelihood, prepared.mean)
    return model.to(device)


def predict(
    model: FillModel, x: Tensor, options: Options, clock: Clock
) -> tuple[np.ndarray, np.ndarray | None, dict[str, object]]:
    """Mean and, if asked for, standard deviation of a measurement at the points; of the field itself if smooth."""
    about: dict[str, object] = {}
    deviation = None
    with clock("mean"), quietly(options), record_solves() as solves:
        mean = model(x).mean
    solve = about["solve"] = solves[-1] if solves else None
    if options.std:
        with (
            clock("standard deviations"),
            quietly(options, _ROUGHER),
            in_reasonable_time(solve, len(x)),
            record_solves() as solves,
        ):
            variance = model(x).lazy_covariance_matrix.diagonal(dim1=-1, dim2=-2)  # .variance stops at 1e-10
            noise = 0.0 if options.smooth else model.likelihood.noise
            deviation = (variance + noise).clamp_min(0.0).sqrt().cpu().numpy()
        found = solves.variances[-1] if solves.variances else None
        samples = found.num_samples if found is not None else 0
        about["std_method"] = f"from {samples} samples" if samples else "exact"
    return mean.cpu().numpy(), deviation, about


def fill_in_memory(
    numbers: np.ndarray, axes: Sequence[Axis], options: Options, device: torch.device | None = None
) -> tuple[np.ndarray, np.ndarray | None, FillModel, FillReport]:
    """Everything of ``Filled``, as plain arrays."""
    clock = Clock()
    gaps = np.isnan(numbers)
    scales = label_scales(numbers, axes)
    if scales is not None:
        numbers = numbers / scales
    with torch.random.fork_rng(devices=[]):  # whose state stays the user's
        torch.manual_seed(options.seed)
        model, prepared, score = fit_in_memory(numbers, axes, options, clock, device)
        wanted = np.flatnonzero(np.ones_like(gaps) if options.smooth else gaps)
        grid = CartesianGrid([torch.from_numpy(axis.points).to(device) for axis in axes])
        found, deviation, about = predict(model, grid.points(torch.from_numpy(wanted).to(device)), options, clock)
    mean, std = numbers.copy(), None
    mean.reshape(-1)[wanted] = found
    if deviation is not None:
        std = np.zeros(numbers.shape)
        std.reshape(-1)[wanted] = deviation
    notes = prepared.notes
    if scales is not None:
        mean, std = mean * scales, None if std is None else std * scales
        notes += ("labels differ in scale: each was divided by its standard deviation; so are the held-out error, the "
                  "noise and the model",)  # fmt: skip
    report = FillReport(
        shape=numbers.shape,
        num_gaps=int(gaps.sum()),
        axes=tuple(map(str, axes)),
        kernel=prepared.learned.name,
        noise_std=float(prepared.learned.likelihood.noise.detach().sqrt()),
        held_out=score,
        history=prepared.learned.history,
        seconds=clock.seconds,
        notes=notes,
        **about,  # type: ignore[arg-type]
    )
    return mean, std, model, report


@contextmanager
def quietly(options: Options, rougher: float = 1.0) -> Iterator[None]:
    """The settings of predictions; that variances come from samples is in the report."""
    with (
        torch.no_grad(),
        gpytorch.settings.debug(False),  # predicting at the training data is meant, if smooth
        settings.solve_tolerance(rougher * options.tolerance),
        settings.mixed_precision(),
        settings.dense_size(_DENSE),
        linear_operator.settings.max_cholesky_size(_DENSE),
        settings.progress(options.progress),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", ApproximateVarianceWarning)
        warnings.filterwarnings("ignore", message="Sparse invariant checks")  # torch's, of the labels' IndexKernel
        yield
