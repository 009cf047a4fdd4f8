"""The held-out check of transformed values, in the units of the data.

The model is judged by what it says of z. Scores are those of the predictions of y: of medians, quantiles and CRPS.
"""

from dataclasses import replace

import numpy as np

from gpytorch_gaps.filling.checking.calibration import Check
from gpytorch_gaps.filling.transforms.predictive import Transformed

_FACTORS = np.geomspace(0.1, 10.0, 401)  # on standard deviations, that are tried


def in_data_units(check: Check, predicted: Transformed, truth: np.ndarray) -> Check:
    """The check with scores, and mean square errors, of the predictions of observations `truth` (Q,).

    :param check: that of z. Its degrees of freedom stay those of z, and its `predicted` is of z.
    :param predicted: the distributions of the observations.
    """
    expected, score = float(np.mean(predicted.mean_square)), predicted.score(truth)
    return replace(
        check,
        score=score,
        variance=expected,
        gap_variance=None,
        ratio=float(np.mean((truth - predicted.median) ** 2)) / max(expected, 1e-300),
        stretch=_stretch(check, predicted, truth, score.level),
        truth=truth,
    )


def _stretch(check: Check, predicted: Transformed, truth: np.ndarray, level: float) -> float:
    """The factor on standard deviations of z with which intervals cover nearest to `level`."""
    if not any(flags.any() for flags in predicted.transform.at_ends(truth)):
        return check.stretch  # that of z: a monotone function changes no coverage
    off = [abs(predicted.stretched(float(factor)).coverage(truth, level) - level) for factor in _FACTORS]
    nearest = np.flatnonzero(np.array(off) <= min(off) + 1e-9)
    return float(min(_FACTORS[nearest], key=lambda factor: abs(np.log(factor))))
