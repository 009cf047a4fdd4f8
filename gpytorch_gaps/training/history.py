"""The record of a fit, step by step."""

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from gpytorch_gaps.reports import SolveRecord
from gpytorch_gaps.training.uncertainty import HyperparameterUncertainty
from gpytorch_gaps.utils.progress import format_bytes


@dataclass
class History:
    """The record of a fit: one entry per step, computed with the parameters *before* the update of that step.

    CG iterations, residuals and standard errors are those reported by the operators of this package.

    >>> history = History(loss=[1.3, 0.2], noise=[0.7, 0.01], iterations=[9, 7], seconds=[0.1, 0.1], stopped="steps")
    >>> len(history), history.best_loss, history.converged
    (2, 0.2, False)
    >>> print(history)
    2 steps, all done: loss 1.3 -> 0.2 nats per observation (best 0.2), noise 0.01, 16 CG iterations, 0.2 s
    """

    loss: list[float] = field(default_factory=list)
    """Negative marginal log likelihood (and log priors) per observation, summed over a batch of GPs."""
    noise: list[float | None] = field(default_factory=list)
    """Mean of ``likelihood.noise``; None if the likelihood has no noise."""
    iterations: list[int] = field(default_factory=list)
    """CG iterations of solves and log-determinants, over all evaluations of the loss in the step."""
    worst_residual: list[float | None] = field(default_factory=list)
    """Largest relative residual of the step's solves; None if none were reported."""
    standard_error: list[float | None] = field(default_factory=list)
    """Standard error of the log-determinant per observation; 0 if exact, None if biased or not reported."""
    seconds: list[float] = field(default_factory=list)
    """Wall-clock seconds of the step."""
    solve_seconds: list[float] = field(default_factory=list)
    """Seconds in reported solves."""
    gradient_seconds: list[float] = field(default_factory=list)
    """Seconds in the backward pass."""
    sent_bytes: list[int] = field(default_factory=list)
    """Bytes that this process sent to others that share the training; 0 for a single process."""
    expected_gain: list[float | None] = field(default_factory=list)
    """Expected gain of an L-BFGS step at the end of a fit, in nats for all observations; None for other steps."""
    num_observations: int = 0
    """Number of observations of each GP: ``loss * num_observations`` is in nats."""
    num_distrusted: int | None = None
    """Number of observations with gross errors; None unless the likelihood is robust."""
    stopped: str = ""
    """Why the fit ended: ``"converged"``, ``"plateau"``, ``"steps"`` or ``"interrupted"``; empty before the end.

    ``"plateau"``: the loss stopped decreasing, but convergence could not be checked, because the loss is not a
    deterministic function of the parameters (dropout), or because a last step failed.
    """

    uncertainty: HyperparameterUncertainty | None = None
    """How well the data determine the hyperparameters; None unless ``fit(uncertainty=True)``."""

    def __len__(self) -> int:
        return len(self.loss)

    @property
    def best_loss(self) -> float:
        """The lowest loss; infinite without steps."""
        return min(self.loss, default=math.inf)

    @property
    def converged(self) -> bool:
        """Whether an optimum was reached, according to the gradient and the curvature."""
        return self.stopped == "converged"

    def as_dict(self) -> dict[str, list]:
        """Columns of equal length, for plots or ``pandas.DataFrame``.

        :return: one list per quantity, with one entry per step.
        """
        return {name: list(values) for name, values in vars(self).items() if isinstance(values, list)}

    def __str__(self) -> str:
        ended = {"steps": "all done", "plateau": "plateau reached"}.get(self.stopped, self.stopped or "under way")
        if not self.loss:
            return f"0 steps, {ended}"
        noise = "" if self.noise[-1] is None else f", noise {self.noise[-1]:.3g}"
        bytes_sent = sum(self.sent_bytes)
        sent = f", {format_bytes(bytes_sent / len(self))} sent per step" if bytes_sent else ""
        distrusted = "" if self.num_distrusted is None else f", {self.num_distrusted} observations distrusted"
        return (
            f"{len(self)} steps, {ended}: loss {self.loss[0]:.4g} -> {self.loss[-1]:.4g} "
            f"nats per observation (best {self.best_loss:.4g}){noise}, {sum(self.iterations)} CG iterations, "
            f"{sum(self.seconds):.3g} s{sent}{distrusted}"
        )

    def _append(self, **entries: Any) -> None:
        """Adds a step."""
        for name, value in entries.items():
            getattr(self, name).append(value)

    def _truncate(self, length: int) -> None:
        """Removes steps that were not completed."""
        for values in vars(self).values():
            if isinstance(values, list):
                del values[length:]


class FitError(RuntimeError):
    """Raised by :func:`fit` if the loss, a gradient or a parameter is no longer finite.

    :param message: what is not finite, and what to try.
    :param step: number of the step that failed, from 0.
    :param history: the completed steps.

    >>> error = FitError("the loss is nan", 3, History(loss=[1.0, 0.9, 0.8]))
    >>> error.step, len(error.history)
    (3, 3)
    """

    def __init__(self, message: str, step: int, history: History) -> None:
        super().__init__(message)
        self.step, self.history = step, history


def count_iterations(record: SolveRecord) -> int:
    """Total CG iterations. Probes solved together with y appear in both reports and are counted once."""
    shared = Counter(solve.iterations for solve in record if "log-determinant" in solve.reason)
    total = sum(solve.iterations for solve in record)
    for logdet in record.logdets:
        if shared[logdet.iterations]:
            shared[logdet.iterations] -= 1
        else:
            total += logdet.iterations
    return total


def logdet_error(record: SolveRecord) -> float | None:
    """Standard error of the sum of all log-determinants, with independent probes."""
    errors = [logdet.standard_error for logdet in record.logdets]
    known = [error.double().square().sum().item() for error in errors if error is not None]
    return math.sqrt(sum(known)) if errors and len(known) == len(errors) else None
