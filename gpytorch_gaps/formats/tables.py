"""Wide tables: a .csv file with a header line, one row for each entry of the index, one column for each series.

The first column is the index if it holds dates or other text, or if its header is empty or one of `INDEX_NAMES`; it
must not have gaps or repetitions then. Any other table is indexed 0, 1, ... Columns of text are carried along. When the
table is written again, only the text of cells that were gaps changes; pandas would rewrite every cell.
"""

import csv
import io
import re
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpytorch_gaps.formats.opened import OpenedFile, choose, reading, single_array
from gpytorch_gaps.utils.dtypes import to_dtype
from gpytorch_gaps.utils.files import atomic_write

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


class CsvFile(OpenedFile):
    suffixes = (".csv",)
    packages = ("pandas",)
    has_variables = True
    dimensions = range(1, 3)
    limits = "table has two dimensions at most"

    text: str
    delimiter: str
    encoding: str
    columns: list[int]  # the positions in a row of the columns of `data`
    reserved: Sequence[float]

    @classmethod
    def read(cls, path: Path, variable: str | None, gap_value: float | None) -> OpenedFile:
        import pandas

        with reading(path, "a table of text in UTF-8"):
            raw = path.read_bytes()
            text = raw.decode("utf-8-sig")
            if "\0" in text:
                raise ValueError("it is binary")
            first_line = re.search(r"[^\r\n]*[^\s][^\r\n]*", text)
            delimiter = max(",;\t", key=first_line.group().count) if first_line else ","
            lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
            header, *rows = [row for row in lines if row] or [[]]
        if not rows:
            raise ValueError(f"{path}: holds no rows below a header, expected a header line and numbers")
        for i, row in enumerate(rows):
            if len(row) != len(header):
                raise ValueError(f"{path}: row {i + 2} has {len(row)} cells, expected {len(header)}, as in the header")
        texts = list(zip(*rows, strict=True))
        index = _index(path, header[0], texts[0])
        parsed = {i: _column(path, header[i], texts[i]) for i in range(0 if index is None else 1, len(header))}
        found = {i: numbers for i, numbers in parsed.items() if numbers is not None}
        if variable is not None:
            choose(path, [header[i] for i in found], variable)
            position = next(i for i in found if header[i] == variable)
            found = {position: found[position]}
        if not found:
            raise ValueError(f"{path}: holds no column of numbers, only {', '.join(header)}")
        names = _labels([header[i] for i in found])
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"{path}: the header has {twice!r} twice, expected each column once")
        values = np.stack(list(found.values()), axis=1)
        if gap_value is not None:
            values[values == gap_value] = np.nan
        opened = cls(path, pandas.DataFrame(values, index=index, columns=pandas.Index(names)))
        opened.text, opened.delimiter, opened.columns = text, delimiter, list(found)
        opened.encoding = "utf-8-sig" if raw.startswith(b"\xef\xbb\xbf") else "utf-8"
        opened.reserved = () if gap_value is None else (gap_value,)
        return opened

    def _write_again(self, filled: "pandas.DataFrame", path: Path, lossless: bool) -> None:
        before, after = self.data.to_numpy(), filled.to_numpy(dtype=np.float64)
        if lossless:
            changed = before != after
        else:
            changed = np.isnan(before) & ~np.isnan(after)
            after = to_dtype(after, after.dtype, self.reserved)
        numbers = zip(*np.nonzero(changed), after[changed].tolist(), strict=True)
        cells = {(i + 1, self.columns[j]): repr(number) for i, j, number in numbers}
        content = _replaced(self.text, self.delimiter, cells).encode(self.encoding)
        atomic_write(path, lambda stream: stream.write(content))

    def _labelled(self, filled: "pandas.DataFrame") -> tuple[str, np.ndarray, list[tuple[str, np.ndarray] | None]]:
        row, column = str(filled.index.name or "row"), str(filled.columns.name or "column")
        column = column if column != row else f"{column}_"
        name = "values" if "values" not in (row, column) else "table_values"
        return name, filled.to_numpy(), [(row, filled.index.to_numpy()), (column, filled.columns.to_numpy())]

    @classmethod
    def _write_new(cls, opened: OpenedFile, filled: Any, path: Path) -> None:
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
        content = table.to_csv(index_label=table.index.name or "index", lineterminator="\n").encode()
        atomic_write(path, lambda stream: stream.write(content))


