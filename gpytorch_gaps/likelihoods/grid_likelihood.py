"""Gaussian noise on a grid: one variance, one per level of an axis, or one per observation."""

from collections.abc import Mapping
from typing import Any

import gpytorch
import torch
from gpytorch.constraints import Interval
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from gpytorch.likelihoods.noise_models import HomoskedasticNoise, MultitaskHomoskedasticNoise, Noise
from gpytorch.models import ExactGP
from gpytorch.priors import Prior
from linear_operator.operators import DiagLinearOperator, LinearOperator, ZeroLinearOperator
from numpy.typing import ArrayLike
from torch import Tensor

from gpytorch_gaps.grid.cartesian import CartesianGrid, refuse_other_grid
from gpytorch_gaps.likelihoods.gross_errors import GrossErrors, find_gross_errors
from gpytorch_gaps.likelihoods.marginal import MarginalNormal
from gpytorch_gaps.likelihoods.noise import GivenNoise, as_variances
from gpytorch_gaps.operators import SelectedKroneckerDiagOperator
from gpytorch_gaps.operators.inspect import GridPoints, grid_covariance, grid_points
from gpytorch_gaps.operators.noisy import NoisyGridOperator
from gpytorch_gaps.posterior.covariance import PosteriorCovarianceOperator
from gpytorch_gaps.posterior.strategy import predicting
from gpytorch_gaps.utils.tensors import first_equal_row


