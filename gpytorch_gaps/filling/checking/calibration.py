"""Held-out check: predicts withheld observations from the others, to estimate the error in the gaps.

Let C be the covariance of the errors e of withheld observations according to the model, including noise. If the model
is right,

    r = e'e / tr C

is approximately a chi-square variable with ``v = (tr C)^2 / |C|_F^2`` degrees of freedom, divided by v (Satterthwaite
1946). v is small if errors are correlated, as in one hole. The variances of the model should be multiplied by about

    c^2 = (v r + v0) / (v + v0)

where v0 is the weight of the model's own variances. If r cannot be explained by chance, the factor is r. The expected
mean square error in the gaps is c^2 times the mean of the model's variances there. If there are many withheld cells,
and they are similar to the gaps, this is the measured error; otherwise it is close to the model's own estimate.

Let p be the fraction of withheld observations inside 95 % intervals. If p is below 95 % by more than chance, as with
heavy tails, or above 99 %, all standard deviations are multiplied by the factor with which intervals would cover 95 %.
If p is between 95 and 99 %, nothing changes, because withheld observations may be easier to predict than the gaps.
Field and noise are scaled together: with c^2 times the kernel and c^2 times the noise, the posterior mean is the same,
and every standard deviation is multiplied by c.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from scipy.special import bdtr, bdtrc, chdtr, chdtrc
from torch import Tensor

from gpytorch_gaps.filling.arrays.grid_values import Part, coordinates
from gpytorch_gaps.filling.arrays.options import Options
from gpytorch_gaps.filling.arrays.orientation import Orientation
from gpytorch_gaps.filling.checking.holdout import Withheld
from gpytorch_gaps.filling.learning.model import FillModel
from gpytorch_gaps.filling.learning.predict import NORMAL_975, Prediction
from gpytorch_gaps.posterior.scoring import Score, score_errors
from gpytorch_gaps.reports import CalibrationWarning

_COVERAGE_RANGE = (0.85, 0.99)  # coverage of 95 % intervals without a warning
_MIN_CHANCE = 0.01  # a coverage outside the range is not due to chance if its probability is smaller
_MODEL_WEIGHT = 15.0  # v0
_REFUTED = 1e-3  # if errors of this size have a smaller probability, only the measured ratio r counts
_MAX_VARIANCE_SAMPLES = 16
_FEW_DRAWS, _MANY_DRAWS = 8, 64  # number of draws of errors for their degrees of freedom; many with a dense factor
_MAX_EXACT_ERRORS = 1000  # largest number of errors whose covariance is computed if there is a dense factor
_MAX_GAPS = 500  # number of gaps whose variance is computed if there are no standard deviations
_LIKE_THE_GAPS = 0.8  # withheld cells are similar to the gaps if the ratio of their expected errors is at least this


@dataclass(frozen=True, eq=False)
class Predicted:
    """Predictions of measurements: `mean` and `variance` (Q,), and `draws` (n, Q) or `covariance` (Q, Q) of errors."""

    mean: Tensor
    variance: Tensor
    draws: Tensor | None = None
    covariance: Tensor | None = None

    def freedom(self, unit: Tensor | float = 1.0) -> float:
        """Degrees of freedom of the errors, divided by `unit`: ``(tr C)^2 / |C|_F^2``."""
        if self.covariance is None:
            assert self.draws is not None
            return _freedom_of_draws(self.draws / unit)
        unit = torch.as_tensor(unit, dtype=self.covariance.dtype)
        scaled = self.covariance / unit.unsqueeze(-1) / unit
        return max(1.0, float((scaled.trace() / torch.linalg.matrix_norm(scaled)) ** 2))

    def at(self, rows: Any, unit: float = 1.0) -> "Predicted":
        """A subset of the predictions, times `unit`."""
        return Predicted(
            unit * self.mean[rows],
            unit**2 * self.variance[rows],
            None if self.draws is None else unit * self.draws[:, rows],
            None if self.covariance is None else unit**2 * self.covariance[rows][:, rows],
        )


@dataclass(frozen=True, eq=False)
class Check:
    """Scores of withheld observations, and the conclusions for the gaps."""

    score: Score
    variance: float
    """Mean square error of the withheld observations according to the model."""
    gap_variance: float | None
    """Mean square error that the model expects in the gaps, if it was computed."""
    ratio: float
    """Mean square error over `variance`."""
    freedom: float
    """Degrees of freedom of `ratio`."""
    independent: float
    """Effective number of independent observations for the coverage."""
    stretch: float
    """Factor on standard deviations with which 95 % intervals would cover 95 %."""
    predicted: Predicted | None = field(default=None, repr=False)
    truth: np.ndarray | None = field(default=None, repr=False)
    """The withheld observations."""

    def among(self, rows: np.ndarray, unit: float = 1.0) -> "Check":
        """The check of some of the withheld observations, times `unit`; nothing is known of the gaps."""
        assert self.predicted is not None
        assert self.truth is not None
        return judge(self.predicted.at(torch.from_numpy(rows), unit), unit * self.truth[rows])

    @property
    def factor(self) -> float:
        """Factor by which the variances of the model should be multiplied."""
        squares = self.freedom * self.ratio
        if min(chdtr(self.freedom, squares), chdtrc(self.freedom, squares)) < _REFUTED:
            return self.ratio
        return (squares + _MODEL_WEIGHT) / (self.freedom + _MODEL_WEIGHT)

    @property
    def calibration(self) -> float:
        """Factor by which standard deviations are to be multiplied: 1 unless they are too small or far too large."""
        kept = self._may_be_chance or self.score.level <= self.score.coverage <= _COVERAGE_RANGE[1]
        return 1.0 if kept or not self.stretch > 0 else self.stretch

    @property
    def is_calibrated(self) -> bool:
        """Whether the coverage is between 85 and 99 %, or outside by no more than chance."""
        return _COVERAGE_RANGE[0] <= self.score.coverage <= _COVERAGE_RANGE[1] or self._may_be_chance

    @property
    def _may_be_chance(self) -> bool:
        """Whether correct intervals may well cover so few, or so many, of the withheld observations."""
        count = max(1, round(min(self.independent, self.score.count)))
        inside = round(self.score.coverage * count)
        few = self.score.coverage < self.score.level
        tail = bdtr(inside, count, self.score.level) if few else bdtrc(inside - 1, count, self.score.level)
        return bool(tail >= _MIN_CHANCE)


def check_withheld(
    model: FillModel,
    part: Part,
    withheld: Withheld,
    options: Options,
    noise: Callable[[Tensor], Tensor],
    some_gaps: np.ndarray | None = None,
    mean: np.ndarray | None = None,
) -> Check:
    """Predicts the withheld observations of a part of a grid.

    :param model: a model of the part without the hidden observations.
    :param noise: gives the variances of the noise of measurements at points, beside known errors.
    :param some_gaps: flags of gaps whose variance is computed as well.
    :param mean: predictions of the withheld observations, if they come from elsewhere.
    """
    cells = [np.argwhere(flags) for flags in (withheld.scored, some_gaps) if flags is not None]
    where = np.concatenate(cells)
    known = 0.0 if part.noise is None else torch.from_numpy(part.noise[tuple(where.T)])
    x = coordinates(part.axes, where)
    predicted = predict_measurements(model, x, options, noise(x) + known)
    count = len(cells[0])
    in_gaps = float(predicted.variance[count:].mean()) if len(predicted.mean) > count else None
    predicted = predicted.at(slice(count))
    if mean is not None:
        predicted = replace(predicted, mean=torch.from_numpy(mean))
    return judge(predicted, part.values[withheld.scored], in_gaps)


def sample_gaps(gaps: np.ndarray, generator: np.random.Generator, orientation: Orientation) -> np.ndarray:
    """Flags of all `gaps`, or of a few hundred of them, chosen in the canonical order."""
    turned = orientation.turn(gaps)
    cells = np.flatnonzero(turned)
    flags = np.zeros(gaps.size, dtype=bool)
    flags[cells if len(cells) <= _MAX_GAPS else generator.choice(cells, _MAX_GAPS, replace=False)] = True
    return orientation.turn_back(flags.reshape(turned.shape))


def predict_measurements(
    model: FillModel, x: Tensor, options: Options, noise: Tensor | float | None = None
) -> Predicted:
    """Predictions of measurements, by the method that fills gaps.

    :param noise: variance of the noise at the points. Default: that of the model.
    """
    device = model.train_targets.device
    prediction = Prediction(model, x.to(device), options, quick=True)
    noise = model.likelihood.noise.detach() if noise is None else torch.as_tensor(noise, device=device)
    variance = prediction.variance(_MAX_VARIANCE_SAMPLES) + noise
    if prediction.is_factorized and len(x) <= _MAX_EXACT_ERRORS:
        covariance = prediction.covariance() + torch.diag(noise.expand(len(x)))
        return Predicted(prediction.mean.cpu(), variance.cpu(), covariance=covariance.cpu())
    draws = prediction.draws(_MANY_DRAWS if prediction.is_factorized else _FEW_DRAWS)
    draws = draws + noise.sqrt() * torch.randn_like(draws)
    return Predicted(prediction.mean.cpu(), variance.cpu(), draws.cpu())


def judge(predicted: Predicted, truth: np.ndarray, gap_variance: float | None = None) -> Check:
    """Compares predictions of withheld observations with their values `truth` (Q,)."""
    error = torch.from_numpy(truth) - predicted.mean
    deviation = predicted.variance.sqrt()
    expected = float(predicted.variance.mean())
    return Check(
        score=score_errors(error, deviation),
        variance=expected,
        gap_variance=gap_variance,
        ratio=float(error.square().mean()) / expected,
        freedom=predicted.freedom(),
        independent=predicted.freedom(deviation),
        stretch=float((error / deviation).abs().quantile(0.95)) / NORMAL_975,
        predicted=predicted,
        truth=truth,
    )


def _freedom_of_draws(draws: Tensor) -> float:
    """``(tr C)^2 / |C|_F^2``, from independent draws: ``E d_i'd_i = tr C``, ``E (d_i'd_j)^2 = |C|_F^2``."""
    draws = draws / draws.square().mean().sqrt()  # for any units
    products = draws @ draws.mT
    squares = products.diagonal()
    crossed = (products.square().sum() - squares.square().sum()) / (len(draws) * (len(draws) - 1))
    return max(1.0, float(squares.mean().square() / crossed))


def _warn_if_miscalibrated(check: Check, rescaled: bool) -> None:
    if check.is_calibrated:
        return
    score = check.score
    wrong = "small" if score.coverage < score.level else "large"
    done = "have been" if rescaled else "would have to be"
    warnings.warn(
        f"{score.level:.0%} intervals cover {score.coverage:.0%} of {score.count:,} withheld observations: the model's "
        f"standard deviations are too {wrong}. They {done} multiplied by {check.stretch:.2g}, with which intervals "
        f"cover {score.level:.0%} of these; result.model is unchanged. Try: your own kernels (kernels=), more steps, "
        "or coordinates instead of labels.",
        CalibrationWarning,
        stacklevel=4,
    )


def stated_error(
    check: Check | None, gap_variance: float | None, notes: Sequence[str] = (), rescaled: bool = False
) -> dict[str, Any]:
    """The entries of a report about errors; warns if standard deviations are too small or too large.

    :param gap_variance: the mean square error that the model expects in the gaps.
    :param rescaled: whether there are standard deviations, which were multiplied by ``check.calibration``.
    """
    found: dict[str, Any] = {"held_out": None if check is None else check.score, "notes": tuple(notes)}
    if check is not None:
        _warn_if_miscalibrated(check, rescaled)
        if rescaled and check.calibration != 1.0:
            found["calibrated_by"] = check.calibration
    if gap_variance is not None:
        found["expected_rmse"] = math.sqrt(gap_variance * (1.0 if check is None else check.factor))
    if gap_variance is not None and check is not None:
        found["like_the_gaps"] = check.variance >= _LIKE_THE_GAPS**2 * gap_variance
        if not found["like_the_gaps"]:
            found["notes"] += (
                "no observations as far from data as the gaps could be withheld: the expected RMSE is the model's own, "
                "corrected by its error at the withheld cells",
            )
    return found
