"""How much all observations explain beyond regressions on neighbours, estimated at a few random points.

The regression ``b'y_J`` of a value f has the residual variance t; the posterior variance is v: see
:mod:`gpytorch_gaps.posterior.drawn_variance`. With ``e = g - A b``, the covariance of the observations with the
residual of the regression,

    ``t - v = e'A^-1 e``

One solve is enough for many pilots i, with random signs ``s_i = +-1``. For ``A u = sum_j s_j e_j``,

    ``s_i e_i'u = (t_i - v_i) + sum_(j != i) s_i s_j e_i'A^-1 e_j``

The last sum has mean zero. It is small, since the residuals of regressions hardly depend on observations far away. Its
size is known: it is that of ``e_i'u`` for the u of another solve, for other pilots.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from gpytorch_gaps.posterior.parts import PosteriorParts
from gpytorch_gaps.posterior.regressions import Neighbourhoods
from gpytorch_gaps.posterior.train_covariance import wide_product
from gpytorch_gaps.reports import one_report

_NUM_PILOTS = 192
_COLUMNS = (2, 8)  # smallest and largest number of right-hand sides
_POINTS_BETWEEN_PILOTS = 2000  # distance between pilots of one right-hand side, as a number of points


class Pilots(NamedTuple):
    """Points, the residual variances of their regressions, and the part explained by others. shape: (P,) each"""

    points: Tensor
    left: Tensor  # t
    beyond: Tensor  # an estimate of t - v
    noise: Tensor  # its standard error
    missed: Tensor  # a bound on the effect of the residuals of the solves

    @property
    def off(self) -> Tensor:
        """The sum of both errors."""
        return self.noise + self.missed


@torch.no_grad()
def pilots(parts: PosteriorParts, local: Neighbourhoods) -> Pilots:
    """Pilots at random: all points are divided into equal parts, and one point is picked from each.

    :param local: neighbours of the points. There must be some.
    """
    generator = torch.Generator().manual_seed(0)
    places = (local.members >= 0).nonzero()  # nearby points are adjacent in this order
    count, device = min(_NUM_PILOTS, len(places)), places.device
    picked = (torch.arange(count) + torch.rand(count, generator=generator)) * (len(places) / count)
    tile, member = places[picked.long().clamp_max(len(places) - 1).to(device)].unbind(-1)
    signs = 2.0 * torch.randint(2, (count,), generator=generator).double().to(device) - 1.0
    wanted = -(-count * _POINTS_BETWEEN_PILOTS // len(places))
    columns = max(min(wanted, _COLUMNS[1], count), _COLUMNS[0])
    column = (torch.arange(count, device=device) % columns).unsqueeze(-1)
    chosen = torch.zeros(count, columns, dtype=torch.float64, device=device).scatter(1, column, signs.unsqueeze(-1))
    points = local.members[tile, member]
    rows, weights, left = local.of_members(tile, member)
    few = parts.at(points)

    fitted = torch.zeros(parts.train.size(-1), columns, dtype=torch.float64, device=device)
    fitted = fitted.index_add(0, rows.flatten(), (weights.unsqueeze(-1) * chosen.unsqueeze(-2)).flatten(0, 1))
    covariance = wide_product(few.cross.mT, chosen).double() - parts.observed.matmul(fitted)  # sums of s_j e_j
    with one_report():
        u, residual = parts.observed.solve_for_variances(covariance, chosen.abs().mT @ left, columns)
    image = (covariance - residual)[rows]  # of u, shape: (P, m, C)
    of_all = wide_product(few.cross, u).double() - (weights.unsqueeze(-1) * image).sum(-2)  # e_i'u, shape: (P, C)
    others = of_all.scatter(1, column, 0.0).square().sum(-1) / (columns - 1)
    beyond = (signs * of_all.gather(1, column).squeeze(-1)).clamp_min(0.0)
    missed = parts.observed.variance_error(residual)[column.squeeze(-1)]  # (e'A^-1 r)^2 <= (t - v) r'D^-1 r
    return Pilots(points, left, beyond.minimum(left), others.sqrt(), (beyond * missed).sqrt() + missed)
