"""``fill_gaps``: fills the gaps of any array in one call."""

import math
from typing import Any

import numpy as np
import torch

from gpytorch_gaps import settings
from gpytorch_gaps.filling.arrays.adapters import ArrayAdapter, adapt
from gpytorch_gaps.filling.arrays.masks import ignoring
from gpytorch_gaps.filling.arrays.options import Options
from gpytorch_gaps.filling.arrays.sentinels import warn_of_sentinels
from gpytorch_gaps.filling.arrays.targets import Targets
from gpytorch_gaps.filling.axes.axis import Axes
from gpytorch_gaps.filling.axes.index_grid import is_a
from gpytorch_gaps.filling.constant import constant, nothing_to_learn
from gpytorch_gaps.filling.datasets import fill_dataset, fit_dataset
from gpytorch_gaps.filling.learning.model import FillModel
from gpytorch_gaps.filling.learning.predict import seeded
from gpytorch_gaps.filling.process.choose import choose_filling
from gpytorch_gaps.filling.process.streamed import StreamedFilling
from gpytorch_gaps.filling.results.filled import Filled
from gpytorch_gaps.filling.results.fitted import Fitted

MAX_CELLS_IN_MEMORY = 4_000_000
"""Arrays with more cells are streamed."""


def fill_gaps(
    values: Any,
    axes: Axes = None,
    kernels: Any = "auto",
    *,
    periods: Any = None,
    trend: bool = True,
    smooth: bool = False,
    joint: bool = False,
    std: bool = True,
    check: bool = True,
    steps: int = 40,
    tolerance: float = 1e-2,
    memory: float = 2**32,
    seed: int = 0,
    progress: bool = True,
    where: Any = None,
    max_gap: Any = None,
    noise: Any = None,
    untrusted: Any = None,
    robust: bool | str = "auto",
    mean: Any = None,
    budget: float | None = None,
    transform: Any = None,
    bounds: Any = None,
) -> Filled:
    """Fills the gaps of an array on a grid with the posterior mean of an exact Gaussian process.

    Kernels are chosen and trained on windows of the grid. Each axis has a Matern or squared exponential kernel, or a
    sum over several scales, with periodic kernels for years and days. Labels have a covariance of low rank plus a
    diagonal. Some observations are withheld from training and predicted. They are as far from other observations as the
    gaps are. Their errors give the expected error in the gaps, ``result.report.expected_rmse``, and scores,
    ``result.report.held_out``. Mean and standard deviations are then those of the exact process given all observations.
    With fewer than 30 observations, standard deviations are widened for the uncertainty of the hyperparameters.

    :param values: a tensor, an array, a masked array, a pandas Series or wide DataFrame, or an xarray DataArray or
        Dataset. Gaps are NaN or masked. The input is not modified. Arrays of more than four million cells are streamed
        through :func:`reconstruct` slab by slab. Their kernel is a single product, and standard deviations come from 16
        draws. The results of a DataArray in dask chunks have the same chunks. If it has at most four million cells, it
        is loaded and filled like any other array.
    :param axes: coordinates of each dimension: numbers, dates, strings, rows of several columns, or None for 0, 1, ..
        A mapping from names of dimensions to coordinates is better, because names such as ``"lat"`` have a meaning.
        Default: the coordinates of `values`.
    :param kernels: ``"auto"``, a list with one entry per axis, or a mapping from names or numbers of axes. Entries are
        GPyTorch kernels, which are copied and trained, or ``"auto"``.
    :param periods: periods of cycles: a mapping from names or numbers of axes to one or several periods, in units of
        the axis (days for times). Default: axes of times are searched for yearly and daily cycles. An empty list
        prevents this. Along a regular axis of 3,000 points or more and at least fifty periods, cycles are part of the
        mean.
    :param trend: whether to subtract a plane first if the data have a trend.
    :param smooth: whether to replace observed values too, by the field without noise.
    :param joint: whether to fill the variables of a Dataset on the same grid with a joint model, which uses their
        correlations. Variables on other grids are filled separately.
    :param std: whether to compute standard deviations, which take most of the time for large grids.
    :param check: whether to withhold some observations, predict them, and report scores. For streamed values this takes
        as long as the mean.
    :param steps: largest number of optimizer steps.
    :param tolerance: largest error of the mean from the solver, in posterior standard deviations.
        ``result.report.error_in_std`` is a bound on the actual error.
    :param memory: bytes that the covariance matrices of an axis or a streamed solve may take.
    :param seed: seed of all random choices. The random state of torch is not changed.
    :param progress: whether to show progress bars for steps of more than a few seconds; ``settings.progress(False)``
        hides them too.
    :param where: a mask of the cells that may be filled: True, or any number except 0. Other gaps remain gaps. A
        DataArray is matched by its dimensions, a DataFrame by its index. Arrays and tensors have the shape of `values`,
        or one that NumPy broadcasts to it. For a Dataset also the name of one of its variables, or a mapping by
        variable.
    :param max_gap: the longest run of gaps that is filled: a mapping from names or numbers of axes to a number of cells
        (an integer) or a length with a unit (``"5 days"``, ``"0.5 degrees"``, ``"10 units"``, a timedelta). Cells of a
        longer run along any of these axes remain gaps. As in ``interpolate_na`` of xarray, a length with a unit is the
        distance of the observations on both sides.
    :param untrusted: a mask of observations that are treated as gaps, and filled. It has the form of `where`.
    :param noise: known errors of the measurements: one standard deviation, or an array of them like `values`. The error
        at a gap is that of a measurement there. It may be NaN, for the root mean square of the other errors. Additional
        noise is learned; it may be almost zero. For a Dataset: a mapping from names of variables to errors, or to the
        names of the variables that contain them. For streamed values: one standard deviation.
    :param mean: a background, such as a climatology, the output of a model or the elevation: an array like `values`, or
        a function of the coordinates of all axes. The function receives arrays that broadcast, in the user's units.
        Values are modelled as ``a + b * background`` plus a field, and the coefficients are learned. Several
        backgrounds are given as a list, or as a mapping from names. They must be finite at observations and in the gaps
        that are filled. For a Dataset: one background for all variables, or a mapping by variable; variables of the
        Dataset may be given by name.
    :param budget: approximate limit, in seconds on one core. If the default would take longer, the filling reduces, in
        this order: steps of training, candidate kernels, draws for error bars, the check, error bars. A note of the
        report lists the reductions. The mean is always that of the exact process. Decisions depend on counted work and
        on the rounded speed of the machine, not on the clock, so that results repeat. For streamed values, only the
        training is limited.
    :param robust: whether to search for wild values: observations that are extreme in comparison with all data and with
        their neighbours. They are not used. They are flagged in ``result.distrusted`` and listed in the report; `mean`
        contains them unchanged. ``True`` also predicts every observation from the others, drops those that the model
        cannot explain, and trains again. ``False`` uses all observations. Streamed arrays are not searched.
    :param transform: for skewed or bounded data, a monotone transform that is applied to the values before they are
        modelled: ``"log"``; ``"logit"``; ``"boxcox"``, a power that is learned; ``"rank"``, which makes the
        distribution of all observations normal; a pair of functions (forward, inverse) of arrays; or ``"auto"``, which
        compares some of these, and no transform, by the CRPS of withheld observations. Results are in the units of the
        data: ``result.mean`` contains medians, and ``result.std`` standard deviations. See also ``result.quantile`` and
        ``result.expectation``. ``result.model`` is a model of transformed values. For a Dataset also a mapping by
        variable. Not available with `joint`, `noise` or streamed values.
    :param bounds: the smallest and the largest possible value, such as ``(0, None)`` or ``(0, 1)``, with None for no
        bound. No predicted value or quantile is outside. Without `transform`, one bound selects ``"log"``, and two
        select ``"logit"``; if there are observations on a bound, such as days without rain, bounds select ``"rank"``.
        For a Dataset also a mapping by variable.
    :return: a :class:`Filled` with mean, standard deviation, flags of the gaps, model and report.
    :raises ValueError: if values are not real and finite, if all of them are gaps, if coordinates do not match, or if
        an option is invalid.

    The 95 % intervals of withheld observations should cover 95 % of them. If they cover fewer, by more than chance, or
    more than 99 %, standard deviations are multiplied by ``result.report.calibrated_by``, the factor with which they
    would cover 95 %. If they cover less than 85 % or more than 99 %, there is a :class:`CalibrationWarning`.
    ``result.model`` is not changed.

    >>> import numpy as np, gpytorch_gaps as gaps
    >>> from gpytorch.kernels import RBFKernel
    >>> t = np.linspace(0, 1, 20)
    >>> truth = np.sin(6 * t[:, None]) * np.cos(4 * t)
    >>> values = truth.copy()
    >>> values[6:12, 8:14] = np.nan
    >>> result = gaps.fill_gaps(values, [t, t], progress=False, steps=10, kernels=[RBFKernel(), RBFKernel()])
    >>> bool(np.abs(result.mean - truth).max() < 0.05)
    True
    >>> result.report.num_gaps
    36
    """
    progress = progress and settings.progress.value() if isinstance(progress, bool) else progress
    options = Options(
        kernels=kernels,
        periods=periods,
        trend=trend,
        smooth=smooth,
        joint=joint,
        std=std,
        check=check,
        steps=steps,
        tolerance=tolerance,
        memory=memory,
        seed=seed,
        progress=progress,
        where=where,
        max_gap=max_gap,
        noise=noise,
        untrusted=untrusted,
        robust=robust,
        mean=mean,
        budget=budget,
        transform=transform,
        bounds=bounds,
    )
    with settings.progress(progress), torch.inference_mode(False), torch.enable_grad():
        if is_a(values, "xarray", "Dataset"):
            if axes is not None:
                raise ValueError("axes: got coordinates with a Dataset, expected None: its variables have their own")
            return fill_dataset(values, options, _fill)
        if joint:
            raise ValueError(
                f"joint: got True with a {type(values).__name__}, expected an xarray Dataset; along an axis of labels, "
                "all parts of an array are used together anyway"
            )
        return _fill(_adapt_trusted(values, axes, options), options)


