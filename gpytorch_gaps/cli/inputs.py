"""What a file holds, as ``fill_gaps`` is to see it."""

from typing import Any

import numpy as np

from gpytorch_gaps.filling import fill
from gpytorch_gaps.filling.adapters import ArrayAdapter, adapt
from gpytorch_gaps.formats import Opened


def values_of(opened: Opened) -> Any:
    """The data; what is read in chunks but small goes into memory, where more can be told of it."""
    data = opened.data
    if hasattr(data, "data_vars"):
        return data.assign({name: _held(one) for name, one in data.data_vars.items()})
    return _held(data)


def _held(values: Any) -> Any:
    small = int(np.prod(values.shape)) <= fill.MAX_CELLS_IN_MEMORY
    return values.compute() if small and getattr(values, "chunks", None) is not None else values


def kinds_of(opened: Opened, values: Any) -> dict[str, ArrayAdapter]:
    """One for each variable, by name; the name is empty where the file gives none."""
    if hasattr(values, "data_vars"):
        return {str(name): adapt(one) for name, one in values.data_vars.items()}
    name = str(getattr(values, "name", None) or "") if hasattr(values, "dims") else ""
    return {name: adapt(values, opened.axes)}
