"""Chooses the number of threads by the size of the work: small calls run on one thread.

torch splits a product of 100 x 100 matrices over all cores. On an idle machine that saves microseconds. If another
process keeps one of the cores busy, every product waits milliseconds for the thread that is not scheduled, and a solve
makes thousands of products. Ten solves on a grid of 100 x 100 cells then take 1 s with one thread, 37 to 98 s with two.

Use :func:`threads_for` around a block whose largest call is known, or :func:`sized` to decorate a function whose
arguments tell the size of its calls.

>>> before = torch.get_num_threads()
>>> torch.set_num_threads(2)
>>> with threads_for(flops=1e6):
...     torch.get_num_threads()
1
>>> torch.get_num_threads()
2
>>> torch.set_num_threads(before)

A switch costs less than a microsecond: OpenMP keeps its threads and only changes how many it uses. OpenMP stores that
number per calling thread. MKL, and a thread that uses torch for the first time inside the block, use the number that
was set last. Python threads that solve at the same time may therefore run some products on more or fewer threads than
intended. This does not change results, and each thread restores the number that it found.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_MIN_FLOPS_FOR_THREADS = 5e7  # in one call: one or two milliseconds on one core
_MIN_NUMBERS_FOR_THREADS = 2**17  # read or written by one call: a tenth of a millisecond

_local = threading.local()  # `.available`: the number of threads outside of all blocks


@contextmanager
def threads_for(flops: float, numbers: float = 0.0) -> Iterator[None]:
    """Inside, torch uses one thread if no call is large, else as many as the user set. It may be nested.

    :param flops: FLOPs of the largest call inside the block.
    :param numbers: numbers that the largest call reads or writes.
    """
    before, outside = torch.get_num_threads(), getattr(_local, "available", None)
    available = before if outside is None else outside
    is_large = flops >= _MIN_FLOPS_FOR_THREADS or numbers >= _MIN_NUMBERS_FOR_THREADS
    wanted = available if is_large else 1
    _local.available = available
    if wanted != before:
        torch.set_num_threads(wanted)
    try:
        yield
    finally:
        _local.available = outside
        if wanted != before:
            torch.set_num_threads(before)


Work = tuple[float, float]
"""FLOPs of the largest call, and numbers that it reads or writes: the arguments of :func:`threads_for`."""


def sized(work: Callable[..., Work]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: the function runs inside ``threads_for(*work(*arguments))``.

    :param work: computes the size of the largest call from the arguments of the function.
    :return: the decorator.

    >>> @sized(lambda matrix: (2.0 * matrix.numel() * len(matrix), matrix.numel()))
    ... def square(matrix):
    ...     return matrix @ matrix
    >>> square(torch.eye(2)).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def on_threads(*args: P.args, **kwargs: P.kwargs) -> R:
            with threads_for(*work(*args, **kwargs)):
                return function(*args, **kwargs)

        return on_threads

    return decorate
