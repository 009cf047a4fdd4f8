"""Checks of arguments. Each raises a ValueError with the given value and the expected one."""

import math
import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from gpytorch_gaps.utils.tensors import first_equal, first_equal_row


def check_integer(name: str, value: Any, at_least: int, hint: str = "") -> int:
    """An integer of at least `at_least`. `hint` describes other accepted values.

    >>> check_integer("steps", -1, at_least=0)
    Traceback (most recent call last):
    ValueError: steps: got -1, expected an integer of at least 0
    """
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < at_least:
        raise ValueError(f"{name}: got {value!r}, expected an integer of at least {at_least}{hint}")
    return int(value)


def check_number(
    name: str, value: Any, *, above: float = -math.inf, at_least: float = -math.inf, what: str = "number"
) -> float:
    """One finite number within bounds: a Python or NumPy number, or an array or tensor with one entry.

    >>> check_number("noise", torch.tensor([0.5]), above=0, what="variance")
    0.5
    >>> check_number("noise", 0.0, above=0, what="variance")
    Traceback (most recent call last):
    ValueError: noise: got 0.0, expected a variance above 0
    """
    shape = tuple(getattr(value, "shape", ()))
    if math.prod(shape) != 1:
        raise ValueError(f"{name}: got shape {shape}, expected one {what}")
    try:
        found = math.nan if isinstance(value, bool | str) else float(value.item() if shape else value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: got {value!r}, expected a {what}") from error
    came = str(value) if isinstance(value, numbers.Real) else repr(value)
    if not math.isfinite(found):
        raise ValueError(f"{name}: got {came}, expected a finite {what}")
    if found <= above:
        raise ValueError(f"{name}: got {came}, expected a {what} above {above:g}")
    if found < at_least:
        raise ValueError(f"{name}: got {came}, expected a {what} of at least {at_least:g}")
    return found


# -- entries and rows of tensors ---------------------------------------------------------------------------------------


def refuse_entries(bad: Tensor, tensor: Tensor, name: str, expected: str) -> None:
    """Raises for the first entry of `tensor` that `bad` marks."""
    if bad.any():
        entry = tuple(bad.nonzero()[0].tolist())
        raise ValueError(f"{name}: entry {entry} is {tensor[entry].item()}; expected {expected}")


def refuse_repeats(name: str, rows: Tensor, keys: Tensor | None = None) -> None:
    """Raises if two of the rows `(m, d)` are equal.

    :param keys: one number per row that identifies it, shape (m,), where that is cheaper to compare.
    """
    first = first_equal_row(rows, rows) if keys is None else first_equal(keys, keys)
    repeats = (first != torch.arange(len(rows), device=rows.device)).nonzero()
    if len(repeats) > 0:
        later = int(repeats[0])
        hint = "" if rows.dtype == torch.float64 else ", or torch.float64 if that tells them apart"
        raise ValueError(
            f"{name}: rows {int(first[later])} and {later} are both {rows[later].tolist()} in {rows.dtype}; "
            f"expected distinct coordinates{hint}"
        )


# -- arrays and tensors ------------------------------------------------------------------------------------------------


class TensorArgument(NamedTuple):
    """An argument as a tensor, with the required dtype and device; None for any."""

    name: str
    tensor: Tensor
    dtype: torch.dtype | None
    device: torch.device | None


def read_tensor(name: str, value: ArrayLike | Tensor, booleans: bool = False) -> TensorArgument:
    """Reads real numbers from any container or a number. Masked entries of a NumPy masked array become NaN.

    Integers require no floating-point dtype; Python numbers require no device either.

    :param booleans: whether booleans count as numbers.
    """
    if isinstance(value, Tensor):
        tensor, floating = value, value.is_floating_point()
    else:
        try:
            array = np.asanyarray(value)
            floating = array.dtype.kind == "f"
            if isinstance(array, np.ma.MaskedArray):
                array = np.ma.filled(array if floating else array.astype(np.float64), np.nan)
            # torch needs native byte order and C order; the copy also protects against later changes by the caller
            tensor = torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name}: expected real numbers, but {error}") from error
    if tensor.is_complex() or tensor.dtype == torch.uint64 or (tensor.dtype == torch.bool and not booleans):
        raise ValueError(f"{name}: got {tensor.dtype}; expected floating-point numbers, or integers that fit int64")
    if not tensor.is_floating_point():
        tensor = tensor.long()  # torch supports few operations on unsigned integers
    if isinstance(value, Sequence):
        return TensorArgument(name, tensor, None, None)
    return TensorArgument(name, tensor, tensor.dtype if floating else None, tensor.device)


def to_common_dtype(*arguments: TensorArgument) -> list[Tensor]:
    """The tensors in one floating-point dtype and on one device.

    :raises ValueError: if two arguments require different ones.
    """
    dtype = _required(arguments, "dtype") or torch.get_default_dtype()
    device = _required(arguments, "device")
    return [argument.tensor.to(dtype=dtype, device=device) for argument in arguments]


def _required(arguments: Sequence[TensorArgument], trait: str) -> Any:
    first, *others = [(a.name, getattr(a, trait)) for a in arguments if getattr(a, trait) is not None] or [("", None)]
    for name, got in others:
        if got != first[1]:
            raise ValueError(f"{name}: got {got}; expected {first[1]}, the {trait} of {first[0]}")
    return first[1]
