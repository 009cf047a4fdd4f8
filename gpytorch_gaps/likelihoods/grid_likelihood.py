"""Gaussian noise on a grid: one variance, one per level of an axis, or one per observation."""

from collections.abc import Mapping
from typing import Any

import torch
from gpytorch.constraints import Interval
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.likelihoods.gaussian_likelihood import _GaussianLikelihoodBase
from gpytorch.likelihoods.noise_models import HomoskedasticNoise, MultitaskHomoskedasticNoise, Noise
from gpytorch.priors import Prior
from linear_operator.operators import DiagLinearOperator, LinearOperator, ZeroLinearOperator
from numpy.typing import ArrayLike
from torch import Tensor

from gpytorch_gaps.grid.cartesian import CartesianGrid, first_equal_row, refuse_other_grid, same_values
from gpytorch_gaps.likelihoods.marginal_normal import MarginalNormal
from gpytorch_gaps.likelihoods.noise import GivenNoise
from gpytorch_gaps.operators import SelectedKroneckerDiagOperator
from gpytorch_gaps.operators.inspect import grid_covariance, grid_points, one_member, row_points
from gpytorch_gaps.operators.noisy import NoisyGridOperator
from gpytorch_gaps.posterior.covariance import PosteriorCovarianceOperator


class GappyGridLikelihood(GaussianLikelihood):
    """``y = f + e``, e independent and Gaussian, for a model with a :class:`GappyGridKernel`.

    Evaluates the kernel before it adds the noise, so that what GPyTorch solves with is our operator. Used like
    ``gpytorch.likelihoods.GaussianLikelihood``: ``likelihood(model(x))``, ``mll(output, y)``.

    :param noise: known variances: a number, or one for each observation. Default: learned.
    :param noise_axis: learn one variance for every level of this axis of `grid`, such as one per output or station.
        They whiten into the kernel's factors, so that fill-gaps applies as for one noise.
    :param grid: the grid; needed with `noise_axis`.
    :param noise_prior: of the learned noise.
    :param noise_constraint: of the learned noise. GPyTorch's default keeps it above 1e-4.
    :param batch_shape: of the learned noise, for a batch of models.

    Test points get the noise of their own level or, where variances were given, of the observation in their place;
    at other points ``likelihood(posterior, noise=...)`` says what it is.
    """

    def __init__(
        self,
        noise: ArrayLike | Tensor | None = None,
        noise_axis: int | None = None,
        *,
        grid: CartesianGrid | None = None,
        noise_prior: Prior | None = None,
        noise_constraint: Interval | None = None,
        batch_shape: torch.Size = torch.Size(),  # noqa: B008  # an immutable tuple, as in GPyTorch
    ) -> None:
        learned = {"noise_prior": noise_prior, "noise_constraint": noise_constraint, "batch_shape": batch_shape}
        if noise is not None:
            if noise_axis is not None or noise_prior is not None or noise_constraint is not None:
                raise ValueError("noise: got known variances and options for learned ones; expected one or the other")
            noise_model: Noise = GivenNoise(_variances(noise))
        elif noise_axis is not None:
            noise_model = MultitaskHomoskedasticNoise(_levels(noise_axis, grid), **learned)
        else:
            noise_model = HomoskedasticNoise(**learned)
        _GaussianLikelihoodBase.__init__(self, noise_model)
        self.noise_axis = None if noise_axis is None or grid is None else noise_axis % len(grid.axes)
        self.grid = grid if noise_axis is not None else None

    def _load_from_state_dict(self, state_dict: Mapping[str, Tensor], prefix: str, *args: Any) -> None:
        if self.grid is not None:
            refuse_other_grid(self.grid, state_dict, f"{prefix}grid.")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def get_fantasy_likelihood(self, **kwargs: Any) -> Any:
        """For further observations, with their variances as ``noise=`` where those of the others were given."""
        fantasy = super().get_fantasy_likelihood(**kwargs)
        if not isinstance(self.noise_covar, GivenNoise) or self.noise.size(-1) == 1:
            return fantasy
        if kwargs.get("noise") is None:
            raise ValueError(
                "noise: variances were given for the observations; expected those of the new ones too: "
                "model.get_fantasy_model(x, y, noise=...)"
            )
        new = _variances(kwargs["noise"])
        batch = torch.broadcast_shapes(self.noise.shape[:-1], new.shape[:-1])
        parts = [noise.expand(*batch, noise.size(-1)) for noise in (self.noise, new)]
        fantasy.noise_covar = GivenNoise(torch.cat(parts, -1))
        return fantasy

    # -- the marginal distribution -------------------------------------------------------------------------------------

    def marginal(
        self, function_dist: MultivariateNormal, *params: Any, noise: Tensor | None = None, **kwargs: Any
    ) -> MultivariateNormal:
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
        """For the conditional distribution and expected log-probabilities, which come without a covariance."""
        return self._diagonal(base_shape, None, params, noise)

    def _diagonal(
        self, shape: torch.Size, covariance: LinearOperator | None, params: tuple[Any, ...], noise: Tensor | None
    ) -> DiagLinearOperator:
        if noise is not None:
            number = not torch.is_tensor(noise)
            known = self.noise.new_full((1,), float(noise)) if number else noise
            variances = _variances(known)
            if variances.size(-1) not in (1, shape[-1]):
                came = tuple(variances.shape)
                raise ValueError(f"noise: got shape {came}, expected one variance for each of {shape[-1]} points")
            return DiagLinearOperator(variances.expand(*shape[:-1], shape[-1]))
        if self.noise_axis is not None:
            return self._axis_noise(shape, covariance, params)
        if isinstance(self.noise_covar, GivenNoise) and _is_posterior(covariance):
            return self._given_at_test_points(shape, covariance)
        return self.noise_covar(shape=shape)

    def _axis_noise(
        self, shape: torch.Size, covariance: LinearOperator | None, params: tuple[Any, ...]
    ) -> DiagLinearOperator:
        """One variance per level: ``D = 1 (x) .. (x) D_k (x) .. (x) 1`` at the cells of the observations."""
        assert self.grid is not None
        assert self.noise_axis is not None
        noise = self.noise.expand(*torch.broadcast_shapes(self.noise.shape[:-1], shape[:-1]), self.noise.size(-1))
        found = None if covariance is None else grid_points(covariance)
        points = getattr(covariance, "points", None) if _is_posterior(covariance) else None
        if found is not None:  # the prior, of the observations most of the time
            kernel, x = found
            shared = one_member(x)
            x = x if shared is None else shared
            cells = None if shared is None else kernel.cells_of(shared)
            if cells is not None and all(map(same_values, cells.axes, self.grid.axes)):
                axes = [torch.ones_like(axis[:, 0]).expand(*noise.shape[:-1], -1) for axis in self.grid.axes]
                axes[self.noise_axis] = noise
                return SelectedKroneckerDiagOperator(*axes, index=cells.index)
        elif points is not None:
            x = points.x
        else:
            given = params[0][0] if params and isinstance(params[0], list | tuple) else params[0] if params else None
            if given is None and covariance is not None:
                given = row_points(covariance)  # of a kernel that was not evaluated lazily
            if not torch.is_tensor(given):
                raise ValueError("noise_axis: the points' levels are not known here; expected likelihood(f, x)")
            x = given
        if x.size(-1) != self.grid.num_columns:
            raise ValueError(f"x: got {x.size(-1)} columns, expected the grid's {self.grid.num_columns}")
        axis = self.grid.axes[self.noise_axis]
        columns = self.grid.columns[self.noise_axis]
        level = first_equal_row(axis, x[..., columns])  # shape: (*batch, N)
        if bool((level < 0).any()):
            row = tuple((level < 0).nonzero()[0].tolist())
            raise ValueError(
                f"noise_axis: test point {row[-1]} has {x[row][columns].tolist()} there, a level without a noise of "
                "its own; expected levels of the grid, or noise= in likelihood(posterior, noise=...)"
            )
        batch = torch.broadcast_shapes(noise.shape[:-1], level.shape[:-1])
        return DiagLinearOperator(noise.expand(*batch, -1).gather(-1, level.expand(*batch, -1)))

    def _given_at_test_points(self, shape: torch.Size, covariance: Any) -> DiagLinearOperator:
        """The variance given for the observation in the same place."""
        given = self.noise
        if given.size(-1) == 1:
            return self.noise_covar(shape=shape)
        points = covariance.points
        where = None if points is None else first_equal_row(points.train_x, points.x)
        if where is None or bool((where < 0).any()):
            raise ValueError(
                "noise: variances were given for the observations only, and a test point is not one of them; expected "
                "likelihood(posterior, noise=...) with one for each test point"
            )
        return DiagLinearOperator(given[..., where].expand(*shape[:-1], shape[-1]))


