"""Held-out check: withheld observations are predicted from the others, to estimate the error in the gaps.

The model expects the errors e of withheld observations to have some covariance C, noise included. If it is right,

    r = e'e / tr C

is about a chi-square variable of ``v = (tr C)^2 / |C|_F^2`` degrees of freedom, divided by v (Satterthwaite 1946).
v is small where errors are correlated, as in one hole. The model's variances should be multiplied by about

    c^2 = (v r + v0) / (v + v0)

where v0 is how far the model is trusted beforehand; or by r itself, where r cannot be chance. The mean square error to
expect in the gaps is c^2 times the mean of the model's variances there: what was measured, if withheld cells are like
the gaps and tell a lot; the model's own, if not.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gpytorch.models import ExactGP
from scipy.special import bdtr, bdtrc, chdtr, chdtrc, stdtrit
from torch import Tensor

from gpytorch_gaps.filling.axes import Axis
from gpytorch_gaps.filling.deviations import in_reasonable_time
from gpytorch_gaps.filling.withhold import FEWEST
from gpytorch_gaps.posterior.scoring import Score, score_errors
from gpytorch_gaps.reports import CalibrationWarning, SolveReport, record_solves

SAMPLES = 24
"""Draws behind standard deviations, where they are not exact."""

COVERAGE = (0.85, 0.99)
"""Between these, the share of withheld observations inside 95 % intervals is as it should be."""

_NORMAL = 1.959964  # of a normal variable, 95 % are within so many standard deviations
_CHANCE = 0.01  # probability below which a coverage outside is not taken for chance
_TRUST = 15.0  # v0
_REFUTED = 1e-3  # probability of errors so large, or so small, below which a model is not trusted
_DRAWS, _CHEAP_DRAWS = 8, 64  # of errors, by which degrees of freedom are counted
_GAPS = 500  # that are looked at, where standard deviations are not asked for
_NEARER = 0.8  # of the error expected in the gaps: where withheld cells have less, they are not like them


@dataclass(frozen=True, eq=False)
class Predicted:
    """Predictions of measurements: `mean` and `variance` (Q,), and some draws of their errors (n, Q)."""

    mean: Tensor
    variance: Tensor
    draws: Tensor

    def first(self, count: int) -> "Predicted":
        return Predicted(self.mean[:count], self.variance[:count], self.draws[:, :count])


@dataclass(frozen=True)
class Check:
    """What withheld observations tell."""

    score: Score
    variance: float
    """That was expected of them, on average."""
    gap_variance: float | None
    """That is expected in the gaps, on average, where these were looked at."""
    ratio: float
    """Mean square error over `variance`."""
    freedom: float
    """Degrees of freedom of `ratio`."""
    independent: float
    """Effective number of independent observations for the coverage."""
    stretch: float
    """By what standard deviations would have to be multiplied for 95 % intervals that cover 95 %."""

    @property
    def factor(self) -> float:
        """By which variances are off, at best guess."""
        squares = self.freedom * self.ratio
        if min(chdtr(self.freedom, squares), chdtrc(self.freedom, squares)) < _REFUTED:
            return self.ratio
        return (squares + _TRUST) / (self.freedom + _TRUST)

    @property
    def is_calibrated(self) -> bool:
        """Whether the coverage lies between 85 and 99 %, or beyond by what may be chance."""
        count = max(1, round(min(self.independent, self.score.count)))
        inside = round(self.score.coverage * count)
        if self.score.coverage < COVERAGE[0]:
            return bool(bdtr(inside, count, self.score.level) >= _CHANCE)
        return self.score.coverage <= COVERAGE[1] or bool(bdtrc(inside - 1, count, self.score.level) >= _CHANCE)


def points_of(axes: Sequence[Axis], positions: Sequence[np.ndarray], flags: np.ndarray) -> Tensor:
    """Coordinates of the flagged cells of the part at `positions`. shape: (Q, D)"""
    cells = np.argwhere(flags).T
    columns = [axis.points[p[c]] for axis, p, c in zip(axes, positions, cells, strict=True)]
    return torch.from_numpy(np.concatenate(columns, axis=1))


def some_gaps(values: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Flags of a few hundred gaps."""
    cells = np.flatnonzero(np.isnan(values))
    flags = np.zeros(values.size, dtype=bool)
    flags[cells if len(cells) <= _GAPS else generator.choice(cells, _GAPS, replace=False)] = True
    return flags.reshape(values.shape)


