"""A process group from the environment that torchrun sets, with an explicit timeout."""

import math
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from gpytorch_gaps.distributed.communicator import Communicator, RankError

_groups_joined: Counter[str] = Counter()  # number of groups that this process has joined, for each port


@contextmanager
def process_group(timeout: float = 60.0, backend: str | None = None) -> Iterator[Communicator]:
    """All processes that ``torchrun`` has started, as a context; without ``torchrun``, this process alone.

    So the same script runs as ``python script.py`` and as ``torchrun --nproc-per-node 4 script.py``.

    >>> import gpytorch_gaps as gaps
    >>> with gaps.distributed.process_group(timeout=30) as group:
    ...     print(group)
    rank 0 of 1

    :param timeout: seconds after which a process that does not answer counts as dead, and the others raise.
    :param backend: a backend of ``torch.distributed``. Default: NCCL for CUDA tensors, gloo for tensors on the host.
    :return: a :class:`Communicator`, to be passed as `group`.
    :raises ValueError: if the timeout is not a positive number.
    :raises RankError: if the other processes do not join in time.
    """
    if not isinstance(timeout, int | float) or isinstance(timeout, bool) or not 0 < timeout < math.inf:
        raise ValueError(f"process_group: timeout: got {timeout!r}, expected a finite number of seconds above 0")
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        yield Communicator()
        return
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    who, limit = f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}", timedelta(seconds=timeout)
    try:
        store, rank, count = next(dist.rendezvous("env://", timeout=limit))
        # a separate prefix: otherwise a second group, or a restarted one, would find the addresses of the first
        restart, port = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), os.environ["MASTER_PORT"]
        store = dist.PrefixStore(f"start {restart}, group {_groups_joined[port]}", store)
        _groups_joined[port] += 1
        dist.init_process_group(
            backend or ("cpu:gloo,cuda:nccl" if cuda else "gloo"),
            store=store,
            rank=rank,
            world_size=count,
            timeout=limit,
        )
    except (RuntimeError, dist.DistError) as error:
        raise RankError(
            f"{who}: the others cannot be reached, or did not all join within {timeout:g} s ({error})"
        ) from None
    try:
        yield Communicator(dist.group.WORLD)
    finally:
        dist.destroy_process_group()
