"""A budget of seconds, and the reductions of a filling that meet it.

Every decision is made before the work. It depends on counted work at nominal rates, and on the speed of this machine
relative to these, rounded to a power of two. It does not depend on the clock, so that results repeat.

| in this order | reduction |
|---|---|
| training | fewer steps, then fewer candidate kernels, down to half of the budget |
| error bars | fewer draws |
| the held-out check | left out |
| error bars | left out |
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from gpytorch_gaps.utils.rates import machine_speed

_TRAINING_SHARE = 0.5  # part of the budget for training
_SOLVE_FLOPS_PER_SECOND = 5e9  # rate of solves on one core: thin products and transforms are limited by memory
_DRAW_OVER_MEAN = 0.7  # cost of a draw, relative to that of the mean
_CHECK_DRAWS = 16  # number of draws for variances and for the correlation of errors
FEWEST_DRAWS, MOST_DRAWS = 8, 16  # number of draws for error bars


@dataclass(frozen=True)
class Effort:
    """Numbers of steps: of the comparison of all candidates, of the finalists, and of the final training."""

    first: int
    further: int
    final: int
    candidates: int

    def shortened(self, share: float) -> "Effort":
        """The same candidates, with a fraction of the steps."""
        first, further, final = (max(1, round(share * count)) for count in (self.first, self.further, self.final))
        return Effort(first, further, final, self.candidates)

    def seconds(self, comparison: Sequence[float], training: float, finalists: int) -> float:
        """Nominal seconds.

        :param comparison: seconds of one step in the comparison, for each candidate.
        :param training: seconds of one step of the final training.
        """
        some = comparison[: self.candidates]
        compared = self.first * sum(some) + self.further * sum(some[:finalists]) if len(some) > 1 else 0.0
        return compared + self.final * training


@dataclass
class Budget:
    """Seconds that a filling may take, and what it leaves out.

    :param seconds: the budget. None: no limit.

    >>> budget = Budget(10.0)
    >>> budget.spend(4.0)
    >>> budget.is_limited, budget.notes
    (True, [])
    """

    seconds: float | None = None
    left_out: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.left = math.inf if self.seconds is None else self.seconds * machine_speed()

    @property
    def is_limited(self) -> bool:
        return self.seconds is not None

    @property
    def notes(self) -> list[str]:
        """What was left out, as a note of a report."""
        return [f"to keep to the budget of {self.seconds:g} s, {'; '.join(self.left_out)}"] if self.left_out else []

    def spend(self, seconds: float) -> None:
        """Subtracts nominal seconds from the budget."""
        self.left -= seconds

    def training(self, full: Effort, comparison: Sequence[float], training: float, finalists: int) -> Effort:
        """The training that half of the budget allows, `full` if possible, and at least a few steps of one candidate.

        :param comparison: nominal seconds of one step in the comparison, for each candidate.
        :param training: those of one step of the final training.
        """
        efforts = [full, full.shortened(0.5), full.shortened(0.25)]
        efforts += [replace(efforts[-1], candidates=count) for count in (4, 2, 1) if count < full.candidates]
        costs = [effort.seconds(comparison, training, finalists) for effort in efforts]
        fits = [number for number, cost in enumerate(costs) if cost <= _TRAINING_SHARE * self.left]
        chosen = fits[0] if fits else len(efforts) - 1
        self.spend(costs[chosen])
        effort = efforts[chosen]
        if effort.candidates < full.candidates:
            self.left_out.append(f"{effort.candidates} of {full.candidates} candidate kernels were tried")
        if chosen:
            self.left_out.append(f"training took {effort.final} steps instead of {full.final}")
        return effort

    def predictions(self, solve_flops: float, is_direct: bool, check: bool, std: bool) -> tuple[bool, int]:
        """Whether a check is affordable after the mean, and the most draws for error bars; 0 if there are to be none.

        :param solve_flops: counted work of the mean.
        :param is_direct: whether there is a dense factor, which serves error bars as well.
        :param check: whether a check is wanted.
        :param std: whether error bars are wanted.
        """
        mean = solve_flops / _SOLVE_FLOPS_PER_SECOND
        draw = 0.0 if is_direct else _DRAW_OVER_MEAN * mean
        self.spend(mean)
        checking = mean + _CHECK_DRAWS * draw if check else 0.0
        few, many = (count * draw if std else 0.0 for count in (FEWEST_DRAWS, MOST_DRAWS))
        if checking + many <= self.left:
            return check, MOST_DRAWS if std else 0
        if checking + few <= self.left:
            self.left_out.append(f"error bars come from {FEWEST_DRAWS} draws instead of up to {MOST_DRAWS}")
            return check, FEWEST_DRAWS
        if check:
            self.left_out.append("nothing was withheld for a check")
        if std and few > self.left:
            self.left_out.append("there are no error bars")
        return False, FEWEST_DRAWS if std and few <= self.left else 0


def evaluation_seconds(observations: Sequence[int], factors: int) -> float:
    """Nominal seconds of one step: a likelihood of windows, with its gradient.

    :param observations: of each window.
    :param factors: the number of matrices that their covariance is made of.
    """
    return sum(3e-11 * n**3 + factors * (3e-9 * n**2 + 3e-4) for n in observations)
