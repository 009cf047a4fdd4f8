"""Scores of withheld observations: overall, by fold, and by distance to the nearest observation."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gpytorch_gaps.filling.transforms.predictive import Normal, Transformed
from gpytorch_gaps.posterior.scoring import Score
from gpytorch_gaps.utils.html import table

FAR = 1e6
"""The distance between labels, in cells: so large that labels are not neighbours."""

_HEADER = ("", "observations", "RMSE", "MAE", "CRPS", "coverage")


@dataclass(frozen=True)
class DistanceScore:
    """Scores of observations whose distance to the nearest given one is above `above` and at most `up_to` cells."""

    above: float
    up_to: float
    score: Score

    def __str__(self) -> str:
        if self.up_to >= FAR:
            return "no other of its label"
        return "1 cell" if self.up_to == 1 else f"above {self.above:g}, up to {self.up_to:g} cells"


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Scores of withheld observations: overall, by fold, and by distance to the nearest given observation.

    ``print(evaluation)`` shows a table, ``evaluation.as_dict()`` is a dictionary that can be written as JSON. See
    :meth:`gpytorch_gaps.Filled.evaluate`.

    >>> import numpy as np
    >>> one = np.ones(4)
    >>> evaluation = Evaluation(0.1 * one, 0.1 * one, np.array([1.0, 1.0, 3.0, 3.0]), np.array([0, 0, 1, 1]))
    >>> print(evaluation)
                            observations  RMSE  MAE    CRPS  coverage
    all                                4   0.1  0.1  0.0602     100 %
    fold 1                             2   0.1  0.1  0.0602     100 %
    fold 2                             2   0.1  0.1  0.0602     100 %
    1 cell                             2   0.1  0.1  0.0602     100 %
    above 2, up to 4 cells             2   0.1  0.1  0.0602     100 %
    """

    errors: np.ndarray = field(repr=False)
    """Measured minus predicted value of each withheld observation."""
    deviations: np.ndarray = field(repr=False)
    """Standard deviations of these errors, like those of ``result.std`` in gaps."""
    distances: np.ndarray = field(repr=False)
    """Distances of each to the nearest observation that was given, in cells; labels are not neighbours."""
    fold: np.ndarray = field(repr=False)
    """The number of the fold of each, from 0."""
    notes: tuple[str, ...] = ()
    """Notes on the scores, in sentences."""
    predicted: Normal | Transformed | None = field(default=None, repr=False)
    """The distributions that are scored, if they are not normal ones: then `errors` are those of medians."""

    @property
    def score(self) -> Score:
        """Scores of all withheld observations."""
        return self._score(np.ones(len(self.errors), dtype=bool))

    @property
    def folds(self) -> tuple[Score, ...]:
        """Scores of each fold."""
        return tuple(self._score(self.fold == number) for number in np.unique(self.fold))

    @property
    def by_distance(self) -> tuple[DistanceScore, ...]:
        """Scores by distance, in intervals that end at 1, 2, 4, 8, .. cells."""
        found = []
        ends = np.ceil(np.log2(np.maximum(self.distances, 1.0)))
        for end in np.unique(ends).tolist():
            above, up_to = (0.0 if end == 0 else 2.0 ** (end - 1)), 2.0**end
            found.append(DistanceScore(above, up_to, self._score(ends == end)))
        return tuple(found)

    def coverage(self, levels: Sequence[float]) -> list[float]:
        """Fractions of the withheld observations inside central intervals.

        :param levels: probabilities of the intervals, between 0 and 1.
        :return: the share for each; of calibrated error bars it is about the level.
        """
        found, truth = self._predicted
        return [found.coverage(truth, level) for level in levels]

    def as_dict(self) -> dict[str, Any]:
        """All scores, as a dictionary that can be written as JSON."""
        return {
            "score": self.score.as_dict(),
            "folds": [one.as_dict() for one in self.folds],
            "by_distance": [
                {"above": one.above, "up_to": min(one.up_to, FAR), **one.score.as_dict()} for one in self.by_distance
            ],
            "notes": list(self.notes),
        }

    def __repr__(self) -> str:
        return f"<Evaluation of {len(self.errors):,} observations: {self.score}>"

    def __str__(self) -> str:
        rows = [_HEADER, *self._rows()]
        first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
        lines = [f"{name:<{first}}" + "".join(map("  {:>{}}".format, cells, others)) for name, *cells in rows]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _repr_html_(self) -> str:
        return table(self._rows(), _HEADER) + table([("note", note) for note in self.notes])

    def _rows(self) -> list[tuple[str, ...]]:
        named = [("all", self.score), *((f"fold {number + 1}", one) for number, one in enumerate(self.folds))]
        named += [(str(one), one.score) for one in self.by_distance]
        return [(name, f"{one.count:,}", *_in_short(one)) for name, one in named]

    def _score(self, rows: np.ndarray) -> Score:
        found, truth = self._predicted
        return found.at(rows).score(truth[rows])

    @property
    def _predicted(self) -> tuple[Normal | Transformed, np.ndarray]:
        """The distributions that are scored, and the observations."""
        if self.predicted is None:
            return Normal(np.zeros(len(self.errors)), self.deviations), self.errors
        return self.predicted, self.predicted.median + self.errors


def _in_short(score: Score) -> tuple[str, ...]:
    return f"{score.rmse:.3g}", f"{score.mae:.3g}", f"{score.crps:.3g}", f"{100 * score.coverage:.0f} %"