def predict_measurements(model: ExactGP, x: Tensor) -> Predicted:
    """By the model in memory, as gaps are."""
    x = x.to(model.train_targets.device)
    with torch.no_grad(), record_solves() as solves:
        mean = model(x).mean
        solve: SolveReport | None = solves[-1] if solves else None
        noise = model.likelihood.noise
        with in_reasonable_time(solve, len(x), SAMPLES):
            covariance = model(x).lazy_covariance_matrix
            variance = covariance.diagonal(dim1=-1, dim2=-2) + noise  # .variance stops at 1e-10
        cheap = solve is None or solve.method == "cholesky"
        draws = covariance.zero_mean_mvn_samples(_CHEAP_DRAWS if cheap else _DRAWS)
        draws = draws + noise.sqrt() * torch.randn_like(draws)
    return Predicted(mean.cpu(), variance.cpu(), draws.cpu())


def judge(predicted: Predicted, truth: np.ndarray, gap_variance: float | None = None) -> Check:
    """What the withheld observations `truth` (Q,) say of predictions of them."""
    error = torch.from_numpy(truth) - predicted.mean
    deviation = predicted.variance.sqrt()
    expected = float(predicted.variance.mean())
    return Check(
        score=score_errors(error, deviation),
        variance=expected,
        gap_variance=gap_variance,
        ratio=float(error.square().mean()) / expected,
        freedom=_freedom(predicted.draws),
        independent=_freedom(predicted.draws / deviation),
        stretch=float((error / deviation).abs().quantile(0.95)) / _NORMAL,
    )


def _freedom(draws: Tensor) -> float:
    """``(tr C)^2 / |C|_F^2``, from independent draws: ``E d_i'd_i = tr C``, ``E (d_i'd_j)^2 = |C|_F^2``."""
    draws = draws / draws.square().mean().sqrt()  # whatever the units
    products = draws @ draws.mT
    squares = products.diagonal()
    crossed = (products.square().sum() - squares.square().sum()) / (len(draws) * (len(draws) - 1))
    return max(1.0, float(squares.mean().square() / crossed))


def _warn_of(check: Check) -> None:
    """Warns where intervals cover too little, or too much."""
    if check.is_calibrated:
        return
    score = check.score
    narrow = score.coverage < score.level
    warnings.warn(
        f"{score.level:.0%} intervals cover {score.coverage:.0%} of {score.count:,} withheld observations: standard "
        f"deviations are too {'small' if narrow else 'large'}. Multiplied by {check.stretch:.2g}, they would cover "
        f"{score.level:.0%}. Try: kernels of your own (kernels=), more steps, or coordinates in place of labels.",
        CalibrationWarning,
        stacklevel=4,
    )


def worth(check: Check | None, gap_variance: float | None, notes: Sequence[str] = ()) -> dict[str, Any]:
    """Entries of a report, and a warning where error bars cannot be trusted.

    :param gap_variance: the mean square error that the model expects in the gaps.
    """
    found: dict[str, Any] = {"held_out": None if check is None else check.score, "notes": tuple(notes)}
    if check is not None:
        _warn_of(check)
    if gap_variance is not None:
        found["expected_rmse"] = math.sqrt(gap_variance * (1.0 if check is None else check.factor))
    if gap_variance is not None and check is not None:
        found["like_the_gaps"] = check.variance >= _NEARER**2 * gap_variance
        if not found["like_the_gaps"]:
            found["notes"] += (
                "no observations as far from data as the gaps could be withheld: the expected RMSE is the model's own, "
                "corrected by its error at the withheld cells",
            )
    return found


def widening(count: int) -> float:
    """By what standard deviations from so few observations are multiplied, that nothing can be withheld of them.

    Mean and scale of the process, its length-scales and noise are estimates then. A mean and a variance from n
    observations leave ``sqrt(n / (n - 1))`` times Student's t; about half of the degrees of freedom go to the others.
    """
    if count >= FEWEST:
        return 1.0
    return float(stdtrit(max(1.0, count / 2), 0.975) / _NORMAL * math.sqrt(count / (count - 1)))
