"""Files that are whole or not there: a run that is killed leaves what was before, or what the next run goes on from."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch


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


class GrowingArray:
    """An ``.npy`` file that grows along its first axis beside `path`, as ``<path>.partial``, until it is whole.

    How far it has grown is in ``<path>.partial.json``, with the name of what it grows into: one that goes by the same
    name goes on from there, any other starts afresh.
    """

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: str, name: str) -> None:
        refuse_directory("output", path)
        if not path.parent.is_dir():
            raise ValueError(f"output: the directory of {path} does not exist; expected one that does")
        self.path, self._name = path, f"{name} {shape} {dtype}"
        self._partial, self._record = (path.with_name(path.name + end) for end in (".partial", ".partial.json"))
        self.rows = self._rows_of_before()
        mode, own = ("r+", None) if self.rows else ("w+", shape)
        self._array = np.lib.format.open_memmap(self._partial, mode, dtype, own)

    def _rows_of_before(self) -> int:
        try:
            record = json.loads(self._record.read_text())
            return int(record["rows"]) if record["name"] == self._name and self._partial.exists() else 0
        except (OSError, ValueError, KeyError, TypeError):
            return 0

    def append(self, slab: np.ndarray) -> None:
        """On disk before it counts."""
        self._array[self.rows : self.rows + len(slab)] = slab
        self._array.flush()
        self.rows += len(slab)
        record = json.dumps({"name": self._name, "rows": self.rows}).encode()
        write_whole(self._record, lambda stream: stream.write(record))

    def finish(self) -> None:
        """Puts the file where it belongs, if it is whole."""
        if self.rows != len(self._array):
            raise ValueError(f"{self.path}: {self.rows} slices are written, expected {len(self._array)}")
        del self._array
        with self._partial.open("rb+") as stream:
            os.fsync(stream.fileno())
        os.replace(self._partial, self.path)
        self._record.unlink(missing_ok=True)
