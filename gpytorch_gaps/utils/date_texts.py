"""Parses dates written as text, without guessing the order of day and month.

| text | order |
|---|---|
| 2020-04-03, 2020/04/03, 2020.04.03, 2020-04, with a time of day or without | year, month, day |
| 03.04.2020 | day, month, year, as usual for dates with dots |
| 03/04/2020, 03-04-2020 | day or month first: whichever makes all texts dates; if both do, an error |
"""

import re
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import numpy as np

_TIME = r"(?:[T ]+(\d{1,2}):(\d{2})(?::(\d{2})(\.\d+)?)?\s*([AaPp][Mm])?\s*(Z|UTC|[+-]\d{2}(?::?\d{2})?)?)?"
_YEAR_FIRST = re.compile(rf"(\d{{4}})([-/.])(\d{{1,2}})(?:\2(\d{{1,2}}))?{_TIME}")
_YEAR_LAST = re.compile(rf"(\d{{1,2}})([-/.])(\d{{1,2}})\2(\d{{4}}){_TIME}")
_SHORT_YEAR = re.compile(r"\d{1,2}([/.])\d{1,2}\1\d{2}(?:[T ].*)?")

ORDERS = {"day-first": True, "month-first": False}
"""Names for the order of day and month."""


class AmbiguousDatesError(ValueError):
    """The order of day and month is ambiguous."""


def parse_dates(name: str, texts: Sequence[str], day_first: bool | None = None) -> np.ndarray | None:
    """Parse dates, in UTC if they have a time zone.

    :param name: name of the argument, for error messages.
    :param texts: the texts.
    :param day_first: whether 03/04/2020 is in April; None if it is not known.
    :return: datetime64, or None if a text has none of the forms above.
    :raises AmbiguousDatesError: if the order of day and month is ambiguous.

    >>> parse_dates("date", ["30/01/2001", "01/02/2001"]).astype("datetime64[D]").astype(str).tolist()
    ['2001-01-30', '2001-02-01']
    """
    texts = [text.strip() for text in texts]
    found = _fields(_YEAR_FIRST, texts)
    if found is not None:
        return _dates([(year, month, day or "1", *time) for year, _, month, day, *time in found])
    found = _fields(_YEAR_LAST, texts)
    if found is None:
        if texts and all(map(_SHORT_YEAR.fullmatch, texts)):
            raise AmbiguousDatesError(
                f"{name}: got dates such as {texts[0]!r}, whose year has two digits; expected dates as 2020-04-03"
            )
        return None
    orders = {True: (2, 0), False: (0, 2)}  # fields of month and day
    if found[0][1] == "." and day_first is None:
        day_first = True
    ways = {
        first: _dates([(one[3], one[month], one[day], *one[4:]) for one in found])
        for first, (month, day) in orders.items()
        if day_first is None or first is day_first
    }
    possible = [dates for dates in ways.values() if dates is not None]
    if len(possible) == 2 and (possible[0] != possible[1]).any():
        at = int((possible[0] != possible[1]).argmax())
        day, month = (dates[at].astype("datetime64[D]") for dates in possible)
        raise AmbiguousDatesError(
            f"{name}: got {texts[at]!r}, which may be {day} or {month}; expected dates as {day}, or the order of day "
            "and month: pandas.to_datetime(..., dayfirst=True), and --dates day-first on the command line"
        )
    return possible[0] if possible else None


def _fields(pattern: re.Pattern, texts: Sequence[str]) -> list[tuple] | None:
    """The groups of every text; None if a text does not match."""
    found = [pattern.fullmatch(text) for text in texts]
    return [one.groups() for one in found if one is not None] if texts and all(found) else None


def _dates(fields: Sequence[Sequence[Any]]) -> np.ndarray | None:
    """Dates from texts of year, month, day, hour, minute, second, fraction, am or pm, and zone; None if one is not
    in the calendar."""
    try:
        return np.array([_date(*one) for one in fields], dtype="datetime64[us]")
    except (ValueError, OverflowError):
        return None


def _date(
    year: str, month: str, day: str, hour: str | None, minute: str | None, second: str | None, fraction: str | None,
    half: str | None, zone: str | None,
) -> datetime:  # fmt: skip
    clock = int(hour or 0)
    if half is not None:
        clock = clock % 12 + 12 * (half.lower() == "pm")
    moment = datetime(int(year), int(month), int(day), clock, int(minute or 0), int(second or 0))
    if fraction is not None:
        moment += timedelta(seconds=float(fraction))
    if zone is not None and zone[0] in "+-":
        ahead = timedelta(hours=int(zone[1:3]), minutes=int(zone[3:].lstrip(":") or 0))
        moment -= ahead if zone[0] == "+" else -ahead
    return moment
