"""Posterior mean and covariance of an ``ExactGP``, with our solves and tolerances, and without Q x N matrices."""

import math
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import gpytorch
import torch
from gpytorch.distributions import MultitaskMultivariateNormal
from gpytorch.models import ExactGP
from gpytorch.models.exact_prediction_strategies import DefaultPredictionStrategy
from linear_operator.operators import AddedDiagLinearOperator, LinearOperator, ZeroLinearOperator
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

from gpytorch_gaps import settings
from gpytorch_gaps.grid.protocol import GridKernel
from gpytorch_gaps.operators.inspect import GridPoints, grid_covariance, grid_points, on_one_grid, one_member
from gpytorch_gaps.operators.noisy import NoisyGridOperator
from gpytorch_gaps.posterior.covariance import PosteriorCovarianceOperator
from gpytorch_gaps.posterior.last_solutions import LastSolutions
from gpytorch_gaps.posterior.parts import PredictionPoints
from gpytorch_gaps.posterior.train_covariance import has_float64_entries, wide_product
from gpytorch_gaps.solvers.config import SolveConfig
from gpytorch_gaps.utils.precision import full_float32


@contextmanager
def predicting(model: ExactGP, progress: bool) -> Iterator[None]:
    """Puts a model into eval mode. At the end, every submodule returns to its earlier mode.

    :param progress: whether progress bars may be shown, if the settings allow them.
    """
    modes = [(module, module.training) for module in model.modules()]
    training = model.training
    model.eval()
    try:
        with settings.progress(settings.progress.value() and progress):
            yield
    finally:
        model.train(training)  # clears caches that depend on the mode
        for module, mode in modes:
            module.training = mode


