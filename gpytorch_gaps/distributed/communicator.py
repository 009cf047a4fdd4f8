"""The processes that share one problem: what they send to each other, and what happens when one of them fails.

All messages go through :class:`Communicator`. It counts them, and if a process does not answer, it raises a
:class:`RankError` that names the step. A single process is a group of one and sends nothing.
"""

import math
import os
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gpytorch_gaps.utils.progress import format_bytes

T = TypeVar("T")
_END = object()


class RankError(RuntimeError):
    """Another process of the group has failed, does not answer, or was given different arguments."""


@dataclass
class Traffic:
    """The messages that one process has sent, by their purpose.

    >>> traffic = Traffic()
    >>> traffic.add("sums", 4096)
    >>> traffic.total, str(traffic)
    (4096, 'sums: 1 x 4 KiB')

    :param messages: number of messages for each purpose.
    :param bytes: number of bytes for each purpose.
    """

    messages: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)

    def add(self, purpose: str, size: int) -> None:
        """Count a message of `size` bytes."""
        self.messages[purpose] = self.messages.get(purpose, 0) + 1
        self.bytes[purpose] = self.bytes.get(purpose, 0) + size

    @property
    def total(self) -> int:
        """Number of bytes for all purposes together."""
        return sum(self.bytes.values())

    def __str__(self) -> str:
        large = [purpose for purpose, size in self.bytes.items() if size >= 0.01 * self.total]
        sizes = {name: format_bytes(self.bytes[name] / self.messages[name]) for name in large}
        parts = [f"{name}: {self.messages[name]} x {size}" for name, size in sizes.items()]
        small = sum(count for purpose, count in self.messages.items() if purpose not in large)
        return ", ".join([*parts, *([f"{small} short messages"] if small else [])]) or "nothing"


class Communicator:
    """The members of a process group, and the rank of this process among them.

    Attributes: `rank`, from 0; `size`, the number of processes; `traffic`, what this process has sent.

    >>> comm = Communicator()
    >>> comm.rank, comm.size, comm.is_main
    (0, 1, True)

    :param group: a process group of ``torch.distributed``, or another Communicator; None for this process alone.
    :raises ValueError: if `group` is no process group, or if this process is not a member.
    """

    def __init__(self, group: Any = None) -> None:
        group = group.group if isinstance(group, Communicator) else group
        self._group: Any = None
        self.rank, self.size = 0, 1
        self.traffic = Traffic()
        if group is None:
            return
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("group: this process is not a member, expected calls by members only")
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError(
                "group: got one without torch.distributed being initialised, expected `with "
                "gpytorch_gaps.distributed.process_group() as group:` around the call, started by torchrun"
            )
        if not isinstance(group, dist.ProcessGroup):
            raise ValueError(f"group: got {type(group).__name__}, expected a group of torch.distributed, or None")
        # a weak reference: torch aborts at exit if a result keeps a destroyed group alive
        self._group = weakref.ref(group)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    @property
    def group(self) -> Any:
        """The group of ``torch.distributed``; None for a single process."""
        found = None if self._group is None else self._group()
        if found is None and self.size > 1:
            raise RankError(f"{self}: the process group has ended, expected calls inside the block")
        return found

    @property
    def is_main(self) -> bool:
        """Whether this process has rank 0: it writes shared files, shows progress bars and makes decisions."""
        return self.rank == 0

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}"

    # -- messages ------------------------------------------------------------------------------------------------------

    def sum(self, own: Tensor, purpose: str) -> Tensor:
        """The sum of a tensor over all processes, in place. The result has the same bits everywhere."""
        if self.size > 1:
            with self._waiting(purpose, own.numel() * own.element_size()), _contiguous(own) as sent:
                dist.all_reduce(sent, group=self.group)
        return own

    def broadcast(self, value: Tensor, purpose: str) -> Tensor:
        """Replace a tensor by that of the main process, in place."""
        if self.size > 1:
            with self._waiting(purpose, value.numel() * value.element_size()), _contiguous(value) as sent:
                dist.broadcast(sent, dist.get_global_rank(self.group, 0), group=self.group)
        return value

    def from_main(self, value: float, device: torch.device, purpose: str) -> float:
        """The number of the main process. Decisions that depend on it are the same everywhere, despite rounding."""
        if self.size == 1:
            return value
        found = torch.tensor(value, dtype=torch.float64, device=device)
        return float(self.broadcast(found, purpose))

    def exchange(self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]], purpose: str) -> list[Tensor]:
        """Send one part to every process.

        :param parts: one tensor for each process.
        :param shapes: the shapes of the tensors that the others send here.
        :return: the tensors that the others have sent here, in the order of their ranks.
        """
        if self.size == 1:
            return list(parts)
        sent = torch.cat([part.reshape(-1) for part in parts])
        sizes = [math.prod(shape) for shape in shapes]
        found = sent.new_empty(sum(sizes))
        with self._waiting(purpose, sent.numel() * sent.element_size()):
            dist.all_to_all_single(found, sent, sizes, [part.numel() for part in parts], group=self.group)
        return [part.view(*shape) for part, shape in zip(found.split(sizes), shapes, strict=True)]

    def gather(self, own: T, purpose: str) -> list[T]:
        """Small Python objects of all processes, in the order of their ranks."""
        if self.size == 1:
            return [own]
        found: list[Any] = [None] * self.size
        with self._waiting(purpose, len(pickle.dumps(own))):
            dist.all_gather_object(found, own, group=self.group)
        return found

    @contextmanager
    def _waiting(self, purpose: str, size: int) -> Iterator[None]:
        try:
            yield
        except RankError:
            raise
        except RuntimeError as error:  # gloo has no exception type for a peer that has ended or is late
            raise RankError(
                f"{self}: no answer from another rank ({purpose}). It has failed, hangs, or needs longer than the "
                "timeout of the process group, which process_group(timeout=...) sets; its own output and that of the "
                f"launcher say which. The same call continues from its checkpoint, if it has one. ({error})"
            ) from None
        self.traffic.add(purpose, size)

    # -- work that succeeds on all processes, or fails on all ----------------------------------------------------------

    def run_on_all(self, what: str, work: Callable[[], T]) -> T:
        """Run ``work()`` on every process. If it fails on one, all others raise a RankError with the reason."""
        result, failure = None, None
        try:
            result = work()
        except Exception as error:
            failure = error
        self._compare_outcomes(what, failure, None)
        return result  # type: ignore[return-value]

    def run_lockstep(self, what: str, work: Iterator[Any]) -> None:
        """Exhaust an iterator on every process, one step at a time, so that a failure is noticed after one step."""
        more = [True]
        while any(more):
            here, failure = False, None
            try:
                here = next(work, _END) is not _END
            except Exception as error:
                failure = error
            more = self._compare_outcomes(what, failure, here)

    def _compare_outcomes(self, what: str, failure: Exception | None, own: T) -> list[T]:
        """The objects of all processes, unless one has failed."""
        problem = None if failure is None else f"{type(failure).__name__}: {failure}"
        try:
            outcomes = self.gather((problem, own), what)
        except RankError:
            if failure is None:
                raise
            raise failure from None  # the first failure matters more
        if failure is not None:
            raise failure
        for rank, (theirs, _) in enumerate(outcomes):
            if theirs is not None:
                raise RankError(f"{self}: rank {rank} failed ({what}): {theirs}")
        return [found for _, found in outcomes]

    def require_same(self, description: Mapping[str, Any]) -> None:
        """Raise a ValueError on every process if an entry differs between them."""
        first, *others = self.gather(dict(description), "comparing arguments")
        for rank, theirs in enumerate(others, 1):
            for name in dict.fromkeys([*first, *theirs]):
                ours, other = first.get(name, "nothing"), theirs.get(name, "nothing")
                if ours != other:
                    raise ValueError(
                        f"{name}: got {ours} on rank 0 and {other} on rank {rank}, expected the same on all ranks"
                    )


