"""Where results go: all of it is checked before anything is computed."""

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gpytorch_gaps.formats import Opened, check_output
from gpytorch_gaps.utils.files import require_place

PICTURES = (".png", ".pdf", ".svg")


@dataclass(frozen=True)
class Outputs:
    """`pictures` by variable. `every`: whether observed values are written too, as smoothing changes them."""

    filled: Path
    std: Path | None
    pictures: dict[str, Path]
    every: bool

    def paths(self) -> list[Path]:
        return [self.filled, *([] if self.std is None else [self.std]), *self.pictures.values()]


def checked_outputs(options: argparse.Namespace, opened: Opened, variables: Iterable[str]) -> Outputs:
    """What was asked for, if all of it can be written."""
    outputs = Outputs(options.output, options.std, pictures_of(options.plot, list(variables)), options.smooth)
    check_output(outputs.filled, opened, lossless=outputs.every)
    if outputs.std is not None:
        check_output(outputs.std, opened, lossless=True)
    if outputs.pictures:
        check_picture("--plot", options.plot)
    _check_distinct(outputs, opened.path)
    for path in outputs.paths():
        if path.exists() and not options.force:
            raise ValueError(f"{path}: exists; --force replaces it")
    return outputs


def check_picture(name: str, path: Path) -> None:
    """That a picture can be drawn, and put there."""
    if path.suffix.lower() not in PICTURES:
        raise ValueError(f"{name}: got {path}, expected a name that ends in {', '.join(PICTURES)}")
    require_place(name, path)
    import gpytorch_gaps.plot  # noqa: F401  says what is missing


def pictures_of(path: Path | None, variables: list[str]) -> dict[str, Path]:
    """One for each variable, with its name before the suffix where there are several."""
    if path is None:
        return {}
    if len(variables) == 1:
        return {variables[0]: path}
    return {name: path.with_name(f"{path.stem}_{name.replace('/', '_')}{path.suffix}") for name in variables}


def _check_distinct(outputs: Outputs, source: Path) -> None:
    """The filling may replace what it was made from; nothing else may share a place."""
    taken = [path.resolve() for path in outputs.paths()]
    if len(set(taken)) < len(taken):
        twice = next(path for path in taken if taken.count(path) > 1)
        raise ValueError(f"{twice}: is to hold two results, expected a file for each")
    if source.resolve() in taken[1:]:
        raise ValueError(f"{source}: is what is filled, expected another file for the standard deviations or a picture")