class GappyGridLikelihood(GaussianLikelihood):
    """Gaussian likelihood ``y = f + e`` with independent noise e, for a model with a :class:`GappyGridKernel`.

    Use it like ``gpytorch.likelihoods.GaussianLikelihood``: ``likelihood(model(x))``, ``mll(output, y)``. It evaluates
    the kernel before it adds the noise, so that GPyTorch solves with the operators of this package.

    The noise at a test point is that of its level on `noise_axis`. If variances were given for all observations, it is
    that of the observation at the same point. For other test points, pass `noise_elsewhere`, or use
    ``likelihood(posterior, noise=...)``.

    :param noise: known variances: one number, or one for each observation. Default: the noise is learned.
    :param noise_elsewhere: the variance at test points without an observation, if `noise` has one per observation.
    :param noise_axis: learn one variance for every level of this axis of `grid`, such as one per output or station.
        The fill-gaps method applies as for a single variance.
    :param grid: the grid; required with `noise_axis`.
    :param noise_prior: prior of the learned noise.
    :param noise_constraint: constraint of the learned noise. GPyTorch's default keeps it above 1e-4.
    :param batch_shape: batch shape of the learned noise, for a batch of models.
    :param robust: whether some observations may have gross errors. Each of these gets an additional variance of its
        own. :meth:`weigh` finds them; :func:`fit` calls it. New observations are predicted without gross errors.
        Batches of models are not supported.
    :raises ValueError: if variances are not finite and above 0, if options for given and learned noise are combined, or
        if `noise_axis` is not an axis of `grid`.

    >>> GappyGridLikelihood().noise.shape
    torch.Size([1])
    >>> GappyGridLikelihood(noise=0.01).noise
    tensor([0.0100])
    >>> stations = CartesianGrid([range(100), range(3)])
    >>> GappyGridLikelihood(noise_axis=1, grid=stations).noise.shape  # one per station
    torch.Size([3])
    """

    def __init__(
        self,
        noise: ArrayLike | Tensor | None = None,
        noise_axis: int | None = None,
        *,
        noise_elsewhere: float | None = None,
        grid: CartesianGrid | None = None,
        noise_prior: Prior | None = None,
        noise_constraint: Interval | None = None,
        batch_shape: torch.Size = torch.Size(),  # noqa: B008  # an immutable tuple, as in GPyTorch
        robust: bool = False,
    ) -> None:
        if not isinstance(robust, bool) or (robust and len(batch_shape)):
            came = f"a batch of shape {tuple(batch_shape)}" if len(batch_shape) else repr(robust)
            raise ValueError(f"robust: got {came}, expected True, for one model, or False")
        learned = {"noise_prior": noise_prior, "noise_constraint": noise_constraint, "batch_shape": batch_shape}
        if noise is not None:
            if noise_axis is not None or noise_prior is not None or noise_constraint is not None:
                raise ValueError("noise: got known variances and options for learned ones; expected one or the other")
            noise_model: Noise = GivenNoise(as_variances(noise))
        elif noise_axis is not None:
            noise_model = MultitaskHomoskedasticNoise(_num_levels(noise_axis, grid), **learned)
        else:
            noise_model = HomoskedasticNoise(**learned)
        _GaussianLikelihoodBase.__init__(self, noise_model)
        self.noise_axis = None if noise_axis is None or grid is None else noise_axis % len(grid.axes)
        self.grid = grid if noise_axis is not None else None
        self.noise_elsewhere = noise_elsewhere
        self.gross_errors = GrossErrors() if robust else None

    def _load_from_state_dict(self, state_dict: Mapping[str, Tensor], prefix: str, *args: Any) -> None:
        if self.grid is not None:
            refuse_other_grid(self.grid, state_dict, f"{prefix}grid.")
        super()._load_from_state_dict(state_dict, prefix, *args)

    # -- gross errors ------------------------------------------------------------------------------------------------

    def weigh(self, model: ExactGP) -> Tensor:
        """Finds the observations with gross errors, with the current hyperparameters, for ``robust=True``.

        The variances are part of the ``state_dict`` and do not change until the next call. In a training loop of your
        own, call this before the first step and about every ten steps; :func:`fit` does this itself. Call it again
        after ``set_train_data``.

        :param model: the model of this likelihood, with its training data.
        :return: :attr:`distrusted`.
        :raises ValueError: if the likelihood is not robust, is not that of the model, or the model is a batch.

        >>> import gpytorch, torch, gpytorch_gaps as gaps
        >>> class Model(gpytorch.models.ExactGP):
        ...     def __init__(self, x, y, grid):
        ...         super().__init__(x, y, gaps.GappyGridLikelihood(robust=True))
        ...         self.mean_module = gpytorch.means.ZeroMean()
        ...         self.covar_module = gaps.GappyGridKernel([gpytorch.kernels.RBFKernel()], grid)
        ...     def forward(self, x):
        ...         return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
        >>> values = torch.linspace(0, 6, 50).sin()
        >>> values[31] = 40.0
        >>> grid, x, y = gaps.from_array(values)
        >>> model = Model(x, y, grid)
        >>> x[model.likelihood.weigh(model)]
        tensor([[31.]])
        """
        gross = self._own_gross_errors()
        if getattr(model, "likelihood", None) is not self:
            raise ValueError("model: got a model with another likelihood, expected the model of this likelihood")
        if model.train_targets is None or model.train_targets.dim() != 1:
            came = "none" if model.train_targets is None else f"shape {tuple(model.train_targets.shape)}"
            raise ValueError(f"model: train_targets: got {came}, expected observations of shape (N,)")
        with predicting(model, progress=False), gpytorch.settings.prior_mode(True), torch.no_grad():
            prior = model(*model.train_inputs)
            noise = self._noise(prior.mean.shape, prior.lazy_covariance_matrix, (), None)._diagonal()
        find_gross_errors(model, gross, noise)
        return self.distrusted

    @property
    def distrusted(self) -> Tensor:
        """Flags of the observations with gross errors, for a robust likelihood. shape: (N,)"""
        return self._own_gross_errors().variance > 0

    def check_observations(self, observations: Tensor) -> None:
        """Raises a ValueError if gross errors were found for other observations than these."""
        if self.gross_errors is not None:
            self.gross_errors.check(observations)

    def _own_gross_errors(self) -> GrossErrors:
        if self.gross_errors is None:
            raise ValueError("robust: got False, expected a GappyGridLikelihood(robust=True)")
        return self.gross_errors

    def get_fantasy_likelihood(self, **kwargs: Any) -> Any:
        """The likelihood for a model with further observations. These have no gross errors until :meth:`weigh`.

        :param kwargs: ``noise``, the variances of the further observations, if `noise` has one per observation.
        :return: the likelihood.
        :raises ValueError: if ``noise`` is missing.
        """
        fantasy = super().get_fantasy_likelihood(**kwargs)
        if fantasy.gross_errors is not None:
            fantasy.gross_errors.accepts_further = True
        if not isinstance(self.noise_covar, GivenNoise) or self.noise.size(-1) == 1:
            return fantasy
        if kwargs.get("noise") is None:
            raise ValueError(
                "noise: variances were given for the observations; expected those of the new ones too: "
                "model.get_fantasy_model(x, y, noise=...)"
            )
        new = as_variances(kwargs["noise"])
        batch = torch.broadcast_shapes(self.noise.shape[:-1], new.shape[:-1])
        parts = [noise.expand(*batch, noise.size(-1)) for noise in (self.noise, new)]
        fantasy.noise_covar = GivenNoise(torch.cat(parts, -1))
        return fantasy

    def marginal(
        self, function_dist: MultivariateNormal, *params: Any, noise: Tensor | None = None, **kwargs: Any
    ) -> MultivariateNormal:
        """Distribution of noisy observations.

        :param function_dist: distribution of the latent function.
        :param params: the points, as in ``likelihood(f, x)``, if `function_dist` does not contain them.
        :param noise: variances to use instead of the likelihood's: a number, or one for each point.
        :return: the distribution with noise.
        :raises ValueError: if the noise has another precision than the mean, or is not known at a point.
        """
        covariance = function_dist.lazy_covariance_matrix
        diagonal = self._diagonal(function_dist.mean.shape, covariance, params, noise)
        if diagonal.dtype != function_dist.mean.dtype:
            raise ValueError(
                f"noise: is {diagonal.dtype}, the model's mean {function_dist.mean.dtype}; expected the same: "
                f"model.to({function_dist.mean.dtype}) casts a model with its likelihood"
            )
        noisy = grid_covariance(covariance) + diagonal
        plain = type(function_dist) is MultivariateNormal and isinstance(noisy, NoisyGridOperator)
        return (MarginalNormal if plain else type(function_dist))(function_dist.mean, noisy)

    def _shaped_noise_covar(
        self, base_shape: torch.Size, *params: Any, noise: Tensor | None = None, **kwargs: Any
    ) -> DiagLinearOperator:
        """GPyTorch calls this for conditional distributions and expected log-probabilities, without a covariance."""
        return self._diagonal(base_shape, None, params, noise)

    def _diagonal(
        self, shape: torch.Size, covariance: LinearOperator | None, params: tuple[Any, ...], noise: Tensor | None
    ) -> DiagLinearOperator:
        """The covariance of noise and gross errors, for points of the batch shape and number in `shape`."""
        diagonal = self._noise(shape, covariance, params, noise)
        if self.gross_errors is None or noise is not None or covariance is None or _is_posterior(covariance):
            return diagonal
        gross = self.gross_errors.variances(shape)
        return diagonal if gross is None else DiagLinearOperator(diagonal._diagonal() + gross)

    def _noise(
        self, shape: torch.Size, covariance: LinearOperator | None, params: tuple[Any, ...], noise: Tensor | None
    ) -> DiagLinearOperator:
        """The noise covariance, for points of the batch shape and number in `shape`."""
        if noise is not None:
            variances = as_variances(noise if torch.is_tensor(noise) else self.noise.new_full((1,), float(noise)))
            if variances.size(-1) not in (1, shape[-1]):
                came = tuple(variances.shape)
                raise ValueError(f"noise: got shape {came}, expected one variance for each of {shape[-1]} points")
            return DiagLinearOperator(variances.expand(*shape[:-1], shape[-1]))
        if self.noise_axis is not None:
            return self._axis_noise(self.noise_axis, shape, _points(covariance, params))
        if isinstance(self.noise_covar, GivenNoise) and _is_posterior(covariance):
            return self._given_at_test_points(shape, covariance)
        return self.noise_covar(shape=shape)

    def _axis_noise(self, noise_axis: int, shape: torch.Size, points: GridPoints) -> DiagLinearOperator:
        """One variance per level: ``D = I ⊗ .. ⊗ D_k ⊗ .. ⊗ I`` at the cells of the points."""
        assert self.grid is not None
        noise = self.noise.expand(*torch.broadcast_shapes(self.noise.shape[:-1], shape[:-1]), self.noise.size(-1))
        cells = points.cells_on(self.grid)
        if cells is not None:  # structured, for the covariance of the observations
            axes = [torch.ones_like(axis[:, 0]).expand(*noise.shape[:-1], -1) for axis in self.grid.axes]
            axes[noise_axis] = noise
            return SelectedKroneckerDiagOperator(*axes, index=cells)
        x, columns = points.x, self.grid.columns[noise_axis]
        if x.size(-1) != self.grid.num_columns:
            raise ValueError(f"x: got {x.size(-1)} columns, expected the grid's {self.grid.num_columns}")
        level = first_equal_row(self.grid.axes[noise_axis], x[..., columns])  # shape: (*batch, N)
        if bool((level < 0).any()):
            row = tuple((level < 0).nonzero()[0].tolist())
            raise ValueError(
                f"noise_axis: got {x[row][columns].tolist()} at test point {row[-1]}, which has no noise; expected "
                "levels of the grid, or noise= in likelihood(posterior, noise=...)"
            )
        batch = torch.broadcast_shapes(noise.shape[:-1], level.shape[:-1])
        return DiagLinearOperator(noise.expand(*batch, -1).gather(-1, level.expand(*batch, -1)))

    def _given_at_test_points(self, shape: torch.Size, covariance: Any) -> DiagLinearOperator:
        """The given variance of the observation at each test point."""
        given = self.noise
        if given.size(-1) == 1:
            return self.noise_covar(shape=shape)
        points = covariance.points
        where = None if points is None else first_equal_row(points.train_x, points.x)
        if where is not None and self.noise_elsewhere is not None:
            known = given[..., where.clamp_min(0)]
            variances = torch.where(where < 0, torch.full_like(known, self.noise_elsewhere), known)
            return DiagLinearOperator(variances.expand(*shape[:-1], shape[-1]))
        if where is None or bool((where < 0).any()):
            raise ValueError(
                "noise: got variances for the observations only, and a test point without an observation; expected "
                "likelihood(posterior, noise=...) with one variance for each test point"
            )
        return DiagLinearOperator(given[..., where].expand(*shape[:-1], shape[-1]))