@contextmanager
def _contiguous(tensor: Tensor) -> Iterator[Tensor]:
    """A contiguous view or copy, which is sent; results are written back to the tensor."""
    plain = tensor.detach().contiguous()
    plain = plain.view(torch.uint8) if plain.dtype == torch.bool else plain
    yield plain
    if plain.data_ptr() != tensor.data_ptr():
        tensor.copy_(plain.view(tensor.dtype))


SINGLE = Communicator()


def communicator_for(group: Any, caller: str) -> Communicator:
    """The communicator of a group. Warns if there is no group, but torchrun has started several processes."""
    if group is None and int(os.environ.get("WORLD_SIZE", "1")) > 1 and os.environ.get("RANK") == "0":
        warnings.warn(
            f"{caller}: torchrun has started {os.environ['WORLD_SIZE']} processes, and each does all of the work and "
            "writes the same files. Try: `with gpytorch_gaps.distributed.process_group() as group:` and group=group.",
            UserWarning,
            stacklevel=3,
        )
    return Communicator(group)


def own_slices(size: int, group: Any, multiple: int = 1) -> slice:
    """The slices of the first axis that belong to this process, in `reconstruct` with this group.

    >>> own_slices(100, group=None)
    slice(0, 100, None)

    :param size: length of the first axis.
    :param group: a process group, as for :func:`gpytorch_gaps.reconstruct`.
    :param multiple: slices that are stored together, such as the chunks of a zarr array. Cuts are made between them.
    :return: the slices from ``start`` to ``stop``.
    """
    comm = Communicator(group)
    return split_evenly(size, comm.size, multiple)[comm.rank]


def split_evenly(size: int, count: int, multiple: int = 1) -> list[slice]:
    """Split ``range(size)`` into `count` parts whose lengths differ by at most one multiple.

    >>> split_evenly(10, 3)
    [slice(0, 4, None), slice(4, 7, None), slice(7, 10, None)]
    >>> split_evenly(10, 2, multiple=4)
    [slice(0, 8, None), slice(8, 10, None)]

    :param multiple: cuts are made at multiples of this number, if every part gets at least one.
    """
    multiple = multiple if math.ceil(size / multiple) >= count else 1
    pieces = math.ceil(size / multiple)
    ends = [min(size, multiple * math.ceil(pieces * part / count)) for part in range(count + 1)]
    return [slice(start, stop) for start, stop in pairwise(ends)]
