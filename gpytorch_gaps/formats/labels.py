"""Labelled values as numbers that are stored, and plain arrays as labelled ones."""

from typing import TYPE_CHECKING, Any

import numpy as np

from gpytorch_gaps.formats.opened import Opened
from gpytorch_gaps.formats.values import to_dtype

if TYPE_CHECKING:
    import xarray

# What of a variable's encoding is about its meaning, not about its storage.
MEANING = ("units", "calendar", "coordinates", "grid_mapping", "bounds", "cell_measures", "ancillary_variables")


def without(data: Any, gap_value: float) -> Any:
    """NaN for `gap_value`; where numbers are packed, for what is nearer to it than to the next number."""

    def one(values: "xarray.DataArray") -> "xarray.DataArray":
        scale = values.encoding.get("scale_factor")
        if scale is not None:
            return values.where(abs(values - gap_value) > abs(float(scale)) / 2)
        value = values.dtype.type(gap_value) if values.dtype.kind == "f" else gap_value
        return values.where(values != value)

    return data.map(one, keep_attrs=True) if hasattr(data, "data_vars") else one(data)


def meaning(variable: "xarray.DataArray") -> dict[str, Any]:
    return {key: variable.encoding[key] for key in MEANING if key in variable.encoding}


def unpacked_attributes(values: "xarray.DataArray", encoding: dict) -> dict[str, Any]:
    """Those of `values`, without the limits of packed numbers, which are packed as well."""
    is_packed = "scale_factor" in encoding or "add_offset" in encoding
    stale = ("valid_min", "valid_max", "valid_range") if is_packed else ()
    return {key: held for key, held in values.attrs.items() if key not in stale}


def packed(values: np.ndarray, encoding: dict, dtype: np.dtype, gap_value: float | None) -> np.ndarray:
    """`values` as stored: scaled, never a fill value nor `gap_value`, in `dtype`, or in its signed or unsigned twin."""

    def scaled(numbers: Any) -> Any:
        if "scale_factor" in encoding or "add_offset" in encoding:
            return (numbers - encoding.get("add_offset", 0.0)) / encoding.get("scale_factor", 1.0)
        return numbers

    values = scaled(values.astype(np.float64, copy=False))
    twin = {"true": "u", "false": "i"}.get(str(encoding.get("_Unsigned")), dtype.kind)
    meant = np.dtype(f"{twin}{dtype.itemsize}") if dtype.kind in "iu" else dtype
    marks = [np.asarray(encoding[key]).ravel() for key in ("_FillValue", "missing_value") if key in encoding]
    reserved = [mark for some in marks for mark in some.astype(meant, casting="unsafe").tolist()]
    if gap_value is not None:
        reserved.append(scaled(gap_value) if meant.kind == "f" else np.rint(scaled(gap_value)))
    stored = to_dtype(values, meant, reserved)
    return stored.view(dtype.newbyteorder("=")) if meant.kind != dtype.kind else stored


def labelled(opened: Opened, filled: Any) -> "xarray.DataArray":
    """A table or an array with its coordinates."""
    import xarray

    if hasattr(filled, "columns"):
        row, column, name = table_names(filled, "row", "column")
        coordinates: list = [(row, filled.index.to_numpy()), (column, filled.columns.to_numpy())]
    else:
        name = opened.name
        coordinates = opened.coordinates or [None] * filled.ndim
    dims = [found[0] if found else f"dim_{i}" for i, found in enumerate(coordinates)]
    return xarray.DataArray(np.asarray(filled), dict(filter(None, coordinates)), dims, name)


def table_names(table: Any, row: str, column: str) -> tuple[str, str, str]:
    """What to call the rows, the columns and the values of a table, each otherwise."""
    row = str(table.index.name or row)
    column = str(table.columns.name or column)
    column = column if column != row else f"{column}_"
    return row, column, "values" if "values" not in (row, column) else "table_values"
