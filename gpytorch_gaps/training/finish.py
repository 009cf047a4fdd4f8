"""The end of a fit: quasi-Newton steps on one fixed function, until next to nothing is left to gain.

Adam with a constant learning rate circles around an optimum. Losses that stop falling do not mean that it has arrived.
From a plateau on, L-BFGS takes steps ``-H^-1 g``. Where log-determinants are estimated, it uses the fixed probes of a
warm start, which make the gradient a smooth function; those that are drawn from a preconditioner jump with its
eigenvectors. It uses gradients only: their estimates are not exactly the gradients of the estimated values, so that a
line search would be misled. With g and H of the negative log-likelihood in nats, a step is expected to gain

    g' H^-1 g / 2

This is half the squared distance to the optimum in standard deviations of the estimates: at 1e-4 nats, every
hyperparameter is within 1.5 % of its own uncertainty of the optimum. (That of k fixed probes is itself off by at most
``1 / sqrt(k)`` of it.)
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

MORE_PROBES = 2  # times as many as in the steps before, as they stay the same
ENOUGH = 1e-4  # nats: what a step is expected to gain, where a fit has converged
_PAIRS = 10  # differences of gradients that tell the curvature
_LONGEST = 0.5  # change of a raw parameter in a step: beyond, the curvature is another


class QuasiNewton(Optimizer):
    """L-BFGS without a line search, one evaluation a step, for the last steps to an optimum.

    Starts from ``H = I`` for the mean over observations, of which each says at most 1/2 about the logarithm of a scale.
    """

    def __init__(self, parameters: Iterable[Parameter]) -> None:
        super().__init__(parameters, {})
        self._parameters = self.param_groups[0]["params"]

    def step(self, closure: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]
        loss = closure()
        gradient, state = self._gradient(), self._own_state()
        if "gradient" in state:
            self._remember(state["step"], gradient - state["gradient"], state["pairs"])
        direction = -_times_inverse_curvature(gradient, state["pairs"])
        state["expected_gain"] = -0.5 * float(gradient @ direction)  # an observation
        step = direction * min(1.0, _LONGEST / max(float(direction.abs().max()), 1e-300))
        state["gradient"], state["step"] = gradient, step
        with torch.no_grad():
            for parameter, part in zip(self._parameters, step.split(self._sizes()), strict=True):
                parameter += part.view_as(parameter)
        return loss

    @property
    def expected_gain(self) -> float:
        """Expected gain of the last step, in nats per observation."""
        return self._own_state()["expected_gain"]

    @property
    def knows_curvature(self) -> bool:
        """Whether gradients have been compared in as many directions as there are, or ten."""
        return len(self._own_state()["pairs"]) >= min(_PAIRS, sum(self._sizes()))

    def _own_state(self) -> dict[str, Any]:
        state = self.state[self._parameters[0]]
        state.setdefault("pairs", [])
        return state

    def _sizes(self) -> list[int]:
        return [parameter.numel() for parameter in self._parameters]

    def _gradient(self) -> Tensor:
        parts = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self._parameters]
        return torch.cat([part.detach().reshape(-1) for part in parts])

    @staticmethod
    def _remember(step: Tensor, change: Tensor, pairs: list[list[Tensor]]) -> None:
        if float(step @ change) > 1e-10 * float(step.norm() * change.norm()):  # a direction that is curved upwards
            pairs.append([step, change])
            del pairs[:-_PAIRS]


def _times_inverse_curvature(gradient: Tensor, pairs: list[list[Tensor]]) -> Tensor:
    """``H^-1 g`` by the two loops of L-BFGS (Nocedal & Wright 2006, algorithm 7.4).

    Directions that are not known are taken to be as flat as the flattest that was seen, ``s's / s'y``: rather too much
    is expected of them than too little.
    """
    result, weights = gradient.clone(), []
    for step, change in reversed(pairs):
        weights.append((step @ result) / (step @ change))
        result -= weights[-1] * change
    if pairs:
        result *= max((step @ step) / (step @ change) for step, change in pairs)
    for (step, change), weight in zip(pairs, reversed(weights), strict=True):
        result += step * (weight - (change @ result) / (step @ change))
    return result
