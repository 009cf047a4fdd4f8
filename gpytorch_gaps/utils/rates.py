"""The speed of this machine for the parts of a solve: matrix products, moving numbers, and calls.

It is measured once per process, in a few hundredths of a second, as the best of a few runs.

If plans depend on a measurement, they may differ from run to run, and results differ within the tolerance. Inside
:func:`nominal_rates` they do not: rates are then those of a typical machine, for any load and number of threads.
"""

import functools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from gpytorch_gaps.utils.threads import threads_for

_SIZE = 640
_NUMBERS = 2**21
_REPEATS = 4
_SHARE = 0.6  # rate of thin matrix products, relative to a large square one


@dataclass(frozen=True)
class Rates:
    """FLOPs per second of matrix products, bytes per second that are read and written, seconds per call."""

    products: float
    memory: float
    call: float

    def seconds(self, flops: float, moved: float = 0.0, calls: float = 0.0) -> float:
        return flops / (_SHARE * self.products) + moved / self.memory + calls * self.call


NOMINAL = {"cpu": Rates(3e10, 8e10, 2e-6), "cuda": Rates(5e12, 5e11, 5e-6)}
"""Rates of one core of a server, and of a graphics card, in float64."""

_nominal: ContextVar[bool] = ContextVar("nominal", default=False)


@contextmanager
def nominal_rates() -> Iterator[None]:
    """Inside, plans are made by :data:`NOMINAL` rates, so that they are the same in every run."""
    token = _nominal.set(True)
    try:
        yield
    finally:
        _nominal.reset(token)


@functools.cache
def machine_speed() -> float:
    """The speed of one core of this machine relative to a nominal one, rounded to a power of two to be reproducible.

    >>> 2.0 ** round(math.log2(machine_speed())) == machine_speed()
    True
    """
    with threads_for(flops=0.0):
        measured = _measured("cpu", None, torch.float64, 1)
    return 2.0 ** round(math.log2(measured.products / NOMINAL["cpu"].products))


def rates_of(device: torch.device, dtype: torch.dtype) -> Rates:
    """The rates to plan by: those of this machine, or nominal ones."""
    if _nominal.get() and device.type in NOMINAL:
        return NOMINAL[device.type]
    return _measured(device.type, device.index, dtype, torch.get_num_threads())


@functools.cache
def _measured(kind: str, index: int | None, dtype: torch.dtype, threads: int) -> Rates:
    device = torch.device(kind, index) if index is not None else torch.device(kind)
    square = torch.ones(_SIZE, _SIZE, dtype=dtype, device=device)
    numbers = torch.ones(_NUMBERS, dtype=dtype, device=device)
    few = torch.ones(8, dtype=dtype, device=device)

    def some_calls() -> torch.Tensor:
        for _ in range(50):
            few.mul_(1.0)
        return few

    return Rates(
        products=2.0 * _SIZE**3 / _best(lambda: square @ square),
        memory=2.0 * numbers.numel() * numbers.element_size() / _best(lambda: numbers.mul_(1.0)),
        call=_best(some_calls) / 50.0,
    )


def _best(work: Callable[[], torch.Tensor]) -> float:
    """Seconds that work takes, until one of its results can be read."""
    seconds = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        float(work().view(-1)[0])
        seconds.append(time.perf_counter() - started)
    return max(min(seconds), 1e-9)
