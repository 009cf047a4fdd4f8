"""Tables: a .csv file with a header line, wide or long.

A wide table has one row for each entry of its index, and one column for each series. The first column is the index if
it contains dates or other text, or if its header is empty or one of `INDEX_NAMES`. An index must not have gaps or
repetitions. Any other table is indexed 0, 1, ... Columns of text are kept.

A long table has one row for each value, and columns that identify the value, such as a date and a station.

When a table is written again, only the text of cells that were gaps changes. (pandas would rewrite every cell.)
"""

import csv
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpytorch_gaps.formats.opened import OpenedFile, choose, reading, single_array
from gpytorch_gaps.formats.table_columns import (
    Layout,
    column_labels,
    first_is_index,
    index_level,
    numbers_of_column,
    refuse_repeats,
)
from gpytorch_gaps.utils.dtypes import to_dtype
from gpytorch_gaps.utils.files import atomic_write

if TYPE_CHECKING:
    import pandas


class CsvFile(OpenedFile):
    suffixes = (".csv",)
    packages = ("pandas",)
    has_variables = True
    dimensions = range(1, 3)
    limits = "table has two dimensions at most"

    text: str
    delimiter: str
    encoding: str
    header: list[str]
    texts: Sequence[Sequence[str]]  # by column
    columns: list[int]  # the positions in a row of the columns of `data`
    reserved: Sequence[float]

    @classmethod
    def read(
        cls,
        path: Path,
        variable: str | None,
        gap_value: float | None,
        layout: Layout = Layout(),  # noqa: B008  frozen
    ) -> OpenedFile:
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
        keys = _keys(path, header, texts, layout)
        found = _series(path, header, texts, keys, variable)
        names = column_labels([header[i] for i in found])
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"{path}: the header has {twice!r} twice, expected each column once")
        if layout.columns and len(found) > 1:
            listed = ", ".join(map(str, names))
            raise ValueError(f"{path}: got columns without --value, expected the column of values: one of {listed}")
        values = np.stack(list(found.values()), axis=1)
        if gap_value is not None:
            values[values == gap_value] = np.nan
        table = pandas.DataFrame(values, _index(path, header, texts, keys, layout), pandas.Index(names))
        opened = cls(path, table.iloc[:, 0] if layout.columns else table)
        opened.header, opened.texts = [name.strip() for name in header], texts
        opened.text, opened.delimiter, opened.columns = text, delimiter, list(found)
        opened.encoding = "utf-8-sig" if raw.startswith(b"\xef\xbb\xbf") else "utf-8"
        opened.reserved = () if gap_value is None else (gap_value,)
        return opened

    def names(self) -> list[str]:
        return self.header

    def take_out(self, name: str) -> "pandas.Series":
        import pandas

        position = self.header.index(choose(self.path, self.header, name, "column"))
        numbers = numbers_of_column(self.path, name, self.texts[position])
        if numbers is None:
            raise ValueError(f"{self.path}: column {name!r} is text, expected numbers")
        if position in self.columns:
            if len(self.columns) == 1:
                self._refuse_to_take(name)
            place = self.columns.index(position)
            self.columns = [one for one in self.columns if one != position]
            self.data = self.data.drop(columns=self.data.columns[place])
        return pandas.Series(numbers, index=self.data.index)

    def _write_again(self, filled: Any, path: Path, lossless: bool) -> None:
        shape = (len(filled), -1)  # a Series has one column
        before, after = self.data.to_numpy().reshape(shape), filled.to_numpy(dtype=np.float64).reshape(shape)
        if lossless:
            changed = before != after
        else:
            changed = np.isnan(before) & ~np.isnan(after)
            after = to_dtype(after, after.dtype, self.reserved)
        numbers = zip(*np.nonzero(changed), after[changed].tolist(), strict=True)
        cells = {(i + 1, self.columns[j]): repr(number) for i, j, number in numbers}
        content = _replaced(self.text, self.delimiter, cells).encode(self.encoding)
        atomic_write(path, lambda stream: stream.write(content))

    def _labelled(self, filled: Any) -> tuple[str, np.ndarray, list[tuple[str, np.ndarray] | None]]:
        if filled.index.nlevels > 1:
            return _unstacked(filled)
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


def _keys(path: Path, header: Sequence[str], texts: Sequence[Sequence[str]], layout: Layout) -> list[int]:
    """The positions of the columns that index the rows; empty if rows are counted."""
    if not layout.index:
        return [0] if first_is_index(header[0], texts[0]) else []
    plain = [name.strip() for name in header]
    named = [choose(path, plain, name.strip(), "column") for name in (*layout.index, *layout.columns)]
    return [plain.index(name) for name in named]


def _index(
    path: Path, header: Sequence[str], texts: Sequence[Sequence[str]], keys: Sequence[int], layout: Layout
) -> "pandas.Index | None":
    import pandas

    levels = [index_level(path, header[key], texts[key], layout) for key in keys]
    if not levels:
        return None
    index = levels[0] if len(levels) == 1 else pandas.MultiIndex.from_arrays(levels)
    refuse_repeats(path, [header[key] for key in keys], index, [texts[key] for key in keys])
    return index


def _series(
    path: Path, header: Sequence[str], texts: Sequence[Sequence[str]], keys: Sequence[int], variable: str | None
) -> dict[int, np.ndarray]:
    """The numbers of each column by its position: of all columns of numbers except the index, or of one of them."""
    parsed = {i: numbers_of_column(path, header[i], texts[i]) for i in range(len(header)) if i not in keys}
    found = {i: numbers for i, numbers in parsed.items() if numbers is not None}
    if variable is not None:
        choose(path, [header[i] for i in found], variable)
        position = next(i for i in found if header[i] == variable)
        return {position: found[position]}
    if not found:
        raise ValueError(f"{path}: holds no column of numbers, only {', '.join(header)}")
    return found


def _unstacked(filled: Any) -> tuple[str, np.ndarray, list[tuple[str, np.ndarray] | None]]:
    """A long table as an array with one dimension per level of its index, and NaN for missing rows."""
    table = filled.to_frame() if filled.ndim == 1 else filled
    levels, names = [level.to_numpy() for level in table.index.levels], [str(name) for name in table.index.names]
    array = np.full((*map(len, levels), table.shape[1]), np.nan)
    array[tuple(table.index.codes)] = table.to_numpy()
    coordinates: list[tuple[str, np.ndarray] | None] = list(zip(names, levels, strict=True))
    if filled.ndim == 1:
        return str(filled.name), array[..., 0], coordinates
    return "values", array, [*coordinates, ("column", filled.columns.to_numpy())]


def _replaced(text: str, delimiter: str, cells: dict[tuple[int, int], str]) -> str:
    """`text` with the given cells replaced, by row and column. Quotes, line ends and other characters do not change."""
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
