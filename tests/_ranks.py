"""Functions run by several processes that form a gloo group, as torchrun would have started them.

>>> run_ranks(2, "tests.distributed._work", "collectives")  # doctest: +SKIP

Starting a process takes seconds, most of them to import torch: processes are kept, and form a new group for every call.
"""

import atexit
import importlib
import multiprocessing
import os
import queue
import socket
import time
import traceback
import warnings

_context = multiprocessing.get_context("spawn")
_kept = []


class RanksFailed(AssertionError):
    """What every rank that failed said. `errors` by rank; None of one that was killed."""

    def __init__(self, errors, seconds):
        super().__init__("\n".join(f"rank {rank}: {error}" for rank, error in sorted(errors.items())))
        self.errors, self.seconds = errors, seconds


class _Worker:
    def __init__(self):
        self.jobs, self.answers = _context.Queue(), _context.Queue()
        self.process = _context.Process(target=_work, args=(self.jobs, self.answers), daemon=True)
        self.process.start()

    def answer(self, until):
        """(result, error); an error of None's is that of a process that is gone."""
        while time.monotonic() < until:
            try:
                return self.answers.get(timeout=0.1)
            except queue.Empty:
                if not self.process.is_alive():
                    return None, ""
        self.process.kill()
        return None, "no answer"


def run_ranks(count, module, name, *args, timeout=90.0, limit=240.0):
    """``module.name(group, *args)`` by `count` processes: what each returns, plain Python or NumPy arrays.

    :param timeout: of the process group, in seconds.
    :param limit: after which a process that has not answered is killed.
    """
    _kept[:] = [worker for worker in _kept if worker.process.is_alive()]
    while len(_kept) < count:
        _kept.append(_Worker())
    port, started = _free_port(), time.monotonic()
    for rank, worker in enumerate(_kept[:count]):
        worker.jobs.put((rank, count, port, timeout, module, name, args))
    found = [worker.answer(started + limit) for worker in _kept[:count]]
    errors = {rank: error or None for rank, (_, error) in enumerate(found) if error is not None}
    if errors:
        raise RanksFailed(errors, time.monotonic() - started)
    return [result for result, _ in found]


@atexit.register
def _stop():
    for worker in _kept:
        worker.process.kill()


def _work(jobs, answers):
    import gpytorch  # noqa: F401  # its import warns of what torch deprecates
    import torch

    from gpytorch_gaps import GappyGridKernel, distributed, fit, reconstruct  # noqa: F401  # torch warns of deprecations

    torch.set_num_threads(1)
    warnings.simplefilter("error")
    while True:
        answers.put(_do(*jobs.get()))


def _do(rank, count, port, timeout, module, name, args):
    from gpytorch_gaps import distributed

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(count), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        with distributed.process_group(timeout=timeout) as group:
            return getattr(importlib.import_module(module), name)(group, *args), None
    except BaseException as error:
        return None, f"{type(error).__name__}: {error}\n{''.join(traceback.format_exception(error))}"


def _free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
