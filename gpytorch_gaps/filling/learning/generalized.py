"""Coefficients of backgrounds by generalized least squares, once the covariance is learned.

    min_a Σ_w (y_w - X_w a)' A_w^-1 (y_w - X_w a),    A_w the covariance of the observations of window w

The columns of X are the constant, the slopes and the backgrounds. In ordinary least squares, a smooth background would
also explain its accidental correlation with the field, because hundreds of correlated observations count separately.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gpytorch_gaps.filling.axes.axis import Axis
from gpytorch_gaps.filling.learning.learn import Learned
from gpytorch_gaps.filling.learning.model import TrendMean, make_model
from gpytorch_gaps.filling.learning.window_likelihood import WindowLogLikelihood, WindowTensors
from gpytorch_gaps.filling.learning.windows import Window


def generalized(mean: TrendMean, learned: Learned, axes: Sequence[Axis], windows: Sequence[Window]) -> TrendMean:
    """The mean with coefficients by generalized least squares, if it has backgrounds. Offsets and cycles are kept.

    :param learned: the kernel and the noise.
    :param windows: the observations that are used.
    """
    if mean.covariates is None:
        return mean
    designs, targets = [], []
    with torch.no_grad():
        for window in windows:
            tensors = WindowTensors.of(window, axes, mean)
            design = _design(mean, tensors.points)
            kept = tensors.residual + design @ _coefficients(mean)  # values minus offsets and cycles
            root = torch.linalg.cholesky(_covariance(learned, tensors, mean))
            white = torch.linalg.solve_triangular(root, torch.cat([design, kept[:, None]], 1), upper=False)
            designs.append(white[:, :-1])
            targets.append(white[:, -1])
        x, y = torch.cat(designs), torch.cat(targets)
        spread = x.square().mean(0).sqrt().clamp_min(torch.finfo(x.dtype).tiny)
        found = torch.linalg.lstsq(x / spread, y, driver="gelsd").solution / spread
    return mean.with_coefficients(found[0], *found[1:].split([_num_slopes(mean), len(mean.covariates.names)]))


def _design(mean: TrendMean, points: Tensor) -> Tensor:
    """The columns of X. shape: (N, 1 + slopes + backgrounds)"""
    assert mean.covariates is not None
    sloped = mean.slopes != 0
    columns = [torch.ones_like(points[:, :1]), (points - mean.centre)[:, sloped], mean.covariates(points)]
    return torch.cat(columns, 1)


def _coefficients(mean: TrendMean) -> Tensor:
    return torch.cat([mean.constant.reshape(1), mean.slopes[mean.slopes != 0], mean.coefficients])


def _num_slopes(mean: TrendMean) -> int:
    return int((mean.slopes != 0).sum())


def _covariance(learned: Learned, window: WindowTensors, mean: TrendMean) -> Tensor:
    """shape: (N, N)"""
    model = make_model(window.grid, window.index, window.y, learned.terms, learned.likelihood, mean)
    noise = WindowLogLikelihood(learned.likelihood, model, learned.terms, [window]).noise(window)
    return model.covar_module(window.points).to_dense() + torch.diag(noise)
