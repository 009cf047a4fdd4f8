"""Contexts in GPyTorch's style: ``with settings.gap_method("fill"), settings.solve_tolerance(1e-8): ...``

Every value is checked when the context is created, so that a misspelt method fails at its own line. The tighter of
these tolerances and ``linear_operator.settings.cg_tolerance`` applies. Matrices of up to `dense_size` observations, or
gaps, are factorised. A smaller ``linear_operator.settings.max_cholesky_size`` takes precedence; a larger one does not,
because importing BoTorch raises it to 4096 for the whole process.
"""

import linear_operator

from gpytorch_gaps.reports import active_records
from gpytorch_gaps.settings.methods import (
    gap_method,
    logdet_method,
    num_neighbours,
    preconditioner,
    preconditioner_rank,
    variance_method,
    variance_samples,
)
from gpytorch_gaps.settings.values import (
    dense_size,
    gap_penalty,
    group,
    max_iterations,
    mean_tolerance,
    mixed_precision,
    prediction_memory,
    progress,
    solve_tolerance,
    train_tolerance,
    warm_start,
)
from gpytorch_gaps.solvers.config import SolveConfig

_DEFAULT_TOLERANCE, _DEFAULT_MEAN_TOLERANCE = 1e-6, 1e-2  # if nothing else is set


def current() -> SolveConfig:
    """The configuration given by the present settings, which an operator passes to its solvers.

    The tighter of these tolerances and ``linear_operator.settings.cg_tolerance`` applies, and the smaller of
    `dense_size` and ``linear_operator.settings.max_cholesky_size``.

    :return: a frozen :class:`~gpytorch_gaps.solvers.config.SolveConfig`.

    >>> with gap_method("spectral"), max_iterations(50):
    ...     config = current()
    >>> config.method, config.max_iterations
    ('spectral', 50)
    """
    upstream = float(linear_operator.settings.cg_tolerance.value())
    tolerance, of_mean = solve_tolerance.value(), mean_tolerance.value()
    return SolveConfig(
        method=gap_method.value(),
        preconditioner=preconditioner.value(),
        rank=preconditioner_rank.value(),
        num_neighbours=num_neighbours.value(),
        tolerance=min(tolerance or _DEFAULT_TOLERANCE, upstream),
        mean_tolerance=_DEFAULT_MEAN_TOLERANCE if of_mean is None and tolerance is None else of_mean,
        max_iterations=max_iterations.value(),
        dense_size=min(dense_size.value(), linear_operator.settings.max_cholesky_size.value()),
        penalty=gap_penalty.value(),
        mixed_precision=mixed_precision.value(),
        train_tolerance=min(train_tolerance.value(), upstream),
        loosest_tolerance=upstream,
        logdet_method=logdet_method.value(),
        num_probes=linear_operator.settings.num_trace_samples.value(),
        repeat_probes=linear_operator.settings.deterministic_probes.on(),
        variance_method=variance_method.value(),
        variance_samples=variance_samples.value(),
        memory=prediction_memory.value(),
        communicator=group.value(),
        warm_start=warm_start.value(),
        records=active_records(),
    )


__all__ = [
    "current",
    "dense_size",
    "gap_method",
    "gap_penalty",
    "group",
    "logdet_method",
    "max_iterations",
    "mean_tolerance",
    "mixed_precision",
    "num_neighbours",
    "preconditioner",
    "preconditioner_rank",
    "prediction_memory",
    "progress",
    "solve_tolerance",
    "train_tolerance",
    "variance_method",
    "variance_samples",
    "warm_start",
]
