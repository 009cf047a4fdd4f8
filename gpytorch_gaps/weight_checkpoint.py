"""The weights of a reconstruction under way, in a file from which it goes on."""

import time
from pathlib import Path

import torch
from torch import Tensor

from gpytorch_gaps.files import save_whole
from gpytorch_gaps.kronecker.truncated import TruncatedEigen

_SAVE_EVERY = 10.0  # seconds between checkpoints
_FORMAT = 1
_KEYS = {"format", "noise", "eigenvalues", "rhs", "weights", "iterations"}


class WeightCheckpoint:
    """The last weights, in a file, with what tells whether they belong to this problem."""

    def __init__(self, path: Path | None, basis: TruncatedEigen, noise: float, rhs: Tensor) -> None:
        self.path, self.start, self.iterations = path, None, 0
        self._problem = {"format": _FORMAT, "noise": noise, "eigenvalues": basis.products.cpu(), "rhs": rhs.cpu()}
        self._saved = time.perf_counter()
        if path is None:
            return
        if path.exists():
            self.start = self._read(path).to(rhs.device)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)

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
                raise ValueError(f"checkpoint: {path} belongs to another run: {what} differ; {advice}")
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
            save_whole(self.path, {**self._problem, **state})
        self._saved = time.perf_counter()

    def remove(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)
