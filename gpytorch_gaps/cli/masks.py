"""Which cells to fill, and which observations to use: the options --mask, --max-gap and --untrusted."""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from gpytorch_gaps.cli.arguments import Condition, find_condition
from gpytorch_gaps.cli.sources import of_variables, read_source
from gpytorch_gaps.filling.arrays.masks import ignoring
from gpytorch_gaps.formats import OpenedFile
from gpytorch_gaps.formats.masks import open_mask

_COMPARISONS: dict[str, Callable[[np.ndarray, float], np.ndarray]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
    "&": lambda values, bits: (np.nan_to_num(values).astype(np.int64) & int(bits)) != 0,
}


def read_mask(given: str, opened: OpenedFile) -> Any:
    """The mask of --mask: an array, or a condition on an array, such as ``land == 0``.

    :raises ValueError: if there is neither such an array nor such a file.
    """
    condition = find_condition(given)
    if condition is None:
        return read_source("--mask", given, opened, open_mask)
    name, symbol, number = condition
    return _compared(read_source("--mask", name, opened, open_mask), symbol, number)


def distrust(conditions: list[Condition], opened: OpenedFile) -> None:
    """Makes gaps of the observations that fulfil one of the conditions, such as ``qc != 0``."""
    flags = [_compared(opened.take_out(name), symbol, number) for name, symbol, number in conditions]
    for one in flags:
        untrusted = of_variables("--untrusted", opened, one)
        if hasattr(opened.data, "data_vars"):
            opened.data = opened.data.assign(
                {name: ignoring(opened.data[name], own) for name, own in untrusted.items() if own is not None}
            )
        else:
            opened.data = ignoring(opened.data, untrusted)


def _compared(quality: Any, symbol: str, number: float) -> Any:
    """Flags in the form of `quality`."""
    flags = _COMPARISONS[symbol](np.asarray(quality), number)
    if hasattr(quality, "dims"):
        return quality.copy(data=flags)
    if hasattr(quality, "columns"):
        return type(quality)(flags, index=quality.index, columns=quality.columns)
    return type(quality)(flags, index=quality.index) if hasattr(quality, "index") else flags
