"""Kernels for axes whose meaning is known.

| axis | kernel |
|---|---|
| distances | Matern of some roughness or squared exponential; of several columns, a length-scale each |
| with a cycle | the same, plus a periodic kernel whose shape changes slowly |
| labels | a free covariance of low rank, begun from the correlations of what was observed |
"""

import copy
import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from gpytorch.kernels import IndexKernel, Kernel, MaternKernel, PeriodicKernel, ProductKernel, RBFKernel, ScaleKernel
from gpytorch.priors import NormalPrior
from torch import Tensor

from gpytorch_gaps.filling.axes import Axis
from gpytorch_gaps.filling.learn import Candidate
from gpytorch_gaps.filling.model import Term, positive

SMOOTH = math.inf
"""The roughness of a squared exponential."""

_LABEL_RANK = 5
_PRIOR_WIDTH = 1.5  # of the logarithm: a factor of four to either side is as good as any


def candidates(
    axes: Sequence[Axis],
    variance: float,
    periods: Sequence[Sequence[float]],
    correlations: Sequence[np.ndarray | None],
    given: Sequence[Kernel | None],
    one_term: bool = False,
    shortest: float = 0.0,
) -> list[Candidate]:
    """What is compared: Matern of three roughnesses, squared exponential; and two to four scales of the last.

    :param periods: the cycles of each axis.
    :param correlations: between the places of an axis of labels.
    :param given: kernels that the user chose; theirs go into every candidate, as copies.
    :param one_term: whether the kernel has to be a single product.
    :param shortest: the least length-scale, in cells. Above 0 kernels are smooth: a Matern keeps all of its
        eigenvectors, however long its length-scale, so that a floor would not spare any.
    """
    make = partial(_term, axes, periods, correlations, given, shortest)
    distances = [axis for axis, own in zip(axes, given, strict=True) if own is None and axis.kind != "label"]
    if not distances:
        return [
            (
                "as given" if any(own is not None for own in given) else "free covariances of labels",
                lambda: [make(SMOOTH, 0.2, variance)],
            )
        ]
    names = {0.5: "Matern-1/2", 1.5: "Matern-3/2", 2.5: "Matern-5/2", SMOOTH: "squared exponential"}

    def single(roughness: float) -> list[Term]:
        return [make(roughness, 0.2, variance)]

    one: list[Candidate] = [(name, partial(single, roughness)) for roughness, name in names.items()]
    if one_term and shortest > 0:
        one = one[-1:]
    longest = max(axis.size for axis in distances)
    if one_term or longest < 8 or all(own is not None for own in given):
        return one

    def scales(count: int) -> list[Term]:
        # length-scales from the spacing of the cells to the extent of the grid, evenly on a logarithmic scale
        shares = [share / (count - 1) for share in range(count)]
        weights = [0.5**number for number in range(count)][::-1]
        return [make(SMOOTH, share, variance * w / sum(weights)) for share, w in zip(shares, weights, strict=True)]

    def near_and_far(near: int) -> list[Term]:
        return [*(make(SMOOTH, 0.4 * i, 0.3 * variance / near) for i in range(near)), make(0.5, 0.8, 0.7 * variance)]

    return [
        *one,
        ("squared exponential near, Matern-1/2 far", partial(near_and_far, 1)),
        ("squared exponentials near, Matern-1/2 far", partial(near_and_far, 2)),
        *((f"squared exponentials of {count} scales", partial(scales, count)) for count in (3, 4)),
    ]


def _term(
    axes: Sequence[Axis],
    periods: Sequence[Sequence[float]],
    correlations: Sequence[np.ndarray | None],
    given: Sequence[Kernel | None],
    shortest: float,
    roughness: float,
    share: float,
    scale: float,
) -> Term:
    """:param share: where between the spacing of the cells (0) and the extent of the grid (1) length-scales begin."""
    kernels: list[Kernel] = []
    for axis, cycles, correlation, own in zip(axes, periods, correlations, given, strict=True):
        if own is not None:
            kernels.append(_begun(copy.deepcopy(own).double(), axis, share))
        elif axis.kind == "label":
            kernels.append(_free(axis.size, correlation))
        else:
            kernels.append(_of_distance(axis, roughness, share, shortest, cycles if share >= 0.2 else ()))
    return Term(kernels, scale)


