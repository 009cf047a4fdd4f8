"""Reports of solves (method, iterations, residual of the *original* system), and the blocks that record them."""

import logging
import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

from gpytorch_gaps.utils.html import fields_table

_logger = logging.getLogger(__name__)


class ApproximateVarianceWarning(NumericalWarning):
    """Variances are estimates, as exact ones would take too long. The message states their error and what to try."""


class CalibrationWarning(NumericalWarning):
    """Error bars cover too few or too many of the withheld observations. The message suggests what to try."""


class NotConvergedWarning(NumericalWarning):
    """A solve ended above its tolerance. The message states the residual that was reached and what to try.

    >>> import warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("error", NotConvergedWarning)  # a solve that does not converge raises
    """


@dataclass(frozen=True, eq=False)
class SolveReport:
    """One linear solve.

    `residual` is ``||(K_XX + s2 I) a_X - y_X|| / ||y_X||`` per column, of shape ``(*batch, columns)``, computed in
    float64 from the float64 solution; the solution of a float32 system is rounded afterwards. `iterations` counts
    conjugate-gradient iterations, i.e. products with the system being solved, over all refinement passes. `flops`
    counts Kronecker products, the preconditioner, and its set-up if this solve performed it. `expected_seconds` is the
    time that `auto` expected on this machine. Right-hand sides that were solved in several `parts` have one report, in
    which numbers are summed.

    >>> from gpytorch_gaps.operators import SelectedKroneckerOperator
    >>> with record_solves() as solves:
    ...     _ = SelectedKroneckerOperator(torch.eye(3).double()).add_diagonal(1.0).solve(torch.ones(3, 1).double())
    >>> solves[0].method, solves[0].converged, solves[0].num_rhs
    ('cholesky', True, 1)
    """

    method: str
    iterations: int
    residual: Tensor
    seconds: float
    rank: int
    num_rhs: int
    converged: bool
    tolerance: float
    refinements: int = 0
    flops: float = 0.0
    reason: str = ""
    parts: int = 1
    expected_seconds: float = math.inf
    error_in_std: float = math.inf
    """Certified bound on the error of the posterior mean of the data that were solved for, at every point, in units of
    the posterior standard deviation there: ``||D^(-1/2) r||``, the residual r in units of the noise D, of the worst
    column. Infinite without noise, and where the system is not a noisy covariance."""
    std_tolerance: float | None = None
    """The largest `error_in_std` that counts as converged; None if there is no such requirement."""
    num_neighbours: int = 0
    """Neighbours of each observation, if the preconditioner is a sparse inverse Cholesky factor; else 0."""

    @property
    def worst_residual(self) -> float:
        return float(self.residual.max()) if self.residual.numel() else 0.0

    def __repr__(self) -> str:
        return f"<SolveReport {self}>"

    def _repr_html_(self) -> str:
        return fields_table(self)

    def __str__(self) -> str:
        state = "converged" if self.converged else "NOT CONVERGED"
        rank = f", rank {self.rank}" if self.rank else ""
        rank = f", {self.num_neighbours} neighbours" if self.num_neighbours else rank
        why = f" ({self.reason})" if self.reason else ""
        why = f" in {self.parts} parts{why}" if self.parts > 1 else why
        why = why if math.isinf(self.expected_seconds) else f" ({self.expected_seconds:.2g} s expected){why}"
        known = not math.isinf(self.error_in_std)
        bound = f", mean within {self.error_in_std:.1e} standard deviations" if known else ""
        return (
            f"{self.method}{rank}: {state} in {self.iterations} iterations, worst residual {self.worst_residual:.1e} "
            f"of {self.num_rhs} right-hand sides{bound}, {self.flops / 1e9:.3g} GFLOP, {self.seconds:.3g} s{why}"
        )


@dataclass(frozen=True, eq=False)
class LogdetReport:
    """One log-determinant. `standard_error` is zero on exact paths, None for Nystrom, which is biased.

    >>> from gpytorch_gaps.operators import SelectedKroneckerOperator
    >>> with record_solves() as solves:
    ...     _ = SelectedKroneckerOperator(torch.eye(3).double()).add_diagonal(1.0).logdet()
    >>> solves.logdets[0].method, float(solves.logdets[0].standard_error)
    ('exact', 0.0)
    """

    method: str
    value: Tensor
    standard_error: Tensor | None
    num_probes: int
    iterations: int = 0  # Lanczos iterations
    reason: str = ""

    def __str__(self) -> str:
        error = "biased" if self.standard_error is None else f"standard error {float(self.standard_error.max()):.2g}"
        probes = f", {self.num_probes} probes, {self.iterations} iterations" if self.num_probes else ""
        return f"{self.method} ({self.reason}): {self.value.tolist()}, {error}{probes}"


