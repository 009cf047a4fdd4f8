"""Files that are complete or absent: a process that is killed leaves the previous file."""

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor


def atomic_write(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Write a temporary file beside `path` and move it to `path` once it is on disk."""
    partial = path.with_name(path.name + ".tmp")
    try:
        with partial.open("wb") as stream:
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def atomic_save(path: Path, content: dict[str, Any]) -> None:
    """Save tensors and plain Python data, which ``torch.load(..., weights_only=True)`` can read."""
    atomic_write(path, lambda stream: torch.save(content, stream))


def atomic_write_store(path: Path, write: Callable[[Path], Any]) -> None:
    """`atomic_write` for a directory: written beside `path`, which it replaces once it is complete."""
    path = path.resolve()
    partial, former = path.with_name(path.name + ".tmp"), path.with_name(f".{path.name}.former")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        write(partial)
        if path.exists():  # a directory that is not empty cannot be replaced in one step
            shutil.rmtree(former, ignore_errors=True)
            path.rename(former)
        partial.rename(path)
    finally:
        if former.exists() and not path.exists():
            former.rename(path)
        for leftover in (partial, former):
            shutil.rmtree(leftover, ignore_errors=True)


def refuse_directory(name: str, path: Path) -> None:
    if path.is_dir():
        raise ValueError(f"{name}: got the directory {path}, expected a file, which need not exist")


def require_place(name: str, path: Path) -> None:
    """Raise an error if no file can be written at a path."""
    refuse_directory(name, path)
    if not path.parent.is_dir():
        raise ValueError(f"{name}: the directory of {path} does not exist; expected one that does")
    require_writable(name, path)


def require_writable(name: str, path: Path) -> None:
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"{name}: no permission to write in the directory of {path}")


def digest(*tensors: Tensor) -> str:
    """A short hash of the content of tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()[:12]
