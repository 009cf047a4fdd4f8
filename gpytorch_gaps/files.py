"""Files that are whole or not there: a run that is killed leaves what was before, or what the next run goes on from."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from gpytorch_gaps.distributed.ranks import Ranks


def write_whole(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Writes beside `path`, and takes its place once everything is on disk."""
    partial = path.with_name(path.name + ".tmp")
    try:
        with partial.open("wb") as stream:
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def save_whole(path: Path, content: dict[str, Any]) -> None:
    """Tensors and plain Python data, to be read by ``torch.load(..., weights_only=True)``."""
    write_whole(path, lambda stream: torch.save(content, stream))


def refuse_directory(name: str, path: Path) -> None:
    if path.is_dir():
        raise ValueError(f"{name}: got the directory {path}, expected a file, which need not exist")


def require_place(name: str, path: Path) -> None:
    """That a file can be put at `path`, whether there is one or not."""
    refuse_directory(name, path)
    if not path.parent.is_dir():
        raise ValueError(f"{name}: the directory of {path} does not exist; expected one that does")
    require_writable(name, path)


def require_writable(name: str, path: Path) -> None:
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"{name}: no permission to write in the directory of {path}")


def digest(*tensors: Tensor) -> str:
    """What tells tensors of other content apart."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()[:12]


class GrowingArray:
    """An ``.npy`` file that grows along its first axis beside `path`, as ``<path>.partial``, until it is whole.

    How far it has grown is in ``<path>.partial.json``, with the name of what it grows into: one that goes by the same
    name goes on from there, any other starts afresh.

    :param rows: of the first axis, which this rank writes; the file is on a file system that all ranks share.
    """

    def __init__(
        self,
        path: Path,
        shape: tuple[int, ...],
        dtype: str,
        name: str,
        rows: slice | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._ranks = ranks = ranks or Ranks()
        self._rows = rows or slice(0, shape[0])
        self.path, self._name = path, f"{name} {shape} {dtype} {self._rows.start} to {self._rows.stop}"
        self._partial = path.with_name(path.name + ".partial")
        self._record = self._record_of(ranks.rank)
        self.rows = self._rows.start  # up to which the file has grown
        self._array: np.ndarray | None = None
        # one that has nothing of before makes the file anew, for all
        found = ranks.together("looking for its output", lambda: self._array_of_before(shape, dtype))
        if all(ranks.gather(found is not None, "looking for its output")):
            self._array = found
            return
        del found
        self.rows = self._rows.start
        ranks.together("making its output", lambda: self._make(shape, dtype))
        self._array = ranks.together("opening its output", self._open)

    def _record_of(self, rank: int) -> Path:
        return self.path.with_name(f"{self.path.name}.partial{f'.{rank}' if rank else ''}.json")

    def _array_of_before(self, shape: tuple[int, ...], dtype: str) -> np.ndarray | None:
        """What a run before has written under the same name, if it is all there."""
        require_place("output", self.path)
        try:
            record = json.loads(self._record.read_text())
            rows = record["rows"]
            if record["name"] != self._name or type(rows) is not int or not self._rows.start < rows <= self._rows.stop:
                return None
            size = self._partial.stat().st_size  # opened to be written to, a file that was cut off grows back, as zeros
            array = self._open()
            whole = self._partial.stat().st_size == size and array.shape == shape and array.dtype == np.dtype(dtype)
        except (OSError, ValueError, KeyError, TypeError, EOFError):
            return None
        if not whole:
            return None
        self.rows = rows
        return array

    def _make(self, shape: tuple[int, ...], dtype: str) -> None:
        self._record.unlink(missing_ok=True)  # first: a record must never outlive what it is of
        if self._ranks.leads:
            np.lib.format.open_memmap(self._partial, "w+", dtype, shape)

    def _open(self) -> np.ndarray:
        try:
            return np.lib.format.open_memmap(self._partial, "r+")
        except FileNotFoundError as error:
            if self._ranks.leads:
                raise
            raise ValueError(
                f"output: {self._partial} was made by rank 0, and is not here; expected a file system that all ranks "
                "share"
            ) from error

    def append(self, slab: np.ndarray) -> None:
        """On disk before it counts.

        Written, not mapped: of a page that two machines share, each would put back the part of the other as it was.
        """
        assert self._array is not None
        if slab.shape[1:] != self._array.shape[1:] or self.rows + len(slab) > self._rows.stop:
            came, expected = f"a slab of shape {slab.shape} at slice {self.rows}", self._array.shape[1:]
            raise ValueError(f"{self.path}: got {came}, expected slices of shape {expected} up to {self._rows.stop}")
        plain = np.ascontiguousarray(slab, dtype=self._array.dtype)
        with self._partial.open("rb+") as stream:
            stream.seek(self._array.offset + self.rows * self._array.strides[0])  # type: ignore[attr-defined]
            stream.write(plain.data)
            stream.flush()
            os.fsync(stream.fileno())
        self.rows += len(slab)
        record = json.dumps({"name": self._name, "rows": self.rows}).encode()
        write_whole(self._record, lambda stream: stream.write(record))

    def finish(self) -> None:
        """Puts the file where it belongs, if it is whole."""
        self._ranks.together("writing its slices", self._close)
        self._ranks.together("putting the output in its place", self._place)

    def _close(self) -> None:
        assert self._array is not None
        if self.rows != self._rows.stop:
            written, expected = self.rows - self._rows.start, self._rows.stop - self._rows.start
            raise ValueError(f"{self.path}: {written} slices are written, expected {expected}")
        self._array = None
        with self._partial.open("rb+") as stream:
            os.fsync(stream.fileno())

    def _place(self) -> None:
        if self._ranks.leads:
            os.replace(self._partial, self.path)
        self._record.unlink(missing_ok=True)