def _replaced(text: str, delimiter: str, cells: dict[tuple[int, int], str]) -> str:
    """`text` with the given cells, by row and column; every other character, such as quotes and line ends, stays."""
    cell = re.compile(rf'("[^"]*(?:""[^"]*)*"|[^{delimiter}\r\n]*)({delimiter}|\r\n|\r|\n|\Z)')
    parts, row, column = [], 0, 0
    for found in cell.finditer(text):
        before, end = found.groups()
        parts += [cells.get((row, column), before), end]
        if end == delimiter:
            column += 1
        elif column or before:  # the line is not empty
            row, column = row + 1, 0
    return "".join(parts)


def _is_gap(text: str) -> bool:
    return text.strip().lower() in GAPS


def _numbers(texts: Sequence[str]) -> np.ndarray | None:
    """Each text as the nearest float64, gaps as NaN; None if a text is neither."""
    try:
        return np.array([np.nan if _is_gap(text) else float(text) for text in texts])
    except ValueError:
        return None


def _column(path: Path, name: str, texts: Sequence[str]) -> np.ndarray | None:
    """The numbers of a column, None for a column of text; a mixture is an error."""
    numbers = _numbers(texts)
    if numbers is None:
        is_text = [_numbers([text]) is None for text in texts]
        if any(not text and not _is_gap(one) for text, one in zip(is_text, texts, strict=True)):
            row = is_text.index(True)
            raise ValueError(f"{path}: column {name!r} has {texts[row]!r} in row {row + 2}, expected a number or a gap")
    return numbers


def _index(path: Path, name: str, texts: Sequence[str]) -> "pandas.Index | None":
    """The first column as an index, None if it is data."""
    import pandas

    plain = name.strip().lower()
    numbers = _numbers(texts)
    if numbers is not None and plain not in INDEX_NAMES and plain:
        return None
    gap = next((i for i, text in enumerate(texts) if _is_gap(text)), None)
    if gap is not None:
        raise ValueError(f"{path}: the index, column {name!r}, has a gap in row {gap + 2}, expected none")
    index: Any = _dates(texts, plain, numbers is not None)
    if index is None:
        index = pandas.Index(texts if numbers is None else numbers)
        if numbers is not None and all(text.strip().lstrip("+-").isdigit() for text in texts):
            index = pandas.Index([int(text) for text in texts])  # exact, also beyond 2^53
    if index.has_duplicates:
        row = int(np.argmax(index.duplicated()))
        raise ValueError(
            f"{path}: the index, column {name!r}, has {texts[row]!r} again in row {row + 2}; expected a wide table, "
            "one row for each entry of the index and one column for each series"
        )
    return index.rename(name.strip() or None)


def _dates(texts: Sequence[str], name: str, numbers: bool) -> "pandas.DatetimeIndex | None":
    """Dates, in UTC if a zone is given. If day and month are ambiguous, the order in which the dates increase."""
    import pandas

    texts = [text.strip() for text in texts]
    if name in ("date", "day", "time", "datetime") and all(map(COMPACT_DATE.fullmatch, texts)):
        ways: list[dict[str, Any]] = [{"format": "%Y%m%d"}]
    elif not numbers and all(map(DATE.fullmatch, texts)):  # 1.5 is a number, not a date
        ways = [{"format": "ISO8601"}, {"dayfirst": "." in texts[0]}, {"dayfirst": "." not in texts[0]}]
    else:
        return None
    found = []
    for way in ways:
        with suppress(ValueError, OverflowError), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that the order of day and month is a guess
            found.append(pandas.to_datetime(texts, utc=True, **way).tz_convert(None))
    return next((dates for dates in found if dates.is_monotonic_increasing), found[0] if found else None)


def _labels(names: list[str]) -> list[Any]:
    """Numbers if all are numbers, integers as such."""
    numbers = _numbers(names)
    if numbers is None or np.isnan(numbers).any():
        return names
    return [int(number) if number.is_integer() else number for number in numbers.tolist()]
