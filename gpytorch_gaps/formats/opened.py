"""The common parts of all formats: the class of an opened file, the table of formats, and checks."""

import copy
import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from gpytorch_gaps.formats.additions import Additions
from gpytorch_gaps.utils.files import require_place

FORMATS: dict[str, type["OpenedFile"]] = {}
"""The class for each suffix. Subclasses of `OpenedFile` are added automatically."""


_NOTHING = Additions()


class OpenedFile(ABC):
    """A file with gaps, opened by :func:`gpytorch_gaps.formats.open_file`. A context manager: it closes the file.

    :ivar data: the values for :func:`gpytorch_gaps.fill_gaps`: an array, masked array, DataFrame, DataArray or Dataset.
    :ivar axes: coordinates for ``fill_gaps`` by name, if the file has them in separate arrays, else None.
    :ivar name: the name of the array, ``"values"`` if it has none.
    """

    suffixes: ClassVar[tuple[str, ...]] = ()
    packages: ClassVar[tuple[str, ...]] = ()  # imported when such a file is read or written
    directory: ClassVar[bool] = False
    has_variables: ClassVar[bool] = False
    holds_one_array: ClassVar[bool] = True
    dimensions: ClassVar[range] = range(1, 65)  # numbers of dimensions of an array that can be written
    limits: ClassVar[str] = ""  # the same in words, for an error message

    additions = _NOTHING  # additions to the file that is written

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        FORMATS.update(dict.fromkeys(cls.suffixes, cls))

    def __init__(self, path: Path, data: Any, name: str = "values") -> None:
        self.path, self.data, self.name = path, data, name
        self.axes: dict[str, Any] | None = None
        self.coordinates: list[tuple[str, np.ndarray] | None] = []  # `axes` with their names in the file

    @classmethod
    @abstractmethod
    def read(cls, path: Path, variable: str | None, gap_value: float | None) -> "OpenedFile": ...

    @abstractmethod
    def _write_again(self, filled: Any, path: Path, lossless: bool) -> None:
        """Writes a copy of the opened file with its gaps filled."""

    @classmethod
    @abstractmethod
    def _write_new(cls, opened: "OpenedFile", filled: Any, path: Path) -> None:
        """Writes the contents of a file of another format in this format."""

    @classmethod
    def _refuse(cls, opened: "OpenedFile", path: Path, lossless: bool) -> None:
        """Raises if this format cannot hold the contents of the opened file, which may be of any format."""
        if not cls.holds_one_array:
            return
        shape = tuple(single_array(opened, opened.data, path).shape)
        if len(shape) not in cls.dimensions and not isinstance(opened, cls):
            raise ValueError(
                f"output: {opened.path} has the shape {shape}, but a {path.suffix} {cls.limits}; "
                "write .npy, .npz, .nc or .zarr"
            )

    def _for_other_formats(self, filled: Any, lossless: bool) -> Any:
        return filled

    def _labelled(self, filled: Any) -> tuple[str, np.ndarray, list[tuple[str, np.ndarray] | None]]:
        """Name, values and coordinates of an array, for formats that store them."""
        return self.name, np.asarray(filled), self.coordinates or [None] * filled.ndim

    def names(self) -> list[str]:
        """The names of the arrays, variables or columns of the file; none if its array has no name."""
        return []

    def take_out(self, name: str) -> Any:
        """Another array of the file, such as a mask or quality flags. It is removed from `data`.

        :param name: one of :meth:`names`.
        :raises ValueError: if there is no such array, or if it is the only one in `data`.
        """
        raise ValueError(f"{self.path}: got {name!r}, but a {self.path.suffix} file holds one array without a name")

    def _refuse_to_take(self, name: str) -> None:
        raise ValueError(f"{self.path}: got {name!r}, which is the array to fill; expected another one")

    def check(self, path: Path, lossless: bool = False, additions: Additions = _NOTHING) -> None:
        """Raises if :meth:`write` with the same arguments could not write. See :func:`check_output`."""
        kind = format_of(path)
        require(path, *kind.packages)
        kind._require_place(path)
        kind._refuse(self, path, lossless)
        if additions.flags or additions.deviations is not None:
            kind._refuse_variables(self, path, lossless)

    @classmethod
    def _refuse_variables(cls, opened: "OpenedFile", path: Path, lossless: bool) -> None:
        """Raises if this format cannot hold flags and deviations beside the contents of the opened file."""
        raise ValueError(
            f"output: a {path.suffix} file cannot hold flags or standard deviations beside the filled values; write "
            ".nc or .zarr, or standard deviations to another file"
        )

    @classmethod
    def _require_place(cls, path: Path) -> None:
        require_place("output", path)

    def write(self, filled: Any, path: Path | str, lossless: bool = False, additions: Additions = _NOTHING) -> None:
        """Writes a result, completely or not at all.

        If the format is that of the opened file, everything except the gaps is unchanged, bit for bit. Otherwise the
        values are converted. Numbers keep the type of the file. If it stores integers, or packs numbers into integers,
        filled values are rounded.

        :param filled: an object of the type and shape of `data`. Its gaps remain gaps in the file.
        :param path: the file to write; its suffix determines the format. It may be the opened file.
        :param lossless: whether to write every entry, observed or not, as a floating-point number without rounding. For
            results that are not the filled file, such as a smoothed field.
        :param additions: a line of history, flags and standard deviations to be written too.
        :raises ValueError: if the format cannot hold the result, or `filled` has another shape.

        >>> import numpy, tempfile
        >>> from pathlib import Path
        >>> from gpytorch_gaps.formats import open_file
        >>> folder = Path(tempfile.mkdtemp())
        >>> numpy.save(folder / "in.npy", numpy.array([[1, 99], [3, 4]], dtype="int16"))
        >>> with open_file(folder / "in.npy", gap_value=99) as opened:
        ...     opened.write(numpy.full((2, 2), 6.7), folder / "out.npy")
        >>> numpy.load(folder / "out.npy").tolist()
        [[1, 7], [3, 4]]
        """
        path = Path(path)
        self.check(path, lossless, additions)
        got, expected = _shapes(filled), _shapes(self.data)
        if got != expected:
            raise ValueError(f"filled: got {got}, expected {expected}, as in {self.path}")
        kind = format_of(path)
        with reraise_as(f"output: {self.path} cannot be written as {path}", OSError):
            source = copy.copy(self)
            source.additions = additions
            if isinstance(source, kind):
                source._write_again(filled, path, lossless)
            else:
                kind._write_new(source, source._for_other_formats(filled, lossless), path)

    def write_deviations(self, deviations: Any, path: Path | str, history: str = "") -> None:
        """Writes standard deviations without rounding. Of a scale and an offset of the file, only the scale applies.

        :param deviations: an object of the type and shape of `data`. A Dataset may have only some of its variables.
        :param path: the file to write; its suffix determines the format.
        :param history: a line for the attribute ``history`` of netCDF and zarr files.
        :raises ValueError: as in :meth:`write`.
        """
        self._of_deviations(deviations).write(deviations, path, lossless=True, additions=Additions(history))

    def _of_deviations(self, deviations: Any) -> "OpenedFile":
        """This file, with standard deviations and their metadata in place of the values."""
        return self

    def close(self) -> None:  # noqa: B027  most formats keep nothing open
        """Closes the file. Data that are read lazily cannot be read any more."""

    def __enter__(self) -> "OpenedFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _shapes(data: Any) -> Any:
    """The shape; for several variables, by name. Labelled dimensions may be in any order."""
    if hasattr(data, "data_vars"):
        return {name: _shapes(data[name]) for name in sorted(data.data_vars, key=str)}
    return dict(sorted(data.sizes.items(), key=str)) if hasattr(data, "sizes") else tuple(data.shape)