def _begun(kernel: Kernel, axis: Axis, share: float) -> Kernel:
    """The user's kernel; length-scales that were never set begin between the spacing and the extent of the axis."""
    for part in kernel.modules():
        if isinstance(part, Kernel) and part.has_lengthscale and not bool(part.raw_lengthscale.any()):
            part.lengthscale = _between(axis, share)
    return kernel


def _between(axis: Axis, share: float, shortest: float = 0.0) -> float:
    near = max(1.5, 1.1 * shortest) * axis.spacing
    return near ** (1 - share) * max(axis.extent / 2, near) ** share


def _of_distance(axis: Axis, roughness: float, share: float, shortest: float, cycles: Sequence[float]) -> Kernel:
    kernel: Kernel = _stationary(axis, roughness, _between(axis, share, shortest), shortest * axis.spacing)
    for period in cycles:
        shape = PeriodicKernel(period_length_constraint=positive(), lengthscale_constraint=positive())
        shape.period_length, shape.lengthscale = period, 2.0
        shape.raw_period_length.requires_grad_(False)  # known, and a likelihood has many maxima in it
        slow = RBFKernel(lengthscale_constraint=positive())
        slow.lengthscale = max(axis.extent, 5 * period)
        repeated = ScaleKernel(ProductKernel(shape, slow), outputscale_constraint=positive())
        kernel = kernel + repeated
    return kernel.double()


def _stationary(axis: Axis, roughness: float, start: float, least: float) -> Kernel:
    columns = axis.points.shape[1] if axis.kind == "group" else 1
    options = {
        "ard_num_dims": columns if columns > 1 else None,
        "lengthscale_constraint": positive(least),
    }
    kernel = RBFKernel(**options) if math.isinf(roughness) else MaternKernel(nu=roughness, **options)
    if columns == 1:  # of the logarithm: a density of the length-scale itself would depend on its units
        kernel.register_prior("lengthscale_prior", NormalPrior(math.log(start), _PRIOR_WIDTH), _log_lengthscale)
    ranges = np.ptp(axis.points, axis=0)
    kernel.lengthscale = torch.tensor(
        start * (np.where(ranges > 0, ranges, 1.0) / max(axis.extent, 1e-300)) if columns > 1 else [start]
    )
    return kernel.double()


def _log_lengthscale(kernel: Kernel) -> Tensor:
    return kernel.lengthscale.log()


def _free(size: int, correlation: np.ndarray | None) -> Kernel:
    """``B B' + diag(v)``, begun as the leading part of the correlations, and what is left on the diagonal."""
    rank = min(size, _LABEL_RANK)
    kernel = IndexKernel(num_tasks=size, rank=rank, var_constraint=positive()).double()
    matrix = np.eye(size) if correlation is None else correlation
    values, vectors = np.linalg.eigh(matrix)
    root = vectors[:, -rank:] * np.sqrt(np.clip(values[-rank:], 0.0, None))
    left = np.clip(np.diag(matrix) - (root**2).sum(1), 0.02, None)
    with torch.no_grad():
        kernel.covar_factor.copy_(torch.from_numpy(root))
    kernel.var = torch.from_numpy(left)
    return kernel


def label_correlations(numbers: np.ndarray, axis: int, shrinkage: float = 20.0) -> np.ndarray:
    """Between the places of one axis, from the cells that both have; the fewer these are, the closer to none.

    Positive semi-definite, with ones on the diagonal.
    """
    rows = np.moveaxis(numbers, axis, 0).reshape(numbers.shape[axis], -1)
    known = ~np.isnan(rows)
    means = np.where(known, rows, 0.0).sum(axis=1) / np.maximum(known.sum(axis=1), 1)
    centred = np.where(known, rows - means[:, None], 0.0)
    count = known.astype(float) @ known.T.astype(float)
    covariance = centred @ centred.T / np.maximum(count, 1)
    deviation = np.sqrt(np.maximum(np.diag(covariance), 1e-300))
    matrix = covariance / np.outer(deviation, deviation) * count / (count + shrinkage)
    np.fill_diagonal(matrix, 1.0)
    values, vectors = np.linalg.eigh(matrix)
    matrix = (vectors * np.clip(values, 1e-3, None)) @ vectors.T
    scale = np.sqrt(np.diag(matrix))
    return matrix / np.outer(scale, scale)
