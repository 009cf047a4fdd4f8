"""Backgrounds: known fields. The mean of the Gaussian process is a linear function of them.

    m(x) = c + Σ_k a_k g_k(x) + ..

g_k is a table on the grid, such as a climatology or the elevation, or a function of the coordinates. The coefficients
a_k are estimated with the rest of the mean, see :mod:`gpytorch_gaps.filling.learning.estimates`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpytorch_gaps.filling.arrays.adapters import ArrayAdapter
from gpytorch_gaps.filling.arrays.same_grid import on_grid
from gpytorch_gaps.filling.arrays.variables import VariablesAdapter
from gpytorch_gaps.filling.axes.axis import Axis
from gpytorch_gaps.filling.axes.decoding import broadcastable, decoded
from gpytorch_gaps.grid.cartesian import CartesianGrid

Function = Callable[..., Any]
"""A function of the coordinates of all axes. It receives arrays that broadcast, in the units of the user."""

Slab = tuple[int, np.ndarray, np.ndarray]
"""First slice along the first axis, flags of observed cells, and flags of cells where backgrounds must be known."""


@dataclass(frozen=True, eq=False)
class Background:
    """One field: its name, and its `values` on the grid, its `function` of the coordinates, or both.

    Values may be a broadcast view.
    """

    name: str
    values: np.ndarray | None
    function: Function | None = None

    def rows(self, axes: Sequence[Axis], start: int, stop: int) -> np.ndarray:
        """The values in the slices `start` to `stop` of the first axis."""
        if self.values is not None:
            return self.values[start:stop]
        assert self.function is not None
        first, *others = broadcastable(axes)
        shape = (stop - start, *(axis.size for axis in axes[1:]))
        return _numbers(self.name, self.function(first[start:stop], *others), shape)


class Covariates(torch.nn.Module):
    """The values of backgrounds at points, from the grid or from functions.

    :param backgrounds: fields on the same grid.
    :param axes: the axes of the grid.
    :param missing: the value at points where a background is not known. Default: such points raise a ValueError.
    """

    def __init__(self, backgrounds: Sequence[Background], axes: Sequence[Axis], missing: float | None = None) -> None:
        super().__init__()
        self.names, self._missing = [one.name for one in backgrounds], missing
        self._functions, self._axes = [one.function for one in backgrounds], list(axes)
        self.grid = CartesianGrid([torch.from_numpy(axis.points) for axis in axes])
        for number, one in enumerate(backgrounds):
            values = None if one.values is None else torch.from_numpy(np.array(_without_repetition(one.values)))
            self.register_buffer(f"values_{number}", values)

    def forward(self, x: Tensor) -> Tensor:
        """shape: (*, D) -> (*, K)"""
        positions = self.grid.axis_index_of(x)
        off = (positions < 0).any(0)
        found = torch.stack([self._at(number, positions, off, x) for number in range(len(self.names))], -1)
        unknown = ~found.isfinite()
        if self._missing is not None:
            return found.masked_fill(unknown, self._missing)
        if bool(unknown.any()):
            name = self.names[int(unknown.flatten(end_dim=-2).any(0).nonzero()[0])]
            raise ValueError(f"mean: {name} is NaN or infinite at a point of x; expected points where it is known")
        return found

    def on_grid(self, coefficients: Tensor) -> np.ndarray:
        """The sum of all backgrounds, each times its coefficient, on the whole grid."""
        total = np.zeros(tuple(axis.size for axis in self._axes))
        for number, coefficient in enumerate(coefficients.tolist()):
            values, function = getattr(self, f"values_{number}"), self._functions[number]
            if values is None and function is not None:
                total += coefficient * _numbers(self.names[number], function(*broadcastable(self._axes)), total.shape)
            else:
                total += coefficient * values.numpy(force=True)
        return total

    def _at(self, number: int, positions: Tensor, off: Tensor, x: Tensor) -> Tensor:
        """One background at points. shape: (*, D) -> (*)

        :param positions: positions of the points on each axis. shape: (d, *)
        :param off: flags of the points off the grid.
        """
        values: Tensor | None = getattr(self, f"values_{number}")
        if values is None:
            return self._elsewhere(number, x.flatten(end_dim=-2)).view(off.shape)
        repeated = torch.tensor(values.shape, device=x.device).view(-1, *[1] * off.dim()) == 1
        found = values[tuple(positions.clamp_min(0).masked_fill(repeated, 0))]
        if bool(off.any()):
            found[off] = self._elsewhere(number, x[off])
        return found

    def _elsewhere(self, number: int, x: Tensor) -> Tensor:
        """The function of one background at any points. shape: (Q, D) -> (Q,)"""
        name, function = self.names[number], self._functions[number]
        if function is None:
            raise ValueError(
                f"mean: {name} is an array, known only at the cells of the grid; got the point "
                f"{x[0].tolist()} off the grid; expected cells, or a function of the coordinates as background"
            )
        points = [part.numpy(force=True) for part in x.split([axis.points.shape[1] for axis in self._axes], -1)]
        arguments = [decoded(axis, part) for axis, part in zip(self._axes, points, strict=True)]
        return torch.from_numpy(np.array(_numbers(name, function(*arguments), (len(x),)))).to(x)


def _without_repetition(values: np.ndarray) -> np.ndarray:
    """The array with size one along dimensions that were broadcast."""
    return values[tuple(slice(1) if stride == 0 else slice(None) for stride in values.strides)]


def read_covariates(
    adapter: ArrayAdapter, given: Any, known: np.ndarray, needed: np.ndarray, scales: np.ndarray | None
) -> Covariates:
    """The backgrounds of an array in memory, checked.

    :param given: the argument ``mean`` of ``fill_gaps``.
    :param known: flags of the observed cells.
    :param needed: flags of the cells where backgrounds must be known.
    :param scales: divisors of the values. Backgrounds are divided too, so that coefficients do not change.
    :raises ValueError: if a background does not fit the grid, is not known where it is needed, or is constant.
    """
    axes, size = adapter.axes, adapter.shape[0]
    backgrounds = [replace(one, values=one.rows(axes, 0, size)) for one in _read(adapter, given, known)]
    _check(backgrounds, axes, [(0, known, needed)])
    if scales is not None:
        backgrounds = [_divided(one, scales, axes) for one in backgrounds]
    return Covariates(backgrounds, axes)


def read_slab_covariates(adapter: ArrayAdapter, given: Any, slabs: Iterable[Slab]) -> Covariates:
    """The backgrounds of an array that is read slab by slab, checked. Functions are evaluated only where needed.

    :param given: the argument ``mean`` of ``fill_gaps``. Arrays are kept in memory with their own dimensions.
    :param slabs: all slabs of the array.
    :raises ValueError: as in :func:`read_covariates`.
    """
    backgrounds = _read(adapter, given)
    _check(backgrounds, adapter.axes, slabs)
    return Covariates(backgrounds, adapter.axes, missing=0.0)  # at cells that are neither observed nor filled


def _check(backgrounds: Sequence[Background], axes: Sequence[Axis], slabs: Iterable[Slab]) -> None:
    """Checks that backgrounds are known where they are needed, that they vary, and that there are not too many."""
    count, ranges = 0, {one.name: (np.inf, -np.inf) for one in backgrounds}
    for start, known, needed in slabs:
        count += int(known.sum())
        for one in backgrounds:
            rows = one.rows(axes, start, start + len(known))
            bad = needed & ~np.isfinite(rows)
            if bad.any():
                at = tuple(map(int, np.argwhere(bad)[0]))
                what, cell = "an observation" if known[at] else "a gap", (start + at[0], *at[1:])
                raise ValueError(
                    f"mean: {one.name} is {rows[at]} at the cell {cell}, {what}; expected a finite background "
                    "there. Try filling it first, or where= for the cells that have one"
                )
            seen, (least, largest) = rows[known], ranges[one.name]
            ranges[one.name] = min(least, seen.min(initial=np.inf)), max(largest, seen.max(initial=-np.inf))
    for name, (least, largest) in ranges.items():
        if largest <= least:
            raise ValueError(
                f"mean: {name} is the same at all observations; expected a background that varies, or its "
                "coefficient cannot be learned"
            )
    if count <= len(backgrounds) + 1:
        raise ValueError(f"mean: got {len(backgrounds)} backgrounds for {count} observations; expected fewer of them")


def _read(adapter: ArrayAdapter, given: Any, known: np.ndarray | None = None) -> list[Background]:
    """The given backgrounds. If there are several variables, backgrounds are centred at the `known` cells."""
    if isinstance(adapter, VariablesAdapter):
        assert known is not None
        return [
            _of_variable(adapter, number, one, known[number])
            for number, (name, own) in enumerate(adapter.by_name.items())
            if given.get(name) is not None
            for one in _read(own, given[name], known[number])
        ]
    backgrounds = []
    for name, one in _listed(given):
        if callable(one) and not hasattr(one, "dims"):
            backgrounds.append(Background(name, None, one))
        else:
            found = on_grid(adapter, one.compute() if getattr(one, "chunks", None) else one, "mean")
            values = np.asarray(_without_repetition(np.asarray(found)), dtype=np.float64)
            backgrounds.append(Background(name, np.broadcast_to(values, adapter.shape)))
    return backgrounds


def _listed(given: Any) -> list[tuple[str, Any]]:
    """Names and fields of a single background, of a list or tuple, or of a mapping."""
    if isinstance(given, Mapping):
        return [(str(name), one) for name, one in given.items()]
    several = isinstance(given, list | tuple) and all(callable(one) or hasattr(one, "shape") for one in given)
    fields = list(given) if several else [given]
    if not fields:
        raise ValueError("mean: got an empty list, expected at least one background")
    names = []
    for number, one in enumerate(fields):
        own = str(getattr(one, "__name__", None) or getattr(one, "name", None) or "")
        plain = "the background" if len(fields) == 1 else f"background {number}"
        names.append(plain if own in ("", "<lambda>") or own in names else own)
    return list(zip(names, fields, strict=True))


def _of_variable(adapter: VariablesAdapter, number: int, one: Background, known: np.ndarray) -> Background:
    """The background of one of several variables that are filled together. It is zero for the others.

    It is centred, so that it is not confounded with the level of the variable.
    """
    own, variable = one.rows(adapter.axes[1:], 0, adapter.shape[1]), list(adapter.by_name)[number]
    centre = float(own[known].mean())
    values = np.zeros(adapter.shape)
    values[number] = own - centre
    function = None if one.function is None else _OfVariable(one.function, str(variable), centre)
    return Background(f"{one.name} of {variable}", values, function)


def _divided(one: Background, scales: np.ndarray, axes: Sequence[Axis]) -> Background:
    """A background divided by the scales of labels, which have size one along all other axes."""
    function = None if one.function is None else _Divided(one.function, scales, axes)
    return replace(one, values=one.values / scales, function=function)


@dataclass(frozen=True, eq=False)
class _OfVariable:
    """The function for one variable as a function for all variables: centred, and zero for the others."""

    function: Function
    variable: str
    centre: float

    def __call__(self, variable: np.ndarray, *others: np.ndarray) -> np.ndarray:
        return np.where(variable == self.variable, self.function(*others) - self.centre, 0.0)


@dataclass(frozen=True, eq=False)
class _Divided:
    """A function divided by the scale of the label."""

    function: Function
    scales: np.ndarray
    axes: Sequence[Axis]

    def __call__(self, *arguments: np.ndarray) -> np.ndarray:
        places = [
            axis.encode(np.ravel(own))[:, 0].astype(int).reshape(np.shape(own)) if size > 1 else 0
            for axis, size, own in zip(self.axes, self.scales.shape, arguments, strict=True)
        ]
        return self.function(*arguments) / self.scales[tuple(places)]


def _numbers(name: str, found: Any, shape: tuple[int, ...]) -> np.ndarray:
    """The result of a function as numbers of the given shape."""
    array = np.asarray(found, dtype=np.float64)
    try:
        return np.broadcast_to(array, shape)
    except ValueError:
        raise ValueError(
            f"mean: the function {name} returned an array of the shape {array.shape}, expected {shape} or a shape that "
            "broadcasts to it: it is called with one array of coordinates for each axis"
        ) from None
