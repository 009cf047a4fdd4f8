"""``fill_gaps``: the gaps of any array filled in one call."""

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

    Kernels are chosen and trained on windows of the grid: along each axis a Matern or squared exponential kernel, or a
    sum over several scales, with periodic kernels for years and days; labels have a covariance of low rank and a
    diagonal. Some observations, as far from the others as the gaps are, are withheld from training and predicted. They
    give the error to expect in the gaps, ``result.report.expected_rmse``, and scores, ``result.report.held_out``. Mean
    and standard deviations are then those of the exact process given all observations. Below 30 observations, standard
    deviations are widened for the uncertainty of the hyperparameters.

    :param values: a tensor, an array, a masked array, a pandas Series or wide DataFrame, or an xarray DataArray or
        Dataset. Gaps are NaN or masked. The input is not modified. Arrays of more than four million cells are streamed
        through :func:`reconstruct` slab by slab, with a single product of kernels and standard deviations from 16
        draws.
        DataArrays in dask chunks give results in the same chunks: those of at most four million cells are computed, and
        filled like any other array.
    :param axes: coordinates of each dimension: numbers, dates, strings, rows of several columns, or None for 0, 1, ..;
        or a mapping from names of dimensions to these, as names such as ``"lat"`` have a meaning. Default: the
        coordinates of `values`.
    :param kernels: ``"auto"``, a list with one entry per axis, or a mapping from names or numbers of axes. Entries are
        GPyTorch kernels, which are copied and trained, or ``"auto"``.
    :param periods: periods of cycles: a mapping from names or numbers of axes to one or several periods, in units of
        the axis (days for times). Default: axes of times are searched for the year and the day; an empty list
        prevents this. Along regular axes of 3,000 points or more and fifty periods, the mean has the cycles.
    :param trend: whether to subtract a plane first if the data have a trend.
    :param smooth: whether to replace observed values too, by the field without noise.
    :param joint: whether the variables of a Dataset that lie on one grid are filled together, so that they inform each
        other. Variables on other grids are filled by themselves.
    :param std: whether to compute standard deviations, which take most of the time for large grids.
    :param check: whether to withhold some observations and report how well they are predicted. For streamed values this
        takes as long as the mean.
    :param steps: optimizer steps, at most.
    :param tolerance: the largest error of the mean that the solver may leave, in posterior standard deviations.
        ``result.report.error_in_std`` is a bound on the error that it left.
    :param memory: bytes that the covariance matrices of an axis or a streamed solve may take.
    :param seed: seed of all random choices. The random state of torch is not changed.
    :param progress: whether to show progress bars for steps of more than a few seconds; ``settings.progress(False)``
        hides them too.
    :param where: a mask of the cells that may be filled, True or any number but 0; other gaps stay gaps. A DataArray is
        matched by its dimensions, a DataFrame by its index; arrays and tensors have the shape of `values`, or one that
        NumPy broadcasts to it. For a Dataset also the name of one of its variables, or a mapping by variable.
    :param max_gap: the longest run of gaps that is filled: a mapping from names or numbers of axes to a number of cells
        (an integer) or a length with a unit (``"5 days"``, ``"0.5 degrees"``, ``"10 units"``, a timedelta). Cells of a
        longer run, along any of these axes, stay gaps. Lengths with a unit are measured as by ``interpolate_na`` of
        xarray: between the observations on both sides.
    :param untrusted: a mask of observations that are not believed, given as `where` is: they are gaps, and filled.
    :param noise: known errors of the measurements: one standard deviation, or an array of them like `values`. NaN is
        allowed in gaps, where a measurement is taken to have the error that is given there, or else the root mean
        square of the others. Further noise is learned, which may be next to none. For a Dataset, a mapping from names
        of variables to these, or to the names of the variables that have them. Streamed values have one standard
        deviation.
    :param mean: a background, such as a climatology, the output of a model or the elevation: an array like `values`, or
        a function of the coordinates of all axes, which come as arrays that broadcast, in the units that they have. It
        is scaled: values are ``a + b * background`` and a field, with coefficients that are learned. Several come in a
        list, or in a mapping from their names. It has to be known at observations and in gaps. For a Dataset, one for
        all variables or a mapping by variable, where variables of the Dataset may be given by name.
    :param budget: seconds that a filling may take on one core, about. With less than it would take by default, it does
        without some steps of training, some candidate kernels, some draws for error bars, the check, and error bars, in
        this order; a note of the report says what was left out. The mean is always that of the exact process. Decided
        from counted work and the rounded speed of the machine, not by the clock, so results repeat. Of streamed values
        it limits the training only.
    :param robust: whether to look for wild values: observations out of all proportion to the data, which their
        neighbours do not share. They are not used, are flagged in ``result.distrusted`` and named in the report; `mean`
        has them as they are. ``True`` also predicts every observation from the others, drops those that the model
        cannot explain, and trains again. ``False`` believes all. Streamed arrays are believed.
    :param transform: for skewed and bounded data, a monotone transform of the values that the model is of: ``"log"``;
        ``"logit"``; ``"boxcox"``, a power that is learned; ``"rank"``, which makes the distribution of all observations
        normal; a pair of functions (forward, inverse) of arrays; or ``"auto"``, which compares some of these, and none,
        by the CRPS of withheld observations. Results are in the units of the data: ``result.mean`` has medians,
        ``result.std`` standard deviations; see also ``result.quantile`` and ``result.expectation``. The model is of
        transformed values. For a Dataset also a mapping by variable. Not with `joint`, `noise` or streamed values.
    :param bounds: the least and the largest possible value, such as ``(0, None)`` or ``(0, 1)``, None for no bound: no
        predicted value or quantile is outside. Without `transform`, one bound asks for ``"log"``, two for ``"logit"``;
        if there are observations on a bound, such as days without rain, for ``"rank"``. For a Dataset also a mapping.
    :return: a :class:`Filled` with mean, standard deviation, flags of the gaps, model and report.
    :raises ValueError: if values are not real and finite, if all of them are gaps, if coordinates do not match, or if
        an option is invalid.

    If 95 % intervals cover fewer of the withheld observations than chance explains, or more than 99 % of them, standard
    deviations are multiplied by the factor with which they would cover 95 %, ``result.report.calibrated_by``. Below 85
    and above 99 %, a :class:`CalibrationWarning` says so. ``result.model`` is not changed.

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
                raise ValueError("axes: got some with a Dataset, expected None: its variables have their own")
            return fill_dataset(values, options, _fill)
        if joint:
            raise ValueError(
                f"joint: got True with a {type(values).__name__}, expected an xarray Dataset; along an axis of labels, "
                "the parts of an array inform each other anyway"
            )
        return _fill(_adapt_trusted(values, axes, options), options)


