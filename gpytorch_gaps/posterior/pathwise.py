"""Draws of a posterior by conditioning draws of the prior: ``f_* - K_*X A^-1 (f_X + e)``, ``A = K_XX + D``.

Here f is a joint draw of the prior at observations and test points, and e a draw of the noise. The result has mean zero
and exactly the covariance ``K_** - K_*X A^-1 K_X*``. It takes one solve per draw, for any number of points. If there
are more draws than points, ``A^-1 K_X*`` is computed instead, with one solve per point. This gives the same draws.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from gpytorch_gaps.posterior.joint_draws import JointDraws, normal_columns
from gpytorch_gaps.posterior.parts import PosteriorParts, chunks
from gpytorch_gaps.posterior.train_covariance import wide_product
from gpytorch_gaps.utils.precision import full_float32


class ConditionedDraws(NamedTuple):
    """Draws of noisy observations and of the function at test points, and the part explained by the observations."""

    observed: Tensor  # y, shape (*batch, N, n)
    tested: Tensor  # f_*, shape (*batch, Q, n)
    explained: Tensor  # K_*X a, a close to A^-1 y, shape (*batch, Q, n)
    residual: Tensor | None  # y - A a in float64; None if it is not known. shape (*batch, N, n)
    white: Tensor  # standard normal numbers for noise, shape (*batch, Q, n)


@full_float32()
def pathwise_draws(
    parts: PosteriorParts,
    count: int,
    generator: torch.Generator | None = None,
    what: str = "samples",
    noise: Tensor | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Deviations from the posterior mean, and the explained parts of the draws, a few draws at a time.

    Deviations have the covariance of the posterior. The explained parts have that of the mean, and are independent of
    the deviations. The first draws do not depend on the number of draws. Draws of the function do not depend on whether
    noise is added.

    :param noise: variances of noise to add to the deviations, shape (*batch, Q).
    :return: shape (*batch, Q, n) each.
    """
    for draws in conditioned_draws(parts, count, generator, what):
        explained = draws.explained.to(draws.tested.dtype)
        deviation = draws.tested - explained
        yield deviation if noise is None else deviation + noise.sqrt().unsqueeze(-1) * draws.white, explained


@full_float32()
def conditioned_draws(
    parts: PosteriorParts,
    count: int,
    generator: torch.Generator | None = None,
    what: str = "samples",
) -> Iterator[ConditionedDraws]:
    """Draws of the prior and their explained parts, a few draws at a time.

    Without gradients, explained parts are in float64, and the residuals of the solves are known.
    """
    joint = JointDraws(parts.prior.evaluate_kernel(), parts.cross, parts.train, parts.cells, parts.config.memory)
    size = parts.columns_at_once(2 * joint.size + 8 * parts.prior.shape[:-1].numel())
    weights = parts.solve_covariances() if _fewer_points(parts, count) else None  # shape: (*batch, N, Q)
    for columns in chunks(count, size, what, unit="draw"):
        sizes = [*joint.sizes, parts.num_points]  # the last one is for the noise
        *normals, white = normal_columns(sizes, columns.stop - columns.start, parts.train, generator)
        observed, tested = joint.draw(normals)
        residual = None
        if weights is not None:
            explained = weights.mT @ observed
        elif parts.differentiated or parts.grid_train is None:
            explained = parts.cross @ parts.observed.solve(observed, expected=count, of_data=True)
        else:
            config = parts.observed.config_for(count)
            solved = parts.grid_train.solve_columns(observed.double(), config, of_data=True)
            explained, residual = wide_product(parts.cross, solved.solution), solved.residual
        yield ConditionedDraws(observed, tested, explained, residual, white)


def _fewer_points(parts: PosteriorParts, count: int) -> bool:
    """Whether there are fewer points than draws, and their covariances with the data fit in memory."""
    numbers = 4 * parts.train.shape[:-1].numel() * parts.num_points
    return parts.num_points < count and 8 * numbers <= parts.config.memory
