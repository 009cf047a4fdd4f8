"""Gaps filled in one call, for whoever has NaNs and no wish to learn Gaussian processes today.

>>> import numpy as np, gpytorch_gaps as gaps
>>> t = np.linspace(0, 1, 40)
>>> values = np.sin(6 * t[:, None]) * np.cos(4 * t)
>>> values[12:25, 10:22] = np.nan
>>> result = gaps.fill_gaps(values, progress=False)
>>> bool(np.isnan(result.mean).any())
False
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gpytorch_gaps import settings
from gpytorch_gaps.filling.in_memory import LARGEST, Clock, fill_in_memory, fit_in_memory
from gpytorch_gaps.filling.kinds import Kind, TensorKind, is_a, put, read_kind
from gpytorch_gaps.filling.model import FillModel
from gpytorch_gaps.filling.options import Options
from gpytorch_gaps.filling.report import FillReport
from gpytorch_gaps.filling.streamed import fill_streamed
from gpytorch_gaps.filling.trend import label_scales

_ROUNDING = 4 * np.finfo(np.float64).eps  # of values: what differs by less is equal


@dataclass(frozen=True, eq=False)
class Filled:
    """What ``fill_gaps`` found.

    Of a Dataset, `mean`, `std` and `gaps` are Datasets, `model` and `report` dictionaries, by variable.
    """

    mean: Any
    """What came, of the same kind, its gaps filled; observed values are untouched, unless smoothing was asked for."""
    std: Any
    """How far off the mean may be: the standard deviation of a measurement in a gap, 0 where there is one. If smooth,
    that of the field without its noise, everywhere. NaN where it cannot be known: if there is one observation, or all
    are equal. Wider than the model's own below 30 observations. None if not asked for, or if values were streamed."""
    gaps: Any
    """Which cells were gaps."""
    model: Any
    """The fitted ``ExactGP``, in units of the data: ``model.likelihood(model(x))`` predicts anywhere. None where
    nothing had to be learned, or values were streamed."""
    report: Any
    """A :class:`FillReport`: print it."""

    def __repr__(self) -> str:
        return f"<Filled {self.report}>"


def fill_gaps(
    values: Any,
    axes: Sequence[Any] | None = None,
    kernels: Any = "auto",
    *,
    periods: Any = None,
    trend: bool = True,
    smooth: bool = False,
    std: bool = True,
    check: bool = True,
    steps: int = 40,
    tolerance: float = 1e-2,
    memory: float = 2**32,
    seed: int = 0,
    progress: bool = True,
) -> Filled:
    """Fills the gaps of an array on a grid by the exact Gaussian process of what was observed.

    Kernels are chosen and trained on some windows of the grid: a Matern of the right roughness along each axis, or a
    sum of several scales; periodic ones for years and days; free covariances for labels. Some observations, as far
    from the others as the gaps are, are withheld to tell what the result is worth: ``result.report.expected_rmse`` and
    ``result.report.held_out``. A :class:`CalibrationWarning` says where 95 % intervals cover less than 85 or more than
    99 % of them, beyond chance. The mean and its standard deviations are then those of the exact process, given all
    observations; below 30 observations, standard deviations are widened by what is unknown of the hyperparameters.

    :param values: a tensor, an array, a masked array, a pandas Series or wide DataFrame, an xarray DataArray or
        Dataset. Gaps are NaN, or masked. It is not changed. Chunked DataArrays (dask), and arrays of more than four
        million cells, go through :func:`reconstruct`: slab by slab, with a single product of kernels and without
        standard deviations.
    :param axes: coordinates of each dimension: numbers, dates, strings, rows of several columns, or None for 0, 1, ..
        By default those that `values` brings along.
    :param kernels: ``"auto"``; or one for each axis, or a mapping from names or numbers of axes: GPyTorch kernels,
        which are copied and trained, or ``"auto"``.
    :param periods: of cycles, as a mapping from names or numbers of axes to one or several, in units of the axis, days
        for times. By default the year and the day are looked for in axes of times; an empty list is none.
    :param trend: whether a plane may be taken off first, if there is a trend.
    :param smooth: whether observed values are replaced too, by the field without its noise.
    :param std: whether to work out standard deviations, which take most of the time of large grids.
    :param check: whether to withhold some observations first, and report how well they are predicted. Where values
        are streamed, this takes as long as the mean.
    :param steps: of Adam, at the most.
    :param tolerance: largest error of the mean that the solver may leave, in posterior standard deviations;
        ``result.report.solve.error_in_std`` is the bound that was reached.
    :param memory: bytes that a streamed solve may take.
    :param progress: whether to show bars for what takes more than a few seconds; ``settings.progress(False)`` hides
        them too.
    :param seed: of whatever is random: the same gives the same. The state of torch's own is left alone.
    """
    progress = progress and settings.progress.value() if isinstance(progress, bool) else progress
    options = Options(kernels, periods, trend, smooth, std, check, steps, tolerance, memory, seed, progress)
    with settings.progress(progress), torch.inference_mode(False), torch.enable_grad():
        if is_a(values, "xarray", "Dataset"):
            if axes is not None:
                raise ValueError("axes: got some with a Dataset, expected None: its variables bring their own")
            return _fill_dataset(values, options)
        return _fill(read_kind(values, axes), options)


