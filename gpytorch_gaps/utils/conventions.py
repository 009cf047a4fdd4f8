"""CF attributes that determine which variables contain numbers, and which of these numbers are valid.

Variables are xarray DataArrays, or anything with their `dtype`, `dims`, `attrs` and `encoding`.
"""

from typing import Any

import numpy as np

FLAG_ATTRIBUTES = ("flag_values", "flag_masks", "flag_meanings")
LIMIT_ATTRIBUTES = ("valid_min", "valid_max", "valid_range")


def holds_numbers(variable: Any) -> bool:
    """Whether a variable has dimensions and holds numbers that can be averaged, not flags."""
    is_numeric = variable.dtype.kind in "iuf" and bool(variable.dims)
    return is_numeric and not any(name in variable.attrs for name in FLAG_ATTRIBUTES)


def valid_limits(variable: Any) -> tuple[float, float] | None:
    """The smallest and the largest valid value, by its attributes; None if they set no limits.

    Limits of packed numbers are packed too, unless they are floating-point numbers. Limits of short integers beside
    unpacked numbers without an encoding belong to a packing that is no longer known. They are ignored.
    """
    attributes, encoding = variable.attrs, variable.encoding
    known = [np.asarray(attributes[name]).ravel() for name in LIMIT_ATTRIBUTES if name in attributes]
    if any(one.dtype.kind not in "iuf" for one in known):
        return None
    low = attributes.get("valid_min", np.ravel(attributes.get("valid_range", -np.inf))[0])
    high = attributes.get("valid_max", np.ravel(attributes.get("valid_range", np.inf))[-1])
    if not known or not (float(low) < float(high) or "_Unsigned" in encoding):
        return None
    is_packed = "scale_factor" in encoding or "add_offset" in encoding
    integers = all(one.dtype.kind in "iu" for one in known)
    if not is_packed or not integers:
        is_unknown = integers and not is_packed and variable.dtype.kind == "f" and all(o.itemsize < 8 for o in known)
        return None if is_unknown else (float(low), float(high))
    if str(encoding.get("_Unsigned")) == "true":
        low, high = (np.asarray(one).astype(f"u{np.asarray(one).itemsize}", casting="unsafe") for one in (low, high))
    scale, offset = float(encoding.get("scale_factor", 1.0)), float(encoding.get("add_offset", 0.0))
    low, high = sorted(float(end) * scale + offset for end in (low, high))
    return low, high


def where_valid(variable: Any) -> Any:
    """A DataArray with NaN outside its valid limits, except for rounding; the same object if it has no limits."""
    limits = valid_limits(variable)
    if limits is None:
        return variable
    half_step = abs(float(variable.encoding.get("scale_factor", 0.0))) / 2
    result = variable.where((variable >= limits[0] - half_step) & (variable <= limits[1] + half_step))
    result.encoding = variable.encoding
    return result
