"""Additions to filled values in a file: standard deviations, flags of filled cells, a line of history.

Only netCDF and zarr files can contain them. Everything else in the file is unchanged.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

OBSERVED, FILLED, NOT_FILLED = range(3)
STD_SUFFIX, FLAG_SUFFIX = "_std", "_filled_flag"


@dataclass(frozen=True)
class Additions:
    """Additions that :meth:`OpenedFile.write` writes beside the filled values.

    :param history: a line that is appended to the attribute ``history`` of netCDF and zarr files, as CF recommends.
    :param flags: whether to add a variable ``<name>_filled_flag``: which cells were observed, filled and not filled.
    :param deviations: standard deviations, in the form of the data, for a variable ``<name>_std``. Default: none.

    >>> Additions(history="2024-05-01: gaps filled", flags=True).flags
    True
    """

    history: str = ""
    flags: bool = False
    deviations: Any = None

    @property
    def are_none(self) -> bool:
        return not (self.history or self.flags or self.deviations is not None)


class AddedVariable(NamedTuple):
    """A variable of a file: its dimensions, values and attributes."""

    dims: tuple[Any, ...]
    values: np.ndarray
    attributes: dict[str, Any]


def added_variables(
    flags: bool, data: Mapping[Any, Any], filled: Mapping[Any, Any], deviations: Mapping[Any, Any]
) -> dict[Any, dict[str, AddedVariable]]:
    """The variables to add, as a mapping from the variable that they belong to.

    :param flags: whether flags are added.
    :param data: DataArrays with NaN at gaps, by name.
    :param filled: the results, by name.
    :param deviations: standard deviations of some of them, by name.
    """
    added: dict[Any, dict[str, AddedVariable]] = {}
    for name, before in data.items():
        gaps = before.isnull().values
        if name in deviations:
            one = deviations[name].transpose(*before.dims)
            added.setdefault(name, {})[f"{name}{STD_SUFFIX}"] = AddedVariable(one.dims, one.values, dict(one.attrs))
        if flags and gaps.any():
            left = filled[name].transpose(*before.dims).isnull().values
            state = np.where(gaps, np.where(left, NOT_FILLED, FILLED), OBSERVED).astype(np.int8)
            added.setdefault(name, {})[f"{name}{FLAG_SUFFIX}"] = AddedVariable(before.dims, state, _about_flags(before))
    return added


def _about_flags(variable: Any) -> dict[str, Any]:
    named = variable.attrs.get("long_name", variable.name)
    attributes = {
        "long_name": f"whether {named} was observed or filled",
        "flag_values": np.array([OBSERVED, FILLED, NOT_FILLED], dtype=np.int8),
        "flag_meanings": "observed filled not_filled",
    }
    standard_name = variable.attrs.get("standard_name")
    return attributes | ({"standard_name": f"{standard_name} status_flag"} if standard_name else {})


def with_line(history: Any, line: str) -> str:
    """An attribute ``history`` with one more line."""
    return f"{history}\n{line}" if history else line


def with_names(ancillary: Any, names: Any) -> str:
    """An attribute ``ancillary_variables`` with more names."""
    return " ".join([*str(ancillary or "").split(), *names])
