"""Fits the hyperparameters of an ExactGP: ascends its log marginal likelihood, and keeps account of every step.

>>> history = fit(model, steps=200, checkpoint="run.pt")  # doctest: +SKIP
>>> print(history)  # doctest: +SKIP
84 steps, converged: loss 1.31 -> 0.207 nats per observation (best 0.206), noise 0.0102, 903 CG iterations, 12.1 s
"""

import math
import numbers
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from gpytorch.mlls import ExactMarginalLogLikelihood, MarginalLogLikelihood
from gpytorch.models import ExactGP
from torch.optim import Adam, Optimizer
from tqdm import tqdm

from gpytorch_gaps.distributed.agreement import describe_module
from gpytorch_gaps.distributed.columns import same_start
from gpytorch_gaps.distributed.communicator import communicator_for
from gpytorch_gaps.solvers.warm_start import WarmStart
from gpytorch_gaps.training.checkpoint import Checkpoint, problem_of
from gpytorch_gaps.training.history import FitError, History
from gpytorch_gaps.training.run import Run
from gpytorch_gaps.utils.files import digest

PLATEAU_WINDOW = 5
"""Losses averaged before they are compared, so that neither Adam's overshoot nor noisy log-determinants end a run."""


def fit(
    model: ExactGP,
    steps: int = 100,
    *,
    lr: float = 0.1,
    optimizer: Optimizer | Callable[..., Optimizer] | None = None,
    progress: bool = True,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 10,
    patience: int | None = 10,
    min_improvement: float = 0.1,
    mll: MarginalLogLikelihood | None = None,
    warm_start: bool | WarmStart = False,
    group: Any = None,
) -> History:
    """Maximises the log marginal likelihood of `model` over its parameters that require a gradient.

    The model and its likelihood are left in eval mode, ready to predict, however the fit ends. Should loss or gradient
    become NaN or infinite, a :class:`FitError` is raised and the model put back to its last parameters with a finite
    loss. Any other exception, Ctrl-C included, passes through once the unfinished step is undone and, with
    `checkpoint`, the state saved; it carries the steps done as its attribute `history`.

    :param steps: in all, those of a resumed checkpoint included.
    :param lr: the learning rate; a ready optimizer has its own.
    :param optimizer: a class or function called as ``optimizer(parameters, lr=lr)``, or a ready Optimizer of
        parameters of the model. Adam by default. L-BFGS works: a step may evaluate the loss many times.
    :param progress: whether to show a bar, on stderr.
    :param checkpoint: a file to which the state is saved at the start, every `checkpoint_every` steps and at the end.
        If it exists, the run resumes from it, with its parameters, optimizer and torch random state: the trajectory is
        that of an uninterrupted run, bit for bit on the same machine. A finished run returns at once. A checkpoint of
        other data, parameters, optimizer or settings (such as ``settings.logdet_method``) is refused.
    :param patience: after so many steps without improvement of the mean of the last five losses by `min_improvement`
        nats (all observations together, not per observation) the optimizer gives way to the finish: L-BFGS steps with
        fixed probes, until one is expected to gain less than 1e-4 nats. Then ``history.converged`` is True. None leaves
        all steps to the optimizer.
    :param mll: maximised in place of ``ExactMarginalLogLikelihood(model.likelihood, model)``.
    :param warm_start: for 10^5 observations and more: solves start from those of the step before, with the same probes
        at every step, to a loose tolerance; a :class:`WarmStart` says how many and how loose. Where log-determinants
        are exact it changes nothing. (A resumed run sets up its preconditioners anew: there, the trajectory is that of
        an uninterrupted one to the tolerance, not bit for bit.)
    :param group: of ``torch.distributed``, such as :func:`gpytorch_gaps.distributed.process_group` gives: its members
        make the same call with the same model and data, and share the solves of every step, those for the data and
        for the probes of the log-determinant. All end with the parameters that one process would have found, and
        started from those, and from the random state, of the first. Where log-determinants are exact there is nothing
        to share. The first one writes the checkpoint.
    """
    ranks = communicator_for(group, "fit")

    def prepared() -> Run:
        _check_numbers(steps, lr, checkpoint_every, patience, min_improvement)
        objective = _checked_mll(model, mll)
        return Run(model, objective, _make_optimizer(model, optimizer, lr), _make_memory(warm_start), ranks)

    run = ranks.run_on_all("checking what it was given", prepared)
    if ranks.size > 1:
        arguments = {
            "steps": steps,
            "checkpoint": str(checkpoint),
            "checkpoint_every": checkpoint_every,
            "patience": patience,
            "min_improvement": min_improvement,
        }
        ranks.require_same({**_flat(problem_of(run)), **arguments, **_in_force(run)})
        same_start(model, ranks)
        run.begin()
    plateau = _Plateau(patience, min_improvement)
    file = None if checkpoint is None else Checkpoint(Path(checkpoint), run)
    if file is not None:
        file.resume_or_start()
    for loss, gain in zip(run.history.loss, run.history.expected_gain, strict=True):
        if gain is None:
            plateau.add(loss * run.history.num_observations)
    model.train()
    try:
        hidden = not (progress and ranks.is_main)
        with tqdm(total=int(steps), initial=len(run.history), desc="fit", disable=hidden) as bar:
            while not (stopped := _advance(run, plateau, int(steps))):
                bar.set_postfix(run.latest(), refresh=False)
                bar.update()
                if file is not None and len(run.history) % checkpoint_every == 0:
                    file.save()
        run.history.stopped = stopped
        if file is not None:
            file.save()
    except FitError:
        run.fall_back(file)
        raise
    except BaseException as error:
        run.interrupt(error, file)
        raise
    finally:
        model.eval()
    return run.history