class GappyGridPredictionStrategy(DefaultPredictionStrategy):
    """The prediction strategy that ``ExactGP`` uses in eval mode for kernels with a :class:`GappyGridKernel` in them.

    It keeps one solution ``(K_XX + D)^-1 (y - m)`` for each configuration, that is, each method and tolerance. The
    first solve starts from the solution for the previous training data, which the kernel keeps.

    :param train_inputs: inputs of the observations, as in ``ExactGP``.
    :param train_prior_dist: prior distribution of the function at the observations.
    :param train_labels: the observations y, shape (*batch, N).
    :param likelihood: the model's likelihood, which adds the noise D.
    :param before: solutions that the first solve may start from. Default: those of the kernel.
    :param roots: further arguments of GPyTorch's ``DefaultPredictionStrategy``.
    :raises ValueError: for a multitask prior.

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
    >>> mean = model.eval()(grid.points()).mean
    >>> type(model.prediction_strategy).__name__
    'GappyGridPredictionStrategy'
    """

    def __init__(
        self,
        train_inputs: Any,
        train_prior_dist: Any,
        train_labels: Tensor,
        likelihood: Any,
        before: LastSolutions | None = None,
        **roots: Any,
    ) -> None:
        if isinstance(train_prior_dist, MultitaskMultivariateNormal):
            raise ValueError("model: got a multitask prior; expected outputs as an axis of the grid (IndexKernel)")
        super().__init__(train_inputs, train_prior_dist, train_labels, likelihood, **roots)
        if hasattr(likelihood, "check_observations"):
            likelihood.check_observations(train_labels)
        covariance: LinearOperator = self.lik_train_train_covar  # type: ignore[has-type]
        if isinstance(covariance, AddedDiagLinearOperator):  # GPyTorch's likelihoods do not evaluate the kernel
            covariance = grid_covariance(covariance._linear_op) + covariance._diag_tensor
        self.lik_train_train_covar = covariance
        self._solutions: dict[tuple[tuple[Any, ...], bool], Tensor] = {}
        self._before = before

    @property
    def mean_cache(self) -> Tensor:
        """``(K_XX + D)^-1 (y - m)`` in float64, since it is large if the noise is small. shape: (*batch, N)"""
        if gpytorch.settings.observation_nan_policy.value() != "ignore":
            raise ValueError("observation_nan_policy: expected 'ignore': gaps are cells that are not in train_x")
        return self.solution_for(settings.current())

    def solution_for(self, config: SolveConfig) -> Tensor:
        """:attr:`mean_cache` for a given configuration. Each method and tolerance has a solution of its own."""
        key = (config.solution_key, gpytorch.settings.detach_test_caches.on())
        if key not in self._solutions:
            _warn_of_rounding(self.lik_train_train_covar)
            solution = self._solution(config)
            if gpytorch.settings.detach_test_caches.on():
                solution = solution.detach()
            self._solutions[key] = solution
            if solution.grad_fn is not None:
                solution.grad_fn.register_hook(_forgetting(self))
        return self._solutions[key]

    def _solution(self, config: SolveConfig) -> Tensor:
        """The solution. The solve starts from the solution for the previous training data, if the kernel has one."""
        train, found = self.lik_train_train_covar, self._grid_points
        offset = (self.train_labels.double() - self.train_prior_dist.mean.double()).unsqueeze(-1)
        if not isinstance(train, NoisyGridOperator):
            return train.solve(offset.to(train.dtype)).squeeze(-1)
        if found is None:
            return train.solve(offset, of_data=True, config=config).squeeze(-1)
        kernel, x = found
        known = self._before or kernel.solutions
        guess = known.start(config.solution_key, kernel.grid, x, offset.shape[:-2])
        guess = None if guess is None else guess.unsqueeze(-1)
        solution = train.solve(offset, guess=guess, of_data=True, config=config).squeeze(-1)
        kernel.solutions.keep(config.solution_key, x, solution)
        return solution

    @property
    def _grid_points(self) -> tuple[GridKernel, Tensor] | None:
        """The grid kernel, and the observations' coordinates in its columns."""
        found = grid_points(self.train_prior_dist.lazy_covariance_matrix)
        if found is None or found.kernel is None:
            return None
        x = one_member(found.x)
        return None if x is None else (found.kernel, x)

    @full_float32()
    def exact_prediction(
        self, test_mean: Tensor, test_test_covar: LinearOperator, test_train_covar: LinearOperator
    ) -> tuple[Tensor, LinearOperator]:
        """Posterior mean, shape (*batch, Q), and a lazy covariance, which is computed when it is read."""
        cross = grid_covariance(test_train_covar)
        mean = test_mean + wide_product(cross, self.mean_cache.unsqueeze(-1)).squeeze(-1).to(test_mean.dtype)
        if gpytorch.settings.skip_posterior_variances.on():
            nothing = ZeroLinearOperator(*test_test_covar.size(), dtype=mean.dtype, device=mean.device)
            nothing.points = self._test_points(cross)  # the likelihood needs the points to add noise
            return mean, nothing
        train = self.lik_train_train_covar
        if gpytorch.settings.detach_test_caches.on():
            # linear_operator's own detach copies tensors, and caches for them would be lost
            train = train.representation_tree()(*(tensor.detach() for tensor in train.representation()))
        return mean, PosteriorCovarianceOperator(test_test_covar, cross, train, points=self._test_points(cross))

    def _test_points(self, cross: LinearOperator) -> PredictionPoints | None:
        """The test points, if they are known: the noise of some likelihoods depends on them."""
        rows, found = grid_points(cross), self._grid_points
        if rows is None or found is None or not on_one_grid(self.train_prior_dist.lazy_covariance_matrix):
            return None
        kernel, train_x = found
        return PredictionPoints(rows.x, train_x, GridPoints(rows.x, kernel).cells_on(kernel.grid))

    def get_fantasy_strategy(
        self, inputs: Any, targets: Tensor, full_inputs: Any, full_targets: Tensor, full_output: Any, **kwargs: Any
    ) -> "GappyGridPredictionStrategy":
        """The strategy with further observations. Its exact solve starts from the solution without them."""
        likelihood = self.likelihood.get_fantasy_likelihood(**kwargs)
        found = self._grid_points
        return type(self)(
            full_inputs, full_output, full_targets, likelihood, before=None if found is None else found[0].solutions
        )


def _forgetting(strategy: GappyGridPredictionStrategy) -> Callable[..., None]:
    """A hook that clears the solutions of a strategy: their graph can be used for one backward pass only.

    It has a weak reference to the strategy. The garbage collector does not follow the hooks of a graph, so that a
    strong reference would make a cycle that is never freed: strategy, solution, graph, hook.
    """
    found = weakref.ref(strategy)

    def forget(*_: Any) -> None:
        owner = found()
        if owner is not None:
            owner._solutions.clear()

    return forget


def _warn_of_rounding(covariance: LinearOperator) -> None:
    """Warns if rounding of the kernel to float32 may change predictions. Grid kernels are evaluated in float64.

    The relative change is about ``0.1 eps sqrt(N) k(x, x) / s2``, as for independent roundings. Factors of 0.06 to 0.12
    were measured in place of 0.1.
    """
    if not isinstance(covariance, AddedDiagLinearOperator) or has_float64_entries(covariance._linear_op):
        return
    kernel, noise = covariance._linear_op._diagonal().detach(), covariance._diag_tensor._diagonal().detach()
    ratio = float((kernel.double() / noise.double()).max())
    moved = 0.1 * torch.finfo(torch.float32).eps * math.sqrt(covariance.size(-1)) * ratio
    if moved > 5e-5:
        warnings.warn(
            "the kernel is rounded to float32, and the noise is so small in comparison that predictions may change by "
            f"about {moved:.0e} of their size. Try: model.double(), with float64 data.",
            NumericalWarning,
            stacklevel=2,
        )
