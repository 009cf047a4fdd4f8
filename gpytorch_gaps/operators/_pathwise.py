"""Draws of a posterior by conditioning draws of the prior: ``f_* - K_*X A^-1 (f_X + e)``, ``A = K_XX + D``.

With f a draw of the prior at observations and test points together and e one of the noise, this has mean zero and
exactly the covariance ``K_** - K_*X A^-1 K_X*``: one solve a draw, whatever the number of points.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from gpytorch_gaps.operators._added_diag import solve_data
from gpytorch_gaps.operators._joint_draws import JointDraws
from gpytorch_gaps.operators._posterior_parts import PosteriorParts
from gpytorch_gaps.precision import full_float32
from gpytorch_gaps.progress import with_bar
from gpytorch_gaps.solvers.choose import expecting


@full_float32()
def pathwise_draws(
    parts: PosteriorParts, count: int, generator: torch.Generator | None = None, what: str = "samples"
) -> Iterator[tuple[Tensor, Tensor]]:
    """Deviations from the posterior mean, and what was explained of the draw, a few at a time.

    Deviations have the posterior's covariance; the explained part, independent of them, that of the mean.
    shape: (*batch, Q, n) each
    """
    joint = JointDraws(parts.prior.evaluate_kernel(), parts.cross, parts.train, parts.cells)
    size = parts.columns_at_once(2 * joint.size + 4 * parts.prior.shape[:-1].numel())
    with with_bar(None, what, total=count, unit="draw") as bar:
        for start in range(0, count, size):
            observed, tested = joint.draw(min(size, count - start), generator)
            with expecting(count * parts.train.batch_shape.numel()):
                explained = parts.cross @ solve_data(parts.train, observed)
            yield tested - explained, explained
            bar.update(tested.size(-1))