def fit_model(values: Any, axes: Axes = None, **options: Any) -> Any:
    """The trained model with which ``fill_gaps`` fills, conditioned on all observations.

    It is in the units of the data, or of each label's standard deviation if these differ by a factor of three or more.

    :param values: as in :func:`fill_gaps`; always in memory.
    :param axes: as in :func:`fill_gaps`.
    :param options: as in :func:`fill_gaps`.
    :return: an ``ExactGP``; for a Dataset, a dictionary with one per variable.
    """
    checked = Options(**options)
    if is_a(values, "xarray", "Dataset"):
        return fit_dataset(values, checked, _fit)
    return _fit(_adapt_trusted(values, axes, checked), checked)


def _adapt_trusted(values: Any, axes: Axes, options: Options) -> ArrayAdapter:
    """The adapter of the values that are believed."""
    return adapt(values if options.untrusted is None else ignoring(values, options.untrusted), axes)


def is_streamed(adapter: ArrayAdapter) -> bool:
    """Whether ``fill_gaps`` streams the array, because it is too large for a model in memory."""
    return math.prod(adapter.shape) > MAX_CELLS_IN_MEMORY


def _fit(adapter: ArrayAdapter, options: Options) -> FillModel:
    """Chooses a model of the array in memory and conditions it."""
    adapter.load()
    numbers = _numbers(adapter)
    with seeded(options.seed), settings.progress(options.progress):
        filling, chosen = choose_filling(adapter, numbers, Targets(adapter, options, np.isnan(numbers)), options)
        return filling.condition(chosen)


def fit_in_memory(adapter: ArrayAdapter, options: Options) -> Fitted | None:
    """The model of an array in memory, checked and conditioned on all observations; None if there is none to learn."""
    numbers = _numbers(adapter)
    targets = Targets(adapter, options, np.isnan(numbers))
    if nothing_to_learn(numbers, np.isnan(numbers), targets, options):
        return None
    with settings.progress(options.progress), torch.inference_mode(False), torch.enable_grad(), seeded(options.seed):
        filling, chosen = choose_filling(adapter, numbers, targets, options)
        check = filling.check_model(chosen)
        return Fitted(filling, chosen, check, filling.condition(chosen))


def _fill(adapter: ArrayAdapter, options: Options) -> Filled:
    """Reads the array, chooses a model, checks it, predicts, and returns results in the form of the input."""
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
