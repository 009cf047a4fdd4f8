"""The output of a reconstruction: a file that is whole or not there, and that a killed run goes on with."""

import json
import os
from pathlib import Path

import numpy as np

from gpytorch_gaps.distributed.communicator import Communicator
from gpytorch_gaps.utils.files import atomic_write, require_place


class ResumableNpy:
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
        ranks: Communicator | None = None,
    ) -> None:
        self._ranks = ranks = ranks or Communicator()
        self._rows = rows or slice(0, shape[0])
        self.path, self._name = path, f"{name} {shape} {dtype} {self._rows.start} to {self._rows.stop}"
        self._partial = path.with_name(path.name + ".partial")
        self._record = self._record_of(ranks.rank)
        self.rows = self._rows.start  # up to which the file has grown
        self._array: np.ndarray | None = None
        # one that has nothing of before makes the file anew, for all
        found = ranks.run_on_all("looking for its output", lambda: self._array_of_before(shape, dtype))
        if all(ranks.gather(found is not None, "looking for its output")):
            self._array = found
            return
        del found
        self.rows = self._rows.start
        ranks.run_on_all("making its output", lambda: self._make(shape, dtype))
        self._array = ranks.run_on_all("opening its output", self._open)

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
        if self._ranks.is_main:
            np.lib.format.open_memmap(self._partial, "w+", dtype, shape)

    def _open(self) -> np.ndarray:
        try:
            return np.lib.format.open_memmap(self._partial, "r+")
        except FileNotFoundError as error:
            if self._ranks.is_main:
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
        atomic_write(self._record, lambda stream: stream.write(record))

    def finish(self) -> None:
        """Puts the file where it belongs, if it is whole."""
        self._ranks.run_on_all("writing its slices", self._close)
        self._ranks.run_on_all("putting the output in its place", self._place)

    def _close(self) -> None:
        assert self._array is not None
        if self.rows != self._rows.stop:
            written, expected = self.rows - self._rows.start, self._rows.stop - self._rows.start
            raise ValueError(f"{self.path}: {written} slices are written, expected {expected}")
        self._array = None
        with self._partial.open("rb+") as stream:
            os.fsync(stream.fileno())

    def _place(self) -> None:
        if self._ranks.is_main:
            os.replace(self._partial, self.path)
        self._record.unlink(missing_ok=True)