def fit_model(values: Any, axes: Sequence[Any] | None = None, **options: Any) -> FillModel:
    """The model by which ``fill_gaps`` would fill, trained, with all observations; options as there.

    In units of the data; or of each label's standard deviation, where these differ by more than a factor of three.
    """
    kind = read_kind(values, axes)
    numbers = kind.numbers()
    _refuse_all_gaps(numbers)
    scales = label_scales(numbers, kind.axes)
    numbers = numbers if scales is None else numbers / scales
    settled = Options(**options)
    with torch.random.fork_rng(devices=[]), settings.progress(settled.progress):
        torch.manual_seed(settled.seed)
        return fit_in_memory(numbers, kind.axes, settled, Clock(), _device(kind))[0]


def _fill(kind: Kind, options: Options) -> Filled:
    if kind.chunked or math.prod(kind.shape) > LARGEST:
        return _fill_streamed(kind, options)
    numbers = kind.numbers()
    gaps = np.isnan(numbers)
    _refuse_all_gaps(numbers)
    nothing = _nothing_to_learn(numbers, gaps, options)
    if nothing is not None:
        unknown = np.where(gaps | options.smooth, np.nan, 0.0)
        flat = np.where(gaps, numbers[~gaps].flat[0], numbers)
        report = FillReport(numbers.shape, int(gaps.sum()), tuple(map(str, kind.axes)), notes=(nothing,))
        std = kind.like(unknown) if options.std else None
        return Filled(kind.filled(flat, gaps, smooth=False), std, kind.like(gaps), None, report)
    mean, deviation, model, report = fill_in_memory(numbers, kind.axes, options, _device(kind))
    std = None if deviation is None else kind.like(deviation)
    return Filled(kind.filled(mean, gaps, options.smooth), std, kind.like(gaps), model, report)


def _nothing_to_learn(numbers: np.ndarray, gaps: np.ndarray, options: Options) -> str | None:
    if not gaps.any() and not options.smooth:
        return "there are no gaps: nothing was done"
    known = numbers[~gaps]
    unknown = "No uncertainty estimate is available: std is NaN there."
    if len(known) == 1:
        return f"only one observation: all gaps were set to its value. {unknown}"
    if np.ptp(known) <= _ROUNDING * np.abs(known).max():
        return f"all observations are equal: all gaps were set to their value. {unknown}"
    return None


def _refuse_all_gaps(numbers: np.ndarray) -> None:
    if np.isnan(numbers).all():
        raise ValueError(f"values: got {numbers.size} entries, all of them gaps; expected at least one observation")


def _device(kind: Kind) -> torch.device | None:
    return kind.given.device if isinstance(kind, TensorKind) else None


def _fill_streamed(kind: Kind, options: Options) -> Filled:
    result, _, report = fill_streamed(kind, options)
    dtype = np.dtype(kind.array.dtype)

    def slab(held: np.ndarray, start: int) -> np.ndarray:
        mean = result.slab(start, start + len(held)).cpu().numpy()
        gap = np.ma.getmaskarray(held) | np.isnan(np.ma.getdata(held))
        return put(held, mean, gap, options.smooth)

    if kind.chunked:
        import dask.array

        def block(held: np.ndarray, block_info: Any = None) -> np.ndarray:
            return slab(held, block_info[0]["array-location"][0][0]) if block_info else held

        whole = kind.array.rechunk(dict.fromkeys(range(1, len(kind.shape)), -1))
        mean = dask.array.map_blocks(block, whole, dtype=dtype, meta=np.empty((0,) * len(kind.shape), dtype))
        return Filled(kind.given.copy(data=mean), None, kind.like(dask.array.isnan(whole)), None, report)
    filled, gaps = (
        np.empty(kind.shape, np.float32 if result.dtype == torch.float32 else np.float64),
        np.empty(kind.shape, dtype=bool),
    )
    step = max(1, 2**22 // math.prod(kind.shape[1:]))
    for start in range(0, kind.shape[0], step):
        rows = slice(start, min(start + step, kind.shape[0]))
        held = kind.array[rows]
        gaps[rows] = np.ma.getmaskarray(held) | np.isnan(np.ma.getdata(held))
        filled[rows] = result.slab(rows.start, rows.stop).cpu().numpy()
    return Filled(kind.filled(filled, gaps, options.smooth), None, kind.like(gaps), None, report)


def _fill_dataset(dataset: Any, options: Options) -> Filled:
    names = [name for name, held in dataset.data_vars.items() if held.dtype.kind in "iuf" and held.dims]
    if not names:
        raise ValueError(f"values: got a Dataset with {list(dataset.data_vars)}, expected a variable of numbers")
    found = {}
    for name in names:
        try:
            found[name] = _fill(read_kind(dataset[name]), options)
        except ValueError as error:
            raise ValueError(f"variable {name!r}: {error}") from error
    stds = {name: one.std for name, one in found.items() if one.std is not None}
    return Filled(
        dataset.assign({name: one.mean for name, one in found.items()}),
        dataset[list(stds)].assign(stds) if stds else None,
        dataset[names].assign({name: one.gaps for name, one in found.items()}),
        {name: one.model for name, one in found.items()},
        {name: one.report for name, one in found.items()},
    )
