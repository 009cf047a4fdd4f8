"""The result of `fit_reconstruction`, and the record of its steps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gpytorch.kernels import Kernel
from torch import Tensor


@dataclass(frozen=True)
class LearningStep:
    """A step of :func:`fit_reconstruction`, before it changes the hyperparameters.

    >>> step = LearningStep({"noise": 0.1}, 0.3, 0.05, 500, 20, 0.1, 1e-3)
    >>> step.distance
    0.3

    :param values: values of the hyperparameters by name.
    :param distance: estimated distance to the maximum of the likelihood, in standard deviations of the hyperparameters.
    :param probe_error: error of this distance from random probes, in the same unit; zero if nothing was estimated.
    :param num_train: number of observations that were used.
    :param iterations: number of conjugate gradient iterations for the mean.
    :param seconds: duration of the step.
    :param error_in_std: certified error of the mean, in posterior standard deviations.
    """

    values: dict[str, float]
    distance: float
    probe_error: float
    num_train: int
    iterations: int
    seconds: float
    error_in_std: float


@dataclass(frozen=True, eq=False)
class LearnedKernels:
    """Hyperparameters with the largest likelihood: the result of :func:`fit_reconstruction`.

    >>> learned = LearnedKernels([], 0.1, {"noise": 0.1}, {"noise": 0.01}, -20.0, 0.0, [], True)
    >>> print(learned)
    0 steps, converged: noise 0.1 +- 1 %; log-likelihood -20

    :param kernels: the kernels with their hyperparameters, for :func:`reconstruct`.
    :param noise: the noise variance.
    :param values: values of the hyperparameters by name.
    :param deviations: their standard deviations given the data, for gaps that are spread evenly. They are relative for
        positive hyperparameters; for others, they are those of the raw values.
    :param log_likelihood: log-likelihood of all observations, in nats, before the last step.
    :param log_likelihood_error: its standard error from random probes.
    :param steps: the record of all steps.
    :param converged: whether the last step used all observations and was within the tolerance.
    """

    kernels: Sequence[Kernel | Tensor]
    noise: float
    values: dict[str, float]
    deviations: dict[str, float]
    log_likelihood: float
    log_likelihood_error: float
    steps: Sequence[LearningStep]
    converged: bool

    def __repr__(self) -> str:
        return f"<LearnedKernels {self}>"

    def __str__(self) -> str:
        ended = "converged" if self.converged else "not converged"
        found = ", ".join(
            f"{name} {value:.4g} +- {100 * self.deviations.get(name, math.nan):.2g} %"
            for name, value in self.values.items()
        )
        error = f" +- {self.log_likelihood_error:.2g}" if self.log_likelihood_error else ""
        return f"{len(self.steps)} steps, {ended}: {found}; log-likelihood {self.log_likelihood:.10g}{error}"
