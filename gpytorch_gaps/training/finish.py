"""The end of a fit: detection of a plateau, then quasi-Newton steps until almost nothing is left to gain.

Adam with a constant learning rate circles around an optimum, so losses that stop decreasing do not mean convergence.
After a plateau, L-BFGS takes steps ``-H^-1 g``. If log-determinants are estimated, it uses the fixed probes of a warm
start, so that the loss is a smooth function. (Probes drawn from a preconditioner would change abruptly with its
eigenvectors.) It uses gradients only. A line search would be unreliable, because estimated gradients are not exactly
the gradients of estimated values. With the gradient g and Hessian H of the negative log likelihood in nats, the
expected gain of a step is

    g' H^-1 g / 2

This is half the squared distance to the optimum, in standard deviations of the hyperparameters' posterior. At 1e-4
nats, the distance of every hyperparameter from the optimum is below 1.5 % of its standard deviation. (The optimum for k
fixed probes has itself an error of up to ``1 / sqrt(k)`` standard deviations.)
"""

import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from gpytorch_gaps.training.bounds import Bounds, arrived, put_at_bound
from gpytorch_gaps.training.history import History

PLATEAU_WINDOW = 5  # losses that are averaged before a comparison: single ones overshoot, or are estimates
FINISH_PROBES_FACTOR = 2  # number of fixed probes, relative to the number of probes in the steps before
CONVERGED_GAIN_NATS = 1e-4  # expected gain of a step below which a fit has converged
# Pairs (step, change of the gradient) from which the curvature is estimated. Ten miss flat directions.
_MAX_PAIRS = 20
_MAX_PARAMETER_CHANGE = 0.5  # largest change of a raw parameter in one step: the curvature changes with distance


class Plateau:
    """Counts the steps since the mean of the last five losses last decreased by `min_improvement` nats.

    :param patience: the number of these steps that is a plateau. None: there is never a plateau.
    """

    def __init__(self, patience: int | None, min_improvement: float) -> None:
        self._patience, self._min_improvement = patience, min_improvement
        self._window: deque[float] = deque(maxlen=PLATEAU_WINDOW)
        self._best, self._waited = math.inf, 0

    def add(self, nats: float) -> None:
        """Adds the loss of a step, for all observations together."""
        self._window.append(nats)
        if len(self._window) < PLATEAU_WINDOW:
            return
        mean = sum(self._window) / PLATEAU_WINDOW
        if mean < self._best - self._min_improvement:
            self._best, self._waited = mean, 0
        else:
            self._waited += 1

    def replay(self, history: History) -> None:
        """Adds the optimizer's steps of a resumed run."""
        for loss, gain in zip(history.loss, history.expected_gain, strict=True):
            if gain is None:
                self.add(loss * history.num_observations)

    @property
    def reached(self) -> bool:
        return self._patience is not None and self._waited >= self._patience


class QuasiNewton(Optimizer):
    """L-BFGS without a line search, for the last steps to an optimum. Each step takes one evaluation of the loss.

    It starts from ``H = I`` for the mean loss per observation, because each observation adds at most 1/2 to the
    curvature in the logarithm of a scale.

    :param parameters: the parameters to optimize.
    :param bounds: constraints of parameters that are held where they arrive at their lower bound.
    """

    def __init__(self, parameters: Iterable[Parameter], bounds: Bounds | None = None) -> None:
        super().__init__(parameters, {})
        self._parameters = self.param_groups[0]["params"]
        self._bounds = bounds or {}

    def step(self, closure: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]
        """Takes one step. `closure` returns the loss and computes its gradients."""
        loss = closure()
        state = self._own_state()
        self._hold_and_release()
        gradient = self._gradient().masked_fill(self._flags("held"), 0.0)
        if "gradient" in state:
            self._remember(state["step"], gradient - state["gradient"], state["pairs"])
        direction = -_times_inverse_curvature(gradient, state["pairs"])
        few = len(state["pairs"]) < max(_MAX_PAIRS, self._num_free)
        gain = 0.5 * gradient @ _times_inverse_curvature(gradient, state["pairs"], careful=few)
        state["expected_gain"] = float(gain)  # nats per observation
        step = direction * min(1.0, _MAX_PARAMETER_CHANGE / max(float(direction.abs().max()), 1e-300))
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
        """Whether there are as many pairs as free parameters, or twenty."""
        return len(self._own_state()["pairs"]) >= min(_MAX_PAIRS, self._num_free)

    @property
    def _num_free(self) -> int:
        """Number of parameters that are not held."""
        return sum(self._sizes()) - sum(self._own_state()["held"])

    def _hold_and_release(self) -> None:
        """Holds parameters that arrive at their bound, and releases those that turn out to have their optimum above."""
        state, held, released = self._own_state(), self._flags("held"), self._flags("released")
        near = torch.cat([arrived(parameter, self._bounds).reshape(-1) for parameter in self._parameters])
        new, wrong = near & ~held & ~released, held & (self._gradient() < 0)
        if not bool((new | wrong).any()):
            return
        sides = (which.split(self._sizes()) for which in (new, wrong))
        for parameter, down, up in zip(self._parameters, *sides, strict=True):
            put_at_bound(parameter, down.view_as(parameter), self._bounds)
            put_at_bound(parameter, up.view_as(parameter), self._bounds, close=True)
        held = (held | new) & ~wrong
        state["held"], state["released"] = held.tolist(), (released | wrong).tolist()
        known, state["pairs"] = state["pairs"], []
        for step, change in known:
            self._remember(step.masked_fill(held, 0.0), change.masked_fill(held, 0.0), state["pairs"])
        state.pop("gradient", None)  # that of other values of these parameters

    def _own_state(self) -> dict[str, Any]:
        state = self.state[self._parameters[0]]
        if not state:  # plain flags: a checkpoint would turn tensors into numbers
            state.update(pairs=[], held=[False] * sum(self._sizes()), released=[False] * sum(self._sizes()))
        return state

    def _flags(self, name: str) -> Tensor:
        return torch.tensor(self._own_state()[name], device=self._parameters[0].device)

    def _sizes(self) -> list[int]:
        return [parameter.numel() for parameter in self._parameters]

    def _gradient(self) -> Tensor:
        parts = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self._parameters]
        return torch.cat([part.detach().reshape(-1) for part in parts])

    @staticmethod
    def _remember(step: Tensor, change: Tensor, pairs: list[list[Tensor]]) -> None:
        if float(step @ change) > 1e-10 * float(step.norm() * change.norm()):  # positive curvature
            pairs.append([step, change])
            del pairs[:-_MAX_PAIRS]


def _times_inverse_curvature(gradient: Tensor, pairs: list[list[Tensor]], careful: bool = False) -> Tensor:
    """``H^-1 g`` by the two-loop recursion of L-BFGS (Nocedal & Wright 2006, algorithm 7.4).

    Unknown directions get the curvature of the last step, ``y'y / s'y``. A step along them is then short.

    :param careful: whether they get the smallest curvature seen so far, ``s'y / s's``, instead. Their gain is then
        over- rather than underestimated.
    """
    result, weights = gradient.clone(), []
    for step, change in reversed(pairs):
        weights.append((step @ result) / (step @ change))
        result -= weights[-1] * change
    if pairs and careful:
        result *= max((step @ step) / (step @ change) for step, change in pairs)
    elif pairs:
        step, change = pairs[-1]
        result *= (step @ change) / (change @ change)
    for (step, change), weight in zip(pairs, reversed(weights), strict=True):
        result += step * (weight - (change @ result) / (step @ change))
    return result
