"""The factors by which the held-out check multiplies standard deviations.

If the standard deviations of a model are wrong, they are seldom all wrong by the same factor: a kernel that is wrong
far from data may be right among data. Withheld observations are therefore divided into groups by the standard deviation
that the model expects. Groups with almost the same median are joined. Each group has its own factor. It is 1 if the
coverage of the group may be due to chance. Between the medians of the groups, the logarithm of the factor is linear in
the logarithm of the standard deviation. Beyond them, it is constant.
"""

import numpy as np

from gpytorch_gaps.filling.checking.calibration import Check

_MOST_GROUPS = 4
_DISTINCT = 1.1  # least ratio of the medians of two groups
_LEAST_INDEPENDENT = 100.0  # independent observations in a group; five of them should be outside 95 % intervals


def factors(check: Check, std: np.ndarray) -> np.ndarray | float:
    """The factors on standard deviations of measurements.

    :param check: in the units of `std`.
    :param std: standard deviations of the model, of any shape, noise included.
    """
    if check.calibration == 1.0 or check.predicted is None:
        return check.calibration
    expected = check.predicted.variance.sqrt().numpy()
    count = int(np.clip(check.independent // _LEAST_INDEPENDENT, 1, _MOST_GROUPS))
    groups = _distinct(np.array_split(np.argsort(expected, kind="stable"), count), expected)
    if len(groups) == 1:
        return check.calibration
    sizes = [float(np.median(expected[rows])) for rows in groups]
    own = [check.among(rows).calibration for rows in groups]
    with np.errstate(divide="ignore"):  # standard deviations are zero at observed cells
        return np.exp(np.interp(np.log(std), np.log(sizes), np.log(own)))


def _distinct(groups: list[np.ndarray], expected: np.ndarray) -> list[np.ndarray]:
    """Joins groups with almost the same median, whose order is that of the observations, or of rounding."""
    found = groups[:1]
    for rows in groups[1:]:
        if np.median(expected[rows]) < _DISTINCT * np.median(expected[found[-1]]):
            found[-1] = np.concatenate([found[-1], rows])
        else:
            found.append(rows)
    return found
