"""Further arrays: those of the options --mask, --mean and --noise."""

import argparse
from collections.abc import Hashable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpytorch_gaps.cli.masks import read_mask
from gpytorch_gaps.cli.sources import of_variables, read_source
from gpytorch_gaps.formats import OpenedFile

_ByVariable = dict[Hashable | None, dict[str, Any]]
"""Arrays and numbers by name, for each variable. The key None is for all variables."""


def arrays_beside(options: argparse.Namespace, opened: OpenedFile) -> dict[str, Any]:
    """The mask, the backgrounds and the known errors as keywords of ``fill_gaps``."""
    # all of them are taken out first: the variables to fill are those that remain
    mask = None if options.mask is None else read_mask(options.mask, opened)
    backgrounds = _by_variable("--mean", options.mean, opened)
    errors = _by_variable("--noise", options.noise, opened)
    _require_filled("--mean", backgrounds, opened)
    _require_filled("--noise", errors, opened)
    return {
        "where": None if mask is None else of_variables("--mask", opened, mask),
        "mean": _backgrounds(backgrounds, opened),
        "noise": _errors(errors, options.noise, opened),
    }


def _errors(found: _ByVariable, given: Sequence[str], opened: OpenedFile) -> Any:
    """Numbers or arrays, by variable if there are several."""
    for variable, errors in found.items():
        if len(errors) > 1:
            raise ValueError(f"--noise: got {', '.join(errors)} for {variable or 'all values'}, expected one")
    if not hasattr(opened.data, "data_vars"):
        if len(found) > 1:
            raise ValueError(f"--noise: got {' and '.join(given)}, expected one")
        return next((one for errors in found.values() for one in errors.values()), None)
    if None in found:
        names = ", ".join(map(str, opened.data.data_vars))
        raise ValueError(f"--noise: got one for all of {names}, expected VARIABLE={given[0]}, or one --variable")
    return {variable: next(iter(errors.values())) for variable, errors in found.items()} or None


def _backgrounds(found: _ByVariable, opened: OpenedFile) -> Any:
    """A mapping by name; for several variables, one for each variable."""
    if not hasattr(opened.data, "data_vars"):
        fields = {name: of_variables("--mean", opened, one) for own in found.values() for name, one in own.items()}
        return fields or None
    shared = {name: of_variables("--mean", opened, one) for name, one in found.pop(None, {}).items()}
    by_variable = {}
    for variable in opened.data.data_vars:
        own = {name: one[variable] for name, one in shared.items() if one[variable] is not None}
        by_variable[variable] = own | found.get(variable, {})
    return {variable: fields for variable, fields in by_variable.items() if fields} or None


def _by_variable(option: str, given: Sequence[str], opened: OpenedFile) -> _ByVariable:
    """Numbers (for --noise) and arrays by name, for each variable in ``VARIABLE=..``, or None for all variables."""
    found: _ByVariable = {}
    for text in given:
        first, _, rest = text.partition("=")
        variable, source = (first, rest) if rest and first in opened.names() else (None, text)
        number = _number(source) if option == "--noise" else None
        name = source if number is not None or source in opened.names() else Path(source).stem
        found.setdefault(variable, {})[name] = read_source(option, source, opened) if number is None else number
    return found


def _require_filled(option: str, found: _ByVariable, opened: OpenedFile) -> None:
    """Raises if a named variable is not filled."""
    data = opened.data
    names = [str(one) for one in data.data_vars] if hasattr(data, "data_vars") else [opened.name]
    for key in found:
        if key is not None and key not in names:
            raise ValueError(f"{option}: got the variable {key!r}, expected one to fill: {', '.join(names)}")


def _number(text: str) -> float | None:
    with suppress(ValueError):
        return float(text)
    return None
