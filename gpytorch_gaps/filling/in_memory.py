"""Filling with an exact model of the whole grid, in memory: mean, standard deviations, and a held-out check."""

import math
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import gpytorch
import linear_operator
import numpy as np
import torch
from torch import Tensor

from gpytorch_gaps import settings
from gpytorch_gaps.filling.axes import Axis
from gpytorch_gaps.filling.check import (
    Check,
    judge,
    points_of,
    predict_measurements,
    some_gaps,
    widening,
    worth,
)
from gpytorch_gaps.filling.deviations import in_reasonable_time
from gpytorch_gaps.filling.model import FillModel, make_model
from gpytorch_gaps.filling.options import Options
from gpytorch_gaps.filling.prepare import Prepared, prepare
from gpytorch_gaps.filling.report import FillReport
from gpytorch_gaps.filling.trend import fit_mean, label_scales, sample_of
from gpytorch_gaps.filling.withhold import Withheld, choose_part, withhold
from gpytorch_gaps.grid.cartesian import CartesianGrid
from gpytorch_gaps.reports import ApproximateVarianceWarning, record_solves

LARGEST = 4_000_000
"""Cells up to which a model of the whole grid is made; beyond, values are streamed."""

_RESIDUAL = 1e-4  # relative, besides the certified error of the mean
ROUGHER = 10.0  # times the tolerance, for draws: their own error is larger
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
) -> tuple[FillModel, Prepared, Check | None]:
    """A model of everything observed, with what was learned and what it is worth."""
    refuse_long_axes(axes, options)
    generator = np.random.default_rng(options.seed)
    positions, part = choose_part(lambda p: numbers[np.ix_(*p)], numbers.shape, generator)
    withheld = withhold(part, generator) if options.check else None
    known = numbers if withheld is None else without(numbers, positions, withheld.scored)
    with clock("training"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse invariant checks")
        prepared = prepare(lambda p: known[np.ix_(*p)], known.shape, axes, options, generator, known)
    check = None
    if withheld is not None:
        with clock("held-out check"), quietly(options, ROUGHER):
            left = without(numbers, positions, withheld.hidden)
            mean = fit_mean(axes, *sample_of(left, generator), trend=options.trend)
            gaps = np.zeros_like(withheld.hidden) if options.std else some_gaps(part, generator)
            check = check_part(part, axes, positions, withheld, replace(prepared, mean=mean), gaps, device)
    return condition(numbers, axes, prepared, device), prepared, check


def without(numbers: np.ndarray, positions: Sequence[np.ndarray], flags: np.ndarray) -> np.ndarray:
    """A copy with NaN at the flagged cells of the part at `positions`."""
    result = numbers.copy()
    result[np.ix_(*positions)] = np.where(flags, np.nan, result[np.ix_(*positions)])
    return result


def check_part(
    part: np.ndarray, axes: Sequence[Axis], positions: Sequence[np.ndarray], withheld: Withheld, prepared: Prepared,
    gaps: np.ndarray, device: torch.device | None = None, mean: np.ndarray | None = None,
) -> Check:  # fmt: skip
    """Withheld observations of the part at `positions`, predicted from the others in it.

    :param gaps: flags of gaps whose variance is looked at as well.
    :param mean: predictions of the withheld observations, where they were found in another way.
    """
    there = [Axis(a.name, a.kind, a.points[p], a.unit) for a, p in zip(axes, positions, strict=True)]
    model = condition(np.where(withheld.hidden, np.nan, part), there, prepared, device)
    x = torch.cat([points_of(axes, positions, flags) for flags in (withheld.scored, gaps)])
    count = int(withheld.scored.sum())
    found = predict_measurements(model, x)
    in_gaps = float(found.variance[count:].mean()) if len(x) > count else None
    found = found.first(count)
    return judge(found if mean is None else replace(found, mean=torch.from_numpy(mean)), part[withheld.scored], in_gaps)


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
        posterior = model(x)
        mean = posterior.mean
    solve = about["solve"] = solves[-1] if solves else None
    if options.std:
        with (
            clock("standard deviations"),
            quietly(options, ROUGHER),
            in_reasonable_time(solve, len(x)),
            record_solves() as solves,
        ):
            covariance = posterior.lazy_covariance_matrix.in_current_settings()  # no second solve for the mean
            variance = covariance.diagonal(dim1=-1, dim2=-2)  # .variance stops at 1e-10
            noise = 0.0 if options.smooth else model.likelihood.noise
            deviation = (variance + noise).clamp_min(0.0).sqrt().cpu().numpy() * widening(len(model.train_targets))
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
        model, prepared, check = fit_in_memory(numbers, axes, options, clock, device)
        wanted = np.flatnonzero(np.ones_like(gaps) if options.smooth else gaps)
        grid = CartesianGrid([torch.from_numpy(axis.points).to(device) for axis in axes])
        found, deviation, about = predict(model, grid.points(torch.from_numpy(wanted).to(device)), options, clock)
    mean, std, noise = numbers.copy(), None, float(prepared.learned.likelihood.noise.detach())
    mean.reshape(-1)[wanted] = found
    gap_variance = None if check is None else check.gap_variance
    if deviation is not None:
        std = np.zeros(numbers.shape)
        std.reshape(-1)[wanted] = deviation
        gap_variance = float(np.mean(std[gaps] ** 2)) + (noise if options.smooth else 0.0) if gaps.any() else None
    notes = (*prepared.notes, *_few(int((~gaps).sum()), options))
    if scales is not None:
        mean, std = mean * scales, None if std is None else std * scales
        notes += ("labels differ in scale: each was divided by its standard deviation; so are the held-out error, the "
                  "noise and the model",)  # fmt: skip
    report = FillReport(
        shape=numbers.shape,
        num_gaps=int(gaps.sum()),
        axes=tuple(map(str, axes)),
        kernel=prepared.learned.name,
        noise_std=math.sqrt(noise),
        **worth(check, gap_variance, notes),
        history=prepared.learned.history,
        seconds=clock.seconds,
        **about,  # type: ignore[arg-type]
    )
    return mean, std, model, report


def _few(count: int, options: Options) -> list[str]:
    wider = widening(count)
    if wider == 1.0 or not options.std:
        return []
    return [f"only {count} observations, so hyperparameters are uncertain: std was multiplied by {wider:.2g}"]


@contextmanager
def quietly(options: Options, rougher: float = 1.0) -> Iterator[None]:
    """The settings of predictions; that variances come from samples is in the report."""
    with (
        torch.no_grad(),
        gpytorch.settings.debug(False),  # predicting at the training data is meant, if smooth
        settings.solve_tolerance(rougher * _RESIDUAL),
        settings.mean_tolerance(rougher * options.tolerance),
        settings.mixed_precision(),
        settings.dense_size(_DENSE),
        linear_operator.settings.max_cholesky_size(_DENSE),
        settings.progress(options.progress),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", ApproximateVarianceWarning)
        warnings.filterwarnings("ignore", message="Sparse invariant checks")  # torch's, of the labels' IndexKernel
        yield
