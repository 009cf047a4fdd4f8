"""About how long ``fill_gaps`` would take: FLOPs, counted, by the rates of this machine, measured.

    training   (candidates x short runs x 3 + steps x windows)  Cholesky factors and their gradients of N observations
    mean       iterations x terms x two products with the kernel, 2 M Σ m_i FLOPs each; or one dense factor, N^3 / 3
    check      four solves of a part of the grid: a mean, and draws together, which share products; a streamed one again
    std        a solve for each gap, if that is 5e11 FLOPs at most; else seven of the mean, for 64 draws together
    streamed   ten sweeps over the grid of 4 M r FLOPs, and reading it once

Neither kernels nor iterations are known before the data have been looked at, so that numbers of them are what is usual.
Calibrated with one thread on arrays of 1,200 to 10^8 cells, on a machine that was busy with other work: it is right
within a factor of three or so. Where gaps are large and noise is small, solves take several times as long.
"""

import math
from collections.abc import Sequence

import torch

from gpytorch_gaps.filling.grid_values import MAX_PART_CELLS
from gpytorch_gaps.filling.learn import FIRST_STEPS
from gpytorch_gaps.filling.streamed import MAX_CHECKED_CELLS
from gpytorch_gaps.solvers.planning.rates import Rates, rates_of

_CANDIDATES = 8
_COMPARED = 3  # windows that candidates are compared on
_TERMS = 2.0
_ITERATIONS = 35.0
_DENSE = 2000  # observations that are solved for by a dense factor
_RANK = 50.0  # of a smooth kernel along the longest axis
_SWEEPS = 10.0
_CHECK, _STD = 4.0, 7.0  # solves of the mean
_EXACT = 5e11  # FLOPs of variances without samples, as predictions have it
_STD_SECONDS = 120.0


def fill_seconds(
    shape: Sequence[int], observed: int, windows: Sequence[int], streamed: bool, steps: int = 50
) -> dict[str, float]:
    """By what they go to, with standard deviations and the held-out check.

    :param windows: observations in each.
    """
    rates = rates_of(torch.device("cpu"), torch.float64)
    cells = math.prod(shape)
    found = {"training": _training(rates, windows, steps)}
    part = min(cells, MAX_PART_CELLS)
    share = observed / max(cells, 1)
    sides = [min(size, part ** (1 / len(shape))) for size in shape]
    one = _solve(rates, sides, share * part)
    found["held-out check"] = one if share * part <= _DENSE else _CHECK * one
    if streamed:
        found["mean"] = rates.seconds(_SWEEPS * 4 * cells * _RANK, 64.0 * cells)
        found["held-out check"] += found["mean"] * min(1.0, MAX_CHECKED_CELLS / cells)
        return found
    found["mean"] = mean = _solve(rates, shape, observed)
    one_by_one = (cells - observed) * _ITERATIONS * _TERMS * 2 * 2 * cells * sum(shape)  # FLOPs
    if observed <= _DENSE:
        found["standard deviations"] = mean
    elif one_by_one <= _EXACT:
        found["standard deviations"] = rates.seconds(one_by_one)
    else:
        found["standard deviations"] = min(_STD * mean, _STD_SECONDS)
    return found


def _training(rates: Rates, windows: Sequence[int], steps: int) -> float:
    """A factor takes N^3 / 3 FLOPs, its gradient and the products that pick cells some ten times as many."""
    if not windows:
        return 0.0
    size = sum(windows) / len(windows)
    once = rates.seconds(6 * size**3, 60 * 8 * size**2 * _TERMS, 400.0)
    return once * (_CANDIDATES * FIRST_STEPS * min(_COMPARED, len(windows)) + steps * len(windows))


def _solve(rates: Rates, shape: Sequence[float], observed: float) -> float:
    cells = math.prod(shape)
    if observed <= _DENSE:
        return rates.seconds(observed**3 / 3 + 2 * observed**2, 40 * 8 * observed**2, 500.0)
    product = rates.seconds(2 * cells * sum(shape), 16.0 * cells * len(shape), 10.0)
    return _ITERATIONS * _TERMS * 2 * product
