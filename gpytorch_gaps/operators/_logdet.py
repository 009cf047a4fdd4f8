"""The log-determinants that an operator ``W K W' + D`` works out itself, each with its report."""

from dataclasses import replace
from typing import Any

import torch
from linear_operator.operators import ConstantDiagLinearOperator
from torch import Tensor

from gpytorch_gaps import settings
from gpytorch_gaps.distributed.columns import Share, num_probes, own_probes, sum_over_ranks
from gpytorch_gaps.linalg.selection import product_at, unravel
from gpytorch_gaps.operators.fill_gaps import FillGapsOperator
from gpytorch_gaps.reports import LogdetReport
from gpytorch_gaps.solvers.logdet.exact import data_side_logdet, gap_side_logdet, grid_logdet
from gpytorch_gaps.solvers.logdet.nystrom import nystrom_logdet
from gpytorch_gaps.solvers.logdet.stochastic import estimating, standard_error
from gpytorch_gaps.solvers.system import whiten
from gpytorch_gaps.utils.precision import full_float32


@full_float32()
def logdet_by(operator: Any, method: str, side: str) -> tuple[Tensor, LogdetReport]:
    """By a given method on a given side, for noise that is constant or one a point. Differentiable. shape: batch"""
    system, factors, noise = operator._system(), operator.factors, operator._noise_tensor()
    error: Tensor | None = torch.zeros((), device=operator.device)
    probes = iterations = 0
    if method == "nystrom":
        value, error = nystrom_logdet(system, factors, noise), None
    elif method == "stochastic":
        value, error, probes, iterations = _gap_side_stochastic(operator)
    elif side == "gaps":
        value = gap_side_logdet(system, factors, noise)
    else:
        value = data_side_logdet(factors, operator.train_index, noise, system.cholesky())
    value = value.to(operator.dtype)
    return value, LogdetReport(method, value.detach(), error, probes, iterations, f"{side} side")


@full_float32()
def whitened_logdet(operator: Any) -> tuple[Tensor, LogdetReport]:
    """For noise that is a product over axes: ``log|D^(-1/2) (W K W' + D) D^(-1/2)| + log|D|``. shape: batch"""
    roots = [axis.sqrt() for axis in operator._diag_tensor.axis_noise]
    factors = [whiten(factor, root) for factor, root in zip(operator.factors, roots, strict=True)]
    index = operator.train_index
    kernel = operator._linear_op.with_factors(factors)
    unit = torch.ones(*operator.batch_shape, 1, dtype=operator.dtype, device=operator.device)
    white: Any = kernel + ConstantDiagLinearOperator(unit, diag_shape=operator.size(-1))
    value, report = white._own_logdet(white.agreed_path())
    root = product_at(roots, unravel(index, kernel.row_shape))
    value = value + 2.0 * root.log().sum(-1)
    return value, replace(report, value=value.detach())


def _gap_side_stochastic(operator: Any) -> tuple[Tensor, Tensor, int, int]:
    """``log|A| + log|V A^-1 V'|``, the second term by Lanczos on the L x L matrix: value, error, probes, iterations."""
    system, factors, noise, cache = (
        operator._system(),
        operator.factors,
        operator._noise_tensor(),
        operator._linear_op.cache,
    )
    value = grid_logdet(system, factors, noise)
    if not len(system.gap_index):
        return value, torch.zeros((), device=operator.device), 0, 0
    cache.cached("eigen", factors, system.eigen)  # worked out already: not once more below
    gaps = FillGapsOperator(*factors, noise=noise.to(factors[0].dtype), gap_index=system.gap_index, cache=cache)
    share, estimates, iterations = Share(settings.group.value(), num_probes()), None, 0
    with estimating():
        if share.draws:
            gaps.probes = own_probes(gaps, gaps._preconditioner()[1], share)
        own = gaps.logdet() if share.count else torch.zeros_like(value)
    if share.count:
        estimates, iterations = gaps.last_probes()
    every = share.of(estimates)
    value = value + sum_over_ranks(share.ranks, share.weight * own, gaps.representation())
    return value, standard_error(every), every.size(0), iterations
