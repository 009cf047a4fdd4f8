"""Tables in HTML, which notebooks show instead of text: small, without scripts, in the colours of the page."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields  # noqa: F401  the example makes a dataclass
from html import escape
from typing import Any

_TABLE = "border-collapse:collapse;margin:0.3em 0"
_CELL = "padding:0.1em 1em 0.1em 0;text-align:left;vertical-align:top"
_HEAD = f"{_CELL};font-weight:normal;opacity:0.65"
_TITLE = "font-weight:bold;margin-top:0.4em"


def table(rows: Iterable[Sequence[object]], header: Sequence[object] = (), title: object = "") -> str:
    """A table with escaped entries. The first entry of each row is its heading.

    Colours are those of the page, so the table can be read on light and dark ones.

    :param rows: entries, which are converted to text.
    :param header: headings of the columns, if any.
    :param title: a line above the table, if any.

    >>> table([("name", "a < b")]).count("a &lt; b")
    1
    """
    head = "".join(f'<th style="{_HEAD}">{_text(entry)}</th>' for entry in header)
    lines = [f"<tr>{head}</tr>"] if header else []
    for first, *others in rows:
        cells = "".join(f'<td style="{_CELL}">{_text(entry)}</td>' for entry in others)
        lines.append(f'<tr><th style="{_HEAD}">{_text(first)}</th>{cells}</tr>')
    above = f'<div style="{_TITLE}">{_text(title)}</div>' if title else ""
    return f'{above}<table style="{_TABLE}">{"".join(lines)}</table>'


def _text(entry: object) -> str:
    return escape(str(entry))


def fields_table(record: Any) -> str:
    """A table of the fields of a dataclass that are not at their defaults, with its name as title.

    >>> @dataclass
    ... class Solve:
    ...     method: str
    ...     rank: int = 0
    >>> html = fields_table(Solve("cholesky"))
    >>> "cholesky" in html, "rank" in html
    (True, False)
    """
    known = [(one.name, getattr(record, one.name), one.default) for one in fields(record) if one.repr]
    shown = [(name, _in_short(value)) for name, value, default in known if value is not None and value is not default]
    return table([(name.replace("_", " "), words) for name, words in shown if words], title=type(record).__name__)


def _in_short(value: Any) -> str:
    if hasattr(value, "numel"):
        return (
            f"{float(value.max()):.1e}, the largest of {value.numel():,}"
            if value.numel() > 1
            else f"{float(value):.3g}"
        )
    if isinstance(value, float):
        return f"{value:.3g}" if math.isfinite(value) else ""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return " x ".join(map(str, value)) if isinstance(value, tuple) else str(value)
