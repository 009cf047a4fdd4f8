"""The files of a command: inputs for ``fill_gaps``, and paths of results."""

import argparse
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpytorch_gaps.filling import fill
from gpytorch_gaps.filling.arrays.adapters import ArrayAdapter, adapt
from gpytorch_gaps.formats import Additions, OpenedFile, check_output, open_file
from gpytorch_gaps.utils.files import atomic_write, require_place

PICTURES = (".png", ".pdf", ".svg")
PAGES = (".html", ".htm")


def open_input(options: argparse.Namespace) -> OpenedFile:
    """The input of a command."""
    return open_file(
        options.input,
        options.variable,
        options.gap_value,
        index=options.index,
        columns=options.columns,
        dates=options.dates,
    )


def read_arrays(opened: OpenedFile) -> tuple[Any, dict[str, ArrayAdapter]]:
    """The values for ``fill_gaps``, and an adapter for each variable by name. The name may be empty.

    Small values that are read in chunks are loaded into memory.
    """
    values = opened.data
    if hasattr(values, "data_vars"):
        values = values.assign({name: _loaded_if_small(one) for name, one in values.data_vars.items()})
        return values, {str(name): adapt(one) for name, one in values.data_vars.items()}
    values = _loaded_if_small(values)
    name = str(getattr(values, "name", None) or "") if hasattr(values, "dims") else ""
    return values, {name: adapt(values, opened.axes)}


def _loaded_if_small(values: Any) -> Any:
    small = math.prod(values.shape) <= fill.MAX_CELLS_IN_MEMORY
    return values.compute() if small and getattr(values, "chunks", None) is not None else values


@dataclass(frozen=True)
class Outputs:
    """The files to write. `std` is a separate file, `pictures` are by variable, and `quantiles` by probability.

    `every`: whether observed values are written too, because smoothing changes them.
    """

    filled: Path
    std: Path | None
    pictures: dict[str, Path]
    every: bool
    both: bool = False
    """Whether standard deviations are written into the filled file."""

    quantiles: dict[float, Path] = field(default_factory=dict)
    """Files of quantiles, by their probabilities."""

    @property
    def path_of_std(self) -> Path | None:
        """The file with the standard deviations."""
        return self.filled if self.both else self.std

    def paths(self) -> list[Path]:
        std = [] if self.std is None else [self.std]
        return [self.filled, *std, *self.quantiles.values(), *self.pictures.values()]


def check_outputs(options: argparse.Namespace, opened: OpenedFile, variables: Iterable[str]) -> Outputs:
    """The requested outputs. Checks, before any work, that each can be written."""
    both = options.std is not None and options.std.resolve() == options.output.resolve()
    std, pictures = None if both else options.std, picture_paths(options.plot, list(variables))
    outputs = Outputs(options.output, std, pictures, options.smooth, both, dict(options.quantile))
    if len(outputs.quantiles) < len(options.quantile):
        raise ValueError("--quantile: got a probability twice, expected a file for each")
    additions = Additions(flags=options.flags, deviations=both or None)
    check_output(outputs.filled, opened, outputs.every, additions)
    if outputs.std is not None:
        check_output(outputs.std, opened, lossless=True)
    for path in outputs.quantiles.values():
        check_output(path, opened, outputs.every)
    if outputs.pictures:
        check_picture("--plot", options.plot)
    _check_distinct(outputs, opened.path)
    for path in outputs.paths():
        if path.exists() and not options.force:
            raise ValueError(f"{path}: exists; --force replaces it")
    return outputs


def _check_distinct(outputs: Outputs, source: Path) -> None:
    """Only the filled file may replace the input; no other two may share a path."""
    taken = [path.resolve() for path in outputs.paths()]
    if len(set(taken)) < len(taken):
        twice = next(path for path in taken if taken.count(path) > 1)
        raise ValueError(f"{twice}: got this path for two results, expected a file for each")
    if source.resolve() in taken[1:]:
        raise ValueError(
            f"{source}: got the input as output, expected another file for standard deviations, quantiles and pictures"
        )


def picture_paths(path: Path | None, variables: list[str]) -> dict[str, Path]:
    """The path for each variable. If there are several, the name of the variable is before the suffix."""
    if path is None:
        return {}
    if len(variables) == 1:
        return {variables[0]: path}
    return {name: path.with_name(f"{path.stem}_{name.replace('/', '_')}{path.suffix}") for name in variables}


def check_picture(name: str, path: Path) -> None:
    """Checks that a picture can be drawn and written there."""
    if path.suffix.lower() not in PICTURES:
        raise ValueError(f"{name}: got {path}, expected a name that ends in {', '.join(PICTURES)}")
    require_place(name, path)
    import gpytorch_gaps.plot  # noqa: F401  raises if matplotlib is missing


def check_page(path: Path, force: bool) -> None:
    """Checks that a page with pictures can be made and written there."""
    if path.suffix.lower() not in PAGES:
        raise ValueError(f"--output: got {path}, expected a name that ends in {', '.join(PAGES)}")
    require_place("--output", path)
    if path.exists() and not force:
        raise ValueError(f"{path}: exists; --force replaces it")
    import gpytorch_gaps.plot  # noqa: F401  raises if matplotlib is missing


def save_picture(figure: Any, path: Path) -> None:
    """Writes a matplotlib figure and closes it."""
    from matplotlib import pyplot

    kind = path.suffix.lower().removeprefix(".")
    atomic_write(path, lambda stream: figure.savefig(stream, format=kind, dpi=120))
    pyplot.close(figure)
