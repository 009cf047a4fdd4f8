"""Hyperparameters from windows: Adam maximizes the sum of the exact log-likelihoods of the windows.

    log p = Σ_w log N(y_w | m_w, Σ_t s_t ∘_i K_ti[c_i, c_i] + s2 I + D_w)

D_w are the known variances of measurement errors, if there are any. Windows are treated as independent, which only
makes the estimate less precise. Candidate kernels are compared by short runs on a few windows, and the best of them by
longer runs. The best one is trained on all windows.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from linear_operator.utils.errors import NanError, NotPSDError

from gpytorch_gaps.filling.axes.axis import Axis
from gpytorch_gaps.filling.learning.budget import Budget, Effort, evaluation_seconds
from gpytorch_gaps.filling.learning.label_factors import LabelFactors
from gpytorch_gaps.filling.learning.label_kernel import label_likelihood
from gpytorch_gaps.filling.learning.model import ProductTerm, TrendMean, make_likelihood, make_model
from gpytorch_gaps.filling.learning.window_likelihood import WindowLogLikelihood, WindowTensors
from gpytorch_gaps.filling.learning.windows import Window
from gpytorch_gaps.grid.cartesian import CartesianGrid
from gpytorch_gaps.likelihoods import GappyGridLikelihood
from gpytorch_gaps.training.fit import fit
from gpytorch_gaps.training.history import History
from gpytorch_gaps.utils.progress import with_bar
from gpytorch_gaps.utils.threads import threads_for

FIRST_STEPS, FURTHER_STEPS = 10, 20  # steps of all candidates, and additional steps of the finalists
_FINALISTS = 3
_LEARNING_RATE = 0.15
_MIN_GAIN_PER_TERM = 0.01  # nats per observation
_DOUBLE_GAIN_OBSERVATIONS = 4e5  # with so many observations, a further term must gain twice as much: solves are slower

Candidate = tuple[str, Callable[[], list[ProductTerm]]]
"""The name of a kernel, and a function that creates its terms."""


@dataclass(frozen=True, eq=False)
class TrainingData:
    """Observations of windows, and estimates from before the training.

    :param windows: observations to learn from.
    :param axes: the axes of the whole grid.
    :param mean: the mean function, which is not trained.
    :param variance: the variance that the kernel and the noise must explain.
    :param noise_floor: the smallest noise, as a fraction of the variance.
    :param num_observations: number of observations of the whole grid.
    :param labels: an axis of labels and their covariance, if labels differ in noise.
    :param variables: number of the axis of variables that are filled together. Each has its own noise.
    """

    windows: Sequence[Window]
    axes: Sequence[Axis]
    mean: TrendMean
    variance: float
    noise_floor: float
    num_observations: float = 0.0
    labels: tuple[int, LabelFactors] | None = None
    variables: int | None = None

    def make_likelihood(self) -> GappyGridLikelihood:
        """The likelihood with the noise before training."""
        grid = CartesianGrid([torch.from_numpy(axis.points) for axis in self.axes])
        if self.labels is None:
            return make_likelihood(self.variance, self.noise_floor, grid=grid, noise_axis=self.variables)
        return label_likelihood(grid, *self.labels, self.noise_floor)

    @property
    def own_variance(self) -> float | None:
        """Mean of the own variance of labels, if labels differ in noise."""
        return None if self.labels is None else float(self.labels[1].variance * self.labels[1].own.mean())


@dataclass(frozen=True, eq=False)
class Learned:
    """A kernel and noise with their hyperparameters, and the record of their training."""

    name: str
    terms: list[ProductTerm]
    likelihood: GappyGridLikelihood
    own_variance: float | None = None
    loss: float = math.inf
    history: History | None = None


class Contender:
    """A candidate on some windows, trained step by step. `loss` is the smallest loss of the last steps.

    Steps are those of :func:`fit`, without records, checkpoints and resets.
    """

    def __init__(self, found: Learned, windows: Sequence[WindowTensors], mean: TrendMean) -> None:
        self.found, self.loss = found, math.inf
        self._mll = _objective(found, windows, mean)
        trained = [parameter for parameter in self._mll.model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.Adam(trained, lr=_LEARNING_RATE)

    def train(self, steps: int) -> bool:
        """Makes some optimizer steps. Returns whether every loss was finite."""
        losses = []
        for _ in range(steps):
            self._optimizer.zero_grad()
            try:
                loss = -self._mll(None, None)
            except (NanError, NotPSDError):
                return False
            loss.backward()
            losses.append(loss.item())
            self._optimizer.step()
        self.loss = min(losses)
        return all(map(math.isfinite, losses))


@threads_for(flops=0.0)  # windows have a few hundred observations
def learn(
    candidates: Sequence[Candidate],
    data: TrainingData,
    steps: int,
    progress: bool = True,
    budget: Budget | None = None,
) -> Learned:
    """The best of the candidates, trained on all windows.

    :param candidates: kernels to compare.
    :param data: the training data.
    :param steps: largest number of optimizer steps of the final training.
    :param progress: whether to show a progress bar for the final training.
    :param budget: limits of steps and candidates.
    """
    min_gain = _MIN_GAIN_PER_TERM * (1 + data.num_observations / _DOUBLE_GAIN_OBSERVATIONS)
    windows = [WindowTensors.of(window, data.axes, data.mean) for window in data.windows]
    sixth = max(1, len(windows) // 6)
    few = [*windows[:sixth], *windows[sixth:][-2 * sixth :]]  # a third have neighbouring cells, the others strides
    field = [Learned(name, make(), data.make_likelihood(), data.own_variance) for name, make in candidates]
    effort = Effort(FIRST_STEPS, FURTHER_STEPS, steps, len(field))
    if budget is not None and budget.is_limited:
        per_step = [_step_seconds(found, few) for found in field]
        effort = budget.training(effort, per_step, _step_seconds(field[0], windows), _FINALISTS)
        field = field[: effort.candidates]
    best = field[0] if len(field) == 1 else _best_of(field, few, data.mean, min_gain, effort)
    return _train(best, windows, data.mean, effort.final, progress)


def _step_seconds(found: Learned, windows: Sequence[WindowTensors]) -> float:
    return evaluation_seconds([len(window.y) for window in windows], sum(len(term.kernels) for term in found.terms))


def _best_of(
    field: Sequence[Learned], windows: Sequence[WindowTensors], mean: TrendMean, min_gain: float, effort: Effort
) -> Learned:
    """The candidate with the smallest loss after a few steps. The loss has a penalty of `min_gain` per extra term."""
    contenders = [Contender(found, windows, mean) for found in field]
    with with_bar(None, "kernels compared", total=len(field) + _FINALISTS) as bar:
        for length, survivors in ((effort.first, _FINALISTS), (effort.further, 1)):
            trained = []
            for contender in contenders:
                if contender.train(length):  # candidates that fail are dropped
                    trained.append(contender)
                bar.update()
            contenders = sorted(
                trained or contenders[:1],
                key=lambda one: one.loss + min_gain * sum(term.cost for term in one.found.terms),
            )[:survivors]
    return contenders[0].found


def _train(found: Learned, windows: Sequence[WindowTensors], mean: TrendMean, steps: int, progress: bool) -> Learned:
    """Trains the parameters of `found` in place."""
    mll = _objective(found, windows, mean)
    history = fit(mll.model, steps, lr=_LEARNING_RATE, mll=mll, progress=progress, patience=10, min_improvement=0.05)
    return replace(found, loss=min(history.loss), history=history)


def _objective(found: Learned, windows: Sequence[WindowTensors], mean: TrendMean) -> WindowLogLikelihood:
    first = windows[0]
    model = make_model(first.grid, first.index, first.y, found.terms, found.likelihood, mean)
    return WindowLogLikelihood(found.likelihood, model, found.terms, windows, found.own_variance)