def fit_model(values: Any, axes: Axes = None, **options: Any) -> Any:
    """The trained model that ``fill_gaps`` would use, conditioned on all observations.

    It is in the units of the data. If the standard deviations of labels differ by a factor of three or more, it is in
    units of these.

    :param values: as in :func:`fill_gaps`, but always in memory.
    :param axes: as in :func:`fill_gaps`.
    :param options: as in :func:`fill_gaps`.
    :return: an ``ExactGP``; for a Dataset, a dictionary with one model per variable.
    """
    checked = Options(**options)
    if is_a(values, "xarray", "Dataset"):
        return fit_dataset(values, checked, _fit)
    return _fit(_adapt_trusted(values, axes, checked), checked)


def _adapt_trusted(values: Any, axes: Axes, options: Options) -> ArrayAdapter:
    """The adapter of the values, with gaps in place of untrusted ones."""
    return adapt(values if options.untrusted is None else ignoring(values, options.untrusted), axes)


def is_streamed(adapter: ArrayAdapter) -> bool:
    """Whether ``fill_gaps`` streams the array, because it is too large for a model in memory."""
    return math.prod(adapter.shape) > MAX_CELLS_IN_MEMORY


def _fit(adapter: ArrayAdapter, options: Options) -> FillModel:
    """Chooses a model of an array in memory, and conditions it on all observations."""
    adapter.load()
    numbers = _numbers(adapter)
    with seeded(options.seed), settings.progress(options.progress):
        filling, chosen = choose_filling(adapter, numbers, Targets(adapter, options, np.isnan(numbers)), options)
        return filling.condition(chosen)


