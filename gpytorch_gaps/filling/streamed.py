"""Filling what is too large for a model in memory, or read piece by piece: kernels from windows, then `reconstruct`.

The held-out check runs `reconstruct` as well, on the grid without what is withheld, or a part of it. The kernel is a
single product here, and a squared exponential where a rougher one, which needs all of its eigenvectors,
would not fit in memory. Its short length-scales are held up, from doubling to doubling, until those that it needs do.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gpytorch.kernels import Kernel, ScaleKernel

from gpytorch_gaps.filling.axes import Axis
from gpytorch_gaps.filling.check import Check, some_gaps, worth
from gpytorch_gaps.filling.in_memory import ROUGHER, Clock, check_part, quietly, refuse_long_axes
from gpytorch_gaps.filling.kinds import Kind
from gpytorch_gaps.filling.model import positive
from gpytorch_gaps.filling.options import Options
from gpytorch_gaps.filling.prepare import Prepared, prepare
from gpytorch_gaps.filling.report import FillReport
from gpytorch_gaps.filling.windows import Reader
from gpytorch_gaps.filling.withhold import Withheld, choose_part, region_around, withhold
from gpytorch_gaps.reconstruction.inputs import truncation_level
from gpytorch_gaps.reconstruction.reconstruct import reconstruct
from gpytorch_gaps.reconstruction.result import Reconstruction

CHECKED = 30_000_000
"""Cells of the reconstruction that is checked: of a larger grid, a part."""

_VECTORS = 10  # of the size of the weights, that a solve holds
_FIRST_FLOOR = 1.0  # cells: no restriction yet
_TABLE = 2048  # places of an axis by which its eigenvalues are judged: of a longer one, every so many
_SLAB = 2**24  # cells of it that are read at a time
_ROUNDING = 1e-15  # of the largest eigenvalue: smaller ones are lost in rounding


def fill_streamed(kind: Kind, options: Options) -> tuple[Reconstruction, Prepared, FillReport]:
    """The posterior mean, to be given out slab by slab, and how it was found."""
    clock, generator, axes = Clock(), np.random.default_rng(options.seed), kind.axes
    read = reader_of(kind)
    refuse_long_axes(axes, options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        positions, part = choose_part(read, kind.shape, generator)
        withheld = withhold(part, generator) if options.check else None
        with clock("training"):
            seen = read if withheld is None else _without(read, positions, withheld.scored)
            known = part if withheld is None else np.where(withheld.scored, np.nan, part)
            corner = [int(p[0]) for p in positions]
            prepared, floor = _affordable(seen, kind, options, generator, known, corner)
        check = None
        if withheld is not None:
            with clock("held-out check"):
                gaps = some_gaps(part, generator)
                check = _check(read, kind, positions, part, withheld, gaps, prepared, options)
        with clock("mean"):
            result = _reconstruct(kind.array, axes, prepared, options)
    notes = [*prepared.notes, "values were streamed: there are no standard deviations, and no model in memory"]
    if floor:
        held_up = f", length-scales held above {floor:g} cells" if floor > _FIRST_FLOOR else ""
        notes.append(f"only smooth kernels were tried{held_up}, so that {options.memory / 2**30:.3g} GiB suffice")
    report = FillReport(
        shape=kind.shape,
        num_gaps=math.prod(kind.shape) - result.report.num_train,
        axes=tuple(map(str, axes)),
        kernel=prepared.learned.name,
        noise_std=math.sqrt(_noise(prepared)),
        **worth(check, None if check is None else check.gap_variance, notes),
        solve=result.report,
        history=prepared.learned.history,
        seconds=clock.seconds,
    )
    return result, prepared, report


def _reconstruct(values: Any, axes: Sequence[Axis], prepared: Prepared, options: Options) -> Reconstruction:
    return reconstruct(
        values,
        [axis.points for axis in axes],
        _kernels(prepared),
        _noise(prepared),
        mean=float(prepared.mean.constant),
        tolerance=options.tolerance,
        memory=options.memory,
        progress=options.progress,
    )


def _noise(prepared: Prepared) -> float:
    return float(prepared.learned.likelihood.noise.detach())


def _check(
    read: Reader, kind: Kind, positions: Sequence[np.ndarray], part: np.ndarray, withheld: Withheld, gaps: np.ndarray,
    prepared: Prepared, options: Options,
) -> Check:  # fmt: skip
    """Withheld observations as `reconstruct` predicts them, beside the variances of a model of the part in memory."""
    region = region_around(positions, kind.shape, CHECKED)
    left = _without(read, positions, withheld.hidden)
    step = max(1, _SLAB // math.prod(map(len, region[1:])))
    slabs = (left([region[0][at : at + step], *region[1:]]) for at in range(0, len(region[0]), step))
    there = [Axis(a.name, a.kind, a.points[p], a.unit) for a, p in zip(kind.axes, region, strict=True)]
    result = _reconstruct(slabs, there, prepared, options)
    inside = [p - int(whole[0]) for p, whole in zip(positions, region, strict=True)]
    rows = result.slab(int(inside[0][0]), int(inside[0][-1]) + 1).cpu().numpy()
    mean = rows[np.ix_(np.arange(len(rows)), *inside[1:])][withheld.scored]
    with quietly(options, ROUGHER):
        return check_part(part, kind.axes, positions, withheld, prepared, gaps, mean=mean)


def _affordable(
    read: Reader, kind: Kind, options: Options, generator: np.random.Generator,
    part: np.ndarray, corner: Sequence[int],
) -> tuple[Prepared, float]:  # fmt: skip
    """What was learned with the least floor under length-scales whose weights fit in memory."""
    rough = math.prod(kind.shape) * 8 * _VECTORS <= options.memory and max(kind.shape) <= _TABLE
    floor = 0.0 if rough or None not in options.kernels_of(kind.axes) else _FIRST_FLOOR
    while True:
        prepared = prepare(read, kind.shape, kind.axes, options, generator, part, True, floor, corner)
        needed = math.prod(_ranks(prepared, kind.axes, options)) * 8 * _VECTORS
        if needed <= options.memory:
            return prepared, floor
        if None not in options.kernels_of(kind.axes) or floor > max(kind.shape):
            took = f"{needed / 2**30:.3g} GiB" if math.isfinite(needed) else "too long"
            raise ValueError(
                f"kernels: their eigenvectors take {took}, expected at most {options.memory / 2**30:.3g} GiB: pass a "
                "larger memory, smoother kernels or longer length-scales"
            )
        floor = max(_FIRST_FLOOR, 2 * floor)


def _ranks(prepared: Prepared, axes: Sequence[Axis], options: Options) -> list[float]:
    """Eigenvectors that each axis needs, before any value is read.

    Those of a long axis from its eigenvalues at some of its places, which are the first of all ``m / n`` times smaller;
    infinite where these places do not resolve the kernel, whose decomposition would take far too long then.
    """
    spectra = []
    with torch.no_grad():
        for kernel, axis in zip(_kernels(prepared), axes, strict=True):
            some = torch.from_numpy(axis.points[:: -(-axis.size // _TABLE)].copy())
            spectra.append(torch.linalg.eigvalsh(kernel(some).to_dense()) * (axis.size / len(some)))
    tops = [float(values[-1]) for values in spectra]
    share = truncation_level(options.tolerance, math.prod(axis.size for axis in axes))
    level = max(share * _noise(prepared), _ROUNDING * math.prod(tops))
    ranks = []
    for number, (axis, values) in enumerate(zip(axes, spectra, strict=True)):
        others = math.prod(tops[:number] + tops[number + 1 :])
        rank = float(max(1, (values * others >= level).sum()))
        ranks.append(math.inf if len(values) < axis.size and rank > len(values) / 2 else rank)
    return ranks


def _kernels(prepared: Prepared) -> list[Kernel]:
    """One for each axis; the scale goes with the first."""
    (term,) = prepared.learned.terms
    first = ScaleKernel(term.kernels[0], outputscale_constraint=positive())
    first.outputscale = term.scale.detach()
    return [first.double(), *list(term.kernels)[1:]]


def reader_of(kind: Kind) -> Reader:
    """Values at a product of positions, axis by axis, as files and chunks are read: steps as slices."""

    def read(positions: Sequence[np.ndarray]) -> np.ndarray:
        part: Any = kind.array
        for axis, at in enumerate(positions):
            steps = np.unique(np.diff(at))
            even = len(steps) <= 1
            index: Any = slice(int(at[0]), int(at[-1]) + 1, int(steps[0]) if len(steps) else 1) if even else at
            part = part[(slice(None),) * axis + (index,)]
        part = part if np.ma.isMaskedArray(part) else np.asarray(part)
        numbers = np.ma.filled(part.astype(np.float64), np.nan)
        if np.isinf(numbers).any():
            raise ValueError("values: got infinite entries, expected finite values, or NaN for gaps")
        return numbers

    return read


def _without(read: Reader, positions: Sequence[np.ndarray], held: np.ndarray) -> Reader:
    """The same reader, blind to what is withheld in the part at `positions`."""
    starts = [int(p[0]) for p in positions]

    def blind(wanted: Sequence[np.ndarray]) -> np.ndarray:
        values = read(wanted)
        inside = [(p >= s) & (p < s + m) for p, s, m in zip(wanted, starts, held.shape, strict=True)]
        if all(flags.any() for flags in inside):
            there = np.ix_(*[p[flags] - s for p, flags, s in zip(wanted, inside, starts, strict=True)])
            seen = values[np.ix_(*inside)]
            values[np.ix_(*inside)] = np.where(held[there], np.nan, seen)
        return values

    return blind
