"""What the steps of a fit did."""

import math
from collections import Counter
from dataclasses import dataclass, field

from gpytorch_gaps.reports import SolveRecord
from gpytorch_gaps.utils.progress import format_bytes


@dataclass
class History:
    """What every step of a fit did, one entry a step, each at the parameters *before* that step's update.

    CG iterations, residuals and standard errors are those that this package's operators report.
    """

    loss: list[float] = field(default_factory=list)
    """Negative log marginal likelihood (and priors) per observation, summed over a batch of GPs."""
    noise: list[float | None] = field(default_factory=list)
    """Mean of ``likelihood.noise``; None if there is none."""
    iterations: list[int] = field(default_factory=list)
    """Of conjugate gradients: solves and log-determinants, over all evaluations of the loss in the step."""
    worst_residual: list[float | None] = field(default_factory=list)
    """Largest relative residual of the step's solves; None if none were reported."""
    standard_error: list[float | None] = field(default_factory=list)
    """Of the log-determinant, per observation; 0 where it is exact, None where it is biased or not reported."""
    seconds: list[float] = field(default_factory=list)
    solve_seconds: list[float] = field(default_factory=list)
    """Of these, in solves that were reported."""
    gradient_seconds: list[float] = field(default_factory=list)
    """Of these, in the backward pass."""
    sent_bytes: list[int] = field(default_factory=list)
    """What this process handed to others that share the training: nothing if it is alone."""
    expected_gain: list[float | None] = field(default_factory=list)
    """Nats that the step was expected to gain, all observations together, in the last steps of a fit; None before."""
    num_observations: int = 0
    """Of each GP: ``loss * num_observations`` is in nats."""
    stopped: str = ""
    """``"converged"``, ``"plateau"``, ``"steps"`` or ``"interrupted"``; empty under way.

    ``"plateau"``: the loss stopped decreasing, but convergence could not be checked, because the loss is not a
    deterministic function of the parameters (dropout), or because a last step failed.
    """

    def __len__(self) -> int:
        return len(self.loss)

    @property
    def best_loss(self) -> float:
        return min(self.loss, default=math.inf)

    @property
    def converged(self) -> bool:
        """Whether an optimum was reached: next to nothing is left to gain, by the gradient and the curvature there."""
        return self.stopped == "converged"

    def as_dict(self) -> dict[str, list]:
        """The columns, of one length, as plotting and ``pandas.DataFrame`` take them."""
        return {name: list(values) for name, values in vars(self).items() if isinstance(values, list)}

    def __str__(self) -> str:
        ended = {"steps": "all done", "plateau": "plateau reached"}.get(self.stopped, self.stopped or "under way")
        if not self.loss:
            return f"0 steps, {ended}"
        noise = "" if self.noise[-1] is None else f", noise {self.noise[-1]:.3g}"
        bytes_sent = sum(self.sent_bytes)
        sent = f", {format_bytes(bytes_sent / len(self))} sent a step" if bytes_sent else ""
        return (
            f"{len(self)} steps, {ended}: loss {self.loss[0]:.4g} -> {self.loss[-1]:.4g} "
            f"nats per observation (best {self.best_loss:.4g}){noise}, {sum(self.iterations)} CG iterations, "
            f"{sum(self.seconds):.3g} s{sent}"
        )

    def _cut(self, length: int) -> None:
        """Forgets steps that were not completed."""
        for values in vars(self).values():
            if isinstance(values, list):
                del values[length:]


class FitError(RuntimeError):
    """Loss, gradient or parameters are no longer finite; `history` holds the steps up to there."""

    def __init__(self, message: str, step: int, history: History) -> None:
        super().__init__(message)
        self.step, self.history = step, history


def count_iterations(record: SolveRecord) -> int:
    """Of solves and log-determinants. Probes solved along with the right-hand side are reported as both: count one."""
    shared = Counter(solve.iterations for solve in record if "log-determinant" in solve.reason)
    total = sum(solve.iterations for solve in record)
    for logdet in record.logdets:
        if shared[logdet.iterations]:
            shared[logdet.iterations] -= 1
        else:
            total += logdet.iterations
    return total


def logdet_error(record: SolveRecord) -> float | None:
    """Standard error of the sum of all log-determinants, whose probes are independent."""
    errors = [logdet.standard_error for logdet in record.logdets]
    known = [error.double().square().sum().item() for error in errors if error is not None]
    return math.sqrt(sum(known)) if errors and len(known) == len(errors) else None