def fit_in_memory(adapter: ArrayAdapter, options: Options) -> Fitted | None:
    """The model of an array in memory, checked and conditioned on all observations; None if no model is needed."""
    numbers = _numbers(adapter)
    targets = Targets(adapter, options, np.isnan(numbers))
    if nothing_to_learn(numbers, np.isnan(numbers), targets, options):
        return None
    with settings.progress(options.progress), torch.inference_mode(False), torch.enable_grad(), seeded(options.seed):
        filling, chosen = choose_filling(adapter, numbers, targets, options)
        check = filling.check_model(chosen)
        return Fitted(filling, chosen, check, filling.condition(chosen))


def _fill(adapter: ArrayAdapter, options: Options) -> Filled:
    """Reads the array, chooses and checks a model, predicts, and returns results in the form of the input."""
    if is_streamed(adapter):
        streamed = StreamedFilling(adapter, Targets(adapter, options), options)
        with seeded(options.seed):
            chosen = streamed.choose_model()
            return Filled(*streamed.predict(chosen, streamed.check_model(chosen)))
    adapter.load()
    numbers = _numbers(adapter)
    targets = Targets(adapter, options, np.isnan(numbers))
    gaps = np.isnan(numbers) & targets.rows(0, len(numbers))
    notes = nothing_to_learn(numbers, gaps, targets, options)
    if notes:
        return constant(adapter, numbers, gaps, options, notes)
    with seeded(options.seed):
        filling, chosen = choose_filling(adapter, numbers, targets, options)
        check = filling.check_model(chosen)
        found = filling.predict(chosen, check)
    assert found.model is not None
    return Filled(*found, Fitted(filling, chosen, check, found.model))


def _numbers(adapter: ArrayAdapter) -> np.ndarray:
    """All values as float64, NaN at gaps; at least one is observed."""
    numbers = adapter.numbers()
    if np.isnan(numbers).all():
        raise ValueError(f"values: got {numbers.size} entries, all of them gaps; expected at least one observation")
    warn_of_sentinels(numbers)
    return numbers
