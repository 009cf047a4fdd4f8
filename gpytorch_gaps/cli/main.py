"""From arguments to an exit code. Every error is one line on standard error.

| code | meaning |
|---|---|
| 0 | success |
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
# Exceptions with messages for the user. Any other exception is a defect, and is reported as one.
_USER_ERRORS = (ValueError, OSError, ImportError, RuntimeError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    :param arguments: arguments of the command line. Default: ``sys.argv[1:]``.
    :return: the exit code: 0 after success, 1 after an error, 2 after wrong usage, 130 after an interruption.
    :raises SystemExit: with code 2 on wrong usage, with code 0 after ``--help`` and ``--version``.

    >>> from gpytorch_gaps.cli.main import main
    >>> main(["--version"])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    SystemExit: 0
    """
    options = make_parser().parse_args(arguments)
    try:
        with _one_line_warnings(getattr(options, "quiet", False)) as warned:
            return _run(options, warned)
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has closed it
        sys.stderr.close()
        return 1
    except Exception as error:
        if options.traceback:
            traceback.print_exc()
        say(f"error: {_one_line(error)}")
        return 1


def _run(options: argparse.Namespace, warned: list[str]) -> int:
    """Runs a command. Its module, and with it torch, is imported only here."""
    if options.command == "fill":
        from gpytorch_gaps.cli.fill import run_fill

        return run_fill(options, warned)
    if options.command == "report":
        from gpytorch_gaps.cli.report import run_report

        return run_report(options, warned)
    if options.command == "inspect":
        from gpytorch_gaps.cli.inspect import run_inspect

        return run_inspect(options)
    if options.methods:
        from gpytorch_gaps.cli.demo import run_methods

        return run_methods()
    from gpytorch_gaps.cli.demo import run_demo

    return run_demo(options.output)


def say(message: str) -> None:
    """Prints one line on standard error, below any progress bar."""
    from tqdm import tqdm

    tqdm.write(f"gpytorch-gaps: {message}", file=sys.stderr)


def _one_line(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return f"out of memory; {error}".rstrip("; ")
    words = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        words = f"{error.filename}: {error.strerror}"
    if not isinstance(error, _USER_ERRORS):
        words = f"unexpected {type(error).__name__}: {words} (a defect: --traceback shows where)"
    return words


@contextmanager
def _one_line_warnings(quiet: bool) -> Iterator[list[str]]:
    """Prints each warning once, on one line, and collects them. Warnings for programmers are ignored."""
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
