"""Fits the hyperparameters of an ExactGP by maximizing its marginal log likelihood, and records every step."""

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from gpytorch.mlls import ExactMarginalLogLikelihood, LeaveOneOutPseudoLikelihood, MarginalLogLikelihood
from gpytorch.models import ExactGP
from torch.optim import Adam, Optimizer
from tqdm import tqdm

from gpytorch_gaps.distributed.agreement import describe_module
from gpytorch_gaps.distributed.columns import same_start
from gpytorch_gaps.distributed.communicator import communicator_for
from gpytorch_gaps.laplace import LaplaceGP, LaplaceMarginalLogLikelihood
from gpytorch_gaps.solvers.warm_start import WarmStart
from gpytorch_gaps.training.checkpoint import Checkpoint, problem_of
from gpytorch_gaps.training.curvature import measure
from gpytorch_gaps.training.finish import Plateau
from gpytorch_gaps.training.history import FitError, History
from gpytorch_gaps.training.run import TrainingRun
from gpytorch_gaps.utils.checks import check_integer, check_number
from gpytorch_gaps.utils.files import digest

_MOST_WITH_UNCERTAINTY = 100  # parameters: each takes three evaluations of the gradient, and two predictions
_LEAST_IMPROVEMENT, _IMPROVEMENT_PER_OBSERVATION = 0.1, 1e-3  # nats in the steps of Adam, before L-BFGS takes over


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
    min_improvement: float | None = None,
    mll: MarginalLogLikelihood | None = None,
    warm_start: bool | WarmStart = False,
    group: Any = None,
    uncertainty: bool = False,
) -> History:
    """Maximizes the marginal log likelihood of `model` over its parameters that require a gradient.

    At the end, the model and its likelihood are in eval mode, ready to predict, even if the fit fails. If an exception
    other than :class:`FitError` interrupts the fit (such as Ctrl-C), the unfinished step is undone, the state is saved
    to `checkpoint`, and the exception is raised again. Its attribute `history` holds the completed steps.

    :param model: the model, with training data.
    :param steps: total number of steps, including those of a resumed checkpoint.
    :param lr: learning rate. An Optimizer object has its own.
    :param optimizer: a class or function that is called as ``optimizer(parameters, lr=lr)``, or an Optimizer object for
        parameters of the model. Default: Adam. L-BFGS works too: a step may evaluate the loss several times.
    :param progress: whether to show a progress bar on stderr.
    :param checkpoint: file to which the state is saved at the start, every `checkpoint_every` steps and at the end. If
        it exists, the run resumes from it, with its parameters, optimizer and random state of torch. On the same
        machine, the results are bit for bit those of an uninterrupted run with the same checkpoints. A finished run
        returns immediately.
    :param checkpoint_every: number of steps between saves.
    :param patience: number of steps without improvement after which L-BFGS replaces the optimizer. An improvement is a
        decrease of the mean of the last five losses by `min_improvement`. L-BFGS uses fixed probes and stops when a
        step is expected to gain less than 1e-4 nats; ``history.converged`` is then True. None: the optimizer takes all
        steps.
    :param min_improvement: smallest decrease of the loss that is an improvement, in nats for all observations together.
        Default: 0.001 per observation, but at least 0.1.
    :param mll: objective to maximize. Default: ``ExactMarginalLogLikelihood(model.likelihood, model)``, and for a
        :class:`LaplaceGP` its :class:`LaplaceMarginalLogLikelihood`.
    :param warm_start: for 10^5 observations and more: solves start from the solutions of the previous step, with the
        same probes at every step and a loose tolerance. Pass a :class:`WarmStart` to choose the number of probes and
        the tolerance. Exact log-determinants are not affected. A resumed run sets up its preconditioners again, so that
        its results equal those of an uninterrupted run only up to the tolerance.
    :param group: process group of ``torch.distributed``, such as the result of
        :func:`gpytorch_gaps.distributed.process_group`. Its members make the same call with the same model and data,
        and share the solves of every step. All start from the parameters and the random state of the first process, and
        end with the same parameters. Exact log-determinants are not shared. The first process writes the checkpoint.
    :param uncertainty: whether to measure how well the data determine the hyperparameters, with three more evaluations
        of the gradient for each. ``history.uncertainty`` then has their covariance and standard errors, and predicts
        with error bars that include them: :class:`HyperparameterUncertainty`.
    :return: the record of all steps.
    :raises FitError: if the loss, a gradient or a parameter is no longer finite. The model then has its last parameters
        with a finite loss.
    :raises ValueError: if an argument is not valid, or the checkpoint belongs to other data, parameters, optimizer or
        settings (such as ``settings.logdet_method``).

    >>> import gpytorch, gpytorch_gaps as gaps
    >>> class Model(gpytorch.models.ExactGP):
    ...     def __init__(self, x, y, likelihood, grid):
    ...         super().__init__(x, y, likelihood)
    ...         self.mean_module = gpytorch.means.ConstantMean()
    ...         self.covar_module = gaps.GappyGridKernel([gpytorch.kernels.RBFKernel()], grid)
    ...     def forward(self, x):
    ...         return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
    >>> grid, x, y = gaps.from_array(torch.linspace(0, 6, 50).sin())
    >>> history = fit(Model(x, y, gaps.GappyGridLikelihood(), grid), steps=5, progress=False)
    >>> len(history), history.stopped, history.loss[-1] < history.loss[0]
    (5, 'steps', True)
    """
    comm = communicator_for(group, "fit")

    def prepare() -> tuple[_Options, TrainingRun]:
        path = None if checkpoint is None else Path(checkpoint)
        options = _Options(steps, path, checkpoint_every, patience, min_improvement, uncertainty)
        check_number("fit: lr", lr, above=0)
        objective = _checked_mll(model, mll)
        memory = _checked_warm_start(warm_start)
        if uncertainty:
            _check_uncertainty(model, objective)
        return options, TrainingRun(model, objective, _checked_optimizer(model, optimizer, lr), memory, comm)

    options, run = comm.run_on_all("checking its arguments", prepare)
    if comm.size > 1:
        comm.require_same({**_flat(problem_of(run)), **options.described(), **_details(run)})
        same_start(model, comm)
        run.mark_start()
    return _train(run, options, progress)


