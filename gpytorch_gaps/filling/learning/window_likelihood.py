"""The log-likelihood of windows, by dense algebra: the sum over windows w of

    log N(y_w | m_w, Σ_t s_t ∘_i K_ti[c_i, c_i] + S_w + D_w)

S_w is the learned noise, with one variance, or one for each label. D_w are the known variances of measurement errors,
if there are any. A window has few positions along an axis, and a few hundred observations. A kernel is called once for
all windows, at positions or at lags, and not at all pairs of observations.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from gpytorch.kernels import Kernel
from gpytorch.mlls import ExactMarginalLogLikelihood
from gpytorch.models import ExactGP
from torch import Tensor

from gpytorch_gaps.autograd.summed_products import summed_products_log_prob
from gpytorch_gaps.filling.axes.axis import Axis
from gpytorch_gaps.filling.learning.label_kernel import own_variance
from gpytorch_gaps.filling.learning.model import ProductTerm, TrendMean, grid_columns
from gpytorch_gaps.filling.learning.windows import Window
from gpytorch_gaps.grid.cartesian import CartesianGrid
from gpytorch_gaps.likelihoods import GappyGridLikelihood

_LOG_OWN_STD = 0.05  # standard deviation of the log-normal prior of the own variance of labels
_SAME_LAG = 1e-9  # lags are equal if they differ by less than this fraction of the largest


@dataclass(frozen=True, eq=False)
class WindowTensors:
    """A window as tensors. `picks` are rows of the identity, (N, m_i), as in :mod:`gpytorch_gaps.autograd`."""

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

    def columns(self, axes: Sequence[int]) -> list[int]:
        """The columns of points that belong to a block of axes."""
        return grid_columns(self.grid, axes)


class WindowFactors:
    """The covariance matrices of several windows along some axes, with a single call of a kernel.

    The kernel is called at distinct places, and every observation picks one of them. A stationary kernel of a block of
    axes is called at the distinct lags of the observations. On a grid, there are only few.
    """

    def __init__(self, windows: Sequence[WindowTensors], axes: Sequence[int], stationary: bool) -> None:
        self.picks: list[Tensor | None] = [None] * len(windows)
        self._lags: list[tuple[Tensor, Tensor]] | None = None
        if len(axes) > 1 and stationary and all(windows[0].grid.axes[axis].size(-1) == 1 for axis in axes):
            self._lags = [_distinct_lags(window, axes) for window in windows]
            return
        places = [window.points[:, window.columns(axes)] for window in windows]
        for number, window in enumerate(windows):
            code = torch.zeros(len(window.y), dtype=torch.long)
            for axis in axes:
                code = code * window.grid.shape[axis] + window.picks[axis].argmax(-1)
            distinct, at = code.unique(return_inverse=True)
            if len(distinct) < len(code):  # several observations share a place
                found = places[number].new_empty(len(distinct), places[number].size(-1))
                found[at] = places[number]
                places[number], self.picks[number] = found, torch.eye(len(distinct), dtype=torch.float64)[at]
        self._sizes = [len(one) for one in places]
        most = max(self._sizes)  # rows of the padding, which repeats the first place, are dropped
        self._places = torch.stack([torch.cat([one, one[:1].expand(most - len(one), -1)]) for one in places])

    def __call__(self, kernel: Kernel) -> list[Tensor]:
        if self._lags is None:
            matrices = kernel(self._places).to_dense().unbind(0)
            return [matrix[:size, :size] for matrix, size in zip(matrices, self._sizes, strict=True)]
        lags = torch.cat([lags for lags, _ in self._lags])
        values = kernel(lags, torch.zeros_like(lags[:1])).to_dense()
        own = values.squeeze(-1).split([len(lags) for lags, _ in self._lags])
        # indexing by more than one dimension is much slower, especially in the backward pass
        return [
            values.index_select(0, at.flatten()).view(at.shape) for values, (_, at) in zip(own, self._lags, strict=True)
        ]


def _distinct_lags(window: WindowTensors, axes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """All combinations of the distinct lags along the axes, and the index of the lag of each pair of observations.

    shape: (lags, D), (N, N)
    """
    found, at = [], torch.zeros((), dtype=torch.long)
    for axis in axes:
        points = window.grid.axes[axis].squeeze(-1)
        lags = (points.unsqueeze(-1) - points).abs()
        size = lags.amax().clamp_min(torch.finfo(torch.float64).tiny) * _SAME_LAG
        codes, own = (lags / size).round().unique(return_inverse=True)
        found.append(size * codes)
        position = window.picks[axis].argmax(-1)
        at = at * len(codes) + own[position.unsqueeze(-1), position]
    return torch.cartesian_prod(*found), at


class WindowLogLikelihood(ExactMarginalLogLikelihood):
    """The composite log marginal likelihood of several windows, per observation, with the priors of the kernels.

    Windows share the kernels of `model`, which is the model of the first window. All windows are evaluated by dense
    algebra. GPyTorch passes the lazy prior of the first window, which is not evaluated.

    :param own_variance: centre of a narrow log-normal prior for the mean of the own variance of labels, including
        noise. It is needed because windows contain few of the labels.
    """

    def __init__(
        self,
        likelihood: GappyGridLikelihood,
        model: ExactGP,
        terms: Sequence[ProductTerm],
        windows: Sequence[WindowTensors],
        own_variance: float | None = None,
    ) -> None:
        super().__init__(likelihood, model)
        self._own_variance = own_variance
        self._terms, self._windows = list(terms), list(windows)
        self._blocks = {}
        for axes in {axes for term in terms for axes in term.blocks}:
            kernels = [term.kernels[term.blocks.index(axes)] for term in terms if axes in term.blocks]
            self._blocks[axes] = WindowFactors(windows, axes, all(kernel.is_stationary for kernel in kernels))

    def forward(self, function_dist: object, target: object, *params: object, **kwargs: object) -> Tensor:
        scales = torch.stack([term.scale for term in self._terms])
        factors = [
            [self._blocks[axes](kernel) for kernel, axes in zip(term.kernels, term.blocks, strict=True)]
            for term in self._terms
        ]
        total = torch.zeros((), dtype=torch.float64)
        for number, window in enumerate(self._windows):
            own = [[block[number] for block in term] for term in factors]
            picks = [[self._blocks[axes].picks[number] for axes in term.blocks] for term in self._terms]
            total = total + summed_products_log_prob(window.residual, self.noise(window), scales, own, picks)
        if self._own_variance is not None:
            ratio = own_variance(self._terms, self.likelihood) / self._own_variance
            total = total - 0.5 * (ratio.log() / _LOG_OWN_STD).square()
        return self._add_other_terms(total, params) / sum(len(window.y) for window in self._windows)

    def noise(self, window: WindowTensors) -> Tensor:
        """Variances of the noise of the observations. shape: (N,)"""
        axis = self.likelihood.noise_axis
        if axis is None:
            return self.likelihood.noise + window.noise
        codes = window.points[:, window.columns([axis])].squeeze(-1).long()
        return self.likelihood.noise[codes] + window.noise
