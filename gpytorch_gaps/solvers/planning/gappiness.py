"""The local gappiness of a grid: the share of gaps in the neighbourhood of its gaps."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_NEIGHBOURS = 25  # number of neighbouring cells that determine whether a gap is isolated


def local_gappiness(gaps: Tensor, shape: Sequence[int]) -> float:
    """Gappiness in the neighbourhood of a gap: that of the grid if gaps are scattered, near one inside a cloud.

    It is the 95 % quantile, over the gaps, of the share of gaps among about 25 neighbours. If that is no more than
    expected by chance, it is the gappiness of the grid.

    :param gaps: flat cells, shape (L,).
    """
    if not len(gaps):
        return 0.0
    num_cells = math.prod(shape)
    overall = len(gaps) / num_cells
    reach = max(1, round(_NEIGHBOURS ** (1.0 / len(shape)) / 2))
    found = torch.zeros(num_cells, dtype=torch.float64, device=gaps.device)
    found[gaps] = 1.0
    found = found.reshape(*shape)
    cells = torch.ones((), dtype=torch.float64, device=gaps.device)
    for axis, size in enumerate(shape):
        place = torch.arange(size, device=gaps.device)
        first, last = (place - reach).clamp_min(0), (place + reach + 1).clamp_max(size)
        sums = torch.cat([torch.zeros_like(found.narrow(axis, 0, 1)), found.cumsum(axis)], axis)
        found = sums.index_select(axis, last) - sums.index_select(axis, first)
        cells = cells * (last - first).view([-1 if i == axis else 1 for i in range(len(shape))])
    share = ((found - 1.0) / (cells - 1.0).clamp_min(1.0)).flatten()[gaps]  # a gap is not its own neighbour
    high = float(share.kthvalue(math.ceil(0.95 * len(gaps))).values)
    chance = 3.0 * math.sqrt(overall * (1.0 - overall) / max(1.0, float(cells.max()) - 1.0))
    return high if high > overall + chance else overall
