"""The interpretation of a dimension of an array, and the coordinates that its kernel receives.

| kind | what it is | coordinates |
|---|---|---|
| number | numbers | unchanged |
| time | dates of any calendar, durations, numbers in CF units such as "hours since 2000-01-01" | days since the first |
| latitude, longitude | by standard name, unit or name | degrees |
| circle | longitudes of a whole circle, months, days of the year, hours | unchanged, within one period |
| group | several columns, such as a station's position | unchanged |
| label | strings, numbers that identify something, bands, or a few levels without coordinates | 0, 1, .., m - 1 |
| position | anything else without coordinates | 0, 1, .., m - 1 |
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gpytorch_gaps.filling.axes.calendars import YEAR
from gpytorch_gaps.filling.axes.encodings import Numbers, as_array

DAY = 1.0
"""Length of a day, in days."""

Axes = Sequence[Any] | Mapping[str, Any] | None
"""Coordinates of each dimension, with or without names; None for those of the values."""


@dataclass(frozen=True, eq=False)
class Axis:
    """One dimension: its `name`, its `kind` from the table above, and `points` (m, d), the inputs of its kernel."""

    name: str
    kind: str
    points: np.ndarray
    unit: str = ""
    year: float = YEAR
    """Mean length of a year in the calendar of an axis of times, in days."""
    encoding: Callable[[str, np.ndarray], np.ndarray] = Numbers()  # noqa: RUF009  a frozen dataclass itself
    """The function from the user's coordinates to points."""
    coordinates: np.ndarray | None = None
    """The coordinates that the user gave; None if there are none."""
    note: str = ""
    """The assumption about the axis, if it is uncertain."""

    @property
    def size(self) -> int:
        return len(self.points)

    @property
    def is_ordered(self) -> bool:
        """Whether positions that follow each other are near each other."""
        return self.kind not in ("label", "group")

    @property
    def period(self) -> float | None:
        """Circumference of a circle, None for other kinds."""
        return getattr(self.encoding, "period", None)

    @property
    def extent(self) -> float:
        """The largest difference of coordinates within one column; of a circle, its diameter."""
        if self.period is not None:
            return self.period / math.pi
        return float(np.ptp(self.points, axis=0).max())

    @property
    def spacing(self) -> float:
        """Median distance between neighbours; the largest one if there are several columns."""
        if self.size == 1:
            return 1.0
        steps = np.diff(np.sort(self.points, axis=0), axis=0)
        steps = np.where(steps > 0, steps, np.nan)
        known = [np.nanmedian(column) for column in steps.T if np.isfinite(column).any()]
        return float(max(known, default=1.0))

    def at(self, positions: np.ndarray) -> "Axis":
        """The same axis with some of its points."""
        known = None if self.coordinates is None else self.coordinates[positions]
        return replace(self, points=self.points[positions], coordinates=known)

    def encode(self, coordinates: Any) -> np.ndarray:
        """Points of further coordinates, in the form of those of the axis. shape: (m, d)

        :raises ValueError: if coordinates are of another kind, or labels that the axis does not have.
        """
        return self.encoding(self.name, as_array(self.name, coordinates, getattr(self.encoding, "zone", None)))

    def __str__(self) -> str:
        where = f" {self.unit}" if self.unit else ""
        span = "" if self.kind in ("label", "group", "position", "circle") else f", {self.extent:.6g}{where}"
        return f"{self.name}: {self.size} {_PLURALS[self.kind]}{span}"


_PLURALS = {
    "number": "numbers",
    "time": "times",
    "latitude": "latitudes",
    "longitude": "longitudes",
    "circle": "points on a circle",
    "group": "points of several columns",
    "label": "labels",
    "position": "positions",
}
