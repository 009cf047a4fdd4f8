"""Hyperparameters from windows: Adam maximizes the sum of the exact log-likelihoods of the windows.

    log p = Σ_w log N(y_w | m_w, Σ_t s_t ∘_i K_ti[c_i, c_i] + s2 I + D_w)

D_w has the known variances of the errors of measurements, if there are any. Windows are treated as independent, which
only costs precision of the estimate. Candidate kernels are compared by short runs on a few windows, the best of them by
longer runs, and the winner is trained on all windows.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from gpytorch.kernels import Kernel
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.models import ExactGP
from torch import Tensor

from gpytorch_gaps.autograd.dense import normal_log_prob
from gpytorch_gaps.filling.axes import Axis
from gpytorch_gaps.filling.model import ProductTerm, TrendMean, make_likelihood, make_model
from gpytorch_gaps.filling.windows import Window
from gpytorch_gaps.grid.cartesian import CartesianGrid
from gpytorch_gaps.likelihoods import GappyGridLikelihood
from gpytorch_gaps.training.fit import fit
from gpytorch_gaps.training.history import FitError, History
from gpytorch_gaps.utils.progress import with_bar
from gpytorch_gaps.utils.threads import threads_for

FIRST_STEPS, FURTHER_STEPS = 10, 20  # of all candidates, and of the finalists after these
_FINALISTS = 3
_LEARNING_RATE = 0.15
_MIN_GAIN_PER_TERM = 0.01  # nats per observation
_DOUBLE_GAIN_OBSERVATIONS = 4e5  # solves of more observations take longer, so another term has to gain more

Candidate = tuple[str, Callable[[], list[ProductTerm]]]
"""The name of a kernel, and a function that makes its terms."""


@dataclass(frozen=True, eq=False)
class TrainingData:
    """Observations of windows, and what is known before training.

    :param windows: observations to learn from.
    :param axes: the axes of the whole grid.
    :param mean: the mean function, which is not trained.
    :param variance: the variance that the kernel and the noise have to explain.
    :param noise_floor: the smallest noise, as a share of the variance.
    :param num_observations: those of the whole grid.
    """

    windows: Sequence[Window]
    axes: Sequence[Axis]
    mean: TrendMean
    variance: float
    noise_floor: float
    num_observations: float = 0.0


@dataclass(frozen=True, eq=False)
class Learned:
    """A kernel and noise with their hyperparameters, and how they were found."""

    name: str
    terms: list[ProductTerm]
    likelihood: GappyGridLikelihood
    loss: float = math.inf
    history: History | None = None


@dataclass(frozen=True, eq=False)
class WindowTensors:
    """A window as tensors.

    `picks` are rows of the identity, (N, m_i): products with them are far faster than indexing, above all backwards.
    """

    grid: CartesianGrid
    picks: list[Tensor]
    points: Tensor
    index: Tensor
    y: Tensor
    residual: Tensor
    noise: Tensor

    @classmethod
    def of(cls, window: Window, axes: Sequence[Axis], mean: TrendMean) -> "WindowTensors":
        grid = CartesianGrid([torch.from_numpy(axis.points[p]) for axis, p in zip(axes, window.positions, strict=True)])
        columns = window.cells.unbind(-1)
        picks = [torch.eye(size, dtype=torch.float64)[c] for size, c in zip(grid.shape, columns, strict=True)]
        index = grid.ravel(columns)
        points = grid.points(index)
        return cls(grid, picks, points, index, window.values, window.values - mean(points), window.noise)

    def covariance(self, kernel: Kernel, axes: Sequence[int]) -> Tensor:
        """The covariance of the observations, for a kernel on an axis or a block of axes. shape: (N, N)"""
        if len(axes) == 1:
            pick = self.picks[axes[0]]
            return pick @ kernel(self.grid.axes[axes[0]]).to_dense() @ pick.mT
        columns = slice(self.grid.columns[axes[0]].start, self.grid.columns[axes[-1]].stop)
        return kernel(self.points[:, columns]).to_dense()


class WindowLogLikelihood(ExactMarginalLogLikelihood):
    """The composite log marginal likelihood of several windows, per observation, with the priors of the kernels.

    Windows share the kernels of `model`, which is the model of the first of them. All are evaluated by dense algebra,
    so the lazy prior of the first that GPyTorch passes in is not evaluated.
    """

    def __init__(
        self,
        likelihood: GappyGridLikelihood,
        model: ExactGP,
        terms: Sequence[ProductTerm],
        windows: Sequence[WindowTensors],
    ) -> None:
        super().__init__(likelihood, model)
        self._terms, self._windows = list(terms), list(windows)

    def forward(self, function_dist: object, target: Tensor, *params: object, **kwargs: object) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for window in self._windows:
            total = total + normal_log_prob(window.residual, self._covariance(window))
        return self._add_other_terms(total, params) / sum(len(window.y) for window in self._windows)

    def _covariance(self, window: WindowTensors) -> Tensor:
        """shape: (N, N)"""
        covariance = torch.diag(self.likelihood.noise + window.noise)
        for term in self._terms:
            factors = map(window.covariance, term.kernels, term.blocks)
            covariance = covariance + term.scale * math.prod(factors, start=torch.ones(()))
        return covariance


@threads_for(flops=0.0)  # windows have a few hundred observations
def learn(candidates: Sequence[Candidate], data: TrainingData, steps: int, progress: bool = True) -> Learned:
    """The best of the candidates, trained on all windows.

    :param candidates: kernels to compare.
    :param data: what to learn from.
    :param steps: optimizer steps of the final training, at most.
    :param progress: whether to show a bar for the final training.
    """
    min_gain = _MIN_GAIN_PER_TERM * (1 + data.num_observations / _DOUBLE_GAIN_OBSERVATIONS)
    windows = [WindowTensors.of(window, data.axes, data.mean) for window in data.windows]
    few = [*windows[:1], *windows[1:][-2:]]  # one of neighbouring cells and two with strides
    field = [Learned(name, make(), make_likelihood(data.variance, data.noise_floor)) for name, make in candidates]
    if len(field) > 1:
        with with_bar(None, "kernels compared", total=len(field) + _FINALISTS) as bar:
            for length, survivors in ((FIRST_STEPS, _FINALISTS), (FURTHER_STEPS, 1)):
                trained = []
                for found in field:
                    with suppress(FitError):  # candidates that fail are dropped
                        trained.append(_train(found, few, data.mean, length, progress=False))
                    bar.update()
                field = sorted(trained or field[:1], key=lambda one: one.loss + min_gain * len(one.terms))[:survivors]
    return _train(field[0], windows, data.mean, steps, progress)


def _train(found: Learned, windows: Sequence[WindowTensors], mean: TrendMean, steps: int, progress: bool) -> Learned:
    """Trains the parameters of `found` in place."""
    terms, likelihood, first = found.terms, found.likelihood, windows[0]
    model = make_model(first.grid, first.index, first.y, terms, likelihood, mean)
    mll = WindowLogLikelihood(likelihood, model, terms, windows)
    history = fit(model, steps, lr=_LEARNING_RATE, mll=mll, progress=progress, patience=10, min_improvement=0.05)
    return Learned(found.name, terms, likelihood, min(history.loss), history)
