"""The settings, one context each; see :mod:`gpytorch_gaps.settings`."""

from typing import Any

from gpytorch_gaps.distributed.communicator import SINGLE, Communicator
from gpytorch_gaps.solvers.warm_start import WarmStart
from gpytorch_gaps.utils import progress as bars
from gpytorch_gaps.utils.contexts import Choice, Number, Setting, Switch


class gap_method(Choice):
    """How ``(K_XX + s2 I) a_X = y_X`` is solved: the paper's three formulations, a dense one, or the cheapest.

    :param value: ``"auto"`` (default), ``"fill"``, ``"ignore"``, ``"penalize"``, ``"spectral"`` or ``"cholesky"``.
        ``"ignore"`` with ``preconditioner_rank(p)`` is the paper's IG_p; with ``preconditioner_rank(0)`` its plain IG.
        ``"spectral"`` is fill-gaps in a truncated eigenbasis.
    :raises ValueError: for any other name.

    >>> with gap_method("fill"):
    ...     gap_method.value()
    'fill'
    """

    choices = ("auto", "fill", "ignore", "penalize", "spectral", "cholesky")
    _global_value = "auto"


class logdet_method(Choice):
    """How ``log|K_XX + s2 I|`` is computed.

    :param value: ``"auto"`` (default), ``"exact"``, ``"stochastic"`` or ``"nystrom"``, the paper's approximation, which
        is biased.

    >>> from gpytorch_gaps import settings
    >>> with logdet_method("exact"):
    ...     settings.current().logdet_method
    'exact'
    """

    choices = ("auto", "exact", "stochastic", "nystrom")
    _global_value = "auto"


class variance_method(Choice):
    """How the variances of a posterior are computed.

    :param value: ``"exact"``: a solve per point, or a closed form where the kernel is of low rank to the tolerance.
        ``"low_rank"``: the closed form at `preconditioner_rank`, whatever that leaves out. ``"pathwise"``: from
        `variance_samples` draws. ``"auto"`` (default): exact where that is affordable, else pathwise, with a warning.
        The methods that are not exact state their error in ``record_solves().variances``.

    >>> from gpytorch_gaps import settings
    >>> with variance_method("pathwise"):
    ...     settings.current().variance_method
    'pathwise'
    """

    choices = ("auto", "exact", "low_rank", "pathwise")
    _global_value = "auto"


class variance_samples(Number):
    """Draws that pathwise variances are estimated from: their standard error is at most ``sqrt(2 / samples)``.

    At cells of the training grid, draws estimate only what the nearest observations leave, and errors are mostly far
    smaller: 16 to 32 draws are then enough.

    :param value: at least 8; default 64.

    >>> from gpytorch_gaps import settings
    >>> with variance_samples(256):
    ...     settings.current().variance_samples
    256
    """

    minimum = 8  # with fewer, the stated error would be wrong
    integer = True
    _global_value = 64


class preconditioner(Setting):
    """What conjugate gradients are preconditioned with when gaps are ignored.

    :param value: ``"eigen"``: the leading eigenvectors of the kernel, of `preconditioner_rank`. ``"neighbours"``: a
        sparse inverse Cholesky factor, by `num_neighbours`. ``"none"``. ``"auto"`` (default): what should take the
        least time. Or a function of your own, which is given the system: see the page on preconditioners.
    :raises ValueError: for any other name.

    >>> from gpytorch_gaps import settings
    >>> with preconditioner("neighbours"), num_neighbours(30):
    ...     settings.current().preconditioner, settings.current().num_neighbours
    ('neighbours', 30)
    """

    choices = ("auto", "eigen", "neighbours", "none")
    _global_value = "auto"

    def __init__(self, value: Any) -> None:
        if value not in self.choices and not callable(value):
            raise ValueError(
                f"settings.preconditioner: got {value!r}, expected one of {', '.join(self.choices)}, or a function "
                "that makes a preconditioner"
            )
        super().__init__(value)


class num_neighbours(Number):
    """Neighbours of each observation in the ``"neighbours"`` preconditioner.

    :param value: at least 1, or None (default): 20, or 40 where these should save time.

    >>> from gpytorch_gaps import settings
    >>> with num_neighbours(10):
    ...     settings.current().num_neighbours
    10
    """

    minimum = 1
    integer = True
    optional = True
    _global_value = None


class preconditioner_rank(Number):
    """Rank of the eigen preconditioners.

    :param value: a rank, 0 for no preconditioner, or None (default): chosen from the spectrum for ignore-gaps, no
        preconditioner for fill-gaps.

    >>> from gpytorch_gaps import settings
    >>> with gap_method("ignore"), preconditioner_rank(100):
    ...     settings.current().rank
    100
    """

    integer = True
    optional = True
    _global_value = None


class solve_tolerance(Number):
    """Relative residual of the original system that every column of a solve must reach.

    :param value: above 0, or None (default): 1e-6, and posterior means are also held to `mean_tolerance`.

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
    """Conjugate-gradient iterations after which a solve gives up, with a warning.

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
    """Observations (for log-determinants, also gaps) up to which ``"auto"`` uses dense Cholesky; beyond, if cheaper.

    ``gap_method("cholesky")`` and ``logdet_method("exact")`` ask for one whatever the size.

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

    About twice as fast on large grids. Where float32 cannot contract, the solve continues in float64. Solves of
    float32 models always work this way.

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
    """What marginal log likelihoods keep from one evaluation to the next.

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
