"""Contexts in GPyTorch's style: ``with settings.gap_method("fill"), settings.solve_tolerance(1e-8): ...``

Every value is checked when the context is made, so that a misspelt method fails at its own line. Tolerances are never
looser than asked: a tighter ``linear_operator.settings.cg_tolerance`` wins over ours. Matrices of up to `dense_size`
observations, or gaps, are factorized; a smaller ``linear_operator.settings.max_cholesky_size`` wins over it. A larger
one does not: importing BoTorch raises it to 4096 for the whole process.
"""

import math
import numbers
from typing import Any

import linear_operator
from linear_operator.settings import _value_context

from gpytorch_gaps.distributed.communicator import SINGLE, Communicator
from gpytorch_gaps.reports import active_records
from gpytorch_gaps.solvers.config import SolveConfig
from gpytorch_gaps.solvers.warm_start import WarmStart
from gpytorch_gaps.utils import progress as bars


class _Setting(_value_context):
    """A value that is restored to what it was on entry, not to what it was where the context was made."""

    def __enter__(self) -> None:
        self._orig_value = type(self).value()
        super().__enter__()


class _Choice(_Setting):
    """One of a few names."""

    choices: tuple[str, ...] = ()

    def __init__(self, value: str) -> None:
        if value not in self.choices:
            raise ValueError(
                f"settings.{type(self).__name__}: got {value!r}, expected one of {', '.join(self.choices)}"
            )
        super().__init__(value)


class _Number(_Setting):
    """A number, at least (or above) `minimum`; None where a default is worked out from the problem."""

    minimum: float = 0.0
    exclusive = False
    integer = False
    optional = False

    def __init__(self, value: Any) -> None:
        kind = numbers.Integral if self.integer else numbers.Real  # NumPy's scalars are welcome
        valid = isinstance(value, kind) and not isinstance(value, bool) and math.isfinite(value)
        valid = valid and (value > self.minimum if self.exclusive else value >= self.minimum)
        if not (valid or (value is None and self.optional)):
            bound = f"{'above' if self.exclusive else 'at least'} {self.minimum:g}"
            expected = f"{'an integer' if self.integer else 'a number'} {bound}{' or None' if self.optional else ''}"
            raise ValueError(f"settings.{type(self).__name__}: got {value!r}, expected {expected}")
        super().__init__(value)


class gap_method(_Choice):
    """How ``(K_XX + s2 I) a_X = y_X`` is solved: the paper's three formulations, a dense one, or the cheapest.

    ``"ignore"`` with ``preconditioner_rank(p)`` is the paper's IG_p; with ``preconditioner_rank(0)`` its plain IG.
    ``"spectral"`` is fill-gaps in a truncated eigenbasis.
    """

    choices = ("auto", "fill", "ignore", "penalize", "spectral", "cholesky")
    _global_value = "auto"


class logdet_method(_Choice):
    """How ``log|K_XX + s2 I|`` is computed; ``"nystrom"`` is the paper's approximation, biased."""

    choices = ("auto", "exact", "stochastic", "nystrom")
    _global_value = "auto"


class variance_method(_Choice):
    """How the variances of a posterior are computed.

    ``"exact"``: a solve per point, or a closed form where the kernel is of low rank to the tolerance. ``"low_rank"``:
    the closed form at `preconditioner_rank`, whatever that leaves out. ``"pathwise"``: from `variance_samples` draws.
    ``"auto"``: exact where that is affordable, else pathwise, with a warning. The last two methods state their error:
    see ``record_solves().variances``.
    """

    choices = ("auto", "exact", "low_rank", "pathwise")
    _global_value = "auto"


class variance_samples(_Number):
    """Draws that pathwise variances are estimated from: their standard error is at most ``sqrt(2 / samples)``."""

    minimum = 8  # with fewer the stated error would not be one
    integer = True
    _global_value = 64


class preconditioner_rank(_Number):
    """Rank p of the eigen preconditioners. None: chosen from the spectrum for IG, no preconditioner for FG."""

    integer = True
    optional = True
    _global_value = None


