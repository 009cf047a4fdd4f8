"""Settings that name a method: of solves, log-determinants, variances and preconditioners.

See :mod:`gpytorch_gaps.settings`.
"""

from typing import Any

from gpytorch_gaps.utils.contexts import Choice, Number, Setting


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

    :param value: ``"exact"``: a solve per point, or a closed form if the kernel has a low rank to the tolerance.
        ``"low_rank"``: the closed form at `preconditioner_rank`, even if that rank is too low. ``"pathwise"``: from
        `variance_samples` draws. ``"auto"`` (default): exact if that is affordable, else pathwise, with a warning.
        ``record_solves().variances`` states the error of methods that are not exact.

    >>> from gpytorch_gaps import settings
    >>> with variance_method("pathwise"):
    ...     settings.current().variance_method
    'pathwise'
    """

    choices = ("auto", "exact", "low_rank", "pathwise")
    _global_value = "auto"


class variance_samples(Number):
    """The largest number of draws for pathwise variances: the standard error is at most ``sqrt(2 / samples)``.

    At cells of the training grid, draws estimate only what the nearest observations do not explain, and errors are
    mostly far smaller. If that is less than 2 % of nearly all variances, no draws are made.

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
    """The preconditioner of conjugate gradients when gaps are ignored.

    :param value: ``"eigen"``: the leading eigenvectors of the kernel, of `preconditioner_rank`. ``"neighbours"``: a
        sparse inverse Cholesky factor with `num_neighbours`. ``"none"``: no preconditioner. ``"auto"`` (default): the
        fastest, by estimate. You can also pass a function of the system: see the page on preconditioners.
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

    :param value: at least 1, or None (default): 20, or 40 if these are expected to save time.

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
