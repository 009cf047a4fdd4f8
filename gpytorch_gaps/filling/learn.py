"""Hyperparameters from windows: the sum of their exact log-likelihoods, by dense algebra, ascended by Adam.

    log p = Σ_w log N(y_w | m_w, Σ_t s_t ∘_i K_ti[c_i, c_i] + s2 I)

Windows are treated as independent of each other, which only costs precision of the estimate. Candidates, kernels of
another roughness or of several scales, are compared by a short run on a few windows; the best goes on with all.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from gpytorch.mlls import ExactMarginalLogLikelihood
from linear_operator.utils.cholesky import psd_safe_cholesky
from torch import Tensor

from gpytorch_gaps.filling.axes import Axis
from gpytorch_gaps.filling.model import FillModel, PlaneMean, Term, make_likelihood, make_model
from gpytorch_gaps.filling.windows import Window
from gpytorch_gaps.fit import fit
from gpytorch_gaps.grid import CartesianGrid
from gpytorch_gaps.history import FitError, History
from gpytorch_gaps.likelihoods import GappyGridLikelihood

SHORT, LONG = 20, 50  # steps
_LR = 0.15
_COST_OF_A_TERM = 0.01  # nats an observation that a term more must gain: it takes time at every solve


@dataclass(frozen=True, eq=False)
class Learned:
    """Terms and noise with their hyperparameters, and how they were found."""

    name: str
    terms: list[Term]
    likelihood: GappyGridLikelihood
    loss: float
    history: History


class WindowLogLikelihood(ExactMarginalLogLikelihood):
    """The mean log-likelihood of an observation, over all windows, with the priors of the kernels."""

    def __init__(
        self, model: FillModel, terms: Sequence[Term], windows: Sequence[Window], axes: Sequence[Axis]
    ) -> None:
        super().__init__(model.likelihood, model)
        self._terms = list(terms)
        self._parts = [_Part.of(window, axes) for window in windows]

    def forward(self, function_dist: object, target: Tensor, *params: object, **kwargs: object) -> Tensor:
        total, count = torch.zeros((), dtype=torch.float64), 0
        for part in self._parts:
            root = psd_safe_cholesky(self._covariance(part))
            normal = torch.distributions.MultivariateNormal(
                self.model.mean_module(part.x), scale_tril=root, validate_args=False
            )
            total, count = total + normal.log_prob(part.y), count + len(part.y)
        return self._add_other_terms(total, params) / count

    def _covariance(self, part: "_Part") -> Tensor:
        """shape: (N, N)"""
        covariance = self.likelihood.noise * torch.eye(len(part.y), dtype=torch.float64)
        for term in self._terms:
            product = term.scale
            for kernel, points, pick in zip(term.kernels, part.points, part.picks, strict=True):
                product = product * (pick @ kernel(points).to_dense() @ pick.mT)
            covariance = covariance + product
        return covariance


@dataclass(frozen=True, eq=False)
class _Part:
    """A window as tensors. `picks` are rows of the identity, (N, m_i): as products they are far faster than indexing,
    above all backwards."""

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


def learn(
    candidates: Sequence[Candidate],
    windows: Sequence[Window],
    axes: Sequence[Axis],
    mean: PlaneMean,
    variance: float,
    floor: float,
    steps: int = LONG,
    progress: bool = True,
) -> Learned:
    """The best of the candidates, trained on all windows.

    :param floor: under the noise, as a share of the variance.
    """
    few = _some(windows)
    best: Learned | None = None
    trials = candidates if len(candidates) > 1 else []
    for name, make in trials:
        try:
            found = _train(name, make(), make_likelihood(variance, floor), few, axes, mean, SHORT, progress=False)
        except FitError:
            continue
        price = _COST_OF_A_TERM * len(found.terms)
        if best is None or found.loss + price < best.loss + _COST_OF_A_TERM * len(best.terms):
            best = found
    if best is None:
        name, make = candidates[0]
        return _train(name, make(), make_likelihood(variance, floor), windows, axes, mean, steps, progress)
    return _train(best.name, best.terms, best.likelihood, windows, axes, mean, steps, progress)


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
    window = windows[0]
    grid = CartesianGrid([torch.from_numpy(a.points[p]) for a, p in zip(axes, window.positions, strict=True)])
    index = torch.from_numpy(np.ravel_multi_index(window.cells.numpy().T, grid.shape))
    model = make_model(grid.points(index), window.values, grid, terms, likelihood, mean)
    model.terms = torch.nn.ModuleList(terms)  # whose scales are learned, not those of the kernels made from them
    for part in model.covar_module.modules():
        if hasattr(part, "raw_outputscale"):
            part.raw_outputscale.requires_grad_(False)
    mll = WindowLogLikelihood(model, terms, windows, axes)
    history = fit(model, steps, lr=_LR, mll=mll, progress=progress, patience=10, min_improvement=0.05)
    return Learned(name, terms, likelihood, min(history.loss), history)
