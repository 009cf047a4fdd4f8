"""Settings that are tolerances, limits, or about how things run; see :mod:`gpytorch_gaps.settings`."""

from typing import Any

from gpytorch_gaps.distributed.communicator import SINGLE, Communicator
from gpytorch_gaps.solvers.warm_start import WarmStart
from gpytorch_gaps.utils import progress as bars
from gpytorch_gaps.utils.contexts import Number, Setting, Switch


class solve_tolerance(Number):
    """Relative residual of the original system that every column of a solve must reach.

    :param value: above 0, or None (default): 1e-6, and posterior means must also reach `mean_tolerance`.

    >>> from gpytorch_gaps import settings
    >>> with solve_tolerance(1e-8):
    ...     settings.current().tolerance
    1e-08
    """

    exclusive = True
    optional = True
    _global_value = None


class mean_tolerance(Number):
    """Largest error of a posterior mean, at every point, in units of the posterior standard deviation there.

    It is certified: ``SolveReport.error_in_std`` is a bound, not an estimate.

    :param value: above 0, or None (default): 1e-2 unless `solve_tolerance` is set.

    >>> from gpytorch_gaps import settings
    >>> settings.current().mean_tolerance
    0.01
    """

    exclusive = True
    optional = True
    _global_value = None


class train_tolerance(Number):
    """Relative residual required of every solve inside the marginal log likelihood (training).

    :param value: above 0; default 1e-6.

    >>> from gpytorch_gaps import settings
    >>> with train_tolerance(1e-3):
    ...     settings.current().train_tolerance
    0.001
    """

    exclusive = True
    _global_value = 1e-6


class max_iterations(Number):
    """Conjugate-gradient iterations after which a solve stops with a warning.

    :param value: at least 1; default 2000.

    >>> from gpytorch_gaps import settings
    >>> with max_iterations(500):
    ...     settings.current().max_iterations
    500
    """

    minimum = 1
    integer = True
    _global_value = 2000


class dense_size(Number):
    """Observations (for log-determinants, also gaps) up to which ``"auto"`` always uses dense Cholesky.

    Beyond this number, it does so if that is cheaper. ``gap_method("cholesky")`` and ``logdet_method("exact")`` use
    dense Cholesky for any size.

    :param value: default 800.

    >>> from gpytorch_gaps import settings
    >>> with dense_size(0):
    ...     settings.current().dense_size
    0
    """

    integer = True
    _global_value = 800


class gap_penalty(Number):
    """The penalty gamma of Evans & Nair (2018), eq. (3.3), for ``gap_method("penalize")``.

    :param value: above 0, or None (default): large enough that the penalty itself costs no accuracy.

    >>> from gpytorch_gaps import settings
    >>> with gap_penalty(1e6):
    ...     settings.current().penalty
    1000000.0
    """

    exclusive = True
    optional = True
    _global_value = None


class prediction_memory(Number):
    """Bytes that a prediction may hold at once beyond its inputs and its result.

    :param value: above 0; default 2**29.

    >>> from gpytorch_gaps import settings
    >>> with prediction_memory(2**30):
    ...     settings.current().memory == 2**30
    True
    """

    exclusive = True
    _global_value = 2**29


class mixed_precision(Switch):
    """Whether solves of float64 models are iterated in float32 and refined in float64, to the same residual.

    This is about twice as fast on large grids. If iterations in float32 do not converge, the solve continues in
    float64. Solves of float32 models always work this way.

    :param value: default False.

    >>> from gpytorch_gaps import settings
    >>> with mixed_precision():
    ...     settings.current().mixed_precision
    True
    """

    _global_value = False


class progress(Switch):
    """Whether computations that take more than a few seconds show a progress bar.

    :param value: default True.

    >>> with progress(False):
    ...     progress.value()
    False
    """

    @classmethod
    def value(cls) -> bool:
        return bars.is_enabled()

    @classmethod
    def _set_value(cls, value: bool) -> None:
        bars.set_enabled(value)


class warm_start(Setting):
    """What an evaluation of the marginal log likelihood reuses from the previous one.

    :param value: a :class:`WarmStart`, or None (default) for nothing.

    >>> with warm_start(WarmStart(num_probes=2)):
    ...     warm_start.value().num_probes
    2
    """

    _global_value = None

    def __init__(self, value: WarmStart | None) -> None:
        if value is not None and not isinstance(value, WarmStart):
            raise ValueError(f"settings.warm_start: got {type(value).__name__}, expected a WarmStart or None")
        super().__init__(value)


class group(Setting):
    """Processes that share the columns of marginal log likelihoods.

    Gradients are then averaged over them by ``distributed.average_gradients``, as ``fit(group=...)`` does.

    :param value: a process group of ``torch.distributed``, or None (default) for this process alone.

    >>> with group(None):
    ...     group.value().size
    1
    """

    _global_value = SINGLE

    def __init__(self, value: Any) -> None:
        super().__init__(value if isinstance(value, Communicator) else Communicator(value))
