"""What to fill and what to believe: the options --mask, --max-gap and --untrusted."""

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from gpytorch_gaps.cli.parser import Condition, find_condition
from gpytorch_gaps.filling.masks import ignoring
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


def read_mask(given: str | None, opened: OpenedFile) -> Any:
    """The mask of --mask, which may be a condition on an array, such as ``land == 0``.

    :return: the mask as ``fill_gaps`` takes it, or a dictionary of masks by variable if there are several.
    :raises ValueError: if there is neither such an array nor such a file.
    """
    if given is None:
        return None
    condition = find_condition(given)
    if condition is None:
        return _of_variables("--mask", opened, _array_of_mask(given, opened))
    name, symbol, number = condition
    return _of_variables("--mask", opened, _compared(_array_of_mask(name, opened), symbol, number))


def _array_of_mask(given: str, opened: OpenedFile) -> Any:
    """Another array of the opened file, or of a file, after a colon if that holds several."""
    if given in opened.names():
        return opened.take_out(given)
    if Path(given).exists():
        return open_mask(given)
    path, colon, name = given.rpartition(":")
    if colon and Path(path).exists():
        return open_mask(path, name)
    held = ", ".join(opened.names()) or "an array without a name"
    raise ValueError(f"--mask: got {given!r}, expected a file, or an array of {opened.path}, which has {held}")


def distrust(conditions: list[Condition], opened: OpenedFile) -> None:
    """Makes gaps of the observations that fulfil one of the conditions, such as ``qc != 0``."""
    flags = [_compared(opened.take_out(name), symbol, number) for name, symbol, number in conditions]
    for one in flags:
        untrusted = _of_variables("--untrusted", opened, one)
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


def _of_variables(option: str, opened: OpenedFile, mask: Any) -> Any:
    """The mask; for several variables, a dictionary with it for those that have its dimensions, else None."""
    data = opened.data
    if not hasattr(data, "data_vars"):
        pixels = getattr(data, "ndim", 0) == getattr(mask, "ndim", 0) + 1 and data.shape[:-1] == mask.shape
        return mask[..., None] if pixels and isinstance(mask, np.ndarray) else mask
    dims = getattr(mask, "dims", None)
    if dims is None:
        raise ValueError(f"{option}: got an array without dimensions for several variables; pick one with --variable")
    found = {name: mask if set(dims) <= set(one.dims) else None for name, one in data.data_vars.items()}
    if all(one is None for one in found.values()):
        raise ValueError(f"{option}: got the dimensions {list(map(str, dims))}, which no variable to fill has")
    return found
