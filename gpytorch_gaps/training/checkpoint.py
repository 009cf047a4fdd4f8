"""A fit's state in a file, from which a killed run goes on as if nothing had happened."""

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
from gpytorch_gaps.training.history import History
from gpytorch_gaps.utils.files import digest, refuse_directory, save_whole

_CHECKPOINT_FORMAT = 2


class Checkpoint:
    """A file with a run's last complete step, as tensors and plain Python data, and the problem it belongs to."""

    def __init__(self, path: Path, run: Any) -> None:
        refuse_directory("fit: checkpoint", path)
        self.path, self.run, self.problem = path, run, problem_of(run)

    def resume_or_start(self) -> None:
        """Of several processes the first one reads and writes; all go on from what it has read."""
        ranks = self.run.ranks
        own = ranks.together("reading its checkpoint", lambda: self._read_or_start() if ranks.leads else None)
        if own is not None and ranks.size > 1:
            own.pop("warm_start", None)  # each had columns of its own
        content = ranks.gather(own, "the checkpoint")[0]
        if content is not None:
            self._resume(content)

    def _read_or_start(self) -> dict[str, Any] | None:
        if self.path.exists():
            content = self._read()
            self._require_same(content["problem"])
            return content
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.save()  # a path that cannot be written is better found now than in an hour
        return None

    def save(self) -> None:
        """Atomic: whoever is killed meanwhile leaves the file before or the file after."""
        if not self.run.ranks.leads:
            return
        state, history = self.run.now, copy.deepcopy(self.run.history)
        history._cut(state["step"])
        content = {"format": _CHECKPOINT_FORMAT, "problem": self.problem, "history": vars(history), **state}
        save_whole(self.path, content)

    def _read(self) -> dict[str, Any]:
        advice = "expected one written by fit; move it away to start afresh"
        try:
            content = torch.load(self.path, map_location="cpu", weights_only=True)
        except OSError:
            raise
        except Exception as error:
            kind = type(error).__name__  # torch's message would send the reader elsewhere
            raise ValueError(f"checkpoint: {self.path} cannot be read ({kind}); {advice}") from error
        expected = {"format", "problem", "history", *self.run.now} - {"warm_start"}  # told by the problem
        if not isinstance(content, dict) or not expected <= content.keys() or content["format"] != _CHECKPOINT_FORMAT:
            raise ValueError(f"checkpoint: {self.path} is not a checkpoint of this version; {advice}")
        return content

    def _require_same(self, problem: dict[str, Any]) -> None:
        if differences := _differences(problem, self.problem):
            raise ValueError(
                f"checkpoint: {self.path} belongs to another run: {'; '.join(differences)}. Expected the same data, "
                "model, optimizer and settings; pass another path, or move the file away to start again"
            )

    def _resume(self, content: dict[str, Any]) -> None:
        self.run.restore(content)
        self.run.history = History(**{**content["history"], "stopped": ""})
        torch.set_rng_state(content["rng"]["cpu"])
        if torch.cuda.is_available():
            for device, state in enumerate(content["rng"]["cuda"][: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(state, device)
        self.run.begin()


def problem_of(run: Any) -> dict[str, Any]:
    """What a checkpoint must share with the run that resumes it."""
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
        "warm start": str(run.memory),
        "optimizer": f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
        "parameters of each optimizer group": [len(group["params"]) for group in optimizer.param_groups],
        "options of the optimizer": {name: str(value) for name, value in optimizer.defaults.items()},
    }


def _settings() -> dict[str, str]:
    """All that decides about a log marginal likelihood, by name, linear_operator's settings among them."""
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
    """In words, entry by entry."""
    found = []
    for key in dict.fromkeys([*theirs, *ours]):
        there, here = theirs.get(key, "absent"), ours.get(key, "absent")
        if isinstance(there, dict) and isinstance(here, dict):
            found += _differences(there, here, f"{prefix}{key}: ")
        elif there != here:
            found.append(f"{prefix}{key}: {there} in the checkpoint, {here} here")
    return found
