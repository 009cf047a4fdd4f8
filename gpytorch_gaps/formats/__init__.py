"""Gappy arrays from files, and results back into files: ``open_file``, ``check_output``, ``Opened.write``.

Formats by suffix: .npy, .npz, .nc (netCDF 3 and 4), .zarr (a directory), .csv, .tif / .tiff, .png. Packages
that a format needs are imported when such a file is met, never before.
"""

from pathlib import Path

from gpytorch_gaps.formats import images, numpy_files, tables, tiff_files, xarray_files  # noqa: F401  each adds its formats
from gpytorch_gaps.formats.opened import Opened, format_of, require

__all__ = ["Opened", "check_output", "open_file"]


def open_file(path: Path | str, variable: str | None = None, gap_value: float | None = None) -> Opened:
    """What the file holds, read lazily where its format allows; entries equal to `gap_value` are gaps, as NaN is.

    `variable` picks one array of an .npz, .nc or .zarr file, or one column of a .csv table.
    """
    path = Path(path)
    kind = format_of(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    if path.is_dir() != kind.directory:
        got, expected = ("a directory", "a file") if path.is_dir() else ("a file", "a directory")
        raise ValueError(f"{path}: got {got}, expected {expected} for a {path.suffix}")
    if variable is not None and not kind.has_variables:
        raise ValueError(
            f"{path}: got the variable {variable!r}, but a {path.suffix} file holds one array without a name"
        )
    require(path, *kind.packages)
    return kind.read(path, variable, gap_value)


def check_output(path: Path | str, opened: Opened, lossless: bool = False) -> None:
    """Refuses, before any work, an output that ``opened.write(.., path, lossless=lossless)`` could not write."""
    opened.check(Path(path), lossless)