def format_of(path: Path) -> type[OpenedFile]:
    """The class of the format for the suffix."""
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"{path}: got the suffix {path.suffix!r}, expected one of {', '.join(sorted(FORMATS))}")
    return FORMATS[path.suffix.lower()]


def require(path: Path, *packages: str) -> None:
    """Imports packages. If one is missing, the error names the extra to install."""
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError as error:
            message = f"{path}: a {path.suffix} file needs {package}: pip install 'gpytorch-gaps[files]'"
            raise ImportError(message) from error


@contextmanager
def reraise_as(what: str, *passed: type[Exception]) -> Iterator[None]:
    """Turns any exception of a library, except the `passed` types, into a ValueError that begins with `what`."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (ImportError, MemoryError, *passed)):
            raise
        reason = str(error).strip().splitlines()
        raise ValueError(f"{what} ({reason[0] if reason else type(error).__name__})") from error


def reading(path: Path, expected: str) -> AbstractContextManager[None]:
    """A context for reading a file that may be damaged."""
    return reraise_as(f"{path}: not readable as {expected}", PermissionError)


def choose(path: Path, names: Iterable[str], variable: str, what: str = "variable") -> str:
    """Returns `variable`, or raises a ValueError if it is not one of the names."""
    names = list(names)
    if variable not in names:
        listed = ", ".join(map(str, names)) or "none"
        raise ValueError(f"{path}: got the {what} {variable!r}, expected one of {listed}")
    return variable


def require_numbers(path: Path, name: str, shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Checks for real numbers, at least one, on at least one dimension."""
    if dtype.kind not in "iuf" or dtype.itemsize > 8:
        raise ValueError(f"{path}: {name} holds {dtype}, expected integers or floating numbers of at most 64 bits")
    if not shape or 0 in shape:
        raise ValueError(f"{path}: {name} has the shape {shape}, expected one dimension or more, none of them 0")


def single_array(opened: OpenedFile, data: Any, path: Path) -> Any:
    """`data`, or its only variable; raises if there are several, for a format that holds one array."""
    if not hasattr(data, "data_vars"):
        return data
    names = list(data.data_vars)
    if len(names) > 1:
        raise ValueError(
            f"output: {opened.path} has the variables {', '.join(map(str, names))}, but a {path.suffix} file holds "
            "one; pick it with --variable NAME, or write .nc, .zarr or .npz"
        )
    return data[names[0]]
