"""Reads arrays with gaps from files, and writes results back. Everything else in a file is unchanged.

Formats by suffix: .npy, .npz, .nc (netCDF 3 and 4), .zarr (a directory), .csv, .tif / .tiff, .png. A package that a
format needs is imported when such a file is opened.
"""

from collections.abc import Sequence
from pathlib import Path

from gpytorch_gaps.formats import arrays, netcdf, npz, png, tables, tiff, zarr_store  # noqa: F401  each adds its suffix
from gpytorch_gaps.formats.additions import Additions
from gpytorch_gaps.formats.opened import OpenedFile, format_of, require
from gpytorch_gaps.formats.table_columns import Layout

__all__ = ["Additions", "OpenedFile", "check_output", "open_file"]


def open_file(
    path: Path | str,
    variable: str | None = None,
    gap_value: float | None = None,
    *,
    index: str | Sequence[str] = (),
    columns: str | Sequence[str] = (),
    dates: str | None = None,
) -> OpenedFile:
    """Opens a file with gaps. It is read lazily if its format allows this.

    :param path: the file, or the directory of a .zarr store.
    :param variable: one array of an .npz, .nc or .zarr file, or one column of a .csv table. Default: all numeric
        variables. For an .npz file: the only array with gaps.
    :param gap_value: a number that marks a gap, in addition to NaN.
    :param index: for a .csv table, the columns that index its rows. Default: the first, if it looks like an index.
    :param columns: for a long .csv table, which has one row per value: further columns that identify the series of a
        value, such as the station. `variable` is then the column of the values.
    :param dates: the order of day and month in dates of a .csv table such as 03/04/2020: ``"day-first"`` or
        ``"month-first"``.
    :return: the opened file, a context manager. Its `data` and `axes` are arguments of
        :func:`gpytorch_gaps.fill_gaps`.
    :raises ValueError: if the file does not have the format of its suffix, or contains no real numbers.
    :raises FileNotFoundError: if there is no such file.
    :raises ImportError: if a package for the format is missing.

    >>> import numpy, tempfile
    >>> from pathlib import Path
    >>> import gpytorch_gaps as gaps
    >>> path = Path(tempfile.mkdtemp()) / "waves.npy"
    >>> values = numpy.sin(numpy.arange(30.0))
    >>> values[7:9] = numpy.nan
    >>> numpy.save(path, values)
    >>> with gaps.formats.open_file(path) as opened:
    ...     filled = gaps.fill_gaps(opened.data, opened.axes, std=False, check=False, steps=5, progress=False)
    ...     opened.write(filled.mean, path.with_name("filled.npy"))
    >>> bool(numpy.isfinite(numpy.load(path.with_name("filled.npy"))).all())
    True
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
    layout = Layout(_names(index), _names(columns), dates)
    if not layout.is_default and kind is not tables.CsvFile:
        raise ValueError(f"{path}: got index, columns or dates, expected none: they are for .csv tables")
    require(path, *kind.packages)
    if kind is tables.CsvFile:
        return tables.CsvFile.read(path, variable, gap_value, layout)
    return kind.read(path, variable, gap_value)


def _names(given: str | Sequence[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def check_output(
    path: Path | str, opened: OpenedFile, lossless: bool = False, additions: Additions | None = None
) -> None:
    """Checks, before any work, that :meth:`OpenedFile.write` can write a result of an opened file.

    :param path: the file to write; its suffix determines the format.
    :param opened: the opened file.
    :param lossless: as in :meth:`OpenedFile.write`.
    :param additions: as in :meth:`OpenedFile.write`. Any value of deviations other than None has the same effect.
    :raises ValueError: if the format cannot hold the result, or nothing can be written at this path.
    :raises ImportError: if a package for the format is missing.

    >>> import numpy, tempfile
    >>> from pathlib import Path
    >>> from gpytorch_gaps.formats import check_output, open_file
    >>> path = Path(tempfile.mkdtemp()) / "cube.npy"
    >>> numpy.save(path, numpy.zeros((2, 3, 4)))
    >>> check_output(path.with_name("out.npz"), open_file(path))
    >>> check_output(path.with_name("out.csv"), open_file(path))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: output: ...cube.npy has the shape (2, 3, 4), but a .csv table has two dimensions at most; write ...
    """
    opened.check(Path(path), lossless, additions or Additions())
