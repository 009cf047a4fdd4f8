"""Wide tables: a .csv file with a header line, one row for each entry of the index, one column for each series.

The first column is the index if it is dates or other text, or if its header is empty or one of `INDEX_NAMES`; it has
to be without gaps and repetitions then. Any other table is indexed 0, 1, .. Columns that hold text alone are carried
along. Cells are written as the text they came in, unless their number changed.
"""

import csv
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from gpytorch_gaps.files import write_whole
from gpytorch_gaps.formats.opened import Opened, choose, reading, single_array

if TYPE_CHECKING:
    import pandas

# fmt: off
INDEX_NAMES = frozenset((
    "index", "id", "row", "time", "date", "datetime", "timestamp", "year", "month", "week", "day", "hour", "minute",
    "second", "t", "x", "y", "lat", "latitude", "lon", "longitude", "depth", "height", "level", "altitude", "elevation",
    "distance",
))
# fmt: on
GAPS = frozenset(("", "na", "nan"))
DATE = re.compile(r"\d{1,4}[-/.]\d{1,2}([-/.]\d{1,4})?([T ].*)?")
COMPACT_DATE = re.compile(r"\d{8}")


class Table(Opened):
    suffixes = (".csv",)
    packages = ("pandas",)
    has_variables = True

    header: list[str]
    rows: list[list[str]]
    columns: list[int]  # where in a row the columns of `data` are
    layout: dict[str, Any]

    @classmethod
    def read(cls, path: Path, variable: str | None, gap_value: float | None) -> Opened:
        import pandas

        with reading(path, "a table of text in UTF-8"):
            header, rows, layout = _parse(path)
        if not rows or not header:
            raise ValueError(f"{path}: holds no rows below a header, expected a header line and numbers")
        for i, row in enumerate(rows):
            if len(row) != len(header):
                raise ValueError(f"{path}: row {i + 2} has {len(row)} cells, expected {len(header)}, as in the header")
        texts = list(zip(*rows, strict=True))
        first = _index(path, header[0], texts[0])
        columns = list(range(0 if first is None else 1, len(header)))
        parsed = {i: _column(path, header[i], texts[i]) for i in columns}
        found = {i: numbers for i, numbers in parsed.items() if numbers is not None}
        columns = list(found)
        if variable is not None:
            columns = [next(i for i in columns if header[i] == choose(path, [header[i] for i in columns], variable))]
        if not columns:
            raise ValueError(f"{path}: holds no column of numbers, only {', '.join(header)}")
        names = _labels([header[i] for i in columns])
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"{path}: the header has {twice!r} twice, expected each column once")
        values = np.stack([found[i] for i in columns], axis=1)
        if gap_value is not None:
            values[values == gap_value] = np.nan
        opened = cls(path, pandas.DataFrame(values, index=first, columns=pandas.Index(names)))
        opened.header, opened.rows, opened.columns, opened.layout = header, rows, columns, layout
        return opened

    def _write_again(self, filled: "pandas.DataFrame", path: Path, lossless: bool) -> None:
        before, after = self.data.to_numpy(), filled.to_numpy(dtype=np.float64)
        rows = [list(row) for row in self.rows]
        for i, j in zip(*np.nonzero((before != after) & ~np.isnan(after)), strict=True):
            rows[i][self.columns[j]] = repr(float(after[i, j]))
        _write_rows([self.header, *rows], path, **self.layout)

    @classmethod
    def _write_new(cls, opened: Opened, filled: Any, path: Path) -> None:
        import pandas

        one = single_array(opened, filled, path)
        if hasattr(one, "to_pandas"):
            table = one.reset_coords(drop=True).to_pandas()
        else:
            known = [*opened.coordinates, None, None]
            labels = [found[1] if found else None for found in known[: one.ndim]]
            table = (pandas.DataFrame if one.ndim == 2 else pandas.Series)(one, *labels)
            table = table.rename_axis(known[0][0] if known[0] else None)
        if table.ndim == 1:
            table = table.to_frame(opened.name if table.name is None else table.name)
        stream = io.StringIO()
        table.to_csv(stream, index_label=table.index.name or "index")
        write_whole(path, lambda out: out.write(stream.getvalue().encode()))

    @classmethod
    def _refuse(cls, opened: Opened, path: Path, lossless: bool) -> None:
        shape = tuple(single_array(opened, opened.data, path).shape)
        if len(shape) > 2:
            raise ValueError(
                f"output: {opened.path} has the shape {shape}, but a .csv table has two dimensions at most; "
                "write .npy, .npz, .nc or .zarr"
            )