def _advance(run: Run, plateau: "_Plateau", steps: int) -> str:
    """One step more, of the optimizer or, from a plateau on, of the finish; or why there is none."""
    if run.arrived:
        return "converged"
    if len(run.history) >= steps:
        return "steps"
    if not plateau.reached:
        run.step()
        plateau.add(run.history.loss[-1] * run.history.num_observations)
    elif not ((run.finish or run.begin_finish()) and run.finish_step()):
        return "plateau"
    return ""


def _in_force(run: Run) -> dict[str, str]:
    """What else decides about the steps: the groups and state of a ready optimizer, and modules."""
    groups = [{k: v for k, v in group.items() if k != "params"} for group in run.optimizer.param_groups]
    state = [
        value
        for own in run.optimizer.state_dict()["state"].values()
        for value in own.values()
        if torch.is_tensor(value)
    ]
    return {
        "optimizer: groups": str(groups),
        "optimizer: state": digest(*state),
        "modules": str([describe_module(module) for module in run.model.modules()]),
    }


def _flat(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Entries of entries by their path."""
    found: dict[str, Any] = {}
    for name, value in nested.items():
        found.update(_flat(value, f"{prefix}{name}: ") if isinstance(value, dict) else {prefix + name: value})
    return found


class _Plateau:
    """Counts the steps since the windowed mean last fell by enough."""

    def __init__(self, patience: int | None, min_improvement: float) -> None:
        self._patience, self._min_improvement = patience, min_improvement
        self._window: deque[float] = deque(maxlen=PLATEAU_WINDOW)
        self._best, self._waited = math.inf, 0

    def add(self, nats: float) -> None:
        self._window.append(nats)
        if len(self._window) < PLATEAU_WINDOW:
            return
        mean = sum(self._window) / PLATEAU_WINDOW
        if mean < self._best - self._min_improvement:
            self._best, self._waited = mean, 0
        else:
            self._waited += 1

    @property
    def reached(self) -> bool:
        return self._patience is not None and self._waited >= self._patience


def _checked_mll(model: ExactGP, mll: MarginalLogLikelihood | None) -> MarginalLogLikelihood:
    if not isinstance(model, ExactGP):
        _refuse("model", type(model).__name__, "a gpytorch.models.ExactGP")
    if model.train_inputs is None or model.train_targets is None or not model.train_targets.numel():
        _refuse("model", "one without training data", "train_inputs and train_targets; see set_train_data")
    rows = model.train_inputs[0].size(-2)
    if model.train_targets.size(-1) != rows:
        came = f"train_targets of shape {tuple(model.train_targets.shape)}"
        _refuse("model", came, f"(*batch, {rows}), one for each row of train_inputs")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        _refuse("model", "no parameter that requires a gradient", "at least one to fit")
    if mll is None:
        return ExactMarginalLogLikelihood(model.likelihood, model)
    if not isinstance(mll, MarginalLogLikelihood):
        _refuse("mll", type(mll).__name__, "a gpytorch.mlls.MarginalLogLikelihood")
    if mll.model is not model or mll.likelihood is not model.likelihood:
        _refuse("mll", "one of another model or likelihood", "that of model and model.likelihood")
    return mll


def _make_optimizer(model: ExactGP, given: Optimizer | Callable[..., Optimizer] | None, lr: float) -> Optimizer:
    if not isinstance(given, Optimizer):
        if given is not None and not callable(given):
            _refuse("optimizer", type(given).__name__, "an Optimizer, its class, or a function of (params, lr)")
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        given = (given or Adam)(parameters, lr=lr)
        if not isinstance(given, Optimizer):
            _refuse("optimizer", f"a function that returns {type(given).__name__}", "one that returns an Optimizer")
    own = set(map(id, model.parameters()))
    foreign = sum(id(parameter) not in own for group in given.param_groups for parameter in group["params"])
    if foreign:
        _refuse("optimizer", f"one of {foreign} parameters that are not the model's", "one of the model's own only")
    return given


def _make_memory(given: bool | WarmStart) -> WarmStart | None:
    if not isinstance(given, bool | WarmStart):
        _refuse("warm_start", repr(given), "True, False or a WarmStart")
    return WarmStart() if given is True else given or None


def _check_numbers(steps: Any, lr: Any, checkpoint_every: Any, patience: Any, min_improvement: Any) -> None:
    for name, value, minimum in (
        ("steps", steps, 0),
        ("checkpoint_every", checkpoint_every, 1),
        ("patience", patience, 1),
    ):
        whole = isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= minimum
        if not whole and not (name == "patience" and value is None):
            _refuse(name, repr(value), f"an integer, at least {minimum}{' or None' if name == 'patience' else ''}")
    for name, value in (("lr", lr), ("min_improvement", min_improvement)):
        real = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
        if not real or value < 0 or (name == "lr" and value == 0):
            _refuse(name, repr(value), f"a finite number, {'above' if name == 'lr' else 'at least'} 0")


def _refuse(argument: str, came: str, expected: str) -> NoReturn:
    raise ValueError(f"fit: {argument}: got {came}, expected {expected}")
