"""From arguments to an exit code: whatever goes wrong is one line, and an interrupted run says so.

| code | |
|---|---|
| 0 | done |
| 1 | the data or a file could not be handled |
| 2 | wrong usage |
| 130 | interrupted |
"""

import argparse
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gpytorch_gaps.cli.parser import make_parser

INTERRUPTED = 130
# Whose messages are meant for whoever gave the data; anything else is a defect of ours, and says so.
_EXPLAINED = (ValueError, OSError, ImportError, RuntimeError)


def main(arguments: Sequence[str] | None = None) -> int:
    options = make_parser().parse_args(arguments)
    try:
        with _short_warnings(getattr(options, "quiet", False)) as seen:
            return _run(options, seen)
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our output has had enough
        sys.stderr.close()
        return 1
    except Exception as error:
        if options.traceback:
            traceback.print_exc()
        say(f"error: {_one_line(error)}")
        return 1


def _run(options: argparse.Namespace, warned: list[str]) -> int:
    if options.command == "fill":
        from gpytorch_gaps.cli.fill import run_fill

        return run_fill(options, warned)
    if options.command == "inspect":
        from gpytorch_gaps.cli.inspect import run_inspect

        return run_inspect(options)
    if options.methods:
        from gpytorch_gaps.cli.demo_methods import run_methods

        return run_methods()
    from gpytorch_gaps.cli.demo import run_demo

    return run_demo(options.output)


def say(message: str) -> None:
    """Prints one line on standard error, clear of any progress bar."""
    from tqdm import tqdm

    tqdm.write(f"gpytorch-gaps: {message}", file=sys.stderr)


def _one_line(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return f"out of memory; {error}".rstrip("; ")
    words = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        words = f"{error.filename}: {error.strerror}"
    if not isinstance(error, _EXPLAINED):
        words = f"unexpected {type(error).__name__}: {words} (a defect: --traceback shows where)"
    return words


@contextmanager
def _short_warnings(quiet: bool) -> Iterator[list[str]]:
    """Each warning as one line, once; those meant for programmers are left out."""
    seen: list[str] = []

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        words = " ".join(str(message).split())
        if words not in seen:
            seen.append(words)
            if not quiet:
                say(f"warning: {words}")

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        for category in (DeprecationWarning, PendingDeprecationWarning, FutureWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", category)
        warnings.showwarning = show
        yield seen
