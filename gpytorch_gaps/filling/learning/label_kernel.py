"""Kernel and noise of labels. How they differ between labels is given. Only one number for each is learned: a and s2.

    k(l, m) = b_l' b_m + a v_l [l = m],    noise of label l = s2 v_l

B and v come from :mod:`gpytorch_gaps.filling.learning.label_factors`. The own variation of a label has two parts: one
that is correlated along the other axes, with the weight a, and noise. The sizes of both are learned from windows.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from gpytorch.kernels import IndexKernel, Kernel
from gpytorch.likelihoods.noise_models import Noise
from linear_operator.operators import DiagLinearOperator
from torch import Tensor

from gpytorch_gaps.filling.learning.label_factors import LabelFactors
from gpytorch_gaps.filling.learning.model import ProductTerm, positive
from gpytorch_gaps.grid.cartesian import CartesianGrid
from gpytorch_gaps.likelihoods import GappyGridLikelihood

_FIRST_SHARE = 0.5  # initial fraction of the own variation that is not noise
_LABEL_RANK = 5  # rank of free covariances
_LEAST_PROFILE = 0.02  # smallest noise variance of a label, relative to that of the average label


class LabelKernel(IndexKernel):
    """``B B' + a diag(v)``. Only a is learned."""

    def __init__(self, factors: LabelFactors) -> None:
        labels, rank = factors.loadings.shape
        super().__init__(num_tasks=labels, rank=rank, var_constraint=positive())
        self.double()
        with torch.no_grad():
            self.covar_factor.copy_(torch.from_numpy(factors.loadings))
            self.raw_var.copy_(torch.from_numpy(factors.own).log())
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        share = torch.tensor(math.log(_FIRST_SHARE), dtype=torch.float64)
        self.register_parameter("raw_share", torch.nn.Parameter(share))

    @property
    def var(self) -> Tensor:
        """a v"""
        return self.raw_share.exp() * self.raw_var.exp()


class ProfileNoise(Noise):
    """Noise variances of labels in given proportions. Their mean is learned."""

    def __init__(self, profile: Tensor, variance: float, floor: float) -> None:
        super().__init__()
        self.register_buffer("profile", profile)
        self.register_parameter("raw_noise", torch.nn.Parameter(torch.zeros(1, dtype=torch.float64)))
        self.register_constraint("raw_noise", positive(floor))
        self.initialize(raw_noise=self.raw_noise_constraint.inverse_transform(torch.tensor([max(variance, 2 * floor)])))

    @property
    def noise(self) -> Tensor:
        """shape: (labels,)"""
        return self.raw_noise_constraint.transform(self.raw_noise) * self.profile

    def forward(self, *params: object, **kwargs: object) -> DiagLinearOperator:
        return DiagLinearOperator(self.noise)


def label_likelihood(grid: CartesianGrid, axis: int, factors: LabelFactors, floor: float) -> GappyGridLikelihood:
    """Noise in the proportions of the own variation of labels.

    :param axis: the axis of labels.
    :param floor: the smallest mean noise, as a fraction of the variance of labels.
    """
    own = torch.from_numpy(factors.own)
    profile = (own / own.mean()).clamp_min(_LEAST_PROFILE)
    likelihood = GappyGridLikelihood(noise_axis=axis, grid=grid).double()
    first = (1.0 - _FIRST_SHARE) * float(own.mean()) * factors.variance
    likelihood.noise_covar = ProfileNoise(profile, first, floor * factors.variance)
    return likelihood


def on_part(likelihood: GappyGridLikelihood, grid: CartesianGrid) -> GappyGridLikelihood:
    """The likelihood for a part of the grid: an ordinary likelihood with the noise of the labels there."""
    if likelihood.noise_axis is None:
        return likelihood
    labels = grid.axes[likelihood.noise_axis].squeeze(-1).long()
    part = GappyGridLikelihood(noise_axis=likelihood.noise_axis, grid=grid, noise_constraint=positive()).double()
    part.noise = likelihood.noise.detach().to(labels.device)[labels]
    return part


def own_variance(terms: Sequence[ProductTerm], likelihood: GappyGridLikelihood) -> Tensor:
    """Mean of the own variance of labels, including noise, if labels differ in noise."""
    total = likelihood.noise.mean()
    for term in terms:
        kernel = term.kernels[term.blocks.index((likelihood.noise_axis,))]
        assert isinstance(kernel, LabelKernel)
        total = total + term.scale * kernel.var.mean()
    return total


def free_covariance(size: int, factors: LabelFactors | None) -> Kernel:
    """``B B' + diag(v)``, initialized with the leading eigenvectors of the known covariance; v is the remainder."""
    rank, matrix = min(size, _LABEL_RANK), covariance_of(size, factors)
    values, vectors = np.linalg.eigh(matrix)
    root = vectors[:, -rank:] * np.sqrt(np.clip(values[-rank:], 0.0, None))
    return index_kernel(root, np.clip(np.diag(matrix) - (root**2).sum(1), 0.02, None))


def covariance_of(size: int, factors: LabelFactors | None) -> np.ndarray:
    """The covariance of labels. Without factors, labels are independent."""
    return np.eye(size) if factors is None else factors.loadings @ factors.loadings.T + np.diag(factors.own)


def index_kernel(root: np.ndarray, variances: np.ndarray) -> Kernel:
    """``B B' + diag(v)`` of labels."""
    kernel = IndexKernel(num_tasks=len(root), rank=root.shape[1], var_constraint=positive()).double()
    with torch.no_grad():
        kernel.covar_factor.copy_(torch.from_numpy(root))
    kernel.var = torch.from_numpy(variances)
    return kernel
