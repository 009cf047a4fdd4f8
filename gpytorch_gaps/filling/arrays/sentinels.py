"""Numbers such as -9999 and 1e20 that mark gaps but are not declared as such."""

import warnings

import numpy as np

# Conventional marks of missing values: those of netCDF libraries, of models, of integer types, and strings of nines.
_CONVENTIONAL = np.array(
    [9.969209968386869e36, 1e20, 1e30, 1e35, 1e15, 3.4028234663852886e38, -3.4028234663852886e38, -1e20, -1e30, -1e34]
    + [32767, -32767, -32768, 65535, 65534, 2147483647, -2147483647, -2147483648, 4294967295]
    + [sign * nines for sign in (1, -1) for nines in (99, 99.9, 99.99, 999, 999.9, 999.99, 9999, 9999.9, 99999, 999999)]
    + [-8888, 8888, -7777]
)
_ROUNDING = 1e-6  # relative rounding, for 1e20 in float32
_FAR, _VERY_FAR = 1.0, 10.0  # distance to all others, over their range, for a conventional number and for any other
_OFTEN = 3  # smallest number of cells with a number that is not conventional
_TOO_LARGE = 1e18  # its square overflows in float32
_MOST = 3  # largest number of marks


def find_sentinels(values: np.ndarray) -> list[tuple[float, int]]:
    """Numbers at an end of the range of `values`, far from all others, and how many cells have them.

    >>> import numpy as np
    >>> find_sentinels(np.array([1.0, 2.0, -9999.0, 3.0, -9999.0]))
    [(-9999.0, 2)]
    >>> find_sentinels(np.array([1.0, 2.0, 30.0, 3.0]))
    []
    """
    found: list[tuple[float, int]] = []
    left = values[~np.isnan(values)]
    while len(found) < _MOST and left.size > 1:
        ends = [end for end in (left.min(), left.max()) if _may_be_sentinel(end, left)]
        if not ends:
            break
        found.append((float(ends[0]), int((left == ends[0]).sum())))
        left = left[left != ends[0]]
    return found


def _may_be_sentinel(end: float, values: np.ndarray) -> bool:
    """Whether the smallest or largest of the values stands out."""
    conventional = bool(np.isclose(end, _CONVENTIONAL, rtol=_ROUNDING, atol=0).any())
    held = values == end
    others = values[~held]
    if not others.size or (not conventional and held.sum() < _OFTEN):
        return False
    low, high = float(others.min()), float(others.max())
    distance = min(abs(end - low), abs(end - high))
    if conventional:
        return distance > _FAR * (high - low)
    return high > low and distance > _VERY_FAR * (high - low)


def warn_of_sentinels(values: np.ndarray) -> None:
    """Warns if some numbers look like marks of gaps.

    :raises ValueError: if one of them is too large for a model of the values.
    """
    for number, count in find_sentinels(values):
        cells = f"{count:,} cells hold" if count > 1 else "one cell holds"
        message = (
            f"values: {number:.10g} stands out: {cells} it, far from all other values. If it marks gaps, replace it by "
            f"NaN, or pass gap_value={number:.10g} where a file is opened (--gap-value {number:.10g}); if it is an "
            f"error, pass untrusted=(values == {number:.10g})."
        )
        if abs(number) > _TOO_LARGE:
            raise ValueError(message)
        warnings.warn(message, stacklevel=5)
