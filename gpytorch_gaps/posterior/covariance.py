"""``K_** - K_*X (K_XX + D)^-1 K_X*``: the covariance of a posterior. Only what is needed is computed."""

from typing import Any

import torch
from linear_operator import to_dense
from linear_operator.operators import AddedDiagLinearOperator, DiagLinearOperator, LinearOperator
from linear_operator.utils.getitem import _equal_indices
from linear_operator.utils.memoize import cached
from torch import Tensor

from gpytorch_gaps import settings
from gpytorch_gaps.autograd.kernel_root import directions, kernel_root
from gpytorch_gaps.posterior.joint_draws import normal_columns
from gpytorch_gaps.posterior.parts import PosteriorParts, PredictionPoints
from gpytorch_gaps.posterior.pathwise import pathwise_draws
from gpytorch_gaps.posterior.variance import posterior_variance
from gpytorch_gaps.reports import also_record_to, one_report
from gpytorch_gaps.solvers.config import SolveConfig
from gpytorch_gaps.utils.precision import full_float32

_FEW_POINTS = 8  # draws at so few points use a dense root: it takes one solve per point


class PosteriorCovarianceOperator(LinearOperator):
    """The posterior covariance ``K_** - K_*X (K_XX + D)^-1 K_X*`` of Q points, given N observations.

    ``model(x).lazy_covariance_matrix`` is one. Its diagonal is computed by ``settings.variance_method``. Draws are
    draws of the prior, conditioned on the data. No matrix of size Q x N is stored. The operator keeps the configuration
    of its creation, and reports to the records that were active then.

    :param prior: K_**, evaluated or lazy, shape (*batch, Q, Q).
    :param cross: K_*X, shape (*batch, Q, N).
    :param train: K_XX + D, shape (*batch, N, N).
    :param config: configuration of the solves. Default: the current settings.
    :param points: coordinates and cells of the Q points.

    >>> from linear_operator.operators import DenseLinearOperator
    >>> prior, cross, train = (DenseLinearOperator(torch.tensor([[value]])) for value in (1.0, 1.0, 2.0))
    >>> PosteriorCovarianceOperator(prior, cross, train).diagonal()
    tensor([0.5000])
    """

    def __init__(
        self,
        prior: LinearOperator,
        cross: LinearOperator,
        train: LinearOperator,
        config: SolveConfig | None = None,
        points: PredictionPoints | None = None,
    ) -> None:
        config = config or settings.current()
        batch = torch.broadcast_shapes(prior.batch_shape, cross.batch_shape, train.batch_shape)
        prior, cross, train = (
            op if op.batch_shape == batch else op.expand(*batch, *op.matrix_shape) for op in (prior, cross, train)
        )
        super().__init__(prior, cross, train, config=config, points=points)
        self.parts, self.config = PosteriorParts(prior, cross, train, config, points), config

    def in_current_settings(self) -> "PosteriorCovarianceOperator":
        """The same covariance, computed with the current settings."""
        parts = self.parts
        return PosteriorCovarianceOperator(parts.prior, parts.cross, parts.train, points=parts.points)

    @property
    def points(self) -> PredictionPoints | None:
        return self.parts.points

    @property
    def dtype(self) -> torch.dtype:
        return self.parts.dtype

    @property
    def device(self) -> torch.device:
        return self.parts.train.device

    def _size(self) -> torch.Size:
        return self.parts.prior.shape

    def _transpose_nonbatch(self) -> "PosteriorCovarianceOperator":
        # its value is symmetric, but the gradient of the prior must be transposed
        parts = self.parts
        return PosteriorCovarianceOperator(parts.prior.mT, parts.cross, parts.train, self.config, self.points)

    def __add__(self, other: Any) -> LinearOperator | Tensor:
        if isinstance(other, DiagLinearOperator):
            return NoisyPosteriorCovarianceOperator(self, other)
        return super().__add__(other)

    @full_float32()
    def _matmul(self, rhs: Tensor) -> Tensor:
        columns = rhs.unsqueeze(-1) if rhs.dim() == 1 else rhs
        parts = self.parts
        with also_record_to(self.config.records):
            result = parts.prior @ columns - parts.cross @ parts.observed.solve(parts.cross.mT @ columns)
        return result.squeeze(-1) if rhs.dim() == 1 else result

    @cached(name="posterior_variance")
    @full_float32()
    def _diagonal(self) -> Tensor:
        with also_record_to(self.config.records):
            return posterior_variance(self.parts)

    @full_float32()
    def variance_and_draws(self) -> tuple[Tensor, Tensor | None]:
        """The variances, and the draws that they are estimated from.

        :return: variances, shape (*batch, Q), and draws minus the mean, shape (n, *batch, Q). None in place of draws
            if variances are exact, or if the points were processed in several parts with separate draws.
        """
        made: list[Tensor] = []
        with also_record_to(self.config.records):
            variance = posterior_variance(self.parts, made)
        return variance, made[0].movedim(-1, 0) if len(made) == 1 else None

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        simple = all(isinstance(index, slice) or index.dim() == 1 for index in (row_index, col_index))
        if not simple or not _equal_indices(row_index, col_index):
            return super()._getitem(row_index, col_index, *batch_indices)
        part = self.parts.at(row_index, *batch_indices)
        return PosteriorCovarianceOperator(part.prior, part.cross, part.train, self.config, part.points)

    @cached
    @full_float32()
    def to_dense(self) -> Tensor:
        parts, prior = self.parts, to_dense(self.parts.prior)
        with also_record_to(self.config.records):
            if parts.num_points > parts.columns_at_once() and not parts.differentiated:
                return prior - parts.explained_covariance()
            columns = to_dense(parts.cross).mT
            variances = prior.diagonal(dim1=-2, dim2=-1).detach()
            weights = parts.observed.solve_for_variances(columns, variances, parts.num_points)[0].to(self.dtype)
            # a'G - a'Aa / 2 and its transpose: A is symmetric, so its gradient is made symmetric
            half = weights.mT @ (columns - 0.5 * (parts.train @ weights))
            return prior - (half + half.mT)

    # -- draws -------------------------------------------------------------------------------------------------------

    @full_float32()
    def zero_mean_mvn_samples(
        self, num_samples: int, generator: torch.Generator | None = None, noise: Tensor | None = None
    ) -> Tensor:
        """Exact, reparametrized draws: conditioned draws of the prior or, at a few points, draws by a dense root.

        The choice depends only on the points, so that the first draws do not depend on the number of draws.

        :param num_samples: the number of draws.
        :param generator: source of the random numbers; default: torch's global random state.
        :param noise: variances of noise to add, shape (*batch, Q).
        :return: shape (num_samples, *batch, Q).
        """
        with also_record_to(self.config.records):
            if 0 < self.size(-1) <= _FEW_POINTS:
                root = self._dense_root().to(self.dtype)
                normals, white = normal_columns([self.size(-1)] * 2, num_samples, self, generator)
                draws = root @ (directions(root).mT @ normals)
                draws = draws if noise is None else draws + noise.sqrt().unsqueeze(-1) * white
            else:
                with one_report():
                    pieces = pathwise_draws(self.parts, num_samples, generator, noise=noise)
                    draws = torch.cat([deviation for deviation, _ in pieces], -1)
        return draws.movedim(-1, 0)

    @cached(name="dense_root")
    def _dense_root(self) -> Tensor:
        return kernel_root(self.to_dense())[0]

    def root_decomposition(self, method: str | None = None) -> LinearOperator:
        """A root by Cholesky for all sizes: a Lanczos root loses a third of the variance."""
        return super().root_decomposition(method=method or "cholesky")


