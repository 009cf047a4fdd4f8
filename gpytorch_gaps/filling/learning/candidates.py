"""Candidate kernels, depending on the kinds of the axes.

| axis | kernel |
|---|---|
| distances | Matern or squared exponential; with several columns, one length-scale per column |
| distances with a cycle | the same, plus a periodic kernel whose shape changes slowly |
| few labels | a free covariance, initialized by a factor analysis of all observations |
| many labels | the covariance of the factor analysis, with a scale on its diagonal |
| variables filled together | a free covariance; or for each variable a term with its own length-scales |
| regular axes of space | one Matern kernel of the distance in the plane, or on the sphere |
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from gpytorch.kernels import Kernel, MaternKernel

from gpytorch_gaps.filling.axes.axis import Axis
from gpytorch_gaps.filling.learning.axis_kernels import between, closed, distance_kernel, initialized
from gpytorch_gaps.filling.learning.cycles import Cycles
from gpytorch_gaps.filling.learning.label_factors import LabelFactors
from gpytorch_gaps.filling.learning.label_kernel import LabelKernel, covariance_of, free_covariance, index_kernel
from gpytorch_gaps.filling.learning.learn import Candidate
from gpytorch_gaps.filling.learning.model import ProductTerm, positive
from gpytorch_gaps.kernels import SphereKernel
from gpytorch_gaps.kernels.blocks import LONG_AXIS, LONG_SERIES, regular_positions

_SMOOTH = math.inf  # nu of a squared exponential
_NAMES = {0.5: "Matern-1/2", 1.5: "Matern-3/2", 2.5: "Matern-5/2", _SMOOTH: "squared exponential"}
MAX_FREE_LABELS = 8
"""Largest number of labels whose covariance is determined by windows."""

_MIN_SIZE_OF_SEVERAL_SCALES = 8  # smallest number of positions of the longest axis
_SPACE = ("latitude", "longitude", "number", "position")  # kinds of axes, in their order in a block
_GLOBE = (("latitude", "degrees"), ("circle", "degrees"))  # kinds and units of axes
_MAX_BLOCK = 3  # largest number of axes of space
_SAME_DEGREE = 1.1  # up to this ratio of the longest to the shortest degree of longitude, latitudes are a plane


@dataclass(frozen=True, eq=False)
class KernelTask:
    """The data for the choice of a kernel, and its restrictions.

    :param axes: the axes of the grid.
    :param variance: the variance of the data.
    :param periods: the periods of the cycles along each axis.
    :param factors: the covariance for each axis of labels; None for other axes.
    :param given: the user's kernel for each axis; every candidate contains a copy. None if a kernel is to be chosen.
    :param limits: restrictions that keep a streamed solve in memory.
    :param cycles: cycles of the mean. Along their axis, kernels model how cycles change.
    :param variables: number of the axis of variables, if several are filled together.
    """

    axes: Sequence[Axis]
    variance: float
    periods: Sequence[Sequence[float]]
    factors: Sequence[LabelFactors | None]
    given: Sequence[Kernel | None]
    limits: "KernelLimits"
    cycles: Cycles | None = None
    variables: int | None = None


@dataclass(frozen=True)
class KernelLimits:
    """Restrictions of the kernel.

    :param one_term: whether the kernel must be a single product.
    :param shortest_cells: the smallest length-scale, in cells. If it is not 0, all kernels are squared exponentials: a
        Matern kernel needs all of its eigenvectors for any length-scale.
    """

    one_term: bool = False
    shortest_cells: float = 0.0


def candidates(task: KernelTask) -> list[Candidate]:
    """The kernels to compare: Matern of three roughnesses, squared exponentials, and sums of several scales."""
    make = partial(_term, task)
    given, variance, one_term = task.given, task.variance, task.limits.one_term
    distances = [axis for axis, own in zip(task.axes, given, strict=True) if own is None and axis.kind != "label"]
    if not distances:
        name = "as given" if any(own is not None for own in given) else "free covariances of labels"
        return [(name, lambda: [make(_SMOOTH, 0.2, variance)])]

    def single(roughness: float) -> list[ProductTerm]:
        return [make(roughness, 0.2, variance)]

    singles: list[Candidate] = [(name, partial(single, roughness)) for roughness, name in _NAMES.items()]
    if one_term and task.limits.shortest_cells > 0:
        singles = singles[-1:]
    longest = max(axis.size for axis in distances)
    if one_term or longest < _MIN_SIZE_OF_SEVERAL_SCALES or all(own is not None for own in given):
        return singles

    def scales(count: int) -> list[ProductTerm]:
        # length-scales from the spacing of the cells to the extent of the grid, equally spaced on a logarithmic scale
        shares = [share / (count - 1) for share in range(count)]
        weights = [0.5**number for number in range(count)][::-1]
        return [make(_SMOOTH, share, variance * w / sum(weights)) for share, w in zip(shares, weights, strict=True)]

    def near_and_far(near: int) -> list[ProductTerm]:
        return [*(make(_SMOOTH, 0.4 * i, 0.3 * variance / near) for i in range(near)), make(0.5, 0.8, 0.7 * variance)]

    space = spatial_block(task)
    by_distance: list[Candidate] = [
        (f"{_NAMES[roughness]} {space.words}", partial(_isotropic_terms, task, space, roughness))
        for roughness in (0.5, 1.5, 2.5)
        if space is not None
    ]
    return [
        *singles,
        *by_distance,
        *_with_own_scales(task, space),
        ("squared exponential near, Matern-1/2 far", partial(near_and_far, 1)),
        ("squared exponentials near, Matern-1/2 far", partial(near_and_far, 2)),
        *((f"squared exponentials of {count} scales", partial(scales, count)) for count in (3, 4)),
    ]


def _term(task: KernelTask, roughness: float, share: float, scale: float) -> ProductTerm:
    """A product of kernels.

    :param share: initial length-scales, from the spacing of the cells (0) to the extent of the grid (1).
    """
    shortest = task.limits.shortest_cells
    kernels: list[Kernel] = []
    columns = zip(task.axes, task.periods, task.factors, task.given, strict=True)
    for number, (axis, periods, factors, own) in enumerate(columns):
        if own is not None:
            kernels.append(closed(initialized(copy.deepcopy(own).double(), axis, share), axis))
        elif axis.kind == "label":
            if factors is None or axis.size <= MAX_FREE_LABELS:
                kernels.append(free_covariance(axis.size, factors))
            else:
                kernels.append(LabelKernel(factors))
        else:
            lasting = task.cycles is None or task.cycles.axis != number
            cycles = [(period, lasting) for period in periods if share >= 0.2]
            kernels.append(closed(distance_kernel(axis, roughness, share, shortest, cycles), axis))
    return ProductTerm(kernels, scale)


def _with_own_scales(task: KernelTask, space: "SpatialBlock | None") -> list[Candidate]:
    """Kernels for variables that are filled together, with different length-scales for each variable.

        Σ_v b_v b_v' k_v,    Σ_v b_v b_v' = B, the initial covariance of the variables

    If b_v is along axis v, the variables are independent of each other.
    """
    number = task.variables
    if number is None or task.given[number] is not None or task.axes[number].size > MAX_FREE_LABELS:
        return []
    values, vectors = np.linalg.eigh(covariance_of(task.axes[number].size, task.factors[number]))
    root = vectors * np.sqrt(np.clip(values, 0.0, None)) @ vectors.T

    def terms(roughness: float, isotropic: bool) -> list[ProductTerm]:
        found = []
        for loading in root.T:
            if isotropic and space is not None:
                (term,) = _isotropic_terms(task, space, roughness)
            else:
                term = _term(task, roughness, 0.2, task.variance)
            term.kernels[term.blocks.index((number,))] = index_kernel(loading[:, None], np.full(len(loading), 0.02))
            term.cost = 1 / len(root)  # all of them count like one term of a single variable
            found.append(term)
        return found

    kinds = [(1.5, True), (2.5, True), (_SMOOTH, False)] if space is not None else [(1.5, False), (_SMOOTH, False)]
    return [(f"{_NAMES[kind[0]]} for each variable", partial(terms, *kind)) for kind in kinds]


# -- kernels of the distance -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SpatialBlock:
    """Regular axes of space with a kernel of the distance.

    :param axes: their numbers.
    :param on_sphere: whether they are latitude and longitude, and the length of a degree of longitude varies.
    """

    axes: tuple[int, ...]
    on_sphere: bool

    @property
    def words(self) -> str:
        return "on the sphere" if self.on_sphere else "of the distance"


def spatial_block(task: KernelTask) -> SpatialBlock | None:
    """The axes for a kernel of the distance: those of the globe, or two or three regular axes of space; else None.

    Axes with cycles, and axes with a kernel of the user, are not included. Latitude comes first. If longitudes go
    around the whole globe, the block is on a sphere, even if there are few latitudes.
    """
    free = [
        number
        for number, axis in enumerate(task.axes)
        if task.given[number] is None and not task.periods[number] and axis.size > 1
    ]
    globe = [number for kind in _GLOBE for number in free if (task.axes[number].kind, task.axes[number].unit) == kind]
    if len(globe) == len(_GLOBE) and is_regular(task.axes[globe[-1]]):
        return SpatialBlock(tuple(globe), True)
    space = [number for number in free if task.axes[number].kind in _SPACE and is_regular(task.axes[number])]
    run = tuple(sorted(space, key=lambda number: _SPACE.index(task.axes[number].kind)))[:_MAX_BLOCK]
    if len(run) < 2:
        return None
    kinds = [task.axes[number].kind for number in run]
    if kinds == ["latitude", "longitude"]:
        degree = np.cos(np.radians(task.axes[run[0]].points))
        return SpatialBlock(run, bool(degree.max() > _SAME_DEGREE * degree.min()))
    return SpatialBlock(run, False)


def is_regular(axis: Axis) -> bool:
    """Whether the points of an axis are multiples of a step."""
    if axis.points.shape[1] > 1:
        return False
    points = torch.from_numpy(axis.points.squeeze(-1)).double()
    return regular_positions(points, points) is not None


def goes_by_fft(axis: Axis, num_axes: int) -> bool:
    """Whether products with the covariance of an axis use FFTs: the axis is long, regular and not labels."""
    long = axis.size >= (LONG_SERIES if num_axes == 1 else LONG_AXIS)
    return long and axis.kind != "label" and is_regular(axis)


def _isotropic_terms(task: KernelTask, space: SpatialBlock, roughness: float) -> list[ProductTerm]:
    """A Matern kernel of the distance, with one length-scale per axis in the plane, times the kernels of other axes."""
    whole = _term(task, roughness, 0.5, task.variance)
    axes = [task.axes[number] for number in space.axes]
    if space.on_sphere:
        base = MaternKernel(nu=roughness, lengthscale_constraint=positive())
        base.lengthscale = math.radians(between(axes[0], 0.5))
        kernel: Kernel = SphereKernel(base)
    else:
        kernel = MaternKernel(nu=roughness, ard_num_dims=len(axes), lengthscale_constraint=positive())
        kernel.lengthscale = torch.tensor([between(axis, 0.5) for axis in axes])
    others = [number for number in range(len(task.axes)) if number not in space.axes]
    order = sorted([space.axes, *((number,) for number in others)])
    kernels = [kernel.double() if axes == space.axes else whole.kernels[axes[0]] for axes in order]
    return [ProductTerm(kernels, task.variance, order)]
