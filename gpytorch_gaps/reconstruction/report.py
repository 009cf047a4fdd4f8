"""The report of a reconstruction."""

import math
import warnings
from dataclasses import dataclass, field

from linear_operator.utils.warnings import NumericalWarning

from gpytorch_gaps.distributed.communicator import Traffic
from gpytorch_gaps.reports import SolveReport, report_solve
from gpytorch_gaps.utils.progress import format_bytes

_ADVICE = "more max_iterations, more memory for the dense block of the preconditioner, or more noise"


@dataclass(frozen=True, eq=False)
class ReconstructionReport(SolveReport):
    """The report of a reconstruction, ``Reconstruction.report``.

    It has the fields of :class:`SolveReport`. `error_in_std` bounds the error of the mean at every point, in units of
    the posterior standard deviation there. It includes the error of the solve, and those of `kernel_error` and dropped
    eigenvalues, which grow with `misfit`. `residual` is that of the system of the weights in float64,
    ``|Phi'W'y - (s2 T^-1 + Phi'W'W Phi) w| / |Phi'W'y|``.

    >>> import numpy as np, gpytorch_gaps as gaps
    >>> from gpytorch.kernels import RBFKernel
    >>> values = np.sin(np.linspace(0, 6, 40))[:, None] * np.ones(30)
    >>> values[10:20, 5:15] = np.nan
    >>> report = gaps.reconstruct(values, None, [RBFKernel(), RBFKernel()], noise=0.01, progress=False).report
    >>> report.converged, report.num_train, report.error_in_std < 0.01
    (True, 1100, True)

    :param kernel_error: a bound on ``|K - Phi T Phi'| / s2``, the error of truncation, factorisation and rounding.
    :param misfit: root mean square of ``y - f`` at the observations, in units of the noise standard deviation. It is at
        most about 1 if the noise variance is correct.
    :param shape: cells along each axis.
    :param num_train: number of observed cells.
    :param ranks: number of eigenvectors that are kept on each axis.
    :param basis_size: number of products of eigenvectors that are kept.
    :param read_seconds: seconds to read the values.
    :param setup_seconds: seconds to decompose the kernels.
    :param num_processes: number of processes.
    :param traffic: messages and bytes that this process sent until the end of the solve.
    :param bytes_per_iteration: bytes that this process sent per iteration of the solve.
    :param num_draws: number of draws for the standard deviations.
    :param std_error: relative error of the standard deviations, from the number of draws and from their solves. Each
        standard deviation is within its error with a probability of 95 %, and 95 % of the errors are below this number.
    :param median_std_error: the median of these errors.
    :param std_truncation: a bound on the relative error of standard deviations from dropped eigenvalues.
    :param draw_seconds: seconds for the draws.
    """

    kernel_error: float = math.inf
    misfit: float = math.nan
    shape: tuple[int, ...] = ()
    num_train: int = 0
    ranks: tuple[int, ...] = ()
    basis_size: int = 0
    read_seconds: float = 0.0
    setup_seconds: float = 0.0
    num_processes: int = 1
    traffic: Traffic = field(default_factory=Traffic)
    bytes_per_iteration: float = 0.0
    num_draws: int = 0
    std_error: float = math.nan
    median_std_error: float = math.nan
    std_truncation: float = math.nan
    draw_seconds: float = 0.0

    def __repr__(self) -> str:
        return f"<ReconstructionReport {self}>"

    def __str__(self) -> str:
        grid = " x ".join(map(str, self.shape))
        shared = ""
        if self.num_processes > 1:
            sent = format_bytes(self.bytes_per_iteration)
            shared = f"; {self.num_processes} processes, each of which sent {sent} per iteration ({self.traffic})"
        return (
            f"{grid} cells, {self.num_train} observed; {self.basis_size} of {math.prod(self.ranks)} basis functions, "
            f"which leave out {self.kernel_error:.1e} of the noise; {super().__str__()}; reading took "
            f"{self.read_seconds:.3g} s, the basis {self.setup_seconds:.3g} s{shared}{self._drawn}"
        )

    @property
    def std_accuracy(self) -> str:
        """The accuracy of the standard deviations in words; empty without draws."""
        if not self.num_draws:
            return ""
        median, nearly_all = 100 * self.median_std_error, 100 * self.std_error
        return f"from {self.num_draws} draws, half of them within {median:.2g} %, 95 % within {nearly_all:.2g} %"

    @property
    def _drawn(self) -> str:
        if not self.num_draws:
            return ""
        return (
            f"; standard deviations {self.std_accuracy}, dropped eigenvalues add at most {self.std_truncation:.1e} of "
            f"them, in {self.draw_seconds:.3g} s"
        )


def announce(report: ReconstructionReport, kernel_part: float) -> None:
    """Record the report, and warn if the tolerance was not reached.

    :param kernel_part: the part of `error_in_std` that is due to the truncated and rounded kernel.
    """
    advice = _ADVICE
    if kernel_part > 0.5 * report.error_in_std:
        advice = (
            f"a larger noise: float64 resolves the kernel to {report.kernel_error:.1e} of the noise variance, and the "
            f"RMS residual of the data is {report.misfit:.1e} noise standard deviations"
        )
    report_solve(report, advice)
    if report.kernel_error > 1.0:
        warnings.warn(
            f"the kernel is known only to {report.kernel_error:.1e} times the noise: float64 does not resolve "
            "eigenvalues as small as the noise. Try: more noise, or a rougher kernel.",
            NumericalWarning,
            stacklevel=3,
        )