def _is_posterior(covariance: LinearOperator | None) -> bool:
    """Whether it is a posterior's, which knows where its points lie; or nothing in its place."""
    return isinstance(covariance, PosteriorCovarianceOperator | ZeroLinearOperator) and hasattr(covariance, "points")


def _variances(noise: ArrayLike | Tensor) -> Tensor:
    tensor = noise if isinstance(noise, Tensor) else torch.as_tensor(noise)
    if not torch.is_tensor(noise) and (tensor.dim() == 0 or not tensor.is_floating_point()):
        tensor = tensor.to(torch.get_default_dtype())
    tensor = tensor.unsqueeze(-1) if tensor.dim() == 0 else tensor
    if not tensor.is_floating_point() or not bool((tensor > 0).all()) or not bool(tensor.isfinite().all()):
        came = f"{tensor.dtype} with a minimum of {float(tensor.min())}"
        raise ValueError(f"noise: got {came}, expected finite variances above 0")
    return tensor


def _levels(noise_axis: int, grid: CartesianGrid | None) -> int:
    if not isinstance(grid, CartesianGrid):
        raise ValueError("grid: got none, expected the CartesianGrid whose axis noise_axis counts")
    axes = len(grid.axes)
    if not isinstance(noise_axis, int) or not -axes <= noise_axis < axes:
        raise ValueError(f"noise_axis: got {noise_axis!r}, expected an axis of the grid, {-axes} to {axes - 1}")
    return len(grid.axes[noise_axis])
