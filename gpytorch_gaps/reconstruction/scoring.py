"""A step of Fisher's scoring: an estimate of the maximum of the likelihood from its gradient and expected curvature.

The Fisher information is ``F_pq = tr(A^-1 dA_p A^-1 dA_q) / 2`` for the covariance A of the observations. If gaps are
spread evenly, A has approximately the eigenvalues ``N/M T + s2``. With ``e = N/M T / (N/M T + s2)``, the fraction of
each function's variance that the data explain,

    F_pq = sum_ab Y_p[a, b] Y_q[b, a] e_a e_b / 2,     F_ps = sum_a Y_p[a, a] e_a (1 - e_a) / 2,
    F_ss = (N - R + sum_a (1 - e_a)^2) / 2

with s the logarithm of the noise variance. The step ``F^-1 g`` has the length ``sqrt(g' F^-1 g)`` in standard
deviations of the hyperparameters given the data. Its expected gain, in nats, is half the square of that. If it would
change a logarithm by much, it is replaced by ``(F + c I)^-1 g``, which mostly shortens the directions about which the
data are least informative.

If gaps are not spread evenly, the curvature is different. The changes of the gradient in the last steps s, ``y = -dg``,
then correct F by the formula of Broyden, Fletcher, Goldfarb and Shanno.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from gpytorch_gaps.reconstruction.hyperparameters import AxisDerivatives
from gpytorch_gaps.reconstruction.likelihood import Derivatives, along
from gpytorch_gaps.reconstruction.weight_space import WeightSpace

_LEAST_SHARE = 0.05  # smallest fraction of the observations that determine the noise; rougher kernels do not truncate
_LEAST_CURVATURE = 0.1  # a smaller curvature along a step, relative to the expected one, is ignored
_LEAST_INFORMATION = 1e-2  # information on a logarithm without any data: a standard deviation of ten


@dataclass(frozen=True)
class Score:
    """The gradient and the expected curvature of the log-likelihood, and the step that follows from them.

    :param gradient: gradient for all hyperparameters, the noise last. shape: (P,)
    :param information: F. shape: (P, P)
    :param probes: gradients of single probes minus their mean. shape: (S, P)
    """

    gradient: Tensor
    information: Tensor
    probes: Tensor

    def step(self, largest: float) -> Tensor:
        """``(F + c I)^-1 g`` with the smallest c, up to 10 %, for which no entry exceeds `largest`. shape: (P,)"""
        values, vectors = self._spectrum
        along, damping = vectors.mT @ self.gradient, 0.0
        while True:
            step = vectors @ (along / (values + damping))
            if not float(step.abs().max()) > largest:
                return step
            damping = max(1.1 * damping, _LEAST_INFORMATION)

    @property
    def distance(self) -> float:
        """Length of the step, in standard deviations of the hyperparameters."""
        return math.sqrt(float(self._lengths(self.gradient)))

    @property
    def probe_error(self) -> float:
        """The error of the step from random probes, in the same unit: NaN for a single probe, zero for none."""
        count = len(self.probes)
        if count < 2:
            return math.nan if count else 0.0
        return math.sqrt(float(self._lengths(self.probes).sum()) / (count * (count - 1)))

    @property
    def deviations(self) -> Tensor:
        """Standard deviations of the hyperparameters given the data. shape: (P,)"""
        values, vectors = self._spectrum
        return (vectors.square() / values).sum(-1).sqrt()

    def corrected(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> "Score":
        """The same gradient, with a curvature that agrees with the changes of the gradient in earlier steps.

        :param pairs: steps, and the change of the negative gradient by each. shape: (P,) each
        """
        known = self.information + _LEAST_INFORMATION * torch.eye(len(self.gradient), dtype=torch.float64)
        for step, change in pairs:
            image = known @ step
            expected, found = float(step @ image), float(step @ change)
            if found > _LEAST_CURVATURE * expected:
                known = known + torch.outer(change, change) / found - torch.outer(image, image) / expected
        return replace(self, information=known)

    def _lengths(self, gradients: Tensor) -> Tensor:
        """``g' F^-1 g`` for one or several gradients. shape: (*, P) -> (*)"""
        values, vectors = self._spectrum
        return ((gradients @ vectors).square() / values).sum(-1)

    @cached_property
    def _spectrum(self) -> tuple[Tensor, Tensor]:
        values, vectors = torch.linalg.eigh(self.information)
        return values.clamp_min(0.0) + _LEAST_INFORMATION, vectors


def score(space: WeightSpace, found: Derivatives, by_hyperparameter: Sequence[AxisDerivatives]) -> Score:
    """The gradient and the Fisher information of all hyperparameters.

    :param found: derivatives of the likelihood with respect to factors and noise.
    :param by_hyperparameter: derivatives of the factors with respect to hyperparameters.
    """
    probes = [_gradient(one, by_hyperparameter) for one in found.probes]
    size = len(by_hyperparameter) + 1
    return Score(
        _gradient(found, by_hyperparameter),
        fisher_information(space, by_hyperparameter),
        torch.stack(probes) if probes else torch.zeros(0, size, dtype=torch.float64),
    )


def _gradient(found: Derivatives, by_hyperparameter: Sequence[AxisDerivatives]) -> Tensor:
    entries = [
        0.5 * sum(float((found.axes[axis] * own).sum()) for axis, own in one.items()) for one in by_hyperparameter
    ]
    return torch.tensor([*entries, found.noise], dtype=torch.float64)


def fisher_information(space: WeightSpace, by_hyperparameter: Sequence[AxisDerivatives]) -> Tensor:
    """F, for gaps that are spread evenly. shape: (P, P)"""
    kept = space.products > 0
    explained = torch.where(kept, space.share / (space.share + space.shift), 0.0)
    axes = range(explained.dim())
    result = explained.new_zeros(len(by_hyperparameter) + 1, len(by_hyperparameter) + 1)
    places = {axis: [p for p, one in enumerate(by_hyperparameter) if axis in one] for axis in axes}
    stacks = {axis: torch.stack([by_hyperparameter[p][axis] for p in own]) for axis, own in places.items() if own}
    unexplained = explained * (1.0 - explained)
    for axis, own in stacks.items():
        rows = torch.tensor(places[axis])
        weighted = (own * along(axis, explained, explained)).flatten(1)
        result[rows[:, None], rows] += 0.5 * weighted @ own.flatten(1).mT
        result[rows, -1] += 0.5 * own.diagonal(dim1=-2, dim2=-1) @ _marginal(unexplained, [axis])
        for other, others in stacks.items():
            if other != axis:
                pair = _marginal(explained.square(), [axis, other])
                columns = torch.tensor(places[other])
                left, right = (one.diagonal(dim1=-2, dim2=-1) for one in (own, others))
                result[rows[:, None], columns] += 0.5 * left @ pair @ right.mT
    result[-1, :-1] = result[:-1, -1]
    remaining = space.num_train - space.weights.size + float((1.0 - explained[kept]).square().sum())
    result[-1, -1] = 0.5 * max(remaining, _LEAST_SHARE * space.num_train)
    return result


def _marginal(box: Tensor, axes: Sequence[int]) -> Tensor:
    """Sums over all axes except the given ones. The result has the given axes in the given order."""
    others = [axis for axis in range(box.dim()) if axis not in axes]
    sums = box.sum(others) if others else box
    return sums if list(axes) == sorted(axes) else sums.mT
