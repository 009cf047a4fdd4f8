"""Functions run by several processes that form a gloo group, as torchrun would have started them.

>>> run_ranks(2, "tests.distributed._work", "collectives")  # doctest: +SKIP

Importing torch takes seconds. Processes are forked from one that has imported it, are kept, and form a new group for
every call. Nothing here depends on the speed of the machine: limits are far above what any call takes.
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
from datetime import timedelta

JOIN_SECONDS = 300.0  # to start, join and answer, however busy the machine is
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests._ranks", "tests.distributed._work"])
_kept = []
_used_ports = set()


class RanksFailed(AssertionError):
    """What every rank that failed said. `errors` by rank; None for one that was killed."""

    def __init__(self, errors):
        super().__init__("\n".join(f"rank {rank}: {error}" for rank, error in sorted(errors.items())))
        self.errors = errors


class _Worker:
    def __init__(self):
        self.jobs, self.answers = _context.Queue(), _context.Queue()
        self.process = _context.Process(target=_work, args=(self.jobs, self.answers), daemon=True)
        self.process.start()

    def answer(self, until):
        """(result, error); the error of a process that is gone is the empty string."""
        while time.monotonic() < until:
            try:
                return self.answers.get(timeout=0.1)
            except queue.Empty:
                if not self.process.is_alive():
                    return None, ""
        self.process.kill()
        return None, "no answer"


def run_ranks(count, module, name, *args, timeout=JOIN_SECONDS, hangs=()):
    """``module.name(group, *args)`` by `count` processes: what each returns, plain Python or NumPy arrays.

    :param timeout: seconds after which the group gives up on a rank that does not answer; all have joined by then.
    :param hangs: ranks that never answer; they are killed once all others have.
    """
    _kept[:] = [worker for worker in _kept if worker.process.is_alive()]
    while len(_kept) < count:
        _kept.append(_Worker())
    port, until = _free_port(), time.monotonic() + 2 * JOIN_SECONDS
    for rank, worker in enumerate(_kept[:count]):
        worker.jobs.put((rank, count, port, timeout, module, name, args))
    found = {rank: worker.answer(until) for rank, worker in enumerate(_kept[:count]) if rank not in hangs}
    for rank in hangs:
        found[rank] = _kept[rank].answer(until=0.0)
    errors = {rank: error or None for rank, (_, error) in found.items() if error is not None}
    if errors:
        raise RanksFailed(errors)
    return [found[rank][0] for rank in range(count)]


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
    import torch.distributed as dist

    from gpytorch_gaps import distributed

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(count), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        with distributed.process_group(timeout=JOIN_SECONDS) as group:
            dist.barrier(group.group)  # gloo may still be connecting one rank when another leaves the group
            if timeout != JOIN_SECONDS:
                limit_answers(group, timeout)
            return getattr(importlib.import_module(module), name)(group, *args), None
    except BaseException as error:
        return None, f"{type(error).__name__}: {error}\n{''.join(traceback.format_exception(error))}"


def limit_answers(group, seconds):
    """Sets the timeout of a group that all ranks have joined, which may take far longer than an answer."""
    import torch.distributed as dist

    dist.barrier(group.group)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group.group)


def _free_port():
    """A port that no group before has used: processes count the groups they have joined at a port."""
    while True:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        if port not in _used_ports:
            _used_ports.add(port)
            return port
