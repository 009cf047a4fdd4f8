"""The weights of a reconstruction under way, in a file from which it goes on."""

import re
import time
from pathlib import Path

import torch
from torch import Tensor

from gpytorch_gaps.distributed.communicator import Communicator
from gpytorch_gaps.reconstruction.weights import ShardedWeights, Weights
from gpytorch_gaps.utils.files import atomic_save

_SAVE_EVERY = 10.0  # seconds between checkpoints
_FORMAT = 1
_KEYS = {"format", "noise", "eigenvalues", "rhs", "weights", "iterations"}


class WeightCheckpoint:
    """The last weights, in a file, with what tells whether they belong to this problem.

    Weights that every rank has are the first one's to keep; those in parts are kept in a file each.
    """

    def __init__(self, path: Path | None, weights: Weights, noise: float, rhs: Tensor) -> None:
        ranks = weights.ranks
        self.start: Tensor | None = None
        self.iterations = 0
        in_parts = isinstance(weights, ShardedWeights)
        self.path = path if path is None or not in_parts else part_of(path, ranks)
        keeps = path is not None and (in_parts or ranks.is_main)
        self._saved = time.perf_counter()
        self._problem = {"format": _FORMAT, "noise": noise, "eigenvalues": weights.products, "rhs": rhs}
        if keeps:
            self._problem.update(eigenvalues=weights.products.cpu(), rhs=rhs.cpu())
        found = ranks.run_on_all("reading its checkpoint", lambda: self._of_before(path, ranks) if keeps else None)
        if not keeps:
            self.path = None
        if path is None:
            return
        all_found = ranks.gather((found is not None, self.iterations), "the checkpoint")
        if in_parts and not all(there for there, _ in all_found):
            self.iterations = 0  # weights of some are no start
            return
        if all_found[0][0]:
            self.iterations = all_found[0][1]
            self.start = torch.empty_like(rhs) if found is None else found.to(rhs.device)
            if not in_parts:
                ranks.broadcast(self.start, "the checkpoint")

    def _of_before(self, path: Path | None, ranks: Communicator) -> Tensor | None:
        assert self.path is not None
        assert path is not None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for other in path.parent.iterdir():
            part = re.fullmatch(re.escape(path.name) + r"\.\d+of(\d+)", other.name)
            if part and (self.path == path or int(part[1]) != ranks.size):
                raise ValueError(
                    f"checkpoint: found {other.name}, of {part[1]} ranks; expected one written by {ranks.size}. "
                    "Move it away to start afresh"
                )
        return self._read(self.path) if self.path.exists() else None

    def _read(self, path: Path) -> Tensor:
        advice = "expected one written by reconstruct; move it away to start afresh"
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except OSError:
            raise
        except Exception as error:
            raise ValueError(f"checkpoint: {path} cannot be read ({type(error).__name__}); {advice}") from error
        if not isinstance(content, dict) or content.get("format") != _FORMAT or not content.keys() >= _KEYS:
            raise ValueError(f"checkpoint: {path} is not a checkpoint of this version; {advice}")
        for name in ("noise", "eigenvalues", "rhs"):
            theirs, ours = torch.as_tensor(content[name]), torch.as_tensor(self._problem[name])
            same = theirs.shape == ours.shape and bool((theirs - ours).norm() <= 1e-8 * ours.norm())
            if not same:
                what = {"noise": "noise", "eigenvalues": "kernels, axes or tolerance", "rhs": "values or mean"}[name]
                verb = "differs" if name == "noise" else "differ"
                raise ValueError(f"checkpoint: {path} belongs to another run: {what} {verb}; {advice}")
        weights = content["weights"]
        if weights.shape != content["rhs"].shape or not bool(weights.isfinite().all()):
            raise ValueError(f"checkpoint: {path} holds weights that are none; {advice}")
        self.iterations = int(content["iterations"])
        return weights

    def watch(self, weights: Tensor, iterations: int) -> None:
        if time.perf_counter() - self._saved > _SAVE_EVERY:
            self.save(weights, iterations)

    def save(self, weights: Tensor, iterations: int, done: bool = False) -> None:
        if self.path is not None:
            total = 0 if done else self.iterations + iterations  # from the end of a solve, nothing is left to do
            state = {"weights": weights.cpu(), "iterations": total}
            atomic_save(self.path, {**self._problem, **state})
        self._saved = time.perf_counter()

    def remove(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def part_of(path: Path, ranks: Communicator) -> Path:
    """Where a rank keeps its part of what is too large for one."""
    return path.with_name(f"{path.name}.{ranks.rank}of{ranks.size}")
