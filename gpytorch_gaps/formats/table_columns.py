"""Converts the text columns of a table to numbers, dates, text, or an index of its rows."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpytorch_gaps.utils.date_texts import ORDERS, parse_dates

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
COMPACT_DATE = re.compile(r"\d{8}")


@dataclass(frozen=True)
class Layout:
    """How to read a table.

    :param index: the columns that index the rows. Default: the first column, if it looks like an index.
    :param columns: for a long table, further columns that identify the series of a value.
    :param dates: the order of day and month in dates such as 03/04/2020: ``"day-first"`` or ``"month-first"``.
    """

    index: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    dates: str | None = None

    def __post_init__(self) -> None:
        if self.dates not in (None, *ORDERS):
            raise ValueError(f"dates: got {self.dates!r}, expected one of {', '.join(ORDERS)}")
        if self.columns and not self.index:
            raise ValueError(f"columns: got {', '.join(self.columns)} without an index, expected one: index='date'")

    @property
    def is_default(self) -> bool:
        return self == Layout()

    @property
    def day_first(self) -> bool | None:
        return None if self.dates is None else ORDERS[self.dates]


def _is_gap(text: str) -> bool:
    return text.strip().lower() in GAPS


def _numbers(texts: Sequence[str]) -> np.ndarray | None:
    """Each text as the nearest float64, gaps as NaN; None if a text is neither."""
    try:
        return np.array([np.nan if _is_gap(text) else float(text) for text in texts])
    except ValueError:
        return None


def numbers_of_column(path: Path, name: str, texts: Sequence[str]) -> np.ndarray | None:
    """The numbers of a column; None for a column of text. A mixture raises a ValueError."""
    numbers = _numbers(texts)
    if numbers is None:
        is_text = [_numbers([text]) is None for text in texts]
        if any(not text and not _is_gap(one) for text, one in zip(is_text, texts, strict=True)):
            row = is_text.index(True)
            raise ValueError(f"{path}: column {name!r} has {texts[row]!r} in row {row + 2}, expected a number or a gap")
    return numbers


def first_is_index(name: str, texts: Sequence[str]) -> bool:
    """Whether the first column of a table indexes its rows."""
    plain = name.strip().lower()
    return _numbers(texts) is None or plain in INDEX_NAMES or not plain


def index_level(path: Path, name: str, texts: Sequence[str], layout: Layout) -> "pandas.Index":
    """A column as an index: dates, integers, other numbers or text."""
    import pandas

    gap = next((i for i, text in enumerate(texts) if _is_gap(text)), None)
    if gap is not None:
        raise ValueError(f"{path}: the index, column {name!r}, has a gap in row {gap + 2}, expected none")
    numbers = _numbers(texts)
    index: Any = _dates(name.strip(), texts, numbers is not None, layout)
    if index is None:
        index = pandas.Index(texts if numbers is None else numbers)
        if numbers is not None and all(text.strip().lstrip("+-").isdigit() for text in texts):
            index = pandas.Index([int(text) for text in texts])  # exact for integers above 2^53 too
    return index.rename(name.strip() or None)


def refuse_repeats(path: Path, names: Sequence[str], index: "pandas.Index", texts: Sequence[Sequence[str]]) -> None:
    """Raises if two rows have the same entry of the index."""
    if not index.has_duplicates:
        return
    row = int(np.argmax(index.duplicated()))
    entry = ", ".join(repr(column[row]) for column in texts)
    if len(names) == 1:
        raise ValueError(
            f"{path}: the index, column {names[0]!r}, has {entry} again in row {row + 2}; expected a wide table, with "
            "one row for each entry of the index and one column for each series. For a long table, name its columns: "
            f"--index {names[0].strip() or 'NAME'} --columns NAME --value NAME"
        )
    raise ValueError(f"{path}: {', '.join(names)} are {entry} again in row {row + 2}; expected each combination once")


def _dates(name: str, texts: Sequence[str], numbers: bool, layout: Layout) -> "pandas.DatetimeIndex | None":
    """Dates, in UTC if a zone is given."""
    import pandas

    if name.lower() in ("date", "day", "time", "datetime") and all(
        COMPACT_DATE.fullmatch(one.strip()) for one in texts
    ):
        texts = [f"{one[:4]}-{one[4:6]}-{one[6:]}" for one in map(str.strip, texts)]
        numbers = False
    found = None if numbers else parse_dates(name, texts, layout.day_first)  # 1.5 is a number, not a date
    return None if found is None else pandas.DatetimeIndex(found)


def column_labels(names: list[str]) -> list[Any]:
    """Numbers if all are numbers, integers as such."""
    numbers = _numbers(names)
    if numbers is None or np.isnan(numbers).any():
        return names
    return [int(number) if number.is_integer() else number for number in numbers.tolist()]
