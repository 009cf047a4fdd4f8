"""A checkpoint on disk: written atomically, and checked before a run continues from it."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from gpytorch_gaps.utils.files import atomic_save, refuse_directory


class CheckpointFile:
    """A file with the state of an unfinished run, as tensors and plain Python data.

    A process that is killed while it writes leaves the previous file.

    >>> import tempfile
    >>> file = CheckpointFile(Path(tempfile.mkdtemp()) / "run.pt", "fit", version=1)
    >>> file.read({"step"}) is None
    True
    >>> file.save({"step": 3})
    >>> file.read({"step"})["step"]
    3

    :param path: the file, which need not exist. Its directory is made by the first :meth:`save`.
    :param writer: name of the function that writes the file, for error messages.
    :param version: version of the format; files of other versions raise an error.
    """

    def __init__(self, path: Path, writer: str, version: int) -> None:
        refuse_directory("checkpoint", path)
        self.path, self._writer, self._version = path, writer, version

    def save(self, content: dict[str, Any]) -> None:
        """Replace the file by one with this content."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        atomic_save(self.path, {"format": self._version, **content})

    def read(self, keys: Collection[str]) -> dict[str, Any] | None:
        """Return the content of the file on the host, or None if there is no file.

        :param keys: entries that the content must have.
        :raises ValueError: if the file is no checkpoint of this version, or lacks an entry.
        """
        if not self.path.exists():
            return None
        try:
            content = torch.load(self.path, map_location="cpu", weights_only=True)
        except OSError:
            raise
        except Exception as error:  # torch's own message recommends unsafe loading
            raise self.error(f"cannot be read ({type(error).__name__})") from error
        complete = isinstance(content, dict) and content.get("format") == self._version and set(keys) <= content.keys()
        if not complete:
            raise self.error("is not a checkpoint of this version")
        return content

    def require_same(self, differences: Collection[str]) -> None:
        """Raise an error if the file was written for another problem.

        :param differences: what differs between the problem of the file and the present one, in words.
        :raises ValueError: if there is any difference.
        """
        if differences:
            raise self.error(f"belongs to another run: {'; '.join(differences)}")

    def error(self, problem: str) -> ValueError:
        """A ValueError that names the file, its problem and what to do."""
        advice = f"expected one written by {self._writer} for the same problem; move it away to start again"
        return ValueError(f"checkpoint: {self.path} {problem}; {advice}")

    def remove(self) -> None:
        """Delete the file, if it exists."""
        self.path.unlink(missing_ok=True)
