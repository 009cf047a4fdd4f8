"""Joint draws of a posterior at any points, in the units of the data."""

from numbers import Integral

import torch
from gpytorch.models import ExactGP
from linear_operator.operators import LinearOperator
from torch import Tensor

from gpytorch_gaps.grid.cartesian import CartesianGrid
from gpytorch_gaps.posterior.covariance import NoisyPosteriorCovarianceOperator, PosteriorCovarianceOperator
from gpytorch_gaps.posterior.strategy import predicting


def sample_posterior(
    model: ExactGP,
    x: Tensor | CartesianGrid,
    num_samples: int = 1,
    *,
    noise: bool = False,
    seed: int | None = None,
    progress: bool = True,
) -> Tensor:
    """Exact joint draws from a model's posterior: of the function, or of new observations of it.

    Draws of the prior are conditioned on the data. This takes one solve per draw for any number of points, or one solve
    per point if there are fewer points than draws. At a few points, draws come from their dense covariance. With the
    same seed, the first draws do not depend on ``num_samples``. Draws are reparametrized, so that gradients flow
    through them. For the full gradient in the hyperparameters, use ``gpytorch.settings.detach_test_caches(False)``.

    :param model: a model with training data and a :class:`GappyGridKernel` in its covariance.
    :param x: points, shape (*batch, Q, D), or a grid with the columns of the training data.
    :param num_samples: the number of draws.
    :param noise: whether to add the likelihood's noise.
    :param seed: seed of the draws; default: torch's global random state.
    :param progress: whether to show a progress bar after a few seconds.
    :return: shape (num_samples, *batch, Q), or (num_samples, *batch, *grid.shape) for a grid.
    :raises ValueError: if an argument is of the wrong type or range, if `x` has other columns than the training data,
        or if the model has no training data or no :class:`GappyGridKernel`.

    >>> import gpytorch, gpytorch_gaps as gaps
    >>> class Model(gpytorch.models.ExactGP):
    ...     def __init__(self, x, y, grid):
    ...         super().__init__(x, y, gaps.GappyGridLikelihood())
    ...         self.mean_module = gpytorch.means.ZeroMean()
    ...         self.covar_module = gaps.GappyGridKernel([gpytorch.kernels.RBFKernel() for _ in range(2)], grid)
    ...
    ...     def forward(self, x):
    ...         return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
    >>> grid, x, y = gaps.from_array(torch.tensor([[1.0, torch.nan, 0.3], [0.5, 0.0, 0.1]]))
    >>> model = Model(x, y, grid)
    >>> gaps.sample_posterior(model, grid, 5, seed=0).shape
    torch.Size([5, 2, 3])
    """
    if not isinstance(model, ExactGP):
        raise ValueError(f"sample_posterior: model: got {type(model).__name__}, expected a gpytorch.models.ExactGP")
    if not isinstance(num_samples, Integral) or isinstance(num_samples, bool) or num_samples < 1:
        raise ValueError(f"sample_posterior: num_samples: got {num_samples!r}, expected an integer above 0")
    if seed is not None and (not isinstance(seed, Integral) or isinstance(seed, bool)):
        raise ValueError(f"sample_posterior: seed: got {seed!r}, expected an integer or None")
    if not isinstance(x, Tensor | CartesianGrid):
        raise ValueError(f"sample_posterior: x: got {type(x).__name__}, expected a tensor of points or a CartesianGrid")
    if model.train_inputs is None:
        raise ValueError("sample_posterior: model: got no training data, expected some; set_train_data sets it")
    shape = x.shape if isinstance(x, CartesianGrid) else None
    points = x.points() if isinstance(x, CartesianGrid) else x
    columns = model.train_inputs[0].size(-1)
    if points.size(-1) != columns:
        raise ValueError(
            f"sample_posterior: x: got {points.size(-1)} columns, expected {columns}, as the training data"
        )
    with predicting(model, progress):
        posterior = model(points)
        if noise:
            posterior = model.likelihood(posterior)
        generator = None if seed is None else torch.Generator(device=posterior.mean.device).manual_seed(int(seed))
        deviations = _draws_of(posterior.lazy_covariance_matrix).zero_mean_mvn_samples(int(num_samples), generator)
    samples = posterior.mean + deviations
    return samples if shape is None else samples.unflatten(-1, shape)


def _draws_of(covariance: LinearOperator) -> PosteriorCovarianceOperator | NoisyPosteriorCovarianceOperator:
    if isinstance(covariance, PosteriorCovarianceOperator | NoisyPosteriorCovarianceOperator):
        return covariance
    raise ValueError(
        f"sample_posterior: model: got a posterior covariance of class {type(covariance).__name__}, expected a model "
        "whose covar_module has a GappyGridKernel in it. Try: posterior.rsample()"
    )
