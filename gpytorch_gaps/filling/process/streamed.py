"""Filling of arrays that are too large for a model in memory: slab by slab, by `reconstruct`.

The held-out check uses `reconstruct` too, on the grid or a part of it, without the withheld observations. The kernel is
a single product. A rough kernel needs all of its eigenvectors. If they do not fit in memory, squared exponentials are
used. If these do not fit either, a lower bound on their length-scales is doubled until they do.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from gpytorch.kernels import Kernel, ScaleKernel

from gpytorch_gaps.filling.arrays.adapters import ArrayAdapter
from gpytorch_gaps.filling.arrays.covariates import read_slab_covariates
from gpytorch_gaps.filling.arrays.grid_values import GridValues, region_around
from gpytorch_gaps.filling.arrays.known_noise import same_variances
from gpytorch_gaps.filling.arrays.options import Options
from gpytorch_gaps.filling.arrays.sentinels import warn_of_sentinels
from gpytorch_gaps.filling.arrays.targets import Targets
from gpytorch_gaps.filling.axes.axis import Axis
from gpytorch_gaps.filling.checking.calibration import Check, check_withheld, sample_gaps
from gpytorch_gaps.filling.checking.holdout import Withheld
from gpytorch_gaps.filling.learning.candidates import KernelLimits
from gpytorch_gaps.filling.learning.choose import ChosenModel, choose_model
from gpytorch_gaps.filling.learning.model import positive
from gpytorch_gaps.filling.learning.predict import widening
from gpytorch_gaps.filling.process.pipeline import Filling, Results
from gpytorch_gaps.filling.process.slab_fields import SlabFields
from gpytorch_gaps.reconstruction.inputs import truncation_level
from gpytorch_gaps.reconstruction.reconstruct import reconstruct
from gpytorch_gaps.reconstruction.result import Reconstruction

MAX_CHECKED_CELLS = 30_000_000
"""Cells of the reconstruction of the held-out check: a part of a larger grid."""

_WEIGHT_VECTORS = 10  # number of vectors with the size of the weights during a solve
_VECTORS_PER_DRAW = 2.5  # three in float32, and one in float64
_DRAWS = 16
_NO_VARIATION = 1e-12  # relative to the mean: if residuals are smaller, all observations are equal
_FIRST_BOUND_CELLS = 1.0  # first bound on length-scales, which is not a restriction
_MAX_SPECTRUM_POINTS = 2048  # number of points for estimates of the eigenvalues of an axis; others are skipped
_CHECKED_SLAB_CELLS = 2**24
_ROUNDING = 1e-15  # relative to the largest eigenvalue


class StreamedFilling(Filling):
    """Fills an array slab by slab, with standard deviations from draws.

    :param adapter: the array, which is read in slabs.
    :param targets: the gaps that are filled.
    """

    def __init__(self, adapter: ArrayAdapter, targets: Targets, options: Options) -> None:
        if options.joint and adapter.units_differ:
            size = " x ".join(map(str, adapter.shape))
            raise ValueError(
                f"joint: got {size} cells, too many for memory; expected at most four million. Try: a part of the "
                "array, or joint=False"
            )
        if options.is_transformed:
            size = " x ".join(map(str, adapter.shape))
            raise ValueError(
                f"transform: got one, or bounds, for {size} cells, which are streamed; expected at most four million "
                "cells. Try: fill a part, or transform values and results yourself"
            )
        noise = None if options.noise is None else same_variances(options.noise, adapter.shape)
        covariates = None
        if options.mean is not None:
            slabs = ((start, ~gaps, ~gaps | filled) for start, gaps, filled in targets.slabs())
            covariates = read_slab_covariates(adapter, options.mean, slabs)
        may_fill = None if targets.are_all else targets.read
        source = GridValues(adapter.axes, adapter.read, may_fill, noise, covariates)
        super().__init__(adapter, source, targets, options)
        self._bound = 0.0  # on length-scales, in cells

    def _choose(self, seen: GridValues) -> ChosenModel:
        """Chooses the model with the smallest bound on length-scales whose weights fit in memory."""
        options, shape, axes = self.options, self.source.shape, self.source.axes
        warn_of_sentinels(self.part.values)
        part = self.part if self.withheld is None else self.part.without(self.withheld.scored)
        may_be_rough = math.prod(shape) * 8 * _WEIGHT_VECTORS <= options.memory and max(shape) <= _MAX_SPECTRUM_POINTS
        all_given = None not in options.kernels_of(axes)
        self._bound = 0.0 if may_be_rough or all_given else _FIRST_BOUND_CELLS
        while True:
            limits = KernelLimits(one_term=True, shortest_cells=self._bound)
            chosen = choose_model(seen, part, options, self.generator, limits, self.budget)
            needed = math.prod(_ranks(chosen, axes, self._noise(chosen), options)) * 8 * _WEIGHT_VECTORS
            if needed <= options.memory:
                return chosen
            if all_given or self._bound > max(shape):
                came = f"{needed / 2**30:.3g} GiB" if math.isfinite(needed) else "too much memory and time"
                raise ValueError(
                    f"kernels: their eigenvectors take {came}, expected at most {options.memory / 2**30:.3g} GiB: "
                    "pass a larger memory, smoother kernels or longer length-scales"
                )
            self._bound = max(_FIRST_BOUND_CELLS, 2 * self._bound)

    def _check(self, chosen: ChosenModel, withheld: Withheld) -> Check:
        """Takes means from `reconstruct` and variances from a model of the part in memory."""
        part = self.part
        some_gaps = sample_gaps(part.targets, self.generator, part.orientation)
        region = region_around(part.positions, self.source.shape, MAX_CHECKED_CELLS)
        others = self.source.without(part, withheld.hidden)
        step = max(1, _CHECKED_SLAB_CELLS // math.prod(map(len, region[1:])))
        slabs = (others.read([region[0][at : at + step], *region[1:]]) for at in range(0, len(region[0]), step))
        axes = [axis.at(positions) for axis, positions in zip(self.source.axes, region, strict=True)]
        result = self._reconstruct(slabs, axes, chosen)
        inside = [p - int(whole[0]) for p, whole in zip(part.positions, region, strict=True)]
        rows = result.slab(int(inside[0][0]), int(inside[0][-1]) + 1).cpu().numpy()
        mean = rows[np.ix_(np.arange(len(rows)), *inside[1:])][withheld.scored]
        model = chosen.conditioned(part.without(withheld.hidden))
        return check_withheld(model, part, withheld, self.options, chosen.noise_at, some_gaps, mean)

    def predict(self, chosen: ChosenModel, check: Check | None) -> Results:
        draws = _DRAWS if self.options.std and self._draws_fit(chosen) else 0
        with self.stopwatch("mean and draws" if draws else "mean"):
            result = self._reconstruct(self.adapter.array, self.source.axes, chosen, draws)
        wider, noise = widening(result.report.num_train), self._noise(chosen)
        gap_variance = None if check is None else check.gap_variance
        if draws and self.part.targets.any():
            in_gaps = result.variance_at(self.part.positions).double().cpu().numpy()[self.part.targets]
            gap_variance = wider**2 * (float(in_gaps.mean()) + noise)
        residual = result.report.misfit * math.sqrt(noise)  # root mean square
        no_variation = residual <= _NO_VARIATION * abs(float(chosen.mean.constant))
        factor = wider
        if no_variation:  # the data do not determine a variance
            factor, gap_variance = math.nan, None
        fields = SlabFields(self.adapter, self.targets, self.options.smooth, result, noise, factor, check)
        mean, std, gaps = fields.in_chunks() if self.adapter.chunked else fields.computed()
        num_gaps, num_left = math.prod(self.source.shape) - result.report.num_train, 0
        if not self.targets.are_all:
            num_gaps, num_left = self.targets.count()
        about = {"noise_std": math.sqrt(noise), "solve": result.report, "std_method": result.report.std_accuracy}
        report = self._report(
            chosen, check, gap_variance, self._notes(bool(draws), no_variation), num_gaps, num_left, **about
        )
        return Results(mean, std, gaps, None, report)

    def _draws_fit(self, chosen: ChosenModel) -> bool:
        """Whether draws fit in memory. The kernel was chosen for the memory of the mean only."""
        weights = math.prod(_ranks(chosen, self.source.axes, self._noise(chosen), self.options))
        return 8 * weights * (_WEIGHT_VECTORS + _VECTORS_PER_DRAW * _DRAWS) <= self.options.memory

    def _notes(self, drawn: bool, no_variation: bool) -> list[str]:
        notes = ["values were streamed: there is no model in memory"]
        if drawn and no_variation:
            notes.append("all observations are equal. No uncertainty estimate is available: std is NaN in the gaps.")
        if self.options.std and not drawn:
            memory = f"{self.options.memory / 2**30:.3g} GiB"
            notes.append(f"there are no standard deviations: draws do not fit in {memory}; pass a larger memory")
        if self._bound:
            bound = f", length-scales held above {self._bound:g} cells" if self._bound > _FIRST_BOUND_CELLS else ""
            notes.append(f"only smooth kernels were tried{bound}, to fit in {self.options.memory / 2**30:.3g} GiB")
        return notes

    def _noise(self, chosen: ChosenModel) -> float:
        """The variance of the errors of measurements."""
        return chosen.noise + (0.0 if self.source.noise is None else float(self.source.noise.flat[0]))

    def _reconstruct(self, values: Any, axes: Iterable[Axis], chosen: ChosenModel, draws: int = 0) -> Reconstruction:
        return reconstruct(
            values,
            [axis.points for axis in axes],
            _kernels(chosen),
            self._noise(chosen),
            mean=chosen.mean if chosen.mean.varies else float(chosen.mean.constant),
            tolerance=self.options.tolerance,
            memory=self.options.memory,
            draws=draws,
            seed=self.options.seed,
            progress=self.options.progress,
        )


def _kernels(chosen: ChosenModel) -> list[Kernel]:
    """One kernel per axis; the first includes the scale."""
    (term,) = chosen.learned.terms
    first = ScaleKernel(term.kernels[0], outputscale_constraint=positive())
    first.outputscale = term.scale.detach()
    return [first.double(), *list(term.kernels)[1:]]


def _ranks(chosen: ChosenModel, axes: Sequence[Axis], noise: float, options: Options) -> list[float]:
    """Number of eigenvectors that each axis needs, before any value is read.

    The spectrum of a long axis of m points is estimated from n of them. Their eigenvalues are about ``n / m`` times the
    largest ones of all points. The number is infinite if these points do not resolve the kernel; its decomposition
    would take far too long.
    """
    spectra = []
    with torch.no_grad():
        for kernel, axis in zip(_kernels(chosen), axes, strict=True):
            some = torch.from_numpy(axis.points[:: -(-axis.size // _MAX_SPECTRUM_POINTS)].copy())
            spectra.append(torch.linalg.eigvalsh(kernel(some).to_dense()) * (axis.size / len(some)))
    largest = [float(values[-1]) for values in spectra]
    share = truncation_level(options.tolerance, math.prod(axis.size for axis in axes))
    level = max(share * noise, _ROUNDING * math.prod(largest))
    ranks = []
    for number, (axis, values) in enumerate(zip(axes, spectra, strict=True)):
        others = math.prod(largest[:number] + largest[number + 1 :])
        rank = float(max(1, (values * others >= level).sum()))
        ranks.append(math.inf if len(values) < axis.size and rank > len(values) / 2 else rank)
    return ranks
