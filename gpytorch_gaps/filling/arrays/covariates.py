"""Backgrounds: known fields of which the mean of the Gaussian process is a linear function.

    m(x) = c + Σ_k a_k g_k(x) + ..

g_k is a table on the grid, such as a climatology or the elevation, or a function of the coordinates. The coefficients
a_k are estimated with the rest of the mean, see :mod:`gpytorch_gaps.filling.learning.estimates`.
"""

from collections.abc import Callable, Mapping, Sequence
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
"""A function of the coordinates of all axes, in the units of the user, as arrays that broadcast."""


@dataclass(frozen=True, eq=False)
class Background:
    """One field: its name, its `values` on the grid, and the `function` that they come from, if any."""

    name: str
    values: np.ndarray
    function: Function | None = None


class Covariates(torch.nn.Module):
    """The values of backgrounds at points: those on the grid, or those of functions elsewhere.

    :param backgrounds: fields on one grid.
    :param axes: the axes of the grid.
    """

    table: Tensor

    def __init__(self, backgrounds: Sequence[Background], axes: Sequence[Axis]) -> None:
        super().__init__()
        self.names = [one.name for one in backgrounds]
        self._functions, self._axes = [one.function for one in backgrounds], list(axes)
        self.grid = CartesianGrid([torch.from_numpy(axis.points) for axis in axes])
        table = np.stack([one.values.reshape(-1) for one in backgrounds], axis=1)
        self.register_buffer("table", torch.from_numpy(table))  # shape: (M, K)

    def forward(self, x: Tensor) -> Tensor:
        """shape: (*, D) -> (*, K)"""
        cells = self.grid.index_of(x)
        found = self.table[cells.clamp_min(0)]
        off = cells < 0
        if bool(off.any()):
            found[off] = self._elsewhere(x[off])
        if bool(found.isnan().any()):
            name = self.names[int(found.isnan().flatten(end_dim=-2).any(0).nonzero()[0])]
            raise ValueError(f"mean: {name} is NaN at a point of x; expected points where it is known")
        return found

    def _elsewhere(self, x: Tensor) -> Tensor:
        """Values of the functions at points off the grid. shape: (Q, D) -> (Q, K)"""
        for name, function in zip(self.names, self._functions, strict=True):
            if function is None:
                raise ValueError(
                    f"mean: {name} is an array, known at the cells of the grid only; got the point "
                    f"{x[0].tolist()} off the grid; expected cells, or a function of the coordinates as background"
                )
        points = [part.numpy(force=True) for part in x.split([axis.points.shape[1] for axis in self._axes], -1)]
        arguments = [decoded(axis, part) for axis, part in zip(self._axes, points, strict=True)]
        columns = [
            _numbers(name, function(*arguments), (len(x),))
            for name, function in zip(self.names, self._functions, strict=True)
            if function is not None
        ]
        return torch.from_numpy(np.stack(columns, axis=1)).to(x)


def read_covariates(
    adapter: ArrayAdapter, given: Any, known: np.ndarray, needed: np.ndarray, scales: np.ndarray | None
) -> Covariates:
    """The backgrounds of an array, checked.

    :param given: the argument ``mean`` of ``fill_gaps``.
    :param known: flags of the observed cells.
    :param needed: flags of the cells where backgrounds have to be known.
    :param scales: what values are divided by; backgrounds are divided too, which leaves their coefficients.
    :raises ValueError: if a background does not fit to the grid, is not known where it is needed, or is constant.
    """
    backgrounds = _read(adapter, given, known)
    for one in backgrounds:
        bad = needed & ~np.isfinite(one.values)
        if bad.any():
            cell = tuple(map(int, np.argwhere(bad)[0]))
            what = "an observation" if known[cell] else "a gap"
            raise ValueError(
                f"mean: {one.name} is {one.values[cell]} at the cell {cell}, {what}; expected a finite background "
                "there. Try filling it first, or where= for the cells that have one"
            )
        if np.ptp(one.values[known]) <= 0:
            raise ValueError(
                f"mean: {one.name} is the same at all observations; expected a background that varies, or its "
                "coefficient cannot be learned"
            )
    if known.sum() <= len(backgrounds) + 1:
        raise ValueError(
            f"mean: got {len(backgrounds)} backgrounds for {int(known.sum())} observations; expected fewer of them"
        )
    if scales is not None:
        backgrounds = [_divided(one, scales, adapter.axes) for one in backgrounds]
    return Covariates(backgrounds, adapter.axes)