@dataclass(frozen=True)
class _Options:
    """The checked arguments that determine how long a fit runs and when it saves."""

    steps: int
    checkpoint: Path | None
    checkpoint_every: int
    patience: int | None
    min_improvement: float | None
    uncertainty: bool

    def __post_init__(self) -> None:
        check_integer("fit: steps", self.steps, at_least=0)
        check_integer("fit: checkpoint_every", self.checkpoint_every, at_least=1)
        if self.patience is not None:
            check_integer("fit: patience", self.patience, at_least=1, hint=" or None")
        if self.min_improvement is not None:
            check_number("fit: min_improvement", self.min_improvement, at_least=0)
        if not isinstance(self.uncertainty, bool):
            raise _error("uncertainty", repr(self.uncertainty), "True or False")

    def described(self) -> dict[str, str]:
        return {name: str(value) for name, value in asdict(self).items()}


def _train(run: TrainingRun, options: _Options, progress: bool) -> History:
    """Resumes from the checkpoint, if any, and takes steps until the fit ends."""
    file = None if options.checkpoint is None else Checkpoint(options.checkpoint, run)
    if file is not None:
        file.resume_or_start()
    least = options.min_improvement
    if least is None:
        least = max(_LEAST_IMPROVEMENT, _IMPROVEMENT_PER_OBSERVATION * run.model.train_targets.size(-1))
    plateau = Plateau(options.patience, least)
    plateau.replay(run.history)
    run.model.train()
    try:
        hidden = not (progress and run.comm.is_main)
        with tqdm(total=int(options.steps), initial=len(run.history), desc="fit", disable=hidden) as bar:
            while not (stopped := _advance(run, plateau, int(options.steps))):
                bar.set_postfix(run.summary(), refresh=False)
                bar.update()
                if file is not None and len(run.history) % options.checkpoint_every == 0:
                    file.save()
        run.weigh()
        run.history.stopped = stopped
        if file is not None:
            file.save()
        if options.uncertainty:
            run.history.uncertainty = measure(run)
    except FitError:
        run.fall_back(file)
        raise
    except BaseException as error:
        run.interrupt(error, file)
        raise
    finally:
        run.model.eval()
    return run.history


