"""The weights of an unfinished reconstruction, in a file from which the same call continues."""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpytorch_gaps.distributed.communicator import Communicator
from gpytorch_gaps.reconstruction.sharding import ShardedWeights, Weights
from gpytorch_gaps.utils.checkpoint import CheckpointFile

_SECONDS_BETWEEN_SAVES = 10.0
_VERSION = 1
_SAME = 1e-8  # relative difference: sums over other numbers of processes differ by less, other problems by more
_DIFFERENCES = {
    "noise": "noise differs",
    "eigenvalues": "kernels, axes or tolerance differ",
    "rhs": "values or mean differ",
}


class WeightCheckpoint:
    """The last weights, and the data that identify their problem.

    Replicated weights are kept by the main process. Sharded weights are kept by every process in a file of its own.
    `start` are the weights of an earlier call, or None. `draws` are deviations of draws of an earlier call.

    :param path: the file; None for no checkpoint.
    :param rhs: ``Phi' W' y``.
    """

    def __init__(self, path: Path | None, weights: Weights, noise: float, rhs: Tensor) -> None:
        comm, sharded = weights.comm, isinstance(weights, ShardedWeights)
        self.start: Tensor | None = None
        self.draws: list[Tensor] = []
        self._mean: tuple[Tensor, int] | None = None
        self._saved = time.perf_counter()
        self._file: CheckpointFile | None = None
        if path is None:
            return
        self._problem: dict[str, Any] = {}
        if sharded or comm.is_main:
            own = path.with_name(f"{path.name}.{comm.rank}of{comm.size}") if sharded else path
            self._file = CheckpointFile(own, "reconstruct", _VERSION)
            self._problem = {"noise": noise, "eigenvalues": weights.products.cpu(), "rhs": rhs.cpu()}
        content = comm.run_on_all("reading its checkpoint", lambda: self._read(path, comm, sharded))
        found = comm.gather(content is not None, "the checkpoint")
        if not found[0] or (sharded and not all(found)):
            return  # the weights cannot be used if the shards of some processes are missing
        kept = [] if content is None else [content["weights"], *content.get("draws", [])]
        count = comm.gather(len(kept), "the checkpoint")[0]
        held = [one.to(rhs.device) for one in kept] or [torch.empty_like(rhs) for _ in range(count)]
        if not sharded:
            held = [comm.broadcast(one, "the checkpoint") for one in held]
        self.start, *self.draws = held

    def _read(self, path: Path, comm: Communicator, sharded: bool) -> dict[str, Any] | None:
        if self._file is None:
            return None
        path.parent.mkdir(parents=True, exist_ok=True)
        for other in path.parent.iterdir():
            part = re.fullmatch(re.escape(path.name) + r"\.\d+of(\d+)", other.name)
            if part and (not sharded or int(part[1]) != comm.size):
                raise ValueError(
                    f"checkpoint: found {other.name}, written by {part[1]} processes; expected one written by "
                    f"{comm.size}. Try: move it away to start again"
                )
        content = self._file.read({*self._problem, "weights", "iterations"})
        if content is None:
            return None
        differences = [text for name, text in _DIFFERENCES.items() if not self._is_same(name, content[name])]
        self._file.require_same(differences[:1])  # the right-hand side depends on everything else
        kept, shape = [content["weights"], *content.get("draws", [])], content["rhs"].shape
        if any(one.shape != shape or not bool(one.isfinite().all()) for one in kept):
            raise self._file.error("contains NaN or infinite weights, or weights of the wrong shape")
        return content

    def _is_same(self, name: str, found: Any) -> bool:
        theirs, ours = torch.as_tensor(found), torch.as_tensor(self._problem[name])
        return theirs.shape == ours.shape and bool((theirs - ours).norm() <= _SAME * ours.norm())

    def watch(self, weights: Callable[[], Tensor], iterations: int) -> None:
        """Save the weights if the last save is some seconds old."""
        if self._file is not None and time.perf_counter() - self._saved > _SECONDS_BETWEEN_SAVES:
            self.save(weights(), iterations)

    def save(self, weights: Tensor, iterations: int) -> None:
        """Save the weights, the number of iterations of this call so far, and the draws."""
        self._mean = weights, iterations
        if self._file is not None:
            found = {"weights": weights.cpu(), "iterations": iterations, "draws": [one.cpu() for one in self.draws]}
            self._file.save({**self._problem, **found})
        self._saved = time.perf_counter()

    def keep_draw(self, number: int, deviation: Tensor) -> None:
        """Keep the deviation of a draw; save it with all others if the last save is some seconds old."""
        if self._file is not None and self._mean is not None:
            self.draws[number : number + 1] = [deviation]
            if time.perf_counter() - self._saved > _SECONDS_BETWEEN_SAVES:
                self.save(*self._mean)

    def remove(self) -> None:
        """Delete the file."""
        if self._file is not None:
            self._file.remove()
