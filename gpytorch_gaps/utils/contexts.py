"""Values that a ``with`` block changes, in the style of GPyTorch's settings, checked when the context is made."""

import math
import numbers
from typing import Any

from linear_operator.settings import _value_context


class Setting(_value_context):
    """A value that is restored on exit to what it was on entry, not to what it was when the context was created."""

    def __enter__(self) -> None:
        self._orig_value = type(self).value()
        super().__enter__()


class Choice(Setting):
    """A setting whose value is one of a few names."""

    choices: tuple[str, ...] = ()

    def __init__(self, value: str) -> None:
        if value not in self.choices:
            raise ValueError(
                f"settings.{type(self).__name__}: got {value!r}, expected one of {', '.join(self.choices)}"
            )
        super().__init__(value)


class Number(Setting):
    """A number, at least (or above) `minimum`; None if the default depends on the problem."""

    minimum: float = 0.0
    exclusive = False
    integer = False
    optional = False

    def __init__(self, value: Any) -> None:
        kind = numbers.Integral if self.integer else numbers.Real  # NumPy's scalars are welcome
        valid = isinstance(value, kind) and not isinstance(value, bool) and math.isfinite(value)
        valid = valid and (value > self.minimum if self.exclusive else value >= self.minimum)
        if not (valid or (value is None and self.optional)):
            bound = f"{'above' if self.exclusive else 'at least'} {self.minimum:g}"
            expected = f"{'an integer' if self.integer else 'a number'} {bound}{' or None' if self.optional else ''}"
            raise ValueError(f"settings.{type(self).__name__}: got {value!r}, expected {expected}")
        super().__init__(value)


class Switch(Setting):
    """A setting whose value is True or False."""

    def __init__(self, value: bool = True) -> None:
        if not isinstance(value, bool):
            raise ValueError(f"settings.{type(self).__name__}: got {value!r}, expected True or False")
        super().__init__(value)
