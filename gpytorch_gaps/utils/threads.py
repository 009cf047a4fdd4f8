"""Threads by the size of the work: small work runs on one thread.

torch splits a product of 100 x 100 matrices over all cores. That gains microseconds on an idle machine. Where another
process keeps one of the cores busy, every product waits for the thread that is not scheduled: milliseconds each, and a
solve makes thousands of them.

>>> before = torch.get_num_threads()
>>> torch.set_num_threads(2)
>>> with threads_for(flops=1e6):
...     torch.get_num_threads()
1
>>> torch.get_num_threads()
2
>>> torch.set_num_threads(before)

Switching costs less than a microsecond: OpenMP keeps its threads, and only the number to be used changes. That number
belongs to the calling thread, as far as OpenMP goes; MKL, and a thread that uses torch for the first time meanwhile,
take the one set last. So Python threads that solve at the same time may run some products on fewer or more threads
than meant. Results do not depend on it, and each thread puts back what it found.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_WORTH_FLOPS = 5e7  # of one call: a millisecond or two of one core
_WORTH_NUMBERS = 2**17  # that a call reads or writes: a tenth of a millisecond

_local = threading.local()  # `.given`: the number of threads outside of all blocks


@contextmanager
def threads_for(flops: float, numbers: float = 0.0) -> Iterator[None]:
    """Inside, torch uses one thread if no call is large, else as many as the user gave it. May be nested.

    :param flops: of the largest call.
    :param numbers: that the largest call reads or writes.
    """
    before, given = torch.get_num_threads(), getattr(_local, "given", None)
    available = before if given is None else given
    wanted = available if flops >= _WORTH_FLOPS or numbers >= _WORTH_NUMBERS else 1
    _local.given = available
    if wanted != before:
        torch.set_num_threads(wanted)
    try:
        yield
    finally:
        _local.given = given
        if wanted != before:
            torch.set_num_threads(before)


Work = tuple[float, float]
"""FLOPs of the largest call, and numbers that it reads or writes."""


def sized(work: Callable[..., Work]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function that runs on :func:`threads_for` ``work(*its arguments)``."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def on_threads(*args: P.args, **kwargs: P.kwargs) -> R:
            with threads_for(*work(*args, **kwargs)):
                return function(*args, **kwargs)

        return on_threads

    return decorate
