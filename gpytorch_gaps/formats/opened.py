"""What a file holds, and how to write such a thing again: one subclass of `Opened` a format."""

import importlib
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from gpytorch_gaps.utils.files import require_place, require_writable

FORMATS: dict[str, type["Opened"]] = {}


class Opened(ABC):
    """`data` as ``fill_gaps`` takes it, `axes` where the file tells the coordinates beside the array, else None.

    `write` takes what is of the kind of `data`. In the format that was opened everything else in the file stays as it
    was; in another format the conversion is the plain one. A context manager: leaving it closes the file.
    """

    suffixes: ClassVar[tuple[str, ...]] = ()
    packages: ClassVar[tuple[str, ...]] = ()  # imported when such a file is read or written
    directory: ClassVar[bool] = False
    has_variables: ClassVar[bool] = False

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        FORMATS.update(dict.fromkeys(cls.suffixes, cls))

    def __init__(self, path: Path, data: Any, axes: list | None = None, name: str = "values") -> None:
        self.path, self.data, self.axes, self.name = path, data, axes, name
        self.coordinates: list[tuple[str, np.ndarray] | None] = []  # `axes` with their names, as the file has them

    @classmethod
    @abstractmethod
    def read(cls, path: Path, variable: str | None, gap_value: float | None) -> "Opened": ...

    @abstractmethod
    def _write_again(self, filled: Any, path: Path, lossless: bool) -> None:
        """The opened file, with `filled` for its gaps."""

    @classmethod
    @abstractmethod
    def _write_new(cls, opened: "Opened", filled: Any, path: Path) -> None:
        """What was opened in another format."""

    @classmethod
    @abstractmethod
    def _refuse(cls, opened: "Opened", path: Path, lossless: bool) -> None:
        """Raises where this format cannot hold what was opened, in this format or another."""

    def _converted(self, filled: Any, lossless: bool) -> Any:
        """`filled` as it goes to another format."""
        return filled

    def check(self, path: Path, lossless: bool = False) -> None:
        kind = format_of(path)
        require(path, *kind.packages)
        if kind.directory:
            _require_store_place(path)
            require_writable("output", path)
        else:
            require_place("output", path)
        kind._refuse(self, path, lossless)

    def write(self, filled: Any, path: Path | str, lossless: bool = False) -> None:
        """Writes all or nothing, in the format that the suffix of `path` names.

        In the number type of the file: where that is an integer, or packs numbers into integers, filled entries are
        rounded to it and observed ones stay as they were. `lossless` writes floating numbers as they are, every
        entry: for what is not a filling of the file, such as a smoothed field.
        """
        path = Path(path)
        self.check(path, lossless)
        got, expected = _shapes(filled), _shapes(self.data)
        if got != expected:
            raise ValueError(f"filled: got {got}, expected {expected}, as in {self.path}")
        kind = format_of(path)
        with explained(f"output: {self.path} cannot be written as {path}", OSError):  # a full disk says so itself
            if isinstance(self, kind):
                self._write_again(filled, path, lossless)
            else:
                kind._write_new(self, self._converted(filled, lossless), path)

    def write_deviations(self, deviations: Any, path: Path | str) -> None:
        """Writes standard deviations, lossless: a scale of the file applies to them as to its values, an offset not."""
        self._of_deviations().write(deviations, path, lossless=True)

    def _of_deviations(self) -> "Opened":
        """This file, described as one of deviations."""
        return self

    def close(self) -> None:  # noqa: B027  most formats keep nothing open
        """Lets go of the file; lazily read data cannot be read any more."""

    def __enter__(self) -> "Opened":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _shapes(data: Any) -> Any:
    """The shape, by variable where there are several; labelled dimensions may come in any order."""
    if hasattr(data, "data_vars"):
        return {name: _shapes(data[name]) for name in sorted(data.data_vars, key=str)}
    return dict(sorted(data.sizes.items(), key=str)) if hasattr(data, "sizes") else tuple(data.shape)


def format_of(path: Path) -> type[Opened]:
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"{path}: got the suffix {path.suffix!r}, expected one of {', '.join(FORMATS)}")
    return FORMATS[path.suffix.lower()]


def require(path: Path, *packages: str) -> None:
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError as error:
            message = f"{path}: a {path.suffix} file needs {package}: pip install 'gpytorch-gaps[files]'"
            raise ImportError(message) from error


@contextmanager
def explained(what: str, *passed: type[Exception]) -> Iterator[None]:
    """What a library says, in whatever exception but the `passed` ones, as one ValueError that begins with `what`."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (ImportError, MemoryError, *passed)):
            raise
        reason = str(error).strip().splitlines()
        raise ValueError(f"{what} ({reason[0] if reason else type(error).__name__})") from error


def reading(path: Path, expected: str) -> AbstractContextManager[None]:
    """For a file that is there and may be broken; one that is not ours to read says so itself."""
    return explained(f"{path}: not readable as {expected}", PermissionError)


def choose(path: Path, names: Iterable[str], variable: str) -> str:
    names = list(names)
    if variable not in names:
        raise ValueError(
            f"{path}: got the variable {variable!r}, expected one of {', '.join(map(str, names)) or 'none'}"
        )
    return variable


def require_numbers(path: Path, name: str, shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Real numbers, one or more, on one dimension or more."""
    if dtype.kind not in "iuf" or dtype.itemsize > 8:
        raise ValueError(f"{path}: {name} holds {dtype}, expected integers or floating numbers of at most 64 bits")
    if not shape or 0 in shape:
        raise ValueError(f"{path}: {name} has the shape {shape}, expected one dimension or more, none of them 0")


def single_array(opened: Opened, data: Any, path: Path) -> Any:
    """`data`, or its only variable; refuses several where one array is all that the format of `path` holds."""
    if not hasattr(data, "data_vars"):
        return data
    names = list(data.data_vars)
    if len(names) > 1:
        raise ValueError(
            f"output: {opened.path} has the variables {', '.join(map(str, names))}, but a {path.suffix} file holds "
            "one; pick it with --variable NAME, or write .nc, .zarr or .npz"
        )
    return data[names[0]]


def write_store_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """`atomic_write` for a directory: written beside `path`, which it replaces once it is complete."""
    path = path.resolve()
    partial, former = path.with_name(path.name + ".tmp"), path.with_name(f".{path.name}.former")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        write(partial)
        if path.exists():  # a directory that is not empty cannot be replaced in one step
            shutil.rmtree(former, ignore_errors=True)
            path.rename(former)
        partial.rename(path)
    finally:
        if former.exists() and not path.exists():
            former.rename(path)
        for leftover in (partial, former):
            shutil.rmtree(leftover, ignore_errors=True)


def _require_store_place(path: Path) -> None:
    marks = ("zarr.json", ".zgroup", ".zattrs", ".zmetadata")
    if path.exists() and not (path.is_dir() and (not any(path.iterdir()) or any((path / m).exists() for m in marks))):
        raise ValueError(f"output: {path} exists and is no zarr store; expected a new name, or a store to replace")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"output: the directory of {path} does not exist; expected one that does")
