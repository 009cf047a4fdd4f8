"""The processes that share one problem: who they are, what goes between them, and what happens when one fails.

Everything that is sent goes through :class:`Ranks`, which counts it, and which turns a rank that does not answer into a
:class:`RankError` that says what was waited for. One process alone is a group of one, to which nothing is sent.
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
    """Another rank has failed, hangs, or was given something else."""


@dataclass
class Traffic:
    """What one rank has handed to the others: how many messages, and how many bytes, by what they were for."""

    messages: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)

    def add(self, purpose: str, size: int) -> None:
        self.messages[purpose] = self.messages.get(purpose, 0) + 1
        self.bytes[purpose] = self.bytes.get(purpose, 0) + size

    @property
    def total(self) -> int:
        """Bytes, of all purposes."""
        return sum(self.bytes.values())

    def __str__(self) -> str:
        large = [purpose for purpose, size in self.bytes.items() if size >= 0.01 * self.total]
        parts = [
            f"{name}: {self.messages[name]} x {format_bytes(self.bytes[name] / self.messages[name])}" for name in large
        ]
        small = sum(count for purpose, count in self.messages.items() if purpose not in large)
        return ", ".join([*parts, *([f"{small} short messages"] if small else [])]) or "nothing"


class Ranks:
    """The members of a process group, and who of them this is.

    :param group: of ``torch.distributed``, or another of these; None is this process alone.
    """

    def __init__(self, group: Any = None) -> None:
        group = group.group if isinstance(group, Ranks) else group
        self._group: Any = None
        self.rank, self.size = 0, 1
        self.traffic = Traffic()
        if group is None:
            return
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("group: this process is not a member, expected calls by members only")
        if not isinstance(group, dist.ProcessGroup) and dist.is_available() and dist.is_initialized():
            raise ValueError(f"group: got {type(group).__name__}, expected a group of torch.distributed, or None")
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError(
                "group: got one without torch.distributed being initialised, expected `with "
                "gpytorch_gaps.distributed.process_group() as group:` around the call, started by torchrun"
            )
        # not held: a group that outlives its end, in a result say, has torch abort when Python ends
        self._group = weakref.ref(group)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    @property
    def group(self) -> Any:
        """Of torch.distributed; None for one process alone."""
        found = None if self._group is None else self._group()
        if found is None and self.size > 1:
            raise RankError(f"{self}: the process group has ended, expected calls inside of it")
        return found

    @property
    def leads(self) -> bool:
        """Whether this is the one that writes files, shows bars and decides."""
        return self.rank == 0

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}"

    # -- what is sent --------------------------------------------------------------------------------------------------

    def sum(self, own: Tensor, purpose: str) -> Tensor:
        """The sum over all ranks, in place. The same bits everywhere."""
        if self.size > 1:
            with self._waiting(purpose, own.numel() * own.element_size()), _in_order(own) as sent:
                dist.all_reduce(sent, group=self.group)
        return own

    def number(self, value: float, device: torch.device, purpose: str) -> float:
        """What the first rank has found: decisions are made once, whatever the last bits are elsewhere."""
        if self.size == 1:
            return value
        found = torch.tensor(value, dtype=torch.float64, device=device)
        return float(self.broadcast(found, purpose))

    def broadcast(self, value: Tensor, purpose: str) -> Tensor:
        """The first rank's numbers, in place."""
        if self.size > 1:
            with self._waiting(purpose, value.numel() * value.element_size()), _in_order(value) as sent:
                dist.broadcast(sent, dist.get_global_rank(self.group, 0), group=self.group)
        return value

    def exchange(self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]], purpose: str) -> list[Tensor]:
        """Sends a part to every rank; gives what every rank has sent here, of the shapes that are known to come."""
        if self.size == 1:
            return list(parts)
        sent = torch.cat([part.reshape(-1) for part in parts])
        sizes = [math.prod(shape) for shape in shapes]
        found = sent.new_empty(sum(sizes))
        with self._waiting(purpose, sent.numel() * sent.element_size()):
            dist.all_to_all_single(found, sent, sizes, [part.numel() for part in parts], group=self.group)
        return [part.view(*shape) for part, shape in zip(found.split(sizes), shapes, strict=True)]

    def gather(self, own: T, purpose: str) -> list[T]:
        """Small Python objects of all ranks, in their order."""
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
        except RuntimeError as error:  # gloo has no type of its own for a peer that is gone, or late
            raise RankError(
                f"{self}: no answer from another rank ({purpose}). It has failed, hangs, or needs longer than the "
                "timeout of the process group, which process_group(timeout=...) sets; its own output and that of the "
                f"launcher tell which. The same call goes on from its checkpoint, if it has one. ({error})"
            ) from None
        self.traffic.add(purpose, size)

    # -- all or none ---------------------------------------------------------------------------------------------------

    def together(self, what: str, work: Callable[[], T]) -> T:
        """``work()`` on every rank; where it fails on one, all others are told why, and end too."""
        result, failure = None, None
        try:
            result = work()
        except Exception as error:
            failure = error
        self._tell(what, failure, None)
        return result  # type: ignore[return-value]

    def in_step(self, what: str, work: Iterator[Any]) -> None:
        """Goes through an iterator on every rank, a piece at a time: who fails or hangs is found out soon."""
        more = [True]
        while any(more):
            here, failure = False, None
            try:
                here = next(work, _END) is not _END
            except Exception as error:
                failure = error
            more = self._tell(what, failure, here)

    def _tell(self, what: str, failure: Exception | None, own: T) -> list[T]:
        """All ranks' words, unless one has failed."""
        problem = None if failure is None else f"{type(failure).__name__}: {failure}"
        try:
            told = self.gather((problem, own), what)
        except RankError:
            if failure is None:
                raise
            raise failure from None  # what failed first matters more
        if failure is not None:
            raise failure
        for rank, (theirs, _) in enumerate(told):
            if theirs is not None:
                raise RankError(f"{self}: rank {rank} failed ({what}): {theirs}")
        return [word for _, word in told]

    def require_same(self, description: Mapping[str, Any]) -> None:
        """Refuses, on every rank, what differs between them."""
        first, *others = self.gather(dict(description), "comparing what ranks were given")
        for rank, theirs in enumerate(others, 1):
            for name in dict.fromkeys([*first, *theirs]):
                ours, other = first.get(name, "nothing"), theirs.get(name, "nothing")
                if ours != other:
                    raise ValueError(
                        f"{name}: got {ours} on rank 0 and {other} on rank {rank}, expected the same on all ranks"
                    )


