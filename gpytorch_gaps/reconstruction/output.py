"""The output of a reconstruction: a file that is complete or absent, and that a later run can continue."""

import json
import os
from pathlib import Path

import numpy as np

from gpytorch_gaps.distributed.communicator import SINGLE, Communicator
from gpytorch_gaps.utils.files import atomic_write, require_place


class ResumableNpy:
    """An ``.npy`` file. It grows along its first axis as ``<path>.partial``, and moves to `path` once it is complete.

    ``<path>.partial.json`` records how many slices are on disk, and the name of their content. A later run with the
    same name continues from there. Any other run starts again.

    :param path: path of the complete file, on a file system that all processes share.
    :param shape: shape of the whole array.
    :param dtype: NumPy's name of the dtype.
    :param name: identifies the content.
    :param rows: slices of the first axis that this process writes. Default: all.
    :param comm: processes that write the file together.
    """

    def __init__(
        self,
        path: Path,
        shape: tuple[int, ...],
        dtype: str,
        name: str,
        rows: slice | None = None,
        comm: Communicator = SINGLE,
    ) -> None:
        self._comm, self._shape, self._dtype = comm, shape, np.dtype(dtype)
        self._own = rows or slice(0, shape[0])
        self.path, self._name = path, f"{name} {shape} {dtype} {self._own.start} to {self._own.stop}"
        self._partial = path.with_name(path.name + ".partial")
        self._record = path.with_name(f"{path.name}.partial{f'.{comm.rank}' if comm.rank else ''}.json")
        self.rows = self._own.start  # the next slice to be written
        written = comm.run_on_all("looking for its output", self._rows_on_disk)
        if all(found is not None for found in comm.gather(written, "looking for its output")):
            self.rows = written or self.rows
        else:  # if one process has to start, all others start too
            comm.run_on_all("making its output", self._make)
        self._offset = comm.run_on_all("opening its output", self._open).offset

    def _rows_on_disk(self) -> int | None:
        """The number of slices that an earlier run with the same name has written; None if there is no valid file."""
        require_place("output", self.path)
        try:
            record = json.loads(self._record.read_text())
            rows = record["rows"]
            if record["name"] != self._name or type(rows) is not int or not self._own.start < rows <= self._own.stop:
                return None
            size = self._partial.stat().st_size
            array = self._open()  # mode r+ extends a truncated file to its full size with zeros
            whole = self._partial.stat().st_size == size and array.shape == self._shape and array.dtype == self._dtype
        except (OSError, ValueError, KeyError, TypeError, EOFError):
            return None
        return rows if whole else None

    def _make(self) -> None:
        self._record.unlink(missing_ok=True)  # first, so that there is never a record without its file
        if self._comm.is_main:
            np.lib.format.open_memmap(self._partial, "w+", self._dtype, self._shape)

    def _open(self) -> np.memmap:
        try:
            return np.lib.format.open_memmap(self._partial, "r+")
        except FileNotFoundError as error:
            if self._comm.is_main:
                raise
            raise ValueError(
                f"output: rank 0 has created {self._partial}, but this process does not see it; expected a file system "
                "that all processes share"
            ) from error

    def append(self, slab: np.ndarray) -> None:
        """Write the next slices, and record them once they are on disk.

        The file is not memory-mapped: if two machines mapped the same page, one would overwrite the other's data.
        """
        if slab.shape[1:] != self._shape[1:] or self.rows + len(slab) > self._own.stop:
            came, expected = f"a slab of shape {slab.shape} at slice {self.rows}", self._shape[1:]
            raise ValueError(f"{self.path}: got {came}, expected slices of shape {expected} up to {self._own.stop}")
        plain = np.ascontiguousarray(slab, dtype=self._dtype)
        bytes_per_slice = self._dtype.itemsize * int(np.prod(self._shape[1:]))
        with self._partial.open("rb+") as stream:
            stream.seek(self._offset + self.rows * bytes_per_slice)
            stream.write(plain.data)
            stream.flush()
            os.fsync(stream.fileno())
        self.rows += len(slab)
        record = json.dumps({"name": self._name, "rows": self.rows}).encode()
        atomic_write(self._record, lambda stream: stream.write(record))

    def finish(self) -> None:
        """Move the complete file to `path`. All processes must call this.

        :raises ValueError: if slices are missing.
        """
        self._comm.run_on_all("writing its slices", self._require_complete)
        self._comm.run_on_all("putting the output in its place", self._place)

    def _require_complete(self) -> None:
        if self.rows != self._own.stop:
            written, expected = self.rows - self._own.start, self._own.stop - self._own.start
            raise ValueError(f"{self.path}: {written} slices are written, expected {expected}")

    def _place(self) -> None:
        if self._comm.is_main:
            os.replace(self._partial, self.path)
        self._record.unlink(missing_ok=True)
