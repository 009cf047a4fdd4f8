"""The state of a fit in a file, from which the same call continues."""

import copy
from pathlib import Path
from typing import Any

import linear_operator
import torch
from gpytorch.constraints import Interval
from gpytorch.priors import Prior
from torch import Tensor

from gpytorch_gaps import settings
from gpytorch_gaps.grid.cartesian import CartesianGrid
from gpytorch_gaps.likelihoods.noise import GivenNoise
from gpytorch_gaps.solvers.preconditioning import forget_neighbours
from gpytorch_gaps.training.history import History
from gpytorch_gaps.utils.checkpoint import CheckpointFile
from gpytorch_gaps.utils.files import digest

_VERSION = 2


class Checkpoint:
    """The last completed step of a run, and a description of its problem.

    If there are several processes, only the first reads and writes the file.

    :param path: the file, which need not exist.
    :param run: the :class:`~gpytorch_gaps.training.run.TrainingRun`.
    """

    def __init__(self, path: Path, run: Any) -> None:
        self.path, self.run, self.problem = path, run, problem_of(run)
        self._file = CheckpointFile(path, "fit", _VERSION)

    def resume_or_start(self) -> None:
        """Resets the run to the file's state on all processes, or writes the file if there is none."""
        comm = self.run.comm
        own = comm.run_on_all("reading its checkpoint", lambda: self._read_or_start() if comm.is_main else None)
        if own is not None and comm.size > 1:
            own.pop("warm_start", None)  # the columns of the first process; every process has its own
        content = comm.gather(own, "the checkpoint")[0]
        if content is not None:
            self._resume(content)

    def _read_or_start(self) -> dict[str, Any] | None:
        content = self._file.read({"problem", "history", *self.run.state} - {"warm_start"})
        if content is None:
            self.save()  # reports a path that cannot be written now, and not in an hour
            return None
        self._file.require_same(_differences(content["problem"], self.problem))
        return content

    def save(self) -> None:
        """Writes the last completed step."""
        forget_neighbours()
        if not self.run.comm.is_main:
            return
        state, history = self.run.state, copy.deepcopy(self.run.history)
        history._truncate(state["step"])
        self._file.save({"problem": self.problem, "history": vars(history), **state})

    def _resume(self, content: dict[str, Any]) -> None:
        self.run.restore(content)
        self.run.history = History(**{**content["history"], "stopped": ""})
        torch.set_rng_state(content["rng"]["cpu"])
        if torch.cuda.is_available():
            for device, state in enumerate(content["rng"]["cuda"][: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(state, device)
        self.run.mark_start()


def problem_of(run: Any) -> dict[str, Any]:
    """Everything that must be the same in a checkpoint and in the run that resumes from it."""
    model, optimizer = run.model, run.optimizer
    named = list(model.named_parameters())
    fixed = [parameter for _, parameter in named if not parameter.requires_grad]
    for module in model.modules():
        if isinstance(module, Interval | Prior | CartesianGrid | GivenNoise):
            fixed.extend(module.buffers())
    return {
        "train_inputs": [_fingerprint(inputs) for inputs in model.train_inputs],
        "train_targets": _fingerprint(model.train_targets),
        "modules": {name or "model": type(module).__name__ for name, module in model.named_modules()},
        "parameters": {name: f"{tuple(p.shape)} {p.dtype}{'' if p.requires_grad else ' fixed'}" for name, p in named},
        "fixed values (parameters, bounds, priors, grid, known noise)": digest(*fixed),
        "objective": type(run.mll).__name__,
        "settings": _settings(),
        "warm start": str(run.warm_start),
        "optimizer": f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
        "parameters of each optimizer group": [len(group["params"]) for group in optimizer.param_groups],
        "options of the optimizer": {name: str(value) for name, value in optimizer.defaults.items()},
    }


def _settings() -> dict[str, str]:
    """All settings that affect a marginal log likelihood, ours and linear_operator's, by name."""
    ours = (
        settings.gap_method,
        settings.logdet_method,
        settings.preconditioner_rank,
        settings.train_tolerance,
        settings.max_iterations,
        settings.gap_penalty,
        settings.mixed_precision,
    )
    theirs = linear_operator.settings
    return {
        **{setting.__name__: str(setting.value()) for setting in ours},
        "dense_size": str(settings.current().dense_size),
        "cg_tolerance": str(theirs.cg_tolerance.value()),
        "num_trace_samples": str(theirs.num_trace_samples.value()),
        "deterministic_probes": str(theirs.deterministic_probes.on()),
    }


def _fingerprint(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} #{digest(tensor)}"


def _differences(theirs: dict[str, Any], ours: dict[str, Any], prefix: str = "") -> list[str]:
    """The entries of two nested dictionaries that differ, in words."""
    found = []
    for key in dict.fromkeys([*theirs, *ours]):
        there, here = theirs.get(key, "absent"), ours.get(key, "absent")
        if isinstance(there, dict) and isinstance(here, dict):
            found += _differences(there, here, f"{prefix}{key}: ")
        elif there != here:
            found.append(f"{prefix}{key}: {there} in the checkpoint, {here} here")
    return found
