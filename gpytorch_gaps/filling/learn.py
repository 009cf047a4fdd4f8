"""Hyperparameters from windows: the sum of their exact log-likelihoods, by dense algebra, ascended by Adam.

    log p = Σ_w log N(y_w | m_w, Σ_t s_t ∘_i K_ti[c_i, c_i] + s2 I)

Windows are treated as independent of each other, which only costs precision of the estimate. Candidates, kernels of
another roughness or of several scales, are compared by short runs on a few windows, the better ones by longer runs; the
best goes on with all.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.models import ExactGP
from linear_operator.operators import DiagLinearOperator
from torch import Tensor

from gpytorch_gaps.autograd.normal_log_prob import normal_log_prob
from gpytorch_gaps.filling.axes import Axis
from gpytorch_gaps.filling.model import PlaneMean, Term, make_likelihood
from gpytorch_gaps.filling.windows import Window
from gpytorch_gaps.likelihoods import GappyGridLikelihood
from gpytorch_gaps.training.fit import fit
from gpytorch_gaps.training.history import FitError, History
from gpytorch_gaps.utils.progress import with_bar
from gpytorch_gaps.utils.threads import threads_for

SHORT, LONG = 10, 40  # steps
_FINALISTS, _FURTHER = 3, 20  # candidates that go on from the short run, and for how many steps more
_LR = 0.15
_PRICE, _LARGE = 0.01, 4e5  # nats an observation that a term more must gain, and observations that double that


@dataclass(frozen=True, eq=False)
class Learned:
    """Terms and noise with their hyperparameters, and how they were found."""

    name: str
    terms: list[Term]
    likelihood: GappyGridLikelihood
    loss: float
    history: History


class WindowModel(ExactGP):
    """What is trained: terms, noise and a mean, known by windows alone. There is no distribution to ask for."""

    def __init__(
        self, parts: Sequence["_Part"], terms: Sequence[Term], likelihood: GappyGridLikelihood, mean: PlaneMean
    ) -> None:
        super().__init__(parts[0].x, parts[0].y, likelihood)
        self.parts, self.terms, self.mean_module = list(parts), torch.nn.ModuleList(terms), mean

    def forward(self, x: Tensor) -> MultivariateNormal:
        return MultivariateNormal(x.new_zeros(len(x)), DiagLinearOperator(x.new_ones(len(x))))


class WindowLogLikelihood(ExactMarginalLogLikelihood):
    """The mean log-likelihood of an observation, over all windows, with the priors of the kernels."""

    def forward(self, function_dist: object, target: Tensor, *params: object, **kwargs: object) -> Tensor:
        total, count = torch.zeros((), dtype=torch.float64), 0
        for part in self.model.parts:
            residual = part.y - self.model.mean_module(part.x)
            total, count = total + normal_log_prob(residual, self._covariance(part)), count + len(part.y)
        return self._add_other_terms(total, params) / count

    def _covariance(self, part: "_Part") -> Tensor:
        """shape: (N, N)"""
        covariance = self.likelihood.noise * torch.eye(len(part.y), dtype=torch.float64)
        for term in self.model.terms:
            product = term.scale
            for kernel, points, pick in zip(term.kernels, part.points, part.picks, strict=True):
                product = product * (pick @ kernel(points).to_dense() @ pick.mT)
            covariance = covariance + product
        return covariance


@dataclass(frozen=True, eq=False)
class _Part:
    """A window as tensors.

    `picks` are rows of the identity, (N, m_i): as products they are far faster than indexing, above all backwards.
    """

    points: list[Tensor]
    picks: list[Tensor]
    x: Tensor
    y: Tensor

    @classmethod
    def of(cls, window: Window, axes: Sequence[Axis]) -> "_Part":
        points = [torch.from_numpy(axis.points[p]) for axis, p in zip(axes, window.positions, strict=True)]
        picks = [
            torch.eye(len(p), dtype=torch.float64)[c] for p, c in zip(points, window.cells.unbind(-1), strict=True)
        ]
        x = torch.cat([p[c] for p, c in zip(points, window.cells.unbind(-1), strict=True)], dim=-1)
        return cls(points, picks, x, window.values)


Candidate = tuple[str, Callable[[], list[Term]]]


@threads_for(flops=0.0)  # windows have a few hundred observations
def learn(
    candidates: Sequence[Candidate],
    windows: Sequence[Window],
    axes: Sequence[Axis],
    mean: PlaneMean,
    variance: float,
    floor: float,
    steps: int = LONG,
    progress: bool = True,
    observations: float = 0.0,
) -> Learned:
    """The best of the candidates, trained on all windows.

    :param floor: under the noise, as a share of the variance.
    :param observations: in all: the more, the longer a solve takes, and the more must a term gain that makes it longer.
    """
    price = _PRICE * (1 + observations / _LARGE)
    few = _some(windows)

    def run(found: Learned, where: Sequence[Window], steps: int, progress: bool = False) -> Learned:
        return _train(found.name, found.terms, found.likelihood, where, axes, mean, steps, progress)

    field = [Learned(name, make(), make_likelihood(variance, floor), math.inf, History()) for name, make in candidates]
    if len(field) > 1:
        with with_bar(None, "kernels compared", total=len(field) + _FINALISTS) as bar:
            for length, survivors in ((SHORT, _FINALISTS), (_FURTHER, 1)):
                trained = []
                for found in field:
                    with suppress(FitError):  # a candidate that fails is none
                        trained.append(run(found, few, length))
                    bar.update()
                field = sorted(trained or field[:1], key=lambda one: one.loss + price * len(one.terms))[:survivors]
    return run(field[0], windows, steps, progress)


def _some(windows: Sequence[Window]) -> list[Window]:
    """The first, of neighbours, and the last two, at strides."""
    return [*windows[:1], *windows[1:][-2:]]


def _train(
    name: str,
    terms: list[Term],
    likelihood: GappyGridLikelihood,
    windows: Sequence[Window],
    axes: Sequence[Axis],
    mean: PlaneMean,
    steps: int,
    progress: bool,
) -> Learned:
    model = WindowModel([_Part.of(window, axes) for window in windows], terms, likelihood, mean)
    mll = WindowLogLikelihood(likelihood, model)
    history = fit(model, steps, lr=_LR, mll=mll, progress=progress, patience=10, min_improvement=0.05)
    return Learned(name, terms, likelihood, min(history.loss), history)