@contextmanager
def _in_order(tensor: Tensor) -> Iterator[Tensor]:
    """The same numbers in the order of their places, which is what is sent, whatever the strides of each rank are."""
    plain = tensor.detach().contiguous()
    plain = plain.view(torch.uint8) if plain.dtype == torch.bool else plain
    yield plain
    if plain.data_ptr() != tensor.data_ptr():
        tensor.copy_(plain.view(tensor.dtype))


ALONE = Ranks()


def ranks_of(group: Any, what: str) -> Ranks:
    """Those of a group; one process that torchrun has started among others, and that has none, is told so."""
    if group is None and int(os.environ.get("WORLD_SIZE", "1")) > 1 and os.environ.get("RANK") == "0":
        warnings.warn(
            f"{what}: torchrun has started {os.environ['WORLD_SIZE']} processes, and each does all of the work, and "
            "writes the same files. Try: `with gpytorch_gaps.distributed.process_group() as group:` and group=group.",
            UserWarning,
            stacklevel=3,
        )
    return Ranks(group)


def own_slices(size: int, group: Any, multiple: int = 1) -> slice:
    """Which of `size` slices of the first axis are this process's, in `reconstruct` with this group."""
    ranks = Ranks(group)
    return shares(size, ranks.size, multiple)[ranks.rank]


def shares(size: int, count: int, multiple: int = 1) -> list[slice]:
    """`size` things in `count` parts of one length, or of two that differ by one; cut at multiples where possible.

    >>> shares(10, 3)
    [slice(0, 4, None), slice(4, 7, None), slice(7, 10, None)]
    >>> shares(10, 2, multiple=4)
    [slice(0, 8, None), slice(8, 10, None)]
    """
    multiple = multiple if math.ceil(size / multiple) >= count else 1
    pieces = math.ceil(size / multiple)
    ends = [min(size, multiple * math.ceil(pieces * part / count)) for part in range(count + 1)]
    return [slice(start, stop) for start, stop in pairwise(ends)]