def _read(adapter: ArrayAdapter, given: Any, known: np.ndarray) -> list[Background]:
    if isinstance(adapter, VariablesAdapter):
        return [
            _of_variable(adapter, number, one, known[number])
            for number, (name, own) in enumerate(adapter.by_name.items())
            if given.get(name) is not None
            for one in _read(own, given[name], known[number])
        ]
    listed = _listed(given)
    arguments = broadcastable(adapter.axes) if any(callable(one) for _, one in listed) else []
    backgrounds = []
    for name, one in listed:
        if callable(one) and not hasattr(one, "dims"):
            backgrounds.append(Background(name, _numbers(name, one(*arguments), adapter.shape), one))
        else:
            values = np.asarray(on_grid(adapter, one, "mean"), dtype=np.float64)
            backgrounds.append(Background(name, values))
    return backgrounds


def _listed(given: Any) -> list[tuple[str, Any]]:
    """Names and fields: of one, of several in a list or tuple, or of a mapping by name."""
    if isinstance(given, Mapping):
        return [(str(name), one) for name, one in given.items()]
    several = isinstance(given, list | tuple) and all(callable(one) or hasattr(one, "shape") for one in given)
    fields = list(given) if several else [given]
    if not fields:
        raise ValueError("mean: got an empty list, expected a background, or several")
    names = []
    for number, one in enumerate(fields):
        own = str(getattr(one, "__name__", None) or getattr(one, "name", None) or "")
        plain = "the background" if len(fields) == 1 else f"background {number}"
        names.append(plain if own in ("", "<lambda>") or own in names else own)
    return list(zip(names, fields, strict=True))


def _of_variable(adapter: VariablesAdapter, number: int, one: Background, known: np.ndarray) -> Background:
    """The background of one of several variables that are filled together, zero for the others.

    It is centred, so that it does not compete with the level of the variable.
    """
    centre, variable = float(one.values[known].mean()), list(adapter.by_name)[number]
    values = np.zeros(adapter.shape)
    values[number] = one.values - centre
    function = None if one.function is None else _OfVariable(one.function, str(variable), centre)
    return Background(f"{one.name} of {variable}", values, function)


def _divided(one: Background, scales: np.ndarray, axes: Sequence[Axis]) -> Background:
    """A background over the scales of labels, which have size one along all other axes."""
    function = None if one.function is None else _Divided(one.function, scales, axes)
    return replace(one, values=one.values / scales, function=function)


@dataclass(frozen=True, eq=False)
class _OfVariable:
    """The function of one variable as one of all variables, centred, zero for the others."""

    function: Function
    variable: str
    centre: float

    def __call__(self, variable: np.ndarray, *others: np.ndarray) -> np.ndarray:
        return np.where(variable == self.variable, self.function(*others) - self.centre, 0.0)


@dataclass(frozen=True, eq=False)
class _Divided:
    """A function over the scale of the label."""

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
    """What a function returned, as numbers of this shape."""
    array = np.asarray(found, dtype=np.float64)
    try:
        return np.broadcast_to(array, shape)
    except ValueError:
        raise ValueError(
            f"mean: the function {name} returned an array of the shape {array.shape}, expected {shape} or a shape that "
            "broadcasts to it: it is called with one array of coordinates for each axis"
        ) from None