def _parse(path: Path) -> tuple[list[str], list[list[str]], dict[str, Any]]:
    """Header, rows, and how the text was laid out: what parts cells and lines, and a byte order mark."""
    raw = path.read_bytes()
    text = raw.decode("utf-8-sig")
    if "\0" in text:
        raise ValueError("it is binary")
    line = text.split("\n", 1)[0]
    delimiter = max(",;\t", key=line.count)
    rows = [row for row in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True) if row]
    layout = {
        "delimiter": delimiter,
        "lineterminator": "\r\n" if line.endswith("\r") else "\n",
        "encoding": "utf-8-sig" if raw.startswith(b"\xef\xbb\xbf") else "utf-8",
    }
    return (rows[0] if rows else []), rows[1:], layout


def _write_rows(rows: list[list[str]], path: Path, encoding: str, **layout: Any) -> None:
    def write(stream: IO[bytes]) -> None:
        text = io.TextIOWrapper(stream, encoding=encoding, newline="")
        csv.writer(text, **layout).writerows(rows)
        text.detach()  # flushes, and leaves the stream open

    write_whole(path, write)


def _numbers(texts: Sequence[str]) -> np.ndarray | None:
    """Each text as the float64 next to it, gaps as NaN; None where one is neither."""
    try:
        return np.array(["nan" if text.strip().lower() in GAPS else text for text in texts]).astype(np.float64)
    except ValueError:
        return None


def _column(path: Path, name: str, texts: Sequence[str]) -> np.ndarray | None:
    """The numbers of a column, None for one of text alone; a mixture is a mistake in the file."""
    numbers = _numbers(texts)
    if numbers is None:
        text = [_numbers([text]) is None for text in texts]
        if any(not is_text and one.strip().lower() not in GAPS for is_text, one in zip(text, texts, strict=True)):
            row = text.index(True)
            raise ValueError(f"{path}: column {name!r} has {texts[row]!r} in row {row + 2}, expected a number or a gap")
    return numbers


def _index(path: Path, name: str, texts: Sequence[str]) -> "pandas.Index | None":
    """The index that the first column is, None where it is data."""
    import pandas

    plain = name.strip().lower()
    numbers = _numbers(texts)
    if numbers is not None and plain not in INDEX_NAMES and plain:
        return None
    gap = next((i for i, text in enumerate(texts) if text.strip().lower() in GAPS), None)
    if gap is not None:
        raise ValueError(f"{path}: the index, column {name!r}, has a gap in row {gap + 2}, expected none")
    index: Any = _dates(texts, plain)
    if index is None:
        index = pandas.Index(texts if numbers is None else numbers)
        if numbers is not None and all(text.strip().lstrip("+-").isdigit() for text in texts):
            index = pandas.Index([int(text) for text in texts])
    if index.has_duplicates:
        row = int(np.argmax(index.duplicated()))
        raise ValueError(
            f"{path}: the index, column {name!r}, has {texts[row]!r} again in row {row + 2}; expected a wide table, "
            "one row for each entry of the index and one column for each series"
        )
    return index.rename(name.strip() or None)


def _dates(texts: Sequence[str], name: str) -> "pandas.DatetimeIndex | None":
    """Dates, in UTC where a zone is given; where day and month could be swapped, in the way in which they rise."""
    import pandas

    texts = [text.strip() for text in texts]
    if name in ("date", "day", "time", "datetime") and all(map(COMPACT_DATE.fullmatch, texts)):
        ways: list[dict[str, Any]] = [{"format": "%Y%m%d"}]
    elif all(map(DATE.fullmatch, texts)):
        ways = [{"format": "ISO8601"}, {"dayfirst": "." in texts[0]}, {"dayfirst": "." not in texts[0]}]
    else:
        return None
    found = []
    for way in ways:
        try:
            found.append(pandas.to_datetime(texts, utc=True, **way).tz_convert(None))
        except (ValueError, OverflowError):
            continue
    return next((dates for dates in found if dates.is_monotonic_increasing), found[0] if found else None)


def _labels(names: list[str]) -> list[Any]:
    """Numbers where all are numbers."""
    numbers = _numbers(names)
    if numbers is None or np.isnan(numbers).any():
        return names
    return [int(number) if number.is_integer() else number for number in numbers.tolist()]