class solve_tolerance(_Number):
    """Relative residual of the original system that every column of a solve must reach.

    None, the default, asks for 1e-6 and, of posterior means, for `mean_tolerance` too.
    """

    exclusive = True
    optional = True
    _global_value = None


class mean_tolerance(_Number):
    """Largest error of a posterior mean, at every point, in units of the posterior standard deviation there.

    It is certified: ``SolveReport.error_in_std`` is a bound, not an estimate. None, the default, asks for 1e-2 unless
    `solve_tolerance` is set.
    """

    exclusive = True
    optional = True
    _global_value = None


class train_tolerance(_Number):
    """Relative residual required of every solve inside the marginal log likelihood (training)."""

    exclusive = True
    _global_value = 1e-6


class max_iterations(_Number):
    """Conjugate-gradient iterations after which a solve gives up, with a warning."""

    minimum = 1
    integer = True
    _global_value = 2000


class dense_size(_Number):
    """Observations (for log-determinants, also gaps) up to which ``"auto"`` uses dense Cholesky; beyond, if cheaper.

    ``gap_method("cholesky")`` and ``logdet_method("exact")`` ask for one whatever the size.
    """

    integer = True
    _global_value = 800


class gap_penalty(_Number):
    """The penalty gamma of sec:PG. None: large enough that the penalty itself costs no accuracy asked for."""

    exclusive = True
    optional = True
    _global_value = None


class prediction_memory(_Number):
    """Bytes that a prediction may hold at once beyond its inputs and its result."""

    exclusive = True
    _global_value = 2**29


class mixed_precision(_Setting):
    """Whether solves of float64 models are iterated in float32 and refined in float64: to the same residual.

    About twice as fast on large grids. Where float32 cannot contract, the solve goes on in float64. Those of float32
    models always work this way.
    """

    _global_value = False

    def __init__(self, value: bool = True) -> None:
        _check_switch("mixed_precision", value)
        super().__init__(value)


class progress(_Setting):
    """Whether predictions and samples that take more than a few seconds show a progress bar."""

    def __init__(self, value: bool = True) -> None:
        _check_switch("progress", value)
        super().__init__(value)

    @classmethod
    def value(cls) -> bool:
        return bars.is_enabled()

    @classmethod
    def _set_value(cls, value: bool) -> None:
        bars.set_enabled(value)


def _check_switch(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"settings.{name}: got {value!r}, expected True or False")


class warm_start(_Setting):
    """What log marginal likelihoods remember from one to the next: a :class:`WarmStart`, or None for nothing."""

    _global_value = None

    def __init__(self, value: WarmStart | None) -> None:
        if value is not None and not isinstance(value, WarmStart):
            raise ValueError(f"settings.warm_start: got {type(value).__name__}, expected a WarmStart or None")
        super().__init__(value)


class group(_Setting):
    """Processes that share the columns of log marginal likelihoods; a group of ``torch.distributed``, or None.

    Gradients are then averaged over them by ``distributed.average_gradients``, as ``fit(group=...)`` does.
    """

    _global_value = SINGLE

    def __init__(self, value: Any) -> None:
        super().__init__(value if isinstance(value, Communicator) else Communicator(value))


_DEFAULT_TOLERANCE, _DEFAULT_MEAN_TOLERANCE = 1e-6, 1e-2  # where nothing else was asked for


def current() -> SolveConfig:
    """The configuration that follows from the settings as they are now: what an operator hands to its solvers.

    The tighter of our tolerances and ``linear_operator.settings.cg_tolerance`` counts, and the smaller of `dense_size`
    and ``linear_operator.settings.max_cholesky_size``.
    """
    upstream = float(linear_operator.settings.cg_tolerance.value())
    tolerance, of_mean = solve_tolerance.value(), mean_tolerance.value()
    return SolveConfig(
        method=gap_method.value(),
        rank=preconditioner_rank.value(),
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
    "preconditioner_rank",
    "prediction_memory",
    "progress",
    "solve_tolerance",
    "train_tolerance",
    "variance_method",
    "variance_samples",
    "warm_start",
]
