"""The covariance of a block of axes: a matrix, or an operator if the kernel is stationary along regular axes.

For an operator, the kernel is evaluated at the lags of a lattice instead of at all pairs of points. Coordinates lie on
a lattice if they are multiples of one step, apart from rounding. Places of the lattice may be missing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gpytorch.kernels import AdditiveKernel, Kernel, ProductKernel, ScaleKernel
from scipy.fft import next_fast_len
from torch import Tensor

from gpytorch_gaps.linalg.circulant import CirculantOperator
from gpytorch_gaps.linalg.factors import Factor, asymmetry, negative_share
from gpytorch_gaps.linalg.positions import Positions
from gpytorch_gaps.operators.float64_covariance import covariance_in_float64
from gpytorch_gaps.operators.inspect import resolve_active_dims

MAX_DENSE = 8192  # points of a block whose covariance is a matrix: 0.5 GiB
MAX_DENSE_AXIS = 2**15  # points of a single axis whose covariance is a matrix: 8 GiB
LONG_AXIS = 3000  # an axis with as many points uses FFTs instead of a matrix with eigenvectors
LONG_SERIES = 2000  # the same for the only axis of a grid: one decomposition costs more than many solves
_MAX_TABLE = 2**27  # covariances by lag: 1 GiB
_PLACES_PER_LEVEL = 8  # places of the lattice; with more of them, coordinates count as irregular
_FINEST = 12  # the smallest distance and its fractions down to 1/12 are tried as a step
_STEP_ROUNDING = 1e-6  # allowed rounding of coordinates, as a fraction of a step
_EPS_ROUNDING = 8.0  # allowed rounding of coordinates, in units of eps times the largest
_MAX_STORED_ROUNDING = 0.01  # fraction of a step, for coordinates that may have been rounded to float32 in a file
_MAX_STEP_ROUNDING = 0.125  # fraction of a step, for all coordinates
_PAIRS = 64  # pairs of points at which the symmetries of a kernel are tested
_VARIATION = 1e-4  # differences of covariances that count as equal, as a fraction of the largest covariance
_GROWTH = (1, 2, 4)  # factors of the padding that are tried until a torus is positive definite

Period = float | None
_Axis = tuple[float, Positions, Positions, int]  # step, places in rows and columns, and span
_ANY_PERIOD = 0.0  # a constant has any period


@dataclass(frozen=True)
class Lattice:
    """The places of the levels of a block's stationary axes. The dense axes of the block come first.

    :param num_dense: number of dense axes.
    :param steps: distance of neighbouring places on each stationary axis.
    :param rows: places of the levels of the rows.
    :param columns: places of the levels of the columns.
    :param spans: the largest lag plus one, in places.
    :param periods: the period of the covariance along each axis, or None.
    """

    num_dense: int
    steps: tuple[float, ...]
    rows: tuple[Positions, ...]
    columns: tuple[Positions, ...]
    spans: tuple[int, ...]
    periods: tuple[Period, ...]

    def torus(self, growth: int) -> tuple[int, ...]:
        """Number of places on each circle: one period if it is known, else `growth` times twice the span."""
        return tuple(map(_circle, self.spans, self.steps, self.periods, [growth] * len(self.steps)))


def _circle(span: int, step: float, period: Period, growth: int) -> int:
    padded, closed = int(next_fast_len(growth * (2 * span - 1), real=True)), _steps_around(step, period)
    if closed >= span and (growth > 1 or closed <= 2 * padded):
        return closed  # no padding: the circle itself
    return padded


def _steps_around(step: float, period: Period) -> int:
    """Steps in a period, 0 if it is not a multiple of the step."""
    closed = 0 if period is None else round(period / step)
    return closed if period is not None and abs(closed * step - period) <= _STEP_ROUNDING * step else 0


def _around(axis: _Axis, period: Period, device: torch.device) -> _Axis:
    """The places of an axis on its circle, if it reaches further: both of its ends may be the same place."""
    step, rows, columns, span = axis
    closed = _steps_around(step, period)
    if not 0 < closed < span:
        return axis
    return step, _modulo(rows, closed, device), _modulo(columns, closed, device), closed


def _modulo(positions: Positions, closed: int, device: torch.device) -> Positions:
    if not torch.is_tensor(positions):
        positions = positions if positions <= closed else torch.arange(positions, device=device)
    return positions % closed if torch.is_tensor(positions) else positions


# -- which axes ------------------------------------------------------------------------------------------------------


def stationary_columns(kernel: Kernel, num_columns: int) -> dict[int, Period]:
    """The columns along which a kernel depends only on lags, each with its period.

    A custom kernel can declare them by an attribute of this name, as :class:`gpytorch_gaps.SphereKernel` does.
    """
    own = getattr(kernel, "stationary_columns", None)
    if own is not None:
        return own
    if isinstance(kernel, ScaleKernel):
        return stationary_columns(kernel.base_kernel, num_columns)
    if isinstance(kernel, AdditiveKernel | ProductKernel):
        return _along_all([_through_active_dims(child, num_columns) for child in kernel.kernels], num_columns)
    return dict.fromkeys(range(num_columns)) if kernel.is_stationary else {}


def _through_active_dims(kernel: Kernel, num_columns: int) -> dict[int, Period]:
    """The stationary columns of a kernel with `active_dims`. It is constant along the columns that it does not use."""
    seen = resolve_active_dims(kernel, tuple(range(num_columns)))
    own = stationary_columns(kernel, len(seen))
    found: dict[int, Period] = dict.fromkeys(set(range(num_columns)) - set(seen), _ANY_PERIOD)
    return found | {seen[place]: period for place, period in own.items()}


def _along_all(found: Sequence[dict[int, Period]], num_columns: int) -> dict[int, Period]:
    common = [column for column in range(num_columns) if all(column in own for own in found)]
    periods = {column: {own[column] for own in found} - {_ANY_PERIOD} or {_ANY_PERIOD} for column in common}
    return {column: own.pop() if len(own) == 1 else None for column, own in periods.items()}


def find_lattice(kernel: Kernel, rows: Sequence[Tensor], columns: Sequence[Tensor]) -> Lattice | None:
    """The lattice on which the levels of a block of axes lie, for rows and columns; None if there is none.

    :param rows: coordinates of the rows on every axis of the block, shape (q_i, d_i) each.
    :param columns: coordinates of the columns, shape (m_i, d_i) each.
    """
    widths = [axis.size(-1) for axis in rows]
    periods = _through_active_dims(kernel, sum(widths))
    stationary = [sum(widths[:axis]) if widths[axis] == 1 else -1 for axis in range(len(rows))]
    found = [
        regular_positions(row.squeeze(-1), column.squeeze(-1)) if first in periods else None
        for first, row, column in zip(stationary, rows, columns, strict=True)
    ]
    num_dense = max((axis + 1 for axis, own in enumerate(found) if own is None), default=0)
    lattices = [own for own in found[num_dense:] if own is not None]
    if not lattices:
        return None
    own_periods = tuple(periods[first] or None for first in stationary[num_dense:])
    around = [_around(*own, rows[0].device) for own in zip(lattices, own_periods, strict=True)]
    step, row_positions, col_positions, span = zip(*around, strict=True)
    lattice = Lattice(num_dense, step, row_positions, col_positions, span, own_periods)
    dense = math.prod(len(axis) for axis in rows[:num_dense]) * math.prod(len(axis) for axis in columns[:num_dense])
    fits = dense * math.prod(places // 2 + 1 for places in lattice.torus(1)) <= _MAX_TABLE
    return lattice if fits and _is_invariant(kernel, rows, lattice) else None


def regular_positions(rows: Tensor, columns: Tensor) -> tuple[float, Positions, Positions, int] | None:
    """The step of the lattice of two sets of coordinates, their places on it, and its span; None if there is none.

    >>> regular_positions(torch.tensor([0.0, 0.5, 1.5]), torch.tensor([1.0, 2.0]))
    (0.5, tensor([0, 1, 3]), tensor([2, 4]), 5)
    """
    both = torch.cat([rows, columns]).detach().double().cpu()
    away = both.sort().values.diff()
    rounding, of_float32 = (
        _EPS_ROUNDING * torch.finfo(dtype).eps * float(both.abs().max()) for dtype in (rows.dtype, torch.float32)
    )
    was_float32 = bool((both == both.float()).all())  # files often store coordinates as float32
    away = away[away > rounding]
    if not len(away):
        return (1.0, 1, 1, 1) if len(rows) == len(columns) == 1 else None
    span, least = float(both.max() - both.min()), float(away.min())
    least = float(away[away < (1.0 + 0.5 / _FINEST) * least].mean())  # one distance alone has more rounding
    backwards = len(rows) > 1 and bool(rows[0] > rows[-1])
    from_start = both.max() - both if backwards else both - both.min()
    for fraction in range(1, _FINEST + 1):
        count = int((away * (fraction / least)).round().sum())
        if count + 1 > _PLACES_PER_LEVEL * len(both):
            return None
        step = span / count
        places = (from_start / step).round()
        # with a larger tolerance, any coordinate would be close to some place
        allowed = min(_STEP_ROUNDING * step + rounding, _MAX_STEP_ROUNDING * step)
        if was_float32:
            allowed = max(allowed, min(of_float32, _MAX_STORED_ROUNDING * step))
        if bool(((from_start - places * step).abs() <= allowed).all()):
            own, other = places.long().split([len(rows), len(columns)])
            return step, _as_positions(own, rows.device), _as_positions(other, rows.device), count + 1
    return None


def _as_positions(places: Tensor, device: torch.device) -> Positions:
    first = bool((places == torch.arange(len(places))).all())
    return len(places) if first else places.to(device)


def _is_invariant(kernel: Kernel, axes: Sequence[Tensor], lattice: Lattice) -> bool:
    """Tests at some pairs of points whether a kernel is stationary, and even, along the axes of a lattice.

    Half of the pairs are neighbours: with a short length-scale, the covariances of the others are all zero.
    """
    generator, pairs = torch.Generator().manual_seed(0), []
    for axis in axes:
        first = torch.randint(len(axis), (_PAIRS,), generator=generator)
        second = torch.randint(len(axis), (_PAIRS,), generator=generator)
        near = first + torch.randint(-2, 3, (_PAIRS,), generator=generator)
        second[::2] = near.clamp(0, len(axis) - 1)[::2]
        pairs.append([axis[level.to(axis.device)] for level in (first, second)])
    first, second = (torch.cat(side, -1) for side in zip(*pairs, strict=True))
    # pairs with the same lags that start at the origin, like the entries of a lag table
    dense, lag = sum(axis.size(-1) for axis in axes[: lattice.num_dense]), (first.double() - second.double()).abs()
    start = torch.cat([first[:, :dense], torch.zeros_like(first[:, dense:])], -1)
    end = torch.cat([second[:, :dense], lag[:, dense:].to(second.dtype)], -1)
    with torch.no_grad():
        value, by_lag = (covariance_in_float64(kernel, *pair, diag=True) for pair in ((first, second), (start, end)))
    return bool(((value - by_lag).abs() <= _VARIATION * value.abs().amax()).all())


# -- covariances -----------------------------------------------------------------------------------------------------


def block_factor(
    kernel: Kernel,
    rows: Sequence[Tensor],
    columns: Sequence[Tensor],
    lattice: Lattice | None,
    definite: bool = False,
    **params: Any,
) -> Factor:
    """The covariance of a block of axes, in float64 if the kernel allows it. shape: (*batch, prod q_i, prod m_i)

    :param lattice: the result of :func:`find_lattice`; None for a matrix.
    :param definite: whether to try larger tori until one is positive definite, for draws. Products use the smallest.
    """
    if lattice is None:
        return covariance_in_float64(kernel, block_points(rows), block_points(columns), **params)
    for growth in _GROWTH if definite else _GROWTH[:1]:
        torus = lattice.torus(growth)
        table = _lag_table(kernel, rows, columns, lattice, torus, params)
        sides = {"row_positions": lattice.rows, "col_positions": lattice.columns}
        found = CirculantOperator(table, torus=torus, inner=lattice.torus(1), **sides)
        if not definite or not _is_whole(found) or negative_share(found) == 0.0:
            break
        if growth < _GROWTH[-1] and table.numel() * 2 ** len(torus) > _MAX_TABLE:
            break
    return found


def _is_whole(covariance: CirculantOperator) -> bool:
    """Whether the covariance on the whole torus is symmetric, so that it has eigenvalues."""
    if covariance.num_dense[0] != covariance.num_dense[1]:
        return False
    difference, size = asymmetry(covariance).tolist() if covariance.num_dense[0] > 1 else (0.0, 1.0)
    return difference <= _VARIATION * size


def block_points(axes: Sequence[Tensor]) -> Tensor:
    """All combinations of one row from each axis, the last fastest. shape: (m_i, d_i) each -> (prod m_i, Σ d_i)"""
    points = axes[0]
    for axis in axes[1:]:
        left = points.repeat_interleave(len(axis), 0)
        points = torch.cat([left, axis.repeat(len(points), 1)], -1)
    return points


def _lag_table(
    kernel: Kernel,
    rows: Sequence[Tensor],
    columns: Sequence[Tensor],
    lattice: Lattice,
    torus: Sequence[int],
    params: dict[str, Any],
) -> Tensor:
    """Covariances by lag. shape: (*batch, a, b, n_1 // 2 + 1, ...)"""
    like: dict[str, Any] = {"dtype": rows[0].dtype, "device": rows[0].device}
    lags = [
        (step * torch.arange(places // 2 + 1, dtype=torch.float64, device=like["device"])).to(**like).unsqueeze(-1)
        for step, places in zip(lattice.steps, torus, strict=True)
    ]
    # lags from zero are exact; differences of large coordinates are not
    origin = torch.zeros(1, len(lags), **like)
    first = block_points([*rows[: lattice.num_dense], origin])
    second = block_points([*columns[: lattice.num_dense], *lags])
    covariance = covariance_in_float64(kernel, first, second, **params)
    dense = len(second) // math.prod(len(own) for own in lags)
    return covariance.unflatten(-1, (dense, *(len(own) for own in lags)))
