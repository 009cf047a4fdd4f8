"""The covariance of labels, by a factor analysis of all observations that accounts for gaps.

The values of k labels at one place of the other axes, minus the mean, are

    y_l = b_l' z + e_l,    z ~ N(0, I_q),    e_l ~ N(0, v_l),    b_lj ~ N(0, t_j)

so that their covariance is ``B B' + diag(v)``. Windows of a few hundred observations do not determine the q + 1 numbers
of each label, but all places together do. They are estimated by a few rounds of variational Bayes (Bishop 1999,
Ghahramani & Beal 2000). Each round takes one regression per label and one per place, on the observed values. Small
variances t_j remove factors that are not needed. The remaining uncertainty of b_l is added to its own variance: v_l
contains ``tr Var(b_l)``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gpytorch_gaps.filling.arrays.grid_values import coordinates
from gpytorch_gaps.filling.axes.axis import Axis
from gpytorch_gaps.filling.learning.model import TrendMean

_LABELS_PER_FACTOR = 3  # with fewer labels, a factor cannot be distinguished from the own variation of a label
_MAX_RANK = 12
_MAX_PLACES = 4000  # largest number of places that are used
_ROUNDS = 30
_PSEUDO_OBSERVATIONS = 3.0  # shrinkage of variances towards that of the average label, in pseudo-observations
_CORRELATION_PSEUDO_OBSERVATIONS = 20.0
_LEAST_OWN = 1e-4  # smallest own variation of a label, as a fraction of its variance


@dataclass(frozen=True, eq=False)
class LabelFactors:
    """Covariance ``s (B B' + diag(v))`` of labels.

    :param loadings: B. shape: (labels, factors)
    :param own: v. shape: (labels,)
    :param variance: s, the mean variance of labels. The mean of the diagonal of ``B B' + diag(v)`` is one.
    """

    loadings: np.ndarray
    own: np.ndarray
    variance: float


def label_factors(
    values: np.ndarray, axes: Sequence[Axis], axis: int, mean: TrendMean, generator: np.random.Generator
) -> LabelFactors:
    """The covariance of the labels along one axis.

    :param values: values on the whole grid, NaN at gaps.
    :param axes: the axes of the grid.
    :param axis: number of the axis of labels.
    :param mean: the mean function, which is subtracted first.
    """
    places = np.moveaxis(values, axis, -1).reshape(-1, values.shape[axis])
    used = np.flatnonzero((~np.isnan(places)).any(axis=1))
    if len(used) > _MAX_PLACES:
        used = np.sort(generator.choice(used, _MAX_PLACES, replace=False))
    residuals = places[used].copy()
    row, label = np.nonzero(~np.isnan(residuals))
    others = [size for number, size in enumerate(values.shape) if number != axis]
    cells = list(np.unravel_index(used[row], others)) if others else []
    cells.insert(axis, label)
    residuals[row, label] -= mean(coordinates(axes, np.stack(cells, axis=1))).numpy()
    return analyse(residuals)


def analyse(residuals: np.ndarray) -> LabelFactors:
    """The factors of labels from their residuals (places, labels), NaN at gaps."""
    known = ~np.isnan(residuals)
    counts, y = known.sum(axis=0), np.where(known, residuals, 0.0)
    squares = (y**2).sum(axis=0)
    average = float(squares.sum() / max(1, counts.sum())) or 1.0
    variance = (squares + _PSEUDO_OBSERVATIONS * average) / (counts + _PSEUDO_OBSERVATIONS)
    y = y / np.sqrt(variance)
    loadings, own, spread = _first_guess(y, known)
    for _ in range(_ROUNDS):
        loadings, own, spread = _improved(y, known, loadings, own, spread)
    own = variance * (own + np.trace(spread, axis1=1, axis2=2))
    loadings = np.sqrt(variance)[:, None] * loadings
    scale = float(np.mean((loadings**2).sum(axis=1) + own))
    return LabelFactors(loadings / scale**0.5, own / scale, scale)


def _first_guess(y: np.ndarray, known: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Loadings from the leading eigenvectors of the correlations. These are shrunk if few places have both labels."""
    both = known.T.astype(float) @ known
    rank = min(max(1, y.shape[1] // _LABELS_PER_FACTOR), _MAX_RANK)
    correlations = y.T @ y / (both + _CORRELATION_PSEUDO_OBSERVATIONS)
    np.fill_diagonal(correlations, 1.0)
    values, vectors = np.linalg.eigh(correlations)
    loadings = vectors[:, -rank:] * np.sqrt(np.clip(values[-rank:], 0.05, None))
    if len(loadings) == 1:  # a single label has no common factors
        loadings = np.zeros_like(loadings)
    return loadings, np.clip(1.0 - (loadings**2).sum(axis=1), 0.1, None), np.zeros((len(loadings), rank, rank))


def _improved(
    y: np.ndarray, known: np.ndarray, loadings: np.ndarray, own: np.ndarray, spread: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One round: updates the factors of every place, and the loadings and own variances of every label.

    :param spread: covariance of the loadings of each label. shape: (labels, factors, factors)
    """
    (places, labels), rank = y.shape, loadings.shape[1]
    weights = known / own
    second = loadings[:, :, None] * loadings[:, None, :] + spread
    precision = np.eye(rank) + (weights @ second.reshape(labels, -1)).reshape(places, rank, rank)
    covariance = np.linalg.inv(precision)
    factors = np.einsum("tij,tj->ti", covariance, (weights * y) @ loadings)
    moments = covariance + factors[:, :, None] * factors[:, None, :]

    gram = (known.T.astype(float) @ moments.reshape(places, -1)).reshape(labels, rank, rank)
    target = y.T @ factors
    prior = np.maximum(np.diagonal(second, axis1=1, axis2=2).mean(axis=0), 1e-6)
    spread = np.linalg.inv(gram / own[:, None, None] + np.diag(1.0 / prior))
    loadings = np.einsum("lij,lj->li", spread, target / own[:, None])
    second = loadings[:, :, None] * loadings[:, None, :] + spread
    left = (y**2).sum(axis=0) - 2 * (loadings * target).sum(axis=1) + (gram * second).sum(axis=(1, 2))
    average = float(np.exp(np.log(own).mean()))
    own = (left + _PSEUDO_OBSERVATIONS * average) / (known.sum(axis=0) + _PSEUDO_OBSERVATIONS)

    # the same covariance with factors of unit variance, and loadings whose columns are orthogonal
    root = np.linalg.cholesky(moments.mean(axis=0))
    _, turn = np.linalg.eigh(root.T @ loadings.T @ loadings @ root)
    turn = root @ turn
    return loadings @ turn, np.maximum(own, _LEAST_OWN), turn.T @ spread @ turn