def _points(covariance: LinearOperator | None, params: tuple[Any, ...]) -> GridPoints:
    """The points of a distribution: those of its covariance, or else those passed to the likelihood."""
    found = None if covariance is None else grid_points(covariance)
    if found is not None:
        return found
    if _is_posterior(covariance) and covariance.points is not None:  # type: ignore[union-attr]
        return GridPoints(covariance.points.x)  # type: ignore[union-attr]
    given = params[0][0] if params and isinstance(params[0], list | tuple) else params[0] if params else None
    if not torch.is_tensor(given):
        raise ValueError("noise_axis: got a distribution without its points, expected likelihood(f, x)")
    return GridPoints(given)


def _is_posterior(covariance: LinearOperator | None) -> bool:
    """Whether it is the covariance of a posterior, or the zero operator in place of it. Both have `points`."""
    return isinstance(covariance, PosteriorCovarianceOperator | ZeroLinearOperator) and hasattr(covariance, "points")


def _num_levels(noise_axis: int, grid: CartesianGrid | None) -> int:
    if not isinstance(grid, CartesianGrid):
        raise ValueError("grid: got none, expected the CartesianGrid whose axis noise_axis counts")
    axes = len(grid.axes)
    if not isinstance(noise_axis, int) or not -axes <= noise_axis < axes:
        raise ValueError(f"noise_axis: got {noise_axis!r}, expected an axis of the grid, {-axes} to {axes - 1}")
    return len(grid.axes[noise_axis])
