"""The tables of :mod:`benchmarks.neighbours`, in Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks._neighbour_problems import labelled
from benchmarks._results import markdown_table

CAP = 2000
RANK, NEIGHBOURS = 300, 20
NAMES = {
    "fill": '`"fill"`',
    "eigen": f"rank {RANK}",
    "neighbours": f"{NEIGHBOURS} neighbours",
    "before": '`"auto"`, no neighbours',
    "auto": '`"auto"`',
}
COLUMNS = tuple(NAMES)


@dataclass(frozen=True)
class Row:
    """One cold solve."""

    shape: tuple[int, int]
    length: float
    kernel: str
    noise: float
    gaps: str
    observations: int
    column: str
    method: str
    rank: int
    num_neighbours: int
    converged: bool
    iterations: int
    residual: float
    seconds: float  # of the CPU, with all set-up
    reason: str

    @property
    def iterations_text(self) -> str:
        return str(self.iterations) if self.converged else f"> {CAP}" if self.iterations >= CAP else "not converged"

    @property
    def method_text(self) -> str:
        """The method and its preconditioner."""
        if self.num_neighbours:
            return f"{self.num_neighbours} neighbours"
        return f"rank {self.rank}" if self.rank else self.method


def tables(rows: Sequence[Row]) -> list[str]:
    """One table in Markdown for every grid and length-scale: iterations and seconds by kernel, noise and gaps."""
    texts = []
    for shape, length in dict.fromkeys((row.shape, row.length) for row in rows):
        own = [row for row in rows if (row.shape, row.length) == (shape, length)]
        texts.append(f"{labelled(shape)} cells, length-scale {length:g}: iterations (CPU seconds, with set-up)")
        texts.append(_table(own))
        texts.append(f"The same, iterations alone: {' / '.join(dict.fromkeys(row.gaps for row in own))}")
        texts.append(_compact(own))
        texts.append(worst_of(own))
    return texts


def _table(rows: Sequence[Row]) -> str:
    columns = [column for column in COLUMNS if any(row.column == column for row in rows)]
    found = {(row.kernel, row.noise, row.gaps, row.column): row for row in rows}
    lines, before = [], ""
    for kernel, noise, where in dict.fromkeys((row.kernel, row.noise, row.gaps) for row in rows):
        title = f"{kernel}, {noise:.0e}".replace("e-0", "e-")
        cells = [_cell(found.get((kernel, noise, where, column))) for column in columns]
        lines.append(["" if title == before else title, where, *cells])
        before = title
    return markdown_table(["kernel, noise", "gaps", *(NAMES[column] for column in columns)], lines)


def _cell(row: Row | None) -> str:
    return "" if row is None else f"{_short(row)} ({row.seconds:.2g} s)"


def _short(row: Row) -> str:
    how = f"{row.method_text}: " if row.column in ("auto", "before") else ""
    return f"{how}{row.iterations_text}"


def _compact(rows: Sequence[Row]) -> str:
    """One line per kernel and noise, with all gaps."""
    columns = [column for column in COLUMNS if any(row.column == column for row in rows)]
    lines = []
    for kernel, noise in dict.fromkeys((row.kernel, row.noise) for row in rows):
        own = [row for row in rows if (row.kernel, row.noise) == (kernel, noise)]
        cells = [_side_by_side([row for row in own if row.column == column]) for column in columns]
        lines.append([f"{kernel}, {noise:.0e}".replace("e-0", "e-"), *cells])
    return markdown_table(["kernel, noise", *(NAMES[column] for column in columns)], lines)


def _side_by_side(rows: Sequence[Row]) -> str:
    """Iterations for all gaps; a method is named once for those that follow each other."""
    texts, before = [], ""
    for row in rows:
        same = row.column in ("auto", "before") and row.method_text == before
        texts.append(row.iterations_text if same else _short(row))
        before = row.method_text
    return " / ".join(texts)


def worst_of(rows: Sequence[Row]) -> str:
    """The most iterations that ``"auto"`` took, and how its time compares with the best of the other columns."""
    auto = [row for row in rows if row.column == "auto"]
    if not auto:
        return ""
    slow = [row for row in auto if row.iterations > 60 or not row.converged]
    most = max(auto, key=lambda row: row.iterations)
    ratios = []
    for own in auto:
        key = (own.kernel, own.noise, own.gaps)
        others = [
            r.seconds
            for r in rows
            if (r.kernel, r.noise, r.gaps) == key and r.column not in ("auto", "before") and r.converged
        ]
        ratios += [own.seconds / min(others)] if others else []
    slowest = f"; up to {max(ratios):.2g} times the seconds of the best other column" if ratios else ""
    return (
        f"`auto`: {len(auto) - len(slow)} of {len(auto)} rows in at most 60 iterations, the most "
        f"{most.iterations_text} ({most.kernel}, {most.noise:g}, {most.gaps}: {most.method_text}; {most.reason})"
        f"{slowest}."
    )