def _advance(run: TrainingRun, plateau: Plateau, steps: int) -> str:
    """Takes one step of the optimizer or, after a plateau, of L-BFGS. Returns why the fit ends, or ""."""
    if run.converged and not (run.weigh() and run.begin_finish()):
        return "converged"
    if len(run.history) >= steps:
        return "steps"
    if not plateau.reached:
        run.step()
        plateau.add(run.history.loss[-1] * run.history.num_observations)
    elif not ((run.finish or run.begin_finish()) and run.finish_step()):
        return "plateau"
    return ""


# -- what must be the same in all processes ----------------------------------------------------------------------------


def _details(run: TrainingRun) -> dict[str, str]:
    """Everything else that affects the steps: groups and state of an Optimizer object, and arguments of modules."""
    groups = [{k: v for k, v in group.items() if k != "params"} for group in run.optimizer.param_groups]
    entries = [entry for state in run.optimizer.state_dict()["state"].values() for entry in state.values()]
    return {
        "optimizer: groups": str(groups),
        "optimizer: state": digest(*filter(torch.is_tensor, entries)),
        "modules": str([describe_module(module) for module in run.model.modules()]),
    }


def _flat(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Entries of nested dictionaries by their path."""
    found: dict[str, Any] = {}
    for name, value in nested.items():
        found.update(_flat(value, f"{prefix}{name}: ") if isinstance(value, dict) else {prefix + name: value})
    return found


# -- checks of arguments -----------------------------------------------------------------------------------------------


def _checked_mll(model: ExactGP, mll: MarginalLogLikelihood | None) -> MarginalLogLikelihood:
    if not isinstance(model, ExactGP):
        raise _error("model", type(model).__name__, "a gpytorch.models.ExactGP")
    if model.train_inputs is None or model.train_targets is None or not model.train_targets.numel():
        raise _error("model", "no training data", "train_inputs and train_targets; see set_train_data")
    rows = model.train_inputs[0].size(-2)
    if model.train_targets.size(-1) != rows:
        came = f"train_targets of shape {tuple(model.train_targets.shape)}"
        raise _error("model", came, f"(*batch, {rows}), one for each row of train_inputs")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise _error("model", "no parameter that requires a gradient", "at least one to fit")
    if mll is None:
        kind = LaplaceMarginalLogLikelihood if isinstance(model, LaplaceGP) else ExactMarginalLogLikelihood
        return kind(model.likelihood, model)
    if not isinstance(mll, MarginalLogLikelihood):
        raise _error("mll", type(mll).__name__, "a gpytorch.mlls.MarginalLogLikelihood")
    if mll.model is not model or mll.likelihood is not model.likelihood:
        raise _error("mll", "one of another model or likelihood", "that of model and model.likelihood")
    return mll


def _checked_optimizer(model: ExactGP, given: Optimizer | Callable[..., Optimizer] | None, lr: float) -> Optimizer:
    if not isinstance(given, Optimizer):
        if given is not None and not callable(given):
            raise _error("optimizer", type(given).__name__, "an Optimizer, its class, or a function of (params, lr)")
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        given = (given or Adam)(parameters, lr=lr)
        if not isinstance(given, Optimizer):
            came = f"a function that returns {type(given).__name__}"
            raise _error("optimizer", came, "one that returns an Optimizer")
    own = set(map(id, model.parameters()))
    foreign = sum(id(parameter) not in own for group in given.param_groups for parameter in group["params"])
    if foreign:
        came = f"one of {foreign} parameters that are not the model's"
        raise _error("optimizer", came, "one of the model's own only")
    return given


def _checked_warm_start(given: bool | WarmStart) -> WarmStart | None:
    if not isinstance(given, bool | WarmStart):
        raise _error("warm_start", repr(given), "True, False or a WarmStart")
    return WarmStart() if given is True else given or None


def _check_uncertainty(model: ExactGP, mll: MarginalLogLikelihood) -> None:
    if isinstance(mll, LeaveOneOutPseudoLikelihood):
        raise _error("uncertainty", "True with a LeaveOneOutPseudoLikelihood", "a marginal likelihood, or False")
    count = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    if count > _MOST_WITH_UNCERTAINTY:
        came = f"True with {count} parameters"
        raise _error("uncertainty", came, f"at most {_MOST_WITH_UNCERTAINTY} that require a gradient, or False")


def _error(argument: str, came: str, expected: str) -> ValueError:
    return ValueError(f"fit: {argument}: got {came}, expected {expected}")
