"""Draws of a posterior by conditioning draws of the prior: ``f_* - K_*X A^-1 (f_X + e)``, ``A = K_XX + D``.

With f a draw of the prior at observations and test points together and e one of the noise, this has mean zero and
exactly the covariance ``K_** - K_*X A^-1 K_X*``: one solve a draw, whatever the number of points. Where there are more
draws than points, ``A^-1 K_X*`` is solved for instead, a column a point, which gives the same draws.
"""

from collections.abc import Iterator

import torch
from linear_operator import to_dense
from torch import Tensor

from gpytorch_gaps.posterior.joint_draws import JointDraws, normal_columns
from gpytorch_gaps.posterior.parts import PosteriorParts
from gpytorch_gaps.utils.precision import full_float32
from gpytorch_gaps.utils.progress import with_bar


@full_float32()
def pathwise_draws(
    parts: PosteriorParts,
    count: int,
    generator: torch.Generator | None = None,
    what: str = "samples",
    noise: Tensor | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Deviations from the posterior mean, and what was explained of the draw, a few at a time.

    Deviations have the posterior's covariance; the explained part, independent of them, that of the mean. The first
    draws do not depend on how many follow, nor the function on whether noise is added to it.

    :param noise: variances of noise to add to the deviations, shape (*batch, Q).
    :return: shape (*batch, Q, n) each.
    """
    joint = JointDraws(parts.prior.evaluate_kernel(), parts.cross, parts.train, parts.cells, parts.config.memory)
    size = parts.columns_at_once(2 * joint.size + 5 * parts.prior.shape[:-1].numel())
    weights = _weights_of_points(parts) if _fewer_points(parts, count) else None  # shape: (*batch, N, Q)
    with with_bar(None, what, total=count, unit="draw") as bar:
        for start in range(0, count, size):
            sizes = [*joint.sizes, parts.num_points]  # the last: of the noise
            *normals, white = normal_columns(sizes, min(size, count - start), parts.train, generator)
            observed, tested = joint.draw(normals)
            if weights is not None:
                explained = weights.mT @ observed
            else:
                explained = parts.cross @ parts.solve_data(observed, count)
            deviation = tested - explained
            yield deviation if noise is None else deviation + noise.sqrt().unsqueeze(-1) * white, explained
            bar.update(tested.size(-1))


def _fewer_points(parts: PosteriorParts, count: int) -> bool:
    """Whether there are fewer points than draws, so few that their covariances with the data may be held."""
    numbers = 4 * parts.train.shape[:-1].numel() * parts.num_points
    return parts.num_points < count and 8 * numbers <= parts.config.memory


def _weights_of_points(parts: PosteriorParts) -> Tensor:
    """``A^-1 K_X*``. An error in it is seen by every draw, so that it is solved for more tightly."""
    return parts.solve_tightly(to_dense(parts.cross).mT.contiguous())
