"""The held-out check of transformed values, in the units of the data.

Scores are those of the predictions of y: of medians, quantiles and CRPS. Let e be the errors of medians. The sum of
their squares has the degrees of freedom of a chi-square variable with the same mean and variance,
``v = 2 (sum E e^2)^2 / var(sum e^2)``. For independent errors, this would be

    v' = 2 (sum E e^2)^2 / sum (E e^4 - (E e^2)^2)

It is small for skewed data, because a few errors dominate. Correlated errors have fewer degrees of freedom, by the same
factor as the errors of z.
"""

from dataclasses import replace

import numpy as np

from gpytorch_gaps.filling.checking.calibration import Check
from gpytorch_gaps.filling.transforms.predictive import Transformed

_TINY = 1e-300
_FACTORS = np.geomspace(0.1, 10.0, 401)  # factors on standard deviations that are tried


def in_data_units(check: Check, predicted: Transformed, truth: np.ndarray) -> Check:
    """The check with scores and mean square errors for predictions of the observations `truth` (Q,).

    :param check: the check of z. Its `predicted` is not changed.
    :param predicted: the distributions of the observations.
    """
    squares, score = predicted.mean_square, predicted.score(truth)
    expected = max(float(np.mean(squares)), _TINY)
    variances = predicted.latent_std**2
    share = check.freedom / (variances.sum() ** 2 / (variances**2).sum())
    spread = float((predicted.mean_fourth - squares**2).sum())
    return replace(
        check,
        score=score,
        variance=expected,
        gap_variance=None,
        ratio=float(np.mean((truth - predicted.median) ** 2)) / expected,
        freedom=max(1.0, float(share * 2 * squares.sum() ** 2) / max(spread, _TINY)),
        stretch=_stretch(check, predicted, truth, score.level),
        truth=truth,
    )


def _stretch(check: Check, predicted: Transformed, truth: np.ndarray, level: float) -> float:
    """The factor on standard deviations of z with which the coverage of intervals is closest to `level`."""
    if not any(flags.any() for flags in predicted.transform.at_ends(truth)):
        return check.stretch  # a monotone function does not change the coverage
    off = [abs(predicted.stretched(float(factor)).coverage(truth, level) - level) for factor in _FACTORS]
    nearest = np.flatnonzero(np.array(off) <= min(off) + 1e-9)
    return float(min(_FACTORS[nearest], key=lambda factor: abs(np.log(factor))))