class NoisyPosteriorCovarianceOperator(AddedDiagLinearOperator):
    """``K_** - K_*X (K_XX + D)^-1 K_X* + D_*``: the posterior covariance of new observations, with their noise.

    ``likelihood(model(x)).lazy_covariance_matrix`` is one. Variances and draws are those of the posterior plus noise.
    Like any ``AddedDiagLinearOperator``, it is a sum: a :class:`PosteriorCovarianceOperator` plus a diagonal operator.

    >>> from linear_operator.operators import DenseLinearOperator, DiagLinearOperator
    >>> prior, cross, train = (DenseLinearOperator(torch.tensor([[value]])) for value in (1.0, 1.0, 2.0))
    >>> noisy = PosteriorCovarianceOperator(prior, cross, train) + DiagLinearOperator(torch.tensor([0.25]))
    >>> type(noisy).__name__, noisy.diagonal()
    ('NoisyPosteriorCovarianceOperator', tensor([0.7500]))
    """

    def __add__(self, other: Any) -> LinearOperator | Tensor:
        if isinstance(other, DiagLinearOperator):
            return type(self)(self._linear_op, self._diag_tensor + other)
        return super().__add__(other)

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        function = self._linear_op._getitem(row_index, col_index, *batch_indices)
        if isinstance(function, PosteriorCovarianceOperator):  # the same points as rows and as columns
            noise = self._diag_tensor._diagonal()[(*batch_indices, row_index)]
            return type(self)(function, DiagLinearOperator(noise))
        return LinearOperator._getitem(self, row_index, col_index, *batch_indices)  # otherwise, a plain block

    def zero_mean_mvn_samples(self, num_samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws of the posterior plus draws of the noise. shape: (num_samples, *batch, Q)"""
        posterior: PosteriorCovarianceOperator = self._linear_op
        return posterior.zero_mean_mvn_samples(num_samples, generator, noise=self._diag_tensor._diagonal())

    def root_decomposition(self, method: str | None = None) -> LinearOperator:
        """A root by Cholesky for all sizes."""
        return super().root_decomposition(method=method or "cholesky")
