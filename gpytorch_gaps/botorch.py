"""``GappyGridModel``: an exact Gaussian process on a grid with gaps, as a model of BoTorch.

The observations are rows of `train_X`, in any order, as everywhere in BoTorch. The grid is that of their coordinates.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from itertools import chain
from typing import Any

import torch

try:
    from botorch.models.gpytorch import GPyTorchModel
    from botorch.models.model import FantasizeMixin
    from botorch.models.transforms.input import InputTransform
    from botorch.models.transforms.outcome import OutcomeTransform, Standardize
    from botorch.models.utils.gpytorch_modules import (
        get_covar_module_with_dim_scaled_prior,
        get_gaussian_likelihood_with_lognormal_prior,
    )
    from botorch.optim.fit import fit_gpytorch_mll_scipy
    from botorch.sampling.base import MCSampler
    from botorch.utils.datasets import SupervisedDataset
    from botorch.utils.types import DEFAULT
except ImportError as error:
    raise ImportError("GappyGridModel needs BoTorch: pip install 'gpytorch-gaps[botorch]'") from error

from gpytorch.constraints import GreaterThan
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel, RBFKernel
from gpytorch.likelihoods import Likelihood
from gpytorch.means import ConstantMean, Mean
from gpytorch.mlls import MarginalLogLikelihood
from gpytorch.models import ExactGP
from torch import Tensor

from gpytorch_gaps.grid.cartesian import CartesianGrid, observed_entries
from gpytorch_gaps.grid.data import from_points
from gpytorch_gaps.kernels import GappyGridKernel
from gpytorch_gaps.likelihoods import GappyGridLikelihood
from gpytorch_gaps.likelihoods.noise import GivenNoise
from gpytorch_gaps.training.fit import fit
from gpytorch_gaps.training.history import History

__all__ = ["GappyGridModel"]


class GappyGridModel(GPyTorchModel, ExactGP, FantasizeMixin):
    """A model of BoTorch for observations on some cells of a grid, such as learning curves that stop at any epoch.

    The posterior is exact at any point, on the grid or not. By default the model, with its priors, is that of
    ``SingleTaskGP``: a squared-exponential kernel with a length-scale per column, and standardized outcomes.

    :param train_X: points, shape (N, d). Rows may be equal.
    :param train_Y: observations, shape (N, 1). NaN marks a gap: a cell without an observation.
    :param train_Yvar: known noise variances, shape (N, 1). Default: one noise, which is learned. New observations then
        have the mean variance.
    :param groups: columns of `train_X` that form one axis, such as ``[[0, 1, 2], [3]]`` for curves over column 3 of
        configurations in the columns 0 to 2. Default: one axis per column.
    :param kernels: one GPyTorch kernel per axis, whose product is the covariance. Put a ``ScaleKernel`` around one of
        them to learn the variance.
    :param mean_module: the prior mean. Default: a constant.
    :param likelihood: a likelihood, usually a :class:`GappyGridLikelihood`.
    :param outcome_transform: a transform of BoTorch for outcomes. Default: ``Standardize``. None: no transform.
    :param input_transform: a transform of BoTorch for inputs, without learned parameters, which would change the
        coordinates of the grid. The grid is that of the transformed points.
    :raises ValueError: if shapes do not match, a value is infinite, or the input transform has parameters to learn.

    ``history`` is the record of the last fit by :func:`gpytorch_gaps.fit`.

    >>> import torch
    >>> from botorch.fit import fit_gpytorch_mll
    >>> from gpytorch.mlls import ExactMarginalLogLikelihood
    >>> epoch, rate = torch.meshgrid(*(torch.linspace(0, 1, 6, dtype=torch.float64),) * 2, indexing="ij")
    >>> loss = torch.exp(-3 * epoch) + (rate - 0.4) ** 2
    >>> loss[4:, 3] = torch.nan  # a run that was stopped early
    >>> X = torch.stack([epoch.flatten(), rate.flatten()], -1)
    >>> model = GappyGridModel(X, loss.reshape(-1, 1))
    >>> mll = fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model), optimizer_kwargs={"steps": 20})
    >>> model.posterior(X[-3:-2]).mean.shape, len(model.history)
    (torch.Size([1, 1]), 20)
    """

    def __init__(
        self,
        train_X: Tensor,
        train_Y: Tensor,
        train_Yvar: Tensor | None = None,
        *,
        groups: Sequence[Sequence[int]] | None = None,
        kernels: Sequence[Kernel] | None = None,
        mean_module: Mean | None = None,
        likelihood: Likelihood | None = None,
        outcome_transform: OutcomeTransform | Any | None = DEFAULT,
        input_transform: InputTransform | None = None,
    ) -> None:
        self._validate_tensor_args(X=train_X, Y=train_Y, Yvar=train_Yvar)
        _check(train_X, train_Y, input_transform)
        with torch.no_grad():
            transformed = self.transform_inputs(X=train_X, input_transform=input_transform)
        groups = [[column] for column in range(transformed.size(-1))] if groups is None else groups
        distinct = torch.unique(transformed, dim=0)
        grid, _, _ = from_points(distinct, torch.zeros_like(distinct[:, 0]), groups)
        observed = observed_entries("train_Y", train_Y)
        train_X, train_Y, transformed = (rows[observed] for rows in (train_X, train_Y, transformed))
        train_Yvar = None if train_Yvar is None else train_Yvar[observed]
        if outcome_transform == DEFAULT:
            outcome_transform = Standardize(m=1)
        if outcome_transform is not None:
            outcome_transform.train()
            train_Y, train_Yvar = outcome_transform(Y=train_Y, Yvar=train_Yvar, X=transformed)
        likelihood = _likelihood(train_Yvar) if likelihood is None else likelihood
        super().__init__(train_X, train_Y.squeeze(-1), likelihood)
        self._num_outputs = 1
        self.history: History | None = None
        self.mean_module = ConstantMean() if mean_module is None else mean_module
        self.covar_module = _grid_kernel(kernels, grid, groups)
        if outcome_transform is not None:
            self.outcome_transform = outcome_transform
        if input_transform is not None:
            self.input_transform = input_transform
        self.to(train_X)

    @classmethod
    def construct_inputs(
        cls, training_data: SupervisedDataset, *, groups: Sequence[Sequence[int]] | None = None
    ) -> dict[str, Any]:
        """Arguments of the model for a dataset of BoTorch. Ax calls this.

        :param training_data: the dataset.
        :param groups: columns that form one axis.
        :return: keyword arguments.
        """
        return {**super().construct_inputs(training_data), "groups": groups}

    def forward(self, x: Tensor) -> MultivariateNormal:
        """Prior distribution of the function.

        :param x: points.
        :return: the distribution.
        """
        if self.training:
            x = self.transform_inputs(x)
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))

    def fantasize(
        self, X: Tensor, sampler: MCSampler, observation_noise: Tensor | None = None, **kwargs: Any
    ) -> "GappyGridModel":
        """The model conditioned on draws of observations at further points, as in every model of BoTorch.

        :param X: the points.
        :param sampler: the sampler of the draws.
        :param observation_noise: noise variances at the points, in transformed units. Default: the learned noise, or
            the mean of the given variances.
        :param kwargs: further arguments of ``condition_on_observations``.
        :return: the model.
        """
        if observation_noise is None and isinstance(getattr(self.likelihood, "noise_covar", None), GivenNoise):
            observation_noise = self.likelihood.noise.mean().expand(*X.shape[:-1], 1)
        return super().fantasize(X, sampler, observation_noise, **kwargs)

    def custom_fit(
        self,
        mll: MarginalLogLikelihood,
        closure: Callable[..., Any] | None = None,
        closure_kwargs: dict[str, Any] | None = None,
        optimizer: Callable[..., Any] | None = None,
        optimizer_kwargs: dict[str, Any] | None = None,
        **_: Any,
    ) -> MarginalLogLikelihood:
        """Fits the hyperparameters; ``botorch.fit.fit_gpytorch_mll`` calls it.

        It uses :func:`gpytorch_gaps.fit` with warm starts and up to 200 steps, and stores the record in ``history``.

        :param mll: the objective.
        :param closure: a loss with gradients for another optimizer.
        :param closure_kwargs: arguments of the closure.
        :param optimizer: another optimizer, such as ``fit_gpytorch_mll_scipy`` of BoTorch.
        :param optimizer_kwargs: arguments of :func:`gpytorch_gaps.fit`, such as ``steps``, or of `optimizer`.
        :return: the objective, in eval mode.
        """
        options = optimizer_kwargs or {}
        if optimizer is not None or closure is not None:
            loss = None if closure is None else partial(closure, **(closure_kwargs or {}))
            (optimizer or fit_gpytorch_mll_scipy)(mll.train(), closure=loss, **options)
            return mll.eval()
        for name, _, constraint in self.named_parameters_and_constraints():
            if constraint is not None and not constraint.enforced:
                raise ValueError(
                    f"{name}: got {constraint} without a transform, which Adam does not respect; expected one with a "
                    "transform. Try: fit_gpytorch_mll(mll, optimizer=fit_gpytorch_mll_scipy)"
                )
        self.history = fit(self, **{"steps": 200, "warm_start": True, "progress": False, "mll": mll, **options})
        return mll.eval()


def _check(train_X: Tensor, train_Y: Tensor, input_transform: InputTransform | None) -> None:
    if train_X.dim() != 2:
        raise ValueError(f"train_X: got shape {tuple(train_X.shape)}; expected (N, d): batches are not supported")
    if train_Y.shape != (len(train_X), 1):
        raise ValueError(
            f"train_Y: got shape {tuple(train_Y.shape)}; expected ({len(train_X)}, 1): one outcome. Try: a "
            "ModelListGP of one model per outcome, or outcomes as an axis of codes with an IndexKernel"
        )
    if input_transform is not None and any(parameter.requires_grad for parameter in input_transform.parameters()):
        raise ValueError("input_transform: got parameters to learn; expected a fixed transform, as the grid is fixed")


def _likelihood(variances: Tensor | None) -> GappyGridLikelihood:
    """The likelihood of ``SingleTaskGP``."""
    if variances is not None:
        return GappyGridLikelihood(noise=variances.squeeze(-1), noise_elsewhere=float(variances.mean()))
    noise = get_gaussian_likelihood_with_lognormal_prior().noise_covar
    return GappyGridLikelihood(noise_prior=noise.noise_prior, noise_constraint=_enforced(noise.raw_noise_constraint))


def _enforced(bound: GreaterThan) -> GreaterThan:
    """The same bound and initial value, enforced by a transform. (In BoTorch, the optimizer enforces bounds.)"""
    return GreaterThan(float(bound.lower_bound), initial_value=bound.initial_value)


def _grid_kernel(kernels: Sequence[Kernel] | None, grid: CartesianGrid, groups: Sequence[Sequence[int]]) -> Kernel:
    """The product of the kernels of the axes, by default that of ``SingleTaskGP``."""
    columns = list(chain.from_iterable(groups))
    if kernels is None:
        whole = get_covar_module_with_dim_scaled_prior(ard_num_dims=len(columns))
        kernels = [
            RBFKernel(
                ard_num_dims=len(group),
                lengthscale_prior=deepcopy(whole.lengthscale_prior),
                lengthscale_constraint=_enforced(whole.raw_lengthscale_constraint),
            )
            for group in groups
        ]
    in_order = columns == list(range(len(columns)))
    return GappyGridKernel(kernels, grid, active_dims=None if in_order else columns)
