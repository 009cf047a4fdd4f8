"""Common parts of benchmarks: runs in separate processes, files of results, and the style of figures."""

import json
import math
import multiprocessing
import resource
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GIB = 2**30
_SAMPLE_EVERY = 0.2  # seconds between two looks at the memory of a run
_START, _STOP, _FACTS, _FAILURE = "start", "stop", "facts", "failure"  # what a run says

# processes begin as copies of one that has this loaded and has done nothing: they start at once, with clean memory, and
# what is loaded at first use is no part of a time (the last is for torch.unravel_index)
_LOADED = ["gpytorch_gaps", "benchmarks._runs", "torch.fx.experimental.symbolic_shapes"]
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(_LOADED)


# -- runs --------------------------------------------------------------------------------------------------------------


class Child:
    """The interface of a run in a separate process to the process that has started it."""

    def __init__(self, sender: Connection) -> None:
        self._sender = sender

    @contextmanager
    def clock(self) -> Iterator[None]:
        """The part of a run that is timed, killed at the cap, and watched for its memory; not its preparation."""
        self._sender.send((_START, anonymous_gib()))
        yield
        self._sender.send((_STOP, anonymous_gib()))

    def report(self, **facts: Any) -> None:
        """Facts that are kept even if the run is killed later."""
        self._sender.send((_FACTS, facts))


def run_capped(work: Callable[..., None], *arguments: Any, cap: float, memory_gib: float) -> dict[str, Any]:
    """Runs ``work(child, *arguments)`` in a separate process, and returns what it reports.

    The process is killed `cap` seconds after the start of a clock. The result also has "before_gib" and "memory_gib":
    anonymous memory at the start of the first clock, and its peak until the clock stopped. Mapped files do not count.
    A run that reported no "outcome" gets one: "capped", "out of memory" or "failed", the last with a "note".

    :param memory_gib: memory that the process may allocate.
    """
    receiver, sender = _PROCESSES.Pipe(duplex=False)
    process = _PROCESSES.Process(target=_work, args=(sender, memory_gib, work, arguments), daemon=True)
    process.start()
    sender.close()
    try:
        facts = _listen(receiver, process.pid, cap)
    finally:
        process.kill()
        process.join()
        receiver.close()
    if "outcome" not in facts:
        facts.update(outcome="failed", note=f"ended with exit code {process.exitcode}")
    return facts


def _listen(receiver: Connection, pid: int | None, cap: float) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    failure: dict[str, Any] = {}
    samples: list[float] = []
    deadline = None
    while True:
        remaining = None if deadline is None else deadline - time.monotonic()
        if remaining is not None and remaining <= 0:
            failure = {"outcome": "capped"}
            break
        if not receiver.poll(None if remaining is None else min(remaining, _SAMPLE_EVERY)):
            samples.append(anonymous_gib(pid))
            continue
        try:
            kind, content = receiver.recv()
        except EOFError:
            break
        if kind == _START:
            facts.setdefault("before_gib", content)
            samples, deadline = [content], time.monotonic() + cap
        elif kind == _STOP:
            facts.setdefault("memory_gib", max(*samples, content))
            deadline = None
        elif kind == _FACTS:
            facts.update(content)
        else:
            failure = content
    if samples:
        facts.setdefault("memory_gib", max(samples))
    return {**failure, **facts}


def _work(sender: Connection, memory_gib: float, work: Callable[..., None], arguments: Sequence[Any]) -> None:
    """Runs the work in the child process, with a limit of memory."""
    _, most = resource.getrlimit(resource.RLIMIT_DATA)  # which mapped files do not count towards
    resource.setrlimit(resource.RLIMIT_DATA, (int(memory_gib * GIB), most))
    warnings.simplefilter("ignore")  # what did not converge is reported as such
    tqdm.set_lock(threading.RLock())  # one between processes would outlive a child that is killed
    try:
        work(Child(sender), *arguments)
    except MemoryError:
        sender.send((_FAILURE, {"outcome": "out of memory"}))
    except Exception as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0][:160]
        failure = {"outcome": "out of memory"} if "allocate memory" in text else {"outcome": "failed", "note": text}
        sender.send((_FAILURE, failure))


def anonymous_gib(pid: int | None = None) -> float:
    """Memory of a process, by default of this one, without the files it has mapped; 0 where that is not known."""
    return _kibibytes(Path("/proc") / str(pid or "self") / "status", "RssAnon") / 2**20


def available_gib() -> float:
    """Memory that is still available to programs; infinite if it is not known."""
    return _kibibytes(Path("/proc") / "meminfo", "MemAvailable") / 2**20 or math.inf


def _kibibytes(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)


def gemm_gflops(dtype: torch.dtype, size: int, repeats: int = 5) -> float:
    """The rate of matrix products on this machine at this moment, as the best of several products."""
    a, b = torch.randn(2, size, size, dtype=dtype)
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        torch.mm(a, b)
        seconds.append(time.perf_counter() - started)
    return 2.0 * size**3 / min(seconds) / 1e9


# -- files -------------------------------------------------------------------------------------------------------------


def described(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in facts.items())


def markdown_table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [columns, ["---"] * len(columns), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def number(value: float | None, form: str) -> str:
    """A number in a table; empty if it was not measured."""
    return "" if value is None else format(value, form)


def write_results(directory: Path, name: str, content: Mapping[str, Any], parts: Iterable[str]) -> None:
    """`content` as ``<name>.json`` and the parts of a text as ``<name>.md``; either is there as a whole, or not."""
    directory.mkdir(parents=True, exist_ok=True)
    texts = {".json": json.dumps(content, indent=1) + "\n", ".md": "\n\n".join(parts) + "\n"}
    for suffix, text in texts.items():
        partial = directory / f"{name}{suffix}.partial"
        partial.write_text(text)
        partial.replace(directory / f"{name}{suffix}")


def read_results(directory: Path, name: str) -> dict[str, Any] | None:
    """The content of an earlier :func:`write_results`, if there is one."""
    path = directory / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


# -- figures -----------------------------------------------------------------------------------------------------------


def pyplot() -> Any:
    """``matplotlib.pyplot``, drawing to files."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def tidy(axis: "Axes") -> None:
    """Without a frame, over a light grid."""
    axis.grid(which="major", color="0.9", linewidth=0.7)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def whole_decades(axis: "Axes") -> None:
    """Makes a logarithmic y axis end at powers of ten, with labels for these only."""
    low, high = axis.get_ylim()
    axis.set_ylim(10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("")


def power_of_ten(value: float) -> str:
    """``1e-06`` as mathematics, for titles."""
    mantissa, exponent = f"{value:.0e}".split("e")
    factor = "" if mantissa == "1" else rf"{mantissa} \cdot "
    return f"${factor}10^{{{int(exponent)}}}$"