@dataclass(frozen=True, eq=False)
class VarianceReport:
    """The variances of a posterior.

    `error` has one entry per point, in the units of the variance. For ``"exact"`` it is a bound, from the tolerance,
    the residuals and rounding. For the others, 95 % of points have a smaller error, as estimated from some exact
    variances (``"low_rank"``) or from the number of samples (``"pathwise"``: about two standard errors). Where the
    nearest observations explain nearly all, ``"pathwise"`` needs no samples; nearly exact variances then give the
    error.

    >>> report = VarianceReport("exact", torch.zeros(2), seconds=0.0)
    >>> print(report)
    exact variances of 2 points: error up to 0.0e+00, 0 s
    """

    method: str
    error: Tensor  # shape: (*batch, Q)
    seconds: float
    rank: int = 0
    num_samples: int = 0
    reason: str = ""

    def __repr__(self) -> str:
        return f"<VarianceReport {self}>"

    def __str__(self) -> str:
        rank = f", rank {self.rank}" if self.rank else ""
        samples = f", {self.num_samples} samples" if self.num_samples else ""
        largest = float(self.error.max()) if self.error.numel() else 0.0
        why = f" ({self.reason})" if self.reason else ""
        points = f"{self.error.size(-1)} points{rank}{samples}"
        return f"{self.method} variances of {points}: error up to {largest:.1e}, {self.seconds:.3g} s{why}"


class SolveRecord(list[SolveReport]):
    """Reports of the solves of a block, in order, of its log-determinants (`logdets`) and its variances (`variances`).

    >>> SolveRecord().logdets
    []
    """

    def __init__(self) -> None:
        super().__init__()
        self.logdets: list[LogdetReport] = []
        self.variances: list[VarianceReport] = []


_recorders: list[SolveRecord] = []


@contextmanager
def record_solves() -> Iterator[SolveRecord]:
    """Collects a report of every solve inside the block. Blocks may be nested: the outer one also collects the inner's.

    :return: a context that gives a :class:`SolveRecord`.

    >>> with record_solves() as outer, record_solves() as inner:
    ...     pass
    >>> len(outer) == len(inner) == 0
    True
    """
    record = SolveRecord()
    _recorders.append(record)
    try:
        yield record
    finally:
        # by identity: two empty records compare equal
        _recorders[:] = [r for r in _recorders if r is not record]


def active_records() -> tuple[SolveRecord, ...]:
    return tuple(_recorders)


@contextmanager
def also_record_to(records: Iterable[SolveRecord]) -> Iterator[None]:
    """Also records solves made inside the block to `records`."""
    idle = [record for record in records if not any(record is other for other in _recorders)]
    _recorders.extend(idle)
    try:
        yield
    finally:
        _recorders[:] = [r for r in _recorders if not any(r is record for record in idle)]


class Together:
    """Collects solves that share one report."""

    def __init__(self) -> None:
        self.residual: Tensor | None = None  # residual of all solves together, if it was computed
        self._parts: list[tuple[SolveReport, Any, str]] = []

    def add(self, report: SolveReport, advice: str) -> None:
        # on a host as numbers: small tensors between large ones would prevent the reuse of memory
        own = report.residual
        self._parts.append(
            (replace(report, residual=_NOTHING), own.tolist() if own.device.type == "cpu" else own, advice)
        )

    def report(self) -> None:
        if not self._parts:
            return
        reports = [report for report, _, _ in self._parts]
        residual = self.residual
        if residual is None:
            every = (own for _, own, _ in self._parts)
            tensors = [own if torch.is_tensor(own) else torch.tensor(own, dtype=torch.float64) for own in every]
            residual = torch.cat(tensors, -1)
        merged = replace(
            reports[0],
            iterations=sum(report.iterations for report in reports),
            residual=residual,
            seconds=sum(report.seconds for report in reports),
            num_rhs=residual.numel(),
            converged=all(report.converged for report in reports),
            tolerance=max(report.tolerance for report in reports),
            refinements=sum(report.refinements for report in reports),
            flops=sum(report.flops for report in reports),
            parts=sum(report.parts for report in reports),
            expected_seconds=sum(report.expected_seconds for report in reports),
            error_in_std=max(report.error_in_std for report in reports),
        )
        report_solve(merged, next((advice for report, _, advice in self._parts if not report.converged), ""))


_NOTHING = torch.zeros(0)
_together: list[Together] = []


@contextmanager
def one_report() -> Iterator[Together]:
    """Makes one report, at the end of the block, of solves for different columns of the same right-hand side."""
    together = Together()
    _together.append(together)
    try:
        yield together
    finally:
        _together.remove(together)
        together.report()


def report_solve(report: SolveReport, advice: str) -> None:
    """Passes a report to every active recorder, and warns if the solve did not converge."""
    if _together:
        _together[-1].add(report, advice)
        return
    _logger.debug("solve: %s", report)
    for record in _recorders:
        record.append(report)
    warn_not_converged(report, advice)


def warn_not_converged(report: SolveReport, advice: str) -> None:
    """Warns if a solve did not converge. The message states what was reached and what to try."""
    if report.converged:
        return
    achieved = f"a relative residual of {report.worst_residual:.1e} where {report.tolerance:.1e} was required"
    if report.std_tolerance is not None and report.worst_residual <= report.tolerance:
        achieved = (
            f"posterior means within {report.error_in_std:.1e} of their standard deviations where "
            f"{report.std_tolerance:.1e} was required"
        )
    message = f"{report.method!r} stopped after {report.iterations} iterations with {achieved}. Try: {advice}."
    warnings.warn(message, NotConvergedWarning, stacklevel=2)


def report_logdet(report: LogdetReport) -> None:
    _logger.debug("log-determinant: %s", report)
    for record in _recorders:
        record.logdets.append(report)


def report_variance(report: VarianceReport) -> None:
    _logger.debug("variances: %s", report)
    for record in _recorders:
        record.variances.append(report)
